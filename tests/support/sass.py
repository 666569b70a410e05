"""What NVIDIA's assembler makes of a step: its longest chain, and loads of the device's memory.

    python -m tests.support.sass      # an LSTM, forward and backward, for three architectures: a table

A chain is of instructions that wait for each other: through registers, through shared memory, and through barriers,
behind which everything waits for what was written before. It is that of one more step: what the third step ends later
than the second one. The assembler and the disassembler come with `pip install '.[ptxas]'`; no test needs them.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

import tensorloop as tl
from tensorloop.compiler.step import Step
from tensorloop.compiler.targets import ptx
from tensorloop.compiler.targets.ptx.assemble import ptx_of
from tests.support.ptxas import ARCHITECTURES, find_ptxas, texts


class Instruction(NamedTuple):
    """One line: its name, and the registers that it writes and reads; a guard is read, too."""

    name: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    operands: tuple[str, ...]


class Chain(NamedTuple):
    """Of one step of one lane: instructions that wait for each other, loads of the device's memory, and barriers."""

    longest: int
    loads: int
    barriers: int


def find_nvdisasm() -> str:
    """Its path; empty where there is none."""
    wheels = Path(sysconfig.get_paths()["purelib"], "nvidia").glob("*/bin/nvdisasm")
    return next(map(str, wheels), shutil.which("nvdisasm") or "")


def steps_on_device(rows: int, features: int) -> list[Step]:
    """The steps of an LSTM forward and backward, as a device is given them."""
    found: list[Step] = []
    cell = torch.nn.LSTMCell(features, features)
    init = torch.zeros(rows, features, requires_grad=True), torch.zeros(rows, features, requires_grad=True)

    def noted(step: Step) -> list[str]:
        found.append(step)
        return []

    before, asked = ptx.describe, os.environ.get("TENSORLOOP_PTX")
    ptx.describe = noted
    os.environ["TENSORLOOP_PTX"] = "1"
    try:
        tl.explain(lambda c, x: ((after := cell(x, c)), after[0]), init, torch.randn(4, rows, features), device="cuda")
    finally:
        ptx.describe = before
        os.environ.pop("TENSORLOOP_PTX")
        if asked is not None:
            os.environ["TENSORLOOP_PTX"] = asked
    return found


