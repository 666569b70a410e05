"""Beam search with a model of transformers, as `generate` searches, and trained through: `beam_search`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import ModelOutput

from tensorloop import beam
from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, facts_of, named
from tensorloop._common.keywords import hints
from tensorloop.hf import known
from tensorloop.hf.advice import warn
from tensorloop.hf.decoder import Decoder
from tensorloop.hf.hypotheses import Beams, clear_padding, show_cache
from tensorloop.hf.known import ATTENTION
from tensorloop.hf.layers import ArrayLayer
from tensorloop.hf.processors import as_processor
from tensorloop.hf.prompt import Prompt, Source, count_steps
from tensorloop.loop import Checkpoints
from tensorloop.schedule import Schedule

_STOPS = {True: "first_n", False: "hf", "never": "exact"}
_KEYWORDS = hints(
    ("num_beams beams beam_width", "beam_size= is the number of hypotheses that run"),
    ("num_return_sequences nbest", "n_best= is the number of hypotheses returned"),
    ("max_new_tokens max_length max_len", "max_steps= bounds the new tokens, the eos counted"),
    ("eos_id end_token_id", "eos_token_id= is what ends a hypothesis, one or several"),
    ("pad_token_id", "tokens are packed: hyps.tokens.pad(pad_token_id)"),
    ("do_sample temperature top_k top_p", "rollout() draws"),
    ("use_cache", "a search always has a cache; leave it out"),
    ("input_features inputs", "input_ids takes what the model's encoder reads"),
)


@named("hf.beam_search", _KEYWORDS)
def beam_search(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    decoder_input_ids: Tensor | None = None,
    encoder_outputs: ModelOutput | None = None,
    beam_size: int,
    n_best: int | None = None,
    max_steps: int | None = None,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    logits_processor: Callable[[Any, Any], Tensor] | Sequence[Callable[[Any, Any], Tensor]] | None = None,
    checkpoints: int | Schedule | Checkpoints | None = None,
    progress: bool = False,
) -> beam.Hypotheses:
    """Finds the n best continuations of each prompt, as `generate(num_beams=...)` does, with gradients of scores.

        hyps = tl.hf.beam_search(model, input_ids, attention_mask, beam_size=4, max_steps=50)  # a decoder's prompts
        hyps = tl.hf.beam_search(model, input_ids, beam_size=4)                                # an encoder's sources

    Args:
        model: a model of transformers that has a cache, decoder-only or encoder-decoder.
        input_ids: (B, P) int64, the prompts, of a decoder padded on the left; of an encoder-decoder the source, which
            is encoded once; of one that reads no tokens (Whisper) its features (B, ...).
        attention_mask: (B, P), 0 where there is padding; None: there is none.
        decoder_input_ids: (B, P) int64, what hypotheses of an encoder-decoder begin with, its decoder_start_token_id
            included. None: that token alone.
        encoder_outputs: ModelOutput with last_hidden_state (B, S, d), what an encoder made, in the place of input_ids,
            as in `rollout`.
        beam_size: int, at least 1: how many hypotheses of a row run at a time.
        n_best: int, how many are returned; None is `beam_size`.
        max_steps: int, generate's max_new_tokens: the most tokens, the end counted; what has not ended then ranks with
            what has. None: a search goes on to the last position that the model's config names.
        eos_token_id: the token that ends a hypothesis, or several; None asks the model's own settings, which are asked
            for nothing else.
        length_penalty: float, default 1: scores are divided by this power of the length, as generate does.
        early_stopping: True, False (default) or "never", as generate's.
        logits_processor: one of transformers' processors or a list of them, on log-probabilities. One that is not known
            to treat all rows alike is given all rows at each step, as generate does: those that have ended then stay in
            the batch.
        checkpoints: which carries are kept for backward, as in `while_loop`: None keeps all, an int that many.
        progress: bool, default False: whether steps and running rows are shown.

    Returns:
        `tl.beam.Hypotheses`. `final` is generate's sequences_scores; tokens have no prompt and no end, which is in
        `ends`.

    Gradient: of `scores`, `final` and `token_scores`, as teacher forcing of the same tokens has it, to the model.
    Cost: prompts are run once, for B rows, and never copied; a step runs B * beam_size rows. With
    `attn_implementation="tensorloop"` it keeps of attention the queries and its own keys, O(T) in all; other
    implementations are given keys that are gathered at each step, which is O(T²), and a UserWarning says so.

    Raises:
        TypeError: a model without a cache, arguments of another type.
        ValueError: masks that are no padding, devices, more tokens than learned positions, processors that keep
            something of rows, NaN.

    Sources: transformers' `_beam_search` for what it finds; `tl.beam.beam_search` for how.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> model.set_attn_implementation(tl.hf.ATTENTION)
        >>> ids = torch.tensor([[3, 4], [5, 6]])
        >>> tl.hf.beam_search(model, ids, beam_size=3, n_best=2, max_steps=4, eos_token_id=15).scores.shape
        torch.Size([2, 2])
    """
    decoder = Decoder(model)
    size, kept = _check_sizes(beam_size, n_best)
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise WrongValue(f"early_stopping must be True, False or 'never', got {early_stopping!r}")
    if not isinstance(length_penalty, int | float):
        raise WrongType(f"length_penalty must be a number, got {arguments.describe(length_penalty)}")
    processor = as_processor(logits_processor)
    prompt, source = decoder.read(input_ids, attention_mask, decoder_input_ids, encoder_outputs=encoder_outputs)
    gathers = decoder.text._attn_implementation != ATTENTION or known.makes_keys_of_latents(decoder.text)
    if torch.is_grad_enabled() and gathers:
        warn(decoder.text, "hf.beam_search: keys are gathered for each step")
        decoder.advised = True
    steps = count_steps(max_steps, "max_steps", prompt, decoder.positions(prompt))
    ends = decoder.read_ends(eos_token_id)
    steps_of = _Steps(decoder, prompt, source, processor and processor.run, not ends)
    length = beam.Power(length_penalty) if length_penalty else beam.Sum()
    found = _search(
        steps_of.with_history if processor else steps_of,
        steps_of.arrays,
        batch_size=len(prompt.ids),
        beam_size=size,
        bos_id=prompt.ids[:, -1],
        eos_id=ends or [model.get_output_embeddings().weight.shape[0]],
        context=steps_of.context,
        max_steps=steps,
        length=length,
        stop=_STOPS[early_stopping],
        eos="top_k",
        capped="ranked",
        checkpoints=checkpoints,
        compact=processor is None or not processor.all_rows,
        progress=progress,
    )
    return found if kept == size else _first(found, kept)


_search = facts_of(beam.beam_search)


class _Steps:
    """The model as a step of a search, and what that begins with: all of the prompt but its last token was run."""

    def __init__(self, decoder: Decoder, prompt: Prompt, source: Source | None, processor: Any, endless: bool) -> None:
        self.decoder, self.processor, self.endless = decoder, processor, endless
        self.before = prompt.length - 1
        own, cross, _ = decoder.begin(prompt, source, prompt.new.shape[1] - 1)
        self.padded = prompt.mask is not None and self.before > 0
        self.context: dict[str, Any] = {}
        if self.padded:
            assert prompt.mask is not None
            clear_padding(own, prompt.mask[:, :-1])
            last = prompt.mask.sum(1) - 1
            self.context |= {"mask": prompt.mask, "last": last, "starts": self.before - last}
        if source is not None and cross is not None:
            self.source = source
            self.context["source"] = [(x.keys, x.values) for x in cross.layers]  # pyright: ignore[reportAttributeAccessIssue]
            self.context["told"] = source.by_row()
        if processor:
            self.context["prompt"] = prompt.ids
        layers = [layer for layer in own.layers if isinstance(layer, ArrayLayer)]
        self.kinds = [layer.kind for layer in layers]
        self.arrays = [layer.arrays for layer in layers]

    def __call__(self, arrays: Any, tokens: Tensor, context: dict[str, Any]) -> tuple[Any, Tensor]:
        """The arrays, which grow by a slot, and log_probs (B, K, V) after `tokens` (B, K)."""
        log_probs = self._run(arrays, tokens, context)
        return arrays, F.pad(log_probs, (0, 1), value=-torch.inf) if self.endless else log_probs

    def with_history(
        self, arrays: Any, tokens: Tensor, context: dict[str, Any], *, history: Tensor
    ) -> tuple[Any, Tensor]:
        """The arrays and log_probs (B, K, V) after `tokens`, processed as `generate` does."""
        log_probs = self._run(arrays, tokens, context)
        before = context["prompt"][:, None].expand(-1, tokens.shape[1], -1)
        flat = torch.cat([before, history], 2).flatten(0, 1)
        log_probs = self.processor(flat, log_probs.flatten(0, 1)).view(log_probs.shape)
        return arrays, F.pad(log_probs, (0, 1), value=-torch.inf) if self.endless else log_probs

    def _run(self, arrays: Any, tokens: Tensor, context: dict[str, Any]) -> Tensor:
        rows, size = tokens.shape
        t = len(arrays[0][0]) - self.before
        beams = Beams(rows, size, context.get("starts"), self.kinds[0].reads_arrays)
        cache = show_cache(arrays, self.kinds, context.get("source", []), beams)
        mask = positions = source = None
        if self.padded:
            mask = F.pad(context["mask"], (0, t), value=True).repeat_interleave(size, 0)
            positions = (context["last"] + t).repeat_interleave(size)[:, None]
        if "source" in context:
            # The keys are there: of the states themselves only the shape is asked for.
            told = {name: x.repeat_interleave(size, 0) for name, x in context["told"].items()}
            nothing = context["source"][0][0].new_zeros(())
            source = self.source.of_rows(nothing.expand(rows * size, *self.source.states.shape[1:]), told)
        logits = self.decoder.logits(tokens.reshape(-1, 1), mask, positions, cache, source)
        return logits.log_softmax(-1).view(rows, size, -1)


def _check_sizes(beam_size: Any, n_best: Any) -> tuple[int, int]:
    size = arguments.at_least(1, beam_size, "beam_size")
    kept = size if n_best is None else arguments.as_int(n_best, "n_best")
    if not 1 <= kept <= size:
        raise WrongValue(f"n_best must be from 1 to beam_size, which is {size}; got {kept}")
    return size, kept


def _first(hyps: beam.Hypotheses, n: int) -> beam.Hypotheses:
    """The first n of each row."""
    rows, size = hyps.lens.shape
    picked = (torch.arange(rows)[:, None] * size + torch.arange(n)).flatten().to(hyps.lens.device)
    lattice = dataclasses.replace(hyps.lattice, ends=tuple(x[:, :n] for x in hyps.lattice.ends))
    each = {name: getattr(hyps, name)[:, :n] for name in ("lens", "scores", "final", "valid", "finished", "ends")}
    mass = each["scores"].detach().masked_fill(~each["finished"], -torch.inf).logsumexp(1).exp()
    packed = {"tokens": hyps.tokens[picked], "token_scores": hyps.token_scores[picked]}
    return dataclasses.replace(hyps, **packed, **each, coverage=mass, lattice=lattice)
