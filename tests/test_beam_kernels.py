"""The kernels of beam search against torch operations, which are against sorting in plain Python."""

import pytest
import torch
from torch import Tensor

from tensorloop.kernels import cpu_beam, eager_beam, find

MODULES = {"cpu": cpu_beam, "eager": eager_beam}
SHAPES = [(1, 1, 1, 3), (3, 4, 5, 4), (3, 4, 5, 40), (2, 3, 200, 7), (0, 2, 3, 2), (4, 8, 129, 16)]


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, coarse: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys and log_probs, some of them -inf; coarse ones tie."""
    rows, size, vocabulary = shape[:3]
    generator = torch.Generator().manual_seed(seed)
    keys = -2 * torch.rand(rows, size, generator=generator).to(dtype)
    log_probs = -5 * torch.rand(rows, size, vocabulary, generator=generator).to(dtype)
    if coarse:
        keys, log_probs = keys.round(), log_probs.round()
    log_probs[torch.rand(log_probs.shape, generator=generator) < 0.1] = -torch.inf
    keys[:, 1:][torch.rand(rows, size - 1, generator=generator) < 0.2] = -torch.inf
    return keys, log_probs


def sorted_by_hand(keys: Tensor, log_probs: Tensor, count: int, eos: int) -> list[list[tuple[float, int, int]]]:
    found = []
    for key, scores in zip(keys, log_probs, strict=True):
        every = [
            ((key[k] + scores[k, v]).item(), k, v)
            for k in range(len(key))
            for v in range(scores.shape[1])
            if v != eos and key[k] + scores[k, v] > -torch.inf
        ]
        every.sort(key=lambda x: (-x[0], x[1], x[2]))
        first = every[0][1:] if every else (0, 0)
        found.append((every + [(-float("inf"), *first)] * count)[:count])
    return found


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("module", MODULES)
def test_the_best_continuations(module: str, shape: tuple[int, ...], dtype: torch.dtype, coarse: bool):
    keys, log_probs = inputs(shape, dtype, coarse)
    eos = shape[2] - 1
    values, parents, tokens, ends = MODULES[module].beam_best(keys, log_probs, shape[3], eos)
    ours = [list(zip(*(x.tolist() for x in row), strict=True)) for row in zip(values, parents, tokens, strict=True)]
    assert ours == sorted_by_hand(keys, log_probs, shape[3], eos)
    assert torch.equal(ends, keys + log_probs[:, :, eos])


@pytest.mark.parametrize("module", MODULES)
def test_nan_is_the_largest(module: str):
    keys, log_probs = inputs((5, 3, 150))
    log_probs[2, 1, 140] = torch.nan
    log_probs[4, 0, 0] = torch.nan
    values = MODULES[module].beam_best(keys, log_probs, 4, 1)[0]
    assert values[:, 0].isnan().tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("module", MODULES)
def test_memory_of_any_layout(module: str):
    keys, log_probs = inputs((4, 3, 20))
    expected = MODULES[module].beam_best(keys, log_probs, 5, 2)
    turned = log_probs.transpose(0, 2).contiguous().transpose(0, 2)
    got = MODULES[module].beam_best(keys.t().contiguous().t(), turned, 5, 2)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_tracing_back(module: str):
    generator = torch.Generator().manual_seed(1)
    steps, rows, size, each = 9, 3, 4, 5
    parents = torch.randint(size, (steps, rows, size), generator=generator)
    lens = torch.randint(steps + 1, (rows, each), generator=generator)
    places = torch.randint(size, (rows, each), generator=generator)
    found = MODULES[module].beam_trace(parents, lens, places)
    for b in range(rows):
        for i in range(each):
            expected, place = [0] * steps, int(places[b, i])
            for t in range(int(lens[b, i]) - 1, -1, -1):
                expected[t], place = place, int(parents[t, b, place])
            assert found[:, b, i].tolist() == expected
    assert MODULES[module].beam_trace(parents[:0], lens * 0, places).shape == (0, rows, each)


def test_rows_are_shared_among_threads():
    keys, log_probs = inputs((64, 8, 1000), torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = cpu_beam.beam_best(keys, log_probs, 8, 1)
    finally:
        torch.set_num_threads(threads)
    alone = eager_beam.beam_best(keys, log_probs, 8, 1)
    assert all(torch.equal(x, y) for x, y in zip(together, alone, strict=True))


def test_which_kernel_is_found():
    keys = torch.zeros(2, 3)
    assert find("beam_best", keys) is cpu_beam.beam_best
    assert find("beam_best", keys.to(torch.bfloat16)) is eager_beam.beam_best
    assert find("beam_best", keys.to("meta")) is eager_beam.beam_best
    assert find("beam_trace", keys.long()) is cpu_beam.beam_trace
