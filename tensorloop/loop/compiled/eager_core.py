"""A recurrence run step by step in torch operations: for what a back end lacks, and to test others against."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from tensorloop.loop.compiled.operations import aten
from tensorloop.loop.compiled.recurrence import Recurrence


class EagerCore:
    """The core that any recurrence has."""

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
        self._step = fx.GraphModule(torch.nn.Module(), graph).forward
        self._sizes = len(r.carry), len(r.outs), len(r.terms)
        self._reverse, self._asks = r.reverse, bool(going)

    def __call__(
        self,
        steps: int,
        invariants: Sequence[Tensor],
        sequences: Sequence[Tensor],
        carry: Sequence[Tensor],
        outs: Sequence[Tensor],
        sums: Sequence[Tensor],
    ) -> tuple[list[Tensor], int]:
        """As `Core` says."""
        n, m, k = self._sizes
        state = list(carry)
        done = 0
        with torch.no_grad():
            while done < steps:
                t = steps - 1 - done if self._reverse else done
                found = self._step(*invariants, *(x[t] for x in sequences), *state)
                state = list(found[:n])
                for out, x in zip(outs, found[n : n + m], strict=True):
                    out[t] = x
                for total, x in zip(sums, found[n + m : n + m + k], strict=True):
                    total += x
                done += 1
                if self._asks and not found[-1]:
                    break
        return [x.clone(memory_format=torch.contiguous_format) for x in state], done
