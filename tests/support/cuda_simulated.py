"""The CUDA kernels in numba's simulator, beside torch operations. `test_cuda.py` runs them in a process apart.

The simulator is chosen before numba is imported (NUMBA_ENABLE_CUDASIM=1), and lasts as long as the process.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorloop_cuda
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.cuda.simulator import kernel as simulator
from tensorloop_cuda import launch, target
from torch import Tensor

from tensorloop.kernels.eager import regroup
from tests.support.cuda_cases import (
    DISGUISES,
    MOVED,
    OPERATIONS,
    REDUCED,
    arguments,
    kernel,
    many_moves,
    offsets_of,
    some_moves,
)
from tests.support.cuda_turns import Block, Thread

LENS = [[], [0, 0], [1], [3, 0, 1, 5, 0], [0, 11]]
GUARD = 64  # numbers before and behind a tensor that are not its own


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each simulated thread is one of Python's: a few of them, which take turns at more work than they are."""
    monkeypatch.setattr(launch, "THREADS", 4)
    monkeypatch.setattr(launch, "MOST_BLOCKS", 2)
    monkeypatch.setattr(simulator, "BlockManager", Block)


def test_the_simulator_is_on() -> None:
    assert target.SIMULATED


def ours(operation: str) -> Callable[..., Any]:
    return getattr(tensorloop_cuda, operation)


def assert_same(operation: str, args: tuple[Any, ...], tolerance: float = 2e-5) -> None:
    precise = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    found, expected = ours(operation)(*args), kernel("eager", operation)(*precise)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=False)
    assert (found if isinstance(found, Tensor) else found[0]).dtype == args[0].dtype


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("features", [0, 1, 9])
def test_odd_sizes(operation: str, features: int) -> None:
    for lens in LENS:
        assert_same(operation, arguments(operation, lens, features))


