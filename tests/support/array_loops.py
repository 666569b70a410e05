"""Loops with TensorArrays in the carry, by name: every way in which a compiled one reads and writes them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import TensorArray
from tests.support.carried_arrays import SLOTS, B, D, Inputs, appends, next_state, scanned, tensors

Loop = Callable[[Inputs, Any], Any]
LOOPS: dict[str, Loop] = {}


def loop(make: Loop) -> Loop:
    """Puts a loop into the table: it gives what a loss is made of."""
    LOOPS[make.__name__] = make
    return make


def table(name: str, step: Callable[..., Tensor], **options: Any) -> None:
    LOOPS[name] = lambda d, compile: scanned(d, compile, step, **options)


def appends_twice(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    a.append(h).append(x)
    return next_state(h, x, d, a[-1] + a[-2] @ d.W)


def extends(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    a.extend(torch.stack([x, h]))
    return next_state(h, x, d, a.stack().sum(0) @ d.W)


def reads_slots(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    h = next_state(h, x, d, a[1] @ d.W)
    a.append(h)
    return h + 0.3 * a[-3]


def reads_in_place(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    slot = a[0]
    slot += h
    a.append(slot)
    return next_state(h, x, d, a[0] - slot)


def attends(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    a.append(h @ d.W)
    scores = torch.einsum("bd,tbd->bt", x @ d.Q, a[: len(a)]) / math.sqrt(D)
    return next_state(h, x, d, torch.einsum("bt,tbd->bd", torch.softmax(scores, -1), a.stack()))


def means(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    p = a.append(h).stack()
    return next_state(h, x, d, p.mean(0) @ d.W + p.sum(0) / len(a) + p.amax(0) + (p * p).mean((0, 2))[:, None])


def maps_all_slots(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    return next_state(h, x, d, torch.tanh(a.append(h).stack() @ d.W + x).logsumexp(0))


def sees_a_window(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    more = a[len(a) - 3 :].sum(0) @ d.W
    a.append(h)
    return next_state(h, x, d, more)


def joins_what_it_read(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    return next_state(h, x, d, torch.cat([a.append(h).stack(), x[None] @ d.W]).sin().sum(0))


def writes(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    old = a[1]
    h = next_state(h, x, d, old @ d.W)
    a[1] = h * 1.5
    return h + old


def writes_and_sums(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    h = next_state(h, x, d, a.stack().sum(0) @ d.W)
    a[2] = h
    return h


def multiplies_the_newest_slots(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    newest = a.append(h.sin()).stack()[-2:].flatten(0, 1) @ d.W
    return next_state(h, x, d, newest.view(2, B, D).cumsum(0)[1])


for each in (
    appends_twice,
    multiplies_the_newest_slots,
    reads_slots,
    reads_in_place,
    sees_a_window,
    writes,
    writes_and_sums,
    maps_all_slots,
):
    table(each.__name__, each)
for each in (appends, extends, attends, means, joins_what_it_read):
    table(each.__name__, each)
    table(f"{each.__name__}_from_nothing", each, empty=True)
table("means_backwards", means, reverse=True)


@loop
def heads(d: Inputs, compile: Any) -> Any:
    """tl.attention, two query heads to a key head."""

    def body(state: Any, x: Tensor) -> Any:
        h, k, v = state
        k.append((h @ d.W)[:, None])
        v.append((h @ d.Q)[:, None])
        h = torch.tanh(x + tl.attention(torch.stack([x, h @ d.U], 1), k, v, scale=0.7).sum(1))
        return (h, k, v), h

    return tl.scan(body, (d.h, TensorArray(), TensorArray()), d.xs, compile=compile)


@loop
def of_two_lengths(d: Inputs, compile: Any) -> Any:
    def body(state: Any, x: Tensor) -> Any:
        h, a, b, memory = state
        a.append(h).append(h * 2)
        b.append(x + h)
        h = torch.tanh((a.stack().mean(0) + b.stack().sum(0) + memory[1]) @ d.W)
        memory[1] = h
        return (h, a, b, memory), h.sum()

    init = d.h, TensorArray(), TensorArray.unstack(d.slots), TensorArray.unstack(d.slots[:2])
    return tl.scan(body, init, d.xs, compile=compile)


@loop
def a_ring(d: Inputs, compile: Any) -> Any:
    """Slots by tensors: read, and overwritten."""

    def body(state: Any, x: Tensor) -> Any:
        h, a, t = state
        h = next_state(h, x, d, a[(t * 3 + 1) % SLOTS] @ d.W + a.gather(torch.stack([t % 2, -1 - t % 3])).sum(0))
        a.write(t % SLOTS, h)
        return (h, a, t + 1), h

    return tl.scan(body, (d.h, TensorArray.unstack(d.slots), torch.tensor(0)), d.xs, compile=compile)


@loop
def numbered(d: Inputs, compile: Any) -> Any:
    def body(i: int, state: Any) -> Any:
        h, a = state
        h = torch.tanh(h @ d.U + a[i])
        a[i] = h * 2
        return h, a

    return tl.fori_loop(0, SLOTS, body, (d.h, TensorArray.unstack(d.slots)), compile=compile)


@loop
def while_small(d: Inputs, compile: Any) -> Any:
    """More steps than there is room for at first."""

    def body(state: Any) -> Any:
        n, h, a = state
        h = torch.tanh(h @ d.U + a[-1])
        return n + 1, h, a.append(h)

    init = torch.zeros((), dtype=torch.int64), d.h, TensorArray.unstack(d.slots)
    return tl.while_loop(lambda state: state[0] < 70, body, init, compile=compile)


@loop
def stops_early(d: Inputs, compile: Any) -> Any:
    def body(state: Any, x: Tensor) -> Any:
        h, a, n = state
        h = next_state(h, x, d, a.append(h).stack().mean(0) @ d.W)
        return (h, a, n + 1), h

    init = d.h, TensorArray.unstack(d.slots), torch.tensor(0)
    return tl.scan(body, init, d.xs, until=lambda state: state[2] >= 4, compile=compile)


@loop
def only_ys(d: Inputs, compile: Any) -> Any:
    """What the arrays give goes nowhere but into ys."""

    def body(state: Any, x: Tensor) -> Any:
        h, a = state
        h = next_state(h, x, d)
        p = a.append(h).stack()
        return (h, a), torch.einsum("tb,tbd->bd", torch.softmax((p @ d.W * h).sum(-1), 0), p)

    return tl.scan(body, (d.h, TensorArray()), d.xs, compile=compile)


@loop
def integers(d: Inputs, compile: Any) -> Any:
    def body(state: Any, x: Tensor) -> Any:
        h, a = state
        h = next_state(h, x, d)
        a.append(h.argmax(-1))
        return (h, a), a.stack().sum(0)

    return tl.scan(body, (d.h, TensorArray()), d.xs, compile=compile)


def outcome(
    make: Loop, compile: Any, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[list[Any], list[Any]]:
    """(what a loop gives, the gradients of a loss of it)."""
    d = Inputs(dtype, **options)
    found = tensors(make(d, compile))
    torch.manual_seed(1)
    terms = [(x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in found if x.requires_grad]
    return found, list(torch.autograd.grad(torch.stack(terms).sum(), d.leaves(), allow_unused=True))
