"""The gradient of a loop buffer: one autograd node for each write and read, strung on a token.

A *token* is a tensor of the shape (len, *F) that the array has at that moment. It holds no values (one number,
expanded). Each node takes the array's token and gives the next one, so that backward visits the operations on one
array in reverse order, and the gradient of a token is the gradient of the whole array at that moment: the *gradient
buffer* G. There is one G for each array and backward pass; nodes change it in place as it passes:

    a read  of slots s:  G[s] += gradient of what was read      (the first one met makes G)
    a write of slots s:  gradient of the value = G[s]; then G[s] = 0
    an append:           gradient of the value = G[len_before:], a view; G[:len_before] goes on

An append need not clear its slots, as no older node can see them. G is always made here, never a tensor that came
from outside, so nobody else's gradient is written into. When backward is itself recorded (`create_graph=True`) or
runs under vmap (`is_grads_batched=True`), the same three rules are carried out by ordinary differentiable
operations, each of which makes a new G.
"""

from typing import Any

import torch
from torch import Tensor

from tensorloop._torch import transforms
from tensorloop._torch.graph import edges_of, leaf_of
from tensorloop.kernels import find
from tensorloop.tensor_array.keys import Key, RowSlots, as_index, first_slot, put_, take


class ArrayNode(torch.autograd.Function):
    """One write of `x` at `write` (both may be None), then one read of `read` (may be None), on one array.

    The caller has changed the buffer already; what happens here is the record. (token, x) -> (token', out).
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, token: Tensor | None, x: Tensor | None, block: Any, write: Key | None, length: int, read: Key | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.before = 0 if token is None else token.shape[0]
        ctx.write, ctx.read = write, read
        # A leaf keeps what it gets as its .grad: as a view, it would keep the whole gradient buffer alive.
        ctx.leaf = x is not None and x.is_leaf
        ctx.shape = (length, *block.element_shape)
        after = block.zero.expand(ctx.shape)
        return after if read is None else (after, block.read(read))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor | None, grad_out: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if grad is None and grad_out is None:
            return (None,) * 6
        # Batched gradients come under a vmap of their own.
        in_place = not torch.is_grad_enabled() and transforms.maybe_level() is None
        if grad_out is not None:
            # A buffer that no other node will see is not changed again: what came from outside will do for it.
            only = grad is None and not ctx.before and isinstance(ctx.read, slice) and grad_out.shape == ctx.shape
            grad = (
                grad_out
                if only and _dense(grad_out) and not _feeds_leaves(ctx)
                else _add(grad, ctx.read, grad_out, ctx.shape, in_place)
            )
        assert grad is not None
        grad_x = None
        if ctx.write is not None:
            appended = first_slot(ctx.write) >= ctx.before
            if isinstance(ctx.write, RowSlots) and in_place:  # both at once
                grad_x = find("take_rows", grad, *ctx.write)(grad, ctx.write.pos, ctx.write.where)
            else:
                if ctx.needs_input_grad[1]:
                    grad_x = _gradient_of(grad, ctx.write, ctx.leaf or (in_place and not appended))
                if not appended:
                    grad = _clear(grad, ctx.write, in_place)
        before = grad[: ctx.before] if ctx.before else None
        return before, grad_x, None, None, None, None


class _Pin(torch.autograd.Function):
    """The values themselves as the first token, tied to the operation that made them: see `pin`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def pin(values: Tensor) -> Tensor:
    """An alias of `values` whose history stays what it is, whatever in-place operations `values` meets later."""
    return _Pin.apply(values)  # pyright: ignore[reportReturnType]


def _add(grad: Tensor | None, key: Key, grad_out: Tensor, shape: tuple[int, ...], in_place: bool) -> Tensor:
    """The gradient buffer with `grad_out` added at `key`; made here if no later node has made it."""
    if grad_out.layout is not torch.strided:
        grad_out = grad_out.to_dense()
    if grad is None:
        if isinstance(key, slice) and (key.start, key.stop) == (0, shape[0]):
            return grad_out.clone()
        grad = grad_out.new_zeros(shape)
    if not in_place:
        return grad.index_put(as_index(key, grad), grad_out, accumulate=True)
    if isinstance(key, (int, slice)):
        grad[key].add_(grad_out)
    else:
        grad.index_put_(as_index(key, grad), grad_out, accumulate=True)
    return grad


def _feeds_leaves(ctx: Any) -> bool:
    """Whether the values were stacked from leaves, whose `.grad` would be views of what came from outside."""
    stack, _ = edges_of(ctx)[-1]
    return stack is not None and any(leaf_of(node) is not None for node, _ in edges_of(stack))


def _dense(x: Tensor) -> bool:
    return x.layout is torch.strided


def _gradient_of(grad: Tensor, key: Key, copy: bool) -> Tensor:
    """Returns what the gradient buffer holds for a value written at `key`."""
    out = take(grad, key)
    if isinstance(key, RowSlots):
        return torch.where(key.mask(out), out, 0)
    return out.clone() if copy and isinstance(key, (int, slice)) else out


def _clear(grad: Tensor, key: Key, in_place: bool) -> Tensor:
    """The gradient buffer with 0 where `key` was written: what was there before had no influence."""
    if in_place:
        put_(grad, key, 0)
        return grad
    old = take(grad, key)
    zero = torch.where(key.mask(old), 0, old) if isinstance(key, RowSlots) else torch.zeros_like(old)
    return grad.index_put(as_index(key, grad), zero)
