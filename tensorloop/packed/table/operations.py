"""Every torch function that packed tensors take, a row each: what it is, what runs it in each form, what survives it.

A packed tensor has several forms. `rows`: (B, T*, *F) itself. `views`: its dims in another order, heads or time first;
of those (B, C, T*) also has `channels` and (B, C, T*, F) `images`, for layers that mix time. `scores`: (B, H, T*, S*).
`static`: rows whose shape does not depend on lens. `sizes`: ordinary tensors, and a ragged size among the arguments.

A form runs a function by the handler that its row names, `file.function`, where `@handles` stands. Where the row names
none, the kind says how: what treats entries alike runs on the values, what has a dim runs with that dim translated.
What neither says is refused: by the reason in the row, or by the general one of its form. Lists of functions that
other files need are read from here (`named`), so that a new function is one row.
"""

from collections.abc import Iterator
from typing import NamedTuple

FORMS = ROWS, VIEWS, CHANNELS, IMAGES, SCORES, STATIC, SIZES = (
    *("rows", "views", "channels", "images", "scores", "static", "sizes"),
)

# Kinds
BY_ENTRY = "by entry"  # it treats entries alike; torch's tag `pointwise` says so of most, which need no row
ALONG = "along"  # it works along the dims that its argument `dim` names, and is right along any of them
LAST = "last"  # it works on the last features of each entry
WHOLE = "whole"  # it does not ask which dim is which: losses of pairs, facts, new tensors, copies
CLASSES = "classes"  # it has classes behind batch and ragged dim, or in dim 1 of (B, V, T*)
LAYER = "layer"  # it mixes the steps of each row, channels first
SHAPE = "shape"  # it moves, adds, drops or regroups dims
PRODUCT = "product"  # it sums over a dim that two tensors share
OTHER = "other"  # it is like no other
UNTAKEN = "untaken"  # packed tensors do not take it; entries of rows, tables made by T, or refusals know it

# What a row says besides, by a word.
SAYS = {
    "drops": "the dim that it works along is gone afterwards, or of size 1",
    "keeps": "its result has the shape of its input",
    "view": "torch gives a view; ours may be a copy, and what is changed in it in place is written to its source",
    "beside": "it takes ordinary tensors beside packed ones, which are broadcast",
    "of numbers": "it needs no feature dim",
    "pads": "it has no packed kernel for a ragged dim or for a matrix of each row: it pads, and warns",
    "all dims": "of scores, it is right along queries and keys too",
    "row by row": "of scores, torch's own for each row is faster along keys than one for all segments",
    # of the entries of rows, (N, *F)
    "batch": "entry i of the result is made of entry i of its first argument, whatever the sizes behind",
    "sizes": "it keeps entries in order where it keeps the number of dims",
    "exchanges": "it exchanges two dims",
    "cuts": "it cuts or joins: there and back, all entries are in their place again",
    "regroups": "sizes (B, -1, *F) may be asked of it",
    "asks sizes": "of its second argument it takes the sizes alone, or the dtype",
    "turns": "in place, it changes sizes or all numbers",
    "moves": "it may move entries although its dim is a feature",
    # of tables made by T
    "begins": "nothing comes from another place along time: the result's beginning is that of a shorter row",
    "fact": "it says nothing of sizes",
    "chooses": "its gradient goes to entries that it chooses",
    "by number": "somebody may have read the longest row's number from a shape",
    "as it is": "it gives the same numbers elsewhere",
}


class Lacks(NamedTuple):
    """Why a form has no function, and what to write instead."""

    why: str
    cure: str


_NO_SHAPE = Lacks("the shape of its result depends on the lens", "p.trim()")
_NO_INDEX = Lacks(_NO_SHAPE.why, "use p.pad()[b], a mask in torch.where, or p.trim() outside of graphs")
_NOT_WRITTEN = Lacks("entries are not written by index", "use torch.where and a mask, or p.pad()")
_BY_SUMS = Lacks("it is not there", "write it with p.mean(1) and p.square()")
_NO_PLACES = Lacks("its indices are not there", "use amax and amin, or of two tensors maximum")
_NO_ORDER = Lacks("its numbers come in the order of (B, T*, *F)", "transpose it back")
_BY_SORT = Lacks("it sorts along dim 0", "use x.sort(dim).values")
_OF_STEPS = Lacks("it takes (B, T*)", "transpose it back")
_OF_DIM_1 = Lacks("its channels would be dim 1", "transpose it back, or give it (B, C, T*)")
_NO_LAYOUT = Lacks("its layout has no ragged dim", "use q.attend(k, v)")


