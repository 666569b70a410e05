"""What `explain` says: where each operation of a body ends up, and why a loop stays eager."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from docs import partition
from tensorloop.compiler.divide.partition import Partition
from tensorloop.compiler.step import Step, Unsupported
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run.plan import Plan, plans
from tests.support import array_loops
from tests.support.compiled_cases import CASES, check_equal, outcome


def part(text: str, *headings: str) -> str:
    """What stands below these headings, one in the other."""
    for heading in headings:
        text = text.split(f"{heading}:", 1)[1]
    return re.split(r"\n *(?:once|before|in the|after|backward|kept)", text)[0]


def lstm(features: int, size: int) -> str:
    """What becomes of an LSTM."""
    wx, wh = (torch.randn(n, 4 * size).requires_grad_() for n in (features, size))

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        i, f, g, o = (x @ wx + state[0] @ wh).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h, c), h

    explanation = tl.explain(
        body, (torch.zeros(4, size), torch.zeros(4, size)), torch.randn(6, 4, features).requires_grad_()
    )
    assert explanation.compiled
    return str(explanation)


def test_products_of_small_matrices_are_done_in_the_loop():
    text, inside = lstm(5, 4), "in the loop"
    assert part(text, "forward", inside).count("mm") == 1  # two of one shape
    assert part(text, "backward", inside).count("mm") == 4
    assert "all steps at once" not in text


def test_other_products_with_xs_are_hoisted_and_weight_gradients_come_after():
    text, before, inside = lstm(40, 128), "before the loop, all steps at once", "in the loop"
    assert part(text, "forward", before).strip().endswith("mm [4, 512]")
    assert part(text, "forward", inside).count("mm") == 1
    assert part(text, "backward", inside).count("mm") == 1
    assert part(text, "backward", "after the loop, all steps at once").count("mm") == 3
    assert "forward: one native function" in text
    assert "backward: one native function" in text


def test_a_map_has_no_loop():
    plans.clear()
    outcome(CASES["mapped"], torch.float32, "strict")
    (plan,) = (p for p in plans._plans.values() if isinstance(p, Plan))
    assert plan.forward.core is None
    assert plan.backward().core is None


def splits() -> tuple[Partition, Partition]:
    """Those of the one plan there is, forward and backward."""
    (plan,) = (p for p in plans._plans.values() if isinstance(p, Plan))
    return plan.forward.partition, plan.backward().partition


def test_a_loop_stores_once_what_is_asked_for_and_nothing_else():
    """Of a step's product, sum and tanh the last one, which serves as the state before the next step, too."""
    plans.clear()
    w = torch.randn(3, 3, requires_grad=True)
    _, ys = tl.scan(
        lambda h, x: ((h := torch.tanh(h @ w + x)), h), torch.ones(2, 3), torch.randn(4, 2, 3), compile=True
    )
    ys.sum().backward()
    forward, backward = splits()
    (out,) = forward.outs
    assert str(out.target) == "aten.tanh.default"
    assert forward.states == {0: out}
    (out,) = backward.outs  # the gradient before tanh: that of the carry and of the weights is made of it
    assert str(out.target) == "aten.mul.Tensor"
    assert backward.states == {}


def test_what_forward_does_with_an_array_pulls_nothing_into_the_loop_backward():
    plans.clear()
    array_loops.outcome(array_loops.LOOPS["reads_slots"], "strict")
    _, backward = splits()
    assert "aten.select.int" in {str(n.target) for n in backward.outs}
    assert "aten.clone.default" not in {str(n.target) for n in backward.inside}


def test_a_loop_that_stays_eager_says_why_and_where():
    explanation = tl.explain(lambda h, x: (h * x.item(), h), torch.ones(2), torch.ones(3))
    assert not explanation.compiled
    assert re.search(r"\.item\(\) reads a value in Python\n  at .*test_compiled_explain.py:\d+", str(explanation))


def test_what_the_emitter_lacks_leaves_the_loop_or_makes_it_eager(monkeypatch: pytest.MonkeyPatch):
    from tensorloop.compiler.targets.cpu.cpu_target import CpuTarget
    from tensorloop.compiler.targets.eager import EagerCore

    def without(name: str) -> Any:
        def native(_: CpuTarget, step: Step) -> EagerCore:
            for node in step.graph.nodes:
                if getattr(node.target, "_opname", "") == name:
                    raise Unsupported(f"{name}: not known", node)
            return EagerCore(step)

        return native

    for name, compiled in (("exp", True), ("tanh", False)):
        plans.clear()
        monkeypatch.setattr(CpuTarget, "make_core", without(name))

        def body(h: torch.Tensor, x: torch.Tensor) -> Any:
            h = torch.tanh(h + x.exp())
            return h, None

        init, xs = torch.ones(2, requires_grad=True), torch.ones(3, 2)
        explanation = tl.explain(body, init, xs)
        assert explanation.compiled is compiled
        if compiled:
            check_equal([tl.scan(body, init, xs, compile="strict")[0]], [tl.scan(body, init, xs)[0]], 1e-6)
        else:
            assert "lacks a native form, tanh: not known" in str(explanation)
            on_gpu = str(tl.explain(body, init, xs, device="cuda"))
            assert on_gpu.startswith("scan: compiled, on cuda:0\n")
            assert "\nforward: CUDA graphs" in on_gpu
    plans.clear()


