"""The distribution over the next token that sampling makes of logits: temperature, top_k, top_p and min_p."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue


class Distribution(NamedTuple):
    """Holds what is done to logits, in the order of transformers: divided, then cut by top_k, top_p and min_p."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def check(self, hint: str = "") -> None:
        """Refuses what makes no distribution."""
        if not _is_number(self.temperature) or not 0 < self.temperature < torch.inf:
            got = arguments.describe(self.temperature)
            raise WrongValue(f"temperature must be a finite number above 0, got {got}{hint}")
        if self.top_k is not None:
            arguments.at_least(1, self.top_k, "top_k")
        for x, name in ((self.top_p, "top_p"), (self.min_p, "min_p")):
            if x is not None and not _is_number(x):
                raise WrongType(f"{name} must be a number, got {arguments.describe(x)}")
            if x is not None and not 0 < x <= 1:
                raise WrongValue(f"{name} must be in (0, 1], got {x}")

    @property
    def cuts(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_k is not None or self.min_p is not None or (self.top_p is not None and self.top_p < 1)

    def scale(self, logits: Tensor) -> Tensor:
        """Scores (B, V) at the temperature."""
        return logits if self.temperature == 1 else logits / self.temperature

    def cut(self, scores: Tensor) -> Tensor:
        """Scores (B, V) with -inf for the tokens that are left out. Of equal ones top_p takes those of lower number."""
        if self.top_k is not None and self.top_k < scores.shape[1]:
            least = scores.detach().topk(self.top_k, 1)[0][:, -1:]
            scores = scores.masked_fill(scores.detach() < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            values, places = scores.detach().softmax(1).sort(dim=1, descending=True, stable=True)
            outside = values.cumsum(1) - values >= self.top_p
            out = torch.zeros_like(outside).scatter_(1, places, outside)
            scores = scores.masked_fill(out, -torch.inf)
        if self.min_p is not None:
            given = scores.detach().softmax(1)
            scores = scores.masked_fill(given < self.min_p * given.amax(1, keepdim=True), -torch.inf)
        return scores


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
