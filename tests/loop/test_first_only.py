"""Loops whose first step is unlike the others: an init that only the first step gets."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad, gradcheck, gradgradcheck

import tensorloop as tl
from tests.support.loop_cases import Counter, Ours, compare, randn, rotate, with_and_without_checkpoints


def begun(loops: Any, xs: Tensor, weight: Tensor, **options: Any) -> Any:
    """A program whose carry begins as None."""

    def body(h: Tensor | None, x: Tensor) -> Any:
        h = torch.zeros(4, dtype=torch.float64) if h is None else h
        h = rotate(h) + torch.sin(x @ weight)
        return h, (h.cos(), h.sum(), None, 1.5)

    return loops.scan(body, tl.first_only(None) if isinstance(loops, Ours) else None, xs, **options)


@with_and_without_checkpoints
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"dim": 1}], ids=["forwards", "reverse", "dim"])
def test_values_and_gradients(options: dict[str, Any], length: int, checkpoints: Any) -> None:
    shape = (3, length) if "dim" in options else (length, 3)
    compare(lambda loops, *xs: begun(loops, *xs, **options), randn(*shape), randn(3, 4), checkpoints=checkpoints)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_derivatives_of_derivatives(checkpoints: Any) -> None:
    def f(xs: Tensor, weight: Tensor) -> Any:
        return begun(Ours(checkpoints), xs, weight)[1][0]

    inputs = randn(4, 3), randn(3, 4)
    assert gradcheck(f, inputs)
    assert gradgradcheck(f, inputs)


def test_each_step_runs_once() -> None:
    body = Counter(lambda h, x: (x if h is None else h + x, None))
    with torch.no_grad():
        assert tl.scan(body, tl.first_only(None), torch.arange(5))[0] == 10
    assert body.calls == 5


@with_and_without_checkpoints
def test_gradients_reach_the_first_init(checkpoints: Any) -> None:
    start, wide = randn(2), randn(2, 4)
    out = tl.scan(
        lambda h, x: (torch.sin(h @ wide if len(h) == 2 else rotate(h)) + x, None),
        tl.first_only(start),
        torch.ones(5),
        checkpoints=checkpoints,
    )[0]
    true = torch.sin(start @ wide) + 1
    for _ in range(4):
        true = torch.sin(rotate(true)) + 1
    torch.testing.assert_close(out, true)
    torch.testing.assert_close(grad(out.sum(), (start, wide)), grad(true.sum(), (start, wide)))
    assert torch.equal(start, randn(2))


@with_and_without_checkpoints
def test_the_other_loops(checkpoints: Any) -> None:
    def double(c: Any) -> Any:
        return torch.ones((), dtype=torch.float64) if c is None else c * 2

    init = tl.first_only(None)
    options: Any = {"checkpoints": checkpoints}
    loop = tl.while_loop(lambda c: c is None or c < 100, double, init, return_steps=True, **options)
    assert loop == (128, 8)
    assert tl.while_loop(lambda c: c is not None, double, init, return_steps=True, **options) == (None, 0)
    assert [tl.while_loop(lambda c: True, double, init, max_steps=n, **options) for n in range(4)] == [None, 1, 2, 4]
    assert tl.fori_loop(2, 6, lambda i, c: torch.tensor(i) if c is None else c * i, init, **options) == 2 * 3 * 4 * 5
    assert tl.fori_loop(2, 2, lambda i, c: c, init, **options) is None
    steps: Any = tl.scan(lambda c, _: (double(c), 1), init, until=lambda c: c >= 8, **options)
    assert steps[0] == 8
    assert steps[1].tolist() == [1] * 4
    steps = tl.scan(lambda c, _: (double(c), 1), init, until=lambda c: c >= 1, **options)
    assert steps[1].tolist() == [1]
    carry, ys = tl.scan(lambda c, x: (double(c), x), init, torch.ones(0, 3), **options)
    assert carry is None
    assert ys.shape == (0, 3)


def test_arrays_ranges_and_contexts_among_what_is_parted() -> None:
    slots, context = tl.TensorArray.unstack(randn(5, 2)), randn(2)

    def body(c: Any, x: Any, context: Tensor) -> Any:
        c = (tl.TensorArray(), context) if c is None else c
        past, h = c
        h = rotate(h) + x["slot"] * x["t"]
        return (past.append(h), h), past[:].sum(0)

    xs = {"slot": slots, "t": range(5), "none": None}
    (past, h), ys = tl.scan(body, tl.first_only(None), xs, context=context, checkpoints=2)
    true, all_ = context, []
    for t in range(5):
        true = rotate(true) + slots[t] * t
        all_.append(true)
    torch.testing.assert_close(past.stack(), torch.stack(all_))
    torch.testing.assert_close(ys, torch.stack(all_).cumsum(0))
    torch.testing.assert_close(grad(h.sum(), context), grad(true.sum(), context))


def test_a_compiled_loop_runs_from_the_second_step_on() -> None:
    cell, xs = nn.GRUCell(3, 4), torch.randn(9, 2, 3)

    def body(h: Tensor | None, x: Tensor) -> Any:
        h = cell(x, h)  # takes None for zeros
        return h, h

    eager, compiled = (tl.scan(body, tl.first_only(None), xs, compile=how) for how in (False, "strict"))
    torch.testing.assert_close(compiled, eager)


def test_under_transforms() -> None:
    xs, weight = randn(5, 3), randn(3, 4, grad=False)

    def f(xs: Tensor) -> Tensor:
        return begun(Ours(), xs, weight)[0].sum()

    torch.testing.assert_close(torch.func.grad(f)(xs.detach()), grad(f(xs), xs)[0])
    torch.testing.assert_close(torch.func.vmap(f)(xs.detach().expand(2, 5, 3)), f(xs.detach()).expand(2))
    torch.testing.assert_close(torch.compile(f, backend="eager")(xs.detach()), f(xs.detach()))


def last(c: Any, x: Any) -> Any:
    return x, x


def test_what_is_refused() -> None:
    init: Any = tl.first_only(None)
    with pytest.raises(TypeError, match="changed the carry at step 1") as changed:
        tl.scan(lambda c, x: (0 if c is None else 1 if x < 2 else 1.5, x), init, torch.arange(5))
    assert "the first step was done by itself: steps are counted from the one after it" in changed.value.__notes__
    with pytest.raises(TypeError, match=re.escape("another structure than the others:\n  - *\n  + (*,)")):
        tl.scan(lambda c, x: (x, x if c is None else (x,)), init, torch.arange(3))
    with pytest.raises(
        TypeError, match=r"scan: y is a tensor .* after the first step, stacked, and .* after the others"
    ):
        tl.scan(lambda c, x: (x, x if c is None else x * 1.0), init, torch.arange(3))
    with pytest.raises(ValueError, match=r"y has shape \(1, 1\) after the first step, stacked, and \(2, 2\)"):
        tl.scan(lambda c, x: (x, x[:1] if c is None else x), init, torch.ones(3, 2))
    with pytest.raises(TypeError, match="first_only, which does not go with packed xs"):
        tl.scan(last, init, tl.PackedTensor(torch.zeros(4), [3, 1]))
    with pytest.raises(TypeError, match=r"first_only, where a condition is one bool; reduce it"):
        tl.while_loop(lambda c: torch.tensor([True, False]), lambda c: c, init)


@pytest.mark.parametrize("options", [{"checkpoints": 0}, {"checkpoints": "all"}, {"compile": "yes"}])
def test_bad_options_are_refused_before_the_first_step(options: Any) -> None:
    body = Counter(last)
    with pytest.raises((TypeError, ValueError), match="scan: "):
        tl.scan(body, tl.first_only(None), torch.arange(3), **options)
    assert body.calls == 0
