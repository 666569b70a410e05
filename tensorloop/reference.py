"""The specification: every numerical operation again in a few lines of plain PyTorch, for the tests to compare with.

Slow, obvious, and differentiable as often as anybody likes. A loop buffer is here a tuple of its values: each write
makes a new one, so that the gradients are those of a functional array by construction; a packed tensor is values and
a list of lengths. Shapes are not checked. It stays one file, however long: the definition is read as a whole.
"""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Slots = tuple[Tensor, ...]


def unstack(values: Tensor) -> Slots:
    """The n slices of values (n, *F)."""
    return tuple(values.unbind(0))


def append(slots: Slots, x: Tensor) -> Slots:
    """`x` in a new slot at the end."""
    return (*slots, x)


def write(slots: Slots, i: int, x: Tensor) -> Slots:
    """`x` in slot i; i == len appends."""
    return (*slots[:i], x, *slots[i + 1 :])


def scatter(slots: Slots, indices: Sequence[int], values: Tensor) -> Slots:
    """values[j] in slot indices[j], in order; slots begun on the way are 0."""
    for i, x in zip(indices, values.unbind(0), strict=True):
        slots = slots + tuple(torch.zeros_like(x) for _ in range(i - len(slots)))
        slots = write(slots, i, x)
    return slots


def write_rows(slots: Slots, pos: Sequence[int], x: Tensor, where: Sequence[bool]) -> Slots:
    """Row b of x (B, *F) in row b of slot pos[b] where where[b]; rows not written of a new slot are 0."""
    for b, (i, writes) in enumerate(zip(pos, where, strict=True)):
        if writes:
            slots = slots + tuple(torch.zeros_like(x) for _ in range(i + 1 - len(slots)))
            rows = slots[i].unbind(0)
            slots = write(slots, i, torch.stack([*rows[:b], x[b], *rows[b + 1 :]]))
    return slots


def gather(slots: Slots, indices: Tensor) -> Tensor:
    """(*I, *F) for indices of any shape I."""
    return stack(slots)[indices]


def stack(slots: Slots) -> Tensor:
    """(n, *F)"""
    return torch.stack(slots)


