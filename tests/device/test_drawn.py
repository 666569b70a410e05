"""Random numbers of graphs: how a device draws, which its documents say, and that loops draw what eager ones draw."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop._torch import cuda_numbers
from tensorloop.compiler.targets.graphs import drawn
from tensorloop.loop.compiled.run import drawn_numbers
from tensorloop.loop.compiled.run.plan import Plan, plans
from tests.device import pretended
from tests.device.graph_steps import ON
from tests.support.compiled_cases import check_equal

# ---- the device draws as CUDA's documents say


def philox(seed: int, offset: int) -> int:
    """The first number of Philox4x32-10 at a place, as its paper has it: ten rounds over a counter, with a key."""
    low = 2**32 - 1
    counter, key = [offset & low, offset >> 32, 0, 0], [seed & low, seed >> 32]
    for i in range(10):
        if i:
            key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & low, (a >> 32) ^ counter[3] ^ key[1], a & low]
    return counter[0]


def increment(count: int) -> int:
    """How far a draw of so many numbers moves the offset on, for 256 threads of 528 blocks that draw four at a time."""
    return 4 * -(-max(count, 1) // (4 * 256 * 528))


def as_documented(seed: int, counts: list[int], offset: int = 0) -> tuple[list[Tensor], int]:
    """The uniform numbers of draws one behind the other, and the offset behind them."""
    found = []
    for count in counts:
        word = Generator("cpu").manual_seed(philox(seed, offset))
        found.append(torch.rand(count, generator=word, device="cpu").to(ON))
        offset += increment(count)
    return found, offset


COUNTS = [3, 700_000, 1]


@pytest.fixture(params=["torch's own", "a user's"])
def generator(request: pytest.FixtureRequest) -> Generator:
    own = torch.cuda.default_generators[0] if request.param == "torch's own" else Generator(ON)
    return own.manual_seed(0x1234_5678_9ABC_DEF0)


def test_each_draw_moves_the_offset_on(generator: Generator) -> None:
    found = [torch.empty(n, device=ON).uniform_(generator=generator) for n in COUNTS]
    expected, offset = as_documented(generator.initial_seed(), COUNTS)
    check_equal(found, expected, 0)
    assert generator.get_offset() == offset == 4 + 8 + 4
    assert generator.get_state().view(torch.int64).tolist() == [generator.initial_seed(), offset]


def recorded(generator: Generator) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph, into = torch.cuda.CUDAGraph(), [torch.zeros(n, device=ON) for n in COUNTS]
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        for x in into:
            x.uniform_(generator=generator)
    return graph, into


def test_a_replay_begins_where_the_generator_stands(generator: Generator) -> None:
    graph, into = recorded(generator)
    assert generator.get_offset() == 0  # nothing is drawn while it records
    seed, offset = generator.initial_seed(), 0
    for turn in range(4):
        if turn == 2:
            seed, offset = 5, 40
            generator.manual_seed(seed).set_offset(offset)
        graph.replay()
        expected, offset = as_documented(seed, COUNTS, offset)
        check_equal(into, expected, 0)
        assert generator.get_offset() == offset
        torch.empty(1, device=ON).uniform_(generator=generator)  # who draws in between moves it on, too
        offset += 4


def test_a_graph_draws_from_the_state_that_it_has_recorded() -> None:
    generator = Generator(ON).manual_seed(3)
    graph, into = recorded(generator)
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(Generator(ON).manual_seed(4))
    graph.replay()
    check_equal(into, as_documented(3, COUNTS)[0], 0)
    assert (generator.get_offset(), state.get_offset()) == (0, 16)


# ---- loops draw what eager ones draw

B, N, T = 3, 4, 29
W = torch.linalg.qr(torch.randn(N, N, dtype=torch.float64, generator=Generator("cpu").manual_seed(1), device="cpu"))[0]
W = W.to(ON).requires_grad_()


def dropped(h: Tensor, x: Tensor, own: Generator) -> Any:
    return F.dropout(torch.tanh(h @ W + x), 0.4), F.dropout(x, 0.2)


def noisy(h: Tensor, x: Tensor, own: Generator) -> Any:
    noise = torch.randn(B, N, dtype=h.dtype, device=ON, generator=own)
    h = torch.tanh(h @ W + x + 0.1 * noise + torch.rand_like(x))
    return h, (torch.empty_like(h).exponential_(generator=own), torch.randint(0, 9, (4,), device=ON))


def chosen(h: Tensor, x: Tensor, own: Generator) -> Any:
    token = torch.multinomial((h @ W + x).softmax(-1), 1, generator=own)[:, 0]
    return torch.tanh(h + W[token]), token


def sampled(h: Tensor, x: Tensor, own: Generator) -> Any:
    choice = torch.distributions.OneHotCategorical(logits=h @ W + x)
    token = choice.sample()
    return torch.tanh(h + token @ W), choice.log_prob(token)


BODIES: dict[str, Callable[..., Any]] = {"dropout": dropped, "noise": noisy, "choice": chosen, "sample": sampled}
OPTIONS = {
    "plain": {},
    "reverse": {"reverse": True},
    "checkpoints": {"checkpoints": 2},
    "no grad": {"grad": False},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    plans.clear()
    yield
    plans.clear()


def outcome(
    body: Callable[..., Any], own: Generator, compile: Any, steps: int = T, grad: bool = True, **options: Any
) -> list[Any]:
    """What a loop gives, gradients, and where the generators stand."""
    h = torch.full((B, N), 0.1, dtype=W.dtype, device=ON, requires_grad=grad)
    xs = torch.sin(torch.arange(steps * B * N, dtype=W.dtype, device=ON)).view(steps, B, N).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        found = tree_leaves(tl.scan(lambda h, x: body(h, x, own), h, xs, compile=compile, **options))
    if grad:
        loss = torch.stack([y.sin().sum() for y in found if y.requires_grad]).sum()
        found += torch.autograd.grad(loss, [h, xs, W], allow_unused=True)
    return [*found, torch.cuda.get_rng_state(ON), own.get_state()]


# What reads values runs eagerly with checkpoints.
CASES = [(name, how) for name in BODIES for how in OPTIONS if (name, how) != ("sample", "checkpoints")]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_numbers_gradients_and_generators_are_the_eager_loops(name: str, options: str, short: None) -> None:
    """In each call anew, of several: seeded, going on, and from another generator of the user's."""
    states = []
    for compile in (False, "strict"):
        torch.manual_seed(7)
        own, other = Generator(ON).manual_seed(8), Generator(ON).manual_seed(9)
        runs = [outcome(BODIES[name], g, compile, **OPTIONS[options]) for g in (own, own, other, own, other)]
        states.append(runs)
    for found, expected in zip(*reversed(states), strict=True):
        check_equal(found, expected, 1e-11)


