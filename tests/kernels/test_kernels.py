"""The kernels of the CPU beside torch operations: values, odd sizes, threads, and memory around the buffers."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorloop import kernels
from tensorloop.kernels.cpu import compiling, regroup, segment_reductions
from tensorloop.kernels.cpu import rows as cpu_rows
from tensorloop.kernels.cpu import threads as _threads
from tensorloop.kernels.eager import regroup as eager_moves
from tensorloop.kernels.eager import rows as eager_rows
from tensorloop.kernels.eager import segment_reductions as eager
from tensorloop.kernels.moves import Move, Moves
from tests.support.cuda_cases import MOVED, OPERATIONS, arguments, kernel, offsets_of

ROOT = Path(__file__).parents[2]


def ours(operation: str) -> Callable[..., Any]:
    return kernel("cpu", operation)


def assert_same(operation: str, args: tuple[Any, ...], tolerance: float = 2e-5) -> None:
    precise = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    found, expected = ours(operation)(*args), kernel("eager", operation)(*precise)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=False)
    assert (found if isinstance(found, Tensor) else found[0]).dtype == args[0].dtype


@pytest.fixture(autouse=True)
def gather_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "LARGE", 0)
    monkeypatch.setattr(cpu_rows, "LONG", 0)


LENS = [[], [0], [1], [0, 0, 0], [3, 0, 1, 5, 0], [0, 7], [40, 1, 0, 2]]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("features", [0, 1, 3, 16, 255, 256, 257, 600])
def test_odd_sizes(operation: str, features: int) -> None:
    for lens in LENS:
        assert_same(operation, arguments(operation, lens, features))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if kernels.TABLE[name].cpu is kernels.REAL])
def test_float64(operation: str) -> None:
    assert_same(operation, arguments(operation, [3, 0, 9, 1], 5, torch.float64), 1e-13)


@pytest.mark.parametrize("operation", MOVED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_any_dtype_is_moved(operation: str, dtype: torch.dtype) -> None:
    args = arguments(operation, [3, 0, 9, 1], 5, dtype)
    assert torch.equal(ours(operation)(*args), kernel("eager", operation)(*args))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_strides(operation: str) -> None:
    def laid_out(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        return torch.stack([x, x + 1], -1)[..., 0]

    args = arguments(operation, [3, 0, 9, 1], 5)
    expected = ours(operation)(*args)
    torch.testing.assert_close(ours(operation)(*map(laid_out, args)), expected, rtol=0, atol=0)


@given(
    operation=st.sampled_from(OPERATIONS),
    lens=st.lists(st.integers(0, 9), max_size=8),
    features=st.integers(0, 70),
)
def test_drawn_sizes(operation: str, lens: list[int], features: int) -> None:
    assert_same(operation, arguments(operation, lens, features))


@pytest.fixture
def busy_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three threads and pieces of a few bytes, so that small work is shared, too."""
    monkeypatch.setattr(_threads, "PIECE", 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.usefixtures("busy_threads")
def test_threads_change_nothing(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(operation, [30, 0, 1, 77, 5, 12], 300)
    shared = ours(operation)(*args)
    monkeypatch.setattr(_threads, "PIECE", 1 << 60)
    alone = ours(operation)(*args)
    for x, y in zip(*([r] if isinstance(r, Tensor) else r for r in (shared, alone)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("busy_threads")
def test_many_callers_at_once() -> None:
    args = arguments("segment_cumsum", [30, 0, 1, 77, 5, 12], 300)
    expected = eager.segment_cumsum(*args)
    with ThreadPoolExecutor(8) as callers:
        for found in callers.map(lambda _: segment_reductions.segment_cumsum(*args), range(64)):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_piece_runs_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threads, "PIECE", 1)
    torch.set_num_threads(threads)
    try:
        for count in (0, 1, 2, 7, 100):
            done: list[int] = []
            _threads.share(lambda start, stop, to: to.extend(range(start, stop)), count, 1 << 30, (done,))
            assert sorted(done) == list(range(count))
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("busy_threads")
def test_an_error_in_a_thread_is_the_caller_s() -> None:
    def failing(start: int, stop: int) -> None:
        if start <= 50 < stop:
            raise ArithmeticError("piece 50")

    with pytest.raises(ArithmeticError, match="piece 50"):
        _threads.share(failing, 100, 1 << 30, ())


# ---- numbers that are not finite ----


@pytest.mark.parametrize("operation", ["segment_max", "segment_min", "segment_logsumexp", "segment_softmax"])
def test_infinite_and_nan(operation: str) -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[-inf, -inf], [-inf, 1.0], [inf, 1.0], [nan, 1.0], [2.0, nan, nan], [inf, inf], [-inf, inf, nan]]
    offsets = offsets_of([len(row) for row in rows])
    values = torch.tensor([x for row in rows for x in row]).unsqueeze(1).repeat(1, 5)
    assert_same(operation, (values, offsets, *([0.0] if operation in ("segment_max", "segment_min") else [])))


def test_softmax_is_exact_where_torch_s_is() -> None:
    x = torch.cat([torch.linspace(-120, 0, 10001), torch.tensor([-torch.inf])]).unsqueeze(1)
    offsets = torch.arange(0, 2 * len(x) + 1, 2)
    pairs = torch.stack([x, torch.zeros_like(x)], 1).flatten(0, 1)
    found = segment_reductions.segment_softmax(pairs, offsets)
    expected = pairs.double().view(-1, 2, 1).softmax(1).float().view(-1, 1)
    torch.testing.assert_close(found, expected, rtol=4e-7, atol=1e-37)
    assert found[-2] == 0
    assert found[-1] == 1


# ---- memory ----

GUARD = 64  # elements on either side of a buffer


class Guarded:
    """Tensors cut out of the middle of larger ones; what lies around holds a pattern that must stay."""

    def __init__(self, poison: float) -> None:
        self._poison = poison
        self._made: list[tuple[Tensor, Tensor]] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = torch.Size(shape).numel()
        whole = torch.full((count + 2 * GUARD,), self._poison, dtype=dtype)
        self._made.append((whole, whole[GUARD : GUARD + count]))
        return self._made[-1][1].view(shape)

    def copy(self, x: Tensor) -> Tensor:
        return self.empty(*x.shape, dtype=x.dtype).copy_(x)

    def assert_whole(self) -> None:
        for whole, _ in self._made:
            around = torch.cat([whole[:GUARD], whole[-GUARD:]])
            assert torch.equal(around, torch.full_like(around, self._poison)), "a kernel wrote out of bounds"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("features", [1, 5, 16, 257])
def test_nothing_around_the_buffers_is_read_or_written(
    operation: str, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a kernel makes is cut out of a poisoned buffer too; a read out of bounds would bring 1e6 into the result.
    guarded = Guarded(1e6)
    args = arguments(operation, [4, 0, 1, 9], features)
    expected = kernel("eager", operation)(*args)
    args = tuple(guarded.copy(x) if isinstance(x, Tensor) and x.dtype is torch.float32 else x for x in args)

    def new_empty(like: Tensor, *shape: Any, **_: Any) -> Tensor:
        return guarded.empty(*(shape[0] if isinstance(shape[0], tuple) else shape), dtype=like.dtype)

    def new_full(like: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
        return guarded.empty(*shape, dtype=like.dtype).fill_(fill)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(Tensor, "new_full", new_full)
    found = ours(operation)(*args)
    monkeypatch.undo()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    guarded.assert_whole()
    assert len(guarded._made) > 1


def test_a_write_out_of_bounds_would_be_seen() -> None:
    guarded = Guarded(0.5)
    x = guarded.empty(3)
    guarded.assert_whole()
    x.as_strided((1,), (1,), GUARD + 3).fill_(1.0)
    with pytest.raises(AssertionError, match="out of bounds"):
        guarded.assert_whole()


WRONG_OFFSETS = [[0, 3, 2, 5], [1, 2, 5], [0, 2, 6], [0, 2, 4], [0, -1, 5], []]


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "gather_rows"])
def test_wrong_offsets_touch_no_memory(operation: str) -> None:
    values = torch.randn(5, 4)
    for wrong in WRONG_OFFSETS:
        offsets = torch.tensor(wrong, dtype=torch.int64)
        rows = torch.randn(max(len(wrong) - 1, 0), 5, 4)
        args = {
            "pack_rows": (rows, offsets, 5),
            "pad_rows": (values, offsets, 5, 0),
            "spread_rows": (rows[:, 0].contiguous(), offsets, 5),
            "segment_max": (values, offsets, 0),
            "segment_min": (values, offsets, 0),
            "segment_softmax_grad": (values, values, offsets),
            "segment_logsumexp_grad": (values, rows[:, 0], rows[:, 0], offsets),
            "segment_extreme_grad": (values, rows[:, 0], rows[:, 0], offsets),
        }.get(operation, (values, offsets))
        with pytest.raises(ValueError, match="offsets must rise from 0 to 5"):
            ours(operation)(*args)


def test_a_row_longer_than_its_padding() -> None:
    with pytest.raises(ValueError, match="by at most 2 a row"):
        cpu_rows.pack_rows(torch.randn(2, 2, 4), torch.tensor([0, 3, 4]), 4)
    values, offsets = torch.randn(4, 3), torch.tensor([0, 3, 4])
    assert torch.equal(cpu_rows.pad_rows(values, offsets, 2, 0), eager_rows.pad_rows(values, offsets, 2, 0))


@pytest.mark.parametrize("wrong", [-1, 100, 1 << 40])
def test_an_index_out_of_range_is_not_followed(wrong: int) -> None:
    values = torch.randn(100, 300)
    index = torch.arange(100)
    index[17] = wrong
    with pytest.raises(IndexError, match=rf"gather_rows: index\[17\] is {wrong}, expected 0 <= index < 100"):
        cpu_rows.gather_rows(values, index)


def test_small_gathers_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(IndexError, match="out of range in self"):
        cpu_rows.gather_rows(torch.randn(3, 4), torch.tensor([3]))
    index = torch.randint(0, 5000, (5000,))
    for values in (torch.randn(5000, 1), torch.randn(5000, 300)):
        assert torch.equal(cpu_rows.gather_rows(values, index), values[index])


# ---- moves ----


@pytest.mark.parametrize("length", [*range(1, 40), 63, 64, 65, 127, 255, 256, 257, 1023, 1024, 1025, 3000])
def test_runs_of_every_length(length: int) -> None:
    guarded = Guarded(77)
    source = guarded.copy(torch.randint(0, 70, (3, 2 * length), dtype=torch.uint8))
    moves = Moves([2 * length], [length + 1, length], [Move(0, 0, length, 0, length), Move(0, 1, 0, 0, length)])
    out = [guarded.empty(3, width, dtype=torch.uint8) for width in moves.targets]
    regroup.run([source], out, moves)
    for x, y in zip(out, eager_moves.regroup([source], moves), strict=True):
        assert torch.equal(x, y)
    guarded.assert_whole()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.usefixtures("busy_threads")
def test_sums_write_nothing_else(dtype: torch.dtype) -> None:
    guarded = Guarded(1e6)
    table = [Move(0, 0, 1, 2, 5), Move(1, 0, 0, 2, 5), Move(0, 0, 1, 9, 5), Move(1, 0, 7, 9, 5), Move(1, 0, 0, 9, 5)]
    moves = Moves([6, 12], [15], table)
    rows = [guarded.copy(torch.randint(-9, 9, (41, width)).to(dtype)) for width in moves.sources]
    out = [guarded.empty(41, 15, dtype=dtype)]
    regroup.run(rows, out, moves)
    assert torch.equal(out[0], eager_moves.regroup(rows, moves)[0])
    guarded.assert_whole()


def test_segments_cover_every_column_once_and_join() -> None:
    table = [Move(0, 0, 0, 0, 2), Move(0, 0, 2, 2, 3), Move(1, 0, 0, 7, 1), Move(0, 2, 2, 0, 3)]
    moves = Moves([5, 1], [9, 2, 3], table)
    assert moves.segments == (
        *((0, 0, 5, ((0, 0),)), (0, 5, 2, ()), (0, 7, 1, ((1, 0),)), (0, 8, 1, ())),
        *((1, 0, 2, ()), (2, 0, 3, ((0, 2),))),
    )
    assert moves.transposed.segments == (
        *((0, 0, 2, ((0, 0),)), (0, 2, 3, ((0, 2), (2, 0)))),
        (1, 0, 1, ((0, 7),)),
    )
    assert moves.transposed.transposed is moves
    assert not moves.sums
    assert moves.transposed.sums
    part = moves.between([False, True], [True, False, False])
    assert part.table == ((0, 0, 0, 7, 1),)
    assert (part.sources, part.targets) == ((1,), (9,))
    assert moves.between([False, True], [True, False, False]) is part


# ---- the table ----


def test_find_gives_kernels_for_memory_alone() -> None:
    x = torch.randn(2, 3)
    assert kernels.find("regroup", x) is regroup.regroup
    assert kernels.find("pack_rows", x.bool()) is cpu_rows.pack_rows
    assert kernels.find("segment_sum", torch.nn.Parameter(x)) is segment_reductions.segment_sum
    assert kernels.find("segment_sum", x.half()) is eager.segment_sum
    assert kernels.find("segment_softmax", x.double()) is eager.segment_softmax
    assert kernels.find("regroup", x.to("meta")) is eager_moves.regroup
    assert kernels.find("segment_sum", x, x.to("meta")) is eager.segment_sum

    class Mine(Tensor):
        pass

    assert kernels.find("segment_sum", x.as_subclass(Mine)) is eager.segment_sum
    assert kernels.find("pack_rows", x.to_sparse()) is eager_rows.pack_rows
    assert kernels.find("pack_rows", x, x.to_sparse()) is eager_rows.pack_rows
    found = []

    def look(row: Tensor) -> Tensor:
        found.append(kernels.find("segment_sum", row))
        return row

    torch.func.vmap(look)(x)
    assert found == [eager.segment_sum]


def test_fakes_go_to_torch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(2, 3)
    with FakeTensorMode() as mode:
        assert kernels.find("segment_sum", x) is eager.segment_sum
        fake = mode.from_tensor(x)
    assert kernels.find("segment_sum", fake) is eager.segment_sum


def test_every_kernel_has_its_torch_form() -> None:
    for operation in kernels.TABLE:
        assert callable(kernel("cpu", operation))
        assert callable(kernel("eager", operation))
    with pytest.raises(KeyError, match="segment_prod"):
        kernels.find("segment_prod", torch.zeros(1))


def fresh(code: str) -> Any:
    """What code prints as JSON in a new process."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_numba_loads_when_a_kernel_is_asked_for() -> None:
    loaded = fresh(
        "import json, sys, torch\n"
        "import tensorloop, tensorloop.kernels as kernels, tensorloop.regroup\n"
        "steps = ['numba' in sys.modules]\n"
        "kernels.find('segment_sum', torch.zeros(1, dtype=torch.half))\n"
        "steps.append('numba' in sys.modules)\n"
        "kernels.find('segment_sum', torch.zeros(1))\n"
        "steps.append('numba' in sys.modules)\n"
        "print(json.dumps(steps))"
    )
    assert loaded == [False, False, True]


def test_a_kernel_without_a_place_on_disk_is_compiled_all_the_same() -> None:
    namespace: dict[str, Any] = {}
    exec("def twice(x):\n    return 2 * x", namespace)  # no file, so nowhere to keep it
    assert compiling.compiled(namespace["twice"])(21) == 42


def test_kernels_run_in_a_fork() -> None:
    code = (
        "import json, os, torch\n"
        "from tensorloop.kernels.cpu import segment_reductions, threads\n"
        "torch.set_num_threads(2)\n"
        "threads.PIECE = 1\n"
        "values, offsets = torch.ones(100, 300), torch.tensor([0, 40, 100])\n"
        "before = segment_reductions.segment_sum(values, offsets).sum().item()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    total = segment_reductions.segment_sum(values, offsets).double().numpy().sum()\n"
        "    os._exit(0 if total == before == 30000 else 1)\n"
        "print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))"
    )
    assert fresh(code) == 0
