"""`same_loop` on a port that is right, and on thirty that are wrong, each in its own way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.testing import same_loop

T, B, F = 6, 3, 4
draw = torch.Generator().manual_seed(3)
W = (torch.randn(F, F, generator=draw) / 2).requires_grad_()
V = (torch.randn(F, F, generator=draw) / 2).requires_grad_()
BIAS = torch.randn(F, generator=draw).requires_grad_()
XS = torch.randn(T, B, F, generator=draw)
H0 = torch.randn(B, F, generator=draw)


def original(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    out = []
    for x in xs:
        z = h @ W + x
        h = torch.tanh(z) + BIAS
        y = torch.sin(h @ V)
        out.append(y)
    return torch.stack(out), h


PLACE = f"test_same_loop.py:{original.__code__.co_firstlineno + 2}"
Step = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def port_of(step: Step, **options: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A port with this step, which is told its number."""

    def ported(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        def body(carry: tuple[int, Tensor], x: Tensor) -> tuple[tuple[int, Tensor], Tensor]:
            t, h = carry
            h, y = step(t, h, x)
            return (t + 1, h), y

        (_, h), ys = tl.scan(body, (0, h), xs, **options)
        return ys, h

    return ported


def right(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = h @ W + x
    h = torch.tanh(z) + BIAS
    return h, torch.sin(h @ V)


def detached_state(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return right(t, h.detach() if t == 3 else h, x)


def detached_inside(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = h @ W + x
    h = torch.tanh(z.detach() if t == 2 else z) + BIAS
    return h, torch.sin(h @ V)


def detached_output(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h, y = right(t, h, x)
    return h, y.detach() if t == 4 else y


def detached_input(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return right(t, h, x.detach())


def detached_weight(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = h @ W.detach() + x
    h = torch.tanh(z) + BIAS
    return h, torch.sin(h @ V)


def without_gradient(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        z = h @ W + x
    h = torch.tanh(z) + BIAS
    return h, torch.sin(h @ V)


def through_numpy(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return right(t, torch.from_numpy(h.detach().numpy().copy()), x)


def old_output(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = h @ W + x
    new = torch.tanh(z) + BIAS
    return new, torch.sin(h @ V)


def no_bias_at_5(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = h @ W + x
    h = torch.tanh(z) + (0 if t == 5 else BIAS)
    return h, torch.sin(h @ V)


def bias_within(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = h @ W + x
    h = torch.tanh(z + BIAS)
    return h, torch.sin(h @ V)


def transposed(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = h @ W.T + x
    h = torch.tanh(z) + BIAS
    return h, torch.sin(h @ V)


def begins_at_zero(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return right(t, torch.zeros_like(h) if t == 0 else h, x)


def other_gate(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = h @ W + x
    h = torch.sigmoid(z) + BIAS
    return h, torch.sin(h @ V)


def little_off(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return right(t, h + (1e-4 if t == 3 else 0), x)


def in_half(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return right(t, h.half().to(h.dtype), x)


def clamped(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return right(t, h, x.clamp(max=1.0))


def leaky(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    new, y = right(t, h, x)
    return new + 1e-3 * h if t >= 4 else new, y


def doubled_gradient(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return right(t, 2 * h - h.detach() if t == 1 else h, x)


def wrong_y_at_2(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h, y = right(t, h, x)
    return h, y * (1.01 if t == 2 else 1)


def draws(t: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    torch.rand(1)
    return right(t, h, x)


STEPS = [
    (detached_state, "step 2 of 6", "h"),
    (detached_inside, "step 2 of 6", "z"),
    (detached_output, "step 4 of 6", "h"),
    (detached_input, "", "gradient of xs"),
    (detached_weight, "", "gradient of W"),
    (without_gradient, "step 5 of 6", "z"),
    (through_numpy, "step 4 of 6", "h"),
    (old_output, "", "value of output[0]"),
    (no_bias_at_5, "step 5 of 6", "h"),
    (bias_within, "step 0 of 6", "h"),
    (transposed, "step 0 of 6", "z"),
    (begins_at_zero, "step 0 of 6", "z"),
    (other_gate, "step 0 of 6", "h"),
    (little_off, "step 3 of 6", "z"),
    (in_half, "step 0 of 6", "z"),
    (clamped, "step 0 of 6", "h"),
    (leaky, "step 4 of 6", "h"),
    (doubled_gradient, "step 0 of 6", "h"),
    (wrong_y_at_2, "", "value of output[0]: 12 of"),
    (draws, "", "random numbers"),
]


@pytest.mark.parametrize(("step", "where", "what"), STEPS, ids=[case[0].__name__ for case in STEPS])
def test_a_wrong_step_is_found_and_named(step: Step, where: str, what: str) -> None:
    report = same_loop(original, port_of(step), XS, H0, sizes={}, repeats=0)
    assert not report
    assert where in report.first, report
    assert what in (report.first if where else "\n".join(report.differences)), report


def backwards(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    ys, h = port_of(right, reverse=True)(xs, h)
    return ys, h


def one_step_short(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    ys, h = port_of(right)(xs[:-1], h)
    return torch.cat([ys, ys[-1:]]), h


def shifted(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return port_of(right)(torch.cat([xs[1:], xs[:1]]), h)


def as_a_list(xs: Tensor, h: Tensor) -> Any:
    ys, h = port_of(right)(xs, h)
    return [ys, h, h]


def without_init(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return port_of(right)(xs, h.detach())


def in_float(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    ys, h = port_of(right)(xs, h)
    return ys.float(), h


def wrong_for_one_row(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    ys, h = port_of(right)(xs, h)
    return (ys + 1 if xs.shape[1] == 1 else ys), h


def fails_for_one_step(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    if len(xs) == 1:
        raise ValueError("too short")
    return port_of(right)(xs, h)


def changes_its_input(xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    found = port_of(right)(xs, h)
    with torch.no_grad():
        h.zero_()
    return found


WHOLE = [
    (backwards, f"step 0 of 6 ({PLACE})"),
    (one_step_short, f"the original takes 6 steps ({PLACE}), the port 5"),
    (shifted, "step 0 of 6"),
    (
        as_a_list,
        "structure of the results: the original gives output[0], output[1]; the port gives output[0], output[1], o",
    ),
    (without_init, "gradient of h"),
    (in_float, "value of output[0]: dtype torch.float32, the original's is torch.float64"),
    (wrong_for_one_row, "B = 1: differs: value of output[0]"),
    (fails_for_one_step, "T = 1: differs: the port fails: ValueError: too short"),
    (changes_its_input, "side effect on h: the original does not change it"),
]


@pytest.mark.parametrize(("ported", "text"), WHOLE, ids=[case[0].__name__ for case in WHOLE])
def test_a_wrong_port_is_found_and_named(ported: Any, text: str) -> None:
    report = same_loop(original, ported, XS, H0, sizes={"T": (T, 1), "B": (B, 1)}, repeats=0)
    assert not report.same
    assert text in repr(report), report


def test_two_directions() -> None:
    def both(xs: Tensor, h: Tensor) -> Tensor:
        return torch.cat([original(xs, h)[0], original(xs.flip(0), h)[0].flip(0)], -1)

    def ported(xs: Tensor, h: Tensor, swapped: bool = False) -> Tensor:
        ways = [port_of(right, reverse=reverse)(xs, h)[0] for reverse in (swapped, not swapped)]
        return torch.cat(ways, -1)

    assert same_loop(both, ported, XS, H0, sizes={"B": B}, repeats=0)
    report = same_loop(both, lambda xs, h: ported(xs, h, True), XS, H0, sizes={}, repeats=0)
    assert "value of output: 144 of 144" in report.differences[0]
    assert "step 0" in report.first
