"""Loops whose steps are known by what they read in Python: what has changed since is seen, wherever it stands."""

import collections
import contextvars
import dataclasses
import functools
import math
import operator
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.effects.judge import Judge
from tensorloop.loop.known_reads import known_reads

XS = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(6, 1).repeat(1, 2)


class Count:
    """What a body must not count on."""

    def __init__(self) -> None:
        self.n = 0

    def impure(self, h: Tensor) -> Tensor:
        self.n += 1
        return h * self.n


class Config:
    scale = 1.0

    def __init__(self) -> None:
        self.on = False


class Slotted:
    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


class Adding:
    def __init__(self, h: Tensor) -> None:
        self.h = h

    def __add__(self, other: Tensor) -> Tensor:
        return self.h + other

    @property
    def twice(self) -> Tensor:
        return self.h * 2


class Base(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h)


class Above(Base):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


class Impure(nn.Module):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def forward(self, h: Tensor) -> Tensor:
        return self.count.impure(h)


Made = Callable[[Count], tuple[Callable[[Tensor], Tensor], Callable[[], Any]]]
CASES: dict[str, Made] = {}
IS_ON = True
holder = types.ModuleType("holder")


def case(made: Made) -> Made:
    CASES[made.__name__] = made
    return made


@case
def variable(count: Count) -> Any:
    on = False

    def change() -> None:
        nonlocal on
        on = True

    return lambda h: count.impure(h) if on else h.sin(), change


@case
def a_global(count: Count) -> Any:
    patch(sys.modules[__name__], "IS_ON", False)
    return lambda h: count.impure(h) if IS_ON else h.sin(), lambda: patch(sys.modules[__name__], "IS_ON", True)


@case
def attribute(count: Count) -> Any:
    config = Config()
    return lambda h: count.impure(h) if config.on else h.sin(), lambda: setattr(config, "on", True)


@case
def attribute_of_a_class(count: Count) -> Any:
    config = type("Mine", (Config,), {})()
    return (lambda h: count.impure(h) if config.scale > 1 else h.sin(), lambda: setattr(type(config), "scale", 2.0))


@case
def attribute_that_hides_the_class(count: Count) -> Any:
    config = Config()
    return (lambda h: count.impure(h) if config.scale > 1 else h.sin(), lambda: setattr(config, "scale", 2.0))


@case
def slot(count: Count) -> Any:
    config = Slotted()
    return lambda h: count.impure(h) if config.on else h.sin(), lambda: setattr(config, "on", True)


@case
def attribute_of_a_module(count: Count) -> Any:
    holder.on = False  # pyright: ignore[reportAttributeAccessIssue]
    return (lambda h: count.impure(h) if holder.on else h.sin(), lambda: setattr(holder, "on", True))


@case
def attribute_by_name(count: Count) -> Any:
    config = Config()
    return lambda h: count.impure(h) if config.on else h.sin(), lambda: setattr(config, "on", True)


@case
def attribute_by_a_getter(count: Count) -> Any:
    config, get = Config(), operator.attrgetter("on")
    return lambda h: count.impure(h) if get(config) else h.sin(), lambda: setattr(config, "on", True)


@case
def attribute_by_vars(count: Count) -> Any:
    config = Config()
    return lambda h: count.impure(h) if vars(config)["on"] else h.sin(), lambda: setattr(config, "on", True)


@case
def attribute_that_comes(count: Count) -> Any:
    config = Config()
    return lambda h: count.impure(h) if hasattr(config, "more") else h.sin(), lambda: setattr(config, "more", 1)


@case
def item_of_a_dict(count: Count) -> Any:
    config = {"on": False}
    return lambda h: count.impure(h) if config["on"] else h.sin(), lambda: config.update(on=True)


@case
def item_by_get(count: Count) -> Any:
    config: dict[str, bool] = {}
    return lambda h: count.impure(h) if config.get("on") else h.sin(), lambda: config.update(on=True)


