"""Steps, graphs and values of all steps are held against what they say they are: each kind of mistake is noticed."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import tensorloop as tl
from tensorloop.compiler.divide import all_steps
from tensorloop.compiler.graph.simplify import _write_anew
from tensorloop.compiler.lengths import Length
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.step import Step
from tensorloop.compiler.verify import Broken, Promise, check_graph, check_values, promise, verify
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run import plan, program
from tensorloop.loop.compiled.run.plan import Plan, plans
from tests.support.both_ways import check_alike, outcome

D = torch.float64
aten = torch.ops.aten


def step(h: Tensor, x: Tensor) -> Any:
    best, place = (h @ x).max(-1)
    return (h.sin() + x).sum(-1), best, place


def graph() -> fx.Graph:
    """A step as it was traced."""
    return make_fx(step, tracing_mode="fake")(torch.ones(3, 3, dtype=D), torch.ones(3, 3, dtype=D)).graph


def node(found: fx.Graph, target: Any) -> fx.Node:
    return next(n for n in found.nodes if n.target == target)


def another_operation(found: fx.Graph) -> None:
    n = node(found, aten.sin.default)
    n.target, n.args = aten.gt.Scalar, (n.args[0], 0)


def another_overload(found: fx.Graph) -> None:
    n = node(found, aten.sum.dim_IntList)
    n.target, n.args = aten.sum.default, (n.args[0],)


def another_dim(found: fx.Graph) -> None:
    n = node(found, aten.sum.dim_IntList)
    n.args = (n.args[0], [-1], True)


def another_dtype(found: fx.Graph) -> None:
    n = node(found, aten.sum.dim_IntList)
    n.kwargs = {"dtype": torch.float32}


def said_otherwise(found: fx.Graph) -> None:
    n = node(found, aten.mm.default)
    n.meta["val"] = n.meta["val"][:, :2]


def one_of_two_said_otherwise(found: fx.Graph) -> None:
    n = node(found, aten.max.dim)
    n.meta["val"] = (n.meta["val"][0], n.meta["val"][1].int())


FAULTS = another_operation, another_overload, another_dim, another_dtype, said_otherwise, one_of_two_said_otherwise


def test_a_graph_that_gives_what_it_says():
    check_graph(graph(), [])
    check_graph(graph(), [torch.randn(3, 3, dtype=D)])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_node_that_does_not_give_what_it_says(fault: Callable[[fx.Graph], None]):
    found = graph()
    fault(found)
    with pytest.raises(Broken, match=r"gives torch.* where its graph has torch"):
        check_graph(found, [])


def growing(more: int) -> fx.Graph:
    """All slots but the last one of an array, as its graph says, and but `more` of them."""
    found, n = fx.Graph(), Length(0, 1, 0)
    array = found.placeholder("array")
    array.meta |= {"val": torch.empty(9, 3, dtype=D, device="meta"), "shapes": ((n, 3),)}
    part = found.call_function(aten.slice.Tensor, (array, 0, 0, n - more))
    part.meta |= {"val": torch.empty(8, 3, dtype=D, device="meta"), "shapes": ((n - 1, 3),)}
    found.output((part,))
    return found


def test_what_is_as_long_as_an_array():
    check_graph(growing(1), [], 1)
    with pytest.raises(Broken, match=r"gives torch.float64 of shape"):
        check_graph(growing(2), [], 1)


# -- steps, as the passes make them


def looped(compile: Any) -> list[Tensor]:
    """A loop with invariants, sequences, outs and a sum in each direction, and its gradients."""
    w, h, xs = (x.clone().requires_grad_() for x in (torch.eye(3, dtype=D), torch.ones(2, 3, dtype=D), XS))
    h, ys = tl.scan(lambda h, x: ((new := (h @ w + x).tanh()), (new * x).sum(-1)), h, xs, compile=compile)
    return [h.detach(), *torch.autograd.grad(h.sum() + ys.sum(), [w, xs])]


XS = torch.linspace(-1, 1, 24, dtype=D).view(4, 2, 3)
MADE: dict[str, Callable[[Plan], tuple[Step | None, bool]]] = {
    "with_gradients": lambda plan: (plan.step, False),
    "backward_step": lambda plan: (plan.backward().step, False),
    "loop forward": lambda plan: (plan.forward.partition.loop, True),
    "loop backward": lambda plan: (plan.backward().partition.loop, True),
}


def a_call(step: Step) -> fx.Node:
    return next(n for n in step.graph.nodes if n.op == "call_function" and n.all_input_nodes and n.users)


def wrong_dtype(step: Step) -> Step:
    a_call(step).meta["val"] = a_call(step).meta["val"].float()
    return step


def unknown_value(step: Step) -> Step:
    del a_call(step).meta["val"]
    return step


def no_operation(step: Step) -> Step:
    a_call(step).target = torch.sin
    return step


def written_in_place(step: Step) -> Step:
    a_call(step).target = aten.zero_.default
    return step


def read_too_early(step: Step) -> Step:
    n = a_call(step)
    next(iter(n.users)).append(n)
    return step


def lost_sequence(step: Step) -> Step:
    return dataclasses.replace(step, sequences=())


def two_roles(step: Step) -> Step:
    return dataclasses.replace(step, invariants=(*step.invariants, *step.carry))


def lost_carry(step: Step) -> Step:
    return dataclasses.replace(step, next_carry=step.next_carry[:-1])


def another_next_carry(step: Step) -> Step:
    others = (
        n for n in step.graph.nodes if n.op != "output" and n.meta["val"].shape != step.carry[0].meta["val"].shape
    )
    return dataclasses.replace(step, next_carry=(next(others),))


def node_of_another_graph(step: Step) -> Step:
    return dataclasses.replace(step, outs=(node(graph(), aten.mm.default),))


def going_is_no_bool(step: Step) -> Step:
    return dataclasses.replace(step, going=step.carry[0])


WRONG = (wrong_dtype, unknown_value, no_operation, written_in_place, read_too_early, lost_sequence, two_roles,
         lost_carry, another_next_carry, node_of_another_graph, going_is_no_bool)  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_a_fault_in_what_a_pass_makes_is_found(name: str):
    for fault in (None, *WRONG):
        plans.clear()
        looped("strict")
        (found,) = (x for x in plans._plans.values() if isinstance(x, Plan))
        step, alone = MADE[name](found)
        assert step is not None
        if fault is None:
            verify(step, alone=alone)
            verify(step, [], alone=alone)
            continue
        faulty = fault(step)
        with pytest.raises(Broken):
            verify(faulty, alone=alone)
    plans.clear()


@pytest.mark.parametrize(("where", "name", "fault"), [
    (plan, "with_gradients", lambda found: dataclasses.replace(found, step=wrong_dtype(found.step))),
    (program, "divide", lambda found: dataclasses.replace(found, loop=two_roles(found.loop))),
], ids=["with_gradients", "divide"])  # fmt: skip
def test_a_plan_with_a_faulty_step_is_not_made(
    where: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch, fresh_plans: None
):
    done = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **options: fault(done(*args, **options)))
    with pytest.raises(RuntimeError, match="not compiled: "):
        looped("strict")


def test_a_faulty_step_backward_is_replaced_by_the_gradient_step_by_step(
    monkeypatch: pytest.MonkeyPatch, fresh_plans: None
):
    done, expected = plan.backward_step, looped(False)
    monkeypatch.setattr(plan, "backward_step", lambda *args: lost_carry(done(*args)))
    with pytest.warns(UserWarning, match="the loop's gradient is computed step by step"):
        found = looped("strict")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


# -- values of all steps at once

EACH = Promise(True, torch.Size([2]), D, HOST)


def test_values_that_were_promised():
    check_values(
        [torch.ones(5, 2, dtype=D), torch.ones(2)], [EACH, Promise(False, torch.Size([2]), torch.float32, HOST)], 5
    )
    check_values(
        [torch.ones(5, 9, dtype=D)], [Promise(True, None, D, HOST)], 5
    )  # of what grows only the dtype is known


@pytest.mark.parametrize("value", [
    torch.ones(5, 2), torch.ones(5, 3, dtype=D), torch.ones(5, 2, 1, dtype=D), torch.ones(5, dtype=D),
    torch.ones(4, 2, dtype=D), torch.ones(2, dtype=D), torch.ones(5, 2, dtype=D, device="meta"),
], ids=["dtype", "shape", "a dim more", "a dim less", "steps", "of one step", "device"])  # fmt: skip
def test_a_value_that_was_not_promised(value: Tensor):
    with pytest.raises(Broken, match=r"all steps at once give torch.* where a step has torch.float64 of shape"):
        check_values([torch.ones(5, 2, dtype=D), value], [EACH, EACH], 5)


def test_what_is_the_same_for_all_steps_has_no_dim_for_them():
    with pytest.raises(Broken):
        check_values([torch.ones(5, 2, dtype=D)], [EACH._replace(each=False)], 5)


def test_a_promise_is_what_the_graph_says():
    found = graph()
    assert promise(node(found, aten.mm.default), HOST, each=True) == Promise(True, torch.Size([3, 3]), D, HOST)
    array = next(iter(growing(1).nodes))
    assert promise(array, HOST, each=False) == Promise(False, None, D, HOST)


# -- a loop one of whose stages breaks its promise


def of_another_dtype(s: Any, n: fx.Node, x: fx.Node, *args: Any, **options: Any) -> fx.Node:
    return s.call(lambda x: n.target(x, *args, **options).float(), s.found[x])  # pyright: ignore[reportCallIssue]


def of_fewer_steps(s: Any, n: fx.Node, x: fx.Node, dims: Any = (), *rest: Any, **options: Any) -> fx.Node:
    return s.call(lambda x: x.sum(-1)[1:], s.found[x])


def run(compile: Any, h: Tensor, xs: Tensor) -> Any:
    return tl.scan(lambda h, x: (h * 0.5 + x.sin(), (x * x).sum(-1)), h, xs, compile=compile)


GIVEN = torch.tensor([0.3, -0.4], dtype=D), torch.linspace(-1, 1, 8, dtype=D).view(4, 2)


@pytest.mark.parametrize("rule", [of_another_dtype, of_fewer_steps], ids=lambda rule: rule.__name__)
def test_a_loop_whose_stage_is_wrong_runs_eagerly(rule: Any, monkeypatch: pytest.MonkeyPatch, fresh_plans: None):
    expected = outcome(run, False, GIVEN)
    monkeypatch.setitem(all_steps.RULES, aten.sum.dim_IntList, rule)
    with pytest.raises(RuntimeError, match="not compiled: all steps at once give"):
        run("strict", *GIVEN)
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        found = outcome(run, True, GIVEN)
    assert [w.category for w in met] == [NotCompiledWarning]
    check_alike(found, expected, 0)


def test_a_gradient_whose_stage_is_wrong_is_computed_step_by_step(monkeypatch: pytest.MonkeyPatch, fresh_plans: None):
    def run(compile: Any, h: Tensor, xs: Tensor) -> Any:
        return tl.scan(lambda h, x: (h * 0.5, x.sum(-1)), h, xs, compile=compile)

    expected = outcome(run, False, GIVEN)

    def wrong(s: Any, n: fx.Node, x: fx.Node, sizes: Any, **_: Any) -> fx.Node:
        return s.call(lambda x: x.expand(-1, *sizes).float(), s.found[x])

    monkeypatch.setitem(all_steps.RULES, aten.expand.default, wrong)
    with pytest.warns(UserWarning, match="all steps at once give .*; the loop's gradient is computed step by step"):
        found = outcome(run, "strict", GIVEN)
    check_alike(found, expected, 1e-12)


# -- what a gradient's formula writes to


def writing(target: Any, *args: Any, of: str = "own", read_later: bool = False) -> fx.Graph:
    """A graph that writes to a tensor of its own, an input, or a view."""
    found = fx.Graph()
    x = found.placeholder("x")
    own = found.call_function(aten.clone.default, (x,))
    view = found.call_function(aten.select.int, (own, 0, 0))
    written = found.call_function(target, ({"own": own, "input": x, "view": view}[of], *(args or (x,))))
    found.output((written, found.call_function(aten.neg.default, (own,)) if read_later else own))
    return found


@pytest.mark.parametrize("name", ["copy_", "pow_", "mul_"])
def test_a_write_to_a_tensor_of_its_own_gives_a_new_one(name: str):
    overload, anew = {"copy_": ("default", aten.copy.default), "pow_": ("Scalar", aten.pow.Tensor_Scalar),
                      "mul_": ("Tensor", aten.mul.Tensor)}[name]  # fmt: skip
    found = fx.Graph()
    x = found.placeholder("x")
    own = found.call_function(aten.clone.default, (x,))
    written = found.call_function(getattr(getattr(aten, name), overload), (own, 3 if name == "pow_" else x))
    found.output((written,))
    _write_anew(found)
    assert written.target == anew
    module = fx.GraphModule(torch.nn.Module(), found)
    assert module(torch.tensor([2.0]))[0].item() == {"copy_": 2, "pow_": 8, "mul_": 4}[name]


@pytest.mark.parametrize("of", ["input", "view"])
def test_a_write_to_memory_that_another_tensor_looks_at_is_refused(of: str):
    for target, args in ((aten.copy_.default, ()), (aten.add_.Tensor, ()), (aten.fill_.Scalar, (0,))):
        with pytest.raises(Refused, match="writes to a tensor in place"):
            _write_anew(writing(target, *args, of=of))


def test_a_write_to_what_is_read_later_or_through_a_view_is_refused():
    with pytest.raises(Refused, match="writes to a tensor in place"):
        _write_anew(writing(aten.add_.Tensor, read_later=True))
    with pytest.raises(Refused, match="writes to a tensor in place"):
        _write_anew(writing(aten.add_.Tensor))  # there is a view of it
