"""Recurrences made of small step functions by the passes that loops go through, and their graphs run node by node."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop._torch.tracing import traced, without_writes
from tensorloop.compiler.graph.decompositions import after_autograd, before_autograd
from tensorloop.compiler.graph.simplify import simplified
from tensorloop.compiler.step import CoreCall, Step
from tensorloop.compiler.targets.choose import find_place

Body = Callable[..., dict[str, Any]]
Given = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]  # invariants, sequences, carry


def recurrence(
    step: Body,
    invariants: Sequence[Tensor] = (),
    sequences: Sequence[Tensor] = (),
    carry: Sequence[Tensor] = (),
    *,
    reverse: bool = False,
) -> Step:
    """step(invariants, slices, carry) -> {"carry": [...], "outs": [...], "sums": [...], "going": bool tensor}, traced.

    `sequences` have their steps in dim 0, at least one.
    """
    counts: dict[str, int] = {}

    def flat(*tensors: Tensor) -> list[Tensor]:
        a, b = len(invariants), len(invariants) + len(sequences)
        made = step(tensors[:a], tensors[a:b], tensors[b:])
        parts = {name: list(made.get(name, ())) for name in ("carry", "outs", "sums")}
        parts["going"] = [made["going"]] if "going" in made else []
        counts.update({name: len(part) for name, part in parts.items()})
        return [one for part in parts.values() for one in part]

    examples = [*invariants, *(one[0].contiguous() for one in sequences), *carry]
    module = traced(without_writes(flat), examples, before_autograd())
    graph = simplified(traced(module.forward, examples, after_autograd()).graph)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    results = list(graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
    taken, start = {}, 0
    for name, count in counts.items():
        taken[name] = tuple(results[start : start + count])
        start += count
    a, b = len(invariants), len(invariants) + len(sequences)
    return Step(
        graph,
        tuple(places[:a]),
        tuple(places[a:b]),
        tuple(places[b:]),
        taken["carry"],  # pyright: ignore[reportArgumentType]
        taken["outs"],  # pyright: ignore[reportArgumentType]
        taken["sums"],  # pyright: ignore[reportArgumentType]
        taken["going"][0] if taken["going"] else None,  # pyright: ignore[reportArgumentType]
        reverse,
        place=find_place([]),
    )


def interpreted(rec: Step, call: CoreCall) -> tuple[list[Tensor], int]:
    """Does what a core does, node by node in torch."""
    steps, invariants, sequences, carry, outs, sums, _ = call
    interpreter = fx.Interpreter(fx.GraphModule(torch.nn.Module(), rec.graph))
    now, done = list(carry), 0
    names = rec.outputs
    wanted = rec.graph.output_node().args[0]
    assert len(names) == len(wanted)  # pyright: ignore[reportArgumentType]
    for turn in range(steps):
        t = steps - 1 - turn if rec.reverse else turn
        made = list(interpreter.run(*invariants, *(one[t] for one in sequences), *now))
        now, rest = made[: len(now)], made[len(now) :]
        for place, value in zip(outs, rest, strict=False):
            place[t].copy_(value)
        for total, value in zip(sums, rest[len(outs) :], strict=False):
            total.add_(value)
        done += 1
        if rec.going is not None and not bool(rest[-1]):
            break
    return [one.clone() for one in now], done


def places(rec: Step, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """(outs, sums) to fill: ones that show what was not written, and sums that are not zero before."""
    outs = [torch.full((steps, *one.meta["val"].shape), 7).to(one.meta["val"].dtype) for one in rec.outs]
    sums = [torch.ones(one.meta["val"].shape, dtype=one.meta["val"].dtype) for one in rec.sums]
    return outs, sums


def assert_same(
    core: Any,
    rec: Step,
    steps: int,
    invariants: Sequence[Tensor] = (),
    sequences: Sequence[Tensor] = (),
    carry: Sequence[Tensor] = (),
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """A core and the interpreter agree in all that they give."""
    mine, sums = places(rec, steps)
    theirs, totals = places(rec, steps)
    sequences = [one[:steps].contiguous() for one in sequences]
    last, done = core(CoreCall(steps, invariants, sequences, carry, mine, sums))
    expected, count = interpreted(rec, CoreCall(steps, invariants, sequences, carry, theirs, totals))
    assert done == count
    for name, a, b in (("carry", last, expected), ("outs", mine, theirs), ("sums", sums, totals)):
        for n, (one, other) in enumerate(zip(a, b, strict=True)):
            where = f"{name}[{n}]"
            torch.testing.assert_close(
                one, other, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, w=where: f"{w}: {m}"
            )
