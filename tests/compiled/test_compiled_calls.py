"""Compiled loops in the world around them: plans used again, backward passes, transforms, threads, memory."""

import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run.plan import plans
from tests.support.compiled_cases import CASES, bytes_kept, check_equal, leaf, outcome, rotation

D = torch.float64


pytestmark = pytest.mark.usefixtures("fresh_plans")


def rnn(U: Tensor, xs: Tensor, h: Tensor | None = None, *, compile: Any = "strict", scale: float = 1.0) -> Any:
    """(h, ys) of a small recurrent net; its body is made anew."""

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.sin(h @ U * scale + x)
        return h, h * 2

    return tl.scan(body, torch.zeros(2, 4, dtype=xs.dtype) if h is None else h, xs, compile=compile)


def cell_step(cell: nn.GRUCell, h: Tensor, x: Tensor) -> Any:
    h = cell(x, h)
    return h, h


def loss(result: Any) -> Tensor:
    return result[0].sum() + result[1].square().sum()


def test_a_closure_made_again_another_length_and_other_weights_use_one_plan():
    for length in (3, 7, 1, 64):
        U, xs = rotation(D), leaf(D, length, 2, 4)
        found, expected = rnn(U, xs), rnn(U, xs, compile=False)
        check_equal(found, expected, 1e-12)
        check_equal(torch.autograd.grad(loss(found), (U, xs)), torch.autograd.grad(loss(expected), (U, xs)), 1e-12)
    assert plans.made == 1


def test_other_constants_shapes_and_branches_are_other_plans():
    U = rotation(D)
    for scale in (1.0, 2.0):
        check_equal(rnn(U, leaf(D, 5, 2, 4), scale=scale)[1:], [rnn(U, leaf(D, 5, 2, 4), scale=scale)[1]], 10)
    xs = leaf(D, 5, 2, 4)
    for scale in (0.0, -0.0, float("nan"), 1, True, 1.0):
        check_equal(rnn(U, xs, scale=scale), rnn(U, xs, scale=scale, compile=False), 1e-12)
    for batch in (1, 3):
        h, xs = leaf(D, batch, 4), leaf(D, 5, batch, 4)
        check_equal(rnn(U, xs, h), rnn(U, xs, h, compile=False), 1e-12)


def test_the_least_used_plan_goes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tensorloop.loop.compiled.run.plan.MOST_PLANS", 2)
    U = rotation(D)
    for batch in (1, 2, 1, 3, 1):
        rnn(U, leaf(D, 5, batch, 4), leaf(D, batch, 4))
    assert plans.made == 3
    rnn(U, leaf(D, 5, 2, 4), leaf(D, 2, 4))
    assert plans.made == 4


def test_weights_that_an_optimizer_changes_in_place():
    runs = []
    for compile in (False, "strict"):
        torch.manual_seed(0)
        cell = nn.GRUCell(4, 4).double()
        optimizer = torch.optim.Adam(cell.parameters(), lr=0.05)
        xs = torch.randn(6, 2, 4, dtype=D)
        for _ in range(4):
            optimizer.zero_grad()
            h, _ = tl.scan(partial(cell_step, cell), torch.zeros(2, 4, dtype=D), xs, compile=compile)
            (h - 1).square().sum().backward()
            optimizer.step()
        runs.append([p.detach().clone() for p in cell.parameters()])
    check_equal(runs[1], runs[0], 1e-10)
    assert plans.made == 1


def test_backward_twice():
    U, xs = rotation(D), leaf(D, 5, 2, 4)
    total = loss(rnn(U, xs))
    first = torch.autograd.grad(total, (U, xs), retain_graph=True)
    second = torch.autograd.grad(total, (U, xs))
    check_equal(second, first, 0)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(total, (U, xs))


def test_gradients_are_memory_of_their_own():
    U, xs = rotation(D), leaf(D, 5, 2, 4)
    grads = [torch.autograd.grad(loss(rnn(U, xs)), (U, xs)) for _ in range(3)]
    kept = [[g.clone() for g in gs] for gs in grads]
    grads[0][0].add_(1)
    grads[0][1].add_(1)
    check_equal(grads[1], kept[1], 0)
    assert len({g.untyped_storage().data_ptr() for gs in grads for g in gs}) == 6


