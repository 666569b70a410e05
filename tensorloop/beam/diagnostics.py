"""What a search finds out about the model that it was given: what it refuses, and what it warns of.

That no later hypothesis can be better is proved from what log-probabilities are: a sum of them never rises, and no
probability is above 1. Scores that break this disprove the proof.
"""

from collections.abc import Sequence
from typing import Never

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop._common.user_line import warn
from tensorloop.beam.batch import Batch

_NAME = "beam_search"
ENDLESS = 5000  # steps without a limit after which one is told


def find_slack(dtype: torch.dtype) -> float:
    """How far above 0 the log of a sum of probabilities may be by rounding, that of a large vocabulary included."""
    return 0.01 + 16 * torch.finfo(dtype).eps


def find_disproved(
    bound: float, first: Tensor, best: Tensor, steps: Tensor, ends: tuple[Tensor, Tensor], mass: Tensor
) -> Tensor:
    """(B,) bool: the rows whose scores are no log-probabilities; `bound` is the slack of each step.

    `first` (B,): the log of what the first step's sum to. `best` (T, B): the best running sum after each of `steps`
    (B,). `ends`: tokens and sums of those returned, (B, n). `mass` (B,): the probability of all of them.
    """
    t = torch.arange(len(best), device=best.device)[:, None]
    before = torch.cat([torch.zeros_like(best[:1]), best])  # the best sum before each step
    rises = ((best - before[:-1] > bound) & (t < steps)).any(0)
    lens, sums = ends
    rises |= (sums - before.t().gather(1, lens.clamp(max=len(best))) > bound).any(1)
    return (first > bound) | rises | (mass.log() > bound * steps.clamp(min=1))


def warn_of_scores(over: Sequence[float]) -> bool:
    """Tells of rows that prove nothing, those not 0 of B numbers, and whether there are any."""
    rows = [row for row, x in enumerate(over) if x]
    if rows:
        warn(
            f"{_NAME}: log_probs of {len(rows)} of {len(over)} rows, row {rows[0]} the first, come to probabilities of "
            f"more than 1, so nothing proves a result the best and `stopped` does not say 'exact'; apply log_softmax "
            f"in step_fn. A reward for length belongs in a length model"
        )
    return bool(rows)


def warn_of_endless(searching: Tensor, ended: Tensor, n_best: int) -> None:
    """Tells of a search that may never end, in rows (B,); `ended` (B, n)."""
    rows = searching.nonzero()[:, 0].tolist()
    row = rows[0]
    warn(
        f"{_NAME}: {ENDLESS} steps, and {len(rows)} rows still run; in row {row} {int(ended[row].sum())} of {n_best} "
        f"hypotheses have ended. A search whose eos_id stays improbable, or has probability 0, runs for ever: give "
        f"max_steps"
    )


def refuse_row(t: int, row: int, log_probs: Tensor | None) -> Never:
    """For a row whose log_probs (K, V) are no numbers, or None: those that forbid everything."""
    where = f"step {t}, row {row}"
    if log_probs is not None:
        what = "infinite" if bool((log_probs == torch.inf).any()) else "NaN"
        raise WrongValue(f"step_fn gave {what} log_probs at {where}")
    raise WrongValue(
        f"at {where} every token of every hypothesis is forbidden (log_probs of -inf); "
        f"let eos_id end those that cannot go on"
    )


def check_sums(t: int, log_probs: Tensor, running: Tensor, batch: Batch, tolerance: float) -> None:
    """Raises where probabilities do not sum to one, in rows of the batch that are `running`."""
    total = log_probs.logsumexp(2)
    off = (~(total.abs() <= tolerance) & running[:, None]).nonzero()
    if len(off):
        row, place = off[0].tolist()
        raise WrongValue(
            f"log_probs at step {t}, row {batch.name(row)}, hypothesis {place} sum to a probability of "
            f"{float(total[row, place].exp()):.4g}, not 1; apply log_softmax in step_fn"
        )