@pytest.mark.parametrize("operation", REDUCED)
def test_float64(operation: str) -> None:
    assert_same(operation, arguments(operation, [3, 0, 9, 1], 2, torch.float64), 1e-13)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_whole_blocks(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that a GPU is given: 256 threads a block, as many blocks as there is work."""
    monkeypatch.setattr(launch, "THREADS", 256)
    monkeypatch.setattr(launch, "MOST_BLOCKS", 1 << 16)
    assert_same(operation, arguments(operation, [20, 0, 13], 9))


@pytest.mark.parametrize("operation", MOVED)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int64]
)
def test_any_dtype_is_moved(operation: str, dtype: torch.dtype) -> None:
    for features in (3, 4):
        args = arguments(operation, [3, 0, 1], features, dtype)
        assert torch.equal(ours(operation)(*args), kernel("eager", operation)(*args))


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.complex128, 2 - 3j), (torch.float32, -0.0), (torch.bfloat16, -math.inf), (torch.int8, -3)],
)
def test_what_pads_may_be_any_number(dtype: torch.dtype, fill: Any) -> None:
    values, offsets, steps, _ = arguments("pad_rows", [2, 0, 3], 3, dtype)
    found, expected = (f(values, offsets, steps, fill) for f in (tensorloop_cuda.pad_rows, kernel("eager", "pad_rows")))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_pad_cuts_longer_rows() -> None:
    values, offsets, *_ = arguments("pad_rows", [3, 0, 5], 2)
    assert torch.equal(
        tensorloop_cuda.pad_rows(values, offsets, 2, 9), kernel("eager", "pad_rows")(values, offsets, 2, 9)
    )


@pytest.mark.parametrize("operation", REDUCED)
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")  # numpy's, of inf - inf
def test_infinite_and_not_a_number(operation: str, special: float) -> None:
    args = arguments(operation, [4, 1, 2, 0, 3], 2)
    args[0][1, 0] = args[0][4, 0] = special  # among others, and alone
    args[0][5:7, 1] = special  # all of a segment
    assert_same(operation, args)


@pytest.mark.parametrize("operation", ["segment_max", "segment_min"])
def test_of_equals_the_first(operation: str) -> None:
    values = torch.randint(0, 3, (24, 2)).float()  # few different ones, which several threads find
    values[20:, 1] = math.nan
    for lens in ([6, 18], [24], [12, 12]):
        _, where = ours(operation)(values, offsets_of(lens), 0)
        assert torch.equal(where, kernel("eager", operation)(values, offsets_of(lens), 0)[1])


@settings(max_examples=20)
@given(operation=st.sampled_from(OPERATIONS), lens=st.lists(st.integers(0, 6), max_size=5), features=st.integers(0, 10))
def test_drawn_sizes(operation: str, lens: list[int], features: int) -> None:
    assert_same(operation, arguments(operation, lens, features))


# ---- regroup


DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.int16, torch.bool])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_regroup_and_its_gradient(dtype: torch.dtype, batch: int) -> None:
    moves = some_moves()
    for table in (moves, moves.transposed) if dtype in tensorloop_cuda.SUMMED else (moves,):
        rows = [(torch.randn(batch, width + 3) * 3).to(dtype)[:, 1 : width + 1] for width in table.sources]
        for found, expected in zip(tensorloop_cuda.regroup(rows, table), regroup.regroup(rows, table), strict=True):
            assert torch.equal(found, expected)


def test_regroup_of_many_tensors() -> None:
    """More addresses than one launch passes to the device."""
    moves = many_moves(2)
    rows = list(torch.randn(50, 2, 2))
    assert torch.equal(tensorloop_cuda.regroup(rows, moves)[0], torch.cat(rows[::-1], 1))
    grads = tensorloop_cuda.regroup([torch.arange(200.0).view(2, 100)], moves.transposed)
    assert torch.equal(torch.cat(grads[::-1], 1), torch.arange(200.0).view(2, 100))


# ---- writes into slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_write_rows(dtype: torch.dtype) -> None:
    slots, x = torch.randn(4, 5, 3).to(dtype), torch.randn(5, 3).to(dtype)
    pos, where = torch.tensor([0, 3, 9, -1, 2]), torch.tensor([True, True, True, True, False])
    expected = slots.clone()
    expected[0, 0], expected[3, 1] = x[0], x[1]  # two are outside, one is masked
    tensorloop_cuda.write_rows(slots, pos, x, where)
    assert torch.equal(slots, expected)
    taken = torch.zeros_like(x)
    taken[0], taken[1] = x[0], x[1]
    expected[0, 0], expected[3, 1] = 0, 0
    assert torch.equal(tensorloop_cuda.take_rows(slots, pos, where), taken)
    assert torch.equal(slots, expected)


# ---- memory around the tensors


def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """(a copy of x, all the memory around it): what is outside is NaN, or 77."""
    outside = math.nan if x.is_floating_point() else 77
    whole = torch.full((x.numel() + 2 * GUARD,), outside, dtype=x.dtype)
    inner = whole[GUARD : GUARD + x.numel()].view(x.shape)
    inner.copy_(x)
    return inner, whole


def untouched(whole: Tensor) -> bool:
    outside = torch.cat([whole[:GUARD], whole[-GUARD:]])
    return bool((outside.isnan() if outside.is_floating_point() else outside == 77).all())


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The memory around every tensor that a kernel's caller makes for results."""
    made: list[Tensor] = []

    def new_empty(like: Tensor, *shape: Any, **_: Any) -> Tensor:
        size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        inner, whole = guarded(torch.zeros(size, dtype=like.dtype))
        made.append(whole)
        return inner

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: new_empty(x, x.shape))
    yield made
    assert made
    assert all(map(untouched, made))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_memory_outside_is_neither_read_nor_written(operation: str, outputs: list[Tensor]) -> None:
    for lens in ([3, 0, 5], [0, 1]):
        args = [guarded(x)[0] if isinstance(x, Tensor) else x for x in arguments(operation, lens, 3)]
        assert_same(operation, tuple(args))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("bad", [[0, 99, 8], [5, -3, 8], [1 << 40, -(1 << 40), 1 << 40], [8, 0, 8]])
