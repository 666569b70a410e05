"""Compiled loops that carry TensorArrays while rows stop: slots of rows that have ended hold 0, as in eager ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.targets.cpu import loop_threads
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.look.frame import Frame
from tensorloop.loop.compiled.look.template import Template
from tensorloop.loop.compiled.run.plan import plans
from tensorloop.packed import PackedTensor
from tests.support.compiled_cases import rotation
from tests.support.devices import HERE

D = torch.float64
LENS = [4, 1, 2, 4, 3]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator(HERE).manual_seed(seed))


def attend(query: Tensor, slots: Tensor) -> Tensor:
    weights = torch.softmax(torch.einsum("bf,tbf->bt", query, slots), -1)
    return torch.einsum("bt,tbf->bf", weights, slots)


def compare(run: Callable[[Any], tuple[list[Tensor], list[Tensor]]], compile: Any = "strict") -> None:
    """Results and gradients of the compiled loop beside the eager one's."""
    found = []
    for way in (False, compile):
        outputs, inputs = run(way)
        loss = sum((x.sin().sum() for x in outputs if x.is_floating_point()), torch.zeros(()))
        found.append([*outputs, *torch.autograd.grad(loss, inputs)])
    for eager, compiled in zip(*found, strict=True):
        assert eager.shape == compiled.shape
        torch.testing.assert_close(eager, compiled, rtol=1e-10, atol=1e-10)


Step = Callable[[Tensor, tl.TensorArray], Any]


def scanned(step: Step, lens: list[int] = LENS, *, slots: int = 0, **options: Any) -> Callable[[Any], Any]:
    """A scan over packed xs: h turns by a rotation and takes in what `step` makes of it and the array."""
    rows, width = len(lens), 4
    R = rotation(D)

    def run(compile: Any) -> tuple[list[Tensor], list[Tensor]]:
        h, x = drawn(rows, width, seed=1).requires_grad_(), drawn(sum(lens), width, seed=2).requires_grad_()
        old = drawn(slots, rows, width, seed=3).requires_grad_()
        memory = drawn(rows, 3, width, seed=4).requires_grad_()

        def body(state: Any, x: Tensor, memory: Tensor) -> Any:
            h, array = state
            array = array.append(h + memory[:, 0])
            made = step(h, array)
            more, array = made if isinstance(made, tuple) else (made, array)
            h = h @ R + torch.tanh(more) + x
            return (h, array), h * 2

        init = h, tl.TensorArray.unstack(old) if slots else tl.TensorArray()
        xs = PackedTensor(x, lens)
        (last, array), ys = tl.scan(body, init, xs, context=memory, compile=compile, **options)
        return [last, array.stack(), ys.values], [h, x, memory, *([old] if slots else [])]

    return run


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("lens", [LENS, [5, 5], [1], [2, 0, 3], [6, 1, 1]], ids=str)
@pytest.mark.extended("[6, 1, 1]", "[5, 5]")
def test_attention_to_all_slots(lens: list[int], slots: int, checkpoints: int | None):
    compare(scanned(lambda h, a: attend(h, a.stack()), lens, slots=slots, checkpoints=checkpoints))


@pytest.mark.parametrize(
    "step",
    [
        lambda h, a: a[0],
        lambda h, a: a[-1] * 2,
        lambda h, a: a.stack().sum(0) / len(a),
        lambda h, a: a[:].amax(0),
        lambda h, a: a.stack().permute(1, 0, 2).sum(1),
        lambda h, a: (a[0], a.append(h.cos())),
        lambda h, a: (h, a.write(1, h.cos())),
    ],
    ids=["first", "last", "mean", "max", "permuted", "two", "overwritten"],
)
def test_other_uses_of_an_array(step: Step):
    compare(scanned(step, slots=2))


def test_a_detached_read_has_no_gradient():
    compare(scanned(lambda h, a: a.stack().detach().sum(0) + h))
    compare(scanned(lambda h, a: a.stack().detach().sum(0) + h, [3, 3]))


