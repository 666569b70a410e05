"""What trainers of models compute, as recipes: GRPO and DPO beside TRL, Coconut beside whole sequences run again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from docs.examples.recipes import coconut, dpo, eagle, grpo, self_forcing
from tensorloop import hf, memory
from tests.support.hf_models import VOCABULARY, model_of
from tests.support.hf_ports import (
    GROUP,
    HEAT,
    KINDS,
    Drawn,
    assert_same,
    be_exact,
    exact_model,
    grads_of,
    other_of,
    rows_of,
)


@pytest.mark.parametrize("kind", KINDS)
def test_grpo_is_that_of_a_padded_batch(kind: str) -> None:
    drawn = Drawn(kind)
    assert len(set(drawn.answers.lens.tolist())) > 2
    log_probs, entropies, mask = grpo.padded_log_probs(drawn.model, drawn.prompts, drawn.answers, GROUP, HEAT)
    old, of_reference = drawn.old.pad(), drawn.of_reference.pad()
    ratios = (log_probs - old).exp()[mask]
    assert (ratios > 1.2).any()
    assert (ratios < 0.8).any()
    expected = grpo.padded_loss(log_probs, old, drawn.advantages, mask)
    assert_same(drawn.model, drawn.loss(loss_type="grpo"), expected)
    log_probs, entropies, mask = grpo.padded_log_probs(drawn.model, drawn.prompts, drawn.answers, GROUP, HEAT)
    expected = grpo.padded_loss(log_probs, old, drawn.advantages, mask, of_reference, 0.3)
    expected = expected - 0.1 * (entropies * mask).sum() / mask.sum()
    assert_same(drawn.model, drawn.loss(loss_type="grpo", beta=0.3, entropy_coef=0.1), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_dpo_is_that_of_each_row_by_itself(kind: str) -> None:
    model = exact_model(kind)
    reference = other_of(model)
    prompts, pairs = rows_of([5, 2, 4]), rows_of([3, 6, 1, 4, 5, 5])

    def log_prob(of: Any, i: int) -> Tensor:
        prompt, answer = prompts.unbind()[i // 2], pairs.unbind()[i]
        logits = of(torch.cat([prompt, answer])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        return -nn.functional.cross_entropy(logits, answer, reduction="sum")

    gains = torch.stack([log_prob(model, i) - log_prob(reference, i).detach() for i in range(6)])
    expected = -nn.functional.logsigmoid(0.2 * (gains[::2] - gains[1::2])).mean()
    assert_same(model, dpo.dpo_loss(model, reference, prompts, pairs, beta=0.2), expected)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_of_grpo_raises_the_reward(updates: int) -> None:
    torch.manual_seed(0)
    model = model_of("grouped", dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    prompts = rows_of([5, 2, 4])

    def reward(tokens: tl.PackedTensor) -> Tensor:
        return (tokens % 2 == 0).float().mean(1)

    rewards = [
        float(grpo.train_step(model, optimizer, prompts, reward, group=8, max_new_tokens=6, updates=updates).mean())
        for _ in range(12)
    ]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6


# -- thoughts


@pytest.mark.parametrize("thoughts", [0, 1, 5])
@pytest.mark.parametrize("attention", ["sdpa", hf.ATTENTION])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_coconut_is_whole_sequences_run_again(
    kind: str, attention: str, thoughts: int, checkpoints: int | None
) -> None:
    model = exact_model(kind)
    question, mask = grpo.pad_left(rows_of([5, 2, 4]))
    answer = rows_of([3, 3, 3]).values.view(3, 3)
    expected = coconut.plain_loss(model, question, mask, answer, thoughts)
    grads = grads_of(model, expected)
    model.set_attn_implementation(attention)
    found = coconut.compute_loss(model, question, mask, answer, thoughts, checkpoints=checkpoints)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads_of(model, found), grads, rtol=1e-9, atol=1e-9)


def test_bytes_of_thoughts() -> None:
    """Kept for backward by n and by 2 n thoughts: the sequence run again grows as the square."""
    model = model_of("grouped", hf.ATTENTION, torch.float32)
    question, mask = torch.randint(3, VOCABULARY, (4, 8)), torch.ones(4, 8, dtype=torch.int64)

    def kept(thoughts: int, loss: Any, **options: Any) -> int:
        return memory.saved_bytes(lambda: loss(model, question, mask, question[:, :1], thoughts, **options))

    few, many, most = (kept(n, coconut.compute_loss) for n in (10, 20, 40))
    assert most - many == pytest.approx(2 * (many - few), rel=0.15)  # arrays have room for a power of 2
    assert most < kept(40, coconut.plain_loss) / 15
    assert kept(40, coconut.compute_loss, checkpoints=4) < most / 3


def test_thoughts_learn() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = model_of("gpt2", dtype=torch.float32)
    adam, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(40):
        question, answer = coconut.make_walks(64, 4, 2, generator)
        loss = coconut.compute_loss(model, question, torch.ones_like(question), answer, 2)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 1.45 < 3 < losses[0]  # at random among four nodes it is 1.39


# -- a draft head


def _known(kind: str, length: int = 8) -> tuple[Any, tuple[Tensor, Tensor, Tensor], Tensor]:
    torch.manual_seed(2)
    target = exact_model(kind)
    ids = torch.randint(3, VOCABULARY, (3, length))
    draft = eagle.Draft(16, 4, VOCABULARY).double()
    return draft, eagle.read_target(target, ids, (0, 1, 2)), torch.tensor([length, length - 3, 2])


def _masked(draft: eagle.Draft, known: tuple[Tensor, Tensor, Tensor], lens: Tensor, steps: int) -> Tensor:
    """The losses by attention of all places of all steps to all, with a mask that says who sees whom."""
    states, (_, tokens, goals) = draft.fuse(known[0]), known
    T, keys, values, losses = tokens.shape[1], [], [], []
    for k in range(steps):
        shifted = torch.zeros_like(tokens)
        shifted[:, : T - 1 - k] = tokens[:, 1 + k :]
        q, key, value = draft.look(states, shifted, torch.arange(T) + k)
        keys.append(key)
        values.append(value)
        mask = torch.cat([torch.ones(T, T).tril(), *[torch.eye(T)] * k], 1).bool()
        seen = nn.functional.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask)
        states = draft.end(states, seen)
        log_probs = draft.head(draft.of_head(states)).log_softmax(-1)
        terms = [
            -(goals[b, t + 1 + k] * log_probs[b, t]).sum()
            for b in range(len(lens))
            for t in range(int(lens[b]) - 1 - k)
        ]
        losses.append(torch.stack(terms).mean())
    return torch.stack(losses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoints", [None, 1, 3])
def test_a_training_time_test_is_attention_with_a_mask(kind: str, checkpoints: int | None) -> None:
    draft, known, lens = _known(kind)
    found = eagle.compute_losses(draft, known, lens, 5, checkpoints=checkpoints)
    expected = _masked(draft, known, lens, 5)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert_same(draft, eagle.total(found), eagle.total(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_its_steps_are_those_of_drafting(kind: str) -> None:
    """At each place: a causal layer over the model's states up to there, then over its own, one after another."""
    draft, (states, tokens, _), _ = _known(kind)
    fused, T = draft.fuse(states), tokens.shape[1]
    kept, steps = eagle.Kept(tl.TensorArray(), tl.TensorArray(), fused), []
    for k in range(4):
        kept = draft.step(kept, nn.functional.pad(tokens[:, 1 + k :], (0, 0, 0, 1 + k)))
        steps.append(kept.states)
    for t in range(T - 4):
        rows = fused[:, : t + 1]
        for k in range(4):
            n = rows.shape[1]
            q, key, value = draft.look(rows, tokens[:, 1 : n + 1], torch.arange(n))
            seen = nn.functional.scaled_dot_product_attention(q, key, value, is_causal=True)
            new = draft.end(rows, seen)[:, -1:]
            torch.testing.assert_close(steps[k][:, t], new[:, 0], rtol=1e-10, atol=1e-10)
            rows = torch.cat([rows, new], 1)


