"""Continuations that a model of transformers makes of its own, with their gradient: `rollout`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.utils.generic import ModelOutput

from tensorloop._common import arguments
from tensorloop._common.errors import Misuse, WrongType, WrongValue, facts_of, named
from tensorloop._common.keywords import describe_unknown, hints
from tensorloop._common.saved import saved
from tensorloop.hf.cache import TrainCache, as_dynamic
from tensorloop.hf.decoder import Decoder
from tensorloop.hf.distribution import Distribution
from tensorloop.hf.hypotheses import SourceLayer
from tensorloop.hf.processors import Processor, as_processor, as_stop
from tensorloop.hf.prompt import Prompt, Source, count_steps
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
    ("cache", "past_key_values= is a cache to go on from"),
    ("position_ids cache_position", "positions are made from attention_mask"),
    ("token_type_ids mm_token_type_ids", "what tokens see is not known here with them; use model.generate()"),
    ("output_scores output_logits output_attentions output_hidden_states", "a Rollout has log_probs and entropies"),
)


@saved()
@dataclass(frozen=True, eq=False)
class Rollout:
    """A continuation of each of B prompts: what `rollout` returns.

    Packed rows may be of different lengths; `.pad(value)` gives (B, T).

    Attributes:
        tokens: PackedTensor (B, T*) int64, the end with them.
        log_probs: PackedTensor (B, T*), of each token, under the distribution that it was drawn from.
        ended: (B,) bool, whether an end token came; False in rows that `stopping_criteria` or the most tokens stopped.
        policy_log_probs: PackedTensor (B, T*), of each token at this temperature, before top_k, top_p and min_p: what
            `completion_logprobs(temperature=)` gives, and so the old ones of PPO's and GRPO's ratios. Without
            `logits_processor` too.
        entropies: PackedTensor (B, T*), of the distribution that each token was drawn from, with `return_entropy`; else
            None.

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
    entropies: PackedTensor | None = None

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
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    decoder_input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    past_key_values: Cache | None = None,
    encoder_outputs: ModelOutput | None = None,
    max_new_tokens: int | None = None,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    stopping_criteria: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    logits_processor: Callable[[Any, Any], Tensor] | Sequence[Callable[[Any, Any], Tensor]] | None = None,
    return_entropy: bool = False,
    group: int = 1,
    feed: str = "tokens",
    generator: torch.Generator | None = None,
    checkpoints: int | Schedule | Checkpoints | None = None,
    progress: bool = False,
    **model_kwargs: Any,
) -> Rollout:
    """Decodes token by token, greedily or by drawing, and keeps the graph of what it did.

        drawn = tl.hf.rollout(model, input_ids, attention_mask, do_sample=True, max_new_tokens=50)
        (-(drawn.log_probs.sum(1) * rewards).mean()).backward()  # REINFORCE

    A row that has ended leaves the batch. With `group`, a prompt runs once, and its continuations go on from there.

    Args:
        model: a model of transformers that has a cache, decoder-only or encoder-decoder.
        input_ids: (B, P) int64, the prompts, of a decoder padded on the left; of an encoder-decoder the source (of one
            that reads no tokens, as Whisper, its features). None: what follows takes its place.
        attention_mask: (B, P), 0 where there is padding; None: there is none. Tokens between others may be masked, as
            in turns that are padded each: positions count what is not masked, as `generate` has it.
        decoder_input_ids: (B, P) int64, what an encoder-decoder begins with, its start token included. None: that token
            alone.
        inputs_embeds: (B, P, d) floats, embeddings in the place of a decoder's input_ids, which get a gradient.
            `logits_processor` then sees the new tokens alone.
        past_key_values: TrainCache or DynamicCache, of the model's first n tokens of each prompt; only those after them
            are run. input_ids are all P tokens, n of them in the cache, as in `generate`; or only those after them,
            where attention_mask (B, n + P) is given. The cache is left as it is, and what was computed for it gets a
            gradient.
        encoder_outputs: ModelOutput with last_hidden_state (B, S, d), what an encoder made, in the place of input_ids;
            attention_mask is then (B, S), or that of the features.
        max_new_tokens: int, the most tokens, the end counted. None: rows go on until they end, or to the last position
            that the model's config names.
        eos_token_id: the token that ends a row, or several; None is the model's own.
        stopping_criteria: transformers' StoppingCriteria, a function of (input_ids, scores), or a list of them: after
            each token, those that give True, or True in a row of (B,) bools, stop it. `scores` is None, as in
            `generate` by default. None: nothing else stops a row.
        do_sample: bool, default False: the best token is taken. True draws one.
        temperature: float above 0, default 1: the logits are divided by it.
        top_k: int, then only so many of the likeliest tokens stay; None keeps all.
        top_p: float, and of those only the smallest set whose probability is at least this; None keeps all.
        min_p: float, and of those only tokens with at least this part of the likeliest one's probability; None keeps
            all.
        logits_processor: one of transformers' LogitsProcessor, a function of (input_ids (B, n), scores (B, V)) that
            gives scores (B, V), or a list of them: what they make of logits, before the temperature, is what tokens are
            drawn from. None: nothing. They, and `stopping_criteria`, are given the prompt's tokens and the new ones.
            One that is not known to treat all rows alike is given all rows at each step, as by `generate`: those that
            have stopped then stay in the batch.
        return_entropy: bool, default False: whether the Rollout has `entropies`.
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
        model_kwargs: keywords that the model's forward, or its encoder's, is given with the prompt, features and their
            masks (`pixel_values`, `image_sizes`), by way of the model's prepare_inputs_for_generation.

    Returns:
        A `Rollout` of B * group rows.

    Gradient: of log_probs to the model, through the cache. With "tokens" it is what teacher forcing of the tokens has
    (multiplied by rewards, the score-function gradient); the others pass it through what was fed too.
    Cost: the tokens of the prompts, once a prompt, of which a group copies keys and values; then a step for each token
    but the last, of the rows that run. What is kept is O(T) with `attn_implementation="tensorloop"` or "sdpa" (see
    TrainCache), and with `return_entropy` B * V numbers more a step. Without gradients it is what `generate` takes.

    Raises:
        TypeError: a model without a cache, arguments of another type, keywords that the model has none of.
        ValueError: numbers out of range, prompts padded on the right, devices, more tokens than learned positions, no
            end to come; a cache of other rows, tokens or sizes, processors that keep something of rows, features that
            are read at each step, or for which the model makes masks or positions of its own.
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

        From a cache, with a processor, a stop rule and entropies:

        >>> cache = tl.hf.TrainCache(config)
        >>> _ = model(torch.tensor([[3], [5]]), cache=cache)
        >>> drawn = tl.hf.rollout(
        ...     model, torch.tensor([[3, 4], [5, 6]]), past_key_values=cache, max_new_tokens=4, eos_token_id=15,
        ...     logits_processor=transformers.RepetitionPenaltyLogitsProcessor(1.2),
        ...     stopping_criteria=lambda input_ids, scores: input_ids[:, -1] == 9, return_entropy=True,
        ... )
        >>> drawn.entropies.shape, cache.get_seq_length()
        ((2, *), 1)
    """
    decoder = Decoder(model)
    processor, stop = as_processor(logits_processor), as_stop(stopping_criteria)
    draw = _Draw(bool(do_sample), Distribution(temperature, top_k, top_p, min_p), generator, processor)
    draw.check()
    group = arguments.at_least(1, group, "group")
    arguments.as_bool(return_entropy, "return_entropy")
    if feed not in _FEEDS:
        raise WrongValue(f"feed must be one of {', '.join(map(repr, _FEEDS))}, got {feed!r}")
    for name in model_kwargs:
        if name in _KEYWORDS or name not in decoder.options:
            raise WrongType(str(describe_unknown(rollout, [name], _KEYWORDS)))
    more = {"inputs_embeds": inputs_embeds, "past_key_values": past_key_values, "encoder_outputs": encoder_outputs}
    prompt, source = decoder.read(input_ids, attention_mask, decoder_input_ids, holes=True, **more, **model_kwargs)
    ends = decoder.read_ends(eos_token_id)
    if max_new_tokens is None and not ends and stop is None:
        raise WrongValue("nothing says when to stop: give max_new_tokens= or eos_token_id=")
    steps = count_steps(max_new_tokens, "max_new_tokens", prompt, decoder.positions(prompt))
    run = _Rollouts(decoder, draw, feed, (prompt, source, group), (ends, stop), return_entropy)
    carry, lens = _loop(
        run.goes_on,
        run.step,
        run.init,
        context=run.context,
        max_steps=None if steps is None else steps - 1,
        compact=not any(x is not None and x.all_rows for x in (processor, stop)),
        return_steps=True,
        checkpoints=checkpoints,
        compile=False,
        progress=progress,
    )
    found = (x and pack_padded(x.stack().transpose(0, 1), lens + 1) for x in carry.made)
    tokens, log_probs, of_policy, entropies = found
    assert tokens is not None
    assert log_probs is not None
    _refuse_nan(log_probs, "" if processor is None else ", or logits_processor made them,")
    return Rollout(tokens, log_probs, carry.ended, log_probs if of_policy is None else of_policy, entropies)


