"""linear_recurrence: values and derivatives against the plain loop, transforms, refusals, bytes kept."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop import kernels, reference
from tensorloop.kernels.eager import recurrence as eager
from tensorloop.loop.linear import linear_recurrence
from tensorloop.memory import saved_bytes
from tensorloop.testing import assert_matches_reference, assert_no_leak
from tests.support.parallel_cases import both_ways, work

D = torch.float64


def turning(*shape: int, dtype: torch.dtype = D) -> Tensor:
    """Factors that keep the size of h: signs, or phases."""
    if dtype.is_complex:
        return torch.polar(torch.ones(shape, dtype=D), torch.rand(shape, dtype=D) * 6).to(dtype).requires_grad_()
    return (torch.randint(0, 2, shape).to(dtype) * 2 - 1).mul(1.01).requires_grad_()


def leaf(*shape: int, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def assert_like_the_loop(a: Any, b: Tensor, init: Any = None, dim: int = 0, reverse: bool = False) -> None:
    assert_matches_reference(
        lambda *v: linear_recurrence(*v, dim=dim, reverse=reverse),
        lambda *v: reference.linear_recurrence(*v, dim=dim, reverse=reverse),
        *(a, b, init),
        rtol=1e-10,
        atol=1e-10,
    )


@both_ways
@pytest.mark.parametrize("dtype", [D, torch.complex128])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33])
def test_any_length(T: int, dtype: torch.dtype, reverse: bool) -> None:
    assert_like_the_loop(turning(T, 3, dtype=dtype), leaf(T, 3, dtype=dtype), leaf(3, dtype=dtype), 0, reverse)


def test_a_factor_may_be_the_same_along_any_dims() -> None:
    shape = (2, 3, 4)
    for dim, ones, reverse in itertools.product(range(3), itertools.product(*((1, n) for n in shape)), (False, True)):
        rest = [n for d, n in enumerate(shape) if d != dim]
        assert_like_the_loop(turning(*ones), leaf(*shape), leaf(*rest), dim, reverse)
    assert_like_the_loop(turning(4), leaf(*shape), leaf(4), -2)
    assert_like_the_loop(turning(), leaf(*shape), leaf(), 1)


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(shape=sizes, which=st.integers(0, 3), ones=st.lists(st.booleans(), min_size=4, max_size=4), back=st.booleans())
def test_drawn_shapes(shape: list[int], which: int, ones: list[bool], back: bool) -> None:
    few = [1 if one else n for n, one in zip(shape, ones, strict=False)]
    assert_like_the_loop(turning(*few), leaf(*shape), None, which % len(shape), back)


def test_wide_rows_are_cut_into_blocks() -> None:
    a, b = turning(5, 2, 300), leaf(5, 2, 300)
    assert_like_the_loop(a, b, leaf(2, 300))
    assert_like_the_loop(turning(5, 2, 1), b)
    assert_like_the_loop(turning(5, 1, 300), b)
    assert_like_the_loop(a[:, :1, :1], b, None, 2, True)


@pytest.mark.usefixtures("on_the_cpu")
def test_the_kernel_and_torch_operations_agree() -> None:
    for dtype, shape, reverse in itertools.product((torch.float32, D), [(9,), (3, 9, 2), (2, 9, 0)], (False, True)):
        a, b = turning(*shape, dtype=dtype).detach(), torch.randn(shape, dtype=dtype)
        dim = len(shape) // 2
        args = a, b, torch.randn_like(b.narrow(dim, 0, 1)), dim, reverse
        run = kernels.find("linear_recurrence", b)
        assert run.__module__ == "tensorloop.kernels.cpu.recurrence"
        torch.testing.assert_close(run(*args), eager.linear_recurrence(*args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex64])
def test_dtypes_without_a_kernel(dtype: torch.dtype) -> None:
    a, b = torch.randint(1, 3, (4, 2)).to(dtype), torch.randint(-3, 4, (4, 2)).to(dtype)
    found = linear_recurrence(a, b)
    assert found.dtype == dtype
    assert torch.equal(found, reference.linear_recurrence(a, b))


def test_dtypes_are_promoted_and_numbers_widen_nothing() -> None:
    b = torch.ones(3)
    assert linear_recurrence(0.5, b).dtype == torch.float32
    assert linear_recurrence(2, b.half()).dtype == torch.float16
    assert linear_recurrence(torch.ones(3, dtype=D), b).dtype == D
    assert linear_recurrence(1j, b).tolist() == [1, 1 + 1j, 1j]
    assert linear_recurrence(2, torch.arange(3), 5).tolist() == [10, 21, 44]


def test_strided_and_expanded_inputs() -> None:
    wide = leaf(6, 5, 4)
    factors = turning(6, 5, 4)
    assert_like_the_loop(factors.mT, wide.mT, None, 1)
    assert_like_the_loop(factors[:, ::2], wide[:, ::2], None, 1)
    assert_like_the_loop(factors[:1].expand(6, 5, 4), wide[:1].expand(6, 5, 4))
    one = leaf(6)
    assert_matches_reference(lambda v: linear_recurrence(v, v), lambda v: reference.linear_recurrence(v, v), one)


@both_ways
@pytest.mark.parametrize("shape", [(0, 3), (0,), (3, 0)])
def test_nothing_to_do(shape: tuple[int, ...], reverse: bool) -> None:
    a, b, init = leaf(*shape), leaf(*shape), leaf(*shape[1:])
    h = linear_recurrence(a, b, init, reverse=reverse)
    assert h.shape == shape
    assert [g.tolist() for g in grad(h.sum(), (a, b, init))] == [torch.zeros_like(x).tolist() for x in (a, b, init)]


def test_the_result_shares_no_memory_with_b() -> None:
    for T in (0, 1, 3):
        b = torch.ones(T, 2)
        linear_recurrence(1.0, b).fill_(7)
        assert b.eq(1).all()


# -- derivatives


@both_ways
@pytest.mark.parametrize("dtype", [D, torch.complex128])
@pytest.mark.parametrize("few", [(3, 2), (1, 2), (3, 1), (1, 1)])
def test_first_and_second_derivatives_are_those_of_finite_differences(
    few: tuple[int, int], dtype: torch.dtype, reverse: bool
) -> None:
    inputs = leaf(*few, dtype=dtype), leaf(3, 2, dtype=dtype), leaf(2, dtype=dtype)

    def run(a: Tensor, b: Tensor, init: Tensor) -> Tensor:
        return linear_recurrence(a, b, init, reverse=reverse)

    assert gradcheck(run, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(run, inputs, check_batched_grad=True)


@pytest.mark.parametrize("needs", [[0], [1], [2], [0, 1], [1, 2], [0, 2]])
def test_any_subset_of_inputs_may_need_gradients(needs: list[int]) -> None:
    given = [turning(5, 2), leaf(5, 2), leaf(2)]
    given = [x if i in needs else x.detach() for i, x in enumerate(given)]
    wanted = [given[i] for i in needs]

    def derivatives(run: Callable[..., Tensor]) -> list[Tensor]:
        y = run(*given)
        first = grad(y.sin().sum(), wanted, create_graph=True)
        return [y, *first, *grad(torch.stack([x.square().sum() for x in first]).sum(), wanted)]

    torch.testing.assert_close(derivatives(linear_recurrence), derivatives(reference.linear_recurrence))


def loss(run: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    return (run(a, b, b[0], reverse=True) ** 3).sum() + run(0.9, b, dim=1)[1].sin().sum()


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian"])
def test_func_derivatives(name: str) -> None:
    a, b = turning(4, 1).detach(), torch.randn(4, 3, dtype=D)
    found, expected = (
        getattr(torch.func, name)(lambda a, b, r=run: loss(r, a, b), argnums=(0, 1))(a, b)
        for run in (linear_recurrence, reference.linear_recurrence)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 1), (2, 0)])
def test_vmap_over_any_dims_and_with_grad(in_dims: tuple[Any, ...]) -> None:
    full = turning(3, 4, 2).detach(), torch.randn(3, 4, 2, dtype=D)
    placed = [x[0] if d is None else x.movedim(0, d) for x, d in zip(full, in_dims, strict=True)]

    def of(run: Callable[..., Tensor]) -> Any:
        return lambda a, b: loss(run, a, b)

    rows = [[p if d is None else p.select(d, i) for p, d in zip(placed, in_dims, strict=True)] for i in range(3)]
    found = torch.vmap(torch.func.grad(of(linear_recurrence)), in_dims)(*placed)
    expected = torch.stack([torch.func.grad(of(reference.linear_recurrence))(*row) for row in rows])
    torch.testing.assert_close(found, expected)


def test_forward_mode_with_a_constant_factor() -> None:
    a, b, tangent = turning(4, 2).detach(), torch.randn(4, 2, dtype=D), torch.randn(4, 2, dtype=D)
    with forward_ad.dual_level():
        dual = linear_recurrence(a, forward_ad.make_dual(b, tangent))
        found = forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(found, reference.linear_recurrence(a, tangent))


def test_inside_checkpoints_and_loops() -> None:
    a, b = turning(5, 3), leaf(5, 3)
    expected = grad(reference.linear_recurrence(a, b).sin().sum(), (a, b))
    for reentrant in (False, True):
        out: Any = checkpoint(linear_recurrence, a, b, use_reentrant=reentrant)
        out.sin().sum().backward()
        torch.testing.assert_close([a.grad, b.grad], [*expected])
        a.grad = b.grad = None

    def layers(run: Callable[..., Tensor], checkpoints: int | None) -> Any:
        start = tl.fori_loop(0, 6, lambda i, x: torch.sin(run(a, x)), b, checkpoints=checkpoints)
        return grad(start.sum(), (a, b))

    torch.testing.assert_close(layers(linear_recurrence, 2), layers(reference.linear_recurrence, None))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_takes_it_as_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    a, b = turning(6, 2), leaf(6, 2)
    out = torch.compile(loss, backend=backend, fullgraph=True)(linear_recurrence, a, b)
    expected = loss(reference.linear_recurrence, a, b)
    torch.testing.assert_close([out, *grad(out, (a, b))], [expected, *grad(expected, (a, b))])


# -- cost


def test_kept_are_the_factors_and_the_result_alone() -> None:
    """Inputs are not counted, and a number is a tensor of eight bytes."""
    a, b = turning(1000, 4), leaf(1000, 4)
    h, number = 1000 * 4 * 8, 8
    assert saved_bytes(lambda: linear_recurrence(a, b).sum()) == h + number
    assert saved_bytes(lambda: linear_recurrence(a.exp(), b).sum()) == h + h + number
    assert saved_bytes(lambda: linear_recurrence(a[:, :1].exp(), b).sum()) == h + h // 4 + number
    assert saved_bytes(lambda: linear_recurrence(a.detach(), b).sum()) == 0
    assert saved_bytes(lambda: linear_recurrence(0.99, b).sum()) == number


def test_work_is_linear_in_the_length_and_nothing_stays() -> None:
    def of(T: int) -> int:
        a, b = turning(T, 4, dtype=torch.complex128), leaf(T, 4, dtype=torch.complex128)
        return work(lambda: linear_recurrence(a, b).abs().sum())

    assert of(128) < 2.1 * of(64)
    a, b = turning(9, 2), leaf(9, 2)
    assert_no_leak(lambda: grad(linear_recurrence(a, b).sum(), (a, b)))


# -- refusals

ONES = torch.ones(4, 3)
REFUSED: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("b", lambda: linear_recurrence(0.5, 3), TypeError, "b: expected a tensor, got int 3"),  # pyright: ignore
    ("a", lambda: linear_recurrence("x", ONES), TypeError, "a: expected a tensor, got str 'x'"),  # pyright: ignore
    ("bool", lambda: linear_recurrence(True, ONES), TypeError, "a: expected a tensor, got bool True"),
    ("reverse", lambda: linear_recurrence(1, ONES, reverse=1), TypeError, "reverse must be True or"),  # pyright: ignore
    ("dim", lambda: linear_recurrence(1, ONES, dim=2), ValueError, "b has no dim 2 to run over: its shape is (4, 3)"),
    ("0-d", lambda: linear_recurrence(1, ONES[0, 0]), ValueError, "b has no dim 0"),
    (
        "shape of a",
        lambda: linear_recurrence(torch.ones(4), ONES),
        ValueError,
        "a must broadcast to b, (4, 3), got shape (4,)",
    ),
    (
        "rank of a",
        lambda: linear_recurrence(torch.ones(1, 4, 3), ONES),
        ValueError,
        "a must broadcast to b, (4, 3), got shape (1, 4, 3)",
    ),
    (
        "init",
        lambda: linear_recurrence(1, ONES, torch.ones(4), dim=0),
        ValueError,
        "init must broadcast to b without its steps, (3,), got shape (4,)",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith("linear_recurrence: ")
    assert words in str(caught.value)


def test_a_factor_changed_before_backward_is_an_error() -> None:
    a, b = turning(5), leaf(5)
    h = linear_recurrence(a, b)
    with torch.no_grad():
        a.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()
