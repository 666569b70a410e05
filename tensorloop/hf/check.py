"""A model of one's own, tried in each of the ways that this room has: `check_attention`."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorloop._common import arguments
from tensorloop._common.errors import Fact, Misuse, WrongType, WrongValue, named
from tensorloop.hf import certificate
from tensorloop.hf.cache import TrainCache
from tensorloop.hf.known import ATTENTION
from tensorloop.hf.positions import find_numbering, has_table
from tensorloop.hf.prefixes import Learned
from tensorloop.hf.prompt import read_prompt
from tensorloop.hf.rollouts import rollout
from tensorloop.hf.rows.forward import packed_forward
from tensorloop.hf.search import beam_search
from tensorloop.hf.signature import signature_of
from tensorloop.packed import PackedTensor

_OURS = ("hf.", "TrainCache", "attn_implementation=")
_BEAM = 3


class Tried(NamedTuple):
    """Holds what came of one way of running a model."""

    way: str
    kind: str  # "same", "differs", "refused", "fails"
    off: float  # of values and gradients, relative to the largest; NaN where there are none
    note: str = ""


@dataclass(frozen=True, eq=False)
class AttentionReport:
    """Holds what `check_attention` found; true where nothing differs and nothing fails.

    Attributes:
        model: str, the model's class.
        oracle: str, what it was compared with.
        checks: tuple of `Tried` (way, kind, off, note), one for each way of running it.
        known: bool, whether "tensorloop" attention was compared for a model with this code before.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> report = tl.hf.check_attention(transformers.LlamaForCausalLM(config), torch.tensor([[3, 4, 5, 6]]))
        >>> report.same, report.known
        (True, True)
    """

    model: str
    oracle: str
    checks: tuple[Tried, ...]
    known: bool

    @property
    def same(self) -> bool:
        """Whether all ways that are not refused give what the model itself gives."""
        return all(x.kind in ("same", "refused") for x in self.checks)

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        width = max(len(x.way) for x in self.checks)
        lines = (f"  {x.way:{width}}  {x.kind:8} {x.off:8.1e}  {x.note}".rstrip() for x in self.checks)
        before = "its attention was compared before" if self.known else "its attention was not compared before"
        return "\n".join((f"{self.model}, compared with {self.oracle}; {before}", *lines))


class _Oracle:
    """A model, the rows that it is given, and what it gives for each of them by itself."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor) -> None:
        self.model, self.ids, self.mask = model, ids, mask
        self.rows = [row[seen] for row, seen in zip(ids, mask, strict=True)]
        self.pairs = bool(model.config.is_encoder_decoder)

    def logits(self, row: Tensor, new: Tensor) -> Tensor:
        """(t, V) before each of the new tokens."""
        if self.pairs:
            config = self.model.config
            start = new.new_tensor([config.decoder_start_token_id])
            options = {"input_ids": row[None], "decoder_input_ids": torch.cat([start, new])[None], "use_cache": False}
            return self.model(**options).logits[0, :-1]
        return self.model(input_ids=torch.cat([row, new])[None], use_cache=False).logits[0, len(row) - 1 : -1]

    def check(self, name: str) -> None:
        """Raises where the model itself cannot say anything of these rows."""
        try:
            with torch.no_grad():
                found = torch.cat([self.logits(row, row[:1]) for row in self.rows])
        except Exception as error:
            raise Misuse(f"model itself fails for these rows, by {name!r} attention: {error}") from error
        if bool(found.isnan().any()):
            raise Misuse(f"model itself gives NaN for these rows, by {name!r} attention")

    def check_padded(self, own: str, plain: str) -> None:
        """Raises where its own attention makes NaN of padding: "eager" in float64 does, with a softmax in float32."""
        if self.pairs or bool(self.mask.all()):
            return
        self.model.set_attn_implementation(own)
        try:
            with torch.no_grad():
                found = _padded(self)[0]
        except Exception:  # which each way says for itself
            return
        finally:
            self.model.set_attn_implementation(plain)
        if bool(found.isnan().any()):
            raise Misuse(
                f"model itself gives NaN for rows with padding, by {own!r} attention in {found.dtype}; give "
                "dtype=torch.float32, or rows of one length"
            )

    def forced(self, rows: list[Tensor], tokens: PackedTensor) -> Tensor:
        """Log-probabilities of all tokens, by one pass over each row."""
        found = []
        for row, new in zip(rows, tokens.unbind(), strict=True):
            scores = self.logits(row, new).log_softmax(-1)
            found.append(scores.gather(1, new[:, None])[:, 0])
        return torch.cat(found)

    def all_logits(self) -> Tensor:
        """(N, V) of all tokens of all rows."""
        return torch.cat([self.model(input_ids=row[None], use_cache=False).logits[0] for row in self.rows])


