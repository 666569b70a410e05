"""Attention of running hypotheses to their own histories, gathered for the moment and never kept.

The slots that a hypothesis sees are of three parts:

    prefix    slots (B, *F) that came with the search: one read for all K queries of a row
    shared    slots whose ancestor is the same for all K: one read for all of them, too
    own       the latest few: read for each hypothesis

The kernel `beam_attend` does the forward pass over all three. Backward makes the output again, gathers each part, and
adds to the gradient buffers of the two arrays only where they were read: a step costs what it saw, and keeps its
queries. The node passes the arrays' tokens on, as those of `tensor_array/gradient` do. A second derivative takes the
gradient of the formula, over dense slots.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import scope
from tensorloop._common.errors import named
from tensorloop._torch import transforms
from tensorloop._torch.formula import differentiate, is_differentiated
from tensorloop.attention import engine
from tensorloop.attention.strips import Task
from tensorloop.beam.ancestry import Family
from tensorloop.kernels import find
from tensorloop.tensor_array.block import LiveBlock
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.friends import store_of
from tensorloop.tensor_array.gradient import ArrayNode

_NAME = "attention"


class SeenPart(NamedTuple):
    """Slots that some queries see: (G, S) places in flat slots, or None for the prefix; L queries each."""

    places: Tensor | None
    groups: int
    queries: int


class GatheredPart(NamedTuple):
    """A part with its keys and values, (groups, S, heads_kv, D)."""

    part: SeenPart
    k: Tensor
    v: Tensor


class Seen(NamedTuple):
    """What one step attends to. Places are found again when they are needed, and no array is held: it holds us."""

    family: Family
    births: list[int]
    prefix: int  # slots
    slots: int
    scale: float
    live: tuple[LiveBlock, ...]  # of keys and of values; one where they are the same array

    @named(_NAME)
    def values(self) -> list[Tensor]:
        """The slots of each array, (slots, B, K, *F)."""
        return [x.slots(self.slots) for x in self.live] if self.slots else []

    def split(self) -> Iterator[SeenPart]:
        rows, size = self.family.rows, self.family.size
        if self.prefix:
            yield SeenPart(None, rows, size)
        if self.slots:
            shared, own = self.family.find_places(self.births, 0, self.slots)
            if len(shared):
                yield SeenPart(shared.t(), rows, size)
            if len(own):
                yield SeenPart(own.flatten(1).t(), rows * size, 1)


@named(_NAME)
def attend(q: Tensor, keys: Any, values: Any, scale: float | None) -> Any:
    """(B, K, heads, Dv) of q (B, K, heads, D) over two arrays of one carry; NotImplemented where others must do it.

    Shapes and dtypes are checked by the caller. Gradient: to q and to what was appended, twice.
    """
    k: Any = store_of(keys)
    v: Any = store_of(values)
    if not _can_attend(q, k, v):
        return NotImplemented
    scale = engine.default_scale(q.shape[-1]) if scale is None else scale
    slots = len(k.grown)
    buffers = [_find_buffer(x) for x in ([k.grown] if k.grown is v.grown else [k.grown, v.grown])] if slots else []
    if any(x is None for x in buffers):
        return NotImplemented
    prefix = [None if x.prefix is None else x.prefix.stack() for x in (k, v)]
    live = tuple(x.hold() for x in buffers if x is not None)
    seen = Seen(k.family, k.births, k.shared_slots, slots, scale, live)
    q = q.view_as(q)  # a use that a recorder of the loop sees
    with scope.unrecorded():
        if not torch.is_grad_enabled():
            return _compute(q, prefix, seen.values(), seen)[0]
        tokens = [None if x is None else x.whole_token() for x in buffers]
        out, *after = _Attend.apply(seen, q, *prefix, *tokens)
        for buffer, token in zip(buffers, after, strict=True):
            if buffer is not None and token is not None:
                buffer.token = token
    return out


def _can_attend(q: Any, k: Any, v: Any) -> bool:
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
        and transforms.maybe_level() is None
        and not transforms.forward_mode()
        and not engine.autocasts(q)
    )


def _find_buffer(array: Any) -> Buffer | None:
    store = store_of(array)
    plain = None if store is None else store.one()
    return plain if isinstance(plain, Buffer) else None


class _Attend(torch.autograd.Function):
    """(q, prefix of k and v, tokens of the arrays) -> (output, the next tokens).

    The gradient of slots goes into the gradients of the tokens; into new ones where backward is itself differentiated.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, seen: Seen, q: Tensor, prefix_k: Tensor | None, prefix_v: Tensor | None, *tokens: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.seen = seen
        ctx.save_for_backward(q, prefix_k, prefix_v, *tokens)
        out, _ = _compute(q, (prefix_k, prefix_v), seen.values(), seen)
        return out, *(None if token is None else token.new_zeros(()).expand(token.shape) for token in tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None, None, *grads
        seen: Seen = ctx.seen
        q, *others = ctx.saved_tensors
        prefix, tokens = others[:2], others[2:]
        if is_differentiated(grad, *grads):
            *found, of_slots = _differentiate_whole(q, prefix, tokens, grad, seen)
            added = [
                None if token is None else new if old is None else old + new
                for old, new, token in zip(grads, of_slots, tokens, strict=True)
            ]
            return None, *found, *added
        slots = seen.values()
        sums = [
            None if token is None else torch.zeros_like(slot) if old is None else old.contiguous()
            for old, slot, token in zip(grads, slots, tokens, strict=True)
        ]
        return None, *_backward(grad, q, prefix, slots, sums, seen), *sums


def _compute(q: Tensor, prefix: Sequence[Tensor | None], slots: Sequence[Tensor], seen: Seen) -> tuple[Tensor, Tensor]:
    """The output (B, K, heads, D), and the log-sum-exp of the scores (B, K, heads)."""
    before = [x for x in prefix if x is not None]
    shared, own = seen.family.find_states(seen.births, 0, seen.slots)
    return find("beam_attend", q, *before, *slots)(q, before, slots, shared, own, seen.scale)


def _backward(
    grad: Tensor, q: Tensor, before: Any, slots: Sequence[Tensor], sums: list[Tensor | None], seen: Seen
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of q and of the prefix; those of slots are added to `sums`."""
    out, lse = _compute(q, before, slots, seen)
    task, dq, grad = Task(seen.scale), torch.zeros_like(q), grad.contiguous()
    of_prefix: tuple[Tensor | None, Tensor | None] = (None, None)
    for part, k, v in _gather(seen, before, slots):
        lse_ = lse.reshape(part.groups, part.queries, -1)
        dq_, dk, dv = engine.attend_backward(_group(grad, part), _group(q, part), k, v, _group(out, part), lse_, task)
        dq += dq_.view_as(q)
        if part.places is None:
            of_prefix = dk.transpose(0, 1), dv.transpose(0, 1)
            continue
        for into, d in zip(sums, [dk + dv] if len(sums) == 1 else [dk, dv], strict=True):
            if into is not None:
                into.flatten(0, 2).index_add_(0, part.places.flatten(), d.flatten(0, 1).to(into.dtype))
    return dq, of_prefix[0], of_prefix[1]


def _group(x: Tensor, part: SeenPart) -> Tensor:
    """(B, K, heads, ...) as (groups, queries, heads, ...)."""
    return x.reshape(part.groups, part.queries, *x.shape[2:])


def _gather(seen: Seen, prefix: Any, slots: Sequence[Tensor]) -> Iterator[GatheredPart]:
    """What the parts see."""
    for part in seen.split():
        if part.places is None:
            yield GatheredPart(part, *(x.transpose(0, 1) for x in prefix))
            continue
        place = part.places.flatten()
        kv = [x.flatten(0, 2).index_select(0, place).unflatten(0, part.places.shape) for x in slots]
        yield GatheredPart(part, kv[0], kv[-1])


def _differentiate_whole(
    q: Tensor, prefix: Sequence[Tensor | None], tokens: Sequence[Tensor | None], grad: Tensor, seen: Seen
) -> tuple[Any, ...]:
    """The gradients by autograd of the formula over all slots, as part of the graph where backward is recorded.

    Of q, of the prefix of k and v, and of the slots of each array.
    """
    recorded = torch.is_grad_enabled()
    slots = [
        ArrayNode.apply(token, None, at.block, None, seen.slots, slice(0, seen.slots))[1]
        if recorded and token is not None
        else x
        for at, x, token in zip(seen.live, seen.values(), tokens, strict=True)
    ]
    found = differentiate(lambda q, k, v, *slots: _attend_whole(q, (k, v), slots, seen), (q, *prefix, *slots), grad)
    return *found[:3], found[3:]


def _attend_whole(q: Tensor, prefix: Any, slots: Sequence[Tensor], seen: Seen) -> Tensor:
    """The output as the formula says, from keys and values gathered for each hypothesis."""
    parts = [[x.repeat_interleave(part.queries, 0) for x in kv] for part, *kv in _gather(seen, prefix, slots)]
    k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return engine.whole(q.reshape(-1, 1, *q.shape[2:]), k, v, Task(seen.scale)).view_as(q)
