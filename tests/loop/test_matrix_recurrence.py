"""linear_recurrence with matrices, resets and packed rows: values and derivatives against the plain loop."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import tensorloop as tl
from tensorloop import kernels, reference
from tensorloop.kernels.eager import recurrence as eager
from tensorloop.loop.linear import linear_recurrence
from tensorloop.memory import saved_bytes
from tensorloop.testing import assert_matches_reference
from tests.support.parallel_cases import both_ways, work

D, C = torch.float64, torch.complex128


def turning(*shape: int, dtype: torch.dtype = D) -> Tensor:
    """Matrices that keep the size of h."""
    return torch.linalg.qr(torch.randn(shape, dtype=dtype))[0].requires_grad_()


def leaf(*shape: int, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.4


def assert_like_the_loop(*given: Any, **options: Any) -> None:
    assert_matches_reference(
        lambda *v: linear_recurrence(*v, **options),
        lambda *v: reference.linear_recurrence(*v, **options),
        *given,
        rtol=1e-10,
        atol=1e-10,
    )


# -- matrices


@both_ways
@pytest.mark.parametrize("dtype", [D, C])
@pytest.mark.parametrize("T", [1, 2, 3, 5, 8, 17])
def test_matrices_of_each_step(T: int, dtype: torch.dtype, reverse: bool) -> None:
    given = turning(T, 2, 3, 3, dtype=dtype), leaf(T, 2, 3, dtype=dtype), leaf(2, 3, dtype=dtype)
    assert_like_the_loop(*given, reverse=reverse, matrix=True)
    assert_like_the_loop(*given, reverse=reverse, matrix=True, resets=flags(T, 2))


def test_a_matrix_may_be_the_same_along_any_dims() -> None:
    shape = (2, 4, 3)
    for dim, ones, reverse in itertools.product(range(3), itertools.product(*((1, n) for n in shape)), (False, True)):
        rest = [n for d, n in enumerate(shape) if d != dim]
        given = turning(*ones, 2, 2), leaf(*shape, 2), leaf(*rest, 2)
        assert_like_the_loop(*given, dim=dim, reverse=reverse, matrix=True)
    assert_like_the_loop(turning(2, 2), leaf(*shape, 2), leaf(2), dim=-3, matrix=True, resets=flags(1, 4, 1))


@pytest.mark.parametrize("size", [1, 40])
def test_large_matrices_and_many_vectors(size: int) -> None:
    """Sizes at which torch's products take over."""
    count = 40 if size > 1 else 1100
    for ones in ((), (5, 1, 1), (5, 2, 1), (1, 2, 1), (5, 2, count)):
        if size == 1 or ones != (5, 2, count):
            given = turning(*ones, size, size), leaf(5, 2, count, size)
            assert_like_the_loop(*given, matrix=True, resets=flags(5, 1, count))
    assert_like_the_loop(turning(2, 1, 1, size, size), leaf(2, 3, count, size), None, dim=1, reverse=True, matrix=True)
    a, b = turning(6, 30, 30, dtype=C), leaf(6, 30, dtype=C)
    assert_like_the_loop(a, b, matrix=True, reverse=True, resets=flags(6))


@pytest.mark.usefixtures("on_the_cpu")
def test_the_kernels_and_torch_operations_agree() -> None:
    for dtype, shape, reverse in itertools.product(
        (torch.float32, D), [(9, 4), (3, 9, 2, 5), (2, 9, 0, 3)], (False, True)
    ):
        dim = len(shape) // 2 - 1
        b = torch.randn(shape, dtype=dtype)
        a, begin = turning(*shape, shape[-1], dtype=dtype).detach(), b.narrow(dim, 0, 1).clone()
        starts = flags(*shape[:-1], 1).index_fill_(dim, torch.tensor([shape[dim] - 1 if reverse else 0]), True)
        run = kernels.find("matrix_recurrence", b)
        assert run.__module__ == "tensorloop.kernels.cpu.recurrence"
        both: Any = (a, b, begin, dim, reverse), (a, b, None, dim, reverse, starts)
        for args in both:
            torch.testing.assert_close(run(*args), eager.matrix_recurrence(*args))
        plain = kernels.find("linear_recurrence", b)
        args = a[..., 0], b, None, dim, reverse, starts
        torch.testing.assert_close(plain(*args), eager.linear_recurrence(*args))


