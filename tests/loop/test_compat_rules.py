"""`tl.compat` where torch's operators have rules of their own, or refuse what Python does; transforms around it."""

from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan as torch_s_scan
from torch.autograd import grad
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tests.support.compat_cases import (
    OURS,
    PLAIN,
    assert_same,
    both,
    cell,
    closures,
    counts,
    prefix_sums,
    total,
    unit,
)
from tests.support.loop_cases import randn, rotate, run

D = torch.float64


# -- scan, where torch has rules of its own


def test_a_sum_of_integers_in_index_order() -> None:
    xs, init = torch.arange(4), torch.zeros(1, dtype=torch.int64)
    for reverse, expected in ((False, [0, 1, 3, 6]), (True, [6, 6, 5, 3])):
        carry, ys = tl.compat.torch_scan(both(torch.add), init, xs, reverse=reverse)
        assert (carry.tolist(), ys.flatten().tolist(), ys.shape) == ([6], expected, (4, 1))


@pytest.mark.parametrize("carried", [torch.float16, torch.float32, torch.int32, torch.complex64, torch.bool])
@pytest.mark.parametrize("given_out", [torch.float16, torch.float64, torch.int64, torch.complex64])
def test_dtypes_of_carry_and_output_stay_apart(carried: torch.dtype, given_out: torch.dtype) -> None:
    xs, init = torch.arange(6).view(3, 2).to(given_out), torch.ones(2, dtype=carried)
    carry, ys = tl.compat.torch_scan(lambda c, x: (c | c if c.dtype == torch.bool else c + c, x + x), init, xs)
    assert (carry.dtype, ys.dtype) == (carried, given_out)
    assert torch.equal(ys, xs * 2)


