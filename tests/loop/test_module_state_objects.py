"""Loops that carry state of unlike objects: slots, modules in containers, memory that two attributes share."""

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import tensorloop as tl
from tests.support.loop_cases import randn, rotate, with_and_without_checkpoints

D = torch.float64
Program = Callable[[], tuple[tuple[Any, ...], Callable[[Tensor], Tensor], Callable[[], Any], list[Tensor]]]


class Slotted:
    __slots__ = ("__hidden", "h", "late")

    def __init__(self) -> None:
        self.h, self.__hidden = torch.zeros(2, 4, dtype=D), 1

    def turn(self, x: Tensor) -> Tensor:
        self.__hidden = -self.__hidden
        self.h = self.late = rotate(self.h) + x * self.__hidden
        return self.late


class Both(Slotted):
    """Slots and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = torch.zeros(2, 4, dtype=D)

    def turn(self, x: Tensor) -> Tensor:
        self.sum = self.sum + super().turn(x)
        return self.sum


@dataclass(frozen=True, slots=True)
class Frozen:
    h: Tensor

    def set(self, h: Tensor) -> None:
        object.__setattr__(self, "h", h)


class Leaky(nn.Module):
    """As libraries of spiking nets have it: the shape of the state is that of the first input."""

    mem: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(0.9, dtype=D))
        self.register_buffer("mem", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mem.shape != x.shape:
            self.mem = torch.zeros_like(x)
        self.mem = self.beta * rotate(self.mem) + x - (self.mem > 1).to(x)
        return torch.sigmoid(5 * (self.mem - 1))


def slots() -> Any:
    one = Slotted()
    return (one,), one.turn, lambda: [one.h, one.late], []


def slots_and_attributes() -> Any:
    one, other = Both(), Frozen(torch.zeros(2, 4, dtype=D))

    def step(x: Tensor) -> Tensor:
        other.set(rotate(other.h) + one.turn(x))
        return other.h

    return (one, other), step, lambda: [one.h, one.late, one.sum, other.h], []


def modules_in_containers() -> Any:
    torch.manual_seed(0)
    outer: Any = nn.Module()
    outer.layers = [{"first": Leaky(), "rest": ([Leaky()], Leaky())}]
    first, (others, last) = outer.layers[0].values()
    state = lambda: [first.mem, others[0].mem, last.mem]  # noqa: E731
    return (outer,), lambda x: last(others[0](first(x))), state, [first.beta, last.beta]


def a_module_twice() -> Any:
    cell = Leaky()
    outer = nn.Sequential(cell, nn.Sequential(cell))
    return (outer, cell, {"cell": cell}), outer, lambda: [cell.mem], [cell.beta]


def one_tensor_by_two_names() -> Any:
    cell = SimpleNamespace(now=torch.zeros(2, 4, dtype=D))
    cell.last = cell.now

    def step(x: Tensor) -> Tensor:
        cell.last, cell.now = cell.now, rotate(cell.now) + x
        return cell.now * cell.last

    return (cell,), step, lambda: [cell.now, cell.last], []


def a_property() -> Any:
    class WithProperty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._h: Tensor | None = None

        @property
        def h(self) -> Tensor:
            return torch.zeros(2, 4, dtype=D) if self._h is None else self._h

        @h.setter
        def h(self, h: Tensor) -> None:
            self._h = 1 * h

        def forward(self, x: Tensor) -> Tensor:
            self.h = rotate(self.h) + x
            return self.h.cos()

    module = WithProperty()
    return (module,), module, lambda: [module.h], []


def modules_as_keys_that_look_alike() -> Any:
    torch.manual_seed(0)
    cache: dict[Any, Tensor] = {}
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=D) for _ in range(3)))

    def hook(module: nn.Module, _: Any, y: Tensor) -> Tensor:
        cache[module] = y + (rotate(cache[module]) if module in cache else 0)
        return cache[module].sin()

    for layer in model:
        layer.register_forward_hook(hook)
    return (cache,), model, lambda: [*cache.values()], [*model.parameters()]


def recurrent_layers() -> Any:
    torch.manual_seed(0)
    note, lstm = SimpleNamespace(hidden=None), nn.LSTM(4, 4, 2, dtype=D)

    def step(x: Tensor) -> Tensor:
        y, note.hidden = lstm(x[None], note.hidden)
        return y[0]

    return (note,), step, lambda: [*note.hidden], [*lstm.parameters()]


def norms_of_weights() -> Any:
    torch.manual_seed(0)
    norm, spectral = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(norm(nn.Linear(4, 4, dtype=D)), nn.BatchNorm1d(4, momentum=None, dtype=D), Leaky())
    model.append(spectral(nn.Linear(4, 4, dtype=D)))
    return (model,), model, lambda: [*model.buffers()], [*model.parameters()]


PROGRAMS: list[Program] = [
    slots,
    slots_and_attributes,
    modules_in_containers,
    a_module_twice,
    one_tensor_by_two_names,
    a_property,
    modules_as_keys_that_look_alike,
    recurrent_layers,
    norms_of_weights,
]


@with_and_without_checkpoints
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_object_is_as_after_a_python_loop(program: Program, checkpoints: Any) -> None:
    def run(ours: bool) -> Any:
        objects, step, state, leaves = program()
        xs = randn(6, 2, 4)
        ys = tl.carrying(*objects).map(step, xs, checkpoints=checkpoints) if ours else torch.stack([*map(step, xs)])
        after = state()
        grads = grad(ys.sin().sum(), [xs, *leaves])
        assert all(x is y for x, y in zip(after, state(), strict=True)), "backward has changed the object"
        return ys, after, grads

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.filterwarnings("ignore::tensorloop.loop.NotCompiledWarning")
@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_not_compiled_is_as_eager(program: Program, checkpoints: Any) -> None:
    def run(compiled: bool) -> Any:
        objects, step, state, leaves = program()
        xs = randn(6, 2, 4)
        ys = tl.carrying(*objects).map(step, xs, checkpoints=checkpoints, compile=compiled)
        return ys, state(), grad(ys.sin().sum(), [xs, *leaves])

    torch.testing.assert_close(run(True), run(False))


def writes_into_a_view() -> Any:
    module: Any = nn.Module()
    module.register_buffer("all", torch.zeros(2, 4, dtype=D))
    module.register_buffer("row", module.all[1])
    return module, lambda x: (module.row.add_(x.detach().sum(0)), x + module.all.sum(0))[1]


def writes_into_one_of_two_names() -> Any:
    module: Any = nn.Module()
    module.all = {"row": torch.zeros(4, dtype=D)}
    module.row = module.all["row"]
    return module, lambda x: (module.row.add_(x.detach().sum(0)), x + module.all["row"].clone())[1]


def shows_what_is_written_into() -> Any:
    module: Any = nn.Module()
    module.row, module.all = torch.zeros(4, dtype=D), None

    def step(x: Tensor) -> Tensor:
        module.row += x.detach().sum(0)
        if module.all is None:
            module.all = module.row[1:]
        return x[:, 1:] + module.all.clone()

    return module, step


def appends_to_an_array_of_two_names() -> Any:
    module: Any = nn.Module()
    module.row = module.all = tl.TensorArray()
    return module, lambda x: module.row.append(x) and module.all[:].sum(0)


SHARING = [writes_into_a_view, writes_into_one_of_two_names, shows_what_is_written_into]
SHARING.append(appends_to_an_array_of_two_names)


@with_and_without_checkpoints
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("program", SHARING)
def test_a_write_into_shared_memory_is_refused(program: Any, mode: Any, checkpoints: Any) -> None:
    with mode():
        module, step = program()
        values = copy.deepcopy({**vars(module), **module._buffers}) if program is not SHARING[-1] else {}
        with pytest.raises(RuntimeError, match=r"carrying.map: the body writes into (all|row), which shares memory"):
            tl.carrying(module).map(step, randn(5, 2, 4), checkpoints=checkpoints)
        for key in values.keys() & {"all", "row"}:
            torch.testing.assert_close(getattr(module, key), values[key])
        assert program is not SHARING[-1] or not len(module.all)


def test_parts_of_one_memory_that_do_not_overlap() -> None:
    cache, module = torch.zeros(2, 4, 2, dtype=D), SimpleNamespace()
    module.keys, module.values = cache.unbind(-1)

    def step(x: Tensor) -> Tensor:
        module.keys += x.detach()
        module.values -= module.keys
        return x + module.values

    expected = copy.deepcopy(cache)
    xs = randn(5, 2, 4)
    ys = tl.carrying(module).map(step, xs, checkpoints=2)
    for x in xs:
        expected[..., 0] += x.detach()
        expected[..., 1] -= expected[..., 0]
    torch.testing.assert_close(cache, expected)
    torch.testing.assert_close(ys[-1], xs[-1] + expected[..., 1])


def test_what_has_no_attributes_of_its_own_is_refused() -> None:
    cell = Leaky()
    for x, text in [(torch.zeros(2), "a tensor"), (tl.TensorArray(), "TensorArray"), ([cell], "list"), (3, "int 3")]:
        with pytest.raises(TypeError, match=rf"carrying: objects\[0\] is .*{text}.*; expected a module"):
            tl.carrying(x)
    with pytest.raises(TypeError, match=r"expected a module.*; give the object whose method it is"):
        tl.carrying(cell.forward)


def test_what_the_first_step_raises_says_nothing_of_later_ones() -> None:
    cell = Leaky()

    def fails(x: Tensor) -> Tensor:
        cell.other = x
        raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        tl.carrying(cell).map(fails, randn(5, 2, 4))
    assert not any("later step" in note for note in error.value.__notes__)
    assert not hasattr(cell, "other")


@with_and_without_checkpoints
def test_functional_call_in_the_body_and_around(checkpoints: Any) -> None:
    cell, xs = Leaky(), randn(5, 2, 4)
    beta = torch.tensor(0.7, dtype=D, requires_grad=True)

    def inside(beta: Tensor, xs: Tensor) -> Tensor:
        cell.mem = torch.zeros(0)
        step = lambda x: torch.func.functional_call(cell, {"beta": beta}, (x,))  # noqa: E731
        return tl.carrying(cell).map(step, xs, checkpoints=checkpoints)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, xs: Tensor) -> Tensor:
            return tl.carrying(self).map(self.cell, xs, checkpoints=checkpoints)

    def around(beta: Tensor, xs: Tensor) -> Tensor:
        tensors = {"cell.beta": beta, "cell.mem": torch.zeros(0)}
        return torch.func.functional_call(Whole(), tensors, (xs,)).sin().sum()

    ys = inside(beta, xs)
    plain = Leaky()
    plain.beta = nn.Parameter(beta.detach())
    expected = torch.stack([plain(x) for x in xs])
    torch.testing.assert_close(ys, expected)
    wanted = grad(expected.sin().sum(), (plain.beta, xs))
    torch.testing.assert_close(grad(ys.sin().sum(), (beta, xs)), wanted)
    found = torch.func.grad(around, argnums=(0, 1))(beta.detach(), xs.detach())
    torch.testing.assert_close(found, wanted)


@with_and_without_checkpoints
def test_copies_and_pickles_of_what_is_left(checkpoints: Any) -> None:
    outer: Any = nn.Sequential(Leaky(), nn.BatchNorm1d(4, dtype=D))
    tl.carrying(outer).map(outer, randn(9, 2, 4), checkpoints=checkpoints)
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly"):  # as after a Python loop
        copy.deepcopy(outer)
    outer[0].mem = outer[0].mem.detach()
    for twin in (copy.deepcopy(outer), pickle.loads(pickle.dumps(outer))):
        torch.testing.assert_close(dict(twin.named_buffers()), dict(outer.named_buffers()))
    assert outer[0].mem.untyped_storage().nbytes() == 2 * 4 * 8, "a state is no view of ys"


def test_two_threads_with_a_module_each() -> None:
    made, found = [norms_of_weights() for _ in range(3)], {}

    def work(i: int) -> None:
        objects, step, state, leaves = made[i]
        xs = torch.ones(20, 2, 4, dtype=D).cumsum(2).requires_grad_()
        ys = tl.carrying(*objects).map(step, xs, checkpoints=3)
        found[i] = ys, state(), grad(ys.sum(), [xs, *leaves])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@with_and_without_checkpoints
def test_two_names_for_one_tensor_that_the_first_step_made(checkpoints: Any) -> None:
    state = SimpleNamespace(a=None, b=None)

    def writes(x: Tensor) -> Tensor:
        if state.a is None:
            state.a = state.b = torch.zeros(4, dtype=D)
        state.a += x
        return state.b.clone()

    def sets_anew(x: Tensor) -> Tensor:
        if state.a is None:
            state.a = state.b = x.new_zeros(4)
        state.a, state.b = rotate(state.a) + x, state.b - x
        state.a.mul_(2)  # its own memory by now
        return state.a + state.b

    xs = randn(5, 4)
    with pytest.raises(
        RuntimeError,
        match=r"a, which shares memory with b|outside the loop whose body",
    ):
        tl.carrying(state).map(writes, xs.detach(), checkpoints=checkpoints)
    assert (state.a, state.b) == (None, None)
    expected = torch.stack([sets_anew(x) for x in xs])
    left = state.a, state.b
    state.a = state.b = None
    found = tl.carrying(state).map(sets_anew, xs, checkpoints=checkpoints)
    torch.testing.assert_close([found, state.a, state.b], [expected, *left])
    torch.testing.assert_close(grad(found.sin().sum(), xs), grad(expected.sin().sum(), xs))


@with_and_without_checkpoints
def test_two_names_for_one_array_that_the_first_step_made(checkpoints: Any) -> None:
    state = SimpleNamespace(a=None, b=None)

    def step(x: Tensor) -> Tensor:
        if state.a is None:
            state.a = state.b = tl.TensorArray()
        state.a.append(x)
        return state.b[-1]

    with pytest.raises(
        RuntimeError,
        match=r"a, which shares memory with b|outside the loop whose body",
    ):
        tl.carrying(state).map(step, randn(5, 4), checkpoints=checkpoints)
