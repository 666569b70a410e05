"""Random numbers in compiled loops: torch's own streams, as an eager loop draws them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run.plan import Plan, plans
from tests.support.compiled_cases import check_equal
from tests.support.devices import HERE

B, H, T = 3, 8, 5
DTYPE = torch.float64
TURN = torch.linalg.qr(torch.randn(H, H, dtype=DTYPE, generator=Generator(HERE).manual_seed(1)))[0].requires_grad_()
OWN = Generator(HERE)


def in_place(h: Tensor, x: Tensor) -> Any:
    scale = torch.empty_like(h).uniform_(-1, 1)
    wait = torch.empty(B, H, dtype=DTYPE).exponential_(2.0, generator=OWN)
    return h @ TURN + scale * x - 0.1 * wait, (
        torch.randperm(5),
        torch.empty(3).geometric_(0.3),
        torch.zeros(4, 3).t().bernoulli_(0.3),
    )


def normals(h: Tensor, x: Tensor) -> Any:
    drawn = torch.normal(h.detach(), h.detach().abs())
    others = (
        torch.normal(x.detach(), 0.5),
        torch.normal(1.5, x.detach().abs()),
        torch.normal(0.0, 1.0, (20,), device=h.device),
    )
    return drawn + h @ TURN, others


def attends(h: Tensor, x: Tensor) -> Any:
    return h @ TURN + F.scaled_dot_product_attention(h[None], x[None], x[None], dropout_p=0.3)[0], h


BODIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dropout": lambda h, x: (F.dropout(h @ TURN, 0.4) + F.dropout(x, 0.2), h),
    "alpha dropout": lambda h, x: (F.alpha_dropout(h @ TURN, 0.4, True) + x, h),
    "noise": lambda h, x: (
        h @ TURN + 0.1 * torch.randn_like(h) * x,
        (torch.rand(3), torch.randn(4, dtype=torch.cfloat)),
    ),
    "own generator": lambda h, x: (
        h @ TURN + torch.randn(B, H, dtype=DTYPE, generator=OWN) + torch.rand_like(x),
        torch.randint(0, 9, (4,), generator=OWN),
    ),
    "bernoulli": lambda h, x: (h @ TURN * torch.bernoulli(h.sigmoid()) + x, torch.bernoulli(torch.rand(4, 3).t() / 2)),
    "gumbel softmax": lambda h, x: (F.gumbel_softmax(h) @ TURN + x, h),
    "in place": in_place,
    "normals": normals,
    "attention": attends,
}  # fmt: skip


def outcome(
    body: Callable[..., Any], compile: Any, steps: int = T, grad: bool = True, **options: Any
) -> tuple[list[Tensor], list[Any], list[Tensor]]:
    """(what the loop gives, gradients, the generators' states behind both)."""
    torch.manual_seed(1)
    OWN.manual_seed(5)
    h, xs = (torch.randn(*shape, dtype=DTYPE, requires_grad=grad) for shape in ((B, H), (steps, B, H)))
    with torch.set_grad_enabled(grad):
        outputs = tree_leaves(tl.scan(body, h, xs, compile=compile, **options))
    states, grads = [torch.get_rng_state(), OWN.get_state()], []
    if grad:
        terms = [(y * (torch.arange(y.numel()).view(y.shape) + 1).cos()).sum() for y in outputs if y.requires_grad]
        grads = list(torch.autograd.grad(torch.stack(terms).sum(), [h, xs, TURN], allow_unused=True))
    return outputs, grads, [*states, torch.get_rng_state(), OWN.get_state()]


def check_same(body: Callable[..., Any], **options: Any) -> None:
    expected, expected_grads, states = outcome(body, False, **options)
    found, grads, found_states = outcome(body, "strict", **options)
    check_equal(found, expected, 1e-11)
    check_equal(grads, expected_grads, 1e-11)
    check_equal(found_states, states, 0)


@pytest.mark.parametrize("name", BODIES)
def test_numbers_gradients_and_generators_are_those_of_the_eager_loop(name: str):
    check_same(BODIES[name])


@pytest.mark.parametrize(
    "options", [{"reverse": True}, {"grad": False}, {"grad": False, "reverse": True}, {"checkpoints": 2},
                {"checkpoints": 1, "reverse": True}],
)  # fmt: skip
def test_blocks_are_drawn_again_from_where_they_began(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tensorloop.loop.compiled.run.blocks.MOST_STEPS", 2)
    check_same(BODIES["own generator"], **options)
    check_same(BODIES["dropout"], **options)


def through_draws(h: Tensor, x: Tensor) -> Any:
    return torch.bernoulli(h.sigmoid()), torch.normal(x, h + 1)


DRAWN_FROM: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "both": through_draws,
    "bernoulli of a capture": lambda h, x: (h * 0.9, torch.bernoulli(TURN.sigmoid())),
    "normal around the carry": lambda h, x: (torch.normal(h, 0.5), x * 2),
    "normal with a spread": lambda h, x: (h * 0.9, torch.normal(0.5, x.abs() + TURN[:B].abs())),
}


@pytest.mark.parametrize("name", DRAWN_FROM)
def test_the_gradient_of_what_numbers_are_drawn_around_is_zero(name: str):
    def run(compile: Any) -> list[Any]:
        torch.manual_seed(3)
        h = torch.ones(B, H, dtype=DTYPE, requires_grad=True)
        xs = torch.linspace(-1, 1, T * B * H, dtype=DTYPE).view(T, B, H).requires_grad_()
        last, ys = tl.scan(DRAWN_FROM[name], h, xs, compile=compile)
        grads = torch.autograd.grad(last.sum() + ys.sum(), [h, xs, TURN], allow_unused=True)
        return [last.detach(), ys.detach(), last.requires_grad, ys.requires_grad, *grads]

    for found, expected in zip(run("strict"), run(False), strict=True):
        if isinstance(expected, Tensor):
            assert torch.equal(found, expected)
        else:
            assert found is expected


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "probabilities of xs": (lambda h, x: (h, torch.bernoulli(x)), "probabilities to be between 0 and 1"),
    "probabilities of the carry": (lambda h, x: (h + torch.bernoulli(h), h), "probabilities to be between 0 and 1"),
    "a spread of xs": (lambda h, x: (h, torch.normal(h, x)), "elements of std >= 0"),
    "a spread of the carry": (lambda h, x: (torch.normal(x, h), h), "elements of std >= 0"),
}


