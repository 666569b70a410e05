"""A step's graph made kernels: what every operation is built from, and the walk over the nodes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop.compiler.emitter.ir.code import KINDS, Value
from tensorloop.compiler.emitter.ir.kernels import Gather, Kernel, Matmul, Point, Reduce
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region, broadcast, contiguous, dense
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.emitter.lower import calling, growing
from tensorloop.compiler.lengths import Length, Size, grows, meets_growing, shape_of
from tensorloop.compiler.operations import is_part
from tensorloop.compiler.place import HOST
from tensorloop.compiler.step import Step, Unsupported

Elementwise = Callable[..., Value]
Handler = Callable[..., Any]
HALVES = (torch.bfloat16, torch.float16)
_META = torch.device("meta")  # of what is as long as an array: it has no memory while it is traced


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Two-byte floats are computed in float32 and rounded after every operation, as torch does."""
    return torch.float32 if dtype in HALVES else dtype


def copied(math: Math, value: Value) -> Value:
    """Returns the value as it is: the function of a kernel that copies."""
    return value


class Lowering:
    """Kernels as they are made, and the buffers between them."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.constants: list[Tensor] = []
        self.called: list[fx.Node] = []  # what torch does
        self.values: dict[fx.Node, Any] = {}
        self.written: set[fx.Node] = set()  # nodes that are an array of the carry, changed in place

    # buffers

    def new(self, shape: Sequence[Size], dtype: torch.dtype) -> Array:
        """Returns new scratch memory."""
        if dtype not in KINDS:
            raise Unsupported(f"elements of {dtype}")
        if grows(shape):
            return growing.scratch(shape, dtype)
        return contiguous(Region("scratch", 0, math.prod(shape), dtype), shape)

    def number(self, value: Any, dtype: torch.dtype) -> Array:
        """Returns one number as an array without memory."""
        return Array(Region("value", 0, 1, dtype, value), (), ())

    def constant(self, tensor: Tensor) -> Array:
        """A tensor that is known now."""
        if tensor.numel() == 1 and tensor.dtype in KINDS and not tensor.is_complex():
            one = self.number(tensor.item(), tensor.dtype)
            return Array(one.buffer, tuple(tensor.shape), (0,) * tensor.dim())
        tensor = tensor.detach().contiguous()
        self.constants.append(tensor)
        buffer = Region("constant", len(self.constants) - 1, tensor.numel(), tensor.dtype)
        return contiguous(buffer, tensor.shape)

    def array(self, value: Any, dtype: torch.dtype) -> Array:
        """An argument that may be a number."""
        return value if isinstance(value, Array) else self.number(value, dtype)

    # kernels

    def point(
        self,
        name: str,
        function: Elementwise,
        ins: Sequence[Array],
        dtype: torch.dtype,
        shape: Sequence[Size] | None = None,
        out: Array | None = None,
        piece: object = None,
    ) -> Array:
        """An elementwise kernel over arrays that broadcast together; gives its output."""
        if shape is None:
            shape = out.shape if out is not None else broadcast(*(one.shape for one in ins))
        if out is None:
            out = self.new(shape, dtype)
        if out.numel:
            kept = tuple(one.expand(shape) for one in ins)
            self.kernels.append(Point(name, function, tuple(map(_squeezed(shape), kept)), out.squeeze(), piece))
        return out

    def compute(
        self,
        name: str,
        function: Elementwise,
        ins: Sequence[Any],
        dtype: torch.dtype,
        shape: Any = None,
        out: Array | None = None,
    ) -> Array:
        """An elementwise kernel whose operands are cast to the output's dtype before it computes."""
        inner = computed_in(dtype)
        kind, last = KINDS[inner], KINDS[dtype]

        def cast(math: Math, *values: Value) -> Value:
            return math.cast(function(math, *(math.cast(value, kind) for value in values)), last)

        return self.point(name, cast, [self.array(one, inner) for one in ins], dtype, shape, out)

    def cast(self, array: Array, dtype: torch.dtype) -> Array:
        """A copy in another dtype; the array itself where it has that."""
        if array.dtype == dtype:
            return array
        kind, half = KINDS[dtype], "float" if computed_in(dtype) != dtype else None

        def cast(math: Math, value: Value) -> Value:
            return math.cast(math.cast(value, half) if half and value.kind not in ("double",) else value, kind)

        return self.point("cast", cast, [array], dtype, array.shape)

    def met(self, value: Any, dtype: torch.dtype) -> Any:
        """An operand as torch takes it: beside two-byte floats a number is rounded to their dtype first."""
        if dtype not in HALVES or isinstance(value, Length):
            return value
        if isinstance(value, Array):
            return self.cast(value, dtype)
        return torch.tensor(value, dtype=dtype).item()

    def factor(self, value: Any, dtype: torch.dtype) -> Any:
        """The second operand of a product or a quotient, where torch leaves one number as exact as float32 is."""
        return self.met(value, dtype) if isinstance(value, Array) and value.numel != 1 else value

    def copy(self, array: Array, out: Array, piece: object = None) -> Array:
        """Copies the elements of an array into `out`, in its dtype."""
        kind = KINDS[out.dtype]
        function = copied if array.dtype == out.dtype else lambda math, value: math.cast(value, kind)
        return self.point("copy", function, [array], out.dtype, out=out, piece=piece)

    def dense(self, array: Array) -> Array:
        """Returns the array in order in memory: itself, or a copy."""
        if grows(array.shape) and grows(dense(array.shape)):
            raise Unsupported("a size that changes from step to step lies within another")
        if array.buffer.kind != "value" and array.strides == dense(array.shape, array.strides):
            return array
        return self.copy(array, self.new(array.shape, array.dtype))

    def view(self, array: Array, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A view, of a copy where strides cannot say it."""
        if min(array.strides, default=0) < 0:
            array = self.dense(array)
        try:
            return array.view(function, *args, **kwargs)
        except (RuntimeError, ValueError):
            return self.dense(array).view(function, *args, **kwargs)

    def reshape(self, array: Array, shape: Sequence[Size]) -> Array:
        """A view of another shape, or of a copy where strides cannot say it."""
        return self.view(array, Tensor.view, tuple(shape))

    def reduce(
        self, how: str, array: Array, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None
    ) -> Array:
        """sum, prod, amax, amin, argmax, argmin, any, all over dims; of no elements, what it begins with."""
        rank = len(array.shape)
        over = sorted({dim % rank for dim in dims}) if rank else []
        dtype = dtype or (
            torch.bool if how in ("any", "all") else torch.int64 if how.startswith("arg") else array.dtype
        )
        kept = tuple(1 if n in over else size for n, size in enumerate(array.shape))
        out = self.new(kept, dtype)
        if out.numel and array.numel == out.numel:  # nothing to take together
            source = self.number(0, dtype).expand(kept) if how.startswith("arg") else array
            self.copy(source, out)
        elif out.numel and array.numel:
            strides = tuple(0 if n in over else stride for n, stride in enumerate(out.strides))
            left = [n for n, size in enumerate(array.shape) if size != 1]
            target = Array(out.buffer, array.shape, strides)
            walked = tuple(left.index(n) for n in over if n in left)
            source = array if how.startswith("arg") else self.cast(array, computed_in(dtype))
            self.kernels.append(Reduce(how, source.squeeze(), walked, target.squeeze()))
        elif out.numel:
            self.copy(self.number({"prod": 1, "all": True}.get(how, 0), dtype), out)
        if keepdim:
            return out
        left = [n for n in range(rank) if n not in over]
        return Array(out.buffer, tuple(kept[n] for n in left), tuple(out.strides[n] for n in left))

    def gather(
        self,
        source: Array,
        dims: Sequence[int],
        indices: Sequence[Array],
        shape: Sequence[Size],
        free: Array,
        wraps: bool = False,
    ) -> Array:
        """source at indices: `free` is source broadcast to `shape` with stride 0 at what `indices` choose."""
        if source.buffer.value is not None:
            return self.number(source.buffer.value, source.dtype).expand(shape)
        out = self.new(shape, source.dtype)
        if out.numel:
            steps, sizes = tuple(source.strides[d] for d in dims), tuple(source.shape[d] for d in dims)
            if not all(sizes):
                raise Unsupported("an index into a dim of no elements")
            clean = _squeezed(shape)
            chosen = tuple(clean(one.expand(shape)) for one in indices)
            self.kernels.append(Gather(clean(free), chosen, steps, sizes, out.squeeze(), wraps=wraps))
        return out

    def matmul(self, a: Array, b: Array) -> Array:
        """(*batch, M, K) @ (*batch, K, N), batch dims broadcast before."""
        if computed_in(a.dtype) is not a.dtype:
            return self.cast(self.matmul(self.cast(a, torch.float32), self.cast(b, torch.float32)), a.dtype)
        batch, m, k, n = a.shape[:-2], a.shape[-2], a.shape[-1], b.shape[-1]
        if grows(a.shape) or grows(b.shape):
            return growing.product(self, a, b)
        out = self.new((*batch, m, n), a.dtype)
        if out.numel and not k:
            return self.copy(self.number(0, a.dtype), out)
        if out.numel:
            a, b = (self.placed(one) for one in (a, b))
            self.kernels.append(Matmul(a, b, out))
        return out

    def placed(self, array: Array) -> Array:
        """An operand of what is a function of its own: in memory, at a place that stays."""
        if isinstance(array.offset, Length):
            return self.copy(array, self.new(array.shape, array.dtype))
        return self.dense(array) if array.buffer.kind == "value" else array

    # nodes

    def run(self, nodes: Sequence[fx.Node], handlers: dict[str, Handler]) -> None:
        """Lowers every call in order, each by its operation's handler."""
        for node in nodes:
            if node.op != "call_function":
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: self.values[one])  # pyright: ignore
            name, made = _name(node), len(self.kernels)
            try:
                self.values[node] = self._lowered(node, name, handlers, args, kwargs)
            except Unsupported as refusal:
                if calling.may_call(node):
                    del self.kernels[made:]  # what it had begun
                    self.values[node] = calling.call_out(self, node)
                    continue
                whole = node.meta.get("part_of", node)
                raise Unsupported(f"{name}: {refusal.reason}", refusal.node or whole) from None

    def _lowered(self, node: fx.Node, name: str, handlers: dict[str, Handler], args: Any, kwargs: Any) -> Any:
        """Lowers one call and returns its result: an array, or several."""
        if node.meta.get("called"):
            return calling.call_out(self, node)
        if is_part(node):
            return args[0][args[1]]
        if calling.is_foreign(node) and calling.may_call(node):
            return calling.between_calls(self, node, name, args)
        _known_elements(node)
        if meets_growing(node):
            return growing.apart(self, growing.lower(Call(self, node, name), handlers, args, kwargs))
        if name not in handlers:
            raise Unsupported("not known, and torch does not take it apart")
        return handlers[name](Call(self, node, name), *args, **kwargs)


