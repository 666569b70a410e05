"""One use of each feature on a device, forward and backward, in as many steps as are asked for: what budgets count."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tensorloop as tl
from tensorloop.packed import PackedTensor

Run = Callable[[], Any]
FEATURES: dict[str, Callable[[int], Run]] = {}
ROWS, WIDTH, WORDS = 4, 8, 11
ON = torch.device("cuda")


def feature(function: Callable[[int], Run]) -> Callable[[int], Run]:
    FEATURES[function.__name__] = function
    return function


def random(*size: int, grad: bool = False) -> Tensor:
    return (torch.randn(*size, device="cpu") * 0.3).to(ON).requires_grad_(grad)


def backward(*results: Any) -> None:
    values = [x.values if isinstance(x, PackedTensor) else x for x in results]
    torch.stack([x.square().sum() for x in values]).sum().backward()


# ---- loops


def rnn(steps: int, **options: Any) -> Run:
    w, xs, h = random(WIDTH, WIDTH, grad=True), random(steps, ROWS, WIDTH), random(ROWS, WIDTH)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h

    return lambda: backward(*tl.scan(body, h, xs, **options))


@feature
def python_loop(steps: int) -> Run:
    w, xs, start = random(WIDTH, WIDTH, grad=True), random(steps, ROWS, WIDTH), random(ROWS, WIDTH)

    def run() -> None:
        h, ys = start, []
        for x in xs.unbind():
            h = torch.tanh(h @ w + x)
            ys.append(h)
        backward(h, torch.stack(ys))

    return run


@feature
def scan(steps: int) -> Run:
    return rnn(steps)


@feature
def scan_checkpointed(steps: int) -> Run:
    return rnn(steps, checkpoints=2)


@feature
def scan_offloaded(steps: int) -> Run:
    return rnn(steps, checkpoints=tl.Checkpoints(4, offload="cpu"))


@feature
def scan_until(steps: int) -> Run:
    return rnn(steps, until=lambda h: h.sum() > 1e9)


@feature
def scan_until_rows(steps: int) -> Run:
    return rnn(steps, until=lambda h: h.sum(1) > 1e9)


def while_rows(stops: Callable[[int], Tensor], **options: Any) -> Callable[[int], Run]:
    def made(steps: int) -> Run:
        ends = stops(steps)
        w, h, zero = random(WIDTH, WIDTH, grad=True), random(ends.numel(), WIDTH), torch.zeros_like(ends)

        def body(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return carry[0] + 1, torch.tanh(carry[1] @ w)

        return lambda: backward(tl.while_loop(lambda carry: carry[0] < ends, body, (zero, h), **options)[1])

    return made


FEATURES["while_loop"] = while_rows(lambda steps: torch.tensor(steps, device=ON))
FEATURES["while_loop_rows_all_run"] = while_rows(lambda steps: torch.full((ROWS,), steps, device=ON))
FEATURES["while_loop_rows_stop"] = while_rows(lambda steps: torch.arange(1, steps + 1, device=ON))
FEATURES["while_loop_rows_stop_checkpointed"] = while_rows(
    lambda steps: torch.arange(1, steps + 1, device=ON), checkpoints=4
)


def packed_rows(steps: int) -> PackedTensor:
    """A row of each length up to so many steps; the host knows the lengths."""
    lens = torch.arange(1, steps + 1, device="cpu")
    return PackedTensor(random(int(lens.sum()), WIDTH, grad=True), lens)


def packed_scan_of(steps: int, **options: Any) -> Run:
    w, xs, h = random(WIDTH, WIDTH, grad=True), packed_rows(steps), random(steps, WIDTH)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h

    return lambda: backward(*tl.scan(body, h, xs, **options))


@feature
def packed_scan(steps: int) -> Run:
    return packed_scan_of(steps)


@feature
def packed_scan_checkpointed(steps: int) -> Run:
    return packed_scan_of(steps, checkpoints=4)


@feature
def fixed_point(steps: int) -> Run:
    """So many iterations forward; backward takes as many of its own."""
    factor, x = torch.full((), 0.5, device=ON, requires_grad=True), torch.ones(ROWS, device=ON)
    return lambda: backward(tl.fixed_point(lambda z: z * factor + x, torch.zeros_like(x), tol=2.0**-steps))


@feature
def fori_loop(steps: int) -> Run:
    w, h = random(WIDTH, WIDTH, grad=True), random(ROWS, WIDTH)
    return lambda: backward(tl.fori_loop(0, steps, lambda i, h: torch.tanh(h @ w), h))


@feature
def linear_recurrence(steps: int) -> Run:
    a, b = random(steps, ROWS, WIDTH, grad=True), random(steps, ROWS, WIDTH, grad=True)
    return lambda: backward(tl.linear_recurrence(a, b))


# ---- compiled loops: CUDA graphs of 64, 8 and 1 steps

FEATURES["compiled_scan"] = lambda steps: rnn(steps, compile=True)
FEATURES["compiled_scan_checkpointed"] = lambda steps: rnn(steps, checkpoints=2, compile=True)
FEATURES["compiled_scan_until"] = lambda steps: rnn(steps, until=lambda h: h.sum() > 1e9, compile=True)
FEATURES["compiled_while_loop"] = while_rows(lambda steps: torch.tensor(steps, device=ON), compile=True)
FEATURES["compiled_while_loop_rows_stop"] = while_rows(
    lambda steps: torch.arange(1, steps + 1, device=ON), compile=True
)


@feature
def compiled_lstm(steps: int) -> Run:
    cell, xs = torch.nn.LSTMCell(WIDTH, WIDTH, device=ON), random(steps, ROWS, WIDTH)
    zeros = torch.zeros(ROWS, WIDTH, device=ON)

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        state = cell(x, state)
        return state, state[0]

    def run() -> None:
        (h, c), ys = tl.scan(body, (zeros, zeros), xs, compile=True)
        backward(h, c, ys)

    return run


@feature
def compiled_dropout(steps: int) -> Run:
    w, xs, h = random(WIDTH, WIDTH, grad=True), random(steps, ROWS, WIDTH), random(ROWS, WIDTH)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(F.dropout(h @ w, 0.5) + x)
        return h, h

    return lambda: backward(*tl.scan(body, h, xs, compile=True))


@feature
def compiled_array_append(steps: int) -> Run:
    w, xs, start = random(WIDTH, WIDTH, grad=True), random(steps, ROWS, WIDTH), random(ROWS, WIDTH)

    def body(carry: tuple[Tensor, tl.TensorArray], x: Tensor) -> tuple[tuple[Tensor, tl.TensorArray], Tensor]:
        h, array = carry
        h = torch.tanh(h @ w + x)
        return (h, array.append(h)), h

    def run() -> None:
        (h, array), ys = tl.scan(body, (start, tl.TensorArray()), xs, compile=True)
        backward(h, array.stack(), ys)

    return run


# ---- arrays


@feature
def array_append(steps: int) -> Run:
    x = random(ROWS, WIDTH, grad=True)

    def run() -> None:
        array = tl.TensorArray()
        for t in range(steps):
            array.append(x * t)
        backward(array.stack())

    return run


def array_read(read: Callable[[tl.TensorArray, int, Tensor], Tensor]) -> Callable[[int], Run]:
    def made(steps: int) -> Run:
        x, slot = random(ROWS, WIDTH, grad=True), torch.zeros((), dtype=torch.int64, device=ON)

        def run() -> None:
            array = tl.TensorArray().append(x)
            for t in range(steps):
                array.append(torch.tanh(read(array, t, slot)))
            backward(array.stack())

        return run

    return made


FEATURES["array_prefix"] = array_read(lambda array, t, slot: array[: t + 1].mean(0))
FEATURES["array_slot_on_device"] = array_read(lambda array, t, slot: array[slot])


def attention_over_arrays(**options: Any) -> Callable[[int], Run]:
    def made(steps: int) -> Run:
        w, x = random(WIDTH, WIDTH, grad=True), random(ROWS, 2, WIDTH)

        def run() -> None:
            keys, values, h = tl.TensorArray(), tl.TensorArray(), x
            for _ in range(steps):
                keys.append(h)
                values.append(h @ w)
                h = tl.attention(h, keys, values, **options)
            backward(h)

        return run

    return made


FEATURES["array_attention"] = attention_over_arrays()
FEATURES["array_attention_window"] = attention_over_arrays(window=4)


# ---- beam search


def model() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A step that never prefers the end, so that a search takes all its steps."""
    words, w, out = random(WORDS, WIDTH, grad=True), random(2 * WIDTH, WIDTH, grad=True), random(WIDTH, WORDS)
    never = torch.zeros(WORDS, device="cpu")
    never[1] = -50
    never = never.to(ON)

    def step(h: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(torch.cat([F.embedding(tokens, words), h], -1) @ w)
        return h, (h @ out + never).log_softmax(-1)

    return step


def search(grad: bool = True, **options: Any) -> Callable[[int], Run]:
    def made(steps: int) -> Run:
        step, h = model(), random(3, WIDTH)
        given: dict[str, Any] = {"batch_size": 3, "beam_size": 4, "bos_id": 0, "eos_id": 1, "max_steps": steps}

        def run() -> None:
            with torch.set_grad_enabled(grad):
                found = tl.beam_search(step, h, **given, **options)
            if grad:
                backward(found.scores.masked_fill(~found.valid, 0))

        return run

    return made


@feature
def beam_model_alone(steps: int) -> Run:
    step, start, tokens = model(), random(3, 4, WIDTH), torch.zeros(3, 4, dtype=torch.int64, device=ON)

    def run() -> None:
        h, scores = start, []
        for _ in range(steps):
            h, score = step(h, tokens)
            scores.append(score[..., 0])
        backward(torch.stack(scores))

    return run


FEATURES["beam_search"] = search()
FEATURES["beam_search_no_grad"] = search(grad=False)
FEATURES["beam_search_checkpointed"] = search(checkpoints=4)


@feature
def edit_distance(steps: int) -> Run:
    lens = torch.tensor([steps, steps], device="cpu")
    tokens = [torch.randint(0, 5, (2 * steps,), device="cpu").to(ON) for _ in range(2)]
    found, wanted = (PackedTensor(x, lens) for x in tokens)
    return lambda: tl.risk.edit_distance(found, wanted)


# ---- packed tensors: calls, not steps


def packed_call(function: Callable[[PackedTensor], Any], heads: bool = False) -> Callable[[int], Run]:
    def made(steps: int) -> Run:
        lens = torch.tensor([steps, steps // 2, 3, 1], device="cpu")
        p = PackedTensor(random(int(lens.sum()), *((2,) if heads else ()), WIDTH, grad=True), lens)

        def run() -> None:
            found = function(p)
            backward(*(found if isinstance(found, tuple) else (found,)))

        return run

    return made


FEATURES["packed_pad"] = packed_call(lambda p: p.pad())
FEATURES["packed_sum"] = packed_call(lambda p: p.sum(1))
FEATURES["packed_softmax"] = packed_call(lambda p: p.softmax(1))
FEATURES["packed_cumsum"] = packed_call(lambda p: p.cumsum(1))
FEATURES["packed_amax"] = packed_call(lambda p: p.amax(1))
FEATURES["packed_rows_sliced"] = packed_call(lambda p: p[:2])
FEATURES["packed_row"] = packed_call(lambda p: p[0])
FEATURES["packed_time_sliced"] = packed_call(lambda p: p[:, 1:])
FEATURES["packed_unbind"] = packed_call(lambda p: tuple(p.unbind()))
FEATURES["packed_flip"] = packed_call(lambda p: p.flip(1))
FEATURES["packed_attention"] = packed_call(lambda p: tl.attention(p, p, p, causal=True), heads=True)
FEATURES["packed_attention_window"] = packed_call(lambda p: tl.attention(p, p, p, window=3), heads=True)


def packing(lens_on: str) -> Callable[[int], Run]:
    def made(steps: int) -> Run:
        x = random(4, steps, WIDTH, grad=True)
        lens = torch.tensor([steps, steps // 2, 3, 1], device="cpu").to(lens_on)
        return lambda: backward(tl.pack_padded(x, lens))

    return made


FEATURES["pack_padded"] = packing("cpu")
FEATURES["pack_padded_lens_on_device"] = packing("cuda")
