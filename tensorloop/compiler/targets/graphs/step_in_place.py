"""Steps with arrays in the carry, as a graph of fixed sizes and addresses can hold them.

An array lies in memory of so many slots, of which the first ones are filled. How many that are is a number on the
device, carried like any tensor: slots are read and written at places that are counted from it, in place. What is as
long as an array has room for all slots, the first ones are its values and the others nobody's; what would mix them in,
a sum or a product, is given zeros there. What none of these rules covers is `Unsupported`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop.compiler.edge_walks import needed_for
from tensorloop.compiler.emitter.lower.growing import scheduled, written
from tensorloop.compiler.lengths import (
    Length,
    Size,
    grows,
    has_length,
    meets_growing,
    shape_of,
)
from tensorloop.compiler.operations import (
    asks_for_infinity,
    aten,
    is_discontinuous,
    is_pointwise,
    value_of,
)
from tensorloop.compiler.place import put_on
from tensorloop.compiler.step import Step, Unsupported
from tensorloop.compiler.targets.graphs.slot_room import in_slots

_ROUNDED = {"sum", "mm", "bmm"}  # otherwise in tensors of other sizes
_INT_TRAPS = {"remainder", "fmod", "div", "floor_divide"}  # by zero, which a slot that is nobody's may hold


@dataclasses.dataclass(frozen=True)
class PutOff:
    """Zeros as long as an array, and what is added to them: from a slot on, at indices, or (None) to all."""

    node: fx.Node
    parts: tuple["Summand", ...] = ()


class Summand(NamedTuple):
    """A value that is added to zeros: so many `rows` from a slot on."""

    value: fx.Node
    at: Size | fx.Node | None = None
    rows: int = 0


class InPlace:
    """A step whose arrays lie in memory of `slots` slots, by symbol of their length.

    `module` is called with invariants, arrays that are read, slices of sequences, the carry, lengths, in this order. It
    gives what the step gives; of the carry, the arrays are the memory itself, and the new lengths come after it.
    """

    def __init__(self, step: Step, slots: Sequence[int]) -> None:
        self.step, self._slots = step, slots
        self.versions = written(step)
        self.graph = fx.Graph()
        self._numbers: dict[Any, Any] = {}
        self._new: dict[fx.Node, Any] = {}
        read = [n for n in step.sequences if grows(n)]
        rows = [n for n in step.sequences if not grows(n)]
        for n in (*step.invariants, *read, *rows, *step.carry):
            self._new[n] = self.graph.placeholder(n.name)
        self._lengths = [self.graph.placeholder(f"length_{k}") for k in range(len(step.growth))]
        for n in scheduled(step):
            if n.op == "call_function":
                self._new[n] = self._value(n)
        self.graph.output(self._outputs())
        put_on(self.graph, step.place.device)
        self.module = fx.GraphModule(torch.nn.Module(), self.graph)

    def _outputs(self) -> tuple[Any, ...]:
        step = self.step
        for array, last in zip(step.carry, step.next_carry, strict=True):
            if grows(array) and last not in self.versions:
                raise Unsupported("an array in the carry is replaced by another value", last)
        lengths = [
            self.call(aten.add.Tensor, x, n) if n else x for x, n in zip(self._lengths, step.growth, strict=True)
        ]
        rest = step.outputs[len(step.next_carry) :]
        return *map(self.of, step.next_carry), *lengths, *map(self.of, rest)

    # ---- values

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds an operation to the graph."""
        return self.graph.call_function(target, args, kwargs)

    def of(self, x: Any) -> Any:
        """Returns what stands for an argument of the step's graph: zeros that were put off are made."""
        found = fx.map_arg(x, lambda n: self._made(self._new[n]))
        return self.sized(found)

    def sized(self, x: Any) -> Any:
        """Sizes as they are in memory."""
        if isinstance(x, (list, tuple)):
            return type(x)(map(self.sized, x))
        return in_slots([x], self._slots)[0]

    def number(self, size: Size | Length) -> Any:
        """A size, or a place, as it is in this step: a number on the device where it follows a length."""
        if not isinstance(size, Length):
            return size
        if size not in self._numbers:
            found = self._lengths[size.symbol]
            found = found if size.scale == 1 else self.call(aten.mul.Tensor, found, size.scale)
            self._numbers[size] = self.call(aten.add.Tensor, found, size.shift) if size.shift else found
        return self._numbers[size]

    def places(self, start: Size, count: int, step: int = 1) -> fx.Node:
        """Returns the numbers of so many places, one after the other."""
        key = "places", start, count, step
        if key not in self._numbers:
            found = self.call(
                aten.arange.start_step, 0, count * step, step, dtype=torch.int64, device=torch.device("cpu")
            )
            self._numbers[key] = self.call(aten.add.Tensor, found, self.number(start))
        return self._numbers[key]

    def behind(self, size: Length) -> fx.Node:
        """Returns a mask over a dim of such a size in memory: true for places behind the array, which are nobody's."""
        key = "behind", size
        if key not in self._numbers:
            self._numbers[key] = self.call(aten.ge.Tensor, self.places(0, self.sized(size)), self.number(size))
        return self._numbers[key]

    def filled(self, n: fx.Node, value: Any) -> fx.Node:
        """A value with this number where it is nobody's."""
        x, shape = self.of(n), shape_of(n)
        for d, size in enumerate(shape):
            if isinstance(size, Length):
                mask = self.call(aten.view.default, self.behind(size), [-1] + [1] * (len(shape) - 1 - d))
                x = self.call(aten.masked_fill.Scalar, x, mask, value)
        return x

    def _made(self, x: Any) -> fx.Node:
        if not isinstance(x, PutOff):
            return x
        value = value_of(x.node)
        found = self.call(
            aten.full.default, self.sized(shape_of(x.node)), 0, dtype=value.dtype, device=torch.device("cpu")
        )
        self.add_to(found, x)
        return found

    def add_to(self, memory: fx.Node, x: PutOff) -> None:
        """Adds what was put off, in place."""
        size = shape_of(x.node)[0]
        for value, at, rows in x.parts:
            if at is None:
                self.call(aten.add_.Tensor, memory, value)
            elif isinstance(at, fx.Node):
                self.call(_add_at, memory, self.within(at, size), value)
            else:
                self.call(_add_rows, memory, self.places(at, rows), value)

    def write(self, memory: fx.Node, start: Size, rows: Any, count: int) -> None:
        """Writes so many slots."""
        self.call(aten.index_copy_.default, memory, 0, self.places(start, count), rows)

    def within(self, index: Any, size: Size) -> fx.Node:
        """An index into a dim of this size, such that what is not in it is not in its memory either."""
        return self.call(_within, index, self.number(size), self.sized(size))

    # ---- operations

    def _value(self, n: fx.Node) -> Any:
        if not meets_growing(n):
            return self._as_it_is(n)
        target: Any = n.target
        name = getattr(target, "_opname", "")
        found = _RULES[name](self, n, *n.args, **n.kwargs) if name in _RULES else self._pointwise(n)
        if found is None:
            raise Unsupported(f"{name or n.name} of what is as long as an array in the carry", n)
        return found

    def _as_it_is(self, n: fx.Node) -> fx.Node:
        target = aten.reshape.default if n.target is aten.view.default else n.target
        return self.call(target, *self.of(n.args), **self.of(n.kwargs))

    def _pointwise(self, n: fx.Node) -> fx.Node | None:
        target: Any = n.target
        value = value_of(n) if isinstance(n.meta.get("val"), Tensor) else None
        if value is None or not is_pointwise(n):
            return None
        if target._opname in _INT_TRAPS and not value.dtype.is_floating_point:
            return None
        args, kwargs = n.args, n.kwargs
        if has_length((args, kwargs.values())):  # a number that follows a length, as the mean's divisor
            if target._overloadname not in ("Tensor", "Scalar") or value.dtype not in _NUMBERS or kwargs:
                return None
            target = getattr(aten, target._opname).Tensor
            return self.call(target, *(self._operand(a, value.dtype) for a in args))
        return self.call(target, *self.of(args), **self.of(kwargs))

    def _operand(self, x: Any, dtype: torch.dtype) -> Any:
        if not isinstance(x, Length):
            return self.of(x)
        return self.call(aten._to_copy.default, self.number(dataclasses.replace(x, real=False)), dtype=dtype)


