"""That a replayed step is the step it was: what closures hold, what leaves a step, and `Checkpoints(check=True)`."""

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional

import tensorloop as tl
from tensorloop.loop.checkpoint.leaving import HeldTensorWarning
from tests.support.devices import HERE, ON
from tests.support.loop_cases import randn, rotate

STEPS = 6
SCALE = 1.0
size = 1


def looped(body: Callable[[int, Tensor], Tensor], init: Tensor, checkpoints: Any = 2) -> Tensor:
    return tl.fori_loop(0, STEPS, body, init, checkpoints=checkpoints).sum()


# -- what closures hold


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter", cases=["None"])
@pytest.mark.parametrize("outer", [None, 2])
def test_bodies_made_in_a_loop_that_all_see_its_last_number_are_refused(outer: int | None) -> None:
    """The natural way to write the tasks of MAML: every replay saw the last of them."""
    data, init = [randn(2, seed=i, grad=False) for i in range(3)], randn(2)

    def tasks(_: int, c: Tensor, bind: bool) -> Tensor:
        outs = []
        for i in range(3):
            late = lambda _, c: rotate(c) + torch.sin(c * data[i])  # noqa: B023, E731
            bound = lambda _, c, i=i: rotate(c) + torch.sin(c * data[i])  # noqa: E731
            outs.append(tl.fori_loop(0, 3, bound if bind else late, c, checkpoints=2 if outer or not bind else None))
        return torch.stack(outs).mean(0)

    def run(bind: bool) -> Tensor:
        body = functools.partial(tasks, bind=bind)
        return grad((body(0, init) if outer is None else looped(body, init, outer)).sum(), init)[0]

    torch.testing.assert_close(
        run(True), grad(looped(functools.partial(tasks, bind=True), init, None), init)[0]
    ) if outer else run(True)
    with pytest.raises(
        RuntimeError, match=r"fori_loop: the variable i, .* was [01] in the .* is 2 .*\(`lambda ..., i=i"
    ):
        run(False)


class Task:
    """A body that is a method."""

    def __init__(self) -> None:
        self.scale, self.calls, self.unused, self.verbose = 1.0, 0, 0, False

    def step(self, i: int, c: Tensor) -> Tensor:
        self.calls += 1
        if self.verbose:
            self.verbose = False
        return rotate(c) + (c * self.scale).sin()

    def closure(self) -> Callable[[int, Tensor], Tensor]:
        return lambda i, c: rotate(c) + (c * self.scale).sin()


def of_module(i: int, c: Tensor) -> Tensor:
    return rotate(c) + helper(c)


def helper(c: Tensor) -> Tensor:
    return next((c * SCALE).sin() for _ in range(c.ndim)) + 0 * c.size(0)


