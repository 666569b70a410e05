"""The table of operations against what targets know, and each of them through a loop, compiled and not.

A body for each row of the table that a target has to know: it is reached in a compiled loop, with machine code and with
torch's operations, and gives the eager loop's values and gradients. Others are of what passes take apart.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor, fx

import tensorloop as tl
from tensorloop.compiler.divide import all_steps
from tensorloop.compiler.emitter.lower import calling
from tensorloop.compiler.emitter.lower.lowering import Lowering
from tensorloop.compiler.emitter.lower.pointwise import HANDLERS
from tensorloop.compiler.operations import CORE, OPERATIONS
from tensorloop.compiler.place import HOST
from tensorloop.compiler.step import CoreCall
from tensorloop.compiler.targets.choose import make_core, target_of
from tensorloop.compiler.targets.cpu import native_core
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.listed import CPU, EAGER, TARGETS
from tensorloop.compiler.targets.target import Target
from tensorloop.loop.compiled.run.plan import plans
from tests.support.devices import HERE
from tests.support.operation_bodies import BODIES, ROWS
from tests.support.recurrences import recurrence

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")  # that it is in beta
aten = torch.ops.aten
STEPS = 3

# One compilation for many operations: tracing and LLVM cost less for each than alone.
GROUPS = [list(BODIES)[n : n + 12] for n in range(0, len(BODIES), 12)]


def outcome(
    group: list[str], dtype: torch.dtype, compile: Literal[False, "strict"], gradients: bool = True
) -> list[list[Tensor]]:
    """For each body what it gives at each step, and the gradients of x and of y."""
    generator = torch.Generator(HERE).manual_seed(3)
    x, ys = (torch.randn(n, 3, 17, generator=generator).double() for n in (1, STEPS))
    xs = [x[0].to(dtype).requires_grad_(gradients) for _ in group]
    ys = ys.to(dtype).requires_grad_(gradients)

    def step(carry: list[Tensor], y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        outs = [BODIES[name](x, y) for name, x in zip(group, carry, strict=True)]
        return [_next(x, y, out) for x, out in zip(carry, outs, strict=True)], outs

    last, outs = tl.scan(step, xs, ys, compile=compile)
    if not gradients:
        return [[out, x] for out, x in zip(outs, last, strict=True)]
    losses = [(x * x).sum() for x in last] + [(out * out.detach().cos()).sum() for out in outs if out.requires_grad]
    grads = torch.autograd.grad(losses, [*xs, ys])
    return [[out, x, grad] for out, x, grad in zip(outs, last, grads[:-1], strict=True)] + [[grads[-1]]]


def _next(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """The next x: it depends on the result, so that a loop has to compute it."""
    out = out.to(x.dtype)
    return 0.9 * x + 0.01 * y + 0.01 * torch.where(out.abs() < 100, out, 0.1).mean()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The rows of all that becomes machine code."""
    found: set[str] = set()

    def noting(handler: Callable) -> Callable:
        def noted(call, *args, **kwargs):
            target = call.node.target
            name = getattr(target, "_opname", "getitem")
            overload = f"{name}.{getattr(target, '_overloadname', '')}"
            found.add(overload if overload in OPERATIONS else name)
            return handler(call, *args, **kwargs)

        return noted

    for name, handler in HANDLERS.items():
        monkeypatch.setitem(HANDLERS, name, noting(handler))
    call_out = calling.call_out

    def called(low: Lowering, node: fx.Node) -> object:
        found.add(f"{node.target}, called")
        return call_out(low, node)

    monkeypatch.setattr(calling, "call_out", called)
    plans.clear()
    yield found
    plans.clear()


def check(group: list[str], dtype: torch.dtype, gradients: bool = True) -> None:
    """A compiled loop gives what the eager one gives."""
    found, expected = (outcome(group, dtype, compile, gradients) for compile in ("strict", False))
    for name, mine, theirs in zip([*group, "y"] if gradients else group, found, expected, strict=True):
        off = 1e-3 if dtype is torch.float32 else 1e-6 if mine[0].dtype is torch.float32 else 1e-9
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=off, atol=off, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_each_operation_is_reached_and_gives_what_torch_gives(group: list[str], lowered: set[str]) -> None:
    check(group, torch.float64)
    assert {name.split()[0] for name in group if name in ROWS} - lowered == set()
    assert [name for name in lowered if name.endswith("called")] == []


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["values", "both"])
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_floats_of_32_bits(group: list[str], gradients: bool) -> None:
    check(group, torch.float32, gradients)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_the_eager_target_has_each(group: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_core, "instead", [lambda recurrence, **_: EagerCore(recurrence)])
    plans.clear()
    check(group, torch.float64)
    plans.clear()


