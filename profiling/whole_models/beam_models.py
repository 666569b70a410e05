"""Decoders to search with, and the ways that others search and train: Hugging Face's, a plain loop, a second pass.

Nothing ends before its time where speed and memory are measured: the score of the end is -inf, and every hypothesis
has as many tokens as there are steps. So all ways do the same work, and find the same hypotheses.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tensorloop as tl
from tensorloop.beam import Hypotheses, beam_search, linear_log_softmax

BOS, EOS = 0, 1
LAYERS, WIDTH, HEADS, WORDS, ROWS, BEAMS = 4, 128, 4, 1000, 16, 8  # of the transformer
HIDDEN = 256  # of the decoders that are trained


class Clock:
    """Adds up the time spent inside what it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return run


# -- a transformer, its weights those of Hugging Face's GPT-2


def gpt2(steps: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=steps + 1, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, bos_token_id=BOS,
        eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # so that scores differ, as a trained model's do
    return model


def generate(model: Any, steps: int, clock: Clock) -> tuple[Tensor, Tensor]:
    """Hugging Face's search: tokens (B, K, steps), and scores by length (B, K)."""
    forward = model.forward
    model.forward = clock(forward)
    try:
        out = model.generate(
            torch.full((ROWS, 1), BOS),
            attention_mask=torch.ones(ROWS, 1, dtype=torch.int64),
            num_beams=BEAMS,
            num_return_sequences=BEAMS,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    finally:
        model.forward = forward
    return out.sequences[:, 1:].view(ROWS, BEAMS, steps), out.sequences_scores.view(ROWS, BEAMS)


class Layer(NamedTuple):
    """The weights of a block, as GPT-2 has them: (inputs, outputs)."""

    norm: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    norm_2: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


class Stepper:
    """The same transformer, a token at a time, as one would write it for `beam_search`."""

    def __init__(self, model: Any) -> None:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}

        def pair(name: str) -> tuple[Tensor, Tensor]:
            return weights[f"{name}.weight"], weights[f"{name}.bias"]

        names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        self.layers = [Layer(*(pair(f"transformer.h.{i}.{name}") for name in names)) for i in range(LAYERS)]
        self.tokens, self.places = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
        self.norm, self.readout = pair("transformer.ln_f"), self.tokens.T

    def begin(self) -> dict[str, Any]:
        return {"t": 0, "past": [(tl.TensorArray(), tl.TensorArray()) for _ in range(LAYERS)]}

    def __call__(self, carry: dict[str, Any], tokens: Tensor) -> tuple[dict[str, Any], Tensor]:
        """tokens (B, K) -> log-probabilities (B, K, V)"""
        x = F.embedding(tokens.flatten(), self.tokens).add_(self.places[carry["t"]])
        for layer, (keys, values) in zip(self.layers, carry["past"], strict=True):
            qkv = _linear(_norm(x, layer.norm), layer.qkv).view(*tokens.shape, 3, HEADS, WIDTH // HEADS)
            q, k, v = qkv.unbind(2)
            keys.append(k)
            values.append(v)
            x += _linear(tl.attention(q, keys, values).view(x.shape), layer.out)
            x += _linear(_gelu(_linear(_norm(x, layer.norm_2), layer.up)), layer.down)
        scores = (_norm(x, self.norm) @ self.readout).log_softmax(-1).view(*tokens.shape, -1)
        scores.select(-1, EOS).fill_(-torch.inf)
        return {"t": carry["t"] + 1, "past": carry["past"]}, scores


def _norm(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.layer_norm(x, (WIDTH,), *weight)


def _linear(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.addmm(weight[1], x, weight[0])


def _gelu(x: Tensor) -> Tensor:
    """gelu(x, approximate="tanh"), which is a sigmoid: in half the time."""
    scale = 2 * math.sqrt(2 / math.pi)
    return x.square().mul_(0.044715 * scale).add_(scale).mul_(x).sigmoid_().mul_(x)


def searched(step: Stepper, steps: int, clock: Clock) -> tuple[Tensor, Tensor]:
    """Ours: tokens (B, K, steps), and scores (B, K)."""
    with torch.no_grad():
        hyps = beam_search(
            clock(step), step.begin(), batch_size=ROWS, beam_size=BEAMS, bos_id=BOS, eos_id=EOS, max_steps=steps,
            stop="never",
        )  # fmt: skip
    return hyps.tokens.values.view(ROWS, BEAMS, steps), hyps.scores


# -- decoders that are trained through the search


class Recurrent(nn.Module):
    """A GRU cell and a readout over the vocabulary."""

    bar: Tensor

    def __init__(self, dtype: torch.dtype, attends: bool, lean: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, HIDDEN, dtype=dtype)
        self.cell = nn.GRUCell(HIDDEN, HIDDEN, dtype=dtype)
        self.readout = nn.Linear((1 + attends) * HIDDEN, WORDS, dtype=dtype)
        self.attends, self.lean = attends, lean  # lean: log-probabilities are computed again in backward
        self.register_buffer("bar", torch.zeros(WORDS, dtype=dtype).index_fill_(0, torch.tensor([EOS]), -torch.inf))

    def state(self, h: Tensor, tokens: Tensor) -> Tensor:
        return self.cell(self.embed(tokens).flatten(0, 1), h.flatten(0, 1)).view_as(h)

    def scores(self, h: Tensor) -> Tensor:
        if self.lean:
            return linear_log_softmax(h, self.readout.weight, self.readout.bias) + self.bar
        return self.readout(h).log_softmax(-1) + self.bar

    def step(self, carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        """For `beam_search`; where it attends, to its own past in an array."""
        if not self.attends:
            h = self.state(carry, tokens)
            return h, self.scores(h)
        h, past = carry
        h = self.state(h, tokens)
        past.append(h[:, :, None])  # one head
        seen = tl.attention(h[:, :, None], past, past)[:, :, 0]
        return (h, past), self.scores(torch.cat([h, seen], -1))


def start(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def loss_of(scores: Tensor) -> Tensor:
    """The expected risk of the list; the risks are its places."""
    risks = torch.arange(scores.shape[1], dtype=scores.dtype).expand_as(scores)
    return tl.risk.minimum_risk(scores, risks, alpha=0.1)


def by_search(model: Recurrent, steps: int, checkpoints: int | None) -> Tensor:
    h = start(model.readout.weight.dtype)
    carry = (h, tl.TensorArray()) if model.attends else h
    hyps = beam_search(
        model.step, carry, batch_size=ROWS, beam_size=BEAMS, bos_id=BOS, eos_id=EOS, max_steps=steps, stop="never",
        checkpoints=checkpoints,
    )  # fmt: skip
    return loss_of(hyps.scores)


def by_hand(model: Recurrent, steps: int) -> Tensor:
    """A loop that selects, and reorders by copying: state, scores and, where it attends, all of the past."""
    h = start(model.readout.weight.dtype)[:, None].expand(-1, BEAMS, -1)
    tokens = torch.full((ROWS, BEAMS), BOS)
    sums = torch.full((ROWS, BEAMS), -torch.inf, dtype=h.dtype)
    sums[:, 0] = 0
    past: Tensor | None = None
    for _ in range(steps):
        h = model.state(h, tokens)
        x = h
        if model.attends:
            past = h[:, :, None] if past is None else torch.cat([past, h[:, :, None]], 2)  # (B, K, t, H)
            weights = (torch.einsum("bkh,bkth->bkt", h, past) * HIDDEN**-0.5).softmax(-1)
            x = torch.cat([h, torch.einsum("bkt,bkth->bkh", weights, past)], -1)
        sums, best = (sums[:, :, None] + model.scores(x)).flatten(1).topk(BEAMS)
        parents, tokens = best // WORDS, best % WORDS
        h = h.gather(1, parents[:, :, None].expand_as(h))
        if past is not None:
            past = past.gather(1, parents[:, :, None, None].expand_as(past))
    return loss_of(sums)


# -- a step of minimum risk: through the search, and by a second pass


class Short(nn.Module):
    """A decoder whose hypotheses end: the phones of words, as long as the words are."""

    ROWS, BEAMS, SYMBOLS, LENGTHS = 64, 4, 42, (3, 12)
    is_end: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(self.SYMBOLS, HIDDEN, dtype=dtype)
        self.cells = nn.ModuleList(nn.GRUCell(HIDDEN, HIDDEN, dtype=dtype) for _ in range(2))
        self.readout = nn.Linear(HIDDEN, self.SYMBOLS, dtype=dtype)
        with torch.no_grad():
            self.readout.weight.mul_(4)
        self.register_buffer("is_end", F.one_hot(torch.tensor(EOS), self.SYMBOLS).to(dtype))

    def step(self, carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        *states, left = carry
        shape = tokens.shape
        x, after = self.embed(tokens).flatten(0, -2), []
        for cell, h in zip(self.cells, states, strict=True):
            x = cell(x, h.flatten(0, -2))
            after.append(x.view(*shape, HIDDEN))
        logits = self.readout(x).view(*shape, -1) - 3 * left[..., None] * self.is_end
        return (*after, left - 1), logits.log_softmax(-1)

    def begin(self) -> tuple[Tensor, ...]:
        """Two states, and how many tokens it is to the likely end."""
        draw = torch.Generator().manual_seed(2)
        given = [torch.randn(self.ROWS, HIDDEN, generator=draw) for _ in range(2)]
        given.append(torch.randint(*self.LENGTHS, (self.ROWS,), generator=draw))
        return tuple(x.to(self.is_end.dtype) for x in given)

    def search(self) -> Hypotheses:
        return beam_search(
            self.step, self.begin(), batch_size=self.ROWS, beam_size=self.BEAMS, bos_id=BOS, eos_id=EOS, max_steps=24,
            compact=True,
        )  # fmt: skip

    def risk(self, hyps: Hypotheses, scores: Tensor) -> Tensor:
        return tl.risk.minimum_risk(scores, hyps.lens.to(scores.dtype), valid=hyps.valid & hyps.finished)

    def through_search(self) -> Tensor:
        hyps = self.search()
        return self.risk(hyps, hyps.scores)

    def second_pass(self) -> Tensor:
        """Searches without a gradient, and scores what was found by forced decoding."""
        with torch.no_grad():
            hyps = self.search()
        return self.forced(hyps)

    def forced(self, hyps: Hypotheses) -> Tensor:
        """The second pass alone."""
        tokens = hyps.tokens.pad(EOS)  # (B * K, T)
        tokens = torch.cat([tokens, torch.full_like(tokens[:, :1], EOS)], 1)
        given = torch.cat([torch.full_like(tokens[:, :1], BOS), tokens[:, :-1]], 1)
        carry: Any = tuple(h.repeat_interleave(self.BEAMS, 0) for h in self.begin())
        found = []
        for t in range(tokens.shape[1]):
            carry, scores = self.step(carry, given[:, t])
            found.append(scores.gather(1, tokens[:, t : t + 1])[:, 0])
        counts = torch.arange(tokens.shape[1]) <= hyps.lens.flatten()[:, None]
        total = (torch.stack(found, 1) * counts).sum(1).view(self.ROWS, self.BEAMS)
        return self.risk(hyps, total)
