"""A budget is a promise: so many bytes are alive beside what a loop is given, its outputs and their gradients."""

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop.loop.checkpoint.options import bytes_on
from tests.support.schedule_checks import bytes_of_a_step

T, B, F = 60, 4, 16
Made = tuple[list[Tensor], Callable[..., Any]]  # what gets a gradient, and the loop, called with its options


def leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape) / 4).requires_grad_()


def lstm() -> Made:
    cell, xs, h, c = nn.LSTMCell(F, F), leaf(T, B, F), leaf(B, F), leaf(B, F)

    def body(state: Any, x: Tensor) -> Any:
        state = cell(x, state)
        return state, state[0]

    return [xs, h, c, *cell.parameters()], lambda **how: tl.scan(body, (h, c), xs, **how)


def deep() -> Made:
    net, start = nn.Sequential(nn.Linear(F, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, F)), leaf(B, F)

    def body(i: Any, h: Tensor) -> Tensor:
        return h + 0.1 * net(h)

    return [start, *net.parameters()], lambda **how: tl.fori_loop(0, T, body, start, **how)


def statistics() -> Made:
    net = nn.Sequential(nn.Linear(F, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, F))
    start, xs = leaf(B, F), torch.randn(T, B, F)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h + net(x)), None

    return [start, *net.parameters()], lambda **how: tl.scan(body, start, xs, **how)


def unknown_length() -> Made:
    w, start = leaf(F, F), leaf(B, F)

    def loop(**how: Any) -> Any:
        init: Any = (torch.tensor(0), start)
        return tl.while_loop(lambda c: c[0] < T, lambda c: (c[0] + 1, torch.tanh(c[1] @ w) + c[1]), init, **how)[1]

    return [w, start], loop


def rows_that_stop() -> Made:
    w, start, n = leaf(F, F), leaf(B, F), torch.tensor([3, T, 20, 41])

    def loop(**how: Any) -> Any:
        init: Any = (torch.zeros(B, dtype=torch.long), start)
        return tl.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, torch.tanh(c[1] @ w) + c[1]), init, **how)[1]

    return [w, start], loop


def wide_outputs() -> Made:
    w, start, xs = leaf(F, F), leaf(B, F), leaf(T, B, F)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.sin(h @ w) + x
        return h, (h.repeat(1, 8) * 2, h.mean())

    return [w, start, xs], lambda **how: tl.scan(body, start, xs, **how)


def gradient_from_a_capture_alone() -> Made:
    w, b, xs = leaf(F, F), leaf(F), torch.randn(T, B, F)

    def body(h: Tensor, x: Tensor) -> Any:
        return h + 0.1 * torch.sigmoid(h @ w + x) + b, None

    return [w, b], lambda **how: tl.scan(body, torch.zeros(B, F), xs, **how)


def loop_inside() -> Made:
    start = leaf(B, F)

    def body(i: Any, h: Tensor) -> Tensor:
        return tl.fori_loop(0, 6, lambda j, h: torch.sin(torch.cos(h)), h, checkpoints="auto")

    return [start], lambda **how: tl.fori_loop(0, T, body, start, **how)


def attends_to_an_array() -> Made:
    """Its steps keep more and more, with the same calls of torch."""
    w, start, xs = leaf(F, F), leaf(B, F), leaf(T, B, F)

    def body(carry: Any, x: Tensor) -> Any:
        h, states = carry
        states = states.append(torch.tanh(h @ w + x))
        past = states.stack()
        weights = torch.softmax((past * h).sum(-1), 0)
        return ((weights[..., None] * past).sum(0), states), None

    return [w, start, xs], lambda **how: tl.scan(body, (start, tl.TensorArray()), xs, **how)[0][0]


def array_of_unknown_length() -> Made:
    w, start = leaf(F, F), leaf(B, F)

    def body(carry: Any) -> Any:
        i, h, states = carry
        states = states.append(h)
        return i + 1, torch.tanh(h @ w) + states.stack().mean(0), states

    def loop(**how: Any) -> Any:
        return tl.while_loop(lambda c: c[0] < T, body, (torch.tensor(0), start, tl.TensorArray()), **how)[1]

    return [w, start], loop


