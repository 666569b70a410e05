"""Loops under torch.func, forward mode, batched cotangents and torch.compile. Each case against a plain Python loop."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, grad
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vjp, vmap

import tensorloop as tl
from tests.support.loop_cases import Ours, Plain, Slots, cell, randn, rotate, tensors, with_and_without_checkpoints


def scanned(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Tensor:
    carry, ys = loops.scan(cell(w), init, xs)
    return torch.cat([carry, ys.flatten()])


def repeated(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Tensor:
    """A while loop with an array, prefix reads and an overwrite."""

    def body(carry: Any) -> Any:
        array, c, t = carry
        c = rotate(c) + torch.sin(xs[t] @ w) + array[: t + 1].sum(0).cos()
        array = array.append(c)
        return array.write(0, c * 0.5) if t == 1 else array, c, t + 1

    array, c, _ = loops.while_loop(lambda carry: carry[2] < 3, body, (loops.array().append(init), init, 0))
    return torch.cat([array.stack().flatten(), c])


def counted(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Tensor:
    return loops.fori_loop(0, 3, lambda i, c: rotate(c, i) * w[i % 3] + xs[i].sum(), init)


def mapped(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Tensor:
    return loops.map(lambda x: (x @ w * init).sin(), xs).flatten()


PROGRAMS = [scanned, repeated, counted, mapped]
with_programs = pytest.mark.parametrize("program", PROGRAMS)


def given() -> tuple[Tensor, Tensor, Tensor]:
    return randn(4, grad=False), randn(3, 3, grad=False), randn(3, 4, grad=False)


def both(checkpoints: Any, run: Callable[[Any], Any], tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(run(Ours(checkpoints)), run(Plain()), rtol=tolerance, atol=tolerance)


# -- derivatives


@with_and_without_checkpoints
@with_programs
@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian"])
def test_func_derivatives_to_every_argument(name: str, program: Any, checkpoints: Any) -> None:
    transform, argnums = getattr(torch.func, name), (0, 1, 2)

    def run(loops: Any) -> Any:
        if name in ("grad", "hessian"):
            return transform(lambda *args: program(loops, *args).sin().sum(), argnums)(*given())
        return transform(lambda *args: program(loops, *args), argnums)(*given())

    both(checkpoints, run)


@with_and_without_checkpoints
@with_programs
def test_vjp_and_jvp(program: Any, checkpoints: Any) -> None:
    def backward(loops: Any) -> Any:
        out, pull, *_ = vjp(lambda *args: program(loops, *args), *given())
        return out, pull(torch.linspace(-1, 1, len(out), dtype=torch.float64))

    def forward(loops: Any) -> Any:
        tangents = tuple(x.cos() for x in given())
        return jvp(lambda *args: program(loops, *args), given(), tangents)

    def forward_twice(loops: Any) -> Any:
        tangents = tuple(x.cos() for x in given())
        return jvp(lambda *args: jvp(lambda *inner: program(loops, *inner), args, tangents)[1], given(), tangents)

    for run in (backward, forward, forward_twice):
        both(checkpoints, run)


@with_and_without_checkpoints
@with_programs
def test_jacfwd_is_jacrev_and_hessians_agree(program: Any, checkpoints: Any) -> None:
    init, xs, w = given()

    def function(w: Tensor) -> Tensor:
        return program(Ours(checkpoints), init, xs, w)

    torch.testing.assert_close(jacfwd(function)(w), jacrev(function)(w))
    over = [hessian, lambda f: jacrev(jacrev(f)), lambda f: jacrev(jacfwd(f))]
    first, *rest = (h(lambda w: function(w).sin().sum())(w) for h in over)
    for other in rest:
        torch.testing.assert_close(first, other)


@with_and_without_checkpoints
@with_programs
def test_forward_mode(program: Any, checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, x.cos()) for x in given()]
            out = forward_ad.unpack_dual(program(loops, *duals))
            return out.primal, out.tangent

    both(checkpoints, run)


@with_and_without_checkpoints
@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_of_one_input_and_backward_of_its_tangent(which: int, checkpoints: Any) -> None:
    """A tangent that only init, xs or the closure carries; then reverse over forward."""

    def run(loops: Any) -> Any:
        inputs = [x.requires_grad_() for x in given()]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, x.detach().cos()) if i == which else x for i, x in enumerate(inputs)]
            tangent = forward_ad.unpack_dual(scanned(loops, *duals)).tangent
            assert tangent is not None
            return tangent.detach(), grad(tangent.sin().sum(), inputs, allow_unused=True, materialize_grads=True)

    both(checkpoints, run)


@with_and_without_checkpoints
def test_a_closed_over_wrapped_tensor_gets_its_gradient(checkpoints: Any) -> None:
    init, xs, w = given()
    found = torch.func.grad(lambda w: tl.scan(cell(w), init, xs, checkpoints=checkpoints)[0].sum())(w)
    v = w.clone().requires_grad_()
    torch.testing.assert_close(found, grad(tl.scan(cell(v), init, xs)[0].sum(), v)[0])


@with_and_without_checkpoints
def test_functional_call(checkpoints: Any) -> None:
    model = nn.Linear(4, 4, dtype=torch.float64)
    init = given()[0]

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, loops: Any, init: Tensor) -> Tensor:
            return loops.fori_loop(0, 3, lambda i, c: rotate(c) + self.inner(c).sin(), init).sum()

    loop = Loop()
    weights = {name: p.detach() * 2 for name, p in loop.named_parameters()}

    def run(loops: Any) -> Any:
        return torch.func.grad(lambda weights: functional_call(loop, weights, (loops, init)))(weights)

    both(checkpoints, run)


@with_and_without_checkpoints
@with_programs
def test_batched_cotangents(program: Any, checkpoints: Any) -> None:
    """`is_grads_batched` runs backward under vmap: the loop's own counters stay plain numbers."""

    def run(loops: Any) -> Any:
        inputs = [x.requires_grad_() for x in given()]
        out = program(loops, *inputs)
        cotangents = torch.eye(len(out), dtype=torch.float64)[:5]
        return grad(out, inputs, cotangents, is_grads_batched=True, allow_unused=True, materialize_grads=True)

    both(checkpoints, run)