def test_a_compiler_that_fails_costs_speed_alone(monkeypatch: pytest.MonkeyPatch):
    from tensorloop.compiler.targets.cpu.cpu_target import CpuTarget

    def fails(_: CpuTarget, step: Step) -> Any:
        raise OSError("no room on the device")

    plans.clear()
    monkeypatch.setattr(CpuTarget, "make_core", fails)
    with pytest.warns(NotCompiledWarning, match="the emitter failed, OSError: no room"):
        found = outcome(CASES["lstm"], torch.float64, True)
    plans.clear()
    check_equal(found[0], outcome(CASES["lstm"], torch.float64, False)[0], 0)


def test_a_cache_that_others_can_write_costs_speed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tensorloop").mkdir()
    (tmp_path / "tensorloop").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plans.clear()
    with pytest.warns(RuntimeWarning, match="compiled loops are not kept: .* is not yours alone"):
        found = outcome(CASES["lstm"], torch.float64, "strict")
    check_equal(found[0], outcome(CASES["lstm"], torch.float64, False)[0], 1e-11)
    outcome(CASES["iir"], torch.float64, "strict")  # without a further warning, which would be an error
    assert not list((tmp_path / "tensorloop").iterdir())
    plans.clear()


@pytest.mark.parametrize("wrong", ["Strict", 1, None])
def test_other_values_of_compile_are_refused_or_off(wrong: Any):
    call = (lambda h, x: (h + x, None)), torch.zeros(2), torch.ones(3, 2)
    if not wrong:
        assert tl.scan(*call, compile=wrong)[0].tolist() == [3, 3]
    else:
        with pytest.raises(TypeError, match='scan: compile must be True, False, "auto" or "strict", got'):
            tl.scan(*call, compile=wrong)


def test_the_picture_of_an_lstm_is_current():
    text = partition.explain()
    assert partition.PICTURE.read_text() == partition.draw(text), "python -m docs.partition draws it anew"
    passes, kept = partition.parse(text)
    assert passes["forward"]["before the loop, all steps at once"] == "mm [4, 512]"
    assert "mm [512, 64], mm [512, 128]" in passes["backward"]["after the loop, all steps at once"]
    assert kept.count("[4, 128]") == 7


# ---- of a device that is not there


def explain_on(device: Any, **options: Any) -> tl.loop.Explanation:
    w, h, xs = torch.randn(4, 4).requires_grad_(), torch.zeros(3, 4), torch.randn(6, 3, 4)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h

    return tl.explain(body, h, xs, device=device, **options)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_loop_of_the_host_is_explained_on_a_device():
    found = explain_on("cuda")
    assert found.compiled
    forward, backward = found.text.split("\nbackward:")
    assert forward.startswith("scan: compiled, on cuda:0\n\nlaunches of a step, by line ")
    assert "\nforward: CUDA graphs of 64, 8 and 1 steps\n" in forward
    for text, launches, work, read in ((forward, 2, 3, 48), (backward, 2, 5, 96)):
        has = f"{launches} launches a step, 1 of them ours, for {work} operations"
        assert f"a launch, and a copy for each dtype, here 1; it has {has}\n" in text
        assert "does not wait for the device" in text
        assert f"{read} bytes read and 48 written a step beside the carry, at most {64 * (read + 48):,} of" in text
        assert re.search(r"with TENSORLOOP_PTX=1 instead:\n    one launch: .* lanes, \d barriers? a step\n", text)
    ends = explain_on("cuda:1", until=lambda h: h.sum() > 9).text
    assert ends.startswith("scan: compiled, on cuda:1")
    assert "waits for the device once a graph" in ends
    # The loop itself is where it was.
    assert "\nforward: one native function" in explain_on(None).text


def test_kernels_are_explained_to_who_wants_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TENSORLOOP_PTX", "1")
    text = explain_on("cuda").text
    assert "\n  one launch: 3 groups of " in text
    assert " registers " in text
    assert "instead" not in text


@pytest.mark.usefixtures("on_the_cpu")
def test_what_goes_into_no_graph_is_named():
    def body(carry: Any, x: Tensor) -> Any:
        h, array = carry
        return (h + array.append(h).stack().flip(0)[0] + x, array), None

    text = tl.explain(body, (torch.zeros(2), tl.TensorArray()), torch.ones(5, 2), device="cuda").text
    assert "forward: torch, step by step" in text
    assert "no graph: flip of what is as long as an array in the carry" in text