@pytest.mark.extended("bad2")
def test_wrong_offsets_and_indices_are_not_followed(operation: str, bad: list[int], outputs: list[Tensor]) -> None:
    """On a device nothing looks at them before a kernel does."""
    args = list(arguments(operation, [3, 5], 3))
    place = next(k for k, x in enumerate(args) if isinstance(x, Tensor) and x.dtype is torch.int64)
    args[place] = torch.tensor(bad)
    ours(operation)(*(guarded(x)[0] if isinstance(x, Tensor) else x for x in args))


def test_indices_outside_give_zeros() -> None:
    values = torch.ones(3, 2)
    found = tensorloop_cuda.gather_rows(values, torch.tensor([2, 3, -1, 0]))
    assert found.tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]


def test_regroup_and_writes_stay_inside(outputs: list[Tensor]) -> None:
    moves = some_moves()
    for table in (moves, moves.transposed):
        rows = [guarded(torch.randn(3, width))[0] for width in table.sources]
        for found, expected in zip(tensorloop_cuda.regroup(rows, table), regroup.regroup(rows, table), strict=True):
            assert torch.equal(found, expected)
    slots, whole = guarded(torch.zeros(2, 3, 5))
    pos = torch.tensor([-1, 2, 1 << 40])
    tensorloop_cuda.write_rows(slots, pos, torch.ones(3, 5), torch.ones(3, dtype=torch.bool))
    assert not tensorloop_cuda.take_rows(slots, pos, torch.ones(3, dtype=torch.bool)).any()
    assert untouched(whole)
    assert not slots.any()


def test_results_repeat_to_the_bit() -> None:
    args = arguments("segment_sum", [30, 7], 2)
    assert all(torch.equal(tensorloop_cuda.segment_sum(*args), tensorloop_cuda.segment_sum(*args)) for _ in range(3))


# ---- threads that take turns


