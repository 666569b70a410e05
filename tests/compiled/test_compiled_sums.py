"""Gradients that are sums over steps: added up in the loop where it computes them, and held for no step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tensorloop as tl
from tensorloop.loop.compiled.run.plan import Plan, plans
from tests.support.compiled_cases import check_equal
from tests.support.devices import HERE

D = torch.float64
pytestmark = pytest.mark.usefixtures("fresh_plans")
T, B, N = 7, 3, 5
TURN = torch.linalg.qr(torch.randn(N, N, dtype=D, generator=torch.Generator(HERE).manual_seed(3)))[0]


def tags(p: dict[str, Tensor]) -> Callable[..., Any]:
    """A sum over one dim of what the carry's gradient needs too."""
    return lambda a, x: (torch.logsumexp(a[:, :, None] + p["square"], 1) + x, None)


def bias(p: dict[str, Tensor]) -> Callable[..., Any]:
    """A bias, whose gradient is a sum of what the loop has, and one of a slice of it."""
    return lambda h, x: ((h @ TURN + p["row"] + p["wide"][:, 1 : N + 1]).sin() + x, h)


def gain(p: dict[str, Tensor]) -> Callable[..., Any]:
    """A gain and a number: products that the loop would not need."""
    return lambda h, x: ((torch.tanh(h @ TURN) * p["row"]).sin() * p["number"] + x.cos(), h * p["wide"][:, :N])


def spread(p: dict[str, Tensor]) -> Callable[..., Any]:
    """One number a row."""
    return lambda h, x: ((h @ TURN).sin() + p["column"].expand(B, N) * x, None)


def halves(p: dict[str, Tensor]) -> Callable[..., Any]:
    """A dtype that is not added up in the loop."""
    return lambda h, x: ((h @ TURN + (p["row"].bfloat16() * 2).to(D)).sin() + x, None)


BODIES = [tags, bias, gain, spread, halves]


def run(make: Callable[..., Any], steps: int, compile: Any, **options: Any) -> list[Tensor]:
    """The last carry and gradients."""
    torch.manual_seed(steps)
    shapes = {"square": (N, N), "row": (N,), "wide": (1, N + 2), "number": (), "column": (B, 1)}
    p = {name: torch.randn(shape, dtype=D).requires_grad_() for name, shape in shapes.items()}
    start, xs = torch.randn(B, N, dtype=D).requires_grad_(), torch.randn(steps, B, N, dtype=D).requires_grad_()
    last, ys = tl.scan(make(p), start, xs, compile=compile, **options)
    loss = last.square().sum() + (0 if ys is None else (ys * torch.linspace(0, 1, N, dtype=D)).sum())
    found = torch.autograd.grad(loss, [start, xs, *p.values()], allow_unused=True)
    return [last, *(torch.zeros(()) if g is None else g for g in found)]


@pytest.mark.parametrize("make", BODIES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"checkpoints": 2}], ids=str)
@pytest.mark.parametrize("steps", [1, T])
def test_sums_are_those_of_the_eager_loop(make: Callable[..., Any], options: dict[str, Any], steps: int):
    tolerance = 1e-2 if make is halves else 1e-12
    check_equal(run(make, steps, "strict", **options), run(make, steps, False, **options), tolerance)


def made() -> Plan:
    """The one plan that there is."""
    (plan,) = plans._plans.values()
    return plan


def test_what_a_loop_adds_up_is_held_for_no_step():
    run(tags, T, "strict")
    program = made().backward()
    assert [n.meta["val"].shape for n in program.partition.sums] == [(B, N, N)]
    assert program.bytes_a_step == B * N * 8  # the gradients of xs


def test_halves_are_added_up_by_torch_which_does_so_in_more_bits():
    run(halves, T, "strict")
    assert all(n.meta["val"].dtype is D for n in made().backward().partition.sums)


class Largest(TorchDispatchMode):
    """Notes the most elements that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            self.elements = max(self.elements, x.numel() if isinstance(x, Tensor) else 0)
        return out


@pytest.mark.parametrize("way", ["product", "table", "kernel"])
def test_the_gradient_of_a_weight_takes_memory_for_no_step(way: str):
    steps, rows, size = 20, 2, 64
    weight = torch.randn(*((size, size, 1) if way == "kernel" else (size, size)), dtype=D).requires_grad_()
    xs = torch.randint(size, (steps, rows)) if way == "table" else torch.randn(steps, rows, size, dtype=D)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "product": lambda x: x @ weight,
        "table": lambda x: weight[x],
        "kernel": lambda x: torch.conv1d(x[:, :, None], weight)[:, :, 0],
    }

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(h.flip(-1) + ways[way](x)), None

    h, _ = tl.scan(body, torch.zeros(rows, size, dtype=D), xs, compile="strict")
    with Largest() as largest:
        h.sum().backward()
    assert largest.elements <= max(size * size, steps * rows * size)  # and not steps times the weight
