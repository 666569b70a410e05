"""The list of slots behind a TensorArray under `torch.func` transforms: no state in place, every operation recorded.

A tensor that a transform has wrapped cannot be written into a plain buffer, and a custom autograd function cannot be
differentiated there by all transforms. So the array is what its semantics say: a list of values. Bulk reads stack
them, O(n) bytes each. Values are cloned on the way in and out, because a wrapper's version counter does not see every
change of what it wraps.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from tensorloop._torch import transforms
from tensorloop.tensor_array.keys import Key, RowSlots
from tensorloop.tensor_array.store import Store


class Slots(Store):
    """Slots in a list."""

    __slots__ = ("like", "slots")

    def __init__(self, like: Tensor, slots: Iterable[Tensor]) -> None:
        self.like = like  # an element, for shape, dtype and device while there are no slots
        self.slots = list(slots)

    @property
    def length(self) -> int:
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.slots)

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in self.slots)

    def append(self, x: Tensor) -> None:
        self.slots.append(x.clone())

    def extend(self, values: Tensor) -> None:
        self.slots.extend(x.clone() for x in values.unbind(0))

    def pad(self, length: int) -> None:
        self.slots.extend(self._zeros() for _ in range(length - len(self.slots)))

    def truncate(self, length: int) -> bool:
        del self.slots[length:]
        return True

    def put(self, key: Key, x: Tensor) -> None:
        if isinstance(key, int):
            self.slots[key] = x.clone()
        elif isinstance(key, RowSlots):
            for i, old in enumerate(self.slots):
                here = key._replace(where=key.where & (key.pos == i))
                self.slots[i] = torch.where(here.mask(x), x, old)
        elif isinstance(key, Tensor):
            if transforms.is_fake(key):  # nobody knows which, and no slot holds a value
                return
            for i, value in zip(key.reshape(-1).tolist(), x.flatten(0, key.dim() - 1), strict=True):
                self.slots[i] = value.clone()
        else:
            self.slots[key] = [value.clone() for value in x.unbind(0)]

    def read(self, i: int) -> Tensor:
        return self.slots[i].clone()

    def span(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return self._zeros()[None][:0]
        return torch.stack(self.slots[start:stop])

    def whole(self) -> Tensor:
        return self.span(0, self.length)

    def gather(self, index: Tensor) -> Tensor:
        return self.span(0, self.length)[index]

    def fork(self) -> "Slots":
        return Slots(self.like, self.slots)

    def detach(self) -> "Slots":
        return Slots(self.like, [x.detach() for x in self.slots])

    def _zeros(self) -> Tensor:
        return torch.zeros(self.like.shape, dtype=self.like.dtype, device=self.like.device)


def element_of(x: Tensor, lead: int = 1) -> Tensor:
    """An element of the shape, dtype and device of a slice of `x`; its values do not matter."""
    return torch.empty(x.shape[lead:], dtype=x.dtype, device=x.device)