_NUMBERS = (torch.float32, torch.float64, torch.int64)  # that hold a length exactly
Rule = Callable[..., Any]


def _select(to: InPlace, n: fx.Node, x: fx.Node, dim: int = 0, index: Size = 0) -> Any:
    size = shape_of(x)[dim]
    if not isinstance(size, Length):
        return to._as_it_is(n)
    start = index + size if index < 0 else index
    found = to.call(aten.index_select.default, to.of(x), dim, to.places(start, 1))
    return to.call(aten.squeeze.dim, found, dim)


def _slice(
    to: InPlace, n: fx.Node, x: fx.Node, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Any:
    dim %= len(shape_of(x))
    size, count = shape_of(x)[dim], shape_of(n)[dim]
    if not isinstance(size, Length):
        return to._as_it_is(n)
    start = 0 if start is None else start + size if start < 0 else start
    if isinstance(count, Length):  # as many in memory, of which the last ones are nobody's from now on
        moved = [0] * (2 * (len(shape_of(x)) - 1 - dim)) + [-start, start]
        return (
            None
            if step != 1 or isinstance(start, Length)
            else to.of(x)
            if not start
            else to.call(aten.constant_pad_nd.default, to.of(x), moved)
        )
    return to.call(aten.index_select.default, to.of(x), dim, to.places(start, count, step))


def _cat(to: InPlace, n: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Any:
    first, *rest = tensors
    if dim or not grows(first) or any(grows(x) for x in rest):
        return None
    memory, at = to.of(first), shape_of(first)[0]
    if n not in to.versions or first not in to.versions:
        memory = to.call(aten.clone.default, memory)
    for x in rest:
        count = len(value_of(x))
        same = value_of(x).dtype is value_of(n).dtype
        rows = to.of(x) if same else to.call(aten._to_copy.default, to.of(x), dtype=value_of(n).dtype)
        to.write(memory, at, rows, count)
        at = at + count
    return memory


def _own(to: InPlace, n: fx.Node, x: fx.Node) -> fx.Node:
    """The memory to which a version of an array is written: nobody looks at the version before any more."""
    memory = to.of(x)
    return memory if n in to.versions and x in to.versions else to.call(aten.clone.default, memory)


def _select_scatter(to: InPlace, n: fx.Node, x: fx.Node, value: fx.Node, dim: int = 0, index: Size = 0) -> Any:
    size = shape_of(x)[0]
    if dim or not isinstance(size, Length) or grows(value):
        return None
    memory = _own(to, n, x)
    to.write(memory, index + size if index < 0 else index, to.call(aten.unsqueeze.default, to.of(value), 0), 1)
    return memory


def _index(to: InPlace, n: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None]) -> Any:
    size = shape_of(x)[0]
    if (
        any(isinstance(s, Length) for s in shape_of(x)[1:])
        or indices[0] is None
        or any(i and grows(i) for i in indices)
    ):
        return None
    first = to.within(to.of(indices[0]), size)
    return to.call(aten.index.Tensor, to.of(x), [first, *to.of(list(indices[1:]))])


def _index_put(
    to: InPlace, n: fx.Node, x: fx.Node, indices: Sequence[fx.Node], value: fx.Node, accumulate: bool = False
) -> Any:
    size = shape_of(x)[0]
    if len(indices) != 1 or not isinstance(size, Length) or grows(value) or grows(indices[0]):
        return None
    before = to._new[x]
    if isinstance(before, PutOff) and accumulate:
        return PutOff(n, (*before.parts, Summand(to.of(value), to.of(indices[0]))))
    memory = _own(to, n, x)
    to.call(aten.index_put_.default, memory, [to.within(to.of(indices[0]), size)], to.of(value), accumulate)
    return memory


def _full(to: InPlace, n: fx.Node, size: Sequence[Size], value: Any, **kwargs: Any) -> Any:
    if isinstance(value, Length):
        return None
    lead = isinstance(size[0], Length)
    return PutOff(n) if value == 0 and lead else to.call(aten.full.default, to.sized(size), value, **kwargs)


def _pad(to: InPlace, n: fx.Node, x: fx.Node, pad: Sequence[Size], value: Any = 0) -> Any:
    """Zeros around some slots, or around what is as long as an array."""
    shape = shape_of(x)
    if not grows(x):
        alone = not any(pad[: 2 * (len(shape) - 1)]) and len(pad) == 2 * len(shape)
        return PutOff(n, (Summand(to.of(x), pad[-2], int(shape[0])),)) if alone and value == 0 else None
    pad = list(pad)
    for d, size in enumerate(shape):
        k = 2 * (len(shape) - 1 - d)
        if isinstance(size, Length) and k < len(pad):  # behind it memory has room
            pad[k + 1] = -pad[k]
    return None if has_length(pad) else to.call(aten.constant_pad_nd.default, to.filled(x, value), pad, value)


def _add(to: InPlace, n: fx.Node, a: Any, b: Any, **kwargs: Any) -> Any:
    if kwargs.get("alpha", 1) != 1:
        return to._pointwise(n)
    for x, y in ((a, b), (b, a)):
        if n in to.versions and x in to.versions and isinstance(y, fx.Node):
            memory, more = to.of(x), to._new[y]
            to.add_to(memory, more if isinstance(more, PutOff) else PutOff(n, (Summand(more),)))
            return memory
    values = [to._new[x] if isinstance(x, fx.Node) else None for x in (a, b)]
    if all(isinstance(x, PutOff) for x in values):
        return PutOff(n, (*values[0].parts, *values[1].parts))  # pyright: ignore[reportOptionalMemberAccess]
    return to._pointwise(n)


def _view(to: InPlace, n: fx.Node, x: fx.Node, size: Any) -> Any:
    """Reshapes a value as long as an array: its elements stay first if the dims before that one have the same size."""
    before, after = shape_of(x), shape_of(n)
    i, j = (next((d for d, s in enumerate(shape) if isinstance(s, Length)), None) for shape in (before, after))
    if i is None or j is None or any(map(grows, (before[i + 1 :], after[j + 1 :]))):
        return None
    if math.prod(before[:i]) != math.prod(after[:j]):
        return None
    return to.call(aten.reshape.default, to.of(x), to.sized(list(after)))


def _expand(to: InPlace, n: fx.Node, x: fx.Node, size: Any, **_: Any) -> Any:
    return to.call(aten.expand.default, to.of(x), to.sized(list(shape_of(n))))


def _moved(to: InPlace, n: fx.Node, *_: Any, **__: Any) -> Any:
    return to._as_it_is(n)


def _reduced(to: InPlace, n: fx.Node, x: fx.Node, *args: Any, **kwargs: Any) -> Any:
    target: Any = n.target
    least, most = _range(value_of(x).dtype)
    nothing = {"sum": 0, "amax": least, "amin": most}[target._opname]
    return to.call(target, to.filled(x, nothing), *args, **kwargs)


def _range(dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return (False, True) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _product(to: InPlace, n: fx.Node, a: fx.Node, b: fx.Node) -> Any:
    """Multiplies with zeros behind the arrays on both sides of the sum: 0 times infinity would be NaN."""
    if not isinstance(shape_of(a)[-1], Length):
        return to._as_it_is(n)
    if sum(isinstance(s, Length) for x in (a, b) for s in shape_of(x)) > 2:
        return None
    return to.call(n.target, to.filled(a, 0), to.filled(b, 0))


_RULES: dict[str, Rule] = {
    "select": _select,
    "slice": _slice,
    "cat": _cat,
    "select_scatter": _select_scatter,
    "index": _index,
    "index_put": _index_put,
    "full": _full,
    "constant_pad_nd": _pad,
    "add": _add,
    "view": _view,
    "expand": _expand,
    **dict.fromkeys(("permute", "unsqueeze", "clone"), _moved),
    **dict.fromkeys(("sum", "amax", "amin"), _reduced),
    **dict.fromkeys(("mm", "bmm"), _product),
}


# ---- what a step's graph calls beside torch's operations


def _within(index: Tensor, length: Any, room: int) -> Tensor:
    """An index from the first slot on; what is not in the array is behind its memory, where torch refuses it."""
    wrapped = torch.where(index < 0, index + length, index)
    return wrapped.masked_fill((wrapped < 0) | (wrapped >= length), room)


def _add_at(memory: Tensor, index: Tensor, value: Tensor) -> None:
    aten.index_put_.default(memory, [index], value.to(memory.dtype), True)


def _add_rows(memory: Tensor, places: Tensor, rows: Tensor) -> None:
    aten.index_copy_.default(memory, 0, places, memory.index_select(0, places) + rows)


# ---- what is known of a step


def jumping(step: Step) -> fx.Node | None:
    """Returns an operation whose result a comparison sees, and which rounds otherwise in memory of another size."""
    order = list(step.graph.nodes)
    behind = needed_for(n for n in order if is_discontinuous(n) and not asks_for_infinity(n))
    found = (n for n in order if n in behind and getattr(n.target, "_opname", "") in _ROUNDED)
    return next((n for n in found if any(map(grows, (n, *n.all_input_nodes)))), None)
