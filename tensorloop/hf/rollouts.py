"""Continuations that a model of transformers makes of its own, with their gradient: `rollout`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, EncoderDecoderCache

from tensorloop._common import arguments
from tensorloop._common.errors import Misuse, WrongType, WrongValue, named
from tensorloop._common.keywords import hints
from tensorloop.hf.cache import TrainCache
from tensorloop.hf.distribution import Distribution
from tensorloop.hf.hypotheses import SourceLayer
from tensorloop.hf.layers import Kind
from tensorloop.hf.prompt import Decoder, Prompt, Source, count_steps
from tensorloop.loop import Checkpoints, while_loop
from tensorloop.packed import PackedTensor, pack_padded
from tensorloop.schedule import Schedule
from tensorloop.tensor_array import TensorArray

_FEEDS = ("tokens", "straight_through", "soft")
_KEYWORDS = hints(
    ("max_steps max_length max_len", "max_new_tokens= bounds the tokens, the end counted"),
    ("eos_id end_token_id", "eos_token_id= is what ends a row, one or several"),
    ("num_return_sequences n num_generations group_size", "group= is the number of continuations of each prompt"),
    ("num_beams beam_size", "beam_search() searches"),
    ("pad_token_id", "tokens are packed: rollout.tokens.pad(pad_token_id)"),
    ("sample greedy", "do_sample= says whether tokens are drawn"),
    ("use_cache", "a rollout always has a cache; leave it out"),
    ("input_features inputs", "input_ids takes what the model's encoder reads"),
    ("soft straight_through", "feed= is 'tokens', 'straight_through' or 'soft'"),
)


@dataclass(frozen=True, eq=False)
class Rollout:
    """A continuation of each of B prompts: what `rollout` returns.

    Packed rows may be of different lengths; `.pad(value)` gives (B, T).

    Attributes:
        tokens: PackedTensor (B, T*) int64, the end with them.
        log_probs: PackedTensor (B, T*), of each token, under the distribution that it was drawn from.
        ended: (B,) bool, whether an end came.
        policy_log_probs: PackedTensor (B, T*), of each token at this temperature, before top_k, top_p and min_p: what
            `completion_logprobs(temperature=)` gives, and so the old ones of PPO's and GRPO's ratios.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> said = tl.hf.rollout(model, torch.tensor([[3, 4], [5, 6]]), max_new_tokens=3, eos_token_id=15)
        >>> said.tokens.shape, said.ended.shape
        ((2, *), torch.Size([2]))
    """

    tokens: PackedTensor
    log_probs: PackedTensor
    ended: Tensor
    policy_log_probs: PackedTensor

    @property
    def lens(self) -> Tensor:
        """(B,) int64: how many tokens each row has, the end token included."""
        return self.tokens.lens

    @property
    def without_end(self) -> PackedTensor:
        """The tokens (B, T*) without the end token, as in the result of `hf.beam_search`."""
        lens = self.lens - self.ended.long()
        inside = self.tokens.positions < lens[self.tokens.row_ids]
        return PackedTensor(self.tokens.values[inside], lens)


@named("hf.rollout", _KEYWORDS)
def rollout(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    decoder_input_ids: Tensor | None = None,
    max_new_tokens: int | None = None,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    group: int = 1,
    feed: str = "tokens",
    generator: torch.Generator | None = None,
    checkpoints: int | Schedule | Checkpoints | None = None,
    progress: bool = False,
) -> Rollout:
    """Decodes token by token, greedily or by drawing, and keeps the graph of what it did.

        drawn = tl.hf.rollout(model, input_ids, attention_mask, do_sample=True, max_new_tokens=50)
        (-(drawn.log_probs.sum(1) * rewards).mean()).backward()  # REINFORCE

    A row that has ended leaves the batch. With `group`, a prompt runs once, and its continuations go on from there.

    Args:
        model: a model of transformers that has a cache, decoder-only or encoder-decoder.
        input_ids: (B, P) int64, the prompts, of a decoder padded on the left; of an encoder-decoder the source (of one
            that reads no tokens, as Whisper, its features).
        attention_mask: (B, P), 0 where there is padding; None: there is none.
        decoder_input_ids: (B, P) int64, what an encoder-decoder begins with, its start token included. None: that token
            alone.
        max_new_tokens: int, the most tokens, the end counted. None: rows go on until they end, or to the last position
            that the model's config names.
        eos_token_id: the token that ends a row, or several; None is the model's own.
        do_sample: bool, default False: the best token is taken. True draws one.
        temperature: float above 0, default 1: the logits are divided by it.
        top_k: int, then only so many of the likeliest tokens stay; None keeps all.
        top_p: float, and of those only the smallest set whose probability is at least this; None keeps all.
        min_p: float, and of those only tokens with at least this part of the likeliest one's probability; None keeps
            all.
        group: int, default 1: how many continuations of each prompt there are. They are rows b * group to b * group +
            group - 1 of the result, and have the random numbers that `input_ids.repeat_interleave(group, 0)` has (one
            call of `multinomial` a step, for all rows that run). In training mode they share what dropout takes from
            their prompt.
        feed: what the next step sees. "tokens" (default); "straight_through", the token's embedding with the gradient
            of the expected one; "soft", the expected embedding itself.
        generator: torch.Generator to draw from; None is torch's own.
        checkpoints: K keeps at most K steps and runs the others again in backward, with the same random numbers; None
            keeps all. As in `while_loop`.
        progress: bool, default False: whether steps are shown.

    Returns:
        A `Rollout` of B * group rows.

    Gradient: of log_probs to the model, through the cache. With "tokens" it is what teacher forcing of the tokens has
    (multiplied by rewards, the score-function gradient); the others pass it through what was fed too.
    Cost: one step a token, of the rows that run; before them all tokens of the prompts but the last, once a prompt, of
    which a group copies keys and values. What is kept is O(T) with `attn_implementation="tensorloop"` or "sdpa"
    (see TrainCache).

    Raises:
        TypeError: a model without a cache, arguments of another type.
        ValueError: numbers out of range, masks that are no padding, devices, more tokens than learned positions, no
            end to come.
        RuntimeError: logits that are NaN: the row and the step.

    Sources: Williams 1992; Bengio et al. 2013 (1308.3432) for straight-through.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> given = {"max_new_tokens": 4, "eos_token_id": 15, "do_sample": True}
        >>> drawn = tl.hf.rollout(model.eval(), torch.tensor([[3, 4], [5, 6]]), **given)
        >>> rewards = torch.tensor([1.0, -1.0])
        >>> (-(drawn.log_probs.sum(1) * rewards).mean()).backward()
    """
    decoder = Decoder(model)
    draw = _Draw(bool(do_sample), Distribution(temperature, top_k, top_p, min_p), generator)
    draw.check()
    group = arguments.at_least(1, group, "group")
    if feed not in _FEEDS:
        raise WrongValue(f"feed must be one of {', '.join(map(repr, _FEEDS))}, got {feed!r}")
    prompt, source = decoder.read(input_ids, attention_mask, decoder_input_ids)
    ends = decoder.read_ends(eos_token_id)
    if max_new_tokens is None and not ends:
        raise WrongValue("nothing says when to stop: give max_new_tokens= or eos_token_id=")
    steps = count_steps(max_new_tokens, "max_new_tokens", prompt, decoder.positions(prompt))
    run = _Rollouts(decoder, draw, feed, (prompt, source, group), ends)
    carry, lens = while_loop(
        lambda carry, context: ~carry.ended,
        run.step,
        run.init,
        context=run.context,
        max_steps=steps,
        compact=True,
        return_steps=True,
        checkpoints=checkpoints,
        progress=progress,
    )
    tokens, log_probs = (pack_padded(x.stack().transpose(0, 1), lens) for x in (carry.tokens, carry.log_probs))
    _refuse_nan(log_probs)
    of_policy = log_probs
    if carry.of_policy is not None:
        of_policy = pack_padded(carry.of_policy.stack().transpose(0, 1), lens)
    return Rollout(tokens, log_probs, carry.ended, of_policy)


def _refuse_nan(log_probs: PackedTensor) -> None:
    """One look at all steps: a row that is given NaN ends, and has it last."""
    bad = log_probs.values.detach().isnan()
    if bool(bad.any()):
        i = int(bad.nonzero()[0, 0])
        row, step = int(log_probs.row_ids[i]), int(log_probs.positions[i])
        raise Misuse(
            f"model gave NaN or infinite logits for row {row} at step {step}: look at its weights and its dtype "
            "(float16 overflows), torch.autograd.set_detect_anomaly finds the operation"
        )


class _Draw(NamedTuple):
    """How tokens are chosen."""

    sample: bool
    drawn: Distribution
    generator: torch.Generator | None

    def check(self) -> None:
        """Refuses what makes no distribution."""
        self.drawn.check("; do_sample=False takes the best")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise WrongType(f"generator must be a torch.Generator, got {arguments.describe(self.generator)}")

    def choose(self, log_probs: Tensor, bad: Tensor) -> Tensor:
        """Tokens (B,); any for rows that are `bad` (B,), as NaN would end the process on a device."""
        log_probs = log_probs.detach()
        if not self.sample:
            return log_probs.argmax(1)
        weights = log_probs.exp().masked_fill_(bad[:, None], 1)
        return weights.multinomial(1, generator=self.generator)[:, 0]


class _Carry(NamedTuple):
    """The carry of the loop that generates tokens."""

    cache: TrainCache
    last: Tensor  # (B,) tokens, or (B, d) what is fed
    tokens: TensorArray  # (B,) a step
    log_probs: TensorArray
    ended: Tensor  # (B,) bool
    of_policy: TensorArray | None  # as log_probs, where those are of a part of the tokens alone


class _Rollouts:
    """The body of the loop, and what that begins with: all of the prompt but its last token was run."""

    def __init__(
        self, decoder: Decoder, draw: _Draw, feed: str, given: tuple[Prompt, Source | None, int], ends: list[int]
    ) -> None:
        prompt, source, group = given
        self.decoder, self.draw, self.feed = decoder, draw, feed
        own, cross = decoder.begin(prompt, source, prompt.ids.shape[1] - 1)
        if group > 1:
            prompt, source = prompt.repeat(group), source and source.repeat(group)
            for cache in (own, cross):
                if cache is not None and cache.get_seq_length():
                    cache.batch_repeat_interleave(group)
        self.ends = torch.tensor(ends, dtype=torch.int64, device=prompt.ids.device)
        self.table: Tensor | None = None
        last = prompt.ids[:, -1]
        if feed != "tokens":
            embed = decoder.embedding
            every = torch.arange(embed.weight.shape[0], device=last.device)
            self.table = embed(every)  # what the module makes of weights, where it scales them
            last = embed(last)
        ended = torch.zeros(len(last), dtype=torch.bool, device=last.device)
        self.init = _Carry(own, last, TensorArray(), TensorArray(), ended, TensorArray() if draw.drawn.cuts else None)
        self.context: dict[str, Any] = {"prompt": prompt.ids}
        if prompt.mask is not None:
            self.context |= {"mask": prompt.mask, "last": prompt.mask.sum(1) - 1}
        self.kind = Kind(decoder.text)
        if source is not None and cross is not None:
            keys = [(x.keys, x.values) for x in cross.layers]  # pyright: ignore[reportAttributeAccessIssue]
            self.source = source
            self.context |= {"source": keys, "states": source.states, "told": source.by_row()}

    def step(self, carry: _Carry, context: dict[str, Any]) -> _Carry:
        """One token of each row."""
        t = len(carry.tokens)
        mask = positions = None
        if "mask" in context:
            mask = F.pad(context["mask"], (0, t), value=True)
            positions = (context["last"] + t)[:, None]
        cache, source = self._show(carry.cache, context)
        logits = self.decoder.logits(carry.last[:, None], mask, positions, cache, source)
        scores = self.draw.drawn.scale(logits)
        log_probs = self.draw.drawn.cut(scores).log_softmax(1)
        bad = log_probs.detach()[:, 0].isnan()  # all of its row is, then
        token = self.draw.choose(log_probs, bad)
        carry.tokens.append(token)
        carry.log_probs.append(log_probs.gather(1, token[:, None])[:, 0])
        if carry.of_policy is not None:
            carry.of_policy.append(scores.gather(1, token[:, None])[:, 0] - scores.logsumexp(1))
        ended = (token[:, None] == self.ends).any(1) | bad
        return carry._replace(last=self._feed(token, log_probs, carry.last), ended=ended)

    def _show(self, own: TrainCache, context: dict[str, Any]) -> tuple[Cache, Source | None]:
        if "source" not in context:
            return own, None
        cross: Any = [SourceLayer(keys, values, 1, self.kind.reads_arrays) for keys, values in context["source"]]
        both = EncoderDecoderCache(own, TrainCache.of_layers(cross))
        return both, self.source.of_rows(context["states"], context["told"])

    def _feed(self, token: Tensor, log_probs: Tensor, like: Tensor) -> Tensor:
        if self.table is None:
            return token
        table = self.table[: log_probs.shape[1]]
        expected = log_probs.exp().to(table.dtype)[:, : len(table)] @ table
        if self.feed == "straight_through":
            expected = table[token] + expected - expected.detach()
        return expected.to(like.dtype)
