"""Lengths of arrays in the carry, which change from step to step: a size in a graph is a number or a `Length`.

Torch traces with numbers. A step with such arrays is therefore traced twice, with arrays as long as LENGTH_MARKS say
and as OTHER_MARKS say, and `mark_lengths` writes down a `Length` wherever the two graphs differ. After that no number
stands for a length: whoever treats a `Length` as a number gets an error.
"""

import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from tensorloop.compiler.operations import aten, value_of, values_of
from tensorloop.compiler.step import Unsupported

LENGTH_MARKS = (1_234_567_891, 1_409_386_519, 1_648_721_273)
# A number that follows length k differs between the traces by a multiple of _APART[k]. These are primes, larger than
# any slot, so the multiple says which length it is; and as no small number divides them, the two marks leave different
# remainders: what rounds a length (n // 2 * 2) differs by no such multiple, and is not taken for a length.
_APART = (300_000_007, 340_000_019, 380_000_009)
OTHER_MARKS = tuple(mark - apart for mark, apart in zip(LENGTH_MARKS, _APART, strict=True))
WRITES = frozenset({aten.select_scatter.default, aten.index_put.default})  # to slots that there are


@dataclasses.dataclass(frozen=True)
class Length:
    """`scale` times the length of the arrays of number `symbol`, before the step, and `shift`; a float where `real`.

    It compares with a number as if arrays were longer than that: where they may not be, one of the conditions on
    lengths (`bounds`) keeps the step from running.
    """

    symbol: int
    scale: int
    shift: int
    real: bool = False

    def at(self, lengths: Sequence[int]) -> Any:
        """The number, where the arrays are that long."""
        found = self.scale * lengths[self.symbol] + self.shift
        return float(found) if self.real else found

    def _linear(self, scale: int, shift: int) -> Any:
        return Length(self.symbol, scale, shift) if scale else shift

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, Length):
            return self._linear(self.scale, self.shift + other)
        if other.symbol != self.symbol:
            raise Unsupported("a sum of the lengths of two arrays")
        return self._linear(self.scale + other.scale, self.shift + other.shift)

    def __neg__(self) -> Any:
        return self._linear(-self.scale, -self.shift)

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: int) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Length):
            raise Unsupported("a value of more than one size that changes from step to step")
        return self._linear(self.scale * other, self.shift * other)

    def __floordiv__(self, other: int) -> Any:
        if self.scale % other:
            raise Unsupported("a part of a length that changes from step to step")
        return self._linear(self.scale // other, self.shift // other)

    def __mod__(self, other: int) -> int:
        if self.scale % other:
            raise Unsupported("a part of a length that changes from step to step")
        return self.shift % other

    def __gt__(self, other: Any) -> bool:
        more = self - other
        return more.scale > 0 if isinstance(more, Length) else more > 0

    def __lt__(self, other: Any) -> bool:
        return -self > -other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __le__(self, other: Any) -> bool:
        return not self > other

    __radd__, __rmul__ = __add__, __mul__


# To a type checker a size is an int, as nearly all are. A `Length` takes its place where sizes are added, multiplied
# and compared, and raises everywhere else.
Size = int


def join(one: Any, other: Any) -> Any:
    """Joins a trace with LENGTH_MARKS and one with OTHER_MARKS: numbers that differ become lengths, others stay."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {k: join(x, other[k]) for k, x in one.items()}
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return type(one)([join(x, y) for x, y in zip(one, other, strict=True)])
    if type(one) is type(other) and (one == other or (one != one and other != other)):
        return one
    if type(one) is type(other) and type(one) in (int, float):
        return _length(one, other)  # pyright: ignore[reportArgumentType]
    raise Unsupported("what depends on the length of an array in the carry")


def _length(one: float, other: float) -> Length:
    """Returns the length that two different numbers follow."""
    exact = isinstance(one, int) or (one.is_integer() and abs(one) < 1 << 53)  # larger floats are rounded already
    for k, (mark, apart) in enumerate(zip(LENGTH_MARKS, _APART, strict=True)):
        scale, rest = divmod(one - other, apart)
        if exact and not rest and abs(scale) < _APART[0]:
            return Length(k, int(scale), int(one) - int(scale) * mark, isinstance(one, float))
    raise Unsupported("what is not linear in the length of an array in the carry")


def mark_lengths(graph: fx.Graph, other: fx.Graph) -> bool:
    """Puts a `Length` for each number of a graph that follows one, in arguments and in the shapes of its nodes.

    `graph` was traced with LENGTH_MARKS, `other` with OTHER_MARKS. False where they differ in more than lengths.
    """
    if len(graph.nodes) != len(other.nodes):
        return False
    pairs = list(zip(graph.nodes, other.nodes, strict=True))
    twins = {y: x for x, y in pairs}
    try:
        for x, y in pairs:
            if x.op != y.op or (x.op == "call_function" and x.target is not y.target):
                return False
            args, kwargs = join((x.args, x.kwargs), fx.map_arg((y.args, y.kwargs), lambda n: twins[n]))
            shapes = tuple(
                join(tuple(a.shape), tuple(b.shape)) for a, b in zip(values_of(x), values_of(y), strict=True)
            )
            if has_length((args, kwargs.values())):
                x.args, x.kwargs = args, kwargs
            if has_length(shapes):
                x.meta["shapes"] = shapes
    except Unsupported:
        return False
    return True


def shapes_of(node: fx.Node) -> Sequence[tuple[Size, ...]]:
    """The shapes of a node's values, with a `Length` for each dim as long as an array."""
    return node.meta.get("shapes") or [tuple(x.shape) for x in values_of(node)]


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """The shape of the one tensor that a node stands for, with a `Length` for each dim as long as an array."""
    (shape,) = shapes_of(node)
    return shape


def grows(x: fx.Node | Sequence[Size]) -> bool:
    """Whether a shape, or one of a node's values, has a dim as long as an array in the carry."""
    return "shapes" in x.meta if isinstance(x, fx.Node) else any(isinstance(size, Length) for size in x)


def as_text(size: Size) -> str:
    """A size as one writes it: `n` is the length of an array before the step."""
    if not isinstance(size, Length):
        return str(size)
    name = f"{size.scale if size.scale > 1 else ''}{'nmk'[size.symbol]}"
    return name if not size.shift else f"{name} {'+' if size.shift > 0 else '-'} {abs(size.shift)}"


def of_slice(node: fx.Node) -> Iterator[Size]:
    """Yields numbers not below zero if a slice of a growing array lies in it: torch counts from the end, cuts short."""
    whole: Any = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(whole, fx.Node) or not grows(whole):
        return
    args: Any = node.args
    if node.target is aten.constant_pad_nd.default:
        yield from args[1]
    elif node.target in (aten.select.int, aten.select_scatter.default):
        dim, index = args[-2:]
        yield from _of_part(shape_of(whole)[dim], index, 1, 1)
    elif node.target in (aten.slice.Tensor, aten.slice_scatter.default):
        rest = args[1:] if node.target is aten.slice.Tensor else args[2:]
        dim, start, _, step = [*rest, *[0, None, None, 1][len(rest) :]]
        part = node if node.target is aten.slice.Tensor else args[1]
        yield from _of_part(shape_of(whole)[dim], start or 0, shape_of(part)[dim], step)


def _of_part(size: Size, start: Size, count: Size, step: int) -> Iterator[Size]:
    """Yields numbers that are not below zero if so many elements, from one on, are there."""
    # Traced with long arrays, a part has the start that torch counted from the end, and no stop that is cut short: it
    # is the same part of a shorter array if it begins at 0 or later and its last element is before the end.
    start = start + size if start < 0 else start
    yield start
    yield count
    if count:
        yield size - 1 - start - (count - 1) * step


def all_hold(conditions: Iterable[Size | Length], ends: Sequence[Sequence[int]]) -> bool:
    """Whether no condition is below zero for such lengths of arrays, before the first step and before the last."""
    return all(actual(size, lengths) >= 0 for size in conditions for lengths in ends)


def growth_of(array: fx.Node, growth: Sequence[int]) -> int | None:
    """Returns how many slots a step adds to an array; None for what is no array."""
    return growth[size.symbol] if grows(array) and isinstance(size := shape_of(array)[0], Length) else None


def meets_growing(node: fx.Node) -> bool:
    """Whether a node is of such a size, or made from what is, or from a length itself."""
    if node.op != "call_function":
        return grows(node)
    return grows(node) or any(map(grows, node.all_input_nodes)) or has_length((node.args, node.kwargs.values()))


def has_length(x: Any) -> bool:
    """Whether there is a length in arguments of an operation."""
    if isinstance(x, Length):
        return True
    return isinstance(x, Iterable) and not isinstance(x, (str, Tensor)) and any(map(has_length, x))


def actual(x: Any, lengths: Sequence[int]) -> Any:
    """Returns the arguments of an operation for arrays of these lengths."""
    if isinstance(x, dict):
        return {name: actual(y, lengths) for name, y in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)([actual(y, lengths) for y in x])
    return x.at(lengths) if isinstance(x, Length) else x


class Again(fx.Interpreter):
    """Runs a graph on tensors that may be in another order in memory than those it was traced with."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation."""
        return super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)


