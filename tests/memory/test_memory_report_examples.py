"""The four loops of docs/memory.md: one loss before and after, the guilty line named, the figures of the page."""

import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from docs.examples.memory import actor_critic, decoder, language_model, memory_network
from tensorloop.memory import Growth, growth
from tensorloop.memory.command import main
from tensorloop.memory.report.exponents import marginal

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "memory.md").read_text()
TS = (64, 128, 256)
PROGRAMS = {
    program.__name__.rpartition(".")[2]: program for program in (language_model, decoder, memory_network, actor_critic)
}
GUILTY = {
    "language_model": ["h = cell(xs[t], h)"],
    "decoder": ["keys = torch.cat([keys, k], dim=2)", "values = torch.cat([values, v], dim=2)"],
    "memory_network": ["memory = torch.where(slots == t, h, memory)"],
    "actor_critic": ["history = torch.stack(features, dim=2)  # (B, 1, t, D)"],
}
every_program = pytest.mark.parametrize("name", PROGRAMS)


@pytest.fixture(autouse=True)
def checked_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process: `torch.compile` switches the checks of torch's distributions, and their bytes, off."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@cache
def measured(name: str, which: str) -> Growth:
    function = getattr(PROGRAMS[name], which)
    function(8)
    return growth(lambda T: lambda: function(T), TS)


def made(found: Growth) -> tuple[int, ...]:
    """What all lines allocate."""
    return tuple(sum(line.made[i] for line in found.lines) for i in range(len(found.Ts)))


def parameters(program: ModuleType) -> list[torch.Tensor]:
    modules = [value for value in vars(program).values() if isinstance(value, torch.nn.Module)]
    return [parameter for module in modules for parameter in module.parameters()]


@every_program
def test_before_and_after_are_the_same_program(name: str):
    program = PROGRAMS[name]
    before, after = program.before(13), program.after(13)
    torch.testing.assert_close(after, before)
    weights = parameters(program)
    gradients = [torch.autograd.grad(loss, weights, allow_unused=True) for loss in (before, after)]
    assert any(g is not None and g.any() for g in gradients[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@every_program
@pytest.mark.extended("memory_network")
def test_the_report_names_the_guilty_line_and_what_to_write(name: str):
    found = measured(name, "before")
    worst = found.lines[: len(GUILTY[name])]
    assert [line.site.code for line in worst] == GUILTY[name]
    assert [Path(line.site.file).name for line in worst] == [f"{name}.py"] * len(worst)
    assert all(line.superlinear and re.search(r"tl\.\w+", line.advice or "") for line in worst)
    lines = str(found).splitlines()
    assert lines[0].endswith(worst[0].site.code)
    assert lines[2].strip() == worst[0].advice


@every_program
@pytest.mark.extended("actor_critic", "decoder")
def test_the_fix_is_linear(name: str):
    before, after = measured(name, "before"), measured(name, "after")
    assert abs(after.marginal - 1) < 0.01
    assert abs(after.peak_marginal - 1) < 0.01
    if name == "language_model":
        assert marginal(TS, made(before)) > 1.7
        assert abs(marginal(TS, made(after)) - 1) < 0.01
    else:
        assert min(before.marginal, before.peak_marginal) > 1.9
        assert before.bytes[-1] > 15 * after.bytes[-1]


@every_program
def test_the_figures_on_the_page(name: str):
    for which in ("before", "after"):
        found = measured(name, which)
        total = made(found)
        cells = [
            f"{found.bytes[-1]:,}",
            f"T^{found.marginal:.2f}",
            f"{found.peaks[-1]:,}",
            f"T^{found.peak_marginal:.2f}",
        ]
        cells += [f"{total[-1]:,}", f"T^{marginal(TS, total):.2f}"]
        assert f"| {name.replace('_', ' ')}, {which} | {' | '.join(cells)} |" in PAGE


def test_the_output_on_the_page(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(ROOT)
    command = re.search(r"^python -m tensorloop\.memory (.*)$", PAGE, re.MULTILINE)
    assert command is not None
    assert main([*command[1].split(), "--no-progress"]) == 0
    shown = re.search(r"^```text\n(docs/examples.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert without_time(shown[1]) == without_time(capfd.readouterr().out)


def without_time(text: str) -> str:
    """Bytes repeat themselves, seconds do not."""
    text = re.sub(r"time ~ T\^-?[0-9.]+ \([0-9.e-]+ s\)", "time", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_seconds_alone_may_differ():
    line = "bytes ~ T^1.950; peak ~ T^1.943 (17,873,380 at T=256) beside a constant; time ~ T^{} ({} s)"
    assert without_time(line.format("1.14", "0.407")) == without_time(line.format("-0.20", "1e-05"))
    assert without_time(line.format("1.14", "0.407")) != without_time(
        line.replace("380", "381").format("1.14", "0.407")
    )
