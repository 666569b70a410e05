"""Attention over packed tensors, padded ones and loop buffers, trained on any device in bytes of O(N).

This file is the surface: it checks arguments and brings every kind to (B, T, heads, D), or (1, N, heads, D) with
offsets. The work is done in `engine.py`, or on a GPU by torch's own kernels where they can (`gpu.py`).
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, overload

from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.keywords import hints
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.attention import arrays, engine, gpu
from tensorloop.attention.checks import PARTS, Facts, autocast, check_parts, number
from tensorloop.attention.reading import read_numbers, read_tensors
from tensorloop.attention.trees import TokenTree
from tensorloop.kernels.sight import Sight
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.autograd import check_gradient
from tensorloop.packed.table.base import Packed, check_same_rows, is_packed
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import length_of

P = TypeVar("P", bound=Packed)
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""What `score_mod=` of `tl.attention` takes: a function of a score and its place, as in torch's FlexAttention.

`score_mod(score, b, h, q, k)` gets 0-d tensors: the score, and its row b, head h, query q and key k, and returns the
score to use. It runs under `torch.func.vmap`, so it must not branch on them. In annotations:
`from tensorloop.attention import ScoreMod`.
"""

# What scaled_dot_product_attention and MultiheadAttention call it.
_KEYWORDS = hints(
    (
        "attn_mask mask",
        "block_mask= takes a BlockMask, bias= numbers to add to scores; padding needs none: pack the rows",
    ),
    ("key_padding_mask", "pack the rows: what is padding is then not there; starts= hides slots of arrays"),
    ("dropout_p", "here that is dropout="),
    ("enable_gqa", "leave it out: heads of k and v are always shared where they are fewer"),
    ("need_weights", "weights are never made, so there are none to return"),
    ("window_size", "here that is window=, with causal=True for the past alone"),
    ("s_aux", "here that is sinks="),
)
_MOST_HEADS = 128  # more than that is rather a number of tokens


class AttentionOptions(TypedDict, total=False):
    """The keyword options of `attention`: all its arguments but q, k, v and `starts`."""

    causal: bool
    block_mask: Any
    scale: float | None
    window: int | None
    chunk: int | None
    left_chunks: int | None
    softcap: float | None
    bias: Tensor | None
    relative: tuple[Any, Tensor] | None
    score_mod: ScoreMod | None
    dropout: float
    sinks: Tensor | None