class Row(NamedTuple):
    """One torch function."""

    name: str
    kind: str
    runs: dict[str, str | Lacks]
    """form -> its handler, `file.function`, or why there is none."""
    says: frozenset[str]
    called: str
    """What errors call it: a name that people know."""


TABLE: dict[str, Row] = {}


def _row(kind: str, names: str, rows: str = "", says: str = "", called: str = "", **runs: str | Lacks) -> None:
    """Enters functions that differ in their names alone; `says` has words of SAYS with commas between."""
    words = frozenset(filter(None, says.split(", ")))
    assert words <= SAYS.keys(), words
    for name in names.split():
        assert name not in TABLE, name
        TABLE[name] = Row(name, kind, ({ROWS: rows} if rows else {}) | runs, words, called or name)


# Functions whose work is a number for each entry, and that torch does not tag: aliases, casts, and compositions (tried
# with torch 2.13; leaky_relu with 2.11).
_row(BY_ENTRY, "absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip divide fix floor_divide greater")
_row(BY_ENTRY, "greater_equal hardswish imag isclose leaky_relu less less_equal logsigmoid log_sigmoid multiply")
_row(BY_ENTRY, "negative not_equal real softsign subtract tanhshrink true_divide zeros_like ones_like full_like")
_row(BY_ENTRY, "empty_like rand_like randn_like randint_like clone detach float double half bfloat16 int long short")
_row(BY_ENTRY, "char byte bool cfloat cdouble dropout alpha_dropout bernoulli positive conj resolve_conj isreal type")
_row(BY_ENTRY, "expit gammaln psi complex polar ndtr gammainc gammaincc normal uniform exponential log_normal cauchy")
_row(BY_ENTRY, "geometric poisson neg")
# Operators, without their underscores.
_row(BY_ENTRY, "radd rsub rmul rdiv truediv rtruediv floordiv rfloordiv mod rmod rpow and or xor ror rxor pos invert")
_row(BY_ENTRY, "lshift rshift rlshift rrshift")
_row(BY_ENTRY, "rand", sizes="by_size.fill")  # also the operator __rand__
_row(BY_ENTRY, "contiguous", says="begins", views="reordered.contiguous")
_row(BY_ENTRY, "one_hot", says="batch", sizes="by_size.of_rows")

# -- along a dim that goes

_ROWS, _SUMS = {SCORES: "score_ops.along"}, {STATIC: "static_reduce.sum_or_mean"}
_row(ALONG, "sum", "reduce.sum", "drops", **_ROWS, **_SUMS)
_row(ALONG, "nansum", "reduce.sum", "drops", **_ROWS)
_row(ALONG, "mean", "reduce.mean", "drops", **_ROWS, **_SUMS)
_row(ALONG, "nanmean", "reduce.mean", "drops", **_ROWS)
_row(ALONG, "amax amin", "reduce.amax", "drops, chooses", static="static_reduce.amax", **_ROWS)
_row(ALONG, "max min", "reduce.max", "drops, chooses", static=_NO_PLACES, **_ROWS)
_row(ALONG, "argmax argmin", "reduce.argmax", "drops", static="static_reduce.along_features", **_ROWS)
_row(ALONG, "logsumexp", "reduce.logsumexp", "drops", static="static_reduce.logsumexp", **_ROWS)
_row(ALONG, "std var", "reduce.std", "drops", static=_BY_SUMS, **_ROWS)
_row(ALONG, "std_mean var_mean", "reduce.std", "drops", **_ROWS)
_row(ALONG, "any all", "reduce.any", "drops", static="static_reduce.any", **_ROWS)
_row(ALONG, "count_nonzero", "reduce.count_nonzero", "drops", **_ROWS)
_row(ALONG, "prod", "reduce.prod", "drops, pads", **_ROWS)
_row(ALONG, "norm", "norms.norm", "drops", static=_BY_SUMS, **_ROWS)
_row(ALONG, "vector_norm linalg_vector_norm", "norms.norm", "drops", "norm", **_ROWS)
_row(ALONG, "linalg_norm", "norms.linalg_norm", "drops", "norm")
_row(ALONG, "linalg_matrix_norm", "norms.matrix_norm", "drops", "norm")
_row(ALONG, "cosine_similarity", "norms.cosine_similarity", "drops, beside")
_row(ALONG, "median nanmedian", "sort.median", "drops, chooses", **_ROWS)
_row(ALONG, "kthvalue", "sort.kthvalue", "drops, chooses", **_ROWS)
_row(ALONG, "topk", "sort.topk", "drops, chooses", **_ROWS)
_row(ALONG, "quantile nanquantile", "sort.quantile", "drops, moves", **_ROWS)
_row(ALONG, "unbind", "pieces.unbind", "view, cuts", scores="score_ops.of_heads", static="static_layers.chunk")
_row(ALONG, "select", "pieces.select", "view, cuts", scores="score_ops.of_heads")

