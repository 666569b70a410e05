"""No address without a bound: arrays of few slots, read and written near their end, and the bounds themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import TensorArray
from tensorloop.compiler.emitter.ir.kernels import Gather, Kernel, Matmul, Point, Reduce
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.write.bounds import check_rows, find_bounds
from tensorloop.compiler.lengths import Length, all_hold
from tensorloop.compiler.step import Unsupported
from tensorloop.compiler.targets.cpu import loop_threads
from tests.support.both_ways import check_both

D = torch.float64
STEPS = 6
pytestmark = pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning")

READS: dict[str, Callable[[TensorArray], Tensor]] = {  # of an array of one slot or more
    "the last two": lambda a: a[-2:].sum(0),
    "the last two of a stack": lambda a: a.stack()[-2:].sum(0),
    "from the last but one": lambda a: a[max(len(a) - 2, 0) :].sum(0),
    "the second and third": lambda a: a[1:3].sum(0),
    "the mean of the first two": lambda a: a[:2].mean(0),
    "every other": lambda a: a.stack()[::2].sum(0),
    "around": lambda a: a[2 % len(a)],
    "the last but two": lambda a: a[max(len(a) - 3, 0)],
    "by tensors": lambda a: a.gather(torch.tensor([0, len(a) - 1])).sum(0),
}


def reading(read: Callable[[TensorArray], Tensor]) -> Callable[..., Any]:
    def step(h: Tensor, a: TensorArray) -> Any:
        a.append(torch.sin(h))
        return torch.tanh(h + read(a)), a

    return step


def mean_before(h: Tensor, a: TensorArray) -> Any:
    """Reads slots that are not there yet."""
    y = a[:2].mean(0).nan_to_num(0.5)
    a.append(h.sin())
    return torch.tanh(h + y), a


def writes_last_but_one(h: Tensor, a: TensorArray) -> Any:
    a.append(torch.sin(h))
    a[max(len(a) - 2, 0)] = h
    return torch.tanh(h + a[-1]), a


def writes_without_growing(h: Tensor, a: TensorArray) -> Any:
    a[max(len(a) - 2, 0)] = h * 0.5
    return torch.tanh(h + a[-1]), a


def scanned(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda compile, h, a: tl.scan(
        lambda s, _: (step(*s), s[0]), (h, a), length=STEPS, compile=compile, **options
    )


def until(step: Callable[..., Any]) -> Callable[..., Any]:
    def body(s: Any, _: None) -> Any:
        return (*step(*s[:2]), s[2] + 1), s[0]

    stop: dict[str, Any] = {"until": lambda s: s[2] >= 4}
    return lambda compile, h, a: tl.scan(body, (h, a, torch.tensor(0)), length=STEPS, compile=compile, **stop)


def repeated(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda compile, h, a: tl.while_loop(
        lambda s: s[2] < STEPS, lambda s: (*step(*s[:2]), s[2] + 1), (h, a, torch.tensor(0)), compile=compile
    )


LOOPS: dict[str, Callable[..., Any]] = {
    "scan": scanned,
    "fori_loop": lambda step: (
        lambda compile, h, a: tl.fori_loop(0, STEPS, lambda i, s: step(*s), (h, a), compile=compile)
    ),
    "while_loop": repeated,
    "until": until,
    "checkpoints": lambda step: scanned(step, checkpoints=2),
}


def check_lengths(loop: Callable[..., Any], lengths: Any) -> None:
    """The loop with arrays that begin with so many slots, one after the other: plans of some may serve others."""
    for slots in lengths:
        torch.manual_seed(slots)
        first = torch.randn(slots, 3, dtype=D)

        def run(compile: Any, h: Tensor, first: Tensor) -> Any:
            return loop(compile, h, TensorArray.unstack(first) if len(first) else TensorArray())

        check_both(run, torch.ones(3, dtype=D), first, compile=True)  # or eagerly


@pytest.mark.parametrize("name", READS)
@pytest.mark.few("second and third", "last but two", "around", "by tensors")
def test_an_array_is_read_near_its_end(name: str):
    for kind, loop in LOOPS.items():
        check_lengths(loop(reading(READS[name])), (3, 1, 0, 2) if kind == "scan" else (0,))


OTHERS = mean_before, writes_last_but_one, writes_without_growing


@pytest.mark.parametrize("step", OTHERS, ids=lambda step: step.__name__)
def test_an_array_is_written_near_its_end_or_read_before(step: Callable[..., Any]):
    for loop in LOOPS.values():
        check_lengths(loop(step), (2, 1, *([0] if step is writes_last_but_one else [])))


@pytest.mark.parametrize("name", READS)
def test_an_array_is_read_near_its_end_in_its_memory(name: str, guards: None):
    check_lengths(scanned(reading(READS[name])), (3, 1, 0))


@pytest.mark.parametrize("step", OTHERS, ids=lambda step: step.__name__)
def test_an_array_is_written_near_its_end_in_its_memory(step: Callable[..., Any], guards: None):
    check_lengths(scanned(step), (2, 1))
    check_lengths(scanned(step, reverse=True), (1,))


@pytest.mark.parametrize("name", ["the last two", "the last two of a stack", "from the last but one"])
def test_what_stays_in_its_memory_is_compiled(name: str):
    def run(compile: Any, h: Tensor, first: Tensor) -> Any:
        return scanned(reading(READS[name]))(compile, h, TensorArray.unstack(first))

    for slots in (4, 2):
        check_both(run, torch.ones(3, dtype=D), torch.randn(slots, 3, dtype=D))


def test_slots_of_many_numbers():
    def run(compile: Any, h: Tensor, first: Tensor) -> Any:
        def body(s: Any, _: None) -> Any:
            h, a = s
            a.append(h * 0.5)
            return (h + a[-2], a), None

        return tl.scan(body, (h, TensorArray.unstack(first)), length=2, compile=compile)[0][0]

    check_both(run, torch.ones(700_000), torch.ones(2, 700_000), tolerance=1e-6)
    check_both(run, torch.ones(700_000), torch.ones(1, 700_000), tolerance=1e-6)


def test_slots_by_tensors_of_an_array_without_any():
    def run(compile: Any) -> Any:
        def body(s: Any, _: None) -> Any:
            h, a = s
            return (h + a.gather(torch.tensor([0, 1])).sum(0), a), None

        init = torch.ones(3), TensorArray(element_shape=(3,))
        return tl.scan(body, init, length=3, compile=compile)

    for compile in (False, True):
        with pytest.raises(IndexError):
            run(compile)


@pytest.mark.parametrize("rows", [10, 5, 6, 8])
def test_a_scatter_of_fewer_rows_than_there_are(rows: int, guards: None, monkeypatch: pytest.MonkeyPatch):
    """Threads that share the rows of the carry would read rows of the index that it does not have."""
    monkeypatch.setattr(loop_threads, "parts", lambda rows, work: 3 if rows else 1)
    index = torch.randint(0, 5, (3, 5, 5), generator=torch.Generator().manual_seed(0))

    def run(compile: Any, h: Tensor, source: Tensor) -> Any:
        def body(h: Tensor, i: Tensor) -> Any:
            y = h.scatter(1, i, source)
            return 0.5 * h + 0.3 * y.sin(), y

        return tl.scan(body, h, index, compile=compile)

    torch.manual_seed(rows)
    check_both(run, torch.randn(rows, 5, dtype=D), torch.randn(5, 5, dtype=D))


# -- the bounds themselves

N: Any = Length(0, 1, 0)


def copied(source: Array, out: Array | None = None) -> Point:
    """A kernel that reads all that an array looks at."""
    made = Region("scratch", 0, 1 << 20, D) if out is None else out.buffer
    return Point("copy", lambda m, x: x, (source,), out or Array(made, source.shape, (1,) * len(source.shape)))


def plain(kind: str, numel: int) -> Region:
    return Region(kind, 0, numel, D)


OUTSIDE: dict[str, Kernel] = {
    "behind the end": copied(Array(plain("carry", 10), (5,), (2,), 2)),
    "before the begin": copied(Array(plain("carry", 10), (5,), (-1,), 3)),
    "an offset below zero": copied(Array(plain("sequence", 10), (1,), (1,), -1)),
    "a column too many": copied(Array(plain("invariant", 12), (3, 5), (4, 1))),
    "what is written": copied(Array(plain("carry", 8), (8,), (1,)), Array(plain("out", 7), (8,), (1,))),
    "a factor of a product": Matmul(
        Array(plain("carry", 6), (2, 3), (3, 1)),
        Array(plain("invariant", 11), (3, 4), (4, 1)),
        Array(plain("scratch", 8), (2, 4), (4, 1)),
    ),
    "what is added to a product": Matmul(
        Array(plain("carry", 6), (2, 3), (3, 1)),
        Array(plain("invariant", 12), (3, 4), (4, 1)),
        Array(plain("scratch", 8), (2, 4), (4, 1)),
        Array(plain("carry", 7), (2, 4), (4, 1)),
    ),
    "a place by a tensor": Gather(
        Array(plain("carry", 10), (4,), (0,)),
        (Array(plain("sequence", 4), (4,), (1,)),), (1,), (11,), Array(plain("scratch", 4), (4,), (1,)),
    ),
    "a place of none": Gather(
        Array(plain("carry", 0), (4,), (0,)),
        (Array(plain("sequence", 4), (4,), (1,)),), (1,), (0,), Array(plain("scratch", 4), (4,), (1,)),
    ),
    "the largest of none": Reduce(
        "amax", Array(plain("carry", 0), (4, 0), (0, 1)), (1,), Array(plain("scratch", 4), (4, 0), (1, 0))
    ),
    "a slot before the first, at any length": copied(Array(plain("array", 3 * N), (2, 3), (3, 1), -3)),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_kernel_that_leaves_its_memory_is_none(name: str):
    with pytest.raises(Unsupported, match="outside of its tensor"):
        find_bounds([OUTSIDE[name]], [], (1,))  # pyright: ignore[reportArgumentType]


def of(*kernels: Kernel, growth: tuple[int, ...] = (1,)) -> list[Length]:
    return find_bounds(kernels, [], growth)  # pyright: ignore[reportArgumentType]


def test_conditions_on_lengths():
    slots = plain("array", 3 * N)
    assert of(copied(Array(plain("carry", 10), (5,), (2,), 1))) == []
    assert of(copied(Array(slots, (2, 3), (3, 1), 3 * (N - 2)))) == [Length(0, 3, -6)]  # the last two
    assert of(copied(Array(slots, (3,), (1,), 3 * N))) == [Length(0, 3, 0)]  # what the step appends
    with pytest.raises(Unsupported, match="outside"):
        of(copied(Array(slots, (3,), (1,), 3 * N)), growth=(0,))  # and where it appends nothing
    third = of(copied(Array(slots, (3,), (1,), 6)))  # a slot from the begin is there when there are three
    assert all(all_hold(third, ((n,),)) for n in (2, 3, 9))
    assert not all_hold(third, ((1,),))
    every = of(copied(Array(slots, (N, 3), (3, 1)), Array(plain("scratch", 3 * N), (N, 3), (3, 1))))
    assert all_hold(every, ((1,), (5,)))
    but_two = (N - 2, 3), (3, 1)  # all but the last two, of which there must not be less than none
    first = of(copied(Array(slots, *but_two), Array(plain("scratch", 3 * N), *but_two)))
    assert all_hold(first, ((2,), (5,)))
    assert not all_hold(first, ((1,), (5,)))


def test_conditions_hold_before_the_first_step_and_before_the_last():
    last_two = [Length(0, 3, -6)]
    assert all_hold(last_two, ((2,), (9,)))
    assert not all_hold(last_two, ((1,), (9,)))
    assert not all_hold(last_two, ((9,), (1,)))  # an array that gets shorter, backward
    assert all_hold([Length(1, 1, -1)], ((0, 1), (0, 4)))
    assert not all_hold([Length(0, 1, -1)], ((0, 1), (0, 4)))


def test_large_slots_have_bounds():
    size = 700_000
    last_two = copied(Array(plain("array", size * N), (2, size), (size, 1), size * (N - 2)), None)
    last_two.out = Array(plain("scratch", 2 * size), (2, size), (size, 1))
    assert of(last_two) == [Length(0, size, -2 * size)]
    assert of(last_two, growth=(1, 1)) == [Length(0, size, -2 * size)]


def test_rows_that_threads_share_out_are_those_that_are_walked():
    few = copied(Array(plain("carry", 12), (4, 3), (3, 1)))
    check_rows([few], {0: 0}, 4)  # pyright: ignore[reportArgumentType]
    check_rows([few], {0: None}, 7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Unsupported, match="4 rows of a unit, shared out as 5"):
        check_rows([few], {0: 0}, 5)  # pyright: ignore[reportArgumentType]
    product = OUTSIDE["a factor of a product"]
    check_rows([product], {0: 2}, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Unsupported, match="2 rows of a unit, shared out as 3"):
        check_rows([product], {0: 0}, 3)  # pyright: ignore[reportArgumentType]