@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    dim=st.integers(0, 3),
    negative=st.booleans(),
    kept=st.integers(0, 3),
    reverse=st.booleans(),
)
@settings(max_examples=40)
def test_any_dim_and_outputs_of_fewer_dims(
    shape: list[int], dim: int, negative: bool, kept: int, reverse: bool
) -> None:
    dim %= len(shape)
    xs = randn(*shape).movedim(0, -1).contiguous().movedim(-1, 0)  # not contiguous
    given_dim = dim - len(shape) if negative else dim

    def combine(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        c = (c + x).sin()
        return c, (c.sum([*range(min(kept, c.dim()), c.dim())]) if kept < c.dim() else c)

    def program(ops: Any, xs: Tensor) -> Any:
        return ops.scan(combine, torch.zeros_like(xs.select(dim, 0)), xs, dim=given_dim, reverse=reverse)

    ours, theirs = (
        run(program, OURS, [xs.detach().requires_grad_()]),
        run(program, PLAIN, [xs.detach().requires_grad_()]),
    )
    assert_same(ours, theirs)


def test_outputs_of_fewer_dims_have_their_steps_first_as_torch_s_have() -> None:
    xs = randn(2, 3, 5, grad=False)
    carry = torch.zeros(2, 3, dtype=D)
    ours = tl.compat.torch_scan(lambda c, x: (c + x, x.sum(1)), carry, xs, dim=2)[1]
    assert ours.shape == (5, 2)
    assert tl.scan(lambda c, x: (c + x, x.sum(1)), carry, xs, dim=2)[1].shape == (2, 5)


def test_a_negative_dim_is_that_of_the_first_leaf() -> None:
    a, b = randn(3, 4), randn(3, 4, 2)
    carry, ys = tl.compat.torch_scan(lambda c, x: (c + x[1].sum(1), x[0]), torch.zeros(3, dtype=D), (a, b), dim=-1)
    assert_same(carry, b.sum((1, 2)))
    assert_same(ys, a)
    assert_same(tl.compat.torch_associative_scan(lambda x, y: (x[0] + y[0], x[1] + y[1]), (a, b), -1)[1], b.cumsum(1))


def test_xs_without_leaves_give_the_init_and_no_outputs() -> None:
    init = torch.ones(2)
    for xs in ((), [], {}, [(), {}]):
        assert tl.compat.torch_scan(lambda c, x: (c, c), init, xs) == (init, [])
        assert torch_s_scan(lambda c, x: (c, c), init, xs) == (init, [])


def test_no_steps_give_the_init_and_empty_outputs() -> None:
    init = randn(3)
    carry, ys = tl.compat.torch_scan(lambda c, x: (c + x, (c.sum(), None)), init, torch.empty(0, 3, dtype=D))
    assert torch.equal(carry, init)
    assert (ys[0].shape, ys[1]) == ((0,), None)
    empty = tl.compat.torch_associative_scan(torch.add, torch.empty(2, 0, 3), 1)
    assert empty.shape == (2, 0, 3)


def test_none_and_numbers_go_in_and_out() -> None:
    def combine(c: Any, x: Any) -> Any:
        n, nothing, h = c
        return (n + 1, nothing, rotate(h) + x["a"]), {"n": n, "h": h, "none": x["b"]}

    xs = {"a": randn(4, 2), "b": None}
    (n, nothing, h), ys = tl.compat.torch_scan(combine, (0, None, torch.zeros(2, dtype=D)), xs, reverse=True)
    assert (n, type(n), nothing, ys["none"]) == (4, int, None, None)
    assert (ys["n"].tolist(), ys["h"].shape) == ([3, 2, 1, 0], (4, 2))
    h.sum().backward()


def test_what_comes_in_may_be_given_out() -> None:
    """torch refuses each of these as an alias."""

    def combine(c: Any, x: Tensor) -> Any:
        a, b = c
        return (b, a), (a, a, x, x.view(-1), b + x)

    def program(ops: Any, init: Tensor, xs: Tensor) -> Any:
        return ops.scan(combine, (init, init), xs)

    inputs = [randn(2), randn(3, 2)]
    assert_same(run(program, OURS, inputs), run(program, PLAIN, inputs))
    (a, b), ys = program(OURS, *inputs)
    ys[0].detach().zero_()
    assert all(x.abs().min() > 0 for x in (inputs[0], a, b))


def test_functions_are_called_once_a_step() -> None:
    calls = [0]

    def combine(c: Tensor, x: Tensor) -> tuple[Tensor, None]:
        calls[0] += 1
        return c + x, None

    for T in (1, 4):
        calls[0] = 0
        tl.compat.torch_scan(combine, torch.zeros(2), torch.ones(T, 2))
        assert calls == [T]


@pytest.mark.parametrize("subset", range(1, 8))
def test_any_subset_may_need_a_gradient(subset: int) -> None:
    needs = [bool(subset >> k & 1) for k in range(3)]
    w, h, xs = (randn(*shape, grad=need) for shape, need in zip([(3, 4), (2, 4), (5, 2, 3)], needs, strict=True))
    u = randn(4, grad=False)

    def program(ops: Any, w: Tensor, h: Tensor, xs: Tensor) -> Any:
        _, ys = ops.scan(cell(w, u), h, xs)
        return ys, ops.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, torch.sin(h @ w.mT @ w)), (0, h))[1]

    ours, theirs = run(program, OURS, [w, h, xs]), run(program, PLAIN, [w, h, xs])
    assert_same(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    assert_same(ours[2], theirs[2])


def test_an_rnn_has_the_gradients_of_torch_s() -> None:
    torch.manual_seed(0)
    rnn = nn.RNN(3, 5, dtype=D)
    xs, h = randn(7, 2, 3), randn(2, 5)
    w, u, a, b = rnn.parameters()

    def combine(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ w.T + a + h @ u.T + b)
        return h, h

    wanted = [xs, h, *rnn.parameters()]
    last, ys = tl.compat.torch_scan(combine, h, xs)
    true_ys, true_last = rnn(xs, h[None])
    assert_same((ys, last), (true_ys, true_last[0]))
    assert_same(grad(ys.sin().sum() + last.sum(), wanted), grad(true_ys.sin().sum() + true_last.sum(), wanted))


# -- while_loop


def test_ints_stay_ints_and_lists_come_back_as_a_tuple() -> None:
    out = tl.compat.torch_while_loop(lambda n, x: n < 3, lambda n, x: [n + 1, x * n], [0, torch.ones(2)])
    assert (type(out), out[0], type(out[0])) == (tuple, 3, int)
    Pair = namedtuple("Pair", "n x")
    out = tl.compat.torch_while_loop(lambda n, x: n < 3, lambda n, x: Pair(n + 1, x * n), Pair(0, torch.ones(2)))
    assert (type(out), out[0]) == (tuple, 3)
    flag, half = tl.compat.torch_while_loop(lambda b, f: b, lambda b, f: (f > 2.0, f / 2), (True, 8.0))
    assert (flag, half) == (False, 1.0)


def test_no_tensor_that_comes_back_was_given() -> None:
    x, w = randn(3), randn(3)
    for steps in (0, 2):
        i, y, z = tl.compat.torch_while_loop(
            lambda i, x, y, steps=steps: i < steps, lambda i, x, y: (i + 1, y, x), (torch.tensor(0), x, w)
        )
        assert i.item() == steps
        assert not {id(y), id(z)} & {id(x), id(w)}
        y.detach().zero_()
        assert all(given.abs().min() > 0 for given in (x, w))
        assert_same(grad(y.sum() + 2 * z.sum(), [x, w]), (torch.ones(3, dtype=D), torch.full((3,), 2.0, dtype=D)))


def test_a_condition_may_have_one_element_in_any_shape() -> None:
    for shape in ((), (1,), (1, 1)):
        (x,) = tl.compat.torch_while_loop(lambda x: x < 3, lambda x: (x + 1,), (torch.zeros(shape),))
        assert (x.item(), x.shape) == (3, shape)


def test_modules_with_parameters_and_buffers() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2, dtype=D)
            self.end = nn.Buffer(torch.tensor(1))

        def forward(self, ops: Any, n: Tensor, x: Tensor) -> Any:
            return ops.while_loop(lambda n, x: n > self.end, lambda n, x: (n - 1, self.linear(x).sin()), (n, x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.linear = Decoder(), nn.Linear(2, 2, dtype=D)

        def forward(self, ops: Any, n: Tensor, x: Tensor) -> Any:
            return ops.while_loop(
                lambda n, x: n > 0, lambda n, x: (n - 1, self.linear(self.inner(ops, n, x)[1])), (n, x)
            )

    torch.manual_seed(0)
    module, x = Outer(), randn(2, 2, grad=False)
    ours, theirs = (module(ops, torch.tensor(4), x)[1].square().sum() for ops in (OURS, PLAIN))
    assert_same(ours, theirs)
    assert_same(grad(ours, [*module.parameters()]), grad(theirs, [*module.parameters()]))


# -- associative_scan


@pytest.mark.parametrize("mode", ["pointwise", "generic"])
def test_the_function_sees_one_element_in_both_modes(mode: str) -> None:
    xs, shapes = randn(4, 6, 4), set[torch.Size]()

    def combine(a: Tensor, b: Tensor) -> Tensor:
        shapes.add(a.shape)
        return torch.logaddexp(a, b) + 0 * torch.softmax(a, 0) @ torch.ones(4, 4, dtype=D)

    ours = tl.compat.torch_associative_scan(combine, xs, 1, combine_mode=mode)
    assert shapes == {torch.Size([4, 4])}
    assert_same(ours, xs.logcumsumexp(1))


@given(T=st.integers(1, 17), d=st.integers(-3, 2), reverse=st.booleans())
@settings(max_examples=30)
def test_lengths_and_dims(T: int, d: int, reverse: bool) -> None:
    shape = [2, 3, 2]
    shape[d] = T
    xs = unit(*shape).detach().requires_grad_()

    def program(ops: Any, xs: Tensor) -> Any:
        return ops.associative_scan(torch.mul, xs, d, reverse=reverse)

    assert_same(run(program, OURS, [xs]), run(program, PLAIN, [xs]))


def test_a_few_calls_for_many_elements() -> None:
    calls = [0]

    def combine(a: Tensor, b: Tensor) -> Tensor:
        calls[0] += 1
        return a + b

    tl.compat.torch_associative_scan(combine, torch.ones(1024), 0)
    assert calls[0] <= 20


# -- around and inside


@pytest.mark.parametrize("checkpoints", [None, 1, 3])
def test_inside_a_loop_of_ours(checkpoints: int | None) -> None:
    w, xs = randn(3, 3), randn(5, 3)

    def body(ops: Any, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        c, ys = ops.scan(lambda h, y: ((h @ w + y).sin(), h), c, torch.stack([x, c]))
        _, c = ops.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, torch.cos(h @ w)), (0, c))
        return c, ops.associative_scan(torch.mul, ys, 0)

    ours = tl.scan(partial(body, OURS), xs[0], xs, checkpoints=checkpoints)
    theirs = PLAIN.scan(partial(body, PLAIN), xs[0], xs)
    assert_same(ours, theirs)
    assert_same(grad(total(ours), [w, xs]), grad(total(theirs), [w, xs]))


def test_arrays_ranges_and_packed_tensors_are_carried_as_in_our_loops() -> None:
    xs = randn(4, 3)
    array, _ = tl.compat.torch_scan(lambda c, x: (c.append(x), None), tl.TensorArray(), xs)
    assert_same(array.stack(), xs)
    _, array = tl.compat.torch_while_loop(
        lambda i, c: i < 3, lambda i, c: (i + 1, c.append(xs[i])), (0, tl.TensorArray())
    )
    assert_same(array.stack(), xs[:3])
    carry, numbers = tl.compat.torch_scan(lambda c, i: (c + i, i), 0, range(4))
    assert (carry, numbers.tolist()) == (6, [0, 1, 2, 3])
    packed = tl.pack_padded(xs.view(2, 2, 3), [2, 0])
    carry, ys = tl.compat.torch_scan(lambda c, x: (c + x, c), torch.zeros(2, 3, dtype=D), packed)
    assert_same(carry, packed.sum(1))
    assert ys.lens.tolist() == [2, 0]


def test_the_caller_s_tensors_stay_when_bodies_change_theirs() -> None:
    xs = randn(4, 3, grad=False)
    before = xs.clone()
    carry, _ = tl.compat.torch_scan(lambda c, x: (c + x.add_(1), None), xs[0], xs)
    assert_same(carry, before[0] + before.sum(0) + 4)
    _, h = tl.compat.torch_while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, h.add_(1)), (0, xs[0]))
    assert_same(h, before[0] + 2)
    sums = tl.compat.torch_associative_scan(lambda a, b: a.add_(b), xs, 0)
    assert_same(sums, before.cumsum(0))
    assert torch.equal(xs, before)