@pytest.mark.parametrize("missing", [0, 1])
def test_a_barrier_that_is_missing_shows(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two for each segment: before what others read is written again, and before what they wrote is read."""
    monkeypatch.setattr(launch, "MOST_BLOCKS", 1)  # which meets both segments
    args, wait, met = arguments("segment_softmax_grad", [4, 4], 1), Thread.syncthreads, Counter[Thread]()
    expected = tensorloop_cuda.segment_softmax_grad(*args)
    torch.testing.assert_close(expected, kernel("eager", "segment_softmax_grad")(*args))

    def wait_or_not(thread: Thread) -> None:
        met[thread] += 1
        if met[thread] % 2 == missing:
            wait(thread)

    monkeypatch.setattr(Thread, "syncthreads", wait_or_not)
    tensorloop_cuda.segment_sum(torch.randn(8, 1), args[2])  # other numbers in the memory that threads share
    assert not torch.allclose(tensorloop_cuda.segment_softmax_grad(*args), expected)


def test_a_barrier_that_some_threads_miss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Thread.syncthreads
    monkeypatch.setattr(Thread, "syncthreads", lambda thread: wait(thread) if thread.threadIdx.y else None)
    with pytest.raises(RuntimeError, match="3 of 4 threads of a block came to a barrier"):
        tensorloop_cuda.segment_sum(torch.ones(4, 1), offsets_of([4]))


# ---- what is read, and what is in memory


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.extended("zero_further_on", "turned", "apart")
def test_a_tensor_is_what_it_reads_as(operation: str, disguise: Callable[[Tensor], Tensor]) -> None:
    args = arguments(operation, [2, 0, 3], 3, torch.complex64 if operation in MOVED else torch.float32)
    for place, x in enumerate(args):
        if not isinstance(x, Tensor) or (x.dtype is torch.int64 and not torch.equal(disguise(x), x)):
            continue  # other offsets are none
        args_of, plain = (
            (*args[:place], y, *args[place + 1 :]) for y in (disguise(x), disguise(x).contiguous().clone())
        )
        torch.testing.assert_close(ours(operation)(*args_of), ours(operation)(*plain), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("disguise", DISGUISES)
def test_moved_tensors_are_what_they_read_as(disguise: Callable[[Tensor], Tensor]) -> None:
    moves, rows = some_moves(), [torch.randn(3, 4), torch.randn(3, 6)]
    for sources in ([disguise(rows[0]), rows[1]], [rows[0], disguise(rows[1])]):
        plain = [x.contiguous().clone() for x in sources]
        for found, expected in zip(tensorloop_cuda.regroup(sources, moves), regroup.regroup(plain, moves), strict=True):
            assert torch.equal(found, expected)
    x, pos, where = torch.randn(3, 4), torch.tensor([1, 0, 1]), torch.tensor([True, True, False])
    for some in ((disguise(pos), x, where), (pos, disguise(x), where), (pos, x, disguise(where))):
        plain = [y.contiguous().clone() for y in some]
        found, expected = torch.zeros(2, 2, 3, 4)
        tensorloop_cuda.write_rows(found, *some)
        kernel("eager", "write_rows")(expected, *plain)
        assert torch.equal(found, expected)


def test_slots_of_any_layout_are_written() -> None:
    pos, x, where = torch.tensor([0, 1]), torch.ones(2, 3), torch.ones(2, dtype=torch.bool)
    slots, expected = torch.zeros(2, 3, 2).mT, torch.zeros(2, 2, 3)
    expected[0, 0] = expected[1, 1] = 1
    tensorloop_cuda.write_rows(slots, pos, x, where)
    assert torch.equal(slots, expected)
    assert torch.equal(tensorloop_cuda.take_rows(slots, pos, where), x)
    assert not slots.any()
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        tensorloop_cuda.write_rows(DISGUISES[0](expected), pos, x, where)


def test_slots_of_more_dims_and_none() -> None:
    pos, where = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
    for shape in ((), (3, 2)):
        slots, x = torch.zeros(2, 2, *shape), torch.ones(2, *shape)
        tensorloop_cuda.write_rows(slots, pos, x, where)
        assert slots.flatten(2).sum((0, 1)).eq(2).all() if shape else slots.tolist() == [[1, 0], [0, 1]]
        assert torch.equal(tensorloop_cuda.take_rows(slots, pos, where), x)


def test_what_has_no_memory_is_refused() -> None:
    with pytest.raises(TypeError, match="kernels read numbers in memory, and a Tensor on meta has none here"):
        tensorloop_cuda.spread_rows(torch.ones(2, 3, device="meta"), offsets_of([1, 1]), 2)


# ---- edit distances


@given(
    b=st.lists(st.integers(0, 6), max_size=3),
    each=st.integers(1, 2),
    a=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_edit_distances(b: list[int], each: int, a: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    a = a[: each * len(b)]
    args = torch.randint(3, (sum(a),)), offsets_of(a), torch.randint(3, (sum(b),)), offsets_of(b)
    assert torch.equal(tensorloop_cuda.edit_distance(*args), kernel("eager", "edit_distance")(*args))


@pytest.mark.parametrize("wrong", [[0, 9, 3], [-5, 2, 40], [7, 7, 7], [3, 0, 3]])
def test_edit_distances_of_wrong_offsets_touch_nothing_else(wrong: list[int]) -> None:
    memory = torch.full((2 * GUARD + 7,), -1)
    tokens, offsets = memory[GUARD:-GUARD], torch.tensor(wrong)
    tokens[:] = torch.arange(7)
    for args in ((tokens, offsets, tokens, offsets_of([3, 4])), (tokens, offsets_of([3, 4]), tokens, offsets)):
        assert tensorloop_cuda.edit_distance(*args).shape == (2,)
    assert (memory[:GUARD] == -1).all()
    assert (memory[-GUARD:] == -1).all()
    with pytest.raises(ValueError, match="3 rows of a cannot be shared among 2 rows of b"):
        tensorloop_cuda.edit_distance(tokens, offsets_of([1, 2, 3]), tokens, offsets_of([1, 2]))
