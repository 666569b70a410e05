"""The script that counts moves between rooms: what it counts, and that the library's own paths stay short."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.profiling_modules import profiling_modules

SCRIPT = Path(__file__).parents[2] / "profiling" / "room_moves.py"
# Moves between rooms that one value makes, at most. Who raises one of these should have a reason.
MOST = {
    "append + read + gradient": 19,
    "a step of plain scan": 10,
    "a step of the sweep": 36,
    "a reversed step (every carry is kept)": 56,
    "compiled scan, first call": 1800,  # among that, whether the caller captures a CUDA graph
    "compiled scan, a later call + backward": 205,  # whether the body reads what it read before is asked at each call
    "softmax of a packed tensor": 12,
    "a step of beam_search": 56,  # one more kernel, which ranks the ends, and a look at how the model attends
}


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with profiling_modules(SCRIPT.stem) as modules:
        yield modules[SCRIPT.stem]


def test_paths_stay_short():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True, timeout=300)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    found = {what: int(rooms) for what, rooms, _, _ in rows}
    assert found.keys() == MOST.keys()
    assert {what: n for what, n in found.items() if not 0 < n <= MOST[what]} == {}


def test_a_move_is_a_call_or_a_return_to_another_module(script: Any):
    names: dict[str, Any] = {}
    for module in ("a.x", "a.y", "b"):
        names[module] = {"__name__": f"tensorloop.{module}", "names": names}
        exec("def run(*calls):\n    for call in calls:\n        names[call[0]]['run'](*call[1:])", names[module])

    def work() -> None:
        names["a.x"]["run"](("a.x",), ("a.y", ("b",)), ("b",))

    found = script.moves(work)
    assert [name.removeprefix("tensorloop.") for name in found] == ["a.x", "a.y", "b", "a.y", "a.x", "b", "a.x"]
    assert (script.changes(found), script.changes([*map(script.room, found)])) == (6, 4)


def test_a_room_is_a_folder_or_a_file(script: Any):
    modules = ["loop.api", "loop.checkpoint.node", "regroup", "kernels.cpu.beam", "packed"]
    rooms = ["loop", "loop.checkpoint", "regroup", "kernels", "packed"]
    modules += ["loop.compiled.front", "loop.compiled.run.plan", "compiler.step", "compiler.emitter.ir.code"]
    rooms += ["loop", "loop.compiled.run", "compiler", "compiler.emitter"]
    assert [script.room(f"tensorloop.{m}") for m in modules] == rooms
