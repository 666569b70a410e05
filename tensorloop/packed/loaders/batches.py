"""Packed tensors from what a program has: a padded tensor and its lengths, or the examples of a DataLoader."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue, named
from tensorloop.packed.other_layouts import interop
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim, as_dim
from tensorloop.packed.table.base import check_same_rows
from tensorloop.packed.tensor import PackedTensor


@named("pack_padded")
def pack_padded(x: Tensor, lens: Tensor | Sequence[int] | Dim, *, check: bool | None = None) -> PackedTensor:
    """Packs a padded tensor: the first lens[b] entries of each row b.

    Args:
        x: (B, T, *F), any dtype. A PackedTensor with these lens comes back as it is.
        lens: the length of each row, (B,) int64 or a sequence of ints, or a `Dim`.
        check: bool, whether the values of lens are looked at. None: where they are on the CPU. True: on a device too.

    Returns:
        PackedTensor (B, T*, *F) of N = sum(lens) entries.

    Gradient: to the entries packed; 0 for the padding. Cost: one copy of N entries. Lengths on a device are waited for,
    once for each Dim: N must be known. Keep them on the CPU and nothing waits.

    Raises:
        TypeError: lens that are no int64 tensor, sequence of ints or Dim.
        ValueError: another number of rows, a negative length, a row longer than T.

    Example:
        >>> tl.pack_padded(torch.arange(6).view(2, 3), [2, 3]).values
        tensor([0, 1, 3, 4, 5])
    """
    dim = as_dim(lens, check)
    if isinstance(x, PackedTensor):
        check_same_rows(x, x._with(x.values, dim))
        return x
    arguments.dense_tensor(x, "x")
    if x.dim() < 2 or x.shape[0] != len(dim):
        raise WrongValue(f"x must be (B, T, *F) with B = {len(dim)} as in lens, got shape {tuple(x.shape)}")
    if dim.device != x.device and dim.device.type != "cpu":
        raise WrongValue(f"lens are on {dim.device}, x on {x.device}; move one of them")
    if dim.max_len > x.shape[1]:
        row = int((dim._lens > x.shape[1]).nonzero()[0])
        raise WrongValue(f"lens[{row}] is {int(dim._lens[row])}, but x has {x.shape[1]} steps")
    dim = dim.to(x.device)
    return PackedTensor(segments.pack(x, dim._offsets, dim.total), dim)


@named("collate")
def collate(examples: Sequence[Any], *, stack: Collection[str | int] = ()) -> Any:
    """A `collate_fn` for DataLoader that packs tensors of unequal length instead of padding them.

        DataLoader(data, batch_size=8, collate_fn=tl.packed.collate)
        DataLoader(data, batch_size=8, collate_fn=functools.partial(tl.packed.collate, stack=["speaker"]))

    Tensors of one dim or more are packed, the rest goes the way of default_collate.

    Args:
        examples: a list of trees of one structure (tuples, lists, dicts); their tensors (len_b, *F) may differ in
            len_b.
        stack: keys of dicts, at any depth, or places in an example that is a tuple, whose tensors are of one shape (a
            vector for each example) and are stacked. None by default.

    Returns:
        A tree of the same structure, with a PackedTensor for each tensor.

    Raises:
        TypeError: examples that are no list, a `stack` that is a single string.
        ValueError: no examples, other keys, or *F, dtype or device differ.

    Example:
        >>> tl.packed.collate([{"x": torch.ones(2), "y": 0}, {"x": torch.ones(3), "y": 1}])["x"].lens
        tensor([2, 3])
    """
    return interop.collate(examples, lambda rows: PackedTensor(*interop.join_rows(rows, None)), stack)
