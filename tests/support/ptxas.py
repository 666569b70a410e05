"""NVIDIA's own assembler, where it is installed: what it makes of the library's PTX, in registers and bytes.

    python -m tests.support.ptxas      # all steps of the cases of compiled loops, for three architectures: a table

What is known is kept in build/ptxas.jsonl, so that a run that was stopped goes on; remove it to begin anew.
The assembler comes with `pip install nvidia-cuda-nvcc`, or with CUDA's toolkit; no test needs it.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from tensorloop.compiler.emitter.device.devices import Nvptx
from tensorloop.compiler.emitter.device.kernel import DeviceText, device_text
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.step import Step, Unsupported
from tensorloop.compiler.targets.cpu import native_core
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.ptx.assemble import ptx_of
from tensorloop.compiler.targets.ptx.made import MOST_SPILLED
from tensorloop.loop.compiled.run.plan import plans
from tests.compiler.test_emitter_random import MIXING, STEPS, drawn
from tests.compiler.test_emitter_team import MEETING, case
from tests.support.compiled_cases import CASES, outcome
from tests.support.recurrences import recurrence
from tests.support.recurrent_cells import CELLS, Cell, inputs

SIZES = (4, 32), (512, 64)  # rows and features of cells: a row each group, and several rows a lane
DRAWN = 40  # steps that are drawn
# Bytes of shared memory that a block may have at most, by architecture, as "Technical Specifications per Compute
# Capability" in NVIDIA's CUDA programming guide has it: a multiprocessor's 164 or 228 KiB without 1 KiB of the
# system's. There are the rest, too, the same for these three: 1,024 lanes a block, 2**31 - 1 blocks in a row, 65,536
# registers a multiprocessor and block, 255 a lane. How they are given out is in CUDA's cuda_occupancy.h: a warp gets a
# multiple of 256, of one of four parts of the multiprocessor, among which a block's warps are shared out.
ARCHITECTURES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


KEPT = Path("build", "ptxas.jsonl")  # what earlier runs have found, a row a line


class Row(NamedTuple):
    """What the kernels of a case's steps need on an architecture, or why there are none."""

    dtype: str
    name: str
    arch: str
    needs: list[Any]


class Needs(NamedTuple):
    """What a kernel needs: registers a lane, bytes a lane that it spills to memory, bytes a group of shared memory."""

    registers: int
    spilled: int
    shared: int
    lanes: int

    @property
    def fits(self) -> bool:
        """Whether there are so many registers for a block of so many lanes, and few enough of them are spilled."""
        each = -(-self.registers * 32 // 256) * 256
        warps = 65_536 // 4 // each * 4
        return self.registers <= 255 and self.lanes <= min(1024, 32 * warps) and self.spilled <= MOST_SPILLED


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


def steps_made(run: Callable[[], object]) -> list[Step]:
    """The steps of the compiled loops that `run` asks for, forward and backward; none of it is run natively."""
    found: list[Step] = []

    def noted(step: Step, **_: object) -> EagerCore:
        found.append(step)
        return EagerCore(step)

    native_core.instead.append(noted)  # pyright: ignore[reportArgumentType]
    plans.clear()
    try:
        run()
    finally:
        native_core.instead.pop()
        plans.clear()
    return found


def steps_of(name: str, dtype: torch.dtype) -> list[Step]:
    """The steps of a case of compiled loops, forward and backward."""
    return steps_made(lambda: outcome(CASES[name], dtype, True))


def texts(step: Step, arch: str) -> DeviceText:
    """The step's text; raises `Unsupported` where there is none."""
    return device_text(lowered(step), Nvptx(arch, local=ARCHITECTURES[arch]))


def steps(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], list[Step]]]]:
    """All steps of all cases; cells of sizes that models have; steps in which rows meet, and drawn ones."""
    for name in CASES:
        yield name, partial(steps_of, name, dtype)
    for (rows, features), (name, cell) in product(SIZES, CELLS.items()):
        yield f"{name} {rows} x {features}", lambda c=cell, r=rows, f=features: [cell_step(c, r, f, dtype)]
    yield from ((name, lambda n=name: [case(n, dtype)[0]]) for name in MEETING)
    yield from ((f"drawn {seed}", lambda n=seed: [drawn(n, STEPS + MIXING)[0]]) for seed in range(DRAWN))


def cell_step(cell: Cell, rows: int, features: int, dtype: torch.dtype) -> Step:
    return recurrence(cell.step, *inputs(cell, 1, rows, features, dtype), reverse=cell.reverse)


def needs_of(step: Step, arch: str) -> Needs | str:
    """What its kernel needs, or why there is none."""
    try:
        return assembled(texts(step, arch), arch)
    except Unsupported as lack:
        return lack.reason


def known() -> list[Row]:
    """The rows of earlier runs; a line may have been cut short."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return [Row(*json.loads(line)) for line in lines if line.endswith("]")]


def look(dtypes: Sequence[torch.dtype]) -> None:
    """Adds the rows that are not there yet."""
    done = {row[:3] for row in known()}
    asked = [(str(dtype), name, make) for dtype in dtypes for name, make in steps(dtype)]
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as file:
        print(file=file)
        for dtype, name, make in tqdm(asked, disable=not sys.stderr.isatty()):
            left = [arch for arch in ARCHITECTURES if (dtype, name, arch) not in done]
            made = make() if left else []
            for arch in left:
                print(json.dumps([dtype, name, arch, [needs_of(step, arch) for step in made]]), file=file, flush=True)


def main() -> None:
    """Looks, and prints the table."""
    dtypes = (torch.float32, torch.float64)
    look(dtypes)
    for dtype in dtypes:
        rows = [row for row in known() if row.dtype == str(dtype)]
        for arch in ARCHITECTURES:
            found = [(need, row.name) for row in rows if row.arch == arch for need in row.needs]
            needs = [(Needs(*need), name) for need, name in found if not isinstance(need, str)]
            worst = {field: max(needs, key=lambda row, n=n: row[0][n]) for n, field in enumerate(Needs._fields)}
            print(f"{dtype} {arch}: {len(needs)} texts, {sum(not need.fits for need, _ in needs)} do not fit")
            print(
                "   ",
                "; ".join(f"most {field} {need[n]} ({name})" for n, (field, (need, name)) in enumerate(worst.items())),
            )
            print("   ", f"spilling: {sorted((need.spilled, name) for need, name in needs if need.spilled)}")
        refused = Counter(need for row in rows if row.arch == "sm_80" for need in row.needs if isinstance(need, str))
        print(f"{dtype} refused: {dict(refused)}")


if __name__ == "__main__":
    sys.exit(main())
