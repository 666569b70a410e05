"""What stands behind a TensorArray: the contract of its stores.

The array checks arguments, counts holes and knows its elements; its store holds the slots. There are `Buffer` (plain
autograd), `Slots` (under `torch.func`), `LoopBuffer` (in a checkpointed loop), `Shrunk` and `Picked` (in a batch that
loses rows) and `AncestryStore` (in a beam search). What they promise:

- Arguments fit and slots are in [0, length): nobody checks them again. What is given is never changed.
- What was read stays what it was, whatever is written later.
- Gradients are those of a functional array, where each write makes a new one.
- A call that raises has changed nothing, and raises a `Fact`: the array knows what was called.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from tensorloop.tensor_array.keys import Key


class Store(Protocol):
    """Slots (length, *F). What is not a stub may be left as it is here."""

    __slots__ = ()

    # One past the last slot begun.
    @property
    def length(self) -> int: ...
    # Where the slots are.
    @property
    def device(self) -> torch.device: ...
    # Bytes held, with free slots and what waits.
    @property
    def nbytes(self) -> int: ...
    # Whether any slot carries a gradient.
    @property
    def requires_grad(self) -> bool: ...
    # Begins a slot at the end, with x (*F).
    def append(self, x: Tensor) -> None: ...
    # Begins a slot for each of the values (m, *F).
    def extend(self, values: Tensor) -> None: ...
    # Begins slots up to `length`, with zeros that have no gradient.
    def pad(self, length: int) -> None: ...
    # Overwrites slots that have been begun; of equal indices the last one stays.
    def put(self, key: Key, x: Tensor) -> None: ...
    # Slot i (*F): the tensor written or a copy, never a view.
    def read(self, i: int) -> Tensor: ...
    # Slots [start, stop), as a view where that can be.
    def span(self, start: int, stop: int) -> Tensor: ...
    # All slots, for a caller who copies them at once: a view that nobody may keep.
    def whole(self) -> Tensor: ...
    # The slots of an index of int64 (*I), as a copy (*I, *F).
    def gather(self, index: Tensor) -> Tensor: ...
    # Another store of the same slots: neither sees what is written to the other.
    def fork(self) -> "Store": ...
    # As `fork`, without the gradient.
    def detach(self) -> "Store": ...

    def flush(self) -> object:
        """Takes in what waits as the tensors that were given."""
        return None

    def tell_length(self) -> int:
        """`length` for Python that may choose by it what to do, the user's `len()`. Others take `length` itself."""
        return self.length

    def truncate(self, length: int) -> bool:
        """Forgets the slots from `length` on; False where the caller has to make another store instead."""
        return False

    def one(self) -> "Store":
        """A `Buffer` or `Slots` with the same slots."""
        return self

    def read_at(self, index: Any) -> Tensor | None:
        """The slots of an index that is no number yet, by a store that can: else None, and the array looks at it."""
        return None

    def put_at(self, index: Any, x: Tensor) -> bool:
        """Writes the slot of an index that is no number yet, by a store that can; whether it did."""
        return False

    def attend(self, q: Tensor, keys: Any, values: Any, sight: Any) -> Any:
        """Attends from q to two arrays as a `Sight` says, without a copy; NotImplemented where it cannot."""
        return NotImplemented