@pytest.mark.usefixtures("on_the_cpu")
def test_an_array_in_the_carry_is_in_graphs_and_kernels():
    def body(carry: Any, x: Tensor) -> Any:
        h, array = carry
        return (h + x, array.append(h)), None

    text = tl.explain(body, (torch.zeros(2), tl.TensorArray()), torch.ones(5, 2), device="cuda").text
    assert "forward: CUDA graphs of 64, 8 and 1 steps" in text
    assert "one launch: 2 groups of 32 lanes, 0 barriers a step" in text
    assert "8 bytes read and 0 written a step" in text


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ("mps", ValueError, "explain: device: loops on cpu and cuda are compiled, none on mps"),
        ("gpu", ValueError, "explain: device: Expected one of cpu, cuda"),
        (0, TypeError, "explain: device must be a torch.device or its name, got int 0"),
    ],
)
def test_devices_that_nobody_compiles_for(device: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        explain_on(device)


# ---- by the user's lines


def lines_of(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """The table of an explanation: its heads, and the numbers of each line by what stands there."""
    _, table, _ = text.split("\n\n", 2)
    heads, *rows = (re.split(r" {2,}", line.strip()) for line in table.splitlines())
    return heads, {(row[0], f"{row[0]}  {row[1]}")[":" in row[0]]: row[1 + (":" in row[0]) :] for row in rows}


def two_lines(h: Tensor, x: Tensor) -> Any:
    h = torch.tanh(h * x)
    return h, h.exp().sum()


@pytest.mark.usefixtures("on_the_cpu")
def test_each_line_of_the_body_has_what_it_does_and_keeps():
    init, xs = torch.ones(4, 8, requires_grad=True), torch.ones(30, 4, 8)
    heads, rows = lines_of(tl.explain(two_lines, init, xs).text)
    assert heads == ["operations of a step, by line", "forward", "backward", "outside the loop", "bytes kept"]
    first = two_lines.__code__.co_firstlineno
    assert {name.partition(" ")[0].partition(":")[2]: row for name, row in rows.items()} == {
        f"{first + 1}": ["4", "2", "0", "128"],  # the tanh, and the factor of its gradient, which is kept
        f"{first + 2}": ["1", "2", "1", "128"],  # the exp, which is kept; its sum is of all steps at once
    }
    assert all(name.endswith(("torch.tanh(h * x)", "return h, h.exp().sum()")) for name in rows)


def test_a_body_that_does_nothing_has_no_table():
    text = tl.explain(lambda h, x: (h, None), torch.ones(2, requires_grad=True), torch.ones(3, 2)).text
    assert "by line" not in text
    assert "\n\n" not in text


@pytest.mark.usefixtures("on_the_cpu")
def test_launches_of_a_device_have_lines():
    text = explain_on("cuda").text
    heads, rows = lines_of(text)
    assert heads[:3] == ["launches of a step, by line", "forward", "backward"]
    for column, name in enumerate(("forward", "backward")):
        said = re.search(rf"\n{name}: .*?it has (\d+) launches a step", text, re.DOTALL)
        assert said is not None
        counts = [int(row[column]) for row in rows.values()]
        assert max(counts) <= int(said[1]) <= sum(counts)  # one that several lines share is counted at each


@pytest.mark.usefixtures("fresh_plans", "on_the_cpu")
def test_a_loop_that_ran_says_how_long_it_took():
    init, xs = torch.ones(4, 8, requires_grad=True), torch.ones(300, 4, 8)
    ran = re.compile(r"\n  [\d.,]+ ms for 300 steps when it last ran\n")
    for known in (1, 2):  # the first call makes the program backward, which is not the time of a run
        tl.scan(two_lines, init, xs, compile="strict")[1].sum().backward()
        assert len(ran.findall(tl.explain(two_lines, init, xs).text)) == known
    assert "ms for" not in tl.explain(two_lines, init, xs, device="cuda").text


@pytest.mark.usefixtures("on_the_cpu")
def test_what_would_make_a_loop_better_is_said():
    init, xs = torch.ones(64, 64, requires_grad=True), torch.ones(1, 1).expand(1000, 1, 1)
    text = tl.explain(two_lines, init, xs).text
    (said,) = re.findall(r"less memory: checkpoints=(\d+) keeps some ([\d,]+) bytes at peak in the place of", text)
    K, less = int(said[0]), int(said[1].replace(",", ""))
    assert K == 31
    assert less == K * 2**14 + 2**20
    taken = tl.memory.peak(lambda: tl.scan(two_lines, init, xs, checkpoints=K, compile="strict")[1].sum().backward())
    assert less / 2 < taken < 1.5 * less  # some bytes: beside them are gradients, and ys
    assert "to make it better" not in tl.explain(two_lines, init, xs, checkpoints=K).text
    assert "to make it better" not in tl.explain(two_lines, init, xs[:9]).text

    def distances(h: Tensor, x: Tensor) -> Any:
        return torch.cdist(h, x), None

    text = tl.explain(distances, torch.eye(3), torch.ones(4, 3, 3)).text
    assert re.search(r"less time: test_compiled_explain.py:\d+  return .*: _cdist_forward has no machine code: ", text)
