"""`same_loop`: modules that keep state, the ways in which a port runs, what cannot be compared, and the command."""

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.testing import LoopReport, same_loop
from tests.testing.test_same_loop import H0, XS, B, F, T, W, original, port_of, right


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


def test_an_object_has_one_name_whoever_reaches_it() -> None:
    """The original is a method of it, the port a function beside it; an expanded tensor is reached, too."""
    layer, _ = layers()
    whole = torch.eye(F).expand(B, F, F)

    def ported(xs: Tensor) -> Tensor:
        assert whole.shape[0] == B
        return layer.forward(xs)

    report = same_loop(layer.forward, ported, XS, sizes={"T": (T, 1)}, repeats=0)
    assert report, report
    assert layer.count == 0


def test_sizes_at_which_the_original_fails_are_not_for_the_port() -> None:
    def ported(xs: Tensor) -> Tensor:
        assert len(xs)
        return xs.sum(0)

    report = same_loop(lambda xs: xs[0] + xs[1:].sum(0), ported, XS, sizes={"T": (T, 0)}, repeats=0)
    assert report.cases["T = 0"].startswith("the original fails: IndexError")
    assert report


def test_a_port_that_checkpoints_refuse_says_so_without_times() -> None:
    def plain(xs: Tensor) -> Tensor:
        return torch.stack([x * random.random() for x in xs])

    def ported(xs: Tensor) -> Tensor:
        return tl.map(lambda x: x * random.random(), xs)

    report = same_loop(plain, ported, XS, sizes={}, repeats=0)
    assert report, report
    (text,) = report.cases.values()
    assert text.startswith("the port fails: RuntimeError: map: the body calls random()")


def test_masks_go_on_as_they_end() -> None:
    def prefix(mask: Tensor) -> Tensor:
        return mask.cumsum(0) * mask.cumprod(0)

    def wrong_unless_a_prefix(mask: Tensor) -> Tensor:
        return mask.cumsum(0) * mask

    report = same_loop(prefix, wrong_unless_a_prefix, torch.tensor([True, True, False]), sizes={"T": (3, 7)}, repeats=0)
    assert report, report


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
