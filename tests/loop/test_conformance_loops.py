"""Behaviours that loops must hold in combination: orders of backward, functions of torch in a body, odd carries.

One file, however long: what loops promise beyond single features, to be read as a whole.
"""

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import tensorloop as tl
from tensorloop.loop.checkpoint.leaving import HeldTensorWarning
from tensorloop.memory import LiveStorages, collector_off
from tests.support.devices import HERE
from tests.support.loop_cases import (
    Counter,
    Ours,
    Plain,
    cell,
    compare,
    inputs,
    randn,
    rotate,
    tensors,
    with_and_without_checkpoints,
)

D = torch.float64


def both(checkpoints: Any, run: Callable[[Any], Any], tolerance: float = 1e-9) -> None:
    """What `run` gives is the same with our loops and with Python's."""
    torch.testing.assert_close(run(Ours(checkpoints)), run(Plain()), rtol=tolerance, atol=tolerance)


def total(values: Iterable[Tensor]) -> Tensor:
    return torch.stack([x.sum() for x in values]).sum()


# -- several backward passes, of several orders


def noisy(i: int, c: Tensor, norm: nn.Module, generator: torch.Generator) -> Tensor:
    """A step that draws from two generators and changes a buffer."""
    return rotate(norm(c)) + F.dropout(c, 0.3) + torch.rand(5, 4, generator=generator, dtype=D) * c.sin()


