"""Loops with `compile=True` where `torch.compile` traces: dynamo runs what is here, and writes one operation down.

What it cannot take breaks the graph, and the loop runs as it does without `torch.compile`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from tensorloop._common.errors import Fact
from tensorloop._torch import transforms
from tensorloop._torch.dispatch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from tensorloop._torch.dynamo import (
    NotInGraph,
    constant_in_graphs,
    graph_operator,
    operators_of,
    run_as_graph,
    undisturbed,
)
from tensorloop._torch.fake import fake_tensors
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import NATIVE, Refused
from tensorloop.compiler.targets.choose import find_place
from tensorloop.compiler.trace import Ref, Trace
from tensorloop.loop.compiled import front
from tensorloop.loop.compiled.in_graphs.changing_floats import use_as_tensors
from tensorloop.loop.compiled.in_graphs.operators import LOOP, prepared_loop
from tensorloop.loop.compiled.in_graphs.step_text import StepText, to_text
from tensorloop.loop.compiled.look import autocast
from tensorloop.loop.compiled.look.operation_log import OperationLog
from tensorloop.loop.outputs import place
from tensorloop.packed.table.base import is_packed

_C = TypeVar("_C", bound=Callable[..., Any])
_PLAIN = Tensor, torch.nn.Parameter
_DEVICE = torch.ops.prim.device.default


@constant_in_graphs
@functools.cache
def operator() -> Any:
    """Returns the operator for which dynamo traces a step."""
    return graph_operator("tensorloop_loop", make)


def make(
    module: fx.GraphModule,
    examples: Sequence[Tensor],
    more: Sequence[Any],
    *,
    carry: int,
    reverse: bool = False,
    k: int | None = None,
    numbered: bool = False,
) -> tuple[Any, str]:
    """The operation that stands for a loop, and its step as text; `module` is one step that dynamo traced."""
    captures = [x for x in more if isinstance(x, Tensor)]
    grad = torch.is_grad_enabled()
    wants = [grad and x.requires_grad for x in (*examples, *captures)]
    try:
        _check(module, [*examples, *captures])
        use_as_tensors(module, [*examples, *more])
        inputs = [_Like(x) if isinstance(x, Tensor) else int(x) for x in (*examples, *more)]
        step = undisturbed(lambda: _trace(module, inputs, carry, len(examples), numbered))
        text = to_text(dataclasses.replace(step, reverse=reverse, k=k))
        plan = prepared_loop(text, wants).plan
    except Refused as refusal:
        raise NotInGraph(f"{refusal.reason}; {refusal.cure}") from None
    except Exception as error:  # a body that torch cannot trace
        text = str(error).strip().partition("\n")[0]
        raise NotInGraph(f"its step does not become a graph, {type(error).__name__}: {text}") from None
    if plan.lacking is not None and plan.forward.core is not None:
        raise NotInGraph(f"the loop's core lacks a native form, {plan.lacking.reason}; {NATIVE}")
    return LOOP, text


class _Like:
    """The shape and dtype of a tensor in a graph that is being traced."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype = [int(n) for n in x.shape], x.dtype


class _FakeLog(OperationLog):
    """Writes down a step of tensors that have no numbers: asking them for their device is an operation, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation and writes it down."""
        return func(*args) if func is _DEVICE else super().__torch_dispatch__(func, types, args, kwargs)

    def check_number(self, number: int) -> None:
        """Refuses what is less exact with the number of the step as a tensor of one than with Python's: floats."""
        of_number = {number}  # tensors that are made of the number alone
        for o in self.written.operations:
            given = {x.number for x in tree_leaves([o.args, o.kwargs]) if isinstance(x, Ref)}
            if given and given <= of_number:
                results = {x.number for x in tree_leaves(o.results) if isinstance(x, Ref)}
                if any(self.written.tensors[x].is_floating_point() for x in results):
                    raise Refused(
                        "the body makes a float of i, the number of the step", "carry a float tensor that counts"
                    )
                of_number |= results