# -- along a dim that stays

_row(ALONG, "softmax", "reduce.softmax", "keeps, row by row", static="static_reduce.softmax", **_ROWS)
_row(ALONG, "log_softmax", "reduce.log_softmax", "keeps, row by row", static="static_reduce.softmax", **_ROWS)
_row(ALONG, "special_softmax", "reduce.softmax", "keeps", "softmax", **_ROWS)
_row(ALONG, "special_log_softmax", "reduce.log_softmax", "keeps", "log_softmax", **_ROWS)
_row(ALONG, "softmin", "reduce.softmin", "keeps", "softmax", **_ROWS)
_row(ALONG, "gumbel_softmax", "features.gumbel_softmax", "keeps")
_row(ALONG, "cumsum", "reduce.cumsum", "keeps, begins", static="static_reduce.cumsum", **_ROWS)
_row(ALONG, "cumprod cummax cummin logcumsumexp", "reduce.running", "keeps, pads", **_ROWS)
_row(ALONG, "normalize", "norms.normalize", "keeps", **_ROWS)
_row(ALONG, "sort argsort", "sort.sort", "keeps", **_ROWS)
_row(ALONG, "flip", "reduce.flip", "keeps, all dims, moves", scores="score_ops.of_heads", static="static_reduce.flip")
_row(ALONG, "roll", "pieces.roll", "keeps, all dims", scores="score_ops.of_heads")
_row(ALONG, "diff", "pieces.diff", "beside")
_row(ALONG, "glu", "pieces.glu", static="static_reduce.along_features")
_row(ALONG, "unfold", "spectrum.unfold", "view, moves")

# -- parts along a dim, and what is joined

_HEADS, _PARTS = {SCORES: "score_ops.of_heads"}, {STATIC: "static_layers.chunk"}
_JOINED = {SCORES: "score_ops.cat", STATIC: "static_layers.cat"}
_row(ALONG, "chunk", "pieces.chunk", "view, cuts", **_HEADS, **_PARTS)
_row(ALONG, "split", "pieces.split", "view, cuts", **_HEADS, **_PARTS)
_row(ALONG, "split_with_sizes", "pieces.split", "view, cuts", "split", **_HEADS)
_row(ALONG, "tensor_split", "pieces.tensor_split", "view, cuts", **_HEADS)
_row(ALONG, "narrow", "pieces.narrow", "view, cuts", sizes="by_size.of_rows", **_HEADS)
_row(ALONG, "index_select", "pieces.index_select", "cuts", **_HEADS)
_row(ALONG, "repeat_interleave", "joins.repeat_interleave", "begins, moves", **_HEADS)
_row(ALONG, "cat concat", "joins.cat", "beside, cuts, begins", "cat", **_JOINED)
_row(ALONG, "concatenate", "joins.cat", "beside, cuts", "cat", **_JOINED)
_row(ALONG, "gather", "pieces.gather", "beside")
_row(ALONG, "take_along_dim", "pieces.take_along_dim", "beside")
_row(OTHER, "masked_select", "pieces.masked_select", views=_NO_ORDER, static=_NO_SHAPE)
_row(OTHER, "msort", "sort.msort", views=_BY_SORT)

# -- features of each entry

_row(LAST, "linear", "features.linear", "batch", static="static_layers.linear")
_row(LAST, "layer_norm rms_norm", "features.norm", "batch", static="static_layers.norm")
_row(LAST, "embedding", "features.embedding", "batch, begins, of numbers", static="static_layers.embedding")
_row(LAST, "cdist", "features.cdist", "batch")
_row(OTHER, "prelu", "features.prelu", "batch", channels="statistics.prelu", views=_OF_DIM_1)

# -- losses

_PAIRS = {STATIC: "static_layers.loss"}
_row(WHOLE, "mse_loss l1_loss smooth_l1_loss huber_loss", "losses.loss", "batch", **_PAIRS)
_row(WHOLE, "binary_cross_entropy binary_cross_entropy_with_logits kl_div", "losses.loss", "batch", **_PAIRS)
_row(WHOLE, "poisson_nll_loss", "losses.loss", "batch", **_PAIRS)
_row(WHOLE, "soft_margin_loss", "losses.loss")
_row(CLASSES, "cross_entropy nll_loss", "losses.classes", "batch", static="static_layers.classes")
_row(OTHER, "ctc_loss", "losses.ctc_loss", views="reordered.ctc_loss")

