"""Widths of vectors: those that this machine can run are run, the others are compiled."""

import dataclasses
import re

import pytest
import torch

from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.targets.cpu import compile, emit
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.cpu.native_core import text_of
from tensorloop.compiler.targets.cpu.object_cache import Folder
from tests.support.recurrences import assert_same, recurrence
from tests.support.recurrent_cells import CELLS, inputs

OTHERS = {
    "neon": Machine("aarch64-unknown-linux-gnu", "generic", "+neon", 128, 32),
    "apple": Machine("arm64-apple-darwin", "apple-m1", "+neon", 128, 32),
    "avx2": Machine("x86_64-unknown-linux-gnu", "haswell", "+avx2,+fma", 256, 16),
    "avx512": Machine(
        "x86_64-unknown-linux-gnu", "skylake-avx512", "+avx512f,+avx512vl,+avx512dq,+avx512bw,+fma", 512, 32
    ),
}
STARTS = {"neon": b"\x7fELF", "apple": b"\xcf\xfa\xed\xfe\x0c\0\0\1", "avx2": b"\x7fELF", "avx512": b"\x7fELF"}
MACHINES = {"neon": b"\xb7\0", "avx2": b"\x3e\0", "avx512": b"\x3e\0"}  # in ELF's header
OUTSIDE = (b"exp", b"log", b"tanh", b"fma", b"sqrt", b"floor", b"memcpy", b"memset", b"__ext", b"__trunc")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.getbasetemp() / "cache")


@pytest.mark.parametrize(("bits", "dtype"), [(128, torch.float32), (256, torch.float64), (512, torch.float32)])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.few
def test_every_width_gives_the_same(name: str, bits: int, dtype: torch.dtype, folder: Folder) -> None:
    cell, here = CELLS[name], host()
    given = inputs(cell, 3, 5, 21, dtype)
    rec = recurrence(cell.step, *given, reverse=cell.reverse)
    core = emit(rec, folder=folder, target=dataclasses.replace(here, bits=bits, registers=32 if bits == 512 else 16))
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    assert_same(core, rec, 3, *given, **tolerance)


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("name", ["lstm backward", "layer norm", "viterbi", "kutta", "adam"])
def test_other_machines_code_needs_nothing_from_outside(name: str, target: str) -> None:
    cell = CELLS[name]
    given = inputs(cell, 3, 5, 21, torch.float32)
    _, text = text_of(recurrence(cell.step, *given, reverse=cell.reverse), OTHERS[target])
    widths = {int(n) for n in re.findall(r"<(\d+) x float>", text.module)}
    assert max(widths) == OTHERS[target].bits // 32
    code = compile.compiled(text.module, OTHERS[target])
    assert code[: len(STARTS[target])] == STARTS[target]
    assert code[18:20] == MACHINES.get(target, code[18:20])
    assert b"run" in code
    assert not [name for name in OUTSIDE if name in code]
