"""LLVM IR as text: values of a kind and a width, instructions, loops.

A `Value` is a scalar (width 1) or a vector. An index is an int that is known, or the name of an i64.
"""

import contextlib
import dataclasses
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tensorloop.compiler.lengths import Length, Size
from tensorloop.compiler.step import Unsupported

Index = Size | str

KINDS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.bfloat16: "bfloat",
    torch.float16: "half",
}
BITS = {"float": 32, "double": 64, "i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8, "i1": 1, "bfloat": 16, "half": 16}
FLOATS = ("float", "double", "half", "bfloat")


class Value(NamedTuple):
    """The result of an instruction, or a constant: its text, its kind, how many lanes."""

    text: str
    kind: str
    width: int = 1

    @property
    def type(self) -> str:
        """Returns the type as LLVM writes it."""
        return llvm_type(self.kind, self.width)

    @property
    def floating(self) -> bool:
        """Whether it is a float of any size."""
        return self.kind in FLOATS


def llvm_type(kind: str, width: int = 1) -> str:
    """A scalar or a vector of a kind; bfloat16 is only ever moved and cast, as bits: not every machine has it."""
    scalar = {"u8": "i8", "bfloat": "i16"}.get(kind, kind)
    return scalar if width == 1 else f"<{width} x {scalar}>"


def suffix_of(kind: str) -> str:
    """A kind in the name of an intrinsic."""
    return {"float": "f32", "double": "f64", "half": "f16", "bfloat": "i16", "u8": "i8"}.get(kind, kind)


def literal(kind: str, value: float) -> str:
    """A number as LLVM reads it: floats as the bits of a double, so that none is rounded twice."""
    if kind == "i1":
        return "true" if value else "false"
    if kind not in FLOATS:
        return str(int(value))
    try:
        exact = struct.unpack("f", struct.pack("f", value))[0] if kind == "float" else float(value)
    except OverflowError:
        exact = float("inf") if value > 0 else float("-inf")
    if kind in ("half", "bfloat"):
        raise TypeError("constants of 16 bits are made by a cast")
    return f"0x{struct.unpack('>Q', struct.pack('>d', exact))[0]:016X}"


@dataclasses.dataclass
class Phi:
    """A value with which a loop's turn begins; what the turn before gave is told when its end is written."""

    name: str
    type: str
    first: str
    before: str  # the block that enters the loop
    last: str = ""
    latch: str = ""  # the block that ends a turn

    def close(self, last: str, latch: str) -> None:
        """Says what the next turn begins with, and from which block it comes."""
        self.last, self.latch = last, latch

    def __str__(self) -> str:
        return f"  {self.name} = phi {self.type} [ {self.first}, %{self.before} ], [ {self.last}, %{self.latch} ]"


class OpenLoop:
    """An open loop: its index, the values carried into this turn, those for the next; `results` once it is closed."""

    def __init__(self, index: Index, values: "list[Value]") -> None:
        self.index, self.values, self.results = index, values, values

    def carry(self, values: "Sequence[Value]") -> None:
        """Sets the values that the next turn begins with."""
        self.results = list(values)


class Code:
    """A function's text as it grows."""

    def __init__(self) -> None:
        self.lines: list[str | Phi] = []
        self.declared: dict[str, str] = {}
        self.block = "entry"
        self.lengths: list[str] = []  # of arrays at this step, by symbol
        self._names = 0

    def name(self, prefix: str = "v") -> str:
        """Returns a name that nothing has yet."""
        self._names += 1
        return f"%{prefix}{self._names}"

    @property
    def text(self) -> list[str]:
        """The lines, when all loops are closed."""
        return [str(line) for line in self.lines]

    def phi(self, name: str, kind: str, first: str, before: str) -> Phi:
        """A value of a loop that has just begun, entered from the block `before`."""
        made = Phi(name, kind, first, before)
        self.lines.append(made)
        return made

    def line(self, text: str) -> None:
        """Writes an instruction without a result."""
        self.lines.append(f"  {text}")

    def op(self, text: str, kind: str, width: int = 1) -> Value:
        """Writes an instruction and returns its result."""
        name = self.name()
        self.lines.append(f"  {name} = {text}")
        return Value(name, kind, width)

    def label(self, name: str) -> None:
        """Begins a block."""
        self.lines.append(f"{name}:")
        self.block = name

    def constant(self, kind: str, value: float | Length, width: int = 1) -> Value:
        """Returns one number in every lane, or a length at this step."""
        if isinstance(value, Length):
            length = Value(str(self.sized(value)), "i64")
            how = "sitofp" if kind in FLOATS else "trunc"
            return self.splat(length if kind == "i64" else self.convert(how, length, kind), width)
        text = literal(kind, value)
        return Value(text if width == 1 else self._lanes(kind, [text] * width), kind, width)

    def _lanes(self, kind: str, texts: Sequence[str]) -> str:
        scalar = llvm_type(kind)
        return "<" + ", ".join(f"{scalar} {text}" for text in texts) + ">"

    def lanes(self, kind: str, values: Sequence[float]) -> Value:
        """A constant vector."""
        return Value(self._lanes(kind, [literal(kind, value) for value in values]), kind, len(values))

    def splat(self, value: Value, width: int) -> Value:
        """A scalar in every lane."""
        if width == 1 or value.width == width:
            return value
        vector = llvm_type(value.kind, width)
        one = self.op(f"insertelement {vector} poison, {value.type} {value.text}, i64 0", value.kind, width)
        zeros = "zeroinitializer"
        return self.op(
            f"shufflevector {vector} {one.text}, {vector} poison, <{width} x i32> {zeros}", value.kind, width
        )

    def extract(self, value: Value, lane: int) -> Value:
        """Returns one lane of a vector."""
        return self.op(f"extractelement {value.type} {value.text}, i64 {lane}", value.kind)

    def binary(self, name: str, a: Value, b: Value) -> Value:
        """An arithmetic instruction on two values of one type.

        No flag lets LLVM round another way than torch does, such as `contract`, by which a product and a sum are
        rounded once: x * c - (x * c).amax() is 0 in one place of each row, and a step may ask where. What is better
        rounded once says so itself, by `llvm.fma`.
        """
        return self.op(f"{name} {a.type} {a.text}, {b.text}", a.kind, a.width)

    def compare(self, how: str, a: Value, b: Value) -> Value:
        """Compares by `fcmp` or `icmp`, as the operands are: (lanes of) i1."""
        return self.op(f"{'fcmp' if a.floating else 'icmp'} {how} {a.type} {a.text}, {b.text}", "i1", a.width)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """Returns a where the condition holds, else b."""
        return self.op(
            f"select {condition.type} {condition.text}, {a.type} {a.text}, {b.type} {b.text}", a.kind, a.width
        )

    def convert(self, how: str, value: Value, kind: str) -> Value:
        """A cast instruction."""
        return self.op(f"{how} {value.type} {value.text} to {llvm_type(kind, value.width)}", kind, value.width)

    def call(self, name: str, *values: Value) -> Value:
        """An intrinsic of one type throughout, such as `llvm.fma`."""
        first = values[0]
        suffix = suffix_of(first.kind)
        full = f"{name}.{suffix if first.width == 1 else f'v{first.width}{suffix}'}"
        self.declare(full, first.type, [value.type for value in values])
        arguments = ", ".join(f"{value.type} {value.text}" for value in values)
        return self.op(f"call {first.type} @{full}({arguments})", first.kind, first.width)

    def declare(self, name: str, result: str, arguments: Sequence[str]) -> None:
        """An intrinsic's type, once a module."""
        self.declared[name] = f"declare {result} @{name}({', '.join(arguments)})"

    # indices

    def add(self, *terms: Index) -> Index:
        """Adds numbers; those that are known now are added now."""
        known: Index = sum(term for term in terms if not isinstance(term, str))
        total: Index | None = None
        for term in terms:
            if isinstance(term, str):
                total = term if total is None else self.op(f"add i64 {total}, {term}", "i64").text
        known = self.sized(known)
        if total is None:
            return known
        return total if not known else self.op(f"add i64 {total}, {known}", "i64").text

    def times(self, a: Index, b: Size) -> Index:
        """An index times a known number."""
        if not isinstance(a, str):
            return a * b
        return 0 if b == 0 else a if b == 1 else self.op(f"mul i64 {a}, {self.sized(b)}", "i64").text

    def sized(self, index: Index | Length) -> int | str:
        """An index as a number or a name: of a length, its value at this step."""
        if not isinstance(index, Length):
            return index
        if not self.lengths:
            raise Unsupported("the length of an array where it is not known")
        name = self.lengths[index.symbol]
        if index.scale != 1:
            name = self.op(f"mul i64 {name}, {index.scale}", "i64").text
        return name if not index.shift else self.op(f"add i64 {name}, {index.shift}", "i64").text

    def pointer(self, base: str, offset: Index) -> str:
        """Returns the address `offset` bytes behind a base."""
        offset = self.sized(offset)
        return base if offset == 0 else self.op(f"getelementptr i8, ptr {base}, i64 {offset}", "ptr").text

    # control

    @contextlib.contextmanager
    def loop(self, start: Index, stop: Index, step: int = 1, carried: Sequence[Value] = ()) -> Iterator[OpenLoop]:
        """for index in range(start, stop, step), with values carried from turn to turn.

        `stop - start` is a multiple of `step`. A loop of one turn is none.
        """
        start, stop = self.sized(start), self.sized(stop)
        known = isinstance(start, int) and isinstance(stop, int)
        if isinstance(start, int) and isinstance(stop, int) and stop - start == step:
            single = OpenLoop(start, list(carried))
            yield single
            return
        body, done, before = self.name("loop")[1:], self.name("done")[1:], self.block
        guarded = not known or int(stop) <= int(start)
        if guarded:
            some = self.op(f"icmp slt i64 {start}, {stop}", "i1")
            self.line(f"br i1 {some.text}, label %{body}, label %{done}")
        else:
            self.line(f"br label %{body}")
        self.label(body)
        index = self.name("i")
        values = [Value(self.name("c"), value.kind, value.width) for value in carried]
        turn = self.phi(index, "i64", str(start), before)
        phis = [self.phi(x.text, x.type, a.text, before) for x, a in zip(values, carried, strict=True)]
        opened = OpenLoop(index, values)
        yield opened
        following = self.op(f"add nsw i64 {index}, {step}", "i64").text
        latch = self.block
        more = self.op(f"icmp slt i64 {following}, {stop}", "i1")
        self.line(f"br i1 {more.text}, label %{body}, label %{done}")
        turn.close(following, latch)
        for phi, last in zip(phis, opened.results, strict=True):
            phi.close(last.text, latch)
        self.label(done)
        if guarded:
            opened.results = [
                self.op(f"phi {a.type} [ {a.text}, %{before} ], [ {b.text}, %{latch} ]", a.kind, a.width)
                for a, b in zip(carried, opened.results, strict=True)
            ]

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """A block that is entered where the condition (one i1) holds; it hands nothing out."""
        inside, after = self.name("then")[1:], self.name("after")[1:]
        self.line(f"br i1 {condition.text}, label %{inside}, label %{after}")
        self.label(inside)
        yield
        self.line(f"br label %{after}")
        self.label(after)