class Call:
    """A node being lowered: the lowering, its operation's name, and what is known of its result."""

    def __init__(self, low: Lowering, node: fx.Node, name: str) -> None:
        self.low, self.node, self.name, self.value = low, node, name, node.meta["val"]

    @property
    def dtype(self) -> torch.dtype:
        """Returns the result's dtype."""
        return self.value.dtype

    @property
    def shape(self) -> tuple[Size, ...]:
        """Returns the result's shape."""
        return shape_of(self.node)


def _name(node: fx.Node) -> str:
    """`add` of aten.add.Tensor; a name of another library with its namespace."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


def _known_elements(node: fx.Node) -> None:
    value = node.meta.get("val")
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, Tensor) and one.dtype not in KINDS:
            raise Unsupported(f"elements of {one.dtype}")
        if isinstance(one, Tensor) and one.device not in (HOST, _META):
            raise Unsupported(f"a tensor on {one.device}")


def _squeezed(shape: Sequence[Size]) -> Callable[[Array], Array]:
    """Drops the dims that are 1 in `shape` from arrays of this shape."""
    kept = [n for n, size in enumerate(shape) if size != 1]
    return lambda one: Array(
        one.buffer, tuple(one.shape[n] for n in kept), tuple(one.strides[n] for n in kept), one.offset
    )


def lower(step: Step, handlers: dict[str, Handler]) -> "LoweredStep":
    """Lowers a step: its nodes, then the copies into memory that outlives it."""
    low = Lowering()
    low.written = growing.written(step)
    for kind, nodes in (
        ("invariant", step.invariants),
        ("sequence", step.sequences),
        ("carry", step.carry),
    ):
        for n, node in enumerate(nodes):
            low.values[node] = _placed(kind, n, node)
    low.run(growing.scheduled(step) if low.written else list(step.graph.nodes), handlers)
    return LoweredStep(low, step)


def _placed(kind: str, index: int, node: fx.Node) -> Array:
    value = node.meta["val"]
    if value.device not in (HOST, _META):
        raise Unsupported(f"a tensor on {value.device}", node)
    shape = shape_of(node)
    if grows(shape):
        growing.check_elements(value.dtype)
        kind = {"carry": "array", "sequence": "prefix"}[kind]
    dtype, count = calling.in_memory_as(value.dtype)
    buffer = Region(kind, index, math.prod(shape) * count, dtype)
    if kind == "invariant":
        return calling.laid_out(buffer, value)
    return contiguous(buffer, shape if count == 1 else (*shape, count))


def _may_move(array: Array) -> bool:
    """Whether an array may lie in another place at each step: it is scratch that nobody else looks at."""
    return array.buffer.kind == "scratch" and array.whole and not array.buffer.stays


class LoweredStep:
    """A step as kernels: the array that each role of `source` has, its constants, where the next carry will lie."""

    def __init__(self, low: Lowering, step: Step) -> None:
        self.source, self.kernels, self.constants, self.called = step, low.kernels, low.constants, low.called
        self.invariants = [low.values[node] for node in step.invariants]
        self.carry = [low.values[node] for node in step.carry]
        self.sequences = [low.values[node] for node in step.sequences]
        for node in (*step.outs, *step.next_carry, *step.sums):
            if not isinstance(low.values[node], Array):
                raise Unsupported("several tensors at once as one out", node)
        self.outs = [self._out(low, n, node) for n, node in enumerate(step.outs)]
        self.next = [self._next(low, n, node) for n, node in enumerate(step.next_carry)]
        self.sums = [self._sum(low, n, node) for n, node in enumerate(step.sums)]
        going = step.going
        self.going = None if going is None else low.dense(low.values[going])

    def _out(self, low: Lowering, index: int, node: fx.Node) -> Array:
        value = low.values[node]
        if _may_move(value):
            value.buffer.kind, value.buffer.index = "out", index
            return value
        return low.copy(value, contiguous(Region("out", index, value.numel, value.dtype), value.shape))

    def _next(self, low: Lowering, index: int, node: fx.Node) -> Array:
        """The next carry: an out that holds it already, or one of two buffers that take turns from step to step."""
        value = low.values[node]
        if self.carry[index].buffer.kind == "array":
            return growing.following(value, self.carry[index], node)
        if _may_move(value):
            value.buffer.kind, value.buffer.index = "next", index
        if (value.whole and value.buffer.kind == "out") or (value.buffer.kind, value.buffer.index) == ("next", index):
            return value
        return low.copy(value, contiguous(Region("next", index, value.numel, value.dtype), value.shape))

    def _sum(self, low: Lowering, index: int, node: fx.Node) -> Array:
        value = low.values[node]
        total = contiguous(Region("sum", index, value.numel, value.dtype), value.shape)
        kind, inner = KINDS[value.dtype], KINDS[computed_in(value.dtype)]

        def add(math: Math, a: Value, b: Value) -> Value:
            return math.cast(math.add(math.cast(a, inner), math.cast(b, inner)), kind)

        return low.point("add", add, [total, value], value.dtype, out=total)
