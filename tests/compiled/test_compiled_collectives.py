"""Collectives in a compiled body: their results come later, so they are refused; eager loops wait as the body does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import _functional_collectives as functional

import tensorloop as tl


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def everyone() -> Any:
    return dist.group.WORLD


def in_place(x: Tensor) -> Tensor:
    x = x.detach().clone()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "reduce_scatter_tensor": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, everyone()),
    "all_reduce": lambda x: functional.all_reduce(x, "sum", everyone()),
    "all_gather_into_tensor": lambda x: functional.all_gather_tensor(x, 0, everyone()),
    "all_to_all_single": lambda x: functional.permute_tensor(x, [0], everyone()),
    "allreduce_": in_place,
}


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_collectives(name: str):
    h = torch.linspace(0, 1, 99, requires_grad=True)

    def run(**options: Any) -> list[Tensor]:
        last, ys = tl.scan(lambda h, _: ((CALLS[name](h * 1.5) + h).sin(), h), h, length=4, **options)
        return [last, ys, *torch.autograd.grad(last.sum(), h)]

    with pytest.raises(RuntimeError, match=r"not compiled: \w+\(\) runs between processes, and may go on after"):
        run(compile="strict")
    torch.testing.assert_close(run(compile=False, checkpoints=2), run(compile=False))
