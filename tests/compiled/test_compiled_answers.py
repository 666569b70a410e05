"""Values that a body reads in Python: of captures, which choose a call's plan, and bools, which choose a step's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run import stretches
from tensorloop.loop.compiled.run.plan import plans
from tests.support.both_ways import check_both
from tests.support.devices import HERE

D = torch.float64
pytestmark = pytest.mark.usefixtures("fresh_plans")
W = torch.linalg.qr(torch.randn(3, 3, dtype=D, generator=torch.Generator(HERE).manual_seed(0)))[0]
INIT = torch.tensor([[0.4, -0.7, 1.1], [0.2, 0.3, -0.5]], dtype=D)
# Of five steps each the first numbers are below 0, above 0, ...
XS = torch.sin(torch.arange(150.0, dtype=D)).view(25, 2, 3) * 0.2
XS[:, 0, 0] = torch.tensor([-1.0, 1.0], dtype=D).repeat_interleave(5).repeat(3)[:25]


def of_x(h: Tensor, x: Tensor, w: Tensor) -> Any:
    h = torch.sin(h @ w) + x if x[0, 0] > 0 else torch.cos(h @ w) * x
    return h, (h * 2, 1.0 if x[0, 0] > 0 else 2.0)


def of_the_carry(h: Tensor, x: Tensor, w: Tensor) -> Any:
    h = torch.sin(h @ w) + x
    if torch.all(h.abs() > 0.1):
        h = h * 1.1
    return h, (h.sum(), None)


def of_both_in_two_ways(h: Tensor, x: Tensor, w: Tensor) -> Any:
    if x[0, 0] > 0:
        if not (h.sum() * 0 + x[0, 0] < 0):
            h = h @ w + x
        return h, h
    return torch.tanh(h) - x, h * 2


def of_what_is_written_later(h: Tensor, x: Tensor, w: Tensor) -> Any:
    y = x.clone()
    positive = y[0, 0] > 0
    y.add_(1.0)
    if positive:
        y.sub_(h)
    positive.fill_(True)
    h.mul_(0.5).add_(0.1)
    return torch.sin(h @ w) + y, y


def of_a_float(h: Tensor, x: Tensor, w: Tensor) -> Any:
    return (torch.sin(h @ w) + x if x[0, 0].relu() and (x[0, 1] < 2).item() else h + x), h


BODIES = [of_x, of_the_carry, of_both_in_two_ways, of_what_is_written_later, of_a_float]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reverse": True},
    {"checkpoints": 3},
    {"until": lambda h: h[0, 0] > 1.3, "checkpoints": 2},
    {"until": lambda h: h[0, 0] > 1.3},
    {"reverse": True, "dim": 1},
]


def scanned(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A run of a scan, whose body closes over a weight."""

    def run(compile: Any, h: Tensor, xs: Tensor, w: Tensor) -> Any:
        xs = xs.movedim(0, options.get("dim", 0))
        return tl.scan(lambda h, x: body(h, x, w), h, xs, compile=compile, **options)

    return run


@pytest.mark.parametrize("options", OPTIONS, ids=[" ".join(x) or "plain" for x in OPTIONS])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.few
def test_a_bool_chooses_the_plan_of_a_step(body: Callable[..., Any], options: dict[str, Any]):
    check_both(scanned(body, **options), INIT, XS, W, second=not options)


LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of row n of a table (T, 3)
    "index": lambda table, n: table[n[None]][0],
    "two indices": lambda table, n: table[n[None], torch.arange(3)],
    "index_select": lambda table, n: table.index_select(-2, n[None])[0],
    "gather": lambda table, n: table.t().gather(-1, n.expand(3, 1))[:, 0],
    "take": lambda table, n: table.take(n * 3 + torch.arange(3)),
    "embedding": lambda table, n: torch.nn.functional.embedding(n, table),
    "one_hot": lambda table, n: torch.nn.functional.one_hot(n, len(table)).to(table) @ table,
    "written": lambda table, n: torch.zeros_like(table).index_copy(0, n[None], table[:1]).sum(0) - table[n[None]][0],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_no_row_behind_the_last_step_is_looked_up(name: str):
    """Whether the next step has the same answers is asked of its row, and after the last one there is none."""

    def body(state: Any, x: Tensor, table: Tensor) -> Any:
        h, n = state
        row = LOOKUPS[name](table, n)
        h = torch.tanh(h + row) if row.sum() > 0 else h * row.cos() - x
        return (h, n + 1), h

    def scans(compile: Any, h: Tensor, xs: Tensor, table: Tensor) -> Any:
        return tl.scan(lambda s, x: body(s, x, table), (h, torch.tensor(0)), xs, compile=compile)[1]

    def ends(compile: Any, h: Tensor, xs: Tensor, table: Tensor) -> Any:
        init, go = (h, torch.tensor(0)), lambda s: s[1] < len(table)
        return tl.while_loop(go, lambda s: body(s, xs[0], table)[0], init, compile=compile)[0]

    torch.manual_seed(2)
    h, xs, table = torch.randn(3, dtype=D), torch.randn(9, 3, dtype=D), torch.randn(9, 3, dtype=D)
    table[2:6] = table[2:6].abs()
    check_both(scans, h, xs, table)
    check_both(ends, h, xs, table)
    with pytest.raises((IndexError, RuntimeError)):  # a row that is not there, where there is a step
        scans("strict", h, xs, table[:5])


