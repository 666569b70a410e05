"""What a step that is refused leaves behind: nothing; and what a replay finds is what the step found."""

# ruff: noqa: F401 - the texts of steps use the imports

import array
import bisect
import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import heapq
import io
import itertools
import logging
import operator
import queue
import random
import struct
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.effects.follow import following
from tensorloop.loop.effects.judge import Effect, Judge
from tensorloop.loop.effects.notes import StepNotes


class Failures:
    n = found = 0


@pytest.mark.eager_only("the kind of loop is given", run=False)
@pytest.mark.parametrize("how", [{"compile": True}, {"compile": True, "checkpoints": 2}], ids=["compiled", "both"])
def test_what_comes_after_a_refusal_that_the_body_has_caught_is_refused_too(how: dict[str, Any]) -> None:
    items: list[int] = []

    def body(c: Tensor, x: Tensor) -> Any:
        try:
            Failures.n += 1
        except:  # noqa: E722
            Failures.found += 1
            items.append(2)
        items.append(1)
        return torch.tanh(c + x * (len(items) % 3)), None

    def run(**options: Any) -> Tensor:
        items.clear()
        Failures.n = Failures.found = 0
        return tl.scan(body, torch.zeros(()), torch.ones(4), **options)[0]

    expected = run()
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore", tl.loop.NotCompiledWarning)
        torch.testing.assert_close(run(**how), expected)
        assert (Failures.n, Failures.found, items) == (4, 0, [1] * 4)
    assert Failures.found == 0


class Finalized:
    n = 0

    def __del__(self) -> None:
        Finalized.n += 1


@pytest.mark.eager_only("the kind of loop is given", run=False)
def test_a_finalizer_may_not_hide_an_effect(capfd: pytest.CaptureFixture[str]) -> None:
    items: list[int] = []

    def body(c: Tensor, x: Tensor) -> Any:
        Finalized()
        items.append(1)
        return torch.tanh(c + x * (len(items) % 3)), None

    expected = tl.scan(body, torch.zeros(()), torch.ones(4))[0]
    items.clear()
    Finalized.n = 0
    with pytest.warns(tl.loop.NotCompiledWarning, match=r"sets Finalized\.n"):
        found = tl.scan(body, torch.zeros(()), torch.ones(4), compile=True)[0]
    torch.testing.assert_close(found, expected)
    assert (Finalized.n, items) == (4, [1] * 4)
    assert capfd.readouterr().err == ""


@pytest.mark.eager_only("the kind of loop is given", run=False)
@pytest.mark.parametrize("reads_a_value", [False, True])
def test_a_context_variable_that_had_no_value_has_none_afterwards(reads_a_value: bool) -> None:
    number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)

    def body(c: Tensor, x: Tensor) -> Any:
        number.set(number.get() + 1)
        if reads_a_value and (c > 99).any().item():
            c = c * 2
        return torch.tanh(c + x * number.get()), None

    found = []
    for how in ({}, {"compile": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tl.loop.NotCompiledWarning)
            run = lambda how=how: (tl.scan(body, torch.zeros(()), torch.ones(4), **how)[0], number.get())  # noqa: E731
            found.append(contextvars.copy_context().run(run))
    assert found[0] == found[1]


@pytest.mark.eager_only("the kind of loop is given", run=False)
def test_a_condition_that_writes_to_a_file_is_asked_no_more_than_by_the_eager_loop() -> None:
    file = io.StringIO()

    def cond(c: Any) -> Tensor:
        print("a", file=file)
        return c.sum() < 3

    counts, ways = list[int](), list[Any]([{}, {"compile": True}])
    for how in ways:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tl.loop.NotCompiledWarning)
            tl.while_loop(cond, lambda c: c + 1, torch.zeros(()), **how)
        counts.append(len(file.getvalue()) - sum(counts))
    assert counts[0] == counts[1]


def looped(body: Callable[[torch.Tensor, torch.Tensor], Any], init: Any = None, **options: Any) -> Any:
    init = torch.zeros(2, dtype=torch.float64, requires_grad=True) if init is None else init
    return tl.scan(body, init, torch.ones(3, 2, dtype=torch.float64), **options)