@case
def item_deep_inside(count: Count) -> Any:
    config = {"a": [{"on": False}]}
    return lambda h: count.impure(h) if config["a"][0]["on"] else h.sin(), lambda: config["a"][0].update(on=True)


@case
def length_of_a_list(count: Count) -> Any:
    items: list[int] = []
    return lambda h: count.impure(h) if len(items) else h.sin(), lambda: items.append(1)


@case
def truth_of_a_list(count: Count) -> Any:
    items: list[int] = []
    return lambda h: count.impure(h) if items else h.sin(), lambda: items.append(1)


@case
def element_of_a_list(count: Count) -> Any:
    items = [1, 2]
    return lambda h: count.impure(h) if max(items) > 2 else h.sin(), lambda: items.__setitem__(1, 5)


@case
def element_of_a_set(count: Count) -> Any:
    items = {1, 2}
    return lambda h: count.impure(h) if 5 in items else h.sin(), lambda: items.add(5)


@case
def element_of_a_deque(count: Count) -> Any:
    items = collections.deque([1])
    return lambda h: count.impure(h) if len(items) > 1 else h.sin(), lambda: items.append(5)


@case
def list_in_something_new(count: Count) -> Any:
    items = [1, 2]
    return lambda h: count.impure(h) if max([items]) == [1, 5] else h.sin(), lambda: items.__setitem__(1, 5)


@case
def function(count: Count) -> Any:
    use = Count()
    use.fn = torch.sin  # pyright: ignore[reportAttributeAccessIssue]
    return lambda h: use.fn(h), lambda: setattr(use, "fn", count.impure)  # pyright: ignore[reportAttributeAccessIssue]


@case
def function_in_a_dict(count: Count) -> Any:
    use: dict[str, Any] = {"f": lambda h: h.sin()}
    return lambda h: use["f"](h), lambda: use.update(f=lambda h: count.impure(h))


@case
def variable_of_a_function_inside(count: Count) -> Any:
    config = Config()

    def made() -> Any:
        on = config.on
        return lambda h: count.impure(h) if on else h.sin()

    use = [made()]

    def change() -> None:
        config.on = True
        use[0] = made()

    return lambda h: use[0](h), change


@case
def default(count: Count) -> Any:
    def use(h: Tensor, on: bool = False) -> Tensor:
        return count.impure(h) if on else h.sin()

    return lambda h: use(h), lambda: setattr(use, "__defaults__", (True,))


@case
def argument_of_a_partial(count: Count) -> Any:
    def use(on: bool, h: Tensor) -> Tensor:
        return count.impure(h) if on else h.sin()

    fns = [functools.partial(use, False)]
    return lambda h: fns[0](h), lambda: fns.__setitem__(0, functools.partial(use, True))


@case
def method_of_an_instance(count: Count) -> Any:
    module = Base()
    return lambda h: module.forward(h), lambda: setattr(module, "forward", count.impure)


@case
def method_of_a_class(count: Count) -> Any:
    kind = type("Mine", (Base,), {})
    module = kind()
    return lambda h: module(h), lambda: setattr(kind, "forward", lambda _, h: count.impure(h))


@case
def method_above(count: Count) -> Any:
    module, was = Above(), Base.forward
    del was
    return lambda h: module(h), lambda: patch(Base, "forward", lambda _, h: count.impure(h))


@case
def operator_of_a_class(count: Count) -> Any:
    return lambda h: Adding(h) + h, lambda: patch(Adding, "__add__", lambda _, h: count.impure(h))


@case
def maker_of_a_class(count: Count) -> Any:
    def init(self: Any, h: Tensor) -> None:
        self.h = count.impure(h)

    return lambda h: Adding(h) + h, lambda: patch(Adding, "__init__", init)


@case
def getter_of_a_class(count: Count) -> Any:
    return lambda h: Adding(h).twice, lambda: patch(Adding, "twice", property(lambda self: count.impure(self.h)))