def test_transforms() -> None:
    w, u, h, xs = randn(3, 4), randn(4, grad=False), randn(2, 4, grad=False), randn(5, 2, 3, grad=False)

    def loss(ops: Any, w: Tensor, h: Tensor) -> Tensor:
        carry, ys = ops.scan(cell(w, u), h, xs)
        _, h = ops.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, torch.sin(h @ w.mT @ w)), (0, carry))
        return ops.associative_scan(torch.mul, ys.cos(), 0).sum() + h.sum()

    ours, theirs = partial(loss, OURS), partial(loss, PLAIN)
    detached = w.detach()
    assert_same(torch.func.grad(ours)(detached, h), torch.func.grad(theirs)(detached, h))
    assert_same(
        torch.func.jvp(ours, (detached, h), (detached, h)), torch.func.jvp(theirs, (detached, h), (detached, h))
    )
    stacked = torch.stack([detached, 2 * detached, -detached])
    each = [theirs(x, h) for x in stacked]
    assert_same(torch.func.vmap(ours, (0, None))(stacked, h), torch.stack(each))
    per_sample = torch.func.vmap(torch.func.grad(ours), (0, None))(stacked, h)
    # Twice as large weights make sines of large numbers: batched products, rounded otherwise, show.
    assert_same(per_sample, torch.stack([torch.func.grad(theirs)(x, h) for x in stacked]), 1e-10)
    assert_same(torch.func.jacrev(ours)(detached, h), torch.func.jacrev(theirs)(detached, h))