@pytest.mark.parametrize("body", [of_x, of_the_carry])
def test_in_loops_of_unknown_length_and_of_numbers(body: Callable[..., Any]):
    def run(compile: Any, h: Tensor, w: Tensor) -> Any:
        def step(carry: Any) -> Any:
            h, t = carry
            return body(h, torch.sin(h.detach() * 0 + t / 3), w)[0], t + 1

        init = h, torch.tensor(0.0, dtype=D)
        some = tl.while_loop(lambda c: c[1] < 23, step, init, return_steps=True, compile=compile)
        less = tl.while_loop(lambda c: c[1] < 23, step, init, max_steps=9, checkpoints=2, compile=compile)
        return some, less, tl.fori_loop(2, 20, lambda i, h: body(h, torch.sin(h * 0 + i), w)[0], h, compile=compile)

    check_both(run, INIT, W)


def test_vanilla_slstm_runs_in_two_stretches_by_two_plans(monkeypatch: pytest.MonkeyPatch):
    def cell(state: Any, x: Tensor) -> Any:
        y, c, n, m = state
        i, f, z, o = (x + (y @ weight).repeat(1, 4)).chunk(4, -1)
        later = m + torch.nn.functional.logsigmoid(f)
        m = i if torch.all(n == 0.0) else torch.maximum(i, later)
        i, f = torch.exp(i - m), torch.exp(later - m)
        c, n = f * c + i * torch.tanh(z), f * n + i
        y = torch.sigmoid(o) * c / n
        return (y, c, n, m), y

    def run(compile: Any, weight_: Tensor, xs: Tensor) -> Any:
        nonlocal weight
        weight = weight_
        zero = xs.new_zeros(2, 3)
        return tl.scan(cell, (zero,) * 4, xs, compile=compile)

    weight, xs = W, torch.sin(torch.arange(600.0, dtype=D)).view(25, 2, 12)
    check_both(run, W, xs)
    assert plans.made == 2
    ran, run_one = [], stretches.results_of

    def counted(*args: Any) -> Any:
        ran.append(run_one(*args))
        return ran[-1]

    monkeypatch.setattr(stretches, "results_of", counted)
    run("strict", W.clone().requires_grad_(), xs.clone().requires_grad_())
    assert plans.made == 2
    assert [steps for steps, _ in ran] == [1, 24]


@pytest.mark.parametrize("cut", [False, True])
def test_many_stretches_have_the_gradients_of_one_loop(cut: bool):
    """Short ones and long ones; and a gradient that xs has not is none, not zeros."""

    def run(compile: Any, h: Tensor, xs: Tensor, w: Tensor) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            x = x.detach() if cut else x
            return (h @ w * 0.9 + x if (x[0, 0] > 0) else torch.sin(h) - x * w[0]), h

        return tl.scan(body, h, xs, compile=compile)

    xs = torch.sin(torch.arange(1800.0, dtype=D)).view(300, 2, 3)
    xs[:, 0, 0] = torch.sin(torch.arange(300.0, dtype=D) ** 1.5 / 40)
    check_both(run, INIT, xs, W)


def test_a_bool_that_an_assertion_reads_raises_the_eager_error():
    def body(h: Tensor, x: Tensor) -> Any:
        assert torch.isfinite(h).all(), "no number"
        return h / x, h

    xs = torch.ones(9, 3)
    check_both(lambda compile, h, xs: tl.scan(body, h, xs, compile=compile), torch.ones(3), xs)
    xs[4] = 0.0
    with pytest.raises(AssertionError, match="no number") as told:
        tl.scan(body, torch.ones(3), xs, compile=True)
    assert "step 5" in str(told.value.__notes__)


