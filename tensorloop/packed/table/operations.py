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

from tensorloop.packed.table.operators import ENTRY_OPERATORS
from tensorloop.packed.table.row import (
    ALONG,
    BY_ENTRY,
    CLASSES,
    LAST,
    LAYER,
    OTHER,
    PRODUCT,
    SCORES,
    SHAPE,
    SIZES,
    STATIC,
    TABLE,
    UNTAKEN,
    VIEWS,
    WHOLE,
    Lacks,
    row,
)
from tensorloop.packed.table.untaken import FEATURES, NO_SHAPE, VALUES, WHY

_NO_INDEX = Lacks(NO_SHAPE.why, "use p.pad()[b], a mask in torch.where, or p.trim() outside of graphs")
_NOT_WRITTEN = Lacks("entries are not written by index", "use torch.where and a mask, or p.pad()")
_BY_SUMS = Lacks("it is not there", "write it with p.mean(1) and p.square()")
_NO_PLACES = Lacks("its indices are not there", "use amax and amin, or of two tensors maximum")
_NO_ORDER = Lacks("its numbers come in the order of (B, T*, *F)", "transpose it back")
_BY_SORT = Lacks("it sorts along dim 0", "use x.sort(dim).values")
_OF_STEPS = Lacks("it takes (B, T*)", "transpose it back")
_OF_DIM_1 = Lacks("its channels would be dim 1", "transpose it back, or give it (B, C, T*)")
_OF_VECTORS = Lacks("of a matrix or of all numbers", "use torch.linalg.vector_norm, with a dim")
_OF_ONE = Lacks("of two scores", "write it with products and sums: (x * y).sum(-1)")
_OF_FEATURES = Lacks("it works on feature dims", "take the rows, x.unbind()")
_NO_LAYOUT = Lacks("its layout has no ragged dim", "use q.attend(k, v)")


# Functions whose work is a number for each entry, and that torch does not tag: aliases, casts, and compositions (tried
# with torch 2.13; leaky_relu with 2.11).
row(BY_ENTRY, "absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip divide fix floor_divide greater")
row(BY_ENTRY, "greater_equal hardswish imag isclose leaky_relu less less_equal logsigmoid log_sigmoid multiply")
row(BY_ENTRY, "negative not_equal real softsign subtract tanhshrink true_divide zeros_like ones_like full_like")
row(BY_ENTRY, "empty_like rand_like randn_like randint_like clone detach float double half bfloat16 int long short")
row(BY_ENTRY, "char byte bool cfloat cdouble dropout alpha_dropout bernoulli positive conj resolve_conj isreal type")
row(BY_ENTRY, "expit gammaln psi complex polar ndtr gammainc gammaincc normal uniform exponential log_normal cauchy")
row(BY_ENTRY, "geometric poisson")
row(BY_ENTRY, " ".join(sorted(ENTRY_OPERATORS - {"rand"})))  # torch.rand has a row of its own
row(BY_ENTRY, "rand", sizes="by_size.fill")  # also the operator __rand__
row(BY_ENTRY, "contiguous", says="begins", views="reordered.contiguous")
row(BY_ENTRY, "one_hot", says="batch", sizes="by_size.of_rows")

# -- along a dim that goes

