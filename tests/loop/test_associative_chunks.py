"""associative_scan with checkpoints: the same values and gradients, chunk by chunk, and what is kept and run again."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

from tensorloop import Checkpoints, reference, schedule
from tensorloop.loop.associative import associative_scan
from tensorloop.memory import saved_bytes
from tensorloop.testing import assert_matches_reference, assert_no_leak
from tests.support.parallel_cases import Affine, Fn, both_ways, product, recurrence, rotations, then

ROW = 6 * 8  # bytes of an element of `recurrence`


def assert_like_the_fold(fn: Fn, xs: Any, checkpoints: int, dim: int = 0, reverse: bool = False) -> None:
    assert_matches_reference(
        lambda v: associative_scan(fn, v, dim=dim, reverse=reverse, checkpoints=checkpoints),
        lambda v: reference.associative_scan(fn, v, dim, reverse),
        xs,
        rtol=1e-10,
        atol=1e-10,
    )


@both_ways
@pytest.mark.parametrize("T", [1, 2, 3, 5, 7, 8, 9])
def test_any_length_in_any_number_of_chunks(T: int, reverse: bool) -> None:
    for checkpoints in (1, 2, 3, T, T + 1):
        assert_like_the_fold(then, recurrence(T, requires_grad=True), checkpoints, 0, reverse)


@given(T=st.integers(1, 40), checkpoints=st.integers(1, 40), dim=st.sampled_from([0, 1, -3]), back=st.booleans())
def test_drawn_lengths(T: int, checkpoints: int, dim: int, back: bool) -> None:
    assert_like_the_fold(product, rotations(T, 2, requires_grad=True).movedim(0, dim), checkpoints, dim, back)


def test_no_elements_and_dtypes_without_gradient() -> None:
    assert associative_scan(torch.add, torch.ones(0, 2), checkpoints=3).shape == (0, 2)
    x = torch.randint(0, 9, (11, 3))
    assert torch.equal(associative_scan(torch.add, x, checkpoints=3), x.cumsum(0))
    with torch.no_grad():
        found = associative_scan(torch.add, x.double().requires_grad_(), checkpoints=3)
    assert torch.equal(found, x.double().cumsum(0))


@both_ways
@pytest.mark.extended("reverse")
def test_first_and_second_derivatives_are_those_of_finite_differences(reverse: bool) -> None:
    x = recurrence(6, requires_grad=True)

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(associative_scan(then, Affine(a, b), reverse=reverse, checkpoints=3))

    assert gradcheck(run, tuple(x))
    assert gradgradcheck(run, tuple(x))


def test_closed_over_tensors_and_parts_of_the_result() -> None:
    x, w = rotations(9, requires_grad=True), rotations(requires_grad=True)

    def run(w: Tensor, x: Tensor, checkpoints: int | None) -> Tensor:
        turned = torch.linalg.matrix_exp(w - w.mT)
        return associative_scan(lambda a, b: b @ turned @ a, x, checkpoints=checkpoints)[-1]

    assert_matches_reference(lambda *v: run(*v, checkpoints=4), lambda *v: run(*v, checkpoints=None), w, x)


def test_under_transforms_of_torch_func() -> None:
    x = recurrence(7)

    def loss(checkpoints: int | None) -> Any:
        return lambda a, b: (associative_scan(then, Affine(a, b), checkpoints=checkpoints).b ** 3).sum()

    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        torch.testing.assert_close(transform(loss(3))(*x), transform(loss(None))(*x))
    many = Affine(*(torch.stack([v, v.cos()]) for v in x))
    torch.testing.assert_close(torch.vmap(loss(3))(*many), torch.vmap(loss(None))(*many))


@pytest.mark.parametrize("checkpoints", [1, 2, 8, 32, 100])
def test_one_element_a_chunk_is_kept(checkpoints: int) -> None:
    x = recurrence(100, requires_grad=True)
    assert saved_bytes(lambda: associative_scan(then, x, checkpoints=checkpoints)) <= checkpoints * ROW
    assert_no_leak(lambda: grad(associative_scan(then, x, checkpoints=checkpoints).b.sum(), x))


@pytest.mark.parametrize(("T", "checkpoints"), [(1, 3), (8, 2), (9, 2), (100, 8), (100, 100)])
def test_pairs_are_combined_once_forward_and_once_in_backward(T: int, checkpoints: int) -> None:
    pairs: list[int] = []

    def fn(a: Tensor, b: Tensor) -> Tensor:
        pairs.append(len(a))
        return b @ a

    x = rotations(T, requires_grad=True)
    y = associative_scan(fn, x, checkpoints=checkpoints)
    forward = sum(pairs)
    assert forward < 2 * (T + checkpoints)
    y.sum().backward()
    assert sum(pairs) == 2 * forward


@pytest.mark.parametrize(
    ("checkpoints", "error", "words"),
    [
        (0, ValueError, "checkpoints must be at least 1, got 0"),
        (2.0, TypeError, "checkpoints must be an int"),
        (True, TypeError, "checkpoints must be an int"),
        (Checkpoints(k=2), TypeError, "the number of chunks that xs are cut into, got Checkpoints(k=2"),
        (schedule.Periodic(2), TypeError, "the number of chunks that xs are cut into, got Periodic(every=2)"),
    ],
)
def test_other_checkpoints_are_refused(checkpoints: Any, error: type[Exception], words: str) -> None:
    def fn(a: Any, b: Any) -> Any:
        raise AssertionError("called")

    with pytest.raises(error) as caught:
        associative_scan(fn, torch.ones(4), checkpoints=checkpoints)
    assert str(caught.value).startswith("associative_scan: ")
    assert words in str(caught.value)


def test_what_fn_does_wrong_is_told_as_without_chunks() -> None:
    with pytest.raises(TypeError, match=r"^associative_scan: fn must return slabs like those it gets, of 2 pairs"):
        associative_scan(lambda a, b: (a + b).double(), torch.ones(8), checkpoints=2)
    with pytest.raises(RuntimeError, match="inplace"):
        associative_scan(lambda a, b: a.add_(b), torch.ones(8, requires_grad=True), checkpoints=2)
    x, w = torch.ones(8, requires_grad=True), torch.ones(1, requires_grad=True)
    y = associative_scan(lambda a, b: a * b * w, x, checkpoints=2)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match=r"^associative_scan: .* was changed in place before backward"):
        y.sum().backward()