@with_and_without_checkpoints
def test_a_loop_inside_a_body_that_is_transformed(checkpoints: Any) -> None:
    """torch.func in the body of a loop, over a loop."""

    def run(loops: Any) -> Any:
        init, xs, w = (x.requires_grad_() for x in given())

        def energy(c: Tensor) -> Tensor:
            return loops.scan(cell(w), c, xs)[0].sin().sum()

        out = loops.fori_loop(0, 3, lambda i, c: rotate(c) + torch.func.grad(energy)(c), init)
        return out.detach(), grad(out.sum(), (init, xs, w))

    both(checkpoints, run)


# -- vmap


@with_and_without_checkpoints
@pytest.mark.parametrize(("init_dim", "xs_dim"), list(itertools.product([None, 0, 1], [None, 0, 1, 2])))
def test_vmap_over_carry_and_xs(init_dim: int | None, xs_dim: int | None, checkpoints: Any) -> None:
    if init_dim is None and xs_dim is None:
        init_dim = 0
    init = randn(4, grad=False) if init_dim is None else randn(4, 5, grad=False).movedim(1, init_dim)
    xs = randn(6, 3, grad=False) if xs_dim is None else randn(6, 3, 5, grad=False).movedim(2, xs_dim)
    w = given()[2]

    def run(init: Tensor, xs: Tensor) -> Any:
        return tl.scan(cell(w), init, xs, checkpoints=checkpoints)

    out = vmap(run, (init_dim, xs_dim))(init, xs)
    for i in range(5):
        one = [x if d is None else x.select(d, i) for x, d in ((init, init_dim), (xs, xs_dim))]
        torch.testing.assert_close(tuple(x[i] for x in out), run(*one))


@with_and_without_checkpoints
@pytest.mark.parametrize("where", ["body", "cond", "both"])
@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_over_captured_tensors_only(where: str, dim: int, checkpoints: Any) -> None:
    """The carry is not batched when the loop begins; each element stops on its own where the condition is batched."""
    limits, rows = torch.tensor([0.5, 3.0, 6.0]), randn(4, 3, grad=False)
    init = torch.zeros(4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)

    def run(limit: Tensor, row: Tensor) -> Any:
        bound = limit if where != "body" else 3.0
        step = row if where != "cond" else 1.0
        return tl.while_loop(
            lambda c: c[1] < bound, lambda c: (rotate(c[0]) + step, c[1] + 1), init, checkpoints=checkpoints
        )

    out = vmap(run, (0, dim))(limits, rows.T if dim == 0 else rows)
    for i in range(3):
        one = run(limits[i], rows[:, i])
        torch.testing.assert_close(tuple(x[i] for x in out), one)