def test_elements_of_vmap_stop_on_their_own() -> None:
    starts = torch.tensor([0, 2, 9])
    steps = torch.func.vmap(
        lambda i: tl.compat.torch_while_loop(lambda i, n: i < 5, lambda i, n: (i + 1, n + 1), (i, i * 0))
    )
    assert [x.tolist() for x in steps(starts)] == [[5, 5, 9], [5, 3, 0]]


def test_in_a_recomputed_block() -> None:
    w, u, h, xs = randn(3, 4), randn(4), randn(2, 4), randn(5, 2, 3)
    checkpointed = partial(checkpoint, use_reentrant=False)
    ours = checkpointed(lambda *inputs: closures(OURS, *inputs)[1].sin().sum(), w, u, h, xs)
    theirs = closures(PLAIN, w, u, h, xs)[1].sin().sum()
    assert_same(grad(ours, [w, u, h, xs]), grad(theirs, [w, u, h, xs]))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it, of what follows a break
def test_in_torch_compile() -> None:
    inputs = [randn(3, 4), randn(4), randn(2, 4), randn(5, 2, 3)]

    def program(ops: Any, w: Tensor, u: Tensor, h: Tensor, xs: Tensor) -> Any:
        carry, ys = ops.scan(cell(w, u), h * 2, xs.cos())
        steps, h = ops.while_loop(lambda i, h: h.norm() < 8, lambda i, h: (i + 1, h * 1.5), (0, carry))
        return steps * 2, h + 1, ops.associative_scan(torch.add, ys * 2, 0) * 2

    compiled = torch.compile(partial(program, OURS), backend="aot_eager")
    assert_same(run(lambda _, *inputs: compiled(*inputs), OURS, inputs), run(program, PLAIN, inputs))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.extended("False")
