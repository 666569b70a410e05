# pyright: strict
"""A program as a user writes it: `make check` has pyright and mypy look at it strictly, and the tests run it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_type

import torch
from torch import Tensor, nn

import tensorloop as tl


class State(NamedTuple):
    h: Tensor
    n: int


@dataclass
class Memory:
    slots: tl.TensorArray
    total: Tensor


W: Tensor = torch.ones(4, 4).triu().cos()
XS = torch.linspace(-1, 1, 24).reshape(6, 4)
H = torch.zeros(4)


def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h @ W + x)
    return h, h


def test_scan() -> None:
    h, ys = tl.scan(step, H, XS)
    again = tl.scan(lambda h, x: (torch.tanh(h @ W + x), h), H, XS, checkpoints=tl.Checkpoints(k=2), compile=True)
    assert_type(again, tuple[Tensor, Tensor])
    torch.testing.assert_close(h, again[0])
    assert_type(tl.scan(lambda h, x: (h + x["a"] * x["b"], h), H, {"a": XS, "b": XS}, reverse=True)[1], Tensor)
    assert_type(tl.scan(lambda h, x, c: (h + x * c, h), H, XS, context=W[0]), tuple[Tensor, Tensor])
    assert_type(tl.scan(lambda h, x: (h + x, h), H, XS, until=lambda h: h.sum() > 3), tuple[Tensor, Tensor])
    assert_type(tl.scan(lambda h, _: (h @ W, None), H, length=3), tuple[Tensor, None])
    for plan in (None, 2, tl.schedule.Periodic(2), tl.Checkpoints(budget=1 << 20)):
        assert torch.equal(tl.scan(step, H, XS, checkpoints=plan)[1], ys)
    assert tl.explain(step, H, XS).compiled
    assert tl.explain(lambda h, x: (h + x, None), H, XS, reverse=True).compiled


def test_what_scan_runs_over() -> None:
    _, ys = tl.scan(lambda h, i: (h + i, h.sum() * i), H, range(3))
    rows, _ = tl.scan(lambda h, x: (h + x.sin(), x), H, tl.TensorArray.unstack(XS))
    packed = tl.pack_padded(XS[None], [2])
    last, of_rows = tl.scan(lambda h, x: (h + x.sin(), x.cos()), torch.zeros(1, 4), packed, checkpoints=2)
    kept: tl.PackedTensor = of_rows
    assert ys.shape == (3,)
    assert rows.shape == (4,)
    assert last.shape == (1, 4)
    assert int(kept.lens) == kept.max_len == 2


def test_carries() -> None:
    (h, n), _ = tl.scan(lambda c, x: ((c[0] + x, c[1] + 1), None), (H, 0), XS)
    assert_type(h, Tensor)
    assert_type(n, int)
    carry, ys = tl.scan(lambda c, x: ({"h": c["h"] + x}, c["h"]), {"h": H}, XS)
    assert_type(carry, dict[str, Tensor])
    assert_type(ys, Tensor)
    state, both = tl.scan(lambda s, x: (State(s.h + x, s.n + 1), (s.h, s.n)), State(H, 0), XS)
    assert_type(state, State)
    assert_type(both, tuple[Tensor, int])
    memory, _ = tl.scan(lambda m, x: (Memory(m.slots.append(x), m.total + x), None), Memory(tl.TensorArray(), H), XS)
    assert_type(memory, Memory)
    assert len(memory.slots) == n == state.n == 6


def test_other_loops() -> None:
    h = tl.while_loop(lambda h: h.sum() < 3, lambda h: h + 0.3, H, max_steps=9, checkpoints=3)
    h, steps = tl.while_loop(lambda h: h.sum() < 30, lambda h: h + 0.5, h, return_steps=True)
    assert int(steps) > 1
    assert_type(tl.while_loop(lambda s: s.n < 3, lambda s: State(s.h * 2, s.n + 1), State(h, 0)), State)
    h = tl.while_loop(lambda h, c: (h < c).all(), lambda h, c: h + c, h, context=W[0].abs(), max_steps=3)
    h, _ = tl.while_loop(lambda c: c[1] < 3, lambda c: (c[0] @ W, c[1] + 1), (h, 0))
    assert_type(tl.fori_loop(0, 5, lambda i, h: h + i, H, checkpoints=2), Tensor)
    assert_type(tl.map(lambda x: (x @ W, x.sum()), XS, batch_size=2), tuple[Tensor, Tensor])
    assert_type(tl.map(lambda i: W[i], range(4)), Tensor)
    assert_type(tl.associative_scan(lambda a, b: a + b, XS), Tensor)
    assert_type(tl.linear_recurrence(torch.rand(6, 4), XS), Tensor)
    assert_type(tl.fixed_point(lambda z: torch.tanh(z @ W * 0.1 + 1), H), Tensor)
    z, _ = tl.fixed_point(lambda z, c: torch.tanh(z @ W * 0.1 + c), H, context=XS[0], return_steps=True)
    assert_type(z, Tensor)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.h: Tensor = torch.zeros(1, 4)

    def step(self, x: Tensor) -> Tensor:
        self.h = self.cell(x[None], self.h)
        return self.h


def test_state_on_modules() -> None:
    decoder = Decoder()
    loops = tl.carrying(decoder)
    assert_type(loops.map(decoder.step, XS, checkpoints=4), Tensor)
    assert_type(loops.map(lambda x: decoder.step(x), XS), Tensor)
    c, ys = loops.scan(lambda c, x: (c + 1, decoder.step(x)), torch.zeros(1), XS)
    assert_type(c, Tensor)
    assert_type(ys, Tensor)
    assert_type(loops.fori_loop(0, 3, lambda i, c: c + decoder.step(XS[i]).sum(), c), Tensor)
    assert_type(loops.while_loop(lambda c: c.sum() < 3, lambda c: c + decoder.step(XS[0]).sum() * 0 + 1, c), Tensor)
    c, steps = loops.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, c, return_steps=True)
    assert (float(c), steps) == (9.0, 3)


def test_packed() -> None:
    p = tl.pack_padded(torch.ones(3, 12, 4), [7, 0, 12])
    q = 2 * (p * 2) + p / 2 - 1
    assert_type(-q + p, tl.PackedTensor)
    assert_type((p > 0) & (p < 3), tl.PackedTensor)
    assert_type(p.sin().mean(2), tl.PackedTensor)
    assert_type(p.mean(1), Tensor)
    y = nn.Linear(4, 4)(torch.sin(p))
    pooled: Tensor = (p * (p @ W).softmax(1)).sum(1) + p.amax(1, initial=0.0) + p.pad().sum(1)
    rows = [row.sum() for row in p.unbind()]
    assert len(rows) == p.lens.numel() == 3
    assert pooled.shape == (3, 4)
    assert torch.equal(y.lens, p.lens)
    both = torch.cat([p, q], 2) + torch.where(p > 0, 1, 0).sum()
    assert both.dim() == 3
    heads = p.unflatten(2, (2, 2))
    out = tl.attention(heads, heads, heads, causal=True, window=3)
    assert_type(out, tl.PackedTensor)
    near = tl.attention(heads, heads, heads, score_mod=lambda score, b, h, i, j: score - 0.1 * (i - j).abs())
    assert (out + near).values.shape == (19, 2, 2)


def test_arrays() -> None:
    array = tl.TensorArray()
    for x in XS:
        array.append(x)
    array[0] = XS[1]
    assert_type(array[-1], Tensor)
    assert_type(array[:3], Tensor)
    total = sum((x.sum() for x in array), start=torch.zeros(()))
    assert_type(total, Tensor)
    keys = tl.TensorArray().append(W[:1])
    assert_type(tl.attention(W[:1], keys, keys), Tensor)
    assert array.extend([H, H]).truncate(2).stack().shape == array.gather([0, 1]).shape == (2, 4)


def test_search() -> None:
    embed, readout = nn.Embedding(9, 16), nn.Linear(16, 9)

    def model(h: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sin(h + embed(tokens))
        return h, readout(h).log_softmax(-1)

    def with_history(h: Tensor, tokens: Tensor, *, history: Tensor) -> tuple[Tensor, Tensor]:
        return model(h, tokens)

    sizes: dict[str, Any] = {"batch_size": 2, "beam_size": 4, "bos_id": 0, "eos_id": 1, "max_steps": 5}
    init = torch.zeros(2, 16)
    hyps = tl.beam_search(
        model, init, batch_size=2, beam_size=4, bos_id=0, eos_id=[1, 2], length=tl.beam.BoundedReward(1.0, 3)
    )
    tl.beam_search(with_history, init, **sizes)
    tl.beam_search(lambda h, tokens: model(torch.sin(h), tokens), init, **sizes)
    tl.beam_search(
        lambda h, tokens: (tokens, model(init[:, None], (h + tokens) % 9)[1]), torch.zeros(2).long(), **sizes
    )
    tl.beam_search(lambda h, tokens, c: model(h + c[:, None], tokens), init, context=init, **sizes)
    risks = tl.edit_distance(hyps.tokens, tl.PackedTensor.from_list([torch.tensor([2, 3]), torch.tensor([4])]))
    loss = tl.minimum_risk(hyps.scores, risks) + tl.mwer(hyps.scores, risks)
    assert_type(loss, Tensor)
    torch.autograd.backward(loss)  # loss.backward() has no annotations in torch


def test_tools() -> None:
    made: Callable[[Tensor], Tensor] = lambda x: tl.scan(step, H, x)[1].sum()  # noqa: E731
    kept = tl.memory.saved_bytes(lambda: made(XS.clone().requires_grad_()))
    assert_type(kept, int)
    assert_type(tl.schedule.advances(tl.schedule.of(3, 10), 10), int)