@with_and_without_checkpoints
def test_random_numbers_and_buffers_in_backward_passes_of_every_order(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        torch.manual_seed(0)
        norm, generator, init = nn.BatchNorm1d(4, dtype=D), torch.Generator(HERE).manual_seed(7), randn(5, 4)
        assert norm.weight is not None
        wanted = (init, norm.weight)
        value = loops.fori_loop(0, 4, lambda i, c: noisy(i, c, norm, generator), init).sin().sum()
        found = [*grad(value, wanted, retain_graph=True)]
        first = grad(value, wanted, create_graph=True)
        found += [*first, *grad(total(g.square() for g in first), wanted, retain_graph=True)]
        found += [*grad(value, wanted, retain_graph=True)]
        found += [*grad(total(g.sin() for g in first), wanted, retain_graph=True), *grad(value, init)]
        return [*found, *norm.buffers(), torch.rand(3), generator.get_state()]

    both(checkpoints, run, 1e-7)


@with_and_without_checkpoints
def test_batched_gradients_of_a_loop_that_draws_random_numbers(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        torch.manual_seed(0)
        generator, init = torch.Generator(HERE).manual_seed(7), randn(4)

        def body(i: int, c: Tensor) -> Tensor:
            return rotate(c) + F.dropout(c, 0.3) + torch.rand(4, generator=generator, dtype=D) * c.sin()

        out = loops.fori_loop(0, 4, body, init)
        (found,) = grad(out, init, torch.eye(4, dtype=D), is_grads_batched=True)
        return [out, found, torch.rand(3), generator.get_state()]

    both(checkpoints, run)
    with pytest.raises(RuntimeError, match="random operations"):  # refused again, where it was before
        torch.autograd.functional.jacobian(lambda x: _Random.apply(x), torch.ones(2), vectorize=True)


class _Random(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * torch.rand(2)


@with_and_without_checkpoints
def test_a_loop_in_the_backward_of_a_function(checkpoints: Any) -> None:
    """As implicit differentiation does, in the body of another loop."""

    def run(loops: Any) -> Any:
        class Implicit(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
                ctx.save_for_backward(x, w)
                return (x * w).sin()

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
                with torch.enable_grad():
                    x, w = (v.detach().requires_grad_() for v in ctx.saved_tensors)
                    out = loops.fori_loop(0, 4, lambda i, c: rotate(c) * w + c.sin(), x)
                return grad(out, (x, w), g)

        init, w = randn(2), randn(2, seed=1)
        out = loops.fori_loop(0, 3, lambda i, c: rotate(c) + Implicit.apply(c, w), init)
        return [out, *grad(out.sum(), (init, w))]

    both(checkpoints, run)


@with_and_without_checkpoints
@pytest.mark.parametrize("how", ["autograd", "func"])
def test_an_inner_optimisation_through_a_module(how: str, checkpoints: Any) -> None:
    """The weights are the carry, and each step takes their gradient."""

    def run(loops: Any) -> Any:
        torch.manual_seed(0)
        linear, x, y = nn.Linear(3, 2, dtype=D), randn(5, 3, grad=False), randn(5, 2, grad=False)
        rate = torch.tensor(0.1, dtype=D, requires_grad=True)

        def loss(weights: dict[str, Tensor]) -> Tensor:
            return (torch.func.functional_call(linear, weights, (x,)) - y).square().mean()

        def body(i: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
            if how == "func":
                found = torch.func.grad(loss)(weights)
            else:
                values = grad(loss(weights), list(weights.values()), create_graph=True)
                found = dict(zip(weights, values, strict=True))
            return tree_map(lambda v, g: v - rate * g, weights, found)

        out = loss(loops.fori_loop(0, 4, body, dict(linear.named_parameters())))
        return [out, *grad(out, (rate, *linear.parameters()))]

    both(checkpoints, run)


@with_and_without_checkpoints
def test_a_transformed_loop_that_closes_over_the_result_of_a_checkpointed_one(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        init, w, rows = randn(2), randn(2, seed=1), randn(5, 2, seed=4)
        v = loops.fori_loop(0, 3, lambda i, c: rotate(c) * w, init)

        def loss(x: Tensor) -> Tensor:
            return loops.fori_loop(0, 3, lambda i, c: rotate(c) * v, x).sin().sum()

        each = torch.func.vmap(torch.func.grad(loss))(rows)
        return [each, *grad(each.square().sum(), (init, w, rows))]

    both(checkpoints, run)


@with_and_without_checkpoints
def test_nothing_but_the_results_is_held_after_backward(checkpoints: Any) -> None:
    init, xs, w = inputs()

    def run() -> int:
        with collector_off(), LiveStorages() as live:
            carry, ys = tl.scan(cell(w), init, xs, checkpoints=checkpoints)
            (carry.sum() + ys.sin().sum()).backward()
            init.grad = xs.grad = w.grad = None
            return live.bytes - carry.nbytes - ys.nbytes

    run()
    assert run() == 0


# -- what a body and a carry may be


@with_and_without_checkpoints
def test_random_state_in_the_carry(checkpoints: Any) -> None:
    """A generator of the user's own, as data: also under vmap and grad."""

    def program(loops: Any, x: Tensor, w: Tensor, seed: Any = 7) -> Any:
        def body(i: int, carry: Any) -> Any:
            x, state = carry
            state = (state * 1103515245 + 12345) % 2**31
            return rotate(x) * w + state.double() / 2**31, state

        return loops.fori_loop(0, 5, body, (x, torch.as_tensor(seed)))

    compare(program, randn(2), randn(2, seed=1), checkpoints=checkpoints)
    rows, w, seeds = randn(3, 2, grad=False), randn(2, seed=1, grad=False), torch.tensor([7, 8, 9])

    def loss(x: Tensor, w: Tensor, seed: Tensor) -> Tensor:
        return program(Ours(checkpoints), x, w, seed)[0].sin().sum()

    ours = torch.vmap(torch.func.grad(loss, (0, 1)), (0, None, 0))(rows, w, seeds)
    for b in range(3):
        given = rows[b].clone().requires_grad_(), w.clone().requires_grad_()
        torch.testing.assert_close(
            (ours[0][b], ours[1][b]), grad(program(Plain(), *given, seeds[b])[0].sin().sum(), given)
        )


@with_and_without_checkpoints
def test_functions_words_and_sets_in_the_carry(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        def body(i: int, carry: Any) -> Any:
            x, function, word, seen = carry
            return rotate(function(x)) * w, torch.cos if function is torch.sin else torch.sin, word + "a", seen | {i}

        x, function, word, seen = loops.fori_loop(0, 3, body, (init, torch.sin, "", frozenset()))
        assert (function, word, seen) == (torch.cos, "aaa", {0, 1, 2})
        return x

    compare(program, randn(2), randn(2, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_a_saved_input_is_the_same_tensor_in_the_backward_of_a_function(checkpoints: Any) -> None:
    w, same = randn(2, seed=1), []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            x, saved = ctx.saved_tensors
            same.append(saved is w)
            return g * saved, g * x

    out = tl.fori_loop(0, 4, lambda i, c: rotate(Product.apply(c, w)), randn(2), checkpoints=checkpoints)
    grad(out.sum(), w)
    assert same == [True] * 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@with_and_without_checkpoints
def test_nested_tensors_in_the_carry_and_closed_over(checkpoints: Any) -> None:
    offsets = torch.tensor([0, 1, 4, 6])

    def run(loops: Any) -> Any:
        values, w = randn(6, 2), randn(2, seed=1)
        nested = torch.nested.nested_tensor_from_jagged(values * 1, offsets)
        out = loops.fori_loop(0, 3, lambda i, c: (c * w).sin() + c * nested, nested).values()
        return [out, *grad(out.cos().sum(), (values, w))]

    both(checkpoints, run)


@with_and_without_checkpoints
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_a_module_whose_weight_comes_from_a_power_iteration(old: bool, checkpoints: Any) -> None:
    """`spectral_norm` changes its buffers in each step, with `out=` under no_grad."""
    wrap: Any = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm

    def run(loops: Any) -> Any:
        torch.manual_seed(0)
        linear, init = wrap(nn.Linear(4, 4, dtype=D)), randn(4)
        out = loops.fori_loop(0, 4, lambda i, c: rotate(c) + linear(c).sin(), init)
        return [out, *grad(out.sum(), (init, *linear.parameters())), *linear.buffers()]

    both(checkpoints, run)


class Model(nn.Module):
    """Keeps its loop's settings as part of itself."""

    def __init__(self, checkpoints: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=D)
        self.checkpoints = checkpoints and tl.Checkpoints(k=checkpoints)

    def forward(self, x: Tensor) -> Tensor:
        return tl.fori_loop(0, 3, lambda i, c: rotate(c) + self.linear(c).sin(), x, checkpoints=self.checkpoints)


@with_and_without_checkpoints
def test_a_module_with_a_loop_is_copied_and_pickled_after_use(checkpoints: Any) -> None:
    model, x = Model(checkpoints), randn(4)
    out = model(x)
    first = grad(out.sum(), (x, *model.parameters()))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = other(x)
        assert torch.equal(again, out)
        torch.testing.assert_close(grad(again.sum(), (x, *other.parameters())), first)


@with_and_without_checkpoints
def test_results_are_changed_in_place_before_backward(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Any:
        carry, ys = loops.scan(lambda c, x: (rotate(c) * w + x, c * w), init, xs)
        ys.mul_(2)
        return carry.add_(ys.sum(0)).sin(), ys.cos()

    compare(program, randn(2), randn(4, 2), randn(2, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
def test_a_shared_number_that_carries_a_gradient_beside_rows_that_stop(compact: bool, checkpoints: Any) -> None:
    limits = [3, 0, 5, 1, 5, 2]
    init, scale, w = randn(6, 2), torch.tensor(1.3, dtype=D, requires_grad=True), randn(2, seed=1)

    def body(carry: Any) -> Any:
        x, limit, n, s = carry
        n += 1  # an argument may be changed in place: it is the loop's own
        return rotate(x) * w * s, limit, n, s * 1.1

    zero = torch.zeros(6, dtype=torch.int64)
    x, *_, s = tl.while_loop(
        lambda c: c[2] < c[1], body, (init, torch.tensor(limits), zero, scale), compact=compact, checkpoints=checkpoints
    )
    rows = []
    for b, limit in enumerate(limits):
        row = init[b]
        for t in range(limit):
            row = rotate(row) * w * (scale * 1.1**t)
        rows.append(row)
    wanted, true = (init, scale, w), torch.stack(rows)
    torch.testing.assert_close((x, s), (true, scale * 1.1**5))
    torch.testing.assert_close(grad(x.sin().sum() + s, wanted), grad(true.sin().sum() + scale * 1.1**5, wanted))
    assert not zero.any()


@with_and_without_checkpoints
def test_a_carry_that_is_only_read_stays_unbatched_under_vmap(checkpoints: Any) -> None:
    """In a scan. Where a batched condition stops elements, all of the carry is batched: vmap refuses the None."""
    w, rows = randn(2, grad=False), randn(3, 2, grad=False)
    vmap: Any = torch.vmap  # its types know no None for one output of several

    def scanned(x: Tensor) -> Any:
        return tl.scan(lambda c, _: ((rotate(c[0]) + c[1], c[1]), None), (x, w), None, 3, checkpoints=checkpoints)[0]

    x, same = vmap(scanned, out_dims=(0, None))(rows)
    assert torch.equal(same, w)
    torch.testing.assert_close(x, torch.stack([scanned(row)[0] for row in rows]))

    def stops(x: Tensor, n: Tensor) -> Any:
        return tl.while_loop(
            lambda c: c[1] < n, lambda c: (rotate(c[0]), c[1] + 1, c[2]), (x, n * 0, w), checkpoints=checkpoints
        )

    with pytest.raises(ValueError, match="out_dim"):
        vmap(stops, out_dims=(0, 0, None))(rows, torch.tensor([1, 3, 2]))
    torch.testing.assert_close(vmap(stops)(rows, torch.tensor([1, 3, 2]))[2], w.expand(3, 2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@with_and_without_checkpoints
def test_two_scans_in_a_row_under_compile(checkpoints: Any) -> None:
    def loss(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        carry, ys = loops.scan(cell(w), init.sin(), xs)
        carry, zs = loops.scan(lambda c, y: (rotate(c) + y * w.sum(0), c * y), carry.cos(), ys.sin())
        return carry.sum() + zs.square().sum()

    torch._dynamo.reset()
    given, compiled = inputs(), torch.compile(loss, backend="aot_eager")
    torch.testing.assert_close(grad(compiled(Ours(checkpoints), *given), given), grad(loss(Plain(), *given), given))


# -- what is refused, and what a replay does not see


@with_and_without_checkpoints
def test_an_exception_of_any_body_passes_through(checkpoints: Any) -> None:
    class Own(Exception): ...

    def fails(*args: Any) -> Any:
        raise Own

    x = randn(3, 2)
    calls: dict[str, Callable[[], Any]] = {
        "map": lambda: tl.map(fails, x, checkpoints=checkpoints),
        "fori_loop": lambda: tl.fori_loop(0, 2, fails, x, checkpoints=checkpoints),
        "while_loop": lambda: tl.while_loop(lambda c: True, fails, x, checkpoints=checkpoints),
    }
    for name, call in calls.items():
        with pytest.raises(Own) as error:
            call()
        assert error.value.__notes__ == [f"raised in step 0 of {name}"]


@pytest.mark.eager_only("a backward does not run the body: nothing has changed", cases=["python"])
@pytest.mark.parametrize("inner", ["python", "all", "K=1"])
def test_an_inner_loop_of_another_number_of_steps_in_the_replay(inner: str) -> None:
    w, limits = randn(2), [3]

    def body(i: int, c: Tensor) -> Tensor:
        limit = tl.loop.pure(lambda: limits[0])()
        if inner == "python":
            for _ in range(limit):
                c = rotate(c) * w
            return c
        kept = None if inner == "all" else 1
        return tl.while_loop(lambda d: d[1] < limit, lambda d: (rotate(d[0]) * w, d[1] + 1), (c, 0), checkpoints=kept)[
            0
        ]

    out = tl.fori_loop(0, 3, body, randn(2), checkpoints=2)
    limits[0] = 2
    with pytest.raises(RuntimeError, match="step 2 did not repeat itself"):
        grad(out.sum(), w)


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
def test_a_function_mode_around_the_loop_is_not_there_in_replays() -> None:
    """Not even around backward, as torch takes a mode off while it handles that call: enter it in the body."""
    w, init = randn(2), randn(2, seed=1)

    class Cosines(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))

    def body(i: int, c: Tensor) -> Tensor:
        return rotate(c) * w + torch.sin(c)

    def inside(i: int, c: Tensor) -> Tensor:
        with Cosines():
            return body(i, c)

    (expected,) = grad(tl.fori_loop(0, 3, inside, init).sum(), w)
    torch.testing.assert_close(grad(tl.fori_loop(0, 3, inside, init, checkpoints=2).sum(), w)[0], expected)
    with Cosines():
        (found,) = grad(tl.fori_loop(0, 3, body, init, checkpoints=2).sum(), w)
    assert not torch.allclose(found, expected)


@with_and_without_checkpoints
@pytest.mark.parametrize("how", ["forward", "both", "default"])
def test_tensors_that_the_body_makes_are_where_they_were(how: str, checkpoints: Any) -> None:
    """Under `with torch.device(...)` around forward or all, and after `set_default_device`."""
    init, w = (torch.zeros(2, dtype=D, device="meta", requires_grad=True) for _ in range(2))
    if how == "default":
        torch.set_default_device("meta")
    try:
        with torch.device("meta"):
            out = tl.fori_loop(
                0, 3, lambda i, c: rotate(c, 0.9 * torch.ones(())) * w + torch.ones(2), init, checkpoints=checkpoints
            )
            if how == "both":
                grad(out.sum(), (init, w), retain_graph=True)
        first = grad(out.sum(), (init, w), create_graph=True)
        out.sum().backward(retain_graph=True)
        first[1].sum().backward()
    finally:
        torch.set_default_device(None)
    assert [g.device.type for g in first] == ["meta"] * 2
    assert torch.zeros(1).device.type == "cpu"


@pytest.mark.parametrize(("checkpoints", "calls"), [(None, 5), (1, 20)])
def test_a_body_that_saves_nothing_is_replayed_all_the_same(checkpoints: Any, calls: int) -> None:
    body, x = Counter(lambda i, c: c + 1), randn(2)
    out = tl.fori_loop(0, 5, body, x, checkpoints=checkpoints)
    assert torch.equal(grad(out.sum(), x)[0], torch.ones(2))
    assert body.calls == calls


@with_and_without_checkpoints
def test_shapes_without_values(checkpoints: Any) -> None:
    init, xs, w = (x.detach().to("meta").requires_grad_() for x in inputs())
    carry, ys = tl.scan(cell(w), init, xs, checkpoints=checkpoints)
    assert [(x.shape, x.device.type) for x in tensors((carry, ys))] == [((4,), "meta"), ((7, 4), "meta")]
    assert [g.shape for g in grad(carry.sum() + ys.sum(), (init, xs, w))] == [(4,), (7, 3), (3, 4)]


@pytest.mark.parametrize("checkpoints", [2, 3, tl.Checkpoints(k=3, offload="cpu")], ids=["K=2", "K=3", "offloaded"])
def test_a_state_that_is_changed_in_place_after_the_loop(checkpoints: Any) -> None:
    """What the body returned and kept elsewhere may be a snapshot: refused, unless that is a copy."""
    w, init, kept = randn(2), randn(2, seed=1), []

    def body(i: int, c: Tensor) -> Tensor:
        kept.append(c := rotate(c) * w)
        return c

    true = grad(tl.fori_loop(0, 6, body, init).sum(), w)
    kept.clear()
    with pytest.warns(HeldTensorWarning):
        out = tl.fori_loop(0, 6, body, init, checkpoints=checkpoints)
    with torch.no_grad():
        for x in kept:
            x.add_(1)
    if isinstance(checkpoints, int):
        with pytest.raises(RuntimeError, match=r"a carry of shape \(2,\) was changed in place after the loop had kept"):
            grad(out.sum(), w)
    else:
        torch.testing.assert_close(grad(out.sum(), w), true)