def test_an_object_is_as_old_as_it_is_where_its_dict_lies_where_something_new_was() -> None:
    holder = types.SimpleNamespace(n=0)
    judge = Judge()
    try:
        judge.made.add(id(vars(holder)))  # as of a dict of the step's that is gone
        with pytest.raises(Effect, match="sets n of a SimpleNamespace from outside"):
            judge.attribute(sys._getframe(), holder, "n", 1)
        judge.note_dict(holder)
        assert not judge.is_new(vars(holder))
    finally:
        judge.end()


@pytest.mark.eager_only("it asks for the loops itself", run=False)
@pytest.mark.filterwarnings("ignore:scan. not compiled")
@pytest.mark.parametrize("reads", [False, True])
def test_a_variable_of_a_context_with_a_default_is_put_back(reads: bool) -> None:
    variable = contextvars.ContextVar("variable", default=0)

    def body(carry: Any, x: torch.Tensor) -> Any:
        variable.set(variable.get() + 1)
        c, rows = carry
        if reads and (c[0] > 0).item():
            c = c * 0.5
        return (c + x * variable.get(), rows.append(c.detach())), None

    found = looped(body, (torch.zeros(2, dtype=torch.float64), tl.TensorArray()), compile=True)[0][0]
    assert variable.get() == 3
    variable.set(0)
    torch.testing.assert_close(found, looped(body, (torch.zeros(2, dtype=torch.float64), tl.TensorArray()))[0][0])


@pytest.mark.eager_only("it asks for the loops itself", run=False)
@pytest.mark.filterwarnings("ignore:scan. not compiled")
def test_whether_two_numbers_are_one_object() -> None:
    def body(carry: Any, x: torch.Tensor) -> Any:
        c, n = carry
        return (c + x * (1.0 if n is n + 0 else 0.5), n + 1), None

    init = torch.zeros(2, dtype=torch.float64), 0
    torch.testing.assert_close(looped(body, init, compile=True)[0][0], looped(body, init)[0][0])


@pytest.mark.parametrize("what", ["returned", "view", "changed"])
def test_a_tensor_from_outside_in_a_carry_that_is_written_to_is_refused_with_checkpoints(what: str) -> None:
    outside = torch.zeros(2, dtype=torch.float64)

    def body(carry: Any, x: torch.Tensor) -> Any:
        c, q = carry
        (outside if what == "changed" else q).add_(1)
        return (c + x + q, outside[:] if what == "view" else outside), None

    init = torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"scan: .* which is from outside|shares? memory"):
        looped(body, init, checkpoints=2)


def test_where_a_carry_lies_is_not_asked_with_checkpoints() -> None:
    w = torch.ones(2, dtype=torch.float64)

    def body(carry: Any, x: torch.Tensor) -> Any:
        c, q = carry
        assert w.data_ptr() != x.sin().data_ptr()
        return (c + x * (1.0 if c.data_ptr() == q.data_ptr() else 0.5), c), None

    init = torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="scan: the body asks where a tensor that the loop gives is in memory"):
        looped(body, init, checkpoints=2)


@pytest.mark.eager_only("it asks for checkpoints alone", run=False)
@pytest.mark.parametrize("way", ["variable", "attribute", "item", "getattr"])
@pytest.mark.parametrize("same", [True, False])
def test_a_step_that_sets_what_it_found_missing_repeats_itself_or_is_refused(way: str, same: bool) -> None:
    class Filled:
        def __getattr__(self, name: str) -> float:
            self.__dict__[name] = 3.0
            return 3.0 if same else 1.0

    holder, items, filled, variable = types.SimpleNamespace(x=None), dict[str, float](), Filled(), None

    def scale() -> float:
        nonlocal variable
        if way == "getattr":
            return filled.x
        if way == "item":
            if "x" not in items:
                items["x"] = 3.0
                return 3.0 if same else 1.0
            return items["x"]
        if way == "attribute":
            if holder.x is None:
                holder.x = 3.0
                return 3.0 if same else 1.0
            return holder.x
        if variable is None:
            variable = 3.0
            return 3.0 if same else 1.0
        return variable

    init = torch.ones(2, dtype=torch.float64, requires_grad=True)
    out = looped(lambda c, x: ((c * scale()).sin() + x, None), init, checkpoints=2)[0].sum()
    if not same:
        with pytest.raises(RuntimeError, match="scan: step 0 did not repeat itself in backward"):
            torch.autograd.grad(out, init)
        return
    true = looped(lambda c, x: ((c * 3.0).sin() + x, None), init)[0].sum()
    torch.testing.assert_close(torch.autograd.grad(out, init), torch.autograd.grad(true, init))


