"""Gradients of loops, one behaviour a test, against plain Python loops. Loops with arrays: test_loop_nesting.py."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import tensorloop as tl
from tests.support.loop_cases import (
    Counter,
    Ours,
    Plain,
    cell,
    compare,
    inputs,
    randn,
    recurrent,
    rotate,
    with_and_without_checkpoints,
)

# -- who gets a gradient


@with_and_without_checkpoints
@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("part", ["both", "carry", "ys", "row"])
def test_any_subset_of_inputs_and_any_part_of_the_results(part: str, wants: tuple[bool, ...], checkpoints: Any) -> None:
    def program(loops: Any, *given: Tensor) -> Any:
        carry, ys = recurrent(loops, *given)
        return {"both": (carry, ys), "carry": carry, "ys": ys, "row": ys[2]}[part]

    compare(program, *inputs(*wants), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_single_leaves_of_trees(checkpoints: Any) -> None:
    """One leaf of init, xs, closure wants a gradient; one output of two is used."""

    def program(loops: Any, a: Tensor, b: Tensor, x: Tensor, z: Tensor, w: Tensor, v: Tensor) -> Any:
        def body(carry: Any, row: Any) -> Any:
            a, b = carry["a"], carry["b"]
            return {"a": rotate(a) + row[0] * w, "b": rotate(b) + row[1] * v}, (a * row[0], b.sin())

        carry, (p, q) = loops.scan(body, {"a": a, "b": b}, (x, z))
        return carry["a"], q, carry["b"].detach(), p.detach()

    shapes = [(2,), (2,), (5, 2), (5, 2), (2,), (2,)]
    for chosen in range(6):
        given = [randn(*shape, seed=i, grad=i == chosen) for i, shape in enumerate(shapes)]
        compare(program, *given, checkpoints=checkpoints)


@with_and_without_checkpoints
def test_flags_of_outputs_are_those_of_the_loop(checkpoints: Any) -> None:
    """A carry that needs no gradient, integers beside floats, an output cut by detach or no_grad."""

    def program(loops: Any, init: Tensor, xs: Tensor) -> Any:
        def body(carry: Any, x: Tensor) -> Any:
            a, plain, count, flag = carry
            with torch.no_grad():
                quiet = a * 2
            new = (rotate(a) + x, rotate(plain), count + 1, ~flag)
            return new, (quiet, a.detach(), plain, count, (a > 0), a.sum(), None)

        zero = torch.zeros(2, dtype=torch.float64)
        return loops.scan(body, (init, zero, torch.tensor(0), torch.tensor(True)), xs)

    compare(program, randn(2), randn(4, 2), checkpoints=checkpoints)
    compare(program, randn(2, grad=False), randn(4, 2), checkpoints=checkpoints)
    compare(program, randn(2, grad=False), randn(4, 2, grad=False), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_a_gradient_that_begins_after_some_steps_through_a_chain_of_carries(checkpoints: Any) -> None:
    def program(loops: Any, w: Tensor) -> Any:
        def body(i: int, carry: Any) -> Any:
            a, b, c, d = carry
            return (rotate(a) * (w if i == 1 else 1), rotate(b) + a, rotate(c) * b, d + c)

        return loops.fori_loop(0, 6, body, tuple(torch.ones(2, dtype=torch.float64) for _ in range(4)))

    compare(program, randn(2), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_a_gradient_that_ends_after_some_steps(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        def body(i: int, carry: Any) -> Any:
            a, b = carry
            return rotate(a.detach() if i == 3 else a) * w, b + a

        return loops.fori_loop(0, 6, body, (init, torch.zeros(2, dtype=torch.float64)))

    compare(program, randn(2), randn(2, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("last", [0, 3])
def test_a_last_carry_without_gradient(last: int, checkpoints: Any) -> None:
    """The last step throws the recurrence away, or never begins one."""

    def program(loops: Any, init: Tensor, xs: Tensor) -> Any:
        def body(i: Any, x: Tensor) -> Any:
            n, c = i
            return (n + 1, rotate(c) * x if n < last else c.detach() * 2), c * x

        return loops.scan(body, (0, init), xs)

    compare(program, randn(2), randn(4, 2), checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("what", ["carry", "y", "closure"])
def test_no_grad_in_the_body(what: str, checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor, w: Tensor, v: Tensor) -> Any:
        def body(carry: Any, x: Tensor) -> Any:
            a, b = carry
            with torch.set_grad_enabled(what != "carry"):
                new = rotate(a) * w
            with torch.set_grad_enabled(what != "y"):
                y = b * x
            with torch.set_grad_enabled(what != "closure"):
                factor = v * 2
            return (new, rotate(b) + factor * x), y

        return loops.scan(body, (init, init), xs)

    compare(program, randn(2), randn(4, 2), randn(2, seed=1), randn(2, seed=2), checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("where", ["body", "loop", "inference"])
def test_everything_under_no_grad_has_no_graph(where: str, checkpoints: Any) -> None:
    init, xs, w = inputs()
    if where == "body":
        body = torch.no_grad()(cell(w))
        carry, ys = tl.scan(body, init, xs, checkpoints=checkpoints)
    else:
        with torch.no_grad() if where == "loop" else torch.inference_mode():
            carry, ys = tl.scan(cell(w), init, xs, checkpoints=checkpoints)
    assert not carry.requires_grad
    assert not ys.requires_grad
    torch.testing.assert_close([carry, ys], [x.detach() for x in recurrent(Plain(), *inputs())])


@with_and_without_checkpoints
def test_grad_mode_inside_no_grad(checkpoints: Any) -> None:
    """A body may ask for gradients where the loop does not, for a solver's own use."""
    x = randn(2, grad=False)

    def body(i: int, c: Tensor) -> Tensor:
        with torch.enable_grad():
            v = c.detach().requires_grad_()
            (g,) = grad((v * rotate(v)).sum() + v.sin().sum(), v)
        return c + 0.1 * g

    with torch.no_grad():
        out = tl.fori_loop(0, 4, body, x, checkpoints=checkpoints)
    assert not out.requires_grad
    true = x
    for i in range(4):
        true = body(i, true)
    torch.testing.assert_close(out, true)


