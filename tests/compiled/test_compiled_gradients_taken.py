"""Bodies that take gradients by `torch.autograd.grad`, and blocks under another grad mode, compiled and eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tests.support.devices import HERE

D = torch.float64
Body = Callable[[Tensor, Tensor], Any]
W = torch.linspace(-0.8, 1.1, 4, dtype=D).requires_grad_()
M = torch.randn(4, 4, dtype=D, generator=torch.Generator(HERE).manual_seed(2)).requires_grad_()
XS = torch.randn(5, 2, 4, dtype=D, generator=torch.Generator(HERE).manual_seed(1))


def inner_step(h: Tensor, x: Tensor) -> Any:
    """MAML's: the gradient has a graph."""
    loss = (torch.tanh(h * x) @ M.detach()).square().sum()
    return h - 0.1 * grad(loss, h, create_graph=True)[0] * W, loss


def first_order(h: Tensor, x: Tensor) -> Any:
    loss = torch.sigmoid(h * x).square().sum()
    return torch.sin(h) - 0.1 * grad(loss, h)[0] * W, x * W


def langevin(h: Tensor, x: Tensor) -> Any:
    z = h.detach().requires_grad_()
    force = grad((z.sin() * W.detach() * x.detach()).sum(), z)[0]
    return h * W - 0.1 * force, force


def inner_leaf(h: Tensor, x: Tensor) -> Any:
    w = W.detach().clone().requires_grad_()
    loss = (torch.sin(h * w) - x * W).square().sum()
    return torch.tanh(h + grad(loss, w, create_graph=True)[0]), loss


def curvature(h: Tensor, x: Tensor) -> Any:
    first = grad((h.sin() * x).sum(), h, create_graph=True)[0]
    second = grad(first.square().sum(), h, create_graph=True)[0]
    return torch.tanh(h + 0.1 * second * W), first


def layers(h: Tensor, x: Tensor) -> Any:
    y = (nn.functional.layer_norm(h, (4,)) * x).sum() + (torch.softmax(h @ M, -1) * torch.exp(h * 0.1)).sum()
    return torch.tanh(h + 0.1 * grad(y, h, create_graph=True)[0] * W), y


def of_a_capture(h: Tensor, x: Tensor) -> Any:
    found = grad((x.detach() * W).sin().sum(), W, create_graph=True)[0]
    return torch.tanh(h + found), found


def steps_in_place(h: Tensor, x: Tensor) -> Any:
    z = h.detach().clone().requires_grad_()
    for _ in range(2):
        force = grad((z.sin() * x.detach()).sum(), z)[0]
        with torch.no_grad():
            z -= 0.1 * force
    return torch.sin(h * W) + z.detach() * 0.1, z.detach()