def test_the_table_is_what_the_machine_knows_and_what_is_tried_here() -> None:
    rows = {name for name, row in OPERATIONS.items() if row.kind in CORE}
    assert rows == {name.split()[0] for name in ROWS}
    assert {name.split(".")[0] for name in rows - CPU.lacks} == set(HANDLERS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_a_target_lacks_is_named_in_the_table(target: Target) -> None:
    assert target.lacks <= {name for name, row in OPERATIONS.items() if row.kind in CORE}
    assert target.lacks == set() or target.name not in ("cpu", "eager")
    place = target.place(HOST)
    assert (place.device, target_of(place)) == (HOST, target)


def test_a_step_runs_on_the_target_of_its_place() -> None:
    step = recurrence(
        lambda w, x, h: {"carry": [h[0] * w[0] + x[0]]}, [torch.ones(2)], [torch.ones(3, 2)], [torch.ones(2)]
    )
    for target, kind in ((EAGER, EagerCore), (CPU, native_core.NativeCore)):
        made, lacking = make_core(dataclasses.replace(step, place=target.place(HOST)))
        assert isinstance(made, kind)
        assert lacking is None
        last, done = made(CoreCall(3, [torch.full((2,), 2.0)], [torch.ones(3, 2)], [torch.ones(2)], [], []))
        assert (last[0].tolist(), done) == ([15.0, 15.0], 3)


def test_rows_say_of_aten_what_is_so() -> None:
    for name, row in OPERATIONS.items():
        packet = getattr(aten, name.split(".")[0])
        overloads = [getattr(packet, n) for n in (name.split(".")[1:] or packet.overloads())]
        tagged = any(torch.Tag.pointwise in one.tags for one in overloads)
        assert (row.kind in (*CORE, "ordered")) <= (tagged == (row.kind == "pointwise") or name == "_to_copy"), name
    rules = {getattr(target, "_opname", "getitem") for target in all_steps.RULES}
    assert rules == {name for name, row in OPERATIONS.items() if row.batched} | {"getitem"}


@pytest.mark.parametrize("name", [name for name, row in OPERATIONS.items() if row.indexes])
def test_an_index_that_there_is_not_is_refused(name: str) -> None:
    operations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "gather": lambda x, i: x.gather(0, i),
        "index": lambda x, i: x[i],
        "index_select": lambda x, i: x.index_select(0, i),
        "scatter": lambda x, i: x.scatter(0, i, x[:2]),
        "scatter_add": lambda x, i: x.scatter_add(0, i, x[:2]),
        "index_add": lambda x, i: x.index_add(0, i, x[:2]),
        "index_copy": lambda x, i: x.index_copy(0, i, x[:2]),
        "index_put": lambda x, i: x.index_put([i], x[:2]),
        "scatter_reduce": lambda x, i: x.scatter_reduce(0, i, x[:2], "amax"),
        "index_reduce": lambda x, i: x.index_reduce(0, i, x[:2], "amax"),
    }

    def body(x: Tensor, i: Tensor) -> tuple[Tensor, None]:
        found = operations[name](x, i)
        return x * 0.5 + found.sum(), None

    x = torch.arange(4.0)
    for outside in (4, -5, 2**40):
        for compile in ("strict", False):
            with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|index"):
                tl.scan(body, x, torch.tensor([[0, 1], [1, outside]]), compile=compile)


def test_what_is_taken_apart_sees_no_memory_that_nobody_wrote() -> None:
    """The embedding's gradient takes indices, which it follows: those that memory happens to hold lead anywhere."""
    plans.clear()
    torch.use_deterministic_algorithms(True)  # new memory holds the greatest number
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(["embedding", "index_put"], torch.float64)
    finally:
        torch.use_deterministic_algorithms(False)