def test_what_a_first_call_records_later_ones_replay(short: None) -> None:
    own = Generator(ON)
    with pretended.counted() as counts:
        outcome(noisy, own, "strict", grad=False)
    # Of two looks and their like, four steps that are recorded, and the one behind them.
    assert counts.operations["aten::normal_"] <= 4 + 4 + 1
    with pretended.counted() as counts:
        outcome(noisy, own, "strict", grad=False)
    # 7 graphs of four steps and one of a step; of the look, and where a replay begins: at a seed and an offset each
    assert counts.operations["aten::normal_"] == 2
    assert counts.operations["graph"] == 2 * 7 + 1
    assert not counts.recorded
    assert not counts.syncs


@pytest.mark.parametrize("name", ["choice", "sample"])
def test_a_choice_is_part_of_a_step_s_graph(name: str, short: None) -> None:
    own = Generator(ON)
    for _ in range(2):
        outcome(BODIES[name], own, "strict", grad=False)
    with pretended.counted() as counts:
        outcome(BODIES[name], own, "strict", grad=False)
    assert counts.operations["graph"] >= 15
    assert counts.operations["aten::argmax"] <= 1  # of the look
    waits = [sync for sync in counts.syncs if "/look/" not in sync.lines[0]]
    assert len(waits) == {"choice": 0, "sample": 9 + 1}[name]  # whether the next step goes the same way: once a graph


@pytest.mark.filterwarnings("ignore:.* changes from call to call:UserWarning")
def test_other_numbers_given_to_a_draw_are_another_plan(short: None) -> None:
    """So a plan's graphs, which have them in their launches, are for all of its loops."""
    own, draws = Generator(ON), list[Callable[[Tensor, int], Tensor]]()
    draws += [lambda h, k: F.dropout(h, k / 9), lambda h, k: h + torch.empty_like(h).uniform_(0, k)]
    draws += [lambda h, k: h + torch.randint_like(h, k, 2 * k), lambda h, k: h + torch.randn(k, 1, 1, device=ON).sum(0)]
    for draw in draws:
        for k in (2, 3, 2, 3, 2):
            found = []
            for compile in (False, "strict"):
                torch.manual_seed(1)
                found.append(outcome(lambda h, x, _, k=k, f=draw: (f(torch.tanh(h @ W + x), k), h), own, compile))
            check_equal(found[1], found[0], 1e-11)


