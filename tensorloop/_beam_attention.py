"""Attention of running hypotheses to their own histories, gathered for the moment and never kept.

The slots that a hypothesis sees are of three parts, and the softmax over all of them is put together from the three by
their log-sum-exps, as flash attention puts its blocks together:

    prefix    slots (B, *F) that came with the search: one read for all K queries of a row
    shared    slots whose ancestor is the same for all K: gathered once a row
    own       the latest few: gathered for each hypothesis

Backward gathers them again, and adds to the gradient buffers of the two arrays only where they were read: a step costs
what it saw, and keeps its output and a number for each query and head. The node passes the arrays' tokens on, as those
of `_array_grad` do. A second derivative takes the gradient of the formula, over dense slots.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor  # pyright: ignore[reportMissingImports]

from tensorloop import _active, _attention, _modes
from tensorloop._array_buffer import Buffer
from tensorloop._attention_strips import Task


class Part(NamedTuple):
    """Slots that some queries see: (G, S) places in flat slots, or None for the prefix; L queries each."""

    places: Tensor | None
    groups: int
    queries: int


class Plan(NamedTuple):
    """What one step attends to. Places are found again when they are needed, and no array is held: it holds us."""

    family: Any
    births: list[int]
    prefix: int  # slots
    slots: int
    scale: float
    one: bool  # array, of keys and values

    def parts(self) -> Iterator[Part]:
        rows, size = self.family.rows, self.family.size
        if self.prefix:
            yield Part(None, rows, size)
        if self.slots:
            shared, own = self.family.places(self.births, 0, self.slots)
            if len(shared):
                yield Part(shared.t(), rows, size)
            if len(own):
                yield Part(own.flatten(1).t(), rows * size, 1)


def attend(q: Tensor, keys: Any, values: Any, scale: float | None) -> Any:
    """(B, K, heads, Dv) of q (B, K, heads, D) over two arrays of one carry; NotImplemented where others must do it.

    Shapes and dtypes are checked by the caller. Gradient: to q and to what was appended, twice.
    """
    k, v = keys._store, values._store
    if not _goes_together(q, k, v):
        return NotImplemented
    scale = _attention.default_scale(q.shape[-1]) if scale is None else scale
    slots = len(k.grown)
    buffers = [_buffer(x.grown) if slots else None for x in (k, v)]
    if slots and any(x is None for x in buffers):
        return NotImplemented
    prefix = [None if x.prefix is None else x.prefix.stack() for x in (k, v)]
    spans = [x.grown.stack() if slots else None for x in (k, v)]
    plan = Plan(k.family, k.births, k.shared_slots, slots, scale, k.grown is v.grown)
    q = q.view_as(q)  # a use that a recorder of the loop sees
    with _active.unnoted():
        if not torch.is_grad_enabled():
            return _Attend.apply(q, *prefix, *spans, None, None, plan)[0]
        if plan.one:  # it has one token
            buffers[1] = None
        tokens = [None if x is None else x.whole_token() for x in buffers]
        out, *after = _Attend.apply(q, *prefix, *spans, *tokens, plan)
        for buffer, token in zip(buffers, after, strict=True):
            if buffer is not None and token is not None:
                buffer.token = token
    return out


def _goes_together(q: Any, k: Any, v: Any) -> bool:
    """Whether the arrays are of one step and fit the queries, and nothing but plain autograd is at work."""
    if type(k) is not type(v) or k.family is not v.family or not k.length or not isinstance(q, Tensor) or q.dim() != 4:
        return False
    shapes = [x.slot_shape for x in (k, v)]
    return (
        k.births == v.births
        and (k.shared_slots, len(k.grown)) == (v.shared_slots, len(v.grown))
        and shapes[0] == shapes[1]
        and len(shapes[0]) == 2
        and 0 < shapes[0][0] <= q.shape[2]
        and not q.shape[2] % shapes[0][0]
        and q.shape[3] == shapes[0][1] > 0
        and q.shape[:2] == (k.family.rows, k.family.size)
        and q.is_floating_point()
        and all(x.dtype is q.dtype and x.device == q.device for x in (k, v))
        and _modes.maybe_level() is None
        and not _modes.forward_mode()
        and not _attention.autocasts(q)
    )


def _buffer(array: Any) -> Buffer | None:
    store = array._store
    store = store if isinstance(store, Buffer) else store.one() if hasattr(store, "one") else None
    return store if isinstance(store, Buffer) else None


class _Attend(torch.autograd.Function):
    """(q, prefix of k and v, slots of k and v, their tokens) -> (output, the next tokens).

    The gradient of slots goes into the gradients of the tokens, except where backward is itself differentiated.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        q: Tensor,
        prefix_k: Tensor | None,
        prefix_v: Tensor | None,
        slots_k: Tensor | None,
        slots_v: Tensor | None,
        token_k: Tensor | None,
        token_v: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        out, lse = _forward(q, (prefix_k, prefix_v), (slots_k, slots_v), plan)
        ctx.plan, ctx.tokens = plan, (token_k is not None, token_v is not None)
        ctx.save_for_backward(q, prefix_k, prefix_v, slots_k, slots_v, out, lse)
        return out, *(
            None if token is None else token.new_zeros(()).expand(token.shape) for token in (token_k, token_v)
        )

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor | None, grad_k: Tensor | None = None, grad_v: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None, grad_k, grad_v, None
        q, *others, out, lse = ctx.saved_tensors
        prefix, slots = others[:2], others[2:]
        batched = any(x is not None and is_legacy_batchedtensor(x) for x in (grad, grad_k, grad_v))
        if torch.is_grad_enabled() or _modes.maybe_level() is not None or batched:
            return *_gradient_of_whole(q, prefix, slots, grad, ctx.plan), grad_k, grad_v, None
        sums = [
            None
            if not has
            else torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device)
            if x is None
            else x.contiguous()
            for x, has, slot in zip((grad_k, grad_v), ctx.tokens, slots, strict=True)
        ]
        both = [sums[0]] * 2 if ctx.plan.one else sums
        found = _backward(grad, q, prefix, slots, out, lse, both, ctx.plan)
        return *found, None, None, *sums, None