@pytest.mark.parametrize("which", ["carry", "ys", "one step", "nothing"])
def test_gradients_of_a_part_of_what_a_loop_gives(which: str):
    U, xs, h = rotation(D), leaf(D, 5, 2, 4), leaf(D, 2, 4)
    grads = []
    for compile in (False, "strict"):
        last, ys = rnn(U, xs, h, compile=compile)
        total = {"carry": last.sum(), "ys": ys.sin().sum(), "one step": ys[2, 1].sum(), "nothing": (last * 0).sum()}[
            which
        ]
        grads.append(torch.autograd.grad(total, (U, xs, h)))
    check_equal(grads[1], grads[0], 1e-12)


@pytest.mark.parametrize("name", ["lstm", "attention", "crf", "tokens_and_counts", "until", "while_one", "unbatched"])
def test_second_derivatives(name: str):
    found = []
    for compile in (False, "strict"):
        torch.manual_seed(0)
        loop = CASES[name](D)
        if name == "while_one":
            loop.options["cond"] = lambda state: state[1] < 6
        carry, ys = loop.run(compile)
        outputs = [x for x in tree_leaves((carry, ys)) if isinstance(x, Tensor) and x.requires_grad]
        total = torch.stack([x.square().sum() for x in outputs]).sum()
        leaves = loop.leaves()
        first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        more = torch.stack([g.square().sum() for g in first if g is not None]).sum()
        found.append((first, torch.autograd.grad(more, leaves, allow_unused=True)))
    check_equal([g.detach() if g is not None else g for g in found[1][0]], [g.detach() for g in found[0][0]], 1e-10)
    check_equal(found[1][1], found[0][1], 1e-9)


def test_second_derivatives_where_one_capture_comes_from_another():
    def run(compile: Any) -> list[Tensor]:
        torch.manual_seed(0)
        a = leaf(D, 4, 4)
        b = a.sin()

        def body(h: Tensor, x: Tensor) -> Any:
            h = torch.sin(h @ a + x @ b)
            return h, h

        _, ys = tl.scan(body, torch.ones(2, 4, dtype=D), torch.ones(3, 2, 4, dtype=D), compile=compile)
        (first,) = torch.autograd.grad(ys.square().sum(), a, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first.square().sum(), a)]

    check_equal(run("strict"), run(False), 1e-10)


def test_many_gradients_at_once():
    U, xs = rotation(D), leaf(D, 3, 2, 4)
    jacobians = []
    for compile in (False, "strict"):
        last, _ = rnn(U, xs, compile=compile)
        basis = torch.eye(8, dtype=D).view(8, 2, 4)
        jacobians.append(torch.autograd.grad(last, (U, xs), basis, is_grads_batched=True))
    check_equal(jacobians[1], jacobians[0], 1e-12)


def test_transforms_get_the_eager_loop():
    U, xs, h = rotation(D).detach(), leaf(D, 5, 2, 4).detach(), leaf(D, 2, 4).detach()

    def results(compile: Any) -> list[Any]:
        grad = torch.func.grad(lambda u: loss(rnn(u, xs, h, compile=compile)))(U)
        each = torch.func.vmap(lambda x: rnn(U, x, h, compile=compile)[0])(torch.stack([xs, xs * 2]))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(U, torch.ones_like(U))
            tangent = forward_ad.unpack_dual(rnn(dual, xs, h, compile=compile)[0]).tangent
        return [grad, each, tangent]

    with pytest.warns(NotCompiledWarning, match="around the loop|is on"):
        found = results(True)
    check_equal(found, results(False), 1e-12)


def test_no_grad_keeps_nothing_and_records_nothing():
    U, xs = rotation(D), leaf(D, 5, 2, 4)
    with torch.no_grad():
        found, expected = rnn(U, xs), rnn(U, xs, compile=False)
    check_equal(found, expected, 1e-12)
    with torch.inference_mode():
        check_equal(rnn(U, xs), expected, 1e-12)
    detached = rnn(U.detach(), xs.detach())
    check_equal(detached, expected, 1e-12)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_few_steps(length: int):
    U, xs, h = rotation(D), leaf(D, length, 2, 4), leaf(D, 2, 4)
    results = [rnn(U, xs, h, compile=c) for c in (False, "strict")]
    check_equal(results[1], results[0], 1e-12)
    grads = [torch.autograd.grad(loss(r), (U, xs, h), allow_unused=True) for r in results]
    check_equal(grads[1], grads[0], 1e-12)


def test_ys_may_be_changed_where_eager_ones_may_or_it_is_told():
    U, xs = rotation(D), leaf(D, 5, 2, 4)
    _, ys = tl.scan(lambda h, x: ((h := torch.sin(h @ U + x)), h), torch.zeros(2, 4, dtype=D), xs, compile="strict")
    ys.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ys.sum().backward()


