"""Walks of autograd's graph, and which tensors were changed in place."""

import torch

from tensorloop._torch import graph
from tensorloop._torch.versions import Versions, version_of


def test_a_walk_gives_each_node_once_and_stops_where_it_is_told() -> None:
    w = torch.ones(2, requires_grad=True)
    v = w.exp()
    out = (v * v + w).sum()
    names = [type(node).__name__ for node in graph.walk([out.grad_fn])]
    assert sorted(names) == ["AccumulateGrad", "AddBackward0", "ExpBackward0", "MulBackward0", "SumBackward0"]
    leaves = [leaf for node in graph.walk([out.grad_fn]) if (leaf := graph.leaf_of(node)) is not None]
    assert len(leaves) == 1
    assert leaves[0] is w
    inside = graph.walk([out.grad_fn], lambda edge: edge[0] is not v.grad_fn and graph.leaf_of(edge[0]) is None)
    assert [type(node).__name__ for node in inside] == ["SumBackward0", "AddBackward0", "MulBackward0"]


def test_a_node_leads_to_what_is_below_it() -> None:
    w, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    v = w.exp()
    out = v.sin()
    assert graph.leads_to(out.grad_fn, {id(w)})
    assert graph.leads_to(out.grad_fn, (), {v.grad_fn})
    assert not graph.leads_to(out.grad_fn, {id(other)}, {out.grad_fn})
    assert graph.number_of(v.grad_fn) < graph.number_of(out.grad_fn) < graph.next_number()


def test_residuals_are_counted_by_storage_and_without_captures() -> None:
    w, x = (torch.ones(8, requires_grad=True) for _ in range(2))
    out = (x * w).sin() * x
    assert graph.residual_bytes([out], [], []) == 4 * 32  # x, w, x * w and its sine
    assert graph.residual_bytes([out], [w], []) == 3 * 32


def test_the_first_that_was_changed() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    assert version_of(uncounted) is None
    versions = Versions([None, uncounted, x, y])
    with torch.inference_mode():
        uncounted.add_(1)
    assert versions.changed() is None
    y[:1].add_(1)
    assert versions.changed() == 3
    x.add_(1)
    assert versions.changed() == 2