@pytest.mark.parametrize("count", [2, 3])
def test_rows_are_shared_out_among_threads(count: int, monkeypatch: pytest.MonkeyPatch):
    ran, run = [], loop_threads.run
    monkeypatch.setattr(loop_threads, "parts", lambda rows, work: count if rows else 1)
    monkeypatch.setattr(loop_threads, "run", lambda *args: ran.append(args[-1]) or run(*args))
    compare(scanned(lambda h, a: attend(h, a.stack()), slots=1))
    assert ran == [count, count]  # forward and backward


@pytest.mark.parametrize(
    "step",
    [
        lambda h, a: a.stack().mean((0, 1)).expand_as(h),
        lambda h, a: a[-1].flip(0),
        lambda h, a: h * a.stack().sum(),
        lambda h, a: a.stack()[:, :1].sum(0).expand_as(h),
    ],
    ids=["mean", "flip", "sum", "one row"],
)
def test_a_body_that_mixes_rows_of_an_array_runs_eagerly(step: Step):
    with pytest.warns(NotCompiledWarning, match="rows leave the batch"):
        compare(scanned(step), True)


def test_another_array_in_the_place_of_the_carried_one_runs_eagerly():
    with pytest.warns(NotCompiledWarning, match="is returned as another one"):
        compare(scanned(lambda h, a: (h, tl.TensorArray.unstack(a.stack() * 1))), True)
    with pytest.warns(NotCompiledWarning, match="where rows stop on their own"):
        compare(scanned(lambda h, a: (h, a.detach())), True)


def test_other_lengths_of_as_many_rows_are_the_same_plan():
    step: Step = lambda h, a: attend(h, a[:])  # noqa: E731 - a plan is known by the code of its functions
    compare(scanned(step))
    before = plans.made
    compare(scanned(step, [2, 5, 3, 1, 1]))
    assert plans.made == before


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("lens", [LENS, [3], [2, 0, 3], [0, 0]], ids=str)
def test_while_loops_whose_rows_stop(lens: list[int], checkpoints: int | None, compact: bool):
    R = rotation(D)

    def run(compile: Any) -> tuple[list[Tensor], list[Tensor]]:
        h, old = drawn(len(lens), 4, seed=1).requires_grad_(), drawn(2, len(lens), 4, seed=2).requires_grad_()

        def body(state: Any) -> Any:
            h, n, array, most = state
            array = array.append(h).write(1, h.sin())
            return h @ R + array[0], n + 1, array, most

        init = h, torch.zeros(len(lens), dtype=torch.int64), tl.TensorArray.unstack(old), torch.tensor(lens)
        options: dict[str, Any] = {"compact": compact, "checkpoints": checkpoints, "compile": compile}
        last, n, array, _ = tl.while_loop(lambda s: s[1] < s[3], body, init, **options)
        assert n.tolist() == lens
        return [last, array.stack()], [h, old]

    compare(run)


