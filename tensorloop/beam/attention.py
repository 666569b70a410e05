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
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.autocast import autocasts
from tensorloop._torch.formula import differentiate, is_differentiated
from tensorloop.attention import engine
from tensorloop.beam.ancestry import Family
from tensorloop.kernels import find
from tensorloop.kernels.scores import whole
from tensorloop.kernels.sight import Sight, drain, drain_grad
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.block import LiveBlock
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.gradient import ArrayNode
from tensorloop.tensor_array.internals import has_holes, store_of

_NAME = "attention"
Optional = Sequence[Tensor | None]


class SeenPart(NamedTuple):
    """Slots that queries see: (S, G) places in flat slots, or None for the prefix. A group is a hypothesis or a row."""

    places: Tensor | None
    rows: int
    size: int
    own: bool  # of each hypothesis
    begin: int  # slots in the parts before

    def group(self, x: Tensor) -> Tensor:
        """(B, K, heads, ...) as (G, queries, heads, ...)."""
        return x.reshape(-1, 1, *x.shape[2:]) if self.own else x

    def sight(self, of_all: Sight, bias: Tensor | None, count: int) -> Sight:
        """Returns what these queries see of the part's `count` slots."""
        first = of_all.first
        if first is not None:
            first = (first.repeat_interleave(self.size) if self.own else first) - self.begin
        if bias is not None:
            bias = bias[..., self.begin : self.begin + count]
            if self._splits(bias):
                bias = bias.expand(self.rows, -1, self.size, -1).transpose(1, 2).flatten(0, 1)[:, :, None]
        return of_all._replace(first=first, bias=bias, begin=of_all.begin + self.begin)

    def put_bias(self, into: Tensor, found: Tensor) -> None:
        """Writes the gradient of such a bias where it belongs."""
        if self._splits(into):
            found = found[:, :, 0].unflatten(0, (self.rows, self.size)).transpose(1, 2)
        part = into[..., self.begin : self.begin + found.shape[-1]]
        part.copy_(found.sum_to_size(part.shape))

    def _splits(self, bias: Tensor) -> bool:
        return self.own and (len(bias) > 1 or bias.shape[2] > 1)


class GatheredPart(NamedTuple):
    """A part with its keys and values, (S, G, heads_kv, D)."""

    part: SeenPart
    k: Tensor
    v: Tensor


class Seen(NamedTuple):
    """The slots that a step attends to. Places are found again when needed, and no array is held: it holds us."""

    family: Family
    births: list[int]
    prefix: int  # slots that are seen
    first: int  # of the arrays' own slots
    slots: int
    sight: Sight  # of the slots seen, without the bias and sinks
    live: Sequence[LiveBlock]  # of keys and of values, for backward; one where they are the same array

    @named(_NAME)
    def values(self) -> list[Tensor]:
        """The slots of each array, (slots, B, K, *F), from the first that is seen."""
        return [x.slots(self.slots, self.first) for x in self.live] if self.slots else []

    def split(self) -> Iterator[SeenPart]:
        rows, size = self.family.rows, self.family.size
        if self.prefix:
            yield SeenPart(None, rows, size, False, 0)
        if self.slots > self.first:
            shared, own = self.family.find_places(self.births, self.first, self.slots)
            if len(shared):
                yield SeenPart(shared, rows, size, False, self.prefix)
            if len(own):
                yield SeenPart(own.flatten(1), rows, size, True, self.prefix + len(shared))


@named(_NAME)
def attend(q: Tensor, keys: Any, values: Any, sight: Sight) -> Any:
    """(B, K, heads, Dv) of q (B, K, heads, D) over two arrays of one carry; NotImplemented where others must do it.

    Shapes and dtypes are checked by the caller. Gradient: to q, to the bias, to the sinks and to what was
    appended, twice.
    """
    k: Any = store_of(keys)
    v: Any = store_of(values)
    if not _can_attend(q, k, v) or (sight.first is not None and sight.first.shape[1] > 1):
        return NotImplemented
    slots, start = len(k.births), sight.start(k.length) if sight.window else 0
    buffers: list[Buffer] = []
    for x in (k, v)[: 0 if not slots else 1 if k.grown is v.grown else 2]:
        if not isinstance(buffer := store_of(x.grown), Buffer):
            return NotImplemented
        buffers.append(buffer)
    seen_prefix = max(0, k.shared_slots - start)
    prefix = (_read_prefix(k.prefix, start), _read_prefix(v.prefix, start)) if seen_prefix else (None, None)
    live = [x.hold() for x in buffers] if torch.is_grad_enabled() else []
    bare, changed = _understand(sight, k.family.rows, start)
    seen = Seen(k.family, k.births, seen_prefix, max(0, start - k.shared_slots), slots, bare, live)
    if here.recorder is None and not autocasts(q):  # contexts cost more than to ask
        return _attend(q, changed, prefix, seen, buffers)
    q = q.view_as(q)  # a use that the recorder sees
    with scope.unrecorded(), engine.without_autocast(q):  # all is as it casts
        return _attend(q, changed, prefix, seen, buffers)


