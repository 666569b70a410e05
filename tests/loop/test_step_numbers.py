"""Ranges among xs: each step gets a Python int, in every mode of a loop."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import tensorloop as tl
from tensorloop.loop import NotCompiledWarning
from tensorloop.loop.compiled.run.plan import plans
from tests.support.loop_cases import CHECKPOINTS, compare, randn, rotate, with_and_without_checkpoints


def positions(loops: Any, table: Tensor, xs: Tensor, *, reverse: bool = False) -> Any:
    """A program that looks numbers up in a table; a plain loop has them as tensors."""
    steps = range(3, 3 + 2 * len(xs), 2)
    plain = torch.arange(3, 3 + 2 * len(xs), 2)

    def body(h: Tensor, x: Any) -> Any:
        h = rotate(h + table[x["t"]], 0.1 * int(x["t"])) + x["x"].sin()
        return h, h * x["t"]

    given = {"x": xs, "t": steps if type(loops).__name__ == "Ours" else plain}
    return loops.scan(body, torch.zeros(4, dtype=torch.float64), given, reverse=reverse)


@with_and_without_checkpoints
@pytest.mark.parametrize("reverse", [False, True])
def test_values_and_gradients(reverse: bool, checkpoints: Any) -> None:
    compare(
        lambda loops, *tensors: positions(loops, *tensors, reverse=reverse),
        randn(16, 4),
        randn(6, 4),
        checkpoints=checkpoints,
    )


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_derivatives_of_derivatives(checkpoints: Any) -> None:
    def f(table: Tensor, xs: Tensor) -> Tensor:
        def body(h: Tensor, x: Any) -> Any:
            h = rotate(h * table[x[1]]) + x[0]
            return h, None

        return tl.scan(body, torch.ones(2, dtype=torch.float64), (xs, range(len(xs))), checkpoints=checkpoints)[0]

    inputs = randn(4, 2), randn(4, 2)
    assert gradcheck(f, inputs)
    assert gradgradcheck(f, inputs)


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(-20, 20),
    stop=st.integers(-20, 20),
    step=st.integers(-4, 4).filter(bool),
    reverse=st.booleans(),
    compiled=st.booleans(),
    checkpoints=st.sampled_from(CHECKPOINTS),
)
def test_any_range(start: int, stop: int, step: int, reverse: bool, compiled: bool, checkpoints: Any) -> None:
    numbers = range(start, stop, step)

    def body(c: Tensor, x: Any) -> Any:
        c = c * 3 + x[0] - 2 * x[1]
        return c, c + x[0]

    carry, ys = tl.scan(
        body,
        torch.tensor(1),
        (numbers, range(len(numbers))),
        reverse=reverse,
        checkpoints=checkpoints,
        compile=compiled,
    )
    true, out = 1, []
    for k in reversed(range(len(numbers))) if reverse else range(len(numbers)):
        true = true * 3 + numbers[k] - 2 * k
        out.append(true + numbers[k])
    overflow = 2**64
    assert (int(carry) - true) % overflow == 0
    assert [(a - b) % overflow for a, b in zip(ys.tolist(), out[::-1] if reverse else out, strict=True)] == [0] * len(
        out
    )


def test_the_body_gets_python_ints() -> None:
    kinds: list[Any] = []

    def body(c: int, t: int) -> Any:
        kinds.append(type(t))
        return c + t, t

    last, ys = tl.scan(body, 0, range(5))
    assert (last, ys.tolist()) == (10, [0, 1, 2, 3, 4])
    assert kinds == [int] * 5
    squares: Any = [tl.map(lambda t: t * t, range(n)) for n in (4, 0)]
    assert [x.tolist() for x in squares] == [[0, 1, 4, 9], []]


@with_and_without_checkpoints
def test_until_ends_a_loop_over_a_range(checkpoints: Any) -> None:
    weight = randn(2)
    carry, ys = tl.scan(
        lambda c, t: (c + weight * t, t),
        torch.zeros(2, dtype=torch.float64),
        range(1000),
        until=lambda c: bool((c / weight)[0] >= 5.9),
        checkpoints=checkpoints,
    )
    assert torch.as_tensor(ys).tolist() == [0, 1, 2, 3]
    assert grad(carry.sum(), weight)[0].tolist() == pytest.approx([6, 6])


def lookup(c: Tensor, x: Any) -> Any:
    c = torch.sin(c * 2 + x["x"] * x["t"])
    return c, c


@pytest.mark.parametrize("reverse", [False, True])
def test_a_compiled_loop_makes_one_plan_for_all_steps(reverse: bool) -> None:
    def run(compiled: Any, length: int, start: int) -> Any:
        xs = {"x": randn(length, 3), "t": range(start, start + 3 * length, 3)}
        carry, ys = tl.scan(lookup, torch.zeros(3, dtype=torch.float64), xs, reverse=reverse, compile=compiled)
        return carry, ys, grad(ys.sum(), xs["x"])[0]

    torch.testing.assert_close(run("strict", 6, 1), run(False, 6, 1))
    made = plans.made
    torch.testing.assert_close(run("strict", 9, 1), run(False, 9, 1))
    assert plans.made == made


def test_a_compiled_body_that_needs_the_number_in_python_says_so() -> None:
    for body, text in [
        (lambda c, t: (c * [1.0, 2.0][t % 2], None), r"as a Python number .* Cure: operations of torch take it"),
        (lambda c, t: (c + 1, t), "returns i, the number of the step, as a Python number"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            tl.scan(body, torch.ones(()), range(4), compile="strict")
        with pytest.warns(NotCompiledWarning, match=text):
            assert (
                tl.scan(body, torch.ones(()), range(4), compile=True)[0] == tl.scan(body, torch.ones(()), range(4))[0]
            )


def test_inside_torch_compile() -> None:
    table = randn(5, 2)

    def f(table: Tensor) -> Tensor:
        return tl.scan(lambda c, t: (rotate(c) + table[t], None), torch.zeros(2, dtype=torch.float64), range(5))[0]

    torch.testing.assert_close(torch.compile(f, backend="eager")(table.detach()), f(table.detach()))
    torch.testing.assert_close(torch.func.vmap(f)(table.detach().expand(3, 5, 2))[1], f(table.detach()))
    torch.testing.assert_close(torch.func.jacrev(f)(table.detach()), torch.autograd.functional.jacobian(f, table))


def test_loops_in_loops_over_ranges() -> None:
    weight = randn(4, 4)
    start = torch.zeros(2, dtype=torch.float64)

    def inner(t: int, c: Tensor, plan: Any) -> Tensor:
        return tl.scan(lambda c, s: (rotate(c) + weight[t, s], None), c, range(t + 1), checkpoints=plan)[0]

    true = start
    for t, s in itertools.chain.from_iterable([(t, s) for s in range(t + 1)] for t in range(4)):
        true = rotate(true) + weight[t, s]
    for plan in (None, 1, 2):
        out = tl.scan(lambda c, t, plan=plan: (inner(t, c, plan), None), start, range(4), checkpoints=plan)[0]
        torch.testing.assert_close(out, true)
        torch.testing.assert_close(grad(out[0], weight), grad(true[0], weight, retain_graph=True))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"different lengths along dim 0: xs\['a'\]: 3, xs\['b'\]: 4"):
        tl.scan(lambda c, x: (c, None), 0, {"a": range(3), "b": torch.zeros(4)})
    with pytest.raises(ValueError, match="length is 4, but xs has length 3"):
        tl.scan(lambda c, x: (c, None), 0, range(3), 4)
    with pytest.raises(TypeError, match=r"xs\[0\] is int 0; expected a tensor, a TensorArray, a range or None"):
        tl.scan(lambda c, x: (c, None), 0, [0, 1])
    with pytest.raises(TypeError, match="beside packed leaves"):
        tl.scan(lambda c, x: (c, None), torch.zeros(2), (range(3), tl.PackedTensor(torch.zeros(4), [3, 1])))
    with pytest.raises(TypeError, match="xs: expected a tensor, got range"):
        tl.map(lambda t: t, range(3), batch_size=2)