_SUMS = {STATIC: "static_reduce.sum_or_mean"}
row(ALONG, "sum", "reduce.sum", "drops", **_SUMS)
row(ALONG, "nansum", "reduce.sum", "drops")
row(ALONG, "mean", "reduce.mean", "drops", **_SUMS)
row(ALONG, "nanmean", "reduce.mean", "drops")
row(ALONG, "amax amin", "reduce.amax", "drops, chooses", static="static_reduce.amax")
row(ALONG, "max min", "reduce.max", "drops, chooses", static=_NO_PLACES)
row(ALONG, "argmax argmin", "reduce.argmax", "drops", static="static_reduce.along_features")
row(ALONG, "logsumexp", "reduce.logsumexp", "drops", static="static_reduce.logsumexp")
row(ALONG, "std var", "reduce.std", "drops", static=_BY_SUMS)
row(ALONG, "std_mean var_mean", "reduce.std", "drops")
row(ALONG, "any all", "reduce.any", "drops", static="static_reduce.any")
row(ALONG, "count_nonzero", "reduce.count_nonzero", "drops")
row(ALONG, "prod", "reduce.prod", "drops, pads")
row(ALONG, "norm", "norms.norm", "drops", static=_BY_SUMS)
row(ALONG, "vector_norm linalg_vector_norm", "norms.norm", "drops", "norm")
row(ALONG, "linalg_norm", "norms.linalg_norm", "drops", "norm", scores=_OF_VECTORS)
row(ALONG, "linalg_matrix_norm", "norms.matrix_norm", "", "norm")
row(ALONG, "cosine_similarity", "norms.cosine_similarity", "drops, beside", scores=_OF_ONE)
row(ALONG, "median nanmedian", "sort.median", "drops, chooses")
row(ALONG, "kthvalue", "sort.kthvalue", "drops, chooses")
row(ALONG, "topk", "sort.topk", "chooses", scores="score_ops.along")
row(ALONG, "quantile nanquantile", "sort.quantile", "drops, moves")
row(ALONG, "unbind", "pieces.unbind", "view, cuts", scores="score_ops.of_heads", static="static_layers.chunk")
row(ALONG, "select", "pieces.select", "view, cuts", scores="score_ops.of_heads")

# -- along a dim that stays

row(ALONG, "softmax", "reduce.softmax", "keeps, row by row", static="static_reduce.softmax")
row(ALONG, "log_softmax", "reduce.log_softmax", "keeps, row by row", static="static_reduce.softmax")
row(ALONG, "special_softmax", "reduce.softmax", "keeps", "softmax")
row(ALONG, "special_log_softmax", "reduce.log_softmax", "keeps", "log_softmax")
row(ALONG, "softmin", "reduce.softmin", "keeps", "softmax")
row(ALONG, "gumbel_softmax", "features.gumbel_softmax", "keeps", scores=_OF_FEATURES)
row(ALONG, "cumsum", "reduce.cumsum", "keeps, begins", static="static_reduce.cumsum")
row(ALONG, "cumprod cummax cummin logcumsumexp", "reduce.running", "keeps, pads")
row(ALONG, "normalize", "norms.normalize", "keeps")
row(ALONG, "sort argsort", "sort.sort", "keeps")
row(
    ALONG,
    "flip",
    "reduce.flip",
    "keeps, all dims, moves, one by one",
    scores="score_ops.of_heads",
    static="static_reduce.flip",
)
row(ALONG, "roll", "pieces.roll", "keeps, all dims", scores="score_ops.of_heads")
row(ALONG, "diff", "pieces.diff", "beside")
row(ALONG, "glu", "pieces.glu", static="static_reduce.along_features")
row(ALONG, "unfold", "spectrum.unfold", "view, moves")

# -- parts along a dim, and what is joined

_HEADS, _PARTS = {SCORES: "score_ops.of_heads"}, {STATIC: "static_layers.chunk"}
_JOINED = {SCORES: "score_ops.cat", STATIC: "static_layers.cat"}
row(ALONG, "chunk", "pieces.chunk", "view, cuts", **_HEADS, **_PARTS)
row(ALONG, "split", "pieces.split", "view, cuts", **_HEADS, **_PARTS)
row(ALONG, "split_with_sizes", "pieces.split", "view, cuts", "split", **_HEADS)
row(ALONG, "tensor_split", "pieces.tensor_split", "view, cuts", **_HEADS)
row(ALONG, "narrow", "pieces.narrow", "view, cuts", sizes="by_size.of_rows", **_HEADS)
row(ALONG, "index_select", "pieces.index_select", "cuts", **_HEADS)
row(ALONG, "repeat_interleave", "joins.repeat_interleave", "begins, moves", **_HEADS)
row(ALONG, "cat concat", "joins.cat", "beside, cuts, begins", "cat", **_JOINED)
row(ALONG, "concatenate", "joins.cat", "beside, cuts", "cat", **_JOINED)
row(ALONG, "gather", "pieces.gather", "beside")
row(ALONG, "take_along_dim", "pieces.take_along_dim", "beside")
row(OTHER, "masked_select", "pieces.masked_select", views=_NO_ORDER, static=NO_SHAPE)
row(OTHER, "msort", "sort.msort", views=_BY_SORT)

