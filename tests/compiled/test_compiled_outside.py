"""Bodies that change Python values: each is seen, and the eager loop that runs instead finds them as they were."""

import itertools
import random
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

T = 5
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
    """Names -> a body made anew, and what it has changed."""

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
        "a variable": counter,
        "a global": lambda: (counts_a_global, lambda: CALLS),
        "a list": container(list, lambda held: held.append(1)),
        "a list by its method": bound,
        "a list of a helper": lambda: (appends_by_a_helper, lambda: SEEN),
        "a list in a default": default,
        "an element": container(lambda: [0, 1], lambda held: held.__setitem__(0, held[0] + 1)),
        "a dict": container(dict, lambda held: held.__setitem__(len(held), 1)),
        "a defaultdict": container(lambda: defaultdict(int), lambda held: held[len(held)]),
        "a Counter": container(Counter, lambda held: held.update(a=1)),
        "a set": container(set, lambda held: held.add(len(held))),
        "a deque": container(deque, lambda held: held.append(1)),
        "a dict in a list in a dict": container(
            lambda: {"a": [{}]}, lambda held: held["a"][0].update({len(held["a"][0]): 1})
        ),
        "an object that is called": objects(Counting),
        "an object's method": objects(Counting, "method"),
        "a name in a name": namespace,
        "a module's part": deep,
        "a module's buffer": objects(Buffered),
        "a module's hook": hooked,
        "random.Random": drawn(random.Random, "random"),
        "numpy's generator": drawn(numpy.random.default_rng, "random"),
    }


MAKERS = makers()


def run(name: str, **options: Any) -> tuple[Tensor, str]:
    global CALLS  # noqa: PLW0603
    SEEN.clear()
    CALLS = 0
    body, changed = MAKERS[name]()
    last, _ = tl.scan(body, torch.ones(2), torch.arange(2.0 * T).view(T, 2), **options)
    return last, repr(changed())


@pytest.mark.parametrize("name", MAKERS)
def test_a_change_is_seen_and_taken_back(name: str):
    expected = run(name)
    with pytest.warns(NotCompiledWarning, match=r"the body (changes|draws).*test_compiled_outside.py:\d+\)"):
        found = run(name, compile=True)
    assert found[1] == expected[1]
    assert torch.equal(found[0], expected[0])
    with pytest.raises(RuntimeError, match=r"the body (changes|draws)"):
        run(name, compile="strict")


def test_a_change_is_named():
    body = Counting()
    with pytest.raises(RuntimeError, match=r"the body changes body_fn\.calls, a Python value outside of it"):
        tl.scan(body, torch.ones(2), torch.ones(3, 2), compile="strict")
    assert (body.calls, body.sizes) == (0, {})


def test_an_iterator_is_refused_before_it_gives_less():
    numbers = itertools.count(1)
    with pytest.raises(RuntimeError, match="the body may take the next of numbers, an iterator"):
        tl.scan(lambda h, x: (h * next(numbers), None), torch.ones(2), torch.ones(3, 2), compile="strict")


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
    with pytest.warns(NotCompiledWarning, match="changes body_fn.more"):
        torch.testing.assert_close(tl.scan(Later().step, *call, compile=True), expected)


def test_a_clock_is_seen():
    with pytest.raises(RuntimeError, match="the body does not do the same at every step"):
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


@pytest.mark.parametrize("kind", [Slotted, Swapping, Switching])
def test_slots_and_parts_of_modules_are_put_back(kind: Any):
    def run(compile: bool) -> Any:
        module = kind()
        body = module.turn if kind is Slotted else module
        return tl.scan(body, torch.ones(3, 2), torch.arange(15.0).reshape(5, 3, 1), compile=compile)[0], module

    expected, plain = run(False)
    for _ in range(2):
        with pytest.warns(NotCompiledWarning, match="a Python value outside of it|another one at every step"):
            found, module = run(True)
        torch.testing.assert_close(found, expected)
        if kind is Slotted:
            assert module.sign == plain.sign
        else:
            assert [x.training for x in module.modules()] == [x.training for x in plain.modules()]
            assert [*map(type, module.children())] == [*map(type, plain.children())]


def test_a_step_known_in_part_leaves_no_trace_in_python():
    """A look at the calls ends where they are no longer those of a known step; what the body did is undone."""
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
    with pytest.warns(NotCompiledWarning, match=r"changes switch\.on"):
        found, _ = tl.scan(body, *call, compile=True)
    torch.testing.assert_close(found, expected)
    assert not switch.on
