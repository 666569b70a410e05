"""More bodies that read something, and what changes it: modules, tensors, contexts, what instructions read."""

import contextvars
import dataclasses
import functools
import math
import sys
import threading
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tensorloop as tl
from tests.support.read_cases import Config, Count, Impure, case, patch

IS_ON = True


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
        from tests.support.read_cases_of_modules import IS_ON as on

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
