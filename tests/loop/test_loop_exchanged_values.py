"""Functions and modules that a body names and that are others in backward: refused, unless they do the same."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F

import tensorloop as tl
from tensorloop.loop.known_reads import known_reads
from tests.support.loop_cases import randn


class Fields(NamedTuple):
    scale: float


Change = Callable[["Cell"], Any]
W = randn(3, 3, seed=2)


def looped(body: Callable[[Tensor, Tensor], Any], checkpoints: Any = 2) -> Tensor:
    return tl.scan(body, torch.zeros(2, 3, dtype=W.dtype), randn(5, 2, 3).detach(), checkpoints=checkpoints)[1].sum()


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


class Cell(nn.Module):
    """What it calls are attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.scaled = types.SimpleNamespace(scale=1.0), 1.0
        self.part: Any = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.bound: Any = self.bounded
        self.act: nn.Module = nn.Tanh()
        self.unused: nn.Module = nn.Tanh()

    def bounded(self, h: Tensor) -> Tensor:
        return h.tanh() * self.scaled

    def other(self, h: Tensor) -> Tensor:
        return h.sin()

    def of_partial(self, h: Tensor, x: Tensor) -> Any:
        return (self.part(h @ W) + x,) * 2

    def of_bound(self, h: Tensor, x: Tensor) -> Any:
        return (self.bound(h @ W) + x,) * 2

    def of_module(self, h: Tensor, x: Tensor) -> Any:
        return (self.act(h @ W) + x if self.unused is not None and self.unused else h,) * 2

    def of_alias(self, h: Tensor, x: Tensor) -> Any:
        config = self.config
        return (h @ W * config.scale + x,) * 2

    def of_itself(self, h: Tensor, x: Tensor) -> Any:
        me = self
        return (lambda y: (y @ W * me.config.scale + x,) * 2)(h)

    def of_either(self, h: Tensor, x: Tensor) -> Any:
        found = self.config if self.training else self.act
        return (h @ W * getattr(found, "scale", 1.0) + x,) * 2


def bent(slope: float) -> Any:
    return functools.partial(F.leaky_relu, negative_slope=slope)


CHANGES: dict[str, tuple[str, str, Change]] = {
    "partial": ("of_partial", "argument negative_slope of self.part", lambda x: setattr(x, "part", bent(0.2))),
    "partial by function": ("of_partial", "attribute self.part", lambda x: setattr(x, "part", lambda h: h)),
    "bound method": ("of_bound", "attribute self.bound", lambda x: setattr(x, "bound", x.other)),
    "bound to another": ("of_bound", "attribute self.bound", lambda x: setattr(x, "bound", Cell().eval().bounded)),
    "module": ("of_module", "attribute self.act", lambda x: setattr(x, "act", nn.Sigmoid())),
    "other name": ("of_alias", "attribute self.config.scale", lambda x: setattr(x.config, "scale", 2.0)),
    "other name of self": ("of_itself", "attribute self.config.scale", lambda x: setattr(x.config, "scale", 2.0)),
}
SAME: dict[str, tuple[str, Change]] = {
    "partial": ("of_partial", lambda x: setattr(x, "part", bent(0.1))),
    "bound method": ("of_bound", lambda x: setattr(x, "bound", x.bounded)),
    "module": ("of_module", lambda x: setattr(x, "act", nn.Tanh())),
    "attribute that is not read so": ("of_alias", lambda x: setattr(x, "scale", 2.0)),
}


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
@pytest.mark.parametrize("how", CHANGES)
def test_what_does_something_else_is_refused(how: str) -> None:
    body, named, change = CHANGES[how]
    cell = Cell()
    out = looped(getattr(cell, body))
    change(cell)
    with pytest.raises(RuntimeError, match=f"scan: the {named}, which the body uses, was "):
        grad(out, W)


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
@pytest.mark.parametrize("known", [False, True], ids=["followed", "known"])
@pytest.mark.parametrize("how", ["item", "deep", "length", "keys", "set", "part", "hook", "method", "named tuple"])
def test_what_containers_and_modules_hold_must_stay(how: str, known: bool) -> None:
    options: Any = {"a": [1.0], "b": {1}, "c": types.SimpleNamespace(deep=[{"x": 1.0}])}
    pair, model, cell = types.SimpleNamespace(fields=Fields(1.0)), nn.Sequential(nn.Tanh()), Cell()

    def body(h: Tensor, x: Tensor) -> Any:
        scale = options["a"][0] * options["c"].deep[0]["x"] + len(options["a"]) + (2 in options["b"])
        for key in options:
            scale += len(key)
        return (model(cell.other(h @ W)) * scale * pair.fields.scale + x,) * 2

    changes: dict[str, tuple[str, Callable[[], Any]]] = {
        "item": (r"item options\['a'\]\[0\]", lambda: options["a"].__setitem__(0, 2.0)),
        "deep": (r"item options\['c'\].deep\[0\]\['x'\]", lambda: options["c"].deep[0].update(x=2.0)),
        "length": (r"length of options\['a'\]", lambda: options["a"].append(1.0)),
        "keys": ("keys of options", lambda: options.update(d=1)),
        "set": (r"elements of options\['b'\]", lambda: options["b"].add(2)),
        "part": ("variable model", lambda: model.append(nn.Tanh())),
        "hook": ("variable model", lambda: model.register_forward_hook(lambda *given: given[-1] * 2)),
        "method": ("attribute cell.other", lambda: setattr(cell, "other", torch.tanh)),
        "named tuple": ("attribute pair.fields.scale", lambda: setattr(pair, "fields", Fields(2.0))),
    }
    named, change = changes[how]
    if known:
        looped(body)
    out = looped(body)
    grad(out, W, retain_graph=True)
    change()
    with pytest.raises(RuntimeError, match=f"scan: the {named}, which the body uses, (was|has) "):
        grad(out, W)


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
def test_a_variable_that_is_another_method_is_refused() -> None:
    cell = Cell()
    step: Any = cell.bounded
    out = looped(lambda h, x: (step(h @ W) + x,) * 2)
    step = cell.other
    with pytest.raises(RuntimeError, match=r"the variable step, which the body uses, was <function Cell\.bounded"):
        grad(out, W)


