"""Messages between ranks: who takes part, what all must agree on before the first one, and what a failed one says.

Before each call of ours ranks exchange a header of a few ints: the hash of what the call is (function, shapes, dtypes,
options), whether its arguments were refused here, and what others need to know. Messages of unequal size would abort
or hang, so no other is sent until all headers are alike. It is sent at each call, and not only for a signature that
is new: a rank that knows its signature already would send a summary to one that sends a header. Where headers differ
ranks exchange what they have in words, and all raise the same error.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tensorloop._common.errors import Fact, Misuse, WrongType, WrongValue

R = TypeVar("R")
# The name since torch 2.13, which warns of the other one.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_KINDS: dict[str, type[Fact]] = {kind.__name__: kind for kind in (WrongType, WrongValue, Misuse)}


class Ranks(NamedTuple):
    """The processes of one call; `group` is None where there is nobody to talk to."""

    group: Any
    rank: int
    size: int
    device: torch.device
    name: str  # of the public function

    def gather(self, x: Tensor) -> Tensor:
        """(P, n) of each rank's n numbers, in ranks' order; any dtype: bytes are sent."""
        sent = as_bytes(x)  # gloo knows neither complex numbers nor more than one dim
        if self.group is None:
            return sent.view(x.dtype).view(1, x.numel())
        got = sent.new_empty(self.size * len(sent))
        if len(sent):
            self._send(lambda: _gather(got, sent, group=self.group))
        return got.view(x.dtype).view(self.size, x.numel())

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, another tensor."""
        if self.group is None or not x.numel():
            return x.clone()
        real = torch.view_as_real(x) if x.is_complex() else x
        flat = real.detach().clone(memory_format=torch.contiguous_format).view(-1)
        self._send(lambda: dist.all_reduce(flat, group=self.group))
        found = flat.view(real.shape)
        return torch.view_as_complex(found) if x.is_complex() else found

    def in_words(self, text: Any) -> list[Any]:
        """A picklable object of each rank."""
        found: list[Any] = [text] * self.size
        if self.group is not None:
            self._send(lambda: dist.all_gather_object(found, text, group=self.group))
        return found

    def _send(self, message: Callable[[], Any]) -> None:
        try:
            message()
        except RuntimeError as error:  # torch's own are subclasses
            raise Misuse(
                f"a message between the {self.size} ranks failed on rank {self.rank}: a rank has ended, has raised, or "
                f"has not made this call within the group's timeout; torch says: {error}"
            ) from error


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of x's numbers, in order; a copy."""
    return x.detach().resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def find_ranks(group: Any, device: torch.device | None, name: str) -> Ranks:
    """The ranks of a group, of a device mesh of one dim, or of the default group for None."""
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh
        if group.ndim != 1:
            raise WrongValue(
                f"group is a mesh of {group.ndim} dims, {tuple(group.mesh.shape)}; name the dim: "
                "mesh['name'], or mesh.get_group(0)"
            )
        group = group.get_group()
    if group is None and not (dist.is_available() and dist.is_initialized()):
        raise Misuse("torch.distributed has no group here; call init_process_group first, or give group=")
    group = dist.group.WORLD if group is None else group
    try:
        rank, size = dist.get_group_rank(group, dist.get_rank()), dist.get_world_size(group)
        cpu = device is None and dist.get_backend(group) != "nccl"
    except (RuntimeError, ValueError, AssertionError) as error:
        raise Misuse(f"group is of no use here: it was destroyed, or this process is not in it: {error}") from None
    return Ranks(group, rank, size, device or torch.device("cpu" if cpu else "cuda"), name)


def agree(ranks: Ranks, prepare: Callable[[], tuple[R, Sequence[Any], Sequence[int]]]) -> tuple[R, list[list[int]]]:
    """Gives what `prepare` does, and the ints of every rank, once all ranks are found to make the same call.

    `prepare` checks this rank's arguments and gives (found, signature, ints). What it raises on one rank, and a
    signature that differs, is an error on every rank.
    """
    found, fact, signature, numbers = None, None, (), ()
    try:
        found, signature, numbers = prepare()
    except Fact as error:
        fact = error
    if ranks.group is None:
        if fact is not None:
            raise fact
        return found, [list(numbers)]  # pyright: ignore[reportReturnType]
    text = f"{ranks.name}({', '.join(map(str, signature))})"
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    # Always of one size: a rank whose call has fewer ints, or none as it failed, fills up.
    header = [int(fact is not None), key, *numbers, *[0] * (_INTS - len(numbers))]
    headers = ranks.gather(torch.tensor(header, device=ranks.device)).tolist()
    if any(row[0] or row[1] != key for row in headers) or fact is not None:
        _refuse(ranks, text, fact)
    return found, [row[2 : 2 + len(numbers)] for row in headers]  # pyright: ignore[reportReturnType]


_INTS = 4


def _refuse(ranks: Ranks, text: str, fact: Fact | None) -> None:
    """Raises on every rank: what one of them refused, or who called what."""
    said = ranks.in_words((text, None if fact is None else (type(fact).__name__, str(fact))))
    for rank, (_, refused) in enumerate(said):
        if refused is not None:
            kind = _KINDS.get(refused[0], WrongValue)
            raise kind(f"on rank {rank}: {refused[1]}") from fact
    calls = "".join(f"\n  rank {rank}: {text}" for rank, (text, _) in enumerate(said))
    raise WrongValue(f"the ranks did not make the same call; nothing was computed:{calls}")


def words(name: str, x: Tensor | None, dim: int | None = None) -> str:
    """A tensor's shape, `*` for a size that ranks need not share, and dtype, for a signature."""
    if x is None:
        return f"no {name}"
    sizes = ["*" if i == dim else str(n) for i, n in enumerate(x.shape)]
    return f"{name} ({', '.join(sizes)}) {str(x.dtype).removeprefix('torch.')}"
