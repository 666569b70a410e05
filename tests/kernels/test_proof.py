"""How a CUDA kernel comes to be used: it proves itself once beside torch operations. Stand-ins for kernels, no GPU.

The kernels themselves do so in the simulator (`tests/support/cuda_proofs.py`) and on a device (`tests/test_gpu.py`).
"""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop import cuda, kernels
from tensorloop._torch.dispatch import OperationMode
from tensorloop.kernels import proof
from tensorloop.packed import PackedTensor
from tests.support.cuda_cases import kernel

Offered = dict[str, Callable[..., Any]]
X = torch.ones(2, 3)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Offered:
    """Kernels by the name of their operation, as if the CPU were a GPU; where there is none, torch operations."""
    found: Offered = {}
    monkeypatch.setattr(kernels, "backend_of", lambda *like: "cuda")
    monkeypatch.setattr(cuda, "why_not", lambda: "")
    monkeypatch.setattr(cuda, "kernel", lambda name: found.get(name) or _copy_of(name))
    monkeypatch.setattr(proof, "_chosen", {})
    return found


def _copy_of(name: str) -> Callable[..., Any]:
    by_torch = kernel("eager", name)
    return lambda *args: by_torch(*args)


def twisted(name: str, twist: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """An operation whose (first) result is another."""
    by_torch = kernel("eager", name)

    def run(*args: Any) -> Any:
        out = by_torch(*args)
        return twist(out) if isinstance(out, Tensor) else (twist(out[0]), *out[1:])

    return run


# ---- what is right


def test_a_kernel_that_is_right_is_taken(offered: Offered) -> None:
    offered["segment_sum"] = right = _copy_of("segment_sum")
    for dtype in (torch.float32, torch.float64):
        assert kernels.find("segment_sum", X.to(dtype)) is right
    assert kernels.find("segment_sum", X.half()) is kernel("eager", "segment_sum"), "no kernel for this dtype"
    assert kernels.find("edit_cost", X.long()) is kernel("eager", "edit_cost"), "nor for this operation"


def test_it_is_tried_once(offered: Offered) -> None:
    calls: list[threading.Thread] = []
    offered["spread_rows"] = lambda *args: calls.append(threading.current_thread()) or _copy_of("spread_rows")(*args)
    kernels.find("spread_rows", X)
    tried = len(calls)
    assert tried > 3
    assert threading.current_thread() not in calls
    kernels.find("spread_rows", X)
    assert len(calls) == tried
    kernels.find("spread_rows", X.bool())
    assert len(calls) > tried, "another dtype is moved in other words"


def test_what_it_computes_is_used(offered: Offered) -> None:
    used: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        return lambda *args: used.append(name) or kernel("eager", name)(*args)

    names = ("segment_softmax", "segment_softmax_grad")
    offered.update({name: noted(name) for name in names})
    values = torch.randn(5, 2, requires_grad=True)
    PackedTensor(values, [2, 3]).softmax(1).values.sum().backward()  # both prove themselves
    used.clear()
    (grad,) = torch.autograd.grad((PackedTensor(values, [2, 3]).softmax(1).values ** 2).sum(), values)
    assert used == [*names]
    y = torch.cat([x.softmax(0) for x in values.split([2, 3])])
    torch.testing.assert_close(grad, torch.autograd.grad((y**2).sum(), values)[0])


@pytest.mark.parametrize("operation", [name for name, row in kernels.TABLE.items() if row.cuda != kernels.NO])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.bool, torch.int8]
)
def test_torch_operations_would_pass(operation: str, dtype: torch.dtype, offered: Offered) -> None:
    dtypes = kernels.TABLE[operation].cuda
    if dtypes is None or dtype in dtypes:
        by_torch = kernel("eager", operation)
        assert proof.find_fault(operation, by_torch, by_torch, torch.device("cpu"), dtype) == ""
        assert kernels.find(operation, X.to(dtype)) is not by_torch


# ---- what is wrong


