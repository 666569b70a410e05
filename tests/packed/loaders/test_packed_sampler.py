"""Batches by their number of entries: what is in them, how full they are, and what processes share out."""

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