@with_and_without_checkpoints
def test_vmap_of_a_body_that_returns_constants_or_its_input(checkpoints: Any) -> None:
    init = randn(5, 2, grad=False)

    def run(c: Tensor) -> Any:
        (a, b), ys = tl.scan(
            lambda c, x: ((torch.ones(2, dtype=torch.float64), c[1]), c[0]), (c, c), None, 3, checkpoints=checkpoints
        )
        return a, b, ys

    a, b, ys = vmap(run)(init)
    assert torch.equal(a, torch.ones(5, 2))
    assert torch.equal(b, init)
    assert torch.equal(ys[:, 0], init)
    assert torch.equal(ys[:, 1:], torch.ones(5, 2, 2))


@with_and_without_checkpoints
@pytest.mark.parametrize("sizes", [(2, 3), (3, 3)])
def test_nested_vmap_with_different_axes_for_state_and_bound(sizes: tuple[int, int], checkpoints: Any) -> None:
    outer, inner = sizes
    state, bound = randn(2, outer, inner, grad=False), torch.arange(outer * inner).reshape(inner, outer) % 5

    def run(x: Tensor, n: Tensor) -> Any:
        return tl.while_loop(
            lambda c: c[1] < n, lambda c: (rotate(c[0]), c[1] + 1), (x, n * 0), checkpoints=checkpoints
        )

    x, steps = vmap(vmap(run, (1, 0)), (1, 1))(state, bound)
    for i, j in itertools.product(range(outer), range(inner)):
        torch.testing.assert_close((x[i, j], steps[i, j]), run(state[:, i, j], bound[j, i]))


@with_and_without_checkpoints
def test_vmap_where_the_inner_level_alone_decides(checkpoints: Any) -> None:
    limits = torch.tensor([1, 4, 2])

    def run(x: Tensor, n: Tensor) -> Any:
        return tl.while_loop(
            lambda c: c[1] < n,
            lambda c: (rotate(c[0]), c[1] + 1),
            (x, n * 0),
            return_steps=True,
            checkpoints=checkpoints,
        )

    (x, _), steps = vmap(lambda x: vmap(run, (None, 0))(x, limits))(randn(2, 2, grad=False))
    assert steps.tolist() == [[1, 4, 2]] * 2
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(x[i, j], rotate(randn(2, 2, grad=False)[i], 0.9 * float(limits[j])))


@with_and_without_checkpoints
@pytest.mark.parametrize("shared", [True, False])
def test_vmap_of_grad_is_grad_of_vmap_is_row_by_row(shared: bool, checkpoints: Any) -> None:
    limits, rows, w = torch.tensor([2, 0, 3]), randn(3, 4, grad=False), randn(4, seed=1, grad=False)

    def value(x: Tensor, w: Tensor, n: Tensor) -> Tensor:
        bound = 3 if shared else n
        out = tl.while_loop(
            lambda c: c[1] < bound, lambda c: (rotate(c[0]) * w, c[1] + 1), (x, n * 0), checkpoints=checkpoints
        )
        return out[0].sin().sum()

    by_row = vmap(torch.func.grad(value, (0, 1)), (0, None, 0))(rows, w, limits)
    whole = torch.func.grad(lambda x, w: vmap(value, (0, None, 0))(x, w, limits).sum(), (0, 1))(rows, w)
    torch.testing.assert_close((by_row[0], by_row[1].sum(0)), whole)
    for i in range(3):
        x, v = rows[i].clone().requires_grad_(), w.clone().requires_grad_()
        true = x
        for _ in range(3 if shared else int(limits[i])):
            true = rotate(true) * v
        true = grad(true.sin().sum(), (x, v), allow_unused=True, materialize_grads=True)
        torch.testing.assert_close((by_row[0][i], by_row[1][i]), true)


@with_and_without_checkpoints
def test_vmap_with_arrays_and_rows_that_stop(checkpoints: Any) -> None:
    limits = torch.tensor([1, 3, 2])

    def run(x: Tensor, n: Tensor) -> Any:
        def body(carry: Any) -> Any:
            array, c, t = carry
            c = rotate(c) + array[0]
            return array.write(0, c).append(c), c, t + 1

        array, c, _ = tl.while_loop(
            lambda c: c[2] < n, body, (tl.TensorArray().append(x), x, n * 0), checkpoints=checkpoints
        )
        return array.stack(), c

    rows = randn(3, 2, grad=False)
    stack, c = vmap(run)(rows, limits)
    for i in range(3):
        array, last = Slots([rows[i]]), rows[i]
        for _ in range(int(limits[i])):
            last = rotate(last) + array[0]
            array.write(0, last).append(last)
        torch.testing.assert_close(c[i], last)
        torch.testing.assert_close(stack[i], torch.cat([array.stack(), torch.zeros(4 - len(array), 2)]))


