"""Loops in two processes: DDP over checkpointed loops, ranks with other step counts, collectives in a body.

Both processes run every program once, in the order of PROGRAMS, and leave what they found in files. Each test looks
at one of them and compares it with one process on the joined batch.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tensorloop as tl
from tests.support.loop_cases import with_and_without_checkpoints
from tests.support.processes import found_by, run_together

pytestmark = pytest.mark.usefixtures("on_the_cpu")  # its processes have no device

WORLD = 2
T, B, F = 7, 6, 4
D = torch.float64
SECONDS = 60  # for all programs together; a deadlock ends here, or at the collective's own limit
CHECKPOINTS = [None, 1, 3]


# -- modules


class Rotated(nn.Module):
    """A recurrence that neither contracts nor grows, and a layer after it."""

    def __init__(self, checkpoints: int | None) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        generator = torch.Generator().manual_seed(3)
        self.turn = nn.Parameter(torch.linalg.qr(torch.randn(F, F, dtype=D, generator=generator))[0])
        self.bias = nn.Parameter(torch.randn(F, dtype=D, generator=generator))
        self.last = nn.Parameter(torch.randn(F, 2, dtype=D, generator=generator))

    def turned(self, h: Tensor) -> Tensor:
        return h @ self.turn + (h + self.bias).sin()


class Scanned(Rotated):
    def forward(self, xs: Tensor) -> Tensor:
        h, ys = tl.scan(lambda h, x: (self.turned(h) + x, h.cos()), xs[0], xs, checkpoints=self.checkpoints)
        return (h + ys.mean(0)) @ self.last


class Repeated(Rotated):
    """As many steps as the batch asks for; `rows`: each row as many as it asks for."""

    def __init__(self, checkpoints: int | None, rows: bool = False) -> None:
        super().__init__(checkpoints)
        self.rows = rows

    def forward(self, xs: Tensor, steps: Tensor | None = None) -> Tensor:
        """xs (T, B, F); steps (B,), T where not given."""
        wanted = torch.full(xs.shape[1:2], len(xs)) if steps is None else steps

        def goes_on(carry: tuple[Tensor, Tensor]) -> Tensor:
            rows = carry[1] < wanted
            return rows if self.rows else rows.any()

        def step(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.turned(carry[0]), carry[1] + 1

        init = (xs.sum(0), torch.zeros_like(wanted))
        h, _ = tl.while_loop(goes_on, step, init, checkpoints=self.checkpoints)
        return h @ self.last


class Sum(torch.autograd.Function):
    """The sum over the processes of a group. Each of them uses it, so its gradient is their gradients' sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, log: list[str]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.log = group, log
        log.append("sum")
        return total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.log.append("gradient")
        return total(grads[0], ctx.group), None, None


