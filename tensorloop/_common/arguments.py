"""Checks of arguments: facts of what came, what was expected, how to mend it. Nothing here changes anything."""

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tensorloop._common.errors import Freed, WrongIndex, WrongType, WrongValue
from tensorloop._torch import transforms
from tensorloop._torch.storage import freed

INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


_EACH = "by a bool for each row (under vmap for each element), which then stops on its own"
_SEVERAL = {
    "index": "; use gather() or scatter() for several slots",
    "lower": f"; use while_loop with the number in the carry, and end it {_EACH}",
    "upper": f"; use while_loop with the bound in cond_fn, and end it {_EACH}",
    "length": f"; use while_loop with the length in cond_fn, and end it {_EACH}",
    "max_steps": f"; carry a count, and let cond_fn end the loop {_EACH}",
}


def as_int(i: SupportsIndex, what: str = "index") -> int:
    """`i` as an int: ints, numpy integers and 0-d integer tensors are taken, bools and floats are not."""
    if type(i) is int:
        return i
    bad = isinstance(i, bool) or (isinstance(i, Tensor) and (i.dim() != 0 or i.dtype not in INTEGERS))
    if isinstance(i, Tensor) and transforms.is_batched(i):
        raise WrongType(f"{what} is batched by vmap, but is one number for all elements{_SEVERAL.get(what, '')}")
    hint = _SEVERAL.get(what, "") if isinstance(i, Tensor) and i.dim() else ""
    if not bad:
        try:
            return operator.index(i)
        except TypeError as error:
            hint = f"; {error}" if hasattr(i, "__index__") else ""  # what could be an index says why it is none
    raise WrongType(f"{what} must be an int or a 0-d integer tensor, got {describe(i)}{hint}")


def at_least(least: int, i: SupportsIndex, what: str, hint: str = "") -> int:
    """`i` as an int that is not too small."""
    n = as_int(i, what)
    if n < least:
        raise WrongValue(f"{what} must be at least {least}, got {n}{hint}")
    return n


def as_bool(x: bool, what: str) -> bool:
    """`x`, which must be True or False."""
    if not isinstance(x, bool):
        raise WrongType(f"{what} must be True or False, got {describe(x)}")
    return x


def describe(x: Any) -> str:
    """A value in a few words, for messages."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and dtype {x.dtype}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) < 60 else text[:57] + '...'}"


def check_memory(tensors: Iterable[Tensor], what: str) -> None:
    """Raises where a tensor's storage ends before its last number: what reads it would read what is not there."""
    if (x := freed(tensors)) is not None:
        raise Freed(
            f"{describe(x)}, {what}, has lost its memory (untyped_storage().resize_()); "
            f"let it have all of it until backward has run"
        )


def slots(n: int) -> str:
    return f"{n} slot" if n == 1 else f"{n} slots"


def index_tensor(indices: Tensor | Iterable[int], device: torch.device, what: str = "indices") -> Tensor:
    """`indices` as int64, on the CPU or on `device`. Another device is refused, not left: that would be a sync."""
    if not isinstance(indices, Tensor):
        as_list = [as_int(i, f"{what}[{k}]") for k, i in enumerate(items(indices, what))]
        for k, i in enumerate(as_list):
            if not -(2**63) <= i < 2**63:
                raise WrongIndex(f"{what}[{k}] is {i}, which no array reaches")
        return torch.tensor(as_list, dtype=torch.int64, device="cpu")
    if indices.dtype not in INTEGERS:
        raise WrongType(f"{what} must be integers, got dtype {indices.dtype}")
    if indices.device != device and indices.device.type != "cpu":
        raise WrongValue(f"{what} are on {indices.device}, the array is on {device}; move one of them")
    return indices.to(torch.int64)


def items(xs: Any, what: str) -> Iterable[Any]:
    """`xs` if it can be iterated over, else a TypeError that says so."""
    if not isinstance(xs, Iterable):
        raise WrongType(f"{what} must be a tensor or a sequence, got {describe(xs)}")
    return xs


def must_check(check: bool | None, x: Tensor) -> bool:
    """Whether to look at the values of `x`: by default where that costs no sync. Under vmap and in fakes nobody can."""
    if transforms.is_batched(x) or transforms.is_fake(x):
        return False
    return x.device.type == "cpu" if check is None else check


def in_range(index: Tensor, low: int, high: int, what: str = "indices", where: Tensor | None = None) -> None:
    """Raises IndexError naming the first entry outside [low, high), of those where `where`. Syncs a device."""
    bad = (index < low) | (index >= high)
    if where is not None:
        bad = bad & where
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        place = f"[{', '.join(map(str, first))}]" if first else ""
        value = int(index[tuple(first)])
        raise WrongIndex(f"{what}{place} is {value}, expected {low} <= index < {high}")


def dense_tensor(x: Any, what: str = "") -> None:
    """Raises unless x is a dense tensor; `what` it is comes before that."""
    at = f"{what}: " if what else ""
    if not isinstance(x, Tensor):
        raise WrongType(f"{at}expected a tensor, got {describe(x)}; {_tensor_of(x)}")
    if x.is_nested or x.is_quantized:
        cure = "; tl.PackedTensor.from_nested(x) takes jagged ones" if x.is_nested else ""
        raise WrongType(f"{at}expected a dense tensor, got a {'nested' if x.is_nested else 'quantised'} one{cure}")
    if x.layout is not torch.strided:
        raise WrongType(f"{at}expected a dense tensor, got layout {x.layout}; convert it with to_dense()")


def _tensor_of(x: Any) -> str:
    """How to make one plain tensor of what came instead."""
    if hasattr(x, "lens"):  # packed, which this file knows nothing of
        return "give its .values, or .pad()"
    if isinstance(x, PackedSequence):
        return "give tl.PackedTensor.from_packed_sequence(x)"
    if isinstance(x, list | tuple) and any(isinstance(part, Tensor) for part in x):
        return "make one of them with torch.stack"
    return "wrap it with torch.as_tensor"


def as_device(x: Any, what: str) -> torch.device:
    """A device, or the name of one."""
    try:
        return torch.device(x)
    except (RuntimeError, TypeError):
        raise WrongValue(
            f"{what} must be a torch.device or a name such as 'cpu' or 'cuda:0', got {describe(x)}"
        ) from None


def as_place(place: Any, what: str) -> str | Path | None:
    """Where snapshots are kept: None, "cpu", or a folder that is there, with its whole path."""
    if place is None or place == "cpu":
        return place
    if not isinstance(place, str | Path):
        raise WrongType(f'{what} must be "cpu" or a folder, got {describe(place)}')
    if not Path(place).is_dir():
        raise WrongValue(f"{what} is {str(place)!r}, which is no folder; make it first")
    return Path(place).absolute()  # the working directory may change before a loop begins
