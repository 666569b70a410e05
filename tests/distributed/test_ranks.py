"""What ranks refuse together, DTensors and FSDP2 in loops, and ranks that die, in real processes."""

import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tests.support.processes import found_by, run_together

pytestmark = pytest.mark.usefixtures("on_the_cpu")  # its processes have no device

WORLD, SECONDS = 2, 120
D = torch.float64


def error_of(call: Callable[[], Any]) -> str:
    """What a call raises, with its class; what it gives where it raises nothing."""
    try:
        found = call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return f"gave {found}"


# -- refusals


def refusals(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (WORLD,))
    square = init_device_mesh("cpu", (2, 1))
    turned = DeviceMesh("cpu", [1, 0])

    def ones(*shape: int, dtype: Any = D, on: Any = mesh, total: int | None = None) -> Any:
        whole = torch.ones(total or shape[0] * WORLD, *shape[1:])
        return DTensor.from_local(
            torch.ones(*shape, dtype=dtype), on, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def twice() -> Any:
        x = ones(3, 2).requires_grad_()
        h: Any = tl.linear_recurrence(0.5, x)
        (first,) = torch.autograd.grad(h.to_local().square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.to_local().sum(), x)

    def without_gradients() -> Any:
        with torch.set_grad_enabled(rank == 0):
            return run(0.5, ones(3, 2))

    run: Any = tl.linear_recurrence
    scan: Any = tl.associative_scan
    group: Any = dist.new_group([0, 1])
    other: Any = dist.new_group([0])
    calls: dict[str, Callable[[], Any]] = {
        "features": lambda: run(0.5, ones(3, 2 + rank)),
        "dtype": lambda: run(0.5, ones(3, 2, dtype=torch.float32 if rank else D)),
        "empty batch": lambda: run(0.5, ones(3, 2 * rank)),
        "options": lambda: run(0.5, ones(3, 2), reverse=rank == 0),
        "gradients": without_gradients,
        "factors on one rank": lambda: run(ones(3, 2 + rank), ones(3, 2)),
        "odd zigzag": lambda: run(0.5, ones(3, 2), layout="zigzag"),
        "mesh": lambda: run(ones(3, 2, on=turned), ones(3, 2)),
        "plain factors": lambda: run(torch.ones(6, 2), ones(3, 2)),
        "plain b": lambda: run(ones(3, 2), torch.ones(6, 2)),
        "partial": lambda: run(0.5, DTensor.from_local(torch.ones(3, 2), mesh, [Partial()])),
        "layout": lambda: run(0.5, ones(3, 2), layout="striped"),
        "layout of plain": lambda: run(0.5, torch.ones(3, 2), layout="zigzag"),
        "both dims": lambda: run(0.5, distribute_tensor(torch.ones(8, 2), square, [Shard(0), Shard(0)])),
        "entries": lambda: run(0.5, tl.PackedTensor(ones(3 + rank, 2, total=6), [6])),
        "twice": twice,
        "func": lambda: torch.func.grad(lambda b: run(0.5, b).sum())(ones(3, 2)),
        "scan lengths": lambda: scan(torch.add, (ones(3), ones(2))),
        "scan layout": lambda: scan(torch.add, torch.ones(3), layout="zigzag"),
        "scan plain": lambda: scan(torch.add, (ones(3), torch.ones(6))),
        "fold": lambda: tl.distributed.exclusive_fold(torch.add, torch.zeros(2), torch.ones(2 + rank)),
        "fold fn": lambda: tl.distributed.exclusive_fold(None if rank else torch.add, torch.ones(1), torch.ones(1)),  # pyright: ignore
        "gather": lambda: tl.distributed.all_gather(torch.ones(2, 2 + rank)),
        "gather dim": lambda: tl.distributed.all_gather(torch.tensor(1.0)),
        "count": lambda: tl.distributed.count_over_all(-rank),
        "mesh of two dims": lambda: tl.distributed.count_over_all(1, group=square),
        "mean": lambda: tl.distributed.mean_over_all(torch.ones(4), 3),
        "rows": lambda: tl.while_loop(lambda h: h < 3, lambda h: h + 1, ones(3)),
        "array": lambda: tl.fori_loop(
            0, 2, lambda i, c: (c[0], c[1].append(c[0])), (ones(3), tl.TensorArray()), checkpoints=1
        ),
        "packed": lambda: tl.PackedTensor(ones(3, 2), [6]).sum(1),
    }
    found = {name: error_of(call) for name, call in calls.items()}
    found["member"] = error_of(lambda: tl.distributed.count_over_all(1, group=other))
    dist.destroy_process_group(group)
    return found | {"destroyed": error_of(lambda: tl.distributed.count_over_all(1, group=group))}


REFUSALS = {
    "features": r"ValueError: linear_recurrence: the ranks did not .*rank 0: .*b \(\*, 2\).*rank 1: .*b \(\*, 3\)",
    "dtype": r"ValueError: .*rank 0: .*b \(\*, 2\) float64.*rank 1: .*b \(\*, 2\) float32",
    "empty batch": r"ValueError: .*rank 0: .*b \(\*, 0\)",
    "options": r"ValueError: .*rank 0: .*reverse=True.*rank 1: .*reverse=False",
    "gradients": r"ValueError: .*rank 0: .*gradients=True.*rank 1: .*gradients=False",
    "factors on one rank": r"ValueError: linear_recurrence: on rank 1: a must broadcast to b, \(6, 2\), got shape",
    "odd zigzag": r"ValueError: linear_recurrence: on rank 0: b has 3 steps on this rank, which zigzag cuts in two",
    "mesh": r"TypeError: linear_recurrence: on rank 0: a must be a number or a DTensor on the mesh of b",
    "plain factors": r"TypeError: linear_recurrence: on rank 0: a must be .*, got a tensor of shape \(6, 2\)",
    "plain b": r"TypeError: linear_recurrence: b is a tensor .*, and another argument a DTensor; distribute_tensor\(b",
    "partial": r"ValueError: linear_recurrence: b is a sum still to be made.*; redistribute\(\) it first",
    "layout": r"ValueError: linear_recurrence: layout is 'striped'; there are 'contiguous', 'zigzag'",
    "layout of plain": r"ValueError: linear_recurrence: layout is 'zigzag', which is for DTensors",
    "both dims": r"ValueError: linear_recurrence: dims \[0, 1\] of the mesh both shard dim 0 of b",
    "entries": r"ValueError: linear_recurrence: the ranks have 7 entries together, and the lens of b sum to 6",
    "twice": r"RuntimeError: linear_recurrence: it has first derivatives alone where ranks share it",
    "func": r"RuntimeError: linear_recurrence: DTensors are taken eagerly, not under torch.func",
    "scan lengths": r"ValueError: associative_scan: on rank 0: xs\[1\] has 2 of 4 steps on this rank, xs\[0\] has 3",
    "scan layout": r"ValueError: associative_scan: layout is 'zigzag', which is for DTensors",
    "scan plain": r"TypeError: associative_scan: xs\[1\] is no DTensor, and another leaf is",
    "fold": r"ValueError: distributed.exclusive_fold: the ranks did not .*rank 0: .*x \(2\).*rank 1: .*x \(3\)",
    "fold fn": r"TypeError: distributed.exclusive_fold: on rank 1: fn must be callable, got NoneType",
    "gather": r"ValueError: distributed.all_gather: the ranks did not .*x \(\*, 2\).*x \(\*, 3\)",
    "gather dim": r"ValueError: distributed.all_gather: on rank 0: x has no dim 0 to join.*unsqueeze",
    "count": r"ValueError: distributed.count_over_all: on rank 1: entries must be at least 0, got -1",
    "mesh of two dims": r"ValueError: distributed.count_over_all: group is a mesh of 2 dims, .*; name the dim: mesh\[",
    "mean": r"ValueError: distributed.mean_over_all: count is 3, and there are 4 losses here alone",
    "rows": r"TypeError: while_loop: cond_fn gave a bool for each row of a DTensor.*x.to_local\(\)",
    "array": r"TypeError: fori_loop: with checkpoints an array in the carry holds plain tensors",
    "packed": r"TypeError: sum: values that are a DTensor are taken entry by entry",
    "destroyed": r"RuntimeError: distributed.count_over_all: group is of no use here: it was destroyed",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_all_ranks_refuse_alike(folder: Path, name: str):
    first, second = (found[name] for found in found_by(folder, refusals))
    assert re.match(REFUSALS[name], first, re.DOTALL), first
    assert first.partition("ProcessGroup object at")[0] == second.partition("ProcessGroup object at")[0]


def test_who_is_not_in_a_group_may_not_call(folder: Path):
    inside, outside = (found["member"] for found in found_by(folder, refusals))
    assert inside == "gave 1"
    assert "this process is not in it" in outside


# -- loops over DTensors, layers of FSDP2


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoints": {"checkpoints": 2},
    "budget": {"checkpoints": tl.Checkpoints(budget=4000)},
    "compile": {"compile": True},
    "both": {"compile": True, "checkpoints": 2},
    "auto": {"compile": "auto"},
}
PLACES = {
    "batch": (Shard(1), Shard(0), Replicate()),
    "features": (Shard(2), Shard(1), Replicate()),
    "whole": (Replicate(), Replicate(), Replicate()),
    "weights": (Replicate(), Replicate(), Shard(1)),
}


def dtensors(rank: int) -> list[str]:
    """The cells (place, options) of a scan with ys, and of a map, that are as in one process."""
    mesh, made = init_device_mesh("cpu", (WORLD,)), torch.Generator().manual_seed(0)
    xs, h, w = (torch.randn(shape, dtype=D, generator=made) * 0.6 for shape in ((6, 4, 3), (4, 3), (3, 3)))

    def run(xs: Any, h: Any, w: Any, options: dict[str, Any]) -> list[Any]:
        last, ys = tl.scan(lambda h, x: ((h @ w + x).tanh(), h * 2), h, xs, **options)
        doubled = tl.map(lambda x: x * 2, ys.detach())
        loss = last.sum() + ys.square().sum()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        return [last, ys, w.grad, doubled]

    want = run(xs, h, w.clone().requires_grad_(), {})
    right = []
    for place, kinds in PLACES.items():
        for name, options in OPTIONS.items():
            placed: list[Any] = [distribute_tensor(x, mesh, [k]) for x, k in zip((xs, h, w), kinds, strict=True)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found: list[Any] = run(placed[0], placed[1], placed[2].requires_grad_(), options)
            if all(torch.allclose(x.full_tensor(), y) for x, y in zip(found, want, strict=True)):
                right.append(f"{place} {name}")
    return right


class Layers(nn.Module):
    """Two layers in the body of a loop; `again`: run again in backward by torch.utils.checkpoint."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.out, self.again = nn.GRUCell(3, 4), nn.Linear(4, 4), again
        self.to(D)

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        return self.out(self.cell(x, h))

    def forward(self, xs: Tensor, options: dict[str, Any]) -> Tensor:
        def body(h: Tensor, x: Tensor) -> Any:
            new: Any = checkpoint(self.step, h, x, use_reentrant=False) if self.again else self.step(h, x)
            return new, h

        h, ys = tl.scan(body, xs.new_zeros(xs.shape[1], 4), xs, **options)
        return h.sum() + ys.square().sum()


def layers_of_fsdp(rank: int) -> dict[str, str]:
    init_device_mesh("cpu", (WORLD,))
    xs = torch.randn(5, 2, 3, dtype=D, generator=torch.Generator().manual_seed(2))
    one = Layers()
    one(xs, {}).backward()
    want = {name: x.grad for name, x in one.named_parameters()}
    found = {}

    def gradients(module: Layers, options: dict[str, Any]) -> str:
        for _ in range(2):  # the second call finds the module prepared
            module.zero_grad()
            module(xs, options).backward()
        grads: Any = {name: x.grad for name, x in module.named_parameters()}
        return "as one process" if all(torch.allclose(grads[n].full_tensor(), want[n]) for n in want) else "others"  # pyright: ignore

    for name, options in OPTIONS.items():
        for way in ("layers", "loop", "again"):
            module = Layers(way == "again")
            for layer in [module.cell, module.out] if way != "loop" else []:
                fully_shard(layer)
            fully_shard(module)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[f"{way} {name}"] = error_of(lambda module=module, options=options: gradients(module, options))
    return found


def collectives(rank: int) -> dict[str, Any]:
    """Collectives in the body, in place and functional: with replays, and compiled, as one by one."""
    x = torch.full((3,), 1.0 + rank, dtype=D, requires_grad=True)
    group: Any = dist.group.WORLD

    def in_place(h: Tensor) -> Tensor:
        total = h.detach().clone()
        dist.all_reduce(total)
        return h * 0.5 + total * 0.1

    def later(h: Tensor) -> Tensor:
        total = h.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait()
        return h * 0.5 + total * 0.1

    ways = {
        "in place": in_place,
        "async": later,
        "functional": lambda h: h * 0.5 + functional.all_reduce(h.detach(), "sum", group) * 0.1,
    }
    found = {}
    for way, body in ways.items():
        for name, options in OPTIONS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                h = tl.fori_loop(0, 5, lambda i, h, body=body: body(h), x, **options)
                found[way, name] = h.detach(), torch.autograd.grad(h.sum(), x)[0]
            dist.barrier()
    return found


PROGRAMS = [refusals, dtensors, layers_of_fsdp, collectives]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_together(folder, PROGRAMS, SECONDS, WORLD)
    return folder


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("place", PLACES)
def test_loops_over_dtensors(folder: Path, place: str, options: str):
    for right in found_by(folder, dtensors):
        assert f"{place} {options}" in right


@pytest.mark.parametrize("options", OPTIONS)
def test_layers_of_fsdp_in_the_body(folder: Path, options: str):
    """Right, or refused with a cure: the loop's own module as a unit, or torch's checkpoints around the layers."""
    for found in found_by(folder, layers_of_fsdp):
        if "checkpoints" not in OPTIONS[options]:
            assert found[f"layers {options}"] == found[f"again {options}"] == "gave as one process"
        else:
            assert "the body calls FSDPGRUCell, a module of FSDP" in found[f"layers {options}"]
            assert "Give fully_shard() the module that runs the whole loop" in found[f"layers {options}"]
        assert found[f"loop {options}"] == "gave as one process"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", ["in place", "async", "functional"])
def test_collectives_in_the_body(folder: Path, way: str, options: str):
    for rank, found in enumerate(found_by(folder, collectives)):
        h, total = torch.full((3,), 1.0 + rank, dtype=D), 3.0
        for _ in range(5):
            h, total = h * 0.5 + total * 0.1, total * 0.7
        torch.testing.assert_close(found[way, options], (h, torch.full((3,), 0.5**5, dtype=D)))


# -- ranks that die or raise


def last_words(rank: int, leaves: Callable[[int], None]) -> dict[str, Any]:
    """What the living ranks are told where rank 1 leaves in the middle of a training."""
    mesh = init_device_mesh("cpu", (3,))
    x = torch.ones(4, 2, dtype=D, requires_grad=True)
    h: Any = tl.linear_recurrence(0.5, DTensor.from_local(x, mesh, [Shard(0)]))
    h.to_local().sum().backward()
    if rank == 1:
        leaves(rank)
    begin = time.monotonic()
    try:
        tl.linear_recurrence(0.5, DTensor.from_local(x, mesh, [Shard(0)]))
    except RuntimeError as error:
        return {"said": str(error), "seconds": time.monotonic() - begin}
    return {"said": "nothing", "seconds": 0}


def killed(rank: int) -> Any:
    return last_words(rank, lambda rank: os.kill(os.getpid(), signal.SIGKILL))


def hangs(rank: int) -> Any:
    return last_words(rank, lambda rank: time.sleep(60))


@pytest.mark.parametrize("program", [killed, hangs])
def test_living_ranks_are_told(tmp_path: Path, program: Any):
    limit = 4
    run_together(tmp_path, [program], 30, 3, limit, go_on=True)
    for rank in (0, 2):
        found = torch.load(tmp_path / f"{program.__name__}.{rank}")
        assert found["said"].startswith("linear_recurrence: a message between the 3 ranks failed on rank")
        assert "has not made this call within the group's timeout" in found["said"]
        assert found["seconds"] < 3 * limit
