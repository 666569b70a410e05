"""Plain dataclasses in carries, xs, ys and contexts are trees; other objects that hold tensors are told apart."""

import re
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tests.support.loop_cases import randn, rotate, with_and_without_checkpoints

T = TypeVar("T")


@dataclass
class State:
    h: Any
    n: int = 0

    def stepped(self, x: Tensor) -> "State":
        return State(rotate(self.h) * torch.cos(x), self.n + 1)


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: State
    past: tl.TensorArray
    mode: str = "plain"


@dataclass
class Doubling:
    """Its constructor changes what it is given, and makes a field."""

    h: Tensor
    scale: InitVar[float]
    size: int = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.h = self.h * scale
        self.size = self.h.shape[-1]


@dataclass
class Cached(Generic[T]):
    h: T

    @cached_property
    def norm(self) -> Tensor:
        return torch.as_tensor(self.h).norm()


@dataclass
class Extra:
    """Has an attribute that is no field."""

    h: Tensor

    def __post_init__(self) -> None:
        self.size = len(self.h)


def inputs() -> tuple[Tensor, Tensor]:
    return randn(2), randn(5, 2)


@with_and_without_checkpoints
def test_dataclasses_of_carry_xs_and_y(checkpoints: Any) -> None:
    def body(carry: Frozen, x: State) -> tuple[Frozen, State]:
        assert type(carry) is Frozen
        assert type(x) is State
        assert x.n is None
        inner = carry.inner.stepped(x.h)
        return Frozen(inner, carry.past.append(inner.h), carry.mode), State(inner.h * carry.past[0], inner.n)

    init, rows = inputs()
    xs: Any = State(rows, None)  # pyright: ignore[reportArgumentType]
    last, ys = tl.scan(body, Frozen(State(init), tl.TensorArray()), xs, checkpoints=checkpoints)
    loss = last.past.stack().sin().sum() + ys.h.square().sum() + last.inner.h.sum()
    grads = torch.autograd.grad(loss, (init, rows))

    state, past, outs = State(init), [], []
    for x in rows:
        state = state.stepped(x)
        past.append(state.h)
        outs.append(state.h * past[0])
    plain = torch.stack(past).sin().sum() + torch.stack(outs).square().sum() + state.h.sum()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(grads, torch.autograd.grad(plain, (init, rows)))
    assert (last.inner.n, last.mode) == (5, "plain")
    assert torch.as_tensor(ys.n).tolist() == [1, 2, 3, 4, 5]


@with_and_without_checkpoints
def test_a_constructor_runs_where_the_body_calls_it_and_nowhere_else(checkpoints: Any) -> None:
    init, _ = inputs()
    got = tl.fori_loop(0, 4, lambda i, c: Doubling(rotate(c.h), 2.0), Doubling(init, 3.0), checkpoints=checkpoints)
    plain = Doubling(init, 3.0)
    for _ in range(4):
        plain = Doubling(rotate(plain.h), 2.0)
    torch.testing.assert_close(got.h, plain.h)
    assert got.size == 2
    torch.testing.assert_close(*(torch.autograd.grad(x.h.sum(), init) for x in (got, plain)))


@with_and_without_checkpoints
def test_what_a_dataclass_caches_is_computed_anew(checkpoints: Any) -> None:
    def body(i: int, c: Cached[Tensor]) -> Cached[Tensor]:
        return Cached[Tensor](rotate(c.h) / c.norm)

    init, _ = inputs()
    begun = Cached(init)
    assert begun.norm > 0
    got, plain = tl.fori_loop(0, 3, body, begun, checkpoints=checkpoints), Cached(init)
    for i in range(3):
        plain = body(i, plain)
    torch.testing.assert_close(got.h, plain.h)
    torch.testing.assert_close(*(torch.autograd.grad(x.h[0], init) for x in (got, plain)))


@with_and_without_checkpoints
@pytest.mark.parametrize("compact", [False, True])
def test_rows_that_stop_and_a_context_of_dataclasses(compact: bool, checkpoints: Any) -> None:
    limit = torch.tensor([0.5, 2.5, 1.5], dtype=torch.float64)
    h, w = randn(3, 2), randn(3, 2)
    got, steps = tl.while_loop(
        lambda c, context: c.h[:, 0].abs() * 0 + c.n < context.h[:, 0],
        lambda c, context: State(rotate(c.h) * context.n, c.n + 1),
        State(h),
        context=State(limit[:, None], w),  # pyright: ignore[reportArgumentType]
        compact=compact,
        return_steps=True,
        checkpoints=checkpoints,
    )
    assert steps.tolist() == [1, 3, 2]
    rows = []
    for b, n in enumerate([1, 3, 2]):
        row = h[b]
        for _ in range(n):
            row = rotate(row) * w[b]
        rows.append(row)
    torch.testing.assert_close(got.h, torch.stack(rows))
    torch.testing.assert_close(
        torch.autograd.grad(got.h.sin().sum(), (h, w)), torch.autograd.grad(torch.stack(rows).sin().sum(), (h, w))
    )


