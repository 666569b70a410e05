"""regroup and RegroupPlan: values and gradients beside the reference. Errors are in test_regroup_errors.py."""

import copy
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.func import functional_call, jacfwd, jacrev, jvp, vjp, vmap

from tensorloop import reference
from tensorloop.memory import saved
from tensorloop.regroup import RegroupPlan, regroup
from tensorloop.testing import assert_matches_reference, assert_no_leak, assert_saved_bytes

KEYS = [["f1", "f2"], ["f3", "f4", "f5"], ["f6"]]
LENGTHS = [[3, 5], [2, 4, 6], [7]]
GROUPS = [["f1", "f3"], ["f2"], ["f4", "f1", "f6"], ["f1", "f5"]]

Lists = Sequence[Sequence[str]]


def inputs(*batch: int, dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> list[Tensor]:
    return [torch.randn(*batch, sum(n), dtype=dtype, requires_grad=requires_grad) for n in LENGTHS]


def seed_case(*values: Tensor) -> tuple[Tensor, ...]:
    return tuple(regroup(values, KEYS, LENGTHS, GROUPS))


def seed_reference(*values: Tensor) -> tuple[Tensor, ...]:
    return tuple(reference.regroup(values, KEYS, LENGTHS, GROUPS))


@pytest.mark.parametrize("batch", [(4,), (1,), (0,), (2, 3), (2, 0, 3), ()])
def test_values_and_gradients(batch: tuple[int, ...]) -> None:
    assert_matches_reference(seed_case, seed_reference, *inputs(*batch), rtol=0, atol=1e-15)
    plan = RegroupPlan(KEYS, LENGTHS, GROUPS)
    assert_matches_reference(lambda *v: plan(v), seed_reference, *inputs(*batch), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "groups",
    [
        [["f1", "f1"]],
        [["f1", "f6", "f1"], ["f1"], ["f6", "f6", "f6"]],
        [["f1"], []],
        [[]],
        [],
        [["f1", "f2", "f3", "f4", "f5", "f6"]],
        [["f6"], ["f3"]],
    ],
)
def test_keys_twice_nowhere_and_groups_without_keys(groups: Lists) -> None:
    def found(*values: Tensor) -> list[Tensor]:
        return regroup(values, KEYS, LENGTHS, groups)

    assert_matches_reference(found, lambda *v: reference.regroup(v, KEYS, LENGTHS, groups), *inputs(3))


def test_zero_length_keys_and_tensors() -> None:
    keys, lengths = [["a", "b", "c"], ["d"], []], [[0, 2, 0], [0], []]
    groups = [["a"], ["c", "b", "a", "d"], ["d", "d"]]
    values = [torch.randn(3, n, requires_grad=True) for n in (2, 0, 0)]
    plan = RegroupPlan(keys, lengths, groups)
    assert_matches_reference(lambda *v: plan(v), lambda *v: reference.regroup(v, keys, lengths, groups), *values)
    assert [tuple(x.shape) for x in plan(values)] == [(3, 0), (3, 2), (3, 0)]


def test_what_nobody_asked_for_has_gradient_zero() -> None:
    a, b, c = inputs(4)
    (out,) = regroup([a, b, c], KEYS, LENGTHS, [["f4"]])
    ga, gb, gc = grad(out.sum(), [a, b, c])
    assert not ga.any()
    assert not gc.any()
    assert torch.equal(gb, torch.tensor([0.0] * 2 + [1.0] * 4 + [0.0] * 6, dtype=torch.float64).expand(4, 12))


def test_only_some_outputs_and_some_inputs() -> None:
    a, b, c = inputs(4)
    outs = seed_case(a, b.detach(), c)
    assert all(x.requires_grad for x in outs)
    expected = grad(seed_reference(a, b, c)[2].square().sum(), [a, c])
    torch.testing.assert_close(grad(outs[2].square().sum(), [a, c]), expected, rtol=0, atol=0)
    assert torch.equal(grad(seed_case(a, b, c)[1].sum(), b)[0], torch.zeros_like(b))


def test_repeated_backward_gives_the_same_bits() -> None:
    values = inputs(50, dtype=torch.float32)
    outs = seed_case(*values)
    cotangents = [torch.randn_like(x) for x in outs]
    first = grad(outs, values, cotangents, retain_graph=True)
    for _ in range(3):
        torch.testing.assert_close(grad(outs, values, cotangents, retain_graph=True), first, rtol=0, atol=0)


def test_gradients_of_every_order() -> None:
    values = inputs(2)
    assert gradcheck(seed_case, values, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(seed_case, values, check_fwd_over_rev=True)

    def third(f: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        found: Sequence[Tensor] = values
        for _ in range(3):
            loss = sum((x.sin().prod(-1).sum() for x in f(*found)), torch.zeros((), dtype=torch.float64))
            found = grad(loss, values, create_graph=True)
        return tuple(found)

    for x, y in zip(third(seed_case), third(seed_reference), strict=True):
        torch.testing.assert_close(x, y)


def test_transforms() -> None:
    values = [x.detach() for x in inputs(3)]
    tangents = [torch.randn_like(x) for x in values]
    for found, expected in zip(seed_case(*tangents), jvp(seed_case, tuple(values), tuple(tangents))[1], strict=True):
        assert torch.equal(found, expected)
    everything = tuple(range(3))
    for transform in (jacrev, jacfwd):
        ours = transform(seed_case, argnums=everything)(*values)
        theirs = transform(seed_reference, argnums=everything)(*values)
        assert all(torch.equal(x, y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True))
    outs, pull, *_ = vjp(seed_case, *values)
    _, pull_reference, *_ = vjp(seed_reference, *values)
    torch.testing.assert_close(pull(outs), pull_reference(outs), rtol=0, atol=0)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 0), (None, 2, None), (-1, 1, None)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    plain = [torch.randn(3, sum(n)) for n in LENGTHS]
    batched = [
        x if dim is None else torch.stack([x * (k + 1) for k in range(4)], dim)
        for x, dim in zip(plain, in_dims, strict=True)
    ]
    found = vmap(seed_case, in_dims)(*batched)
    torch.testing.assert_close(found, vmap(seed_reference, in_dims)(*batched), rtol=0, atol=0)

    def loss(*values: Tensor) -> Tensor:
        return sum((x.sin().sum() for x in seed_case(*values)), torch.zeros(()))

    def row(k: int) -> list[Tensor]:
        return [x if dim is None else x.select(dim, k) for x, dim in zip(batched, in_dims, strict=True)]

    grads = vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims)(*batched)
    for k in range(4):
        for x, y in zip(grads, torch.func.grad(loss, argnums=(0, 1, 2))(*row(k)), strict=True):
            torch.testing.assert_close(x[k], y)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    ],
)
def test_dtypes(dtype: torch.dtype) -> None:
    differentiable = dtype.is_floating_point or dtype.is_complex
    values = [torch.randint(0, 2, (5, sum(n))).to(dtype).requires_grad_(differentiable) for n in LENGTHS]
    # Gradients are sums of three: torch adds them one by one, in half precision, and not in every version alike.
    near = {"rtol": 4e-3, "atol": 4e-3} if dtype is torch.float16 else {}
    assert_matches_reference(seed_case, seed_reference, *values, **near)
    assert {x.dtype for x in seed_case(*values)} == {dtype}
    assert {x.requires_grad for x in seed_case(*values)} == {differentiable}