def test_what_changes_too_often_or_leads_too_far_is_refused():
    def often(h: Tensor, x: Tensor) -> Any:
        return (h + x if x > 0 else h - x), h

    signs = torch.tensor([1.0, -1.0]).repeat(30)
    for _ in range(2):  # the second time before anything has run
        with pytest.raises(RuntimeError, match=r"a tensor as a condition .* is another one after every few steps"):
            tl.scan(often, torch.tensor(0.0), signs, compile="strict")

    def far(h: Tensor, x: Tensor) -> Any:
        k = 0
        while k < x:
            k += 1
        return h + k, h

    with pytest.raises(RuntimeError, match=r"lead to more than 4 courses \(.*test_compiled_answers"):
        tl.scan(far, torch.tensor(0.0), torch.arange(6.0), compile="strict")


@pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning")
def test_where_bools_are_not_read_the_loop_is_eager():
    def appends(carry: Any, x: Tensor) -> Any:
        h, array = carry
        return (h + x if x > 0 else h - x, array.append(h)), h

    xs = torch.tensor([1.0, 1.0, -1.0])
    init = xs[0], tl.TensorArray()
    check_both(lambda compile, xs: tl.scan(appends, init, xs, compile=compile), xs, compile=True)
    with pytest.raises(RuntimeError, match="reads a value"):
        tl.scan(appends, init, xs, compile="strict")

    def rows(h: Tensor) -> Tensor:
        return h * 2 if h.sum() < 9 else h + 1

    check_both(
        lambda compile, h: tl.while_loop(lambda h: h < 20, rows, h, compile=compile), torch.ones(3), compile=True
    )


def of_an_item(h: Tensor, x: Tensor, w: Tensor) -> Any:
    return (torch.sin(h @ w) + x if x[0, 0].item() > 0.5 else torch.cos(h @ w)), h


def of_computed_items(h: Tensor, x: Tensor, w: Tensor) -> Any:
    y = x.clone()
    low, high = y[0, 0].item(), h.detach().abs().max().item()
    y.mul_(2.0)
    if max(low, -0.9) * 2 - abs(high) / 4 + 1 > 1 - low:
        h = h * 0.9
    return torch.sin(h @ w) + y, h if low else h * 2


def of_a_count(h: Tensor, x: Tensor, w: Tensor) -> Any:
    count = (x > 0).sum().item()
    assert isinstance(count, int)
    assert not isinstance(count, float)
    return (torch.sin(h @ w) if count >= 4.0 or count == 3 else h - x), h


@pytest.mark.parametrize("body", [of_an_item, of_computed_items, of_a_count])
def test_a_number_that_is_compared_chooses_the_plan_of_a_step(body: Callable[..., Any]):
    check_both(scanned(body), INIT, XS, W)
    check_both(scanned(body, reverse=True, checkpoints=3), INIT, XS, W)


def test_a_number_is_compared_as_python_compares():
    x = torch.tensor([0.1, 0.2, 0.3])  # float32, none of which is Python's

    def body(h: Tensor, x: Tensor) -> Any:
        return h + (1 if x.item() > 0.2 else 0) + (2 if x.item() <= 0.1 else 0) + (4 if x.item() == 0.3 else 0), None

    last, _ = tl.scan(body, torch.tensor(0.0), x, compile="strict")
    assert last == tl.scan(body, torch.tensor(0.0), x)[0] == 2.0


@pytest.mark.parametrize(
    "body",
    [
        lambda h, x: h * x.sum().item(),
        lambda h, x: x.sum().item() * h,
        lambda h, x: h + torch.full((3,), x.sum().item()),
        lambda h, x: h.clamp(max=x.sum().item()),
        lambda h, x: h + len(f"{x.sum().item():.1f}"),
        lambda h, x: h + [1.0, 2.0][(x > 0).sum().item() % 2],
        lambda h, x: h + sum(range((x > 0).sum().item())),
        lambda h, x: h + {1: 1.0}.get((x > 0).sum().item(), 2.0),
        lambda h, x: h + round(x.sum().item()),
        lambda h, x: h + (x.sum().item() < x).sum(),
        lambda h, x: h + (1 / (x.sum().item() + 9) > 0),
        lambda h, x: (h, x.sum().item())[1],
        lambda h, x: h if x.sum().item().is_integer() else x,
        lambda h, x: h if hasattr(x.sum().item(), "is_integer") else x,
        lambda h, x: h if type(x.sum().item()) in (int, float) else x,
        lambda h, x: h * torch.tensor(x.sum().item()),
    ],
)
def test_all_else_that_python_does_with_a_number_is_refused(body: Callable[[Tensor, Tensor], Any]):
    xs = torch.linspace(-1, 1, 12).view(4, 3)

    def run(compile: Any, h: Tensor, xs: Tensor) -> Any:
        return tl.scan(lambda h, x: (torch.sin(h), body(h, x)), h, xs, compile=compile)

    with pytest.raises(RuntimeError, match=r"\.item\(\) (reads a value in Python|gave)|asks for the type of a number"):
        run("strict", torch.ones(3), xs)


