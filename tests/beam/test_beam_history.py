"""What grows in the carry: each hypothesis reads its own past, with the numbers and gradients of copies."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tensorloop.beam import search
from tests.support.beam_cases import BOS, EOS, Table
from tests.support.devices import HERE

ROWS, SIZE, HEADS, WIDTH, VOCABULARY = 4, 3, 2, 3, 6
KEEPING = [
    {"checkpoints": checkpoints, "compact": compact} for checkpoints in (None, 1, 3) for compact in (False, True)
]
in_every_way = pytest.mark.parametrize("keeping", KEEPING, ids=lambda k: f"K={k['checkpoints']}-{k['compact']}")


def attend(q: Tensor, keys: Any, values: Any) -> Tensor:
    """The library's attention of hypotheses, which must not fall back here."""
    out = tl.attention(q, keys, values)
    assert out is not NotImplemented
    return out


def generic(q: Tensor, keys: Any, values: Any) -> Tensor:
    """Attention over slots that were read as a tensor."""
    k, v = keys[:], values[:]
    weights = torch.einsum("bkhd,tbkhd->bkht", q, k).mul(WIDTH**-0.5).softmax(-1)
    return torch.einsum("bkht,tbkhd->bkhd", weights, v)


def by_slots(q: Tensor, keys: Any, values: Any) -> Tensor:
    """The same, slot by slot."""
    k, v = torch.stack([keys[i] for i in range(len(keys))]), torch.stack(list(values))
    weights = torch.einsum("bkhd,tbkhd->bkht", q, k).mul(WIDTH**-0.5).softmax(-1)
    return torch.einsum("bkht,tbkhd->bkhd", weights, v)


WAYS = {"attend": attend, "tl.attention": tl.attention, "slice": generic, "slots": by_slots}


