"""Lengths that change from step to step, in graphs: each is a number that nothing else is, `scale * symbol + shift`.

An array in the carry is a tensor of as many slots as a symbol says, and all sizes, strides and offsets that follow from
it are sums with that symbol in them. So torch traces them as numbers, and a back end finds them again: the length of
the array, which it knows when it runs.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from tensorloop.compiler.operations import aten, value_of, values_of

SYMBOLS = (1_234_567_891, 1_409_386_519, 1_648_721_273)
OTHERS = (1_111_333_771, 1_537_171_723, 1_802_775_637)  # of a second trace, which shows what was computed from them
_MOST_SHIFT, _MOST_SHIFT_OF_ONE, _MOST_SCALE = 1 << 20, 1 << 28, 1 << 28
WRITES = frozenset({aten.select_scatter.default, aten.index_put.default})  # to slots that there are


class Length(NamedTuple):
    """`scale` times the length of the arrays of number `symbol`, before the step, and `shift`."""

    symbol: int
    scale: int
    shift: int

    def at(self, lengths: Sequence[int]) -> int:
        """The number, where the arrays are that long."""
        return self.scale * lengths[self.symbol] + self.shift


def stands_for_length(number: Any) -> bool:
    """Whether a number is too large to be anything else, where there are arrays in the carry."""
    return isinstance(number, int) and not isinstance(number, bool) and number > SYMBOLS[0] // 2


def length_in(number: Any, count: int = len(SYMBOLS)) -> Length | None:
    """What a number stands for; None for what is a number and no more, and where that is not sure.

    `count` are the arrays of different lengths that there are. Of one alone, a place in its memory may lie far from a
    multiple of its length: there is no other that it could be meant for.
    """
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > SYMBOLS[0] // 2:
        return None
    if number != number // 1 or number > 1 << 62:
        return None
    number, best = int(number), None
    most = _MOST_SHIFT_OF_ONE if count == 1 else _MOST_SHIFT
    for k, symbol in enumerate(SYMBOLS[:count]):
        scale = (number + symbol // 2) // symbol
        shift = number - scale * symbol
        fits = 0 < scale <= _MOST_SCALE and abs(shift) <= most
        if fits and (best is None or abs(shift) < abs(best.shift)):
            best = Length(k, scale, shift)
    return best


def grows(x: Any) -> bool:
    """Whether a shape, a tensor or a node's values have a dim whose size is such a number."""
    if isinstance(x, fx.Node):
        return any(grows(value.shape) for value in values_of(x))
    shape = x.shape if isinstance(x, Tensor) else x
    return any(length_in(size) is not None for size in shape)


def stands(x: Tensor) -> bool:
    """Whether a tensor has a size that is no real one, of either trace: there is no memory for it."""
    return any(size > SYMBOLS[0] // 2 for size in x.shape)


def said(size: int) -> str:
    """A size as one writes it: `n` is the length of an array before the step."""
    found = length_in(size)
    if found is None:
        return str(size)
    name = f"{found.scale if found.scale > 1 else ''}{'nmk'[found.symbol]}"
    return name if not found.shift else f"{name} {'+' if found.shift > 0 else '-'} {abs(found.shift)}"


def growth_of(array: fx.Node, growth: Sequence[int]) -> int | None:
    """What a step adds to an array's length; None for what is no array."""
    size = length_in(value_of(array).shape[0]) if grows(array) else None
    return None if size is None else growth[size.symbol]


def meets_growing(node: fx.Node) -> bool:
    """Whether a node is of such a size, or made from what is, or from a length itself."""
    if node.op != "call_function":
        return grows(node)
    return grows(node) or any(grows(a) for a in node.all_input_nodes) or _has_length((node.args, node.kwargs.values()))


def _has_length(x: Any) -> bool:
    if isinstance(x, (int, float)):
        return length_in(x) is not None
    return not isinstance(x, (str, fx.Node)) and isinstance(x, Iterable) and any(map(_has_length, x))


def actual(x: Any, lengths: Sequence[int]) -> Any:
    """Arguments of an operation with these lengths in them."""
    if isinstance(x, (list, tuple)):
        return type(x)(actual(y, lengths) for y in x)
    if isinstance(x, (int, float)) and (found := length_in(x)) is not None:
        return type(x)(found.at(lengths))
    return x


class Again(fx.Interpreter):
    """Runs a graph on tensors that may be in another order in memory than those it was traced with."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One operation."""
        return super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)


class Sized(Again):
    """With these lengths."""

    def __init__(self, module: fx.GraphModule, lengths: Sequence[int]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._lengths = lengths

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One operation."""
        kwargs = {name: actual(x, self._lengths) for name, x in kwargs.items()}
        return super().call_function(target, actual(args, self._lengths), kwargs)


def same_but_for_lengths(a: fx.Graph, b: fx.Graph) -> bool:
    """Whether a graph traced with SYMBOLS and one with OTHERS differ in these alone."""
    places: dict[fx.Node, int] = {}
    for i, (x, y) in enumerate(zip(a.nodes, b.nodes, strict=False)):
        places[x] = places[y] = i
        if x.op != y.op or (x.op == "call_function" and x.target is not y.target):
            return False
        if not _alike((x.args, x.kwargs), (y.args, y.kwargs), places):
            return False
    return len(a.nodes) == len(b.nodes)


def _alike(x: Any, y: Any, places: dict[fx.Node, int]) -> bool:
    if isinstance(x, fx.Node):
        return isinstance(y, fx.Node) and places[x] == places[y]
    if isinstance(x, (list, tuple)):
        return (
            isinstance(y, (list, tuple))
            and len(x) == len(y)
            and all(_alike(*z, places) for z in zip(x, y, strict=True))
        )
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_alike(x[k], y[k], places) for k in x)
    found = length_in(x)
    if found is not None:
        return type(x) is type(y) and y == found.scale * OTHERS[found.symbol] + found.shift
    return type(x) is type(y) and (x == y or (x != x and y != y))


def versions(array: fx.Node, last: fx.Node) -> list[fx.Node]:
    """What an array of the carry becomes in a step, from the last version back to the first; [] where it is replaced.

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
    x, y = value_of(a), value_of(b)
    return x.shape == y.shape and x.dtype is y.dtype