@case
def part_of_a_module(count: Count) -> Any:
    model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh()))
    return lambda h: model(h), lambda: setattr(model[1], "0", Impure(count))


@case
def part_that_is_more(count: Count) -> Any:
    model = nn.Sequential(nn.Tanh())
    return lambda h: model(h), lambda: model.append(Impure(count))


@case
def part_of_what_had_none(count: Count) -> Any:
    model = nn.Sequential()
    return lambda h: count.impure(h) if len(model) else h.sin(), lambda: model.append(nn.Tanh())


@case
def module_in_a_list(count: Count) -> Any:
    parts = nn.ModuleList([nn.Tanh()])

    def run(h: Tensor) -> Tensor:
        for part in parts:
            h = part(h)
        return h

    return run, lambda: parts.append(Impure(count))


@case
def hook(count: Any) -> Any:
    model = nn.Sequential(nn.Tanh())
    return lambda h: model(h), lambda: model[0].register_forward_hook(lambda *given: count.impure(given[-1]))


@case
def hook_before(count: Count) -> Any:
    model = nn.Tanh()
    return lambda h: model(h), lambda: model.register_forward_pre_hook(lambda _, given: count.impure(given[0]))


@case
def forward_of_a_part(count: Count) -> Any:
    model = nn.Sequential(nn.Tanh())
    return lambda h: model(h), lambda: setattr(model[0], "forward", count.impure)


@case
def attribute_of_a_part(count: Count) -> Any:
    class Part(nn.Module):
        on = False

        def forward(self, h: Tensor) -> Tensor:
            return count.impure(h) if self.on else h.sin()

    model = nn.Sequential(nn.Tanh(), Part())
    return lambda h: model(h), lambda: setattr(model[1], "on", True)


