"""What the names in a body lead to must be in backward what it was: attributes, classes, slots, partials, functions."""

import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import tensorloop as tl
from tests.support.loop_cases import randn, rotate


def looped(body: Callable[[int, Tensor], Tensor], init: Tensor, checkpoints: Any = 2) -> Tensor:
    return tl.fori_loop(0, 6, body, init, checkpoints=checkpoints).sum()


class Scaled:
    """Its scale is the class's."""

    scale: Any = 1.0

    def step(self, i: int, c: Tensor) -> Tensor:
        return scaled(c, self.scale)

    @classmethod
    def of_class(cls, i: int, c: Tensor) -> Tensor:
        return scaled(c, cls.scale)


class OfBase(Scaled):
    """Its scale is its base's."""


class Calling(OfBase):
    """Its base's method reads the scale."""

    def step(self, i: int, c: Tensor) -> Tensor:
        return super().step(i, c)


@dataclasses.dataclass(slots=True)
class Slots:
    scale: Any = 1.0


class SlotsOfBase(Slots):
    __slots__ = ("other",)


class Fields(NamedTuple):
    scale: Any = 1.0


class Hidden:
    """Its scale is a property, which only the body may ask."""

    def __init__(self) -> None:
        self.inner, self.asked = 1.0, 0

    @property
    def scale(self) -> Any:
        self.asked += 1
        return self.inner


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.config, self.act = 1.0, types.SimpleNamespace(scale=1.0), torch.sin

    def forward(self, c: Tensor) -> Tensor:
        return self.helped(c) if self.training else self.act(scaled(c, self.config.scale))

    def helped(self, c: Tensor) -> Tensor:
        return self.act(scaled(c, self.scale))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, i: int, c: Tensor) -> Tensor:
        return self.part(c)


class Mode(enum.Enum):
    SINE, COSINE = 1, 2


def scaled(c: Tensor, scale: Any) -> Tensor:
    return rotate(c) + (c.cos() if scale is Mode.COSINE else (c * (2.0 if scale == 2.0 else 1.0)).sin())


def keyed(i: int, c: Tensor, *, scale: Any = 1.0) -> Tensor:
    return scaled(c, scale)


def subclassed(*args: Any, **options: Any) -> Any:
    """A partial that others do not take apart when they are made of it."""
    found = functools.partial(*args, **options)
    found.kept = True  # pyright: ignore[reportAttributeAccessIssue]
    return found