@pytest.mark.eager_only("it asks for the loops itself", run=False)
@pytest.mark.filterwarnings("ignore:scan. not compiled")
def test_a_first_step_apart_hands_on_tensors_that_share_memory() -> None:
    def run(**options: Any) -> Any:
        holder = types.SimpleNamespace()

        def body(carry: Any, x: torch.Tensor) -> Any:
            h, q, rows = carry
            h.mul_(0.9)
            holder.n = getattr(holder, "n", 0) + 1
            return (h, h[None][0], rows.append(q)), q.clone()

        init = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), tl.TensorArray()
        return looped(body, init, **options)[1]

    torch.testing.assert_close(run(compile=True), run())


@pytest.mark.eager_only("a loop of no steps", run=False)
def test_a_cache_keeps_nothing_of_a_step_without_numbers() -> None:
    @functools.lru_cache(None)
    def mask(n: int) -> Tensor:
        return torch.ones(n)

    body: Any = lambda c, x: (c * mask(3), c)  # noqa: E731
    with pytest.warns(UserWarning, match="which keeps it"):
        tl.scan(body, torch.ones(3), torch.empty(0, 3))
    assert type(mask(3)) is Tensor
    assert mask(3).sum().item() == 3


class Kept:
    n = 0

    @functools.cached_property
    def number(self) -> int:
        Kept.n += 1
        return Kept.n


def asked_by_a_cache(kept: Kept, calls: list[int]) -> Callable[[Any], Any]:
    @functools.lru_cache(None)
    def limit(k: int) -> int:
        calls[0] += 1
        return calls[0]

    return lambda c: c[0] + limit(calls[0]) < 9


def asked_and_forgotten(kept: Kept, calls: list[int]) -> Callable[[Any], Any]:
    def cond(c: Any) -> Tensor:
        number = kept.number
        del kept.number
        return c[0] + number < 9

    return cond


@pytest.mark.eager_only("it asks for the loops itself", run=False)
@pytest.mark.filterwarnings("ignore:while_loop. not compiled")
@pytest.mark.parametrize("made", [asked_by_a_cache, asked_and_forgotten])
def test_a_condition_that_counts_behind_a_cache_counts_as_in_the_eager_loop(made: Any) -> None:
    found = list[Any]()
    for compiles in (False, True):
        Kept.n, calls, kept = 0, [0], Kept()
        carry = tl.while_loop(made(kept, calls), lambda c: c + 1, torch.zeros(2), compile=compiles)
        found.append((carry.tolist(), calls, Kept.n, vars(kept)))
    assert found[0] == found[1]


@pytest.mark.eager_only("it asks for the loop itself", run=False)
def test_a_cached_property_of_a_condition_compiles() -> None:
    class Limit:
        @functools.cached_property
        def steps(self) -> int:
            return 5

    limit = Limit()
    found = tl.while_loop(lambda c: c[0] < limit.steps, lambda c: c + 1, torch.zeros(2), compile="strict")
    assert found.tolist() == [5, 5]


class Missing(dict[Any, int]):
    def __missing__(self, key: Any) -> int:
        self[key] = 0
        return 0


