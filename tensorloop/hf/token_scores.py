"""Log-probabilities and entropies of tokens, a chunk of logits at a time: `token_logprobs`.

All logits (N, V) of a large vocabulary are more bytes than the rest of a model. A chunk of them is made, used and
dropped, and made again in backward, when the gradient of its rows is there (gradient checkpointing, one chunk a time).
The last chunk is the first that backward needs, and is kept.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tensorloop._common import arguments
from tensorloop._common.errors import Misuse, WrongIndex, WrongType, WrongValue, named
from tensorloop._torch.versions import Versions
from tensorloop.hf.distribution import Distribution


class _Options(TypedDict, total=False):
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    chunk_size: int


@overload
def token_logprobs(
    head: nn.Module, hidden: Tensor, tokens: Tensor, *, return_entropy: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def token_logprobs(
    head: nn.Module,
    hidden: Tensor,
    tokens: Tensor,
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@named("hf.token_logprobs")
def token_logprobs(
    head: nn.Module,
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    chunk_size: int = 512,
    return_entropy: bool = False,
) -> Any:
    """Gives the log-probability of each token after its hidden state, without the logits of all of them.

        log_probs = tl.hf.token_logprobs(model.lm_head, states[:, :-1], ids[:, 1:])  # (B, T - 1)
        log_probs, entropies = tl.hf.token_logprobs(head, states, tokens, return_entropy=True)

    It is `head(hidden).log_softmax(-1)`, gathered at `tokens`. For a model of transformers, whose logits may be scaled
    or capped behind its head, `hf.completion_logprobs` does all of it.

    Args:
        head: nn.Module that makes logits (n, V) of states (n, d), each row by itself: `model.lm_head`, with its bias
            and adapters.
        hidden: (*shape, d) floats, the states.
        tokens: (*shape) int64, from 0 to V - 1.
        temperature: float above 0, default 1: the logits are divided by it.
        top_k: int, then only so many of the likeliest tokens stay; None keeps all.
        top_p: float, and of those only the smallest set whose probability is at least this; None keeps all.
        min_p: float, and of those only tokens with at least this part of the likeliest one's probability; None keeps
            all. A token that is left out has a log-probability of -inf.
        chunk_size: int, default 512: so many rows of logits are made at a time.
        return_entropy: bool, default False: whether entropies, of the same distribution, are returned too.

    Returns:
        (*shape) in the dtype of the logits, float32 at least; with `return_entropy` a pair (log_probs, entropies).

    Softmax, sums and entropies are in float32 where logits are of a smaller dtype; the logits themselves, and the sum
    of the head's gradient over chunks, are in the dtype in which the head computes.

    Gradient: to `hidden` and to what the head has, any number of times.
    Cost: the head runs once on each row in forward, and once more in backward on all but the last chunk. Bytes: a
    few numbers for each of chunk_size * V logits, of one chunk at a time, and the states; those of the last chunk stay
    until backward.

    Raises:
        TypeError: a head that is no module, arguments of another type.
        ValueError: shapes or devices that do not go together, numbers out of range.
        IndexError: a token that is not in the vocabulary.
        RuntimeError: in backward, where weights of the head or `hidden` were changed since.

    Source: Chen et al. 2016 (1604.06174) for checkpoints; Wijmans et al. 2025 (2411.09009) for logits in chunks.

    Example:
        >>> head = torch.nn.Linear(8, 50)
        >>> hidden, tokens = torch.randn(2, 7, 8), torch.randint(50, (2, 7))
        >>> log_probs, entropies = tl.hf.token_logprobs(head, hidden, tokens, chunk_size=4, return_entropy=True)
        >>> log_probs.shape, entropies.shape
        (torch.Size([2, 7]), torch.Size([2, 7]))
    """
    scoring = Scoring(Distribution(temperature, top_k, top_p, min_p), chunk_size, return_entropy).checked()
    _check_given(head, hidden, tokens)
    flat = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1)
    found = scoring.run(head, *flat, lambda: [*head.parameters(), *head.buffers()])
    parts = tuple(x.reshape(tokens.shape) for x in found.unbind(1))
    return parts if return_entropy else parts[0]


def _check_given(head: Any, hidden: Any, tokens: Any) -> None:
    if not isinstance(head, nn.Module):
        raise WrongType(
            f"head must be an nn.Module that makes logits of states, got {arguments.describe(head)}; what a function "
            "closes over could change before backward without notice"
        )
    for x, name in ((hidden, "hidden"), (tokens, "tokens")):
        arguments.dense_tensor(x, name)
    if not hidden.is_floating_point():
        raise WrongType(f"hidden must be floats (..., d), got {hidden.dtype}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise WrongType(f"tokens must be int64, got {tokens.dtype}")
    if not hidden.dim() or hidden.shape[:-1] != tokens.shape:
        raise WrongValue(
            f"hidden must be (*shape, d) for tokens (*shape), got {tuple(hidden.shape)} for {tuple(tokens.shape)}"
        )
    if hidden.device != tokens.device:
        raise WrongValue(f"hidden is on {hidden.device}, tokens on {tokens.device}; move one with .to()")


class Scoring(NamedTuple):
    """Holds what is asked of the logits of each token, and how many rows of them are made at a time."""

    drawn: Distribution
    chunk_size: int
    entropy: bool
    name: str = "hf.token_logprobs"

    def checked(self) -> "Scoring":
        """Refuses what is no distribution and no chunk."""
        self.drawn.check()
        arguments.as_bool(self.entropy, "return_entropy")
        return self._replace(chunk_size=arguments.at_least(1, self.chunk_size, "chunk_size"))

    def run(
        self,
        head: Callable[[Tensor], Tensor],
        hidden: Tensor,
        tokens: Tensor,
        read: Callable[[], list[Tensor]] = list,
    ) -> Tensor:
        """(N, 1 or 2): log-probabilities and entropies of tokens (N,) after `hidden` (N, d).

        `read` lists the tensors that the head reads; a chunk is not made again from others.
        """
        tokens = tokens.to(torch.int64)
        ends = torch.stack(tokens.aminmax()).tolist() if len(tokens) else (0, -1)
        score = partial(self._score, head, ends)
        chunks = list(zip(hidden.split(self.chunk_size), tokens.split(self.chunk_size), strict=True))
        if not torch.is_grad_enabled() or len(chunks) == 1:
            return torch.cat([score(*chunk) for chunk in chunks])
        contexts = nullcontext(), _Unchanged(read, self.name)
        again: Any = partial(checkpoint, score, use_reentrant=False, context_fn=lambda: contexts)
        return torch.cat([*(again(*chunk) for chunk in chunks[:-1]), score(*chunks[-1])])

    def _score(self, head: Callable[[Tensor], Tensor], ends: Sequence[int], hidden: Tensor, tokens: Tensor) -> Tensor:
        """(n, 1 or 2) of one chunk; all tokens are from ends[0] to ends[1]."""
        logits = head(hidden)
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(hidden):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else arguments.describe(logits)
            raise WrongValue(f"head must make logits (n, V) of states {tuple(hidden.shape)}, got {got}")
        if ends[0] < 0 or ends[1] >= logits.shape[1]:  # -100 would be left out by cross_entropy, without a word
            raise WrongIndex(
                f"tokens has {ends[0] if ends[0] < 0 else ends[1]}, expected 0 to {logits.shape[1] - 1}; leave out "
                "what is padding"
            )
        scores = self.drawn.cut(self.drawn.scale(logits.to(torch.promote_types(logits.dtype, torch.float32))))
        if not self.entropy:
            return -cross_entropy(scores, tokens, reduction="none")[:, None]
        log_probs = scores.log_softmax(1)
        finite = log_probs.masked_fill(log_probs.detach() == -torch.inf, 0)  # 0 log 0 is 0
        return torch.stack([log_probs.gather(1, tokens[:, None])[:, 0], -(log_probs.exp() * finite).sum(1)], 1)


class _Unchanged:
    """A context in which a chunk runs again: raises where a tensor that the head reads is no longer what it was.

    torch sees that of what is saved for backward; that is not all, where some of it needs no gradient.
    """

    def __init__(self, read: Callable[[], list[Tensor]], name: str) -> None:
        self._read, self._name, self._tensors = read, name, read()
        self._versions = Versions(self._tensors)

    def __enter__(self) -> None:
        now = zip_longest(self._tensors, self._read())
        # Sharded weights are whole within a forward of their module alone, and others outside.
        exchanged = any(old is not new for old, new in now if not hasattr(old, "device_mesh"))
        if exchanged or self._versions.changed() is not None:
            raise Misuse(
                f"{self._name}: weights of the head were {'exchanged' if exchanged else 'changed in place'} before "
                "backward, which makes logits from them again; call backward first"
            )

    def __exit__(self, *_: object) -> None:
        pass
