"""A loop whose steps run one by one in torch operations: for what a back end lacks, and to test others against."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop.compiler.emitter.lower.growing import scheduled
from tensorloop.compiler.lengths import WRITES, Length, Sized, all_hold, grows, of_slice, shape_of, versions
from tensorloop.compiler.operations import aten, is_view
from tensorloop.compiler.place import put_on
from tensorloop.compiler.step import Core, CoreCall, Step, StepFailed, Unsupported
from tensorloop.compiler.targets.target import Target


class EagerCore:
    """The core that any step has."""

    way = "torch, step by step"
    called: Sequence[fx.Node] = ()

    def __init__(self, step: Step) -> None:
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        order, changes = _in_place(step)
        written = any(n.target in WRITES for n in changes)
        for n in order:
            if n.op != "output":
                new[n] = graph.node_copy(n, lambda a: new[a])
                if n.target is aten.view.default:
                    new[n].target = aten.reshape.default
                new[n].target = changes.get(n, new[n].target)
                if written and is_view(n) and not grows(n) and any(map(grows, n.all_input_nodes)):
                    new[n] = graph.call_function(aten.clone.default, (new[n],))  # as the slots are now
        graph.output(tuple(new[n] for n in step.outputs))
        put_on(graph, step.place.device)
        self.module = fx.GraphModule(torch.nn.Module(), graph)
        self._growth = step.growth
        self._conditions = [size for n in step.graph.nodes for size in of_slice(n)] if step.growth else []
        first = [next(iter(shape_of(n)), None) for n in (*step.sequences, *step.carry)]
        self._sizes_of_arrays = [size if isinstance(size, Length) else None for size in first]
        self._sizes = len(step.carry), len(step.outs), len(step.sums)
        self._reverse, self._asks = step.reverse, step.going is not None

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        """Runs the steps one after the other and returns the last carry, and how many there were."""
        steps, invariants, sequences, carry, outs, sums, lengths = call
        n, m, k = self._sizes
        of_sequences, of_carry = self._sizes_of_arrays[: len(sequences)], self._sizes_of_arrays[len(sequences) :]
        # Arrays are changed as native code would: no version of the caller's counts it.
        pairs = zip(carry, of_carry, strict=True)
        state = [x if size is None else x.data[: size.at(lengths)] for x, size in pairs]
        step = self.module.forward
        done = 0
        with torch.no_grad():
            while done < steps:
                t = steps - 1 - done if self._reverse else done
                now = [n + more * done for n, more in zip(lengths, self._growth, strict=True)]
                if now:
                    step = Sized(self.module, now).run
                pairs = zip(sequences, of_sequences, strict=True)
                rows = [x[t] if size is None else x[: size.at(now)] for x, size in pairs]
                try:
                    found = step(*invariants, *rows, *state)
                except BaseException as error:
                    raise StepFailed(error, done) from None
                state = list(found[:n])
                for out, x in zip(outs, found[n : n + m], strict=True):
                    out[t] = x
                for total, x in zip(sums, found[n + m : n + m + k], strict=True):
                    total += x
                done += 1
                if self._asks and not found[-1]:
                    break
        for i, size in enumerate(of_carry):
            if size is not None and done and state[i].data_ptr() != carry[i].data_ptr():
                carry[i].data[: len(state[i])] = state[i]
        own = [x if x is None else x.clone(memory_format=torch.contiguous_format) for x in _others(state, of_carry)]
        return [x if y is None else y for x, y in zip(carry, own, strict=True)], done

    def fits(self, steps: int, lengths: Sequence[int]) -> bool:
        """Whether each part of an array is what it was when the step was traced; torch checks each index itself."""
        last = [n + more * (steps - 1) for n, more in zip(lengths, self._growth, strict=True)]
        return all_hold(self._conditions, (lengths, last))

    def stepping(self, invariants: Sequence[Tensor]) -> Callable[[CoreCall], tuple[list[Tensor], int]]:
        """Returns this core: it prepares nothing that many calls could share."""
        return self


def _others(state: Sequence[Tensor], sizes: Sequence[Length | None]) -> list[Tensor | None]:
    """Returns the state with None in the place of each array."""
    return [x if size is None else None for x, size in zip(state, sizes, strict=True)]


def _in_place(step: Step) -> tuple[Sequence[fx.Node], dict[fx.Node, Any]]:
    """(the nodes in the order in which they run, what is done in their place to arrays where they lie).

    A slot that there is is overwritten when nobody will look at the array as it was before any more; if that cannot be,
    in a copy.
    """
    found = _changes(step, {**_APPEND, **_OVERWRITE})
    if not any(n.target in WRITES for n in found):
        return list(step.graph.nodes), found
    try:
        return scheduled(step), found
    except Unsupported:
        return list(step.graph.nodes), _changes(step, _APPEND)


def _changes(step: Step, kinds: Mapping[Any, Any]) -> dict[fx.Node, Any]:
    """Returns what stands for the nodes that change a carried array in these ways, up to the first of another kind."""
    found = dict[fx.Node, Any]()
    for array, last in zip(step.carry, step.next_carry, strict=True):
        for n in reversed(versions(array, last)[:-1] if grows(array) else []):
            if n.target not in kinds:
                break
            found[n] = kinds[n.target]
    return found


def _append(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """An array with rows behind it, in the memory of the first, which has room for them: what is there is not moved."""
    array, *rows = parts
    length = len(array) + sum(map(len, rows))
    grown = array.as_strided((length, *array.shape[1:]), array.stride(), array.storage_offset())
    torch.cat(rows, out=grown[len(array) :]) if len(rows) > 1 else grown[len(array) :].copy_(rows[0])
    return grown


def _put(array: Tensor, slot: Tensor, dim: int, index: int) -> Tensor:
    array.select(dim, index).copy_(slot)
    return array


_APPEND = {aten.cat.default: _append}
_OVERWRITE = {aten.select_scatter.default: _put, aten.index_put.default: aten.index_put_.default}


class EagerTarget(Target):
    """Runs any step on any device, one operation of torch after the other."""

    name = "eager"

    def make_core(self, step: Step) -> Core:
        """Returns the step as a graph that torch runs."""
        return EagerCore(step)
