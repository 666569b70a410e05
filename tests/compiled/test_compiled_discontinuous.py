"""What jumps is computed once: values on an edge fall to the same side in the loop forward and in its gradient."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorloop as tl
from tensorloop.loop.compiled.run.plan import Plan, plans
from tests.support.both_ways import AMINMAX_HAS_A_GRADIENT, check_both
from tests.support.devices import HERE

D = torch.float64
Step = Callable[[Tensor], Tensor]


def top(z: Tensor) -> Tensor:
    return z.amax(-1, keepdim=True)


# Of z (8, 16), the largest of each row of which is equal to itself as long as nobody computes it another time.
STEPS: dict[str, Step] = {
    "lt": lambda z: torch.where(z < top(z).detach(), 0.0, z).sum(-1),
    "ge": lambda z: torch.where(z >= top(z), z, 0.0).sum(-1),
    "gt": lambda z: torch.where(top(z) > z, 0.0, z).sum(-1),
    "le": lambda z: torch.where(top(z) <= z, z, 0.0).sum(-1),
    "eq": lambda z: (z * (z == top(z))).sum(-1),
    "ne": lambda z: (z * (z != top(z))).sum(-1),
    "isclose": lambda z: (z * torch.isclose(z, top(z).expand(8, 16), 0.0, 0.0)).sum(-1),
    "bools": lambda z: (z * ((z >= top(z)) ^ (z < 0))).sum(-1),
    "masked_fill": lambda z: z.masked_fill(z == top(z), 0.0).sum(-1),
    "amax": lambda z: z.amax(-1),
    "amin": lambda z: z.amin(-1),
    "max": lambda z: z.max() + z.min(),
    "max of a dim": lambda z: torch.where(z >= z.max(-1, True)[0].detach(), z, 0.0).sum(-1),
    "aminmax": lambda z: torch.aminmax(z, dim=-1)[0] * torch.aminmax(z, dim=-1)[1],
    "median": lambda z: torch.where(z >= z.median(-1, True)[0], z, 0.0).sum(-1),
    "kthvalue": lambda z: torch.where(z >= z.kthvalue(14, -1, True)[0], z, 0.0).sum(-1),
    "topk": lambda z: torch.where(z >= z.topk(3, -1)[0][..., -1:], z, 0.0).sum(-1),
    "sort": lambda z: torch.where(z > z.sort(-1)[0][..., 12:13], z, 0.0).sum(-1),
    "largest in size": lambda z: torch.linalg.vector_norm(z, math.inf, -1),
    "argmax": lambda z: (z * (z < z.gather(-1, z.argmax(-1, keepdim=True)))).sum(-1),
    "argmin": lambda z: (z * (z > z.gather(-1, z.argmin(-1, keepdim=True)))).sum(-1),
    "sign": lambda z: (z * torch.sign(z - top(z))).sum(-1),
    "sgn": lambda z: (z * torch.sgn(top(z) - z)).sum(-1),
    "abs": lambda z: (z - top(z)).abs().sum(-1),
    "copysign": lambda z: torch.copysign(z, z - top(z)).sum(-1),
    "heaviside": lambda z: (z * torch.heaviside((z - top(z)).detach(), z.new_tensor(3.0))).sum(-1),
    "floor": lambda z: (z * torch.floor(z / top(z))).sum(-1),
    "ceil": lambda z: (z * torch.ceil(z / top(z))).sum(-1),
    "round": lambda z: (z * torch.round(0.5 * z / top(z) + 1)).sum(-1),
    "trunc": lambda z: (z * torch.trunc(z / top(z))).sum(-1),
    "frac": lambda z: (z * torch.frac(z / top(z))).sum(-1),
    "remainder": lambda z: (z * torch.remainder(z, top(z))).sum(-1),
    "fmod": lambda z: (z * torch.fmod(z, top(z))).sum(-1),
    "div": lambda z: (z * torch.div(z, top(z), rounding_mode="floor")).sum(-1),
    "div to zero": lambda z: (z * torch.div(z, top(z), rounding_mode="trunc")).sum(-1),
    "int": lambda z: (z * (z / top(z)).int()).sum(-1),
    "bool": lambda z: (z * (z - top(z)).bool()).sum(-1),
    "relu": lambda z: torch.relu(z - top(z).detach()).sum(-1),
    "leaky_relu": lambda z: F.leaky_relu(z - top(z).detach()).sum(-1),
    "hardtanh": lambda z: F.hardtanh((z - top(z).detach()) + 1).sum(-1),
    "clamp": lambda z: z.clamp(max=top(z).detach()).sum(-1),
    "maximum": lambda z: torch.maximum(z, top(z).detach()).sum(-1),
    "minimum": lambda z: torch.minimum(z, top(z)).sum(-1),
}
if not AMINMAX_HAS_A_GRADIENT:
    del STEPS["aminmax"]


def centred(x: Tensor, c: Tensor) -> Tensor:
    z = x * c
    return z - z.mean(-1, keepdim=True)


def to_y(step: Step) -> Any:
    """y alone, which torch computes for all steps at once."""
    return lambda c, x: (c * 0.9 + 0.01 * x.sum(), step(centred(x, c)))


def to_carry(step: Step) -> Any:
    """The carry alone, by machine code; tanh is computed before the loop."""
    return lambda c, x: (c * 0.9 + 0.1 * step(torch.tanh(x) * c).mean(), None)


def to_both(step: Step) -> Any:
    def body(c: Tensor, x: Tensor) -> Any:
        y = step(F.layer_norm(x * c, (16,)))
        return c * 0.9 + 0.01 * x.sum() + 0.05 * y.mean(), y

    return body


def numbers(dtype: torch.dtype, steps: int = 20) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.tensor(0.4, dtype=dtype), torch.randn(steps, 8, 16, dtype=dtype)


def scanned(body: Any, **options: Any) -> Any:
    return lambda compile, c, x: tl.scan(body, c, x, compile=compile, **options)


@pytest.mark.parametrize(
    ("to", "dtype", "tolerance"),
    [(to_y, torch.float32, 3e-4), (to_carry, D, 1e-9), (to_both, torch.float32, 3e-4)],
    ids=["y", "carry", "both"],
)
@pytest.mark.parametrize("name", [name for name in STEPS if name != "median"])
@pytest.mark.few
def test_an_edge_is_met_once(name: str, to: Any, dtype: torch.dtype, tolerance: float):
    check_both(scanned(to(STEPS[name])), *numbers(dtype), tolerance=tolerance)


def test_an_edge_of_what_is_for_all_steps_at_once_alone():
    check_both(scanned(to_y(STEPS["median"])), *numbers(torch.float32), tolerance=3e-4)


@pytest.mark.parametrize("name", ["amax", "eq", "topk", "sort", "maximum", "sign"])
def test_ties(name: str):
    """Whole numbers: the largest of a row is there several times."""
    for dtype, tolerance in ((torch.float32, 3e-4), (D, 1e-9)):
        c, x = numbers(dtype)
        x = (3 * x).round() + 0.1
        for make in (to_y, to_both):
            check_both(scanned(make(STEPS[name])), c, x, tolerance=tolerance)


def until(body: Any) -> Any:
    def counted(state: Any, x: Tensor) -> Any:
        c, y = body(state[0], x)
        return (c, state[1] + 1), y

    stop: dict[str, Any] = {"until": lambda state: state[1] >= 5}
    return lambda compile, c, x: tl.scan(counted, (c, torch.tensor(0)), x, compile=compile, **stop)


def repeated(body: Any) -> Any:
    """A while_loop, of one x."""
    return lambda compile, c, x: tl.while_loop(
        lambda state: state[1] < 5,
        lambda state: (body(state[0], x[0])[0], state[1] + 1),
        (c, torch.tensor(0)),
        compile=compile,
    )


WAYS: dict[str, Any] = {
    "checkpoints": lambda body: scanned(body, checkpoints=2),
    "backwards": lambda body: scanned(body, reverse=True),
    "until": until,
    "while_loop": repeated,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["amax", "lt", "sign", "floor"])
def test_an_edge_in_loops_of_all_kinds(name: str, way: str):
    check_both(WAYS[way](to_both(STEPS[name])), *numbers(torch.float32), tolerance=3e-4)


@pytest.mark.parametrize("seed", range(3))
def test_what_torch_and_machine_code_both_compute(seed: int):
    """A product with the state before each step, for the state after it and for the gradients of all steps."""

    def run(compile: Any, h: Tensor, x: Tensor) -> Any:
        return tl.scan(lambda h, x: (0.5 * h + (torch.tanh(x) * h).amax(0), None), h, x, compile=compile)

    torch.manual_seed(seed)
    for steps in (3, 20):
        check_both(run, torch.full((4,), 0.3), torch.randn(steps, 8, 4), tolerance=3e-4)


@pytest.mark.parametrize("name", ["amax", "sign", "floor"])
def test_roots_which_torch_rounds_otherwise(name: str):
    """A square root of machine code is the nearest number, and one of torch's is one of the two."""
    step = STEPS[name]

    def rooted(c: Tensor, x: Tensor) -> Any:
        y = step(torch.sqrt(x.abs() * c + 0.1))
        return c * 0.9 + 0.1 * y.mean().abs(), y

    check_both(scanned(rooted), *numbers(torch.float32), tolerance=3e-4)
    check_both(scanned(lambda c, x: (rooted(c, x)[0], None)), *numbers(D), tolerance=1e-9)


