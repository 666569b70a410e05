"""Whether a step does the same for each row alone, however many there are: then rows that leave may as well stay.

Three things are looked at. The step's kernels, for addresses of other rows. The step with every number of rows that the
loop has, as the body may ask for it: the operations must be the same, but for sizes. And where torch has others for one
row, the values.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.fake import quiet_fakes
from tensorloop.compiler.custom_functions import UserFunction
from tensorloop.compiler.divide.partition import extract
from tensorloop.compiler.edge_walks import depends_on, needed_for
from tensorloop.compiler.lengths import Sized
from tensorloop.compiler.operations import aten, value_of
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.step import Unsupported
from tensorloop.compiler.targets.choose import find_place, target_of
from tensorloop.compiler.trace import Operation, Ref
from tensorloop.loop.compiled.look.autocast import without_autocast
from tensorloop.loop.compiled.look.frame import Frame
from tensorloop.loop.compiled.look.look import Look, Record, python_values, random_values, record
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.loop import Loop

_UNIFORM = frozenset(
    op.overloadpacket
    for op in (
        *(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format, aten.expand.default),
        *(aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default),
        *(aten.scalar_tensor.default, aten.empty_strided.default, aten.new_empty_strided.default),
    )
)  # what makes rows of no rows: the same in each
_SIZES = frozenset({"size", "sizes", "shape", "stride"})  # arguments that may say how many rows there are
_MIXES = "rows leave the batch, and the body makes one row of others, by a mean over them or the like"
_COUNTS = "rows leave the batch, and what the body does depends on how many there are"


@dataclasses.dataclass
class Known:
    """The facts known of a plan's step, for one choice of the captures that have rows of their own."""

    whole: "_RowsTrace"
    counts: set[Any]


def check(look: Look, plan: Plan, rows: int, counts: Iterable[int], few: Callable[[Tensor], Loop]) -> None:
    """Raises `Refused` where rows that leave would not do as well if they stayed.

    `few` makes the loop of some rows; `counts` are how many there may be beside `rows`.
    """
    if any(isinstance(n.target, UserFunction) for n in plan.module.graph.nodes):
        raise Refused(
            "rows leave the batch, and the body uses a custom Function, whose backward may make one row of others",
            "set compact=False, or compile=False",
        )
    own = _own_captures(look)
    values = python_values(look.frame)
    known = plan.apart.get(own)
    if known is None:
        if rows > 1 and _rows_meet(plan, rows, own):
            raise Refused(_MIXES, "keep rows apart, or set compile=False")
        whole = _RowsTrace(record(look.frame.again(), lines=True, live=False))
        known = plan.apart[own] = Known(whole, set())
    for n in counts:
        if (values, n) not in known.counts:
            _compare(look, plan, known.whole, rows, few(torch.arange(n, device=plan.step.place.device)), n, own)
            known.counts.add((values, n))


def _own_captures(look: Look) -> tuple[int, ...]:
    """Returns which captures have rows of their own: those of the context, which rows leave too."""
    context = {id(x) for x in look.frame.loop.context.leaves if isinstance(x, Tensor) and x.dim()}
    return tuple(i for i, x in enumerate(look.captures) if id(x) in context)


# -- addresses


def _rows_meet(plan: Plan, rows: int, own: Sequence[int]) -> bool:
    t = dataclasses.replace(plan.step, going=None)
    apart = [t.invariants[i] for i in own]
    order, given = list(t.graph.nodes), set(t.inputs)
    ends = [*t.next_carry, *t.outs]
    needed = needed_for(ends, given)
    moving = depends_on((n for n in order if n not in given), [*t.carry, *t.sequences, *apart])
    made = {n for n in needed if n not in given and n not in moving and n.all_input_nodes}  # once, of no rows
    read = [a for n in needed if n in moving or n in ends for a in n.all_input_nodes]
    read += ends
    once = list(dict.fromkeys(n for n in read if n in made or n in t.invariants))
    inside = [n for n in order if n in needed_for(ends, {*given, *once}) and n not in given and n not in once]
    with quiet_fakes():
        whole = extract(t, once, t.sequences, inside, list(dict.fromkeys(t.outs)))
        own_nodes = [n for a, n in zip(once, whole.invariants, strict=True) if a in apart]
        for n in own_nodes:
            n.meta["val"] = value_of(n).contiguous()
        try:
            # Of the host's kernels, wherever the step runs: which rows it makes one of is the same everywhere.
            return target_of(find_place([HOST])).rows_meet(whole, rows, {*whole.sequences, *own_nodes})
        except Unsupported as lack:
            raise Refused(
                f"rows leave the batch, and nobody knows whether they stay apart: {lack.reason}",
                "set compact=False, or compile=False",
            ) from None


# -- numbers of rows


class _RowsTrace:
    """A step of some rows, as it was written down, and the shapes of its tensors."""

    def __init__(self, seen: Record) -> None:
        self.operations, self.shapes = seen.trace.operations, seen.written.shapes()
        self.inputs, self.outputs = seen.trace.inputs, seen.trace.outputs


