"""The example of time in shards: layers as in one process, and a training that a killed process does not change."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from docs.examples.shards.layers import DeltaRule, StateSpace, advantages
from tests.support.processes import found_by, run_together

pytestmark = pytest.mark.usefixtures("on_the_cpu")  # its processes have no device

ROOT = Path(__file__).parents[2]
WORLD, T, B, F = 3, 12, 2, 4


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def layers(rank: int) -> None:
    mesh, here = init_device_mesh("cpu", (WORLD,)), slice(rank * T // WORLD, (rank + 1) * T // WORLD)
    x = torch.randn(T, B, F, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for kind in (StateSpace, DeltaRule):
        torch.manual_seed(1)
        layer: Any = kind(F).double()
        whole = layer(x)
        want = torch.autograd.grad(whole.square().sum(), [*layer.parameters()])
        mine = layer(x[here], mesh)
        close(mine, whole[here])
        for grad, other in zip(torch.autograd.grad(mine.square().sum(), [*layer.parameters()]), want, strict=True):
            dist.all_reduce(grad)
            close(grad, other)
    rewards, values = x[..., 0], x[..., 1]
    done = x[..., 2] > 0.8
    want = advantages(rewards, values, done, x[0, :, 3])
    close(advantages(rewards[here], values[here], done[here], x[0, :, 3], mesh), want[here])
    by_hand, after = torch.zeros(T, B, dtype=torch.float64), torch.zeros(B, dtype=torch.float64)
    following = torch.cat([values[1:], x[:1, :, 3]])
    for t in reversed(range(T)):
        on = 0.99 * (~done[t]).double()
        after = by_hand[t] = rewards[t] + on * following[t] - values[t] + 0.95 * on * after
    close(want, by_hand)


def test_layers_are_as_in_one_process(tmp_path: Path):
    run_together(tmp_path, [layers], 60, WORLD)
    assert found_by(tmp_path, layers, WORLD) == [None] * WORLD


def train(state: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "docs.examples.shards.train", "--state", str(state), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def train_until_done(state: Path) -> "subprocess.CompletedProcess[str]":
    """As the example says: the same command again while it fails, since a loaded machine makes gloo fail at times."""
    for _ in range(4):
        done = train(state)
        if done.returncode == 0:
            return done
    return train(state)


def test_a_killed_process_changes_nothing(tmp_path: Path):
    whole, state = train_until_done(tmp_path / "whole.pt"), tmp_path / "killed.pt"
    killed = train(state, "--die-at", "5")
    assert killed.returncode != 0
    assert "exitcode: -9" in killed.stderr
    assert "linear_recurrence, in backward: a message between the 2 ranks failed on rank 0" in killed.stderr
    assert torch.load(state)["step"] == 5
    again = train_until_done(state)
    assert (whole.returncode, again.returncode) == (0, 0), again.stderr
    assert whole.stdout.startswith("losses")
    assert whole.stdout == again.stdout
    states = [torch.load(path)["model"] for path in (tmp_path / "whole.pt", state)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
