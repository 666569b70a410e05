"""What TensorArray keeps alive, for how long: storages without the garbage collector, long chains, threads, waiting."""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import memory
from tensorloop.tensor_array.buffer import WAITING, Buffer
from tensorloop.tensor_array.internals import store_of


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def decoder(array: tl.TensorArray, steps: int, x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for t in range(steps):
        array.append(torch.sin(x * (t + 1)))
        total = total + (array[: t + 1] ** 2).sum()
    return total


@pytest.mark.parametrize("end", ["backward", "half_way", "after_retained_backward", "exception"])
def test_everything_is_freed_when_dropped(end: str) -> None:
    x = torch.ones(8, requires_grad=True)
    with memory.LiveStorages() as live:
        array = tl.TensorArray()
        total = decoder(array, 20, x)
        assert live.bytes > 20 * 8 * 4
        if end == "backward":
            total.backward()
        elif end == "after_retained_backward":
            total.backward(retain_graph=True)
        elif end == "exception":
            with pytest.raises(ValueError, match="shape"):
                array.append(torch.ones(3))
            array[0] = torch.ones(8)
        x.grad = None
        del array, total
        assert live.bytes == 0


def test_the_block_is_freed_with_the_array_although_the_graph_lives() -> None:
    """A graph holds no values: only the views that operations saved keep a block alive."""
    x = torch.ones(1000, requires_grad=True)
    with memory.LiveStorages() as live:
        array = tl.TensorArray()
        for _ in range(10):
            array.append(x * 2)
        total = array.stack().sum()
        held = live.bytes
        assert held >= 10 * 4000
        del array
        assert live.bytes <= held - 10 * 4000
        total.backward()
        assert x.grad is not None
        assert x.grad[0].item() == 20


def test_what_waits_is_bounded() -> None:
    array = tl.TensorArray()
    x = torch.ones(1, requires_grad=True)
    most = 0
    for t in range(5 * WAITING):
        array.append(x * t)
        store = store_of(array)
        assert isinstance(store, Buffer)
        waiting = len(store.waiting)
        most = max(most, waiting)
        assert waiting <= max(WAITING, (t + 1) // 2 + 1)
    assert most >= WAITING
    array.stack().sum().backward()
    assert x.grad is not None
    assert x.grad.item() == sum(range(5 * WAITING))


def test_no_node_is_made_of_a_token_that_is_as_long_as_its_array() -> None:
    array = tl.TensorArray().extend(torch.ones(3, 2, requires_grad=True) * 1)
    store = store_of(array)
    assert isinstance(store, Buffer)
    token = store.token
    assert token is not None
    assert store.whole_token() is token
    array.append(torch.ones(2))
    assert store.token is token
    longer = store.whole_token()
    assert longer is not None
    assert longer.shape == (4, 2)


@pytest.mark.parametrize("use", ["backward", "drop"])
@pytest.mark.parametrize("steps", [20_000, 100_000])
@pytest.mark.few("20000-backward")
def test_many_steps(use: str, steps: int) -> None:
    """A long chain of nodes: no stack overflows when it is dropped, no list grows with each of them."""
    x = torch.ones(1, requires_grad=True)
    array = tl.TensorArray().append(x * 1)
    array.stack()
    for t in range(steps):
        array[0] = array[0] if t % 2 else -array[0]
    out = array.stack().sum()
    if use == "backward":
        (d,) = torch.autograd.grad(out, x)
        assert d.item() == 1
    del array, out


def test_threads_run_backward_over_different_graphs() -> None:
    results: dict[int, Tensor] = {}

    def work(k: int) -> None:
        x = torch.full((4,), 0.1 * (k + 1), dtype=torch.float64, requires_grad=True)
        for _ in range(10):
            (results[k],) = torch.autograd.grad(decoder(tl.TensorArray(), 15, x), x)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        x = torch.full((4,), 0.1 * (k + 1), dtype=torch.float64, requires_grad=True)
        total = sum(((15 - t) * torch.sin(x * (t + 1)) ** 2).sum() for t in range(15))
        assert isinstance(total, Tensor)
        torch.testing.assert_close(results[k], torch.autograd.grad(total, x)[0])