def total(x: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    x = x.detach().clone()
    if group is not None:
        dist.all_reduce(x, op, group)
    return x


class InStep(Rotated):
    """Rows that stop on their own while all processes take the same steps: the body centres the rows that still run.

    The mean is over the running rows of all processes, as in a batch norm that is shared. `mean` follows it.
    """

    def __init__(self, checkpoints: int | None, group: Any, dropout: float = 0.0) -> None:
        super().__init__(checkpoints)
        self.group, self.dropout = group, dropout
        self.log: list[str] = []
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(F, dtype=D))

    def goes_on(self, carry: tuple[Tensor, Tensor]) -> Tensor:
        self.log.append("ask")
        return total((carry[1] > 0).any().int(), self.group, dist.ReduceOp.MAX) > 0

    def step(self, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, left = carry
        runs = (left > 0).to(D)[:, None]
        new = nn.functional.dropout(self.turned(h), self.dropout, self.training)
        mean, share = self.means(new * runs, runs)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
        return torch.where(runs > 0, new - mean / share, h), left - 1

    def means(self, *xs: Tensor) -> tuple[Tensor, ...]:
        sums: Any = Sum.apply(torch.cat([x.sum(0) for x in xs]), self.group, self.log)
        return tuple((sums / (WORLD * B)).split([x.shape[1] for x in xs]))

    def forward(self, xs: Tensor, steps: Tensor) -> Tensor:
        h, _ = tl.while_loop(self.goes_on, self.step, (xs.sum(0), steps.clone()), checkpoints=self.checkpoints)
        return h @ self.last


def data(rank: int | None = None) -> tuple[Tensor, Tensor]:
    """xs (T, B, F) and steps (B,) of one process; without a rank, of all processes together."""
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(T, WORLD * B, F, dtype=D, generator=generator)
    steps = torch.tensor([1, 4, 2, 0, 3, 1, 9, 2, 6, 5, 0, 7])  # rank 0 is done after 4, rank 1 after 9
    rows = slice(None) if rank is None else slice(rank * B, (rank + 1) * B)
    return xs[:, rows], steps[rows]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    grads = {name: x.grad for name, x in module.named_parameters()}
    return {name: grad.clone() for name, grad in grads.items() if grad is not None}


# -- what both processes run: program(rank) -> something to save


def under_ddp(rank: int) -> Any:
    """Gradients, and how often each hook was called in each backward."""
    xs, _ = data(rank)
    found = {}
    for kind in (Scanned, Repeated):
        for k in CHECKPOINTS:
            for unused in (False, True):
                module = kind(k)
                fired: Counter[tuple[str, str]] = Counter()
                count_hooks(module, fired)
                wrapped = DistributedDataParallel(module, find_unused_parameters=unused)
                counts = []
                for _ in range(2):  # DDP prepares each backward by what the one before it did
                    module.zero_grad()
                    fired.clear()
                    wrapped(xs).square().mean().backward()
                    counts.append(dict(fired))
                found[kind.__name__, k, unused] = (gradients(module), counts)
    return found


def count_hooks(module: nn.Module, fired: Counter[tuple[str, str]]) -> None:
    for name, x in module.named_parameters():
        x.register_hook(lambda grad, name=name: fired.update([("gradient", name)]))
        x.register_post_accumulate_grad_hook(lambda x, name=name: fired.update([("accumulated", name)]))


def other_counts(rank: int) -> Any:
    """Gradients where the processes take 4 and 9 steps."""
    xs, steps = data(rank)
    found = {}
    for rows in (False, True):
        for k in CHECKPOINTS:
            wrapped = DistributedDataParallel(Repeated(k, rows))
            wrapped(xs, steps).square().mean().backward()
            found[rows, k] = gradients(wrapped.module)
    return found


def no_steps(rank: int) -> Any:
    """Gradients where rank 1 takes no step: its loop uses no parameter."""
    xs, steps = data(rank)
    wrapped = DistributedDataParallel(Repeated(3), find_unused_parameters=True)
    wrapped(xs, steps * (rank == 0)).square().mean().backward()
    return gradients(wrapped.module)


def in_step(rank: int) -> Any:
    """Weights and losses of a training whose body holds a collective; the order in which collectives ran."""
    group = dist.new_group()
    return {k: trained(InStep(k, group), *data(rank), DistributedDataParallel) for k in CHECKPOINTS}


def in_step_with_dropout(rank: int) -> Any:
    group = dist.new_group()
    found = {}
    for k in CHECKPOINTS:
        torch.manual_seed(rank)
        found[k] = trained(InStep(k, group, dropout=0.3), *data(rank), DistributedDataParallel)
    return found


def trained(module: InStep, xs: Tensor, steps: Tensor, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    wrapped = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = wrapped(xs, steps).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), "log": list(module.log), "state": dict(module.state_dict())}


LENS = [3, 5, 1, 7, 2, 2, 6, 4, 3, 1, 9]


def ragged_examples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(n, F, dtype=D, generator=generator) for n in LENS]


def loss_of_entries(module: nn.Module, p: Any, group: Any = None) -> Tensor:
    """The mean over the entries of all processes, whose gradients DDP divides by their number."""
    count = total(torch.tensor(float(p.values.shape[0]), dtype=D), group)
    return module(p.values).square().sum() * (WORLD if group is not None else 1) / count


def packed_batches(rank: int) -> Any:
    """Gradients of every step, where the batches of processes have unequal numbers of entries, and these batches."""
    data, found = ragged_examples(), []
    sampler = tl.packed.BatchSampler(LENS, max_entries=10, seed=4)
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Linear(F, 2).to(D))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=tl.packed.collate)  # pyright: ignore
        for batch, p in zip(sampler, loader, strict=True):
            wrapped.zero_grad()
            loss_of_entries(wrapped, p, dist.group.WORLD).backward()
            found.append((batch, gradients(wrapped.module)))
    return found


PROGRAMS: list[Callable[[int], Any]] = [
    under_ddp,
    other_counts,
    no_steps,
    in_step,
    in_step_with_dropout,
    packed_batches,
]


# -- the two processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    run_together(folder, PROGRAMS, SECONDS)
    return folder


def of_one_process(module: nn.Module, *given: Tensor) -> dict[str, Tensor]:
    """The gradients that the joined batch gives in this process."""
    module(*given).square().mean().backward()
    return gradients(module)


# -- tests