def _check(module: fx.GraphModule, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise Refused("no tensor goes in", "give the loop a tensor to carry")
    if find_place(x.device for x in tensors).device != HOST:
        raise Refused("in a graph of torch.compile only loops on the CPU are compiled", "compile the loop alone")
    if autocast.state() is not None:
        raise Refused("autocast is on", "leave autocast before the loop, or compile no graph around it")
    if transforms.maybe_level() is not None or transforms.forward_mode():
        raise Refused("a transform is around", "call the transform inside of the loop, or outside of torch.compile")
    if operators := operators_of(module):
        raise Refused(
            f"the body uses {operators[0]}", "write it without torch's own control flow: torch.where, tl.scan"
        )


def _trace(module: fx.GraphModule, inputs: Sequence[Any], n: int, m: int, numbered: bool) -> StepText:
    """Writes one step down on tensors without numbers: n tensors of the carry, m of the carry and xs."""
    with fake_tensors():
        values = [torch.empty(x.shape, dtype=x.dtype, device=HOST) if isinstance(x, _Like) else x for x in inputs]
        tensors = [x for x in values if isinstance(x, Tensor)]
        log = _FakeLog(tensors, lines=True)
        with log:
            outputs = list(module(*values))
        numbers = log.finish(outputs)
        if numbered:
            log.check_number(m - 1)
    carry = [(x.shape, x.dtype) for x in outputs[:n]]
    if carry != [(x.shape, x.dtype) for x in tensors[:n]]:
        raise Refused("the body changes the shapes or dtypes of its carry", "return the carry as it came")
    written, writes = log.written, bool(log.checks.writes)
    captures = [*range(m, len(tensors)), *written.captures]
    step = Trace(written.operations, range(n), range(n, m), captures, numbers[:n], numbers[n:], None, writes)
    return StepText(
        step, [([int(size) for size in x.shape], x.dtype) for x in tensors], list(written.captures.values())
    )


# -- torch.export, which runs Python


def exports(traced: Callable[..., Any]) -> Callable[[_C], _C]:
    """Marks a loop: while a program is exported, it is what `traced` gives, or runs step by step into the program."""

    def mark(function: _C) -> _C:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            compile = options.get("compile")
            if not (compile is True or compile == "strict") or not torch.compiler.is_exporting():
                return function(*args, **options)
            try:
                return run_as_graph(traced, _refuse, *args, **options)
            except NotInGraph as reason:
                refusal = Refused(str(reason), "compile=False says that this is meant")
            try:
                front.tell(traced.__name__, compile, refusal)
            except Fact as fact:
                raise fact.named(traced.__name__) from None
            return function(*args, **{**options, "compile": False})

        marked: Any = call
        return marked

    return mark


def _refuse(*args: Any, **options: Any) -> Any:
    raise NotInGraph("its arguments cannot stand in a graph")


# -- what dynamo traces

_ALWAYS = {"checkpoints": None, "compile": False, "progress": False}
_SCAN = {"dim": 0, "reverse": False, "until": None, "context": None, "compact": False, **_ALWAYS}
_MAP = {"dim": 0, "batch_size": None, **_ALWAYS}


def scan(
    plain: Callable[..., Any], body_fn: Any, init: Any, xs: Any = None, length: Any = None, **options: Any
) -> tuple[Any, Any]:
    """`tl.scan`."""
    carry, tree = tree_flatten(init, is_leaf=is_packed)
    leaves, xs_tree = tree_flatten(xs, is_leaf=is_packed)
    rows = [x for x in leaves if x is not None]
    given = _asked(_SCAN, options)
    if given is None or given["until"] is not None or not _tensors([*carry, *rows]) or (not rows and length is None):
        return plain(body_fn, init, xs, length, **options)
    dim, more = given["dim"], () if given["context"] is None else (given["context"],)
    rows = [x.movedim(dim, 0) for x in rows]
    steps = rows[0].shape[0] if rows else length
    if steps == 0 or (length is not None and length != steps) or any(x.shape[0] != steps for x in rows):
        return plain(body_fn, init, xs, length, **options)
    there = [x is not None for x in leaves]

    def step(*flat: Tensor) -> Any:
        left = iter(flat[len(carry) :])
        row = tree_unflatten([next(left) if x else None for x in there], xs_tree)
        out, y = body_fn(tree_unflatten(flat[: len(carry)], tree), row, *more)
        ys = tree_leaves(y, is_leaf=is_packed)
        return (_leaves(plain, out, tree), y) if all(x is None or type(x) in _PLAIN for x in ys) else plain()

    settings = {"reverse": bool(given["reverse"]), "k": given["checkpoints"]}
    state, ys = operator()(step, carry, rows, [x.select(0, 0) for x in rows], steps, **settings)
    ys = tree_map(lambda y: None if y is None else y.movedim(0, place(dim, y.dim() - 1)), ys)
    return tree_unflatten(state, tree), ys


def fori_loop(plain: Callable[..., Any], lower: Any, upper: Any, body_fn: Any, init: Any, **options: Any) -> Any:
    """`tl.fori_loop`."""
    carry, tree = tree_flatten(init, is_leaf=is_packed)
    given = _asked(_ALWAYS, options)
    if given is None or isinstance(lower, Tensor) or isinstance(upper, Tensor) or not _tensors(carry) or upper <= lower:
        return plain(lower, upper, body_fn, init, **options)
    numbers: Tensor = torch.arange(lower, upper, device=HOST)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def step(*flat: Tensor) -> Any:
        return _leaves(plain, body_fn(flat[-1], tree_unflatten(flat[:-1], tree)), tree), None

    settings = {"k": given["checkpoints"], "numbered": True}
    state, _ = operator()(step, carry, [numbers], [numbers[0]], upper - lower, **settings)
    return tree_unflatten(state, tree)


def map(plain: Callable[..., Any], fn: Any, xs: Any, **options: Any) -> Any:
    """`tl.map`, as a scan that carries nothing."""
    given = _asked(_MAP, options)
    if given is None or given["batch_size"] is not None:
        return plain(fn, xs, **options)
    options = {name: given[name] for name in ("dim", "checkpoints", "compile")}
    return scan(lambda *_, **__: plain(fn, xs), lambda carry, x: (carry, fn(x)), (), xs, **options)[1]


def _asked(defaults: dict[str, Any], options: dict[str, Any]) -> dict[str, Any] | None:
    """Returns all options; None where they ask for what cannot stand in a graph."""
    given = {**defaults, **options}
    k, dim, compiled = given["checkpoints"], given.get("dim", 0), given["compile"]
    wanted = compiled is True or compiled == "strict"
    known = len(given) == len(defaults) and type(dim) is int and (k is None or (type(k) is int and k > 0))
    return given if wanted and known and not given["progress"] else None


def _tensors(leaves: list[Any]) -> bool:
    return all(type(x) in _PLAIN for x in leaves)


def _leaves(plain: Callable[..., Any], tree: Any, structure: Any) -> list[Tensor]:
    leaves, shape = tree_flatten(tree, is_leaf=is_packed)
    return leaves if shape == structure and _tensors(leaves) else plain()
