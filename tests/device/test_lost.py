"""A device that is lost: each call of it fails from then on, in the middle of whatever a compiled loop does."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import TensorArray
from tensorloop.loop.compiled.run.plan import plans
from tests.device import pretended, recording
from tests.support.devices import let_go

LOST = "^CUDA error: an illegal memory access was encountered"


def a_scan(w: Tensor) -> Tensor:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h

    h, ys = tl.scan(body, torch.ones(2, 3), torch.ones(5, 2, 3), compile=True)
    return h.sum() + ys.square().sum()


def of_unknown_length(w: Tensor) -> Tensor:
    h, _ = tl.while_loop(
        lambda c: c[1] < 5,
        lambda c: (torch.tanh(c[0] @ w), c[1] + 1),
        (torch.ones(2, 3), torch.tensor(0)),
        compile=True,
    )
    return h.sum()


def with_an_array(w: Tensor) -> Tensor:
    def body(carry: tuple[Tensor, TensorArray], x: Tensor) -> tuple[tuple[Tensor, TensorArray], Tensor]:
        h, array = carry
        array.append(h * 2)
        return (torch.tanh(h @ w + array[-2] * x), array), h

    (h, array), ys = tl.scan(
        body, (torch.ones(2, 3), TensorArray.unstack(torch.ones(2, 2, 3))), torch.ones(5, 2, 3), compile=True
    )
    return h.sum() + ys.square().sum() + array.stack().sin().sum()


LOOPS = [a_scan, of_unknown_length, with_an_array]


def weights() -> Tensor:
    return torch.arange(9.0).view(3, 3).cos().requires_grad_()


def calls_of(run: Callable[[], object]) -> int:
    with pretended.counted() as counts:
        run()
    return counts.launches + counts.recorded + len(counts.syncs)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["recorded", "replayed"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_lost_device_is_one_error(loop: Callable[[Tensor], Tensor], known: bool, backward: bool, short: None) -> None:
    """No warning comes, nothing records any more, the plan holds nothing broken, and its memory is let go."""
    w = weights()

    def begin() -> Callable[[], object]:
        """What the device is lost in; recorded before, or not."""
        plans.clear()
        for _ in range(2 if known else 0):
            torch.autograd.grad(loop(w), w)
        loss = loop(w) if backward else None
        return lambda: loop(w) if loss is None else torch.autograd.grad(loss, w)

    expected = torch.autograd.grad(loop(w), w)
    count = calls_of(begin())
    assert count > 5
    for lost in (*range(0, count, max(count // 5, 1)), count - 1):
        with tl.memory.LiveStorages() as live:
            run = begin()
            with pretended.losing(lost), pytest.raises(RuntimeError, match=LOST) as caught:
                run()
            assert not recording.any_recording()
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
            del caught, run
            torch.testing.assert_close(torch.autograd.grad(loop(w), w), expected)
            plans.clear()
            let_go()
            gc.collect()
        assert live.bytes == 0
