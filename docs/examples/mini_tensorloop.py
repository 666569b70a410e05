"""A tensorloop in about a hundred lines: the array's token, and a loop that keeps few carries. Read it downwards.

It has the gradients and the growth of the real one, which `tests/house/test_mini.py` compares, and little else: a fixed
capacity, appends and prefixes, one tensor as carry, no second derivative, and you name what the body closes over.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# The token. Each write and each read takes the array's token and gives the next one, so that all of them stand in one
# chain, in the order of the program. A token has the array's shape and no memory of its own (one zero, expanded). Its
# gradient is the gradient buffer of the array: backward walks the chain from the end and hands the one buffer along.
# A read adds its gradient to the slots that it saw. A write takes the gradient of its slot out, which is then complete,
# as every read of that slot comes later in the program, and so earlier in backward.


class _Write(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, block: "_Block", slot: int) -> Tensor:
        block.data[slot] = x
        ctx.slot = slot
        ctx.set_materialize_grads(False)  # an array that nobody reads afterwards has no gradient buffer
        return token.new_zeros(()).expand_as(token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, buffer: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if buffer is None:
            return None, None, None, None
        grad = buffer[ctx.slot].clone()
        buffer[ctx.slot] = 0  # what the slot held before this write was read by nobody since
        return buffer, grad, None, None


class _Read(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, block: "_Block", stop: int) -> tuple[Tensor, Tensor]:
        ctx.stop, ctx.shape = stop, token.shape
        ctx.set_materialize_grads(False)
        # Not a copy: `.data` has the same memory and a version counter of its own, so that later writes, which touch
        # other slots, do not look like changes of what was read.
        return token.new_zeros(()).expand_as(token), block.data[:stop].data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, buffer: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is not None:
            if buffer is None:  # the last read of the program: here the one buffer is made
                buffer = grad.new_zeros(ctx.shape)
            buffer[: ctx.stop] += grad
        return buffer, None, None


class _Block:
    """Memory that autograd does not look at: as no tensor, it is handed to a Function as it is."""

    def __init__(self, data: Tensor) -> None:
        self.data = data


class TensorArray:
    """Up to `capacity` slots of one shape; appended to, and read as prefixes: O(T) bytes, forward and backward."""

    def __init__(self, capacity: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        self._block = _Block(torch.zeros(capacity, *shape, dtype=dtype))
        self._token = torch.zeros((), dtype=dtype).expand(capacity, *shape)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, x: Tensor) -> None:
        """Writes the next slot."""
        self._token = _Write.apply(self._token, x, self._block, self._length)
        self._length += 1

    def stack(self) -> Tensor:
        """All slots so far, (n, *shape): a view of the array's memory."""
        self._token, values = _Read.apply(self._token, self._block, self._length)  # pyright: ignore[reportGeneralTypeIssues]
        return values


# The loop. Forward runs without a graph and keeps every `every`-th carry. Backward takes the segments from the last to
# the first: it runs the steps of one again, now with a graph, and pulls the gradient of the carry through. At any time
# there are K carries and the graph of T/K steps; with K = root of T both are small, and each step runs twice.


class _Loop(Function):
    @staticmethod
    def forward(
        ctx: Any, body: Callable[[int, Tensor], Tensor], n: int, every: int, carry: Tensor, *used: Tensor
    ) -> Tensor:
        snapshots = []
        for i in range(n):
            if i % every == 0:
                snapshots.append(carry)
            carry = body(i, carry)
        ctx.body, ctx.n, ctx.every, ctx.count = body, n, every, len(snapshots)
        ctx.save_for_backward(*snapshots, *used)
        return carry

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        snapshots, used = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        sums = [torch.zeros_like(x) for x in used]
        for k in reversed(range(ctx.count)):
            with torch.enable_grad():
                carry = start = snapshots[k].detach().requires_grad_()
                for i in range(k * ctx.every, min((k + 1) * ctx.every, ctx.n)):
                    carry = ctx.body(i, carry)
            grad, *more = torch.autograd.grad(carry, [start, *used], grad, allow_unused=True, materialize_grads=True)
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        return None, None, None, grad, *sums


def fori_loop(n: int, body: Callable[[int, Tensor], Tensor], init: Tensor, used: Sequence[Tensor], k: int) -> Tensor:
    """`for i in range(n): init = body(i, init)` with k carries kept; `used`: what requires a gradient in the body."""
    return _Loop.apply(body, n, max(math.ceil(n / k), 1), init, *used)
