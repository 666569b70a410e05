"""A recurrence run step by step in torch operations: for what a back end lacks, and to test others against."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from tensorloop.compiler.lengths import Length, Sized, shape_of
from tensorloop.compiler.operations import aten
from tensorloop.compiler.step import CoreCall, Recurrence


class EagerCore:
    """The core that any recurrence has."""

    way = "torch, step by step"

    def __init__(self, recurrence: Recurrence) -> None:
        r = recurrence
        graph, found = fx.Graph(), dict[fx.Node, fx.Node]()
        for n in r.graph.nodes:
            if n.op != "output":
                found[n] = graph.node_copy(n, lambda a: found[a])
                if n.target is aten.view.default:
                    found[n].target = aten.reshape.default
        going = () if r.going is None else (r.going,)
        graph.output(tuple(found[n] for n in (*r.next_carry, *r.outs, *r.terms, *going)))
        self._module = fx.GraphModule(torch.nn.Module(), graph)
        self._growth = r.growth
        first = [next(iter(shape_of(n)), None) for n in (*r.sequences, *r.carry)]
        self._sizes_of_arrays = [size if isinstance(size, Length) else None for size in first]
        self._sizes = len(r.carry), len(r.outs), len(r.terms)
        self._reverse, self._asks = r.reverse, bool(going)

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        """Runs the steps one after the other and returns the last carry, and how many there were."""
        steps, invariants, sequences, carry, outs, sums, lengths = call
        n, m, k = self._sizes
        of_sequences, of_carry = self._sizes_of_arrays[: len(sequences)], self._sizes_of_arrays[len(sequences) :]
        state = [x if size is None else x[: size.at(lengths)] for x, size in zip(carry, of_carry, strict=True)]
        step = self._module.forward
        done = 0
        with torch.no_grad():
            while done < steps:
                t = steps - 1 - done if self._reverse else done
                now = [n + more * done for n, more in zip(lengths, self._growth, strict=True)]
                if now:
                    step = Sized(self._module, now).run
                pairs = zip(sequences, of_sequences, strict=True)
                rows = [x[t] if size is None else x[: size.at(now)] for x, size in pairs]
                found = step(*invariants, *rows, *state)
                state = list(found[:n])
                for out, x in zip(outs, found[n : n + m], strict=True):
                    out[t] = x
                for total, x in zip(sums, found[n + m : n + m + k], strict=True):
                    total += x
                done += 1
                if self._asks and not found[-1]:
                    break
        for i, size in enumerate(of_carry):
            if size is not None and done:
                carry[i][: len(state[i])] = state[i]
        own = [x.clone(memory_format=torch.contiguous_format) for x in state]
        return [y if size is None else x for x, y, size in zip(carry, own, of_carry, strict=True)], done

    def fits(self, steps: int, lengths: Sequence[int]) -> bool:
        """Whether so many steps stay in their memory. They do: torch checks each index itself."""
        return True

    def stepping(self, invariants: Sequence[Tensor]) -> Callable[[CoreCall], tuple[list[Tensor], int]]:
        """Returns this core: it prepares nothing that many calls could share."""
        return self
