"""Linear recurrences whose time dim ranks share: each folds its chunk, one message, then each computes its chunk.

A chunk makes h of its last step from h before its first one: P h + s, P the product of its factors, s the last step
from 0. All ranks send (P, s) and fold those of the chunks before. Backward is the same the other way: a chunk takes
what the next one asks of its last step, u, to P^H u + v of the one before, v what its own gradients ask of it.

The first chunk knows its beginning: it is computed at once, and sends its last step with P = 0. The last chunk is asked
for nothing. So both are computed once, and only those between are folded first. An empty chunk sends the identity.
Where a row or reset begins in a chunk nothing of what is before goes through it, NaN neither: `_CUT` for an exponent.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.errors import Misuse, WrongValue
from tensorloop._torch.formula import Formula
from tensorloop._torch.shards import as_dtensor, is_sharded
from tensorloop.distributed.fold import needs_gradient, once
from tensorloop.distributed.layout import TimeLayout, aligned, check_mesh, find_layout
from tensorloop.distributed.ranks import agree, as_bytes, words
from tensorloop.distributed.scaled import Scaled, product, times_power
from tensorloop.loop import linear as steps
from tensorloop.loop.recurrences import formula_of, times
from tensorloop.packed.table.base import is_packed

_CUT = 1 << 40


def linear(a: Any, b: Any, init: Any, dim: int, reverse: bool, matrix: bool, resets: Any, layout: Any) -> Any:
    """Runs `loop.linear_recurrence` of DTensors."""
    packed = is_packed(b)
    values = b.values if packed else b
    dim = 0 if packed else dim % max(values.dim(), 1)
    place = find_layout("linear_recurrence", "b", values, dim, layout)

    def prepare() -> tuple[Any, list[Any], list[int]]:
        parts = _packed_parts if packed else _dense_parts
        found, shared = parts(a, b, init, resets, matrix, place)
        part = found[1]
        place.check_even("b", part.shape[dim])
        # Of what is by row, packed, the rows are part of the signature: all ranks have all.
        step = [
            words(what, x, dim if x is not None and x.dim() == part.dim() + (what == "a" and matrix) else None)
            for what, x in zip(("a", "b", "init", "resets"), found, strict=False)
        ]
        flags = {"reverse": reverse, "matrix": matrix, "packed": packed, "one factor": shared}
        flags |= {"gradients": torch.is_grad_enabled()}
        options = [f"dim={dim}", f"layout={layout}", *(f"{name}={on}" for name, on in flags.items())]
        needs = needs_gradient([x for x in found[:3] if x is not None])
        return (found, shared), [*step, *options], [needs, part.shape[dim]]

    (found, shared), rows = agree(place.ranks, prepare)
    if packed:
        found = _begin_rows(found, b._dim, [n for _, n in rows], place.ranks.rank, reverse)
    factors, part, init, starts = found
    if place.ranks.size == 1:
        starts = starts if starts is None or packed else steps.begun(starts, part, dim, reverse)
        h = as_dtensor(steps.run_steps(factors, part, init, starts, dim, reverse, matrix), values)
        return b._with(h) if packed else h
    factors, part, init = steps.promoted(factors, part, init, starts, matrix)
    if packed or init is None:
        init = part.new_zeros(()).expand(*part.shape[:dim], 1, *part.shape[dim + 1 :])
    if starts is not None:
        starts = starts.expand(*starts.shape[:dim], part.shape[dim], *starts.shape[dim + 1 :])
    call = _Call(place, dim, reverse, part.dim() - 1 if matrix else None, shared)
    recorded = torch.zeros((), requires_grad=any(row[0] for row in rows), device=part.device)
    h = as_dtensor(_InShards.apply(call, factors, part, init, starts, recorded), values)  # pyright: ignore[reportArgumentType]
    return b._with(h) if packed else h


def _dense_parts(a: Any, b: Any, init: Any, resets: Any, matrix: bool, place: TimeLayout) -> tuple[Any, bool]:
    """(a, b, init, resets) of this rank, all with the dims of b; whether one factor is for all steps."""

    check_mesh(place, a=a, init=init, resets=resets)

    def stand_in(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if is_sharded(x) else x

    given = [stand_in(x) for x in (a, b, init, resets)]
    whole = steps.dense_steps(given[0], given[1], given[2], given[3], place.dim, matrix)  # checks what was given
    a = aligned(a, place, 1 if matrix else 0) if isinstance(a, Tensor) else a
    init = aligned(init, place, without_time=True) if isinstance(init, Tensor) else init
    resets = aligned(resets, place, -1 if matrix else 0) if isinstance(resets, Tensor) else resets
    return steps.dense_steps(a, b.to_local(), init, resets, place.dim, matrix)[:4], whole[0].shape[place.dim] == 1


def _packed_parts(a: Any, b: Any, init: Any, resets: Any, matrix: bool, place: TimeLayout) -> tuple[Any, bool]:
    """(a, values, init, resets, whether a is by entry) of this rank, of which by row is whole."""

    check_mesh(place, **{k: getattr(x, "values", x) for k, x in (("a", a), ("init", init), ("resets", resets))})

    def part(x: Any, more: int, without_time: bool = False) -> Any:
        if is_packed(x):
            return x._with(aligned(x.values, place, more))
        return aligned(x, place, more, without_time) if isinstance(x, Tensor) else x

    a, init = part(a, 1 if matrix else 0), part(init, 0, True)
    resets = part(resets, -1 if matrix else 0)
    found = steps.packed_steps(a, b._with(b.values.to_local()), init, resets, matrix)
    return found, not found[-1] and len(found[0]) == 1


def _begin_rows(found: Any, ragged: Any, lens: list[int], rank: int, reverse: bool) -> Any:
    """(a, values, init, starts) where this rank has so many of the entries."""
    if sum(lens) != ragged.total:
        raise WrongValue(f"the ranks have {sum(lens)} entries together, and the lens of b sum to {ragged.total}")
    here = slice(sum(lens[:rank]), sum(lens[: rank + 1]))
    return steps.of_rows(found, ragged, ragged._positions[here], ragged._row_ids[here], reverse)


class _TimeChunk(NamedTuple):
    """The steps of one chunk; `starts` None where h begins nowhere anew."""

    number: int
    a: Tensor
    b: Tensor
    starts: Tensor | None


class _Summary(NamedTuple):
    """A chunk takes what comes before it to factors * that + sum; where cut, the sum alone."""

    factors: Scaled
    sum: Tensor

    def of(self, h: Tensor, at: int | None) -> Tensor:
        exponents = self.factors.exponents
        moved = times_power(times(self.factors.numbers, h, at), torch.where(exponents == _CUT, 0, exponents))
        return torch.where(exponents == _CUT, torch.zeros_like(moved), moved) + self.sum


class _Call(NamedTuple):
    """Describes one recurrence, beside its tensors."""

    place: TimeLayout
    dim: int
    reverse: bool
    at: int | None
    shared: bool

    def formula(self, anew: bool, constant: bool) -> Formula:
        return formula_of(self.dim, self.reverse, self.at, anew, constant)

    def cut(self, a: Tensor, b: Tensor, starts: Tensor | None) -> list[_TimeChunk]:
        """This rank's chunks, in the order in which they lie here."""
        numbers, cut = self.place.chunks(self.reverse), self.place.cut
        each = [a] * len(numbers) if self.shared else cut(a, self.dim)
        begins = [None] * len(numbers) if starts is None else cut(starts, self.dim)
        return [_TimeChunk(*of) for of in zip(numbers, each, cut(b, self.dim), begins, strict=True)]

    def first(self, x: Tensor) -> Tensor:
        return x if x.shape[self.dim] == 1 else x.narrow(self.dim, x.shape[self.dim] - 1 if self.reverse else 0, 1)

    def last(self, x: Tensor) -> Tensor:
        return x if x.shape[self.dim] == 1 else x.narrow(self.dim, 0 if self.reverse else x.shape[self.dim] - 1, 1)

    def with_first(self, x: Tensor, new: Tensor) -> Tensor:
        parts = [new, x.narrow(self.dim, 0 if self.reverse else 1, x.shape[self.dim] - 1)]
        return torch.cat(parts[::-1] if self.reverse else parts, self.dim)

    def begun(self, chunk: _TimeChunk) -> Tensor:
        """The starts of a chunk, its first step one of them."""
        assert chunk.starts is not None
        return self.with_first(chunk.starts, torch.ones_like(self.first(chunk.starts)))

    def run(self, chunk: _TimeChunk, enter: Tensor) -> Tensor:
        """All h of a chunk, from the one before it."""
        if not chunk.b.shape[self.dim]:
            return chunk.b
        formula = self.formula(chunk.starts is not None, False)
        if chunk.starts is None:
            return formula.run(chunk.a, chunk.b, enter)
        b = self.first(chunk.b)
        b = torch.where(self.first(chunk.starts), b, b + times(self.first(chunk.a), enter, self.at))
        return formula.run(chunk.a, self.with_first(chunk.b, b), self.begun(chunk))

    def vjp(
        self, chunk: _TimeChunk, grad: Tensor, enter: Tensor, h: Tensor, constant: bool, ask: Tensor | None = None
    ) -> tuple[Any, Tensor, Tensor]:
        """The gradients of a chunk's a (None: of a constant), b and of the h before it; `ask` that of its last h."""
        if not (n := chunk.b.shape[self.dim]):
            nothing = torch.zeros_like(enter) if ask is None else ask
            return (None if constant else torch.zeros_like(chunk.a)), grad, nothing
        formula = self.formula(chunk.starts is not None, constant)
        begin = enter if chunk.starts is None else self.begun(chunk)
        more = {}
        if ask is not None and (chunk.starts is not None or self.shared or n == 1):
            grad = grad.clone(memory_format=torch.contiguous_format)
            into = self.last(grad)
            into += ask
        elif ask is not None:
            more["after"] = ask
        of_a, of_b, of_enter = formula.vjp(grad, *((chunk.a, None, begin, h)[i] for i in formula.keeps), **more)  # pyright: ignore
        if chunk.starts is None:
            return of_a, of_b, of_enter  # pyright: ignore[reportReturnType]
        # The first step was made a start: what came into it was a part of b there.
        blocked, first = self.first(chunk.starts), self.first(of_b)  # pyright: ignore[reportArgumentType]
        found = torch.where(blocked, 0, first)
        factor = self.first(chunk.a).conj()
        of_enter = times(factor if self.at is None else factor.transpose(-2, -1), found, self.at)
        if of_a is not None:
            came = torch.where(blocked, 0, enter).conj()
            more = found * came if self.at is None else found.unsqueeze(-1) * came.unsqueeze(-2)
            into = self.first(of_a)
            into += more.sum_to_size(into.shape)
        return of_a, of_b, torch.where(blocked, 0, of_enter)  # pyright: ignore[reportReturnType]

    # -- between ranks

    def factors(self, chunk: _TimeChunk) -> Scaled:
        """The product of a chunk's factors: of one step's shape, its exponents broadcast to vectors."""
        n, matrix = chunk.b.shape[self.dim], self.at is not None
        step = chunk.a.movedim(self.dim, 0)
        if n:
            found = product(step.flip(0) if self.reverse and not self.shared else step, n, matrix)
        else:  # the identity
            one = torch.eye(step.shape[-1]) if matrix else torch.ones(())
            numbers = one.to(step).expand(1, *step.shape[1:])
            of = numbers[..., :1, :1] if matrix else numbers
            found = Scaled(numbers, torch.zeros_like(of, dtype=torch.int64))
        numbers, exponents = (x.movedim(0, self.dim) for x in found)
        exponents = exponents.squeeze(-1) if matrix else exponents
        if chunk.starts is not None:
            exponents = torch.where(chunk.starts.any(self.dim, keepdim=True), _CUT, exponents)
        return Scaled(numbers, exponents)

    def of_nothing(self, chunk: _TimeChunk, s: Tensor) -> _Summary:
        """The summary that is s whatever came before."""
        shape = [*chunk.a.shape]
        shape[self.dim] = 1
        numbers = chunk.a.new_zeros(shape)
        exponents = torch.zeros_like(numbers if self.at is None else numbers[..., 0], dtype=torch.int64)
        exponents = exponents if self.at is None else exponents[..., :1]
        if chunk.starts is not None:
            exponents = exponents + 0 * chunk.starts.any(self.dim, keepdim=True)
        return _Summary(Scaled(numbers, exponents + _CUT), s)

    def exchange(self, mine: list[_Summary], reverse: bool) -> list[_Summary]:
        """The summaries of all chunks, in their order; one message of a step's size."""
        ranks = self.place.ranks
        pieces = [x for part in mine for x in (*part.factors, part.sum)]
        sent = torch.cat([as_bytes(x) for x in pieces])
        sizes = [x.numel() * x.element_size() for x in pieces]
        of_ranks = []
        for row in ranks.gather(sent):
            # A copy of each, as a view of another dtype begins at a multiple of its size.
            got = [y.clone().view(x.dtype).view(x.shape) for x, y in zip(pieces, row.split(sizes), strict=True)]
            of_ranks.append([_Summary(Scaled(*got[i : i + 2]), got[i + 2]) for i in range(0, len(got), 3)])
        found = self.place.in_order(of_ranks, self.reverse)
        return found[::-1] if reverse else found


