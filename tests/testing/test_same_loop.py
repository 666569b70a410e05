"""`same_loop` on ports that are right, on thirty that are wrong each in its own way, and on what cannot be compared."""

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.testing import LoopReport, same_loop

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


class Layer(nn.Module):
    """Keeps statistics, a count, and a state on itself."""

    mean: Tensor
    fault = ""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(F, F)
        self.register_buffer("mean", torch.zeros(F))
        self.count, self.last = 0, torch.zeros(F)

    def note(self, t: int, h: Tensor) -> None:
        if not (self.fault == "stale" and t == 3):
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)


class Original(Layer):
    def forward(self, xs: Tensor) -> Tensor:
        h, out = torch.zeros_like(xs[0]), torch.zeros_like(xs)
        for t in range(len(xs)):
            h = torch.tanh(self.cell(h) + xs[t]) - self.mean
            self.note(t, h)
            out[t] = h
        self.count += 1
        self.last = h[0].detach()
        return out


class Ported(Layer):
    def forward(self, xs: Tensor) -> Tensor:
        def body(carry: tuple[int, Tensor], x: Tensor) -> tuple[tuple[int, Tensor], Tensor]:
            t, h = carry
            h = torch.tanh(self.cell(h) + x) - self.mean
            self.note(t, h)
            return (t + 1, h), h

        (_, h), ys = tl.loop.carrying(self).scan(body, (0, torch.zeros_like(xs[0])), xs)
        self.count += self.fault != "count"
        self.last = h[0].detach() if self.fault != "last" else self.last
        return ys


def layers(fault: str = "") -> tuple[Original, Ported]:
    torch.manual_seed(1)
    first, second = Original(), Ported()
    second.load_state_dict(first.state_dict())
    second.fault = fault
    return first, second


FAULTS = {"": "", "stale": "side effect on mean", "count": "side effect on count", "last": "side effect on last"}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_modules_keep(fault: str) -> None:
    first, second = layers(fault)
    report = same_loop(first, second, XS, sizes={"T": T}, repeats=0)
    assert report.same == (not fault), report
    assert FAULTS[fault] in repr(report)
    assert ("step 3" in report.first) == (fault == "stale")
    for layer in (first, second):
        assert layer.count == 0
        assert not layer.last.any()
        assert not layer.mean.any()
        assert layer.mean.dtype == layer.cell.weight.dtype == torch.float32
        assert layer.cell.weight.grad is None


def test_modules_of_other_weights_are_not_compared() -> None:
    first, second = Original(), Ported()
    report = same_loop(first, second, XS)
    assert not report
    assert "cell.weight of the port has other values than the original's" in report.differences[0]


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


def test_random_numbers_and_compiled_ways() -> None:
    def plain(xs: Tensor) -> Tensor:
        h = torch.zeros(F)
        for x in xs:
            h = torch.nn.functional.dropout(torch.tanh(h @ W + x), 0.5)
        return h

    def ported(xs: Tensor) -> Tensor:
        return tl.scan(
            lambda h, x: (torch.nn.functional.dropout(torch.tanh(h @ W + x), 0.5), None), torch.zeros(F), xs
        )[0]

    report = same_loop(plain, ported, torch.randn(40, F), sizes={"T": (40, 0, 1, 7)}, repeats=1)
    assert report, report
    assert report.cases == {"T = 0": "same", "T = 1": "same", "T = 7": "same"}
    assert [run.name.partition(" ")[0] for run in report.runs] == ["original", "port", "compiled", "budget"]
    kept = [run.bytes for run in report.runs]
    assert kept[1] is not None
    assert kept[3] is not None
    assert kept[3] < kept[1]
    assert all(run.milliseconds and run.milliseconds > 0 for run in report.runs)


