"""Operations that machine code has no form of run as torch's own between native pieces of a step."""

import functools
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import export
from torch.nn import functional

import tensorloop as tl
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run.plan import plans
from tests.support.compiled_cases import check_equal
from tests.support.devices import HERE

D = torch.float64
LIBRARY = torch.library.Library("calls_out", "DEF")
calls: list[Tensor] = []


def operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] = torch.empty_like) -> Any:
    name = LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"calls_out::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.calls_out, name).default


def _sees(x: Tensor) -> Tensor:
    calls.append(x.clone())
    return x.sin()


def _fails(x: Tensor, at: float) -> Tensor:
    if x.flatten()[0] == at:
        raise ArithmeticError("no such number")
    return x.clone()


def _is_interrupted(x: Tensor, at: float) -> Tensor:
    if x.flatten()[0] == at:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)
    return x.clone()


def _lies(x: Tensor) -> Tensor:
    return x[: 2 if x[0] < 3 else 1].clone()


SEES = operator("sees(Tensor x) -> Tensor", _sees)
FAILS = operator("fails(Tensor x, float at) -> Tensor", _fails, lambda x, at: torch.empty_like(x))
INTERRUPTED = operator("interrupted(Tensor x, float at) -> Tensor", _is_interrupted, lambda x, at: torch.empty_like(x))
LIES = operator("lies(Tensor x) -> Tensor", _lies, lambda x: x.new_empty(2))


def grid(h: Tensor) -> Tensor:
    places = torch.stack([h, h.flip(0)], -1)[None].clamp(-1, 1)
    return functional.grid_sample(h[None, None], places, align_corners=False)[0, 0]


BODIES: dict[str, Callable[[Tensor], Tensor]] = {  # of a (6, 6) tensor
    "distances": lambda h: torch.cdist(h, h.sin() + 1) @ h * 0.1,
    "a table, read between its places": grid,
    "singular values": lambda h: torch.linalg.svd(h)[1] * h.T * 0.1,
    "complex": lambda h: torch.fft.fft2(h).abs() * 0.1,
    "a complex product": lambda h: torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft(h.T).conj(), n=6) * 0.3,
    "one function": lambda h: torch.polygamma(1, h.abs() + 1),
    "of several dtypes": lambda h: torch.histc(h.detach(), 6, -2, 2) * h + (torch.mode(h)[1] % 2)[:, None] * h,
}


@functools.cache
def has_second_derivative(f: Callable[[Tensor], Tensor]) -> bool:
    """In torch: distances have none, and what is read from a table has none in 2.11."""
    h = torch.randn(6, 6, dtype=D, requires_grad=True)
    (first,) = torch.autograd.grad(f(h.sin()).sum(), h, create_graph=True)
    try:
        torch.autograd.grad(first.square().sum(), h)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        return False
    return True


def outcome(f: Callable[[Tensor], Tensor], dtype: torch.dtype, compile: Any, **options: Any) -> list[Tensor]:
    """The last carry, ys, gradients, and gradients of those."""
    generator = torch.Generator(HERE).manual_seed(2)
    h, xs = ((torch.randn(*s, 6, 6, generator=generator) * 0.5).to(dtype).requires_grad_() for s in ((), (5,)))
    gain = torch.linspace(0.5, 1.5, 6).to(dtype).requires_grad_()

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(f(h * gain + x) + 0.3 * x)
        return h, h.cos()

    last, ys = tl.scan(body, h, xs, compile=compile, **options)
    twice = has_second_derivative(f)
    grads = torch.autograd.grad(last.square().sum() + ys.sin().sum(), [h, xs, gain], create_graph=twice)
    again = torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), [h, xs, gain]) if twice else ()
    return [last, ys, *grads, *again]