# -- what that costs

PLAIN: Step = lambda z: z.sum(-1)  # noqa: E731
EACH, ROWS = 8 * 16, 8  # comparisons in a step; its rows
COMPARISONS = "lt", "eq", "masked_fill", "amax", "max of a dim", "topk", "argmax", "bool", "relu", "hardtanh", "clamp"


def bytes_a_step(body: Any, *given: Tensor) -> int:
    plans.clear()
    state, xs = (x.requires_grad_() for x in given)
    tl.scan(body, state, xs, compile="strict")
    (plan,) = plans._plans.values()
    assert isinstance(plan, Plan)
    return plan.bytes_a_step()


@pytest.mark.parametrize("make", [to_y, to_carry, to_both], ids=lambda make: make.__name__)
def test_a_comparison_is_kept_in_a_byte_and_an_index_in_eight(make: Any, fresh_plans: None):
    indices: Step = lambda z: z.gather(-1, z.argmax(-1, keepdim=True)).sum(-1)  # noqa: E731
    dtype = torch.float32 if make is to_y else D
    least = bytes_a_step(make(PLAIN), *numbers(dtype))
    for name in COMPARISONS:
        found = bytes_a_step(make(STEPS[name]), *numbers(dtype))
        assert found == least + EACH if make is to_both else found <= least + EACH, name
    assert bytes_a_step(make(indices), *numbers(dtype)) <= least + 8 * ROWS