def test_until_that_is_batched_is_refused() -> None:
    def run(x: Tensor) -> Any:
        return tl.scan(lambda c, _: (c + 1, c), x, None, 3, until=lambda c: c > 2)

    with pytest.raises(TypeError, match="until is batched by vmap; only while_loop stops each element on its own"):
        vmap(run)(torch.zeros(3))


@with_and_without_checkpoints
def test_length_zero_under_transforms(checkpoints: Any) -> None:
    def run(c: Tensor) -> Any:
        return tl.scan(
            lambda c, x: (c * x, c.sum()), c, torch.zeros(0, 2, dtype=torch.float64), checkpoints=checkpoints
        )

    carry, ys = vmap(run)(randn(3, 2, grad=False))
    assert torch.equal(carry, randn(3, 2))
    assert tuple(ys.shape) == (3, 0)
    found = torch.func.grad(lambda c: run(c)[0].sum() + run(c)[1].sum())(torch.ones(2, dtype=torch.float64))
    assert torch.equal(found, torch.ones(2))


@with_and_without_checkpoints
def test_random_numbers_under_vmap(checkpoints: Any) -> None:
    def run(c: Tensor) -> Tensor:
        return tl.fori_loop(0, 3, lambda i, c: rotate(c) + torch.rand(2), c, checkpoints=checkpoints)

    same = vmap(run, randomness="same")(torch.zeros(4, 2))
    assert torch.equal(same, same[:1].expand(4, 2))
    assert len(vmap(run, randomness="different")(torch.zeros(4, 2)).unique(dim=0)) == 4
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(run)(torch.zeros(4, 2))


# -- torch.compile

# dynamo asks every tensor that it meets for .grad, and torch warns where that is no leaf
asks_for_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def compiled_loss(x: Tensor, w: Tensor, checkpoints: Any) -> Tensor:
    x = x.sin() * 2

    def body(carry: Any, row: Tensor) -> Any:
        array, c = carry
        c = rotate(c) + row * w
        return (array.append(c), c), c.sum()

    (array, c), ys = tl.scan(body, (tl.TensorArray(), x[0]), x, checkpoints=checkpoints)
    rows = tl.while_loop(lambda c: c[:, 0] < 3, lambda c: c.abs() + 1, x, checkpoints=checkpoints)
    return (array.stack().cos() * c).sum() + ys.sin().sum() + rows.square().sum()


@asks_for_grad
@with_and_without_checkpoints
def test_inside_compile(checkpoints: Any) -> None:
    torch._dynamo.reset()
    x, w = randn(3, 2), randn(2, seed=1)
    outs = [f(x, w, checkpoints) for f in (compiled_loss, torch.compile(compiled_loss, backend="eager"))]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(grad(out, (x, w)) for out in outs))


@asks_for_grad
@with_and_without_checkpoints
def test_a_compiled_body(checkpoints: Any) -> None:
    torch._dynamo.reset()
    w = randn(3, 4)
    body = torch.compile(cell(w), backend="eager")
    init, xs = randn(4), randn(5, 3)
    outs = [tl.scan(f, init, xs, checkpoints=checkpoints) for f in (body, cell(w))]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(grad(tensors(out)[1].cos().sum(), (init, xs, w)) for out in outs))


@pytest.mark.parametrize(
    "options", [{}, {"checkpoints": 2}, {"compile": "strict"}, {"checkpoints": 2, "compile": True}]
)
def test_derivatives_of_autograd_functional(options: Any) -> None:
    w, xs = (
        torch.sin(torch.arange(9, dtype=torch.float64)).view(3, 3),
        torch.linspace(0, 1, 12, dtype=torch.float64).view(4, 3),
    )

    def ours(c: Tensor) -> Tensor:
        c, ys = tl.scan(lambda c, x: (torch.tanh(c @ w + x), c.sum()), c, xs, **options)
        return torch.cat([c, ys])

    def plain(c: Tensor) -> Tensor:
        ys = []
        for x in xs:
            ys.append(c.sum())
            c = torch.tanh(c @ w + x)
        return torch.cat([c, torch.stack(ys)])

    c, of = torch.ones(3, dtype=torch.float64), torch.autograd.functional
    for create_graph in (False, True):
        found = of.jacobian(ours, c, create_graph=create_graph)
        torch.testing.assert_close(found, of.jacobian(plain, c, create_graph=create_graph))
    torch.testing.assert_close(of.hessian(lambda c: ours(c).sum(), c), of.hessian(lambda c: plain(c).sum(), c))
    torch.testing.assert_close(of.hvp(lambda c: ours(c).sum(), c, c), of.hvp(lambda c: plain(c).sum(), c, c))