@named("hf.check_attention")
def check_attention(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 4,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float = 1e-4,
) -> AttentionReport:
    """Tries a model in each way that this library runs it, and says what differs from the model itself.

        print(tl.hf.check_attention(model, input_ids, attention_mask))

    The model itself is one pass over each row without a cache, by "eager" attention where it has that. With it are
    compared, in values and in the gradients of all weights: a TrainCache, in chunks and single tokens, with the model's
    attention and with "tensorloop"; one pass with "tensorloop"; packed rows; a rollout and a beam search, whose
    log-probabilities are those of teacher forcing of the tokens that they found. Of a model with an encoder, the last
    two.

    Args:
        model: a model of transformers, of yours or with your weights. It is not changed.
        input_ids: (B, P) int64, a few short rows of tokens that it knows.
        attention_mask: (B, P), 0 where there is padding, on the left; of an encoder on the right. None: there is none.
        max_new_tokens: int, default 4: how many tokens rollouts and searches find.
        dtype: of the copy that is tried; None tries the model as it is, in its own.
        tolerance: float, default 1e-4: the most that may differ, relative to the largest. Norms, rotary angles and
            routers are float32 in many models.

    Returns:
        An `AttentionReport`, which prints as a table. What is refused by name is no difference.

    Cost: a copy of the model, and some twenty passes with their gradients.

    Raises:
        TypeError: no model of transformers.
        ValueError: rows that are none, a prompt that PEFT learns.
        RuntimeError: the model itself fails for them, or gives NaN, as "eager" attention in float64 does of padding.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> bool(tl.hf.check_attention(model, torch.tensor([[3, 4, 5], [6, 7, 8]])))
        True
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise WrongType(f"model must be a model of transformers, got {arguments.describe(model)}")
    if Learned.find(model) is not None:
        raise WrongValue("model has a prompt that PEFT learns, which its forward puts before each call; give its base")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise WrongType(f"dtype must be a torch.dtype of floats, got {arguments.describe(dtype)}")
    steps = arguments.at_least(1, max_new_tokens, "max_new_tokens")
    mask = read_prompt(input_ids, attention_mask).mask
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
    tried: Any = model if dtype is None else copy.deepcopy(model).to(dtype)
    own = tried.config._attn_implementation
    with _evaluated(tried), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of bytes, which are not asked for
        plain = _first_of(tried, ("eager", own))
        oracle = _Oracle(tried, input_ids, mask)
        oracle.check(plain)
        oracle.check_padded(own, plain)
        said = [_ask(oracle, plain, tolerance, *way) for way in _ways(oracle, own, steps)]
    text = tried.config.get_text_config(decoder=True)
    known = certificate.is_served(text)
    return AttentionReport(type(model).__name__, f"{plain!r} attention, one pass, no cache", tuple(said), known)


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """In evaluation mode, and then as it was."""
    was = [(x, x.training) for x in model.modules()]
    own = model.config._attn_implementation
    try:
        model.eval()
        yield
    finally:
        model.set_attn_implementation(own)
        for x, training in was:
            x.training = training


def _first_of(model: Any, names: tuple[str, ...]) -> str:
    for name in names:
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError):
            continue
        return name
    return model.config._attn_implementation


_Run = Callable[[], tuple[Tensor, Callable[[], Tensor]]]  # what a way gives, and what the model itself gives for that


def _ways(oracle: _Oracle, own: str, steps: int) -> list[tuple[str, str, _Run]]:
    """(its name, the attention that it runs with, what runs it)."""
    found: list[tuple[str, str, _Run]] = []
    if not oracle.pairs:
        found += [
            ("one pass, tensorloop", ATTENTION, partial(_padded, oracle)),
            ("packed rows", own, partial(_packed, oracle)),
        ]
    for name in dict.fromkeys((own, ATTENTION)):
        found += [] if oracle.pairs else [(f"TrainCache, {name}", name, partial(_cached, oracle))]
        found += [
            (f"rollout, {name}", name, partial(_rollout, oracle, steps)),
            (f"beam search, {name}", name, partial(_search, oracle, steps)),
        ]
    return found


def _padded(oracle: _Oracle) -> tuple[Tensor, Callable[[], Tensor]]:
    options = _numbered(oracle, 0, oracle.ids.shape[1])
    return oracle.model(input_ids=oracle.ids, use_cache=False, **options).logits[oracle.mask], oracle.all_logits


def _cached(oracle: _Oracle) -> tuple[Tensor, Callable[[], Tensor]]:
    takes, length = signature_of(oracle.model), oracle.ids.shape[1]
    if takes.cache is None:
        raise WrongValue("model takes no cache of keys")
    cache = TrainCache(oracle.model.config)
    chunks = [(0, length // 2), *((i, i + 1) for i in range(length // 2, length))]
    out = []
    for start, stop in chunks:
        if stop > start:
            given: dict[str, Any] = {str(takes.cache): cache, "use_cache": True, **_numbered(oracle, start, stop)}
            out.append(oracle.model(input_ids=oracle.ids[:, start:stop], **given).logits)
    return torch.cat(out, 1)[oracle.mask], oracle.all_logits


def _numbered(oracle: _Oracle, start: int, stop: int) -> dict[str, Any]:
    """The mask of tokens so far and their positions, as far as the model is told them."""
    options: dict[str, Any] = {"attention_mask": oracle.mask[:, :stop].long()}
    padded, takes = not bool(oracle.mask.all()), signature_of(oracle.model).positions
    if padded and not takes and has_table(oracle.model):
        raise WrongValue("model takes no position_ids, so that padding would be counted as positions")
    if padded and takes:
        positions = (oracle.mask.long().cumsum(1) - 1).clamp(min=0)[:, start:stop]
        numbering = find_numbering(oracle.model)
        ids = oracle.ids[:, start:stop]
        options["position_ids"] = positions if numbering is None else numbering.number(ids, positions)
    return options


def _packed(oracle: _Oracle) -> tuple[Tensor, Callable[[], Tensor]]:
    return packed_forward(oracle.model, PackedTensor.from_list(oracle.rows)).values, oracle.all_logits


def _rollout(oracle: _Oracle, steps: int) -> tuple[Tensor, Callable[[], Tensor]]:
    said = rollout(oracle.model, oracle.ids, oracle.mask, max_new_tokens=steps, eos_token_id=[])
    return said.log_probs.values, partial(oracle.forced, oracle.rows, said.tokens)


def _search(oracle: _Oracle, steps: int) -> tuple[Tensor, Callable[[], Tensor]]:
    hyps = beam_search(oracle.model, oracle.ids, oracle.mask, beam_size=_BEAM, max_steps=steps, eos_token_id=[])
    rows = [row for row in oracle.rows for _ in range(_BEAM)]
    return hyps.token_scores.values, partial(oracle.forced, rows, hyps.tokens)


def _ask(oracle: _Oracle, plain: str, tolerance: float, way: str, attention: str, run: _Run) -> Tried:
    model, nothing = oracle.model, float("nan")
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        return Tried(way, "refused", nothing, str(error).split("\n")[0])
    try:
        ours, theirs = run()
        mine = _gradients(model, ours)
    except Exception as error:
        kind = "refused" if isinstance(error, Fact) or str(error).startswith(_OURS) else "fails"
        return Tried(way, kind, nothing, f"{type(error).__name__}: {error}".split("\n")[0])
    model.set_attn_implementation(plain)
    wanted = theirs()
    others = _gradients(model, wanted)
    values, grads = _off([ours.detach()], [wanted.detach()]), _off(mine, others)
    same = values <= tolerance and grads <= tolerance
    return Tried(way, "same" if same else "differs", max(values, grads), "" if same else _said(values, grads))


def _said(values: float, grads: float) -> str:
    return f"values are off by {values:.1e}, gradients by {grads:.1e}"


def _gradients(model: Any, x: Tensor) -> list[Tensor]:
    """Differentiates by all weights a sum that tells all numbers apart; none where nothing is trained."""
    weights = [p for p in model.parameters() if p.requires_grad]
    if not weights or not x.requires_grad:
        return []
    factors = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).view_as(x)
    return list(torch.autograd.grad((x.sin() * factors).sum(), weights, allow_unused=True, materialize_grads=True))


def _off(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    if len(found) != len(wanted) or any(x.shape != y.shape for x, y in zip(found, wanted, strict=True)):
        raise WrongValue("model gives other shapes, or gradients in one way alone")
    finite = (y.masked_fill(y.isinf(), 0) for y in wanted if y.numel())  # tokens that a model rules out are -inf
    scale = max((float(y.abs().max()) for y in finite), default=1.0) or 1.0
    pairs = zip(found, wanted, strict=True)
    worst = [float((x - y).masked_fill(x == y, 0).abs().max()) / scale for x, y in pairs if y.numel()]
    return max((float("inf") if x != x else x for x in worst), default=0.0)