def overwrites_an_array() -> Made:
    w, start, xs = leaf(F, F), leaf(B, F), leaf(T, B, F)

    def body(carry: Any, x: Tensor) -> Any:
        h, ring, i = carry
        h = torch.tanh(h @ w + x) + 0.1 * ring[i % 5]
        return (h, ring.write(i % 5, h), i + 1), None

    return [w, start, xs], lambda **how: tl.scan(
        body, (start, tl.TensorArray.unstack(torch.zeros(5, B, F)), torch.tensor(0)), xs, **how
    )[0][0]


def writes_what_it_carries() -> Made:
    start, xs = leaf(B, F), leaf(T, B, F)

    def body(carry: Any, x: Tensor) -> Any:
        h, states = carry
        h = torch.sin(h) + x
        return (h, states.append(h)), None

    return [start, xs], lambda **how: tl.scan(body, (start, tl.TensorArray()), xs, **how)[0][1].stack()


ARRAYS = [attends_to_an_array, array_of_unknown_length, overwrites_an_array, writes_what_it_carries]
LOOPS = [
    loop_inside,
    lstm,
    deep,
    statistics,
    unknown_length,
    rows_that_stop,
    wide_outputs,
    gradient_from_a_capture_alone,
]


def nbytes(tensors: list[Tensor]) -> int:
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def measured(make: Callable[[], Made], **how: Any) -> tuple[int, list[Tensor]]:
    """The most bytes alive beside outputs and gradients, and the gradients."""
    torch.manual_seed(0)
    wanted, loop = make()
    with tl.memory.track() as tracker:
        outputs = [x for x in tree_leaves(loop(**how)) if isinstance(x, Tensor) and x.requires_grad]
        grads = [torch.ones_like(x) for x in outputs]
        found = torch.autograd.grad(outputs, wanted, grads)
    return tracker.peak - nbytes([*outputs, *grads, *found]), [*found]