@pytest.mark.parametrize("value", [-1.5, math.nan])
@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_drawn_is_an_error_at_its_step(name: str, value: float):
    body, message = WRONG[name]
    xs = torch.full((4, 3), 0.5)
    xs[2] = value

    def wrong(h: Tensor, x: Tensor) -> Any:
        return body(h * 0 + x, x)

    with pytest.raises(RuntimeError):
        tl.scan(wrong, torch.full((3,), 0.5), xs)
    with pytest.raises(RuntimeError, match=message):
        tl.scan(wrong, torch.full((3,), 0.5), xs, compile="strict")


def test_the_numbers_themselves_bit_for_bit():
    def body(h: Tensor, _: None) -> Any:
        drawn = torch.randn(17), torch.rand(3, 5), torch.randint(9, (2,)), torch.empty(40).bernoulli_(0.3)
        return h, (*drawn, F.dropout(torch.ones(9), 0.5))

    def run(compile: Any) -> list[Tensor]:
        torch.manual_seed(2)
        return tree_leaves(tl.scan(body, torch.zeros(1), None, 6, compile=compile))

    check_equal(run("strict"), run(False), 0)


def test_one_plan_for_every_generator_and_new_numbers_each_time():
    plans.clear()

    def run(own: Generator) -> Tensor:
        return tl.scan(
            lambda h, _: (h + torch.randn(4, generator=own), None), torch.zeros(4), None, 3, compile="strict"
        )[0]

    owns = [Generator(HERE).manual_seed(3) for _ in range(2)]
    found = [run(own) for own in owns for _ in range(2)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    assert len([p for p in plans._plans.values() if isinstance(p, Plan)]) == 1


def test_second_derivatives_and_kept_graphs():
    def run(compile: Any, checkpoints: int | None) -> list[Tensor]:
        torch.manual_seed(4)
        h, xs = torch.ones(B, H, dtype=DTYPE, requires_grad=True), torch.randn(T, B, H, dtype=DTYPE)
        last, _ = tl.scan(BODIES["dropout"], h, xs, compile=compile, checkpoints=checkpoints)
        once = torch.autograd.grad(last.square().sum(), h, retain_graph=True)
        (grad,) = torch.autograd.grad(last.square().sum(), h, create_graph=True)
        return [*once, *torch.autograd.grad(grad.square().sum(), TURN)]

    expected = run(False, None)
    for checkpoints in (None, 2):
        check_equal(run("strict", checkpoints), expected, 1e-10)


def test_numbers_that_only_the_forward_pass_needs_are_not_held_for_long_loops(monkeypatch: pytest.MonkeyPatch):
    for module in ("results", "blocks"):
        monkeypatch.setattr(f"tensorloop.loop.compiled.run.{module}.MOST_STEPS", 3)

    def body(h: Tensor, x: Tensor) -> Any:
        return h @ TURN + torch.randn_like(x), x.sum()

    with pytest.warns(NotCompiledWarning, match=r"would be held .* Cure: give checkpoints="):
        outcome(body, True)
    check_same(body, checkpoints=2)
    check_same(BODIES["dropout"])


def test_loops_of_unknown_length_run_eagerly():
    def run(compile: Any) -> Tensor:
        torch.manual_seed(4)
        return tl.while_loop(lambda c: c.sum() < 5, lambda c: c + torch.rand(3), torch.zeros(3), compile=compile)

    expected = run(False)
    with pytest.warns(NotCompiledWarning, match="drawn in a loop of unknown length"):
        assert torch.equal(run(True), expected)
