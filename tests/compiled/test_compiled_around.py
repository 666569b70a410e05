"""What is around a loop: "strict" raises whatever keeps it from being compiled, True says so; memory tools see it."""

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import tensorloop as tl
from tensorloop.loop.compiled import front
from tensorloop.loop.compiled.front import NotCompiledWarning

D = torch.float64
XS = torch.linspace(-1, 1, 15, dtype=D).reshape(5, 3)


def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h + x)
    return h, h


def loop(compile: Any, xs: Tensor = XS) -> Tensor:
    return tl.scan(body, xs[0] * 0, xs, compile=compile)[1].sum()


def under_vmap(compile: Any) -> Any:
    return torch.func.vmap(lambda x: loop(compile, x))(torch.stack([XS, XS]))


def under_grad(compile: Any) -> Any:
    return torch.func.grad(lambda x: loop(compile, x))(XS)


def in_forward_mode(compile: Any) -> Any:
    with forward_ad.dual_level():
        out = loop(compile, forward_ad.make_dual(XS, torch.ones_like(XS)))
        return forward_ad.unpack_dual(out).tangent


def counted(compile: Any) -> Any:
    with FlopCounterMode(display=False):
        return loop(compile)


def in_a_step(compile: Any) -> Any:
    def outer(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return tl.scan(body, h, XS, compile=compile)[0] * x, None

    return tl.scan(outer, torch.ones(3, dtype=D, requires_grad=True), XS, checkpoints=2)[0].detach()


AROUND = [
    (under_vmap, r"a torch\.func transform \(grad, vmap, jvp \.\.\.\) is around the loop"),
    (under_grad, r"a torch\.func transform"),
    (in_forward_mode, "forward-mode differentiation is on"),
    (counted, "_FlopCounterMode is around the loop"),
    (in_a_step, "it runs in a step of tl.fixed_point, or of an eager loop with checkpoints"),
]


@pytest.mark.parametrize(("run", "reason"), AROUND, ids=[run.__name__ for run, _ in AROUND])
def test_what_is_around_is_named(run: Callable[[Any], Any], reason: str):
    expected = run(False)
    with pytest.warns(NotCompiledWarning, match=f"^scan: not compiled: {reason}.*Cure: [^ ]") as told:
        found = run(True)
    assert str(told[0].message).count("test_compiled_around.py:") == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=f"^scan: not compiled: {reason}"):
        run("strict")


def test_explain_says_what_is_around():
    with forward_ad.dual_level():
        explanation = tl.explain(body, torch.zeros(3, dtype=D), XS)
    assert not explanation.compiled
    assert "forward-mode differentiation is on" in str(explanation)


def grows(compile: Any, h: Tensor) -> Any:
    def step(s: Any) -> Any:
        return s[0] + h, s[1].append(s[0])

    h, array = tl.while_loop(lambda s: s[0].sum() < 50, step, (h, tl.TensorArray()), compile=compile, max_steps=9)
    return h, array.stack()