@both_ways
@pytest.mark.parametrize("shape", [(0, 3), (0, 2, 3), (3, 0), (4, 0, 2), (0, 0)])
def test_nothing_to_do(shape: tuple[int, ...], reverse: bool) -> None:
    for a in (leaf(shape[-1], shape[-1]), leaf(*shape, shape[-1])):
        b, init = leaf(*shape), leaf(*shape[1:])
        for resets in (None, flags(*shape[:-1])):
            h = linear_recurrence(a, b, init, reverse=reverse, matrix=True, resets=resets)
            assert h.shape == shape
            assert all(not g.any() for g in grad(h.sum(), (a, b, init), materialize_grads=True))


def test_strided_expanded_and_shared_inputs() -> None:
    wide, factors = leaf(3, 6, 4), turning(6, 4, 3, 3)
    assert_like_the_loop(factors.mT[:, ::2], wide.permute(1, 2, 0)[:, ::2], matrix=True)
    assert_like_the_loop(factors[:1].expand(6, 4, 3, 3), wide.permute(1, 2, 0), matrix=True)
    one = leaf(3, 3)
    assert_matches_reference(
        lambda v: linear_recurrence(v, v, v[0], matrix=True),
        lambda v: reference.linear_recurrence(v, v, v[0], matrix=True),
        one,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64])
def test_dtypes_without_a_kernel(dtype: torch.dtype) -> None:
    a, b = torch.randint(-1, 2, (4, 2, 2)).to(dtype), torch.randint(-3, 4, (4, 2)).to(dtype)
    found = linear_recurrence(a, b, matrix=True)
    assert found.dtype == dtype
    assert torch.equal(found, reference.linear_recurrence(a, b, matrix=True))


@both_ways
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("dtype", [D, C])
@pytest.mark.parametrize("few", [(3, 2), (1, 2), (1, 1)])
def test_derivatives_are_those_of_finite_differences(
    few: tuple[int, int], dtype: torch.dtype, anew: bool, reverse: bool
) -> None:
    inputs = leaf(*few, 2, 2, dtype=dtype), leaf(3, 2, 2, dtype=dtype), leaf(2, 2, dtype=dtype)
    resets = torch.tensor([[True, False], [False, True], [False, False]]) if anew else None

    def run(a: Tensor, b: Tensor, init: Tensor) -> Tensor:
        return linear_recurrence(a, b, init, reverse=reverse, matrix=True, resets=resets)

    assert gradcheck(run, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(run, inputs, check_batched_grad=True)


@pytest.mark.parametrize("needs", [[0], [1], [2], [0, 1], [1, 2], [0, 2]])
def test_any_subset_of_inputs_may_need_gradients(needs: list[int]) -> None:
    given = [turning(5, 2, 2), leaf(5, 2), leaf(2)]
    given = [x if i in needs else x.detach() for i, x in enumerate(given)]
    resets = torch.tensor([False, False, True, False, False])

    def derivatives(run: Callable[..., Tensor]) -> list[Tensor]:
        y = run(*given, matrix=True, resets=resets)
        wanted = [given[i] for i in needs]
        first = grad(y.sin().sum(), wanted, create_graph=True)
        return [y, *first, *grad(torch.stack([x.square().sum() for x in first]).sum(), wanted)]

    torch.testing.assert_close(derivatives(linear_recurrence), derivatives(reference.linear_recurrence))


def loss(run: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    resets = torch.tensor([False, True, False, False])
    return (run(a, b, b[0], reverse=True, matrix=True, resets=resets) ** 3).sum() + run(a[0], b, matrix=True)[
        1
    ].sin().sum()


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian"])
def test_func_derivatives(name: str) -> None:
    a, b = turning(4, 2, 2).detach(), torch.randn(4, 2, dtype=D)
    found, expected = (
        getattr(torch.func, name)(lambda a, b, r=run: loss(r, a, b), argnums=(0, 1))(a, b)
        for run in (linear_recurrence, reference.linear_recurrence)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 1), (3, 0)])
