"""Code that counts or advice could take for what it is not: linear loops, work in one go, lines of many names."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tensorloop.memory import (
    Growth,
    LineGrowth,
    Tracker,
    collector_off,
    growth,
    saved,
    saved_residuals,
    timeline,
    track,
)
from tensorloop.memory.command import main
from tests.support.pages import fresh_ones

FLOAT = 4
B, D = 2, 4
TS = (16, 32, 64)
SOURCE = Path(__file__).read_text().splitlines()


def at(found: Growth, mark: str) -> LineGrowth:
    """The growth of the line of this file that ends in the mark."""
    (number,) = [i for i, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    (line,) = [line for line in found.lines if (line.site.file, line.site.line) == (__file__, number)]
    return line


# -- advice that does not fit


def all_pairs(T: int) -> Callable[[], Tensor]:
    """Nothing here is done step by step."""
    x, mask = torch.randn(T, D, requires_grad=True), torch.ones(T, T).tril() == 0

    def fn() -> Tensor:
        scores = x @ x.T
        scores = scores.masked_fill(mask, float("-inf"))  # masked once
        scores = torch.where(mask, 0.0, scores)  # where once
        weights = torch.softmax(scores, -1)  # softmax once
        i, j = torch.tril_indices(T, T)
        apart = x[i] - x[j]  # gathered once
        both = torch.cat([weights, weights.exp()], 1)  # cat once
        rows = torch.stack(list(both.sin().unbind(0)))  # stack once
        return rows.square().sum() + apart.square().sum()

    return fn


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("masked once", None),
        ("where once", None),
        ("softmax once", "scaled_dot_product_attention"),
        ("gathered once", "in one go"),
        ("cat once", "in one go"),
        ("stack once", "in one go"),
    ],
)
def test_work_in_one_go_is_not_blamed_on_a_loop(mark: str, said: str | None):
    line = at(growth(all_pairs, TS), mark)
    assert line.superlinear
    assert (line.advice is None) if said is None else (said in (line.advice or ""))


def test_attention_without_weights_is_linear_as_the_advice_says():
    attend = nn.MultiheadAttention(D, 2, batch_first=True)

    def make(T: int) -> Callable[[], Tensor]:
        x = torch.randn(B, T, D)
        return lambda: attend(x, x, x, need_weights=False)[0].sum()

    assert growth(make, (64, 128, 256)).marginal == pytest.approx(1, abs=0.05)


def attention_to_an_encoder(T: int) -> Callable[[], Tensor]:
    """Each step looks at all of a sequence that does not change."""
    encoded, mask = torch.randn(B, T, D, requires_grad=True), torch.zeros(B, T, dtype=torch.bool)
    score = nn.Linear(2 * D, 1)

    def fn() -> Tensor:
        h = torch.zeros(B, D)
        for _ in range(T):
            joined = torch.cat([h[:, None].expand(B, T, D), encoded], -1)  # joined
            scores = score(joined)[..., 0]
            scores = torch.where(mask, -1e9, scores)  # masked each step
            scores = scores.masked_fill(mask, float("-inf"))  # masked again
            h = torch.bmm(torch.softmax(scores, -1)[:, None], encoded)[:, 0]
        return h.sum()

    return fn


def test_what_is_joined_or_masked_is_no_history():
    found = growth(attention_to_an_encoder, TS)
    assert "whole sequence" in (at(found, "joined").advice or "")
    for mark in ("masked each step", "masked again"):
        assert "write_rows" not in (at(found, mark).advice or "")


def test_a_prefix_that_is_embedded_anew_is_no_beam():
    words, embed = torch.randint(9, (B, 64)), nn.Embedding(9, D)

    def make(T: int) -> Callable[[], Tensor]:
        def fn() -> Tensor:
            loss = torch.zeros(())
            for t in range(1, T):
                x = embed(words[:, :t])  # embedded
                last = x.sin()[:, -1]  # read of a new tensor
                loss = loss + last.sum()
            return loss

        return fn

    found = growth(make, TS)
    assert "beam" not in (at(found, "embedded").advice or "")
    assert "unstack" not in (at(found, "read of a new tensor").advice or "")


def test_advice_is_on_what_is_saved_where_that_grows():
    def make(T: int) -> Callable[[], Tensor]:
        xs, places = torch.randn(T, B, D, requires_grad=True), torch.eye(T)[:, :, None, None]

        def fn() -> Tensor:
            buffer = torch.zeros(T, B, D)
            for t in range(T):
                buffer = (buffer * (1 - places[t]) + places[t] * xs[t]).sin()  # written
            return buffer.sum()

        return fn

    line = at(growth(make, TS), "written")
    assert line.exponent == pytest.approx(2, abs=0.05)
    assert "checkpoints=K" in (line.advice or "")


def test_stacking_once_after_the_loop_is_fine():
    cell = nn.GRUCell(D, D)

    def make(T: int) -> Callable[[], Tensor]:
        xs = torch.randn(T, B, D)

        def fn() -> Tensor:
            h, kept = torch.zeros(B, D), []
            for x in xs:
                h = cell(x, h)
                kept.append(h)
            return torch.stack(kept).square().mean() + torch.cat(kept).square().mean()

        return fn

    assert not any(line.superlinear or line.advice for line in growth(make, TS).lines)


@pytest.mark.parametrize(
    "module",
    [nn.LSTM(D, D, 2), nn.Conv1d(B, B, 3, padding=1), nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D))],
    ids=["LSTM", "Conv1d", "Sequential"],
)
def test_linear_modules_have_no_guilty_line(module: nn.Module):
    def make(T: int) -> Callable[[], Tensor]:
        x = torch.randn(T, B, D)

        def fn() -> Tensor:
            result = module(x)
            return (result[0] if isinstance(result, tuple) else result).square().sum()

        return fn

    # four sizes: MKL-DNN's scratch for an LSTM, kept for backward, jumps once between 16 and 64
    assert not any(line.superlinear or line.advice for line in growth(make, (*TS, 128)).lines)


# -- exponents


def test_a_peak_that_is_constant_before_it_grows_is_linear():
    """The gradient of the table outweighs a short sequence and stands beside little of it."""
    embed, cell = nn.Embedding(4000, D), nn.RNNCell(D, D)

    def make(T: int) -> Callable[[], Tensor]:
        words = torch.randint(4000, (T, B))

        def fn() -> Tensor:
            h = torch.zeros(B, D)
            for x in embed(words):
                h = cell(x, h)
            return h.sum()

        return fn

    found = growth(make, (125, 250, 500, 1000))
    assert found.peak_exponent < 1.2
    assert found.peak_marginal == pytest.approx(1, abs=0.2)
    assert not any(line.peak_exponent > 1.2 for line in found.lines)


# -- lines


def test_a_compiled_function_has_each_line_once():
    def per_slot(xs: Tensor) -> Tensor:
        return sum((x.exp().sin().sum() for x in xs), torch.zeros(()))  # compiled

    compiled = torch.compile(per_slot, backend="eager")

    def make(T: int) -> Callable[[], Tensor]:
        xs = torch.randn(T, D, requires_grad=True)
        return lambda: compiled(xs)

    assert at(growth(make, (4, 8, 16)), "compiled").exponent == pytest.approx(1)


# -- counts by hand


def test_autocast_keeps_what_it_casts():
    layer, x = nn.Linear(D, D, bias=False), torch.randn(B, D, requires_grad=True)

    def fn() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x).relu().float().sum()

    # x, the weight and the result of relu, at 2 bytes each
    assert saved_residuals(fn).bytes == saved(fn).bytes == (B * D + D * D + B * D) * 2


@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_of_adam_leaves_gradients_and_moments(foreach: bool):
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    with track() as tracker:
        model(torch.randn(B, D)).square().mean().backward()
        optimizer.step()
    sizes = [p.numel() for p in model.parameters()]
    assert tracker.live == (3 * sum(sizes) + len(sizes)) * FLOAT  # gradient, two moments, a count of steps


def test_an_error_in_the_block_comes_through_and_figures_stay():
    x, kept = torch.randn(D, requires_grad=True), []

    def step() -> None:
        with track() as tracker:
            trackers.append(tracker)
            kept.append(x.sin())
            x[D]

    trackers: list[Tracker] = []
    with pytest.raises(IndexError):
        step()
    (tracker,) = trackers
    assert tracker.live == D * FLOAT
    kept.clear()
    x.exp()
    assert (tracker.live, tracker.peak) == (0, D * FLOAT)


# -- what is no loss, and what is no size


def test_sizes_that_are_no_sequence():
    with pytest.raises(TypeError, match=r"growth: Ts must be two or more sizes, such as \(32, 64, 128\); got 64"):
        growth(lambda T: lambda: torch.zeros(()), 64)  # pyright: ignore[reportArgumentType]


def test_a_timeline_of_what_is_no_scalar_runs_no_backward():
    x = torch.randn(D, requires_grad=True)
    assert [mark.name for mark in timeline(lambda: x * 2).marks] == ["step"]
    assert x.grad is None


def test_garbage_from_before_does_not_hide_a_rise():
    def run() -> None:
        gc.collect()
        held = fresh_ones(64 * 2**20)
        time.sleep(0.1)
        del held

    with collector_off():
        cycle: list[object] = [fresh_ones(128 * 2**20)]
        cycle.append(cycle)
        del cycle
        assert timeline(run).rise >= 63 * 2**20


def test_a_reader_that_goes_away_changes_no_verdict(tmp_path: Path):
    script, data = tmp_path / "square.py", tmp_path / "square.json"
    script.write_text("import torch\n\ndef square(T):\n    return torch.ones(T, T, requires_grad=True).exp().sum()\n")
    command = [sys.executable, "-m", "tensorloop.memory", f"{script}:square", "--T", "4,8,16", "--no-progress"]
    end, begin = os.pipe()
    os.close(end)
    with open(begin, "w") as nobody:
        limits = ["--fail-above", "1.2", "--json", str(data)]
        found = subprocess.run([*command, *limits], stdout=nobody, stderr=subprocess.PIPE, check=False)
    assert (found.returncode, data.exists()) == (1, True)


def test_a_function_that_calls_backward_itself_is_told_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = tmp_path / "step.py"
    script.write_text(
        "import torch\n\ndef step(T):\n    loss = torch.ones(T, requires_grad=True).exp().sum()\n"
        "    loss.backward()\n    return loss\n"
    )
    assert main([f"{script}:step", "--T", "4,8", "--no-progress"]) == 2
    assert "must not call backward on its loss" in capfd.readouterr().err