@pytest.mark.parametrize("how", SAME)
def test_what_does_the_same_is_not(how: str) -> None:
    body, change = SAME[how]
    cell = Cell()
    true = grad(looped(getattr(cell, body), None), W)[0]
    out = looped(getattr(cell, body))
    change(cell)
    torch.testing.assert_close(grad(out, W)[0], true)


def made(kind: str, scale: float) -> Callable[[Tensor], Tensor]:
    """A function made anew."""

    def cell(h: Tensor, turns: int = 2) -> Tensor:
        return (h @ W).tanh() * scale if kind != "recursive" or not turns else cell(h, turns - 1)

    class Called:
        def __call__(self, h: Tensor) -> Tensor:
            return cell(h)

    config, called = types.SimpleNamespace(scale=scale, sizes=[1, (2,)]), Called()
    kinds: dict[str, Callable[..., Any]] = {
        "function": cell,
        "recursive": cell,
        "lambda": lambda h: (h @ W).tanh() * scale,
        "decorated": wrapped(cell),
        "partial": functools.partial(lambda weight, h: (h @ weight).tanh() * scale, W),
        "object": lambda h: called(h),
        "configured": lambda h: (h @ W).tanh() * config.scale,
    }
    return kinds[kind]


@pytest.mark.parametrize("kind", ["function", "recursive", "lambda", "decorated", "partial", "object", "configured"])
def test_a_function_made_anew_from_the_same_code_is_the_same(kind: str) -> None:
    def total(checkpoints: Any) -> Tensor:
        out = torch.zeros((), dtype=W.dtype)
        for _ in range(2):
            cell = made(kind, 1.0)
            out = out + looped(lambda h, x: (cell(h) + x,) * 2, checkpoints)  # noqa: B023
        return out

    torch.testing.assert_close(grad(total(2), W), grad(total(None), W))


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
@pytest.mark.parametrize("kind", ["function", "recursive", "lambda", "decorated", "partial", "object", "configured"])
def test_a_function_made_anew_from_other_values_is_another(kind: str) -> None:
    cell = made(kind, 1.0)
    out = looped(lambda h, x: (cell(h) + x,) * 2)
    cell = made(kind, 2.0)
    named = {"object": "variable called", "configured": r"attribute config\.scale"}.get(kind, "variable scale")
    with pytest.raises(RuntimeError, match=f"the {named}, which the body uses, was "):
        grad(out, W)


def test_a_global_function_may_be_defined_again_at_another_line() -> None:
    space: dict[str, Any] = {"W": W}
    exec("def cell(h): return (h @ W).tanh()\ndef body(h, x): return (cell(h) + x,) * 2", space)
    true, out = grad(looped(space["body"], None), W)[0], looped(space["body"])
    exec("\n\n\ndef cell(h): return (h @ W).tanh()", space)
    torch.testing.assert_close(grad(out, W)[0], true)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_modules_of_torch_jit_may_be_named() -> None:
    scripted: Any = torch.jit.script(nn.Linear(3, 3, dtype=W.dtype))
    whole: Any = nn.ModuleDict({"inner": scripted})
    body: Any = lambda h, x: ((scripted(h) + whole.inner(x @ W)) * scripted.training,) * 2  # noqa: E731
    torch.testing.assert_close(grad(looped(body), W), grad(looped(body, None), W))


class Node:
    """One of many that know each other."""

    def __init__(self, after: Any) -> None:
        self.after, self.value = after, 1.0

    def run(self, h: Tensor) -> Tensor:
        return self.after.run(h * self.value) if self.after else h.tanh()


def linked(count: int) -> Any:
    found = None
    for _ in range(count):
        found = Node(found)
    return found


def calls_of(run: Callable[[], Any]) -> int:
    calls, before = 0, sys.getprofile()

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.eager_only("counts the calls of a loop that is not compiled")
def test_objects_that_the_code_does_not_read_cost_nothing() -> None:
    def cost(count: int) -> int:
        head = linked(count)
        body: Any = lambda h, x: ((h @ W) * head.after.value + x,) * 2  # noqa: E731
        known_reads.clear()
        looped(body)
        return calls_of(lambda: looped(body))

    assert cost(3000) == cost(3)


def test_a_long_chain_of_methods_is_no_deep_recursion() -> None:
    head = linked(400)
    body: Any = lambda h, x: (head.run(h @ W) + x,) * 2  # noqa: E731
    torch.testing.assert_close(grad(looped(body), W), grad(looped(body, None), W))
