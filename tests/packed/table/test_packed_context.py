"""A packed tensor as a context: rows that stop leave it, and its gradient is that of each row alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tensorloop.memory import saved
from tests.support import beam_cases as cases
from tests.support.beam_cases import BOS, EOS
from tests.support.devices import HERE

D = torch.float64
LENS = [3, 0, 5, 1, 2, 4]  # an empty row among them
LIMITS = torch.tensor([2, 5, 0, 7, 3, 7])
WIDTH = 4
KEEPING = [{"compact": c, "checkpoints": k} for c in (False, True) for k in (None, 1, 3)]
in_every_way = pytest.mark.parametrize("keeping", KEEPING, ids=lambda x: f"{x['compact']}-K={x['checkpoints']}")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator(HERE).manual_seed(seed)).requires_grad_()


TURN = torch.linalg.qr(randn(WIDTH, WIDTH, seed=9).detach())[0]


def attended(q: Tensor, memory: Any) -> Tensor:
    """q (B, D) over the entries of its row; 0 where there are none."""
    weights = (memory * q[:, None]).sum(-1).softmax(1)
    return (memory * weights[..., None]).sum(1)


def loop(h: Tensor, values: Tensor, lens: list[int], limits: Tensor, sizes: list[int], **options: Any) -> Tensor:
    """Rows turn, and look into their memory, to their own limits."""
    context = {"memory": tl.PackedTensor(values, lens), "limits": limits, "name": "x"}

    def body(carry: Any, given: Any) -> Any:
        x, n = carry
        assert isinstance(given["memory"], tl.PackedTensor)
        sizes.append(len(given["memory"].lens))
        assert len(x) == len(given["memory"].lens)
        return torch.sin(x @ TURN) + attended(x, given["memory"].sin()), n + 1

    zero = torch.zeros(len(h), dtype=torch.int64)
    return tl.while_loop(lambda c, given: c[1] < given["limits"], body, (h, zero), context=context, **options)[0]


@in_every_way
def test_rows_of_a_while_loop_leave_it(keeping: dict[str, Any]):
    h, values, sizes = randn(6, WIDTH), randn(sum(LENS), WIDTH, seed=1), []
    out = loop(h, values, LENS, LIMITS, sizes, **keeping)
    assert (min(sizes) <= 2) == keeping["compact"]
    rows = values.split(LENS)
    alone = torch.cat(
        [loop(h[b : b + 1], rows[b], LENS[b : b + 1], LIMITS[b : b + 1], [], compact=False) for b in range(6)]
    )
    torch.testing.assert_close(out, alone)
    weights = torch.linspace(-1, 1, out.numel(), dtype=D).view_as(out)
    ours, theirs = (torch.autograd.grad((x.cos() * weights).sum(), (h, values)) for x in (out, alone))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_second_derivatives(checkpoints: int | None):
    h, values = randn(6, WIDTH), randn(sum(LENS), WIDTH, seed=1)

    def second(**options: Any) -> tuple[Tensor, ...]:
        out = loop(h, values, LENS, LIMITS, [], **options)
        (g,) = torch.autograd.grad(out.cos().sum(), values, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (h, values))

    torch.testing.assert_close(second(compact=True, checkpoints=checkpoints), second())


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_a_closed_over_one_in_a_checkpointed_loop(checkpoints: int):
    """What its dim works out in the first step is there in the replay."""

    def total(values: Tensor, checkpoints: int | None) -> Tensor:
        memory, other = (tl.PackedTensor(x, LENS) for x in (values, values.cos()))

        def body(i: int, h: Tensor) -> Tensor:
            return torch.sin(h @ TURN) + attended(h, memory + other) + memory.amax(1, initial=0.0)

        return tl.fori_loop(0, 5, body, h, checkpoints=checkpoints).sin().sum()

    h, values = randn(6, WIDTH), randn(sum(LENS), WIDTH, seed=1)
    ours, plain = (torch.autograd.grad(total(values, k), (values, h)) for k in (checkpoints, None))
    torch.testing.assert_close(ours, plain)


def test_under_transforms():
    h, values = randn(6, WIDTH).detach(), randn(sum(LENS), WIDTH, seed=1).detach()

    def total(values: Tensor, **options: Any) -> Tensor:
        return loop(h, values, LENS, LIMITS, [], **options).cos().sum()

    ours, theirs = (torch.func.grad(lambda v, c=c: total(v, compact=c))(values) for c in (True, False))
    torch.testing.assert_close(ours, theirs)
    tangent = torch.func.jvp(lambda v: total(v, compact=True), (values,), (torch.ones_like(values),))[1]
    torch.testing.assert_close(tangent, theirs.sum())


def test_rows_of_a_packed_scan_leave_it():
    """xs of one Dim, a context of another."""
    x, values, h = randn(9, WIDTH, seed=2), randn(sum(LENS[:3]), WIDTH, seed=3), randn(3, WIDTH)
    lens = [4, 2, 3]

    def body(h: Tensor, x: Tensor, memory: Any) -> tuple[Tensor, Tensor]:
        h = torch.sin(h + x) + attended(h, memory)
        return h, h

    for checkpoints in (None, 2):
        xs, context = tl.PackedTensor(x, lens), tl.PackedTensor(values, LENS[:3])
        out, ys = tl.scan(body, h, xs, context=context, checkpoints=checkpoints)
        theirs = []
        for b, (row, memory) in enumerate(zip(x.split(lens), values.split(LENS[:3]), strict=True)):
            state = h[b : b + 1]
            for t in range(lens[b]):
                state, _ = body(state, row[t : t + 1], tl.PackedTensor(memory, LENS[b : b + 1]))
            theirs.append(state)
        torch.testing.assert_close(out, torch.cat(theirs))
        ours, plain = (torch.autograd.grad(y.cos().sum(), (x, values, h)) for y in (out, torch.cat(theirs)))
        torch.testing.assert_close(ours, plain)
        assert len(ys.values) == 9


class Reader(torch.nn.Module):
    """A decoder over packed encoder states; the hypotheses of a row look at the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.readout = (
            torch.nn.Parameter(randn(*x, seed=7).detach()) for x in ((6, WIDTH), (WIDTH, 6))
        )
        self.rows: list[int] = []

    def step(self, h: Tensor, tokens: Tensor, memory: Any) -> tuple[Tensor, Tensor]:
        self.rows.append(len(memory.lens))
        assert len(memory.lens) == len(tokens)
        weights = (memory[..., None, :] * h[:, None]).sum(-1).softmax(1)  # (B, T*, K)
        seen = (memory[..., None, :] * weights[..., None]).sum(1)  # (B, K, D)
        h = torch.sin(h + self.embedding[tokens]) + 0.5 * seen
        return h, torch.log_softmax(2 * h @ self.readout, -1)

    def search(self, h: Tensor, values: Tensor, lens: list[int], **options: Any) -> beam.Hypotheses:
        context = tl.PackedTensor(values, lens)
        return beam.beam_search(
            self.step, h, batch_size=len(h), beam_size=3, bos_id=BOS, eos_id=EOS, context=context, **options
        )


