"""Where the batch and the ragged dim of a packed tensor stand, when its dims are seen in another order.

The features of a view keep their order in the values, so that two places say all: `batch` and `time`, the dims of the
view that are the batch and the ragged dim. The packed tensor itself is the view of places 0 and 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tensorloop._common.errors import WrongIndex
from tensorloop.packed.table.base import Packed, PackedView, find_dim, refusal


class ViewLayout(NamedTuple):
    """The places of the batch and of the ragged dim among `ndim` dims."""

    batch: int
    time: int
    ndim: int

    @property
    def order(self) -> tuple[int, ...]:
        """For each dim of the view the dim of the packed tensor that it is."""
        features = iter(range(2, self.ndim))
        return tuple(0 if i == self.batch else 1 if i == self.time else next(features) for i in range(self.ndim))

    @property
    def from_end(self) -> tuple[int, int]:
        """The two places, counted from the last dim, as dims are for broadcasting."""
        return self.batch - self.ndim, self.time - self.ndim

    def find(self, dim: Any) -> int:
        """A dim of the view as a number from 0."""
        if not -self.ndim <= dim < self.ndim:
            raise WrongIndex(f"dim {dim} is out of range for a packed tensor of {self.ndim} dims")
        return dim % self.ndim

    def features_before(self, place: int) -> int:
        """How many of the dims before this place are features."""
        return place - (self.batch < place) - (self.time < place)

    def insert(self, place: int) -> "ViewLayout":
        """With one more feature at this place."""
        return ViewLayout(self.batch + (place <= self.batch), self.time + (place <= self.time), self.ndim + 1)

    def without(self, dims: Sequence[int]) -> "ViewLayout":
        """Without these features."""
        gone = [sum(d < place for d in dims) for place in (self.batch, self.time)]
        return ViewLayout(self.batch - gone[0], self.time - gone[1], self.ndim - len(dims))


PLAIN = 0, 1
_MAKERS: dict[str, Callable[[Packed, int, int], Any]] = {}


def makes_views(maker: Callable[[Packed, int, int], Any]) -> Callable[[Packed, int, int], Any]:
    """Enters what makes a view, which stands above this file."""
    _MAKERS["view"] = maker
    return maker


def see(packed: Packed, batch: int, time: int) -> Any:
    """The packed tensor with its dims in this order: itself, or a view."""
    return packed if (batch, time) == PLAIN else _MAKERS["view"](packed, batch, time)


def layout_of(x: Any) -> ViewLayout:
    """Where the dims of a packed tensor or of a view of one stand."""
    if isinstance(x, PackedView):
        return ViewLayout(x.batch, x.time, x.packed.ndim)
    return ViewLayout(0, 1, x.ndim)


def find_place(x: Any, dim: Any, extra: int = 0) -> int:
    """A dim of a packed tensor or a view (an int, the ragged Dim or its name) as a number; `extra` are to be added."""
    if isinstance(x, PackedView):
        if type(dim) is int:
            size = x.ndim + extra
            if -size <= dim < size:
                return dim % size
            raise WrongIndex(f"dim {dim} is out of range for a packed tensor of {size} dims")
        find_dim(x.packed, dim)
        return x.time
    return find_dim(x, dim, extra)


def unwrap(x: Any) -> Any:
    """The packed tensor of a view, or of a list of them; anything else as it is."""
    if isinstance(x, PackedView):
        return x.packed
    return type(x)(map(unwrap, x)) if type(x) in (list, tuple) else x


def turn_tensor(x: Tensor, layout: ViewLayout) -> Tensor:
    """An ordinary tensor beside a view, with its dims in the order of the packed tensor; missing ones are of size 1."""
    if not x.dim():
        return x
    x = x[(None,) * (layout.ndim - x.dim())]
    order = layout.order
    return x.permute([order.index(d) for d in range(layout.ndim)])


def turn_back(out: Any, layout: ViewLayout, dims: Sequence[int] = ()) -> Any:
    """Results of an operation on the packed tensor, as the view sees them; `dims` of the view may be gone."""
    if isinstance(out, Packed):
        if out.ndim < layout.ndim:
            layout = layout.without(dims)
        return see(out, layout.batch, layout.time)
    if isinstance(out, Tensor):
        if not out.dim():
            return out
        there = [d for i, d in enumerate(layout.order) if i not in dims or out.dim() == layout.ndim]
        if len(there) != out.dim():
            raise refusal("its result has a dim more, which this order has no place for", "transpose it back")
        return out.permute([sorted(there).index(d) for d in there])
    if isinstance(out, (tuple, list)):
        parts = [turn_back(x, layout, dims) for x in out]
        return type(out)(parts) if type(out).__module__ == "torch.return_types" or type(out) is list else tuple(parts)
    return out


def as_ordinary(x: Any) -> Tensor:
    """The ordinary tensor (1, T, *F) that a packed tensor of one row stands for, its dims as they are seen."""
    return turn_back(unwrap(x).values.unsqueeze(0), layout_of(x))