class _InShards(torch.autograd.Function):
    """h of this rank's part. `recorded` asks for a gradient where any rank does, so that all take part in backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, call: _Call, a: Tensor, b: Tensor, init: Tensor, starts: Tensor | None, recorded: Tensor
    ) -> Tensor:
        end = call.place.total - 1
        chunks = call.cut(a, b, starts)
        zero = torch.zeros_like(init, memory_format=torch.contiguous_format)
        found: dict[int, Tensor] = {}
        summaries = []
        for c in chunks:
            if c.number == 0:
                found[0] = call.run(c, init)
                summaries.append(call.of_nothing(c, call.last(found[0]) if len_of(c, call) else init.clone()))
            elif c.number == end:
                summaries.append(call.of_nothing(c, zero))
            else:
                s = call.last(call.run(c, zero)) if len_of(c, call) else zero
                summaries.append(_Summary(call.factors(c), s))
        enters, before = {0: init}, init
        for number, summary in enumerate(call.exchange(summaries, False)):
            before = enters[number + 1] = summary.of(before, call.at)
        for c in chunks:
            if c.number:
                found[c.number] = call.run(c, enters[c.number])
        hs = [found[c.number] for c in chunks]
        h = hs[0] if len(hs) == 1 else torch.cat(hs, call.dim)
        ctx.call, ctx.count = call, len(chunks)
        kept = [x for c, s in zip(chunks, summaries, strict=True) for x in (enters[c.number], *s.factors)]
        ctx.save_for_backward(a, h, starts, *kept)
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            try:
                found = _InShards.differentiate(ctx, grad)
            except Misuse as fact:
                raise fact.named("linear_recurrence, in backward") from fact.__cause__
        a, h, *_ = ctx.saved_tensors
        of_a, of_b, of_init = (None if x is None else once("linear_recurrence", x, grad, a, h) for x in found)
        return None, of_a, of_b, of_init, None, None

    @staticmethod
    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        call: _Call = ctx.call
        a, h, starts, *kept = ctx.saved_tensors
        constant, end = not ctx.needs_input_grad[1], call.place.total - 1
        chunks = call.cut(a, h, starts)  # of b nothing but its length is asked
        grads = call.place.cut(grad, call.dim)
        hs = call.place.cut(h, call.dim)
        enters, factors = kept[::3], [Scaled(*kept[i : i + 2]) for i in range(1, len(kept), 3)]
        done: dict[int, Any] = {}
        summaries = []
        for c, g, before, of_h, f in zip(chunks, grads, enters, hs, factors, strict=True):
            if c.number == end:
                done[end] = call.vjp(c, g, before, of_h, constant)
                summaries.append(call.of_nothing(c, done[end][2]))
            elif c.number == 0:
                summaries.append(call.of_nothing(c, torch.zeros_like(before)))
            else:
                numbers = f.numbers.conj().resolve_conj()
                numbers = numbers if call.at is None else numbers.transpose(-2, -1)
                asked = call.vjp(c, g, before, of_h, True)[2]
                summaries.append(_Summary(Scaled(numbers, f.exponents), asked))
        asks, after = {}, torch.zeros_like(enters[0])
        for back, summary in enumerate(call.exchange(summaries, True)):
            after = asks[end - back - 1] = summary.of(after, call.at)
        for c, g, before, of_h in zip(chunks, grads, enters, hs, strict=True):
            if c.number == end:
                continue
            done[c.number] = call.vjp(c, g, before, of_h, constant, asks[c.number])
        in_place = [done[c.number] for c in chunks]
        of_init = done[0][2] if 0 in done else torch.zeros_like(enters[0])
        of_b = torch.cat([x[1] for x in in_place], call.dim) if len(chunks) > 1 else in_place[0][1]
        if constant:
            return None, of_b, of_init
        parts = [x[0] for x in in_place]
        if call.shared:
            return torch.stack(parts).sum(0), of_b, of_init
        return torch.cat(parts, call.dim) if parts[1:] else parts[0], of_b, of_init


def len_of(chunk: _TimeChunk, call: _Call) -> int:
    """The number of a chunk's steps."""
    return chunk.b.shape[call.dim]
