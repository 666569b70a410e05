"""What a step with TensorArrays in its carry does for arrays of any length, learnt from looks with a few lengths."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop.compiler.refused import Refused
from tensorloop.compiler.trace import PICKS, Operation, select_at, slice_at
from tensorloop.loop.compiled.look.carried_arrays import STAND_IN
from tensorloop.loop.compiled.look.look import Record
from tensorloop.loop.compiled.look.operation_traits import storage_of

LONGER = 12  # slots of an array, in a look that shows what changes with its length


class Template:
    """The step for arrays of any length, learnt from one look, and for each group one with longer arrays.

    `written` are records with lines, `seen` records that make a key.
    """

    def __init__(self, written: Sequence[Record], seen: Sequence[Record]) -> None:
        self._traces, self._logs = [x.trace for x in written], [x.log for x in written]
        self._key = [self._joined(*entries) for entries in _aligned(x.written.key for x in seen)]

    def operations(self, symbols: Sequence[int]) -> list[Operation]:
        """The operations of the step, with `symbols` in the place of lengths."""

        def put(x: Any) -> Any:
            if isinstance(x, _Affine):
                return x.shift + sum(a * s for a, s in zip(x.scales, symbols, strict=False))
            if isinstance(x, dict):
                return {name: put(y) for name, y in x.items()}
            return [put(y) for y in x] if isinstance(x, list) else x

        operations = []
        for same in _aligned(x.operations for x in self._traces):
            first = same[0]
            if any((o.function, o.results, o.cut) != (first.function, first.results, first.cut) for o in same):
                raise length_matters(first.place)
            args = self._joined(*(o.args for o in same), place=first.place)
            if first.function in PICKS and any(isinstance(x, _Affine) for x in args):
                picked = self._picked(first, args)
                operations.append(dataclasses.replace(picked, args=put(args)))
                continue
            kwargs = self._joined(*(o.kwargs or {} for o in same), place=first.place)
            operations.append(dataclasses.replace(first, args=put(args), kwargs=put(kwargs)))
        return operations

    def _picked(self, o: Operation, args: list[Any]) -> Operation:
        """Takes a part that a length chooses by indices, of what is always as large: no slice is as long as a mark."""
        wholes = [log.written.tensors[o.args[0].number] for log in self._logs]
        if any(x.shape != wholes[0].shape for x in wholes):
            return dataclasses.replace(o, args=args)
        if storage_of(wholes[0]) in self._logs[0].checks.writes:  # as a view the part would show it
            raise length_matters(o.place)
        if o.function is PICKS[0]:
            return dataclasses.replace(o, function=select_at, args=args)
        dim, start, stop = args[1:4]
        if start is None or (type(stop) is int and stop > wholes[0].shape[dim]):  # up to an end that is as it is
            raise length_matters(o.place)
        return dataclasses.replace(o, function=slice_at, args=args)

    def describes(self, seen: Record, lengths: Sequence[int], captures: Sequence[Tensor]) -> bool:
        """Whether a step that ran with arrays of these lengths did this, with these captures."""
        expected = [x.at(lengths) if isinstance(x, _Affine) else x for x in self._key]
        return expected == seen.written.key and same_captures(captures, seen.captures)

    def _joined(self, first: Any, *others: Any, place: Any = None) -> Any:
        """An argument, with `_Affine` where it changes with the lengths."""
        if isinstance(first, (list, tuple)) and all(type(x) is type(first) and len(x) == len(first) for x in others):
            return type(first)(self._joined(*xs, place=place) for xs in zip(first, *others, strict=True))
        if isinstance(first, dict) and all(isinstance(x, dict) and x.keys() == first.keys() for x in others):
            return {name: self._joined(y, *(x[name] for x in others), place=place) for name, y in first.items()}
        if all(type(x) is type(first) and x == first for x in others):
            return first
        if type(first) is not int or any(type(x) is not int for x in others):
            raise length_matters(place)
        parts = [divmod(x - first, LONGER - STAND_IN) for x in others]
        if any(rest for _, rest in parts) or sum(scale != 0 for scale, _ in parts) > 1:
            raise length_matters(place)
        scales = tuple(scale for scale, _ in parts)
        return _Affine(scales, first - sum(scales) * STAND_IN)


def same_captures(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    """Whether two looks at a step met the same tensors from outside, or made equal ones."""
    pairs = list(zip(these, those, strict=False))
    return len(these) == len(those) and all(a is b or torch.equal(a.detach(), b.detach()) for a, b in pairs)


class _Affine:
    """A number that depends on the lengths of arrays: scales . lengths + shift."""

    def __init__(self, scales: tuple[int, ...], shift: int) -> None:
        self.scales, self.shift = scales, shift

    def at(self, lengths: Sequence[int]) -> int:
        return self.shift + sum(a * n for a, n in zip(self.scales, lengths, strict=True))


def _aligned(columns: Any) -> list[tuple[Any, ...]]:
    lists = [list(x) for x in columns]
    if len({len(x) for x in lists}) > 1:
        raise length_matters()
    return list(zip(*lists, strict=True))


def length_matters(place: Any = None) -> Refused:
    """Returns the refusal of a body that takes another course for another length."""
    return Refused(
        "what the body does depends on the length of an array in the carry",
        "read slots that every length has, use torch.full((), len(array)) for a float of it, or set compile=False",
        place,
    )