def decoding(compile: Any, steps: Any = 6, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """A loop of unknown length that attends to all of its past."""
    R, h = rotation(D), drawn(3, 4, seed=1).requires_grad_()

    def body(state: Any) -> Any:
        h, past, n = state
        past = past.append(h)
        return h @ R + torch.tanh(attend(h, past.stack())), past, n + 1

    init = h, tl.TensorArray(), torch.zeros_like(torch.as_tensor(steps))
    last, past, _ = tl.while_loop(lambda s: s[2] < torch.as_tensor(steps), body, init, compile=compile, **options)
    return [last, past.stack()], [h]


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("steps", [6, 1, 40, [6, 1, 3]], ids=str)
def test_a_loop_of_unknown_length_reads_prefixes(steps: Any, checkpoints: int | None):
    compare(lambda compile: decoding(compile, steps, checkpoints=checkpoints))


def test_lengths_that_a_loop_reached_are_tried_before_its_results_are_given(monkeypatch: pytest.MonkeyPatch):
    describes = Template.describes

    def until_five(self: Template, seen: Any, lengths: Any, captures: Any) -> bool:
        return lengths[0] < 5 and describes(self, seen, lengths, captures)

    compare(decoding)
    plans.clear()
    monkeypatch.setattr(Template, "describes", lambda *given: given[2][0] == 7 or until_five(*given))
    compare(lambda compile: decoding(compile, 4))
    with pytest.warns(NotCompiledWarning, match="depends on the length of an array"):
        compare(decoding, True)


def test_slots_after_a_row_has_stopped_hold_zeros():
    init, limits = (torch.zeros(3), tl.TensorArray()), torch.tensor([1.0, 2.0, 3.0])
    h, array = tl.while_loop(
        lambda c: c[0] < limits, lambda c: (c[0] + 1, c[1].append(c[0] + 5)), init, compile="strict"
    )
    assert h.tolist() == [1, 2, 3]
    assert array.stack().tolist() == [[5, 5, 5], [0, 6, 6], [0, 0, 7]]


def test_elements_without_rows_are_the_eager_loops_error():
    def body(state: Any, x: Tensor) -> Any:
        h, array = state
        return (torch.sin(h + x), array.append(h.sum())), None

    for compile in (False, "strict"):
        with pytest.raises(ValueError, match=r"TensorArray.append: slot 1: element shape \(\)"):
            tl.scan(body, (torch.zeros(2), tl.TensorArray()), PackedTensor(torch.ones(3), [1, 2]), compile=compile)


READS: dict[str, Callable[[Tensor, tl.TensorArray], int]] = {
    "nothing": lambda seen, array: 1,
    "width": lambda seen, array: seen.size(-1),
    "shape": lambda seen, array: seen.shape[0],
    "size": lambda seen, array: seen.size(0),
    "len": lambda seen, array: len(seen),
    "slots": lambda seen, array: len(array),
}


@pytest.mark.parametrize("reads", READS)
def test_a_body_that_is_told_no_length_is_looked_at_once_in_a_call(reads: str, monkeypatch: pytest.MonkeyPatch):
    """Of others the last step is looked at, too: what they make of a length may depend on what changes outside."""
    plans.clear()  # a plan of the same code is held against what the body was told when it was made
    looks, run = [], Frame.run
    monkeypatch.setattr(Frame, "run", lambda self, *given: looks.append(1) or run(self, *given))

    def body(state: Any, x: Tensor) -> Any:
        h, array = state
        seen = array.append(h)[:]
        return (torch.sin(seen.sum(0)) + x + (READS[reads](seen, array) > 100), array), h

    xs = PackedTensor(drawn(7, 2, seed=1), [4, 3])
    counts = []
    for _ in range(3):
        before = len(looks)
        tl.scan(body, (drawn(2, 2, seed=2), tl.TensorArray()), xs, compile="strict")
        counts.append(len(looks) - before)
    assert counts[0] > 4
    told = reads not in ("nothing", "width")
    assert counts[1:] == [1 + told, 1 + told]


def _written(array: tl.TensorArray, x: Tensor) -> Tensor:
    array[0] = x
    return x


USES: dict[str, Callable[[tl.TensorArray, Tensor], Tensor]] = {
    "read": lambda array, x: array.read(0),
    "item": lambda array, x: array[-1],
    "write": lambda array, x: array.write(0, x)[0],
    "assign": _written,
    "attention": lambda array, x: tl.attention(x, array, array),
}


@pytest.mark.parametrize("use", USES)
def test_only_len_tells_a_body_how_long_an_array_is(use: str):
    """In a loop of unknown length a body that is told is refused: the library's own questions tell it nothing."""
    h = drawn(2, 3, seed=1)

    def looped(compile: Any, told: bool) -> list[Tensor]:
        def body(state: Any) -> Any:
            h, array, n = state
            seen = USES[use](array, h[:, None])
            return torch.sin(h + seen[:, 0]) + (told and len(array) > 100), array.append(h[:, None]), n + 1

        init = h, tl.TensorArray().append(h[:, None]), torch.tensor(0)
        last, array, _ = tl.while_loop(lambda s: s[2] < 5, body, init, compile=compile)
        return [last, array.stack()]

    for found, expected in zip(looped("strict", False), looped(False, False), strict=True):
        torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="sees how long an array in the carry is"):
        looped("strict", True)
