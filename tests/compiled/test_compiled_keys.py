"""What a plan is found by: nothing that a body does otherwise in a later call is taken for what it did before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, wrap_torch_function

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tests.support.both_ways import check_both
from tests.support.devices import HERE

D = torch.float64
pytestmark = [
    pytest.mark.usefixtures("fresh_plans"),
    pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning"),
]
H = torch.tensor([0.4, -0.7, 1.1], dtype=D)
XS = torch.linspace(-1, 1, 12, dtype=D).view(4, 3)


class Switch:
    """What a body reads: another value in a later call."""

    now: Any = None


def check_each(run: Callable[..., Any], values: Any, *inputs: Tensor, **options: Any) -> None:
    """Calls with one value after the other; plans of the earlier ones are there."""
    for value in values:
        Switch.now = value
        check_both(run, *inputs, compile=True, **options)


def scanned(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda compile, h, xs: tl.scan(body, h, xs, compile=compile)


def test_the_dtype_of_autocast():
    w = torch.randn(4, 4, generator=torch.Generator(HERE).manual_seed(0))

    def body(h: Tensor, x: Tensor) -> Any:
        with torch.autocast(HERE.type, dtype=Switch.now):
            y = h @ w
        return y.float(), y

    check_each(
        scanned(body),
        [torch.bfloat16, torch.float16, torch.bfloat16],
        torch.ones(4, 4),
        torch.ones(2, 1),
        tolerance=0.02,
    )


# -- functions that take part in torch's override protocol, below which a body may do anything


@wrap_torch_function(lambda x: (x,))
def wrapped(x: Tensor) -> Tensor:
    return x * 2 if Switch.now else x.sin()


def handled(x: Tensor) -> Tensor:
    if has_torch_function((x,)):
        return handle_torch_function(handled, (x,), x)
    return x * 2 if Switch.now else x.sin()


@pytest.mark.parametrize("function", [wrapped, handled], ids=["wrapped", "handled"])
def test_functions_that_can_be_overridden(function: Callable[[Tensor], Tensor]):
    check_each(scanned(lambda h, x: (function(h) + x, function(x))), [True, False, True], H, XS)


# -- hooks


def tenfold(h: Tensor) -> Tensor:
    h.register_hook(lambda g: g * 10)
    return h


def tenfold_before(h: Tensor) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_hook(lambda inner, outer: tuple(g if g is None else g * 10 for g in inner))
    return h


def tenfold_after(h: Tensor) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda outer: tuple(g if g is None else g * 10 for g in outer))
    return h


def where_asked(h: Tensor) -> Tensor:
    return tenfold(h) if h.requires_grad else h


HOOKS = tenfold, tenfold_before, tenfold_after, where_asked


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_hooks_of_a_later_call(hook: Callable[[Tensor], Tensor]):
    """The plan of the body without a hook is there."""
    w = torch.ones(3, dtype=D, requires_grad=True)

    def body(h: Tensor, x: Tensor) -> Any:
        h = h * w
        return (hook(h) if Switch.now else h) * 2 + x, None

    check_each(scanned(body), [False, True, False, True], H, XS)


# -- scripted functions


@torch.jit.script
def decay(h: Tensor, x: Tensor) -> Tensor:
    return h * 0.5 + torch.tanh(x) * h


def test_a_scripted_function_keeps_its_gradient():
    """A script makes itself faster after some calls, and has a gradient of its own then."""
    w = torch.linspace(0.5, 1.5, 3, dtype=D)

    def run(compile: Any, h: Tensor, w: Tensor, xs: Tensor) -> Any:
        return tl.scan(lambda h, x: (decay(h, x * w), h * w), h, xs, compile=compile)

    for _ in range(5):
        check_both(run, H, w, XS, compile=True)


def test_a_scripted_function_of_what_is_closed_over():
    w = torch.linspace(0.5, 1.5, 3, dtype=D)

    def run(compile: Any, h: Tensor, w: Tensor, xs: Tensor) -> Any:
        return tl.scan(lambda h, x: (h * x, decay(w, w)), h, xs, compile=compile)

    for _ in range(5):
        check_both(run, H, w, XS, compile=True)


# -- what torch does not see


def unseen(x: Tensor) -> Tensor:
    """A new tensor, by code in C that no mode of torch's hears of."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch._C._VariableFunctions.mul(x.detach(), 2)  # pyright: ignore[reportAttributeAccessIssue]


def test_code_that_torch_does_not_see_is_refused():
    """Each look at a step with the same inputs would find the same."""
    check_both(scanned(lambda h, x: (h * 0.5 + unseen(x), None)), H, XS, compile=True)
    with pytest.raises(RuntimeError, match="not compiled: the body computes a tensor by what torch does not see"):
        tl.scan(lambda h, x: (h * 0.5 + unseen(x), None), H, XS, compile="strict")


