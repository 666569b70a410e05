"""What waits for no device where lengths came from the CPU, or answers are there."""

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import PackedTensor
from tests.device import pretended

LENS = [3, 0, 5, 2]


def on_device(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to("cuda")


class Given(NamedTuple):
    """What there is before anybody counts. `other` has the lengths of `p`, in a dim of its own."""

    p: PackedTensor
    other: PackedTensor
    h: Tensor
    padded: Tensor


def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return h + x, h * x


USES: dict[str, Callable[[Given], Any]] = {
    "rows sliced": lambda x: x.p[1:3],
    "every other row": lambda x: x.p[::2],
    "rows by a list": lambda x: x.p[[2, 0, 2]],
    "rows by a mask of the CPU": lambda x: x.p[torch.tensor([True, False, True, True], device="cpu")],
    "a row": lambda x: x.p[2],
    "an entry": lambda x: x.p[2, -1],
    "time sliced": lambda x: x.p[:, 1:-1],
    "a step of all": lambda x: x.p[[0, 2, 3]][:, -1],
    "rows": lambda x: x.p.unbind(),
    "rows split": lambda x: x.p.split(2),
    "rows joined": lambda x: torch.cat([x.p, x.p[:2]], 0),
    "time joined": lambda x: torch.cat([x.p, x.p], 1),
    "rows repeated": lambda x: x.p.repeat_interleave(2, 0),
    "equal lengths of another": lambda x: x.p + x.other,
    "padded": lambda x: x.p.pad(),
    "packed": lambda x: tl.pack_padded(x.padded, LENS),
    "longer": lambda x: torch.nn.functional.pad(x.p.flatten(2), (0, 0, 1, 2)),
    "largest": lambda x: x.p[[0, 2]].amax(1),
    "attention": lambda x: tl.attention(x.p, x.p, x.p, causal=True),
    "attention in a window": lambda x: tl.attention(x.p, x.p, x.p, window=2),
    "scan": lambda x: tl.scan(step, x.h, x.p),
    "scan backwards": lambda x: tl.scan(step, x.h, x.p, reverse=True, checkpoints=2),
}


@pytest.mark.parametrize("use", USES)
def test_packed_tensors_wait_for_nothing(use: str) -> None:
    values = on_device(10, 2, 8)
    p, other = PackedTensor(values, LENS), PackedTensor(values, LENS)
    given = Given(p, other, on_device(4, 2, 8), on_device(4, 6, 8))
    with pretended.counted() as counts:
        USES[use](given)
    assert counts.syncs == []


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_rows_that_are_asked_on_the_cpu(checkpoints: int | None) -> None:
    """They stop as those that are asked on the device, and no question waits."""
    results = []
    for where, syncs in (("cpu", 0), ("cuda", 8)):
        h0, limits, times = on_device(5, 3).requires_grad_(), torch.tensor([4, 1, 0, 7, 2], device=where), count()
        with pretended.counted() as counts:
            h, steps = tl.while_loop(
                lambda h, limits=limits, times=times: limits > next(times),
                lambda h: torch.sin(2 * h),
                h0,
                checkpoints=checkpoints,
                return_steps=True,
            )
        assert len(counts.syncs) == syncs
        assert (h.device.type, steps.device.type, steps.tolist()) == ("cuda", "cuda", [4, 1, 0, 7, 2])
        results.append((h, *torch.autograd.grad(h.square().sum(), h0)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("rows", [False, True])
def test_a_fixed_point_waits_once_an_iteration(rows: bool) -> None:
    factor, x = torch.tensor([0.5, 0.1, 0.3], device="cuda", requires_grad=True), torch.ones(3, device="cuda")
    with pretended.counted() as counts:
        z, steps = tl.fixed_point(lambda z: factor * z + x, torch.zeros_like(x), rows=rows, return_steps=True)
    assert len(counts.syncs) == int(torch.as_tensor(steps).max())
    found = torch.autograd.grad(z.sum(), factor)[0]
    torch.testing.assert_close((z, found), (1 / (1 - factor), 1 / (1 - factor) ** 2), rtol=1e-4, atol=1e-4)


def test_elements_of_vmap_stop_each_by_an_answer_of_the_cpu() -> None:
    factor, given = torch.tensor([0.5, 0.1], device="cuda"), torch.ones(2, 3, device="cuda")

    def search(f: Tensor, x: Tensor) -> Any:
        return tl.fixed_point(lambda z: f * z + x, torch.zeros_like(x), return_steps=True)  # reads changes on the CPU

    found, steps = torch.func.vmap(search)(factor, given)
    torch.testing.assert_close(found, given / (1 - factor[:, None]), rtol=1e-4, atol=1e-4)
    assert steps.tolist() == [search(f, x)[1] for f, x in zip(factor, given, strict=True)]
