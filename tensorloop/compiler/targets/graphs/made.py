"""Makes CUDA graphs of a step, and says what they ask of the device, or why there are none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tensorloop.compiler.lengths import grows
from tensorloop.compiler.operations import bytes_of, is_part, shares_memory, value_of
from tensorloop.compiler.step import Core, Step, Unsupported
from tensorloop.compiler.targets import ptx
from tensorloop.compiler.targets.graphs.fused_step import Joined, join
from tensorloop.compiler.targets.graphs.graph_core import GraphCore
from tensorloop.compiler.targets.graphs.held import MOST as HELD
from tensorloop.compiler.targets.graphs.held import workspace
from tensorloop.compiler.targets.graphs.recorded import CHUNKS, SIZES, STATIC, intermediate_bytes
from tensorloop.compiler.targets.graphs.slot_room import FEW, MOST, has_arrays
from tensorloop.compiler.targets.graphs.step_in_place import InPlace, jumping

# What a graph cannot hold, by torch's own tags: the host waits for a value, or the memory of a result is known late.
_NOT_RECORDED = {
    torch.Tag.data_dependent_output: "waits for a value",
    torch.Tag.dynamic_output_shape: "gives a tensor whose size depends on values",
    torch.Tag.nondeterministic_seeded: "draws random numbers",
    torch.Tag.cudagraph_unsafe: "is not for CUDA graphs",
}
# Torch computes these on the host, or looks at an outcome there, and no tag says so.
_ON_THE_HOST = {"linalg_eig", "_linalg_check_errors", "histc"}
# Ours, whose Python asks nothing: it only launches torch's own operations, which a graph repeats.
_LAUNCH = {"tensorloop::multinomial_of", "tensorloop::within"}
_AT_PLACES, _MASKS = {"index", "index_put"}, {torch.bool, torch.uint8}


def emit(step: Step) -> Core:
    """Returns the step as graphs that are recorded, and held to the eager core, when they first run."""
    check(step)
    return GraphCore(step)


def describe(step: Step) -> list[str]:
    """Returns what graphs of a step ask of the device, a line each, or why there are none."""
    try:
        check(step)
    except Unsupported as lack:
        return [f"no graph: {lack.reason}"]
    rows = [n for n in step.sequences if not grows(n)]
    kinds = {value_of(n).dtype for n in (*rows, *step.outs)}
    read, written = (sum(map(bytes_of, nodes)) for nodes in (rows, step.outs))
    held = next((size for size in SIZES if size * (read + written) <= CHUNKS), SIZES[-1]) * (read + written)
    lines = [
        f"a graph for {', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]} steps at once: a launch, and a copy for "
        f"each dtype, here {max(1, len(kinds))}; it has {_operations(step)}",
        "waits for the device once a graph" if step.going is not None else "does not wait for the device",
        f"{workspace(step.place.device):,} bytes of cuBLAS's for the graphs of each stream, and at most "
        f"{HELD // 2**20:,} MiB for the recordings of all loops; tl.cuda.clear() gives them back",
        f"{read:,} bytes read and {written:,} written a step beside the carry, at most {held:,} of them held",
    ]
    if has_arrays(step):
        lines.append(
            f"arrays lie in memory of {FEW}, {2 * FEW}, {4 * FEW} ... slots, copied there and back once a call; "
            f"what takes more than {MOST // 2**20} MiB runs step by step"
        )
    return lines


def _operations(step: Step) -> str:
    """Says what a graph has a step, and why it has no kernels of ours where it could have some."""
    count = len(_launching(step))
    if has_arrays(step):
        return f"{count} operations a step"
    joined = _joined(step)
    without = f"; no kernels of their own for some: {'; '.join(joined.lacking)}" if joined.lacking else ""
    if not joined.kernels:
        return f"{count} operations a step{without}"
    return f"{joined.launches} launches a step, {joined.kernels} of them ours, for {count} operations{without}"


def launched(step: Step) -> list[tuple[int, Sequence[fx.Node]]]:
    """Returns the launches of a step: how many, and of which of its operations; none where there are no graphs."""
    try:
        check(step)
    except Unsupported:
        return []
    if has_arrays(step):
        return [(1, (n,)) for n in _launching(step)]
    joined = _joined(step)
    torchs = (n for n in _launching(joined.step) if isinstance(n.target, torch._ops.OpOverload))
    return [*joined.pieces, *((1, (n,)) for n in torchs)]


def _launching(step: Step) -> list[fx.Node]:
    """The operations of a step that are a launch each."""
    return [n for n in step.graph.nodes if n.op == "call_function" and not shares_memory(n) and not is_part(n)]


def _joined(step: Step) -> Joined:
    return join(step, lambda piece: (list, len(ptx.describe_piece(piece.step).modules)))


def check(step: Step) -> None:
    """Raises `Unsupported` where a step cannot be recorded, or is so large that its launches are no burden."""
    if has_arrays(step):
        InPlace(step, [FEW] * len(step.growth))
        if (n := jumping(step)) is not None:
            raise Unsupported(f"a comparison sees {n.target._opname} of what is as long as an array", n)  # pyright: ignore
    for n in step.graph.nodes:
        if n.op == "call_function" and (why := _why_not(n)):
            raise Unsupported(f"{getattr(n.target, '_opname', n.name)} {why}", n)
    held = sum(bytes_of(n) for n in (*step.inputs, *step.outs, *step.sums) if not grows(n)) + intermediate_bytes(
        step.graph
    )
    if held > STATIC:
        raise Unsupported(f"a step reads and writes {held / 2**20:,.0f} MiB, more than is kept for CUDA graphs")


def _why_not(node: fx.Node) -> str:
    """Says why an operation cannot be recorded, in a few words; empty where it can."""
    if is_part(node):
        return ""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not (target.namespace == "aten" or target._name in _LAUNCH):
        return "is not torch's own: its Python would run once, and not at each step"
    if target._opname in _ON_THE_HOST:
        return "is computed by the host"
    names = [a.name for a in target._schema.arguments]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("check_errors"):
        return "waits for its outcome, to raise an error"
    if target._opname in _AT_PLACES:  # whose tag is there for masks
        masks = any(isinstance(n, fx.Node) and value_of(n).dtype in _MASKS for n in given["indices"])
        return "asks how many of a mask are true" if masks else ""
    return next((why for tag, why in _NOT_RECORDED.items() if tag in target.tags), "")