def test_vmap_over_any_dims_and_with_grad(in_dims: tuple[Any, ...]) -> None:
    full = turning(3, 4, 2, 2).detach(), torch.randn(3, 4, 2, dtype=D)
    placed = [x[0] if d is None else x.movedim(0, d) for x, d in zip(full, in_dims, strict=True)]
    rows = [[p if d is None else p.select(d, i) for p, d in zip(placed, in_dims, strict=True)] for i in range(3)]

    def of(run: Callable[..., Tensor]) -> Any:
        return lambda a, b: loss(run, a, b)

    found = torch.vmap(torch.func.grad(of(linear_recurrence)), in_dims)(*placed)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(of(reference.linear_recurrence))(*r) for r in rows]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_takes_it_as_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    a, b = turning(4, 2, 2), leaf(4, 2)
    out = torch.compile(loss, backend=backend, fullgraph=True)(linear_recurrence, a, b)
    expected = loss(reference.linear_recurrence, a, b)
    torch.testing.assert_close([out, *grad(out, (a, b))], [expected, *grad(expected, (a, b))])


def test_kept_are_the_matrices_and_the_result_alone() -> None:
    a, b, one = turning(100, 4, 4), leaf(100, 4), turning(4, 4)
    h, number = 100 * 4 * 8, 8
    assert saved_bytes(lambda: linear_recurrence(a, b, matrix=True).sum()) == h + number
    assert saved_bytes(lambda: linear_recurrence(one.exp(), b, matrix=True).sum()) == h + 2 * 16 * 8 + number - 16 * 8
    assert saved_bytes(lambda: linear_recurrence(a.detach(), b, matrix=True).sum()) == 0


def test_work_is_linear_in_the_length() -> None:
    def of(T: int) -> int:
        a, b = turning(3, 3, dtype=C), leaf(T, 3, dtype=C)
        return work(lambda: linear_recurrence(a, b, matrix=True).abs().sum())

    assert of(128) < 2.1 * of(64)


def test_a_result_may_be_changed_in_place() -> None:
    b = leaf(4, 3)
    h = linear_recurrence(turning(3, 3).detach(), b, matrix=True)
    h.mul_(2)
    grad(h.sum(), b)


# -- resets


@both_ways
@pytest.mark.parametrize("T", [1, 2, 5, 9])
def test_resets(T: int, reverse: bool) -> None:
    for dtype in (D, C):
        a, b, init = (leaf(*n, dtype=dtype) for n in ((T, 3), (T, 3), (3,)))
        for resets in (flags(T, 3), flags(T, 1), flags(1, 3), torch.ones(T, 1, dtype=torch.bool)):
            assert_like_the_loop(a, b, init, reverse=reverse, resets=resets)
            assert_like_the_loop(a[:1], b, None, reverse=reverse, resets=resets)
    assert_like_the_loop(leaf(4, T), leaf(4, T), leaf(4), dim=1, reverse=reverse, resets=flags(4, T))


def test_nothing_is_looked_at_across_a_reset() -> None:
    """NaN in an episode, and in the factor of its end, reach no other, forward or backward."""
    for matrix, dtype in itertools.product((False, True), (D, C)):
        a = (turning(6, 2, 2, dtype=dtype) if matrix else leaf(6, 2, dtype=dtype)).detach()
        b = torch.randn(6, 2, dtype=dtype)
        resets = torch.tensor([0, 0, 1, 0, 1, 0]).bool()
        a[2:4], b[3] = float("nan"), float("nan")
        a.requires_grad_()
        b.requires_grad_()
        h = linear_recurrence(a, b, matrix=matrix, resets=resets if matrix else resets[:, None])
        of_a, of_b = grad(h.abs().sum(), (a, b))
        for x in (h, of_a, of_b):
            assert x[:2].isfinite().all()
            assert x[4:].isfinite().all()
        assert h[3].isnan().all()


# -- packed rows


def rows_of(values: Tensor, lens: list[int]) -> list[Tensor]:
    return [*values.split(lens)]


LENS = [[3, 0, 1, 4], [0, 0], [1], []]