def _forward(q: Tensor, prefix: Any, slots: Any, plan: Plan) -> tuple[Tensor, Tensor]:
    """The output (B, K, heads, D), and the log-sum-exp of the scores (B, K, heads)."""
    task, outs, logs = Task(plan.scale), [], []
    for part in plan.parts():
        k, v = _taken(part, prefix, slots)
        out, lse = _attention._forward(_as(q, part), k, v, task)
        outs.append(out.view_as(q))
        logs.append(lse.reshape(q.shape[:-1]))
    if len(outs) == 1:
        return outs[0], logs[0]
    lse = torch.stack(logs).logsumexp(0)
    total = torch.zeros_like(q)
    for out, log in zip(outs, logs, strict=True):
        total.addcmul_(out, (log - lse).exp_()[..., None].to(q.dtype))
    return total, lse


def _backward(
    grad: Tensor, q: Tensor, prefix: Any, slots: Any, out: Tensor, lse: Tensor, sums: list[Any], plan: Plan
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of q and of the prefix; those of slots are added to `sums`."""
    task, dq = Task(plan.scale), torch.zeros_like(q)
    found: list[Tensor | None] = [None, None]
    for part in plan.parts():
        k, v = _taken(part, prefix, slots)
        parts = (_as(x, part) for x in (grad.contiguous(), q))
        grad_, q_ = parts
        lse_ = lse.reshape(part.groups, part.queries, -1)
        dq_, *dkv = _attention._backward(grad_, q_, k, v, _as(out, part), lse_, task)
        dq += dq_.view_as(q)
        for i, d in enumerate(dkv):
            if part.places is None:
                found[i] = d.transpose(0, 1)
            elif sums[i] is not None:
                sums[i].flatten(0, 2).index_add_(0, part.places.flatten(), d.flatten(0, 1).to(sums[i].dtype))
    return dq, found[0], found[1]


def _as(x: Tensor, part: Part) -> Tensor:
    """(B, K, heads, ...) as (groups, queries, heads, ...)."""
    return x.reshape(part.groups, part.queries, *x.shape[2:])


def _taken(part: Part, prefix: Any, slots: Any) -> tuple[Tensor, Tensor]:
    """Keys and values (groups, S, heads_kv, D) of a part."""
    if part.places is None:
        k, v = (x.transpose(0, 1) for x in prefix)
    else:
        place = part.places.flatten()
        k, v = (x.flatten(0, 2).index_select(0, place).unflatten(0, part.places.shape) for x in slots)
    return k, v


def _gradient_of_whole(q: Tensor, prefix: Any, slots: Any, grad: Tensor, plan: Plan) -> tuple[Tensor | None, ...]:
    """The gradients by autograd of the formula over all slots, as part of the graph where backward is recorded."""
    recorded = torch.is_grad_enabled()
    given = [q, *prefix, *slots]
    with torch.enable_grad():
        aliases: list[Any] = [
            None if x is None else x.view_as(x) if recorded and x.requires_grad else x.detach().requires_grad_()
            for x in given
        ]
        out = _whole(aliases[0], aliases[1:3], aliases[3:], plan)
        wanted = [x for x in aliases if x is not None]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=recorded, materialize_grads=True))
    return tuple(None if x is None else next(found) for x in aliases)


def _whole(q: Tensor, prefix: Any, slots: Any, plan: Plan) -> Tensor:
    """The output as the formula says, from keys and values gathered for each hypothesis."""
    parts = [[x.repeat_interleave(part.queries, 0) for x in _taken(part, prefix, slots)] for part in plan.parts()]
    k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return _attention.whole(q.reshape(-1, 1, *q.shape[2:]), k, v, Task(plan.scale)).view_as(q)
