"""Tensors of unusual kinds go into compiled loops: without memory, turned, copies of views, strided, of no dims."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorloop as tl
from tests.support.both_ways import AMINMAX_HAS_A_GRADIENT, check_both
from tests.support.devices import HERE

D = torch.float64
C = torch.complex128
pytestmark = pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning")


def numbers(*shape: int, dtype: torch.dtype = D, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator(HERE).manual_seed(seed))


def zero_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Torch's zeros without memory, which some of its gradients are."""
    return torch._efficientzerotensor(shape, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]


def scanned(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda compile, h, *xs: tl.scan(
        body, h, xs[0] if xs else None, length=None if xs else 3, compile=compile
    )  # fmt: skip


def closed_over(body: Callable[..., Any], steps: int = 3) -> Callable[..., Any]:
    """A body of h and what it closes over."""
    return lambda compile, h, *held: tl.scan(lambda h, _: body(h, *held), h, length=steps, compile=compile)


# -- zeros without memory, conj and neg views

SYMBOLIC: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: zero_tensor((3,), dtype=C),
    "conj": lambda: numbers(3, dtype=C).conj(),
    "neg": lambda: numbers(3, dtype=C).conj().imag,
    "zeros that are real": lambda: zero_tensor((3,), dtype=D),
}


@pytest.mark.parametrize("place", ["init", "xs", "closed over", "gradient"])
def test_tensors_that_memory_does_not_hold(place: str):
    """They are what goes in, or the gradient that comes."""
    for name in SYMBOLIC:
        check_symbolic(name, place)


def check_symbolic(name: str, place: str) -> None:
    kind = SYMBOLIC[name]().dtype
    base = numbers(2, 3, dtype=kind)

    def run(compile: Any) -> list[Tensor]:
        odd, w = SYMBOLIC[name](), numbers(3, dtype=kind).requires_grad_()
        h = odd if place == "init" else numbers(3, dtype=kind, seed=1)
        xs = torch.stack([odd, odd]) if place == "xs" and "zeros" not in name else base
        if place == "xs" and "zeros" in name:
            xs = zero_tensor((2, 3), dtype=kind)
        more: Any = odd if place == "closed over" else 1.0
        last, ys = tl.scan(lambda h, x: (h * 0.5 * w + x * more, h * more), h, xs, compile=compile)
        coming = odd if place == "gradient" else torch.ones_like(last)
        grads = torch.autograd.grad([last, ys], [w], [coming, torch.ones_like(ys)])
        return [last.detach(), ys.detach(), *grads]

    for x, y in zip(run(True if place == "closed over" else "strict"), run(False), strict=True):
        torch.testing.assert_close(x.resolve_conj().resolve_neg(), y.resolve_conj().resolve_neg())


def test_sgn_whose_gradient_is_zeros_without_memory():
    alone = lambda compile, h: tl.fori_loop(0, 2, lambda i, h: torch.sgn(h) * 1, h, compile=compile)  # noqa: E731
    check_both(alone, numbers(3))
    bodies: list[Callable[..., Any]] = [
        lambda h, x: (torch.sgn(h), h + x),
        lambda h, x: (h * torch.sgn(h.detach()) + x, None),
        lambda h, x: (h.sin() * torch.sgn(x), torch.sgn(h)),
    ]
    for body in bodies:
        check_both(scanned(body), numbers(3), numbers(2, 3, seed=1))


@pytest.mark.parametrize("function", ["sign", "sgn", "round", "floor", "ceil", "trunc", "angle"])
def test_steps_of_what_is_closed_over(function: str):
    """Their gradient is zero, and the same at every step."""
    check_both(closed_over(lambda h, w: (h * getattr(torch, function)(w), None)), numbers(3), 3 * numbers(3, seed=1))


def test_doubles_become_halves_and_doubles_again():
    for dtype in (torch.float16, torch.bfloat16):
        body = lambda h, x, d=dtype: (h.to(d).double() * 0.5 + x, h.to(d).long())  # noqa: E731
        check_both(scanned(body), 3 * numbers(7), numbers(2, 7))


# -- how they lie in memory


def test_what_is_closed_over_in_another_order():
    w = numbers(1, 6, 3).permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not w.is_contiguous()
    bodies: list[Callable[..., Any]] = [
        lambda h, w: (h.sin() + w.reshape(-1).cos().sum(), h),
        lambda h, w: (h.sin() + w.contiguous().view(-1)[:3], h),
        lambda h, w: (h.sin() + F.group_norm(w, 3).cos().sum(), h),
        lambda h, w: (h.sin() + w.flatten(1).sum(0)[:3], w.reshape(3, 6)),
    ]
    for body in bodies:
        check_both(closed_over(body), numbers(3), w)