def test_a_body_that_changes_its_dataclass_leaves_the_callers_alone() -> None:
    def body(c: State, x: Tensor) -> Any:
        c.h, c.n = c.h + x, c.n + 1
        return c, None

    init = State(torch.zeros(2))
    last, _ = tl.scan(body, init, torch.ones(3, 2))
    assert (last.n, init.n) == (3, 0)
    assert init.h.tolist() == [0, 0]


def test_packed_xs_map_and_associative_scan_take_dataclasses() -> None:
    packed = tl.PackedTensor(torch.arange(5.0), [2, 3])
    _, ys = tl.scan(lambda c, x: (c + x.h, State(c)), torch.zeros(2), State(packed, None))  # pyright: ignore[reportArgumentType]
    assert isinstance(ys.h, tl.PackedTensor)
    assert ys.h.values.tolist() == [0, 0, 0, 2, 5]
    for batch_size in (None, 2):
        mapped: Any = tl.map(lambda x: State(x.h * 2), State(torch.arange(3.0), None), batch_size=batch_size)  # pyright: ignore[reportArgumentType]
        assert mapped.h.tolist() == [0, 2, 4]
    sums = tl.associative_scan(lambda a, b: Cached(a.h + b.h), Cached(torch.ones(4)))
    assert sums.h.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (lambda i, c: State(c.h.float(), c.n), ["- c.h: Tensor (2,) float64", "+ c.h: Tensor (2,) float32"]),
        (lambda i, c: State(State(c.h), c.n), ["- c.h: Tensor", "+ c.h: State"]),
        (lambda i, c: c.h, ["- State(h=*, n=*)", "+ *", "- c.n: int"]),
        (lambda i, c: Cached(c.h), ["- State(h=*, n=*)", "+ Cached(h=*)"]),
    ],
)
def test_errors_name_the_field(body: Any, lines: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        tl.fori_loop(0, 2, body, State(randn(2)))
    for line in lines:
        assert line in str(caught.value)


def test_an_attribute_that_a_body_adds_is_a_change_of_structure() -> None:
    def body(i: int, c: State) -> State:
        c.extra = c.h  # pyright: ignore[reportAttributeAccessIssue]
        return c

    with pytest.raises(TypeError, match=re.escape("+ State with attributes that are no fields: extra")):
        tl.fori_loop(0, 2, body, State(randn(2)))


# -- objects that are no trees


class Memory:
    """An object as libraries have them, caches of attention among them."""

    def __init__(self, h: Tensor) -> None:
        self.layers = [{"h": h}]


OBJECTS = {
    "namespace": (lambda h: SimpleNamespace(h=h), lambda c: c.h, "c[0].h in it", "register_dataclass"),
    "class": (Memory, lambda c: c.layers[0]["h"], "c[0].layers[0]['h'] in it", "register_pytree_node"),
    "extra": (Extra, lambda c: c.h, "c[0].h in it", "declare all of its attributes as fields"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_with_tensors_is_carried_as_by_a_python_loop_or_refused_where_that_cannot_be(kind: str) -> None:
    make, read, path, cure = OBJECTS[kind]
    init, _ = inputs()

    def body(i: int, c: Any) -> Any:
        return make(rotate(read(c[0]))), c[1] + read(c[0])

    got = tl.fori_loop(0, 3, body, (make(init), init))[1]
    plain = (make(init), init)
    for i in range(3):
        plain = body(i, plain)
    torch.testing.assert_close(got, plain[1])
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), init) for x in (got, plain[1])))
    with pytest.raises(TypeError) as replayed:
        tl.fori_loop(0, 3, body, (make(init), init), checkpoints=2)
    with pytest.raises(TypeError) as frozen:
        tl.while_loop(lambda c: c[1] < 3, lambda c: body(0, c), (make(init), init))
    for error in (str(replayed.value), str(frozen.value)):
        assert path in error
        assert "became another tensor at step 0" in error
        assert cure in error


@with_and_without_checkpoints
def test_an_object_whose_tensors_stay_is_carried(checkpoints: Any) -> None:
    init, _ = inputs()
    box, w = SimpleNamespace(w=init), randn(2)
    got = tl.fori_loop(0, 3, lambda i, c: (c[0], rotate(c[1]) * c[0].w), (box, w), checkpoints=checkpoints)[1]
    plain = w
    for _ in range(3):
        plain = rotate(plain) * init
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), (init, w)) for x in (got, plain)))
