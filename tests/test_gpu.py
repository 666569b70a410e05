"""On a real device: arrays, loops with random numbers replayed, every kernel and its proof.

Skipped without one. `pytest --device` runs on a pretended one what needs no kernels.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorloop as tl
from tensorloop import cuda, kernels
from tensorloop.kernels import proof
from tensorloop.kernels.eager import regroup
from tensorloop.packed import StaticPackedTensor
from tests.support.cuda_cases import MOVED, OPERATIONS, REDUCED, arguments, kernel, some_moves

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_kernels = pytest.mark.skipif(bool(cuda.why_not()), reason=f"no CUDA kernels: {cuda.why_not()}")
DEVICE = torch.device("cuda")


# ---- arrays


def prefix_sums(x: Tensor) -> Tensor:
    """Appends, single reads, prefix reads, an overwrite and a stack: some of each."""
    ta = tl.TensorArray()
    for t in range(len(x)):
        ta.append(x[t].sin())
        ta.append(ta[: t + 1].sum(0).cos() * ta[t])
    ta[1] = ta[0] * ta[-1]
    return (ta.stack() ** 3).sum() + (ta.gather([0, 3, 3]) ** 2).sum()


def test_an_array_gives_what_it_gives_on_the_cpu() -> None:
    x = torch.randn(6, 5, dtype=torch.float64, device="cpu")
    here, there = x.requires_grad_(), x.detach().to(DEVICE).requires_grad_()
    expected, found = prefix_sums(here), prefix_sums(there)
    torch.testing.assert_close(found.cpu(), expected)
    (dx,) = torch.autograd.grad(expected, here)
    (dy,) = torch.autograd.grad(found, there)
    assert dy.device.type == "cuda"
    torch.testing.assert_close(dy.cpu(), dx)


def test_rows_are_written_where_they_should() -> None:
    results = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(0)
        x = start = torch.randn(3, 2).to(device).requires_grad_()
        ta = tl.TensorArray(capacity=3)  # on a device the first such write begins all of it
        for pos, where in (([0, 0, 0], [True, True, False]), ([1, 0, 1], [True] * 3), ([2, 2, 0], [True] * 3)):
            ta.write_rows(torch.tensor(pos, device=device), x, torch.tensor(where, device=device))
            x = x * 2
        values = ta.stack()
        (grad,) = torch.autograd.grad((values**2).sum(), start)
        results.append((values.detach().cpu(), grad.cpu()))
    torch.testing.assert_close(results[1], results[0])


# ---- loops


def dropout_scan(w: Tensor, xs: Tensor, k: int | None) -> list[Tensor]:
    """The carry, the gradients, and the next random number of the device."""
    torch.manual_seed(3)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(h @ w, 0.3) + x
        return h, h.sin()

    h, ys = tl.scan(body, torch.zeros_like(xs[0]), xs, checkpoints=k)
    grads = torch.autograd.grad((h**2).sum() + (ys**2).sum(), [w, xs])
    return [h.detach(), *grads, torch.rand(4, device=xs.device)]


@pytest.mark.parametrize("k", [1, 3])
def test_a_replayed_scan_draws_the_same_numbers(k: int) -> None:
    w = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0].to(DEVICE).requires_grad_()
    xs = torch.randn(9, 2, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    torch.testing.assert_close(dropout_scan(w, xs, k), dropout_scan(w, xs, None), rtol=1e-12, atol=1e-12)


def dropout_while(w: Tensor, x: Tensor, k: int | None) -> list[Tensor]:
    torch.manual_seed(3)

    def body(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        i, h = carry
        return i + 1, F.dropout(h @ w, 0.3) + x

    limits = torch.tensor([3, 7], device=x.device)
    _, h = tl.while_loop(lambda c: c[0] < limits, body, (torch.zeros_like(limits), x), checkpoints=k)
    return [h.detach(), *torch.autograd.grad((h**2).sum(), [w, x]), torch.rand(4, device=x.device)]


@pytest.mark.parametrize("k", [1, 3])
def test_a_replayed_while_loop_draws_the_same_numbers(k: int) -> None:
    w = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0].to(DEVICE).requires_grad_()
    x = torch.randn(2, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    torch.testing.assert_close(dropout_while(w, x, k), dropout_while(w, x, None), rtol=1e-12, atol=1e-12)


# ---- kernels


def on_device(operation: str, lens: list[int], features: int, dtype: torch.dtype) -> list:
    return [x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments(operation, lens, features, dtype)]


@needs_kernels
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_beside_torch_operations(operation: str, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype is torch.float32 else 1e-11
    for lens in ([], [0, 0], [3, 0, 1, 5], [700, 1, 0, 64]):
        for features in (0, 1, 3, 33, 256):
            args = on_device(operation, lens, features, dtype)
            found, expected = cuda.kernel(operation)(*args), kernel("eager", operation)(*args)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("operation", MOVED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex128])
def test_kernels_move_any_dtype(operation: str, dtype: torch.dtype) -> None:
    args = on_device(operation, [3, 0, 50], 5, dtype)
    assert torch.equal(cuda.kernel(operation)(*args), kernel("eager", operation)(*args))


@needs_kernels
def test_regroup_and_its_gradient() -> None:
    moves = some_moves()
    for table in (moves, moves.transposed):
        rows = [torch.randn(1000, width, device=DEVICE) for width in table.sources]
        for found, expected in zip(cuda.kernel("regroup")(rows, table), regroup.regroup(rows, table), strict=True):
            assert torch.equal(found, expected)


@needs_kernels
def test_rows_are_written_into_slots() -> None:
    slots, x = torch.zeros(4, 3, 5, device=DEVICE), torch.randn(3, 5, device=DEVICE)
    pos, where = torch.tensor([3, 9, 0], device=DEVICE), torch.tensor([True, True, False], device=DEVICE)
    cuda.kernel("write_rows")(slots, pos, x, where)
    expected = torch.zeros_like(slots)
    expected[3, 0] = x[0]
    assert torch.equal(slots, expected)


@needs_kernels
def test_kernels_wait_for_the_current_stream() -> None:
    values, offsets = on_device("segment_sum", [500, 500], 64, torch.float32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = values * 2
        found = cuda.kernel("segment_sum")(late, offsets)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(found, kernel("eager", "segment_sum")(values * 2, offsets), rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("operation", ["pack_rows", *REDUCED, "regroup"])
def test_cuda_graphs_record_kernels(operation: str) -> None:
    moves = some_moves()
    if operation == "regroup":
        rows = [torch.randn(9, width, device=DEVICE) for width in moves.sources]
        args, source, reference = [rows, moves], rows[0], regroup.regroup
    else:
        args = on_device(operation, [30, 0, 7], 16, torch.float32)
        source, reference = args[0], kernel("eager", operation)
    on_gpu = cuda.kernel(operation)
    on_gpu(*args)  # compiled, and the plan's table brought over, before anything is recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = on_gpu(*args)
    source.mul_(0.5)
    graph.replay()
    torch.testing.assert_close(found, reference(*args), rtol=1e-4, atol=1e-4)


# ---- snapshots beside the loop


@pytest.mark.parametrize("places", [["cpu"], [None, "cpu"], [None, "cpu", "folder"]])
def test_snapshots_leave_the_device_and_come_back(places: list[str | None], tmp_path: Path) -> None:
    class Everywhere(tl.schedule.Schedule):
        def sweep(self, length: int | None) -> Iterator[tl.schedule.Forward]:
            for step in range(length or 0):
                place = places[step % len(places)]
                yield tl.schedule.Snapshot(step, tmp_path if place == "folder" else place)
                yield tl.schedule.Advance(step, step + 1)

    w = (torch.randn(512, 512, dtype=torch.float64) / 30).to(DEVICE).requires_grad_()
    x = torch.randn(512, 512, dtype=torch.float64).to(DEVICE)

    def gradient(checkpoints: Any) -> Tensor:
        h = tl.fori_loop(0, 30, lambda i, h: torch.sin(h @ w) + h.roll(1, 0), x, checkpoints=checkpoints)
        return torch.autograd.grad(h.sum(), w)[0]

    expected = gradient(None)
    for _ in range(3):  # buffers are used again
        torch.testing.assert_close(gradient(Everywhere()), expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="the pretended device does not count memory")
def test_carries_on_the_cpu_take_no_memory_of_the_device() -> None:
    x = torch.zeros(2**22, device=DEVICE, requires_grad=True)

    def held(plan: Any) -> int:
        before = torch.cuda.memory_allocated()
        h = tl.fori_loop(0, 20, lambda i, h: torch.sin(h) + 1, x, checkpoints=plan)
        torch.cuda.synchronize()
        taken = torch.cuda.memory_allocated() - before
        del h
        return taken

    assert held(tl.Checkpoints(k=8)) > held(tl.Checkpoints(k=8, offload="cpu")) + 6 * x.nbytes
    assert held(tl.schedule.Hierarchy(2, tl.schedule.Level("cpu", write=0, read=0))) <= 4 * x.nbytes


@pytest.mark.parametrize("reverse", [False, True])
def test_a_linear_recurrence_gives_what_it_gives_on_the_cpu(reverse: bool) -> None:
    results = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(0)
        a, b = (torch.randn(77, *shape, dtype=torch.float64).to(device).requires_grad_() for shape in ((5, 1), (5, 3)))
        h = tl.linear_recurrence(a.sin(), b, reverse=reverse)
        results.append([x.detach().cpu() for x in (h, *torch.autograd.grad(h.square().sum(), (a, b)))])
    torch.testing.assert_close(results[1], results[0])


# ---- which kernels are chosen


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_chosen", {})


def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=DEVICE)


def test_which_kernels_can_read_a_tensor() -> None:
    assert kernels.backend_of(zeros()) == "cuda"
    assert kernels.backend_of(zeros(), torch.nn.Parameter(zeros())) == "cuda"
    assert kernels.backend_of(zeros(), zeros().cpu()) == "eager"
    assert kernels.backend_of(zeros().to_sparse()) == "eager"


@needs_kernels
@pytest.mark.parametrize("operation", [name for name, row in kernels.TABLE.items() if row.cuda != kernels.NO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex128])
def test_every_kernel_proves_itself(operation: str, dtype: torch.dtype, undecided: None) -> None:
    dtypes = kernels.TABLE[operation].cuda
    wanted = dtypes is None or dtype in dtypes
    expected = cuda.kernel(operation) if wanted else kernel("eager", operation)
    assert kernels.find(operation, zeros(dtype)) is expected


@needs_kernels
def test_deterministic_algorithms_do_not_keep_a_kernel_from_it(undecided: None) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.find("segment_max", zeros()) is cuda.kernel("segment_max")
    finally:
        torch.use_deterministic_algorithms(False)


@needs_kernels
def test_a_kernel_that_is_wrong_is_left(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "kernel", lambda name: lambda *args: kernel("eager", name)(*args) + 1)
    with pytest.warns(RuntimeWarning, match=r"segment_sum on cuda:0 is left to torch operations: .* numbers otherwise"):
        assert kernels.find("segment_sum", zeros()) is kernel("eager", "segment_sum")


@needs_kernels
def test_nothing_is_decided_while_a_graph_records(undecided: None) -> None:
    x, plan = torch.randn(9, 4, device=DEVICE), tl.RegroupPlan([["a", "b"]], [[1, 3]], [["b", "a"], ["a"]])
    for by in (kernel("eager", "regroup"), cuda.kernel("regroup")):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert kernels.find("regroup", x) is by
            found = plan([x])  # which no device knows yet
        x.normal_()
        graph.replay()
        assert torch.equal(torch.cat(found, 1), torch.cat([x[:, 1:], x[:, :1], x[:, :1]], 1))
        assert kernels.find("regroup", x) is cuda.kernel("regroup")


# ---- packed tensors of static shape


def static_loss(values: Tensor, lens: Tensor, weight: Tensor) -> Tensor:
    p = StaticPackedTensor(values, lens, max_len=6)
    heads: Any = F.linear(p, weight).unflatten(-1, (2, 2))
    x = p + heads.attend(heads, heads, causal=True).flatten(2)
    return (x.softmax(1) * p - x.mean(1, keepdim=True)).square().sum() + x.logsumexp(1)[:2].sum() + x.pad().sin().sum()


def test_a_cuda_graph_of_static_rows_is_replayed_with_other_lens() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(12, 4, generator=generator, device="cpu").to(DEVICE).requires_grad_()
    weight = torch.randn(4, 4, generator=generator, device="cpu").to(DEVICE).requires_grad_()
    lens = torch.tensor([3, 2, 4], device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(static_loss(values, lens, weight), [values, weight])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(static_loss(values, lens, weight), [values, weight])
    for others in ([3, 2, 4], [1, 6, 0], [5, 1, 6]):
        with torch.no_grad():
            lens.copy_(torch.tensor(others))
            values.copy_(torch.randn(12, 4, generator=generator, device="cpu"))
            values[sum(others) :] = torch.nan
        graph.replay()
        here = [x.detach().cpu().requires_grad_() for x in (values, weight)]
        lens_here = torch.tensor(others, device="cpu")
        expected = torch.autograd.grad(static_loss(here[0], lens_here, here[1]), here)
        torch.testing.assert_close([x.cpu() for x in found], list(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_static_rows_never_wait_for_the_device() -> None:
    values, lens = torch.randn(12, 4, device=DEVICE, requires_grad=True), torch.tensor([3, 2, 4], device=DEVICE)
    weight = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    torch.autograd.grad(static_loss(values, lens, weight), [values, weight])
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(static_loss(values, lens, weight), [values, weight])
    finally:
        torch.cuda.set_sync_debug_mode("default")