def scan(
    body_fn: Callable[..., tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    dim: int = 0,
    reverse: bool = False,
    until: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """(carry, ys) of one step or more; ys in index order, steps along `dim`, or last where y has fewer dims."""
    leaves, tree = tree_flatten(xs)
    n = next((x.shape[dim] for x in leaves if x is not None), length)
    steps = itertools.count() if n is None else reversed(range(n)) if reverse else range(n)
    ys: list[Any] = []
    init = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, init)  # which a body may change in place
    for t in steps:
        init, y = body_fn(init, tree_unflatten([x if x is None else x.select(dim, t) for x in leaves], tree))
        ys.append(tree_map(lambda y: y.clone() if isinstance(y, Tensor) else y, y))
        if until is not None and until(init):
            break
    return init, tree_map(lambda *y: _stacked(y, dim), *(ys[::-1] if reverse else ys))


def _stacked(ys: Sequence[Any], dim: int) -> Tensor | None:
    if ys[0] is None:
        return None
    values = [y if isinstance(y, Tensor) else torch.as_tensor(y) for y in ys]
    return torch.stack(values, dim if dim < 0 else min(dim, values[0].dim()))


def while_loop(
    cond_fn: Callable[[Any], Any], body_fn: Callable[[Any], Any], init: Any, max_steps: int | None = None
) -> tuple[Any, int]:
    """(carry, steps)"""
    steps = 0
    while (max_steps is None or steps < max_steps) and cond_fn(init):
        init = body_fn(init)
        steps += 1
    return init, steps


def fixed_point(fn: Callable[[Any], Any], init: Any, steps: int = 1000) -> Any:
    """Returns what `fn` leaves as it is, reached in so many steps; the gradient is that of these steps."""
    return while_loop(lambda _: True, fn, init, steps)[0]


def while_rows(
    cond_fn: Callable[[Any], Any], body_fn: Callable[[Any], Any], init: Any, max_steps: int | None = None
) -> tuple[Any, Tensor]:
    """(carry, steps (B,)) where cond_fn gives (B,) bools: each row of the carry (B, *F) alone, as a batch of one."""
    leaves, tree = tree_flatten(init)
    rows = [tree_unflatten(row, tree) for row in zip(*(x.split(1) for x in leaves), strict=True)]
    done = [while_loop(cond_fn, body_fn, row, max_steps) for row in rows]
    return tree_map(lambda *x: torch.cat(x), *(carry for carry, _ in done)), torch.tensor([n for _, n in done])


def associative_scan(fn: Callable[[Any, Any], Any], xs: Any, dim: int = 0, reverse: bool = False) -> Any:
    """ys[t] = fn(ys[t - 1], xs[t]) for a tree xs, one after the other; fn gets slabs of one pair."""
    leaves, tree = tree_flatten(xs)
    slices = zip(*(x.movedim(dim, 0).split(1) for x in leaves), strict=True)
    elements = [tree_unflatten(x, tree) for x in slices]
    ys = list(itertools.accumulate(elements[::-1] if reverse else elements, fn))
    return tree_map(lambda *y: torch.cat(y).movedim(0, dim), *(ys[::-1] if reverse else ys))


def linear_recurrence(
    a: Any,
    b: Tensor,
    init: Tensor | None = None,
    dim: int = 0,
    reverse: bool = False,
    matrix: bool = False,
    resets: Tensor | None = None,
) -> Tensor:
    """h[t] = a[t] h[t - 1] + b[t] along `dim`, with init for h[t - 1] where resets[t]; all broadcast to b."""
    first = torch.as_tensor(0 if init is None else init)
    factors = torch.as_tensor(a).expand(*b.shape, *b.shape[-1:] * matrix).unbind(dim % b.dim())
    resets = torch.zeros((), dtype=torch.bool) if resets is None else resets.unsqueeze(-1) if matrix else resets
    h, hs = first.expand_as(b.select(dim, 0)), {}
    for t in reversed(range(len(factors))) if reverse else range(len(factors)):
        h = torch.where(resets.expand(b.shape).select(dim, t), first, h)
        h = ((factors[t] * h.unsqueeze(-2)).sum(-1) if matrix else factors[t] * h) + b.select(dim, t)
        hs[t] = h
    return torch.stack([hs[t] for t in sorted(hs)], dim)


def rnn(
    cell: Callable[[Tensor, Any], Any],
    x: Tensor,
    state: Any,
    lens: Sequence[int],
    dones: Tensor | None = None,
    fresh: Any = None,
    reverse: bool = False,
) -> tuple[Tensor, Any]:
    """(output (T, B, *F), state) of a cell `(x, state) -> (y, state)`, each row of x (T, B, *F) alone.

    Where `dones` (T, B) an episode begins, with the state `fresh`; each is run from its end under `reverse`.
    """
    rows: list[Any] = []
    for b, n in enumerate(lens):
        s, ys = tree_map(lambda s, b=b: s[b : b + 1], state), {}
        for t in reversed(range(n)) if reverse else range(n):
            first = t + reverse  # the step that may begin an episode
            if dones is not None and first < n and dones[first, b]:
                s = tree_map(lambda s, b=b: s[b : b + 1], fresh)
            ys[t], s = cell(x[t, b : b + 1], s)
        rows.append(([ys.get(t) for t in range(len(x))], s))
    zero = torch.zeros_like(next(y for ys, _ in rows for y in ys if y is not None))
    output = torch.stack([torch.cat([zero if y is None else y for y in ys]) for ys, _ in rows], 1)
    return output, tree_map(lambda *s: torch.cat(s), *(s for _, s in rows))


# Packed tensors: values (N, *F) hold the rows one after another, `lens` how long each is. An operation is that of each
# row alone.

Lens = list[int]
Reduction = Callable[[Tensor, tuple[int, ...]], Tensor]


def offsets_of(lens: Lens) -> Tensor:
    """(B+1,) int64: where each row begins, and the end of the last."""
    return torch.tensor([0, *itertools.accumulate(lens)])


def pack(padded: Tensor, lens: Lens) -> Tensor:
    """(B, T, *F) -> (N, *F)"""
    return torch.cat([padded.flatten(0, 1)[:0], *(row[:n] for row, n in zip(padded, lens, strict=True))])


def pad(values: Tensor, lens: Lens, steps: int, fill: float = 0) -> Tensor:
    """(N, *F) -> (B, steps, *F), `fill` behind the end of each row."""
    behind = [values.new_full((steps - n, *values.shape[1:]), fill) for n in lens]
    rows = [torch.cat(pair) for pair in zip(values.split(lens), behind, strict=True)]
    return torch.stack(rows) if rows else values.new_zeros(0, steps, *values.shape[1:])


def spread(rows: Tensor, lens: Lens) -> Tensor:
    """(B, *F) -> (N, *F): row b as often as it is long."""
    return torch.cat([rows[:0], *(row.expand(n, *row.shape) for row, n in zip(rows, lens, strict=True))])


def at_steps(values: Tensor, lens: Lens) -> list[Tensor]:
    """The entries at each t, (rows that reach t, *F): what the batch dim holds there."""
    rows = values.split(lens)
    return [torch.stack([row[t] for row in rows if len(row) > t]) for t in range(max(lens, default=0))]


def reduce(fn: Reduction, values: Tensor, lens: Lens, dim: tuple[int, ...] = (1,)) -> Tensor:
    """fn(x, dims) of each row, or with 0 in `dim` of the entries at each t; dims are numbered as in (B, T, *F)."""
    inner = (0, *(d - 1 for d in dim if d > 1))
    done = [fn(x, inner) for x in (at_steps(values, lens) if 0 in dim else values.split(lens))]
    return torch.stack(done) if done else fn(values.new_zeros(2, *values.shape[1:]), inner)[None][:0]


def within(fn: Callable[[Tensor], Tensor], values: Tensor, lens: Lens, dim: int = 1) -> Tensor:
    """fn of each row, or for dim 0 of the entries at each t, which keeps their number: (N, *F)."""
    if dim == 1:
        return torch.cat([values[:0], *map(fn, values.split(lens))])
    done = [iter(fn(x)) for x in at_steps(values, lens)]
    return torch.stack([next(done[t]) for n in lens for t in range(n)]) if sum(lens) else values[:0]


def segment_sum(values: Tensor, lens: Lens) -> Tensor:
    """(B, *F); 0 for an empty row."""
    return reduce(lambda row, dim: row.sum(dim), values, lens)


def segment_mean(values: Tensor, lens: Lens) -> Tensor:
    """(B, *F); NaN for an empty row."""
    return reduce(lambda row, dim: row.mean(dim), values, lens)


def segment_max(values: Tensor, lens: Lens, empty: float = 0) -> Tensor:
    """(B, *F); `empty` for an empty row. Equal entries share the gradient."""
    return reduce(lambda row, _: row.amax(0) if len(row) else row.new_full(row.shape[1:], empty), values, lens)


def segment_min(values: Tensor, lens: Lens, empty: float = 0) -> Tensor:
    """(B, *F); `empty` for an empty row. Equal entries share the gradient."""
    return reduce(lambda row, _: row.amin(0) if len(row) else row.new_full(row.shape[1:], empty), values, lens)


def segment_logsumexp(values: Tensor, lens: Lens) -> Tensor:
    """(B, *F); -inf for an empty row."""
    return reduce(lambda row, dim: row.logsumexp(dim), values, lens)


def segment_softmax(values: Tensor, lens: Lens) -> Tensor:
    """(N, *F)"""
    return within(lambda row: row.softmax(0), values, lens)


def segment_log_softmax(values: Tensor, lens: Lens) -> Tensor:
    """(N, *F)"""
    return within(lambda row: row.log_softmax(0), values, lens)


def segment_cumsum(values: Tensor, lens: Lens) -> Tensor:
    """(N, *F)"""
    return within(lambda row: row.cumsum(0), values, lens)


def flip(values: Tensor, lens: Lens) -> Tensor:
    """(N, *F), each row from its end."""
    return within(lambda row: row.flip(0), values, lens)


def gather_rows(values: Tensor, index: Sequence[int]) -> Tensor:
    """(n, *F): the entries of these numbers; one may be taken again."""
    return torch.cat([values[:0], *(values[i : i + 1] for i in index)])


def scan_packed(
    body_fn: Callable[..., tuple[Any, Any]], init: Any, values: Tensor, lens: Lens, reverse: bool = False
) -> tuple[Any, Any]:
    """(carry, ys (N, *F)) over packed xs: each row of the carry with its row of xs, as a batch of one; N is not 0."""
    leaves, tree = tree_flatten(init)
    carries = [tree_unflatten(row, tree) for row in zip(*(x.split(1) for x in leaves), strict=True)]
    ys = []
    for b, row in enumerate(values.split(lens)):
        if len(row):
            carries[b], y = scan(body_fn, carries[b], row[:, None], reverse=reverse)
            ys.append(tree_map(lambda y: y.squeeze(1), y))
    return tree_map(lambda *x: torch.cat(x), *carries), tree_map(lambda *y: torch.cat(y), *ys)


def regroup(
    values: Sequence[Tensor],
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
) -> list[Tensor]:
    """The columns of each key by `split`, put together by `cat`."""
    columns: dict[str, Tensor] = {}
    for x, names, widths in zip(values, keys, lengths, strict=True):
        columns.update(zip(names, x.split(list(widths), -1), strict=True))
    nothing = values[0][..., :0]
    return [torch.cat([nothing, *(columns[key] for key in group)], -1) for group in groups]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, sees: Tensor | None = None,
    softcap: float = 0.0, bias: Tensor | float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q (B, T, heads, D), k, v (B, S, heads_kv, D), `sees` (B, heads, T, S), `sinks` (heads,); 0 if none is seen."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (softcap * torch.tanh(scores / softcap) if softcap else scores) + bias
    mask = torch.ones_like(scores, dtype=torch.bool) if sees is None else sees.expand(scores.shape)
    mask = mask.tril() if causal else mask
    most = scores.detach().amax(-1, keepdim=True) if scores.numel() else 0
    weights = torch.exp(scores - most) * mask
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else torch.exp(sinks[:, None, None] - most))
    return (weights / torch.where(total == 0, 1, total) @ v).transpose(1, 2)


