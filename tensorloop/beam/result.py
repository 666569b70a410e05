"""The result of a beam search: the n best hypotheses of each row, read back from the decisions of the search."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.ranking import descending
from tensorloop._common.saved import saved
from tensorloop._common.uploads import upload
from tensorloop.beam import diagnostics, show
from tensorloop.beam.ancestry import as_index
from tensorloop.beam.decisions import Decisions
from tensorloop.beam.gold import Gold
from tensorloop.kernels import find
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.tensor import PackedTensor
from tensorloop.tensor_array.array import TensorArray


@saved()
@dataclass(frozen=True, eq=False, repr=False)
class Lattice:
    """Everything that the search kept, step by step: T steps, B rows, K hypotheses (K + 1 with gold).

    Hypothesis k after step t goes on from hypothesis `backpointers[t, b, k]` of the step before with `tokens[t, b, k]`.
    Nothing here has a gradient.

    Attributes:
        tokens: (T, B, K) int64.
        backpointers: (T, B, K) int64.
        scores: (T, B, K), the sum of a hypothesis' log-probabilities so far; -inf where there is none. Hypotheses that
            merge after step t have scores of their own there, and go on as one.
        steps: (B,) int64, how many steps each row took; what stands after them means nothing.
        ends: the hypotheses returned, two tensors (B, n_best): how many tokens each has, and its place k.

    Example:
        >>> embed, out = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4)
        >>> step = lambda h, tokens: ((h := torch.sin(h + embed(tokens))), out(h).log_softmax(-1))
        >>> hyps = tl.beam_search(step, torch.zeros(2, 8), batch_size=2, beam_size=3, bos_id=0, eos_id=1, max_steps=3)
        >>> hyps.lattice.tokens.shape  # T steps, B rows, K hypotheses
        torch.Size([3, 2, 3])
    """

    tokens: Tensor
    backpointers: Tensor
    scores: Tensor
    steps: Tensor
    ends: tuple[Tensor, Tensor]

    def __repr__(self) -> str:
        steps, rows, size = self.tokens.shape
        return f"Lattice({steps} steps, {rows} rows, {size} hypotheses)"

    def draw(self, row: int = 0, *, ax: Any = None, names: Any = None) -> Any:
        """Draws the lattice of a row with matplotlib; paths to the returned hypotheses are bold.

        Args:
            row: int, which row of the batch.
            ax: the matplotlib axes to draw on; None makes a figure.
            names: what is written for a token, as `names[token]` or `names(token)`; None writes its number.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> embed, out = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4)
            >>> step = lambda h, tokens: ((h := torch.sin(h + embed(tokens))), out(h).log_softmax(-1))
            >>> sizes = {"batch_size": 2, "beam_size": 3, "bos_id": 0, "eos_id": 1, "max_steps": 3}
            >>> hyps = tl.beam_search(step, torch.zeros(2, 8), **sizes)
            >>> axes = hyps.lattice.draw(0)  # with matplotlib
        """
        return show.draw(self, row, ax, names)


@saved()
@dataclass(frozen=True, eq=False, repr=False)
class Hypotheses:
    """The n best hypotheses of B rows, best first: what `beam_search` returns.

    Row b * n_best + j of what is packed is `[b, j]` of the others.

    Attributes:
        tokens: PackedTensor (B * n_best, T*) int64, without bos and eos.
        lens: (B, n_best) int64, tokens without the eos; 0 where there is no hypothesis.
        scores: (B, n_best), the log-probability, eos included, of all that merged into it; -inf where there is none.
        final: (B, n_best), what the length model makes of the score; hypotheses are in this order.
        token_scores: PackedTensor (B * n_best, T*), the log-probability of each token and last of the eos; they sum to
            `scores`, but where hypotheses were merged to less, as they are those of the one that went on.
        valid: (B, n_best) bool, whether there is a hypothesis.
        finished: (B, n_best) bool, whether it ended with eos.
        ends: (B, n_best) int64, the eos_id that ended it; -1 where none did.
        stopped: a list with a string for each row: "exact" (no later hypothesis could be better), "heuristic" (ended by
            a rule) or "capped" (by max_steps).
        gap: (B,) float64, the most by which a hypothesis that had not ended, continued to any length, can be above the
            n-th that ended; 0 or less where the row is exact.
        coverage: (B,), the probability of all ended hypotheses returned, each counted once.
        lattice: `Lattice`, all that the search kept.
        keys: (B, n_best), the keys of `StochasticBeam`; None with others.
        kappa: (B,), the largest key that was left out; None with others than `StochasticBeam`.
        inclusion: (B, n_best), the probability of being drawn, given kappa; None with others than `StochasticBeam`.
        gold: (B,) int64, which of the n_best is the gold hypothesis; None without gold.

    Gradient: `scores`, `final` and `token_scores`, to all that the log-probabilities came from.

    Example:
        >>> embed, out = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4)
        >>> step = lambda h, tokens: ((h := torch.sin(h + embed(tokens))), out(h).log_softmax(-1))
        >>> hyps = tl.beam_search(step, torch.zeros(2, 8), batch_size=2, beam_size=3, bos_id=0, eos_id=1, max_steps=9)
        >>> hyps.scores.shape, hyps.batch_size, hyps.n_best, hyps.repeated.any().item()
        (torch.Size([2, 3]), 2, 3, False)
    """

    tokens: PackedTensor
    lens: Tensor
    scores: Tensor
    final: Tensor
    token_scores: PackedTensor
    valid: Tensor
    finished: Tensor
    ends: Tensor
    stopped: list[str]
    gap: Tensor
    coverage: Tensor
    lattice: Lattice
    keys: Tensor | None = None
    kappa: Tensor | None = None
    inclusion: Tensor | None = None
    gold: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """The number of rows, B."""
        return self.lens.shape[0]

    @property
    def n_best(self) -> int:
        """How many hypotheses each row has."""
        return self.lens.shape[1]

    @property
    def repeated(self) -> Tensor:
        """(B, n_best) bool: whether an earlier hypothesis of the row has the same tokens; only samples repeat."""
        return find_repeated(self.tokens, self.lens, self.valid, self.ends)

    def text(self, names: Any = None, rows: int = 10) -> str:
        """Writes the hypotheses of the first rows with their scores.

        Args:
            names: what is written for a token, as `names[token]` or `names(token)`; None writes its number.
            rows: int, how many rows of the batch are shown.

        Returns:
            A string, a line for each hypothesis.

        Example:
            >>> embed, out = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4)
            >>> step = lambda h, tokens: ((h := torch.sin(h + embed(tokens))), out(h).log_softmax(-1))
            >>> sizes = {"batch_size": 2, "beam_size": 3, "bos_id": 0, "eos_id": 1, "max_steps": 3}
            >>> hyps = tl.beam_search(step, torch.zeros(2, 8), **sizes)
            >>> hyps.text(rows=1).splitlines()[0]
            'Hypotheses(2 rows, 3 best)'
        """
        return show.write_text(self, names, rows)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return show.write_html(self)


class _Entries(NamedTuple):
    """Candidates for the result, (B, m) each."""

    keys: Tensor
    sums: Tensor
    lens: Tensor
    places: Tensor
    end: Tensor  # which of the eos_ids
    group: Tensor  # 2: ended; 1: not; 0: none
    gold: Tensor  # bool

    def sort(self, count: int, capped: str) -> "_Entries":
        """The best `count`: ended before others unless `capped` is "ranked", then by key, then in order."""
        order = descending(self.keys)[1]
        group = self.group if capped == "last" else self.group.clamp(max=1)
        groups = descending(group.gather(1, order))[1]
        order = order.gather(1, groups)[:, :count]
        return _Entries(*(x.gather(1, order) for x in self))


def build_result(decisions: Decisions, picked: TensorArray | list[Tensor], steps: Tensor) -> Hypotheses:
    """The result. `picked` has (B, size * (1 + E)) a step: log-probs of the tokens chosen, then those of every end."""
    decisions.finish()
    best = _collect(decisions)
    rules, n = decisions.rules, decisions.rules.n_best
    valid, finished = best.group > 0, best.group == 2
    count = decisions.steps
    parents, tokens = (_stack(x[:count], decisions) for x in (decisions.parents, decisions.tokens))
    trace = find("beam_trace", parents)(parents, best.lens, best.places)
    packed, token_scores = _read(tokens, trace, best, finished, picked, len(decisions.eos))
    ended_by = torch.where(finished, decisions.eos[best.end], -1)
    wide = decisions.sums.dtype
    sums = token_scores.sum(1).to(wide).view(decisions.rows, n)
    if decisions.survivors and not isinstance(picked, list):
        sums = _sum_merged(decisions, picked.stack().to(wide), best, finished)
    value = best.sums.to(wide)
    # The sum as the search had it; the gradient is that of the parts.
    scores = torch.where(valid, value.masked_fill(~valid, 0) + (sums - sums.detach()), -torch.inf)
    # Numbers for a length model where there is no hypothesis: what it makes of none may have a NaN for a gradient.
    final = rules.length.final(torch.where(valid, scores, 0.0), torch.where(valid, best.lens + finished, 1))
    repeats = find_repeated(packed, best.lens, valid, ended_by) if rules.choose.repeats else torch.zeros_like(valid)
    mass = scores.detach().masked_fill(~finished | repeats, -torch.inf).logsumexp(1).exp()
    kept = _stack(decisions.sums_after, decisions).to(wide)
    if count:
        running = kept.amax(2) if rules.merge is None else kept.logsumexp(2)
        ends = best.lens, value
        over = diagnostics.find_disproved(decisions.slack, decisions.first_mass, running, steps, ends, mass)
        decisions.gap = torch.where(over, torch.inf, decisions.gap)
    else:
        over = torch.zeros_like(decisions.searching)
    # All that Python asks for, in one wait for a device.
    gaps, by_rule, disproved = torch.stack([decisions.gap, decisions.by_rule.double(), over.double()]).tolist()
    if count and not decisions.told:
        diagnostics.warn_of_scores(disproved)
    result = Hypotheses(
        packed, best.lens, scores, torch.where(valid, final, -torch.inf), token_scores, valid, finished, ended_by,
        _name_stops(gaps, by_rule), decisions.gap, mass,
        Lattice(tokens, parents, kept, steps, (best.lens, best.places)),
    )  # fmt: skip
    return _add_extras(result, decisions, best)


def _sum_merged(decisions: Decisions, picked: Tensor, best: _Entries, finished: Tensor) -> Tensor:
    """(B, n): the scores where hypotheses were merged, with their gradient."""
    sums = decisions.sum_merged(picked, best.lens, best.places)
    row = torch.arange(decisions.rows, device=sums.device)[:, None]
    place = decisions.size + best.places * len(decisions.eos) + best.end
    return sums + picked[best.lens.clamp(max=len(picked) - 1), row, place].masked_fill(~finished, 0.0)


def _stack(steps: list[Tensor], decisions: Decisions) -> Tensor:
    """(T, B, size)"""
    empty = 0, decisions.rows, decisions.size
    return torch.stack(steps) if steps else torch.zeros(empty, dtype=torch.int64, device=decisions.device)


def _add_extras(result: Hypotheses, decisions: Decisions, best: _Entries) -> Hypotheses:
    extras: dict[str, Any] = {}
    if decisions.rules.choose.by_key:
        inclusion = -torch.expm1(-torch.exp(best.sums - decisions.lost[:, None]))
        extras = {"keys": best.keys, "kappa": decisions.lost, "inclusion": torch.where(result.valid, inclusion, 0.0)}
    if decisions.gold is not None:
        extras["gold"] = best.gold.to(torch.uint8).argmax(1)
    return Hypotheses(**(vars(result) | extras))


def _name_stops(gaps: list[float], by_rule: list[float]) -> list[str]:
    rows = zip(gaps, by_rule, strict=True)
    return ["exact" if gap <= 0 else "heuristic" if ruled else "capped" for gap, ruled in rows]


def _collect(decisions: Decisions) -> _Entries:
    n, k, many = decisions.rules.n_best, decisions.rules.size, len(decisions.eos)
    pool = decisions.pool
    ended = pool.keys > -torch.inf
    lens, place, end = pool.locate(k, many)
    entries = _Entries(pool.keys, pool.sums, lens, place, end, 2 * ended.long(), torch.zeros_like(ended))
    if decisions.gold is not None and decisions.steps:
        entries = _put_gold(entries, decisions, decisions.gold)
    if not bool(decisions.asked.any() if decisions.gold is None else decisions.searching.any()):
        return _blank(entries.sort(n, decisions.rules.capped), decisions)
    places = torch.arange(k, device=decisions.device).expand(decisions.rows, -1)
    lens = torch.full_like(places, decisions.steps)
    keys = decisions.keys if decisions.rules.choose.by_key else decisions.rules.length.final(decisions.sums, lens)
    running = (decisions.keys > -torch.inf) & decisions.searching[:, None]
    none = torch.zeros_like(running)
    keys = keys.masked_fill(~running, -torch.inf)
    late = _Entries(keys, decisions.sums, lens, places, none.long(), running.long(), none)
    both = _Entries(*(torch.cat(pair, 1) for pair in zip(entries, late, strict=True)))
    return _blank(both.sort(n, decisions.rules.capped), decisions)


def _blank(entries: _Entries, decisions: Decisions) -> _Entries:
    """With zeros where there is no hypothesis, and in the last place of rows whose gold one the model excludes."""
    if decisions.gold is not None and decisions.steps:
        excluded = torch.zeros_like(entries.gold)
        excluded[:, -1] = decisions.gold.sum == -torch.inf
        keys, sums = (x.masked_fill(excluded, -torch.inf) for x in (entries.keys, entries.sums))
        group = entries.group.masked_fill(excluded, 0)
        entries = entries._replace(keys=keys, sums=sums, group=group, gold=entries.gold | excluded)
    none = entries.group == 0
    return entries._replace(lens=entries.lens.masked_fill(none, 0), places=entries.places.masked_fill(none, 0))


def _put_gold(entries: _Entries, decisions: Decisions, gold: Gold) -> _Entries:
    """With the gold hypothesis in the last place, unless the search has found it or it cannot be."""
    lens, sums = gold.lens, gold.sum
    found = (entries.group == 2) & (entries.lens == lens[:, None]) & (entries.places == gold.place[:, None])
    found &= entries.end == gold.end
    found &= found.long().cumsum(1) == 1
    last = torch.zeros_like(found)
    last[:, -1] = ~found.any(1) & (sums > -torch.inf)
    key = decisions.rules.length.final(sums[:, None], lens[:, None] + 1)

    def put(old: Tensor, new: Any) -> Tensor:
        return torch.where(last, torch.as_tensor(new, dtype=old.dtype, device=old.device), old)

    return _Entries(
        put(entries.keys, key),
        put(entries.sums, sums[:, None]),
        put(entries.lens, lens[:, None]),
        put(entries.places, decisions.size - 1),
        put(entries.end, gold.end),
        put(entries.group, 2),
        found | last,
    )


def _read(
    tokens: Tensor, trace: Tensor, best: _Entries, finished: Tensor, picked: TensorArray | list[Tensor], many: int
) -> tuple[PackedTensor, PackedTensor]:
    """The tokens, and the log-probability of each and of the eos."""
    steps, rows, size = tokens.shape
    # Lengths, and whether there is an end, on the CPU: the one wait for a device.
    lens, ended = torch.stack([best.lens.flatten(), finished.flatten().to(best.lens.dtype)]).cpu()
    dim, longer = (Dim(None, x).to(tokens.device) for x in (lens, lens + ended))
    # One flat index selects much faster than one for each dim; `first` is that of (step, row).
    hypothesis, each = dim._row_ids, best.lens.shape[1]
    first = dim._positions * rows + torch.div(hypothesis, max(each, 1), rounding_mode="floor")
    place = trace.flatten().index_select(0, dim._positions * (rows * each) + hypothesis)
    packed = PackedTensor(tokens.flatten().index_select(0, first * size + place), dim)
    # In `picked` all is (step, row, place), then the `many` ends of each place.
    width = size * (1 + many)
    if not steps:
        like = getattr(picked, "dtype", None) or torch.get_default_dtype()
        return packed, PackedTensor(torch.zeros(0, dtype=like, device=tokens.device), longer)
    ends = (best.lens * rows + torch.arange(rows, device=tokens.device)[:, None]) * width + size
    ends += best.places * many + best.end
    index = torch.empty(longer.total, dtype=torch.int64, device=tokens.device)
    last = longer._offsets[1:] - 1
    at = upload(ended.nonzero()[:, 0], tokens.device)
    index[last.index_select(0, at)] = ends.flatten().index_select(0, at)
    index[longer._offsets.index_select(0, hypothesis) + dim._positions] = first * width + place
    values = (torch.stack(picked) if isinstance(picked, list) else picked.stack()).flatten()
    return packed, PackedTensor(values.index_select(0, as_index(index, len(values))), longer)


def find_repeated(tokens: PackedTensor, lens: Tensor, valid: Tensor, ends: Tensor) -> Tensor:
    """(B, n) bool: whether an earlier hypothesis of the row is the same, with the same end."""
    rows, n = lens.shape
    padded = tokens.pad(-1).view(rows, n, tokens.max_len)
    same = (padded[:, :, None] == padded[:, None]).all(3) & (lens[:, :, None] == lens[:, None])
    same &= ends[:, :, None] == ends[:, None]
    return (same & valid[:, None]).tril(-1).any(2) & valid