class Sized(Again):
    """Runs a graph on arrays of these lengths."""

    def __init__(self, module: fx.GraphModule, lengths: Sequence[int]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._lengths = lengths

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation with the actual lengths in its arguments."""
        return super().call_function(target, *actual((args, kwargs), self._lengths))


def versions(array: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Returns the versions of a carried array in a step, from the last back to the first; [] where it is replaced.

    Each is made from the one before by an operation that leaves its other slots as they are, or adds to all.
    """
    reached = {array: array}
    for n in array.graph.nodes:
        before = _version_before(n, reached)
        if before is not None:
            reached[n] = before
    if last not in reached:
        return []
    found = [last]
    while found[-1] is not array:
        found.append(reached[found[-1]])
    return found


def _version_before(n: fx.Node, reached: Container[fx.Node]) -> fx.Node | None:
    if n.op != "call_function" or not n.args:
        return None
    first: Any = n.args[0]
    if n.target is aten.cat.default:
        return first[0] if first[0] in reached and (len(n.args) < 2 or n.args[1] == 0) and len(first) > 1 else None
    if n.target in WRITES or (n.target is aten.slice.Tensor and tuple(n.args[1:3]) in ((), (0,), (0, 0), (0, None))):
        return first if first in reached else None
    if n.target is aten.add.Tensor:
        return next((a for a in n.args if isinstance(a, fx.Node) and a in reached and _same(a, n)), None)
    return None


def _same(a: fx.Node, b: fx.Node) -> bool:
    return shape_of(a) == shape_of(b) and value_of(a).dtype is value_of(b).dtype