def attention_packed(q: Tensor, k: Tensor, v: Tensor, q_lens: Lens, k_lens: Lens, **options: Any) -> Tensor:
    """q (N, heads, D), k and v (M, heads_kv, D): row b of q sees row b of k; `options` as above."""
    rows = zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)
    nothing = q.new_zeros(0, q.shape[1], v.shape[2])
    return torch.cat([nothing, *(attention(*(x[None] for x in row), **options)[0] for row in rows)])


# Searches and risks: tokens are ints, one row is a sequence of them.

Row = Sequence[int]
Cost = Callable[[int, int], float]


class Hypothesis(NamedTuple):
    """One result of a beam search: what it is ranked by, the sum of its log-probabilities, tokens without the eos."""

    final: Any
    score: Any
    tokens: tuple[int, ...]
    finished: bool = True
    end: int = -1  # the token that ended it


def beam_search(
    log_probs: Callable[[tuple[int, ...]], Any], beam_size: int, max_steps: int, eos_id: int | tuple[int, ...],
    n_best: int, final: Callable[[Any, int], Any] = lambda score, length: score, may_end: int | None = None,
    stop: Callable[[list[Hypothesis], list[Any], int], bool] = lambda pool, running, t: False, capped: str = "last",
    merge: Callable[[tuple[int, ...]], Any] = lambda tokens: tokens,
) -> tuple[list[Hypothesis], int]:  # fmt: skip
    """(n_best hypotheses, steps) of one row; log_probs(tokens so far) -> V numbers; a tie keeps its order.

    Each eos counts where it is among the `may_end` best offers of its step, by default anywhere. `running` are pairs of
    score and tokens after t steps; those of the last one come behind the pool, or are "ranked" with it. Of those with
    equal merge(tokens) the best goes on, with the probability of all.
    """
    eos = eos_id if isinstance(eos_id, tuple) else (eos_id,)
    running: list[Any] = [(0.0, ())]
    pool, t = [], 0
    while running and t < max_steps and not (len(pool) == n_best and stop(pool, running, t)):
        met: dict[Any, list[Any]] = {}
        for s, past in running:  # the best first
            met.setdefault(merge(past), []).append((s, past))
        running = [
            x[0] if len(x) == 1 else (torch.stack([s for s, _ in x]).logsumexp(0), x[0][1]) for x in met.values()
        ]
        offers = [(s + p, (*past, k)) for s, past in running for k, p in enumerate(log_probs(past)) if p > -math.inf]
        best, t = sorted(offers, key=lambda offer: -offer[0]), t + 1
        ended = [offer for offer in offers if offer[1][-1] in eos and offer in best[:may_end]]
        pool += [Hypothesis(final(s, t), s, tokens[:-1], True, tokens[-1]) for s, tokens in ended]
        pool = sorted(pool, key=lambda found: -found.final)[:n_best]
        running = [offer for offer in best if offer[1][-1] not in eos][:beam_size]
    late = [Hypothesis(final(s, t), s, tokens, False) for s, tokens in running if t == max_steps]
    return sorted(pool + late, key=lambda one: (capped == "last" and not one.finished, -one.final))[:n_best], t


