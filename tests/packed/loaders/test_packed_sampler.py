"""Batches by their number of entries: what is in them, how full they are, and what processes share out."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tensorloop.packed import BatchSampler, collate

LENGTHS = st.lists(st.integers(0, 9), max_size=30)


@settings(max_examples=100)
@given(
    lens=LENGTHS,
    most=st.integers(9, 30),
    rows=st.none() | st.integers(1, 4),
    world=st.integers(1, 4),
    shuffle=st.booleans(),
    drop=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_example_once_in_batches_that_fit(
    lens: list[int], most: int, rows: int | None, world: int, shuffle: bool, drop: bool, epoch: int
) -> None:
    plans = []
    for rank in range(world):
        sampler = BatchSampler(lens, most, max_rows=rows, shuffle=shuffle, drop_last=drop, rank=rank, world_size=world)
        sampler.set_epoch(epoch)
        plans.append(list(sampler))
        assert list(sampler) == plans[-1]
        assert len(sampler) == len(plans[-1])
    assert len({len(plan) for plan in plans}) == 1
    batches = [batch for plan in plans for batch in plan]
    for batch in batches:
        assert batch
        assert sum(lens[i] for i in batch) <= most
        assert rows is None or len(batch) <= rows
    found = [i for batch in batches for i in batch]
    if drop:
        assert len(set(found)) == len(found)
    else:
        assert set(found) == set(range(len(lens)))
        once = len(set(found)) == len(found)
        assert once or all(len(batch) == 1 for batch in batches)  # nothing was left to divide


def test_in_order() -> None:
    lens = [5, 2, 4, 3, 1, 0]
    assert list(BatchSampler(lens, 6, shuffle=False)) == [[0], [1, 2], [3, 4, 5]]
    assert list(BatchSampler(lens, 6, shuffle=False, max_rows=1)) == [[i] for i in range(6)]
    assert list(BatchSampler(torch.tensor(lens), 6, shuffle=False, drop_last=True)) == [[0], [1, 2]]
    both = [list(BatchSampler(lens, 6, shuffle=False, rank=r, world_size=2)) for r in (0, 1)]
    assert both == [[[0], [3]], [[1, 2], [4, 5]]]
    assert list(BatchSampler([], 6)) == []


def test_epochs_and_seeds() -> None:
    lens = torch.randint(1, 50, (300,), device="cpu", generator=torch.Generator().manual_seed(0))

    def plan(seed: int, epoch: int) -> list[list[int]]:
        sampler = BatchSampler(lens, 500, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert plan(0, 1) == plan(0, 1)
    assert plan(0, 1) != plan(0, 2)
    assert plan(0, 0) != plan(3, 0)


def test_batches_are_full_and_of_like_lengths() -> None:
    """Lengths as of speech: 1 to 30 seconds in frames; four processes."""
    lens = torch.randint(100, 3000, (5000,), device="cpu", generator=torch.Generator().manual_seed(1))
    most, world = 40_000, 4
    plans = [list(BatchSampler(lens, most, rank=rank, world_size=world)) for rank in range(world)]
    batches = [lens[batch] for plan in plans for batch in plan]
    filled = sum(int(n.sum()) for n in batches)
    assert filled == int(lens.sum())
    assert filled / (len(batches) * most) > 0.96
    padded = sum(int(n.max()) * len(n) for n in batches)
    assert filled / padded > 0.9  # of what a padded batch of these would hold
    longest = [[int(lens[batch].max()) for batch in plan] for plan in plans]
    apart = [max(step) / min(step) for step in zip(*longest, strict=True)]
    assert sorted(apart)[len(apart) // 2] < 1.3  # processes wait little for each other's steps


def test_in_a_data_loader() -> None:
    data: Any = [torch.full((n, 2), float(n)) for n in (3, 0, 5, 2, 4)]
    sampler = BatchSampler([len(x) for x in data], max_entries=7, seed=1)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    assert len(loader) == len(sampler)
    for batch, p in zip(sampler, loader, strict=True):
        assert p.lens.tolist() == [len(data[i]) for i in batch]


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("too long", lambda: BatchSampler([3, 9], 8), ValueError, r"lens\[1\] is 9, more than max_entries, 8; leave such"),
    ("negative", lambda: BatchSampler([3, -1], 8), ValueError, r"lens\[1\] is -1"),
    ("no room", lambda: BatchSampler([0], 0), ValueError, "max_entries must be at least 1, got 0"),
    ("no rows", lambda: BatchSampler([0], 1, max_rows=0), ValueError, "max_rows must be at least 1, got 0"),
    ("half a place", lambda: BatchSampler([0], 1, rank=0), TypeError, "rank and world_size go together"),
    ("no place", lambda: BatchSampler([0], 1, rank=2, world_size=2), ValueError, "rank must be from 0 to 1, got 2"),
    ("a number", lambda: BatchSampler(3, 8), TypeError, "lens must be a Dim"),  # pyright: ignore
    ("floats", lambda: BatchSampler([3], 8.5), TypeError, "max_entries must be an int"),  # pyright: ignore
]


@pytest.mark.parametrize("name", [case[0] for case in REFUSED])
def test_what_is_refused(name: str) -> None:
    _, fn, kind, text = next(case for case in REFUSED if case[0] == name)
    with pytest.raises(kind, match=f"(packed.BatchSampler|Dim): .*{text}"):
        fn()


# -- deals to processes, states


def speech(n: int) -> torch.Tensor:
    """Lengths as of read sentences in frames: most about 1,400, the others from 100 on."""
    made = torch.Generator().manual_seed(0)
    peak = torch.normal(1420.0, 130.0, (n,), generator=made)
    tail = 100 + 1500 * torch.rand(n, generator=made) ** 0.8
    return torch.where(torch.rand(n, generator=made) < 0.65, peak, tail).clamp(100, 2450).long()


COSTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "length": lambda n: n,
    "attention": lambda n: 3000 * n + n * n,
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("most", [20_000, 60_000])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_processes_have_like_costs(size: int, most: int, cost: str):
    lens = speech(4000)
    costs = COSTS[cost](lens).double()
    plans = [list(BatchSampler(lens, most, rank=rank, world_size=size, cost=COSTS[cost])) for rank in range(size)]
    loads = torch.tensor([[float(costs[batch].sum()) for batch in plan] for plan in plans])
    assert max(int(lens[batch].sum()) for plan in plans for batch in plan) <= most
    assert sorted(i for plan in plans for batch in plan for i in batch) == list(range(len(lens)))
    # No deal of a step is below its mean, nor below its costliest example.
    largest = torch.tensor([max(float(costs[i]) for plan in plans for i in plan[t]) for t in range(len(plans[0]))])
    bound = torch.maximum(loads.mean(0), largest)
    # The last step has what was left.
    assert loads.amax(0)[:-1].sum() <= 1.02 * bound[:-1].sum()


def taken(lens: Any, size: int, states: list[Any], steps: int, **options: Any) -> tuple[list[int], Any]:
    """What so many processes hand out in some steps after a state, and the state then."""
    found, state = [], None
    for rank in range(size):
        sampler = BatchSampler(lens, 12, rank=rank, world_size=size, **options)
        sampler.set_epoch(2)
        if states:
            sampler.load_state_dict(states[-1])
        batches = iter(sampler)
        found += [i for _ in range(min(steps, len(sampler))) for i in next(batches)]
        assert state is None or state == sampler.state_dict()
        state = sampler.state_dict()
    return found, state


@pytest.mark.parametrize("seed", range(8))
def test_a_state_goes_on_in_any_number_of_processes(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    lens = [rng.randint(1, 8) for _ in range(150)]
    options = {"shuffle": seed % 2 == 0, "seed": seed, "max_rows": rng.choice([None, 3])}
    handed, states = [], []
    for _ in range(4):
        some, state = taken(lens, rng.randint(1, 5), states, rng.randint(0, 4), **options)
        handed += some
        torch.save(state, tmp_path / "state")
        states.append(torch.load(tmp_path / "state", weights_only=True))
    some, _ = taken(lens, rng.randint(1, 3), states, 1000, **options)
    assert sorted(handed + some) == list(range(len(lens)))


def test_a_state_in_as_many_processes_goes_on_with_the_same_batches():
    one = BatchSampler(speech(300), 10_000, seed=1)
    batches = list(one)
    state = one.state_dict(steps=5)
    other = BatchSampler(speech(300), 10_000, seed=1)
    other.load_state_dict(state)
    other.set_epoch(0)  # as loops do at their head
    assert list(other) == batches[5:]
    assert len(other) == len(batches) - 5
    other.set_epoch(1)
    one.set_epoch(1)
    assert list(other) == list(one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 3}, r"ValueError: .*another seed \(0, here 3\)"),
        ({"lens": [1, 2, 4]}, "ValueError: .*another lens_checksum"),
        ({"lens": [1, 2]}, r"ValueError: .*another examples \(3, here 2\)"),
        ({"cost": lambda n: n * n}, "ValueError: .*another cost_checksum"),
        ({"state": [1]}, r"TypeError: .*must be a dict that state_dict\(\) gave, got list"),
        ({"state": {"epoch": 1}}, "TypeError: .*lacks, or has too many, 'cost_checksum'"),
        ({"history": [[0, 1]]}, r"TypeError: .*state\['history'\] must be a list of \[ranks, steps\]"),
        ({"history": [[1, 9]]}, "ValueError: .*has 9 steps of 1 ranks, where at most 2 were left"),
        ({"steps": 9}, "ValueError: .*steps must be at most 2"),
        ({"given_cost": 3}, "TypeError: .*cost must be a function from lens to costs, got int 3"),
        ({"given_cost": lambda n: -n}, r"ValueError: .*cost gives -1.0 for lens\[0\], 1"),
        ({"given_cost": lambda n: n[:1]}, r"ValueError: .*one number for each example, \(3,\), got shape \(1,\)"),
    ],
)
def test_states_that_do_not_fit_are_refused(change: dict[str, Any], message: str):
    def run() -> None:
        first = BatchSampler([1, 2, 3], 4, **({"cost": change["given_cost"]} if "given_cost" in change else {}))
        state = first.state_dict(change.get("steps", 1))
        state |= {"history": change["history"]} if "history" in change else {}
        more = {name: change[name] for name in ("seed", "cost") if name in change}
        BatchSampler(change.get("lens", [1, 2, 3]), 4, **more).load_state_dict(change.get("state", state))

    kind, _, text = message.partition(": ")
    with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[kind], match=text):
        run()