def test_why_it_is_not_compiled_is_in_the_table() -> None:
    values: list[float] = []

    def ported(xs: Tensor) -> Tensor:
        def body(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            values.append(float(h.sum()))
            return torch.tanh(h @ W + x), None

        return tl.scan(body, torch.zeros(F), xs)[0]

    def plain(xs: Tensor) -> Tensor:
        h = torch.zeros(F)
        for x in xs:
            values.append(float(h.sum()))
            h = torch.tanh(h @ W + x)
        return h

    report = same_loop(plain, ported, torch.randn(40, F), sizes={}, repeats=1)
    assert report, report
    assert "not compiled" in report.runs[2].remark
    assert "Cure: " in report.runs[2].remark
    assert values == []


def bad(name: str) -> tuple[Any, tuple[Any, ...]]:
    def fails(xs: Tensor) -> Tensor:
        raise RuntimeError("Found no NVIDIA driver\non your system")

    def unsteady(xs: Tensor) -> Tensor:
        return xs + random.SystemRandom().random()

    def changes(xs: Tensor) -> Tensor:
        xs.mul_(2)
        return xs.sum(0)

    large = torch.zeros(1).expand(2**28)
    return {
        "fails": (fails, (XS,)),
        "random": (unsteady, (XS,)),
        "changes": (changes, (XS,)),
        "large": (fails, (large,)),
    }[name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fails", "nothing was compared: the original fails for the sample: RuntimeError: Found no NVIDIA driver"),
        (
            "random",
            "nothing was compared: the original gives other results at each run from equal seeds (value of output",
        ),
        ("changes", "side effect on xs: the original changes it"),
        ("large", "nothing was compared: sample and weights take 2,147,483,648 bytes; give a smaller sample"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(name: str, text: str) -> None:
    function, sample = bad(name)
    before = XS.clone()
    report = same_loop(function, lambda xs: 2 * xs.sum(0), *sample, sizes={}, repeats=0)
    assert not report
    assert text in report.differences[-1]
    assert "\n" not in report.differences[-1]
    assert torch.equal(XS, before)
    assert torch.get_default_dtype() == torch.float32


def test_misuse() -> None:
    with pytest.raises(TypeError, match="same_loop: ported must be a function or a module, got a tensor"):
        same_loop(original, XS, XS, H0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"sizes\['T'\]: no tensor of the sample has a dim of 7; there are \[6, 3, 4\]"
    ):
        same_loop(original, original, XS, H0, sizes={"T": 7})
    with pytest.raises(TypeError, match="sizes must be a dict from names to sizes"):
        same_loop(original, original, XS, H0, sizes=[7])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"sizes\['T'\] must be an int"):
        same_loop(original, original, XS, H0, sizes={"T": "7"})  # pyright: ignore[reportArgumentType]


def test_what_cannot_be_cast_is_compared_as_it_is() -> None:
    part = W[0]  # its gradient goes on to W

    def plain(xs: Tensor) -> Tensor:
        return torch.stack([x * part for x in xs.float()])

    report = same_loop(plain, lambda xs: tl.map(lambda x: x * part, xs), XS, sizes={}, repeats=0)
    assert report, report
    assert report.dtype == "the dtypes given"
    assert part.dtype == torch.float32


class Slotted:
    __slots__ = ("h",)

    def __init__(self) -> None:
        self.h = torch.zeros(F)


def test_all_that_a_run_changes_is_put_back() -> None:
    """Slots, generators, lists, and the random numbers of torch and Python."""
    slotted, generator, log = Slotted(), torch.Generator().manual_seed(1), [0.5]

    def note(h: Tensor, x: Tensor) -> Tensor:
        return h * random.random() + x * torch.rand(F, generator=generator)

    def plain(xs: Tensor) -> Tensor:
        for x in xs:
            slotted.h = note(slotted.h, x)
        log.append(1.0)
        return slotted.h

    def ported(xs: Tensor) -> Tensor:
        slotted.h = tl.scan(lambda h, x: (note(h, x), None), slotted.h.expand(B, F), xs)[0]
        log.append(1.0)
        return slotted.h

    states = generator.get_state(), torch.get_rng_state(), random.getstate()
    report = same_loop(plain, ported, XS, sizes={"T": (T, 1, 9)}, repeats=1)
    assert report, report
    assert "rand" in report.runs[3].remark  # refused with checkpoints, which is no difference
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == states[2]
    assert log == [0.5]
    assert slotted.h.shape == (F,)
    assert not slotted.h.any()


def test_originals_that_end_the_program_and_samples_that_are_used_up() -> None:
    report = same_loop(lambda xs: sys.exit(3), lambda xs: xs, XS)
    assert report.differences == ["nothing was compared: the original fails for the sample: SystemExit: 3"]
    with pytest.raises(TypeError, match=r"same_loop: sample\[0\]\['x'\] is list_iterator .*which one run uses up"):
        same_loop(sum, sum, {"x": iter([1, 2])})


def test_sizes_of_weights_are_not_varied_unless_named() -> None:
    report = same_loop(original, port_of(right), XS, H0, repeats=0)
    assert report, report
    assert [*report.cases] == ["size 6 -> 0", "size 6 -> 1", "size 6 -> 7", "size 3 -> 0", "size 3 -> 1", "size 3 -> 5"]


def test_packed_rows_and_a_notebook() -> None:
    def plain(p: tl.PackedTensor) -> Tensor:
        return torch.stack([row.sum(0) for row in p.unbind()])

    def ported(p: tl.PackedTensor) -> Tensor:
        return tl.scan(lambda h, x: (h + x, None), torch.zeros(3, 2), p)[0]

    p = tl.PackedTensor(torch.randn(6, 2), [1, 3, 2])
    report = same_loop(plain, ported, p)
    assert report, report
    shown = report._repr_html_()
    assert shown.count("<tr>") >= 4
    assert "of original" in shown
    assert isinstance(report, LoopReport)


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorloop.same import main

    (tmp_path / "old.py").write_text("def f(xs):\n    return xs.cumsum(0)\n")
    (tmp_path / "new.py").write_text(
        "import torch, tensorloop as tl\n"
        "def f(xs):\n    return tl.scan(lambda c, x: (c + x, c + x), torch.zeros(2, dtype=xs.dtype), xs)[1]\n"
        "def g(xs):\n    return 2 * f(xs)\n"
        "def sample():\n    return torch.ones(5, 2)\n"
    )
    old, new = f"{tmp_path}/old.py:f", f"{tmp_path}/new.py"
    assert main([old, f"{new}:f", "--repeats", "0", "--sizes", "T=5"]) == 0
    assert "same: values, gradients for xs" in capsys.readouterr().out
    assert main([old, f"{new}:g", "--repeats", "0"]) == 1
    assert main([old, f"{new}:h"]) == 2
    assert "there is no h" in capsys.readouterr().err
    assert main([old, f"{new}:f", "--sizes", "T=x"]) == 2