def every_hypothesis(
    log_probs: Callable[[tuple[int, ...]], Any],
    vocabulary: int,
    max_steps: int,
    eos_id: int | tuple[int, ...],
    final: Callable[[Any, int], Any] = lambda score, length: score,
) -> list[Hypothesis]:
    """All that end within `max_steps`, the eos counted, best first: what a beam that keeps everything finds."""
    eos = eos_id if isinstance(eos_id, tuple) else (eos_id,)
    others, found = [token for token in range(vocabulary) if token not in eos], []
    for tokens in itertools.chain(*(itertools.product(others, repeat=n) for n in range(max_steps))):
        for end in eos:
            score = sum(log_probs(tokens[:i])[token] for i, token in enumerate((*tokens, end)))
            found.append(Hypothesis(final(score, len(tokens) + 1), score, tokens, True, end))
    return sorted(found, key=lambda one: -one.final)


def edit_table(
    a: Row, b: Row, insertion: float = 1, deletion: float = 1, substitution: Cost = operator.ne
) -> dict[tuple[int, int], float]:
    """Returns costs of a's first i tokens against b's first j; insertions are tokens only a has, deletions b."""
    cost: dict[tuple[int, int], float] = {(0, 0): 0}
    for i, j in itertools.product(range(len(a) + 1), range(len(b) + 1)):
        ways = [cost[i - 1, j - 1] + substitution(a[i - 1], b[j - 1])] if i and j else []
        ways += [cost[i - 1, j] + insertion] if i else []
        ways += [cost[i, j - 1] + deletion] if j else []
        cost[i, j] = min(ways, default=0)
    return cost


