"""What differs between devices: who a lane is, how lanes wait for each other and hand values on, a kernel's head.

`Nvptx` is NVIDIA's GPUs. `Coroutines` is this machine: each lane is a coroutine of LLVM, and a wait suspends it, so
that whoever resumes them chooses the order in which lanes go from one wait to the next.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from tensorloop.compiler.emitter.ir.code import Code, Value
from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.step import Unsupported

WARP = 32  # lanes that hand values on to each other
MOST_LANES = 1024  # of a group
# What LLVM has instructions for on every device; for others it looks for a library, and ends the process without one.
_KNOWN = {"fma", "fabs", "copysign", "sqrt", "floor", "ceil", "trunc", "roundeven", "fshl"}
MOST_ARGUMENTS = 500  # a kernel's have 4 KiB of room on every device


class Device(Protocol):
    """A device that text is written for: its lanes, groups and memory, and how barriers and shuffles are written.

    lane, group, scratch are names in its text: an i64, an i64, and the address of the group's scratch memory.
    """

    @property
    def lanes_a_group(self) -> int:
        """Returns how many lanes a group has; 0 where that is chosen for the step."""
        ...

    @property
    def groups(self) -> int:
        """Returns the most groups that rows are shared out among."""
        ...

    @property
    def local(self) -> int:
        """Returns the bytes of fast memory that a group may have for itself."""
        ...

    @property
    def machine(self) -> Machine:
        """Returns the machine that LLVM compiles for; values are one element wide."""
        ...

    def begin(self, code: Code, lanes: int, groups: int, scratch: int, local: bool) -> None:
        """Says who this lane is and where its group's scratch memory lies."""
        ...

    def wait(self, code: Code) -> None:
        """Makes all lanes of the group wait until each is here; what they wrote is then seen by all."""
        ...

    def shuffle(self, code: Code, value: Value, distance: int) -> Value:
        """The value of the lane whose number differs in one bit, `distance`; all lanes of a warp come here together."""
        ...

    def reciprocal(self, code: Code, value: Value) -> Value:
        """1 / value, which is a normal number or NaN: of a float to a unit in the last place, of a double 20 bits."""
        ...

    def fetch(self, code: Code, address: str) -> None:
        """Asks for the line of the device's memory around an address, which is read soon."""
        ...

    def own_scratch(self, lanes: int) -> int:
        """Returns the bytes of scratch memory that the device's own text needs."""
        ...

    def module(self, code: Code, arguments: Sequence[str], numbers: Sequence[str], lanes: int, local: bool) -> str:
        """Returns the module around a kernel's lines, which is given addresses and numbers."""
        ...


class OneWide(Machine):
    """A machine whose text has no vectors: its lanes are those of a group."""

    def lanes(self, dtypes: set[torch.dtype]) -> int:
        """Returns 1: a value is one element wide, whatever its dtype."""
        return 1