@in_every_way
def test_a_search_over_packed_states_is_that_of_each_row(keeping: dict[str, Any]):
    model, h, values = Reader(), randn(6, WIDTH), randn(sum(LENS), WIDTH, seed=1)
    hyps = model.search(h, values, LENS, max_steps=9, **keeping)
    assert (min(model.rows) < 6) == keeping["compact"]
    alone = [model.search(h[b : b + 1], x, LENS[b : b + 1], max_steps=9) for b, x in enumerate(values.split(LENS))]
    for b, one in enumerate(alone):
        cases.assert_same(cases.rows_of(hyps)[b], cases.rows_of(one)[0])
    wanted = [h, values, *model.parameters()]
    together = torch.autograd.grad(hyps.scores.sin().sum(), wanted)
    apart = torch.autograd.grad(torch.cat([one.scores for one in alone]).sin().sum(), wanted)
    torch.testing.assert_close(together, apart)


def test_a_search_leaves_rows_by_itself():
    model = Reader()
    model.search(randn(6, WIDTH), randn(sum(LENS), WIDTH, seed=1), LENS, max_steps=9)
    assert min(model.rows) < 6


def test_nothing_is_repeated_for_the_hypotheses():
    """A step that only reads lengths: the context costs the search nothing, whatever K is."""
    long = tl.PackedTensor(torch.randn(3 * 4000, 8, requires_grad=True), [4000] * 3)

    def step(h: Tensor, tokens: Tensor, memory: Any) -> tuple[Tensor, Tensor]:
        scores = torch.tensor([0.0, -1.0, 0.0]) + memory.values[:1].sum() * torch.tensor([0.0, 0.1, 0.2])
        return h, scores.log_softmax(0).expand(*tokens.shape, 3)

    def search() -> Tensor:
        return beam.beam_search(
            step, torch.zeros(3, 1), batch_size=3, beam_size=20, bos_id=BOS, eos_id=EOS, context=long, max_steps=5,
        ).scores.sum()  # fmt: skip

    assert saved(search).bytes < long.values.nbytes / 2


@pytest.mark.parametrize("compact", [True, False])
def test_another_number_of_rows_is_named(compact: bool):
    context = {"memory": [tl.PackedTensor(torch.zeros(3, 2), [2, 1])]}
    with pytest.raises(
        ValueError, match=r"there are 3 rows, but context\['memory'\]\[0\] is PackedTensor \(2, \*, 2\)"
    ):
        beam.beam_search(
            lambda c, k, x: (c, k), torch.zeros(3, 1), batch_size=3, beam_size=2, bos_id=BOS, eos_id=EOS,
            context=context, compact=compact,
        )  # fmt: skip


def test_a_packed_context_changed_in_place_is_refused():
    values = torch.ones(5, 2)

    def body(x: Tensor, memory: Any) -> Tensor:
        memory.values.add_(1)
        return x + 1

    with pytest.raises(RuntimeError, match="context, or a tensor that it shares memory with, was changed in place"):
        tl.while_loop(
            lambda x, memory: x < torch.arange(1.0, 4)[-len(x) :], body, torch.zeros(3),
            context=tl.PackedTensor(values, [2, 2, 1]), compact=True,
        )  # fmt: skip
