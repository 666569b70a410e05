"""Loops that carry what their bodies set on modules; the oracle is the Python loop that sets it.

Long, as each promise of `carrying` has a program of its own; objects of other kinds: `test_module_state_objects.py`.
"""

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import grad, gradcheck, gradgradcheck

import tensorloop as tl
from tests.support.loop_cases import CHECKPOINTS, randn, rotate, with_and_without_checkpoints

D = torch.float64
add_up: Any = sum


class Memory(nn.Module):
    """A matrix that is written to, from a buffer that is not."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", randn(3, 4, grad=False))
        self.rows: Tensor | None = None

    def read(self) -> Tensor:
        if self.rows is None:
            self.rows = self.bias.clone()
        return self.rows.mean(0)

    def write(self, x: Tensor) -> None:
        assert self.rows is not None
        self.rows = rotate(self.rows) + x


class Decoder(nn.Module):
    """State of many kinds: None at first, missing at first, in containers, counted, written in place, in a module."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.memory = nn.Linear(3, 4, dtype=D), Memory()
        self.norm, self.dropout = nn.BatchNorm1d(4, dtype=D), nn.Dropout(0.3)
        self.h: Tensor | None = None
        self.steps = 0
        self.kept = {"cell": [torch.zeros(2, 4, dtype=D), (torch.ones(2, 4, dtype=D),)], "name": "kept"}
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def step(self, x: Tensor) -> Tensor:
        h = torch.zeros(2, 4, dtype=D) if self.h is None else self.h
        self.h = rotate(h) + torch.sin(self.linear(x) + self.memory.read())
        self.memory.write(self.h.sum(0))
        first, (second,) = self.kept["cell"]  # pyright: ignore[reportAssignmentType]
        self.kept["cell"] = [second, (torch.cos(first + self.h),)]
        self.count += 1
        self.steps += 1
        self.out = self.dropout(self.norm(self.h + second))
        return self.out

    def state(self) -> list[Any]:
        return [self.h, self.memory.rows, self.steps, self.kept["cell"], self.out, self.count, *self.norm.buffers()]


def of_python(module: Any, xs: Tensor) -> Tensor:
    return torch.stack([module.step(x) for x in xs])


def results(run: Callable[[Decoder, Tensor], Tensor]) -> Any:
    """ys, the last state, the gradients of both."""
    decoder, xs = Decoder(), randn(6, 2, 3)
    ys = run(decoder, xs)
    state = decoder.state()
    ends: Any = [ys.sin().sum(), decoder.h, decoder.memory.rows, decoder.kept["cell"][0]]
    wanted = [xs, *decoder.parameters()]
    grads = grad(add_up(x.sum() for x in ends), wanted)
    assert all(x is y for x, y in zip(state, decoder.state(), strict=True)), "backward has changed the module"
    return ys, state, grads


@with_and_without_checkpoints
def test_a_module_is_as_after_a_python_loop(checkpoints: Any) -> None:
    def ours(decoder: Decoder, xs: Tensor) -> Tensor:
        count, mean, names = decoder.count, decoder.norm.running_mean, [*vars(decoder)]
        ys = tl.carrying(decoder).map(decoder.step, xs, checkpoints=checkpoints)
        assert decoder.count is count, "what the body writes into is written into"
        assert decoder.norm.running_mean is mean
        assert [*vars(decoder)] == [*names, "out"]
        return ys

    torch.testing.assert_close(results(ours), results(of_python))


@with_and_without_checkpoints
def test_two_loops_in_a_row_go_on(checkpoints: Any) -> None:
    def ours(decoder: Decoder, xs: Tensor) -> Tensor:
        loops = tl.carrying(decoder)
        return torch.cat([loops.map(decoder.step, x, checkpoints=checkpoints) for x in (xs[:2], xs[2:])])

    torch.testing.assert_close(results(ours), results(of_python))


@pytest.mark.parametrize("length", [0, 1, 2])
def test_few_steps(length: int) -> None:
    decoder = Decoder()
    ys = tl.carrying(decoder).map(decoder.step, randn(6, 2, 3)[:length], checkpoints=1)
    assert ys.shape == (length, 2, 4)
    assert decoder.steps == length
    assert length or ("out" not in vars(decoder) and decoder.h is None and decoder.count == 0)
    if length:
        plain, xs = Decoder(), randn(6, 2, 3)[:length]  # seeds dropout
        true = of_python(plain, xs)
        decoder = Decoder()
        torch.testing.assert_close(tl.carrying(decoder).map(decoder.step, xs), true)
        torch.testing.assert_close(decoder.state(), plain.state())