_loop = facts_of(while_loop)


def _refuse_nan(log_probs: PackedTensor, also: str) -> None:
    """One look at all steps: a row that is given NaN ends, and has it last."""
    bad = log_probs.values.detach().isnan()
    if bool(bad.any()):
        i = int(bad.nonzero()[0, 0])
        row, step = int(log_probs.row_ids[i]), int(log_probs.positions[i])
        raise Misuse(
            f"model gave NaN or infinite logits{also} for row {row} at step {step}: look at its weights and its dtype "
            "(float16 overflows), torch.autograd.set_detect_anomaly finds the operation"
        )


class _Draw(NamedTuple):
    """How tokens are chosen."""

    sample: bool
    drawn: Distribution
    generator: torch.Generator | None
    processor: Processor | None

    def check(self) -> None:
        """Refuses what makes no distribution."""
        self.drawn.check("; do_sample=False takes the best")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise WrongType(f"generator must be a torch.Generator, got {arguments.describe(self.generator)}")

    @property
    def changes(self) -> bool:
        """Whether tokens are drawn from another distribution than that at the temperature."""
        return self.drawn.cuts or self.processor is not None

    def scores(self, logits: Tensor, ids: Callable[[], Tensor]) -> Tensor:
        """Scores (B, V) whose softmax is the distribution, after these tokens."""
        if self.processor is not None:
            found = self.processor.run(ids(), logits.clone())  # which may be changed in place
            if not isinstance(found, Tensor) or found.shape != logits.shape:
                got = tuple(found.shape) if isinstance(found, Tensor) else arguments.describe(found)
                raise WrongValue(f"logits_processor must give scores {tuple(logits.shape)}, as it was given, got {got}")
            logits = found
        return self.drawn.cut(self.drawn.scale(logits))

    def choose(self, log_probs: Tensor) -> Tensor:
        """Tokens (B,); any for rows of NaN, which would end the process on a device."""
        log_probs = log_probs.detach()
        if not self.sample:
            return log_probs.argmax(1)
        weights = log_probs.exp().masked_fill_(log_probs[:, :1].isnan(), 1)
        return weights.multinomial(1, generator=self.generator)[:, 0]


