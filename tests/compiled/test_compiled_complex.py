"""Complex numbers in compiled loops: values, gradients by torch's convention, and what has no form in real numbers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tests.support.compiled_cases import check_equal
from tests.support.devices import HERE

B, N, T = 2, 4, 5
Body = Callable[[Tensor, Tensor], Any]


def numbers(*shape: int, dtype: torch.dtype = torch.complex128, scale: float = 0.4) -> Tensor:
    generator = torch.Generator(HERE).manual_seed(sum(shape))
    return (torch.randn(shape, dtype=dtype, generator=generator) * scale).requires_grad_()


TURN = torch.polar(torch.ones(N).double(), torch.linspace(0.1, 2, N).double()).requires_grad_()
IN, OUT = numbers(3, N), numbers(N, 3)
UNITARY = torch.linalg.qr(numbers(N, N).detach())[0].contiguous().requires_grad_()
RATE = numbers(N, dtype=torch.float64, scale=1)
CAPTURES = [TURN, IN, OUT, UNITARY, RATE]


def fed(x: Tensor) -> Tensor:
    return x.to(torch.complex128) @ IN


def unit(z: Tensor) -> Tensor:
    return z / (1 + z.abs())


def diagonal(h: Tensor, x: Tensor) -> Any:
    h = TURN * h + fed(x)
    return h, (h @ OUT).real


def writes(h: Tensor, x: Tensor) -> Any:
    new = torch.zeros_like(h)
    new[:, 0] = h[:, 1] * 1j
    new[:, 1:] = h[:, 1:].conj() + x.sum(-1, keepdim=True)
    return unit(new), h


def functions(h: Tensor, x: Tensor) -> Any:
    z = torch.exp(h * 0.3) + h.sqrt() + h.log() + h**2 + h**-1 + h**0.3 + h.sin() * h.cos() + fed(x)
    return unit(z), h.sgn()


def quotients(h: Tensor, x: Tensor) -> Any:
    z = (h + 1) / (fed(x) + h * 2j) + 1 / h + h / 2 - 2 / (1j + h) - h / (1 - 2j)
    return unit(z), (h.sum(), h.mean(-1), (h == h.conj()).sum())


def at_zero(h: Tensor, x: Tensor) -> Any:
    zero = h - h
    return TURN * h, (zero.abs().sum() + zero.sgn().abs().sum(), torch.linalg.vector_norm(h))


BODIES: dict[str, Body] = {
    "diagonal": diagonal,
    "rates": lambda h, x: (torch.exp(torch.complex(-0.1 * RATE.exp(), RATE)) * h + fed(x), (h @ OUT).real * 2),
    "matrices": lambda h, x: (unit(h @ UNITARY + fed(x)), h.abs()),
    "conjugates": lambda h, x: (unit(h.conj() @ UNITARY.mH * 1j + fed(x)), (h * h.conj()).real),
    "parts": lambda h, x: (
        unit(torch.complex(h.imag, h.real - x.sum(-1, keepdim=True)) * (1 + 0.5j)),
        (h.angle(), h.conj().imag),
    ),
    "views": lambda h, x: (
        torch.view_as_complex(torch.view_as_real(h).flip(-1).contiguous()) * TURN,
        torch.view_as_real(h.conj().resolve_conj()).sum(-1),
    ),
    "polar": lambda h, x: (torch.polar(h.abs() / (1 + h.abs()) + x.sum().abs(), h.angle() + 0.1), h),
    "functions": functions,
    "further functions": lambda h, x: (
        unit(h.tanh() + h.tan() * h.sinh() + h.cosh() + h.sigmoid() + h.expm1() * h.log1p() + h.rsqrt() + fed(x)),
        (h.log2() + h.log10() + h.exp2() + h.lerp(h.conj(), 0.3), h.prod(1), h.cumprod(0), h.var(1), h.isinf()),
    ),
    "spectra": lambda h, x: (
        unit(torch.fft.ifft(torch.fft.fft(h) * TURN) + torch.fft.fftn(fed(x), norm="ortho")),
        (torch.fft.rfft(x), torch.fft.irfft(torch.fft.rfft(h.real), 6), torch.fft.hfft(h, 5), torch.fft.fft(h, 130)),
    ),
    "factors": lambda h, x: (unit(h @ torch.linalg.cholesky(h.mH @ h + 3 * torch.eye(N)) + fed(x)), h.atanh()),
    "quotients": quotients,
    "choices": lambda h, x: (unit(torch.where(h.real > 0, h, -h * 1j) + fed(x)), torch.cat([h, h.conj()], -1)),
    "places": lambda h, x: (torch.stack([h[:, 1], h[:, 0], *h.unbind(1)[2:]], 1) * TURN, (h.cumsum(-1), h[:, :2])),
    "zero": at_zero,
    "writes": writes,
    "products": lambda h, x: (
        unit(torch.einsum("bn,nm->bm", h, UNITARY) + h * x.sum(-1, keepdim=True)),
        torch.vdot(h[0], h[1]),
    ),
}


def test_a_transform_is_part_of_the_machine_code():
    found = tl.explain(BODIES["spectra"], numbers(B, N, scale=1), numbers(T, B, 3, dtype=torch.float64)).text
    assert "one native function" in found
    assert "by torch" not in found


def outcome(body: Body, compile: Any, **options: Any) -> tuple[list[Tensor], list[Any]]:
    h, xs = numbers(B, N, scale=1), numbers(T, B, 3, dtype=torch.float64)
    outputs = tree_leaves(tl.scan(body, h, xs, compile=compile, **options))
    terms = [(y * (torch.arange(y.numel()).view(y.shape) + 1).cos()).sum() for y in outputs if y.requires_grad]
    terms = [(y * (1 + 0.3j)).real if y.is_complex() else y for y in terms]
    return outputs, list(torch.autograd.grad(torch.stack(terms).sum(), [h, xs, *CAPTURES], allow_unused=True))


@pytest.mark.parametrize("name", BODIES)
def test_values_and_gradients_are_those_of_the_eager_loop(name: str):
    expected, expected_grads = outcome(BODIES[name], False)
    found, grads = outcome(BODIES[name], "strict")
    check_equal(found, expected, 1e-11)
    check_equal(grads, expected_grads, 1e-11)


@pytest.mark.parametrize("options", [{"checkpoints": 2}, {"reverse": True}])
def test_checkpoints_and_other_ways_of_running(options: dict[str, Any]):
    expected, expected_grads = outcome(diagonal, False, **options)
    found, grads = outcome(diagonal, "strict", **options)
    check_equal(found, expected, 1e-11)
    check_equal(grads, expected_grads, 1e-11)


def test_second_derivatives():
    def curve(compile: Any) -> Tensor:
        h, xs = numbers(B, N, scale=1), numbers(T, B, 3, dtype=torch.float64)
        last, _ = tl.scan(BODIES["matrices"], h, xs, compile=compile)
        (grad,) = torch.autograd.grad(last.abs().sum(), UNITARY, create_graph=True)
        return torch.autograd.grad(grad.abs().square().sum(), h)[0]

    torch.testing.assert_close(curve("strict"), curve(False), rtol=1e-10, atol=1e-10)


def test_lazy_conjugates_and_negatives_that_come_from_outside():
    h, xs, turn = numbers(B, N).conj(), numbers(T, B, N).conj(), numbers(N).conj()
    negative = numbers(T, B, N).conj().imag
    assert negative.is_neg()

    def body(h: Tensor, row: Any) -> Any:
        x, y = row
        return (h * turn + x * y).conj(), h

    found, expected = (tree_leaves(tl.scan(body, h, (xs, negative), compile=c)) for c in ("strict", False))
    check_equal(found, expected, 1e-12)


def test_a_while_loop_whose_rows_stop():
    def run(compile: Any) -> list[Tensor]:
        c = numbers(6, scale=1)
        init = torch.zeros_like(c), torch.zeros(6)

        def going(state: Any) -> Tensor:
            return (state[0].abs() < 2) & (state[1] < 20)

        def body(state: Any) -> Any:
            return state[0] ** 2 + c, state[1] + 1

        (z, _), steps = tl.while_loop(going, body, init, return_steps=True, compile=compile)
        return [z, steps, *torch.autograd.grad(z.abs().log1p().sum(), c)]

    check_equal(run("strict"), run(False), 1e-9)


def test_float32_and_no_gradients():
    def run(compile: Any) -> list[Tensor]:
        turn, xs = TURN.detach().to(torch.complex64), numbers(T, N, dtype=torch.float32).detach()
        return tree_leaves(tl.scan(lambda h, x: (turn * h + x, h.real), turn, xs, compile=compile))

    check_equal(run("strict"), run(False), 1e-5)


def test_an_operation_without_a_form_in_real_numbers_is_torchs_own():
    last, _ = tl.scan(lambda h, x: (torch.fft.fft(h), None), numbers(N), None, 2, compile="strict")
    torch.testing.assert_close(last, torch.fft.fft(torch.fft.fft(numbers(N))))


@pytest.mark.parametrize("n", [4, 6, 130])
def test_phases_of_what_is_real_in_a_spectrum_of_real_numbers(n: int):
    def run(compile: Any) -> Tensor:
        xs = -numbers(T, n, dtype=torch.float64).detach().abs()
        rows = tl.scan(lambda h, x: (h, torch.fft.rfft(x + 0 * h).angle()), xs[0], xs, compile=compile)[1]
        return rows[:, [0, n // 2]]

    assert torch.equal(run("strict"), run(False))


def test_a_norm_of_everything_that_keeps_its_dims():
    def run(compile: Any) -> list[Tensor]:
        norm = torch.linalg.vector_norm
        last, ys = tl.scan(
            lambda h, x: (unit(h + x), norm(h, keepdim=True)), UNITARY, numbers(T, N, N), compile=compile
        )
        return [last, ys]

    check_equal(run("strict"), run(False), 1e-9)


PARTS = [0.0, -0.0, 1.0, -2.5, 0.3, math.inf, -math.inf, math.nan]
EVERYWHERE = torch.complex(*(x.reshape(-1) for x in torch.meshgrid(*[torch.tensor(PARTS).double()] * 2, indexing="ij")))
OF_ANYTHING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / b,
    "quotient of real numbers": lambda a, b: torch.stack([b.real / a, a / b.real, a / 2, 1 / a, a**-1]),
    "powers": lambda a, b: torch.stack([a**2, a**0.5, a**1.5, a.sqrt(), a.rsqrt()]),
    "functions": lambda a, b: torch.stack([a.exp(), a.log(), a.tanh(), a.tan(), a.sin(), a.cosh(), a.log1p()]),
}


@pytest.mark.parametrize("name", OF_ANYTHING)
def test_what_is_finite_beside_infinity_is_what_torch_has(name: str):
    """A number of which a part is infinite or NaN is one: what its other part is, torch's kernels do not agree on."""
    pairs = [x.reshape(-1) for x in torch.meshgrid(EVERYWHERE, EVERYWHERE, indexing="ij")]

    def run(compile: Any) -> Tensor:
        body = lambda h, _: ([x.clone() for x in h], OF_ANYTHING[name](*h))  # noqa: E731
        found = tl.scan(body, pairs, None, 1, compile=compile)[1]
        return torch.where(torch.isfinite(found), found, math.inf)

    torch.testing.assert_close(run("strict"), run(False), rtol=1e-9, atol=1e-9)
