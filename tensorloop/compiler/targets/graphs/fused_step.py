"""A step with its pieces as kernels of ours, for graphs of fewer launches; torch's own operations where those fail."""

import dataclasses
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop._torch.grad_modes import lasting
from tensorloop._torch.tracing import without_modes
from tensorloop.compiler.operations import shares_memory
from tensorloop.compiler.step import Step, Unsupported
from tensorloop.compiler.targets import ptx
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.graphs.pieces import SmallPiece, cut, is_free, seen_beyond

Run = Callable[..., list[Tensor]]


class Joined(NamedTuple):
    """A step with calls in the place of pieces, its launches, those of kernels of ours, why pieces are torch's.

    pieces: for each piece that is kernels of ours, how many, and its operations.
    """

    step: Step
    launches: int
    kernels: int
    lacking: tuple[str, ...]
    pieces: Sequence[tuple[int, Sequence[fx.Node]]]


class FusedStep:
    """Has what a graph records: kernels of ours where there are some, until `give_up`."""

    def __init__(self, step: Step, plain: fx.GraphModule) -> None:
        self._step, self._plain, self._lock = step, plain, threading.Lock()
        self._fused: fx.GraphModule | None = None
        self.why_not = ""  # why a step that had kernels has none any more

    @property
    def used(self) -> bool:
        """Whether kernels of ours are in what is recorded."""
        return not self.why_not and self._fused is not None and self._fused is not self._plain

    def module(self) -> fx.GraphModule:
        """Returns the step as it is to be recorded; its kernels are made once."""
        with self._lock:
            self._fused = self._fused or self._made()
            return self._plain if self.why_not else self._fused

    def _made(self) -> fx.GraphModule:
        with lasting(), without_modes():
            joined = join(self._step, lambda piece: (found := ptx.PieceKernels(piece.step), len(found.text.modules)))
        return EagerCore(joined.step).module if joined.kernels else self._plain

    def give_up(self, why: str) -> None:
        """Leaves all to torch's operations from now on."""
        self.why_not = why


def join(step: Step, make: Callable[[SmallPiece], tuple[Run, int]]) -> Joined:
    """Returns a step with what `make` makes of its pieces, and how many launches each is.

    A piece of which nothing is made, or that does not pay, stays as it is.
    """
    found, home, lacking = cut(step), dict[fx.Node, tuple[SmallPiece, Run]](), dict[str, None]()
    ours: list[tuple[int, Sequence[fx.Node]]] = []
    for piece in found.pieces:
        try:
            run, count = make(piece)
        except Unsupported as lack:
            lacking[lack.reason] = None
            continue
        if piece.pays(count):
            home |= dict.fromkeys(piece.own, (piece, run))
            ours.append((count, piece.own))
    joined, kernels = _with_calls(step, found.order, home), sum(count for count, _ in ours)
    torchs = (n for n in joined.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return Joined(joined, kernels + sum(not shares_memory(n) for n in torchs), kernels, tuple(lacking), ours)


def _with_calls(step: Step, order: Sequence[fx.Node], home: Mapping[fx.Node, tuple[SmallPiece, Run]]) -> Step:
    """The step with a call where the first operation of a piece stands; what only a piece looks at goes with it."""
    graph, new, begun, needed = fx.Graph(), dict[fx.Node, fx.Node](), set[SmallPiece](), seen_beyond(step, home)
    for n in order:
        if n not in home:
            if n.op == "placeholder" or n in needed or not is_free(n):
                new[n] = graph.node_copy(n, lambda a: new[a])
            continue
        piece, run = home[n]
        if piece in begun:
            continue
        begun.add(piece)
        call = graph.call_function(_named(run), tuple(new[a] for a in piece.given))
        for i, out in enumerate(piece.outs):
            new[out] = graph.call_function(operator.getitem, (call, i))
            new[out].meta = dict(out.meta)
    names = ("invariants", "sequences", "carry", "next_carry", "outs", "sums")
    roles: Any = {name: tuple(new[n] for n in getattr(step, name)) for name in names}
    return dataclasses.replace(step, graph=graph, going=None if step.going is None else new[step.going], **roles)


def _named(run: Run) -> Run:
    """A function, which is what a graph calls."""

    def piece(*given: Tensor) -> list[Tensor]:
        return run(*given)

    return piece