@both_ways
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("lens", LENS)
def test_each_packed_row_is_a_recurrence_of_its_own(lens: list[int], matrix: bool, reverse: bool) -> None:
    n, count, more = sum(lens), len(lens), (2,) * matrix
    b, init = leaf(n, 2), leaf(count, 2)
    resets = flags(n) if matrix else flags(n, 1)
    full = (turning if matrix else leaf)(n, 2, *more) if n else leaf(0, 2, *more)
    one, of_rows = (leaf(*k, 2, *more) for k in ((), (count, 1)))
    for a, begin, anew in itertools.product((full, one, of_rows), (None, init, init[:1].sum(0)), (None, resets)):

        def ours(a: Any = a, begin: Any = begin, anew: Any = anew) -> Tensor:
            p = tl.PackedTensor(a, lens) if a is full else a
            r = None if anew is None else tl.PackedTensor(anew, lens)
            h = linear_recurrence(p, tl.PackedTensor(b, lens), begin, reverse=reverse, matrix=matrix, resets=r)
            assert h.lens.tolist() == lens
            return h.values

        def plain(a: Any = a, begin: Any = begin, anew: Any = anew) -> Tensor:
            parts = [b[:0]]
            at = 0
            for i, x in enumerate(rows_of(b, lens)):
                own, at = slice(at, at + len(x)), at + len(x)
                if len(x):
                    factor = a[own] if a is full else a if a is one else a[i]
                    start = begin[i] if begin is init else begin
                    r = None if anew is None else anew[own]
                    parts.append(
                        reference.linear_recurrence(factor, x, start, reverse=reverse, matrix=matrix, resets=r)
                    )
            return torch.cat(parts)

        found, expected = ours(), plain()
        torch.testing.assert_close(found, expected)
        wanted = [x for x in (a, b, init) if x.numel()]
        if n:
            first = [grad(h.sin().sum(), wanted, create_graph=True, materialize_grads=True) for h in (found, expected)]
            torch.testing.assert_close(*first)
            second = [
                grad(sum((x**2).sum() for x in g), wanted, allow_unused=True, materialize_grads=True)  # pyright: ignore
                for g in first
            ]
            torch.testing.assert_close(*second)


@both_ways
def test_nan_in_a_row_reaches_no_other(reverse: bool) -> None:
    a, b = torch.rand(9, 2, dtype=D), torch.randn(9, 2, dtype=D)
    a[3:6] = b[4] = float("nan")
    p, q = (tl.PackedTensor(x.requires_grad_(), [3, 0, 3, 3]) for x in (a, b))
    h = linear_recurrence(p, q, torch.ones(4, 2), reverse=reverse).values
    for x in (h, *grad(h.sum(), (a, b))):
        assert x[:3].isfinite().all()
        assert x[6:].isfinite().all()


def test_advantages_of_packed_episodes() -> None:
    """Generalised advantage estimation, each episode a row."""
    lens, gamma, lam = [4, 1, 6], 0.99, 0.95
    rewards, values = torch.randn(11, dtype=D), torch.randn(11, dtype=D)
    expected = []
    for r, v in zip(rows_of(rewards, lens), rows_of(values, lens), strict=True):
        advantage, found = torch.zeros((), dtype=D), []
        for t in reversed(range(len(r))):
            following = v[t + 1] if t + 1 < len(r) else 0
            advantage = r[t] + gamma * following - v[t] + gamma * lam * advantage
            found.append(advantage)
        expected += found[::-1]
    following = torch.cat([x for v in rows_of(values, lens) for x in (v[1:], v.new_zeros(1))])
    deltas = tl.PackedTensor(rewards + gamma * following - values, lens)
    torch.testing.assert_close(linear_recurrence(gamma * lam, deltas, reverse=True).values, torch.stack(expected))


