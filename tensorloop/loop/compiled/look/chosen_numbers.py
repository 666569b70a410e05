"""What draws do with the numbers that they have drawn, as operations of torch's registry: they raise its errors."""

from collections.abc import Iterator

import torch
from torch import Tensor


def _choose(p: Tensor, drawn: Tensor, count: int, replacement: bool) -> Tensor:
    """Chooses as torch does, with its errors: the largest of p / drawn, or where the drawn parts of the whole lie."""
    for sound, error in _checks(p):
        if not bool(sound):
            raise RuntimeError(error)
    return choose_unchecked(p, drawn, count, replacement)


def _choose_there(p: Tensor, drawn: Tensor, count: int, replacement: bool) -> Tensor:
    """Draws from probabilities on a device, which raises by itself where they are wrong: the host does not wait."""
    for sound, error in _checks(p):
        torch.ops.aten._assert_async.msg(sound, error)
    return choose_unchecked(p, drawn, count, replacement)


def _checks(p: Tensor) -> Iterator[tuple[Tensor, str]]:
    yield ((p >= 0) & (p < float("inf"))).all(), "probability tensor contains either `inf`, `nan` or element < 0"
    yield (p.sum(-1) != 0).all(), "invalid multinomial distribution (sum of probabilities <= 0)"


def choose_unchecked(p: Tensor, drawn: Tensor, count: int, replacement: bool) -> Tensor:
    """Chooses from probabilities, whatever they are."""
    if replacement and count > 1:
        below = p.cumsum(-1)
        below = (below / below[..., -1:]).double()
        return torch.searchsorted(below, drawn).clamp_(max=p.shape[-1] - 1)
    races = p / drawn
    return races.argmax(-1, keepdim=True) if count == 1 else races.topk(count).indices


def _like(p: Tensor, drawn: Tensor, count: int, replacement: bool) -> Tensor:
    return p.new_empty((*p.shape[:-1], count), dtype=torch.int64)


def _within(x: Tensor, low: float, high: float, error: str) -> Tensor:
    """A copy, of which every number is known to be in bounds; NaN is not."""
    if x.numel() and not bool(((x >= low) & (x <= high)).all()):
        raise RuntimeError(error)
    return x.clone()


def _within_there(x: Tensor, low: float, high: float, error: str) -> Tensor:
    torch.ops.aten._assert_async.msg(((x >= low) & (x <= high)).all(), error)
    return x.clone()


_LIBRARY = torch.library.Library("tensorloop", "FRAGMENT")
_LIBRARY.define("multinomial_of(Tensor p, Tensor drawn, int count, bool replacement) -> Tensor")
_LIBRARY.impl("multinomial_of", _choose, "CPU")
_LIBRARY.impl("multinomial_of", _choose_there, "CompositeExplicitAutograd")
torch.library.register_fake("tensorloop::multinomial_of", _like, lib=_LIBRARY)
CHOOSE = torch.ops.tensorloop.multinomial_of.default
_LIBRARY.define("within(Tensor x, float low, float high, str error) -> Tensor", tags=(torch.Tag.pointwise,))
_LIBRARY.impl("within", _within, "CPU")
_LIBRARY.impl("within", _within_there, "CompositeExplicitAutograd")
torch.library.register_fake("tensorloop::within", lambda x, *_: torch.empty_like(x), lib=_LIBRARY)
WITHIN = torch.ops.tensorloop.within.default
