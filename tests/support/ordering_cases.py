"""Masks for tests of orderings: as dense tensors, and as graphs."""

import torch
from torch import Tensor

from tensorloop.ordering import Graph
from tests.support.devices import HERE


def dense(graph: Graph) -> Tensor:
    """(N, M) bool."""
    n, m = graph.shape
    sees = torch.zeros(n, m, dtype=torch.bool)
    sees[torch.arange(n).repeat_interleave(graph.indptr.diff()), graph.indices.long()] = True
    return sees


def points(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.rand(n, d, generator=torch.Generator(HERE).manual_seed(seed), dtype=torch.float64)


def random_mask(n: int, m: int, share: float, seed: int = 0) -> Tensor:
    return torch.rand(n, m, generator=torch.Generator(HERE).manual_seed(seed)) < share


def shuffled_band(n: int, reach: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A band whose positions were shuffled, (n, n) bool, and the order that would mend it."""
    order = torch.randperm(n, generator=torch.Generator(HERE).manual_seed(seed))
    steps = order[:, None] - order
    return steps.abs() <= reach, order.argsort()