def test_an_all_pole_filter_is_its_companion_matrix() -> None:
    """y[t] = x[t] - c1 y[t - 1] - c2 y[t - 2] - c3 y[t - 3], with coefficients of each step."""
    T, order = 20, 3
    x, c = leaf(2, T), (torch.randn(2, T, order, dtype=D) * 0.2).requires_grad_()
    past, ys = torch.zeros(2, order, dtype=D), []
    for t in range(T):
        y = x[:, t] - (c[:, t] * past).sum(1)
        past = torch.cat([y[:, None], past[:, :-1]], 1)
        ys.append(y)
    expected = torch.stack(ys, 1)
    shift = torch.eye(order, dtype=D)[:-1].expand(2, T, order - 1, order)
    companion = torch.cat([-c[:, :, None], shift], 2)
    b = torch.nn.functional.pad(x[..., None], (0, order - 1))
    found = linear_recurrence(companion, b, dim=1, matrix=True)[..., 0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad(found.sin().sum(), (x, c)), grad(expected.sin().sum(), (x, c)))


def test_the_delta_rule_with_columns_as_vectors() -> None:
    """H = (I - beta k k^T) H + beta k v^T."""
    T, B, F, V = 7, 2, 3, 4
    k, v, beta = leaf(T, B, F), leaf(T, B, V), torch.rand(T, B, 1, dtype=D).requires_grad_()
    H, hs = torch.zeros(B, F, V, dtype=D), []
    for t in range(T):
        H = H + beta[t, :, :, None] * k[t][:, :, None] * (v[t][:, None] - k[t][:, None] @ H)
        hs.append(H)
    expected = torch.stack(hs)
    A = torch.eye(F, dtype=D) - beta[..., None] * k[..., :, None] * k[..., None, :]
    U = beta[..., None] * v[..., :, None] * k[..., None, :]  # columns last: (T, B, V, F)
    found = linear_recurrence(A[:, :, None], U, matrix=True).mT
    torch.testing.assert_close(found, expected)
    given = (k, v, beta)
    torch.testing.assert_close(grad(found.sin().sum(), given), grad(expected.sin().sum(), given))


# -- refusals

ONES, PACKED = torch.ones(4, 3), tl.PackedTensor(torch.ones(4, 3), [1, 3])
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: linear_recurrence(2.0, ONES, matrix=True), TypeError, "a: expected a tensor, got float 2.0"),
    (
        lambda: linear_recurrence(torch.ones(3), ONES, matrix=True),
        ValueError,
        "a must hold matrices (3, 3) for the vectors of b, (4, 3), got (3,)",
    ),
    (
        lambda: linear_recurrence(torch.ones(5, 3, 3), ONES, matrix=True),
        ValueError,
        "a must broadcast to (*b.shape, F), (4, 3, 3), got shape (5, 3, 3)",
    ),
    (
        lambda: linear_recurrence(torch.ones(3, 3), ONES, dim=1, matrix=True),
        ValueError,
        "dim is 1, the last one of b, (4, 3), where the vectors of matrix=True are",
    ),
    (
        lambda: linear_recurrence(1, ONES, resets=torch.ones(4).bool()),
        ValueError,
        "resets must broadcast to b, (4, 3), got shape (4,); add dims at the end: resets[..., None]",
    ),
    (lambda: linear_recurrence(1, ONES, resets=ONES), TypeError, "resets must be bools, got dtype torch.float32"),
    (lambda: linear_recurrence(PACKED, ONES), TypeError, "a is packed, and b is not; pack b too"),  # pyright: ignore
    (
        lambda: linear_recurrence(tl.PackedTensor(ONES, [2, 2]), PACKED),
        ValueError,
        "a: packed tensors of different lens; the first row that differs is 0: 1 and 2",
    ),
    (
        lambda: linear_recurrence(1, PACKED, resets=ONES.bool()),
        TypeError,
        "resets must be packed as b is, got a tensor of shape (4, 3)",
    ),
    (
        lambda: linear_recurrence(1, PACKED, torch.ones(3, 3)),
        ValueError,
        "init must broadcast to b without its steps, (2, 3), got shape (3, 3)",
    ),
    (
        lambda: linear_recurrence(torch.ones(1, 1), tl.PackedTensor(torch.ones(4), [4]), matrix=True),
        ValueError,
        "b has no dim for the vectors of matrix=True: its values are (4,)",
    ),
    (lambda: linear_recurrence(1, ONES, matrix=1), TypeError, "matrix must be True or False"),  # pyright: ignore
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith("linear_recurrence: ")
    assert words in str(caught.value)