def disassembled(step: Step, arch: str) -> str:
    """The lines of a step's kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_bytes(ptx_of(texts(step, arch).module, arch))
        made = path.with_suffix(".cubin")
        subprocess.run([find_ptxas(), f"-arch={arch}", str(path), "-o", str(made)], check=True, capture_output=True)
        return subprocess.run([find_nvdisasm(), "-c", str(made)], check=True, capture_output=True, text=True).stdout


def chain_of(text: str) -> Chain:
    """The chain of a step: of the loop that has most lines."""
    lines = [found for line in text.splitlines() if (found := _read(line)) is not None]
    labels = {line: n for n, line in enumerate(lines) if isinstance(line, str)}
    begin, end = max(_loops(lines, labels), key=lambda loop: loop[1] - loop[0])
    once = _unrolled(lines, labels, begin, end)
    depths, reached = dict[str, int](), list[int]()
    for _ in range(3):
        for one in once:
            at = 1 + max((depths.get(name, 0) for name in one.reads), default=0)
            for name in one.writes:
                # What is written to memory is there when the last of all writes is.
                depths[name] = max(at, depths.get(name, 0)) if name in _PLACES else at
        reached.append(max(depths.values()))
    return Chain(
        reached[2] - reached[1],
        sum(one.name.startswith("LDG") for one in once),
        sum(one.name.startswith("BAR") for one in once),
    )


_PLACES = ("shared", "barrier", "branch")
_REGISTER = re.compile(r"\bU?[RP]\d+\b")
# Names behind a register that the same instruction writes: what is carried over, and what a comparison says.
_SEVERAL = ("IADD3", "UIADD3", "LEA", "ULEA", "ISETP", "UISETP", "FSETP", "DSETP", "PLOP3", "UPLOP3", "SHFL", "FCHK")
_STORES = ("STS", "STG", "ST", "BAR", "BRA", "EXIT", "BSSY", "BSYNC", "CALL", "CCTL", "NOP", "RET", "WARPSYNC", "RED")


def _read(line: str) -> Instruction | str | None:
    """An instruction, a label, or None of what is neither."""
    label = re.match(r"^(\.L_x_\d+):", line.strip())
    if label:
        return label[1]
    found = re.match(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)
    if found is None:
        return None
    guard, name, rest = found[1] or "", found[2], found[3]
    operands = [part.strip() for part in rest.split(",")] if rest else []
    base = name.split(".")[0]
    written = 0 if base in _STORES else 1
    if base in _SEVERAL:
        while written < len(operands) and re.fullmatch(r"U?P(\d|T)|R\d+", operands[written]) and written < 2:
            if operands[written].startswith(("R", "UR")) and operands[0][-1] != "T":
                break
            written += 1
    writes = [n for part in operands[:written] for n in _wide(part, name)]
    reads = [n for part in [*operands[written:], guard] for n in _wide(part, name)]
    if guard:
        reads += writes
    if base == "LDS":
        reads += ["shared", "barrier"]
    elif base == "LDG":
        reads.append("barrier")
    elif base == "STS":
        writes.append("shared")
        reads.append("barrier")
    elif base == "BAR":
        writes.append("barrier")
        reads += ["shared", "barrier"]
    # A lane goes on behind a branch when it is known where.
    reads.append("branch")
    if base in ("BRA", "CALL", "BSYNC"):
        writes.append("branch")
    return Instruction(name, tuple(writes), tuple(reads), tuple(operands))


def _wide(operand: str, name: str) -> list[str]:
    """The registers of an operand: two of an address, and as many as an instruction moves."""
    more = 2 if (".64" in operand or ".64" in name or ".WIDE" in name) else 4 if ".128" in name else 1
    found = list[str]()
    for one in _REGISTER.findall(operand):
        kind, number = re.fullmatch(r"(\D+)(\d+)", one).groups()  # pyright: ignore[reportOptionalMemberAccess]
        found += [f"{kind}{int(number) + k}" for k in range(more if kind.endswith("R") else 1)]
    return found


def _loops(lines: list[Instruction | str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """The first and the last line of each loop: a branch to a label before it."""
    found = []
    for n, line in enumerate(lines):
        if isinstance(line, Instruction) and line.name.startswith("BRA"):
            label = re.search(r"\.L_x_\d+", " ".join(line.operands))
            if label and labels.get(label[0], n + 1) < n:
                found.append((labels[label[0]], n))
    return found


def _unrolled(lines: list[Instruction | str], labels: dict[str, int], begin: int, end: int) -> list[Instruction]:
    """A step's instructions as they are run: those of loops inside as often as they are run."""
    inner = [loop for loop in _loops(lines, labels) if begin < loop[0] and loop[1] < end]
    found, n = list[Instruction](), begin
    while n <= end:
        loop = max((loop for loop in inner if loop[0] == n), key=lambda loop: loop[1], default=None)
        if loop is not None:
            found += _turns(lines, *loop) * [line for line in lines[loop[0] : loop[1]] if isinstance(line, Instruction)]
            n = loop[1]
        line = lines[n]
        if isinstance(line, Instruction):
            found.append(line)
        n += 1
    return found


def _turns(lines: list[Instruction | str], begin: int, end: int) -> int:
    """How often a loop runs whose counter is known before it; a lane's own elements are one turn."""
    inside = [line for line in lines[begin:end] if isinstance(line, Instruction)]
    for compare in inside:
        if not compare.name.startswith(("ISETP", "UISETP")) or len(compare.operands) < 4:
            continue
        counter, bound = compare.operands[2].split(".")[0], compare.operands[3]
        steps = [one for one in inside if one.name in ("IADD3", "UIADD3", "VIADD") and one.operands[0] == counter]
        numbers = [x for one in steps for x in one.operands if re.fullmatch(r"-?0x[0-9a-f]+", x)]
        before = [one for one in lines[:begin] if isinstance(one, Instruction) and counter in one.writes]
        if not numbers or not before or not re.fullmatch(r"-?0x[0-9a-f]+", bound):
            continue
        start = before[-1].operands[-1] if "RZ" not in before[-1].operands[-1:] else "0x0"
        if re.fullmatch(r"-?0x[0-9a-f]+", start):
            low, high = (x - 2**32 if x >= 2**31 else x for x in (int(start, 16), int(bound, 16)))
            return max(1, (high - low) // int(numbers[0], 16))
    return 1


def main() -> None:
    """Prints the table."""
    sizes = [tuple(map(int, size.split("x"))) for size in sys.argv[1:]] or [(4, 32), (32, 64), (32, 256)]
    for rows, features in sizes:
        for way, step in zip(("forward", "backward"), steps_on_device(rows, features), strict=True):
            for arch in ARCHITECTURES:
                chain = chain_of(disassembled(step, arch))
                print(f"LSTM {rows} x {features} {way} {arch}: {chain}")


if __name__ == "__main__":
    sys.exit(main())
