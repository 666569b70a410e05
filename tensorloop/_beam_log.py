"""What a search decides: parents and tokens of every step, the pool of ended hypotheses, and when each row stops.

Decisions are facts, not state: they stand beside the loop, for all rows of the full batch, and nothing here has a
gradient. A step is decided once; when a checkpointed loop does it again, it is told what was decided then.

The pool keeps the n best ended hypotheses of each row as (key, sum, step, place). An end that comes later must be
strictly better to take a place, so that a row may stop as soon as nothing better can come.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._beam_choice import Offer, row_seeds
from tensorloop._beam_length import Sum, bound_of
from tensorloop.kernels.eager_beam import descending

_ENDS = {"always": None, "top_k": 1, "top_2k": 2}
_NAME = "beam_search"


class Rules(NamedTuple):
    """The arguments of a search that decide."""

    size: int
    n_best: int
    eos_id: int
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


class Log:
    """The decisions of one search. `size` counts the hypotheses that run, a gold one included."""

    # What each row has, (B, rules.size), once the first log_probs have told the dtype. Sums are of log-probabilities.
    keys: Tensor
    sums: Tensor
    most: Tensor  # (B,) the best that a running hypothesis can still reach

    def __init__(self, rules: Rules, rows: int, gold: Gold | None, device: torch.device) -> None:
        self.rules, self.rows, self.gold, self.device = rules, rows, gold, device
        self.size = rules.size + (gold is not None)
        self.bound = bound_of(rules.length, rules.max_steps)
        self.seeds = row_seeds(rules.choose, rows, device)
        self.steps = 0
        self.parents = torch.empty(8, rows, self.size, dtype=torch.int64, device=device)
        self.tokens = torch.empty_like(self.parents)
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
        self.pool_end = torch.zeros(self.rows, n, dtype=torch.int64, device=self.device)  # step * rules.size + place
        self.lost = self.keys.new_full((self.rows,), -torch.inf)
        self.most = self.keys.new_full((self.rows,), torch.inf)

    @property
    def running(self) -> Tensor:
        """(B,) bool: the rows that need another step."""
        if self.gold is None:
            return self.searching
        return self.searching | (self.steps <= self.gold.lens)

    def step(self, t: int, ids: Tensor | None, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """(parents, tokens) of step t, (rows, size) each: as decided, or decided now. `ids`: the rows in the batch."""
        if t == self.steps:
            self._decide(t, ids, log_probs.detach())
        parents, tokens = self.parents[t], self.tokens[t]
        if ids is None:  # whoever gets them may keep them: later steps write to the same tensors
            return parents.clone(), tokens.clone()
        return parents.index_select(0, ids), tokens.index_select(0, ids)

    def _decide(self, t: int, ids: Tensor | None, log_probs: Tensor) -> None:
        rules = self.rules
        wide = torch.promote_types(log_probs.dtype, torch.float32)
        if not t and wide is not self.sums.dtype:
            self._begin(wide)
        every = log_probs.to(wide)
        log_probs = every if self.gold is None else every[:, :-1]
        ends = _ENDS[rules.eos]
        sums, keys = _rows(self.sums, ids), _rows(self.keys, ids)
        offer = Offer(
            keys, sums, log_probs, rules.eos_id, None if ends is None else ends * rules.size, _rows(self.seeds, ids), t
        )
        choice = rules.choose.choose(offer)
        self._refuse(choice, every, ids, t)
        end_sums, sums = choice.ends, choice.keys
        if rules.choose.by_key:
            end_sums = offer.sums + log_probs[:, :, rules.eos_id]
            picked = log_probs.flatten(1).gather(1, choice.parents * log_probs.shape[2] + choice.tokens)
            sums = (offer.sums.gather(1, choice.parents) + picked).masked_fill(choice.keys == -torch.inf, -torch.inf)
        self._keep(t, choice, ids)
        if self.gold is not None:
            self._follow_gold(t, choice, ids, every[:, -1])
        self._pool(t, self._wide(choice.ends, ids), self._wide(end_sums, ids))
        if choice.lost is not None and rules.choose.by_key:
            self._lose(self._wide(choice.lost, ids))
        self.keys = self._wide(choice.keys, ids)
        self.sums = self._wide(sums, ids) if rules.choose.by_key else self.keys
        self.sums_of.append(self._all_sums(t))
        self.steps = t + 1
        self._stop(t)

    def _keep(self, t: int, choice: Any, ids: Tensor | None) -> None:
        """Writes down parents and tokens. A row that has stopped goes on as the first of its hypotheses."""
        if t == len(self.parents):
            self.parents = torch.cat([self.parents, torch.empty_like(self.parents)])
            self.tokens = torch.cat([self.tokens, torch.empty_like(self.tokens)])
        k = self.rules.size
        for log, chosen in ((self.parents, choice.parents), (self.tokens, choice.tokens)):
            chosen = self._wide(chosen, ids, 0)
            log[t, :, :k] = chosen if self.all_search else chosen.masked_fill(~self.running[:, None], 0)

    def _follow_gold(self, t: int, choice: Any, ids: Tensor | None, log_probs: Tensor) -> None:
        """Step t of the gold hypotheses, whose last token is eos."""
        assert self.gold is not None
        k, lens, parents, tokens = self.rules.size, self.gold.lens, self.parents[t], self.tokens[t]
        column = self.gold.tokens[:, min(t, self.gold.tokens.shape[1] - 1)]
        same = self.is_gold & (self.keys > -torch.inf)
        found, place = same.max(1)
        self.gold_place = torch.where(found & (lens == t), place, self.gold_place)
        self.is_gold = same.gather(1, parents[:, :k]) & (tokens[:, :k] == column[:, None])
        taken = self._wide(log_probs.gather(1, _rows(column, ids)[:, None])[:, 0], ids, 0.0)
        self.gold_sum = self.gold_sum + taken.masked_fill(t > lens, 0)
        # What is over goes on as one that is not, so that step_fn sees nothing that cannot be.
        runs = self._wide(choice.keys, ids).amax(1) > -torch.inf
        for log, gold in ((parents, torch.full_like(column, k)), (tokens, column)):
            log[:, :k] = torch.where(runs[:, None], log[:, :k], gold[:, None])
            log[:, k] = torch.where(runs & (t >= lens), log[:, 0], gold)

    def _all_sums(self, t: int) -> Tensor:
        """(B, size): the sums of all that runs on after step t."""
        if self.gold is None:
            return self.sums
        gold = self.gold_sum.masked_fill(t >= self.gold.lens, -torch.inf)
        return torch.cat([self.sums, gold[:, None]], 1)

    def _wide(self, x: Tensor, ids: Tensor | None, fill: float = -torch.inf) -> Tensor:
        """The rows of the full batch, from those in the batch."""
        if ids is None:
            return x
        return x.new_full((self.rows, *x.shape[1:]), fill).index_copy_(0, ids, x)

    def _pool(self, t: int, keys: Tensor, sums: Tensor) -> None:
        """Takes the ends of step t."""
        rules, n = self.rules, self.rules.n_best
        if not rules.choose.by_key and type(rules.length) is not Sum:
            ranks = rules.length.final(sums, torch.full_like(sums, t + 1, dtype=torch.int64))
            keys = torch.where(keys > -torch.inf, ranks, -torch.inf)
        if not self.all_search:
            keys = keys.masked_fill(~self.searching[:, None], -torch.inf)
        keys, order = descending(torch.cat([self.pool_key, keys], 1))
        if rules.choose.by_key:
            self._lose(keys[:, n])
        order, self.pool_key = order[:, :n], keys[:, :n]
        self.pool_sum = torch.cat([self.pool_sum, sums], 1).gather(1, order)
        self.pool_end = torch.cat([self.pool_end, self.places + t * rules.size], 1).gather(1, order)

    def _lose(self, keys: Tensor) -> None:
        """Notes the keys of what was left out, (B,)."""
        self.lost = torch.where(self.searching, torch.maximum(self.lost, keys), self.lost)

    def _stop(self, t: int) -> None:
        """Ends the rows whose rule says so, or in which nothing runs any more."""
        rules, sums = self.rules, self.sums
        bound = self.keys if rules.choose.by_key else self.bound(sums, t + 1)
        self.most = torch.where(self.keys > -torch.inf, bound, -torch.inf).amax(1)
        worst = self.pool_key[:, -1]
        ends = self.most == -torch.inf
        if rules.stop == "exact":
            ends = worst >= self.most
        elif rules.stop == "first_n":
            ends = ends | (worst > -torch.inf)
        elif rules.stop == "hf":
            reached = rules.length.final(sums.amax(1, keepdim=True), torch.full_like(sums[:, :1], t + 1))
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
        gap = torch.where(self.most == -torch.inf, -torch.inf, (self.most - self.pool_key[:, -1]).double())
        self.gap = torch.where(rows, gap, self.gap)
        if self.rules.choose.by_key:  # what runs on is left out
            self._lose(torch.where(rows, self.most, -torch.inf))

    # -- what is refused

    def _refuse(self, choice: Any, log_probs: Tensor, ids: Tensor | None, t: int) -> None:
        best = torch.maximum(choice.keys.amax(1), choice.ends.amax(1))
        fine = best > -torch.inf  # not if it is NaN
        if not self.all_search:
            fine = fine | ~_rows(self.searching, ids)
        if self.gold is not None:
            fine = fine & ~(log_probs[:, -1].isnan().any(1) & _rows(t <= self.gold.lens, ids))
        if not bool(fine.all()):
            row = int((~fine).nonzero()[0, 0])
            where = f"step {t}, row {row if ids is None else int(ids[row])}"
            if float(best[row]) != -torch.inf:
                raise ValueError(f"{_NAME}: step_fn gave NaN log_probs at {where}")
            raise ValueError(
                f"{_NAME}: at {where} every token of every hypothesis is forbidden (log_probs of -inf); "
                f"let eos_id end those that cannot go on"
            )
        if self.rules.check:
            self._check_sums(log_probs, ids, t)

    def _check_sums(self, log_probs: Tensor, ids: Tensor | None, t: int) -> None:
        total = log_probs.logsumexp(2)
        off = ((total.abs() > 1e-3) & _rows(self.running, ids)[:, None]).nonzero()
        if len(off):
            row, place = off[0].tolist()
            raise ValueError(
                f"{_NAME}: log_probs at step {t}, row {row if ids is None else int(ids[row])}, hypothesis {place} sum "
                f"to a probability of {float(total[row, place].exp()):.4g}, not 1; apply log_softmax in step_fn"
            )


def _rows(x: Tensor, ids: Tensor | None) -> Tensor:
    return x if ids is None else x.index_select(0, ids)