def _attend(q: Tensor, changed: Optional, prefix: Optional, seen: "Seen", buffers: Sequence[Buffer]) -> Tensor:
    """`changed`: the bias and the sinks."""
    if not torch.is_grad_enabled():
        return _compute(q, changed, prefix, [x.look(seen.first) for x in buffers], seen)[0]
    out, *after = _AttendHypotheses.apply(seen, q, *changed, *prefix, *(x.whole_token() for x in buffers))
    for buffer, token in zip(buffers, after, strict=True):
        if token is not None:
            buffer.token = token
    return out


def _read_prefix(array: TensorArray, start: int) -> Tensor:
    """Its slots from `start` on; without a graph they are looked at where they are."""
    store = store_of(array)
    if torch.is_grad_enabled() or not isinstance(store, Buffer) or has_holes(array):
        return array[start:]
    return store.look(start)


def _understand(sight: Sight, rows: int, start: int) -> tuple[Sight, tuple[Tensor | None, Tensor | None]]:
    """Returns what K queries see of the slots from `start` on, and their bias (1 or B, heads, 1 or K, S) and sinks."""
    first, bias = sight.first, sight.bias
    if first is not None:
        first = first[:, 0].expand(rows) - start
    if bias is not None:
        bias = bias[..., start:].transpose(1, 2)
    # each is the last of its own history, so that the window says no more than `start`
    return sight._replace(causal=False, window=0, first=first, bias=None, sinks=None), (bias, sight.sinks)


def _can_attend(q: Any, k: Any, v: Any) -> bool:
    """Whether the arrays are of one step and fit the queries, and nothing but plain autograd is at work."""
    if type(k) is not type(v) or k.family is not v.family or not k.length or not isinstance(q, Tensor) or q.dim() != 4:
        return False
    kind, (rows, size, heads, width) = k.kind(), q.shape
    slot, dtype, device = kind
    return (
        kind == v.kind()
        and k.births == v.births
        and k.shared_slots == v.shared_slots
        and len(slot) == 2
        and 0 < slot[0] <= heads
        and not heads % slot[0]
        and width == slot[1] > 0
        and (rows, size) == (k.family.rows, k.family.size)
        and q.is_floating_point()
        and dtype is q.dtype
        and device == q.device
        and transforms.maybe_level() is None
        and not transforms.forward_mode()
        and (not autocasts(q) or q.dtype in (torch.get_autocast_dtype(q.device.type), torch.float64))
    )


