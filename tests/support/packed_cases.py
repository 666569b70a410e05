"""One call or more of every function in the tables of packed tensors, each of which keeps rows apart.

A case gets packed (B, T*, 4) of a floating dtype, and gives what has rows: packed tensors, tensors (B, ...), or tuples
of these. What it needs besides is made of the dtype it is given, and the same in each call.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.packed import PackedTensor, pairs, rnnt_loss
from tests.support.attention_cases import block_mask

Case = Callable[[Any], Any]
FEATURES = 4
ctc_loss: Any = F.ctc_loss  # its stub takes no None, and no lists


def fixed(p: Any, *shape: int, shift: float = 0.0) -> Tensor:
    """Numbers in [-1, 1], the same in every call."""
    n = torch.Size(shape).numel()
    return torch.arange(n, dtype=torch.float64).add(shift).mul(1.7).sin().view(shape).to(p.dtype)


def tokens(p: Any, classes: int = FEATURES) -> PackedTensor:
    """(B, T*) int64 classes that follow the numbers of p: another class where one is poisoned."""
    found = torch.where(p.values[:, 0].detach() > 0, 1, classes - 1)
    return p._with(found)


def second(p: Any) -> PackedTensor:
    """A packed tensor that depends on p."""
    return p._with(p.values.roll(1, -1) * 0.5 + 0.25)


def wide(p: Any) -> Any:
    """Of a dtype that has complex numbers."""
    return p.float() if p.dtype is torch.bfloat16 else p


def recurrent(kind: Any, **settings: Any) -> Case:
    def run(p: Any) -> Any:
        torch.manual_seed(0)
        out, state = kind(FEATURES, 3, batch_first=True, dtype=p.dtype, **settings)(p)
        states = state if isinstance(state, tuple) else (state,)
        return out, *(h.transpose(0, 1) for h in states)

    return run


def _multihead(p: Any) -> Any:
    torch.manual_seed(0)
    return nn.MultiheadAttention(FEATURES, 2, batch_first=True, dtype=p.dtype)(p, second(p), p)[0]


def along(name: str, *dims: Any, **more: Any) -> list[Case]:
    """torch's function of this name over each of these dims."""
    return [lambda p, d=d: getattr(torch, name)(p, dim=d, **more) for d in dims]


def loss(name: str, **more: Any) -> list[Case]:
    return [lambda p: getattr(F, name)(p, second(p), reduction="none", **more)]


def weighed(p: Any) -> Any:
    x = p._with(fixed(p, *p.values.shape).sigmoid())
    return F.binary_cross_entropy(x, x, p.detach(), reduction="none")


def filled(p: Any) -> Any:
    return p[p.lens > 0]


def heads(p: Any) -> Any:
    return p.unflatten(-1, (2, 2))


def ctc(p: Any, lengths: Any = None) -> Tensor:
    targets = PackedTensor(torch.ones(len(p.lens), dtype=torch.int64), [1] * len(p.lens))
    return ctc_loss(p.log_softmax(-1), targets, lengths, None, reduction="none")


def transducer(p: Any) -> Tensor:
    text = PackedTensor(fixed(p, 2 * len(p.lens), FEATURES), [2] * len(p.lens))
    x, y = pairs(p, text)
    targets = PackedTensor(torch.ones(len(p.lens), dtype=torch.int64), [1] * len(p.lens))
    return rnnt_loss((x + y).log_softmax(-1), targets, reduction="none")


