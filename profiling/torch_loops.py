"""Gradients of torch's own loop operators and of ours, beside those of a Python loop.

    python profiling/torch_loops.py                       # seconds
    python profiling/torch_loops.py --newer-python PATH   # and under another torch, whose Python has numpy and numba

There are no clocks here: a figure is the relative distance |g - g'| / |g'| of a gradient g from the Python loop's g',
in float64, over ten random inputs. 0 is right, and 1 is what a gradient of zeros has.
"""

import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from running import harness
from running.script import Peer, Result, Script, Target
from torch import Tensor

import tensorloop as tl

SEEDS = {"quick": 2, "short": 10, "usual": 10}
STEPS = 6
APART = 1e-12

Loss = Callable[..., Tensor]


# ---- while_loop, from an init that needs no gradient: the weight is closed over, as a module's is ----


def step(i: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return i + 1, h + torch.sin(h @ w)


def python_while(h: Tensor, w: Tensor) -> Tensor:
    for _ in range(STEPS):
        h = h + torch.sin(h @ w)
    return h.square().sum()


def torch_while(h: Tensor, w: Tensor) -> Tensor:
    from torch import while_loop

    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, h: i < STEPS, lambda i, h: step(i, h, w), (start, h))[1].square().sum()


def our_while(h: Tensor, w: Tensor) -> Tensor:
    start = torch.zeros((), dtype=torch.int64)
    return tl.while_loop(lambda c: c[0] < STEPS, lambda c: step(*c, w), (start, h), checkpoints=2)[1].square().sum()


# ---- h = a h + b as an associative scan, in the mode that one gets without asking ----


def pair(earlier: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return earlier[0] * later[0], earlier[1] * later[0] + later[1]


def python_recurrence(a: Tensor, b: Tensor) -> Tensor:
    h, total = torch.zeros_like(b[0]), torch.zeros_like(b[0, 0])
    for x, y in zip(a.unbind(0), b.unbind(0), strict=True):
        h = x * h + y
        total = total + h.square().sum()
    return total


def torch_recurrence(a: Tensor, b: Tensor) -> Tensor:
    from torch._higher_order_ops import associative_scan  # it has no public name (2.11 to 2.15)

    return associative_scan(pair, (a, b), dim=0)[1].square().sum()


def our_recurrence(a: Tensor, b: Tensor) -> Tensor:
    return tl.associative_scan(pair, (a, b))[1].square().sum()


LOSSES: dict[str, dict[str, Loss]] = {
    "while_loop": {"python": python_while, "torch": torch_while, "ours": our_while},
    "associative_scan": {"python": python_recurrence, "torch": torch_recurrence, "ours": our_recurrence},
}
WANTED = {"while_loop": {"w": 1}, "associative_scan": {"a": 0, "b": 1}}  # name -> place among the inputs
TITLES = {
    "while_loop": "`while_loop`, h = h + sin(h w), init without gradient",
    "associative_scan": "`associative_scan`, h = a h + b, default mode",
}


def inputs(loop: str, seed: int) -> list[Tensor]:
    """The first tensor of while_loop's needs no gradient, all others do."""
    made = torch.Generator().manual_seed(seed)
    if loop == "while_loop":
        h, w = (torch.randn(n, 4, generator=made, dtype=torch.float64) for n in (3, 4))
        return [h, w.requires_grad_()]
    a, b = (torch.randn(7, 3, generator=made, dtype=torch.float64) for _ in range(2))
    return [(a.sigmoid() + 0.5).requires_grad_(), b.requires_grad_()]


def distances(loop: str, way: str, seed: int) -> dict[str, float]:
    """Of each gradient from the Python loop's, by name."""
    found = {}
    for name, place in WANTED[loop].items():
        given = inputs(loop, seed)
        right, other = (
            torch.autograd.grad(LOSSES[loop][how](*given), given[place], materialize_grads=True)[0]
            for how in ("python", way)
        )
        found[name] = float((other - right).norm() / right.norm())
    return found


# ---- the script ----


def newer(cell: harness.Cell) -> bool:
    return cell.get("torch") == "newer"


PEER = Peer("newer", ("numba",), newer)  # the versions of torch stand above the columns


def checks(args: Namespace) -> list[harness.Cell]:
    return [{"kind": "check", "loop": loop, "at_most": APART} for loop in LOSSES]


def cells(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": "gradient", "loop": loop, "way": way, "torch": which, "seeds": SEEDS[args.set]}
        for loop in LOSSES
        for which in ("this", "newer")
        for way in ("torch", "ours")
    ]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    if cell["kind"] == "check":
        return {"apart": max(max(distances(cell["loop"], "ours", seed).values()) for seed in range(3))}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [distances(cell["loop"], cell["way"], seed) for seed in range(cell["seeds"])]
    answer = {f"{name} {what}": pick(x[name] for x in found) for name in found[0] for what, pick in EXTREMES.items()}
    return answer | {"warnings": len(said), "version": torch.__version__.split("+")[0]}


EXTREMES = {"least": min, "most": max}


def version(result: Result, which: str) -> str | None:
    found = (raw.get("version") for e in result["entries"] if e["cell"]["torch"] == which for raw in e["raw"])
    return next(filter(None, found), None)


def text_of(result: Result, loop: str, name: str, **cell: str) -> str:
    least, most = (harness.figure(result, f"{name} {what}", loop=loop, **cell) for what in EXTREMES)
    if least is None or most is None:
        return harness.why_not(result, loop=loop, **cell)
    same = harness.digits(least) == harness.digits(most)
    return harness.digits(most) if same else f"{harness.digits(least)} to {harness.digits(most)}"


def section(result: Result, picture: str) -> str:
    versions = {which: found for which in ("this", "newer") if (found := version(result, which))}
    header = ["loop", "gradient of"]
    header += [f"{way} {name}" for name in versions.values() for way in ("torch", "tensorloop with")]
    rows = [
        [
            TITLES[loop],
            name,
            *(text_of(result, loop, name, torch=w, way=x) for w in versions for x in ("torch", "ours")),
        ]
        for loop, names in WANTED.items()
        for name in names
    ]
    warned = sum(raw.get("warnings", 0) for entry in result["entries"] for raw in entry["raw"])
    return "\n\n".join(
        [
            "Relative distance of the gradient from a Python loop's, least to most over the inputs: 0 is right, 1 is a "
            f"gradient of zeros. *error*: it raises. Warnings, of all ways together: {warned}.",
            harness.table(header, rows, text_columns=2),
        ]
    )


def summary(result: Result) -> list[str]:
    """What ours are apart, and how far torch's are in the version that is installed."""
    (ours,) = targets(result)
    if ours.value is None:
        return []
    theirs = {
        f"{TITLES[loop]}, gradient of {name}": text_of(result, loop, name, torch="this", way="torch")
        for loop, names in WANTED.items()
        for name in names
    }
    return [
        f"tensorloop's gradients agree with a Python loop's to {harness.digits(ours.value)}. Those of torch's own "
        "operators are off by:",
        "\n".join(f"- {what}: {text.replace('error', 'it raises')}" for what, text in theirs.items()),
    ]


def targets(result: Result) -> list[Target]:
    found = [
        harness.figure(result, f"{name} most", loop=loop, torch="this", way="ours")
        for loop, names in WANTED.items()
        for name in names
    ]
    known = [x for x in found if x is not None]
    return [Target("tensorloop's gradients, distance from the Python loop's", max(known, default=None), APART)]


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 1},
    checks=checks,
    targets=targets,
    peers=(PEER,),
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
