"""Packed tensors in combinations that must hold: splits of all kinds, loops with hooks and dropout, copies between."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad

import tensorloop as tl
from tensorloop.packed import PackedTensor
from tests.support.loop_cases import Ours, Plain, randn, rotate, with_and_without_checkpoints

D = torch.float64
LENS = [3, 0, 5, 1, 5, 2]


def total(*values: Tensor) -> Tensor:
    return torch.stack([x.sum() for x in values]).sum()


@pytest.mark.parametrize(("lens", "sizes"), [([3, 0, 4], [2, 0, 1]), ([0, 0, 0], [1, 0, 2]), ([], [0, 0]), ([2], [1])])
@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_pieces_of_a_split_and_their_gradients(kind: Any, lens: list[int], sizes: list[int]) -> None:
    values = randn(sum(lens), 2)
    parts: Any = PackedTensor(values, torch.tensor(lens, dtype=torch.int64)).split(kind(sizes))
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert [x.lens.tolist() for x in parts] == [lens[a:b] for a, b in itertools.pairwise(ends)]
    assert torch.equal(torch.cat([x.values for x in parts]), values)
    first, *others = (x.values for x in parts)
    found = grad(total(first * 2, *others), values)[0]
    assert found[:, 0].tolist() == [2.0] * len(first) + [1.0] * (len(values) - len(first))


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        ([1, 1], ValueError, r"split: sizes \[1, 1\] do not sum to the 3 rows"),
        ([1, 1, 1, 1], ValueError, r"split: sizes \[1, 1, 1, 1\] do not sum to the 3 rows"),
        ([-1, 4], ValueError, r"split: sizes\[0\] must be at least 0, got -1"),
        ([1.0, 2.0], TypeError, r"split: sizes\[0\] must be an int or a 0-d integer tensor, got float 1.0"),
        ([[1], [2]], TypeError, r"split: sizes\[0\] must be an int .* got list \[1\]"),
        (
            torch.ones(1, 3, dtype=torch.int64),
            TypeError,
            r"split: size must be an int .* got a tensor of shape \(1, 3\)",
        ),
        (0, ValueError, "split: size must be at least 1, got 0"),
        (1.5, TypeError, "split: size must be an int or a 0-d integer tensor, got float 1.5"),
        (None, TypeError, "split: size must be an int or a 0-d integer tensor, got NoneType None"),
    ],
)
def test_sizes_that_do_not_split(size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PackedTensor(torch.zeros(7, 2), [3, 0, 4]).split(size)


def test_a_split_by_a_number_of_rows() -> None:
    p = PackedTensor(torch.arange(7), [3, 0, 4])
    for size, lens in ((1, [[3], [0], [4]]), (2, [[3, 0], [4]]), (3, [[3, 0, 4]]), (9, [[3, 0, 4]])):
        assert [x.lens.tolist() for x in p.split(size)] == lens  # pyright: ignore[reportAttributeAccessIssue]
    assert [x.lens.tolist() for x in p.split(torch.tensor(2))] == [[3, 0], [4]]  # pyright: ignore


def test_memory_is_pinned_where_there_is_a_device_for_it() -> None:
    p = PackedTensor(torch.zeros(3, 2, device="cpu"), [1, 2])
    if torch.cuda.is_available():
        assert p.pin_memory().values.is_pinned()
    else:
        with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA"):
            p.pin_memory()


@with_and_without_checkpoints
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_packed_rows_with_all_at_once(reverse: bool, checkpoints: Any) -> None:
    """Arrays, context, dropout, changes in place and hooks; reductions before and after; gradients of two orders."""

    def run(checkpoints: Any) -> list[Tensor]:
        torch.manual_seed(0)
        values, w, context = randn(16, 4), randn(4, seed=1), randn(6, 4, seed=2)
        p = PackedTensor(values, LENS)

        def body(carry: Any, x: Tensor, context: Tensor) -> Any:
            array, h = carry
            h = rotate(h) * w + x * context
            h.mul_(1.01)
            h.register_hook(lambda g: g * 0.9)
            return (array.append(h), h), (array[0].cos() + h, F.dropout(h, 0.3))

        xs: Any = (p * w).sin() + p.cumsum(1)
        (array, h), (y, z) = tl.scan(
            body,
            (tl.TensorArray(), torch.ones(6, 4, dtype=D)),
            xs,
            context=context,
            reverse=reverse,
            checkpoints=checkpoints,
        )
        loss = total(y.softmax(1).square().sum(1), h.sin(), array.stack().cos(), z.square().sum(1))
        wanted = (values, w, context)
        first = grad(loss, wanted, create_graph=True)
        return [loss, *first, *grad(total(*(g.square() for g in first)), wanted)]

    # By rows alone: test_packed_scan.py. Here all ways of keeping steps agree.
    torch.testing.assert_close(run(checkpoints), run(tl.schedule.StoreAll() if checkpoints is None else None))


@with_and_without_checkpoints
def test_a_packed_carry_that_a_body_changes_in_place_and_copies(checkpoints: Any) -> None:
    def run(loops: Any) -> list[Tensor]:
        values, w = randn(6, 2), randn(2, seed=1)

        def body(i: int, carry: Any) -> Any:
            p, s = carry
            q = p * w + p.softmax(1)
            q += 0.1
            old = (copy.deepcopy if i % 2 else lambda x: pickle.loads(pickle.dumps(x)))(p.detach())
            return q, s + q.logsumexp(1).nan_to_num(neginf=0) * old.sum(1)

        start = PackedTensor(values, [1, 0, 3, 2]), torch.zeros(4, 2, dtype=D)
        q, s = loops.fori_loop(0, 4, body, start)
        first = grad(total(q.values.sin(), s), (values, w), create_graph=True)
        return [q.values, s, *first, *grad(total(*(g.square() for g in first)), (values, w))]

    torch.testing.assert_close(run(Ours(checkpoints)), run(Plain()))


@with_and_without_checkpoints
def test_packed_rows_that_a_body_closes_over_with_a_hook(checkpoints: Any) -> None:
    def run(loops: Any) -> list[Tensor]:
        values, w = randn(6, 2), randn(2, seed=1)
        p: Any = PackedTensor(values, [1, 0, 3, 2]).sin()
        p.values.register_hook(lambda g: g.clamp(-0.3, 0.3))

        def body(i: int, c: Tensor) -> Tensor:
            return rotate(c) + p.sum(1).sum(0) * w * p.softmax(1).values.sum(0).cos()

        out = loops.fori_loop(0, 4, body, w)
        return [out, *grad(out.sum(), (values, w))]

    torch.testing.assert_close(run(Ours(checkpoints)), run(Plain()))