@pytest.mark.eager_only(
    "a backward does not run the body: what has changed since does not matter",
    cases=["closure", "global", "partial", "nested", "default"],
)
@pytest.mark.parametrize("how", ["method", "closure", "global", "partial", "nested", "default"])
def test_a_number_that_the_body_refers_to_must_stay(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    init, task, number = randn(2), Task(), 1.0

    def nested(i: int, c: Tensor) -> Tensor:
        return (lambda: rotate(c) + (c * number).sin())()

    def default(i: int, c: Tensor, number: float = 1.0) -> Tensor:
        return rotate(c) + (c * number).sin()

    bodies: dict[str, Any] = {"method": task.step, "closure": task.closure(), "global": of_module, "nested": nested}
    bodies |= {"partial": functools.partial(lambda _, i, c: nested(i, c), None), "default": default}
    out = looped(bodies[how], init)
    task.calls, task.unused = 100, 100
    monkeypatch.setattr(f"{__name__}.size", 2)  # an attribute of that name is no global
    true = grad(looped(bodies[how], init, None), init)[0]
    torch.testing.assert_close(grad(out, init, retain_graph=True)[0], true)
    torch.testing.assert_close(grad(out, init, create_graph=True)[0], true)
    task.scale, number = 2.0, 2.0
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    default.__defaults__ = (2.0,)
    named = {"method": r"attribute self\.scale", "closure": r"attribute self\.scale", "global": "global SCALE"}
    message = (
        f"the {named.get(how, 'default number' if how == 'default' else 'variable number')}, which .* 1.0 .* 2.0 in"
    )
    with pytest.raises(RuntimeError, match=message):
        grad(out, init, retain_graph=True)
    with pytest.raises(RuntimeError, match=message):
        grad(out, init, create_graph=True)


def test_what_a_body_reads_and_changes_is_refused() -> None:
    calls, warned = 0, False

    def body(i: int, c: Tensor) -> Tensor:
        nonlocal calls, warned
        calls += 1
        if calls > STEPS:
            warned = True
        return rotate(c) + c.sin() if warned else c.sin() + rotate(c)

    with pytest.raises(RuntimeError, match=r"the body reads calls, a variable of its closure"):
        looped(body, randn(2))
    assert (calls, warned) == (0, False)


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
def test_nan_and_a_variable_that_is_gone() -> None:
    init, nothing, gone = randn(2), float("nan"), 1.0
    out = looped(lambda i, c: rotate(c) if nothing == 1 else c.sin(), init)
    other = looped(lambda i, c: c.sin() * gone, init)  # noqa: F821
    nothing = float("nan")
    assert grad(out, init)[0].isfinite().all()
    del gone
    with pytest.raises(RuntimeError, match=r"variable gone, which the body uses, was 1\.0 .* and is gone in backward"):
        grad(other, init)


def test_the_step_of_a_beam_search_is_looked_into_too() -> None:
    table, number = randn(5, 5), 1.0

    def step(carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return carry, (table[tokens] * number).log_softmax(-1)

    options: Any = {"batch_size": 2, "beam_size": 2, "bos_id": 0, "eos_id": 1, "max_steps": 4, "checkpoints": 2}
    hyps = tl.beam_search(step, torch.zeros(2), **options)
    number = 2.0
    with pytest.raises(RuntimeError, match="the variable number, which the body uses"):
        hyps.scores.sum().backward()


# -- what leaves a step


@pytest.mark.parametrize("what", ["result", "part", "argument", "x", "attribute"])
@pytest.mark.parametrize("outer", [None, 3])
def test_a_tensor_that_stays_behind_is_warned_of(what: str, outer: int | None) -> None:
    w, init, xs, seen = randn(2), randn(2), randn(STEPS, 2), list[Tensor]()

    def body(c: Tensor, x: Tensor) -> tuple[Tensor, None]:
        h = rotate(c) + (c * w).sin() + x
        if what == "attribute":
            body.last = h  # pyright: ignore[reportFunctionMemberAccess]
        else:
            seen.append({"part": h * 2, "argument": c, "x": x}.get(what, h))
        return h, None

    def loop(i: int, init: Tensor) -> Tensor:
        return tl.scan(body, init, xs, checkpoints=2)[0]

    message = "scan: a value that the body computed from its argument, a tensor of shape"
    with pytest.warns(HeldTensorWarning, match=message) as met:
        loop(0, init) if outer is None else tl.fori_loop(0, 1, loop, init, checkpoints=outer)
    assert met[0].filename == __file__


@pytest.mark.eager_only("it says that a carry with arrays is not compiled")
@pytest.mark.parametrize("outer", [None, 3])
def test_nothing_else_is_warned_of(outer: int | None) -> None:
    w, init, log, cell = randn(2), randn(2), list[Any](), nn.LSTMCell(2, 2, dtype=torch.float64)
    xs = randn(STEPS, 2)
    normed = nn.utils.spectral_norm(nn.Linear(2, 2, dtype=torch.float64))  # keeps its weight, and that a graph

    def recursive(c: Tensor) -> Tensor:
        def again(n: int) -> Tensor:
            return h if n == 0 else again(n - 1)

        h = (c * w).sin()
        return again(2)  # a cycle, with h in it, for the collector

    def inside(carry: Any, x: Tensor) -> Any:
        h, (c, s), past, _ = carry
        log.append((h.detach(), x.detach(), h.sum().item()))
        c, s = cell(x[None], (c, s))
        inner = tl.fori_loop(0, 2, lambda i, h: rotate(h) + (h * w).sin(), h, checkpoints=1)
        h = (recursive(h) if outer is None else (h * w).sin()) + inner + past[-1] + normed(h)
        return (h, (c, s), past.append(h * 2), w), (h, w)

    def loop(i: int, init: Tensor) -> Tensor:
        start = (init, (torch.ones(1, 2).double(), torch.ones(1, 2).double()), tl.TensorArray().append(init), init)
        carry, ys = tl.scan(inside, start, xs, checkpoints=2)
        return carry[0] + carry[1][0][0] + carry[2].stack().sum(0) + ys[0].sum(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = loop(0, init) if outer is None else tl.fori_loop(0, 2, loop, init, checkpoints=outer)
        grad(out.sum(), [init, w])


def test_an_argument_kept_for_a_later_step_is_refused() -> None:
    """Its gradient was lost: it was a leaf of that step's graph."""
    w, past = randn(2), list[Tensor]()

    def body(i: int, c: Tensor) -> Tensor:
        past.append(c)
        return rotate(c) + (past[0] * w).sin()

    with pytest.raises(RuntimeError, match=r"the body reads a list to which an earlier step has written"):
        looped(body, randn(2))


# -- Checkpoints(check=True)


class Counter:
    """An object in the carry that steps change."""

    def __init__(self) -> None:
        self.inner = {"n": [0.0]}


@pytest.mark.parametrize("where", ["carry", "y"])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_check_names_the_step_and_what_differs(draws: bool, where: str, create_graph: bool) -> None:
    w, init, on = randn(2), randn(2), [True]

    @tl.loop.pure  # so that nobody sees what it reads
    def part(c: Tensor) -> Tensor:
        return functional.dropout(c * w, 0.5, on[0]) if draws else c * w * (2.0 if on[0] else 1.0)

    def body(c: Any, _: None) -> Any:
        h = rotate(c["h"]) + part(c["h"])
        return {"h": h if where == "carry" else rotate(c["h"])}, (h.sin(), 1)

    carry, (ys, _) = tl.scan(body, {"h": init}, length=STEPS, checkpoints=tl.Checkpoints(k=2, check=True))
    on[0] = False
    found = ["torch's generator" + ("" if HERE.type == "cpu" else f" of {ON}")] * draws
    differ = ", ".join([*[r"carry\['h'\]"] * (where == "carry"), r"y\[0\]", *found])
    step = 0 if create_graph else r"\d"
    with pytest.raises(RuntimeError, match=rf"scan: step {step} did not repeat itself .*pass: {differ}\. A body must"):
        grad(carry["h"].sum() + ys.sum(), w, create_graph=create_graph)


@pytest.mark.eager_only("no step of a compiled loop runs again", run=False)
@pytest.mark.parametrize(("layer", "refused"), [(nn.Dropout(0.5), True), (nn.Tanh(), False)])
def test_the_mode_of_a_module_matters_where_it_has_one(layer: nn.Module, refused: bool) -> None:
    part, init = nn.Sequential(layer, nn.Tanh()), randn(2)
    out = tl.scan(lambda c, _: (rotate(c) + part(c), None), init, length=STEPS, checkpoints=2)[0]
    part.eval()
    if refused:
        with pytest.raises(RuntimeError, match="Dropout, which the body uses, has another mode"):
            grad(out.sum(), init)
    else:
        grad(out.sum(), init)


def test_a_check_sees_objects_in_the_carry() -> None:
    def body(i: int, carry: Any) -> Any:
        h, counter = carry
        counter.inner["n"][0] += 1
        return rotate(h), counter

    init = randn(2)
    h, _ = tl.fori_loop(0, STEPS, body, (init, Counter()), checkpoints=tl.Checkpoints(k=2, check=True))
    with pytest.raises(RuntimeError, match=r"fori_loop: step \d did not .*: carry\[1\]\. A body must"):
        grad(h.sum(), init)


def test_a_check_sees_arrays_in_the_carry() -> None:
    number, read = [1.0], tl.loop.pure(lambda: number[0])

    def body(i: int, carry: Any) -> Any:
        h, past = carry
        return rotate(h), past.append(h * read())

    init = randn(2)
    _, past = tl.fori_loop(0, STEPS, body, (init, tl.TensorArray()), checkpoints=tl.Checkpoints(k=2, check=True))
    number[0] = 2.0
    with pytest.raises(RuntimeError, match=r"fori_loop: step \d did not .*: carry\[1\]\. A body must"):
        grad(past.stack().sum(), init)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 2, STEPS])
def test_a_check_lets_steps_pass_that_repeat_themselves(k: int, dtype: torch.dtype) -> None:
    """With torch's random numbers, a generator of the user's, arrays, rows that stop; others may draw in between."""
    generator, init, w = torch.Generator(HERE), randn(3, 2).to(dtype), randn(2)

    def gradients(checkpoints: Any) -> list[Tensor]:
        torch.manual_seed(0)
        generator.manual_seed(0)

        def body(carry: Any) -> Any:
            h, n, past, flags = carry
            noise = torch.rand(2) + torch.rand(2, generator=generator)
            h = h * noise.to(dtype) / noise.to(dtype).abs() + w.to(dtype) + past[:].mean(0)
            return h, n + 1, past.append(h), ~flags

        limits = torch.tensor([2, STEPS, 4])
        start = init, torch.zeros(3, dtype=torch.int64), tl.TensorArray().append(init), torch.ones(3, 0).bool()
        h = tl.while_loop(lambda c: c[1] < limits, body, start, checkpoints=checkpoints)[0]
        random.random()
        np.random.rand()
        torch.rand(3)
        loss = torch.view_as_real(h).sum() if h.is_complex() else h.sum()
        first = grad(loss, [init, w], retain_graph=True)
        return [*first, *grad(loss, [init, w], create_graph=True)]

    torch.testing.assert_close(gradients(tl.Checkpoints(k=k, check=True)), gradients(k))


def test_a_check_is_a_bool() -> None:
    with pytest.raises(TypeError, match="Checkpoints: check must be a bool, got"):
        tl.Checkpoints(k=2, check=1)  # pyright: ignore[reportArgumentType]