class Cell(nn.Module):
    """A body with tensors alone in its state, which compiles."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.h = weight, torch.zeros(0, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x) if not len(self.h) else self.h
        self.h = rotate(h) + torch.sin(x * self.weight)
        return self.h.cos()


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("compiled", [False, "strict"])
def test_eager_and_compiled(compiled: Any, checkpoints: Any) -> None:
    def run(ours: bool) -> Any:
        xs, weight = randn(7, 4), randn(4)
        cell = Cell(weight)
        if ours:
            ys = tl.carrying(cell).map(cell, xs, checkpoints=checkpoints, compile=compiled)
        else:
            ys = torch.stack([cell(x) for x in xs])
        return ys, cell.h, grad(ys.sum() + cell.h.sin().sum(), (xs, weight))

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_derivatives_of_derivatives(checkpoints: Any) -> None:
    def f(xs: Tensor, weight: Tensor) -> Any:
        cell = Cell(weight)
        return tl.carrying(cell).map(cell, xs, checkpoints=checkpoints), cell.h

    inputs = randn(4, 2), randn(2)
    assert gradcheck(f, inputs)
    assert gradgradcheck(f, inputs)


@with_and_without_checkpoints
def test_gradients_reach_the_state_from_before(checkpoints: Any) -> None:
    cell, start, xs = Cell(randn(4)), randn(4), randn(5, 4)
    cell.h = start * 1
    tl.carrying(cell).map(cell, xs, checkpoints=checkpoints)
    ours = grad(cell.h.sum(), (start, xs))
    cell.h = start * 1
    of_cells = [cell(x) for x in xs]
    torch.testing.assert_close(ours, grad(cell.h.sum(), (start, xs)))
    assert len(of_cells) == 5


@with_and_without_checkpoints
@pytest.mark.parametrize("when", [0, 1, 3])
def test_an_error_leaves_everything_as_before(when: int, checkpoints: Any) -> None:
    decoder, calls = Decoder(), []
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in decoder.modules()]
    values = copy.deepcopy(decoder.state_dict())
    kept = copy.deepcopy(decoder.kept)

    def body(x: Tensor) -> Tensor:
        y = decoder.step(x)
        fail()
        return y

    @tl.loop.pure
    def fail() -> None:
        calls.append(1)
        if len(calls) == when + 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tl.carrying(decoder).map(body, randn(6, 2, 3), checkpoints=checkpoints)
    for module, before, buffers in attributes:
        assert vars(module).keys() == before.keys()
        assert all(vars(module)[key] is x for key, x in before.items())
        assert all(module._buffers[key] is x for key, x in buffers.items())
    torch.testing.assert_close(dict(decoder.state_dict()), dict(values))
    torch.testing.assert_close(decoder.kept["cell"], kept["cell"])


@with_and_without_checkpoints
def test_a_carry_of_the_body_own_and_conditions(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        cell, xs = Cell(randn(4)), randn(6, 4)
        out: Any = []
        if loops is None:
            total = torch.zeros(4, dtype=D)
            for x in xs:
                total = total + cell(x)
                if cell.h.sum() > 1e9:
                    break
            out.append((total, torch.stack([torch.ones(()) * i for i in range(6)])))
            c, n = torch.ones(4, dtype=D), 0
            while n < 4 and cell.h.abs().sum() < 1e9:
                c, n = c + cell(c), n + 1
            out.append((c, n))
            for i in range(2, 5):
                c = c * i + cell(c)
            out.append(c)
        else:
            options: Any = {"checkpoints": checkpoints}
            zeros = torch.zeros(4, dtype=D)
            until: Any = lambda _: bool(cell.h.sum() > 1e9)  # noqa: E731
            numbered = (xs, range(6))
            out.append(
                loops(cell).scan(lambda c, x: (c + cell(x[0]), float(x[1])), zeros, numbered, until=until, **options)
            )
            c, n = loops(cell).while_loop(
                lambda c: c[1] < 4 and bool(cell.h.abs().sum() < 1e9),
                lambda c: (c[0] + cell(c[0]), c[1] + 1),
                (torch.ones(4, dtype=D), 0),
                **options,
            )
            out.append((c, n))
            out.append(loops(cell).fori_loop(2, 5, lambda i, c: c * i + cell(c), c, **options))
        leaves = out[0][0], out[1][0], out[2], cell.h
        return out, grad(add_up(x.sum() for x in leaves), (xs, cell.weight))

    torch.testing.assert_close(run(tl.carrying), run(None))


@with_and_without_checkpoints
def test_arrays_objects_and_dicts(checkpoints: Any) -> None:
    def run(ours: bool) -> Any:
        note, cache, xs = SimpleNamespace(h=torch.zeros(4, dtype=D)), {}, randn(5, 4)
        note.past = tl.TensorArray()

        def step(x: Tensor) -> Tensor:
            note.h = rotate(note.h) + x
            note.past.append(note.h)
            cache["mean"] = note.past[:].mean(0)
            return cache["mean"] * 2

        ys = tl.carrying(note, cache).map(step, xs, checkpoints=checkpoints) if ours else torch.stack([*map(step, xs)])
        ends = ys, note.h, note.past.stack(), cache["mean"]
        return *ends, grad(add_up(x.sum() for x in ends), xs)

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.parametrize("inner", CHECKPOINTS)
@pytest.mark.parametrize("outer", CHECKPOINTS)
def test_loops_in_loops_over_one_module(outer: Any, inner: Any) -> None:
    def run(ours: bool) -> Any:
        cell, xs = Cell(randn(4)), randn(3, 4, 4)
        if ours:

            def step(x: Tensor) -> Tensor:
                return tl.carrying(cell).map(cell, x, checkpoints=inner).sum(0) + cell.h

            ys = tl.carrying(cell).map(step, xs, checkpoints=outer)
        else:
            ys = torch.stack([torch.stack([cell(y) for y in x]).sum(0) + cell.h for x in xs])
        return ys, cell.h, grad(ys.sum() + cell.h.sum(), (xs, cell.weight))

    torch.testing.assert_close(run(True), run(False))


@settings(max_examples=30, deadline=None)
@example(kinds=["dict", "dict"], length=5, checkpoints=1, reverse=False)  # a loop whose steps are known then, and
@example(kinds=["int"], length=5, checkpoints=1, reverse=False)  # one with the same functions and another carry
@given(
    kinds=st.lists(
        st.sampled_from(["none", "missing", "tensor", "empty", "list", "dict", "in place", "int"]), max_size=4
    ),
    length=st.integers(1, 6),
    checkpoints=st.sampled_from([None, 1, 2]),
    reverse=st.booleans(),
)
def test_any_kinds_of_state(kinds: list[str], length: int, checkpoints: Any, reverse: bool) -> None:
    def run(ours: bool) -> Any:
        module, xs = nn.Module(), randn(length, 4)
        for i, kind in enumerate(kinds):
            zeros = torch.zeros(4, dtype=D)
            first: Any = {"none": None, "tensor": zeros, "empty": zeros[:0], "list": [zeros], "dict": {"a": zeros}}
            if kind == "in place":
                module.register_buffer(f"a{i}", zeros)
            elif kind == "int":
                setattr(module, f"a{i}", 0)
            elif kind != "missing":
                setattr(module, f"a{i}", first[kind])

        def step(x: Tensor) -> Tensor:
            for i, kind in enumerate(kinds):
                name = f"a{i}"
                old: Any = getattr(module, name, None)
                if kind == "list":
                    old[0] = x = rotate(old[0] + x)
                elif kind == "dict":
                    old["a"] = x = rotate(old["a"] + x)
                elif kind == "in place":
                    old.add_(x.detach())
                    x = x + old
                elif kind == "int":
                    setattr(module, name, old + 1)
                    x = x * (old + 1)
                else:
                    x = rotate(x if old is None or not len(old) else x + old)
                    setattr(module, name, x)
            return x

        if ours:
            ys = tl.carrying(module).map(step, xs, checkpoints=checkpoints, reverse=reverse)
        else:
            ys = torch.stack([step(x) for x in (xs.flip(0) if reverse else xs)])
            ys = ys.flip(0) if reverse else ys
        return ys, [getattr(module, f"a{i}") for i in range(len(kinds))], grad(ys.sum(), xs)

    torch.testing.assert_close(run(True), run(False))


def test_what_no_step_sets_is_not_carried() -> None:
    decoder: Any = Decoder()
    large, leaf = torch.randn(100, 100), torch.ones(4, dtype=D, requires_grad=True)
    decoder.register_buffer("large", large)
    decoder.leaf, decoder.words = leaf, {str(i): i for i in range(5000)}
    words = decoder.words

    def step(x: Tensor) -> Tensor:
        assert decoder.leaf is leaf
        assert decoder.words is words
        return decoder.step(x) * decoder.leaf

    ys = tl.carrying(decoder).map(step, randn(4, 2, 3))
    assert decoder.large is large
    assert grad(ys.sum(), leaf)[0].abs().sum() > 0


def test_what_is_refused() -> None:
    cell, xs = Cell(randn(4)), randn(6, 4)
    for objects, text in [((), "no objects"), ((3,), r"objects\[0\] is int 3"), ((cell, nn.Linear), r"objects\[1\]")]:
        with pytest.raises(TypeError, match=f"carrying: .*{text}"):
            tl.carrying(*objects)
    with pytest.raises(TypeError, match="carrying: names must be a sequence of paths, got 'h'"):
        tl.carrying(cell, names="h")
    with pytest.raises(ValueError, match=r"carrying.map: names: no attribute has the path 'g' after the first step"):
        tl.carrying(cell, names=["g"]).map(cell, xs)
    assert not len(cell.h)

    def grows(x: Tensor) -> Tensor:
        cell.h = torch.cat([cell.h, x])
        return x

    with pytest.raises(TypeError, match=r"carried.state\['h'\]: Tensor \(8,\)"):
        tl.carrying(cell).map(grows, xs)
    assert not len(cell.h)
    with pytest.raises(TypeError, match=r"carrying.scan: body_fn must return \(carry, y\), got Tensor"):
        tl.carrying(cell).scan(lambda c, x: cell(x), None, xs)
    with pytest.raises(TypeError, match=r"changed the carry at step 0 \(h is its carry.*\n  - h: int"):
        tl.carrying(cell).scan(lambda h, x: (x, cell(x)), 0, xs)
    with pytest.raises(TypeError, match=r"carrying.map: fn must be callable, got int 3"):
        tl.carrying(cell).map(3, xs)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_an_attribute_that_a_later_step_sets_is_named(checkpoints: Any) -> None:
    def run(cell: Any, ours: Any) -> Any:
        def step(x: Any) -> Tensor:
            if x[1] == 3:
                cell.late = cell.h * 2
            return cell(x[0]) + cell.late

        return ours(step)

    xs = randn(6, 4)

    def fresh() -> Cell:
        cell = Cell(randn(4))
        cell.late = torch.zeros(4, dtype=D)
        return cell

    cell = fresh()
    late = cell.late
    with pytest.raises(RuntimeError) as error:
        run(cell, lambda step: tl.carrying(cell).map(step, (xs, range(6)), checkpoints=checkpoints))
    text = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert "the body set late at a later step than the first" in text
    assert "give carrying names=['late']" in text
    assert cell.late is late
    ours = run(cell, lambda step: tl.carrying(cell, names=["late"]).map(step, (xs, range(6)), checkpoints=checkpoints))
    plain = fresh()
    true = run(plain, lambda step: torch.stack([step((x, t)) for t, x in enumerate(xs)]))
    torch.testing.assert_close(ours, true)
    torch.testing.assert_close(cell.late, plain.late)
    torch.testing.assert_close(grad(ours.sum(), xs), grad(true.sum(), xs))


def test_under_transforms_and_functional_call() -> None:
    weight, xs = randn(4, grad=False), randn(5, 4, grad=False)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell(weight)
            self.scale = nn.Parameter(torch.ones(4, dtype=D))

        def forward(self, xs: Tensor) -> Tensor:
            return tl.carrying(self.cell).map(lambda x: self.cell(x) * self.scale, xs).sum()

    def f(scale: Tensor) -> Tensor:
        return torch.func.functional_call(Whole(), {"scale": scale}, (xs,))

    scale = randn(4)
    torch.testing.assert_close(torch.func.grad(f)(scale.detach()), grad(f(scale), scale)[0])


def test_checkpoints_keep_as_much_as_with_the_state_in_the_carry() -> None:
    weight = randn(4)

    def bytes_of(length: int, ours: bool) -> int:
        cell, xs = Cell(weight), randn(length, 4, grad=False)

        def run() -> Tensor:
            if ours:
                tl.carrying(cell).map(cell, xs, checkpoints=4)
                return cell.h.sum()
            return tl.scan(
                lambda h, x: (h := rotate(h) + torch.sin(x * weight), h.cos()), weight * 1, xs, checkpoints=4
            )[0].sum()

        return tl.memory.saved_bytes(run)

    plain = [bytes_of(n, False) for n in (50, 100)]
    ours = [bytes_of(n, True) for n in (50, 100)]
    assert ours[1] - ours[0] == plain[1] - plain[0], "of xs and ys alone"
    assert ours[0] - plain[0] < 1000, "the residuals of one step"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    def run(ours: bool) -> Any:
        torch.manual_seed(0)
        linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4, dtype=D))
        cell = Cell(torch.ones(4, dtype=D))
        model, xs = nn.Sequential(linear, nn.BatchNorm1d(4, dtype=D), cell), randn(5, 2, 4, grad=False)
        with mode():
            ys = tl.carrying(model).map(model, xs) if ours else torch.stack([model(x) for x in xs])
        return ys, cell.h, dict(model.named_buffers())

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.eager_only("a count in Python keeps a loop from being compiled, and a warning says so")
def test_no_warning_comes() -> None:
    decoder = Decoder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ys = tl.carrying(decoder).map(decoder.step, randn(6, 2, 3), checkpoints=2)
        ys.sum().backward()
