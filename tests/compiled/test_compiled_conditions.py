"""Conditions asked in Python: those that give a Python bool or look at values. The steps are native all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.loop.compiled import front
from tensorloop.loop.compiled.front import NotCompiledWarning
from tests.support.devices import HERE

D = torch.float64
TURN = torch.linalg.qr(torch.randn(8, 8, dtype=D, generator=torch.Generator(HERE).manual_seed(3)))[0]
Found = tuple[list[Any], list[Tensor]]  # (what the condition noted, values and gradients)


def loop(compile: Any, until: float, checkpoints: int | None = None, max_steps: int | None = None) -> Found:
    """sin(h W) + x while a counter, read in Python, is below."""
    asked: list[float] = []
    x = torch.randn(4, 8, dtype=D, generator=torch.Generator(HERE).manual_seed(1)).requires_grad_()
    w = TURN.clone().requires_grad_()

    def goes_on(state: tuple[Tensor, Tensor]) -> bool:
        assert not torch.is_grad_enabled()
        asked.append(float(state[1]))
        return state[1].item() < until

    def body(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.sin(state[0] @ w) + 0.1 * x, state[1] + 1

    init = x * 1, torch.zeros(())
    h, n = tl.while_loop(goes_on, body, init, compile=compile, checkpoints=checkpoints, max_steps=max_steps)
    found = torch.autograd.grad(h.square().sum(), [x, w], allow_unused=True, materialize_grads=True)
    return asked, [h.detach(), n, *found]


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == expected[0]
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("max_steps", [None, 0, 1, 7, 300])
@pytest.mark.parametrize("checkpoints", [None, 1, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 64, 150])
def test_a_condition_that_reads_a_value(steps: int, checkpoints: int | None, max_steps: int | None) -> None:
    assert_same(loop("strict", steps, checkpoints, max_steps), loop(False, steps, checkpoints, max_steps))


@pytest.mark.parametrize("until", [False, True])
@pytest.mark.parametrize("by", [1, 2, -3])
def test_a_condition_that_reads_a_value_beside_a_counter(by: int, until: bool) -> None:
    """A Python number of the carry that grows by as much in each step is what it is there."""
    ones = torch.ones(3, dtype=D)

    def step(carry: Any, x: Any) -> Any:
        return (carry[0] + by, carry[1] * 1.1 + x), None

    def run(compile: Any) -> Any:
        def over(carry: Any) -> bool:
            return float(carry[1].sum()) > 1e9 or carry[0] > 14 or carry[0] < -8

        if until:
            return tl.scan(step, (3, ones), ones.expand(30, 3), until=over, compile=compile)[0]
        return tl.while_loop(
            lambda carry: not over(carry), lambda carry: step(carry, ones)[0], (3, ones), compile=compile
        )

    (n, h), (expected, g) = run("strict"), run(False)
    assert n == expected
    torch.testing.assert_close(h, g)


def test_what_the_condition_does_is_done_as_often(capsys: pytest.CaptureFixture[str]) -> None:
    def run(compile: Any) -> Any:
        calls, seen = 0, []

        def goes_on(h: Tensor) -> bool:
            nonlocal calls
            calls += 1
            seen.append(round(h.sum().item(), 6))
            print(len(seen))
            return len(seen) < 12

        h = tl.while_loop(goes_on, lambda h: torch.sin(h @ TURN) + 0.1, torch.ones(2, 8, dtype=D), compile=compile)
        return calls, seen, capsys.readouterr().out, h

    found, expected = run("strict"), run(False)
    assert found[:3] == expected[:3]
    assert found[0] > 3
    torch.testing.assert_close(found[3], expected[3])


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_until(reverse: bool, checkpoints: Any) -> None:
    def run(compile: Any) -> Found:
        asked: list[float] = []
        xs = torch.randn(90, 4, 8, dtype=D, generator=torch.Generator(HERE).manual_seed(1)).requires_grad_()

        def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.sin(h @ TURN) + x
            return h, h * x

        def ends(h: Tensor) -> bool:
            asked.append(round(h.sum().item(), 6))
            return len(asked) == 70

        init = torch.zeros(4, 8, dtype=D)
        h, ys = tl.scan(body, init, xs, until=ends, reverse=reverse, compile=compile, checkpoints=checkpoints)
        return asked, [h.detach(), ys.detach(), *torch.autograd.grad(h.sum() + ys.sin().sum(), xs)]

    expected = run(False)
    first = run("strict")
    assert first[0][-70:] == expected[0]  # it is found out by an answer that is asked for again
    assert_same(run("strict"), expected)


def test_only_a_condition_that_answers_in_python_is_asked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        front, "PythonCondition", lambda loop, make=front.PythonCondition: made.append(loop) or make(loop)
    )

    def taken(until: Callable[[Tensor], Any]) -> int:
        return len(tl.scan(lambda h, x: (h + x, h), torch.zeros(()), torch.ones(9), until=until, compile="strict")[1])

    for _ in range(2):
        assert taken(lambda h: h > 4.5) == 5
    assert not made
    assert taken(lambda h: h.item() > 4.5) == 5
    assert made


def test_until_that_never_ends() -> None:
    xs = torch.randn(5, 3)
    for _ in range(2):
        h, ys = tl.scan(lambda h, x: (h + x, h), xs[0], xs, until=lambda h: False, compile="strict")
        assert len(ys) == 5
        torch.testing.assert_close(h, xs[0] + xs.sum(0))


def test_second_derivatives() -> None:
    def run(compile: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, 8, dtype=D).requires_grad_()
        y, _ = tl.while_loop(
            lambda c: int(c[1]) < 3,
            lambda c: (torch.sin(c[0] @ TURN), c[1] + 1),
            (x[None] * 1, torch.tensor(0)),
            compile=compile,
        )
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return [g, *torch.autograd.grad(g.sin().sum(), x)]

    for a, b in zip(run("strict"), run(False), strict=True):
        torch.testing.assert_close(a, b)


def test_arrays_and_their_length() -> None:
    def run(compile: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, 8, dtype=D).requires_grad_()

        def body(c: tuple[Tensor, tl.TensorArray]) -> tuple[Tensor, tl.TensorArray]:
            h = torch.sin(c[0] @ TURN)
            c[1].append(h)
            return h, c[1]

        def goes_on(c: tuple[Tensor, tl.TensorArray]) -> bool:
            return len(c[1]) < 70 and (not len(c[1]) or bool(c[1][-1].sum() < 100))

        h, array = tl.while_loop(goes_on, body, (x[None] * 1, tl.TensorArray()), compile=compile)
        out = array.stack()
        return [h, out, *torch.autograd.grad(h.sum() + out.square().sum(), x)]

    for a, b in zip(run("strict"), run(False), strict=True):
        torch.testing.assert_close(a, b)


def test_complex_carries_and_a_wide_product() -> None:
    w = torch.linalg.qr(torch.randn(70, 70, dtype=D))[0]

    def run(compile: Any) -> Tensor:
        z = torch.polar(torch.ones(3, 70, dtype=D), torch.linspace(0, 1, 70, dtype=D).expand(3, 70).contiguous())
        h = torch.ones(3, 70, dtype=D)
        found, h = tl.while_loop(
            lambda c: float(c[0].real.sum()) > -20.0,
            lambda c: (c[0] * torch.tensor(0.99 + 0.1j, dtype=z.dtype), torch.tanh(c[1] @ w)),
            (z, h),
            compile=compile,
        )
        return torch.cat([found.real, found.imag, h])

    torch.testing.assert_close(run(True), run(False))


def test_an_error_of_the_condition_says_the_step() -> None:
    def goes_on(c: Tensor) -> bool:
        if float(c) > 7:
            raise ValueError("too far")
        return True

    with pytest.raises(ValueError, match="too far") as caught:
        tl.while_loop(goes_on, lambda c: c + 1, torch.zeros(()), compile="strict")
    assert "raised in step 8 of while_loop" in caught.value.__notes__


def test_a_condition_that_gives_something_else() -> None:
    with pytest.raises(TypeError, match="while_loop: cond_fn must return a bool or a bool tensor"):
        tl.while_loop(
            lambda c: True if float(c) < 3 else 1,  # pyright: ignore[reportArgumentType]
            lambda c: c + 1,
            torch.zeros(()),
            compile="strict",
        )


# -- what falls back


def changes_what_the_body_reads() -> tuple[Callable[..., Any], Callable[..., Any]]:
    state = {"n": 0}

    def goes_on(h: Tensor) -> bool:
        state["n"] += 1
        return state["n"] < 6

    return goes_on, lambda h: h * 1.5 + state["n"]


def changes_it_late() -> tuple[Callable[..., Any], Callable[..., Any]]:
    state = {"n": 0}

    def goes_on(h: Tensor) -> bool:
        if h.sum().item() > 40:
            state["n"] += 1
        return state["n"] < 3

    return goes_on, lambda h: h * 1.5 + state["n"]


def keeps_the_carry() -> tuple[Callable[..., Any], Callable[..., Any]]:
    seen: list[Tensor] = []

    def goes_on(h: Tensor) -> bool:
        seen.append(h)
        return len(seen) < 5

    return goes_on, lambda h: h * 1.5


def writes_to_the_carry() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def goes_on(h: Tensor) -> bool:
        h.add_(1.0)
        return h.sum().item() < 90

    return goes_on, lambda h: h * 1.5


def writes_to_it_late() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def goes_on(h: Tensor) -> bool:
        if h.sum().item() > 40:
            h.sub_(1.0)
        return h.sum().item() < 90

    return goes_on, lambda h: h * 1.5 + 1


def draws() -> tuple[Callable[..., Any], Callable[..., Any]]:
    torch.manual_seed(4)
    return lambda h: bool(torch.rand(()) < 0.9), lambda h: h * 1.5


def draws_in_the_body() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return lambda h: bool((h < 60).all().item()), lambda h: h + torch.rand(3)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (changes_what_the_body_reads, "the body reads a dict to which an earlier step has written"),
        (changes_it_late, r"the condition sets \['n'\] of a dict"),
        (keeps_the_carry, "keeps the carry elsewhere"),
        (writes_to_the_carry, "writes to a tensor from outside"),
        (writes_to_it_late, "writes to the carry"),
        (draws, "random numbers"),
        (draws_in_the_body, "random numbers"),
    ],
)
def test_what_falls_back(make: Callable[[], Any], reason: str) -> None:
    def run(compile: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.full((3,), 2.0, requires_grad=True)
        goes_on, body = make()
        h, steps = tl.while_loop(goes_on, body, x * 1, compile=compile, return_steps=True)
        return [h, torch.tensor(steps), *torch.autograd.grad(h.sum(), x)]

    with pytest.warns(NotCompiledWarning, match=reason):
        found = run(True)
    for a, b in zip(found, run(False), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match=reason):
        run("strict")


def test_a_write_to_what_the_body_uses_after_the_first_step_is_an_error() -> None:
    scale = torch.ones(())

    def goes_on(h: Tensor) -> bool:
        if float(h) > 3:
            scale.mul_(2)
        return float(h) < 50

    with pytest.raises(RuntimeError, match="writes to a tensor that the body uses, at step 4"):
        tl.while_loop(goes_on, lambda h: h + scale, torch.zeros(()), compile=True)


def overwrites(a: tl.TensorArray) -> None:
    a[0] = a[0].flip(0) + 1


def appends_what_it_took(a: tl.TensorArray) -> None:
    last = a[-1].clone()
    a.truncate(len(a) - 1)
    a.append(last + 1)
    a.stack()


def appends(a: tl.TensorArray) -> None:
    a.append(a[0])


def looks(a: tl.TensorArray) -> None:
    assert a.stack().shape[0] == len(a)
    assert a[-1].sum() == a[len(a) - 1].sum()


@pytest.mark.parametrize("act", [overwrites, appends_what_it_took, appends, looks])
def test_a_condition_that_writes_to_an_array_at_a_late_step(act: Callable[[tl.TensorArray], None]) -> None:
    def run(compile: Any) -> list[Tensor]:
        x = torch.full((2,), 2.0, requires_grad=True)

        def goes_on(state: tuple[Tensor, tl.TensorArray]) -> bool:
            if 4 <= len(state[1]) < 8:
                act(state[1])
            return state[0].sum().item() < 40

        def body(state: tuple[Tensor, tl.TensorArray]) -> tuple[Tensor, tl.TensorArray]:
            return state[0].flip(0) + x + state[1][0], state[1].append(state[0])

        h, a = tl.while_loop(goes_on, body, (x * 1, tl.TensorArray().append(x * 3)), compile=compile)
        found = torch.cat([h, a.stack().flatten()])
        return [found, *torch.autograd.grad(found.square().sum(), x)]

    if act is looks:
        found = run("strict")
    else:
        with pytest.warns(NotCompiledWarning, match="the condition writes to a TensorArray in the carry"):
            found = run(True)
    torch.testing.assert_close(found, run(False))
