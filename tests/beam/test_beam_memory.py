"""Bytes that a search keeps for backward, counted: how they grow with the number of steps."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tensorloop.memory import LiveStorages, saved
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.testing import assert_linear_memory, assert_no_leak
from tests.support.beam_cases import BOS, EOS
from tests.support.devices import HERE
from tests.support.profiling_modules import profiling_modules

ROWS, SIZE, HEADS, WIDTH, VOCABULARY = 2, 4, 2, 8, 12
MODEL = HEADS * WIDTH
STEPS = [32, 64, 128, 256]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator(HERE).manual_seed(0)
    shapes = {"emb": (VOCABULARY, MODEL), "out": (MODEL, VOCABULARY)} | dict.fromkeys("qkv", (MODEL, MODEL))
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def search(step: Callable[..., Any], init: Any, steps: int, **options: Any) -> beam.Hypotheses:
    return beam.beam_search(
        step, init, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, max_steps=steps, stop="never", **options
    )


def attentive(
    steps: int, checkpoints: int | None = None, *, wrap: Any = lambda step: step, **options: Any
) -> Callable[[], Tensor]:
    """A decoder that attends to its own history."""
    w = weights()

    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        keys, values = carry
        x = w["emb"][tokens]
        q, k, v = (torch.sin(x @ w[name]).unflatten(-1, (HEADS, WIDTH)) for name in "qkv")
        out = tl.attention(q, keys.append(k), values.append(v))
        assert out is not NotImplemented
        return (keys, values), torch.log_softmax((x + out.flatten(-2)) @ w["out"], -1)

    def run() -> Tensor:
        arrays = (tl.TensorArray(), tl.TensorArray())
        return search(wrap(step), arrays, steps, checkpoints=checkpoints, **options).scores.sum()

    return run


def recurrent(steps: int, checkpoints: int | None = None, *, wrap: Any = lambda step: step) -> Callable[[], Tensor]:
    w = weights()

    def step(h: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sin(h @ w["q"] + w["emb"][tokens])
        return h, torch.log_softmax(h @ w["out"], -1)

    def run() -> Tensor:
        return search(wrap(step), torch.zeros(ROWS, MODEL), steps, checkpoints=checkpoints).scores.sum()

    return run


@pytest.mark.parametrize("choose", [beam.TopK(), beam.StochasticBeam()], ids=repr)
def test_a_decoder_that_attends_to_its_history_keeps_o_of_t(choose: Any):
    assert_linear_memory(lambda steps: attentive(steps, choose=choose), STEPS)


def test_samples_that_share_nothing_keep_o_of_t():
    never = torch.zeros(VOCABULARY).index_fill(0, torch.tensor([EOS]), -torch.inf)

    def make(steps: int) -> Callable[[], Tensor]:
        def step(past: Any, tokens: Tensor) -> tuple[Any, Tensor]:
            read = past.append(torch.sin(tokens[..., None] * w["emb"][:SIZE])).read(0)
            return past, torch.log_softmax(read @ w["out"] + never, -1)

        w = weights()
        return lambda: search(step, tl.TensorArray(), steps, choose=beam.Sample()).scores.sum()

    assert_linear_memory(make, STEPS[:3])


def endless(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same decoder, which never ends: every hypothesis has as many tokens as there are steps."""
    bar = torch.zeros(VOCABULARY).index_fill(0, torch.tensor([EOS]), -torch.inf)

    def run(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        carry, scores = step(carry, tokens)
        return carry, scores + bar

    return run


def added(make: Callable[..., Callable[[], Tensor]], steps: int) -> int:
    """Bytes of `2 * steps` steps beyond those of `steps`."""
    few, many = (saved(make(t, wrap=endless)).bytes for t in (steps, 2 * steps))
    return many - few


NUMBER, PLACE, TOKEN = 4 * ROWS * SIZE, 4 * ROWS * SIZE, 8 * ROWS * SIZE  # bytes of a float, an index, a token of each
# Of the token chosen and of the end, by number; of the score in the result. Tokens are the step's own: its indices.
OF_A_SEARCH = 2 * PLACE + PLACE + TOKEN


def test_every_byte_of_a_recurrent_decoder():
    of_the_step = NUMBER * (MODEL + MODEL + VOCABULARY)  # what sin and h @ out are given, what log_softmax gives
    reordered = NUMBER * MODEL + PLACE  # what h @ w is given; where it came from
    assert added(recurrent, 32) == 32 * (of_the_step + reordered + OF_A_SEARCH)


def test_every_byte_of_a_decoder_that_attends_to_its_history():
    of_the_step = NUMBER * (MODEL + 3 * MODEL + MODEL + VOCABULARY)  # given to the products, to sin, to the readout
    history = NUMBER * (MODEL + 2 * MODEL)  # the queries; keys and values, once
    ancestry = 2 * ROWS * SIZE  # a byte for each parent and each ancestor
    grown = 2 * 4  # what tokens of each array are expanded from, for the block of 64 slots
    assert added(attentive, 32) == 32 * (of_the_step + history + OF_A_SEARCH + ancestry) + grown


@pytest.fixture(scope="module")
def decoders() -> Iterator[Any]:
    """profiling/whole_models/beam_models.py: B=16, K=8, H=256, V=1000."""
    with profiling_modules("beam_models") as modules:
        yield modules["beam_models"]


@pytest.mark.parametrize(("steps", "mib"), [(16, 31.9), (32, 64), (64, 130), (128, 266)])
@pytest.mark.extended("128-266")
@pytest.mark.usefixtures("on_the_cpu")
def test_a_decoder_that_attends_in_the_bytes_of_one_buffer(decoders: Any, steps: int, mib: float):
    """Where copies take 46.8, 125.9, 380 and 1275 MiB."""
    model = decoders.Recurrent(torch.float32, True)
    held = saved(lambda: decoders.by_search(model, steps, None)).bytes
    assert held <= mib * 2**20
    if steps == 64:
        assert saved(lambda: decoders.by_search(model, steps, 4)).bytes < 0.1 * held


@pytest.mark.usefixtures("on_the_cpu")
def test_a_gru_decoder_in_the_bytes_of_a_loop_by_hand(decoders: Any):
    """Which keeps a state twice: as it was made, and as the next step is given it, reordered."""
    model = decoders.Recurrent(torch.float32, False)
    held = saved(lambda: decoders.by_search(model, 32, None)).bytes
    by_hand = saved(lambda: decoders.by_hand(model, 32)).bytes
    assert held <= by_hand + 2048  # of the result
    assert saved(lambda: decoders.by_search(model, 32, 3)).bytes < 0.05 * held


def test_with_checkpoints_a_quarter_and_less():
    steps = STEPS[-1]
    for make, part in ((recurrent, 0.25), (attentive, 0.5)):
        with_all = saved(make(steps)).bytes
        few = saved(make(steps, 4)).bytes
        assert few < part * with_all


def test_no_node_keeps_a_block_that_the_array_has_outgrown():
    """The bytes of the array at the end of the search are those of its last block."""
    values = torch.ones(4, requires_grad=True)
    with LiveStorages() as live:
        buffer = Buffer.empty(values, 0)
        kept = []
        for t in range(9):
            buffer.append(values * t)
            kept.append((t + 1, buffer.hold()))
        assert live.bytes <= 16 * 16 + 8  # a block of 16 slots, and what its tokens are expanded from
    for n, present in kept:
        assert torch.equal(present.slots(n), torch.arange(n)[:, None].expand(n, 4).float())


def test_what_a_node_keeps_stays_whatever_is_written():
    values = torch.arange(12.0).view(4, 3)
    buffer = Buffer.unstack(values.clone())
    buffer.append(torch.ones(3))
    before = buffer.hold()
    buffer.append(torch.ones(3))  # within the block
    buffer.extend(torch.ones(20, 3))  # into a new one
    later = buffer.hold()
    buffer.put(2, torch.full((3,), 7.0))
    buffer.extend(torch.ones(50, 3))
    assert torch.equal(before.slots(4), values)
    assert torch.equal(later.slots(4), values)
    assert torch.equal(buffer.hold().slots(3)[2], torch.full((3,), 7.0))
    view = buffer.span(0, 2)
    last = buffer.hold()
    view.zero_()
    with pytest.raises(RuntimeError, match=r"a slice or stack\(\) read from the array was changed in place"):
        last.slots(3)


@pytest.mark.parametrize("checkpoints", [None, 3])
def test_nothing_is_left_when_results_are_dropped(checkpoints: int | None):
    for make in (recurrent, attentive):
        run = make(12, checkpoints)
        run()
        assert_no_leak(run)


def test_a_context_is_never_repeated_for_each_hypothesis():
    """(B, S, F) beside (B, K, ...): what is kept does not grow with K."""
    context = torch.randn(ROWS, 64, MODEL)

    def step(h: Tensor, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return h, torch.log_softmax(torch.einsum("bkf,bsf->bks", h, context)[..., :VOCABULARY], -1)

    def make(size: int) -> Callable[[], Tensor]:
        return lambda: beam.beam_search(
            step, torch.zeros(ROWS, MODEL), batch_size=ROWS, beam_size=size, bos_id=BOS, eos_id=EOS, max_steps=4,
            stop="never", context=context,
        ).scores.sum()  # fmt: skip

    assert saved(make(8)).bytes < context.nbytes + saved(make(1)).bytes