@case
def training(count: Count) -> Any:
    class Part(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return count.impure(h) if self.training else h.sin()

    model = Part().eval()
    return lambda h: model(h), lambda: model.train()


@case
def parameter_that_comes(count: Count) -> Any:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("bias", None)

        def forward(self, h: Tensor) -> Tensor:
            return h.sin() if self.bias is None else count.impure(h)

    model = Part()
    return lambda h: model(h), lambda: setattr(model, "bias", nn.Parameter(torch.zeros(2)))


@case
def shape_of_a_tensor(count: Count) -> Any:
    w = [torch.zeros(2)]
    return lambda h: count.impure(h) if w[0].shape[0] > 2 else h.sin(), lambda: w.__setitem__(0, torch.zeros(3))


@case
def gradient_of_a_tensor(count: Count) -> Any:
    w = torch.zeros(2)
    return lambda h: count.impure(h) if w.requires_grad else h.sin(), lambda: w.requires_grad_()


@case
def attribute_of_a_tensor(count: Count) -> Any:
    w: Any = torch.zeros(2)
    w.on = False
    return lambda h: count.impure(h) if w.on else h.sin(), lambda: setattr(w, "on", True)


@case
def context_variable(count: Count) -> Any:
    on = contextvars.ContextVar("on", default=False)
    return lambda h: count.impure(h) if on.get() else h.sin(), lambda: on.set(True)


@case
def local_of_a_thread(count: Count) -> Any:
    here = threading.local()
    here.on = False
    return lambda h: count.impure(h) if here.on else h.sin(), lambda: setattr(here, "on", True)


@case
def said_to_be_pure(count: Count) -> Any:
    config = Config()
    ask = tl.loop.pure(lambda: config.on)
    return lambda h: count.impure(h) if ask() else h.sin(), lambda: setattr(config, "on", True)


@case
def field_of_a_dataclass(count: Count) -> Any:
    @dataclasses.dataclass
    class Options:
        on: bool = False

    options = Options()
    return lambda h: count.impure(h) if options.on else h.sin(), lambda: setattr(options, "on", True)


@case
def value_of_a_simple_namespace(count: Count) -> Any:
    options = types.SimpleNamespace(on=False)
    return lambda h: count.impure(h) if options.on else h.sin(), lambda: setattr(options, "on", True)


class Pair(NamedTuple):
    on: bool
    other: int = 0


@case
def field_of_a_named_tuple(count: Count) -> Any:
    options = Pair(False)

    def change() -> None:
        nonlocal options
        options = Pair(True)

    return lambda h: count.impure(h) if options.on else h.sin(), change


@case
def argument_that_a_partial_gets(count: Count) -> Any:
    def use(h: Tensor, on: bool = False) -> Tensor:
        return count.impure(h) if on else h.sin()

    fn: Any = functools.partial(use)
    return lambda h: fn(h), lambda: fn.keywords.update(on=True)


@case
def sign_of_zero(count: Count) -> Any:
    config = {"z": 0.0}
    return lambda h: count.impure(h) if math.copysign(1, config["z"]) < 0 else h.sin(), lambda: config.update(z=-0.0)


@case
def bool_for_an_int(count: Count) -> Any:
    config: dict[str, Any] = {"n": 1}
    return lambda h: count.impure(h) if config["n"] is True else h.sin(), lambda: config.update(n=True)


@case
def keywords_of_a_dict(count: Count) -> Any:
    def use(h: Tensor, on: bool = False) -> Tensor:
        return count.impure(h) if on else h.sin()

    config = {"on": False}
    return lambda h: use(h, **config), lambda: config.update(on=True)


@case
def copy_of_a_dict(count: Count) -> Any:
    config = {"on": False}
    return lambda h: count.impure(h) if {**config}["on"] else h.sin(), lambda: config.update(on=True)


@case
def elements_spread(count: Count) -> Any:
    items = [1, 2]
    return lambda h: count.impure(h) if [*items][1] > 2 else h.sin(), lambda: items.__setitem__(1, 5)


@case
def slice_of_a_list(count: Count) -> Any:
    items = [1, 2]
    return lambda h: count.impure(h) if items[1:] == [5] else h.sin(), lambda: items.__setitem__(1, 5)


@case
def text_of_a_list(count: Count) -> Any:
    items = [1, 2]
    return lambda h: count.impure(h) if "5" in f"{items}" else h.sin(), lambda: items.__setitem__(1, 5)


@case
def text_with_a_width(count: Count) -> Any:
    config = Config()
    return (
        lambda h: count.impure(h) if f"{config.scale:.1f}" == "2.0" else h.sin(),
        lambda: setattr(config, "scale", 2.0),
    )


@case
def matched_attribute(count: Count) -> Any:
    config = Config()

    def run(h: Tensor) -> Tensor:
        match config:
            case Config(on=True):
                return count.impure(h)
            case _:
                return h.sin()

    return run, lambda: setattr(config, "on", True)


@case
def matched_item(count: Count) -> Any:
    config = {"on": False}

    def run(h: Tensor) -> Tensor:
        match config:
            case {"on": True}:
                return count.impure(h)
            case _:
                return h.sin()

    return run, lambda: config.update(on=True)


@case
def matched_sequence(count: Count) -> Any:
    items = [1]

    def run(h: Tensor) -> Tensor:
        match items:
            case [_, _]:
                return count.impure(h)
            case _:
                return h.sin()

    return run, lambda: items.append(2)


@case
def which_list_it_is(count: Count) -> Any:
    first, second = [1], [1]
    config: dict[str, list[int]] = {"a": first, "b": second}
    return lambda h: count.impure(h) if config["a"] is config["b"] else h.sin(), lambda: config.update(b=first)


@case
def place_in_memory(count: Count) -> Any:
    first, config = [1], {"b": [1]}
    place = id(first)
    return lambda h: count.impure(h) if id(config["b"]) == place else h.sin(), lambda: config.update(b=first)


@case
def name_that_is_imported(count: Count) -> Any:
    def run(h: Tensor) -> Tensor:
        from tests.loop.test_known_reads import IS_ON as on

        return count.impure(h) if on else h.sin()

    patch(sys.modules[__name__], "IS_ON", False)
    return run, lambda: patch(sys.modules[__name__], "IS_ON", True)


@case
def value_above(count: Count) -> Any:
    class Inner(Config):
        scale = 3.0

        def asked(self) -> float:
            return super().scale

    config = Inner()
    return lambda h: count.impure(h) if config.asked() > 1 else h.sin(), lambda: patch(Config, "scale", 2.0)


@case
def globals_by_name(count: Count) -> Any:
    patch(sys.modules[__name__], "IS_ON", False)
    change = lambda: patch(sys.modules[__name__], "IS_ON", True)  # noqa: E731
    return lambda h: count.impure(h) if globals()["IS_ON"] else h.sin(), change


@case
def text_that_is_evaluated(count: Count) -> Any:
    patch(sys.modules[__name__], "IS_ON", False)
    change = lambda: patch(sys.modules[__name__], "IS_ON", True)  # noqa: E731
    return lambda h: count.impure(h) if eval("IS_ON") else h.sin(), change


_patched: list[tuple[Any, str, Any]] = []


def patch(owner: Any, name: str, value: Any) -> None:
    _patched.append((owner, name, owner.__dict__[name]))
    setattr(owner, name, value)


@pytest.fixture(autouse=True)
def _put_back() -> Any:
    yield
    while _patched:
        setattr(*_patched.pop())


@pytest.mark.parametrize("how", [{"compile": True}, {"checkpoints": 2}], ids=["compiled", "checkpoints"])
@pytest.mark.parametrize("name", CASES)
def test_what_has_changed_since_is_seen(name: str, how: dict[str, Any]) -> None:
    count = Count()
    run, change = CASES[name](count)
    init = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def scanned(**options: Any) -> Tensor:
        return tl.scan(lambda c, x: (run(c) + x, None), init, XS, **options)[0]

    expected = scanned()
    for _ in range(3):
        torch.testing.assert_close(scanned(**how), expected)
    change()
    count.n = 0
    if "checkpoints" in how:
        with pytest.raises(RuntimeError, match=r"the attribute n to which|registers a hook"):
            scanned(**how)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tl.loop.NotCompiledWarning)
        found = scanned(**how)
    after, count.n = count.n, 0
    assert after == len(XS)  # each step has counted, the looks have not
    torch.testing.assert_close(found, scanned())