def edit_distance(a: Row, b: Row, *costs: Any) -> float:
    """The least cost of edits between two rows; `costs` as above."""
    return edit_table(a, b, *costs)[len(a), len(b)]


def edit_path(
    a: Row, b: Row, insertion: float = 1, deletion: float = 1, substitution: Cost = operator.ne
) -> list[tuple[int, int, int]]:
    """(what, place in a, place in b) by edit; from the ends a pair goes before an insertion, that before a deletion."""
    cost, path, i, j = edit_table(a, b, insertion, deletion, substitution), [], len(a), len(b)
    while i or j:
        if i and j and cost[i, j] == cost[i - 1, j - 1] + substitution(a[i - 1], b[j - 1]):
            i, j = i - 1, j - 1
            path.append((int(a[i] != b[j]), i, j))  # match or substitution
        elif i and cost[i, j] == cost[i - 1, j] + insertion:
            i -= 1
            path.append((2, i, -1))
        else:
            j -= 1
            path.append((3, -1, j))
    return path[::-1]


def sentence_bleu(a: Row, b: Row, max_n: int = 4, smoothing: str = "add_one") -> float:
    """The BLEU of one row against one, n-gram by n-gram; 0 where they share no token, 1 where both are empty."""
    if not set(a) & set(b):
        return float(not a and not b)
    logs, missed = [], 0
    for n in range(1, max_n + 1):
        mine, theirs = (Counter(zip(*(row[k:] for k in range(n)), strict=False)) for row in (a, b))
        more = smoothing == "add_one" and n > 1
        hits, total = (mine & theirs).total() + more, mine.total() + more
        if total and not hits:
            missed += 1
            hits = 0.5**missed if smoothing == "exp" else 0
        if total:
            logs.append(math.log(hits / total) if hits else -math.inf)
    return math.exp(min(0, 1 - len(b) / len(a)) + sum(logs) / len(logs))


# Objectives: scores s and risks D (n,) are those of the hypotheses of one row that are there.


def by_row(loss: Callable[..., Tensor], valid: Tensor, *given: Tensor, **options: Any) -> Tensor:
    """(B,): loss(*given) of each row's valid hypotheses alone; given are (B, K), or (B,) for one number a row."""
    rows = zip(valid, *given, strict=True)
    return torch.stack([loss(*(x[there] if x.dim() else x for x in row), **options) for there, *row in rows])


def minimum_risk(scores: Tensor, risks: Tensor, alpha: float = 1) -> Tensor:
    """sum_i Q_i D_i for Q_i = p_i^alpha / sum_j p_j^alpha"""
    p = torch.exp(alpha * scores)
    return (p / p.sum() * risks).sum()


def mwer(scores: Tensor, risks: Tensor, gold_score: Tensor | float = 0.0, weight: float = 0.01) -> Tensor:
    """The expected risk less the mean, which is a constant, and some cross entropy."""
    p = torch.exp(scores)
    return (p / p.sum() * (risks - risks.mean().detach())).sum() - weight * gold_score