@with_and_without_checkpoints
def test_a_body_that_calls_autograd(checkpoints: Any) -> None:
    """The gradient of an energy is part of the step, and is differentiated again."""

    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        def body(i: int, c: Tensor) -> Tensor:
            v = c if c.requires_grad else c.detach().requires_grad_()
            (g,) = grad((v * w).sin().sum(), v, create_graph=True)
            return rotate(c) + g

        return loops.fori_loop(0, 4, body, init)

    compare(program, randn(2), randn(2, seed=1), checkpoints=checkpoints)
    compare(program, randn(2, grad=False), randn(2, seed=1), checkpoints=checkpoints)


# -- where gradients end


@with_and_without_checkpoints
def test_a_detach_in_a_cycle_of_carries(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        def body(i: int, carry: Any) -> Any:
            a, b = carry
            return (rotate(b) * w, rotate(a.detach()) + w)

        return loops.fori_loop(0, 5, body, (init, init))

    compare(program, randn(2), randn(2, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_functions_without_derivative_where_no_gradient_is_needed(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor) -> Any:
        def body(carry: Any, x: Tensor) -> Any:
            a, order = carry
            best = x.argmax()
            floor = torch.nextafter(x.detach(), x.detach() + 1)  # has no derivative
            return (rotate(a) * x, order + best), a[best] + floor.sum()

        return loops.scan(body, (init, torch.tensor(0)), xs)

    compare(program, randn(2), randn(5, 2), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_a_loss_that_does_not_depend_on_the_loop_replays_nothing(checkpoints: Any) -> None:
    w = randn(3, 4)
    body = Counter(cell(w))
    init, xs, _ = inputs()
    carry, ys = tl.scan(body, init, xs, checkpoints=checkpoints)
    other = (init * 2).sum() + w.sum()
    grads = grad(other, (init, xs, w), allow_unused=True)
    assert grads[1] is None
    assert torch.equal(grads[0], torch.full((4,), 2.0, dtype=torch.float64))
    zero = grad((carry.detach() * ys.detach().sum() * init).sum() * 0, init)
    assert torch.equal(zero[0], torch.zeros(4))
    assert body.calls == 7


@with_and_without_checkpoints
def test_length_one_and_zero(checkpoints: Any) -> None:
    compare(recurrent, randn(4), randn(1, 3), randn(3, 4), checkpoints=checkpoints)
    init, xs, w = randn(4), randn(0, 3), randn(3, 4)
    carry, ys = tl.scan(cell(w), init, xs, checkpoints=checkpoints)
    grads = grad(carry.sum() + ys.sum(), (init, xs, w), allow_unused=True)
    assert torch.equal(grads[0], torch.ones(4))
    assert all(g is None or not g.any() for g in grads[1:])


@with_and_without_checkpoints
def test_a_while_loop_of_no_steps_passes_the_gradient_to_init(checkpoints: Any) -> None:
    init, w = randn(2), randn(2, seed=1)
    out = tl.while_loop(lambda c: False, lambda c: c * w, init, checkpoints=checkpoints)
    grads = grad((out * 3).sum(), (init, w), allow_unused=True)
    assert torch.equal(grads[0], torch.full((2,), 3.0))
    assert grads[1] is None


# -- several backward passes


@with_and_without_checkpoints
def test_retain_graph_twice_and_then_the_usual_error(checkpoints: Any) -> None:
    init, xs, w = inputs()
    out = recurrent(Ours(checkpoints), init, xs, w)[1].square().sum()
    first = grad(out, (init, xs, w), retain_graph=True)
    second = grad(out, (init, xs, w))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="a second time"):
        grad(out, (init, xs, w))


@with_and_without_checkpoints
def test_two_outputs_differentiated_one_after_the_other(checkpoints: Any) -> None:
    init, xs, w = inputs()

    def parts(loops: Any) -> list[Any]:
        carry, ys = recurrent(loops, init, xs, w)
        found = [grad(carry.sin().sum(), (init, w), retain_graph=True), grad(ys.cos().sum(), (xs, w))]
        return [x for group in found for x in group]

    torch.testing.assert_close(parts(Ours(checkpoints)), parts(Plain()))


@with_and_without_checkpoints
def test_backward_adds_to_grad_and_takes_inputs(checkpoints: Any) -> None:
    init, xs, w = inputs()
    true = grad(recurrent(Plain(), init, xs, w)[1].square().sum(), (init, xs, w))
    for _ in range(2):
        recurrent(Ours(checkpoints), init, xs, w)[1].square().sum().backward()
    torch.testing.assert_close([init.grad, xs.grad, w.grad], [2 * g for g in true])
    w.grad = None
    recurrent(Ours(checkpoints), init, xs, w)[1].square().sum().backward(inputs=[w])
    torch.testing.assert_close([init.grad, w.grad], [2 * true[0], true[2]])


# -- higher orders


@with_and_without_checkpoints
def test_gradcheck_and_gradgradcheck(checkpoints: Any) -> None:
    def function(init: Tensor, xs: Tensor, w: Tensor) -> Any:
        return recurrent(Ours(checkpoints), init, xs, w)

    given = randn(4), randn(3, 3), randn(3, 4)
    assert gradcheck(function, given)
    assert gradgradcheck(function, given)


@with_and_without_checkpoints
@pytest.mark.parametrize("reverse", [False, True])
def test_third_order(reverse: bool, checkpoints: Any) -> None:
    def derivatives(loops: Any) -> list[Tensor]:
        init, xs, w = inputs()
        carry, ys = loops.scan(cell(w), init, xs, reverse=reverse)
        value, found = carry.sin().sum() + ys.square().sum(), []
        for _ in range(3):
            grads = grad(value, (init, xs, w), create_graph=True)
            found += grads
            value = sum((g.sin().sum() for g in grads), torch.zeros((), dtype=torch.float64))
        return found

    # compiled loops sum in another order, and these derivatives are in the hundreds
    torch.testing.assert_close(derivatives(Ours(checkpoints)), derivatives(Plain()), rtol=1e-8, atol=1e-8)


# -- map, long loops


@with_and_without_checkpoints
def test_map_with_partial_gradients(checkpoints: Any) -> None:
    def program(loops: Any, a: Tensor, b: Tensor, w: Tensor) -> Any:
        return loops.map(lambda x: [x[0] @ w, [(x[1] * 2, x[1].detach() @ x[1]), x[1] > 0]], (a, b))

    for wants in itertools.product([False, True], repeat=3):
        given = randn(3, 2, grad=wants[0]), randn(3, 2, seed=1, grad=wants[1]), randn(2, 2, grad=wants[2])
        compare(program, *given, checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.extended("K=1")
def test_thousands_of_steps(checkpoints: Any) -> None:
    """No recursion, and no deep graph left to free."""
    init = randn(2)
    out = tl.fori_loop(0, 3000, lambda i, c: rotate(c, 0.1), init, checkpoints=checkpoints and 30)
    turn = torch.autograd.functional.jacobian(lambda c: rotate(c, 300.0), init.detach())
    torch.testing.assert_close(grad(out.sum(), init)[0], turn.sum(0), rtol=1e-9, atol=1e-9)