TURN = torch.linalg.qr(torch.randn(16, 16, dtype=D, generator=torch.Generator(HERE).manual_seed(3)))[0].requires_grad_()
EXACT: dict[str, tuple[Any, Any]] = {  # a step that compares, and one that does not
    "relu": (lambda h, x: (torch.relu(h @ TURN + x), None), lambda h, x: (torch.tanh(h @ TURN + x), None)),
    "relu, a y": (lambda h, x: ((y := torch.relu(h @ TURN + x)), y), lambda h, x: ((y := (h @ TURN + x).tanh()), y)),
    "threshold": (
        lambda h, x: (torch.tanh(F.threshold(h, 0.1, 0.0) @ TURN + x), None),
        lambda h, x: (torch.tanh(h @ TURN + x), None),
    ),
    "abs": (
        lambda h, x: (torch.tanh(h.abs() @ TURN + x), None),
        lambda h, x: (torch.tanh(h @ TURN + x), None),
    ),
    "where": (
        lambda h, x: ((y := torch.where(h > 0, torch.tanh(h @ TURN + x), h)), y),
        lambda h, x: ((y := torch.tanh(h @ TURN + x) * 0.5 + h), y),
    ),
    "where of x": (
        lambda h, x: ((y := torch.where(x > 0, torch.tanh(h @ TURN + x), h)), y),
        lambda h, x: ((y := torch.tanh(h @ TURN + x) * x.sin() + h), y),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_compared_again_exactly_is_not_kept(name: str, fresh_plans: None):
    torch.manual_seed(0)
    h, xs = torch.randn(8, 16, dtype=D), torch.randn(4, 8, 16, dtype=D)
    compares, plain = (bytes_a_step(body, h, xs) for body in EXACT[name])
    assert compares <= plain
    check_both(scanned(EXACT[name][0]), h, xs)
