"""Tensors as machine code is given them: as numbers that it has, laid out as it was made for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorloop._torch.memory import symbolic
from tensorloop.compiler.emitter.ir.code import KINDS
from tensorloop.compiler.emitter.ir.failures import failure
from tensorloop.compiler.emitter.ir.kernels import Check
from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.lower.calling import in_memory_as
from tensorloop.compiler.lengths import Length
from tensorloop.compiler.operations import aten, values_of
from tensorloop.compiler.step import CoreCall, Step, StepFailed

NO_SLOT = "a step of a compiled loop reads or writes a slot that there is not in an array of the carry"
OUT_OF_RANGE = "index out of range in a compiled loop: an index that a step reads or writes is not in its dim"


class NeededTensors:
    """The sizes and dtypes that a step's tensors must have, by role; a call is checked before its code runs."""

    def __init__(self, step: Step, roles: Sequence[Sequence[Array]], device: str) -> None:
        self._needed = [[_needed(one) for one in arrays] for arrays in roles]
        self._foreign = any(x.dtype not in KINDS for n in step.graph.nodes for x in values_of(n))
        self._device = device

    def as_numbers(self, call: CoreCall) -> CoreCall:
        """Returns a call whose tensors are all of dtypes that machine code has, such as floats for complex numbers."""
        if not self._foreign:
            return call
        invariants, sequences, outs = (list(map(as_numbers, xs)) for xs in (call.invariants, call.sequences, call.outs))
        return call._replace(invariants=invariants, sequences=sequences, outs=outs)

    def check(self, call: CoreCall) -> None:
        """Raises where a tensor is not what the code would take it for."""
        steps, *tensors, _ = call
        counts = (1, steps, 1, steps, 1)
        given, wrong = [x for kind in tensors for x in kind], None
        for kind, needed, count in zip(tensors, self._needed, counts, strict=True):
            for x, (numel, dtype) in zip(kind, needed, strict=True):
                enough = numel is None or x.numel() >= numel * count
                if not enough or x.dtype is not dtype or x.device.type != self._device:
                    wrong = x
        if (x := symbolic(given) if wrong is None else wrong) is not None:
            raise AssertionError(f"a compiled loop was given {x.dtype} of shape {tuple(x.shape)} on {x.device}")


def as_numbers(x: Tensor) -> Tensor:
    """Returns a tensor in a dtype that machine code has, over the same memory."""
    if x.is_complex():
        return torch.view_as_real(x.detach())
    return x if x.dtype in KINDS else x.detach().view(in_memory_as(x.dtype)[0])


def lay_out(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A tensor in the layout that the code was made for."""
    if tuple(tensor.stride()) == tuple(strides) or tensor.numel() <= 1:
        return tensor
    made = torch.empty_strided(tuple(shape), tuple(strides), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def _needed(array: Array) -> tuple[int | None, torch.dtype]:
    """Returns the elements of one step, None for what is as long as an array in the carry, and their dtype."""
    numel = array.buffer.numel
    return None if isinstance(numel, Length) else numel, array.dtype


def matrix_failed(checks: Sequence[Check], word: int) -> StepFailed:
    """Returns torch's own error of a matrix that has failed, of which a loop has written down this word."""
    found = failure(word)
    check = checks[found.check]
    infos = torch.zeros(check.shape, dtype=torch.int32, device="cpu")
    infos.view(-1)[found.element] = found.info
    try:
        aten._linalg_check_errors.default(infos, check.name, is_matrix=not check.shape)
    except RuntimeError as error:
        return StepFailed(error, found.step)
    raise AssertionError(found)
