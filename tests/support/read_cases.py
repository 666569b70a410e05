"""Bodies that read something of Python's, and what changes it: variables, attributes, items, functions, methods."""

import collections
import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

patched: list[tuple[Any, str, Any]] = []


def patch(owner: Any, name: str, value: Any) -> None:
    patched.append((owner, name, owner.__dict__[name]))
    setattr(owner, name, value)


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