def test_code_that_torch_does_not_see_and_that_gives_whole_numbers():
    """Other numbers that are near give the same here, and the last step's do not."""

    def body(h: Tensor, x: Tensor) -> Any:
        return h * 0.5 + unseen(x).round(), unseen(h)

    check_both(scanned(body), H, XS, compile=True)


# -- how tensors lie in memory

LAYOUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "is_contiguous": lambda h, x: ((h * 2 if h.is_contiguous() else h * 3) + x, None),
    "stride": lambda h, x: (h * h.stride(0) + x, None),
    "strides": lambda h, x: ((h + x) * 0.5, torch.zeros(h.stride(), dtype=h.dtype)),
    "x is contiguous": lambda h, x: (h + (x * 2 if x.is_contiguous() else x * 3), None),
    "a write through reshape": lambda h, x: (_written(h) + x, None),
    "a write through flatten": lambda h, x: (h + _written(x), None),
    "as_strided": lambda h, x: (h * 0.5 + torch.as_strided(h, (3,), (1,)).sum() + x, None),
}


def _written(h: Tensor) -> Tensor:
    h = h.clone()
    h.reshape(-1)[-2:].mul_(3.0)
    return h


@pytest.mark.parametrize("name", LAYOUTS)
def test_how_a_tensor_lies_in_memory(name: str):
    """A transposed one: where it matters, what the eager loop does with it counts."""
    body = LAYOUTS[name]
    torch.manual_seed(0)
    h, xs = torch.randn(3, 3, dtype=D), torch.randn(2, 3, 3, dtype=D)

    def turned(compile: Any, h: Tensor, xs: Tensor) -> Any:
        return tl.scan(body, h.t(), xs.mT, compile=compile)

    for _ in range(2):
        check_both(scanned(body), h, xs, compile=True)
        check_both(turned, h, xs, compile=True)


def test_a_write_to_what_lies_alike_is_compiled():
    torch.manual_seed(0)
    h, xs = torch.randn(3, 4, dtype=D), torch.randn(2, 3, 4, dtype=D)

    def run(compile: Any, h: Tensor, xs: Tensor) -> Any:
        return tl.scan(lambda h, x: ((h + 1).mul_(0.5) + x, None), h.t(), xs.mT, compile=compile)

    check_both(run, h, xs, compile="strict")


# -- tensors on another device

DEVICES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "made": lambda h, x: (h + x, (h + x).to("meta")),
    "closed over": lambda h, x: (h + x, META * 2),
    "by a factory": lambda h, x: (h + x, torch.zeros(3, device="meta")),
}
META = torch.ones(3, device="meta")


@pytest.mark.parametrize("name", DEVICES)
def test_a_tensor_on_another_device(name: str):
    body = DEVICES[name]
    with pytest.raises(RuntimeError, match="not compiled: a tensor on meta is used or made"):
        tl.scan(body, H, XS, compile="strict")
    with pytest.warns(NotCompiledWarning, match="a tensor on meta"):
        h, ys = tl.scan(body, H, XS, compile=True)
    assert (ys.device.type, ys.shape) == ("meta", (4, 3))
    torch.testing.assert_close(h, H + XS.sum(0))


# -- whether a tensor requires a gradient


@pytest.mark.parametrize("name", ["requires_grad", "is_leaf"])
def test_a_body_that_asks_for_gradients_in_a_later_call(name: str):
    """What does not require one is as before then."""

    def body(h: Tensor, x: Tensor) -> Any:
        h = h * 0.5
        asked = Switch.now and (h.requires_grad if name == "requires_grad" else not h.is_leaf)
        return (h.sin() if asked else h.cos()) + x, h

    def run(compile: Any, h: Tensor, xs: Tensor) -> Any:
        return tl.scan(body, h.detach(), xs.detach() * Switch.now, compile=compile)

    for _ in range(2):
        check_each(scanned(body), [False, True], H, XS)
        check_each(run, [False, True], H, XS)


@pytest.mark.parametrize("number", [3, True], ids=str)
def test_a_body_that_asks_for_gradients_and_takes_another_number(number: Any):
    """The operations are the same."""

    def body(h: Tensor, x: Tensor) -> Any:
        h = h * 0.5
        return (h * 2 if h.requires_grad else h * number) + x, h

    for _ in range(2):
        for h in (H, H.clone().requires_grad_()):
            found, expected = (tl.scan(body, h, XS, compile=compile) for compile in (True, False))
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y)