def _named_ways() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]]:
    """What makes (the body, an object); what changes a value; how the error names it."""
    put: Callable[[Any], Any] = lambda x: setattr(x, "scale", 2.0)  # noqa: E731
    get: Callable[[Any], Any] = lambda x: (lambda i, c: scaled(c, x.scale), x)  # noqa: E731

    def swapped(first: Any, second: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        now = first

        def change(_: Any) -> None:
            nonlocal now
            now = second

        return lambda: ((lambda i, c: scaled(c, now.scale)), None), change

    def acting() -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        act: Any = torch.sin

        def change(_: Any) -> None:
            nonlocal act
            act = torch.cos

        return lambda: ((lambda i, c: rotate(c) + act(c)), None), change

    def of_part(scale: Callable[[Part], Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        return lambda: (lambda part: (lambda i, c: part(c), part))(Part()), scale

    def key(x: Any) -> None:
        x.keywords["scale"] = 2.0

    def nested() -> Any:
        inner = subclassed(keyed, scale=1.0)
        return functools.partial(inner), inner

    def with_partial() -> Any:
        body = functools.partial(keyed, scale=1.0)
        return body, body

    def given(x: Any) -> Any:
        return functools.partial(lambda config, i, c: scaled(c, config.scale), x), x

    def whole() -> Any:
        found = Whole()
        return found, found.part

    return {
        "class": (lambda: get(type("C", (), {"scale": 1.0})), put, "attribute x.scale"),
        "class of an object": (lambda: get(Scaled()), lambda x: put(type(x)), "attribute x.scale"),
        "base": (lambda: (lambda x: (x.step, x))(OfBase()), lambda _: put(Scaled), "attribute self.scale"),
        "class method": (lambda: (OfBase.of_class, None), lambda _: put(Scaled), "attribute cls.scale"),
        "object hides class": (lambda: get(Scaled()), put, "attribute x.scale"),
        "super": (lambda: (lambda x: (x.step, x))(Calling()), put, "attribute self.scale"),
        "slots": (lambda: get(Slots()), put, "attribute x.scale"),
        "slots of a base": (lambda: get(SlotsOfBase()), put, "attribute x.scale"),
        "enum": (lambda: get(Slots(Mode.SINE)), lambda x: setattr(x, "scale", Mode.COSINE), "attribute x.scale"),
        "named tuple": (*swapped(Fields(), Fields(2.0)), "attribute now.scale"),
        "another object": (*swapped(Slots(), Slots(2.0)), "attribute now.scale"),
        "property": (lambda: get(Hidden()), lambda x: setattr(x, "inner", 2.0), "attribute x.inner"),
        "keyword default": (lambda: (keyed, keyed), lambda x: x.__kwdefaults__.update(scale=2.0), "default scale"),
        "partial": (with_partial, key, "argument scale"),
        "partial of a partial": (nested, key, "argument scale"),
        "object in a partial": (lambda: given(Slots()), put, "attribute config.scale"),
        "training": (whole, nn.Module.eval, "attribute self.part.training"),
        "config": (
            lambda: (lambda x: (lambda i, c: scaled(c, x.config.scale), x))(Part()),
            lambda x: put(x.config),
            "attribute x.config.scale",
        ),
        "method": (*of_part(put), "attribute part.scale"),
        "module in a module": (whole, put, "attribute self.part.scale"),
        "function": (*acting(), "variable act"),
        "function of an object": (*of_part(lambda x: setattr(x, "act", torch.cos)), "attribute part.act"),
    }


@pytest.mark.eager_only(
    "a backward does not run the body: what has changed since does not matter",
    cases=[
        f"compiled-{how}" for how in _named_ways() if how != "property"
    ],  # which hides its state, and is not compiled
)
@pytest.mark.parametrize("how", _named_ways())
def test_what_names_lead_to_must_stay(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change, named = _named_ways()[how]
    monkeypatch.setattr(Scaled, "scale", 1.0)
    monkeypatch.setattr(keyed, "__kwdefaults__", {"scale": 1.0})
    init = randn(2)
    body, thing = make()
    out = looped(body, init)
    torch.testing.assert_close(grad(out, init, retain_graph=True)[0], grad(looped(body, init, None), init)[0])
    change(thing)
    with pytest.raises(RuntimeError, match=f"fori_loop: the {named}, which the body uses, was .* in the forward"):
        grad(out, init)


def test_what_the_body_does_not_read_may_change_and_no_property_is_asked() -> None:
    class Odd(Scaled):
        """What a name in the body leads to, if it is not the body that asks."""

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

        def helped(self) -> Any:
            return self.step(0, torch.ones(2))

    odd, slots, hidden, part = Odd(), Slots(), Hidden(), Part()  # what calls it would read its scale
    helped = {"helped": lambda: 1.0}.get

    def body(i: int, c: Tensor) -> Tensor:
        got = types.SimpleNamespace(helped=helped("helped"), asked=1, scale=2.0)
        return part.act(scaled(c, got.scale)) * (got.helped() if odd and slots and hidden and got.asked else 2.0)

    init = randn(2)
    out = looped(body, init)
    asked = hidden.asked
    true = grad(out, init, retain_graph=True)[0]
    odd.scale = slots.scale = hidden.inner = part.scale = 3.0
    torch.testing.assert_close(grad(out, init)[0], true)
    assert hidden.asked == asked == 0
