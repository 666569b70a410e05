"""Checkpointed loops over tensors that are not dense numbers: sparse ones, and those without numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import grad

import tensorloop as tl
from tests.support.loop_cases import randn, rotate

STEPS = 5


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr"])
@pytest.mark.parametrize("returns", ["the same", "another"])
def test_a_sparse_tensor_in_the_carry(returns: str, layout: str, wants_gradient: bool, tmp_path: Path) -> None:
    """A matrix whose rows turn, so that nothing vanishes."""
    w = randn(2)

    def gradients(checkpoints: Any) -> list[Tensor]:
        index = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1]])
        matrix = torch.sparse_coo_tensor(index, torch.tensor([0.8, -0.8, 0.3, 0.3], dtype=torch.float64), (2, 2))
        matrix = matrix if layout == "uncoalesced" else matrix.coalesce()
        matrix = matrix.to_sparse_csr() if layout == "csr" else matrix
        matrix = matrix.requires_grad_(wants_gradient)

        def body(i: int, carry: Any) -> Any:
            h, a = carry
            return (a @ h * w.cos()).sin() + rotate(h), a if returns == "the same" else a * 1.1

        h, last = tl.fori_loop(0, STEPS, body, (torch.ones(2, dtype=torch.float64), matrix), checkpoints=checkpoints)
        found = grad(h.sum(), [w, matrix][: 1 + wants_gradient])
        return [h, *(x.to_dense() for x in (last, *found))]

    true = gradients(None)
    plans = [1, 2, tl.Checkpoints(budget=1000), tl.Checkpoints(k=2, check=True), tl.Checkpoints(k=2, offload="cpu")]
    for plan in (*plans, tl.Checkpoints(k=2, offload=tmp_path)):
        torch.testing.assert_close(gradients(plan), true)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize(
    "plan",
    [1, 2, tl.Checkpoints(budget=500), tl.Checkpoints(k=2, check=True), tl.Checkpoints(k=1, residuals=2)],
    ids=str,
)
def test_tensors_without_numbers(plan: Any, random: bool) -> None:
    """Shapes and kinds, as `FakeTensorMode` gives them; random states stay what they are."""
    state = torch.get_rng_state()
    with FakeTensorMode():
        w, init, xs = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(STEPS, 2)

        def body(carry: Any, x: Tensor) -> Any:
            h, past = carry
            h.mul_(w)
            h = rotate(h) + x + (torch.rand(2) if random else 0)
            return (h * 1, past if past is None else past.append(h)), h.sin()

        for past in (None, tl.TensorArray()):
            (h, last), ys = tl.scan(body, (init * 1, past), xs, checkpoints=plan)
            loss = h.sum() + ys.sum() + (0 if last is None else last.stack().sum())
            first = grad(loss, [init, w], create_graph=True)
            assert [x.shape for x in (*first, *grad(loss, [init, w]))] == [(2,)] * 4
            assert ys.shape == (STEPS, 2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("checkpoints", [1, 3])
def test_a_step_that_takes_back_what_it_wrote_first(checkpoints: int) -> None:
    """The array is another's where the step runs again: it has slots, though none before it."""
    xs = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def body(a: tl.TensorArray, x: Tensor) -> tuple[tl.TensorArray, Tensor]:
        tried = a.append(x.sin()).stack().sum(0)
        a.truncate(len(a) - 1)
        return a.append(x * tried), tried * a.stack().sum(0)

    found = []
    for kept in (None, checkpoints):
        array, ys = tl.scan(body, tl.TensorArray(), xs, checkpoints=kept)
        found.append((array.stack(), ys, *torch.autograd.grad(ys.sin().sum() + array.stack().sum(), xs)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("checkpoints", [1, 2, 6])
def test_a_step_that_cuts_its_array_short(checkpoints: int) -> None:
    xs = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def body(a: tl.TensorArray, x: Tensor) -> tuple[tl.TensorArray, Tensor]:
        a.append(x.sin()).append(a[-1] * x.cos())
        seen = a.stack().sum(0)
        a.truncate(len(a) - 1)
        a[len(a) - 1] = a[-1] * 1.5
        return a, seen * a.stack().sum(0)

    a, steps = tl.TensorArray(), []
    for x in xs:
        a, y = body(a, x)
        steps.append(y)
    expected = a.stack(), torch.stack(steps)
    array, ys = tl.scan(body, tl.TensorArray(), xs, checkpoints=checkpoints)
    found = array.stack(), ys
    torch.testing.assert_close(found, expected)
    assert len(array) == 6

    def first_and_second(outputs: tuple[Tensor, Tensor]) -> list[Tensor]:
        loss = (outputs[0] ** 3).sum() + outputs[1].sin().sum()
        (first,) = torch.autograd.grad(loss, xs, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), xs)]

    torch.testing.assert_close(first_and_second(found), first_and_second(expected))
