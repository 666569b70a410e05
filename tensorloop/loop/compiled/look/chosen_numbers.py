"""What `multinomial` does with the numbers that it has drawn, as an operation of torch's registry."""

import torch
from torch import Tensor


def _choose(p: Tensor, drawn: Tensor, count: int, replacement: bool) -> Tensor:
    """Torch's own errors, and its choice: the largest of p / drawn, or where the drawn parts of the whole lie."""
    if not bool(((p >= 0) & (p < float("inf"))).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if bool((p.sum(-1) == 0).any()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    if replacement and count > 1:
        below = p.cumsum(-1)
        below = (below / below[..., -1:]).double()
        return torch.searchsorted(below, drawn).clamp_(max=p.shape[-1] - 1)
    races = p / drawn
    return races.argmax(-1, keepdim=True) if count == 1 else races.topk(count).indices


def _like(p: Tensor, drawn: Tensor, count: int, replacement: bool) -> Tensor:
    return p.new_empty((*p.shape[:-1], count), dtype=torch.int64)


_LIBRARY = torch.library.Library("tensorloop", "FRAGMENT")
_LIBRARY.define("multinomial_of(Tensor p, Tensor drawn, int count, bool replacement) -> Tensor")
_LIBRARY.impl("multinomial_of", _choose, "CPU")
torch.library.register_fake("tensorloop::multinomial_of", _like, lib=_LIBRARY)
CHOOSE = torch.ops.tensorloop.multinomial_of.default
