"""What changes the log-probabilities of searches and rollouts, or stops rows, and which of it knows rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue

# Of transformers' processors: what they make of a row's tokens does not depend on which row it is, nor on calls before.
_ALIKE = (
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper"),
    *("RepetitionPenaltyLogitsProcessor", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper"),
    *("MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
    *("NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor"),
    *("ExponentialDecayLengthPenalty", "LogitNormalization", "SuppressTokensAtBeginLogitsProcessor"),
    *("SuppressTokensLogitsProcessor", "WhisperTimeStampLogitsProcessor"),
)
_STOPS_ALIKE = ("MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria")
# These keep something from call to call that belongs to a row, or add rows of their own.
_KEEPING = (
    *("UnbatchedClassifierFreeGuidanceLogitsProcessor", "ClassifierFreeGuidanceLogitsProcessor"),
    *("DiaClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor", "WhisperNoSpeechDetection"),
    *("DiaEOSDelayPatternLogitsProcessor", "DiaEOSChannelFilterLogitsProcessor"),
)


class Processor(NamedTuple):
    """(ids, log_probs) -> log_probs, and whether it must be given all rows, those that have stopped too."""

    run: Callable[[Any, Any], Any]
    all_rows: bool


def as_processor(given: Any) -> Processor | None:
    """Checks a user's `logits_processor` and wraps it as a `Processor`; None if nothing was given."""
    if given is None:
        return None
    many = isinstance(given, list | tuple)  # as LogitsProcessorList is
    parts = list(given) if many else [given]
    if not all(callable(x) for x in parts):
        raise WrongType(
            "logits_processor must be a function of (input_ids, scores) or a list of them, got "
            f"{arguments.describe(given)}"
        )
    if not parts:
        return None
    for x in parts:
        if isinstance(x, _classes(_KEEPING)):
            raise WrongValue(
                f"logits_processor has {type(x).__name__}, which keeps something of each row from call to call, and "
                "rows change places; leave it out, or put the same into the model's forward"
            )
    alike = _classes(_ALIKE)
    return Processor(LogitsProcessorList(parts) if many else given, not all(type(x) in alike for x in parts))


def as_stop(given: Any) -> Processor | None:
    """Wraps a user's `stopping_criteria` as a `Processor`: of ids (B, n), which rows stop; None for no rules."""
    parts = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if not all(callable(x) for x in parts):
        raise WrongType(
            "stopping_criteria must be a function of (input_ids, scores) or a list of them, got "
            f"{arguments.describe(given)}"
        )
    if not parts:
        return None

    def run(ids: Tensor, scores: None) -> Tensor:
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for rule in parts:
            found = rule(ids, scores)
            answer = torch.as_tensor(found, device=ids.device) if isinstance(found, bool | Tensor) else ids
            if answer.dtype is not torch.bool or (answer.numel() != 1 and answer.shape != done.shape):
                raise WrongType(
                    f"stopping_criteria has {type(rule).__name__}, which must give a bool, or a bool for each row, "
                    f"({len(ids)},), got {arguments.describe(found)}"
                )
            done = done | answer
        return done

    return Processor(run, not all(type(x) in _classes(_STOPS_ALIKE) for x in parts))


def _classes(names: tuple[str, ...]) -> tuple[type, ...]:
    places = transformers.generation.logits_process, transformers.generation.stopping_criteria
    found = (getattr(place, name, None) for place in places for name in names)
    return tuple(x for x in found if x is not None)
