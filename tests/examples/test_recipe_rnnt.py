"""The recipe of a transducer: loss beside all alignments and beside torchaudio's, decoding, training, memory."""

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from docs.examples.recipes import rnnt
from tensorloop import memory


def model_of(labels: int = 4, width: int = 6) -> rnnt.Transducer:
    torch.manual_seed(0)
    return rnnt.Transducer(3, labels, width).double()


def batch_of(frame_lens: list[int], lens: list[int], labels: int = 4) -> tuple[tl.PackedTensor, Tensor, Tensor]:
    torch.manual_seed(1)
    frames = tl.PackedTensor.from_list([torch.randn(n, 3, dtype=torch.float64) for n in frame_lens])
    return frames, torch.randint(1, labels, (len(lens), max(lens))), torch.tensor(lens, dtype=torch.int64)


def alignments(frames: int, labels: int) -> Iterator[list[tuple[int, int, bool]]]:
    """Every course of (frame, labels so far, is this step a label?), a blank in the end."""
    for places in combinations(range(frames + labels - 1), labels):
        t, u, course = 0, 0, []
        for step in range(frames + labels):
            course.append((t, u, step in places))
            t, u = (t, u + 1) if step in places else (t + 1, u)
        yield course


def by_all_alignments(model: rnnt.Transducer, frames: Tensor, labels: Tensor) -> Tensor:
    scores = model.joint(model.encode(frames)[:, None], model.predict(labels[None])[0])  # (T, U + 1, V)
    totals = [
        torch.stack([scores[t, u, labels[u] if said else rnnt.BLANK] for t, u, said in course]).sum()
        for course in alignments(len(frames), len(labels))
    ]
    return -torch.stack(totals).logsumexp(0)


@pytest.mark.parametrize("checkpoints", [None, 1, 2])
def test_the_loss_is_that_of_all_alignments(checkpoints: int | None):
    model = model_of()
    frames, labels, lens = batch_of([4, 1, 5, 2, 3], [3, 2, 0, 1, 3])
    found = model.loss(frames, labels, lens, checkpoints)
    rows = zip(frames.unbind(), labels, lens.tolist(), strict=True)
    expected = torch.stack([by_all_alignments(model, x, row[:n]) for x, row, n in rows])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    grads = [torch.autograd.grad(loss.square().sum(), list(model.parameters())) for loss in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


def test_all_alignments_are_counted():
    assert len(list(alignments(4, 3))) == 20  # of 6 steps before the last blank, 3 are labels


@pytest.mark.parametrize("lens", [[2, 1], [0, 0], [0]])
def test_the_loss_is_that_of_the_whole_lattice(lens: list[int]):
    model = model_of()
    frames, labels, counts = batch_of([6, 3][: len(lens)], lens)
    found = model.loss(frames, labels, counts, checkpoints=2)
    expected = model.plain_loss(frames.pad(), frames.lens, labels, counts)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(loss.sum(), model.encode.weight) for loss in (found, expected)]
    torch.testing.assert_close(*grads)


def test_the_loss_is_torchaudios():
    """Of logits sin(1), sin(2), ...: what torchaudio 2.11.0 gives on the CPU, rnnt_loss(..., reduction="none")."""
    logits = torch.arange(1, 2 * 5 * 4 * 6 + 1, dtype=torch.float64).sin().view(2, 5, 4, 6) * 2
    labels, lens, frame_lens = torch.tensor([[1, 5, 2], [3, 3, 1]]), torch.tensor([3, 2]), torch.tensor([5, 4])
    scores = logits.log_softmax(-1)
    alpha = torch.full((2, 4), rnnt.NEVER, dtype=torch.float64)
    alpha[:, 0] = 0
    for t in range(5):
        alpha = torch.where((t < frame_lens)[:, None], rnnt.frame_of_lattice(alpha, scores[:, t], labels), alpha)
    found = -alpha.gather(1, lens[:, None])[:, 0]
    torch.testing.assert_close(found.float(), torch.tensor([16.246862, 11.407115]), rtol=1e-5, atol=1e-5)


def greedy(model: rnnt.Transducer, frames: Tensor, most: int) -> list[int]:
    """One utterance, step by step."""
    found: list[int] = []
    for frame in model.encode(frames):
        for _ in range(most):
            guess = model.predict(torch.tensor([found], dtype=torch.int64))[0, -1]
            label = int(model.joint(frame, guess).argmax())
            if label == rnnt.BLANK:
                break
            found.append(label)
    return found


@pytest.mark.parametrize("most", [1, 3])
def test_decoding_is_that_of_each_utterance_alone(most: int):
    torch.manual_seed(4)
    model = model_of()
    with torch.no_grad():
        model.out.bias[rnnt.BLANK] += 0.4
    frames = tl.PackedTensor.from_list([3 * torch.randn(n, 3, dtype=torch.float64) for n in (7, 0, 12, 1)])
    found = [row.tolist() for row in model.decode(frames, most).unbind()]
    assert found == [greedy(model, x, most) for x in frames.unbind()]
    assert len({len(row) for row in found}) > 2


def test_it_learns_to_read():
    torch.manual_seed(0)
    model = rnnt.Transducer(3, 4, 24)
    losses = rnnt.train(model, 30, rows=8)
    assert losses[-1] < 0.4 * losses[0]


def test_memory_has_no_lattice_of_logits():
    model = model_of(labels=40, width=16)

    def held(T: int) -> tuple[int, int]:
        frames, labels, lens = batch_of([T, T], [5, 5], 40)
        padded = frames.pad()
        loop = memory.saved_bytes(lambda: model.loss(frames, labels, lens, checkpoints=4).sum())
        return loop, memory.saved_bytes(lambda: model.plain_loss(padded, frames.lens, labels, lens).sum())

    (few, _), (many, plain) = held(16), held(64)
    assert many < plain / 8
    assert many - few < 2 * 48 * 2 * 16 * 8  # the encoded frames, and as they are read