def test_each_stream_has_graphs_of_its_own(short: None) -> None:
    own = Generator(ON)
    for _ in range(3):
        for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
            found = []
            for compile in (False, "strict"):
                torch.manual_seed(1)
                own.manual_seed(2)
                with torch.cuda.stream(stream):
                    found.append(outcome(noisy, own, compile, grad=False))
            check_equal(found[1], found[0], 1e-11)


def test_torch_s_own_generator_may_have_another_state(short: None) -> None:
    """As `graphsafe_set_state` gives it: then that one is drawn from, and the one that was there stays as it is."""
    default, own = torch.cuda.default_generators[0], Generator(ON)
    for _ in range(3):
        outcome(dropped, own, "strict")
    before, found = default.graphsafe_get_state(), []
    try:
        for compile in (False, "strict"):
            default.graphsafe_set_state(Generator(ON).manual_seed(5))
            before.manual_seed(6)
            found.append([*outcome(dropped, own, compile), before.get_state()])
    finally:
        default.graphsafe_set_state(before)
    check_equal(found[1], found[0], 1e-11)


# ---- what is not known to be right is not used


def kept() -> list[drawn.DrawGraphs]:
    found = [p for p in plans._plans.values() if isinstance(p, Plan)]
    return [x for p in found for x in p.drawn.values()]


def wrong(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Graphs whose replays do not do what a replay does."""
    replay = pretended.recording.Graph.replay

    def stands_still(self: Any) -> None:
        before = torch.cuda.default_generators[0].get_state()
        replay(self)
        torch.cuda.default_generators[0].set_state(before)

    def from_elsewhere(self: Any) -> None:
        default = torch.cuda.default_generators[0]
        before = default.get_state()
        default.manual_seed(99)
        replay(self)
        drawn = default.get_offset()
        default.set_state(before)
        default.set_offset(default.get_offset() + drawn)

    way = {"replays stand still": stands_still, "replays begin elsewhere": from_elsewhere}[how]
    monkeypatch.setattr(pretended.recording.Graph, "replay", way)


@pytest.mark.parametrize("how", ["replays stand still", "replays begin elsewhere"])
def test_a_graph_that_draws_otherwise_is_not_used(how: str, monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    own = Generator(ON)

    def run(compile: Any) -> list[Any]:
        torch.manual_seed(1)
        return outcome(dropped, own, compile)

    expected = run(False)
    check_equal(run("strict"), expected, 1e-11)  # of which the graphs of steps are known by now
    for plan in plans._plans.values():
        if isinstance(plan, Plan):
            plan.drawn.clear()
    wrong(monkeypatch, how)
    with pytest.warns(RuntimeWarning, match="left to draws step by step, since CUDA graphs of .* draw other numbers"):
        check_equal(run("strict"), expected, 1e-11)
    check_equal(run("strict"), expected, 1e-11)
    assert [x._failed for x in kept()] == [True]


def test_before_torch_2_13_each_step_launches_its_draws(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    assert cuda_numbers.graphs_draw() == (torch.__version__ >= "2.13")
    monkeypatch.setattr(drawn_numbers, "graphs_draw", lambda: False)
    for _ in range(3):
        outcome(dropped, Generator(ON), "strict")
    assert not kept()


def test_what_is_kept_is_counted_and_given_back(short: None) -> None:
    tl.cuda.clear()
    for _ in range(3):
        outcome(dropped, Generator(ON), "strict")
    assert [list(x._chunks) for x in kept()] == [[4]]
    tl.cuda.clear()
    assert not kept()
    torch.manual_seed(1)
    expected = outcome(dropped, Generator(ON), False)
    torch.manual_seed(1)
    check_equal(outcome(dropped, Generator(ON), "strict"), expected, 1e-11)


def test_graphs_of_many_streams_are_not_all_kept(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    monkeypatch.setattr(drawn_numbers, "MOST_STREAMS", 2)
    for stream in (torch.cuda.Stream() for _ in range(4)):
        with torch.cuda.stream(stream):
            for _ in range(2):
                outcome(dropped, Generator(ON), "strict", grad=False)
        assert all(len(plan.drawn) <= 2 for plan in plans._plans.values() if isinstance(plan, Plan))