@dataclasses.dataclass(frozen=True)
class Nvptx:
    """A GPU of NVIDIA's.

    Args:
        arch: its architecture as LLVM calls it, such as sm_90.
        lanes_a_group: threads of a block; 0 where they are chosen for the step.
        groups: how many blocks rows are shared out among at most.
        local: bytes of shared memory a block may have.
        version: of PTX, such as 7.8; the lowest that LLVM has for the architecture if None.
    """

    arch: str
    lanes_a_group: int = 0
    groups: int = 128
    local: int = 48 * 1024
    version: str | None = None

    @property
    def machine(self) -> Machine:
        """Returns the machine that LLVM compiles for."""
        features = "" if self.version is None else f"+ptx{self.version.replace('.', '')}"
        return OneWide("nvptx64-nvidia-cuda", self.arch, features, 32, 32)

    def begin(self, code: Code, lanes: int, groups: int, scratch: int, local: bool) -> None:
        """Reads the numbers of the thread and the block."""
        for name, register, count in (("lane", "tid.x", lanes), ("group", "ctaid.x", groups)):
            code.declare(f"llvm.nvvm.read.ptx.sreg.{register}", "i32", [])
            code.line(f"%{name}.short = call range(i32 0, {count}) i32 @llvm.nvvm.read.ptx.sreg.{register}()")
            code.line(f"%{name} = zext nneg i32 %{name}.short to i64")
        if local:  # LLVM finds out by itself which addresses come from here, and reads and writes them as such
            code.line("%scratch = addrspacecast ptr addrspace(3) @shared to ptr")
        else:
            code.line(f"%scratch.at = mul i64 %group, {scratch}")
            code.line("%scratch = getelementptr i8, ptr %scratch.all, i64 %scratch.at")

    def wait(self, code: Code) -> None:
        """Writes a barrier of the block."""
        code.declare("llvm.nvvm.barrier.cta.sync.aligned.all", "void", ["i32"])
        code.line("call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)")

    def shuffle(self, code: Code, value: Value, distance: int) -> Value:
        """Shuffles by the warp's own instruction, which takes four bytes."""
        code.declare("llvm.nvvm.shfl.sync.bfly.i32", "i32", ["i32", "i32", "i32", "i32"])
        bits = {"float": 32, "double": 64, "half": 16, "bfloat": 16, "u8": 8}.get(value.kind) or int(value.kind[1:])
        text = value.text
        if value.floating and value.kind != "bfloat":
            text = code.op(f"bitcast {value.type} {text} to i{bits}", "i").text
        parts = []
        for n in range(max(1, bits // 32)):
            part = text if not n else code.op(f"lshr i{bits} {text}, {32 * n}", "i").text
            if bits != 32:
                part = code.op(f"{'zext' if bits < 32 else 'trunc'} i{bits} {part} to i32", "i").text
            given = f"i32 -1, i32 {part}, i32 {distance}, i32 {WARP - 1}"
            parts.append(code.op(f"call i32 @llvm.nvvm.shfl.sync.bfly.i32({given})", "i32").text)
        whole = parts[0]
        if bits < 32:
            whole = code.op(f"trunc i32 {whole} to i{bits}", "i").text
        elif bits > 32:
            low, high = (code.op(f"zext i32 {part} to i64", "i64").text for part in parts)
            whole = code.op(f"or i64 {code.op(f'shl i64 {high}, 32', 'i64').text}, {low}", "i64").text
        if value.floating and value.kind != "bfloat":
            return code.op(f"bitcast i{bits} {whole} to {value.type}", value.kind)
        return Value(whole, value.kind)

    def reciprocal(self, code: Code, value: Value) -> Value:
        """Takes the device's own approximation."""
        name = f"llvm.nvvm.rcp.approx.ftz.{value.type[0]}"
        code.declare(name, value.type, [value.type])
        return code.op(f"call {value.type} @{name}({value.type} {value.text})", value.kind)

    def fetch(self, code: Code, address: str) -> None:
        """Into the multiprocessor's first cache. LLVM's own function for it ends the process below sm_90."""
        there = code.op(f"addrspacecast ptr {address} to ptr addrspace(1)", "ptr").text
        code.line(f'call void asm sideeffect "prefetch.global.L1 [$0];", "l"(ptr addrspace(1) {there})')

    def own_scratch(self, lanes: int) -> int:
        """Returns 0: values go from register to register."""
        return 0

    def module(self, code: Code, arguments: Sequence[str], numbers: Sequence[str], lanes: int, local: bool) -> str:
        """Returns a module of one kernel, whose shared memory has the size that the launch says."""
        for name in code.declared:
            if name.startswith("llvm.") and name.split(".")[1] not in {*_KNOWN, "nvvm"}:
                raise Unsupported(f"{name}, which no device has")
        if any(" = frem " in text for text in code.text):
            raise Unsupported("a remainder that is not written out")
        given = [*_typed(arguments, numbers), *([] if local else ["ptr %scratch.all"])]
        # Without the number of threads the compiler allows for a block of 1,024, and so for 64 registers a thread.
        return "\n".join([
            f'target triple = "{self.machine.triple}"',
            *(["@shared = external addrspace(3) global [0 x i8], align 64"] if local else []),
            *sorted(code.declared.values()),
            f'define ptx_kernel void @run({", ".join(given)}) nounwind "nvvm.maxntid"="{lanes}" {{\nentry:',
            *code.text,
            "  ret void\n}",
            "!9 = !{}\n",
        ])  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WholeNvptx(Nvptx):
    """A GPU of NVIDIA's all of whose threads are one group, which never waits; it has no fast memory of its own."""

    local: int = 0

    def begin(self, code: Code, lanes: int, groups: int, scratch: int, local: bool) -> None:
        """Numbers the threads through all blocks: `groups` of `lanes`."""
        for name, register, count in (("thread", "tid.x", lanes), ("block", "ctaid.x", groups)):
            code.declare(f"llvm.nvvm.read.ptx.sreg.{register}", "i32", [])
            code.line(f"%{name}.short = call range(i32 0, {count}) i32 @llvm.nvvm.read.ptx.sreg.{register}()")
            code.line(f"%{name} = zext nneg i32 %{name}.short to i64")
        code.line(f"%before = mul nuw nsw i64 %block, {lanes}")
        code.line("%lane = add nuw nsw i64 %before, %thread")
        code.line("%scratch = getelementptr i8, ptr %scratch.all, i64 0")

    def wait(self, code: Code) -> None:
        """Raises: a kernel ends instead."""
        raise AssertionError("blocks do not wait for each other")


@dataclasses.dataclass(frozen=True)
class Coroutines:
    """This machine's processor, with each lane as a coroutine that goes on when it is resumed.

    Args:
        here: the processor.
        lanes_a_group, groups, local: as of `Nvptx`.
    """

    here: Machine
    lanes_a_group: int = 32
    groups: int = 1
    local: int = 48 * 1024

    @property
    def machine(self) -> Machine:
        """Returns the machine that LLVM compiles for."""
        return OneWide(self.here.triple, self.here.cpu, self.here.features, 32, 32)

    def begin(self, code: Code, lanes: int, groups: int, scratch: int, local: bool) -> None:
        """Makes the coroutine; who it is, and where its scratch lies, are arguments."""
        code.line("%id = call token @llvm.coro.id(i32 0, ptr null, ptr null, ptr null)")
        code.line("%size = call i64 @llvm.coro.size.i64()")
        code.line("%frame = call ptr @malloc(i64 %size)")
        code.line("%handle = call ptr @llvm.coro.begin(token %id, ptr %frame)")
        code.line(f"%slots = getelementptr i8, ptr %scratch, i64 {scratch - self.own_scratch(lanes)}")

    def wait(self, code: Code) -> None:
        """Suspends the coroutine."""
        after, state = code.name("resumed")[1:], code.name("state")
        code.line(f"{state} = call i8 @llvm.coro.suspend(token none, i1 false)")
        code.line(f"switch i8 {state}, label %suspended [ i8 0, label %{after} i8 1, label %cleanup ]")
        code.label(after)

    def shuffle(self, code: Code, value: Value, distance: int) -> Value:
        """Shuffles through memory that no other text uses: all lanes write, and when they have, read."""
        if value.kind == "i1":  # memory has bytes
            return code.convert("trunc", self.shuffle(code, code.convert("zext", value, "i8"), distance), "i1")
        own = code.pointer("%slots", code.times("%lane", 8))
        code.line(f"store {value.type} {value.text}, ptr {own}, align 8")
        self.wait(code)
        other = code.op(f"xor i64 %lane, {distance}", "i64").text
        made = code.op(f"load {value.type}, ptr {code.pointer('%slots', code.times(other, 8))}, align 8", value.kind)
        self.wait(code)
        return made

    def reciprocal(self, code: Code, value: Value) -> Value:
        """Divides, and forgets what an approximation does not say: the last bit, of a double 32."""
        kind, lost = ("i32", 1) if value.kind == "float" else ("i64", 32)
        one = code.constant(value.kind, 1)
        bits = code.op(f"bitcast {value.type} {code.binary('fdiv', one, value).text} to {kind}", kind).text
        bits = code.op(f"and {kind} {bits}, {-(1 << lost)}", kind).text
        return code.op(f"bitcast {kind} {bits} to {value.type}", value.kind)

    def fetch(self, code: Code, address: str) -> None:
        """Reads a byte, so that guarded text finds an address outside of what is there."""
        code.op(f"load i8, ptr {address}, align 1", "i8")

    def own_scratch(self, lanes: int) -> int:
        """Returns eight bytes for each lane, through which values are shuffled."""
        return 8 * lanes

    def module(self, code: Code, arguments: Sequence[str], numbers: Sequence[str], lanes: int, local: bool) -> str:
        """Returns a module with a coroutine, and what resumes and ends one."""
        given = [*_typed(arguments, numbers), "ptr %scratch", "i64 %lane", "i64 %group"]
        return "\n".join([
            f'target triple = "{self.machine.triple}"',
            *sorted(code.declared.values()),
            f"define ptr @run({', '.join(given)}) presplitcoroutine nounwind {{\nentry:",
            *code.text,
            _COROUTINE,
        ])  # fmt: skip


def _typed(arguments: Sequence[str], numbers: Sequence[str]) -> list[str]:
    return [*(f"ptr {name}" for name in arguments), *(f"i64 {name}" for name in numbers)]


_COROUTINE = """  %state.last = call i8 @llvm.coro.suspend(token none, i1 true)
  switch i8 %state.last, label %suspended [ i8 0, label %never i8 1, label %cleanup ]
never:
  unreachable
cleanup:
  %memory = call ptr @llvm.coro.free(token %id, ptr %handle)
  call void @free(ptr %memory)
  br label %suspended
suspended:
  call void @llvm.coro.end(ptr %handle, i1 false, token none)
  ret ptr %handle
}
define void @resume(ptr %handle) {
  call void @llvm.coro.resume(ptr %handle)
  ret void
}
define void @destroy(ptr %handle) {
  call void @llvm.coro.destroy(ptr %handle)
  ret void
}
define i64 @done(ptr %handle) {
  %over = call i1 @llvm.coro.done(ptr %handle)
  %word = zext i1 %over to i64
  ret i64 %word
}
declare token @llvm.coro.id(i32, ptr, ptr, ptr)
declare i64 @llvm.coro.size.i64()
declare ptr @llvm.coro.begin(token, ptr)
declare i8 @llvm.coro.suspend(token, i1)
declare ptr @llvm.coro.free(token, ptr)
declare void @llvm.coro.end(ptr, i1, token)
declare void @llvm.coro.resume(ptr)
declare void @llvm.coro.destroy(ptr)
declare i1 @llvm.coro.done(ptr)
declare ptr @malloc(i64)
declare void @free(ptr)
!9 = !{}
"""
