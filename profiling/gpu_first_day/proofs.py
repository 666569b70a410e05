"""Every case of the tests of compiled loops as graphs and as kernels, beside the eager loop of this device."""

from functools import partial
from typing import Any

import torch
from compiled_loops import gpu_counts
from gpu_first_day.kept import ERROR
from gpu_first_day.world import Items, World, fell, kernels, short, told

from tensorloop.loop.compiled.run.plan import plans
from tests.support.compiled_cases import CASES, check_equal, outcome

WAYS = {"graphs": False, "kernels": True}  # pieces of graphs that are fused are in `graphs`, where they are the default
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}


def items(world: World) -> Items:
    refused = gpu_counts.refusals()
    return {
        f"{way} {str(dtype).removeprefix('torch.')} {name}": partial(proof, way, dtype, name, refused)
        for dtype in CLOSE
        for way in WAYS
        for name in CASES
    }


def proof(way: str, dtype: torch.dtype, name: str, refused: list[str]) -> dict[str, Any]:
    """Values and gradients, at the first call, which proves what runs, and at the second."""
    plans.clear()
    refused.clear()
    with told() as notes, kernels(WAYS[way]):
        wrong = ""
        expected = outcome(CASES[name], dtype, False)
        for call in ("first", "second"):
            found = outcome(CASES[name], dtype, True)
            try:
                check_equal([*found[0], *found[1]], [*expected[0], *expected[1]], CLOSE[dtype])
            except AssertionError as error:
                wrong = f"the {call} call is wrong: {short(error)}"
                break
    row: dict[str, Any] = {"notes": notes, "fell": fell(notes)}
    if wrong:
        return row | {ERROR: wrong}
    if refused:
        row["refused"] = refused[0]  # asked for as a kernel, and recorded as graphs: by a bound, not by a fault
    return row | {"said": "; ".join(["right", *row["fell"]])}
