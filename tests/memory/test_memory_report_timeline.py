"""The whole process over time: samples from outside, marks of what ran when."""

import importlib.util
import subprocess
import sys
import time
from itertools import combinations, pairwise
from pathlib import Path

import psutil
import pytest
import torch
from matplotlib.text import Text

import tensorloop as tl
from tensorloop._common import scope
from tensorloop.memory import Mark, Timeline, mark, process, timeline
from tensorloop.memory.report import timeline as picture
from tests.support.pages import fresh_ones

ROOT = Path(__file__).parents[2]
MIB = 2**20


def turn(h: torch.Tensor) -> torch.Tensor:
    return h.roll(1)


def loops(w: torch.Tensor) -> torch.Tensor:
    with mark("warm-up"):
        h = tl.fori_loop(0, 3, lambda i, h: turn(h), w)
    h, _ = tl.scan(lambda h, _: (turn(h), None), h, length=4)
    h = tl.while_loop(lambda h: h[0] < 3, lambda h: h + 1, h)
    return h.sum()


def test_forward_backward_and_loops_are_marked():
    w = torch.ones(4, requires_grad=True)
    found = timeline(loops, w)
    assert [m.name for m in found.marks] == ["forward", "warm-up", "fori_loop", "scan", "while_loop", "backward"]
    assert w.grad is not None
    forward, *inner, backward = found.marks
    assert all(forward.begin <= m.begin <= m.end <= forward.end for m in inner)
    assert forward.end <= backward.begin <= backward.end <= found.times[-1]


def test_a_beam_search_is_marked_as_one():
    def search(w: torch.Tensor) -> torch.Tensor:
        def step(carry: None, tokens: torch.Tensor) -> tuple[None, torch.Tensor]:
            return None, w.log_softmax(0).expand(*tokens.shape, 4)

        return tl.beam_search(step, None, batch_size=1, beam_size=2, bos_id=0, eos_id=1).scores.sum()

    found = timeline(search, torch.zeros(4, requires_grad=True))
    assert [m.name for m in found.marks] == ["forward", "beam_search", "backward"]


def test_samples_go_from_before_the_run_to_after_it():
    begun = time.time()
    found = timeline(time.sleep, 0.1, interval=0.01)
    assert found.times[0] == 0
    assert found.times[-1] >= 0.1
    assert all(a <= b for a, b in pairwise(found.times))
    assert len(found.times) == len(found.rss) >= 5
    assert found.marks[0].begin >= 0
    assert found.times[-1] <= time.time() - begun


def test_resident_bytes_follow_what_is_touched():
    def run() -> None:
        with mark("hold"):
            held = fresh_ones(64 * MIB)
            time.sleep(0.1)
        with mark("free"):
            del held
            time.sleep(0.1)

    found = timeline(run)
    assert found.rise >= 63 * MIB
    free = next(m for m in found.marks if m.name == "free")
    assert (
        min(n for when, n in zip(found.times, found.rss, strict=True) if when > free.begin) < max(found.rss) - 48 * MIB
    )
    assert [m.name for m in found.marks] == ["step", "hold", "free"]


def test_pages_that_nobody_touches_are_counted_but_not_resident():
    found = timeline(lambda: (torch.empty(128 * MIB), time.sleep(0.05)))
    assert found.rise < 64 * MIB


def test_an_error_comes_through_and_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError):
        timeline(lambda: 1 / 0)
    assert scope.observer.get() is None
    assert process._marks.get() is None


def test_a_mark_outside_a_timeline_does_nothing():
    with mark("alone"):
        pass
    assert process._marks.get() is None


def test_memory_profiler_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"timeline: needs memory_profiler: pip install 'tensorloop\[memory\]'"):
        timeline(loops, torch.ones(4))


def test_a_second_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_SAMPLER", "raise SystemExit('no access')")
    with pytest.raises(RuntimeError, match="timeline: the second process stopped: no access"):
        timeline(loops, torch.ones(4))


def test_the_second_process_ends_with_ours():
    code = (
        "import os, psutil, tensorloop.memory.process as p\n"
        "with p._sampled(0.01):\n"
        "    print(*(child.pid for child in psutil.Process().children()), flush=True)\n"
        "    os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    (sampler,) = map(int, done.stdout.split())
    for _ in range(500):
        if gone(sampler):
            break
        time.sleep(0.02)
    assert gone(sampler)


def gone(pid: int) -> bool:
    """A process whose parent does not ask for its exit code stays as a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


TIMELINE = Timeline(
    times=(0.0, 0.5, 1.0, 1.5, 2.0),
    rss=(200 * MIB, 300 * MIB, 400 * MIB, 380 * MIB, 250 * MIB),
    marks=(Mark("forward", 0.1, 1.0), Mark("scan", 0.2, 0.4), Mark("scan", 0.5, 0.9), Mark("backward", 1.0, 1.9)),
)


def test_figures_of_a_timeline():
    assert (TIMELINE.rise, TIMELINE.kept) == (200 * MIB, 50 * MIB)
    assert TIMELINE.as_dict()["marks"][1] == {"name": "scan", "begin": 0.2, "end": 0.4}
    assert str(TIMELINE).splitlines() == [
        "resident: 209,715,200 bytes, up by 209,715,200, at the end by 52,428,800",
        "    0.100 s to     1.000 s  forward",
        "    0.200 s to     0.400 s  scan",
        "    0.500 s to     0.900 s  scan",
        "    1.000 s to     1.900 s  backward",
    ]


def test_the_picture(tmp_path: Path):
    TIMELINE.save(tmp_path / "line.png")
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
    figure = picture.draw(TIMELINE)
    figure.draw_without_rendering()
    upper, lower = figure.axes
    assert upper.get_ylabel() == "MiB above the start"
    assert upper.get_title(loc="left") == (
        "Resident memory: 200 MiB at the start, up by 200 MiB, 50 MiB still there at the end"
    )
    assert [label.get_text() for label in lower.get_yticklabels()] == ["forward", "scan (2)", "backward"]
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible() and text.get_text()]
    boxes = [text.get_window_extent().padded(-1) for text in texts]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_the_picture_has_rows_for_the_longest_marks_alone():
    marks = tuple(Mark(f"loop {i}", 0.1 * i, 0.1 * i + 0.001 * (i + 1)) for i in range(30))
    figure = picture.draw(Timeline(TIMELINE.times, TIMELINE.rss, marks))
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == [f"loop {i}" for i in range(20, 30)]