def writes(compile: Any, h: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        h = h.clone()
        h[0] = x[1]
        return h * 2, h

    return tl.scan(step, h, XS, compile=compile)


@pytest.mark.parametrize("run", [lambda compile, h: loop(compile, XS * h), grows, writes])
def test_inference_mode_takes_compiled_loops(run: Any):
    with torch.inference_mode():
        for h in (torch.ones(3, dtype=D).abs(), XS[0].detach()):  # an inference tensor, an ordinary one
            expected = run(False, h)
            for _ in range(2):
                found = run("strict", h)
                torch.testing.assert_close(found, expected)
            assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("compile", [True, "strict"])
def test_a_loop_without_steps_is_no_matter(compile: Any):
    with forward_ad.dual_level():
        h, ys = tl.scan(body, torch.zeros(3, dtype=D), XS[:0], compile=compile)
    assert ys.shape == (0, 3)
    assert torch.equal(h, torch.zeros(3, dtype=D))
    h = tl.while_loop(lambda h: h.sum() > 0, lambda h: h - 1, torch.zeros(3), compile=compile)
    assert torch.equal(h, torch.zeros(3))


@pytest.mark.parametrize("compile", [True, "strict"])
def test_a_loop_in_a_compiled_step_is_a_part_of_it(compile: Any):
    def outer(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return tl.scan(body, h, XS, compile=compile)[0] * x, None

    def run(compile: Any) -> Tensor:
        return tl.scan(outer, torch.ones(3, dtype=D), XS, compile=compile)[0]

    torch.testing.assert_close(run("strict"), run(False))


def slices_and_ys(h: Tensor, x: Tensor) -> Any:
    h, ys = tl.scan(lambda h, z: (torch.tanh(h * WEIGHT + z), h * z), h, x)
    return h, ys


def backwards(h: Tensor, x: Tensor) -> Any:
    h, ys = tl.scan(lambda h, z: (torch.tanh(h * WEIGHT + z), h * z), h, x, reverse=True)
    return h, ys.sum(0)


def each_slice(h: Tensor, x: Tensor) -> Any:
    return torch.tanh(h + tl.map(lambda z: z * WEIGHT, x).sum(0)), None


def together(h: Tensor, x: Tensor) -> Any:
    return torch.tanh(h * WEIGHT + tl.associative_scan(lambda a, b: a * b, torch.tanh(x))[-1]), h


def changes_what_it_gave(h: Tensor, x: Tensor) -> Any:
    def step(c: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        c = c * WEIGHT.detach()
        y = c * 1
        c += z
        return c, y

    return tl.scan(step, h, x)[0] * WEIGHT, h


WEIGHT = torch.tensor([0.5, -0.3, 0.9], dtype=D, requires_grad=True)


@pytest.mark.parametrize("outer", [slices_and_ys, backwards, each_slice, together, changes_what_it_gave])
@pytest.mark.parametrize("grad", [True, False])
def test_loops_with_slices_and_ys_in_a_compiled_step(outer: Any, grad: bool):
    xs = torch.sin(torch.arange(60.0, dtype=D)).reshape(5, 4, 3).requires_grad_()
    init = torch.cos(torch.arange(3.0, dtype=D)).requires_grad_()

    def run(compile: Any) -> list[Tensor]:
        with torch.set_grad_enabled(grad):
            h, ys = tl.scan(outer, init, xs, compile=compile)
        out = [h] if ys is None else [h, ys]
        total = torch.stack([x.sin().sum() for x in out]).sum()
        return [*out, *(torch.autograd.grad(total, (xs, init, WEIGHT)) if grad else ())]

    torch.testing.assert_close(run("strict"), run(False))
    torch.testing.assert_close(run("strict"), run(False))  # known at a glance


def carries_a_weight(compile: Any) -> Tensor:
    w = torch.arange(3.0, dtype=D)
    return tl.fori_loop(0, 4, lambda i, s: (w, s[1]), (XS[0], XS[0]), compile=compile)[0]


def test_a_step_without_operations_is_compiled():
    torch.testing.assert_close(carries_a_weight("strict"), carries_a_weight(False), rtol=0, atol=0)


# -- errors of the look


def fails_in_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_twice(*args: Any, **options: Any) -> Any:
        raise LookupError("a fault of our own")

    monkeypatch.setattr(front, "look_twice", look_twice)


@pytest.mark.usefixtures("fresh_plans")
def test_an_error_of_the_look_is_told_where_the_eager_loop_has_none(monkeypatch: pytest.MonkeyPatch):
    fails_in_the_look(monkeypatch)
    said = "looking at its step raised LookupError: a fault of our own"
    with pytest.warns(NotCompiledWarning, match=f"^scan: not compiled: {said}"):
        found = loop(True)
    torch.testing.assert_close(found, loop(False), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=f"^scan: not compiled: {said}.*; with compile=True it would"):
        loop("strict")
    explanation = tl.explain(body, torch.zeros(3, dtype=D), XS)
    assert not explanation.compiled
    assert said in str(explanation)


@pytest.mark.parametrize("compile", [False, True, "strict"])
def test_an_error_of_the_body_is_the_eager_loops(compile: Any):
    def wrong(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return h @ torch.ones(7, dtype=D), None

    with pytest.raises(RuntimeError, match="size") as met:
        tl.scan(wrong, torch.ones(3, dtype=D), XS, compile=compile)
    assert met.value.__notes__ == ["raised in step 0 of scan"]


def differentiates(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
    (g,) = torch.autograd.grad((h * x).square().sum(), h, create_graph=True)
    return h - 0.1 * g, None


def differentiates_backward(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
    w = h.detach().requires_grad_()
    torch.autograd.backward([(w * x).square().sum()])
    assert w.grad is not None
    return h - 0.1 * w.grad, None


def test_a_backward_pass_in_the_body_is_refused_by_name():
    def run(compile: Any) -> Tensor:
        w = torch.ones(3, dtype=D, requires_grad=True)
        return tl.scan(differentiates_backward, w, XS, compile=compile)[0].detach()

    reason = r"^scan: not compiled: the body runs a backward pass \(torch\.autograd\.backward"
    with pytest.warns(NotCompiledWarning, match=reason):
        found = run(True)
    torch.testing.assert_close(found, run(False), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=reason + r".*Cure: torch\.func\.grad of a function compiles"):
        run("strict")


def test_the_cure_for_gradients_compiles():
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return h - 0.1 * torch.func.grad(lambda h: (h * x).square().sum())(h), None

    def run(step: Any, compile: Any) -> list[Tensor]:
        w = torch.ones(3, dtype=D, requires_grad=True)
        out = tl.scan(step, w, XS, compile=compile)[0]
        return [out.detach(), *torch.autograd.grad(out.sum(), w)]

    torch.testing.assert_close(run(step, "strict"), run(differentiates, False))
    torch.testing.assert_close(run(differentiates, "strict"), run(differentiates, False))


# -- memory tools measure the loop that runs

LONG = torch.linspace(-1, 1, 6400).reshape(200, 4, 8)
W = torch.linspace(-0.3, 0.3, 64).reshape(8, 8).requires_grad_()


def rnn(compile: Any, xs: Tensor = LONG) -> Tensor:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ W + x)
        return h, h

    return tl.scan(step, torch.zeros(4, 8), xs, compile=compile)[1]


def test_saved_bytes_are_those_of_the_compiled_loop():
    states = 201 * 4 * 8 * 4  # before the first step and after each
    found, eager = (tl.memory.saved(lambda c=c: rnn(c).square().sum()) for c in ("strict", False))
    assert found.bytes == states + 4 * 8 * 4  # and init
    assert found.seen_by_hooks == found.bytes
    assert eager.bytes > found.bytes * 1.9  # states and ys, apart


def test_every_tool_sees_the_compiled_loop():
    rnn("strict")
    size = 201 * 4 * 8 * 4 + 4 * 8 * 4
    assert tl.memory.saved_residuals(lambda: rnn("strict").square().sum()).bytes == size
    with tl.memory.LiveStorages() as live:
        out = rnn("strict")
    assert live.bytes == size  # ys are a view of the states
    with tl.memory.track() as tracker:
        loss = rnn("strict").square().sum()
        held = tracker.live
        loss.backward()
    assert size <= held <= size + 64
    del out, loss
    peak = tl.memory.peak(lambda: rnn("strict").square().sum().backward())
    assert 2 * size < peak < 4 * size < tl.memory.peak(lambda: rnn(False).square().sum().backward()) * 2
    found = tl.memory.growth(lambda T: lambda: rnn("strict", LONG[:T]).square().sum(), (50, 100, 200))
    assert 0.97 < found.exponent < 1.03


def test_making_a_plan_does_not_count():
    def run(scale: float) -> Tensor:
        return tl.scan(lambda h, x: ((h * scale + x).tanh(), None), W, torch.ones(9, 8), compile="strict")[0]

    run(0.5)
    known = tl.memory.peak(lambda: run(0.5))
    new = tl.memory.peak(lambda: run(0.25))
    assert new <= 2 * known


@pytest.mark.usefixtures("fresh_plans")
def test_memory_tools_see_arrays_and_open_ends():
    def run() -> Tensor:
        def step(s: Any) -> Any:
            h, array = s
            array.append(torch.tanh(h @ W))
            return torch.tanh(h @ W), array

        return tl.while_loop(lambda s: s[0].sum() < 1e9, step, (LONG[0], tl.TensorArray()), max_steps=40, compile=True)[
            1
        ].stack()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        found = tl.memory.saved(lambda: run().square().sum())
    assert found.bytes >= 2 * 40 * 4 * 8 * 4


def test_a_mode_beside_a_memory_tool_is_named():
    class Mine(FlopCounterMode):
        pass

    with tl.memory.LiveStorages(), contextlib.ExitStack() as stack:
        stack.enter_context(Mine(display=False))
        with pytest.warns(NotCompiledWarning, match=re.escape("_FlopCounterMode is around the loop")):
            loop(True)
