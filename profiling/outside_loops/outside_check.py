"""How a loop of another package is compared with its port: values, gradients, processor time, bytes kept, lines.

A `Loop` makes the package's original and its port with one set of parameters. Values and gradients are compared in
float64, times are of float32.
"""

import ast
import inspect
import re
import statistics
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tensorloop as tl
from tensorloop.loop import NotCompiledWarning

WAYS = ("original", "eager", "compiled")
AT_MOST = 1e-9  # of the largest value: float64, sums in another order


class Size(NamedTuple):
    """How large a loop is; a loop takes of it what it has."""

    steps: int = 256
    rows: int = 8
    width: int = 32


class Made(NamedTuple):
    """Both loops, the same arguments for each, and what else gets a gradient."""

    original: Callable[..., Any]
    port: Callable[..., Any]
    """Takes `compile=` too."""
    inputs: tuple[Any, ...]
    parameters: Sequence[Tensor] = ()


class Loop(NamedTuple):
    """A loop of a package."""

    package: str
    name: str
    make: Callable[[Size], Made]
    found: str | None = None
    """The function in which the original's loop stands, by its dotted name."""
    wraps: bool = False
    """The port calls the package's own step."""
    compiles: bool = True
    """The port has a loop with `compile=`."""
    at_most: float = AT_MOST
    double: bool = True
    """The package takes float64; else values are compared in float32."""
    others: tuple[int, ...] = (0, 1, 11)
    """Other numbers of steps that are compared, where the arguments have a dim of steps."""
    group: str = ""
    """Of many of a package: the row of the table in which it is counted."""
    note: str = ""


def find(path: str) -> Any:
    """A class, function or method by its dotted name; packages are imported where they are used."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found = import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not (error.name and ".".join(parts[:count]).startswith(error.name)):
                raise
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(parts[0], name=parts[0])


@contextmanager
def floats(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have this dtype: packages make their zeros themselves."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def leaves_of(made: Made) -> list[Tensor]:
    """All tensors that get a gradient."""
    found = [x for x in pytree.tree_leaves(made.inputs) if isinstance(x, Tensor) and x.requires_grad]
    return [*found, *(weight for weight in made.parameters if weight.requires_grad)]


def ways_of(loop: Loop, made: Made) -> dict[str, Callable[..., Any]]:
    """The original and the port as they are called."""
    ways = {"original": made.original, "eager": partial(made.port, compile=False)}
    return ways | ({"compiled": partial(made.port, compile=True)} if loop.compiles else {})


def outputs_of(run: Callable[..., Any], made: Made) -> list[Tensor]:
    """All tensors of a result, in order."""
    return [x for x in pytree.tree_leaves(run(*made.inputs)) if isinstance(x, Tensor)]


def directed(outputs: list[Tensor]) -> Tensor:
    """A number that depends on every output, by directions that are the same for all ways."""
    generator = torch.Generator().manual_seed(1)
    total = outputs[0].new_zeros((), dtype=torch.get_default_dtype())
    for x in outputs:
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        if x.requires_grad:
            parts = torch.view_as_real(x).sum(-1) if x.is_complex() else x
            total = total + (parts * direction.to(total.dtype)).sum()
    return total


def results(run: Callable[..., Any], made: Made) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and the gradients of all that gets one."""
    outputs, leaves = outputs_of(run, made), leaves_of(made)
    loss = directed(outputs)
    if not leaves or not loss.requires_grad:
        return [x.detach() for x in outputs], []
    return [x.detach() for x in outputs], list(torch.autograd.grad(loss, leaves, allow_unused=True))


def apart(x: Tensor | None, y: Tensor | None) -> float:
    """How far two are apart, of the larger one's largest value; infinite where shapes or non-finite places differ."""
    if x is None or y is None:
        other = y if x is None else x
        return 0.0 if other is None or not other.abs().any() else float("inf")
    if x.shape != y.shape or x.is_complex() != y.is_complex():
        return float("inf")
    if not x.numel():
        return 0.0
    if not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    x, y = (z[x.isfinite()].to(torch.complex128 if z.is_complex() else torch.float64) for z in (x, y))
    scale = max(1e-6, *(z.abs().max().item() if z.numel() else 0.0 for z in (x, y)))
    return (x - y).abs().max().item() / scale if x.numel() else 0.0