# -- features of each entry

row(LAST, "linear", "features.linear", "batch", static="static_layers.linear")
row(LAST, "layer_norm rms_norm", "features.norm", "batch", static="features.norm")
row(LAST, "embedding", "features.embedding", "batch, begins, of numbers", static="static_layers.embedding")
row(LAST, "cdist", "features.cdist", "batch")
row(OTHER, "prelu", "features.prelu", "batch", channels="statistics.prelu", views=_OF_DIM_1)

# -- losses

_PAIRS = {STATIC: "static_layers.loss"}
row(WHOLE, "mse_loss l1_loss smooth_l1_loss huber_loss", "losses.loss", "batch", **_PAIRS)
row(WHOLE, "binary_cross_entropy binary_cross_entropy_with_logits kl_div", "losses.loss", "batch", **_PAIRS)
row(WHOLE, "poisson_nll_loss", "losses.loss", "batch", **_PAIRS)
row(WHOLE, "soft_margin_loss", "losses.loss")
row(CLASSES, "cross_entropy nll_loss", "losses.classes", "batch", static="static_layers.classes")
row(OTHER, "ctc_loss", "losses.ctc_loss", views="reordered.ctc_loss")

# -- layers that mix time, channels first

row(LAYER, "conv1d", channels="convolution.conv1d")
row(LAYER, "conv_transpose1d", channels="convolution.conv_transpose1d")
row(LAYER, "conv2d", images="images.conv2d")
row(LAYER, "max_pool1d max_pool1d_with_indices", channels="pooling.max_pool1d")
row(LAYER, "max_pool2d max_pool2d_with_indices", images="images.max_pool2d")
row(LAYER, "avg_pool1d", channels="pooling.avg_pool1d")
row(LAYER, "adaptive_avg_pool1d adaptive_max_pool1d", channels="pooling.adaptive_pool1d")
row(LAYER, "adaptive_max_pool1d_with_indices", channels="pooling.adaptive_pool1d")
row(LAYER, "interpolate", channels="resampling.interpolate")
row(LAYER, "batch_norm", says="batch", channels="statistics.batch_norm", images="statistics.batch_norm")
row(LAYER, "group_norm", says="batch", channels="statistics.group_norm")
row(LAYER, "instance_norm", channels="statistics.instance_norm")
row(LAYER, "dropout1d feature_dropout", channels="statistics.dropout1d")
row(OTHER, "pad", "pieces.pad", channels="padding.pad", views="parts.pad", scores="score_ops.pad")
row(OTHER, "stft", "spectrum.stft", views=_OF_STEPS)
row(OTHER, "lstm gru rnn_tanh rnn_relu", "rnn.recurrent", views="rnn.recurrent_time_first")
row(OTHER, "_pack_padded_sequence", "rnn.pack", called="pack_padded_sequence", views="rnn.pack_time_first")
row(OTHER, "scaled_dot_product_attention", "reordered.attend", views="reordered.attend", static=_NO_LAYOUT)
row(OTHER, "multi_head_attention_forward", "reordered.attend_in_heads", views="reordered.attend_in_heads")
row(OTHER, "_nested_tensor_from_mask_left_aligned", "reordered.is_left_aligned")

# -- shapes


