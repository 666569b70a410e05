"""The examples in the docstrings of public names: each has one, and it gives what it says."""

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tensorloop as tl

# rooms that say in `__all__` what they offer
FACES = ("beam", "compat", "distributed", "hf", "loop", "ordering", "packed", "risk", "schedule", "testing")
FILES = ("cuda", "memory")  # what they define is what they offer
MAIN = ("TensorArray", "PackedTensor", "Dim", "RegroupPlan", "beam.Hypotheses", "beam.Lattice", "hf.TrainCache")
MAIN += ("ordering.Graph", "ordering.Ordering", "ordering.Permutation", "schedule.Schedule", "memory.Tracker")
PARTS = {  # what an array of this library, a test or a file is told about, and no user asks
    *("Dim.claim", "Dim.same", "Dim.to", "Dim.device", "Dim.row_ids", "Dim.positions"),
    *("Dim.total", "Dim.max_len"),
    *("ordering.Ordering.graph", "ordering.Ordering.block_size", "ordering.Ordering.permutation"),
    *("ordering.Ordering.inverse", "ordering.Ordering.blocks", "ordering.Permutation.on"),
    *("ordering.Permutation.is_identity", "hf.TrainCache.of_layers"),
    *("memory.Tracker.as_dict", "memory.Tracker.plot", "memory.Tracker.reset_peak", "memory.Tracker.save"),
}


def offered() -> dict[str, Any]:
    """Every public name, under the first place that has it."""
    found = {name: getattr(tl, name) for name in tl.__all__}
    for room in (*FACES, *FILES):
        module = importlib.import_module(f"tensorloop.{room}")
        names = module.__all__ if room in FACES else [name for name in vars(module) if not name.startswith("_")]
        things = {f"{room}.{name}": getattr(module, name) for name in names}
        ours = {
            name: thing for name, thing in things.items() if getattr(thing, "__module__", "").startswith("tensorloop")
        }
        found |= {name: thing for name, thing in ours.items() if callable(thing)}
    first = {id(thing): name for name, thing in reversed(found.items())}
    return {name: found[name] for name in found if first[id(found[name])] == name}


def members(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """What a main class says of its own; what a packed tensor has from torch is torch's to explain."""
    for base in kind.__mro__:
        for member, thing in vars(base).items() if base.__module__.startswith("tensorloop") else ():
            torch_s = name == "PackedTensor" and hasattr(torch.Tensor, member)
            if not (torch_s or member.startswith("_")) and (
                callable(thing) or isinstance(thing, property | classmethod)
            ):
                yield f"{name}.{member}", getattr(kind, member)


THINGS = {name: thing for name, thing in offered().items() if name not in PARTS}
MEMBERS = {name: thing for kind in MAIN for name, thing in members(kind, THINGS[kind]) if name not in PARTS}

EVERYTHING = THINGS | MEMBERS
TOGETHER = (*MAIN, "schedule")  # what these have may be shown in the example of another part of them


def example_of(name: str, thing: Any) -> doctest.DocTest:
    names = {"torch": torch, "tl": tl, "F": F}
    return doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", names, name, None, None)


def failures(test: doctest.DocTest) -> str:
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)


def shows(thing: Any, name: str) -> bool:
    """Whether the example of something has a name in it, in code or output."""
    examples = example_of("", thing).examples
    return re.search(rf"\b{name}\b", "".join(part.source + part.want for part in examples)) is not None


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_public_name_has_an_example_that_holds(name: str) -> None:
    torch.manual_seed(0)
    test = example_of(name, EVERYTHING[name])
    if not test.examples:
        where, _, last = name.rpartition(".")
        beside = [
            thing for other, thing in EVERYTHING.items() if where in TOGETHER and f"{other}.".startswith(f"{where}.")
        ]
        assert any(shows(thing, last) for thing in beside), (
            f"the docstring of {name} has no example, nor does one beside it show it: add `Example:` at its end"
        )
    assert failures(test) == ""


def test_names_are_found() -> None:
    assert {"scan", "beam.TopK", "memory.growth", "schedule.Binomial", "hf.rollout"} <= set(THINGS)
    assert {"TensorArray.append", "PackedTensor.pad", "ordering.Graph.within"} <= set(MEMBERS)
    assert "PackedTensor.sin" not in MEMBERS
    assert set(offered()) | {name for kind in MAIN for name, _ in members(kind, THINGS[kind])} >= PARTS


def test_an_example_that_does_not_hold_is_seen() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert "Expected:\n    3\nGot:\n    2" in failures(test)