def compare(loop: Loop, size: Size) -> dict[str, Any]:
    """How far values and gradients of the port are from the original's, eager and compiled, in float64."""
    found: dict[str, Any] = {}
    with floats(torch.float64 if loop.double else torch.float32):
        torch.manual_seed(0)
        made = loop.make(size)
        runs = ways_of(loop, made)
        expected = results(runs.pop("original"), made)
        for way, run in runs.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                got = results(run, made)
            falls = [str(w.message) for w in caught if issubclass(w.category, NotCompiledWarning)]
            if falls:
                found["fell"] = re.sub(r"/[^ ]*/", "", falls[0])  # without the folders of this machine
            for kind, ours, theirs in zip(("values", "gradients"), got, expected, strict=True):
                if len(ours) != len(theirs):
                    found[f"{way}_{kind}"] = float("inf")
                    continue
                distances = [apart(x, y) for x, y in zip(ours, theirs, strict=True)]
                found[f"{way}_{kind}"] = max(distances, default=0.0)
    return found


def measure(loop: Loop, size: Size, budget_s: float, turns: int) -> dict[str, Any]:
    """Processor seconds of forward and backward, in turns, the median of each; and bytes kept for backward."""
    with floats(torch.float32):
        torch.manual_seed(0)
        made = loop.make(size)
        runs = ways_of(loop, made)
        kept = {
            f"{way}_bytes": tl.memory.saved_bytes(lambda run=run: outputs_of(run, made)) for way, run in runs.items()
        }
        for run in list(runs.values()) * 2:
            spend(run, made)
        seconds: list[dict[str, float]] = []
        begin = time.process_time()
        while len(seconds) < turns and (len(seconds) < 3 or time.process_time() - begin < budget_s):
            seconds.append({way: spend(run, made) for way, run in runs.items()})
    return {f"{way}_s": statistics.median(turn[way] for turn in seconds) for way in runs} | kept


def spend(run: Callable[..., Any], made: Made) -> float:
    """Processor seconds of a forward and backward pass."""
    leaves = leaves_of(made)
    begin = time.process_time()
    loss = directed(outputs_of(run, made))
    if leaves and loss.requires_grad:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    return time.process_time() - begin


def lines_of(loop: Loop, made: Made) -> dict[str, int]:
    """Lines of code of the port, and of the statement that is the original's loop; without comments and docstrings."""
    found = {"port_lines": code_lines(ast.parse(source_of(made.port)))}
    if loop.found:
        loops = [
            node for node in ast.walk(ast.parse(source_of(find(loop.found)))) if isinstance(node, ast.For | ast.While)
        ]
        if loops:
            found["original_lines"] = max(code_lines(node) for node in loops)
    return found


def source_of(function: Any) -> str:
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function)))


def code_lines(tree: ast.AST) -> int:
    """Lines of code, a statement in as few as it needs; without docstrings and comments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


def report_of(loop: Loop, size: Size) -> dict[str, Any]:
    """What `same_loop` says of the port, for several numbers of steps too."""
    torch.manual_seed(0)
    made = loop.make(size)
    tensors = [x for x in pytree.tree_leaves(made.inputs) if isinstance(x, Tensor)]
    sizes = {"T": (size.steps, *loop.others)} if any(size.steps in x.shape for x in tensors) and loop.others else {}
    try:
        report = tl.testing.same_loop(made.original, made.port, *made.inputs, sizes=sizes, atol=loop.at_most, repeats=0)
    except Exception as error:
        return {"differences": [], "stopped": f"{type(error).__name__}: {error}"[:300]}
    return {"differences": report.differences[:2], "cases": report.cases}


def check(loop: Loop, small: Size, large: Size, budget_s: float, turns: int = 9) -> dict[str, Any]:
    """All that is found of a loop."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {key: getattr(loop, key) for key in ("name", "group", "wraps", "note")}
    distances = compare(loop, small)
    found |= {key: distances.pop(key) for key in ("fell",) if key in distances}
    found["apart"] = max(distances.values())
    found |= report_of(loop, small)
    found["same"] = found["apart"] <= loop.at_most and not found["differences"]
    with floats(torch.float32):
        found |= lines_of(loop, loop.make(small))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return found | measure(loop, large, budget_s, turns)