PACKED: dict[str, list[Case]] = {
    # reductions
    **{name: along(name, 1, 2, (1, 2)) for name in ("sum", "nansum", "mean", "nanmean", "logsumexp")},
    **{
        name: [lambda p, n=name: getattr(p, n)(1, initial=0.5), lambda p, n=name: getattr(p, n)(2)]
        for name in ("amax", "amin")
    },
    **{
        name: [lambda p, n=name: getattr(filled(p), n)(1), lambda p, n=name: getattr(p, n)(-1)]
        for name in ("max", "min")
    },
    **{
        name: [lambda p, n=name: getattr(filled(p), n)(1), lambda p, n=name: getattr(p, n)(-1)]
        for name in ("argmax", "argmin")
    },
    **{
        name: [*along(name, 1, 2, (1, 2)), *along(name, 1, correction=0)]
        for name in ("std", "var", "std_mean", "var_mean")
    },
    **{name: along(name, 1, 2) for name in ("any", "all", "count_nonzero")},
    **{
        name: along(name, 1, 2)
        for name in ("softmax", "log_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "prod")
    },
    "special_softmax": [lambda p: torch.special.softmax(p, 1)],
    "special_log_softmax": [lambda p: torch.special.log_softmax(p, 1)],
    "softmin": [lambda p: F.softmin(p, 1)],
    "flip": [lambda p: p.flip(1), lambda p: p.flip(1, 2)],
    # norms
    "norm": [lambda p, n=n: torch.norm(p, n, 1) for n in (0, 1, 2, 3, torch.inf)] + [lambda p: p.norm(2, -1)],
    "vector_norm": [lambda p: torch.linalg.vector_norm(p, 2, (1, 2)), lambda p: torch.linalg.vector_norm(p, 3, 2)],
    "linalg_vector_norm": [lambda p: torch.linalg.vector_norm(p, 1, 1)],
    "linalg_norm": [lambda p: torch.linalg.norm(p, dim=1)],
    "linalg_matrix_norm": [lambda p: torch.linalg.matrix_norm(heads(p))],
    "normalize": [lambda p: F.normalize(p, dim=1), lambda p: F.normalize(p, dim=-1)],
    "cosine_similarity": [
        lambda p: F.cosine_similarity(p, second(p), 1),
        lambda p: F.cosine_similarity(p, second(p), 2),
    ],
    # order
    "sort": [lambda p: p.sort(1), lambda p: p.sort(1, descending=True), lambda p: p.sort(-1)],
    "argsort": [lambda p: p.argsort(1), lambda p: p.argsort(-1)],
    "topk": [lambda p: filled(p).topk(1, 1), lambda p: p.topk(2, -1)],
    "kthvalue": [lambda p: filled(p).kthvalue(1, 1), lambda p: p.kthvalue(2, -1)],
    **{
        name: [lambda p, n=name: getattr(filled(p), n)(1), lambda p, n=name: getattr(p, n)(-1)]
        for name in ("median", "nanmedian")
    },
    **{
        name: [lambda p, n=name: getattr(filled(p), n)(0.3, 1), lambda p, n=name: getattr(p, n)(0.3, -1)]
        for name in ("quantile", "nanquantile")
    },
    # layers
    "linear": [lambda p: F.linear(p, fixed(p, 3, FEATURES), fixed(p, 3))],
    "embedding": [lambda p: F.embedding(tokens(p), fixed(p, FEATURES, 3))],
    "layer_norm": [lambda p: F.layer_norm(p, (FEATURES,), fixed(p, FEATURES))],
    "rms_norm": [lambda p: F.rms_norm(p, (FEATURES,), fixed(p, FEATURES))],
    "prelu": [lambda p: F.prelu(p, fixed(p, 1))],
    "view_as_complex": [lambda p: torch.view_as_real(torch.view_as_complex(wide(p).unflatten(-1, (2, 2))).square())],
    "view_as_real": [lambda p: torch.view_as_real(torch.complex(wide(p), wide(second(p))))],
    "gumbel_softmax": [lambda p: F.gumbel_softmax(p), lambda p: F.gumbel_softmax(p, hard=True, dim=-1)],
    "matmul": [
        lambda p: p @ fixed(p, FEATURES, 3),
        lambda p: torch.matmul(heads(p), heads(second(p))),
        lambda p: p @ fixed(p, len(p.lens), FEATURES, 3),
    ],
    "__matmul__": [lambda p: p @ fixed(p, FEATURES)],
    "bmm": [lambda p: torch.bmm(torch.bmm(p, second(p).transpose(1, 2)).sigmoid(), p)],
    "baddbmm": [lambda p: torch.baddbmm(p, torch.bmm(p, p.transpose(1, 2)).sigmoid(), second(p), beta=0.5)],
    "einsum": [
        lambda p: torch.einsum("btf,fg->btg", p, fixed(p, FEATURES, 3)),
        lambda p: torch.einsum("bts,bsf->btf", torch.einsum("btf,bsf->bts", p, second(p)).softmax(-1), p),
    ],
    "scaled_dot_product_attention": [lambda p: F.scaled_dot_product_attention(p, second(p), p, is_causal=True)],
    "multi_head_attention_forward": [_multihead],
    "__rmatmul__": [lambda p: fixed(p, 2, 2) @ heads(p)],
    "glu": [lambda p: F.glu(p, -1)],
    "lstm": [recurrent(nn.LSTM, bidirectional=True), recurrent(nn.LSTM, num_layers=2)],
    "gru": [recurrent(nn.GRU, bidirectional=True)],
    "rnn_tanh": [recurrent(nn.RNN)],
    "rnn_relu": [recurrent(nn.RNN, nonlinearity="relu")],
    # losses
    **{
        name: loss(name)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss")
    },
    "soft_margin_loss": [lambda p: F.soft_margin_loss(p, second(p).detach(), reduction="none")],
    "binary_cross_entropy": [weighed],  # torch refuses input and target outside of 0 to 1, and NaN is
    "binary_cross_entropy_with_logits": loss("binary_cross_entropy_with_logits"),
    "cross_entropy": [
        lambda p: F.cross_entropy(p, tokens(p), reduction="none"),
        lambda p: F.cross_entropy(p, second(p).softmax(-1), reduction="none"),
    ],
    "nll_loss": [lambda p: F.nll_loss(p, tokens(p), reduction="none")],
    "ctc_loss": [
        ctc,
        lambda p: ctc(p, (p.lens - 1).clamp(min=0)),
        lambda p: ctc_loss(
            p.log_softmax(-1).transpose(0, 1),
            torch.ones(len(p.lens), 1).long(),
            p.lens,
            [1] * len(p.lens),
            reduction="none",
        ),
    ],
    # shapes
    "unsqueeze": [lambda p: p.unsqueeze(-1)],
    "squeeze": [lambda p: p.unsqueeze(-1).squeeze(-1)],
    "transpose": [lambda p: heads(p).transpose(2, 3)],
    "swapaxes": [lambda p: heads(p).swapaxes(2, 3)],
    "swapdims": [lambda p: heads(p).swapdims(2, 3)],
    "permute": [lambda p: heads(p).permute(0, 1, 3, 2)],
    "movedim": [lambda p: heads(p).movedim(2, 3)],
    "moveaxis": [lambda p: heads(p).moveaxis(2, 3)],
    "flatten": [lambda p: heads(p).flatten(2)],
    "unflatten": [heads],
    "view": [lambda p: p.view(len(p.lens), -1, 2, 2)],
    "reshape": [lambda p: p.reshape(len(p.lens), -1, 2, 2)],
    "view_as": [lambda p: p.view_as(second(p))],
    "reshape_as": [lambda p: p.reshape_as(second(p))],
    "expand": [lambda p: p.unsqueeze(-1).expand(-1, -1, -1, 3)],
    "expand_as": [lambda p: p[..., :1].expand_as(p)],
    "repeat": [lambda p: p.repeat(1, 1, 2)],
    "tile": [lambda p: p.tile(1, 1, 2)],
    "cat": [
        lambda p: torch.cat([p, second(p)], 1),
        lambda p: torch.cat([p, second(p)], -1),
        lambda p: torch.cat([fixed(p, p.shape[0], 2, FEATURES), p], 1),
    ],
    "concat": [lambda p: torch.concat([p, second(p)], 1), lambda p: torch.concat([p, second(p)], -1)],
    "concatenate": [lambda p: torch.concatenate([p, second(p)], 1)],
    "stack": [lambda p: torch.stack([p, second(p)], 2)],
    "repeat_interleave": [
        lambda p: p.repeat_interleave(2, -1),
        lambda p: p.repeat_interleave(2, 0)[::2],
        lambda p: p.repeat_interleave(2, 1),
        lambda p: p.repeat_interleave(p._with(p._dim._positions % 3), 1),
    ],
    # pieces, and what moves
    "chunk": [lambda p: p.chunk(2, 1), lambda p: p.chunk(2, -1)],
    "tensor_split": [lambda p: p.tensor_split(2, 1), lambda p: p.tensor_split(2, -1)],
    "split": [lambda p: p.split(2, 1), lambda p: p.split(2, -1), lambda p: torch.cat(p.split(2, 0), 0)],
    "split_with_sizes": [lambda p: p.split_with_sizes([1, 3], -1)],
    "unbind": [lambda p: p.unbind(-1), lambda p: PackedTensor.from_list(p.unbind())],
    "select": [lambda p: p.select(-1, 0), lambda p: filled(p).select(1, 0)],
    "narrow": [lambda p: p.narrow(1, 0, 1), lambda p: p.narrow(-1, 1, 2)],
    "index_select": [
        lambda p: p.index_select(-1, torch.tensor([1, 0, 1])),
        lambda p: filled(p).index_select(1, torch.tensor([0, 0])),
    ],
    "gather": [lambda p: p.gather(1, p.argsort(1)), lambda p: p.gather(-1, p.argsort(-1))],
    "take_along_dim": [
        lambda p: torch.take_along_dim(p, p.argsort(1), 1),
        lambda p: torch.take_along_dim(p, p.argsort(-1), -1),
    ],
    "roll": [lambda p: p.roll(1, 1), lambda p: p.roll(1, -1)],
    "diff": [
        lambda p: p.diff(dim=1),
        lambda p: p.diff(dim=1, prepend=fixed(p, len(p.lens), 1, FEATURES)),
        lambda p: p.diff(),
    ],
    "pad": [
        lambda p: F.pad(p, (0, 0, 1, 2)),
        lambda p: F.pad(p, (0, 0, 1, 2), value=0.5),
        lambda p: F.pad(p, (1, 1)),
        lambda p: F.pad(p, (0, 0, 1, 1), "replicate"),
        lambda p: F.pad(p, (0, 0, -1, 1)),
    ],
    "unfold": [lambda p: p.unfold(1, 2, 1), lambda p: p.unfold(-1, 2, 2)],
    "stft": [
        lambda p: torch.stft(p[..., 0], 2, 1, window=fixed(p, 2), pad_mode="constant", return_complex=True),
        lambda p: torch.stft(p[..., 0], 2, 1, center=False, return_complex=True).abs(),
    ],
    # the rest
    "to": [lambda p: p.to(torch.float64)],
    "type_as": [lambda p: p.type_as(torch.zeros((), dtype=torch.float64))],
    "copy_": [lambda p: torch.zeros_like(p).copy_(p)],
    "fill_": [lambda p: p.detach().clone().fill_(1.5)],
    "zero_": [lambda p: p.detach().clone().zero_()],
    "__getitem__": [lambda p: fixed(p, FEATURES, 3)[tokens(p)]],
}

# What has no row of its own in its result, and why.
NO_ROWS: dict[str, str] = {
    **dict.fromkeys(("equal", "allclose", "_nested_tensor_from_mask_left_aligned"), "one bool of all rows"),
    "item": "of one number alone",
    "__setitem__": "in place, and gives nothing; tests of its own",
    "_pack_padded_sequence": "its result is in the order of time, and no packed tensor; a test of its own",
    "msort": "refused: it sorts along the batch dim",
    "masked_select": "the numbers of all rows in one tensor; a test of its own",
    **dict.fromkeys(
        ("element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "is_signed"),
        "a fact of the whole, without numbers",
    ),
    **dict.fromkeys(("nelement", "numel"), "a fact of the whole, without numbers"),
    "grad": "a tuple of gradients; a test of its own",
    "cdist": "not of bfloat16; a test of its own",
    **dict.fromkeys(
        ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"), "an ordinary tensor without rows"
    ),
}

# Of (B, C, T*), which they get transposed.
CHANNELS_FIRST: dict[str, list[Case]] = {
    "conv1d": [
        lambda x: F.conv1d(x, fixed(x, 3, FEATURES, 3), fixed(x, 3), padding=1),
        lambda x: F.conv1d(x, fixed(x, 3, FEATURES, 2), stride=2),
        lambda x: F.conv1d(x, fixed(x, FEATURES, 1, 3), padding="same", groups=FEATURES),
    ],
    "conv_transpose1d": [lambda x: F.conv_transpose1d(x, fixed(x, FEATURES, 3, 3), stride=2, padding=1)],
    "max_pool1d": [lambda x: F.max_pool1d(x, 2), lambda x: F.max_pool1d(x, 3, 2, 1, ceil_mode=True)],
    "max_pool1d_with_indices": [lambda x: F.max_pool1d(x, 2, 1, return_indices=True)],
    "avg_pool1d": [
        lambda x: F.avg_pool1d(x, 2),
        lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    ],
    "adaptive_avg_pool1d": [lambda x: F.adaptive_avg_pool1d(x, 2)],
    "adaptive_max_pool1d": [lambda x: F.adaptive_max_pool1d(x[x.lens > 0], 2)],
    "group_norm": [lambda x: F.group_norm(x, 2, fixed(x, FEATURES), fixed(x, FEATURES))],
    "instance_norm": [lambda x: F.instance_norm(x, weight=fixed(x, FEATURES))],
    "interpolate": [
        lambda x: F.interpolate(x, scale_factor=1.5),
        lambda x: F.interpolate(x, size=3, mode="linear"),
        lambda x: F.interpolate(x, scale_factor=0.7, mode="linear", align_corners=True),
    ],
    "pad": [lambda x: F.pad(x, (1, 2)), lambda x: F.pad(x, (1, 1), "circular")],
    "prelu": [lambda x: F.prelu(x, fixed(x, FEATURES))],
    "dropout1d": [lambda x: F.dropout1d(x, 0.5)],
    "feature_dropout": [lambda x: torch.feature_dropout(x, 0.5, True)],
}
CHANNELS_WITHOUT_ROWS: dict[str, str] = {
    "batch_norm": "its statistics are those of all rows",
    "adaptive_max_pool1d_with_indices": "refused",
}


def layer(p: Any, kind: Any, *sizes: Any) -> Any:
    """A layer of torch's, batch first, the same in every call."""
    torch.manual_seed(0)
    return kind(*sizes, batch_first=True, dtype=p.dtype)


def attend(**options: Any) -> Case:
    """Attention; options that are functions give what they are of the case's tensor."""

    def run(p: Any) -> Any:
        q = heads(p)
        given: dict[str, Any] = {
            name: x(p) if callable(x) and name != "score_mod" else x for name, x in options.items()
        }
        return tl.attention(q, q * 0.5, q + 1, **given)

    return run


# What else takes packed tensors, in the library's own functions.
OWN: dict[str, Case] = {
    "attention": attend(),
    "attention causal": attend(causal=True),
    "attention window": attend(causal=True, window=2),
    "attention chunk": attend(chunk=2, left_chunks=1),
    "attention softcap": attend(softcap=3.0),
    "attention score_mod": attend(score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j)),
    "attention relative": attend(relative=lambda p: (heads(p), fixed(p, 5, 2, 2))),
    "attention bias": attend(bias=lambda p: fixed(p, 1, 2, p.max_len, p.max_len)),
    "attention dropout": attend(dropout=0.5),
    "attention block_mask": attend(
        block_mask=lambda p: block_mask(lambda b, h, i, j: i - j < 3, None, None, p.max_len, p.max_len)
    ),
    "attention block_mask of rows": attend(
        block_mask=lambda p: block_mask(lambda b, h, i, j: j >= b, len(p.lens), 2, p.max_len + 2, p.max_len + 2)
    ),
    "attention to other rows": lambda p: tl.attention(heads(p), heads(p[:, 1:]), heads(second(p)[:, 1:])),
    "attention of shared heads": lambda p: tl.attention(heads(p), heads(p)[:, :, :1], heads(p)[:, :, 1:], causal=True),
    "MultiheadAttention": lambda p: layer(p, nn.MultiheadAttention, FEATURES, 2)(p, p, p, need_weights=False)[0],
    "TransformerEncoderLayer": lambda p: layer(p, nn.TransformerEncoderLayer, FEATURES, 2, 8, 0.0)(p),
    "a table up to T": lambda p: p + fixed(p, 1, p.max_len + 2, FEATURES)[:, : p.shape[1]],
    "expand to (B, T)": lambda p: p * fixed(p, len(p.lens), 1, FEATURES).expand(p.shape[0], p.shape[1], FEATURES),
    "view(B * T) and back": lambda p: p.view(p.shape[0] * p.shape[1], 2, 2).sin().view(p.shape[0], p.shape[1], -1),
    "pairs": lambda p: pairs(p, second(p)),
    "rnnt_loss": transducer,
    "p[:, a:b]": lambda p: p[:, 1:3],
    "p[rows]": lambda p: p[torch.arange(len(p.lens) - 1, -1, -1)][torch.arange(len(p.lens) - 1, -1, -1)],
    "p + (B, 1, F)": lambda p: p - p.sum(1, keepdim=True),
    "p + (T, F)": lambda p: p + fixed(p, p.max_len, FEATURES),
    "pad and pack": lambda p: tl.pack_padded(p.pad() * 2, p.lens),
    "nested": lambda p: PackedTensor.from_nested(p.to_nested()),
    "packed sequence": lambda p: PackedTensor.from_packed_sequence(filled(p).to_packed_sequence()),
    "scan": lambda p: tl.scan(lambda h, x: ((h * 0.5 + x).tanh(), h * x), fixed(p, len(p.lens), FEATURES), p),
    "scan with checkpoints": lambda p: tl.scan(
        lambda h, x: ((h * 0.5 + x).tanh(), h * x), fixed(p, len(p.lens), FEATURES), p, checkpoints=2
    ),
}

# Of static shape, where the cases above use what is not there: no rows by a mask, no slices of features.
STATIC_INSTEAD: dict[str, list[Case]] = {
    "argmax": [lambda p: p.argmax(-1)],
    "argmin": [lambda p: p.argmin(-1)],
    "matmul": [lambda p: p @ fixed(p, FEATURES, 3)],
    "chunk": [lambda p: p.chunk(2, -1)],
    "concatenate": [lambda p: torch.concatenate([p, second(p)], -1)],
    "split": [lambda p: p.split(2, -1)],
    "unbind": [lambda p: p.unbind(-1)],
}
STATIC_OWN: dict[str, Case] = {
    "attend": lambda p: heads(p).attend(heads(p), heads(p)),
    "attend causal": lambda p: heads(p).attend(heads(p), heads(p), causal=True),
    "pad and pack": lambda p: p.pack(p.pad() * 2),
    "pad": lambda p: p.pad(),
    "amax": lambda p: p.amax(1),
}

# Pointwise functions that need more than one to three tensors of numbers.
POINTWISE: dict[str, Case] = {
    "alpha_dropout": lambda p: F.alpha_dropout(p, 0.5, True),
    "bernoulli": lambda p: torch.bernoulli(p.nan_to_num(0.5, 0.5, 0.5).sigmoid()),
    "dropout": lambda p: F.dropout(p, 0.5, True),
    "full_like": lambda p: torch.full_like(p, 0.5),
    "masked_fill": lambda p: p.masked_fill(p > 0, 0.5),
    "mvlgamma": lambda p: torch.mvlgamma(p.nan_to_num(3, 3, 3).abs() + 3, 1),
    "normal": lambda p: torch.normal(p, 1.0),
    "one_hot": lambda p: F.one_hot(tokens(p), FEATURES),
    "polygamma": lambda p: torch.polygamma(1, p),
    "randint_like": lambda p: torch.randint_like(p, 5),
    "special_polygamma": lambda p: torch.special.polygamma(1, p),
    "threshold": lambda p: F.threshold(p, 0.1, 0.5),
    "type": lambda p: p.type(torch.float64),
    "where": lambda p: torch.where(p > 0, p, second(p)),
}
POINTWISE_ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor"),
            *("gcd", "lcm"),
        ),
        "of integers, which are never NaN",
    ),
    "empty_like": "its numbers are anything",
    "poisson": "how many numbers it draws for an entry depends on that entry",
    "imag": "of complex numbers",
    "rand": "an operator's name, no function of a tensor",
}