def test_a_draft_head_learns_all_its_steps_and_keeps_one() -> None:
    draft, known, lens = _known("gpt2", 24)
    kept = {
        k: memory.saved_bytes(lambda k=k: eagle.compute_losses(draft, known, lens, 7, checkpoints=k)) for k in (None, 1)
    }
    assert kept[1] < kept[None] / 3
    adam = torch.optim.Adam(draft.parameters(), 1e-2)
    seen = []
    for _ in range(20):
        losses = eagle.compute_losses(draft, known, lens, 5, checkpoints=1)
        adam.zero_grad()
        eagle.total(losses).backward()
        adam.step()
        seen.append(losses.detach())
    assert (seen[-1] < seen[0] - 0.1).all()


# -- videos


def _blockwise(model: Any, noise: Tensor) -> Tensor:
    """Videos without a cache: each step of each frame runs all frames, with a mask of blocks."""
    P, C = self_forcing.POINTS, self_forcing.CHANNELS
    made: list[Tensor] = []
    for given in noise:
        clean = torch.zeros_like(given[0])
        for time, fresh in zip(self_forcing.TIMES, given, strict=True):
            rows = torch.cat([*made, (1 - time) * clean + time * fresh], 1)
            times = torch.zeros(rows.shape[1], 1).double()
            times[-P:] = time
            block = torch.arange(rows.shape[1]) // P
            seen = (block[:, None] >= block)[None, None]
            told = model.read(torch.cat([rows, times.expand(len(rows), -1, 1)], -1))
            states = model.body(inputs_embeds=told, attention_mask=seen, use_cache=False).last_hidden_state
            clean = model.say(states[:, -P:])
        made.append(clean)
    assert made[0].shape[1:] == (P, C)
    return torch.stack(made)