def _without_nan(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _narrow(x: Tensor) -> Tensor:
    return x[:, torch.arange(x.shape[1]) % 32]


def _long_rows_cut(values: Tensor, offsets: Tensor) -> Tensor:
    rows = values.split(offsets.diff().tolist())
    return torch.stack([row[:256].sum(0) for row in rows]) if rows else values[:0]


def _never_clears(slots: Tensor, pos: Tensor, where: Tensor) -> Tensor:
    return kernel("eager", "take_rows")(slots.clone(), pos, where)


WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a sum that is a little off": ("segment_sum", twisted("segment_sum", lambda x: x * 1.001), "gives 3 of 5 numbers"),
    "NaN in a maximum": ("segment_max", twisted("segment_max", _without_nan), "0.0 instead of nan for one"),
    "more rows than threads": ("segment_sum", _long_rows_cut, "gives 1 of 5 numbers otherwise"),
    "an empty row": ("segment_min", twisted("segment_min", lambda x: x.masked_fill(x == 7, 0)), "0.0 instead of 7.0"),
    "the last of many columns": ("pack_rows", twisted("pack_rows", _narrow), "gives 6 of 198 numbers otherwise"),
    "the sign of zero": ("pad_rows", twisted("pad_rows", lambda x: x + 0.0), "0.0 instead of -0.0 for one"),
    "a slot that is not cleared": ("take_rows", _never_clears, "instead of 0.0 for one"),
    "another dtype": ("spread_rows", twisted("spread_rows", Tensor.double), "gives torch.float64"),
    "another shape": ("gather_rows", twisted("gather_rows", lambda x: x[1:]), "gives torch.float32 (87, 1), not"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_kernel_that_is_wrong_is_not_taken(case: str, offered: Offered) -> None:
    operation, wrong, said = WRONG[case]
    offered[operation] = wrong
    with pytest.warns(RuntimeWarning) as told:
        assert kernels.find(operation, X) is kernel("eager", operation)
    assert len(told) == 1
    text = str(told[0].message)
    start = f"tensorloop: {operation} on cpu is left to torch operations: in torch.float32 its CUDA kernel "
    assert text.startswith(start)
    assert said in text
    assert told[0].filename == __file__
    assert kernels.find(operation, X) is kernel("eager", operation), "and nothing is said again"
    assert kernels.find(operation, X.double()) is kernel("eager", operation)


def test_a_kernel_that_raises_is_not_taken(offered: Offered) -> None:
    def raising(*_: Any) -> Any:
        raise OSError("libNVVM is missing\nand more")

    offered["segment_cumsum"] = raising
    text = (
        r"tensorloop: segment_cumsum on cpu is left to torch operations: in torch\.float32 its CUDA kernel could not "
        r"be tried: OSError: libNVVM is missing$"
    )
    with pytest.warns(RuntimeWarning, match=text):
        assert kernels.find("segment_cumsum", X) is kernel("eager", "segment_cumsum")
    assert kernels.find("segment_sum", X) is not kernel("eager", "segment_sum"), "others are none the worse"


def test_the_warning_may_be_an_error(offered: Offered) -> None:
    offered["segment_sum"] = twisted("segment_sum", lambda x: x + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="segment_sum on cpu is left to torch"):
            kernels.find("segment_sum", X)
        assert kernels.find("segment_sum", X) is kernel("eager", "segment_sum")


def test_full_memory_decides_nothing(offered: Offered) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    offered["segment_sum"] = full
    assert kernels.find("segment_sum", X) is kernel("eager", "segment_sum")
    offered["segment_sum"] = right = _copy_of("segment_sum")
    assert kernels.find("segment_sum", X) is right


def test_without_kernels_nothing_is_said(offered: Offered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "why_not", lambda: "not installed: numba-cuda")
    assert kernels.find("segment_sum", X) is kernel("eager", "segment_sum")


# ---- when


def test_nothing_is_tried_while_a_graph_or_a_compiler_records(
    offered: Offered, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered["segment_sum"] = right = _copy_of("segment_sum")
    by_torch = kernel("eager", "segment_sum")
    recording: list[bool] = [True]
    monkeypatch.setattr(proof, "_cannot_wait", lambda device: recording[-1])
    assert kernels.find("segment_sum", X) is by_torch
    recording.append(False)
    assert kernels.find("segment_sum", X) is right
    recording.append(True)
    assert kernels.find("segment_sum", X) is right, "what has proved itself may be recorded"


def test_how_recording_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    place = [0]

    class On(nullcontext[None]):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            self.index = device.index

        def __enter__(self) -> None:
            place.append(self.index)

        def __exit__(self, *_: object) -> None:
            place.pop()

    captured: set[int] = set()
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: place[-1] in captured)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert not proof._cannot_wait(first)
    captured.add(1)
    assert not proof._cannot_wait(first)
    assert proof._cannot_wait(second)
    captured.symmetric_difference_update({0, 1})
    assert proof._cannot_wait(second), "the current stream of the caller's device is recorded"
    assert not proof._cannot_wait(torch.device("cpu"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert proof._cannot_wait(torch.device("cpu"))


def test_many_threads_find_one_answer(offered: Offered) -> None:
    calls: list[int] = []
    offered["segment_sum"] = right = lambda *args: calls.append(1) or kernel("eager", "segment_sum")(*args)
    start = threading.Barrier(8)

    def ask(_: int) -> Any:
        start.wait()
        return kernels.find("segment_sum", X)

    with ThreadPoolExecutor(8) as callers:
        assert set(callers.map(ask, range(8))) == {right}
    together = len(calls)
    proof.find_fault("segment_sum", right, kernel("eager", "segment_sum"), torch.device("cpu"), torch.float32)
    assert len(calls) == 2 * together


class Refusing(OperationMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen by the caller's mode")


def test_nothing_of_the_caller_s_is_touched(offered: Offered) -> None:
    """Neither modes nor transforms, grad mode, autocast nor random numbers."""
    offered["segment_softmax"] = right = _copy_of("segment_softmax")
    before = torch.get_rng_state()
    with Refusing():
        assert kernels.find("segment_softmax", X) is right
    assert torch.equal(torch.get_rng_state(), before)

    def inside(row: Tensor) -> Tensor:
        assert kernels.find("segment_sum", X) is not kernel("eager", "segment_sum")
        return row

    torch.func.vmap(inside)(X)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert kernels.find("segment_logsumexp", X) is not kernel("eager", "segment_logsumexp")


# ---- which backend


def test_which_kernels_can_read_a_tensor() -> None:
    assert kernels.backend_of(X) == "cpu"
    assert kernels.backend_of(X, torch.nn.Parameter(X)) == "cpu"
    assert kernels.backend_of(X, X.to("meta")) == "eager"
    assert kernels.backend_of(X.to("meta")) == "eager"
    assert kernels.backend_of(X.to_sparse()) == "eager"
