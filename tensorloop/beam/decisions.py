"""What a search decides: parents and tokens of every step, and when each row stops.

Decisions are facts, not state: they stand beside the loop, for all rows of the full batch, and nothing here has a
gradient. A step is decided once; when a checkpointed loop does it again, it is told what was decided then.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorloop._common.errors import WrongValue
from tensorloop._common.uploads import upload
from tensorloop.beam import diagnostics
from tensorloop.beam.batch import Batch
from tensorloop.beam.choose import Choice, Offer, TopK, choose_best, find_survivors, guess_best, merge_sums
from tensorloop.beam.gold import Gold
from tensorloop.beam.length import Sum, find_bound
from tensorloop.beam.noise import draw_seeds
from tensorloop.beam.pool import Pool, Verdict
from tensorloop.kernels import find

_ENDS = {"always": None, "top_k": 1, "top_2k": 2}


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
    capped: str = "last"
    merge: Any = None


class Decisions:
    """The decisions of one search. `size` counts the hypotheses that run, a gold one included."""

    # What each row has, once the first log_probs have told the dtype.
    keys: Tensor  # (B, rules.size)
    sums: Tensor  # (B, rules.size), of log-probabilities
    pool: Pool
    lost: Tensor  # (B,) the largest key left out of a search that ranks by keys
    first_mass: Tensor  # (B,) the log of what the first step's probabilities sum to
    slack: float  # how far above 0 that may be
    told: bool  # whether it has been said

    def __init__(self, rules: Rules, rows: int, gold: Gold | None, device: torch.device) -> None:
        self.rules, self.rows, self.gold, self.device = rules, rows, gold, device
        self.size = rules.size + (gold is not None)
        self.eos = upload(torch.tensor(rules.eos_ids, device="cpu"), device)
        self.bound = find_bound(rules.length, rules.max_steps)
        self.bound_beyond = find_bound(rules.length, None)  # of hypotheses of any length
        self.seeds = draw_seeds(rules.choose, rows, device)
        self.steps = 0
        self.parents: list[Tensor] = []  # (B, size) int64, of each step
        self.tokens: list[Tensor] = []
        self.sums_after: list[Tensor] = []  # (B, size), of each step
        self.survivors: list[Tensor] = []  # (B, size) int64, of each step of a search that merges, before its choice
        self.searching = torch.ones(rows, dtype=torch.bool, device=device)
        self.all_search = True
        plain = type(rules.choose) is TopK and rules.eos == "always" and len(rules.eos_ids) == 1 and gold is None
        self._guesses = plain and device.type != "cpu"  # there a wait costs nothing, and ties are broken at once
        # `searching` on the CPU; None where it has changed and nobody has asked since.
        self._seen: Tensor | None = torch.ones(rows, dtype=torch.bool, device="cpu")
        self.gap = torch.full((rows,), torch.inf, dtype=torch.float64, device=device)
        self.by_rule = torch.zeros_like(self.searching)
        self._begin(torch.get_default_dtype())

    def _begin(self, wide: torch.dtype) -> None:
        """The state before the first step, in which sums are of this dtype."""
        choose = self.rules.choose
        keys = choose.start(self.seeds, self.rules.size)
        self.keys = keys if choose.by_key else keys.to(wide)
        self.sums = torch.where(keys > -torch.inf, 0.0, keys).to(wide) if choose.by_key else self.keys
        self.pool = Pool(self.rules.n_best, self.keys, self.sums)
        self.lost = self.keys.new_full((self.rows,), -torch.inf)
        if self.gold is not None:
            self.gold.sum = self.sums.new_zeros(self.rows)

    @property
    def running(self) -> Tensor:
        """(B,) bool: the rows that need another step."""
        return self.searching if self.gold is None else self.searching | ~self.gold.is_over(self.steps)

    @property
    def asked(self) -> Tensor:
        """Which rows still run, as a tensor on the CPU, unless that would wait for a device at every step."""
        if self.gold is not None:
            return self.running
        if (seen := self._seen) is None:
            seen = self._seen = self.searching.cpu()
        return seen

    # -- a step

    def step(self, t: int, batch: Batch, log_probs: Tensor, merge_keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Step t, as decided, or decided now: tokens and places of the rows in the batch, as `beam_chosen`."""
        if t == self.steps:
            self._decide(t, batch, log_probs.detach(), merge_keys)
        parents, tokens, eos = self.parents[t], self.tokens[t], self.rules.eos_ids
        taken, places, chosen = find("beam_chosen", parents)(parents, tokens, batch.ids, log_probs.shape[2], eos[0])
        if len(eos) > 1:
            picked, ends = chosen.view(len(taken), 2, self.size, 1).unbind(1)
            ends = ends + (self.eos - eos[0]).to(ends.dtype)
            chosen = torch.cat([picked.flatten(1), ends.flatten(1)], 1).flatten()
        return taken, places, chosen

    def _decide(self, t: int, batch: Batch, log_probs: Tensor, merge_keys: Tensor | None) -> None:
        rules, dtype = self.rules, log_probs.dtype
        if not t and (wide := torch.promote_types(dtype, torch.float32)) is not self.sums.dtype:
            self._begin(wide)
        if merge_keys is not None:
            self._merge(batch.widen(merge_keys, 0))
        log_probs = log_probs if dtype is self.sums.dtype else log_probs.to(self.sums.dtype)
        searched = log_probs if self.gold is None else log_probs[:, :-1]
        self._doubt(t, searched, dtype)
        before = self.keys
        choice, self.sums, end_sums, ranked = self._choose(t, batch, searched)
        self.keys = choice.keys
        self._keep(t, choice)
        if self.gold is not None:
            self.gold.follow(t, (before, self.keys), self.parents[t], self.tokens[t], log_probs[:, -1], batch)
        verdict = self._offer_ends(t, choice.ends, end_sums, ranked)
        if verdict.undecided:
            self._keep(t, choose_best(before, searched, rules.eos_ids, batch))
        if verdict.spoilt or self.gold is not None:
            self._refuse(t, choice, log_probs, batch)
        if rules.check:
            diagnostics.check_sums(
                t, log_probs, batch.select(self.running), batch, max(1e-3, 4 * torch.finfo(dtype).eps)
            )
        if choice.lost is not None and rules.choose.by_key:
            self._lose(choice.lost)
        self.sums_after.append(self.sums if self.gold is None else self.gold.join(self.sums, t))
        self.steps = t + 1
        # Where what has not ended ranks with the rest, no rule ends the last step: what runs is offered after it.
        offered = rules.capped == "ranked" and t + 1 == rules.max_steps
        if (verdict.ended or rules.stop == "hf") and not offered:
            self._stop(t)

    def _merge(self, merge_keys: Tensor) -> None:
        """The hypotheses of a row whose keys (B, K, n) are equal become one."""
        survivors = find_survivors(self.sums, merge_keys, self.searching)
        gone = survivors != torch.arange(self.size, device=self.device)
        self.keys = self.sums = merge_sums(self.sums, survivors).masked_fill(gone, -torch.inf)
        self.survivors.append(survivors)

    def sum_merged(self, picked: Tensor, lens: Tensor, places: Tensor) -> Tensor:
        """(B, n), differentiable: the sums at `places` after so many tokens; `picked` as in `build_result`."""
        sums, every = torch.zeros_like(self.sums), []
        for parents, survivors, taken in zip(self.parents, self.survivors, picked, strict=True):
            every.append(merge_sums(sums, survivors))
            sums = every[-1].gather(1, parents) + taken[:, : self.size]
        return torch.stack([*every, sums], 1).flatten(1).gather(1, lens * self.size + places)

    def _reach(self, bound: Any, length: int) -> Tensor:
        """(B, K): what those that run can still reach; where hypotheses merge, any of a row may become one."""
        if self.rules.merge is None:
            return bound(self.sums, length)
        every = self.sums.logsumexp(1, keepdim=True)
        return bound(every.where(self.sums > -torch.inf, -torch.inf), length)

    def _doubt(self, t: int, log_probs: Tensor, dtype: torch.dtype) -> None:
        """Warns of what is no probability, and of a search that does not end."""
        if not t:
            self.first_mass, self.slack = log_probs[:, 0].logsumexp(1), diagnostics.find_slack(dtype)
            self.told = self.rules.check
            if not self.told and self.device.type == "cpu":  # on a device at the end, where it is waited for anyway
                self.told = diagnostics.warn_of_scores((self.first_mass > self.slack).tolist())
        elif t == diagnostics.ENDLESS and self.rules.max_steps is None and bool(self.searching.any()):
            diagnostics.warn_of_endless(self.searching, self.pool.keys > -torch.inf, self.rules.n_best)

    def _choose(self, t: int, batch: Batch, log_probs: Tensor) -> tuple[Choice, Tensor, Tensor, Tensor | None]:
        """Returns the choice of step t, with the sums of what runs on and of what ends, in all rows.

        At last, where the choice is still to be confirmed, the keys that `Pool.take` confirms it by.
        """
        rules = self.rules
        ends = _ENDS[rules.eos]
        if self._guesses and log_probs.shape[2] > 1:
            choice, ranked = guess_best(self.keys, log_probs, rules.eos_ids[0], batch)
            return choice, choice.keys, choice.ends, ranked
        if type(rules.choose) is TopK and (ends is None or len(rules.eos_ids) == 1):
            choice = choose_best(self.keys, log_probs, rules.eos_ids, batch, (ends or 0) * rules.size)
            return choice, choice.keys, choice.ends, None
        before, keys, seeds = (batch.select(x) for x in (self.sums, self.keys, self.seeds))
        many = None if ends is None else ends * rules.size
        choice = rules.choose.choose(Offer(keys, before, log_probs, self.eos, many, seeds, t))
        sums, end_sums = choice.keys, choice.ends
        if rules.choose.by_key:
            end_sums = (before[:, :, None] + log_probs.index_select(2, self.eos)).flatten(1)
            picked = log_probs.flatten(1).gather(1, choice.parents * log_probs.shape[2] + choice.tokens)
            sums = (before.gather(1, choice.parents) + picked).masked_fill(choice.keys == -torch.inf, -torch.inf)
        parents, tokens = (batch.widen(x, 0) for x in choice[:2])
        lost = None if choice.lost is None else batch.widen(choice.lost)
        choice = Choice(parents, tokens, batch.widen(choice.keys), batch.widen(choice.ends), lost)
        return choice, batch.widen(sums), batch.widen(end_sums), None

    def _keep(self, t: int, choice: Choice) -> None:
        """Writes down parents and tokens. A row that has stopped goes on as the first of its hypotheses."""
        for decided, chosen in ((self.parents, choice.parents), (self.tokens, choice.tokens)):
            chosen = chosen if self.all_search else chosen.masked_fill(~self.running[:, None], 0)
            decided[t:] = [chosen if self.gold is None else F.pad(chosen, (0, 1))]

    def _offer_ends(self, t: int, ends: Tensor, sums: Tensor, ranked: Tensor | None) -> Verdict:
        """Offers the ends of step t to the pool."""
        rules, offered = self.rules, ends
        # After the last step allowed nothing comes any more; what could have come is a matter of any length.
        bound_of_all = self.bound_beyond if t + 1 == rules.max_steps else self.bound
        bounds = self.keys if rules.choose.by_key else self._reach(bound_of_all, t + 1)
        if not rules.choose.by_key and type(rules.length) is not Sum:
            ranks = rules.length.final(sums, torch.full_like(sums, t + 1, dtype=torch.int64))
            offered, ends = ends, torch.where(ends > -torch.inf, ranks, ends)
        verdict = self.pool.take((ends, sums), (self.keys, bounds), self.searching, t, rules.stop, ranked)
        if verdict.spoilt and offered is not ends:
            spoilt = (ends.isnan() & (offered.abs() < torch.inf)).any(1)
            if bool(spoilt.any()):
                row = int(spoilt.nonzero()[0, 0])
                raise WrongValue(f"{rules.length!r} gave the score NaN at step {t}, row {row}")
        if rules.choose.by_key:
            self._lose(self.pool.left_out)
        return verdict

    def _refuse(self, t: int, choice: Choice, log_probs: Tensor, batch: Batch) -> None:
        """Raises where a row has no hypothesis any more, or scores that are no numbers."""
        top = torch.maximum(choice.keys.amax(1), choice.ends.amax(1))
        over = (top == -torch.inf) & (self.pool.keys[:, 0] > -torch.inf)  # all have ended that could
        fine = (top.abs() < torch.inf) | over | ~self.searching  # not if it is NaN
        if self.gold is not None:
            spoilt = batch.widen(~(log_probs[:, -1] < torch.inf).all(1), False)
            fine = fine & ~(spoilt & ~self.gold.is_over(t))
        if not bool(fine.all()):
            row = int((~fine).nonzero()[0, 0])
            forbidden = float(top[row]) == -torch.inf
            diagnostics.refuse_row(t, row, None if forbidden else log_probs[batch.find(row)])

    def _lose(self, keys: Tensor) -> None:
        """Notes the keys of what was left out, (B,)."""
        self.lost = torch.where(self.searching, torch.maximum(self.lost, keys), self.lost)

    # -- when rows stop

    def _stop(self, t: int) -> None:
        """Ends the rows whose rule says so, or in which nothing runs any more."""
        rules, worst, most = self.rules, self.pool.worst, self.pool.most
        ends = most == -torch.inf
        if rules.stop == "exact":
            ends = worst >= most
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
            self.searching, self._seen = self.searching & ~ends, None
            self.all_search = False

    def finish(self) -> None:
        """After the last step: how far the rows are from a proof that have not stopped."""
        self._end(self.searching)

    def _end(self, rows: Tensor) -> None:
        most = self.pool.most
        gap = self.pool.measure_gap(most)
        if self.rules.max_steps is not None and self.rules.stop in ("first_n", "hf"):
            beyond = self._reach(self.bound_beyond, self.steps).where(self.keys > -torch.inf, -torch.inf)
            gap = torch.where(gap <= 0, gap, self.pool.measure_gap(beyond.amax(1)))
        self.gap = torch.where(rows, gap, self.gap)
        if self.rules.choose.by_key:  # what runs on is left out
            self._lose(torch.where(rows, most, -torch.inf))
