"""Checks of single instructions of a guarded text: each touches its bytes, no more and no fewer."""

import ctypes

import pytest
import torch

from tensorloop.compiler.targets.cpu import guard_text, guarded
from tensorloop.compiler.targets.cpu.compile import compiled
from tensorloop.compiler.targets.cpu.guard_memory import GUARD, PATTERN, Arena, GuardedBlock
from tensorloop.compiler.targets.cpu.host import host

VECTOR = "<4 x float> <float 1.0, float 2.0, float 3.0, float 4.0>"
MASK = "<4 x i1> <i1 true, i1 false, i1 true, i1 false>"
POINTERS = "  %ps = getelementptr i8, ptr %p, <4 x i64> <i64 0, i64 64, i64 4, i64 64>\n"
LINES = {  # a line, the bytes that it touches, whether it writes
    "load": ("%x = load double, ptr %p, align 8", 8, False),
    "load of a vector": ("%x = load <4 x float>, ptr %p, align 4", 16, False),
    "load of an address": ("%x = load ptr, ptr %p, align 8", 8, False),
    "load of an atom": ("%x = load atomic i64, ptr %p acquire, align 8", 8, False),
    "store": ("store i8 1, ptr %p, align 1", 1, True),
    "store of a vector": (f"store {VECTOR}, ptr %p, align 4", 16, True),
    "store of an atom": ("store atomic i64 0, ptr %p monotonic, align 8", 8, True),
    "addition": ("%x = atomicrmw add ptr %p, i64 1 seq_cst", 8, True),
    "masked load": (
        f"%x = call <4 x float> @llvm.masked.load.v4f32.p0(ptr %p, i32 4, {MASK}, <4 x float> zeroinitializer)",
        12,
        False,
    ),
    "masked store": (f"call void @llvm.masked.store.v4f32.p0({VECTOR}, ptr %p, i32 4, {MASK})", 12, True),
    "gather": (
        "%x = call <4 x half> @llvm.masked.gather.v4f16.v4p0"
        f"(<4 x ptr> %ps, i32 2, {MASK}, <4 x half> zeroinitializer)",
        6,
        False,
    ),
    "scatter": (f"call void @llvm.masked.scatter.v4f32.v4p0({VECTOR}, <4 x ptr> %ps, i32 4, {MASK})", 8, True),
}
DECLARED = """declare <4 x float> @llvm.masked.load.v4f32.p0(ptr, i32, <4 x i1>, <4 x float>)
declare void @llvm.masked.store.v4f32.p0(<4 x float>, ptr, i32, <4 x i1>)
declare <4 x half> @llvm.masked.gather.v4f16.v4p0(<4 x ptr>, i32, <4 x i1>, <4 x half>)
declare void @llvm.masked.scatter.v4f32.v4p0(<4 x float>, <4 x ptr>, i32, <4 x i1>)
define void @prepare(ptr %p) nounwind {
entry:
  ret void
}
define void @run(ptr %p, i64 %steps, i64 %low, i64 %high, ptr %scratch, i64 %part) nounwind {
entry:
"""


@pytest.mark.parametrize("name", LINES)
def test_an_instruction_touches_what_it_touches(name: str) -> None:
    line, size, writes = LINES[name]
    end = "\n  ret void\n}\n"
    text = f"{DECLARED}{POINTERS}  {line}{end}define void @member(ptr %job) nounwind {{\nentry:{end}"
    loaded = guarded._Loaded(compiled(guard_text.checked(text, "nounwind"), host()), host())

    def said(allowed: int, at: int, may: bool = True) -> str | None:
        arena = Arena()
        piece = arena.add("it", allowed, may)
        arena.open()
        block = GuardedBlock(arena, 0)
        loaded.guard(block.address)
        loaded.run(arena.address(piece) + at, 1, 0, 0, None, 0)
        return block.found(text.splitlines())

    verb = "writes" if writes else "reads"
    assert said(size, 0) is None
    assert (said(size, 0, False) is None) == (not writes)
    for allowed, at in ((size - 1, 0), (size, -8), (size, 8 * size), (0, 0)):
        found = said(allowed, at)
        assert found is not None
        assert found.startswith(verb)
        assert found.partition(": ")[2].startswith(line)


def test_where_an_address_is() -> None:
    arena = Arena()
    first, second = arena.add("first", 10, True), arena.add("second", 100, False, 24)
    arena.open()
    a, b = arena.address(first), arena.address(second)
    assert (a % 64, b % 64) == (0, 24)
    assert b - a - 10 >= GUARD
    assert arena.near(a - 12, 4) == "12 bytes before the begin of first"
    assert arena.near(a + 10, 4) == "0 bytes behind the end of first"
    assert arena.near(a + 8, 4) == "over the end of first"
    assert arena.near(b - 2, 4) == "over the begin of second"
    assert arena.near(b + 4, 4) == "4 bytes behind the begin of second, which is only read"
    assert arena.near(a - 10**6, 4) == "far from all that it was given"
    assert arena.broken() is None
    ctypes.memset(a, 0, 10)
    assert arena.broken() is None
    ctypes.memset(b + 103, 0, 1)
    assert arena.broken() == "changes memory 3 bytes behind the end of second"


def test_the_pattern_is_no_number_and_no_index() -> None:
    held = bytearray(PATTERN * 8)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert torch.frombuffer(held, dtype=dtype).isnan().all()
    assert torch.frombuffer(held, dtype=torch.int64).min() > 1 << 60
    assert torch.frombuffer(held, dtype=torch.int32).min() > 1 << 30
