"""Trains a state-space layer whose time dim processes share, and goes on from its last state where one was killed.

    torchrun --standalone --nproc_per_node=2 -m docs.examples.shards.train --state state.pt
    ... --die-at 5    # process 1 kills itself there; the first command again ends with the same numbers

The state is written after each step by the first process: first beside the old one, then put in its place, so that
whenever a process is killed there is a whole one. Who is left raises and ends, torchrun with it, and the same command
goes on: `until torchrun ...; do sleep 1; done`.
"""

import os
import signal
from argparse import ArgumentParser
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tensorloop as tl
from docs.examples.shards.layers import StateSpace

T, B, F = 24, 4, 3


def main() -> None:
    """One process."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--die-at", type=int, default=-1)
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = nn.ModuleList([StateSpace(F), nn.Linear(F, 1)]).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    begin, losses = 0, []
    if options.state.exists():
        saved = torch.load(options.state)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin, losses = saved["step"], saved["losses"]
    for step in range(begin, options.steps):
        made = torch.Generator().manual_seed(step)
        x = torch.randn(T, B, F, dtype=torch.float64, generator=made)
        wanted = x.cumsum(0).sin().mean(-1)
        mine = slice(rank * T // size, (rank + 1) * T // size)
        errors = (model[1](model[0](x[mine], mesh)).squeeze(-1) - wanted[mine]).square()
        if (step, rank) == (options.die_at, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = tl.distributed.mean_over_all(errors, T * B, averaged=False)
        optimizer.zero_grad()
        loss.backward()
        total = torch.cat([loss.detach().view(1), *(weight.grad.view(-1) for weight in model.parameters())])  # pyright: ignore
        dist.all_reduce(total)
        for weight, grad in zip(
            model.parameters(), total[1:].split([w.numel() for w in model.parameters()]), strict=True
        ):
            weight.grad = grad.view_as(weight)
        optimizer.step()
        losses.append(total[0].item())
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            new = options.state.with_suffix(".new")
            torch.save(state | {"step": step + 1}, new)
            new.replace(options.state)
    if rank == 0:
        print("losses", *(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
