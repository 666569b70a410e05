"""Bodies that change Python values: each is refused before it does so, and the eager loop finds them as they were."""

import itertools
import random
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tests.support.both_ways import check_both

XS = torch.arange(10.0).view(5, 2)
SEEN: list[Any] = []
CALLS = 0


class Counting:
    """A body that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.sizes: dict[int, int] = {}

    def __call__(self, h: Tensor, x: Tensor) -> Any:
        self.calls += 1
        self.sizes[self.calls] = len(h)
        return h * self.calls + x, None

    def method(self, h: Tensor, x: Tensor) -> Any:
        return self(h, x)


class Deep(nn.Module):
    """A module that counts in a part of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Identity(), Step())])

    def forward(self, h: Tensor, x: Tensor) -> Any:
        return self.layers[0](h) + x, None


class Step(nn.Module):
    steps = 0

    def forward(self, h: Tensor) -> Tensor:
        self.steps += 1
        return h * self.steps


class Buffered(nn.Module):
    """A module that puts another tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, h: Tensor, x: Tensor) -> Any:
        self.total = self.total + 1
        return h + x, None


def counts_a_global(h: Tensor, x: Tensor) -> Any:
    global CALLS  # noqa: PLW0603 - what the test is about
    CALLS += 1
    return h * CALLS + x, None


def appends_by_a_helper(h: Tensor, x: Tensor) -> Any:
    _note(1)
    return h * len(SEEN) + x, None


def _note(x: int) -> None:
    SEEN.append(x)


def container(make: Callable[[], Any], change: Callable[[Any], Any]) -> Callable[[], Any]:
    def made() -> Any:
        held = make()

        def body(h: Tensor, x: Tensor) -> Any:
            change(held)
            return h * len(held) + x, None

        return body, lambda: held

    return made


def objects(kind: Callable[[], Any], name: str = "") -> Callable[[], Any]:
    def made() -> Any:
        held = kind()
        return getattr(held, name) if name else held, lambda: vars(held)

    return made


def makers() -> dict[str, Callable[[], tuple[Any, Callable[[], Any]]]]:
    """By what is said of it, a body made anew, and what it has changed."""

    def counter() -> Any:
        n = 0

        def body(h: Tensor, x: Tensor) -> Any:
            nonlocal n
            n += 1
            return h * n + x, None

        return body, lambda: n

    def namespace() -> Any:
        held = SimpleNamespace(inner=SimpleNamespace(steps=0))

        def body(by: float, h: Tensor, x: Tensor) -> Any:
            held.inner.steps += 1
            return h * held.inner.steps * by + x, None

        return partial(body, 2.0), lambda: held.inner.steps

    def bound() -> Any:
        held: list[int] = []
        append = held.append

        def body(h: Tensor, x: Tensor) -> Any:
            append(1)
            return h + x, None

        return body, lambda: held

    def default() -> Any:
        def body(h: Tensor, x: Tensor, held: list[int] = []) -> Any:  # noqa: B006 - what the test is about
            held.append(1)
            return h * len(held) + x, None

        return body, lambda: None

    def deep() -> Any:
        module = Deep()
        return module, lambda: [x.steps for x in module.modules() if isinstance(x, Step)]

    def hooked() -> Any:
        held: list[int] = []
        module = nn.Identity()
        module.register_forward_hook(lambda *_: held.append(1))
        return lambda h, x: (module(h) + x, None), lambda: held

    def drawn(kind: Any, name: str) -> Callable[[], Any]:
        def made() -> Any:
            draw = kind(3)
            return lambda h, x: (h * float(getattr(draw, name)()) + x, None), getattr(draw, name)

        return made

    return {
        "sets n, a variable of its closure": counter,
        "sets the global CALLS": lambda: (counts_a_global, lambda: CALLS),
        "calls append() of a list from outside": container(list, lambda held: held.append(1)),
        "calls append() of a list from outside, by its method": bound,
        "calls append() of a list from outside, in a helper": lambda: (appends_by_a_helper, lambda: SEEN),
        "calls append() of a list from outside, a default": default,
        "calls append() of a list from outside, in a hook": hooked,
        "sets an item of a list from outside": container(lambda: [0, 1], lambda held: held.__setitem__(0, held[0] + 1)),
        "sets [1] of a dict from outside": container(dict, lambda held: held.__setitem__(len(held), 1)),
        "makes an item of a defaultdict from outside by reading it": container(
            lambda: defaultdict(int), lambda held: held[len(held)]
        ),
        "calls update() of a Counter from outside": container(Counter, lambda held: held.update(a=1)),
        "calls add() of a set from outside": container(set, lambda held: held.add(len(held))),
        "calls append() of a deque from outside": container(deque, lambda held: held.append(1)),
        "calls update() of a dict from outside": container(
            lambda: {"a": [{}]}, lambda held: held["a"][0].update({len(held["a"][0]): 1})
        ),
        "sets self.calls": objects(Counting),
        "sets self.calls, in a method": objects(Counting, "method"),
        "sets held.inner.steps": namespace,
        "sets self.steps": deep,
        "sets self.total": objects(Buffered),
        "calls random() of a Random from outside": drawn(random.Random, "random"),
        "calls random()": drawn(numpy.random.default_rng, "random"),
    }


MAKERS = makers()
# Where something appears that was not there, the first step runs by itself before the others are looked at.
APPEARING = "sets [1] of a dict from outside", "makes an item of a defaultdict from outside by reading it"


def fresh(name: str) -> Any:
    global CALLS  # noqa: PLW0603
    SEEN.clear()
    CALLS = 0
    return MAKERS[name]()


def run(name: str, xs: Tensor = XS, **options: Any) -> tuple[Tensor, str]:
    body, changed = fresh(name)
    last, _ = tl.scan(body, torch.ones(2), xs, **options)
    return last, repr(changed())


@pytest.mark.parametrize("name", MAKERS)
def test_a_change_is_refused_before_it_is_made(name: str):
    said = rf"not compiled: the body {re.escape(name.partition(',')[0])}.*\(.*test_compiled_outside.py:\d+\)"
    expected = run(name)
    with pytest.warns(NotCompiledWarning, match=said):
        found = run(name, compile=True)
    assert found[1] == expected[1]
    assert torch.equal(found[0], expected[0])
    _, before = run(name, xs=XS[:1]) if name in APPEARING else (None, repr(fresh(name)[1]()))
    body, changed = fresh(name)
    with pytest.raises(RuntimeError, match=said):
        tl.scan(body, torch.ones(2), XS, compile="strict")
    assert repr(changed()) == before


def test_a_change_is_named():
    body = Counting()
    with pytest.raises(RuntimeError, match=r"the body sets self\.calls \(.*Cure: carry it as a tensor"):
        tl.scan(body, torch.ones(2), torch.ones(3, 2), compile="strict")
    assert (body.calls, body.sizes) == (0, {})


def test_an_iterator_is_refused_before_it_gives_less():
    numbers = itertools.count(1)
    with pytest.raises(RuntimeError, match="the body takes the next of a count from outside"):
        tl.scan(lambda h, x: (h * next(numbers), None), torch.ones(2), torch.ones(3, 2), compile="strict")
    assert next(numbers) == 1


def test_an_error_of_the_body_leaves_no_trace_of_the_step_that_was_looked_at():
    calls: list[int] = []

    def body(h: Tensor, x: Tensor) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("third")
        return h + x, None

    with pytest.warns(NotCompiledWarning), pytest.raises(ValueError, match="third"):
        tl.scan(body, torch.ones(2), torch.ones(9, 2), compile=True)
    assert calls == [1, 1, 1]
    assert tl.explain(body, torch.ones(2), torch.ones(9, 2)).compiled is False
    assert calls == [1, 1, 1]


@pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning")
@pytest.mark.parametrize(
    "later",
    [lambda h, x: (h.double(), None), lambda h, x: ((h, h), None), lambda h, x: (h, h), lambda h, x: h],
    ids=["dtype", "carry", "y", "no pair"],
)
def test_another_dtype_or_structure_in_a_later_step_is_the_error_of_the_eager_loop(later: Callable[..., Any]):
    errors = []
    for compile in (False, True):
        steps: list[int] = []

        def body(h: Tensor, x: Tensor, steps: list[int] = steps) -> Any:
            steps.append(1)
            return later(h, x) if len(steps) == 3 else (h + x, None)

        with pytest.raises((TypeError, ValueError), match="scan") as told:
            tl.scan(body, torch.ones(2), torch.ones(9, 2), compile=compile)
        errors.append((type(told.value), str(told.value), len(steps)))
    assert errors[0] == errors[1]


def test_what_a_body_only_reads_is_no_change():
    table, settings = [1.0, 2.0], {"scale": 2.0, "nan": float("nan")}
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    body = lambda h, x: (module(h) * settings["scale"] + x * table[1] + settings["nan"] * 0, None)  # noqa: E731
    last, _ = tl.scan(body, torch.ones(2), torch.ones(3, 2), compile="strict")
    assert last.isnan().all()


class Lazy:
    """A body that makes a number and a tensor in its first step, and uses them in all."""

    scale: float | None = None

    def step(self, h: Tensor, x: Tensor) -> Any:
        if self.scale is None:
            self.scale = 2.0
        if not hasattr(self, "mask"):
            self.mask = torch.ones(2, 2, dtype=h.dtype).tril() + x
        return torch.sin(h @ self.mask * self.scale) + x, h.sum()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_first_step_that_makes_what_the_others_find_runs_by_itself(reverse: bool):
    def run(compile: Any, h: Tensor, xs: Tensor) -> Any:
        lazy = Lazy()
        found = tl.scan(lazy.step, h, xs, reverse=reverse, compile=compile)
        assert lazy.scale == 2.0
        counted = Lazy()
        numbers = tl.fori_loop(0, 4, lambda i, h: counted.step(h, xs[0] * i)[0], h, compile=compile)
        return found, numbers

    check_both(run, torch.ones(2, dtype=torch.float64), torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2))
    body = Lazy().step
    assert tl.explain(body, torch.ones(2), torch.ones(3, 2)).compiled


def test_a_second_step_that_makes_something_else_is_an_eager_one():
    class Later(Lazy):
        def step(self, h: Tensor, x: Tensor) -> Any:
            if hasattr(self, "mask"):
                self.more = 1.0
            return super().step(h, x)

    call = torch.ones(2), torch.ones(4, 2)
    expected = tl.scan(Later().step, *call)
    with pytest.warns(NotCompiledWarning, match=r"the body sets self\.more"):
        torch.testing.assert_close(tl.scan(Later().step, *call, compile=True), expected)


def test_a_clock_is_seen():
    with pytest.raises(RuntimeError, match=r"the body calls time\.perf_counter\(\)"):
        tl.scan(lambda h, x: (h * time.perf_counter(), None), torch.ones(2), torch.ones(3, 2), compile="strict")


@pytest.mark.parametrize("made", [False, True], ids=["leaf", "made"])
def test_a_hook_that_the_body_registers_is_taken_back(made: bool):
    grads = []
    for compile in (False, True):
        leaf = torch.ones(2, requires_grad=True)
        w = leaf * 1.5 if made else leaf

        def body(h: Tensor, x: Tensor, w: Tensor = w) -> Any:
            w.register_hook(lambda g: g * 0.9)
            return h * w + x, None

        xs = torch.ones(3, 2)
        if compile:
            with pytest.warns(NotCompiledWarning, match="the body registers a hook"):
                last, _ = tl.scan(body, torch.ones(2), xs, compile=True)
        else:
            last, _ = tl.scan(body, torch.ones(2), xs)
        grads.append(torch.autograd.grad(last.sum(), leaf)[0])
    assert torch.equal(*grads)


class Slotted:
    __slots__ = ("sign", "total")

    def __init__(self) -> None:
        self.sign = 1

    def turn(self, h: Tensor, x: Tensor) -> Any:
        self.sign, self.total = -self.sign, x
        return h * self.sign + x, None


class Swapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some, self.other = nn.Identity(), nn.Tanh()

    def forward(self, h: Tensor, x: Tensor) -> Any:
        self.some, self.other = self.other, self.some
        return self.some(h) + x, None


class Switching(nn.Module):
    """Trains at every other step, which is as before after two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, h: Tensor, x: Tensor) -> Any:
        self.train(not self.training)
        return self.norm(h) + x, None


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Slotted, r"sets self\.sign"), (Swapping, r"sets self\.some"), (Switching, r"calls train\(\) of a module")],
)
def test_slots_and_parts_of_modules_stay_as_they_were(kind: Any, said: str):
    def run(compile: bool) -> Any:
        module = kind()
        body = module.turn if kind is Slotted else module
        return tl.scan(body, torch.ones(3, 2), torch.arange(15.0).reshape(5, 3, 1), compile=compile)[0], module

    expected, plain = run(False)
    for _ in range(2):
        with pytest.warns(NotCompiledWarning, match=f"the body {said}"):
            found, module = run(True)
        torch.testing.assert_close(found, expected)
        if kind is Slotted:
            assert module.sign == plain.sign
        else:
            assert [x.training for x in module.modules()] == [x.training for x in plain.modules()]
            assert [*map(type, module.children())] == [*map(type, plain.children())]


def test_a_step_known_in_part_leaves_no_trace_in_python():
    """A look at the calls ends where they are no longer those of a known step: a change before that is refused, too."""
    linear, switch = nn.Linear(2, 2), SimpleNamespace(on=True, flips=False)

    def body(h: Tensor, x: Tensor) -> Any:
        switch.on = switch.on != switch.flips
        h = linear(h)
        return torch.cos(h if switch.on else torch.relu(h)) + x, None

    call = torch.ones(3, 2), torch.arange(15.0).reshape(5, 3, 1)
    tl.scan(body, *call, compile="strict")
    switch.flips = True
    expected, _ = tl.scan(body, *call)
    switch.on = True
    with pytest.warns(NotCompiledWarning, match=r"the body sets switch\.on"):
        found, _ = tl.scan(body, *call, compile=True)
    torch.testing.assert_close(found, expected)
    assert not switch.on