# -- layers that mix time, channels first

_row(LAYER, "conv1d", channels="convolution.conv1d")
_row(LAYER, "conv_transpose1d", channels="convolution.conv_transpose1d")
_row(LAYER, "conv2d", images="images.conv2d")
_row(LAYER, "max_pool1d max_pool1d_with_indices", channels="pooling.max_pool1d")
_row(LAYER, "max_pool2d max_pool2d_with_indices", images="images.max_pool2d")
_row(LAYER, "avg_pool1d", channels="pooling.avg_pool1d")
_row(LAYER, "adaptive_avg_pool1d adaptive_max_pool1d", channels="pooling.adaptive_pool1d")
_row(LAYER, "adaptive_max_pool1d_with_indices", channels="pooling.adaptive_pool1d")
_row(LAYER, "interpolate", channels="resampling.interpolate")
_row(LAYER, "batch_norm", says="batch", channels="statistics.batch_norm", images="statistics.batch_norm")
_row(LAYER, "group_norm", says="batch", channels="statistics.group_norm")
_row(LAYER, "instance_norm", channels="statistics.instance_norm")
_row(LAYER, "dropout1d feature_dropout", channels="statistics.dropout1d")
_row(OTHER, "pad", "pieces.pad", channels="padding.pad", views="parts.pad", scores="score_ops.pad")
_row(OTHER, "stft", "spectrum.stft", views=_OF_STEPS)
_row(OTHER, "lstm gru rnn_tanh rnn_relu", "rnn.recurrent", views="rnn.recurrent_time_first")
_row(OTHER, "_pack_padded_sequence", "rnn.pack", called="pack_padded_sequence", views="rnn.pack_time_first")
_row(OTHER, "scaled_dot_product_attention", "reordered.attend", views="reordered.attend", static=_NO_LAYOUT)
_row(OTHER, "multi_head_attention_forward", "reordered.attend_in_heads", views="reordered.attend_in_heads")
_row(OTHER, "_nested_tensor_from_mask_left_aligned", "reordered.is_left_aligned")

# -- shapes


def _shape(names: str, handler: str, says: str, scores: str, static: str = "", called: str = "", **runs: str) -> None:
    """Enters functions of shapes, for which packed tensors and views of them have the same handler."""
    runs |= {VIEWS: handler, SCORES: f"score_ops.{scores}"}
    runs |= {STATIC: f"static_layers.{static}"} if static else {}
    _row(SHAPE, names, handler, says, called, **runs)


_shape("transpose", "shape.transpose", "view, exchanges, begins", "transpose", "transpose")
_shape("swapaxes swapdims", "shape.transpose", "view, exchanges", "transpose", called="transpose")
_shape("permute", "shape.permute", "view, begins", "permute")
_shape("movedim", "shape.movedim", "view, moves, begins", "move")
_shape("moveaxis", "shape.movedim", "view, moves", "move")
_shape("unsqueeze", "shape.unsqueeze", "view, begins", "unsqueeze", "unsqueeze")
_shape("squeeze", "shape.squeeze", "view, cuts, begins", "squeeze", "squeeze")
_shape("expand", "shape.expand", "view, sizes, begins, by number", "expand", sizes="by_size.expand")
_shape("expand_as", "shape.expand_as", "view, sizes, asks sizes", "expand_as")
_shape("repeat tile", "shape.repeat", "sizes", "repeat", sizes="by_size.repeat")
_shape("stack", "shape.stack", "cuts, begins", "stack", "cat")
_shape("reshape view", "regroup.reshape", "view, regroups, by number", "reshape", sizes="by_size.view")
_shape("reshape_as view_as", "regroup.view_as", "view, regroups, asks sizes", "view_as")
_shape("flatten", "regroup.flatten", "view, cuts", "flatten_dims", "flatten")
_shape("unflatten", "regroup.unflatten", "view, regroups", "unflatten", "unflatten", sizes="by_size.unflatten")
_row(SHAPE, "view_as_complex view_as_real", "regroup.pair", "view, batch", views="regroup.pair")
_TABLE_AT = {VIEWS: "parts.index_table", SCORES: "score_ops.index", STATIC: _NO_INDEX}
_row(OTHER, "__getitem__", "parts.index_table", "view, cuts", **_TABLE_AT)
_row(OTHER, "__setitem__", scores="score_parts.write", static=_NOT_WRITTEN)
_row(SHAPE, "diagonal", says="view", scores="score_parts.diagonal")
_row(OTHER, "tril triu", says="begins", scores="score_parts.keep_triangle")
_row(OTHER, "tril_ triu_", scores="score_parts.keep_triangle")

