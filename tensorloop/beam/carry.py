"""The carry of step_fn: what the loop of a search carries of it, what step_fn is given, and how it is reordered."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.errors import WrongValue
from tensorloop.beam.ancestry import Family
from tensorloop.beam.arrays import unwrap_array, wrap_array
from tensorloop.loop.internals import check_carry, describe
from tensorloop.tensor_array.array import TensorArray


class HypothesesCarry:
    """The carry of all hypotheses, from the init_carry of B rows. `size` counts the hypotheses of a row."""

    def __init__(self, init_carry: Any, rows: int, size: int) -> None:
        self.rows, self.size = rows, size
        self.tree, leaves = pytree.taken_apart(init_carry)
        # By place: slots that all hypotheses of a row share, and the steps in which those were born that followed.
        self.prefixes = {i: x for i, x in enumerate(leaves) if isinstance(x, TensorArray) and len(x)}
        self.births: dict[int, list[int]] = {i: [] for i, x in enumerate(leaves) if isinstance(x, TensorArray)}
        self.tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim()]
        self.init = [self._spread(x, path) for x, path in zip(leaves, self.tree.paths, strict=True)]

    def _spread(self, x: Any, path: str) -> Any:
        """A leaf of init_carry as the loop carries it: with K hypotheses, without the slots that they share."""
        shape: Any = x.shape if isinstance(x, Tensor) else ()
        if isinstance(x, TensorArray) and len(x):
            shape = x.element_shape or ()
        if len(shape) and shape[0] != self.rows:
            raise WrongValue(f"init_carry{path} is {describe(x)}; expected {self.rows} leading rows, or 0-d")
        if isinstance(x, Tensor):
            return x[:, None].expand(-1, self.size, *x.shape[1:]) if x.dim() else x
        if not isinstance(x, TensorArray) or not len(x):
            return x
        if not shape:
            raise WrongValue(f"elements of init_carry{path} are 0-d; expected ({self.rows}, ...)")
        return TensorArray()

    def give(self, leaves: list[Any], prefixes: Sequence[TensorArray], family: Family) -> list[Any]:
        """The leaves for step_fn: arrays are read through the ancestry."""
        if not self.births:
            return leaves
        shared = dict(zip(self.prefixes, prefixes, strict=True))
        given = list(leaves)
        for i, births in self.births.items():
            given[i] = wrap_array(leaves[i], shared.get(i), births, family, self.tree.paths[i])
        return given

    def check(self, returned: Any, given: list[Any], t: int) -> list[Any]:
        """The leaves of what step_fn returned."""
        leaves = self.tree.flatten(returned)
        if leaves is None or not all(map(_alike, leaves, given)):
            leaves = check_carry(self.tree.unflatten(given), returned, t)
        return leaves

    def reorder(self, leaves: list[Any], parents: Tensor) -> list[Any]:
        """The leaves of the hypotheses that run on; `leaves` is used up."""
        for i in self.births:
            leaves[i] = unwrap_array(leaves[i], self.tree.paths[i])
        for i in self.tensors:
            x = leaves[i]
            leaves[i] = x.reshape(len(parents), *x.shape[2:]).index_select(0, parents).view(x.shape)
        return leaves


def _alike(new: Any, old: Any) -> bool:
    """Whether a leaf of the carry is certainly what it must be."""
    if new is old:
        return True
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        return new.shape == old.shape and new.dtype is old.dtype and new.device == old.device
    return type(new) is type(old) and not isinstance(new, (Tensor, TensorArray))
