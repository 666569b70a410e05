"""Complex numbers as pairs of real ones: a step's graph written again, so that nothing behind it knows of them.

That is done before gradients are looked for. Torch's gradient of a complex tensor is the gradient with respect to its
real part plus i times that with respect to its imaginary part: what the pair's two gradients say.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback

from tensorloop._torch.tracing import decompositions, traced
from tensorloop.compiler.graph.complex_rules import Pair, rules
from tensorloop.compiler.graph.decompositions import before_autograd
from tensorloop.compiler.operations import values_of
from tensorloop.compiler.trace import Trace


def split_pairs(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns every complex tensor as two real ones; gradients flow."""
    found: list[Tensor] = []
    for x in tensors:
        x = x.resolve_conj().resolve_neg()
        found += torch.view_as_real(x).unbind(-1) if x.is_complex() else [x]
    return found


def join_pairs(parts: Sequence[Tensor], like: Iterable[Tensor]) -> list[Tensor]:
    """The tensors whose parts these are: as many as there are in `like`, complex where those are."""
    left = iter(parts)
    return [torch.complex(next(left), next(left)) if x.is_complex() else next(left) for x in like]


def to_pairs(
    trace: Trace, module: fx.GraphModule, examples: Sequence[Tensor], wants: Sequence[bool]
) -> tuple[Trace, fx.GraphModule, list[Tensor], list[bool]]:
    """The step, its graph, its inputs and which of them want gradients, without complex numbers."""
    if not any(x.is_complex() for n in module.graph.nodes for x in values_of(n)):
        return trace, module, list(examples), list(wants)
    module = _with_rules(module, examples)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in module.graph.nodes if n.op == "output")

    def again(*tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        given = [Pair(next(left), next(left)) if _is_complex(n) else next(left) for n in inputs]
        found: list[Tensor] = []
        for x in _InPairs(module).run(*given):  # pyright: ignore[reportArgumentType]
            found += x if isinstance(x, Pair) else [x]
        return found

    flat = [x.detach() for x in split_pairs(examples)]
    with traceback.preserve_node_meta():
        new = traced(again, flat, before_autograd())
    counts = [1 + _is_complex(n) for n in inputs]
    wide = [want for want, count in zip(wants, counts, strict=True) for _ in range(count)]
    n, m = len(trace.carry), len(trace.sequences)
    ends = [sum(counts[:k]) for k in (n, n + m, len(counts))]
    outputs = [1 + _is_complex(x) for x in output.args[0]]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues, reportOptionalIterable]
    last, all_outs = sum(outputs[:n]), sum(outputs[: n + len(trace.outs)])
    paired = dataclasses.replace(
        trace,
        operations=(),
        carry=range(ends[0]),
        sequences=range(*ends[:2]),
        invariants=range(*ends[1:]),
        next_carry=range(last),
        outs=range(last, all_outs),
    )
    return paired, new, flat, wide


def _with_rules(module: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    """The graph with operations on complex numbers that torch takes apart as it does real ones."""
    met = {n.target for n in module.graph.nodes if n.op == "call_function" and _is_complex(n)}
    table = decompositions([target for target in met if getattr(target, "_opname", "") in _TORCHS])
    if not table:
        return module
    with traceback.preserve_node_meta():
        return traced(fx.Interpreter(module).run, [x.detach() for x in examples], {**before_autograd(), **table})


_TORCHS = "addcmul", "addcdiv", "block_diag", "linalg_cross"


def _is_complex(n: fx.Node) -> bool:
    return any(x.is_complex() for x in values_of(n))


class _InPairs(fx.Interpreter):
    """Runs a graph with a pair for each complex tensor."""

    def run_node(self, n: fx.Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        if n.op != "call_function" or not (_is_complex(n) or any(isinstance(x, Pair) for x in _flat(args))):
            return super().run_node(n)
        if n.target is operator.getitem:
            return args[0][args[1]]
        rule = rules().get(n.target)
        with traceback.set_current_meta(n):
            _, kwargs = self.fetch_args_kwargs_from_env(n)
            found = NotImplemented if rule is None else rule(*args, **kwargs)
            return _fitted(_joined(n.target)(*args, **kwargs) if found is NotImplemented else found, n.meta.get("val"))


def _joined(operation: Any) -> Callable[..., Any]:
    """The operation itself, on complex numbers: who has none of these calls torch for it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return _halves(operation(*_whole(args), **kwargs))

    return run


def _whole(x: Any) -> Any:
    if isinstance(x, Pair):
        return torch.complex(*x) if isinstance(x.re, Tensor) else complex(*x)
    return type(x)(map(_whole, x)) if type(x) in (list, tuple) else x


def _halves(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_halves(y) for y in x]
    return Pair(*torch.view_as_real(x.resolve_conj()).unbind(-1)) if isinstance(x, Tensor) and x.is_complex() else x


def _flat(args: Any) -> Iterable[Any]:
    for x in args:
        if isinstance(x, (list, tuple)) and not isinstance(x, Pair):
            yield from _flat(x)
        else:
            yield x


def _fitted(x: Any, like: Any) -> Any:
    """A pair in the dtype and shape that the complex tensor had."""
    if isinstance(x, Pair):
        return Pair(*(part.to(like.dtype.to_real()).expand(like.shape) for part in x))
    return [_fitted(y, z) for y, z in zip(x, like, strict=True)] if isinstance(x, (list, tuple)) else x