APPEAR = {  # what the first step makes, and all others change and read
    "defaultdict": (lambda: collections.defaultdict(int), "s['k'] += 1", "s['k']"),
    "dict": (lambda: {}, "s['k'] = s.get('k', 0) + 1", "s['k']"),
    "setdefault": (lambda: {}, "s.setdefault('k', 0); s['k'] += 1", "s['k']"),
    "missing": (Missing, "s['k'] += 1", "s['k']"),
    "attribute": (types.SimpleNamespace, "s.n = getattr(s, 'n', 0) + 1", "s.n"),
    "None": (lambda: types.SimpleNamespace(n=None), "s.n = 1 if s.n is None else s.n + 1", "s.n"),
    "OrderedDict": (collections.OrderedDict, "s['k'] = s.get('k', 0) + 1; s.move_to_end('k')", "s['k']"),
    "ChainMap": (collections.ChainMap, "s['k'] = s.get('k', 0) + 1", "s['k']"),
    "Counter": (collections.Counter, "s['k'] += 1", "s['k']"),
}


@pytest.mark.eager_only("the kind of loop is given", run=False)
@pytest.mark.parametrize("kind", APPEAR)
@pytest.mark.parametrize("loop", ["scan", "fori_loop"])
def test_what_the_first_step_makes_is_gone_where_the_others_are_refused(kind: str, loop: str) -> None:
    make, write, read = APPEAR[kind]
    found: dict[str, Any] = {"s": make(), "torch": torch, "__name__": "users"}
    exec(compile(f"def step(c):\n    {write}\n    return torch.tanh(c * {read})", "<body>", "exec"), found)
    before, c = copy.deepcopy(found["s"]), torch.ones(2, requires_grad=True)
    step = found["step"]
    loops: dict[str, Callable[..., Any]] = {
        "scan": lambda **options: tl.scan(lambda c, x: (step(c), None), c, torch.ones(5), **options),
        "fori_loop": lambda **options: tl.fori_loop(0, 5, lambda i, c: step(c), c, **options),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tl.loop.NotCompiledWarning)
        with pytest.raises(RuntimeError, match=r"the body .*<body>:[23]"):
            loops[loop](checkpoints=2, compile=True)
    assert found["s"] == before


class Lazy:
    """An object whose cached property is filled by being read."""

    @functools.cached_property
    def p(self) -> int:
        return 1


FILLED: dict[str, Callable[[Lazy], Any]] = {
    "in": lambda o: "p" in vars(o),
    "len": lambda o: len(o.__dict__),
    "get": lambda o: o.__dict__.get("p", 0),
}


@pytest.mark.eager_only("the kind of loop is given", run=False)
@pytest.mark.filterwarnings("ignore:scan. not compiled", "ignore:while_loop. not compiled")
@pytest.mark.parametrize("asks", FILLED)
@pytest.mark.parametrize("how", [{"compile": True}, {"compile": True, "checkpoints": 2}], ids=["compiled", "both"])
def test_a_look_does_not_fill_a_cached_property(asks: str, how: dict[str, Any]) -> None:
    def run(**options: Any) -> tuple[float, float]:
        scanned, looped = Lazy(), Lazy()

        def step(o: Lazy, c: Tensor) -> Tensor:
            filled = float(FILLED[asks](o))
            return c * 0.5 + filled * o.p

        zero = torch.zeros(())
        carry, _ = tl.scan(lambda c, x: (step(scanned, c) + x, None), zero, torch.ones(5), **options)
        last = tl.while_loop(lambda c: c < 1.9, lambda c: step(looped, c), zero, max_steps=5, **options)
        return carry.item(), last.item()

    expected = run()
    for _ in range(12):  # also where it is not noted any more what a step reads
        assert run(**how) == expected


def test_steps_that_find_a_cached_property_otherwise_in_backward_are_refused() -> None:
    o, init = Lazy(), torch.ones((), requires_grad=True)

    def body(c: Tensor, x: Tensor) -> Any:
        weight = 2.0 if "p" in vars(o) else 0.5
        return c * weight * o.p + x, None

    with pytest.raises(RuntimeError, match=r"the body fills p|did not repeat itself"):
        tl.scan(body, init, torch.ones(5), checkpoints=2)[0].backward()