class _Made(NamedTuple):
    """Holds what each step makes for each row, (B,)."""

    tokens: TensorArray
    log_probs: TensorArray
    of_policy: TensorArray | None  # as log_probs, where those are not the policy's own
    entropies: TensorArray | None


class _Carry(NamedTuple):
    """The carry of the loop that generates tokens."""

    cache: TrainCache | None  # None where there is a plain one, beside the carry
    last: Tensor  # (B,) tokens, or (B, d) what is fed
    made: _Made
    ended: Tensor  # (B,) bool


class _Rollouts:
    """The body of the loop, and what that begins with: the prompt was run, and the first token drawn."""

    def __init__(
        self,
        decoder: Decoder,
        draw: _Draw,
        feed: str,
        given: tuple[Prompt, Source | None, int],
        stops: tuple[list[int], Processor | None],
        entropy: bool,
    ) -> None:
        prompt, source, group = given
        ends, self.stop = stops
        self.decoder, self.draw, self.feed = decoder, draw, feed
        own, cross, logits = decoder.begin(prompt, source, prompt.new.shape[1])
        if group > 1:
            prompt, source = prompt.repeat(group), source and source.repeat(group)
            logits = logits.repeat_interleave(group, 0)
            for cache in (own, cross):
                if cache is not None:
                    cache.batch_repeat_interleave(group)
        self.ends = torch.tensor(ends, dtype=torch.int64, device=logits.device)
        self.table: Tensor | None = None
        if feed != "tokens":
            embed = decoder.embedding
            every = torch.arange(embed.weight.shape[0], device=logits.device)
            self.table = embed(every)  # what the module makes of weights, where it scales them
        layer: Any = own.layers[0]
        self.reads_arrays = layer.kind.reads_arrays
        self.context: dict[str, Any] = {"prompt": prompt.ids}
        self.plain: DynamicCache | None = None
        if not torch.is_grad_enabled():  # no step runs again, and no copy is kept
            self.plain = as_dynamic(own, decoder.config)
            self.context["rows"] = self.rows = torch.arange(len(logits), device=logits.device)
        # Models are told positions, as by `generate`, which is less work than to find them.
        self.context["last"] = torch.full_like(logits[:, 0], prompt.length - 1, dtype=torch.int64)
        if prompt.mask is not None:
            self.context |= {"mask": prompt.mask, "last": prompt.mask.sum(1) - 1}
        if source is not None and cross is not None:
            keys = [(x.keys, x.values) for x in cross.layers]  # pyright: ignore[reportAttributeAccessIssue]
            self.source = source
            self.context |= {"source": keys, "states": source.states, "told": source.by_row()}
        more = (TensorArray() if x else None for x in (draw.changes, entropy))
        nothing = prompt.ids.new_zeros(len(logits))
        begun = _Carry(None if self.plain else own, nothing, _Made(TensorArray(), TensorArray(), *more), nothing.bool())
        self.init = self._take(begun, logits, self.context)

    def goes_on(self, carry: _Carry, context: dict[str, Any]) -> Tensor:
        """(B,) which rows have not ended, and nothing stops."""
        going = ~carry.ended
        return going if self.stop is None else going & ~self.stop.run(_said(carry, context), None)

    def step(self, carry: _Carry, context: dict[str, Any]) -> _Carry:
        """One token of each row."""
        t = len(carry.made.tokens)
        mask = F.pad(context["mask"], (0, t), value=True) if "mask" in context else None
        positions = (context["last"] + t)[:, None]
        own = self._plain(context) if carry.cache is None else carry.cache
        cache, source = self._show(own, context)
        return self._take(carry, self.decoder.logits(carry.last[:, None], mask, positions, cache, source), context)

    def _take(self, carry: _Carry, logits: Tensor, context: dict[str, Any]) -> _Carry:
        """The carry with one more token, after logits (B, V)."""
        made = carry.made
        log_probs = self.draw.scores(logits, lambda: _said(carry, context)).log_softmax(1)
        token = self.draw.choose(log_probs)
        at = token[:, None]
        chosen = log_probs.gather(1, at)[:, 0]
        made.log_probs.append(chosen)
        if made.of_policy is not None:
            of_policy = self.draw.drawn.scale(logits)
            made.of_policy.append(of_policy.gather(1, at)[:, 0] - of_policy.logsumexp(1))
        if made.entropies is not None:
            finite = log_probs.masked_fill(log_probs.detach() == -torch.inf, 0)  # 0 log 0 is 0
            made.entropies.append(-(log_probs.exp() * finite).sum(1))
        made.tokens.append(token)
        ended = chosen.isnan()  # where one is, all of the row are
        if len(self.ends):
            ended |= (at == self.ends).any(1)
        return carry._replace(last=self._feed(token, log_probs), ended=ended)

    def _plain(self, context: dict[str, Any]) -> DynamicCache:
        """The cache beside the carry, of the rows that are left in the batch."""
        assert self.plain is not None
        if len(rows := context["rows"]) < len(self.rows):
            self.plain.batch_select_indices(torch.searchsorted(self.rows, rows))
            self.rows = rows
        return self.plain

    def _show(self, own: DynamicCache, context: dict[str, Any]) -> tuple[Cache, Source | None]:
        if "source" not in context:
            return own, None
        cross: Any = [SourceLayer(keys, values, 1, self.reads_arrays) for keys, values in context["source"]]
        both = EncoderDecoderCache(own, TrainCache.of_layers(cross))
        return both, self.source.of_rows(context["states"], context["told"])

    def _feed(self, token: Tensor, log_probs: Tensor) -> Tensor:
        if self.table is None:
            return token
        table = self.table[: log_probs.shape[1]]
        expected = log_probs.exp().to(table.dtype)[:, : len(table)] @ table
        if self.feed == "straight_through":
            expected = table[token] + expected - expected.detach()
        return expected.to(table.dtype)


def _said(carry: _Carry, context: dict[str, Any]) -> Tensor:
    """(B, n) the tokens of the prompt and those that followed."""
    said = carry.made.tokens
    return torch.cat([context["prompt"], said.stack().t()], 1) if len(said) else context["prompt"]
