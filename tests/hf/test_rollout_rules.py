"""What changes the distribution of a rollout or stops its rows, its entropies, and rollouts without gradients."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tensorloop as tl
from tensorloop import hf
from tests.support.hf_prompts import ENDS, build, force, prompts


class Offset:
    """Not of transformers: adds what belongs to each row, whose number it counts."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(ids))[:, None]
        return scores - 3.0 * ((torch.arange(scores.shape[1]) + rows) % 3 == 0)


def only_odd(ids: Tensor, scores: Tensor) -> Tensor:
    """Changes what it is given in place."""
    scores[:, ::2] = -torch.inf
    return scores


PROCESSORS: dict[str, Any] = {
    "alike": lambda ids: [
        transformers.RepetitionPenaltyLogitsProcessor(1.7), transformers.NoRepeatNGramLogitsProcessor(1),
    ],
    "own": lambda ids: [Offset()],
    "one": lambda ids: only_odd,
    "list": lambda ids: transformers.LogitsProcessorList([transformers.TopKLogitsWarper(4), Offset()]),
    "rows": lambda ids: [transformers.PrefixConstrainedLogitsProcessor(lambda row, said: [3 + row, 9, 12 + row], 1)],
}  # fmt: skip


def as_list(given: Any) -> Any:
    return transformers.LogitsProcessorList(given if isinstance(given, list) else [given])


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("kind", ["grouped", "gpt2", "t5"])
@pytest.mark.few("grouped-alike", "gpt2-own", "t5-alike", "grouped-one", "grouped-list", "t5-rows")
def test_processors_are_those_of_generate(name: str, kind: str) -> None:
    model = build(kind)
    ids, mask = prompts(model, padded=True)
    before = 1 if model.config.is_encoder_decoder else ids.shape[1]
    for ends in (ENDS[:3], []):
        theirs = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=ends or None,
            logits_processor=as_list(PROCESSORS[name](ids)),
        )[:, before:]  # fmt: skip
        for checkpoints in (None, 2):
            ours = hf.rollout(model, ids, mask, max_new_tokens=6, eos_token_id=ends, checkpoints=checkpoints,
                              logits_processor=PROCESSORS[name](ids))  # fmt: skip
            assert torch.equal(ours.tokens.pad(0), theirs)


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("name", ["alike", "own", "one"])
def test_draws_log_probs_and_entropies_are_of_what_processors_make(name: str, checkpoints: int | None) -> None:
    model = build("grouped")
    ids, _ = prompts(model, padded=False)
    drawn = hf.rollout(
        model, ids, max_new_tokens=6, eos_token_id=ENDS[:3], do_sample=True, temperature=0.7, top_k=9,
        logits_processor=PROCESSORS[name](ids), return_entropy=True, checkpoints=checkpoints,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    tokens = drawn.tokens.pad(3)
    said = torch.cat([ids, tokens], 1)
    logits = model(said, use_cache=False).logits[:, 5:-1]
    run: Any = as_list(PROCESSORS[name](ids))
    top: Any = transformers.TopKLogitsWarper(9)
    log_probs: list[Tensor] = []
    for t in range(tokens.shape[1]):
        scores = run(said[:, : 6 + t], logits[:, t].clone()) / 0.7
        log_probs.append(top(said, scores).log_softmax(-1))
    steps = torch.stack(log_probs, 1)
    real = torch.arange(tokens.shape[1]) < drawn.lens[:, None]
    wanted = steps.gather(2, tokens[..., None])[..., 0][real]
    entropies = -(steps.exp() * steps.masked_fill(steps.isinf(), 0)).sum(-1)[real]
    policy = (logits / 0.7).log_softmax(-1).gather(2, tokens[..., None])[..., 0][real]
    assert drawn.entropies is not None
    weights = torch.linspace(0.5, 1.5, len(wanted), dtype=wanted.dtype)
    for mine, theirs in (
        (drawn.log_probs, wanted),
        (drawn.entropies, entropies),
        (drawn.policy_log_probs, policy),
    ):
        torch.testing.assert_close(mine.values, theirs)
        found, expected = (
            torch.autograd.grad((x * weights).sum(), list(model.parameters()), retain_graph=True)
            for x in (mine.values, theirs)
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_entropies_only_where_they_are_asked_for() -> None:
    model = build("t5")
    ids, mask = prompts(model, padded=True)
    assert hf.rollout(model, ids, mask, max_new_tokens=3).entropies is None
    drawn = hf.rollout(model, ids, mask, max_new_tokens=3, return_entropy=True)
    assert drawn.entropies is not None
    assert drawn.entropies.lens.tolist() == drawn.lens.tolist()
    with pytest.raises(TypeError, match="rollout: return_entropy must be"):
        hf.rollout(model, ids, mask, max_new_tokens=3, return_entropy=2)  # pyright: ignore[reportArgumentType]


def test_processors_that_cannot_be_right() -> None:
    model = build("grouped")
    ids, _ = prompts(model, padded=False)
    cases: list[tuple[Any, str]] = [
        (3, r"logits_processor must be a function of \(input_ids, scores\) or a list of them, got int 3"),
        (lambda ids, scores: scores[:, :5], r"must give scores \(3, 41\), as it was given, got \(3, 5\)"),
        (lambda ids, scores: None, r"logits_processor must give scores \(3, 41\), as it was given, got None"),
        (transformers.ClassifierFreeGuidanceLogitsProcessor(1.5), "logits_processor has Classifier.*, which keeps"),
        (lambda ids, scores: scores - torch.inf, "NaN or infinite logits, or logits_processor made them, for row 0 at"),
    ]  # fmt: skip
    for given, said in cases:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=f"rollout: .*{said}"):
            hf.rollout(model, ids, max_new_tokens=3, logits_processor=given)


# -- stop rules


class Rows(transformers.StoppingCriteria):
    """Stops each row at a length of its own."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:  # pyright: ignore
        assert scores is None
        return input_ids.shape[1] >= self.lengths


def said_twice(ids: Tensor, scores: Any) -> Tensor:
    return ids[:, -1] == ids[:, -2]


STOPS: dict[str, Any] = {
    "rows": lambda: Rows(8, 7, 10),
    "bool": lambda: [lambda ids, scores: ids.shape[1] >= 9],
    "alike": lambda: transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(8)]),
    "several": lambda: [said_twice, Rows(12, 9, 10)],
}


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_rules_stop_rows_where_generate_stops_them(name: str, checkpoints: int | None) -> None:
    model = build("grouped")
    ids, mask = prompts(model, padded=True)
    given = STOPS[name]()
    for ends in ([], ENDS[:3]):
        theirs = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=ends or None,
            stopping_criteria=transformers.StoppingCriteriaList(given if isinstance(given, list) else [given]),
        )[:, 6:]  # fmt: skip
        ours = hf.rollout(model, ids, mask, max_new_tokens=6, eos_token_id=ends, stopping_criteria=given,
                          checkpoints=checkpoints)  # fmt: skip
        found = ours.tokens.pad(0)
        assert found.shape == theirs.shape
        real = torch.arange(found.shape[1]) < ours.lens[:, None]  # without an end, generate goes on in rows that stop
        assert torch.equal(found, theirs.masked_fill(~real, 0))
        last = torch.stack([tokens[-1] for tokens in ours.tokens.unbind()])
        assert torch.equal(ours.ended, torch.isin(last, torch.tensor(ends, dtype=torch.int64)))
        torch.testing.assert_close(
            ours.log_probs.values, torch.cat(force(model, ids, mask, list(ours.tokens.unbind())))
        )
        ours.log_probs.values.sum().backward()


def test_rules_that_treat_rows_alike_let_them_leave() -> None:
    model, seen = build("grouped"), []
    ids, mask = prompts(model, padded=True)
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    for rule, last in ((transformers.MaxLengthCriteria(30), False), (lambda ids, scores: False, True)):
        seen.clear()
        hf.rollout(model, ids, mask, max_new_tokens=20, eos_token_id=ENDS, do_sample=True, stopping_criteria=rule,
                   generator=torch.Generator().manual_seed(1))  # fmt: skip
        assert (seen[-1] == 3) == last


def test_a_rule_may_be_all_that_stops_rows() -> None:
    model = build("t5")
    ids, mask = prompts(model, padded=True)
    found = hf.rollout(model, ids, mask, eos_token_id=[], stopping_criteria=transformers.MaxLengthCriteria(4))
    assert found.lens.tolist() == [3, 3, 3]  # after the token that it begins with
    assert not found.ended.any()
    assert torch.equal(found.without_end.lens, found.lens)


def test_rules_that_cannot_be_right() -> None:
    model = build("grouped")
    ids, _ = prompts(model, padded=False)
    cases: list[tuple[Any, str]] = [
        (3, r"stopping_criteria must be a function of \(input_ids, scores\) or a list of them, got int 3"),
        (lambda ids, scores: ids[:, -1], r"stopping_criteria has function, which must give a bool, or"),
        (lambda ids, scores: torch.zeros(2, dtype=torch.bool), r"a bool for each row, \(3,\), got"),
        (lambda ids, scores: None, r"a bool for each row, \(3,\), got None"),
    ]  # fmt: skip
    for given, said in cases:
        with pytest.raises(TypeError, match=f"rollout: .*{said}"):
            hf.rollout(model, ids, max_new_tokens=3, stopping_criteria=given)


# -- without gradients


@pytest.mark.parametrize("attention", ["sdpa", "tensorloop"])
@pytest.mark.parametrize("kind", ["gpt2", "grouped", "gemma3", "t5"])
@pytest.mark.few("gpt2-sdpa", "gemma3-tensorloop", "gemma3-sdpa", "t5-tensorloop")
def test_rollouts_without_gradients_are_the_same(kind: str, attention: str) -> None:
    model, seen = build(kind, attention), []
    ids, mask = prompts(model, padded=True)
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(len(out)))
    for group, rule in ((1, None), (3, None), (1, lambda ids, scores: False)):
        options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": ENDS, "do_sample": True, "group": group}
        found = []
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                found.append(hf.rollout(model, ids, mask, generator=torch.Generator().manual_seed(5),
                                        stopping_criteria=rule, **options))  # fmt: skip
        assert len(set(found[0].lens.tolist())) > 1
        assert torch.equal(found[0].tokens.pad(0), found[1].tokens.pad(0))
        torch.testing.assert_close(found[0].log_probs.values.detach(), found[1].log_probs.values)
        assert not found[1].log_probs.requires_grad
        assert (seen[-1] < seen[0]) == (rule is None)  # rows have left, and their keys with them


@pytest.mark.parametrize("feed", ["tokens", "soft"])
def test_training_mode_without_gradients(feed: str) -> None:
    """As before a step of PPO or GRPO: dropout is drawn, and nothing is recorded."""
    model = build("gpt2").train()
    ids, mask = prompts(model, padded=True)
    with torch.no_grad():
        still = hf.rollout(model, ids, mask, max_new_tokens=4, eos_token_id=[], feed=feed)
    torch.testing.assert_close(
        still.log_probs.values, hf.rollout(model.eval(), ids, mask, max_new_tokens=4, eos_token_id=[], feed=feed)
        .log_probs.values.detach(),
    )  # fmt: skip
    noisy = build("gpt2", "sdpa", embd_pdrop=0.5).train()
    with torch.no_grad():
        drawn = [hf.rollout(noisy, ids, mask, max_new_tokens=4, eos_token_id=[], feed=feed) for _ in range(2)]
    assert noisy.training
    assert not torch.equal(drawn[0].log_probs.values, drawn[1].log_probs.values)


def test_a_default_for_compiling_is_for_loops_of_ones_own() -> None:
    model = build("grouped")
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    given: Any = {"max_new_tokens": 4, "eos_token_id": []}
    expected = hf.rollout(model, ids, **given).log_probs.values
    with tl.set_default_compile("strict"):
        torch.testing.assert_close(hf.rollout(model, ids, **given).log_probs.values, expected)
        with torch.no_grad():
            torch.testing.assert_close(hf.rollout(model, ids, **given).log_probs.values, expected)
        hf.beam_search(model, ids, beam_size=2, max_steps=3, eos_token_id=[])
