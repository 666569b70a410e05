"""Which tensors that a step did not make carry a gradient of what it gave, asked of graphs without a loop."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tensorloop._common.errors import Misuse
from tensorloop._torch import graph
from tensorloop.loop.checkpoint.capture_graph import StepGraph, find_captures

T = TypeVar("T")


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def found(step: Callable[[], Any], arguments: Sequence[Tensor] = (), met: Sequence[Tensor] = ()) -> list[Tensor]:
    """What the graph of one step says, where torch functions were given `met`."""
    first = graph.next_number()
    outputs = [out] if isinstance(out := step(), Tensor) else list(out)
    numbers, ids = range(first, graph.next_number()), {id(x) for x in arguments}
    return find_captures(outputs, StepGraph(3, ids, numbers, [], met, met))


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return [id(x) for x in found] == [id(x) for x in expected]


def test_a_leaf_that_is_no_argument_is_a_capture_and_counts_once() -> None:
    x, w = leaf(), leaf()
    assert same(found(lambda: (x * w + w.sin()) * w, arguments=[x], met=[x, w]), [w])
    assert found(lambda: x.sin(), arguments=[x]) == []


def test_a_result_from_before_the_step_is_a_capture_and_what_it_came_from_is_none() -> None:
    x, w = leaf(), leaf()
    v, other = w.exp().split(1)
    assert same(found(lambda: x * v, arguments=[x], met=[x, w, other, v]), [v])
    assert same(found(lambda: x * v + other, arguments=[x], met=[x, v, other]), [other, v])


def test_what_a_step_gives_as_it_came() -> None:
    x, w = leaf(), leaf()
    v = w * 2
    assert same(found(lambda: (x, w, v), arguments=[x]), [w, v])


def test_a_source_that_no_function_was_given_is_refused() -> None:
    x, v = leaf(), leaf() * 2

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, z: Tensor) -> Tensor:
            return y * z

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads * 2

    with pytest.raises(Misuse, match=r"^step 3 depends on the result of MulBackward0, a tensor that no torch function"):
        found(lambda: Hidden.apply(x, v), arguments=[x], met=[x])
    assert same(found(lambda: Hidden.apply(x, v), arguments=[x], met=[x, v]), [v])


def in_new_thread(function: Callable[[], T]) -> T:
    """What a function gives in a thread whose nodes are numbered from 0."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_nodes_of_other_threads() -> None:
    """Their numbers say nothing: what leads to an argument is of the step, and what was met and does not a capture."""

    def check() -> None:  # not here, where all tests before have made millions of nodes
        x, w = leaf(), leaf()
        here = graph.next_number()

        def elsewhere(function: Callable[[], Tensor]) -> Tensor:
            def run() -> Tensor:
                y = leaf()
                for _ in range(graph.next_number(), here + 1000):
                    y = y * 1  # until the numbers of this thread are higher
                return function()

            return in_new_thread(run)

        v = elsewhere(lambda: w * 2)
        assert graph.number_of(v.grad_fn) > here
        assert same(found(lambda: x * v, arguments=[x], met=[x, v]), [v])
        assert found(lambda: elsewhere(lambda: x * 2).sin(), arguments=[x], met=[x]) == []

    in_new_thread(check)