class Attentive(torch.nn.Module):
    """A decoder whose only memory is what it attends to."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator(HERE).manual_seed(0)
        width = HEADS * WIDTH

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.embedding, self.readout = weight(VOCABULARY, width), weight(width, VOCABULARY)
        self.q, self.k, self.v = weight(width, width), weight(width, width), weight(width, width)

    def parts(self, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.sin(self.embedding[tokens] + memory)
        q, k, v = ((x @ w).unflatten(-1, (HEADS, WIDTH)) for w in (self.q, self.k, self.v))
        return q, k, v

    def step(self, way: Any, carry: Any, tokens: Tensor, memory: Tensor) -> tuple[Any, Tensor]:
        keys, values = carry
        q, k, v = self.parts(tokens, memory[:, None])
        keys.append(k)
        values.append(v)
        out = torch.sin(way(q, keys, values).flatten(-2))
        return (keys, values), torch.log_softmax(out @ self.readout, -1)

    def search(self, memory: Tensor, way: Any = attend, prefix: Any = None, **options: Any) -> beam.Hypotheses:
        init = prefix or (tl.TensorArray(), tl.TensorArray())
        if prefix is not None:
            init = tuple(tl.TensorArray.unstack(x) for x in prefix)
        return beam.beam_search(
            lambda *args: self.step(way, *args), init, batch_size=len(memory), beam_size=SIZE, bos_id=BOS, eos_id=EOS,
            context=memory, **options,
        )  # fmt: skip

    def forced(self, memory: Tensor, hyps: beam.Hypotheses, prefix: Any = None) -> Tensor:
        """(B, n) scores of the hypotheses, one by one, over tensors that grow by cat."""
        totals = []
        for i in range(hyps.lens.numel()):
            b, last, total = i // hyps.n_best, BOS, memory.new_zeros(())
            k, v = (memory.new_zeros(0, HEADS, WIDTH),) * 2 if prefix is None else (x[:, b] for x in prefix)
            tail = [EOS] if bool(hyps.finished.flatten()[i]) else []
            for token in [*hyps.tokens[i].tolist(), *tail]:
                q, k1, v1 = self.parts(torch.tensor(last), memory[b])
                k, v = torch.cat([k, k1[None]]), torch.cat([v, v1[None]])
                weights = torch.einsum("hd,thd->ht", q, k).mul(WIDTH**-0.5).softmax(-1)
                out = torch.sin(torch.einsum("ht,thd->hd", weights, v).flatten())
                total, last = total + torch.log_softmax(out @ self.readout, -1)[token], token
            totals.append(total)
        return torch.stack(totals).view_as(hyps.scores)


def setting(slots: int = 0) -> tuple[Attentive, Tensor, Any, list[Tensor]]:
    model = Attentive()
    generator = torch.Generator(HERE).manual_seed(1)
    memory = torch.randn(ROWS, HEADS * WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    prefix = None
    if slots:
        shape = (slots, ROWS, HEADS, WIDTH)
        prefix = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2)]
    return model, memory, prefix, [memory, *model.parameters(), *(prefix or [])]


@in_every_way
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.extended("-0-")
def test_each_hypothesis_attends_to_its_own_history(way: str, slots: int, keeping: dict[str, Any]):
    model, memory, prefix, wanted = setting(slots)
    hyps = model.search(memory, WAYS[way], prefix, **keeping)
    assert hyps.lens.max() >= 3
    forced = model.forced(memory, hyps, prefix)
    torch.testing.assert_close(hyps.scores, forced, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, forced.numel(), dtype=forced.dtype).view_as(forced)
    ours = torch.autograd.grad((hyps.scores * weights).sum(), wanted)
    theirs = torch.autograd.grad((forced * weights).sum(), wanted)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@in_every_way
def test_one_array_for_keys_and_values(keeping: dict[str, Any]):
    """A decoder that attends to its own states, beside the same with copies of the states in the carry."""
    generator = torch.Generator(HERE).manual_seed(2)
    w, u, o = (
        torch.randn(n, m, generator=generator, dtype=torch.float64).requires_grad_()
        for n, m in ((6, 6), (6, 6), (6, 5))
    )
    start = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64).requires_grad_()

    def ours(carry: Any, tokens: Tensor, context: Tensor) -> tuple[Any, Tensor]:
        h, past = carry
        h = torch.sin(h @ w + u[tokens])
        past.append(h.unflatten(-1, (HEADS, WIDTH)))
        seen = attend(h.unflatten(-1, (HEADS, WIDTH)), past, past).flatten(-2)
        return (h, past), torch.log_softmax((h + seen) @ o, -1)

    def copying(carry: Any, tokens: Tensor, context: Tensor) -> tuple[Any, Tensor]:
        h, past, t = carry
        h = torch.sin(h @ w + u[tokens])
        past = past.index_copy(2, torch.tensor([t]), h[:, :, None])
        k = past[:, :, : t + 1].unflatten(-1, (HEADS, WIDTH))
        weights = torch.einsum("bkhd,bkthd->bkht", h.unflatten(-1, (HEADS, WIDTH)), k).mul(WIDTH**-0.5).softmax(-1)
        seen = torch.einsum("bkht,bkthd->bkhd", weights, k).flatten(-2)
        return (h, past, t + 1), torch.log_softmax((h + seen) @ o, -1)

    def search(step: Any, init: Any, **options: Any) -> tuple[Tensor, ...]:
        hyps = beam.beam_search(
            step, init, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, context=start, max_steps=7, **options
        )
        return hyps.scores, *torch.autograd.grad(hyps.scores.square().sum(), [w, u, o, start])

    theirs = search(copying, (start, torch.zeros(ROWS, 7, 6, dtype=torch.float64), 0))
    torch.testing.assert_close(search(ours, (start, tl.TensorArray()), **keeping), theirs)


@pytest.mark.parametrize("choose", [beam.Sample(), beam.StochasticBeam()], ids=repr)
def test_histories_of_samples(choose: Any):
    torch.manual_seed(0)
    model, memory, prefix, wanted = setting(1)
    hyps = model.search(memory, attend, prefix, choose=choose, max_steps=9, checkpoints=2)
    forced = model.forced(memory, hyps, prefix)
    torch.testing.assert_close(hyps.scores, forced.where(hyps.valid, -torch.inf), rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.where(hyps.valid, 0).sum(), wanted) for x in (hyps.scores, forced))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_second_derivatives(checkpoints: int | None, slots: int):
    model, memory, prefix, wanted = setting(slots)
    hyps = model.search(memory, attend, prefix, checkpoints=checkpoints, max_steps=6)
    found = []
    for scores in (hyps.scores, model.forced(memory, hyps, prefix)):
        grads = torch.autograd.grad(scores.square().sum(), wanted, create_graph=True)
        found.append(torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), wanted))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)


def test_the_caller_s_arrays_stay_as_they_were():
    model, memory, prefix, _ = setting(2)
    assert prefix is not None
    arrays = tuple(tl.TensorArray.unstack(x) for x in prefix)
    hyps = beam.beam_search(
        lambda *args: model.step(attend, *args), arrays, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS,
        context=memory,
    )  # fmt: skip
    assert hyps.stopped == ["exact"] * ROWS
    assert [len(x) for x in arrays] == [2, 2]


def walk(reads: Any, steps: int = 6, **options: Any) -> beam.Hypotheses:
    """A search whose array holds, for each step, the token that the hypothesis came with."""
    table = Table.random(ROWS, VOCABULARY, seed=3)

    def step(carry: Any, tokens: Tensor, logits: Tensor, *, history: Tensor) -> tuple[Any, Tensor]:
        before, past = carry
        past.append(tokens[..., None])
        reads(past, history, tokens)
        rows = torch.arange(len(tokens))[:, None]
        return (tokens, past), torch.log_softmax(logits[rows, before, tokens], -1)

    init = (torch.zeros(ROWS).long(), tl.TensorArray())
    return beam.beam_search(
        step, init, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, context=table.logits, max_steps=steps,
        stop="never", **options,
    )  # fmt: skip


def test_every_way_of_reading_gives_the_hypothesis_its_own_past():
    seen = []

    def reads(past: Any, history: Tensor, tokens: Tensor) -> None:
        t = history.shape[2]
        assert history.shape == (ROWS, SIZE, t)
        own = torch.cat([torch.full((ROWS, SIZE, 1), BOS), history], 2).permute(2, 0, 1)[..., None]
        assert len(past) == t + 1
        assert past.element_shape == (ROWS, SIZE, 1)
        assert past.dtype is torch.int64
        assert torch.equal(past[:], own)
        assert torch.equal(past.stack(), own)
        assert torch.equal(past[-1], own[-1])
        assert torch.equal(past[0], own[0])
        assert torch.equal(past[1 : t + 1], own[1:])
        assert torch.equal(past[::2], own[::2])
        assert torch.equal(torch.stack(list(past)), own)
        assert torch.equal(past.gather([t, 0]), own[[t, 0]])
        twin = tl.TensorArray.unstack(own)
        assert torch.equal(past.detach().stack(), twin.stack())
        seen.append(t)

    walk(reads)
    assert seen == list(range(6))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.extended("[4]", "[5]", "[6]", "[7]", "[8]", "[9]", "[10]", "[11]")
def test_what_is_read_is_what_a_copy_in_the_carry_would_hold(seed: int):
    pick = random.Random(seed)
    rows, size, steps, vocabulary = pick.randint(1, 5), pick.randint(1, 6), pick.randint(2, 14), pick.randint(3, 6)
    table = Table.random(rows, vocabulary, seed, spread=pick.choice([0.2, 2.0])).logits
    choose = pick.choice([beam.TopK(), beam.Sample(), beam.StochasticBeam()])
    checked = []

    def step(carry: Any, tokens: Tensor, logits: Tensor, *, history: Tensor) -> tuple[Any, Tensor]:
        before, past, copy, age = carry
        t = history.shape[2]
        past.append(tokens)
        copy = copy.index_copy(2, torch.tensor([t]), tokens[..., None])
        own, runs = copy[..., : t + 1], age[:, 0] == t  # what a row that has stopped is given means nothing
        assert torch.equal(past[:].permute(1, 2, 0)[runs], own[runs])
        assert torch.equal(history[runs], own[runs][..., 1:])
        checked.append(t)
        at = torch.arange(len(tokens))[:, None]
        return (tokens, past, copy, age + 1), torch.log_softmax(logits[at, before, tokens], -1)

    zeros = torch.zeros(rows).long()
    init = (zeros, tl.TensorArray(), torch.zeros(rows, steps).long(), zeros)
    beam.beam_search(
        step, init, batch_size=rows, beam_size=size, bos_id=BOS, eos_id=EOS, context=table, max_steps=steps,
        choose=choose, compact=pick.random() < 0.5,
    )  # fmt: skip
    assert checked


def test_history_is_what_is_returned():
    last = {}

    def reads(past: Any, history: Tensor, tokens: Tensor) -> None:
        last["history"], last["tokens"] = history, tokens

    hyps = walk(reads)
    running = torch.cat([last["history"], last["tokens"][..., None]], 2)[..., 1:]
    for b in range(ROWS):
        unfinished = [hyps.tokens[b * SIZE + j] for j in range(SIZE) if not hyps.finished[b, j]]
        for tokens in unfinished:
            assert any(torch.equal(tokens[: running.shape[2]], one) for one in running[b])


def test_arrays_that_grow_at_their_own_pace():
    """Two slots in some steps, none in others."""
    table = Table.random(ROWS, VOCABULARY, seed=4)

    def step(carry: Any, tokens: Tensor, *, history: Tensor) -> tuple[Any, Tensor]:
        before, past = carry
        t = history.shape[2]
        if t % 3:
            past.extend(torch.stack([tokens, tokens + 10]))
        if t % 3 == 2:
            past.append(tokens + 20)
        expected = []
        for i, token in enumerate(history.permute(2, 0, 1)[:t].unbind(0) if t else ()):
            if (i + 1) % 3:
                expected += [token, token + 10]
            if (i + 1) % 3 == 2:
                expected.append(token + 20)
        if expected:
            assert torch.equal(past[:], torch.stack(expected))
        return (tokens, past), torch.log_softmax(table.logits[torch.arange(ROWS)[:, None], before, tokens], -1)

    init = (torch.zeros(ROWS).long(), tl.TensorArray())
    beam.beam_search(step, init, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, max_steps=8, stop="never")


def test_a_row_that_has_stopped_goes_on_as_the_first_of_its_hypotheses(monkeypatch: pytest.MonkeyPatch):
    """Else a batch that is not compact would never have ancestors that all share, and hold S for all its steps."""
    made = list[Any]()
    monkeypatch.setattr(search, "Ancestry", lambda *args, make=search.Ancestry: made.append(make(*args)) or made[-1])
    # The hypotheses of row 0 stay apart until they end in step 1; those of row 1 come from the best one, step by step.
    first = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 8, 1, 1]]).log()
    later = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]]).log()

    def step(carry: Tensor, tokens: Tensor, *, history: Tensor) -> tuple[Tensor, Tensor]:
        scores = later if history.shape[2] else first
        return carry, torch.log_softmax(scores[:, None].expand(-1, SIZE, -1), -1)

    hyps = beam.beam_search(
        step, torch.zeros(2), batch_size=2, beam_size=SIZE, bos_id=BOS, eos_id=EOS, max_steps=8, stop="first_n",
        n_best=1, compact=False,
    )  # fmt: skip
    assert hyps.lattice.steps.tolist() == [2, 8]
    assert made[0].shared[-1] == made[0].state == 7


def test_what_cannot_be_done_to_a_shared_past():
    def overwrites(past: Any, history: Tensor, tokens: Tensor) -> None:
        past[0] = tokens[..., None]

    def wrong_shape(past: Any, history: Tensor, tokens: Tensor) -> None:
        tl.TensorArray.append(past, tokens)

    def of_rows(past: Any, history: Tensor, tokens: Tensor) -> None:
        past.write_rows(torch.zeros(ROWS).long(), tokens[..., None])

    with pytest.raises(RuntimeError, match="an array in the carry of a beam search only grows"):
        walk(overwrites)
    with pytest.raises(RuntimeError, match="only grows"):
        walk(of_rows)
    with pytest.raises(ValueError, match="element shape"):
        walk(wrong_shape)


def bare(step: Any, init: Any) -> beam.Hypotheses:
    return beam.beam_search(
        step, init, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, max_steps=3, stop="never"
    )


def test_arrays_must_come_back_where_they_were():
    scores = torch.full((ROWS, SIZE, 4), -2.0)
    with pytest.raises(ValueError, match=r"elements are \(4, 3, \.\.\.\), got \(4, 2\)"):
        bare(lambda c, k: (c.append(torch.zeros(ROWS, 2)), scores), tl.TensorArray())
    with pytest.raises(TypeError, match="step_fn was given an array at carry and returned TensorArray"):
        bare(lambda c, k: (tl.TensorArray(), scores), tl.TensorArray())
    with pytest.raises(ValueError, match=r"returned the array of carry\[1\] at carry\[0\]; arrays stay put"):
        bare(lambda c, k: ((c[1], c[0]), scores), (tl.TensorArray(), tl.TensorArray()))
    with pytest.raises(ValueError, match=r"init_carry is TensorArray of \(3, 5\).*expected 4 leading rows"):
        bare(lambda c, k: (c, scores), tl.TensorArray.unstack(torch.zeros(2, 3, 5)))


@pytest.mark.parametrize(("outer", "inner"), [(1, None), (2, 2), (None, 1)])
@pytest.mark.parametrize("way", WAYS)
def test_histories_in_a_search_inside_a_loop(way: str, outer: int | None, inner: int | None):
    model, memory, prefix, wanted = setting(1)

    def total(outer: int | None, inner: int | None) -> Tensor:
        def body(x: Tensor, _: None) -> tuple[Tensor, None]:
            hyps = model.search(torch.sin(x), WAYS[way], prefix, checkpoints=inner, max_steps=4)
            return x + hyps.scores.mean(1, keepdim=True), None

        return tl.scan(body, memory, length=3, checkpoints=outer)[0].sum()

    ours, plain = (torch.autograd.grad(total(*how), wanted) for how in ((outer, inner), (None, None)))
    torch.testing.assert_close(ours, plain)