def _compare(look: Look, plan: Plan, whole: _RowsTrace, rows: int, loop: Loop, n: int, own: Sequence[int]) -> None:
    """Raises where a step of n rows is not that of all rows, with fewer."""
    first = None if look.frame.first is None else look.frame.first[:n]
    frame = Frame(loop, first)
    frame.open = look.frame.open
    seen = record(frame, lines=True, live=False)
    if not _same_captures(look.captures, seen.captures, own):
        raise Refused(_COUNTS, "do the same for any number of rows, or set compile=False")
    place = _Same(whole, _RowsTrace(seen), rows, n).difference()
    if place is None:
        return
    if n > 1 or not _same_values(look, plan, rows, loop, first, own):
        raise Refused(_COUNTS, "do the same for any number of rows, or set compile=False", place[0])


def _same_captures(these: Sequence[Tensor], those: Sequence[Tensor], own: Sequence[int]) -> bool:
    pairs = enumerate(zip(these, those, strict=False))
    return len(these) == len(those) and all(
        i in own or a is b or (a.shape == b.shape and torch.equal(a.detach(), b.detach())) for i, (a, b) in pairs
    )


class _Same:
    """Compares two looks at a step, with many rows and with few."""

    def __init__(self, many: _RowsTrace, few: _RowsTrace, rows: int, n: int) -> None:
        self.many, self.few, self.rows, self.n = many, few, rows, n

    def difference(self) -> tuple[Any] | None:
        """The user's line where they differ, as a tuple; None where they do not."""
        a, b = self.many, self.few
        if a.outputs != b.outputs or a.inputs != b.inputs or len(a.operations) != len(b.operations):
            return (None,)
        for x, y in zip(a.operations, b.operations, strict=True):
            if not self._alike(x, y):
                return (y.place,)
        return None

    def _alike(self, x: Operation, y: Operation) -> bool:
        if (x.function, x.results, x.cut) != (y.function, y.results, y.cut) or (x.kwargs or {}).keys() != (
            y.kwargs or {}
        ).keys():
            return False
        names = [a.name for a in x.function._schema.arguments]
        pairs = [*zip(names, x.args, y.args, strict=False)]
        pairs += [(name, z, (y.kwargs or {})[name]) for name, z in (x.kwargs or {}).items()]
        if len(x.args) != len(y.args) or not all(self._equal(p, q, name in _SIZES) for name, p, q in pairs):
            return False
        results, inputs = list(_refs(x.results)), [*_refs(x.args), *_refs(list((x.kwargs or {}).values()))]
        kinds = [self._has_rows(n) for n in results]
        made = any(kinds) and not any(map(self._has_rows, inputs))
        return None not in kinds and not (made and x.function.overloadpacket not in _UNIFORM)

    def _equal(self, x: Any, y: Any, sizes: bool) -> bool:
        if isinstance(x, (list, tuple)):
            return isinstance(y, (list, tuple)) and len(x) == len(y) and all(map(self._equal, x, y, [sizes] * len(x)))
        if type(x) is not type(y):
            return False
        if isinstance(x, float):
            return repr(x) == repr(y)
        return x == y or (sizes and type(x) is int and x * self.n == y * self.rows)

    def _has_rows(self, number: int) -> bool | None:
        """Whether a tensor has as many times the elements as there are rows; None for another relation."""
        a, b = self.many.shapes[number], self.few.shapes[number]
        if a == b:
            return False
        return True if a.numel() * self.n == b.numel() * self.rows and len(a) == len(b) else None


def _refs(x: Any) -> Iterable[int]:
    if isinstance(x, Ref):
        yield x.number
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _refs(y)


# -- values


def _same_values(look: Look, plan: Plan, rows: int, loop: Loop, first: Tensor | None, own: Sequence[int]) -> bool:
    """Whether the plan's step gives each of its rows what the body gives to one."""
    if any(x.is_complex() for x in look.frame.carry):
        return False
    generator = torch.Generator(HOST).manual_seed(0)
    for _ in range(2):
        arrays = look.frame.arrays.of_rows(loop.init, 1)
        frame = Frame(loop, first, arrays)
        frame.open = look.frame.open
        seen = record(frame, lines=True, live=False, change=random_values(generator))
        captures = [_spread(x, rows) if i in own else x for i, x in enumerate(seen.captures)]
        dims = [int(i in arrays.first) for i in frame.places]
        of_all = [*dims, *[0] * (len(seen.before) - len(dims))]
        given = [_spread(x, rows, dim) for x, dim in zip(seen.before, of_all, strict=True)]
        with torch.no_grad(), without_autocast():
            values = Sized(plan.module, arrays.lengths).run(*given, *captures)
        new = seen.results.carry[: len(dims)]
        ys = [y for y in seen.results.ys if isinstance(y, Tensor)]
        k = len(look.frame.carry)
        given = [*values[: len(new)], *values[k : k + len(ys)]]
        for a, b, dim in zip([*new, *ys], given, [*dims, *(0 for _ in ys)], strict=True):
            small = torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() else 0
            a = _spread(a, rows, dim)
            if b.shape != a.shape or not torch.allclose(a, b, small, small, equal_nan=True):
                return False
    return True


def _spread(x: Tensor, rows: int, dim: int = 0) -> Tensor:
    """Repeats one row so many times along `dim`."""
    x = x.detach()
    return x.expand(*x.shape[:dim], rows, *x.shape[dim + 1 :]).contiguous() if x.dim() else x
