"""Custom autograd Functions in compiled loops: the user's backward is the gradient, what has none is named."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import tensorloop as tl
from tensorloop.loop.compiled.look.known_calls import CallTrail
from tensorloop.loop.compiled.run.plan import plans
from tests.support.devices import HERE

D = torch.float64
Body = Callable[[Tensor, Tensor], Any]
W = torch.linspace(-0.8, 1.1, 4, dtype=D).requires_grad_()
XS = torch.randn(5, 2, 4, dtype=D, generator=torch.Generator(HERE).manual_seed(1))


def function(forward: Callable[..., Any], backward: Callable[..., Any], setup: Any = None) -> Any:
    """The `apply` of a Function of these."""
    members: dict[str, Any] = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    members |= {} if setup is None else {"setup_context": staticmethod(setup)}
    return type(forward.__name__, (Function,), members).apply


def rounded(ctx: Any, x: Tensor) -> Tensor:
    return x.round()


def reversed_gradient(ctx: Any, x: Tensor, factor: float) -> Tensor:
    ctx.factor = factor
    return x


def spike(ctx: Any, x: Tensor) -> Tensor:
    if x.requires_grad:  # as SpikingJelly does
        ctx.save_for_backward(x)
    return (x >= 0).to(x)


def product(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
    ctx.save_for_backward(x, y)
    return x * y


def d_product(ctx: Any, g: Tensor) -> Any:
    x, y = ctx.saved_tensors
    return g * y if ctx.needs_input_grad[0] else None, 2 * g * x if ctx.needs_input_grad[1] else None


def exponential(ctx: Any, x: Tensor) -> Tensor:
    y = x.exp()
    ctx.save_for_backward(y)
    return y


def two_results(x: Tensor, y: Tensor) -> Any:
    return x * y, x.sin()


def set_up(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def d_two_results(ctx: Any, g: Tensor, h: Tensor) -> Any:
    x, y, _, sine = ctx.saved_tensors
    return g * y + h * x.cos() + sine * g, 3 * g * x


def largest(ctx: Any, x: Tensor) -> Any:
    positive, index = (x > 0).to(x), x.argmax(-1, keepdim=True)
    ctx.mark_non_differentiable(positive, index)
    ctx.save_for_backward(x, positive)
    return x.amax(-1, keepdim=True).expand(x.shape).contiguous(), positive, index


def d_largest(ctx: Any, g: Tensor, g_positive: Tensor, g_index: Tensor) -> Tensor:
    x, positive = ctx.saved_tensors
    return g * positive + x * 0.1 * g + g_positive


def without_zeros(ctx: Any, x: Tensor, y: Tensor) -> Any:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y)
    return x * 2, y.sin() * x


def d_without_zeros(ctx: Any, g: Tensor | None, h: Tensor | None) -> Any:
    x, y = ctx.saved_tensors
    gx = None if g is None else 2 * g
    if h is None:
        return gx, None
    return h * y.sin() + (0 if gx is None else gx), h * x * y.cos()


def through_a_sine(ctx: Any, x: Tensor) -> Tensor:
    z = x.sin()
    ctx.save_for_backward(z)
    return z.exp()


def relu(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x.clamp(min=0)


def d_relu(ctx: Any, g: Tensor) -> Tensor:
    g = g.clone()
    g[ctx.saved_tensors[0] < 0] = 0
    return g


def by_a_gradient(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x.sin() * x


def d_by_a_gradient(ctx: Any, g: Tensor) -> Tensor:
    with torch.enable_grad():
        x = ctx.saved_tensors[0].detach().requires_grad_()
        (found,) = torch.autograd.grad((x.sin() * x).sum(), x)
    return g * found


def kept_outside(ctx: Any, x: Tensor) -> Tensor:
    ctx.x = x
    return x * x


round_, reverse, fire = (
    function(rounded, lambda ctx, g: g),
    function(reversed_gradient, lambda ctx, g: (-ctx.factor * g, None)),
    function(spike, lambda ctx, g: g / (1 + ctx.saved_tensors[0].abs()) ** 2),
)
multiply, once = function(product, d_product), function(product, once_differentiable(d_product))
exp = function(exponential, lambda ctx, g: g * ctx.saved_tensors[0])
two = function(two_results, d_two_results, set_up)
pick, some, rectify = function(largest, d_largest), function(without_zeros, d_without_zeros), function(relu, d_relu)
inter = function(through_a_sine, lambda ctx, g: g * ctx.saved_tensors[0].exp() * ctx.saved_tensors[0].cos())
inner = function(by_a_gradient, d_by_a_gradient)
kept = function(kept_outside, lambda ctx, g: 2 * g * ctx.x.detach())
nested = function(relu, lambda ctx, g: multiply(ctx.saved_tensors[0], g) * 2)


def pair(h: Tensor, x: Tensor) -> Any:
    a, b = two(h, x)
    return torch.sin(a + x * W), b


def picks(h: Tensor, x: Tensor) -> Any:
    value, positive, index = pick(h)
    return torch.sin(value + x * W + 0.1 * index), h * positive


BODIES: dict[str, Body] = {
    "straight through, saved results": lambda h, x: (torch.sin(round_(h * 3) * 0.3 + x * W), exp(h * 0.5)),
    "an input as the result": lambda h, x: (torch.sin(reverse(h, 0.7) + x * W), reverse(x, 2)),
    "saved where it requires a gradient": lambda h, x: (torch.sin(h + x * W) + fire(h - 0.2), h),
    "needs_input_grad": lambda h, x: (torch.sin(multiply(h, W.expand(2, 4)) + x), multiply(x, h)),
    "setup_context, two results": pair,
    "one of two results": lambda h, x: (torch.sin(two(h, x)[1] + x * W), two(x, h)[0]),
    "results without gradients": picks,
    "no gradients made": lambda h, x: (torch.sin(some(h, x)[1] + x * W), some(x, h)[0]),
    "what is saved is neither input nor result": lambda h, x: (torch.sin(h + x * W), inter(h * W)),
    "a mask written to": lambda h, x: (torch.sin(rectify(h) + x * W), h),
    "autograd.grad in backward": lambda h, x: (torch.sin(inner(h) + x * W), h),
    "a Function in backward": lambda h, x: (torch.sin(nested(h) + x * W), h),
    "an attribute, detached": lambda h, x: (torch.sin(kept(h) + x * W), h),
}
MORE = {"a Function in backward", "one of two results", "an attribute, detached"}
CASES = [pytest.param(b, id=name, marks=pytest.mark.extended if name in MORE else ()) for name, b in BODIES.items()]


def run(body: Body, compile: Any, second: bool = False, **options: Any) -> list[Tensor | None]:
    h, xs = torch.linspace(-1, 1, 8, dtype=D).reshape(2, 4).requires_grad_(), XS.clone().requires_grad_()
    last, ys = tl.scan(body, h, xs, compile=compile, **options)
    loss = last.square().sum() + ys.square().sum()
    found = torch.autograd.grad(loss, (h, xs, W), create_graph=second)
    if not second:
        return [last, ys, *found]
    total = sum(
        ((g * torch.arange(g.numel(), dtype=D).reshape(g.shape)).square().sum() for g in found), torch.zeros(())
    )
    return [*found, *torch.autograd.grad(total, (h, xs, W), allow_unused=True)]


@pytest.mark.parametrize("body", CASES)
def test_the_users_backward_is_the_gradient(body: Body):
    """Of the first order and the second."""
    torch.testing.assert_close(run(body, "strict"), run(body, False))
    torch.testing.assert_close(run(body, "strict", second=True), run(body, False, second=True))


@pytest.mark.parametrize("options", [{"checkpoints": 2}, {"reverse": True}], ids=str)
@pytest.mark.parametrize("name", ["setup_context, two results", "results without gradients"])
def test_in_loops_of_other_kinds(name: str, options: dict[str, Any]):
    torch.testing.assert_close(run(BODIES[name], "strict", **options), run(BODIES[name], False, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bfloat16])
def test_in_other_dtypes(dtype: torch.dtype):
    def step(compile: Any) -> list[Tensor]:
        h = torch.linspace(-1, 1, 4).to(dtype).requires_grad_()
        last, ys = tl.scan(
            lambda h, x: (torch.sin(multiply(h, x) + exp(h * 0.3)), h), h, XS[:, 0].to(dtype), compile=compile
        )
        return [last, ys, *torch.autograd.grad((last.abs().sum() + ys.abs().sum()), h)]

    close = 0.05 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(step("strict"), step(False), rtol=close, atol=close)


def test_loops_of_unknown_length():
    def step(compile: Any) -> list[Tensor]:
        h = torch.linspace(0.2, 0.9, 4, dtype=D).requires_grad_()
        last = tl.while_loop(
            lambda h: h.sum() < 9, lambda h: exp(h * 0.1) * h + multiply(h, W), h, compile=compile, max_steps=9
        )
        return [last, *torch.autograd.grad(last.sum(), (h, W))]

    torch.testing.assert_close(step("strict"), step(False))


def test_a_function_that_may_be_differentiated_once():
    def body(h: Tensor, x: Tensor) -> Any:
        return torch.sin(once(h, x) + x * W), h

    torch.testing.assert_close(run(body, "strict"), run(body, False))
    for compile in ("strict", False):
        h = torch.linspace(-1, 1, 4, dtype=D).requires_grad_()
        last, _ = tl.scan(body, h, XS[:, 0], compile=compile)
        (found,) = torch.autograd.grad(last.square().sum(), h, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            found.sum().backward()


def shifted(ctx: Any, x: Tensor) -> Tensor:
    return x * 1


def test_a_backward_that_is_not_linear():
    """It is called where a gradient comes, and only there, and never for two parts of one."""
    add, give = function(shifted, lambda ctx, g: g + 1), function(shifted, lambda ctx, g: torch.ones_like(g))

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.sin(add(h) + x * W), give(h * W)

    def of(compile: Any, which: str, body: Body = body) -> list[Tensor | None]:
        h = torch.linspace(-1, 1, 4, dtype=D).requires_grad_()
        last, ys = tl.scan(body, h, XS[:, 0], compile=compile)
        loss = {"last": last, "ys": ys, "both": last + ys}[which].sum()
        return [*torch.autograd.grad(loss, (h, W), allow_unused=True)]

    for which in ("last", "ys", "both"):
        torch.testing.assert_close(of("strict", which), of(False, which))

    def anew(h: Tensor, x: Tensor) -> Any:  # only the last step's is called
        return torch.sin(add(h.detach() + x * W)), h.detach() * W

    torch.testing.assert_close(of("strict", "both", anew), of(False, "both", anew))
    with pytest.raises(RuntimeError, match="not linear in the gradient that it gets; set compile=False"):
        run(body, "strict", second=True)


def test_a_known_step_runs_its_backward_too():
    """What a backward does may depend on what Python holds: then it is another plan."""
    factor = [2.0]
    scale = function(shifted, lambda ctx, g: g * factor[0])

    def of(compile: Any) -> Tensor:
        h = torch.linspace(-1, 1, 4, dtype=D).requires_grad_()
        last = tl.scan(lambda h, x: (torch.sin(scale(h) + x), None), h, XS[:, 0], compile=compile)[0]
        return torch.autograd.grad(last.sum(), h)[0]

    for factor[0] in (2.0, 3.0, 2.0, 5.0):
        torch.testing.assert_close(of("strict"), of(False))
    made = plans.made
    of("strict")
    assert plans.made == made


def test_a_step_with_a_function_is_known_by_its_calls(monkeypatch: pytest.MonkeyPatch):
    ends: list[Any] = []
    end = CallTrail.end
    monkeypatch.setattr(CallTrail, "end", lambda *args: ends.append(end(*args)) or ends[-1])
    for _ in range(3):
        run(BODIES["saved where it requires a gradient"], "strict")
    assert ends[-1] is not None


def test_the_class_is_as_it_was():
    class Twice(Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.inputs = len(inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return g * 3

    before, found = dict(vars(Twice)), list[Tensor]()

    def gradient(compile: Any) -> Tensor:
        h = torch.ones(3, dtype=D, requires_grad=True)
        last, _ = tl.scan(lambda h, x: (torch.sin(Twice.apply(h)), None), h, None, length=3, compile=compile)  # pyright: ignore[reportArgumentType]
        return torch.autograd.grad(last.sum(), h)[0]

    def work() -> None:
        found.extend(gradient("strict") for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, [gradient(False)] * 15)
    assert {name: x for name, x in vars(Twice).items() if name in before} == before


# -- what is refused


def wrong(gives: Callable[..., Any], forward: Callable[..., Any] = shifted) -> Body:
    apply = function(forward, gives)
    return lambda h, x: (torch.sin(apply(h) + x * W), h)


CALLS = [0.0]


class Counted(Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        Counted.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * 3


def counts(ctx: Any, x: Tensor) -> Tensor:
    CALLS[0] += 1
    return x * CALLS[0]


def writes(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.mul_(2)


def two_ways(ctx: Any, x: Tensor) -> Any:
    ctx.set_materialize_grads(False)
    return x * 2, x * 3


ways = function(two_ways, lambda ctx, g, h: h if g is None else 2 * g if h is None else g * 0)


def hidden(ctx: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


REFUSED: dict[str, tuple[Body, str]] = {
    "too many gradients": (wrong(lambda ctx, g: (g, g)), "gives 2 gradients, where forward has 1 inputs"),
    "another shape": (wrong(lambda ctx, g: g[0]), r"gives torch.float64 \(4,\) as the gradient of input 0, which is"),
    "no tensor": (wrong(lambda ctx, g: 1.0), "gives float as the gradient of input 0"),
    "an error": (wrong(lambda ctx, g: g.nothing), "raises AttributeError: 'Tensor' object has no attribute 'nothing'"),
    "hooks": (wrong(lambda ctx, g: ctx.register_hook(print)), "uses ctx.register_hook"),
    "a value that is read": (wrong(lambda ctx, g: g * g.sum().item()), r"\.item\(\) reads a value in Python"),
    "random numbers": (wrong(lambda ctx, g: g * torch.rand_like(g)), "the backward of a custom Function draws"),
    "state in forward": (wrong(lambda ctx, g: g, counts), "the body sets an item of a list from outside"),
    "state in backward": (
        wrong(lambda ctx, g: (CALLS.append(1.0), g * 2)[1]),
        r"the body calls append\(\) of a list from outside",
    ),
    "state on the class": (lambda h, x: (torch.sin(Counted.apply(h)), h), r"the body sets Counted\.calls"),
    "an input written to": (wrong(lambda ctx, g: g * 2, writes), "writes to its inputs"),
    "code that torch does not see": (wrong(lambda ctx, g: g * 2, hidden), "turns a tensor into an array"),
    "None for something else": (
        lambda h, x: (torch.sin(ways(h)[0] + x * W), h),
        "takes None for something else than zeros",
    ),
    "another gradient alone": (
        (lambda apply: lambda h, x: (torch.sin(apply(h, x)), h))(
            function(product, lambda ctx, g: (g if ctx.needs_input_grad[1] else 2 * g, g))
        ),
        "is another where it is the only one that is wanted",
    ),
    "what is kept is written to": (
        lambda h, x: (torch.sin((lambda z: kept(z) + z.add_(1))(h * 1) + x * W), h),
        "add_ writes to a tensor that the backward of a custom Function reads",
    ),
    "another mode": (
        wrong(lambda ctx, g: g * (2 if torch.is_grad_enabled() else 3)),
        "gives something else where it is recorded",
    ),
}


@pytest.mark.filterwarnings("ignore::tensorloop.loop.NotCompiledWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_apart_is_named(name: str):
    body, reason = REFUSED[name]
    with pytest.raises(RuntimeError, match=f"not compiled: .*{reason}.*Cure: [^ ]"):
        run(body, "strict")


@pytest.mark.filterwarnings("ignore::tensorloop.loop.NotCompiledWarning")
@pytest.mark.parametrize("name", ["too many gradients", "another shape", "an error"])
def test_a_wrong_backward_raises_what_the_eager_loop_raises(name: str):
    errors = []
    for compile in (True, False):
        with pytest.raises((RuntimeError, AttributeError)) as raised:
            run(REFUSED[name][0], compile)
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


def test_beside_a_tensor_array_it_is_refused_by_name():
    def body(state: Any, x: Tensor) -> Any:
        h, array = state
        h = torch.sin(fire(h) + x * W)
        return (h, array.append(h)), h

    with pytest.raises(RuntimeError, match="a custom Function meets a TensorArray in the carry"):
        tl.scan(body, (XS[0], tl.TensorArray()), XS, compile="strict")