def budgets(make: Callable[[], Made], **how: Any) -> set[int]:
    """Some that the loop can live with, from the least on."""
    everything, loop = measured(make)[0], make()[1]
    least = bytes_of_a_step(lambda plan: loop(checkpoints=plan, **how), make in ARRAYS)[0]
    shares = (0.1, 0.3, 0.6, 1.2)
    return {least, int(1.3 * least), *(n for share in shares if (n := int(share * everything)) > least)}


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    """They are sums in another order, of terms as large as the largest."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=max(1e-4, 1e-5 * float(y.abs().max())))


@pytest.mark.parametrize("make", [*LOOPS, *ARRAYS])
def test_a_budget_is_kept(make: Callable[[], Made]) -> None:
    _, expected = measured(make)
    for budget in budgets(make):
        found, grads = measured(make, checkpoints=tl.Checkpoints(budget=budget))
        assert found <= budget
        assert_alike(grads, expected)


@pytest.mark.parametrize("make", [lstm, deep, unknown_length, wide_outputs, gradient_from_a_capture_alone])
def test_a_compiled_loop_keeps_it(make: Callable[[], Made]) -> None:
    _, expected = measured(make)
    for budget in budgets(make, compile="strict"):
        measured(make, checkpoints=tl.Checkpoints(budget=budget), compile="strict")  # which makes the plan
        found, grads = measured(make, checkpoints=tl.Checkpoints(budget=budget), compile="strict")
        assert found <= budget
        assert_alike(grads, expected)


@pytest.mark.parametrize("make", [attends_to_an_array, overwrites_an_array])
def test_a_compiled_loop_with_arrays_keeps_it(make: Callable[[], Made]) -> None:
    """Beside its arrays and their gradients, which count as outputs, though nobody keeps them here."""
    _, expected = measured(make)
    arrays = 2 * (T if make is attends_to_an_array else 5) * B * F * 4
    for budget in budgets(make, compile="strict"):
        measured(make, checkpoints=tl.Checkpoints(budget=budget), compile="strict")  # which makes the plan
        found, grads = measured(make, checkpoints=tl.Checkpoints(budget=budget), compile="strict")
        assert found <= budget + arrays
        assert_alike(grads, expected)


def drawn(seed: int) -> Made:
    """A loop of random sizes: steps that use weights once or often, with a cell, outputs and gradients of xs or not."""
    choose = random.Random(seed)
    width, rows, steps = choose.choice([4, 16, 32]), choose.choice([1, 4, 8]), choose.choice([20, 60, 150])
    repeats, layers = choose.choice([1, 2, 4]), choose.choice([1, 2, 3])
    has_cell, has_ys, wants_xs, reverse = (choose.random() < share for share in (0.3, 0.4, 0.5, 0.3))
    weights, biases = [leaf(width, width) for _ in range(layers)], [leaf(width) for _ in range(layers)]
    cell, start, xs = nn.GRUCell(width, width), leaf(rows, width), leaf(steps, rows, width)

    def body(h: Tensor, x: Tensor) -> Any:
        for _ in range(repeats):
            z = h + 0.1 * x
            for w, b in zip(weights, biases, strict=True):
                z = torch.tanh(z @ w + b)
            h = h + 0.1 * z
        h = cell(x, h) if has_cell else h
        return h, h.sin() if has_ys else None

    wanted = [*weights, *biases, start, *([xs] if wants_xs else []), *(cell.parameters() if has_cell else [])]
    given = xs if wants_xs else xs.detach()
    return wanted, lambda **how: tl.scan(body, start, given, reverse=reverse, **how)


@pytest.mark.parametrize("compile", [False, "strict"])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.few("[1-", "[26-")
def test_random_loops_keep_theirs(seed: int, compile: Any) -> None:
    def make() -> Made:
        return drawn(seed)

    everything, _ = measured(make)
    least = bytes_of_a_step(lambda plan: make()[1](checkpoints=plan, compile=compile))[0]
    for budget in (least, *(int(share * everything) for share in (0.1, 0.2, 0.3, 0.5, 0.8))):
        if budget >= least:
            how = {"checkpoints": tl.Checkpoints(budget=budget), "compile": compile}
            if compile:
                measured(make, **how)  # which makes the plan
            assert measured(make, **how)[0] <= budget


def steps_of_two_sizes(from_step: int = T // 2, custom: bool = False) -> Made:
    w, start = leaf(F, F), leaf(B, F)

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return grad * ctx.saved_tensors[0].cos()

    sine: Any = Sine.apply if custom else torch.sin

    def body(i: Any, h: Tensor) -> Tensor:
        h = torch.tanh(h @ w) + h
        for _ in range(8 if int(i) >= from_step else 1):
            h = sine(h)
        return h

    return [start, w], lambda **how: tl.fori_loop(0, T, body, start, **how)


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("from_step", [2, T // 2, T - 1])
def test_steps_that_keep_more_than_the_first(from_step: int, custom: bool) -> None:
    def make() -> Made:
        return steps_of_two_sizes(from_step, custom)

    everything, expected = measured(make)
    for share in (0.3, 0.5, 0.8, 1.2):
        budget = 24_000 + int(share * everything)
        found, grads = measured(make, checkpoints=tl.Checkpoints(budget=budget))
        assert found <= budget * (1.1 if custom else 1)  # what a custom Function keeps is an estimate: docs/limits.md
        assert_alike(grads, expected)
    least = bytes_of_a_step(lambda plan: make()[1](checkpoints=plan))[0]
    with pytest.raises(ValueError, match="is too small for one step of this loop") as error:
        make()[1](checkpoints=tl.Checkpoints(budget=least))
    assert f"raised in step {from_step} of fori_loop" in "".join(error.value.__notes__)


@pytest.mark.parametrize("make", LOOPS)
def test_below_the_least_bytes_nothing_runs_but_a_step(make: Callable[[], Made]) -> None:
    _, loop = make()
    least, residuals, beyond, carry = bytes_of_a_step(lambda plan: loop(checkpoints=plan))
    assert least == residuals + beyond + 2 * carry
    with pytest.raises(ValueError, match=f"a budget of {least - 1} bytes is too small .* give at least {least}"):
        loop(checkpoints=tl.Checkpoints(budget=least - 1))
    loop(checkpoints=tl.Checkpoints(budget=least))


def test_sizes_as_text_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    sizes = {"200 MiB": 200 << 20, "1.5GB": 1_500_000_000, "7": 7, " 3 kB ": 3000, "2 GiB": 2 << 30, "5B": 5, 12: 12}
    assert [bytes_on(here, tl.Checkpoints(budget=x)) for x in sizes] == [*sizes.values()]
    monkeypatch.setattr("tensorloop.loop.checkpoint.options.free_bytes", lambda device: 1000)
    assert [bytes_on(here, tl.Checkpoints(budget=x)) for x in (0.5, "25%", "2.5 %")] == [500, 250, 25]
    _, loop = lstm()
    with pytest.raises(ValueError, match="a budget of 500 bytes is too small for one step"):
        loop(checkpoints=tl.Checkpoints(budget=0.5))
    monkeypatch.undo()
    assert 2**20 < (bytes_on(here, tl.Checkpoints(budget=0.5)) or 0) < 2**50


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (0, ValueError, "budget must be at least 1, got 0"),
        (1.0, ValueError, "budget must be above 0 and below 1 where it is a share of free memory, got 1.0"),
        ("100%", ValueError, "budget must be above 0 and below 1 where it is a share of free memory, got 1.0"),
        ("much", ValueError, "budget='much' is no size; write \"200 MiB\""),
        ("3 MBit", ValueError, "budget='3 MBit' is no size"),
        ("-3 MB", ValueError, "budget='-3 MB' is no size"),
        (True, TypeError, "budget must be an int or a 0-d integer tensor, got bool True"),
        ([3], TypeError, "budget must be an int or a 0-d integer tensor, got list"),
    ],
)
def test_what_is_no_budget(budget: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"Checkpoints: {message}"):
        tl.Checkpoints(budget=budget)


CHILD = """
import re, sys, torch, tensorloop as tl
torch.set_num_threads(1)
w, h = torch.randn(128, requires_grad=True), torch.randn(4096, 128, requires_grad=True)  # 2 MB
body = lambda i, h: torch.tanh(torch.sin(h) * w)
tl.fori_loop(0, 8, body, h, checkpoints=tl.Checkpoints(budget=40 << 20)).sum().backward()  # what is loaded once
most = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
before = most()
tl.fori_loop(0, 50, body, h, checkpoints=eval(sys.argv[1])).sum().backward()
print((most() - before) / 1024)
"""


def test_the_process_grows_no_more() -> None:
    """The residuals of all steps are 300 MB; resident memory is the kernel's figure, not ours."""
    grown = [
        float(subprocess.run([sys.executable, "-c", CHILD, plan], capture_output=True, text=True, check=True).stdout)
        for plan in ("None", "tl.Checkpoints(budget=60 << 20)")
    ]
    assert grown[0] > 200
    assert grown[1] < 80  # with outputs, gradients, and holes that the allocator leaves


def test_what_made_a_capture_is_no_part_of_a_step() -> None:
    """The graph of a weight that was computed before the loop, large, is the caller's."""

    def loop(weight: Tensor) -> Callable[[Any], Any]:
        return lambda plan: tl.fori_loop(0, 6, lambda i, h: torch.sin(h @ weight), torch.ones(2, 4), checkpoints=plan)

    large = leaf(200, 200).tanh().sin().tanh()
    assert bytes_of_a_step(loop(large[:4, :4])) == bytes_of_a_step(loop(leaf(4, 4)))
