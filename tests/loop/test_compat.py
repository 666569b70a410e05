"""Programs for torch's own loop operators: by `tl.compat`, by Python loops, and by torch itself where it can."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan as torch_s_associative_scan
from torch._higher_order_ops.scan import scan as torch_s_scan
from torch._higher_order_ops.while_loop import while_loop as torch_s_while_loop
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.utils import _pytree as pytree

from tests.support.compat_cases import (
    NAMES,
    OURS,
    PLAIN,
    PROGRAMS,
    assert_same,
    carry_and_output_differ,
    counts,
    ints_from_shapes,
    nested,
    no_step,
    pairs,
    total,
    trees_and_ints,
    unit,
)
from tests.support.loop_cases import randn, run


def differentiable(x: Any) -> Any:
    return x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def right_torch_s_scan(combine_fn: Any, init: Any, xs: Any, **options: Any) -> Any:
    # Before 2.13 torch's gradient does not pass from step to step where init needs none: pytorch's issue 184528.
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        init = pytree.tree_map(differentiable, init)
    return torch_s_scan(combine_fn, init, xs, **options)


TORCH = SimpleNamespace(  # each compiles what it is given
    scan=right_torch_s_scan,
    while_loop=torch_s_while_loop,
    associative_scan=partial(torch_s_associative_scan, combine_mode="generic"),
)


@pytest.mark.parametrize(("program", "inputs", "_"), PROGRAMS, ids=NAMES)
def test_values_and_gradients_are_a_python_loop_s(program: Any, inputs: list[Tensor], _: bool) -> None:
    outputs, flags, grads = run(program, OURS, inputs)
    true_outputs, true_flags, true_grads = run(program, PLAIN, inputs)
    assert_same(outputs, true_outputs)
    assert_same(grads, true_grads)
    assert flags == true_flags
    ours, theirs = (pytree.tree_structure(program(ops, *inputs)) for ops in (OURS, PLAIN))
    assert ours == theirs


@pytest.mark.parametrize(("program", "inputs", "_"), PROGRAMS, ids=NAMES)
def test_second_order(program: Any, inputs: list[Tensor], _: bool) -> None:
    def of(ops: Any) -> Any:
        wanted = [x for x in inputs if x.requires_grad]
        first = grad(total(program(ops, *inputs)), wanted, create_graph=True)
        if not any(x.requires_grad for x in first):
            return first
        return grad(total(first), wanted, allow_unused=True, materialize_grads=True)

    assert_same(of(OURS), of(PLAIN), 1e-10)


HELD_BY_TORCH = [(name, *case[:2]) for name, case in zip(NAMES, PROGRAMS, strict=True) if case[2]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("program", "inputs"), [case[1:] for case in HELD_BY_TORCH], ids=[c[0] for c in HELD_BY_TORCH])
def test_torch_s_own_gives_the_same(program: Any, inputs: list[Tensor]) -> None:
    ours, theirs = program(OURS, *inputs), program(TORCH, *inputs)
    assert_same(ours, theirs)
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    wanted = [x for x in inputs if x.requires_grad]
    assert_same(grad(total(ours), wanted), grad(total(theirs), wanted))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [counts, nested, trees_and_ints, no_step, ints_from_shapes])
def test_torch_s_own_gives_the_same_where_nothing_needs_a_gradient(program: Any) -> None:
    inputs = next(inputs for other, inputs, _ in PROGRAMS if other is program)
    with torch.no_grad():
        ours, theirs = program(OURS, *inputs), program(TORCH, *inputs)
    assert_same([*pytree.tree_leaves(ours)], [*pytree.tree_leaves(theirs)])


@pytest.mark.parametrize(
    ("program", "inputs"),
    [(carry_and_output_differ, [randn(2), randn(3, 2)]), (counts, [randn(1, 2)]), (pairs, [unit(4, 2), randn(4, 2)])],
    ids=["scan", "while_loop", "associative_scan"],
)
def test_gradients_against_differences(program: Any, inputs: list[Tensor]) -> None:
    def tensors(*inputs: Tensor) -> list[Tensor]:
        leaves = pytree.tree_leaves(program(OURS, *inputs))
        return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]

    assert gradcheck(tensors, inputs)
    assert gradgradcheck(tensors, inputs)
