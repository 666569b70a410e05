"""The transducer loss and joints of two ragged dims, against the enumeration of all paths."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop import reference
from tensorloop.kernels.lattices import rnnt_formula
from tensorloop.memory import peak
from tensorloop.packed import PackedTensor, pairs, rnnt_loss
from tensorloop.packed.rows import alignments
from tensorloop.testing import assert_matches_reference, assert_saved_bytes
from tests.support.cuda_cases import kernel

D = torch.float64


def leaf(*shape: int, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def paths(frames: int, tokens: list[int], blank: int) -> Iterator[list[tuple[int, int, int]]]:
    """Every alignment as (frame, tokens so far, class) of each emission."""
    for places in combinations(range(frames - 1 + len(tokens)), len(tokens)):  # the last emission is a blank
        t = u = 0
        path = []
        for n in range(frames + len(tokens)):
            path.append((t, u, tokens[u] if n in places else blank))
            t, u = (t, u + 1) if n in places else (t + 1, u)
        yield path


def enumerated(values: Tensor, frames: list[int], tokens: list[list[int]], blank: int = 0) -> Tensor:
    rows = values.split([t * (len(y) + 1) for t, y in zip(frames, tokens, strict=True)])
    losses = []
    for row, t, y in zip(rows, frames, tokens, strict=True):
        joint = row.view(t, len(y) + 1, values.shape[1])
        sums = [torch.stack([joint[place] for place in path]).sum() for path in (paths(t, y, blank) if t else ())]
        nothing = values.sum() * 0
        losses.append(-torch.stack(sums).logsumexp(0) if sums else nothing + (0 if not y else torch.inf))
    return torch.stack(losses)


def by_recursion(values: Tensor, frames: list[int], tokens: list[list[int]], blank: int = 0) -> Tensor:
    rows = values.split([t * (len(y) + 1) for t, y in zip(frames, tokens, strict=True)])
    joints = (row.view(t, len(y) + 1, -1) for row, t, y in zip(rows, frames, tokens, strict=True))
    return torch.stack([reference.rnnt_loss(x, y, blank) for x, y in zip(joints, tokens, strict=True)])


def ours(values: Tensor, frames: list[int], tokens: list[list[int]], **options: Any) -> Tensor:
    lens = [t * (len(y) + 1) for t, y in zip(frames, tokens, strict=True)]
    targets = PackedTensor(torch.tensor([x for y in tokens for x in y], dtype=torch.int64), [len(y) for y in tokens])
    return rnnt_loss(PackedTensor(values, lens), targets, **{"reduction": "none", **options})


ROWS = st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=4)


@given(rows=ROWS, blank=st.integers(0, 3))
@settings(max_examples=40)
def test_the_loss_is_the_sum_over_all_paths(rows: list[tuple[int, list[int]]], blank: int):
    frames, tokens = [t for t, _ in rows], [y for _, y in rows]
    values = leaf(sum(t * (len(y) + 1) for t, y in rows), 4)
    assert_matches_reference(
        lambda x: ours(x, frames, tokens, blank=blank), lambda x: enumerated(x, frames, tokens, blank), values
    )
    torch.testing.assert_close(by_recursion(values, frames, tokens, blank), enumerated(values, frames, tokens, blank))
    found, wanted = (f(values.float().detach(), frames, tokens, blank=blank) for f in (ours, enumerated))
    torch.testing.assert_close(found, wanted)


def test_rows_without_frames_or_tokens():
    values = leaf(6, 3)
    found = ours(values, [0, 0, 2, 2], [[], [1], [], [2]])
    assert found.tolist()[:2] == [0, torch.inf]
    torch.testing.assert_close(found[2:], enumerated(values, [0, 0, 2, 2], [[], [1], [], [2]])[2:])
    assert ours(values, [0, 0, 2, 2], [[], [1], [], [2]], reduction="sum").isinf()
    (grad,) = torch.autograd.grad(found[2:].sum(), values)
    assert grad.isfinite().all()
    none = leaf(0, 3)
    assert ours(none, [], []).shape == (0,)
    assert ours(none, [], [], reduction="sum").tolist() == 0
    assert torch.autograd.grad(ours(none, [0], [[]], reduction="mean"), none)[0].shape == (0, 3)


def test_derivatives():
    frames, tokens = [2, 3, 0, 1], [[1, 1], [2], [], []]
    values = leaf(2 * 3 + 3 * 2 + 1, 4)

    def loss(x: Tensor) -> Tensor:
        return ours(x, frames, tokens)

    assert torch.autograd.gradcheck(loss, values)
    assert torch.autograd.gradgradcheck(loss, values)
    plain = values.detach()
    wanted = torch.autograd.functional.jacobian(lambda x: enumerated(x, frames, tokens), plain)
    torch.testing.assert_close(torch.func.jacrev(loss)(plain), wanted)
    torch.testing.assert_close(torch.func.jacfwd(loss)(plain), wanted)
    torch.testing.assert_close(
        torch.func.vmap(loss)(torch.stack([plain, -plain])), torch.stack([loss(plain), loss(-plain)])
    )


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.usefixtures("on_the_cpu")
def test_the_kernel_is_the_formula(dtype: torch.dtype):
    frames, widths = torch.tensor([50, 1, 0, 30, 7]), torch.tensor([12, 1, 3, 1, 20])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (frames * widths).cumsum(0)])
    scores = -torch.rand(int(offsets[-1]), 2, dtype=dtype) * 5
    grad = torch.randn(5, dtype=dtype)
    grad[2] = 0  # that row has no path
    found = {}
    for backend in ("cpu", "eager"):
        losses, alpha = kernel(backend, "rnnt_loss")(scores, offsets, widths)
        found[backend] = losses, kernel(backend, "rnnt_loss_grad")(grad, scores, offsets, widths, losses, alpha)
        assert losses.dtype is dtype
    torch.testing.assert_close(found["cpu"], found["eager"], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found["cpu"][0], rnnt_formula(scores, offsets, widths))
    with pytest.raises(ValueError, match="rnnt_loss: a row's length must be a multiple of its width"):
        kernel("cpu", "rnnt_loss")(scores, offsets, widths + 1)


def test_scores_of_minus_infinity():
    values = leaf(6, 3).detach()
    values[0, 1] = -torch.inf  # the first token cannot come in the first frame
    values.requires_grad_()
    found, wanted = (f(values, [3], [[1]]) for f in (ours, enumerated))
    torch.testing.assert_close(found, wanted)
    (grad,) = torch.autograd.grad(found.sum(), values)
    assert grad.isfinite().all()
    assert grad[0, 1] == 0
    values = torch.full((6, 3), -torch.inf, dtype=D)
    assert ours(values, [3], [[1]]).isinf().all()


# ---- joints


LENS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4)


@given(lens=LENS)
@settings(max_examples=30)
def test_pairs_are_all_pairs_of_a_row(lens: list[tuple[int, int]]):
    of_a, of_b = [n for n, _ in lens], [m for _, m in lens]

    def packed(a: Tensor, b: Tensor) -> list[Tensor]:
        x, y = pairs(PackedTensor(a, of_a), PackedTensor(b, of_b))
        assert x.dims[0] is y.dims[0]
        assert x.lens.tolist() == [n * m for n, m in lens]
        return [x.values, y.values]

    def dense(a: Tensor, b: Tensor) -> list[Tensor]:
        rows = list(zip(a.split(of_a), b.split(of_b), strict=True))
        first = [x[:, None].expand(-1, len(y), -1, -1).flatten(0, 1) for x, y in rows]
        second = [y[None].expand(len(x), -1, -1).flatten(0, 1) for x, y in rows]
        return [torch.cat([a[:0], *first]), torch.cat([b[:0], *second])]

    assert_matches_reference(packed, dense, leaf(sum(of_a), 2, 3), leaf(sum(of_b), 2))


def test_pairs_twice_differentiable():
    a, b = leaf(4, 2), leaf(3, 2)

    def joint(a: Tensor, b: Tensor) -> Tensor:
        x, y = pairs(PackedTensor(a, [2, 0, 2]), PackedTensor(b, [2, 0, 1]))
        return (x * y).tanh().values

    assert torch.autograd.gradcheck(joint, (a, b))
    assert torch.autograd.gradgradcheck(joint, (a, b))


def model(audio: Tensor, text: Tensor, out: Tensor, frames: list[int], tokens: list[list[int]]) -> Tensor:
    x, y = pairs(PackedTensor(audio, frames), PackedTensor(text, [len(y) + 1 for y in tokens]))
    targets = PackedTensor(torch.tensor([t for y in tokens for t in y], dtype=torch.int64), [len(y) for y in tokens])
    return rnnt_loss(((x + y).tanh() @ out).log_softmax(-1), targets, reduction="none")


def test_a_transducer_row_by_row_and_whole():
    frames, tokens = [5, 3, 4], [[1, 2], [], [3]]
    inputs = leaf(12, 6), leaf(6, 6), leaf(6, 4)

    def by_row(audio: Tensor, text: Tensor, out: Tensor) -> Tensor:
        rows = zip(audio.split(frames), text.split([3, 1, 2]), frames, tokens, strict=True)
        parts = [checkpoint(model, a, t, out, [n], [y], use_reentrant=False) for a, t, n, y in rows]
        return torch.cat(parts)  # pyright: ignore

    def dense(audio: Tensor, text: Tensor, out: Tensor) -> Tensor:
        rows = zip(audio.split(frames), text.split([3, 1, 2]), strict=True)
        joints = [((a[:, None] + t).tanh() @ out).log_softmax(-1).flatten(0, 1) for a, t in rows]
        return enumerated(torch.cat(joints), frames, tokens)

    assert_matches_reference(lambda a, t, out: model(a, t, out, frames, tokens), dense, *inputs)
    assert_matches_reference(by_row, dense, *inputs)


@pytest.mark.usefixtures("on_the_cpu")
def test_what_it_keeps_and_that_nothing_is_padded():
    frames, tokens = [200, 2, 2, 2, 2, 2], [[1] * 3, [1] * 20, [1], [], [2], [3] * 20]
    lens = [t * (len(y) + 1) for t, y in zip(frames, tokens, strict=True)]
    values, n = leaf(sum(lens), 16, dtype=torch.float32), sum(lens)
    # The gather's index and what it gives, the forward sums, a loss a row, and where rows begin and how wide they are.
    assert_saved_bytes(lambda: ours(values, frames, tokens), exactly=n * (2 * 8 + 2 * 4 + 8) + 6 * 4 + 13 * 8)
    step = lambda: torch.autograd.grad(ours(values, frames, tokens).sum(), values)  # noqa: E731
    step()
    assert peak(step) < 6 * 200 * 21 * 16 * 4 / 2  # of the padded joint


def test_in_a_loop_with_checkpoints():
    audio, text, out = leaf(7, 4), leaf(4, 4), leaf(4, 4)

    def body(i: int, carry: Any) -> Any:
        a, total = carry
        return a.sin() + a.cos(), total + model(a, text, out, [4, 3], [[1], [2]]).sum()

    found = []
    for checkpoints in (None, 2):
        _, total = tl.fori_loop(0, 4, body, (audio, audio.new_zeros(())), checkpoints=checkpoints)
        found.append((total, *torch.autograd.grad(total, (audio, text, out))))
    torch.testing.assert_close(found[0], found[1])


P = PackedTensor(torch.randn(10, 4), [6, 4])
Y = PackedTensor(torch.tensor([1, 2, 3]), [2, 1])
BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: rnnt_loss(P, Y.pad()), TypeError, "rnnt_loss: targets must be a PackedTensor, got a tensor"),  # pyright: ignore
    (lambda: rnnt_loss(P.pad(), Y), TypeError, "rnnt_loss: log_probs must be a PackedTensor, got a tensor"),  # pyright: ignore
    (
        lambda: rnnt_loss(P[..., 0], Y),
        ValueError,
        r"rnnt_loss: log_probs must be \(B, \(T \(U \+ 1\)\)\*, V\) and targets",
    ),
    (
        lambda: rnnt_loss(P.long(), Y),
        TypeError,
        "rnnt_loss: log_probs must be of a real floating dtype, got torch.int64",
    ),
    (
        lambda: rnnt_loss(P, Y.float()),
        TypeError,
        "rnnt_loss: targets have dtype torch.float32, but tokens are integers",
    ),
    (lambda: rnnt_loss(P, Y, blank=4), ValueError, "rnnt_loss: blank is 4, expected 0 <= blank < 4"),
    (lambda: rnnt_loss(P, Y, reduction="row"), ValueError, "rnnt_loss: reduction must be 'none', 'mean' or 'sum', got"),
    (lambda: rnnt_loss(P, Y + 2), IndexError, r"rnnt_loss: targets\[1\] is 4, expected 0 <= index < 4"),
    (lambda: rnnt_loss(P, Y[:1]), ValueError, "rnnt_loss: log_probs have 2 rows, targets 1"),
    (
        lambda: rnnt_loss(P, PackedTensor(Y.values, [1, 2])),
        ValueError,
        "rnnt_loss: row 1 of log_probs has 4 entries, no multiple of the 3 text positions of 2 targets",
    ),
    (lambda: pairs(P, P.pad()), TypeError, "pairs: b must be a PackedTensor, got a tensor of shape"),  # pyright: ignore
    (lambda: pairs(P, P[:1]), ValueError, "pairs: a has 2 rows, b has 1"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_what_is_refused(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()


def test_other_dtypes():
    values = leaf(6, 3).log_softmax(-1)
    for dtype in (torch.bfloat16, torch.float16):
        found = ours(values.to(dtype), [3], [[1]])
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), ours(values, [3], [[1]]), rtol=0.02, atol=0.02)


def test_under_transforms_no_kernel_is_asked():
    with torch.no_grad():
        values = torch.randn(4, 3, dtype=D)
    found = torch.func.grad(lambda x: ours(x, [2], [[1]]).sum())(values)
    leaves = values.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(ours(leaves, [2], [[1]]).sum(), leaves)[0])
    assert alignments.rnnt.__name__ == "rnnt"