def without(h: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        scale = (h * x).sum(-1, keepdim=True).tanh()
    return torch.sin(h * scale + x * W), scale


def a_view_without(h: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        first = h[:, :1]
    return torch.sin(h * first + x * W), first * 2


def in_place_without(h: Tensor, x: Tensor) -> Any:
    y = h * W
    with torch.no_grad():
        y.mul_(0.5).add_(x)
    return torch.tanh(y + x), y


def set_and_set_back(h: Tensor, x: Tensor) -> Any:
    torch.set_grad_enabled(False)
    y = h * x
    torch.set_grad_enabled(True)
    return torch.tanh(h + y * W), y


BODIES = [inner_step, first_order, langevin, inner_leaf, curvature, layers, of_a_capture, steps_in_place]
BODIES += [without, a_view_without, in_place_without, set_and_set_back]


def run(body: Body, compile: Any, second: bool = False, **options: Any) -> list[Tensor | None]:
    h, xs = torch.linspace(-1, 1, 8, dtype=D).reshape(2, 4).requires_grad_(), XS.clone().requires_grad_()
    last, ys = tl.scan(body, h, xs, compile=compile, **options)
    loss = last.square().sum() + (ys.square().sum() if ys.requires_grad else 0)
    found = torch.autograd.grad(loss, (h, xs, W, M), create_graph=second, allow_unused=True)
    if not second:
        return [last, ys, *found]
    weighted = [g * torch.arange(g.numel(), dtype=D).reshape(g.shape) for g in found if g is not None]
    total = sum((g.square().sum() for g in weighted), torch.zeros(()))
    return [*found, *torch.autograd.grad(total, (h, xs, W, M), allow_unused=True)]


@pytest.mark.parametrize("body", BODIES)
def test_gradients_are_those_of_the_eager_loop(body: Body):
    torch.testing.assert_close(run(body, "strict"), run(body, False))
    torch.testing.assert_close(run(body, "strict", second=True), run(body, False, second=True))


@pytest.mark.parametrize("options", [{"checkpoints": 2}, {"reverse": True}], ids=str)
@pytest.mark.parametrize("body", [inner_step, without])
@pytest.mark.extended("options1")
def test_in_loops_of_other_kinds(body: Body, options: dict[str, Any]):
    torch.testing.assert_close(run(body, "strict", **options), run(body, False, **options))


def test_energies_under_no_grad():
    def body(h: Tensor, x: Tensor) -> Any:
        with torch.enable_grad():
            z = h.detach().requires_grad_()
            force = grad((torch.exp(-((z * x) ** 2)) @ M).sum(), z)[0]
        return h + 0.1 * force, force

    with torch.no_grad():
        torch.testing.assert_close(tl.scan(body, XS[0], XS, compile="strict"), tl.scan(body, XS[0], XS, compile=False))


def test_loops_of_unknown_length():
    def descend(compile: Any) -> list[Tensor]:
        def body(h: Tensor) -> Tensor:
            return h - 0.2 * grad((h.square() * W.square()).sum(), h, create_graph=True)[0]

        h = torch.linspace(1, 2, 4, dtype=D).requires_grad_()
        last = tl.while_loop(lambda h: h.abs().max() > 1.2, body, h, compile=compile, max_steps=9)
        return [last, *torch.autograd.grad(last.sum(), (h, W))]

    torch.testing.assert_close(descend("strict"), descend(False))


def through_earlier_steps(h: Tensor, x: Tensor) -> Any:
    return torch.tanh(h + grad((h * W).sin().sum(), W, create_graph=True)[0]), x


def of_two_carries(c: Any, x: Tensor) -> Any:
    a, b = c
    found = grad((a * b * x).sum(), a, create_graph=True)[0]
    new = torch.sin(a + found)
    return (new, new * W), found


def leaves_a_mode(h: Tensor, x: Tensor) -> Any:
    torch.set_grad_enabled(False)
    return h * x, x


def asks_for_gradients(h: Tensor, x: Tensor) -> Any:
    x.requires_grad_()
    return h * x * W, x


def runs_backward(h: Tensor, x: Tensor) -> Any:
    w = W.detach().clone().requires_grad_()
    (h * w).sum().backward()
    return h * x * W, x


REFUSED: list[tuple[Body, str]] = [
    (through_earlier_steps, "takes the gradient for a tensor from outside, and the carry may depend on it"),
    (leaves_a_mode, "the body leaves another grad mode behind"),
    (asks_for_gradients, r"(calls requires_grad_\(\) on what it is given|sets requires_grad of a Tensor)"),
    (runs_backward, r"runs a backward pass \(backward\)"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED, ids=[body.__name__ for body, _ in REFUSED])
def test_what_is_refused_is_named(body: Body, reason: str):
    h = XS[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=f"not compiled: .*{reason}.*Cure: [^ ]"):
        tl.scan(body, h, XS, compile="strict")
    assert torch.is_grad_enabled()


def test_a_carry_on_which_another_carry_depends():
    """The eager loop's gradient goes through both."""
    init = XS[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="takes the gradient for a carry on which another carry depends"):
        tl.scan(of_two_carries, (init, XS[1]), XS, compile="strict")
    with pytest.warns(NotCompiledWarning):
        found = tl.scan(of_two_carries, (init, XS[1]), XS, compile=True)
    torch.testing.assert_close(found, tl.scan(of_two_carries, (init, XS[1]), XS))


def by_two_steps(c: Any, x: Tensor) -> Any:
    a, b, d = c
    return (d, b, b * 2), grad((a * b * x).sum(), b, create_graph=True)[0]


def by_another_plan(c: Any, x: Tensor) -> Any:
    a, b = c
    if x > 0:
        return (a + b, b), a
    return (a * 2, b), grad((a * b).sum(), b, create_graph=True)[0]


def changed_in_place(c: Any, x: Tensor) -> Any:
    a, b = c
    twice = a * 2
    a.add_(1)
    return (torch.sin(b), b), grad((twice * b * x).sum(), b, create_graph=True)[0]


def hands_on_what_it_takes_it_for(c: Any, x: Tensor) -> Any:
    return (W, c[1] + x), grad((c[0] * W * c[1]).sum(), c[0], create_graph=True)[0]


ONES = torch.ones(6, dtype=D)
SIGNS = torch.tensor([1.0, -1, -1, 1, -1, -1], dtype=D)


@pytest.mark.parametrize("xs", [-ONES, SIGNS, -SIGNS], ids=["ones", "signs", "other signs"])
@pytest.mark.parametrize(
    ("body", "carries"),
    [(by_two_steps, 3), (by_another_plan, 2), (changed_in_place, 2), (hands_on_what_it_takes_it_for, 2)],
)
def test_ways_by_several_steps_and_by_other_plans(body: Any, carries: int, xs: Tensor):
    """The plain loop says what is right; what is not refused is that."""
    init = tuple(W.detach().clone().requires_grad_() * (k + 1) for k in range(carries))
    carry, ys = init, []
    for x in xs:
        carry, y = body(tuple(c * 1 for c in carry) if body is changed_in_place and carry is init else carry, x)
        ys.append(y)
    with pytest.warns(NotCompiledWarning, match="takes the gradient for a"):
        found = tl.scan(body, tuple(c * 1 for c in init), xs, compile=True)
    torch.testing.assert_close(found, (carry, torch.stack(ys)))


def swapped(c: Any, x: Tensor) -> Any:
    a, b, d = c
    return (b, a, torch.sin(d) * x), grad((a * b * d).sum(), b, create_graph=True)[0]


def test_carries_that_depend_on_nothing_else_compile():
    def of(compile: Any) -> Any:
        init = tuple(W.detach().clone().requires_grad_() for _ in range(3))
        carry, ys = tl.scan(swapped, init, SIGNS, compile=compile)
        return carry, ys, grad(ys.square().sum(), init)

    torch.testing.assert_close(of("strict"), of(False))


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: torch.exp(torch.sin(x)),
    "tanh": lambda x: torch.tanh(M.detach() @ x),
    "softmax": lambda x: torch.softmax(M.detach() @ x, 0),
    "norm": lambda x: x * torch.linalg.vector_norm(x),
    "solve": lambda x: torch.linalg.solve(torch.outer(x, x) + 3 * torch.eye(4, dtype=D), x),
}


@pytest.mark.parametrize("name", KEPT)
def test_results_that_autograd_kept_outside_of_the_body(name: str):
    """They have their graph there: rows of a Jacobian, and products with a Hessian."""

    def of(compile: Any) -> list[Tensor]:
        x = W.detach().clone().requires_grad_()
        y = KEPT[name](x)
        first = grad(y.square().sum(), x, create_graph=True)[0]
        rows = tl.map(lambda e: grad(y, x, e, create_graph=True)[0], torch.eye(4, dtype=D), compile=compile)
        power = tl.scan(
            lambda v, _: (grad(first, x, v, create_graph=True)[0] / 9, v), ONES[:4], length=3, compile=compile
        )[0]
        last = grad(rows.square().sum() + power.sum(), x, create_graph=True)[0]
        return [rows, power, last, *grad(last.sum(), x)]

    torch.testing.assert_close(of("strict"), of(False))


def test_what_is_computed_anew_has_no_second_order():
    def body(h: Tensor, x: Tensor) -> Any:
        z = h.detach().requires_grad_()
        energy = checkpoint(lambda z: torch.exp(torch.sin(z) * W).sum(), z, use_reentrant=False)
        return torch.tanh(h + grad(energy, z, create_graph=True)[0]), x

    with pytest.raises(RuntimeError, match=r"goes through what is computed anew|_NoopSaveInputs"):
        tl.scan(body, W.detach(), XS[:, 0], compile="strict")


def test_an_edge_of_a_graph_stands_for_its_tensor():
    edge = get_gradient_edge(W)
    with pytest.raises(RuntimeError, match="takes the gradient for a tensor from outside, and the carry may depend"):
        tl.scan(lambda h, x: (torch.sin(h * W), grad((h * W).sum(), edge)[0]), XS[0], XS, compile="strict")


def test_what_the_loop_starts_with_may_depend_on_what_is_asked_for():
    """It is no part of the step, so it is looked at in each call."""
    for xs, refused in ((XS, False), (XS * W, True), (XS, False)):
        if refused:
            with pytest.raises(RuntimeError, match="takes the gradient for a tensor on which the loop's inputs depend"):
                tl.scan(lambda h, x: (torch.sin(h + grad((x * W).sum(), W)[0]), h), XS[0], xs, compile="strict")
        else:
            tl.scan(lambda h, x: (torch.sin(h + grad((x * W).sum(), W)[0]), h), XS[0], xs, compile="strict")


def test_a_tensor_without_a_gradient_raises_as_in_the_eager_loop():
    for compile in (True, False):
        with pytest.raises(RuntimeError, match="does not require grad"):
            tl.scan(lambda h, x: (h - grad((h * h).sum(), h)[0], x), XS[0], XS, compile=compile)


def test_beside_a_tensor_array():
    def of(compile: Any) -> list[Tensor]:
        def body(state: Any, x: Tensor) -> Any:
            h, array = state
            z = h.detach().requires_grad_()
            h = torch.sin(h + x * W + grad((z.sin() * x).sum(), z, create_graph=True)[0])
            return (h, array.append(h)), None

        (_, array), _ = tl.scan(body, (XS[0], tl.TensorArray()), XS, compile=compile)
        return [array.stack(), *torch.autograd.grad(array.stack().sum(), W)]

    torch.testing.assert_close(of("strict"), of(False))