def _video(attention: str = hf.ATTENTION) -> Any:
    torch.manual_seed(0)
    model = self_forcing.Video(16).double()
    be_exact(model.body)
    model.body.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("attention", ["sdpa", hf.ATTENTION])
@pytest.mark.parametrize("checkpoints", [None, 1, 3])
def test_self_forcing_is_all_frames_run_again(attention: str, checkpoints: int | None) -> None:
    model = _video(attention)
    noise = self_forcing.draw_noise(5, 3, torch.Generator().manual_seed(0)).double()
    expected = _blockwise(_video("sdpa"), noise)
    real = self_forcing.real_videos(5, 4, torch.Generator().manual_seed(1)).double()
    for videos in (
        self_forcing.make_videos(model, noise, checkpoints=checkpoints),
        self_forcing.plain_videos(model, noise),
    ):
        torch.testing.assert_close(videos, expected, rtol=1e-9, atol=1e-9)
    other = _video("sdpa")
    used = [name for name, _ in model.named_parameters() if "embed_tokens" not in name]
    found, true = (
        torch.autograd.grad(
            self_forcing.energy_distance(make(of), real), [dict(of.named_parameters())[name] for name in used]
        )
        for of, make in (
            (model, lambda of: self_forcing.make_videos(of, noise, checkpoints=checkpoints)),
            (other, lambda of: _blockwise(of, noise)),
        )
    )
    torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-9)


def test_bytes_of_videos() -> None:
    """Kept for backward by 8, 16 and 32 frames: a cache that concatenates grows as the square."""
    model, generator = self_forcing.Video(16), torch.Generator().manual_seed(0)

    def kept(frames: int, make: Any, **options: Any) -> int:
        noise = self_forcing.draw_noise(frames, 4, generator)
        return memory.saved_bytes(lambda: make(model, noise, **options).sum())

    few, many, most = (kept(n, self_forcing.make_videos) for n in (8, 16, 32))
    assert most - many == pytest.approx(2 * (many - few), rel=0.15)
    assert most < kept(32, self_forcing.plain_videos) / 2
    assert kept(32, self_forcing.make_videos, checkpoints=4) < most / 4


def test_videos_come_nearer_to_real_ones() -> None:
    torch.manual_seed(0)
    model, generator = self_forcing.Video(16), torch.Generator().manual_seed(0)

    def teach() -> Tensor:
        return self_forcing.denoising_loss(model, self_forcing.real_videos(3, 32, generator), generator)

    def force() -> Tensor:
        videos = self_forcing.make_videos(model, self_forcing.draw_noise(3, 32, generator))
        return self_forcing.energy_distance(videos, self_forcing.real_videos(3, 32, generator))

    for loss, updates in ((teach, 30), (force, 25)):
        losses = self_forcing.train(model, loss, updates, 5e-3)
        assert losses[-1] < 0.7 * losses[0]
    same = self_forcing.real_videos(3, 64, generator)
    assert float(self_forcing.off_the_square(same).max()) < 1e-5
    assert abs(float(self_forcing.energy_distance(same, self_forcing.real_videos(3, 64, generator)))) < 0.2