@overload
def attention(q: P, k: Packed, v: Packed, **options: Unpack[AttentionOptions]) -> P: ...
@overload
def attention(
    q: Tensor,
    k: Tensor | TensorArray,
    v: Tensor | TensorArray,
    *,
    starts: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@called_eagerly
@named("attention", _KEYWORDS)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    block_mask: Any = None,
    scale: float | None = None,
    starts: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    left_chunks: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    relative: tuple[Any, Tensor] | None = None,
    score_mod: ScoreMod | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Any:
    """Softmax attention: each query's mean of the values, weighted by softmax(scale * q . k) over the keys it sees.

        out = tl.attention(q, k, v, causal=True)      # three PackedTensors, or three padded tensors (B, T, heads, D)
        out = tl.attention(q, k, v, block_mask=mask)  # a BlockMask of flex_attention: blocks left out are not read
        out = tl.attention(q, keys, values)           # in a loop: one step's q (B, heads, D) over two TensorArrays

    The layout is (B, T, heads, D), as projections give it. That of scaled_dot_product_attention, (B, heads, T, D),
    needs `transpose(1, 2)`; a UserWarning says so where sizes and strides look like it (docs/attention.md has the
    rule). `heads` is a multiple of `heads_kv`, and query head h shares key head h // (heads / heads_kv).

    Args:
        q: queries of a real floating dtype, packed (B, T*, heads, D) or padded (B, T, heads, D); every token of a
            padded tensor counts. With TensorArrays: (*batch, heads, D) for one token, or (*batch, t, heads, D) for the
            last t tokens, whose keys and values are appended already.
        k: keys of the dtype of `q` (autocast casts all three). Packed (B, S*, heads_kv, D), where row b of `q` sees row
            b of `k`; padded (B, S, heads_kv, D); or a TensorArray with slots (*batch, heads_kv, D), all of which are
            seen.
        v: values, one for each key, of the kind of `k`: (..., heads_kv, Dv).
        causal: bool, default False. The query at position t sees the keys at positions 0 to t of its row, also where T
            and S differ. Of t tokens against arrays, each sees the slots up to its own.
        block_mask: a BlockMask of torch's flex_attention, or None. Positions are those within the row. A mask that was
            made for one batch entry or one head serves all of them. Put causal and windowed parts into the mask; arrays
            take none.
        scale: a number that q . k is multiplied by; None is `D ** -0.5`.
        starts: integers that broadcast to the batch, for TensorArrays alone: slots before `starts[b]` are hidden, as
            left padding is. None hides none.
        window: int, at least 1, or None for no limit: a query sees no key more than `window` - 1 positions (slots)
            before its own. Later keys stay in sight unless `causal`.
        chunk: int, at least 1, or None. Positions come in chunks of this size; a query sees its own chunk and all
            before it. Not for arrays.
        left_chunks: int, at least 0, with `chunk`: how many chunks before its own a query sees; None is all.
        softcap: c > 0 makes each score c * tanh(score / c); None leaves scores as they are.
        bias: floats that are added to the scores and broadcast to (B, heads, T, S) of the longest rows; against arrays
            to (*batch, heads, n) or (*batch, heads, t, n). None adds nothing.
        relative: a pair (p, r), p like `q` and r (2c + 1, heads or 1, D): p_i . r[c + i - j], scaled as q . k is, is
            added to the score of query i and key j; distances above c count as c (Shaw et al. 2018; Dai et al. 2019
            with q + u and p = q + v). Not for arrays.
        score_mod: `score_mod(score, b, h, i, j)` gives the new score; all are 0-d tensors, i and j positions within the
            row, as for flex_attention. It is run by vmap. Not for arrays.
        dropout: float from 0 to below 1, default 0: the share of the weights that are dropped, by a hash of their
            places and one number of torch's generator, so that backward drops the same; the others are divided by 1 -
            dropout. Give 0 in evaluation.
        sinks: floats (heads,), or None: a logit that every query of a head sees beside its keys, in the denominator of
            the softmax alone, so that the weights of a query sum to less than 1. Nothing is done to it.

    Returns:
        What `q` is, with Dv in place of D: packed (B, T*, heads, Dv), padded (B, T, heads, Dv), or (*batch, heads, Dv).
        A query that sees no key gets 0 and passes no gradient.

    Scores are changed in this order: `relative`, `softcap`, `bias`, `score_mod`.

    Gradient: to q, k, v, bias, relative, sinks and what score_mod closes over and gives to torch functions, twice,
    and (slower, in one piece) under `torch.func`.
    Cost: time of the pairs that meet; of a window or chunks, those in reach. Kept for backward: q, k, v, the output and
    a number for each query and head, and the tensors of the scores as they came; an array is kept as a view. Second
    derivatives and transforms make all weights.

    Raises:
        TypeError: kinds or dtypes that do not go together; a `block_mask` that is none.
        ValueError: shapes, heads or lens that do not fit; a mask that does not fit or comes with `causal`, `window` or
            `chunk`; options that arrays do not take; numbers out of range.

    Source: Vaswani et al. 2017; sinks: Agarwal et al. 2025 (gpt-oss); for how it stays within O(N), `engine.py`.

    Example:
        >>> p = tl.PackedTensor(torch.randn(5, 2, 8), [3, 2])  # two rows (T*, heads, D)
        >>> tl.attention(p, p, p, causal=True).values.shape
        torch.Size([5, 2, 8])
    """
    scale = None if scale is None else number(scale, "scale", "; scale q by a tensor")
    if _is_step(q, k, v):
        _refuse_for_arrays(block_mask, (chunk, left_chunks, relative, score_mod))
        arguments.dense_tensor(q, "q")
        given = engine.default_scale(q.shape[-1] if q.dim() else 0) if scale is None else scale
        sight = read_numbers(given, causal, window, softcap, dropout, first=starts, bias=bias, sinks=sinks)
        out = arrays.attend(q, k, v, sight)
        if out is not NotImplemented:
            return out
        causal, window, softcap, dropout, bias, sinks = False, None, None, 0.0, None, None
    elif starts is not None:
        raise WrongValue("starts= is for TensorArrays k and v; elsewhere rows of a PackedTensor need none")
    inputs = _read(q, k, v)
    inputs = inputs._replace(q=autocast(inputs.q), k=autocast(inputs.k), v=autocast(inputs.v))
    check_parts([Facts(x.shape, x.dtype, x.device) for x in (inputs.q, inputs.k, inputs.v)])
    scale = engine.default_scale(inputs.q.shape[-1]) if scale is None else scale
    more: Any = {"chunk": chunk, "left_chunks": left_chunks, "blocks": block_mask, "ends": False}
    sight = read_numbers(scale, causal, window, softcap, dropout, **more)
    if block_mask is not None:
        _check_mask(block_mask, inputs, sight)
    elif inputs.rows is None and not inputs.arrays and _has_heads_first(inputs.q, inputs.k, inputs.v):
        warnings.warn(
            f"attention: q {tuple(q.shape)} is taken as {q.shape[1]} tokens of {q.shape[2]} heads, (B, T, heads, D). "
            "It looks like scaled_dot_product_attention's (B, heads, T, D): if so, transpose(1, 2) q, k, v and the "
            "result",
            stacklevel=3,
        )
    sight = read_tensors(sight, q, inputs.q, inputs.longest, bias, relative, score_mod, sinks)
    return inputs.give(_attend(inputs, sight))


def attend_trees(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    trees: Sequence[TokenTree],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of N tokens (1, N, heads, D) that are trees, one after another; options as of `attention`.

    Gradient: to q, k, v and the sinks, twice. Cost: time of the pairs that meet, and of those between short branches of
    a tree; kept: q, k, v, the output and a number for each query and head.
    """
    q, k, v = (autocast(x) for x in (q, k, v))
    check_parts([Facts(x.shape, x.dtype, x.device) for x in (q, k, v)])
    if (total := sum(x.size for x in trees)) != q.shape[1]:
        raise WrongValue(f"trees have {total} tokens, q has {q.shape[1]}")
    scale = engine.default_scale(q.shape[-1]) if scale is None else scale
    sight = read_numbers(scale, True, window, softcap, dropout, trees=trees, ends=False)
    return engine.attend(q, k, v, read_tensors(sight, q, q, (total, total), None, None, None, sinks))


def _attend(inputs: "_Inputs", sight: Sight) -> Tensor:
    """By a kernel for a GPU, if there is one, or by the engine."""
    parts = inputs.q, inputs.k, inputs.v
    out = gpu.attend(*parts, sight, inputs.rows) if parts[0].is_cuda else None
    if out is not None:
        return out
    if inputs.rows is not None:
        of_q, of_k = inputs.rows
        offsets = of_q._host_offsets.tolist()
        same = of_q.same(of_k)
        sight = sight._replace(offsets=(offsets, offsets if same else of_k._host_offsets.tolist()))
    return engine.attend(*parts, sight)


def _refuse_for_arrays(block_mask: Any, others: tuple[Any, ...]) -> None:
    if block_mask is not None:
        raise WrongValue("block_mask with TensorArrays: starts=, window= and causal= say what is seen of their slots")
    if any(x is not None for x in others):
        raise WrongValue(
            "chunk=, left_chunks=, relative= and score_mod= with TensorArrays: starts= and window= say what is seen of "
            "their slots, and bias= is added to scores"
        )


class _Inputs(NamedTuple):
    """Holds q, k and v as tensors (B, T, heads, D), or (1, N, heads, D) where packed, and how to return the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    like: Any  # what the output is to look like: q as it came
    rows: tuple[Dim, Dim] | None = None  # of packed q and k
    arrays: bool = False

    @property
    def longest(self) -> tuple[int, int]:
        """The numbers of queries and of keys of the longest rows."""
        return (self.q.shape[1], self.k.shape[1]) if self.rows is None else (self.rows[0].max_len, self.rows[1].max_len)

    def give(self, out: Tensor) -> Any:
        """The output as its kind."""
        if self.rows is not None:
            return self.like._with(out[0])
        return out.reshape(*self.like.shape[:-1], out.shape[-1]) if self.arrays else out


def _is_step(q: Any, k: Any, v: Any) -> bool:
    return isinstance(k, TensorArray) and isinstance(v, TensorArray) and not isinstance(q, TensorArray | Packed)


def _read(q: Any, k: Any, v: Any) -> _Inputs:
    packed = [is_packed(x) for x in (q, k, v)]
    arrays = [isinstance(x, TensorArray) for x in (q, k, v)]
    if all(packed):
        check_gradient(q, k, v)
        return _read_packed(q, k, v)
    if arrays == [False, True, True] and not packed[0]:
        return _read_step(q, k, v)
    if any(packed) or any(arrays):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v))
        raise WrongType(
            f"q, k and v must be packed all three, tensors all three, or a tensor and two TensorArrays; got {kinds}"
        )
    for x, part in zip((q, k, v), PARTS, strict=True):
        arguments.dense_tensor(x, part)
        if x.dim() != 4:
            raise WrongValue(f"{part} must be (B, T, heads, D), got {tuple(x.shape)}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise WrongValue(f"batch sizes of q, k and v differ: {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise WrongValue(f"k has {k.shape[1]} positions, v has {v.shape[1]}; each key needs a value")
    return _Inputs(q, k, v, q)


def _has_heads_first(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether dim 2 is rather that of tokens: far larger than dim 1, and larger than heads go, or outside in memory."""
    fewest, most, heads = min(q.shape[1], k.shape[1]), max(q.shape[1], k.shape[1]), min(q.shape[2], k.shape[2])
    if fewest < 2 or heads < 2 * most:  # a step of a decoder has one token and many heads
        return False
    return heads > _MOST_HEADS or all(x.stride(1) < x.stride(2) for x in (q, k, v))


def _read_packed(q: Packed, k: Packed, v: Packed) -> _Inputs:
    for x, part in zip((q, k, v), PARTS, strict=True):
        if x.values.dim() != 3:
            raise WrongValue(
                f"packed {part} must be (B, T*, heads, D), got elements of shape {tuple(x.values.shape[1:])}"
            )
    if len(q._dim) != len(k._dim):
        raise WrongValue(f"q has {len(q._dim)} rows, k has {len(k._dim)}; row b of q sees row b of k")
    check_same_rows(k, v, "k and v")
    return _Inputs(q.values[None], k.values[None], v.values[None], q, (q._dim, k._dim))


def _read_step(q: Any, k: TensorArray, v: TensorArray) -> _Inputs:
    arguments.dense_tensor(q, "q")
    if length_of(k) != length_of(v):
        raise WrongValue(f"k has {arguments.slots(length_of(k))}, v has {length_of(v)}; each key needs a value")
    keys, values = k.stack(), v.stack()
    for x, part, lead in ((q, "q", 0), (keys, "the elements of k", 1), (values, "the elements of v", 1)):
        if x.dim() - lead < 2 or x.shape[lead:-2] != q.shape[:-2]:
            raise WrongValue(
                f"{part} must be (*batch, heads, D) with the batch dims of q, got {tuple(x.shape[lead:])} "
                f"for q {tuple(q.shape)}"
            )
    count = q.shape[:-2].numel()
    keys, values = (x.reshape(len(x), count, *x.shape[-2:]).transpose(0, 1) for x in (keys, values))
    return _Inputs(q.reshape(count, 1, *q.shape[-2:]), keys, values, q, arrays=True)


def _check_mask(mask: Any, inputs: _Inputs, sight: Sight) -> None:
    if not all(hasattr(mask, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE")):
        raise WrongType(
            f"block_mask must be a BlockMask, as flex_attention's create_block_mask makes, "
            f"got {arguments.describe(mask)}"
        )
    if sight.causal:
        raise WrongValue("both causal=True and block_mask; put it in the mask, with and_masks(causal, ...)")
    if sight.near:
        raise WrongValue("both window= or chunk= and block_mask; put it in the mask, with and_masks")
    if mask.kv_num_blocks.device != inputs.q.device:
        raise WrongValue(f"block_mask is on {mask.kv_num_blocks.device}, q on {inputs.q.device}; move it with .to()")
    made_for, tables = tuple(mask.seq_lengths), tuple(mask.kv_num_blocks.shape[:2])
    if inputs.rows is None:
        needed = (inputs.q.shape[1], inputs.k.shape[1])
        fits, batch = made_for == needed, inputs.q.shape[0]
    else:
        needed = tuple(dim.max_len for dim in inputs.rows)
        fits, batch = all(n >= m for n, m in zip(made_for, needed, strict=True)), len(inputs.rows[0])
    if not fits:
        turned = inputs.rows is None and made_for == (inputs.q.shape[2], inputs.k.shape[2])
        hint = "; they are (B, T, heads, D): transpose(1, 2) what is (B, heads, T, D)" if turned else ""
        longest = "" if inputs.rows is None else " in their longest rows"
        raise WrongValue(
            f"block_mask is for {made_for[0]} queries and {made_for[1]} keys, but there are {needed[0]} and "
            f"{needed[1]}{longest}{hint}"
        )
    for got, what, there in zip(tables, ("batch entries", "heads"), (batch, inputs.q.shape[2]), strict=True):
        if got not in (1, there):
            raise WrongValue(f"block_mask is for {got} {what}, not for 1 or {there}")