@with_and_without_checkpoints
@pytest.mark.parametrize("unused", [False, True], ids=["plain", "find_unused_parameters"])
@pytest.mark.parametrize("kind", [Scanned, Repeated])
def test_ddp_gives_the_gradients_of_one_process(folder: Path, kind: Any, unused: bool, checkpoints: Any):
    expected = of_one_process(kind(None), data()[0])
    assert expected.keys() == {"turn", "bias", "last"}
    for found in found_by(folder, under_ddp):
        torch.testing.assert_close(found[kind.__name__, checkpoints, unused][0], expected)


@with_and_without_checkpoints
@pytest.mark.parametrize("unused", [False, True], ids=["plain", "find_unused_parameters"])
@pytest.mark.parametrize("kind", [Scanned, Repeated])
def test_each_hook_is_called_once_a_backward(folder: Path, kind: Any, unused: bool, checkpoints: Any):
    once = {(what, name): 1 for what in ("gradient", "accumulated") for name in ("turn", "bias", "last")}
    for found in found_by(folder, under_ddp):
        assert found[kind.__name__, checkpoints, unused][1] == [once, once]


def test_packed_batches_of_unequal_size_give_the_gradients_of_the_joined_batch(folder: Path):
    data, found = ragged_examples(), found_by(folder, packed_batches)
    assert len(found[0]) == len(found[1])
    for (one, grads), (other, same) in zip(*found, strict=True):
        torch.manual_seed(0)
        module = nn.Linear(F, 2).to(D)
        loss_of_entries(module, tl.packed.collate([data[i] for i in one + other])).backward()
        torch.testing.assert_close(grads, gradients(module))
        torch.testing.assert_close(same, grads)
    for epoch in range(2):  # every example once
        half = len(found[0]) // 2
        steps = [step for rank in found for step in rank[epoch * half : (epoch + 1) * half]]
        assert sorted(i for batch, _ in steps for i in batch) == list(range(len(LENS)))


@with_and_without_checkpoints
@pytest.mark.parametrize("rows", [False, True], ids=["whole", "rows"])
def test_processes_may_take_different_numbers_of_steps(folder: Path, rows: bool, checkpoints: Any):
    each = [of_one_process(Repeated(None, rows), *data(rank)) for rank in range(WORLD)]
    expected = {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}
    for found in found_by(folder, other_counts):
        torch.testing.assert_close(found[rows, checkpoints], expected)


def test_a_process_may_take_no_step_where_ddp_looks_for_unused_parameters(folder: Path):
    each = [of_one_process(Repeated(None), xs, steps * (1 - r)) for r in range(WORLD) for xs, steps in [data(r)]]
    assert each[1].keys() == {"last"}
    expected = {name: (grad + each[1].get(name, 0)) / 2 for name, grad in each[0].items()}
    for found in found_by(folder, no_steps):
        torch.testing.assert_close(found, expected)


@with_and_without_checkpoints
def test_a_body_with_a_collective_trains_as_one_process_does(folder: Path, checkpoints: Any):
    alone = trained(InStep(None, None), *data(), lambda module: module)
    each = [found[checkpoints] for found in found_by(folder, in_step)]
    for found in each:
        torch.testing.assert_close(found["state"], alone["state"])
    torch.testing.assert_close((each[0]["losses"] + each[1]["losses"]) / 2, alone["losses"])
    assert alone["state"]["mean"].any()


@with_and_without_checkpoints
@pytest.mark.parametrize("program", [in_step, in_step_with_dropout])
def test_collectives_run_in_one_order_in_all_processes(folder: Path, program: Any, checkpoints: Any):
    first, second = (found[checkpoints]["log"] for found in found_by(folder, program))
    assert first == second
    assert first.count("gradient") == 3 * 9  # once for each step of three trainings
    assert first[:20] == ["ask", "sum"] * 9 + ["ask", "gradient" if checkpoints is None else "sum"]


@with_and_without_checkpoints
def test_a_replay_asks_no_condition_again(folder: Path, checkpoints: Any):
    for found in found_by(folder, in_step):
        counts = Counter(found[checkpoints]["log"])
        assert counts["ask"] == 3 * 10
        assert counts["sum"] == 3 * 9 if checkpoints is None else counts["sum"] >= 3 * 18


def test_where_random_numbers_were_drawn_a_replay_asks_again(folder: Path):
    for found in found_by(folder, in_step_with_dropout):
        asked = {k: found[k]["log"].count("ask") for k in CHECKPOINTS}
        assert asked[None] == 3 * 10 < min(asked[1], asked[3])


@pytest.mark.parametrize("k", [1, 3])
def test_dropout_in_such_a_body_is_replayed_as_it_was(folder: Path, k: int):
    for found in found_by(folder, in_step_with_dropout):
        torch.testing.assert_close(found[k]["state"], found[None]["state"])
        torch.testing.assert_close(found[k]["losses"], found[None]["losses"])
