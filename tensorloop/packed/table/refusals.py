"""What to write instead of the torch functions that packed tensors do not take: advice for each kind of function."""

from tensorloop._common.errors import WrongType
from tensorloop.packed.table.base import refusal

_VALUES = "give it .values and pack what comes: PackedTensor(y, p.lens)"
_FLATTEN = "flatten first, as no entry is padding: {name}(x.flatten(0, 1), y.flatten(0, 1))"
# Products of two entries of a row have two ragged dims.
BETWEEN = (
    "between the entries of a row a @ b.transpose(1, 2) gives packed scores, "
    "tensorloop.attention(q, k, v) makes scores, softmax and sums, "
    "x, y = tensorloop.packed.pairs(a, b) puts every two side by side"
)
_PRODUCT = f"with ordinary weights torch.matmul(p, w); {BETWEEN}"
_FEATURES = "give it .values, where feature dim d is d - 1, and pack what comes: PackedTensor(y, p.lens)"
_WRITTEN = "it writes by an index; use p[key] = value, torch.where, or an index into .values"
_ROWS = "do it row by row: PackedTensor.from_list([f(row) for row in p])"
_WINDOWS = (
    "it is not there; over whole rows use p.amax(1) or p.mean(1), over windows max_pool1d and avg_pool1d of "
    "p.transpose(1, 2)"
)
_DISTRIBUTIONS = (
    "torch.distributions ask for tensors: give them .values and pack what comes, d = Normal(p.values, 1.0) and "
    "PackedTensor(d.rsample(), p.lens); elsewhere expand ordinary tensors: w.expand_as(p)"
)
_CONV = "its channels are dim 1: give it p.transpose(1, 2), (B, C, T*), and transpose what comes back"

# By name, or by what a name begins or ends with; the first that fits. Each is a reason and what to write.
_NAMES: dict[str, str] = {
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm", "interpolate", "dropout1d"), _CONV),
    "local_response_norm": "its channels are dim 1; use layer_norm or rms_norm",
    "embedding_bag": "use F.embedding(p, weight), then .sum(1), .mean(1) or .amax(1)",
    "mode": "do it row by row: torch.stack([row.mode(0).values for row in p])",
    "aminmax": "use amin and amax",
    "pairwise_distance": "use torch.linalg.vector_norm(x - y, dim=-1)",
    "numpy": "use p.values.numpy(), or p.pad().numpy()",
    "trapezoid": "write it with p[:, 1:] and p[:, :-1], whose lens are equal",
    "cumulative_trapezoid": "write it with p[:, 1:] and p[:, :-1], whose lens are equal",
    **dict.fromkeys(("vstack", "hstack", "dstack", "column_stack"), "use torch.cat(tensors, dim)"),
    **dict.fromkeys(
        ("dropout2d", "dropout3d"), "its channels are dim 1; use F.dropout, or F.dropout1d of p.transpose(1, 2)"
    ),
    **dict.fromkeys(("mm", "mv", "dot", "vdot", "inner", "outer", "tensordot", "kron", "chain_matmul"), _PRODUCT),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "addr"), _PRODUCT),
    **dict.fromkeys(("unique", "unique_consecutive", "nonzero", "argwhere", "histc", "bincount"), "give it .values"),
    **dict.fromkeys(("broadcast_tensors", "_is_all_true"), _DISTRIBUTIONS),
    **dict.fromkeys(("multinomial", "searchsorted", "bucketize", "isin", "bilinear"), _VALUES),
    **dict.fromkeys(("tril", "triu", "svd", "det", "logdet", "inverse"), _VALUES),
    **dict.fromkeys(("diagonal", "renorm"), _FEATURES),
    "trace": "use the sum of PackedTensor(p.values.diagonal(0, -2, -1), p.lens) over its last dim",
    **dict.fromkeys(("__setitem__", "index_put", "index_put_", "put", "put_", "masked_scatter"), _WRITTEN),
    **dict.fromkeys(("T", "H", "mH"), "batch and ragged dim stay where they are; .mT exchanges feature dims"),
}
_BEGINNINGS: dict[str, str] = {
    **dict.fromkeys(
        ("conv1d", "conv_transpose1d", "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d"), _CONV
    ),
    "conv": "conv1d takes p.transpose(1, 2), and conv2d takes p.unsqueeze(1), (B, 1, T*, F)",
    "scatter": _WRITTEN,
    "index_": _WRITTEN,
    "fft_": "over a feature dim give it .values; over the ragged dim padding would change every number: " + _ROWS,
    "istft": "rows get lengths of their own: " + _ROWS,
    "linalg_": "of matrices in the feature dims: " + _VALUES,
    **dict.fromkeys(("max_pool", "avg_pool", "lp_pool", "fractional_", "adaptive_"), _WINDOWS),
}


def advice(name: str) -> str | None:
    """Says what to use in place of the torch function or attribute of this name; None where only the general holds."""
    if name in _NAMES:
        return _NAMES[name]
    found = next((text for start, text in _BEGINNINGS.items() if name.startswith(start)), None)
    return _FLATTEN.format(name=name) if found is None and name.endswith("_loss") else found


def unsupported(name: str, otherwise: str | None = None) -> WrongType:
    """Returns the error for an operation that packed tensors do not take; without advice it says `otherwise`."""
    instead = advice(name) or otherwise
    if instead is not None:
        return refusal("it does not take packed tensors", instead)
    return refusal(
        "this operation is not known for packed tensors, and padding might change its result",
        "use .values (N, *F) where it treats entries alike, or .pad() and a mask",
    )


def no_attribute(name: str, method: bool) -> AttributeError:
    """The error for a method or an attribute of a tensor that packed ones do not have."""
    instead = advice(name)
    if method:
        return AttributeError(
            f"{name} is not known for packed tensors; {instead or 'use .values (N, *F), or .pad() and a mask'}"
        )
    return AttributeError(
        f"a packed tensor has no attribute {name!r}; {instead or '.values and .pad() give ordinary tensors'}"
    )
