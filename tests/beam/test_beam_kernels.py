"""The kernels of beam search against torch operations, which are against sorting in plain Python."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop.beam.batch import Batch
from tensorloop.beam.choose import choose_best, guess_best
from tensorloop.kernels import find
from tensorloop.kernels.cpu import attend, beam
from tensorloop.kernels.cpu import threads as _threads
from tensorloop.kernels.eager import attend as eager_attend
from tensorloop.kernels.eager import beam as eager_beam
from tensorloop.kernels.eager.past import past_attend
from tensorloop.kernels.sight import Sight
from tests.support.devices import HERE

MODULES = {"cpu": beam, "eager": eager_beam}
INF = float("inf")
SHAPES = [(1, 1, 1, 3), (3, 4, 5, 4), (3, 4, 5, 40), (2, 3, 200, 7), (0, 2, 3, 2), (4, 8, 129, 16)]
SHAPES += [(3, 2, v, 5) for v in (31, 32, 33, 64)]  # about one block, and two


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, coarse: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys and log_probs, some of them -inf; coarse ones tie."""
    rows, size, vocabulary = shape[:3]
    generator = torch.Generator(HERE).manual_seed(seed)
    keys = -2 * torch.rand(rows, size, generator=generator).to(dtype)
    log_probs = -5 * torch.rand(rows, size, vocabulary, generator=generator).to(dtype)
    if coarse:
        keys, log_probs = keys.round(), log_probs.round()
    log_probs[torch.rand(log_probs.shape, generator=generator) < 0.1] = -torch.inf
    keys[:, 1:][torch.rand(rows, size - 1, generator=generator) < 0.2] = -torch.inf
    return keys, log_probs


