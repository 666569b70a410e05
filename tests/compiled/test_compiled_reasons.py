"""Why a loop is not compiled: a reason names what the user wrote, the line, and a cure; what has none is compiled."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import Unsupported
from torch.nn import functional

import tensorloop as tl
from tensorloop.compiler.refused import Refused
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.in_graphs.changing_floats import use_as_tensors

D = torch.float64
XS = torch.linspace(-1, 1, 20, dtype=D).reshape(5, 4)
Body = Callable[[Tensor, Tensor], Any]


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g / (1 + ctx.saved_tensors[0].abs()) ** 2


class SpikeInAutocast(Spike):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Spike.forward(ctx, v)


class SpikeForTransforms(torch.autograd.Function):
    @staticmethod
    def forward(v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (v > 0).to(v.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Spike.backward(ctx, g)


def reads(h: Tensor, x: Tensor) -> Any:
    return h * h.sum().item() + x, None


def makes_a_float(h: Tensor, x: Tensor) -> Any:
    return h * float(h.detach().sum()) + x, None


def compares(h: Tensor, x: Tensor) -> Any:
    return h + float(torch.equal(h, x)), None


def nearly_compares(h: Tensor, x: Tensor) -> Any:
    return h + float(torch.allclose(h, x)), None


def checkpointed_inside(h: Tensor, x: Tensor) -> Any:
    return tl.scan(lambda c, y: (torch.tanh(c + y), None), h, XS, checkpoints=2)[0] + x, None


def spikes(h: Tensor, x: Tensor) -> Any:
    return h * 0.9 + x, Spike.apply(h)


def spikes_in_autocast(h: Tensor, x: Tensor) -> Any:
    return h * 0.9 + x, SpikeInAutocast.apply(h)


def spikes_for_transforms(h: Tensor, x: Tensor) -> Any:
    return h * 0.9 + x, SpikeForTransforms.apply(h)


def similar(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h) + functional.cosine_similarity(h, x, dim=0), h


def without_gradients(h: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        scale = h * 2
    return h + x * scale, scale


def draws(h: Tensor, x: Tensor) -> Any:
    return h + torch.poisson(x.detach().abs()), None


def takes_what_is_positive(h: Tensor, x: Tensor) -> Any:
    return h + x[x > 0].sum(), None


def normalises(h: Tensor, x: Tensor) -> Any:
    return h + functional.batch_norm(x[:, None], MEANS, MEANS + 1, training=True).sum(1), None


def normalises_each(h: Tensor, x: Tensor) -> Any:
    return h + functional.instance_norm(x[None, None], running_mean=MEANS, running_var=MEANS + 1)[0, 0], None


MEANS = torch.zeros(1, dtype=D)


def looks_up(h: Tensor, x: Tensor) -> Any:
    return h + TABLE[x.sum().long().clamp(0, 3)], None


TABLE = torch.arange(4.0, dtype=D)
REASONS = [
    (looks_up, "indexing by a tensor of no dims reads a value in Python"),
    (normalises, r"batch_norm\(\) updates its running statistics"),
    (normalises_each, r"instance_norm\(\) updates its running statistics"),
    (reads, r"\.item\(\) reads a value in Python"),
    (makes_a_float, r"float\(\) of a tensor reads a value in Python"),
    (compares, r"equal\(\) reads a value in Python"),
    (nearly_compares, r"allclose\(\) reads a value in Python"),
    (checkpointed_inside, r"the body runs a loop with checkpoints"),
    (draws, r"poisson\(\) draws random numbers"),
    (takes_what_is_positive, r"index by a mask has a result whose shape depends on values"),
]


@pytest.mark.parametrize(("body", "reason"), REASONS, ids=[body.__name__ for body, _ in REASONS])
def test_a_reason_names_the_call_the_line_and_a_cure(body: Body, reason: str):
    init = torch.full((4,), 0.5, dtype=D, requires_grad=True)
    line = body.__code__.co_firstlineno
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tl.scan(body, init, XS, compile=True)
    (warning,) = told  # and no other after it
    assert warning.category is NotCompiledWarning
    assert line < warning.lineno <= line + 2
    place = rf"\(.*test_compiled_reasons\.py:{warning.lineno}\)"
    with pytest.raises(RuntimeError, match=f"^scan: not compiled: {reason}.*{place}.* Cure: [^ ].{{10}}"):
        tl.scan(body, init, XS, compile="strict")


def test_the_cure_for_spikes_gives_the_same():
    def cured(h: Tensor, x: Tensor) -> Any:
        s = h / (1 + h.abs())  # whose derivative is that of `Spike`
        y = (h > 0).to(h.dtype)
        return h * 0.9 + x, y + (s - s.detach())

    def run(body: Body, compile: Any) -> list[Tensor]:
        init = torch.full((4,), 0.5, dtype=D, requires_grad=True)
        ys = tl.scan(body, init, XS, compile=compile)[1]
        return [ys.detach(), *torch.autograd.grad(ys.sum(), init)]

    torch.testing.assert_close(run(cured, "strict"), run(spikes, False))


def pads_in_a_circle(h: Tensor, x: Tensor) -> Any:
    wide = functional.pad(h[None, None], (1, 1), mode="circular")[0, 0]
    return torch.tanh(wide[2:] - wide[:-2] + x), wide


def fills_an_empty_one(h: Tensor, x: Tensor) -> Any:
    made = torch.empty(8, dtype=D)
    made[:4] = h * x
    made[4:] = h - x
    return torch.tanh(made[:4] + made[4:]), made


def gives_nothing(h: Tensor, x: Tensor) -> Any:
    return h * 0.5 + x, h.new_empty(0)


def to_integers_by_halves(h: Tensor, x: Tensor) -> Any:
    return h * 0.5 + x, (h * 100).half().long()


def inverse_hyperbolic(h: Tensor, x: Tensor) -> Any:
    return h * 0.5, torch.atanh(x * 0.5) + torch.acosh(2.5 + x) + torch.asinh(h)


def says_so_to_a_profiler(h: Tensor, x: Tensor) -> Any:
    with torch.profiler.record_function("step"):
        return torch.sin(h) + x, h * x


COMPILED = [says_so_to_a_profiler, spikes, spikes_in_autocast, spikes_for_transforms, similar, without_gradients]
COMPILED += [pads_in_a_circle, fills_an_empty_one, gives_nothing, to_integers_by_halves, inverse_hyperbolic]


@pytest.mark.parametrize("body", COMPILED)
def test_what_has_no_reason_to_fall_back_is_compiled(body: Body):
    def run(compile: Any) -> list[Tensor]:
        init = torch.linspace(0.1, 0.9, 4, dtype=D).requires_grad_()
        xs = XS.clone().requires_grad_()
        h, y = tl.scan(body, init, xs, compile=compile)
        total = h.sum() + (y.square().sum() if y.is_floating_point() else 0)
        return [h, y, *torch.autograd.grad(total, (init, xs))]

    torch.testing.assert_close(run("strict"), run(False))


def test_memory_that_nobody_fills_is_no_result():
    def body(h: Tensor, x: Tensor) -> Any:
        made = torch.empty(4, dtype=D)
        return h + x, made.view(2, 2)  # the last operation gives a part of it

    with pytest.raises(RuntimeError, match=r"made by empty\(\) is filled by no operation"):
        tl.scan(body, XS[0], XS, compile="strict")


@pytest.mark.parametrize("base", [0, 1, 2, -1.5, 2j, 1 + 1j])
def test_a_number_to_a_complex_power(base: complex):
    def run(compile: Any) -> list[Tensor]:
        h = torch.tensor([1 + 1j, 0.5 - 0.2j, 2, 0.1j + 0.3], dtype=torch.complex128, requires_grad=True)
        last, ys = tl.scan(lambda h, x: (h * 0.9 + x, base**h), h, XS * 0.1 + 0.2, compile=compile)
        grads = torch.autograd.grad(ys.abs().sum() + last.abs().sum(), h) if base else ()
        return [last, ys, *grads]

    torch.testing.assert_close(run("strict"), run(False))


STOP = torch.tensor(True)


@pytest.mark.parametrize(
    "stop", [lambda c: STOP, lambda c: ~STOP, lambda c: torch.tensor(False), lambda c: STOP & STOP]
)
def test_until_may_depend_on_nothing_that_is_carried(stop: Any):
    def run(compile: Any) -> Any:
        init = torch.full((4,), 0.5, dtype=D, requires_grad=True)
        last, ys = tl.scan(lambda h, x: (torch.sin(h) + x, h), init, XS, until=stop, compile=compile)
        return [last, ys, *torch.autograd.grad(last.sum() + ys.sum(), init)]

    torch.testing.assert_close(run("strict"), run(False))


@pytest.mark.parametrize("go", [lambda h: STOP, lambda h: torch.tensor(True)])
def test_a_condition_may_depend_on_nothing_that_is_carried(go: Any):
    def run(compile: Any) -> Any:
        init = torch.full((4,), 0.5, dtype=D, requires_grad=True)
        last = tl.while_loop(go, torch.sin, init, max_steps=3, compile=compile)
        return [last, *torch.autograd.grad(last.sum(), init)]

    torch.testing.assert_close(run("strict"), run(False))


def test_a_condition_without_a_carry_is_refused():
    def run(compile: Any) -> Any:
        return tl.scan(lambda c, x: ((), x * 2), (), XS, until=lambda c: STOP, compile=compile)[1]

    with pytest.raises(RuntimeError, match=r"a condition ends a loop that carries no tensor .* Cure: put what"):
        run("strict")
    with pytest.warns(NotCompiledWarning, match="carries no tensor"):
        found = run(True)
    torch.testing.assert_close(found, run(False))


# -- floats that change between calls of a compiled module


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.w = 0.5, nn.Parameter(torch.ones(4, dtype=D))

    def forward(self, xs: Tensor) -> Tensor:
        def body(h: Tensor, x: Tensor) -> Any:
            return torch.tanh(h * self.scale + x * self.w), (h - self.scale) / self.scale

        return tl.scan(body, torch.zeros(4, dtype=D), xs, compile=True)[1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_float_attribute_may_change_between_calls_of_a_compiled_module(backend: str):
    net = Scaled()
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    for scale in (0.5, 0.25, 0.125, -0.75):
        net.scale = scale
        found, expected = ((y := call(XS), *torch.autograd.grad(y.sum(), net.w)) for call in (compiled, net))
        torch.testing.assert_close(found, expected)


def test_a_float_that_changes_and_is_no_factor_is_named():
    class Power(Scaled):
        def forward(self, xs: Tensor) -> Tensor:
            return tl.scan(lambda h, x: (h, x**self.scale), xs[0], xs, compile=True)[1]

    net = Power()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    compiled(XS)
    net.scale = 0.25
    with pytest.raises(Unsupported, match=r"a Python float that changes between calls goes into pow\(\)"):
        compiled(XS)


def test_a_float_that_a_step_is_given_as_a_number_is_refused():
    """As torch 2.15 does: it would go into the loop's operation as an int."""
    graph = fx.Graph()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    graph.output(graph.call_function(torch.mul, (x, scale)))
    with pytest.raises(Refused, match=r"a Python float that changes between calls goes into mul\(\)"):
        use_as_tensors(fx.GraphModule(nn.Module(), graph), [XS, 0.25])


class Counts(nn.Module):
    """A body with its state on a module, which reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x * x.sum().item()
        return self.total


@pytest.mark.parametrize("name", ["map", "scan"])
def test_a_loop_of_carrying_is_called_by_its_name(name: str):
    net = Counts()

    def run(compile: Any) -> Any:
        if name == "map":
            return tl.carrying(net).map(net, XS, compile=compile)
        return tl.carrying(net).scan(lambda c, x: (c, net(x)), 0.0, XS, compile=compile)

    with pytest.warns(NotCompiledWarning, match=rf"^carrying\.{name}: not compiled: \.item\(\) reads"):
        run(True)
    with pytest.raises(RuntimeError, match=rf"^carrying\.{name}: not compiled"):
        run("strict")


def test_loops_in_a_body_of_carrying_have_their_own_names():
    net = Counts()

    def body(x: Tensor) -> Tensor:
        return net(x) * tl.fori_loop(0, 2, lambda i, c: c * c.sum().item(), x, compile=True)

    with pytest.warns(NotCompiledWarning, match=r"^fori_loop: not compiled: \.item\(\) reads"):
        tl.carrying(net).map(body, XS)