def _shape(names: str, handler: str, says: str, scores: str, static: str = "", called: str = "", **runs: str) -> None:
    """Enters functions of shapes, for which packed tensors and views of them have the same handler."""
    runs |= {VIEWS: handler, SCORES: f"score_shapes.{scores}"}
    runs |= {STATIC: f"static_layers.{static}"} if static else {}
    row(SHAPE, names, handler, says, called, **runs)


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
row(SHAPE, "view_as_complex view_as_real", "regroup.pair", "view, batch", views="regroup.pair")
_TABLE_AT = {VIEWS: "parts.index_table", SCORES: "score_ops.index", STATIC: _NO_INDEX}
row(OTHER, "__getitem__", "parts.index_table", "view, cuts", "indexing", **_TABLE_AT)
_WRITE = {VIEWS: "reordered.write", SCORES: "score_parts.write", STATIC: _NOT_WRITTEN}
row(OTHER, "__setitem__", "writes.write", called="assignment to an index", **_WRITE)
row(SHAPE, "diagonal", Lacks(WHY, FEATURES), "view", scores="score_parts.diagonal")
row(OTHER, "tril triu", Lacks(WHY, VALUES), "begins", scores="score_parts.keep_triangle")
row(OTHER, "tril_ triu_", scores="score_parts.keep_triangle")

# -- products

_BETWEEN = {VIEWS: "between.matmul", SCORES: "between.matmul"}
row(PRODUCT, "matmul __matmul__", "features.matmul", "pads", "matmul", static="static_layers.matmul", **_BETWEEN)
row(PRODUCT, "__rmatmul__", "features.matmul", "", "matmul", **_BETWEEN)
row(PRODUCT, "bmm", "between.bmm", views="between.bmm", scores="between.bmm")
row(OTHER, "baddbmm", "between.baddbmm", views="between.baddbmm", scores="between.baddbmm")
row(OTHER, "einsum", "between.einsum", views="between.einsum", scores="between.einsum")

# -- facts, copies, new tensors

_FACTS = dict.fromkeys((SCORES, VIEWS), "attributes.of_values")
row(WHOLE, "is_floating_point is_complex", "attributes.of_values", "fact", **_FACTS)
row(WHOLE, "is_contiguous", "attributes.of_values", "fact", **_FACTS)
row(WHOLE, "is_signed is_inference element_size get_device nelement numel item", "attributes.of_values", **_FACTS)
_MADE = {SIZES: "by_size.fill"}
row(WHOLE, "new_zeros new_ones new_empty new_full", "attributes.of_values", "batch", **_FACTS, **_MADE)
row(WHOLE, "new_tensor", "attributes.of_values", **_FACTS)
row(WHOLE, "equal allclose", "attributes.equal", scores="score_ops.equal")
row(WHOLE, "fill_ zero_", "attributes.fill", "all numbers")
row(WHOLE, "copy_", "attributes.copy", "all numbers, sizes, fact")
_MOVED = {VIEWS: "reordered.to", SCORES: "score_ops.to", STATIC: "static_layers.to"}
row(OTHER, "to", "features.to", "sizes, as it is", **_MOVED)
row(OTHER, "type_as", "features.to", "sizes, as it is, asks sizes", **_MOVED)
row(OTHER, "grad", "attributes.grad", views="attributes.grad", scores="attributes.grad")

# -- made by sizes

row(UNTAKEN, "zeros ones empty randn full randint", sizes="by_size.fill")
row(UNTAKEN, "arange", sizes="by_size.count")
row(UNTAKEN, "eye", sizes="by_size.of_rows")
row(UNTAKEN, "broadcast_to", says="sizes, by number", sizes="by_size.expand")


def named(*says: str) -> frozenset[str]:
    """The functions whose row says one of these words."""
    return frozenset(name for name, row in TABLE.items() if row.says & {*says})


def of_kind(*kinds: str) -> frozenset[str]:
    """The functions of these kinds."""
    return frozenset(name for name, row in TABLE.items() if row.kind in kinds)


def handlers_wanted() -> Iterator[tuple[str, str, str]]:
    """(handler, form, function), each time that the table names a handler."""
    for name, found in TABLE.items():
        for form, handler in found.runs.items():
            if isinstance(handler, str):
                yield handler, form, name