# -- products

_BETWEEN = {VIEWS: "between.matmul", SCORES: "between.matmul"}
_row(PRODUCT, "matmul __matmul__", "features.matmul", "pads", "matmul", static="static_layers.matmul", **_BETWEEN)
_row(PRODUCT, "__rmatmul__", "features.matmul", "", "matmul", **_BETWEEN)
_row(PRODUCT, "mm")
_row(PRODUCT, "bmm", "between.bmm", views="between.bmm", scores="between.bmm")
_row(OTHER, "baddbmm", "between.baddbmm", views="between.baddbmm", scores="between.baddbmm")
_row(OTHER, "einsum", "between.einsum", views="between.einsum", scores="between.einsum")

# -- facts, copies, new tensors

_FACTS = {SCORES: "score_ops.of_values", VIEWS: "reordered.of_values"}
_row(WHOLE, "is_floating_point is_complex", "attributes.of_values", "fact", **_FACTS)
_row(WHOLE, "is_contiguous", "attributes.of_values", "fact", **_FACTS)
_row(WHOLE, "is_signed is_inference element_size get_device nelement numel item", "attributes.of_values", **_FACTS)
_MADE = {SIZES: "by_size.fill"}
_row(WHOLE, "new_zeros new_ones new_empty new_full", "attributes.of_values", "batch", **_FACTS, **_MADE)
_row(WHOLE, "new_tensor", "attributes.of_values", **_FACTS)
_row(WHOLE, "equal allclose", "attributes.equal", scores="score_ops.equal")
_row(WHOLE, "fill_ zero_", "attributes.fill")
_row(WHOLE, "copy_", "attributes.copy", "sizes, fact")
_MOVED = {VIEWS: "reordered.to", SCORES: "score_ops.to", STATIC: "static_layers.to"}
_row(OTHER, "to", "features.to", "sizes, as it is", **_MOVED)
_row(OTHER, "type_as", "features.to", "sizes, as it is, asks sizes", **_MOVED)
_row(OTHER, "grad", "attributes.grad", views="attributes.grad", scores="attributes.grad")

# -- made by sizes

_row(UNTAKEN, "zeros ones empty randn full randint", sizes="by_size.fill")
_row(UNTAKEN, "arange", sizes="by_size.count")
_row(UNTAKEN, "eye", sizes="by_size.of_rows")
_row(UNTAKEN, "broadcast_to", says="sizes, by number", sizes="by_size.expand")

# -- what entries of rows or tables made by T are given, or what is refused for a reason

_row(UNTAKEN, "bilinear gaussian_nll_loss multinomial native_batch_norm native_layer_norm", says="batch")
_row(UNTAKEN, "cpu cuda", says="sizes, as it is")
_row(UNTAKEN, "t", says="exchanges")
_row(UNTAKEN, "transpose_ swapaxes_", says="exchanges, turns")
_row(UNTAKEN, "t_ swapdims_ squeeze_ unsqueeze_", says="turns")
_row(UNTAKEN, "set resize_ set_ copy", says="turns")
_row(UNTAKEN, "vstack hstack column_stack", says="cuts")
_row(UNTAKEN, "aminmax mode", says="chooses")
_row(UNTAKEN, "dim data_ptr untyped_storage storage_offset requires_grad_ __hash__ backward", says="fact")
_row(UNTAKEN, "register_hook retain_grad", says="fact")
_row(UNTAKEN, "nonzero unique tolist __iter__", static=_NO_SHAPE)


def named(*says: str) -> frozenset[str]:
    """The functions whose row says one of these words."""
    return frozenset(name for name, row in TABLE.items() if row.says & {*says})


def of_kind(*kinds: str) -> frozenset[str]:
    """The functions of these kinds."""
    return frozenset(name for name, row in TABLE.items() if row.kind in kinds)


def handlers_wanted() -> Iterator[tuple[str, str, str]]:
    """(handler, form, function), each time that the table names a handler."""
    for name, row in TABLE.items():
        for form, handler in row.runs.items():
            if isinstance(handler, str):
                yield handler, form, name
