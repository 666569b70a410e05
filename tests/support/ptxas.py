"""NVIDIA's own assembler, where it is installed: what it makes of the library's PTX, in registers and bytes.

    python -m tests.support.ptxas      # all steps of the cases of compiled loops, for three architectures: a table

It comes with `pip install nvidia-cuda-nvcc`, or with CUDA's toolkit; no test needs it.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from tensorloop.compiler.emitter.device.devices import Nvptx
from tensorloop.compiler.emitter.device.kernel import DeviceText, device_text
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.step import Step, Unsupported
from tensorloop.compiler.targets.cpu import core
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.ptx.assemble import ptx_of
from tensorloop.compiler.targets.ptx.made import MOST_SPILLED
from tensorloop.loop.compiled.run.plan import plans
from tests.compiler.test_emitter_random import MIXING, STEPS, drawn
from tests.compiler.test_emitter_team import MEETING, case
from tests.support.compiled_cases import CASES, outcome
from tests.support.recurrences import recurrence
from tests.support.recurrent_cells import CELLS, inputs

SIZES = (4, 32), (512, 64)  # rows and features of cells: a row each group, and several rows a lane
DRAWN = 40  # steps that are drawn
# Bytes of shared memory that a block may have, by architecture: the most that one asks for, in NVIDIA's tables.
ARCHITECTURES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


class Needs(NamedTuple):
    """What a kernel needs: registers a lane, bytes a lane that it spills to memory, bytes a group of shared memory."""

    registers: int
    spilled: int
    shared: int
    lanes: int

    @property
    def fits(self) -> bool:
        """Whether a block of so many lanes has the registers: 65,536, of which a warp gets multiples of 256."""
        each = -(-self.registers * 32 // 256) * 256
        return each * (self.lanes // 32) <= 65_536 and self.spilled <= MOST_SPILLED


def find_ptxas() -> str:
    """Its path; empty where there is none."""
    wheels = Path(sysconfig.get_paths()["purelib"], "nvidia").glob("*/bin/ptxas")
    return next(map(str, wheels), shutil.which("ptxas") or "")


def assembled(text: DeviceText, arch: str) -> Needs:
    """Has the text assembled, and reads what is said of it; an error of ptxas is raised with its words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_bytes(ptx_of(text.module, arch))
        done = subprocess.run(
            [find_ptxas(), "-v", f"-arch={arch}", str(path), "-o", str(path.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise AssertionError(done.stderr)
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))
    return Needs(int(registers), spilled, text.scratch if text.local else 0, text.lanes)


def steps_of(name: str, dtype: torch.dtype) -> list[Step]:
    """The steps of a case of compiled loops, forward and backward."""
    found: list[Step] = []

    def noted(step: Step, **_: object) -> EagerCore:
        found.append(step)
        return EagerCore(step)

    core.instead.append(noted)  # pyright: ignore[reportArgumentType]
    plans.clear()
    try:
        outcome(CASES[name], dtype, True)
    finally:
        core.instead.pop()
        plans.clear()
    return found


def texts(step: Step, arch: str) -> DeviceText:
    """The step's text; raises `Unsupported` where there is none."""
    return device_text(lowered(step), Nvptx(arch, local=ARCHITECTURES[arch]))


def steps(dtype: torch.dtype) -> Iterator[tuple[str, Step]]:
    """All steps of all cases; cells of sizes that models have; steps in which rows meet, and drawn ones."""
    for name in CASES:
        yield from ((name, step) for step in steps_of(name, dtype))
    for name, cell in CELLS.items():
        for batch, features in SIZES:
            given = inputs(cell, 1, batch, features, dtype)
            yield f"{name} {batch} x {features}", recurrence(cell.step, *given, reverse=cell.reverse)
    yield from ((name, case(name, dtype)[0]) for name in MEETING)
    yield from ((f"drawn {seed}", drawn(seed, STEPS + MIXING)[0]) for seed in range(DRAWN))


def rows(dtype: torch.dtype) -> Iterator[tuple[str, str, Needs | str]]:
    """(case, architecture, what its kernel needs or why there is none) of all these."""
    for name, step in steps(dtype):
        for arch in ARCHITECTURES:
            try:
                yield name, arch, assembled(texts(step, arch), arch)
            except Unsupported as lack:
                yield name, arch, lack.reason


def main() -> None:
    """Prints the table."""
    for dtype in (torch.float32, torch.float64):
        found = list(rows(dtype))
        for arch in ARCHITECTURES:
            needs = [(need, name) for name, here, need in found if here == arch and isinstance(need, Needs)]
            worst = {field: max(needs, key=lambda row, n=n: row[0][n]) for n, field in enumerate(Needs._fields)}
            print(f"{dtype} {arch}: {len(needs)} texts, {sum(not need.fits for need, _ in needs)} do not fit")
            print(
                "   ",
                "; ".join(f"most {field} {need[n]} ({name})" for n, (field, (need, name)) in enumerate(worst.items())),
            )
            print("   ", f"spilling: {sorted((need.spilled, name) for need, name in needs if need.spilled)}")
        refused = Counter(need for _, here, need in found if here == "sm_80" and isinstance(need, str))
        print(f"{dtype} refused: {dict(refused)}")


if __name__ == "__main__":
    sys.exit(main())