def test_an_associative_scan_in_one_graph(dynamic: bool) -> None:
    whole = torch.compile(partial(prefix_sums, OURS), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    xs = randn(3, 2, 4)
    assert_same(run(lambda _, xs: whole(xs), OURS, [xs]), run(prefix_sums, PLAIN, [xs]))


def test_under_no_grad_nothing_is_recorded() -> None:
    w, u, h, xs = randn(3, 4), randn(4), randn(2, 4), randn(5, 2, 3)
    with torch.no_grad():
        outputs = pytree.tree_leaves([closures(OURS, w, u, h, xs), counts(OURS, h), prefix_sums(OURS, xs)])
    assert not any(x.requires_grad for x in outputs if isinstance(x, Tensor))


def test_bodies_that_are_no_plain_functions() -> None:
    xs = randn(4, 3)

    class Sum(nn.Module):
        def forward(self, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return c + x, c

    zeros = torch.zeros(3, dtype=D)
    assert_same(tl.compat.torch_scan(Sum(), zeros, xs)[0], xs.sum(0))
    assert_same(tl.compat.torch_scan(partial(lambda k, c, x: (c + k * x, c), 2), zeros, xs)[0], 2 * xs.sum(0))
    assert_same(tl.compat.torch_associative_scan(torch.maximum, xs, 0), xs.cummax(0).values)
