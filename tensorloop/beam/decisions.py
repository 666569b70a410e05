"""What a search decides: parents and tokens of every step, the pool of ended hypotheses, and when each row stops.

Decisions are facts, not state: they stand beside the loop, for all rows of the full batch, and nothing here has a
gradient. A step is decided once; when a checkpointed loop does it again, it is told what was decided then.

The pool keeps the n best ended hypotheses of each row as (key, sum, step, place). An end that comes later must be
strictly better to take a place, so that a row may stop as soon as nothing better can come.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorloop.beam import doubt
from tensorloop.beam.choose import Choice, Offer, TopK, choose_best
from tensorloop.beam.length import Sum, find_bound
from tensorloop.beam.noise import draw_seeds
from tensorloop.kernels import find
from tensorloop.kernels.eager.beam import widened

_ENDS = {"always": None, "top_k": 1, "top_2k": 2}
_NAME = "beam_search"


class Rules(NamedTuple):
    """The arguments of a search that decide."""

    size: int
    n_best: int
    eos_ids: tuple[int, ...]  # rising
    max_steps: int | None
    length: Any
    choose: Any
    stop: str
    eos: str
    check: bool


class Gold(NamedTuple):
    """Hypotheses that are followed to their end, one a row, at a place behind the others."""

    tokens: Tensor  # (B, T), eos behind the end
    lens: Tensor  # (B,)
    largest: int  # token
    end: int  # which of the eos_ids


class Decisions:
    """The decisions of one search. `size` counts the hypotheses that run, a gold one included."""

    # What each row has, (B, rules.size), once the first log_probs have told the dtype. Sums are of log-probabilities.
    keys: Tensor
    sums: Tensor
    most: Tensor  # (B,) the best that a running hypothesis can still reach
    left_out: Tensor  # (B,) the best key that the pool did not take in the step
    first_mass: Tensor  # (B,) the log of what the first step's probabilities sum to
    slack: float  # how far above 0 that may be
    told: bool  # whether it has been said

    def __init__(self, rules: Rules, rows: int, gold: Gold | None, device: torch.device) -> None:
        self.rules, self.rows, self.gold, self.device = rules, rows, gold, device
        self.size = rules.size + (gold is not None)
        self.eos = torch.tensor(rules.eos_ids, device=device)
        self.bound = find_bound(rules.length, rules.max_steps)
        self.bound_beyond = find_bound(rules.length, None)  # of hypotheses of any length
        self.seeds = draw_seeds(rules.choose, rows, device)
        self.steps = 0
        self.parents: list[Tensor] = []  # (B, size) int64, of each step
        self.tokens: list[Tensor] = []
        self.places = torch.arange(rules.size, device=device).expand(rows, -1)
        self.sums_of: list[Tensor] = []  # (B, size) after each step
        self.searching = torch.ones(rows, dtype=torch.bool, device=device)
        self.all_search = True
        self.gap = torch.full((rows,), torch.inf, dtype=torch.float64, device=device)
        self.by_rule = torch.zeros_like(self.searching)
        self.is_gold = torch.ones(rows, rules.size, dtype=torch.bool, device=device)  # so far, at each place
        self.gold_place = torch.full((rows,), -1, dtype=torch.int64, device=device)  # where the search has it too
        self._begin(torch.get_default_dtype())

    def _begin(self, wide: torch.dtype) -> None:
        """The state before the first step, in which sums are of this dtype."""
        n, choose = self.rules.n_best, self.rules.choose
        keys = choose.start(self.seeds, self.rules.size)
        self.keys = keys if choose.by_key else keys.to(wide)
        self.sums = torch.where(keys > -torch.inf, 0.0, keys).to(wide) if choose.by_key else self.keys
        self.gold_sum = self.sums.new_zeros(self.rows)
        self.pool_key = self.keys.new_full((self.rows, n), -torch.inf)
        self.pool_sum = self.sums.new_full((self.rows, n), -torch.inf)
        # (step * rules.size + place) * E + which of the E eos_ids
        self.pool_end = torch.zeros(self.rows, n, dtype=torch.int64, device=self.device)
        self.lost = self.keys.new_full((self.rows,), -torch.inf)
        self.most, self.left_out = self.keys.new_full((2, self.rows), torch.inf)

    @property
    def running(self) -> Tensor:
        """(B,) bool: the rows that need another step."""
        if self.gold is None:
            return self.searching
        return self.searching | ((self.steps <= self.gold.lens) & (self.gold_sum > -torch.inf))

    def step(self, t: int, ids: Tensor | None, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step t, as decided, or decided now: tokens and places, as `beam_chosen`. `ids`: the rows in the batch."""
        if t == self.steps:
            self._decide(t, ids, log_probs.detach())
        parents, tokens, eos = self.parents[t], self.tokens[t], self.rules.eos_ids
        taken, places, chosen = find("beam_chosen", parents)(parents, tokens, ids, log_probs.shape[2], eos[0])
        if len(eos) > 1:
            picked, ends = chosen.view(len(taken), 2, self.size, 1).unbind(1)
            ends = ends + (self.eos - eos[0]).to(ends.dtype)
            chosen = torch.cat([picked.flatten(1), ends.flatten(1)], 1).flatten()
        return taken, places, chosen

    def _decide(self, t: int, ids: Tensor | None, log_probs: Tensor) -> None:
        rules, dtype = self.rules, log_probs.dtype
        if not t and (wide := torch.promote_types(dtype, torch.float32)) is not self.sums.dtype:
            self._begin(wide)
        every = _cast(log_probs, self.sums.dtype)
        log_probs = every if self.gold is None else every[:, :-1]
        if not t:
            self.first_mass, self.slack = log_probs[:, 0].logsumexp(1), doubt.find_slack(dtype)
            self.told = rules.check or doubt.warn_of_scores(self.first_mass > self.slack)
        elif t == doubt.ENDLESS and rules.max_steps is None:
            self._warn_of_endless()
        choice, sums, end_sums = self._choose(t, ids, log_probs)
        self._keep(t, choice)
        if self.gold is not None:
            self._follow_gold(t, choice, ids, every[:, -1])
        self.keys, self.sums = choice.keys, sums
        said = self._pool(t, choice.ends, end_sums)
        if said & 1 or self.gold is not None:
            self._refuse(choice, every, ids, t)
        if rules.check:
            self._check_sums(every, ids, t, max(1e-3, 4 * torch.finfo(dtype).eps))
        if choice.lost is not None and rules.choose.by_key:
            self._lose(choice.lost)
        self.sums_of.append(self._join_sums(t))
        self.steps = t + 1
        if said & 2 or rules.stop == "hf":
            self._stop(t)

    def _choose(self, t: int, ids: Tensor | None, log_probs: Tensor) -> tuple[Choice, Tensor, Tensor]:
        """What is chosen in step t, with the sums of what runs on and of what ends, in all rows."""
        rules = self.rules
        if type(rules.choose) is TopK and rules.eos == "always":
            choice = choose_best(self.keys, log_probs, rules.eos_ids, ids)
            return choice, choice.keys, choice.ends
        ends = _ENDS[rules.eos]
        before, keys, seeds = (_select_rows(x, ids) for x in (self.sums, self.keys, self.seeds))
        many = None if ends is None else ends * rules.size
        choice = rules.choose.choose(Offer(keys, before, log_probs, self.eos, many, seeds, t))
        sums, end_sums = choice.keys, choice.ends
        if rules.choose.by_key:
            end_sums = (before[:, :, None] + log_probs.index_select(2, self.eos)).flatten(1)
            picked = log_probs.flatten(1).gather(1, choice.parents * log_probs.shape[2] + choice.tokens)
            sums = (before.gather(1, choice.parents) + picked).masked_fill(choice.keys == -torch.inf, -torch.inf)
        parents, tokens = (self._widen(x, ids, 0) for x in choice[:2])
        keys, ends, lost = (None if x is None else self._widen(x, ids) for x in choice[2:])
        choice = Choice(parents, tokens, keys, ends, lost)  # pyright: ignore[reportArgumentType]
        return choice, self._widen(sums, ids), self._widen(end_sums, ids)

    def _keep(self, t: int, choice: Choice) -> None:
        """Writes down parents and tokens. A row that has stopped goes on as the first of its hypotheses."""
        for log, chosen in ((self.parents, choice.parents), (self.tokens, choice.tokens)):
            chosen = chosen if self.all_search else chosen.masked_fill(~self.running[:, None], 0)
            log[t:] = [chosen if self.gold is None else F.pad(chosen, (0, 1))]

    def _follow_gold(self, t: int, choice: Any, ids: Tensor | None, log_probs: Tensor) -> None:
        """Step t of the gold hypotheses, whose last token is eos."""
        assert self.gold is not None
        k, lens, parents, tokens = self.rules.size, self.gold.lens, self.parents[t], self.tokens[t]
        column = self.gold.tokens[:, min(t, self.gold.tokens.shape[1] - 1)]
        same = self.is_gold & (self.keys > -torch.inf)
        found, place = same.max(1)
        self.gold_place = torch.where(found & (lens == t), place, self.gold_place)
        self.is_gold = same.gather(1, parents[:, :k]) & (tokens[:, :k] == column[:, None])
        taken = self._widen(log_probs.gather(1, _select_rows(column, ids)[:, None])[:, 0], ids, 0.0)
        self.gold_sum = self.gold_sum + taken.masked_fill(self._gold_is_over(t), 0)
        # What is over goes on as one that is not, so that step_fn sees nothing that cannot be.
        runs = choice.keys.amax(1) > -torch.inf
        for log, gold in ((parents, torch.full_like(column, k)), (tokens, column)):
            log[:, :k] = torch.where(runs[:, None], log[:, :k], gold[:, None])
            log[:, k] = torch.where(runs & self._gold_is_over(t + 1), log[:, 0], gold)

    def _gold_is_over(self, t: int) -> Tensor:
        """(B,) bool: the rows whose gold hypothesis has ended before step t, or cannot be."""
        assert self.gold is not None
        return (t > self.gold.lens) | (self.gold_sum == -torch.inf)

    def _join_sums(self, t: int) -> Tensor:
        """(B, size): the sums of all that runs on after step t."""
        if self.gold is None:
            return self.sums
        gold = self.gold_sum.masked_fill(self._gold_is_over(t + 1), -torch.inf)
        return torch.cat([self.sums, gold[:, None]], 1)

    def _widen(self, x: Tensor, ids: Tensor | None, fill: float = -torch.inf) -> Tensor:
        """The rows of the full batch, from those in the batch."""
        if ids is None:
            return x
        return widened(x, ids, self.rows, fill)

    def _pool(self, t: int, ends: Tensor, end_sums: Tensor) -> int:
        """Takes the ends of step t into the pool. What it says is told in `beam_pool`."""
        rules = self.rules
        # After the last step allowed nothing comes any more; what could have come is a matter of any length.
        bound_of_all = self.bound_beyond if t + 1 == rules.max_steps else self.bound
        bound = self.keys if rules.choose.by_key else bound_of_all(self.sums, t + 1)
        if not rules.choose.by_key and type(rules.length) is not Sum:
            ranks = rules.length.final(end_sums, torch.full_like(end_sums, t + 1, dtype=torch.int64))
            spoilt = (ranks.isnan() & (ends.abs() < torch.inf)).any(1)
            if bool(spoilt.any()):
                row = int(spoilt.nonzero()[0, 0])
                raise ValueError(f"{_NAME}: {rules.length!r} gave the score NaN at step {t}, row {row}")
            ends = torch.where(ends > -torch.inf, ranks, ends)
        pool = self.pool_key, self.pool_sum, self.pool_end, self.most, self.left_out
        ends, bound = _cast(ends, self.pool_key.dtype), _cast(bound, self.pool_key.dtype)
        take, running = find("beam_pool", self.pool_key, ends, bound), self.keys
        if len(rules.eos_ids) > 1:  # as many that run as there are ends
            running, bound = (F.pad(x, (0, ends.shape[1] - x.shape[1]), value=-torch.inf) for x in (running, bound))
        said = take((ends, end_sums), (running, bound), pool, self.searching, t, rules.stop)
        if rules.choose.by_key:
            self._lose(self.left_out)
        return said

    def _lose(self, keys: Tensor) -> None:
        """Notes the keys of what was left out, (B,)."""
        self.lost = torch.where(self.searching, torch.maximum(self.lost, keys), self.lost)

    def _stop(self, t: int) -> None:
        """Ends the rows whose rule says so, or in which nothing runs any more."""
        rules, worst = self.rules, self.pool_key[:, -1]
        ends = self.most == -torch.inf
        if rules.stop == "exact":
            ends = worst >= self.most
        elif rules.stop == "first_n":
            ends = ends | (worst > -torch.inf)
        elif rules.stop == "hf":
            best = self.sums.amax(1, keepdim=True)
            reached = rules.length.final(best, torch.full_like(best, t + 1, dtype=torch.int64))
            ends = ends | ((worst > -torch.inf) & (worst >= reached[:, 0]))
        ends = ends & self.searching
        if bool(ends.any()):
            self._end(ends)
            self.by_rule = self.by_rule | ends
            self.searching = self.searching & ~ends
            self.all_search = False

    def finish(self) -> None:
        """After the last step: how far the rows are from a proof that have not stopped."""
        self._end(self.searching)

    def _end(self, rows: Tensor) -> None:
        gap = self._above_worst(self.most)
        if self.rules.max_steps is not None and self.rules.stop in ("first_n", "hf"):
            beyond = self.bound_beyond(self.sums, self.steps).where(self.keys > -torch.inf, -torch.inf)
            gap = torch.where(gap <= 0, gap, self._above_worst(beyond.amax(1)))
        self.gap = torch.where(rows, gap, self.gap)
        if self.rules.choose.by_key:  # what runs on is left out
            self._lose(torch.where(rows, self.most, -torch.inf))

    def _above_worst(self, most: Tensor) -> Tensor:
        return torch.where(most == -torch.inf, -torch.inf, (most - self.pool_key[:, -1]).double())

    # -- what is refused, and what is told

    def _warn_of_endless(self) -> None:
        if rows := self.searching.nonzero()[:, 0].tolist():
            doubt.warn_of_endless(rows, self.pool_key > -torch.inf, self.rules.n_best)

    def _refuse(self, choice: Any, log_probs: Tensor, ids: Tensor | None, t: int) -> None:
        top = torch.maximum(choice.keys.amax(1), choice.ends.amax(1))
        over = (top == -torch.inf) & (self.pool_key[:, 0] > -torch.inf)  # all have ended that could
        fine = (top.abs() < torch.inf) | over | ~self.searching  # not if it is NaN
        if self.gold is not None:
            spoilt = self._widen(~(log_probs[:, -1] < torch.inf).all(1), ids, False)
            fine = fine & ~(spoilt & ~self._gold_is_over(t))
        if not bool(fine.all()):
            row = int((~fine).nonzero()[0, 0])
            where = f"step {t}, row {row}"
            if float(top[row]) != -torch.inf:
                given = log_probs[row if ids is None else int((ids == row).nonzero()[0, 0])]
                what = "infinite" if bool((given == torch.inf).any()) else "NaN"
                raise ValueError(f"{_NAME}: step_fn gave {what} log_probs at {where}")
            raise ValueError(
                f"{_NAME}: at {where} every token of every hypothesis is forbidden (log_probs of -inf); "
                f"let eos_id end those that cannot go on"
            )

    def _check_sums(self, log_probs: Tensor, ids: Tensor | None, t: int, tolerance: float) -> None:
        total = log_probs.logsumexp(2)
        off = (~(total.abs() <= tolerance) & _select_rows(self.running, ids)[:, None]).nonzero()
        if len(off):
            row, place = off[0].tolist()
            raise ValueError(
                f"{_NAME}: log_probs at step {t}, row {row if ids is None else int(ids[row])}, hypothesis {place} sum "
                f"to a probability of {float(total[row, place].exp()):.4g}, not 1; apply log_softmax in step_fn"
            )


def _select_rows(x: Tensor, ids: Tensor | None) -> Tensor:
    return x if ids is None else x.index_select(0, ids)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)
