"""A packed tensor seen time first, as `p.transpose(0, 1)` gives it: for torch's functions that ask for that layout.

Attention layers turn (B, T, F) round before they call their function and turn its result back; the CTC loss takes
(T, B, V). Nothing is moved for them: this is a name for the packed tensor, which goes into these functions and back,
and nowhere else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import named
from tensorloop._common.faces import late
from tensorloop.packed.base import OPERATORS, Packed, PackedView, refusal
from tensorloop.packed.dispatch import dispatch

_WHY = "a packed tensor seen time first goes into attention layers and the CTC loss only"
_INSTEAD_OF_ALL = "transpose it back: x.transpose(0, 1)"


class TimeFirst(PackedView):
    """(T*, B, *F): the packed tensor `packed`, with its first two dims exchanged."""

    __slots__ = ()

    is_nested = False

    @property
    def shape(self) -> tuple[Any, ...]:
        """(None, B, *F)"""
        rows, steps, *features = self.packed.shape
        return steps, rows, *features

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.packed.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.packed.values.device

    def dim(self) -> int:
        """The number of dims."""
        return self.packed.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size; that of the ragged dim equals None, and is no number."""
        return self.shape if dim is None else self.shape[dim]

    @named("transpose")
    def transpose(self, dim0: int, dim1: int) -> Packed:
        """The packed tensor again."""
        if {dim0 % self.packed.ndim, dim1 % self.packed.ndim} != {0, 1}:
            raise refusal("a packed tensor seen time first", "transpose its features before")
        return self.packed

    def __repr__(self) -> str:
        """What it is a view of."""
        return f"TimeFirst({self.packed!r})"

    def __getattr__(self, name: str) -> Any:
        """Refused: what there is of the packed tensor has another order of dims here."""
        if name.startswith("__") or name == "packed":
            raise AttributeError(name)
        raise AttributeError(f"{name}: {_WHY}; {_INSTEAD_OF_ALL}.{name}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The functions that ask for time first."""
        name = getattr(func, "__name__", str(func))
        if name not in _TAKEN:
            raise refusal(_WHY, _INSTEAD.get(name, _INSTEAD_OF_ALL)).named(name.strip("_"))
        return named(name)(_TAKEN[name])(func, *args, **(kwargs or {}))


def _operator(name: str) -> Callable[..., Any]:
    def run(self: TimeFirst, *others: Any) -> Any:
        return TimeFirst.__torch_function__(getattr(Tensor, name), (), (self, *others))

    run.__name__, run.__doc__ = name, "Refused: transpose it back."
    return run


for _name in OPERATORS:
    setattr(TimeFirst, _name, _operator(_name))
setattr(TimeFirst, "__hash__", object.__hash__)  # noqa: B010 - by identity, as a tensor's


def _transpose(func: Any, input: TimeFirst, dim0: int, dim1: int) -> Packed:
    return input.transpose(dim0, dim1)


def _ctc_loss(func: Any, log_probs: Any, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(log_probs, TimeFirst):
        raise refusal("its log_probs are not packed", "pack them, or pass the padded targets")
    return dispatch(func, (log_probs.packed, *args), kwargs)


_TAKEN: dict[str, Callable[..., Any]] = {
    "transpose": _transpose,
    "swapaxes": _transpose,
    "ctc_loss": _ctc_loss,
    "multi_head_attention_forward": late("attention.multihead", "forward"),
}
_INSTEAD: dict[str, str] = dict.fromkeys(
    ("lstm", "gru", "rnn_tanh", "rnn_relu"), "make the layer with batch_first=True and give it the packed tensor itself"
)