def followed(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    begun, made = 0, Judge.__init__

    def init(self: Judge, *args: Any, **kwargs: Any) -> None:
        nonlocal begun
        begun += 1
        made(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Judge, "__init__", init)
        run()
    return begun


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, dtype=torch.float64), Above()])
        self.options = types.SimpleNamespace(scale=0.5, names=["a", "b"])

    def mixed(self, h: Tensor, *, twice: bool = False) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h * 2 if twice else h

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = {name: self.mixed(h) for name in self.options.names}
        return sum(parts.values(), Adding(h).twice) * self.options.scale + x, h


@pytest.mark.parametrize("how", [{"compile": "strict"}, {"checkpoints": 2}], ids=["compiled", "checkpoints"])
def test_a_step_that_is_known_is_not_followed_again(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    known_reads.clear()
    cell, init = Cell(), torch.ones(2, dtype=torch.float64)

    def run() -> None:
        w = torch.ones(2, dtype=torch.float64, requires_grad=True)  # another one at each call
        tl.scan(lambda c, x: cell(c * w, x), init, XS, **how)

    assert followed(run, monkeypatch) > 0
    assert followed(run, monkeypatch) == followed(run, monkeypatch) == 0


@pytest.mark.parametrize("how", [{"compile": "strict"}, {"checkpoints": 2}], ids=["compiled", "checkpoints"])
def test_another_structure_of_the_carry_is_another_step(how: dict[str, Any]) -> None:
    def body(c: Any, x: Tensor) -> Any:
        first, second = c.values() if isinstance(c, dict) else c
        new = (first + x, second * first.sin()) if isinstance(c, tuple) else (first - x, second)
        return (dict(zip(c, new, strict=True)) if isinstance(c, dict) else new), None

    a, b = (torch.full((2,), v, dtype=torch.float64) for v in (1.0, 2.0))
    for init in ((a, b), {"a": a, "b": b}, (a, b), {"b": a, "a": b}):
        found, expected = tl.scan(body, init, XS, **how)[0], tl.scan(body, init, XS)[0]
        torch.testing.assert_close(found, expected)


def test_known_steps_hold_no_objects() -> None:
    import gc
    import weakref

    def one() -> list[weakref.ref[Any]]:
        cell, config, w = Cell(), Config(), torch.ones(2, dtype=torch.float64)

        def body(c: Tensor, x: Tensor) -> Any:
            return (cell(c, x)[0] * w if not config.on else c), None

        ways: list[Any] = [{"compile": True}, {"checkpoints": 2}]
        for how in ways:
            tl.scan(body, torch.ones(2, dtype=torch.float64, requires_grad=True), XS, **how)
        return [weakref.ref(x) for x in (cell, config, w, body)]

    held = one()
    gc.collect()
    assert [x() for x in held] == [None] * len(held)


TOLD: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda c: c[0].item() > 3,
    "bool": lambda c: bool((c > 3).all()),
    "float": lambda c: float(c[0].detach()) > 3,
    "tolist": lambda c: max(c.tolist()) > 3,
    "numpy": lambda c: c.detach().numpy().max() > 3,
    "mask": lambda c: c[c > 3].shape[0] > 0,
    "nonzero": lambda c: len((c > 3).nonzero()) > 0,
    "where": lambda c: torch.where(c > 3)[0].numel() > 0,
    "masked_select": lambda c: c.masked_select(c > 3).numel() > 0,
    "unique": lambda c: torch.unique(torch.cat([c > 3, c > 99])).numel() > 1,
    "repeat": lambda c: c.repeat_interleave((c > 3).long()).numel() > 0,
    "equal": lambda c: not torch.equal(c.clamp(max=3), c),
    "str": lambda c: "True" in str(c > 3),
    "index": lambda c: [False, True][(c > 3).long().max()],
}


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("name", TOLD)
def test_steps_are_followed_as_long_as_numbers_may_say_where_they_go(name: str, again: bool) -> None:
    count, init = Count(), torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def body(c: Tensor, x: Tensor) -> Any:
        return (count.impure(c) if TOLD[name](c) else c) + 1, None

    if again:
        tl.scan(body, init, XS[:3], checkpoints=2)
    with pytest.raises(RuntimeError, match="the attribute n to which"):
        tl.scan(body, init, XS, checkpoints=2)


@pytest.mark.filterwarnings("ignore:scan. not compiled")
def test_a_step_that_went_another_way_for_other_numbers_is_followed() -> None:
    seen = list[int]()

    def body(c: Tensor, x: Tensor) -> Any:
        if c.sum() > 0:
            seen.append(1)
        return c - 1, None

    for start, times in ((-1.0, 0), (-1.0, 0), (2.5, 3), (2.5, 3)):
        seen.clear()
        tl.scan(body, torch.full((2,), start, dtype=torch.float64), XS, compile=True)
        assert len(seen) == times


@pytest.mark.eager_only("loops with checkpoints", run=False)
def test_a_branch_that_no_step_takes_does_not_have_all_steps_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    known_reads.clear()
    plain, init = True, torch.ones(2, requires_grad=True)
    body: Any = lambda c, x: (c.sin() if plain else c.cos(), None)  # noqa: E731
    run = lambda: tl.scan(body, init, torch.ones(50, 2), checkpoints=2)  # noqa: E731
    assert followed(run, monkeypatch) == 2
    assert followed(run, monkeypatch) == 0