NUMBERED: list[Callable[..., Any]] = [
    lambda i, h, table, w: torch.cos(h) if i == 2 else torch.sin(h @ w) + table[i],
    lambda i, h, table, w: torch.sin((h + table[i // 7] if i % 7 == 3 else h) @ w) * (i % 3),
    lambda i, h, table, w: torch.sin(h @ w) + table[min(i, 9), 1:] * i,
    lambda i, h, table, w: torch.sin(h @ w) + (table[:, -i + 2].sum() if 0 < i <= 2 else 1.0 if i else 0.5),
]


@pytest.mark.parametrize("k", range(len(NUMBERED)))
def test_comparisons_of_the_number_of_a_step(k: int):
    def run(compile: Any, h: Tensor, w: Tensor, table: Tensor) -> Any:
        def body(i: Any, h: Tensor) -> Tensor:
            return NUMBERED[k](i, h, table, w)

        def numbered(h: Tensor, i: Any) -> Any:
            return body(i, h), h

        options: Any = {"compile": compile}
        some = tl.fori_loop(0, 23, body, h, **options), tl.fori_loop(1, 23, body, h, checkpoints=3, **options)
        return some, tl.scan(numbered, h, range(1, 40, 2), reverse=True, **options)

    check_both(run, INIT, W, torch.sin(torch.arange(160.0, dtype=D)).view(40, 4)[:, : 3 + (k == 2)])


def test_a_number_of_a_step_that_python_needs_is_refused():
    table = [1.0, 2.0, 3.0, 4.0, 5.0]
    for body in (lambda i, h: h * table[i], lambda i, h: h + sum(range(i)), lambda i, h: h + 1 // (i + 1)):
        with pytest.raises(RuntimeError, match="the body needs i, the number of the step, as a Python number"):
            tl.fori_loop(0, 5, body, torch.ones(3), compile="strict")
    with pytest.raises(RuntimeError, match="a comparison of i reads a value in Python, which is another one after"):
        tl.fori_loop(0, 50, lambda i, h: h + i if i % 2 else h, torch.ones(3), compile="strict")
    with pytest.raises(RuntimeError, match="in a loop that carries no tensor"):
        tl.map(lambda i: torch.ones(3) if i == 0 else torch.zeros(3), range(5), compile="strict")


COUNTING: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (lambda h, x, k: (torch.sin(h) + x * k + XS[k], k + 1), (0,)),
    (lambda h, x, k, j: (torch.sin(h * 2 if k == 3 else h) + x * (k - j), k + 2, j - 1), (-1, 7)),
    (lambda h, x, k: (torch.sin(h - 1 if h.sum() > 0 else h) + x + k % 3, 1 + k), (1,)),
]


@pytest.mark.parametrize("options", [{}, {"checkpoints": 3}])
@pytest.mark.parametrize("k", range(len(COUNTING)))
def test_ints_in_the_carry_that_count_steps(k: int, options: dict[str, Any]):
    counts = []

    def run(compile: Any, h: Tensor, xs: Tensor) -> Any:
        body, start = COUNTING[k]
        (last, *numbers), ys = tl.scan(
            lambda carry, x: (body(carry[0], x, *carry[1:]), carry[0].sum()),
            (h, *start),
            xs,
            compile=compile,
            **options,
        )
        counts.append(numbers)
        return last, ys

    check_both(run, INIT, XS)
    assert counts[0] == counts[1]
    assert all(type(n) is int for n in counts[1])


UNTIL: list[Callable[[Any], Any]] = [
    lambda carry: carry[1] == 4,
    lambda carry: (carry[0].abs() >= 0).all() & (carry[1] > 3),
    lambda carry: carry[0].sum() * 0 + carry[1] > 3,
]


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("k", range(len(UNTIL)))
def test_a_condition_sees_the_ints_that_count(k: int, checkpoints: int | None):
    def body(carry: Any, x: None) -> Any:
        return (torch.sin(carry[0]) + 0.3, carry[1] + 1), carry[0]

    for length in (None, 9):
        (h, n), ys = tl.scan(body, (INIT, 0), length=length, until=UNTIL[k], compile="strict", checkpoints=checkpoints)
        assert n == len(ys) == 4
        torch.testing.assert_close(((h, 4), ys), tl.scan(body, (INIT, 0), length=4))


@pytest.mark.parametrize(
    "after",
    [
        lambda h, k: k * 2,
        lambda h, k: (k + 1) % 4,
        lambda h, k: min(k + 1, 3),
        lambda h, k: k + 1 if h[0, 0] > -2.0 else k,
        lambda h, k: k if h[0, 0] > -2.0 else k + 1,
    ],
)
def test_ints_in_the_carry_that_count_otherwise_are_eager(after: Callable[[Tensor, int], int]):
    def run(compile: Any) -> Any:
        return tl.scan(lambda c, x: ((c[0] + x, after(c[0], c[1])), None), (INIT, 1), XS, compile=compile)

    expected = run(False)[0]
    with pytest.warns(NotCompiledWarning, match=r"is a Python int that changes|an int in the carry counts some steps"):
        last, k = run(True)[0]
    assert (last.tolist(), k) == (expected[0].tolist(), expected[1])


def test_a_module_that_counts_its_steps():
    class Counts(torch.nn.Module):
        calls = 0

        def forward(self, h: Tensor, x: Tensor, w: Tensor) -> Any:
            self.calls += 1
            h = torch.sin(h @ w) + x * self.calls
            return (h * 2 if self.calls == 4 else h), h

    counts = []

    def run(compile: Any, h: Tensor, xs: Tensor, w: Tensor) -> Any:
        module = Counts()
        found = tl.carrying(module).scan(lambda h, x: module(h, x, w), h, xs, compile=compile)
        counts.append(module.calls)
        return found

    check_both(run, INIT, XS, W)
    assert counts == [25, 25]


class Read:
    now: Any = None


GUARDS: list[tuple[Callable[[Tensor, Tensor], Tensor], list[Any]]] = [
    (lambda h, x: h * Read.now.item() + x, [torch.tensor(x) for x in (0.5, 0.25, 0.5, float("nan"))]),
    (lambda h, x: h + x if Read.now * 2 > 1 else h - x, [torch.tensor(x) for x in (0.0, 1.0, 2.0)]),
    (lambda h, x: h + sum([x] * int(Read.now)), [torch.tensor(x) for x in (2, 3, 2)]),
    (lambda h, x: h + x[Read.now], [torch.tensor(x) for x in (0, 2, 1)]),
    (lambda h, x: h + x[Read.now.tolist()], [torch.tensor(x) for x in ([0, 1, 2], [2, 1, 0])]),
    (lambda h, x: h + float(torch.equal(Read.now, TABLE)) * x, [torch.zeros(3), torch.ones(3)]),
]
TABLE = torch.ones(3)


@pytest.mark.parametrize("k", range(len(GUARDS)))
def test_the_value_of_a_capture_chooses_the_plan_of_a_call(k: int):
    body, values = GUARDS[k]
    for value in values + values:
        Read.now = value
        run = lambda compile, h, xs: tl.scan(lambda h, x: (body(h, x), h), h, xs, compile=compile)  # noqa: E731
        check_both(run, INIT[0], XS[:, 0])


def test_a_capture_that_is_another_one_at_each_call_is_refused():
    def body(h: Tensor, x: Tensor) -> Any:
        return h * Read.now.item() + x, h

    for value in (1.0, 2.0, 3.0, 4.0, 2.0):
        Read.now = torch.tensor(value)
        tl.scan(body, torch.tensor(0.0), torch.ones(3), compile="strict")
    Read.now = torch.tensor(5.0)
    with pytest.warns(NotCompiledWarning, match=r"\.item\(\) .* another one in each of 4 calls .* as in h \* scale"):
        last, _ = tl.scan(body, torch.tensor(0.0), torch.ones(3), compile=True)
    assert last == 31.0


def test_a_value_that_was_made_of_the_carry_is_no_guard():
    def body(h: Tensor, x: Tensor) -> Any:
        y = torch.zeros(3, dtype=D)
        view = y[1:]
        view.add_(h[0])
        return h + y[1].item() + x, h

    with pytest.raises(RuntimeError, match=r"\.item\(\) reads a value in Python"):
        tl.scan(body, INIT[0], XS[:, 0], compile="strict")
