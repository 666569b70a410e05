"""What stands behind an array of the carry while a step is written down: a tensor, each write a new one.

Such a tensor has as many slots as the array; an append is a concatenation, a read an index.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.user_line import user_place
from tensorloop.compiler.operations import aten
from tensorloop.compiler.refused import Refused
from tensorloop.loop.compiled.look.operation_log import Recorder
from tensorloop.loop.compiled.look.sizes_seen import is_ours
from tensorloop.tensor_array.internals import store_of
from tensorloop.tensor_array.keys import Key
from tensorloop.tensor_array.store import Store


class Uses:
    """What a step did with arrays beside appending to them."""

    def __init__(self) -> None:
        self.reads = False  # slots, which must be there
        self.spans = False  # a tensor as long as one: torch may have another operation for other lengths
        self.sees = False  # how long one is, in Python: it may choose by that what to do


class StandIn(Store):
    """The store of such an array: `values` (slots, *F) is the array now; None while nobody knows its elements."""

    __slots__ = ("_length", "number", "recorder", "uses", "values")

    def __init__(self, values: Tensor | None, length: int, uses: Uses, recorder: Recorder, number: int) -> None:
        self.values, self._length = values, length
        self.uses, self.recorder, self.number = uses, recorder, number

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        asks: FrameType = sys._getframe(1)
        frame = asks.f_back  # who called len(); array[0] asks whether there is such a slot
        if frame is not None and asks.f_code.co_name != "__getitem__" and not is_ours(frame):
            self.uses.sees = True
        return self._length

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.uses.sees = True
        return self._known().nbytes

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.values is not None and self.values.requires_grad

    def append(self, x: Tensor) -> None:
        self.extend(x.unsqueeze(0))

    def extend(self, values: Tensor) -> None:
        if self.values is None:
            self.values = values.new_zeros((self._length, *values.shape[1:]))
            self.recorder.stand(self.values, self.number)
        self._become(torch.cat([self.values, values]))

    def pad(self, length: int) -> None:
        raise Refused(
            "an array in the carry has slots that are skipped, or written row by row",
            "append, or write to slots that there are",
            user_place(),
        )

    def truncate(self, length: int) -> bool:
        raise Refused("an array in the carry is cut short", "keep a number of valid slots in the carry", user_place())

    def put(self, key: Key, x: Tensor) -> None:
        if not isinstance(key, int):
            raise Refused(
                "an array in the carry is written row by row, or by scatter()",
                "append whole slots, and mask rows with torch.where",
                user_place(),
            )
        self.uses.reads = True
        self._become(self._known().select_scatter(x, 0, key))

    def read(self, i: int) -> Tensor:
        self.uses.reads = True
        return self._known().select(0, i).clone()

    def span(self, start: int, stop: int) -> Tensor:
        self.uses.spans = True
        return self._known()[start:stop]

    def whole(self) -> Tensor:
        return self.span(0, self._length)

    def gather(self, index: Tensor) -> Tensor:
        return self._at(index)

    def read_at(self, index: Any) -> Tensor | None:
        found = self._index(index)
        return None if found is None else self._at(found)

    def put_at(self, index: Any, x: Tensor) -> bool:
        found = self._index(index)
        if found is None or found.dim() or not isinstance(x, Tensor) or not self._takes(x):
            return False
        with self.recorder.instead_of(found):
            self._become(aten.index_put.default(self._known(), [found], x))
        return True

    def _at(self, index: Tensor) -> Tensor:
        with self.recorder.instead_of(index):  # there may be fewer slots here than in the array
            return aten.index.Tensor(self._known(), [index])

    def _takes(self, x: Tensor) -> bool:
        values = self._known()
        return x.shape == values.shape[1:] and x.dtype is values.dtype and x.device == values.device

    def _index(self, index: Any) -> Tensor | None:
        """An index as a tensor that the step knows; None for numbers."""
        if isinstance(index, torch.SymInt):
            number, scale, shift = self.recorder.number, index.node.scale, index.node.shift
            return None if number is None else number * scale + shift
        fits = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.device.type == "cpu"
        return index.to(torch.int64) if fits else None

    def fork(self) -> "StandIn":
        return StandIn(self.values, self._length, self.uses, self.recorder, self.number)

    def detach(self) -> "StandIn":
        twin = self.fork()
        twin._become(self._known().detach())
        return twin

    def attend(self, q: Tensor, keys: Any, values: Any, rules: Any) -> Any:
        """Attention to all slots as the formula says."""
        if not rules.plain:
            return NotImplemented
        stores = [store_of(x) for x in (keys, values)]
        if not all(isinstance(x, StandIn) for x in stores) or not _fit(q, *(x.values for x in stores)):  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
            return NotImplemented
        k, v = (x.whole() for x in stores)  # pyright: ignore[reportOptionalMemberAccess]
        group = q.shape[-2] // k.shape[-2]
        q = q.unflatten(-2, (k.shape[-2], group)) * rules.scale
        weights = torch.softmax(torch.einsum("...d,n...d->...n", q, k.unsqueeze(-2)), -1)
        return torch.einsum("...n,n...d->...d", weights, v.unsqueeze(-2)).flatten(-3, -2)

    def _become(self, values: Tensor) -> None:
        self.values, self._length = values, len(values)

    def _known(self) -> Tensor:
        if self.values is None:
            raise Refused(
                "an array in the carry is read before its first write", "begin with a slot of zeros", user_place()
            )
        return self.values


def _fit(q: Any, k: Tensor | None, v: Tensor | None) -> bool:
    if k is None or v is None or not isinstance(q, Tensor) or q.dim() < 2:
        return False
    same = k.dim() == v.dim() == q.dim() + 1 and k.shape[1:-2] == v.shape[1:-2] == q.shape[:-2]
    heads = same and k.shape[-2] == v.shape[-2] and k.shape[-2] > 0 and q.shape[-2] % k.shape[-2] == 0
    alike = q.is_floating_point() and q.dtype == k.dtype == v.dtype and len(k) == len(v)
    return heads and alike and q.shape[-1] == k.shape[-1] > 0