def test_factors_of_matrices_that_are_transposed():
    def turned(compile: Any, h: Tensor, xs: Tensor) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            return h.sin(), (torch.det(x), torch.linalg.slogdet(x)[1], torch.linalg.inv(x)[0])

        return tl.scan(body, h, xs.mT.contiguous().mT, compile=compile)

    check_both(turned, numbers(3), numbers(3, 4, 4), tolerance=1e-9)


COPIES: dict[str, Callable[[Tensor], Any]] = {
    "diagonal_copy": torch.diagonal_copy,
    "diag": torch.diag,
    "transpose_copy": lambda h: torch.transpose_copy(h, 0, 1),
    "expand_copy": lambda h: torch.expand_copy(h, (2, 3, 3)),
    "unsqueeze_copy": lambda h: torch.unsqueeze_copy(h, 0),
    "permute_copy": lambda h: torch.permute_copy(h, (1, 0)),
    "alias_copy": torch.alias_copy,
    "view_copy": lambda h: torch.view_copy(h, (9,)),
    "t_copy": torch.t_copy,
    "select_copy": lambda h: torch.select_copy(h, 0, 1),
    "slice_copy": lambda h: torch.slice_copy(h, 1, 0, 2),
    "split_copy": lambda h: torch.ops.aten.split_copy(h, 2)[1],
    "unbind_copy": lambda h: torch.ops.aten.unbind_copy(h)[1],
    "unfold_copy": lambda h: torch.unfold_copy(h, 0, 2, 1),
}


def test_copies_of_views():
    """They are not written over with the carry."""
    for f in COPIES.values():
        body = lambda h, x, f=f: (h * 0.5 + 0.1 * f(h).mean() + x, f(h))  # noqa: E731
        check_both(scanned(body), numbers(3, 3), torch.arange(1.0, 4, dtype=D))


STRIDED: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # of how many numbers
    "apart": (lambda x: torch.as_strided(x, (3,), (2,)), 6),
    "overlapping": (lambda x: torch.as_strided(x, (3, 3), (1, 1)), 8),
    "a part of a part": (lambda x: torch.as_strided(x[:3], (6,), (1,)), 8),
    "transposed": (lambda x: torch.as_strided(x, (2, 3), (1, 2)), 6),
    "an offset": (lambda x: torch.as_strided(x * 1, (3, 2), (2, 1), 1), 8),
}


def test_strides_of_a_bodys_own():
    for f, size in STRIDED.values():
        check_both(scanned(lambda h, x, f=f: (h + f(x).sum(), None)), numbers(), numbers(2, size), compile=True)
        body = lambda h, x, f=f: (h * 0.5 + f(h * 2).sin().sum(), f(h * 3))  # noqa: E731
        check_both(scanned(body), numbers(size), compile=True)


def test_an_offset_into_xs_or_the_carry():
    body = lambda h, x: (h + torch.as_strided(x, (3, 2), (2, 1), 1).sum(), None)  # noqa: E731
    check_both(scanned(body), numbers(), numbers(2, 8), compile=True)
    body = lambda h, x: (h * 0.5 + torch.as_strided(h, (3, 2), (2, 1), 1).sum(), None)  # noqa: E731
    check_both(scanned(body), numbers(8), compile=True)


# -- of no dims

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "median": lambda x: x.median(),
    "aminmax": lambda x: torch.aminmax(x)[0],
    "nanmean": lambda x: x.nanmean(),
    "largest in size": lambda x: torch.linalg.vector_norm(x, math.inf),
    "norm of order 0": lambda x: x.norm(p=0) * x,
}
if not AMINMAX_HAS_A_GRADIENT:
    del REDUCTIONS["aminmax"]
CONTINUOUS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.mean() + x.sum() * x.prod() + x.max(0)[0] * x.reshape(1).topk(1)[0][0],
    lambda x: x.cumsum(0) + x.logsumexp(0) + x.softmax(0),
    lambda x: x.sort()[0] + x * (x.argmax() + 1) + x * x.bool().any(),
    lambda x: x.norm(p=3) + x.norm(p=1) + x.var(correction=0),
]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_one_number(name: str):
    f = REDUCTIONS[name]
    check_both(scanned(lambda h, x: (h + f(x), f(x))), numbers(), torch.tensor([1.0, -1.0, 2.0], dtype=D), compile=True)
    check_both(scanned(lambda h, x: (torch.sin(f(h)), f(h * 2))), torch.tensor(0.7, dtype=D), compile=True)


def test_a_count_of_one_number_and_other_reductions():
    counts = lambda h, x: (h + (x > 0).sum(), (x > 0).any())  # noqa: E731
    xs = torch.tensor([1.0, -1.0, 2.0], dtype=D)
    check_both(scanned(counts), torch.zeros((), dtype=torch.int64), xs)
    for f in CONTINUOUS:
        check_both(scanned(lambda h, x, f=f: (h + f(x), f(x))), numbers(), xs)


# -- operations whose values or gradients were others'