WAYS: dict[str, dict[str, Any]] = {"at once": {}, "checkpoints": {"checkpoints": 2}, "reverse": {"reverse": True}}
SOME = ("checkpoints-distances", "reverse-complex")


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.extended(*(f"[{w}-{n}]" for w in [*WAYS][1:] for n in BODIES if f"{w}-{n}" not in SOME))
def test_values_gradients_and_second_derivatives_are_the_eager_loops(name: str, way: str):
    f, options = BODIES[name], WAYS[way]
    close = 1e-8 if name == "one function" else 1e-9  # torch's own trigamma is 5e-10 off what mpmath gives, ours 1e-15
    check_equal(outcome(f, D, "strict", **options), outcome(f, D, False, **options), close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_of_less_bits(dtype: torch.dtype):
    found, expected = (outcome(BODIES["one function"], dtype, compile) for compile in ("strict", False))
    check_equal(found, expected, 1e-4 if dtype is torch.float32 else 0.1)


def test_both_loops_are_native_and_explain_says_what_torch_does():
    def body(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(grid(torch.cdist(h, h) + x)), None

    h, xs = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, 4)
    text = str(tl.explain(body, h, xs))
    forward, backward = text.split("\nbackward:")
    assert "forward: one native function, by one thread\n" in forward
    assert "of these by torch, between native pieces of each step:\n    _cdist_forward [4, 4]\n" in forward
    assert "_cdist_backward [4, 4]" in backward.split("of these by torch")[1]
    assert "grid_sampler_2d_backward" in backward.split("of these by torch")[1]


def test_what_does_not_depend_on_the_carry_is_done_before_the_loop():
    def body(h: Tensor, x: Tensor) -> Any:
        return torch.sin(h + torch.special.bessel_j0(x)), None

    h, xs = torch.randn(4), torch.randn(3, 4)
    before = str(tl.explain(body, h, xs)).split("before the loop")[1].split("in the loop")[0]
    assert "special_bessel_j0 [4]" in before
    check_equal([tl.scan(body, h, xs, compile="strict")[0]], [tl.scan(body, h, xs)[0]], 1e-6)


@pytest.mark.parametrize("ask", ["a tensor", "Python"])
@pytest.mark.parametrize("checkpoints", [None, 3])
def test_loops_of_unknown_length(ask: str, checkpoints: int | None):
    def going(state: tuple[Tensor, Tensor]) -> Any:
        more = state[1] < 40
        return more if ask == "a tensor" else bool(more)

    def run(compile: Any) -> list[Tensor]:
        h = torch.linspace(0, 1, 9, dtype=D).view(3, 3).requires_grad_()

        def body(state: tuple[Tensor, Tensor]) -> Any:
            h, n = state
            return (torch.sin(h + 0.3 * torch.cdist(h, h + 1)), n + 1)

        last, n = tl.while_loop(going, body, (h, torch.tensor(0)), compile=compile, checkpoints=checkpoints)
        return [last, n, *torch.autograd.grad(last.sum(), h)]

    check_equal(run("strict"), run(False), 1e-9)


def test_each_step_calls_once_with_its_own_numbers():
    def body(h: Tensor, x: Tensor) -> Any:
        return SEES(h) + x, h

    with torch.no_grad():
        h, xs = torch.ones(3), torch.arange(6.0).view(2, 3)
        tl.scan(body, h, xs, compile="strict")
        calls.clear()
        last, ys = tl.scan(body, h, xs, compile="strict")
    assert len(calls) == 3  # of which one is the look at the first step
    check_equal(calls[1:], list(ys), 1e-7)
    check_equal([last], [ys[1].sin() + xs[1]], 1e-7)


def counting(operation: Any) -> Callable[[Tensor, Any], Any]:
    return lambda h, _: (operation(h, 500.0) + 1, None)


@pytest.mark.parametrize("compile", [False, "strict"])
def test_an_error_is_the_users_with_its_step(compile: Any):
    with torch.no_grad():
        for checkpoints in (None, 4):
            with pytest.raises(ArithmeticError, match="no such number") as raised:
                tl.scan(counting(FAILS), torch.zeros(2), None, 1000, compile=compile, checkpoints=checkpoints)
            assert raised.value.__notes__ == ["raised in step 500 of scan"]
        with pytest.raises(ArithmeticError, match="no such number") as raised:
            tl.while_loop(lambda h: h[0] < 1000, lambda h: FAILS(h, 500.0) + 1, torch.zeros(2), compile=compile)
        assert raised.value.__notes__ == ["raised in step 500 of while_loop"]
        last, _ = tl.scan(counting(FAILS), torch.zeros(2), None, 400, compile=compile)
    assert last.tolist() == [400, 400]


@torch.library.custom_op("calls_out::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    """An operator with a gradient in the registry."""
    return torch.from_numpy(x.numpy(force=True) * by)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.by = inputs[1]


def _scaled_backward(ctx: Any, grad: Tensor) -> Any:
    (x,) = ctx.saved_tensors
    return grad * ctx.by + FAILS(x, 6.0).detach() * 0, None


scaled.register_fake(lambda x, by: torch.empty_like(x))
scaled.register_autograd(_scaled_backward, setup_context=_keep)


def test_an_operator_of_the_users_has_its_registered_gradient():
    f = lambda h: scaled(h, 0.5) * h  # noqa: E731
    check_equal(outcome(f, D, "strict"), outcome(f, D, False), 1e-9)


@pytest.mark.parametrize("reverse", [False, True])
def test_an_error_in_the_backward_has_the_step_too(reverse: bool):
    h, xs = torch.zeros(2, requires_grad=True), torch.ones(20, 2)
    last, _ = tl.scan(lambda h, x: (scaled(h + x, 1.0), None), h, xs, compile="strict", reverse=reverse)
    with pytest.raises(ArithmeticError, match="no such number") as raised:
        last.sum().backward()
    assert raised.value.__notes__ == ["raised in the backward of step 5 of scan"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("compile", [False, "strict"])
def test_an_interrupt_ends_the_loop_and_leaves_nothing_behind(compile: Any):
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt) as raised:
                tl.scan(counting(INTERRUPTED), torch.zeros(2), None, 1000, compile=compile)
            assert raised.value.__notes__ == ["raised in step 500 of scan"]
        last, _ = tl.scan(counting(INTERRUPTED), torch.zeros(2), None, 400, compile=compile)
    assert last.tolist() == [400, 400]


def test_threads_of_python_run_one_plan_at_once():
    h, xs = torch.randn(3, 3, dtype=D), torch.randn(200, 3, 3, dtype=D)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.sin(torch.cdist(h, h + x) + x), None

    starts = [h + n for n in range(4)]
    expected = [tl.scan(body, h, xs)[0] for h in starts]
    tl.scan(body, h, xs, compile="strict")
    found: dict[int, list[Tensor]] = {n: [] for n in range(4)}

    def work(n: int) -> None:
        for _ in range(3):
            found[n].append(tl.scan(body, starts[n], xs, compile="strict")[0])

    team = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for one in team:
        one.start()
    for one in team:
        one.join()
    for n in range(4):
        check_equal(found[n], [expected[n]] * 3, 1e-12)


def test_no_tensor_of_a_caller_is_held():
    def run(at: float) -> list[weakref.ref[Tensor]]:
        weight, xs = torch.ones(2, 2), torch.ones(9, 2)
        held = [weakref.ref(weight), weakref.ref(xs)]

        def body(h: Tensor, x: Tensor) -> Any:
            return FAILS(h + 0 * torch.cdist(weight, h[None])[:, 0], at) + x, None

        with torch.no_grad():
            tl.scan(body, xs[0], xs, compile="strict")
        return held

    held = run(-1.0)
    with pytest.raises(ArithmeticError):
        run(5.0)
    gc.collect()
    assert [x() for x in held] == [None, None]


def test_a_result_that_is_not_what_was_said_leaves_the_loop_to_torch():
    def body(h: Tensor, x: Tensor) -> Any:
        return h + LIES(h + x).sum(), None

    with torch.no_grad(), pytest.warns(NotCompiledWarning, match=r"lies.* gives .*shape \(1,\).*has .*shape \(2,\)"):
        last, _ = tl.scan(body, torch.zeros(2), torch.ones(4, 2), compile=True)
    check_equal([last], [tl.scan(body, torch.zeros(2), torch.ones(4, 2))[0]], 0)


@pytest.mark.parametrize("how", [(1, False), (3, False), (8, True)], ids=["one", "some", "put back"])
@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.extended("2-one", "2-some")
def test_multinomial_draws_the_eager_loops_numbers_and_chooses_as_torch(how: tuple[int, bool], checkpoints: int | None):
    def run(compile: Any) -> list[Tensor]:
        torch.manual_seed(0)
        h, xs = torch.randn(4, 6, dtype=D).requires_grad_(), torch.randn(9, 4, 6, dtype=D)

        def body(h: Tensor, x: Tensor) -> Any:
            chosen = torch.multinomial((h + x).softmax(-1), *how)
            h = torch.sin(h + x + torch.randn(())) + h.gather(-1, chosen).sum(-1, keepdim=True) * 0.1
            return h, chosen

        last, chosen = tl.scan(body, h, xs, compile=compile, checkpoints=checkpoints)
        return [last, chosen, *torch.autograd.grad(last.square().sum(), h), torch.rand(3)]

    check_equal(run("strict"), run(False), 1e-9)


@pytest.mark.parametrize("number", [-1.0, float("nan"), 0.0])
def test_what_are_no_probabilities_is_an_error_with_the_step(number: float):
    said = []
    for compile in (False, "strict"):
        xs = torch.tensor([1, 1, number, 1])
        with pytest.raises(RuntimeError) as raised:
            tl.scan(lambda h, x: (h + torch.multinomial(x + 0 * h, 1), None), torch.zeros(3), xs, compile=compile)
        said.append((str(raised.value), raised.value.__notes__))
    assert said[0] == said[1]


def test_what_draws_numbers_or_has_no_fixed_shape_is_no_call():
    for operation in (torch.poisson, lambda h: h.masked_select(h > 0).sum()):
        explanation = tl.explain(lambda h, x, f=operation: (f(h.abs()) + x, None), torch.ones(3), torch.ones(2, 3))
        assert not explanation.compiled


def test_a_loop_with_calls_in_an_exported_graph():
    class Net(torch.nn.Module):
        def forward(self, h: Tensor, xs: Tensor) -> Tensor:
            """Runs a compiled loop."""
            return tl.scan(lambda h, x: (torch.sin(torch.cdist(h, h + x)), None), h, xs, compile=True)[0]

    h, xs = torch.randn(3, 3, dtype=D), torch.randn(4, 3, 3, dtype=D)
    program = export(Net(), (h, xs))
    assert [n for n in program.graph.nodes if n.target is torch.ops.tensorloop.loop.default]
    expected = tl.scan(lambda h, x: (torch.sin(torch.cdist(h, h + x)), None), h, xs)[0]
    check_equal([program.module()(h, xs)], [expected], 1e-12)


def test_no_step_runs_in_torch_for_a_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(EagerCore, "__call__", lambda *_: pytest.fail("a step in torch"))
    plans.clear()
    outcome(BODIES["complex"], D, "strict")