def sorted_by_hand(keys: Tensor, log_probs: Tensor, count: int, eos: int) -> list[list[tuple[float, int, int]]]:
    found = []
    for key, scores in zip(keys, log_probs, strict=True):
        every = [
            ((key[k] + scores[k, v]).item(), k, v)
            for k in range(len(key))
            for v in range(scores.shape[1])
            if v != eos and key[k] + scores[k, v] > -torch.inf
        ]
        every.sort(key=lambda x: (-x[0], x[1], x[2]))
        first = every[0][1:] if every else (0, 0)
        found.append((every + [(-float("inf"), *first)] * count)[:count])
    return found


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("module", MODULES)
def test_the_best_continuations(module: str, shape: tuple[int, ...], dtype: torch.dtype, coarse: bool):
    keys, log_probs = inputs(shape, dtype, coarse)
    eos = shape[2] - 1
    values, parents, tokens, ends = MODULES[module].beam_best(keys, log_probs, shape[3], eos)
    ours = [list(zip(*(x.tolist() for x in row), strict=True)) for row in zip(values, parents, tokens, strict=True)]
    assert ours == sorted_by_hand(keys, log_probs, shape[3], eos)
    assert torch.equal(ends, keys + log_probs[:, :, eos])


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("module", MODULES)
def test_ends_among_the_best(module: str, shape: tuple[int, ...], coarse: bool):
    (_, size, vocabulary, count), eos = shape, shape[2] // 2
    for high, seed in itertools.product({1, (count + 1) // 2, count}, range(3)):
        keys, log_probs = inputs(shape, coarse=coarse, seed=seed)
        log_probs[:, :, eos] += 2 * (seed > 0)  # some of them rank high
        every = (keys[:, :, None] + log_probs).flatten(1)
        *best, ends = MODULES[module].beam_best(keys, log_probs, count, eos, high=high)
        for row, found in zip(every.tolist(), ends.tolist(), strict=True):
            first = sorted(range(len(row)), key=lambda i: (-row[i], i))[:high]
            places = [k * vocabulary + eos for k in range(size)]
            assert found == [row[i] if i in first else -INF for i in places]
        anywhere = MODULES[module].beam_best(keys, log_probs, count, eos)[:3]
        assert all(torch.equal(x, y) for x, y in zip(best, anywhere, strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_nan_is_the_largest(module: str):
    keys, log_probs = inputs((5, 3, 150))
    log_probs[2, 1, 149] = torch.nan
    log_probs[3, 1, 1] = torch.nan  # an end
    log_probs[4, 0, 0] = torch.nan
    values = MODULES[module].beam_best(keys, log_probs, 4, 1)[0]
    assert values[:, 0].isnan().tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("module", MODULES)
def test_memory_of_any_layout(module: str):
    keys, log_probs = inputs((4, 3, 20))
    expected = MODULES[module].beam_best(keys, log_probs, 5, 2)
    turned = log_probs.transpose(0, 2).contiguous().transpose(0, 2)
    got = MODULES[module].beam_best(keys.t().contiguous().t(), turned, 5, 2)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_the_best_of_rows_in_the_batch(module: str):
    keys, log_probs = inputs((6, 3, 90))
    ids = torch.tensor([1, 2, 5])
    whole = MODULES[module].beam_best(keys, log_probs, 4, 2)
    got = MODULES[module].beam_best(keys, log_probs[ids], 4, 2, ids)
    for x, y, fill in zip(got, whole, (-torch.inf, 0, 0, -torch.inf), strict=True):
        expected = torch.full_like(y, fill)
        expected[ids] = y[ids]
        assert torch.equal(x, expected)


RULES = ("exact", "first_n", "never")


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("module", MODULES)
def test_the_pool(module: str, rule: str, coarse: bool):
    rows, size, n = 4, 3, 5
    generator = torch.Generator(HERE).manual_seed(3)
    pool = [torch.full((rows, n), -torch.inf), torch.full((rows, n), -torch.inf).double(), torch.zeros(rows, n).long()]
    pool += [torch.zeros(rows), torch.zeros(rows)]
    searching = torch.tensor([True, True, False, True])
    by_hand: list[list[tuple[float, float, int]]] = [[] for _ in range(rows)]
    for t in range(6):
        ends, running, bounds = -9 * torch.rand(3, rows, size, generator=generator)
        ends = ends.round() if coarse else ends
        ends[torch.rand(rows, size, generator=generator) < 0.3] = -torch.inf
        running[torch.rand(rows, size, generator=generator) < 0.5] = -torch.inf
        sums = 2 * ends.double()
        said = MODULES[module].beam_pool((ends, sums), (running, bounds), pool, searching, t, rule)
        empty = over = False
        for b in range(rows):
            top = max(
                [float(x) for x, key in zip(bounds[b], running[b], strict=True) if key > -torch.inf], default=-INF
            )
            assert float(pool[3][b]) == top
            if not searching[b]:
                continue
            new = [(float(ends[b, k]), float(sums[b, k]), t * size + k) for k in range(size) if ends[b, k] > -torch.inf]
            by_hand[b] = sorted(by_hand[b] + new, key=lambda x: -x[0])
            left, by_hand[b] = by_hand[b][n:], by_hand[b][:n]
            assert float(pool[4][b]) == max([x[0] for x in left], default=-INF)
            worst = by_hand[b][n - 1][0] if len(by_hand[b]) == n else -INF
            empty |= not bool((running[b] > -torch.inf).any() | (ends[b] > -torch.inf).any())
            over |= worst >= top if rule == "exact" else top == -INF or (rule == "first_n" and worst > -INF)
        assert said == empty + 2 * over
        for b in range(rows):
            count = len(by_hand[b])
            kept = zip(*(x[b, :count].tolist() for x in pool[:3]), strict=True)
            assert list(kept) == by_hand[b]
            assert bool((pool[0][b, count:] == -torch.inf).all())


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["ends", "running"])
@pytest.mark.parametrize("module", MODULES)
def test_no_number_and_nothing_are_told(module: str, place: str, spoilt: float):
    given = {"ends": torch.zeros(3, 2), "running": torch.zeros(3, 2)}

    def told(searching: list[bool]) -> int:
        pool = [torch.full((3, 2), -torch.inf) for _ in range(2)]
        pool += [torch.zeros(3, 2).long(), torch.zeros(3), torch.zeros(3)]
        running, ends = given["running"], given["ends"]
        return 1 & MODULES[module].beam_pool(
            (ends, ends), (running, running), pool, torch.tensor(searching), 0, "never"
        )

    assert told([True] * 3) == 0
    given[place][1, 1] = spoilt
    assert (told([True] * 3), told([True, False, True])) == (1, 0)
    for x in given.values():
        x[1] = -torch.inf
    assert (told([True] * 3), told([True, False, True])) == (1, 0)


@pytest.mark.parametrize("ids", [None, [0, 2, 3]])
@pytest.mark.parametrize("module", MODULES)
def test_where_the_chosen_are(module: str, ids: list[int] | None):
    size, vocabulary, eos = 3, 7, 2
    generator = torch.Generator(HERE).manual_seed(4)
    parents = torch.randint(size, (5, size), generator=generator)
    tokens = torch.randint(vocabulary, (5, size), generator=generator)
    rows = list(range(5)) if ids is None else ids
    log_probs = torch.randn(len(rows), size, vocabulary, generator=generator)
    states = torch.randn(len(rows), size, generator=generator)
    index = None if ids is None else torch.tensor(ids)
    taken, places, chosen = MODULES[module].beam_chosen(parents, tokens, index, vocabulary, eos)
    picked = log_probs.flatten()[chosen.long()].view(len(rows), 2 * size)
    for i, b in enumerate(rows):
        assert torch.equal(taken[i], tokens[b])
        assert torch.equal(states.flatten()[places.long()].view_as(states)[i], states[i, parents[b]])
        assert torch.equal(picked[i, :size], log_probs[i, parents[b], tokens[b]])
        assert torch.equal(picked[i, size:], log_probs[i, :, eos])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("ids", [None, [1, 2]])
@pytest.mark.parametrize("module", MODULES)
def test_ancestors(module: str, ids: list[int] | None, dtype: torch.dtype):
    rows, size = 3, 4
    generator = torch.Generator(HERE).manual_seed(5)
    table = torch.zeros(16, rows, size, dtype=dtype)
    table[0] = torch.arange(size)
    every = [[[k] for k in range(size)] for _ in range(rows)]  # of each hypothesis: its ancestors, by hand
    first = 0
    for t in range(1, 12):
        parents = torch.randint(size, (rows, size), generator=generator)
        every = [[every[b][int(parents[b, k])] + [k] for k in range(size)] for b in range(rows)]
        index = None if ids is None else torch.tensor(ids)
        kept = torch.zeros_like(table[0])
        first = MODULES[module].beam_ancestors(table, kept, parents, index, first, t)
        assert torch.equal(kept.long(), parents)
        looked_at = range(rows) if ids is None else ids
        alike = [all(len({path[j] for path in every[b]}) == 1 for b in looked_at) for j in range(t)]
        assert alike == [j < first for j in range(t)]
        for b in looked_at:
            assert table[: t + 1, b].t().tolist() == every[b]
    assert first > 2


def attention_inputs(heads: int, heads_kv: int, width: int, before: int, shared: int, own: int) -> list[Any]:
    rows, size = 3, 4
    generator = torch.Generator(HERE).manual_seed(6)
    q = 3 * torch.randn(rows, size, heads, width, generator=generator)
    prefix = [torch.randn(before, rows, heads_kv, width, generator=generator) for _ in range(2 * bool(before))]
    slots = [torch.randn(shared + own, rows, size, heads_kv, width, generator=generator) for _ in range(2)]
    table = torch.randint(size, (shared + own, rows, size), generator=generator).to(torch.uint8)
    return [q, prefix, slots if shared + own else [], table[:shared, :, 0], table[shared:], Sight(0.7, causal=False)]


def attended(q: Tensor, prefix: list[Tensor], slots: list[Tensor], shared: Tensor, own: Tensor, sight: Sight) -> Any:
    """Hypothesis by hypothesis and head by head, in float64."""
    out, lse = torch.zeros_like(q).double(), torch.zeros(q.shape[:-1]).double()
    for b, k, h in itertools.product(*map(range, q.shape[:-1])):
        head = h // (q.shape[2] // (prefix or slots)[0].shape[-2])
        k_seen, v_seen = (
            [x[b, head] for x in (prefix[i] if prefix else [])]
            + [slots[i][j, b, int(state[b]), head] for j, state in enumerate(shared)]
            + [slots[i][len(shared) + j, b, int(state[b, k]), head] for j, state in enumerate(own)]
            for i in (0, -1)
        )
        scores = sight.scale * torch.stack(k_seen).double() @ q[b, k, h].double()
        out[b, k, h], lse[b, k, h] = scores.softmax(0) @ torch.stack(v_seen).double(), scores.logsumexp(0)
    return out, lse


ATTEND = {"cpu": attend.beam_attend, "eager": eager_attend.beam_attend}


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 0, 0, 1), (4, 2, 5, 3, 0, 2), (2, 2, 32, 0, 5, 3), (4, 1, 17, 2, 70, 66), (2, 1, 8, 129, 0, 0)],
)
@pytest.mark.parametrize("module", ATTEND)
def test_attention(module: str, sizes: tuple[int, ...]):
    args = attention_inputs(*sizes)
    for x, y in zip(ATTEND[module](*args), attended(*args), strict=True):
        assert x.dtype is torch.float32
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("module", ATTEND)
def test_attention_to_one_array_and_in_any_layout(module: str):
    q, prefix, slots, shared, own, sight = attention_inputs(2, 2, 8, 3, 4, 2)
    expected = ATTEND[module](q, [prefix[0]] * 2, [slots[0]] * 2, shared, own, sight)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, prefix[0], slots[0], shared, own)]
    got = ATTEND[module](turned[0], [turned[1]], [turned[2]], turned[3], turned[4], sight)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


