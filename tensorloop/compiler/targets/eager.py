"""A loop whose steps run one by one in torch operations: for what a back end lacks, and to test others against."""

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop.compiler.lengths import Length, Sized, all_hold, of_slice, shape_of
from tensorloop.compiler.operations import aten
from tensorloop.compiler.place import Place, put_on
from tensorloop.compiler.step import Core, CoreCall, Step, StepFailed, Unsupported


class EagerCore:
    """The core that any step has."""

    way = "torch, step by step"
    called: Sequence[fx.Node] = ()

    def __init__(self, step: Step) -> None:
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for n in step.graph.nodes:
            if n.op != "output":
                new[n] = graph.node_copy(n, lambda a: new[a])
                if n.target is aten.view.default:
                    new[n].target = aten.reshape.default
        for n in _appends(step):
            new[n].target = _append
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
    """What of a state is no array."""
    return [x if size is None else None for x, size in zip(state, sizes, strict=True)]


def _appends(step: Step) -> list[fx.Node]:
    """Nodes that put rows behind a carried array and give what it is in the next step.

    Each is the only one that is made of the array before it, so no other's rows are in that memory.
    """
    found = list[fx.Node]()
    for array, last in zip(step.carry, step.next_carry, strict=True):
        chain = list[fx.Node]()
        n: Any = last
        while n is not array and _is_append(n):
            chain.append(n)
            n = n.args[0][0]
        made = [*chain[1:], array]
        alone = all(sum(_is_append(user) and user.args[0][0] is x for user in x.users) == 1 for x in made)  # pyright: ignore
        if n is array and chain and alone:
            found += chain
    return found


def _is_append(n: Any) -> bool:
    parts = n.args[0] if n.op == "call_function" and n.target is aten.cat.default else ()
    along = len(n.args) < 2 or n.args[1] == 0
    return bool(parts) and along and isinstance(next(iter(shape_of(parts[0])), None), Length)


def _append(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """An array with rows behind it, in the memory of the first, which has room for them: what is there is not moved."""
    array, *rows = parts
    length = len(array) + sum(map(len, rows))
    grown = array.as_strided((length, *array.shape[1:]), array.stride(), array.storage_offset())
    torch.cat(rows, out=grown[len(array) :]) if len(rows) > 1 else grown[len(array) :].copy_(rows[0])
    return grown


class EagerTarget:
    """Runs any step on any device, one operation of torch after the other."""

    name = "eager"
    lacks = frozenset[str]()
    calls_torch = True

    def place(self, device: torch.device) -> Place:
        """Returns a place where nothing is small: a matrix in the loop is one more operation to start."""
        return Place(device, self.name, cached=0, few_rows=0, many_rows=0, small_step=0)

    def make_core(self, step: Step) -> Core:
        """Returns the step as a graph that torch runs."""
        return EagerCore(step)

    def rows_meet(self, step: Step, count: int, own: Container[fx.Node]) -> bool:
        """Raises `Unsupported`: operations do not say which rows they read."""
        raise Unsupported("torch's operations do not say which rows they read")

    def one_thread(self, users: bool = False) -> AbstractContextManager[None]:
        """Does nothing: how many threads an operation has is torch's matter."""
        return nullcontext()
