"""Functions of torch that packed tensors do not take: what to write instead, and what becomes of entries and tables."""

from tensorloop.packed.table.row import PRODUCT, UNTAKEN, Lacks, row

WHY = "it does not take packed tensors"
NO_SHAPE = Lacks("the shape of its result depends on the lens", "p.trim()")
VALUES = "give it .values and pack what comes: PackedTensor(y, p.lens)"
FLATTEN = "flatten first, as no entry is padding: {name}(x.flatten(0, 1), y.flatten(0, 1))"
# Products of two entries of a row have two ragged dims.
BETWEEN = (
    "between the entries of a row a @ b.transpose(1, 2) gives packed scores, "
    "tensorloop.attention(q, k, v) makes scores, softmax and sums, "
    "x, y = tensorloop.packed.pairs(a, b) puts every two side by side"
)
_PRODUCT = f"with ordinary weights torch.matmul(p, w); {BETWEEN}"
FEATURES = "give it .values, where feature dim d is d - 1, and pack what comes: PackedTensor(y, p.lens)"
WRITTEN = "it writes by an index; use p[key] = value, torch.where, or an index into .values"
ROW_BY_ROW = "do it row by row: PackedTensor.from_list([f(row) for row in p])"
WINDOWS = (
    "it is not there; over whole rows use p.amax(1) or p.mean(1), over windows max_pool1d and avg_pool1d of "
    "p.transpose(1, 2)"
)
_CAT = "use torch.cat(tensors, dim)"
_DISTRIBUTIONS = (
    "torch.distributions ask for tensors: give them .values and pack what comes, d = Normal(p.values, 1.0) and "
    "PackedTensor(d.rsample(), p.lens); elsewhere expand ordinary tensors: w.expand_as(p)"
)
CONV = "its channels are dim 1: give it p.transpose(1, 2), (B, C, T*), and transpose what comes back"


def _instead(names: str, cure: str, says: str = "", **runs: str | Lacks) -> None:
    """Enters functions that are not taken, with what to write instead."""
    row(UNTAKEN, names, Lacks(WHY, cure), says, "", **runs)


# -- layers and losses

_instead("local_response_norm", "its channels are dim 1; use layer_norm or rms_norm")
_instead("dropout2d dropout3d", "its channels are dim 1; use F.dropout, or F.dropout1d of p.transpose(1, 2)")
_instead("embedding_bag", "use F.embedding(p, weight), then .sum(1), .mean(1) or .amax(1)")
_instead("pairwise_distance", "use torch.linalg.vector_norm(x - y, dim=-1)")
_instead("searchsorted bucketize isin svd det logdet inverse", VALUES)
_instead("multinomial bilinear", VALUES, "batch")
row(UNTAKEN, "gaussian_nll_loss native_batch_norm native_layer_norm", says="batch")

# -- products

_instead("mv dot vdot inner outer tensordot kron chain_matmul addmm addmv addbmm addr", _PRODUCT)
row(PRODUCT, "mm", Lacks(WHY, _PRODUCT))

# -- along dims

_instead("mode", "do it row by row: torch.stack([row.mode(0).values for row in p])", "chooses")
_instead("aminmax", "use amin and amax", "chooses")
_instead("trapezoid cumulative_trapezoid", "write it with p[:, 1:] and p[:, :-1], whose lens are equal")
_instead("unique_consecutive argwhere histc bincount", "give it .values")
_instead("nonzero unique", "give it .values", static=NO_SHAPE)
_instead("renorm", FEATURES)
_instead("trace", "use the sum of PackedTensor(p.values.diagonal(0, -2, -1), p.lens) over its last dim")

# -- shapes, and what is written

_instead("vstack hstack column_stack", _CAT, "cuts")
_instead("dstack", _CAT)
_instead("broadcast_tensors _is_all_true", _DISTRIBUTIONS)
_instead("index_put index_put_ put put_ masked_scatter", WRITTEN)
_instead("T H mH", "batch and ragged dim stay where they are; .mT exchanges feature dims")
_instead("numpy", "use p.values.numpy(), or p.pad().numpy()")
row(UNTAKEN, "t", says="exchanges")
row(UNTAKEN, "transpose_ swapaxes_", says="exchanges, turns")
row(UNTAKEN, "t_ swapdims_ squeeze_ unsqueeze_", says="turns")
row(UNTAKEN, "resize_ set_", says="turns")
row(UNTAKEN, "set copy")  # some torches tag them pointwise, but they make no tensor of the same rows
row(UNTAKEN, "cpu cuda", says="sizes, as it is")
row(UNTAKEN, "dim data_ptr untyped_storage storage_offset requires_grad_ __hash__ backward", says="fact")
row(UNTAKEN, "register_hook retain_grad", says="fact")
row(UNTAKEN, "tolist __iter__", static=NO_SHAPE)