SIGHTS: dict[str, Any] = {
    "first": {"first": torch.tensor([0, 2, 130])},
    "nothing": {"first": torch.tensor([1000, 3, 1000])},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": lambda n: torch.randn(1, 4, 1, n)},
    "bias of rows": {"bias": lambda n: torch.randn(3, 4, 4, n).index_fill(3, torch.arange(0, n, 3), -INF)},
    "a bias that hides": {"bias": lambda n: torch.full((1, 4, 1, n), -INF)},
    "dropout": {"dropout": 0.4, "seed": 1 << 61, "first": torch.tensor([1, 0, 2])},
}


@pytest.mark.parametrize("rule", SIGHTS)
@pytest.mark.parametrize("sizes", [(4, 2, 5, 3, 0, 2), (4, 4, 8, 0, 5, 3), (4, 1, 17, 80, 70, 66), (4, 2, 3, 9, 2, 0)])
def test_attention_by_rules_is_that_of_gathered_slots(sizes: tuple[int, ...], rule: str):
    torch.manual_seed(0)
    q, prefix, slots, shared, own, sight = attention_inputs(*sizes)
    count = sum(sizes[3:])
    given: dict[str, Any] = {name: x(count) if callable(x) else x for name, x in SIGHTS[rule].items()}
    sight = sight._replace(**given)
    found = [f(q, prefix, slots, shared, own, sight) for f in ATTEND.values()]
    seen = [[], []]
    for i in (0, 1):  # (n, B, K, heads_kv, D)
        seen[i] = [x[:, None].expand(-1, q.shape[1], -1, -1) for x in (prefix[i] if prefix else [])]
        states = [*shared[:, :, None].expand(-1, -1, q.shape[1]), *own]
        for state, slot in zip(states, slots[i] if slots else [], strict=True):
            seen[i].append(slot.gather(1, state.long()[..., None, None].expand(slot.shape)))
    keys, values = (torch.stack(x).flatten(1, 2).double() for x in seen)
    each: dict[str, Any] = {"causal": False, **given}
    if "first" in given:
        each["first"] = given["first"].repeat_interleave(q.shape[1])
    if "bias" in given:
        each["bias"] = given["bias"].expand(len(q), -1, q.shape[1], -1).transpose(1, 2).flatten(0, 1)[:, :, None]
    out, lse = past_attend(q.double().flatten(0, 1)[:, None], keys, values, Sight(0.7, **each))
    for got in found:
        torch.testing.assert_close(got[0].double(), out.view(q.shape), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(got[1].double(), lse.view(q.shape[:3]), rtol=2e-5, atol=2e-5)


def test_attention_in_threads(monkeypatch: pytest.MonkeyPatch):
    args = attention_inputs(2, 2, 8, 3, 40, 20)
    alone = attend.beam_attend(*args)
    threads = torch.get_num_threads()
    monkeypatch.setattr(_threads, "PIECE", 1)
    try:
        torch.set_num_threads(3)
        together = attend.beam_attend(*args)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_tracing_back(module: str):
    generator = torch.Generator(HERE).manual_seed(1)
    steps, rows, size, each = 9, 3, 4, 5
    parents = torch.randint(size, (steps, rows, size), generator=generator)
    lens = torch.randint(steps + 1, (rows, each), generator=generator)
    places = torch.randint(size, (rows, each), generator=generator)
    found = MODULES[module].beam_trace(parents, lens, places)
    for b in range(rows):
        for i in range(each):
            expected, place = [0] * steps, int(places[b, i])
            for t in range(int(lens[b, i]) - 1, -1, -1):
                expected[t], place = place, int(parents[t, b, place])
            assert found[:, b, i].tolist() == expected
    assert MODULES[module].beam_trace(parents[:0], lens * 0, places).shape == (0, rows, each)


def test_rows_are_shared_among_threads():
    keys, log_probs = inputs((64, 8, 1000), torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = beam.beam_best(keys, log_probs, 8, 1)
    finally:
        torch.set_num_threads(threads)
    alone = eager_beam.beam_best(keys, log_probs, 8, 1)
    assert all(torch.equal(x, y) for x, y in zip(together, alone, strict=True))


@pytest.mark.usefixtures("on_the_cpu")
def test_which_kernel_is_found():
    keys = torch.zeros(2, 3)
    assert find("beam_best", keys) is beam.beam_best
    assert find("beam_best", keys.to(torch.bfloat16)) is eager_beam.beam_best
    assert find("beam_best", keys.to("meta")) is eager_beam.beam_best
    assert find("beam_trace", keys.long()) is beam.beam_trace
    assert find("beam_ancestors", keys.byte()) is beam.beam_ancestors
    assert find("beam_attend", keys) is attend.beam_attend
    assert find("beam_attend", keys.double()) is eager_attend.beam_attend


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("forbidden", [0.0, 0.4])
def test_a_guess_is_the_choice_unless_it_is_told_to_be_undecided(coarse: bool, forbidden: float) -> None:
    undecided = 0
    for seed in range(30):
        keys, log_probs = inputs((3, 4, 5), coarse=coarse, seed=seed)
        log_probs[
            torch.rand(log_probs.shape, generator=torch.Generator(HERE).manual_seed(seed)) < forbidden
        ] = -torch.inf
        whole, batch = choose_best(keys, log_probs, [2], Batch(None, 3)), Batch(None, 3)
        guess, ranked = guess_best(keys, log_probs, 2, batch)
        assert torch.equal(guess.keys, whole.keys)
        assert torch.equal(guess.ends, whole.ends)
        for row in range(3):
            pool = [torch.full((3, 2), -torch.inf).double() for _ in range(2)]
            pool += [torch.zeros(3, 2).long(), torch.zeros(3).double(), torch.zeros(3).double()]
            given = (guess.ends, guess.ends), (guess.keys, guess.keys), pool, torch.arange(3) == row, 0, "exact"
            if beam.beam_pool(*given, ranked) & 4:
                undecided += 1
            else:
                assert torch.equal(guess.parents[row], whole.parents[row])
                assert torch.equal(guess.tokens[row], whole.tokens[row])
    assert (0 < undecided < 90) if coarse or forbidden else not undecided
