"""Ways of choosing which hypotheses run on: the best, samples, or the best under Gumbel noise.

A chooser sees one step of the rows in the batch (`Offer`) and gives a `Choice`. *Keys* rank running hypotheses and
their continuations; they are sums of log-probabilities unless the chooser says otherwise. A key of -inf is no
hypothesis. Everything here is without gradient: the loop differentiates what was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.ranking import best_pairs, descending, find_highest
from tensorloop._common.saved import saved
from tensorloop.beam import noise
from tensorloop.beam.batch import Batch
from tensorloop.kernels import find


class Offer(NamedTuple):
    """The continuations that there are to choose from in step t. B rows, K hypotheses, V tokens."""

    keys: Tensor  # (B, K)
    sums: Tensor  # (B, K), of log-probabilities
    log_probs: Tensor  # (B, K, V)
    eos: Tensor  # (E,) int64, the tokens that end a hypothesis
    ends: int | None  # how high an end must rank among all continuations to be taken; None: all are
    seeds: Tensor  # (B,) int64
    t: int

    def draw_noise(self) -> Tensor:
        """(B, K, V) Gumbel variables, float64."""
        return noise.draw(self.seeds, self.t, self.log_probs.shape)


class Choice(NamedTuple):
    """The hypotheses that run on, and the ends that are offered to the pool."""

    parents: Tensor  # (B, K) int64
    tokens: Tensor  # (B, K) int64
    keys: Tensor  # (B, K) of those that run on
    ends: Tensor  # (B, K * E) keys of the ends of those that ran so far, token by token; -inf for those not offered
    lost: Tensor | None  # (B,) the largest key of a continuation that was left out


@saved()
@dataclass(frozen=True)
class TopK:
    """Goes on with the K best continuations of each row: beam search as usual, and the default of `beam_search`.

    Ties: the smaller beam index, then the smaller token.

    Example:
        >>> embed, out = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4)
        >>> step = lambda h, tokens: ((h := torch.sin(h + embed(tokens))), out(h).log_softmax(-1))
        >>> sizes = {"batch_size": 1, "beam_size": 3, "bos_id": 0, "eos_id": 1, "max_steps": 9}
        >>> hyps = tl.beam_search(step, torch.zeros(1, 8), **sizes, choose=tl.beam.TopK())
        >>> hyps.scores.shape
        torch.Size([1, 3])
    """

    by_key = False  # whether ended hypotheses rank by their keys, not by the length model
    repeats = False  # whether two hypotheses of a row may be the same

    def start(self, seeds: Tensor, size: int) -> Tensor:
        """Gives the keys of step 0: all hypotheses are the same one, so only the first counts.

        Args:
            seeds: (B,) int64, a random number for each row.
            size: int, K.

        Returns:
            (B, K) float64 keys; -inf where there is no hypothesis yet.
        """
        return _place_first(torch.zeros_like(seeds, dtype=torch.float64), size)

    def choose(self, offer: Offer) -> Choice:
        """Takes the best of keys + log_probs.

        Args:
            offer: what there is in this step: keys and sums (B, K), log_probs (B, K, V), the end tokens, seeds and the
                step.

        Returns:
            A `Choice`: parents, tokens and keys (B, K) of what runs on, keys of the ends that are offered, and the
            largest key left out.
        """
        if offer.ends is not None:
            return _choose_by(offer, offer.keys[:, :, None] + offer.log_probs)
        return choose_best(offer.keys, offer.log_probs, offer.eos.tolist(), Batch(None, len(offer.keys)))


@saved()
@dataclass(frozen=True)
class StochasticBeam:
    """Draws samples without replacement: beam search over keys with Gumbel noise gives K sequences that all differ.

    The n hypotheses returned are an exact sample of size n without replacement from the model's distribution over ended
    sequences (n <= K, with stop="exact"). The result has `keys`, `kappa` (the largest key left out) and `inclusion`
    (the probability that each was drawn, given kappa), which `tl.risk.stochastic_beam_risk` takes.

    Args:
        generator: torch.Generator that the noise is drawn from; None is torch's own. One number is drawn for each
            search.

    Source: Kool et al. 2019 (1903.06059).

    Example:
        >>> embed, out = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4)
        >>> step = lambda h, tokens: ((h := torch.sin(h + embed(tokens))), out(h).log_softmax(-1))
        >>> sizes = {"batch_size": 1, "beam_size": 3, "bos_id": 0, "eos_id": 1, "max_steps": 9}
        >>> hyps = tl.beam_search(step, torch.zeros(1, 8), **sizes, choose=tl.beam.StochasticBeam())
        >>> hyps.repeated.any().item()
        False
    """

    generator: torch.Generator | None = field(default=None, compare=False)
    by_key = True
    repeats = False

    def start(self, seeds: Tensor, size: int) -> Tensor:
        """Gives the keys of step 0: the first hypothesis has a Gumbel variable, the others none.

        Args:
            seeds: (B,) int64, a random number for each row.
            size: int, K.

        Returns:
            (B, K) float64 keys; -inf where there is no hypothesis yet.
        """
        return _place_first(noise.draw_first(seeds), size)

    def choose(self, offer: Offer) -> Choice:
        """Draws keys of continuations: Gumbel variables whose maximum is the key of the hypothesis they continue.

        Args:
            offer: what there is in this step: keys and sums (B, K), log_probs (B, K, V), the end tokens, seeds and the
                step.

        Returns:
            A `Choice`: parents, tokens and keys (B, K) of what runs on, keys of the ends that are offered, and the
            largest key left out.
        """
        sums = offer.sums.double()[:, :, None] + offer.log_probs.double()
        noisy = sums + offer.draw_noise()
        most = noisy.amax(2, keepdim=True)
        parent = offer.keys[:, :, None]
        # -log(exp(-parent) - exp(-most) + exp(-noisy)), which neither overflows nor cancels.
        v = parent - noisy + torch.log1p(-torch.exp((noisy - most).clamp(max=0)))
        keys = parent - v.clamp(min=0) - torch.log1p(torch.exp(-v.abs()))
        possible = (offer.log_probs > -torch.inf) & (parent > -torch.inf)
        keys = torch.where(noisy == most, parent, keys)
        return _choose_by(offer, torch.where(possible, keys, -torch.inf).where(sums < torch.inf, torch.nan))


@saved()
@dataclass(frozen=True)
class Sample:
    """Draws K samples with replacement, each token by token; a sample that draws eos has ended.

    `temperature`, `top_k` and `top_p` change what is drawn from, in this order. The scores returned are the model's
    own.

    Args:
        temperature: float above 0, default 1: the log-probabilities are divided by it.
        top_k: int, only so many of the likeliest tokens stay; None keeps all.
        top_p: float, of those only the smallest set whose probability is at least this stays; None keeps all.
        generator: torch.Generator to draw from; None is torch's own. One number is drawn for each search.

    Example:
        >>> embed, out = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4)
        >>> step = lambda h, tokens: ((h := torch.sin(h + embed(tokens))), out(h).log_softmax(-1))
        >>> sizes = {"batch_size": 1, "beam_size": 3, "bos_id": 0, "eos_id": 1, "max_steps": 9}
        >>> hyps = tl.beam_search(step, torch.zeros(1, 8), **sizes, choose=tl.beam.Sample(top_k=2))
        >>> hyps.scores.shape
        torch.Size([1, 3])
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = field(default=None, compare=False)
    by_key = False
    repeats = True

    @named("Sample")
    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise WrongValue(f"temperature must be above 0, got {self.temperature}; TopK() takes the best")
        if self.top_k is not None and arguments.as_int(self.top_k, "top_k") < 1:
            raise WrongValue(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise WrongValue(f"top_p must be in (0, 1], got {self.top_p}")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise WrongType(f"generator must be a torch.Generator, got {arguments.describe(self.generator)}")

    def start(self, seeds: Tensor, size: int) -> Tensor:
        """Gives the keys of step 0: all hypotheses run from the first step on.

        Args:
            seeds: (B,) int64, a random number for each row.
            size: int, K.

        Returns:
            (B, K) float64 keys; -inf where there is no hypothesis yet.
        """
        return torch.zeros(len(seeds), size, dtype=torch.float64, device=seeds.device)

    def choose(self, offer: Offer) -> Choice:
        """Draws one token for each hypothesis: the largest of Gumbel keys is a sample.

        Args:
            offer: what there is in this step: keys and sums (B, K), log_probs (B, K, V), the end tokens, seeds and the
                step.

        Returns:
            A `Choice`: parents, tokens and keys (B, K) of what runs on, keys of the ends that are offered, and the
            largest key left out.
        """
        scaled = self._mask(offer.log_probs / self.temperature)
        best, tokens = (scaled.double() + offer.draw_noise()).max(2)
        alive = (offer.keys > -torch.inf) & (best > -torch.inf)
        taken = offer.log_probs.gather(2, tokens[:, :, None])[:, :, 0]
        keys = torch.where(alive, offer.keys + taken, -torch.inf)
        keys = keys.masked_fill(best.isnan() & (offer.keys > -torch.inf), torch.nan)
        by = tokens[:, :, None] == offer.eos
        ended = by.any(2)
        running, ends = keys.masked_fill(ended, -torch.inf), torch.where(by, keys[:, :, None], -torch.inf).flatten(1)
        # A place that is free goes on as one that runs: what step_fn computes for it is as fine.
        place = torch.arange(tokens.shape[1], device=tokens.device)
        runs = running > -torch.inf
        parents = torch.where(runs | ~runs.any(1, keepdim=True), place, runs.max(1, keepdim=True)[1])
        return Choice(parents, tokens.gather(1, parents), running, ends, None)

    def _mask(self, scaled: Tensor) -> Tensor:
        """`scaled` with -inf for what is not drawn from."""
        if self.top_k is not None and self.top_k < scaled.shape[2]:
            values, places = scaled.topk(self.top_k, 2)
            scaled = torch.full_like(scaled, -torch.inf).scatter_(2, places, values)
        if self.top_p is not None:
            values, places = descending(scaled)
            mass = values.softmax(2)
            outside = mass.cumsum(2) - mass >= self.top_p
            scaled = torch.empty_like(scaled).scatter_(2, places, values.masked_fill(outside, -torch.inf))
        return scaled


def choose_best(keys: Tensor, log_probs: Tensor, eos: Sequence[int], batch: Batch, high: int = 0) -> Choice:
    """The best of keys + log_probs in all rows; `keys` (B, K) are of all, `log_probs` of those in the batch.

    `high`: how high an end, of one eos, must rank among all to be taken; 0 for anywhere.
    """
    several = []
    if len(eos) > 1:
        several = [log_probs[:, :, token] for token in eos]
        log_probs = log_probs.clone()
        for token in eos[1:]:
            log_probs[:, :, token] = -torch.inf
    choose = find("beam_best", keys, log_probs)
    size = keys.shape[1]
    values, parents, tokens, ends = choose(keys, log_probs, max(size, high), eos[0], batch.ids, high)
    if high > size:
        values, parents, tokens = values[:, :size], parents[:, :size], tokens[:, :size]
    if several:
        ends = (keys[:, :, None] + batch.widen(torch.stack(several, 2))).flatten(1)
    return Choice(parents, tokens, values, ends, None)


def find_survivors(sums: Tensor, keys: Tensor, searching: Tensor) -> Tensor:
    """(B, K) int64: the hypothesis that each goes on as: the best of those with equal keys (B, K, n), then the first.

    Itself where there is none (`sums` of -inf), and in rows that do not search.
    """
    alive, place = (sums > -torch.inf) & searching[:, None], torch.arange(sums.shape[1], device=sums.device)
    ids = keys[..., 0]
    if keys.shape[2] > 1:  # a number for each key: K * K comparisons of long ones take longer, and more room
        ids = torch.unique(keys.flatten(0, 1), dim=0, return_inverse=True)[1].view_as(ids)
    same = alive[:, None] & (ids[:, :, None] == ids[:, None])
    return torch.where(alive, torch.where(same, sums[:, None], -torch.inf).argmax(2), place)


def merge_sums(sums: Tensor, survivors: Tensor) -> Tensor:
    """(B, K), differentiable: the logsumexp of those that go on as each survivor; others keep what they have."""
    gone = survivors != torch.arange(sums.shape[1], device=sums.device)
    # 0 for survivors themselves, also where there is none: no difference of infinities, nor its gradient.
    above = (sums - sums.gather(1, survivors)).masked_fill(~gone, 0.0)
    return sums + torch.zeros_like(sums).scatter_add(1, survivors, above.exp()).masked_fill(gone, 1.0).log()


def guess_best(keys: Tensor, log_probs: Tensor, eos: int, batch: Batch) -> tuple[Choice, Tensor]:
    """Chooses the K best as if no keys were equal: (the choice, the K + 1 best keys).

    Those keys tell later whether that was right (`Pool.take`), so nothing waits for a device here.
    """
    size, vocabulary = keys.shape[1], log_probs.shape[2]
    every = batch.select(keys)[:, :, None] + log_probs
    ends = every[:, :, eos].clone()
    every[:, :, eos] = -torch.inf
    ranked, places = every.flatten(1).topk(size + 1, 1)
    ranked, ends, places = batch.widen(ranked), batch.widen(ends), batch.widen(places, 0)[:, :size]
    parents = places.div(vocabulary, rounding_mode="floor")
    tokens = torch.sub(places, parents, alpha=vocabulary)
    return Choice(parents, tokens, ranked[:, :size], ends, None), ranked


def _place_first(keys: Tensor, size: int) -> Tensor:
    out = keys.new_full((len(keys), size), -torch.inf)
    out[:, 0] = keys
    return out


def _choose_by(offer: Offer, keys: Tensor) -> Choice:
    """The K best by keys (B, K, V), which are used up, that do not end, and the ends; NaN is the largest of all."""
    size = keys.shape[1]
    ends = keys.index_select(2, offer.eos)
    if offer.ends is not None:
        high = find_highest(keys, offer.ends).index_select(2, offer.eos)
        ends = torch.where(high | ends.isnan(), ends, -torch.inf)
    ends = ends.flatten(1)
    keys.index_fill_(2, offer.eos, -torch.inf)
    values, parents, tokens = best_pairs(keys, size + 1)
    return Choice(parents[:, :size], tokens[:, :size], values[:, :size], ends, values[:, size])
