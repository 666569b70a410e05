"""Processors of log-probabilities that know rows find what `generate` finds, also where rows have ended before."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tensorloop import hf
from tests.support.hf_prompts import ENDS, build, prompts

ROWS = [list(range(30)), [2, *range(10, 41)], [3, *range(2, 41, 2)]]


class Offset:
    """Not of transformers: adds what belongs to each row, whose number it counts."""

    def __init__(self, beams: int) -> None:
        self.beams = beams

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(ids)) // self.beams
        return scores - 3.0 * ((torch.arange(scores.shape[1]) + rows[:, None]) % 3 == 0)


MAKERS: dict[str, Any] = {
    "prefixes": lambda ids: transformers.PrefixConstrainedLogitsProcessor(lambda row, said: ROWS[row], 3),
    "source": lambda ids: transformers.EncoderNoRepeatNGramLogitsProcessor(1, ids),
    "own": lambda ids: Offset(3),
    "alike": lambda ids: transformers.NoRepeatNGramLogitsProcessor(1),
}


@pytest.mark.parametrize("kind", ["gpt2", "grouped"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.few("prefixes-gpt2", "own-grouped")
def test_finds_what_generate_finds(kind: str, maker: str) -> None:
    model, stopped = build(kind), 0
    ids, mask = prompts(model, padded=True)
    for ends in (ENDS[:3], ENDS):
        for checkpoints in (None, 2):
            hyps = hf.beam_search(
                model, ids, mask, beam_size=3, max_steps=7, eos_token_id=ends, early_stopping=True,
                logits_processor=[MAKERS[maker](ids)], checkpoints=checkpoints,
            )  # fmt: skip
            theirs: Any = model.generate(
                ids, attention_mask=mask, num_beams=3, num_return_sequences=3, max_new_tokens=7, eos_token_id=ends,
                early_stopping=True, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
                output_scores=True, logits_processor=transformers.LogitsProcessorList([MAKERS[maker](ids)]),
            )  # fmt: skip
            torch.testing.assert_close(hyps.final.flatten().float(), theirs.sequences_scores, rtol=1e-5, atol=1e-5)
            lens = hyps.lens.amax(1)
            stopped += int((lens < lens.max()).sum())
    assert stopped


def test_rows_leave_where_all_are_treated_alike() -> None:
    model = build("grouped")
    ids, mask = prompts(model, padded=True)
    seen: list[list[int]] = []

    def watch(processors: Any) -> list[int]:
        counts: list[int] = []
        handle = model.lm_head.register_forward_hook(lambda module, args, out: counts.append(len(out)))
        hf.beam_search(model, ids, mask, beam_size=3, max_steps=7, eos_token_id=ENDS, early_stopping=True,
                       logits_processor=processors)  # fmt: skip
        handle.remove()
        return counts

    for processors in ([transformers.RepetitionPenaltyLogitsProcessor(1.5)], [lambda ids, scores: scores]):
        seen.append(watch(processors))
    assert seen[0][-1] < 9
    assert set(seen[1][1:]) == {9}


def test_processors_that_keep_something_of_rows_are_refused() -> None:
    model = build("grouped")
    ids, mask = prompts(model, padded=True)
    for processor in (
        transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model),
        transformers.ClassifierFreeGuidanceLogitsProcessor(1.5),
    ):
        with pytest.raises(ValueError, match=r"beam_search: logits_processor has \w+, which keeps something of"):
            hf.beam_search(model, ids, mask, beam_size=3, max_steps=4, logits_processor=[processor])