def test_strides() -> None:
    def laid_out(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [a.t().contiguous().t(), torch.cat([b, b], 1)[:, 12:], c[:, :1].expand(4, 7)]

    def repeated(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        return [a[:1].expand(4, 8), b[:, None].expand(4, 3, 12)[:, 1], c[::1]]

    values = inputs(4)
    assert_matches_reference(
        lambda *v: seed_case(*repeated(*v)), lambda *v: seed_reference(*repeated(*v)), *values, rtol=0, atol=1e-14
    )
    assert_matches_reference(
        lambda *v: seed_case(*laid_out(*v)), lambda *v: seed_reference(*laid_out(*v)), *values, rtol=0, atol=1e-15
    )
    three = [x.requires_grad_() for x in (torch.randn(4, 2, 8).mT.contiguous().mT, torch.randn(4, 2, 12))]
    three.append(torch.randn(2, 4, 7).transpose(0, 1).requires_grad_())
    assert_matches_reference(seed_case, seed_reference, *three)


def test_gradients_of_any_stride() -> None:
    values = inputs(4)
    shapes = [x.shape for x in seed_case(*values)]
    expanded = [torch.randn(1, dtype=torch.float64).expand(shape) for shape in shapes]
    transposed = [torch.randn(shape[::-1], dtype=torch.float64).t() for shape in shapes]
    wide = [torch.randn(2 * shape[0], shape[1] + 3, dtype=torch.float64)[::2, 3:] for shape in shapes]
    for cotangents in (expanded, transposed, wide):
        found = grad(seed_case(*values), values, cotangents)
        expected = grad(seed_reference(*values), values, cotangents)
        assert all(torch.allclose(x, y, rtol=0, atol=1e-14) for x, y in zip(found, expected, strict=True))


def test_conjugated_and_negated_views() -> None:
    values = [torch.randn(3, sum(n), dtype=torch.complex64).conj() for n in LENGTHS]
    torch.testing.assert_close(seed_case(*values), seed_reference(*values), rtol=0, atol=0)
    negated = [torch.randn(3, sum(n), dtype=torch.complex64).conj().imag for n in LENGTHS]
    assert negated[0].is_neg()
    torch.testing.assert_close(seed_case(*negated), seed_reference(*negated), rtol=0, atol=0)


def test_outputs_are_new() -> None:
    x = torch.randn(3, 4)
    (out,) = regroup([x], [["a"]], [[4]], [["a"]])
    out.zero_()
    assert x.any()


def test_one_call_is_two_in_steps() -> None:
    values = inputs(3)
    columns = [[f"{i}"] for i in range(4)]
    middle = regroup(values, KEYS, LENGTHS, GROUPS)
    twice = regroup(middle, columns, [[x.shape[1]] for x in middle], [["3", "0"], ["1", "3"]])
    once = regroup(values, KEYS, LENGTHS, [[*GROUPS[3], *GROUPS[0]], [*GROUPS[1], *GROUPS[3]]])
    torch.testing.assert_close(twice, once, rtol=0, atol=0)
    cotangents = [torch.randn_like(x) for x in once]
    for x, y in zip(grad(twice, values, cotangents), grad(once, values, cotangents), strict=True):
        torch.testing.assert_close(x, y)


@given(st.data())
def test_drawn_plans(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=4))
    keys = [[f"{i}.{k}" for k in range(len(some))] for i, some in enumerate(lengths)]
    names = [key for some in keys for key in some]
    group = st.lists(st.sampled_from(names), max_size=6) if names else st.just([])
    groups = data.draw(st.lists(group, max_size=4))
    batch = data.draw(st.integers(0, 5))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    values = [torch.randn(batch, sum(n)).to(dtype).requires_grad_() for n in lengths]
    plan = RegroupPlan(keys, lengths, groups)
    # Integers: sums of copies are exact in any order, and so is the comparison.
    found, expected = plan(values), reference.regroup(values, keys, lengths, groups)
    assert len(found) == len(groups)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if not groups:
        return
    cotangents = [torch.randint(-3, 4, x.shape).to(dtype) for x in expected]
    theirs = grad(expected, values, cotangents, materialize_grads=True)
    for x, y in zip(grad(found, values, cotangents), theirs, strict=True):
        assert torch.equal(x, y)


def test_thousands_of_keys() -> None:
    n = 3000
    names = [f"k{i}" for i in range(n)]
    order = torch.randperm(n).tolist()
    plan = RegroupPlan([names], [[2] * n], [[names[i] for i in order]])
    x = torch.randn(3, 2 * n, requires_grad=True)
    (out,) = plan([x])
    assert torch.equal(out, x.view(3, n, 2)[:, order].flatten(1))
    (found,) = grad(out, x, out.detach())
    assert torch.equal(found, x)


def test_nothing_is_saved_or_leaked() -> None:
    values = inputs(8)
    assert_saved_bytes(seed_case, *values, exactly=0)
    assert saved(seed_reference, *values).bytes == 0

    def run() -> None:
        grad([x.sum() for x in seed_case(*values)], values, create_graph=True)

    run()
    assert_no_leak(run)


def test_moves_are_a_table() -> None:
    plan = RegroupPlan([["a", "b"], ["c"]], [[2, 3], [4]], [["c", "b"], ["a", "c"]])
    assert plan.moves == ((1, 0, 0, 0, 4), (0, 0, 2, 4, 3), (0, 1, 0, 0, 2), (1, 1, 0, 2, 4))
    assert plan.keys == (("a", "b"), ("c",))
    assert repr(plan) == "RegroupPlan(2 tensors (5, 4) -> 2 tensors (7, 6), 4 moves)"


def test_plans_can_be_copied_and_pickled() -> None:
    plan = RegroupPlan(KEYS, LENGTHS, GROUPS)
    values = inputs(2)
    expected = plan(values)
    grad(expected[0].sum(), values)
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        torch.testing.assert_close(other(values), expected, rtol=0, atol=0)


def test_one_plan_serves_any_batch_and_dtype() -> None:
    plan = RegroupPlan(KEYS, LENGTHS, GROUPS)
    for dtype in (torch.float32, torch.int16):
        for batch in (1, 7):
            values = inputs(batch, dtype=torch.float32, requires_grad=False)
            values = [x.to(dtype) for x in values]
            torch.testing.assert_close(plan(values), seed_reference(*values), rtol=0, atol=0)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # dynamo's own, of what crosses a break
@pytest.mark.parametrize("by_plan", [True, False])
def test_a_compiled_function_breaks_its_graph(by_plan: bool) -> None:
    plan = RegroupPlan(KEYS, LENGTHS, GROUPS)

    def loss(*values: Tensor) -> Tensor:
        outs = plan(values) if by_plan else regroup(values, KEYS, LENGTHS, GROUPS)
        return sum((x.sin().sum() for x in outs), torch.zeros(()))

    values = inputs(3)
    compiled = torch.compile(loss, backend="eager")
    assert_matches_reference(compiled, loss, *values)
    assert_matches_reference(compiled, loss, *inputs(4))
    torch.compiler.reset()


def test_a_module_that_regroups() -> None:
    class Features(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = torch.nn.Linear(3, 8), torch.nn.Linear(3, 12)
            self.plan = RegroupPlan(KEYS[:2], LENGTHS[:2], [["f1", "f3"], ["f2", "f1"]])

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(self.plan([self.left(x), self.right(x)]), -1)

    module = Features()
    x = torch.randn(5, 3)
    module(x).square().sum().backward()
    expected = torch.func.grad(lambda p: functional_call(module, p, x).square().sum())(dict(module.named_parameters()))
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_outputs_may_be_changed_in_place(batch: tuple[int, ...]):
    x = torch.randn(*batch, 5, requires_grad=True)
    first, second = regroup([x], [["a", "b"]], [[2, 3]], [["b", "a"], ["a"]])
    wanted = torch.cat([first.detach(), second.detach()], -1).relu() * 2
    assert torch.equal(torch.cat([first.relu_(), second.relu_()], -1) * 2, wanted)
    (first.sum() + second.sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x > 0) * torch.tensor([2.0, 2, 1, 1, 1]))
