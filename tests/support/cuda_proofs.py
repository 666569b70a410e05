"""The CUDA kernels in numba's simulator prove themselves and are used. `test_cuda.py` runs this in a process apart."""

from typing import Any

import pytest
import tensorloop_cuda
import torch
from numba.cuda.simulator import kernel as simulator
from tensorloop_cuda import launch, moves, rows, segment_reductions

import tensorloop as tl
from tensorloop import cuda, kernels
from tensorloop.kernels import proof
from tests.support.cuda_cases import kernel
from tests.support.cuda_turns import Block


@pytest.fixture(autouse=True)
def a_gpu_that_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "backend_of", lambda *like: "cuda")
    monkeypatch.setattr(cuda, "why_not", lambda: "")
    monkeypatch.setattr(proof, "_chosen", {})
    monkeypatch.setattr(launch, "THREADS", 8)
    monkeypatch.setattr(launch, "MOST_BLOCKS", 2)
    monkeypatch.setattr(simulator, "BlockManager", Block)


@pytest.mark.parametrize("operation", [name for name, row in kernels.TABLE.items() if row.cuda != kernels.NO])
@pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")  # numpy's, of inf - inf
def test_every_kernel_proves_itself(operation: str) -> None:
    moved = kernels.TABLE[operation].cuda is kernels.ANY
    some = (torch.float32, torch.bool, torch.bfloat16, torch.complex128)
    for dtype in some if moved else (torch.int64,) if operation == "edit_distance" else (torch.float32,):
        assert kernels.find(operation, torch.zeros(1, dtype=dtype)) is getattr(tensorloop_cuda, operation)


@pytest.mark.parametrize("operation", [name for name, row in kernels.TABLE.items() if row.cuda is kernels.ANY])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128])
def test_a_proof_meets_every_width_of_words(
    operation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing is compiled later, when a CUDA graph may record."""
    met: set[int] = set()

    def note(kernel: Any, like: Any, blocks: int, shape: Any, *args: Any) -> None:
        met.add(args[-1].itemsize)
        launch.launch(kernel, like, blocks, shape, *args)

    module = moves if operation == "regroup" else rows
    monkeypatch.setattr(module, "launch", note)
    if operation == "regroup":
        monkeypatch.setattr(moves, "_on_device", lambda numbers, like: torch.tensor(numbers))
    kernels.find(operation, torch.zeros(1, dtype=dtype))
    assert met == {word for word in (1, 2, 4, 8) if word >= min(dtype.itemsize, 8)}


def test_a_kernel_that_is_wrong_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_reductions, "_column_sum", lambda own, shared: own)  # of one thread alone
    with pytest.warns(RuntimeWarning, match=r"segment_sum on cpu is left to torch .* gives \d+ of 5 numbers"):
        assert kernels.find("segment_sum", torch.zeros(1)) is kernel("eager", "segment_sum")


def test_a_kernel_that_raises_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> Any:
        raise NotImplementedError("load")

    monkeypatch.setattr(segment_reductions, "load", load)
    with pytest.warns(RuntimeWarning, match=r"segment_sum on cpu is left .* could not be tried: .*NotImplementedError"):
        assert kernels.find("segment_sum", torch.zeros(1)) is kernel("eager", "segment_sum")


def test_what_users_call_runs_in_them() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    plain = torch.stack([row.sum(0) for row in x.split([2, 3])])
    found = tl.PackedTensor(x, [2, 3]).sum(1)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, plain)))
    out = tl.regroup([x.bfloat16()], [["a", "b"]], [[1, 3]], [["b", "a"], ["a", "a"]])
    (grad,) = torch.autograd.grad(torch.cat(out, 1).sum(), x)
    assert torch.equal(grad, torch.tensor([3.0, 1, 1, 1]).expand(5, 4))
    array = tl.TensorArray(capacity=2).append(torch.zeros(5, 4))
    array = array.write_rows(torch.tensor([0, 1, 0, 1, 0]), x, torch.tensor([True] * 4 + [False]))
    expected = torch.zeros(2, 5, 4)
    expected[[0, 1, 0, 1], range(4)] = x.detach()[:4]
    assert torch.equal(array.stack().detach(), expected)
    (grad,) = torch.autograd.grad(array.stack().sum(), x)
    assert grad.sum(1).tolist() == [4, 4, 4, 4, 0]
    used = {name for name, _, _ in proof._chosen}
    assert used >= {"segment_sum", "spread_rows", "regroup", "write_rows", "take_rows"}
    assert (torch.device("cpu"), torch.bfloat16) in {key[1:] for key in proof._chosen}
    assert all(found is getattr(tensorloop_cuda, key[0]) for key, found in proof._chosen.items())