def leave_one_out(scores: Tensor, risks: Tensor) -> Tensor:
    """The mean of s_i times D_i less the mean of the other D; 0 where there are no others."""
    if len(scores) < 2:
        return (0 * scores).sum()
    others = torch.stack([torch.cat([risks[:i], risks[i + 1 :]]).mean() for i in range(len(risks))])
    return ((risks - others) * scores).mean()


def stochastic_beam_risk(scores: Tensor, risks: Tensor, kappa: Tensor, estimator: str = "normalised") -> Tensor:
    """sum_i p_i / q_i [bracket], of which p_i = exp(s_i) alone has a gradient."""
    p, q = scores.detach().exp(), 1 - torch.exp(-torch.exp(scores.detach() - kappa))
    w = p / q
    total, weighted = w.sum(), (w * risks).sum()
    bracket = {
        "unbiased": risks,
        "baseline": risks * (1 - p + w) - weighted,
        "normalised": (risks - weighted / total) / (total - w + p),
    }[estimator]
    return (scores.exp() / q * bracket).sum()


# Alignments of one row of frames with tokens.


def ctc_loss(log_probs: Tensor, tokens: Row, blank: int = 0) -> Tensor:
    """Returns the loss of (T, V): a frame stays in a state, moves on, or skips a blank between tokens that differ."""
    states = [blank, *(x for token in tokens for x in (token, blank))]
    reached = {-1: log_probs.sum() * 0}
    for frame in log_probs:
        ways: dict[int, list[Tensor]] = {}
        for s, to in ((s, s + n) for s in reached for n in range(3) if 0 <= s + n < len(states)):
            if to < s + 2 or (states[to] != blank and (s < 0 or states[to] != states[s])):
                ways.setdefault(to, []).append(reached[s] + frame[states[to]])
        reached = {s: torch.stack(scores).logsumexp(0) for s, scores in ways.items()}
    ends = [reached[s] for s in (len(states) - 1, len(states) - 2) if s in reached]
    return -torch.stack(ends).logsumexp(0) if ends else log_probs.sum() * 0 + math.inf


def rnnt_loss(log_probs: Tensor, tokens: Row, blank: int = 0) -> Tensor:
    """Returns the loss of a joint (T, U + 1, V): a blank goes to the next frame, a token to the next text position."""
    reached: dict[tuple[int, int], Tensor] = {}
    for t, u in ((t, u) for t in range(len(log_probs)) for u in range(len(tokens) + 1)):
        ways = [reached[t - 1, u] + log_probs[t - 1, u, blank]] if t else []
        ways += [reached[t, u - 1] + log_probs[t, u - 1, tokens[u - 1]]] if u else []
        reached[t, u] = torch.stack(ways).logsumexp(0) if ways else log_probs.sum() * 0
    end = len(log_probs) - 1, len(tokens)
    return -(reached[end] + log_probs[(*end, blank)])


# Orderings: `sees` (N, M) bool says which keys each query sees.


def count_blocks(sees: Tensor, queries: Tensor, keys: Tensor, size: int) -> tuple[int, int]:
    """Blocks of size x size that are not empty, and those that are full, when positions stand as the orders say."""
    blocks = [part for rows in sees[queries][:, keys].split(size) for part in rows.split(size, 1)]
    return sum(bool(part.any()) for part in blocks), sum(bool(part.any() and part.all()) for part in blocks)


def neighbours(x: Tensor, y: Tensor, reach: Tensor, euclidean: bool) -> Tensor:
    """(N, M) bool: which y (M, d) are within reach (d,) of each x (N, d), in an ellipsoid or a box."""
    steps = ((x[:, None] - y[None]) / reach).abs()
    return (steps.square().sum(2) if euclidean else steps.amax(2)) <= 1


def neighbourhood(shape: Sequence[int], window: Sequence[int]) -> Tensor:
    """(N, N) bool: along each axis a cell sees `window` cells around it, moved inside at the borders."""
    sees = torch.ones(1, 1, dtype=torch.bool)
    for side, width in zip(shape, window, strict=True):
        start = (torch.arange(side) - width // 2).clamp(0, side - width)[:, None]
        steps = torch.arange(side) - start
        sees = torch.kron(sees.int(), ((steps >= 0) & (steps < width)).int()).bool()
    return sees
