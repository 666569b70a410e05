"""Loops of several heads, each with a recurrent matrix of its own: rows and heads are shared out among groups."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, logsigmoid
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop.compiler.emitter.device.devices import Coroutines, Nvptx
from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.step import Step, Unsupported
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.ptx import made
from tensorloop.compiler.targets.ptx.driver import DeviceFacts
from tests.compiler.test_device_arrays import Made, lanes
from tests.support.lane_races import unneeded_waits
from tests.support.lanes import LanesCore
from tests.support.ptx_checks import ARCHITECTURES, check_ptx
from tests.support.ptxas import steps_made
from tests.support.recurrences import Given, assert_same, recurrence

D = torch.float64
T = 5
Cell = Callable[[list[Tensor], Tensor, Tensor, Tensor, Tensor], list[Tensor]]


def lstm(state: list[Tensor], x: Tensor, product: Tensor, bias: Tensor, scale: Tensor) -> list[Tensor]:
    i, f, g, o = (x + product + bias).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def gru(state: list[Tensor], x: Tensor, product: Tensor, bias: Tensor, scale: Tensor) -> list[Tensor]:
    (r, z, n, _), (hr, hz, hn, _) = x.chunk(4, -1), (product + bias).chunk(4, -1)
    z = (z + hz).sigmoid()
    return [(1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * state[0]]


def elman(state: list[Tensor], x: Tensor, product: Tensor, bias: Tensor, scale: Tensor) -> list[Tensor]:
    return [(x + product + bias).chunk(4, -1)[0].tanh()]


def slstm(state: list[Tensor], x: Tensor, product: Tensor, bias: Tensor, scale: Tensor) -> list[Tensor]:
    _, c, n, m = state
    i, f, z, o = (x + product + bias).chunk(4, -1)
    kept = m + logsigmoid(f)
    m = torch.maximum(i, kept)
    i, f = torch.exp(i - m), torch.exp(kept - m)
    c, n = f * c + i * z.tanh(), f * n + i
    return [o.sigmoid() * c / (n + 1), c, n, m]


def norm(state: list[Tensor], x: Tensor, product: Tensor, bias: Tensor, scale: Tensor) -> list[Tensor]:
    """A norm of each head, and how often it was above a bound, one number for each."""
    h = layer_norm((x + product + bias).chunk(4, -1)[0], scale.shape[-1:]) * scale
    return [h.tanh(), state[1] * 0.5 + h.square().mean(-1, keepdim=True)]


CELLS: dict[str, tuple[Cell, int]] = {
    "lstm": (lstm, 2),
    "gru": (gru, 1),
    "elman": (elman, 1),
    "slstm": (slstm, 4),
    "norm": (norm, 2),
}
LAYOUTS = "rows first", "heads first", "flat"


def outcome(
    name: str, layout: str, rows: int, heads: int, size: int, dtype: torch.dtype = D, *, compile: Any
) -> list[Tensor]:
    """Values, and gradients of all that goes in."""
    cell, count = CELLS[name]
    torch.manual_seed(rows * 100 + heads * 10 + size)
    weight = (torch.randn(heads, size, 4 * size, dtype=dtype) * size**-0.5).requires_grad_()
    bias, scale = (torch.randn(heads, n, dtype=dtype).requires_grad_() for n in (4 * size, size))
    xs = torch.randn(T, rows, heads, 4 * size, dtype=dtype)
    init = [torch.randn(rows, heads, size, dtype=dtype) * 0.3 for _ in range(count)]
    if name == "norm":
        init[1] = init[1][..., :1]
    if layout == "heads first":
        xs, init = xs.transpose(1, 2), [x.transpose(0, 1) for x in init]
    flat = layout == "flat"
    if flat:
        xs, init = xs.flatten(2), [x.flatten(1) for x in init]
    xs, init = xs.contiguous().requires_grad_(), [x.contiguous().requires_grad_() for x in init]

    def body(state: list[Tensor], x: Tensor) -> Any:
        if layout == "heads first":
            after = cell(state, x, torch.bmm(state[0], weight), bias[:, None], scale[:, None])
            return after, after[0]
        here = [x.unflatten(-1, (heads, -1)) for x in state] if flat else state
        x = x.unflatten(-1, (heads, -1)) if flat else x
        after = cell(here, x, torch.einsum("bhd,hde->bhe", here[0], weight), bias, scale)
        after = [x.flatten(-2) for x in after] if flat else after
        return after, after[0]

    last, ys = tl.scan(body, init, xs, compile=compile)
    loss = (ys * torch.arange(ys.numel(), dtype=dtype).view_as(ys).cos()).sum()
    loss = loss + sum((n + 1) * x.square().sum() for n, x in enumerate(last))
    leaves = [*init, xs, weight, bias, *([scale] if name == "norm" else [])]
    return [ys.detach(), *(x.detach() for x in last), *torch.autograd.grad(loss, leaves)]


SIZES = [(1, 2, 4), (2, 1, 5), (2, 4, 8), (5, 2, 7), (5, 4, 32), (1, 4, 16)]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for n, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11, msg=lambda m, n=n: f"{n}: {m}")


def groups_of(cores: list[Made]) -> list[int]:
    return [one.core.text.groups for one in cores]


@pytest.mark.parametrize(("rows", "heads", "size"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.few("slstm-rows first-5-2-7", "norm-heads first-5-4-32", "gru-flat-2-1-5")
def test_a_loop_of_heads_is_the_eager_one(name: str, layout: str, rows: int, heads: int, size: int) -> None:
    """Each pair of a row and a head has a group of its own, forward and backward."""
    expected = outcome(name, layout, rows, heads, size, compile=False)
    with lanes(32, 128, "random", guarded=True) as cores:
        check_same(outcome(name, layout, rows, heads, size, compile="strict"), expected)
    if heads > 1 or layout != "heads first":  # one head that lies outside of the rows is no product over heads
        assert groups_of(cores) == [rows * heads] * 2


# Groups that there may be, and how many there are of 6 rows and 4 heads: no group has fewer than another one.
@pytest.mark.parametrize(("most", "groups"), [(2, 2), (5, 4), (7, 6), (23, 12), (24, 24)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["lstm", "norm"])
@pytest.mark.few("norm-heads first-5-4", "lstm-flat-7-6")
def test_a_group_has_several_rows_and_heads(name: str, layout: str, most: int, groups: int) -> None:
    expected = outcome(name, layout, 6, 4, 2, compile=False)
    for count, local in ((8, 0), (128, 48 * 1024)):
        with lanes(count, most, "random", guarded=True, local=local) as cores:
            check_same(outcome(name, layout, 6, 4, 2, compile="strict"), expected)
        assert groups_of(cores) == [groups] * 2
    for one in cores:
        plan = KernelPlan(lowered(one.step), Coroutines(host(), 8, most))
        assert plan.part is not None or layout == "heads first"  # whose heads are rows like others
        unneeded_waits(plan)


def steps_of(name: str, layout: str, *sizes: Any) -> list[Step]:
    """The steps of a loop forward and backward; nothing of it is run."""
    return steps_made(lambda: outcome(name, layout, *sizes, compile="strict"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.few("norm-flat", "slstm-rows first", "lstm-heads first", "gru-flat")
def test_lanes_of_a_group_wait_where_they_would_meet_and_nowhere_else(name: str, layout: str) -> None:
    for step in steps_of(name, layout, 2, 4, 6):
        plan = KernelPlan(lowered(step), Coroutines(host(), 8, 8))
        assert plan.part is not None
        assert unneeded_waits(plan) == []


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("bhd,hde->bhe", x, weight)


# What is made of the product of each head, and how many groups then have 3 rows of 4 heads.
MIXING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "softmax over heads": (lambda x, w: product(x, w).softmax(1), 3),
    "sum over heads": (lambda x, w: product(x, w) + x.sum(1, keepdim=True), 3),
    "all heads to all": (lambda x, w: product(x, w) + (x.flatten(1) @ w.view(20, 5).repeat(1, 4)).view_as(x), 3),
    "heads change places": (lambda x, w: product(x, w).flip(1), 3),
    "the next head": (lambda x, w: product(x, w) + x.roll(1, 1), 3),
    "the mean of rows": (lambda x, w: product(x, w) - x.mean(0), 4),
    "rows and heads": (lambda x, w: product(x, w) / (1 + x.square().mean()), 1),
    "a shift by less than a head": (lambda x, w: product(x, w) + x.flatten(1).roll(1, 1).view_as(x), 3),
    "the carry of another head": (lambda x, w: product(torch.cat([x[:, 1:], x[:, :1]], 1), w), 3),
    "a window over two copies": (
        lambda x, w: product(x, w) + torch.cat([x.flatten(1)] * 2, 1)[:, 1:21].view(3, 4, 5),
        3,
    ),
    "within a head": (lambda x, w: product(x, w).softmax(-1) + x.flip(-1) + x.amax(-1, keepdim=True), 12),
    "rows and heads as one": (lambda x, w: product(x, w).reshape(12, 5).sigmoid().view(3, 4, 5), 12),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.few("rows and heads", "softmax over heads", "another head", "less than a head", "the mean of rows")
def test_what_mixes_heads_is_not_shared_out_by_heads(name: str) -> None:
    function, groups = MIXING[name]
    torch.manual_seed(0)
    weight = (torch.randn(4, 5, 5, dtype=D) / 3).requires_grad_()
    init, xs = (torch.randn(*shape, 3, 4, 5, dtype=D).requires_grad_() for shape in ((), (T,)))

    def run(compile: Any) -> list[Tensor]:
        def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = (function(h, weight) + x).tanh()
            return h, h

        last, ys = tl.scan(body, init, xs, compile=compile)
        gradients = torch.autograd.grad(last.sum() + (ys**3).sum(), [weight, init, xs])
        return [last.detach(), ys.detach(), *gradients]

    with lanes(8, 128, "random", guarded=True) as cores:
        check_same(run("strict"), run(False))
    assert groups_of(cores) == [groups] * 2


# What a step adds to the product of h, (3, 4, 5), from it and from x, which no step writes; how many groups there are.
READING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "each its own": (lambda h, x: x, 12),
    "each its own, twice": (lambda h, x: x.tanh() * h + x.transpose(1, 2).exp().transpose(1, 2), 12),
    "the first head's": (lambda h, x: h * x[:, :1], 12),
    "the first row's": (lambda h, x: h * x[:1], 12),
    "its own and the first head's": (lambda h, x: h * x + x[:, :1], 3),
    "its own and that of another": (lambda h, x: h * x + x.flip(1), 3),
    "another's of what it makes itself": (lambda h, x: h * x.tanh().flip(1), 3),
    "all rows' and its own": (lambda h, x: h * x + x.sum(0), 4),
}


@pytest.mark.parametrize("name", READING)
def test_what_no_step_writes_may_be_read_across_in_one_way(name: str) -> None:
    function, groups = READING[name]
    torch.manual_seed(0)
    given: Given = (
        [torch.randn(4, 5, 5, dtype=D) / 3],
        [torch.randn(T, 3, 4, 5, dtype=D)],
        [torch.randn(3, 4, 5, dtype=D)],
    )

    def step(invariants: list[Tensor], slices: list[Tensor], carry: list[Tensor]) -> dict[str, list[Tensor]]:
        h = (product(carry[0], invariants[0]) + function(carry[0], slices[0])).tanh()
        return {"carry": [h], "outs": [h]}

    rec = recurrence(step, *given)
    core = LanesCore(rec, 8, 128, "random", guarded=True)
    assert_same(core, rec, T, *given, rtol=1e-11, atol=1e-11)
    assert core.text.groups == groups


@pytest.mark.parametrize(("what", "groups"), [("whole", 12), ("heads", 3), ("rows", 4), ("one", 1)])
def test_a_sum_over_parts_is_made_by_one_group(what: str, groups: int) -> None:
    torch.manual_seed(0)
    over = {"whole": (), "heads": (1, 2), "rows": (0, 2), "one": (0, 1, 2)}[what]
    given: Given = [torch.randn(4, 5, 5, dtype=D) / 3], [torch.randn(T, 2, dtype=D)], [torch.randn(3, 4, 5, dtype=D)]

    def step(invariants: list[Tensor], slices: list[Tensor], carry: list[Tensor]) -> dict[str, list[Tensor]]:
        h = product(carry[0], invariants[0]).tanh()
        return {"carry": [h], "sums": [h.sum(over) if over else h]}

    rec = recurrence(step, *given)
    core = LanesCore(rec, 8, 128, "random", guarded=True)
    assert_same(core, rec, T, *given, rtol=1e-11, atol=1e-11)
    assert core.text.groups == groups


def test_what_a_loop_has_for_each_row_or_head_or_once() -> None:
    """Carries without heads, or rows; a mask of rows; whether the loop goes on, which no group knows by itself."""
    torch.manual_seed(0)
    weight = (torch.randn(4, 5, 5, dtype=D) / 3).requires_grad_()
    init = torch.randn(3, 4, 5, dtype=D), torch.zeros(3, dtype=D), torch.zeros((), dtype=D)
    xs, masks = torch.randn(T, 3, 4, 5, dtype=D), torch.rand(T, 3) > 0.4

    def body(state: tuple[Tensor, ...], row: tuple[Tensor, Tensor]) -> Any:
        (h, count, all_of), (x, mask) = state, row
        after = (product(h, weight) + x).tanh() * (1 + count)[:, None, None]
        h, count = torch.where(mask[:, None, None], after, h), count + mask.to(D)
        return (h, count, all_of + 0.5), (h * all_of, count)

    with lanes(8, 128, "random", guarded=True) as cores:
        found = tl.scan(body, init, (xs, masks), compile="strict")
    check_same(tree_leaves(found), tree_leaves(tl.scan(body, init, (xs, masks))))
    assert groups_of(cores) == [12]


@pytest.mark.parametrize(("asked", "groups"), [("a counter", 12), ("all heads", 1)])
def test_whether_a_loop_goes_on_is_known_to_all_groups(asked: str, groups: int) -> None:
    torch.manual_seed(0)
    weight, init = torch.randn(4, 5, 5, dtype=D) / 3, torch.randn(3, 4, 5, dtype=D)

    def cond(state: tuple[Tensor, Tensor]) -> Tensor:
        return state[1] < 5 if asked == "a counter" else state[0].abs().max() > 0.1

    def body(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return product(state[0], weight).tanh(), state[1] + 1

    def run(compile: Any) -> list[Tensor]:
        return [*tl.while_loop(cond, body, (init, torch.zeros((), dtype=D)), max_steps=9, compile=compile)]

    with lanes(8, 128, "random", guarded=True) as cores:
        check_same(run("strict"), run(False))
    assert groups_of(cores) == [groups]


# FlashRNN's sizes: 16 rows, 768 units in so many heads, on a device of 132 multiprocessors with 227 KiB each.
@pytest.mark.parametrize(
    ("heads", "groups", "taken"), [(48, 128, True), (24, 128, True), (12, 96, True), (6, 96, False), (3, 48, False)]
)
def test_heads_of_768_units(heads: int, groups: int, taken: bool) -> None:
    """Matrices of larger heads do not fit: graphs are faster than to read them at each step."""
    facts = DeviceFacts((9, 0), 132, 1024, 227 * 1024)
    for step in steps_of("lstm", "rows first", 16, heads, 768 // heads, torch.float32):
        plan = KernelPlan(lowered(step), Nvptx("sm_90", groups=facts.multiprocessors, local=facts.shared))
        assert plan.groups == groups
        with contextlib.nullcontext() if taken else pytest.raises(Unsupported, match="bytes that one group reads"):
            assert made.text_for(lowered(step), facts).groups == groups


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.few
def test_a_step_of_heads_is_ptx(name: str) -> None:
    for step in steps_of(name, "rows first", 4, 3, 16, torch.float32):
        for arch in ARCHITECTURES:
            assert check_ptx(lowered(step), arch)[0].groups == 12