def test_a_weight_changed_before_backward_is_told():
    U, xs = rotation(D), leaf(D, 5, 2, 4)
    total = loss(rnn(U, xs))
    with torch.no_grad():
        U.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_init_and_captures_are_not_changed_and_not_returned():
    U, xs, h = rotation(D), leaf(D, 5, 2, 4), leaf(D, 2, 4)
    before = [x.detach().clone() for x in (U, xs, h)]
    last, (h2, x, u) = tl.scan(lambda h, x: (h, (h, x, U)), h, xs, compile="strict")
    for y in (last, h2, x, u):
        with torch.no_grad():
            y += 1
    check_equal([x.detach() for x in (U, xs, h)], before, 0)
    assert u.shape == (5, 4, 4)


def test_hooks_on_captures_run_once_with_the_whole_gradient():
    found = []
    for compile in (False, "strict"):
        torch.manual_seed(0)
        seen = []
        base = rotation(D)
        U = base * 1.5
        U.register_hook(lambda g, seen=seen: seen.append(g) or g * 2)
        loss(rnn(U, leaf(D, 5, 2, 4), compile=compile)).backward()
        found.append((*seen, base.grad))
    assert len(found[0]) == len(found[1]) == 2
    check_equal(found[1], found[0], 1e-12)


def test_threads_share_plans():
    U, xs = rotation(D), leaf(D, 50, 2, 4)
    expected = torch.autograd.grad(loss(rnn(U, xs, compile=False)), (U, xs))
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(5):
                check_equal(torch.autograd.grad(loss(rnn(U, xs)), (U, xs)), expected, 1e-12)
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_loop_in_the_body_of_another():
    U, xs = rotation(D), leaf(D, 3, 2, 4)

    def body(h: Tensor, x: Tensor, compile: Any) -> Any:
        h = tl.fori_loop(0, 2, lambda i, h: torch.sin(h @ U), h, compile=compile)
        return h + x, h

    start = torch.ones(2, 4, dtype=D)
    results = [tl.scan(partial(body, compile=c), start, xs, compile=c) for c in (False, "strict")]
    check_equal(results[1], results[0], 1e-12)
    grads = [torch.autograd.grad(loss(r), (U, xs)) for r in results]
    check_equal(grads[1], grads[0], 1e-12)


def test_a_loop_in_a_step_of_a_checkpointed_one():
    U, xs = rotation(D), leaf(D, 4, 3, 2, 4)

    def body(h: Tensor, x: Tensor, compile: Any) -> Any:
        return rnn(U, x, h, compile=compile)[0], None

    grads = []
    for compile in (False, True):
        told = pytest.warns(NotCompiledWarning, match="an eager loop with checkpoints") if compile else nullcontext()
        with told:
            h, _ = tl.scan(partial(body, compile=compile), torch.ones(2, 4, dtype=D), xs, checkpoints=2)
        grads.append(torch.autograd.grad(h.square().sum(), (U, xs)))
    check_equal(grads[1], grads[0], 1e-12)


@pytest.mark.parametrize(
    "name", ["lstm", "lstm_cell", "gru_cell_backwards", "layer_norm_rnn", "attention", "runge_kutta", "crf", "adam"]
)
def test_no_more_is_kept_than_by_the_eager_loop(name: str):
    kept = []
    for compile in (False, "strict"):
        torch.manual_seed(0)
        loop = CASES[name](D)
        kept.append(bytes_kept(loop, compile))
    # The states of a compiled loop are one tensor that begins with a copy of init.
    init = sum(x.nbytes for x in tree_leaves(loop.init))
    assert 0 < kept[1] <= kept[0] + init


def test_float32_and_float64_are_apart():
    for dtype in (torch.float32, D):
        _, grads = outcome(CASES["lstm"], dtype, "strict")
        assert {g.dtype for g in grads} == {dtype}


def test_a_default_device_does_not_reach_inside():
    U, xs = rotation(D), leaf(D, 5, 2, 4)
    expected = torch.autograd.grad(loss(rnn(U, xs, compile=False)), (U, xs))
    start = torch.zeros(2, 4, dtype=D)
    with torch.device("meta"):
        found = torch.autograd.grad(loss(rnn(U, xs, start)), (U, xs))
        with torch.no_grad():
            assert rnn(U, xs, start)[0].device.type == "cpu"
    check_equal(found, expected, 1e-12)