class _AttendHypotheses(torch.autograd.Function):
    """(q, bias, sinks, prefix of k and v, tokens of the arrays) -> (output, the next tokens).

    The gradient of slots goes into the gradients of the tokens; into new ones where backward is itself differentiated.
    """

    @staticmethod
    def forward(ctx: Any, seen: Seen, q: Tensor, *given: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.seen = seen
        ctx.save_for_backward(q, *given)
        out, _ = _compute(q, given[:2], given[2:4], seen.values(), seen)
        return out, *(None if token is None else token.new_zeros(()).expand(token.shape) for token in given[4:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return *[None] * 6, *grads
        seen: Seen = ctx.seen
        given, tokens = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        if is_differentiated(grad, *grads):
            *found, of_slots = _differentiate_whole(given, tokens, grad, seen)
            added = [
                None if token is None else new if old is None else old + new
                for old, new, token in zip(grads, of_slots, tokens, strict=True)
            ]
            return None, *found, *added
        slots = seen.values()
        sums = [
            None if token is None else slot.new_zeros(token.shape) if old is None else old.contiguous()
            for old, slot, token in zip(grads, slots, tokens, strict=True)
        ]
        return None, *_backward(grad, given, slots, sums, seen), *sums


def _compute(
    q: Tensor, changed: Optional, prefix: Optional, slots: Sequence[Tensor], seen: Seen
) -> tuple[Tensor, Tensor]:
    """The output (B, K, heads, D), and the log-sum-exp of the scores (B, K, heads)."""
    (bias, sinks), before = changed, [x for x in prefix if x is not None]
    shared, own = seen.family.find_states(seen.births, seen.first, seen.slots)
    kernel = find("beam_attend", q, *before, *slots)
    out, lse = kernel(q, before, slots, shared, own, seen.sight.having(bias, None))
    return (out, lse) if sinks is None else drain(out, lse, sinks)


def _backward(grad: Tensor, given: Any, slots: Sequence[Tensor], sums: Any, seen: Seen) -> tuple[Tensor | None, ...]:
    """Gradients of what was given: q, the bias, the sinks and the prefix; those of slots are added to `sums`."""
    q, bias, sinks, *before = given
    out, lse = _compute(q, (bias, sinks), before, slots, seen)
    dq, of_bias, grad = torch.zeros_like(q), None if bias is None else torch.zeros_like(bias), grad.contiguous()
    of_sinks = None if sinks is None else drain_grad(grad, out, lse, sinks)
    of_prefix: tuple[Tensor | None, Tensor | None] = (None, None)
    for part, k, v in _gather(seen, before, slots):
        sight, of_kv = part.sight(seen.sight, bias, len(k)), (torch.zeros_like(k), torch.zeros_like(v))
        grad_, q_, out_, lse_ = map(part.group, (grad, q, out, lse))
        dq_, of_bias_ = find("past_attend_grad", grad_, q_, k, v)(grad_, q_, k, v, out_, lse_, sight, *of_kv)
        dq += dq_.reshape(q.shape)
        if of_bias is not None:
            part.put_bias(of_bias, of_bias_)
        if part.places is None:
            of_prefix = of_kv
            continue
        for into, d in zip(sums, [of_kv[0] + of_kv[1]] if len(sums) == 1 else of_kv, strict=True):
            if into is not None:
                into[seen.first :].flatten(0, 2).index_add_(0, part.places.flatten(), d.flatten(0, 1).to(into.dtype))
    return dq, of_bias, of_sinks, *of_prefix


def _gather(seen: Seen, prefix: Any, slots: Sequence[Tensor]) -> Iterator[GatheredPart]:
    """Yields the parts that are seen, with the keys and values of their slots."""
    for part in seen.split():
        if part.places is None:
            yield GatheredPart(part, *prefix)
            continue
        place = part.places.flatten()
        kv = [x.flatten(0, 2).index_select(0, place).unflatten(0, part.places.shape) for x in slots]
        yield GatheredPart(part, kv[0], kv[-1])


def _differentiate_whole(given: Optional, tokens: Optional, grad: Tensor, seen: Seen) -> tuple[Any, ...]:
    """The gradients by autograd of the formula over all slots, as part of the graph where backward is recorded.

    Of q, of the bias, of the sinks, of the prefix of k and v, and of the slots of each array.
    """
    recorded = torch.is_grad_enabled()
    slots = [
        ArrayNode.apply(token, None, at.as_block(seen.slots), None, seen.slots, slice(0, seen.slots))[1]
        if recorded and token is not None
        else at.slots(seen.slots)
        for at, token in zip(seen.live, tokens, strict=True)
    ]
    found = differentiate(lambda q, *others: _attend_whole(q, others[:2], others[2:], seen), (*given, *slots), grad)
    return *found[:5], found[5:]


def _attend_whole(q: Tensor, changed: Optional, kv: Sequence[Tensor], seen: Seen) -> Tensor:
    """The output as the formula says, from keys and values gathered for each hypothesis."""
    size, slots = seen.family.size, [x[seen.first :] for x in kv[2:]]
    parts = [
        [x if part.own else x.repeat_interleave(size, 1) for x in seen_kv]
        for part, *seen_kv in _gather(seen, kv[:2], slots)
    ]
    k, v = (torch.cat(x) for x in zip(*parts, strict=True))
    each = SeenPart(None, seen.family.rows, size, True, 0)
    sight = each.sight(seen.sight, changed[0], len(k))._replace(sinks=changed[1])
    return whole(each.group(q), k, v, sight).reshape(q.shape)
