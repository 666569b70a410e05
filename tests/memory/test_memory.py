"""What counts as saved, hidden, alive; each figure is counted by hand.

Long because it is by hand: a test writes out the sizes that its bytes come from, and shares no helper with the others.
"""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop import memory
from tensorloop.memory import LiveStorages, peak, saved

FLOAT = 4
N = 100  # elements of the usual input: 400 bytes


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, requires_grad=True)


class Hiding(torch.autograd.Function):
    """x -> 2x; keeps exp(x) on the ctx, where no hook sees it, and cos(x) where hooks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.big = x.exp()
        ctx.save_for_backward(x.cos())
        x.sin()  # dead at once
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


# -- what is counted


def test_saved_of_one_operation(x: Tensor):
    found = saved(lambda: x.tanh().sum())
    assert found == memory.Saved(bytes=N * FLOAT, count=1, seen_by_hooks=N * FLOAT, hidden=0, inputs=0, outputs=FLOAT)


def test_arguments_are_passed_and_count_as_inputs(x: Tensor):
    found = saved(lambda a, b: (a * b).sum(), x, torch.randn(N))
    assert (found.bytes, found.inputs) == (0, N * FLOAT)  # x needs a gradient, so only its factor is saved


def test_parameters_count_as_inputs_once():
    layer = torch.nn.Linear(8, 8)
    z = torch.randn(3, 8)

    def twice() -> Tensor:
        return layer(layer(z).tanh()).tanh().sum()

    found = saved(twice)
    assert found.bytes == 2 * 3 * 8 * FLOAT
    assert found.inputs == (8 * 8 + 3 * 8) * FLOAT  # no bias: nothing needs its value


def test_bytes_hidden_on_a_ctx_are_seen(x: Tensor):
    found = saved(lambda: Hiding.apply(x).sum())
    assert (found.seen_by_hooks, found.hidden) == (N * FLOAT, N * FLOAT)
    assert (found.bytes, found.count) == (2 * N * FLOAT, 2)


def test_bytes_kept_in_lists_and_closures_are_hidden_ones(x: Tensor):
    kept: list[Any] = []

    def fn() -> Tensor:
        y = 2 * x
        kept.append(lambda: y)
        kept.append([3 * x])
        return y.sum()

    found = saved(fn)
    assert (found.seen_by_hooks, found.hidden) == (0, 2 * N * FLOAT)


def test_what_a_function_drops_is_not_counted(x: Tensor):
    def fn() -> Tensor:
        for _ in range(5):
            x.exp()
        return (x + 1).sum()

    assert saved(fn).bytes == 0


def test_a_storage_saved_twice_counts_once(x: Tensor):
    def fn() -> Tensor:
        y = 2 * x
        return y.sin().sum() + y.cos().sum() + (y * y).sum()

    assert (saved(fn).bytes, saved(fn).count) == (N * FLOAT, 1)


def test_a_view_counts_its_whole_storage_once(x: Tensor):
    def fn() -> Tensor:
        y = 2 * x
        return y[:3].sin().sum() + y[50:60].cos().sum()

    assert (saved(fn).bytes, saved(fn).count) == (N * FLOAT, 1)


def test_a_view_of_an_input_counts_the_whole_input_as_input(x: Tensor):
    found = saved(lambda: x[:3].sin().sum())
    assert (found.bytes, found.inputs) == (0, N * FLOAT)


def test_an_input_changed_in_place_stays_an_input():
    buffer = torch.zeros(N)
    w = torch.ones(3, requires_grad=True)

    def fn() -> Tensor:
        buffer[:3] = 1
        return (w * buffer[:3]).sum()

    found = saved(fn)
    assert (found.bytes, found.inputs) == (0, N * FLOAT)


def test_returned_tensors_do_not_count_unless_the_graph_holds_them(x: Tensor):
    alone = saved(lambda: {"a": [2 * x, (3 * x,)]})
    assert (alone.bytes, alone.outputs) == (0, 2 * N * FLOAT)
    held = saved(lambda: x.tanh())  # its backward needs its output
    assert (held.bytes, held.outputs) == (N * FLOAT, 0)


def test_another_object_in_the_result_counts_with_all_it_holds(x: Tensor):
    class Holder:
        def __init__(self, y: Tensor) -> None:
            self.y = y

    assert saved(lambda: Holder(2 * x)).bytes == N * FLOAT
    assert saved(lambda: (Holder(x.tanh()), x.sum())).bytes == N * FLOAT


@pytest.mark.parametrize(
    "make", [lambda: torch.tensor([1.0, 2.0]), lambda: torch.zeros(2), lambda: torch.empty(0).resize_(2)]
)
def test_memory_that_fn_makes_from_nothing_counts(make: Callable[[], Tensor], x: Tensor):
    found = saved(lambda: (x[:2] * make().fill_(1)).sum())
    assert (found.bytes, found.inputs) == (2 * FLOAT, 0)


def test_a_storage_that_changes_its_size_counts_as_it_is_now():
    with LiveStorages() as live:
        a = torch.empty(10)
        a.resize_(1000)
        assert (live.bytes, live.peak) == (1000 * FLOAT, 1000 * FLOAT)
    a.untyped_storage().resize_(20)
    assert live.bytes == 20


def test_grad_mode_is_on_during_the_run_and_restored(x: Tensor):
    with torch.no_grad():
        assert saved(lambda: x.tanh().sum()).bytes == N * FLOAT
        assert not torch.is_grad_enabled()


def test_fn_runs_once(x: Tensor):
    calls = []
    saved(lambda: calls.append(1) or x.sum())
    assert calls == [1]


def test_an_error_in_fn_comes_through_and_the_next_run_is_right(x: Tensor):
    with pytest.raises(ZeroDivisionError):
        saved(lambda: x.tanh().sum() / (1 // 0))
    assert gc.isenabled()
    assert saved(lambda: x.tanh().sum()).bytes == N * FLOAT


# -- odd tensors


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
# torch 2.11 warns of every sparse tensor, once.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_count_their_parts():
    with LiveStorages() as live:
        a = torch.eye(5).to_sparse()
        assert live.bytes == 5 * FLOAT + 2 * 5 * 8
        del a
        crow, col, values = torch.arange(6), torch.arange(5), torch.ones(5)
        b = torch.sparse_csr_tensor(crow, col, values, size=(5, 5), check_invariants=False)
        del crow, col, values
        assert live.bytes == 5 * FLOAT + (6 + 5) * 8
        del b
        assert live.bytes == 0


def test_sparse_tensors_are_seen_by_hooks():
    a = torch.eye(5).to_sparse()
    w = torch.randn(5, 2, requires_grad=True)
    found = saved(lambda: torch.sparse.mm(2 * a, w).sum())
    assert (found.hidden, found.seen_by_hooks) == (0, found.bytes)
    assert found.bytes >= 5 * FLOAT


def test_wrapper_subclasses_count_their_parts():
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    found = saved(lambda: (2 * ragged).sin())
    assert found.bytes == found.seen_by_hooks == found.outputs == 6 * 3 * FLOAT
    with LiveStorages() as live:
        kept = [3 * ragged, ragged + 1]
        assert live.bytes == 2 * 6 * 3 * FLOAT
    del kept
    assert live.bytes == 0


def test_meta_and_fake_tensors_have_no_bytes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with LiveStorages() as live:
        kept = [torch.ones(100, device="meta")]
        with FakeTensorMode():
            kept.append(2 * torch.ones(100))
        assert live.bytes == 0


def test_vmap_inside_fn():
    a = torch.randn(4, 25, requires_grad=True)
    assert saved(lambda: torch.vmap(lambda row: row.sin().tanh().sum())(a).sum()).bytes == N * FLOAT


def test_func_grad_is_refused_under_hooks_and_counted_by_live_storages(x: Tensor):
    def fn() -> Any:
        return torch.func.grad(lambda row: row.sin().sum())(x.detach())

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        saved(fn)
    with LiveStorages() as live:
        result = fn()
    assert live.bytes == result.nbytes


# -- measuring changes nothing


def lstm() -> Callable[[], Tensor]:
    layer, z = torch.nn.LSTM(8, 8), torch.randn(6, 2, 8)
    return lambda: layer(z)[0].sum()


def attention() -> Callable[[], Tensor]:
    layer, z = torch.nn.MultiheadAttention(8, 2), torch.randn(6, 2, 8)
    return lambda: layer(z, z, z)[0].sum()


def convolution() -> Callable[[], Tensor]:
    layer = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.GELU())
    z = torch.randn(2, 4, 9)
    return lambda: layer(z).sum()


def cat_loop() -> Callable[[], Tensor]:
    xs = torch.randn(10, N, requires_grad=True)

    def fn() -> Tensor:
        rows, loss = xs[:1], torch.zeros(())
        for x in xs.unbind(0):
            rows = torch.cat([rows, x[None]])
            loss = loss + (rows**2).sum()
        return loss

    return fn


def dropped_outputs() -> Callable[[], Tensor]:
    # Operations that save their own output: held in a way that makes a cycle, they would never be freed.
    x = torch.randn(N, requires_grad=True)

    def fn() -> Tensor:
        x.tanh().exp().sigmoid()
        return x.softmax(0).sum()

    return fn


PROGRAMS = pytest.mark.parametrize("make", [lstm, attention, convolution, cat_loop, dropped_outputs])


@PROGRAMS
def test_the_mode_does_not_change_what_hooks_see(make: Callable[[], Callable[[], Tensor]]):
    fn = make()
    storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def pack(t: Tensor) -> Tensor:
        storages.add(t.untyped_storage())
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = fn()
    found = saved(fn)
    assert sum(s.nbytes() for s in storages) == found.seen_by_hooks + found.inputs
    del loss


@PROGRAMS
def test_the_hooks_do_not_change_what_is_alive(make: Callable[[], Callable[[], Tensor]]):
    fn = make()
    found = saved(fn)
    with LiveStorages() as live:
        loss = fn()
    assert live.bytes == found.bytes + found.outputs
    del loss


def test_hooks_of_fn_itself_come_first_and_hide(x: Tensor):
    def fn() -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return (2 * x).sin().sum()

    found = saved(fn)
    assert (found.seen_by_hooks, found.hidden) == (0, N * FLOAT)


def test_a_checkpoint_inside_fn_saves_only_its_input(x: Tensor):
    from torch.utils.checkpoint import checkpoint

    def fn() -> Any:
        return checkpoint(lambda a: a.sin().tanh().exp().sum(), 2 * x, use_reentrant=False)

    assert saved(fn).bytes == N * FLOAT


def in_a_cycle(x: Tensor) -> Tensor:
    ring: list[Any] = [2 * x]
    ring.append(ring)
    return x.tanh().sum()


@pytest.mark.parametrize("threshold", [1, 700])
def test_the_garbage_collector_changes_nothing(threshold: int, x: Tensor):
    before = gc.get_threshold()
    gc.set_threshold(threshold)
    try:
        found = saved(lambda: in_a_cycle(x))
        assert peak(lambda: [in_a_cycle(x) for _ in range(3)]) == 3 * (2 * N + 1) * FLOAT
    finally:
        gc.set_threshold(*before)
    assert (found.seen_by_hooks, found.hidden) == (N * FLOAT, N * FLOAT)
    assert gc.isenabled()


def test_the_collector_stays_off_where_it_was_off(x: Tensor):
    gc.disable()
    try:
        saved(lambda: x.sum())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_held_afterwards(x: Tensor):
    with memory.collector_off(), LiveStorages() as live:
        saved(lambda: Hiding.apply(x.tanh()).sum())
        assert live.bytes == 0


def test_a_long_graph_is_measured_and_dropped(x: Tensor):
    def fn() -> Tensor:
        y = x[:1]
        for _ in range(20_000):
            y = y.sin()
        return y.sum()

    assert saved(fn).bytes == 19_999 * FLOAT  # the first one saves a view of x


# -- live bytes and peaks


def test_live_storages_follow_what_is_dropped_after_the_block(x: Tensor):
    with LiveStorages() as live:
        loss = x.tanh().exp().sum()
        kept = 2 * x
    assert live.sizes == [N * FLOAT] * 3 + [FLOAT]
    assert (live.bytes, live.count) == (3 * N * FLOAT + FLOAT, 4)
    loss.backward()
    assert (live.bytes, live.count) == (N * FLOAT + FLOAT, 2)  # .grad was made after the block
    del loss, kept
    assert (live.bytes, live.count) == (0, 0)


def test_what_is_made_before_or_after_the_block_does_not_count():
    before = torch.ones(N)
    with LiveStorages() as live:
        inside = torch.ones(N)
        before.add_(1)
        torch.zeros(N, out=before)
        view = before[3:]
    after = torch.ones(N)
    assert live.bytes == N * FLOAT
    assert inside.untyped_storage() in live
    assert all(t.untyped_storage() not in live for t in (before, view, after))


def test_nested_blocks_both_count():
    with LiveStorages() as outer:
        a = torch.ones(N)
        with LiveStorages() as inner:
            b = torch.ones(N)
    assert (outer.bytes, inner.bytes) == (2 * N * FLOAT, N * FLOAT)
    del a, b


def test_backward_is_seen(x: Tensor):
    with LiveStorages() as live:
        (gradient,) = torch.autograd.grad(x.tanh().sum(), x)
    assert live.bytes == gradient.nbytes == N * FLOAT


def test_peak_is_the_most_alive_at_one_time(x: Tensor):
    def one_after_another() -> None:
        for _ in range(5):
            x.exp()

    assert peak(one_after_another) == N * FLOAT
    assert peak(lambda: [x.exp() for _ in range(5)]) == 5 * N * FLOAT
    assert peak(lambda: None) == 0


def test_reset_peak_starts_from_what_is_alive():
    with LiveStorages() as live:
        a = torch.ones(N)
        torch.ones(10 * N)
        assert live.peak == 11 * N * FLOAT
        live.reset_peak()
        assert live.peak == N * FLOAT
        torch.ones(2 * N)
        assert live.peak == 3 * N * FLOAT
    del a


def test_counting_does_not_load_the_compiler():
    code = (
        "import sys, torch\n"
        "from tensorloop import memory\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "print(memory.saved(lambda: x.tanh().sum()).bytes, 'torch._dynamo' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == ["12", "False"], done.stderr


def test_saved_prints_its_figures():
    assert str(memory.Saved(2800, 3, 2400, 400, 80, 4)) == (
        "2,800 bytes in 3 storages (2,400 seen by hooks, 400 hidden); besides 80 of inputs, 4 of outputs"
    )


def test_what_is_no_function_is_refused(x: Tensor):
    for name, count in (("saved", saved), ("peak", peak)):
        with pytest.raises(TypeError, match=f"^{name}: fn must be a function; got Tensor. Pass f, not f"):
            count(x.sum())  # pyright: ignore