def test_the_deviation_of_equal_values():
    """Its gradient is zero there, as torch's."""
    check_both(scanned(lambda h, x: (h * 2 + h.std(), None)), torch.zeros(3, dtype=D))
    check_both(scanned(lambda h, x: (h * 2 + torch.std_mean(h)[0] / (h.std() + 1e-3), h)), torch.zeros(3, dtype=D))
    body = lambda h, x: (h + x.std(), x.std(0))  # noqa: E731
    check_both(scanned(body), torch.zeros(3, dtype=D), torch.ones(3, 4, 2, dtype=D))
    body = lambda h, x: ((z := h + x - h) * 0.5 - (z - z.mean()) / (z.std(0) + 0.1), None)  # noqa: E731
    check_both(scanned(body), torch.zeros(3, dtype=D), torch.ones(3, 3, dtype=D))


AT = torch.tensor([1])
ODD: dict[str, Callable[[Tensor, Tensor], Any]] = {  # of h (3, 3) and x (3, 3)
    "index_fill": lambda h, x: (
        h * 0.5 + torch.zeros(3, dtype=D).index_fill(0, AT, 2.0) * x,
        torch.zeros(3, dtype=D).index_fill(0, AT, x.sum()),
    ),
    "trace": lambda h, x: (h * 0.5 + x.trace() * h.sin(), x.trace() ** 2),
    "a norm of order 3": lambda h, x: (torch.tanh(h * 0.5 + x.norm(p=3)), h.norm(p=3)),
}


def test_rolls_of_several_steps():
    """Of two steps, rolled by two, each would be where it was."""
    body = lambda h, x: (h.sin() + x.roll(2) + x.roll(3) * h.roll(4), (x.roll(1), x.roll(5)))  # noqa: E731
    for steps in (1, 2, 3, 5):
        check_both(scanned(body), numbers(3, 3), numbers(steps, 3, 3), compile=True)


@pytest.mark.parametrize("name", ODD)
def test_operations_of_xs(name: str):
    check_both(scanned(ODD[name]), numbers(3, 3), numbers(3, 3, 3, seed=1), compile=True)
    if "index_fill" in name:
        check_both(scanned(ODD[name]), numbers(3), numbers(3, 3, seed=1), compile=True)


@pytest.mark.parametrize("p", [1.5, 1.0, 3.0])
@pytest.mark.filterwarnings("ignore:.*changes from call to call")  # it does
def test_distances_of_what_is_closed_over(p: float):
    body = lambda h, a, b: (h.sin() + torch.cdist(a, b, p=p).mean(), torch.cdist(a, b, p=p))  # noqa: E731
    check_both(closed_over(body), numbers(3), numbers(3, 4), numbers(5, 4, seed=1), compile=True)


def test_a_convolution_of_what_is_closed_over_that_the_loss_does_not_use():
    body = lambda h, w, k: (h * 0.5, F.conv1d(w, k))  # noqa: E731
    check_both(closed_over(body), numbers(3), numbers(1, 1, 5), numbers(1, 1, 3, seed=1), loss=lambda out: out[0].sum())


def test_integers_with_factors_that_are_floats():
    """Torch makes whole numbers of alpha and beta."""
    m, v = torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, -6])
    bodies: list[Callable[..., Any]] = [
        lambda h, x: (h + torch.addmv(v, m, v, beta=0.5, alpha=0.2), torch.addmv(v, m, v, beta=1.5, alpha=2.2)),
        lambda h, x: (h + 1, torch.baddbmm(m[None], m[None], m[None], beta=1.5, alpha=2.2)),
        lambda h, x: (
            h + torch.addmm(m, m, m, beta=0.5, alpha=1.2).sum(),
            torch.addbmm(m, m[None], m[None], alpha=2.2),
        ),
    ]
    for body in bodies:
        check_both(scanned(body), v, compile=True)


def test_powers_that_overflow():
    base = [146.9171919453943, 0.2226645970848032, 47.8, -47.8, 2, -2, -2, 0, 0, 1, math.inf]
    exponent = [148.9487502947089, -524.99, 184.0, 184.0, 2, 2, 3, 2, -2, math.inf, -1]
    for dtype in (torch.float32, D):
        b, e = torch.tensor(base, dtype=dtype), torch.tensor(exponent, dtype=dtype)
        body = lambda h, x, e=e: (h * 1.0, torch.pow(h, e))  # noqa: E731
        found, expected = (tl.scan(body, b, length=2, compile=compile)[1] for compile in ("strict", False))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, equal_nan=True)


def test_all_that_a_group_norm_gives():
    body = lambda h, w: (h.sin(), torch.native_group_norm(w * h.sum(), None, None, 2, 4, 3, 2, 1e-5))  # noqa: E731
    check_both(closed_over(body), numbers(3), numbers(2, 4, 3, seed=1), compile=True)
