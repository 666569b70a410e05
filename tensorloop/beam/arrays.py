"""TensorArrays in the carry of a beam search: never reordered, read through the ancestry of the hypotheses.

Slots hold (B, K, *F) as they were written, for the hypotheses of the step that wrote them. What a step reads of slot j
is, for hypothesis k, the entry of k's ancestor in that step. The array that `step_fn` is given (its store is an
`AncestryStore`) looks that up; the one that the loop carries is plain.

An array that came with slots of (B, *F), such as the keys of a prompt, has those as a *prefix*, which all hypotheses of
a row share. It is a constant of the row, so the loop gets it as context.
"""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import scope
from tensorloop._common.arguments import describe
from tensorloop._common.errors import Misuse, WrongType, WrongValue
from tensorloop.beam.ancestry import Family
from tensorloop.beam.attention import attend
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.internals import kind_of, show_through, store_of
from tensorloop.tensor_array.store import Store

_NAME = "beam_search"


class AncestryStore(Store):
    """The store of an array in one step: slots of `prefix`, then those of `grown` through `family`."""

    __slots__ = ("births", "family", "grown", "length", "place", "prefix", "shared_slots")
    length: int  # a plain attribute: a step asks for it again and again

    def __init__(self, grown: TensorArray, prefix: TensorArray | None, births: list[int], family: Family, place: str):
        self.grown, self.prefix, self.births, self.family = grown, prefix, births, family
        self.place = place  # in the carry
        self.shared_slots = 0 if prefix is None else len(prefix)  # of all hypotheses of a row
        self.length = self.shared_slots + len(births)

    @property
    def requires_grad(self) -> bool:
        stores = [store_of(x) for x in (self.grown, self.prefix) if x is not None]
        return any(store is not None and store.requires_grad for store in stores)

    @property
    def nbytes(self) -> int:
        return self.grown.nbytes

    @property
    def device(self) -> torch.device:
        device = self.kind()[2] or self.grown.device
        assert device is not None
        return device

    def kind(self) -> tuple[Any, torch.dtype | None, torch.device | None]:
        """Returns the shape that a slot has for one hypothesis, and the dtype and device of all."""
        if self.births or self.prefix is None:
            shape, dtype, device = kind_of(self.grown)
            return shape and shape[2:], dtype, device
        shape, dtype, device = kind_of(self.prefix)
        return shape[1:], dtype, device

    # -- writing

    def append(self, x: Tensor) -> None:
        self._check_hypotheses(x.shape)
        self.grown.append(x)
        self.births.append(self.family.t)
        self.length += 1

    def extend(self, values: Tensor) -> None:
        self._check_hypotheses(values.shape[1:])
        self.grown.extend(values)
        self.births += [self.family.t] * len(values)
        self.length += len(values)  # pyright: ignore[reportIncompatibleMethodOverride]

    def put(self, key: Any, x: Tensor) -> None:
        raise Misuse(
            "an array in the carry of a beam search only grows, as hypotheses share what was written before; "
            "carry a tensor (B, K, ...) for what is overwritten"
        )

    def pad(self, length: int) -> None:
        self.put(None, torch.empty(0))

    def _check_hypotheses(self, shape: torch.Size) -> None:
        rows, size = self.family.rows, self.family.size
        if shape[:2] != (rows, size):
            raise WrongValue(f"in a beam search elements are ({rows}, {size}, ...), got {tuple(shape)}")

    # -- reading

    def read(self, i: int) -> Tensor:
        n = self.shared_slots
        if i < n:
            assert self.prefix is not None
            return self._repeat(self.prefix.read(i))
        return self._select(self.grown.read(i - n)[None], i - n)[0]

    def span(self, start: int, stop: int) -> Tensor:
        n = self.shared_slots
        parts = []
        if start < n:
            assert self.prefix is not None
            with scope.unrecorded():
                shared = self.prefix[start : min(stop, n)]
                parts.append(shared[:, :, None].expand(-1, -1, self.family.size, *shared.shape[2:]))
        if stop > n or not parts:
            first = max(start - n, 0)
            parts.append(self._select(self.grown[first : max(stop - n, first)], first))
        with scope.unrecorded():
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    def whole(self) -> Tensor:
        return self.span(0, self.length)

    def gather(self, index: Tensor) -> Tensor:
        with scope.unrecorded():
            return self.whole()[index]

    def _repeat(self, x: Tensor) -> Tensor:
        with scope.unrecorded():
            return x[:, None].expand(-1, self.family.size, *x.shape[1:]).clone()

    def _select(self, values: Tensor, first: int) -> Tensor:
        """Slots (n, B, K, *F), from the `first` of `grown` on, as the hypotheses of now have them; a copy."""
        with scope.unrecorded(), torch.no_grad():
            shared, own = self.family.find_places(self.births, first, first + len(values))
            index = torch.cat([shared[:, :, None].expand(-1, -1, self.family.size), own]).flatten()
        with scope.unrecorded():
            return values.flatten(0, 2).index_select(0, index).view(values.shape)

    def attend(self, q: Tensor, keys: TensorArray, values: TensorArray, sight: Any) -> Any:
        """Attention of the hypotheses to their histories, where it needs no copy of them; else NotImplemented."""
        return attend(q, keys, values, sight)

    # -- copies

    def one(self) -> Store:
        return self.fork()

    def fork(self) -> Store:
        """An array of its own, which no beam search reorders."""
        return Buffer.unstack(self.whole()) if self.length else Buffer.empty(self._make_empty_element(), 0)

    def detach(self) -> Store:
        return Buffer.unstack(self.whole().detach()) if self.length else Buffer.empty(self._make_empty_element(), 0)

    def _make_empty_element(self) -> Tensor:
        shape = self.grown.element_shape
        if shape is None or None in shape:
            raise ValueError(f"{_NAME}: an empty array of unknown element shape cannot be copied; write first")
        return torch.empty(shape, dtype=self.grown.dtype, device=self.grown.device)  # pyright: ignore[reportArgumentType, reportCallIssue]


def wrap_array(
    grown: TensorArray, prefix: TensorArray | None, births: list[int], family: Family, place: str
) -> TensorArray:
    """The array that `step_fn` gets."""
    del births[len(grown) :]  # of a step that is done again
    store = AncestryStore(grown, prefix, births, family, place)
    if prefix is None or kind_of(grown)[0] is not None:
        return show_through(store, grown)
    return show_through(store, prefix, (family.rows, family.size, *kind_of(prefix)[0][1:]))


def unwrap_array(leaf: Any, place: str) -> TensorArray:
    """The plain array behind what `step_fn` returned at `place` of its carry."""
    store = store_of(leaf) if isinstance(leaf, TensorArray) else None
    if not isinstance(store, AncestryStore):
        raise WrongType(
            f"step_fn was given an array at carry{place} and returned {describe(leaf)} there; append to "
            f"the array that it was given and return that"
        )
    if store.place != place:
        raise WrongValue(f"step_fn returned the array of carry{store.place} at carry{place}; arrays stay put")
    return store.grown
