"""Bodies of loops, one for each operation that a target has to know, and some of what passes take apart."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Body = Callable[[Tensor, Tensor], Tensor]
_HALVES, _KINDS = (torch.bfloat16, torch.float16), (torch.int64, torch.int32, torch.int8, torch.bool, torch.float64)

# Row, and what its body has in particular -> body of two (3, 17) tensors.
ROWS: dict[str, Body] = {
    "view": lambda x, y: x.view(17, 3) + y.reshape(17, 3),
    "view of columns": lambda x, y: x.t().reshape(3, 17) + y,
    "permute": lambda x, y: x.view(3, 17, 1).permute(2, 0, 1) + y,
    "unsqueeze": lambda x, y: x[:, :, None] * y[:, None, :],
    "expand": lambda x, y: x[:, None, :].expand(3, 2, 17) * y[:, :2, None],
    "select": lambda x, y: x[1] + y[:, 3].sum(),
    "slice": lambda x, y: x[:, 1:12:3] * y[:, ::5],
    "slice of splits": lambda x, y: torch.split(x + y, [3, 5, 9], 1)[2] * 2,
    "slice of chunks": lambda x, y: torch.cat([c * n for n, c in enumerate((x * y)[:, :16].chunk(4, 1))][::-1], 1),
    "diagonal": lambda x, y: (x[:, :3] @ y[:3, :3]).diagonal(),
    "clone": lambda x, y: x.t().clone() * y.t(),
    "neg": lambda x, y: -x,
    "add": lambda x, y: x + y + 1,
    "add with a factor": lambda x, y: torch.add(x, y, alpha=0.5),
    "sub": lambda x, y: torch.sub(x, y, alpha=3) + (2 - x),
    "mul": lambda x, y: x * y * 3,
    "div": lambda x, y: x / y + x / 3,
    "div.Tensor_mode": lambda x, y: torch.div(x, y, rounding_mode="floor") + torch.div(x, y, rounding_mode="trunc"),
    "_to_copy": lambda x, y: (x > 0).to(x.dtype) * x,
    "where": lambda x, y: torch.where(x > 0, y, 1.0),
    "abs": lambda x, y: x.abs(),
    "relu": lambda x, y: x.relu(),
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "fmax": lambda x, y: torch.fmax(torch.where(x > 0.5, torch.nan, x), y),
    "fmin": lambda x, y: torch.fmin(y, torch.where(x > 0.5, torch.nan, x)),
    "clamp": lambda x, y: x.clamp(-0.5, 0.7) + torch.clamp(x, -y.abs(), y.abs()),
    "clamp_min": lambda x, y: x.clamp_min(0.1),
    "clamp_max": lambda x, y: x.clamp_max(0.1),
    "reciprocal": lambda x, y: (1 + x.abs()).reciprocal(),
    "sqrt": lambda x, y: (1 + x.abs()).sqrt(),
    "rsqrt": lambda x, y: (1 + x.abs()).rsqrt(),
    "hypot": lambda x, y: torch.hypot(x, y),
    "bitwise_and": lambda x, y: (10 * x).long() & 5,
    "bitwise_or": lambda x, y: ((x < y) | (x >= 0.5)).to(x.dtype),
    "bitwise_xor": lambda x, y: (10 * y).long() ^ (3 * x).long(),
    "bitwise_not": lambda x, y: ~(10 * x).long() + (~(x > 0)).long(),
    "bitwise_left_shift": lambda x, y: (10 * x).long() << (70 * y).long(),
    "bitwise_right_shift": lambda x, y: ((10 * x).long() >> (3 * y).long()) + ((100 * x).int() >> 2),
    "acos": lambda x, y: (0.3 * x).tanh().acos(),
    "acosh": lambda x, y: (2 + x.abs()).acosh(),
    "asin": lambda x, y: (0.3 * x).tanh().asin(),
    "asinh": lambda x, y: x.asinh(),
    "atan": lambda x, y: (3 * x).atan(),
    "atanh": lambda x, y: (0.3 * x).tanh().atanh(),
    "cos": lambda x, y: (100 * x).cos(),
    "cosh": lambda x, y: x.cosh(),
    "sin": lambda x, y: (100 * x).sin(),
    "sinh": lambda x, y: x.sinh(),
    "tan": lambda x, y: (0.3 * x).tan(),
    "tanh": lambda x, y: x.tanh(),
    "erf": lambda x, y: x.erf(),
    "erfc": lambda x, y: x.erfc(),
    "exp": lambda x, y: x.exp(),
    "exp2": lambda x, y: x.exp2(),
    "expm1": lambda x, y: x.expm1(),
    "log": lambda x, y: (1 + x.abs()).log(),
    "log10": lambda x, y: (1 + x.abs()).log10(),
    "log1p": lambda x, y: x.abs().log1p(),
    "log2": lambda x, y: (1 + x.abs()).log2(),
    "pow": lambda x, y: (0.5 + x.abs()) ** y + 2**x,
    "pow of numbers": lambda x, y: x**2 + x**3 + x**4 + (1 + x.abs()) ** 0.5 + (1 + x.abs()) ** -1,
    "sigmoid": lambda x, y: x.sigmoid(),
    "lgamma": lambda x, y: (5 * x).lgamma() + (1 + y.abs()).lgamma(),
    "digamma": lambda x, y: (5 * x.abs() + 0.1).digamma() + (-0.3 - 0.1 * y.sigmoid()).digamma(),
    "polygamma": lambda x, y: torch.polygamma(1, 20 + x.detach()) + torch.polygamma(0, 1 + y.abs()),
    "erfinv": lambda x, y: torch.erfinv(x.tanh()) + torch.erfinv(1 - 1e-5 * y.sigmoid()),
    "i0": lambda x, y: torch.i0(9 * x).log() + torch.special.i0(y),
    "special_i0e": lambda x, y: torch.special.i0e(9 * x),
    "special_i1": lambda x, y: torch.special.i1(x) + torch.special.i1(20 + y) * 1e-9,
    "special_i1e": lambda x, y: torch.special.i1e(9 * x),
    "atan2": lambda x, y: torch.atan2(x, y),
    "eq": lambda x, y: (x == y) | (x.round() == 1),
    "ne": lambda x, y: (x.round() != y.round()) & (x != 1),
    "lt": lambda x, y: (x < y) | (x < 0.3),
    "le": lambda x, y: (x <= y) | (x <= 0.3),
    "gt": lambda x, y: (x > y) | (x > 0.3),
    "ge": lambda x, y: (x >= y) | (x >= 0.3),
    "isnan": lambda x, y: x.detach().log().isnan(),
    "isinf": lambda x, y: (x.detach() / 0).isinf() | x.detach().isfinite(),
    "signbit": lambda x, y: x.signbit(),
    "sign": lambda x, y: x.sign(),
    "sgn": lambda x, y: x.sgn(),
    "copysign": lambda x, y: torch.copysign(x, y),
    "nextafter": lambda x, y: torch.nextafter(x.detach(), y.detach()) - x.detach() > 0,
    "floor": lambda x, y: (3 * x).floor(),
    "ceil": lambda x, y: (3 * x).ceil(),
    "round": lambda x, y: (3 * x).round(),
    "trunc": lambda x, y: (3 * x).trunc(),
    "remainder": lambda x, y: torch.remainder(x, y),
    "fmod": lambda x, y: torch.fmod(x, y),
    "fmod of integers": lambda x, y: (10 * x).long() // 3 + (10 * y).int() % 7 - (5 * x).to(torch.int8),
    "logical_and": lambda x, y: torch.logical_and(x.round(), y.round()),
    "logical_or": lambda x, y: torch.logical_or(x.round(), y.round()),
    "logical_xor": lambda x, y: torch.logical_xor(x.round(), y.round()),
    "logical_not": lambda x, y: (x * (x > 0)).logical_not(),
    "sum": lambda x, y: x.sum() + x.sum(0) * x.sum(1, keepdim=True),
    "sum of bools": lambda x, y: (x > 0).sum(1),
    "amax": lambda x, y: x.amax(1) + x.max(),
    "amax of rows": lambda x, y: x.amax(0) + x.max(0)[0],
    "amin": lambda x, y: x.amin(1) * x.amin(0).sum() + x.min() + x.min(1)[0],
    "argmax": lambda x, y: x.argmax(1) + x.argmax(),
    "argmin": lambda x, y: x.argmin(1) + x.min(1)[1],
    "any": lambda x, y: (x > 1.5).any(1) | (x > 3).any(),
    "all": lambda x, y: (x > -2).all(1) & (x > -9).all(),
    "prod": lambda x, y: x.prod(1) + x[0].prod(),
    "mm": lambda x, y: x @ y.t(),
    "mm of columns": lambda x, y: x.t() @ y,
    "mm in others": lambda x, y: torch.addmm(y[:, :3], x, y.t(), beta=0.5, alpha=2) + F.linear(x, y, y[:, 0]),
    "bmm": lambda x, y: x[:, :, None] @ y[:, None, :],
    "bmm in others": lambda x, y: torch.baddbmm(y[:, :5, None], x[:, :5, None], y[:, None, :1]),
    "convolution": lambda x, y: F.conv1d(x[:, None, :], y[:1, None, :3]),
    "convolution_backward": lambda x, y: F.conv1d(x[None], x[:, None, :4] * y[:, None, :4], groups=3, padding=3),
    "convolution_backward of images": lambda x, y: F.conv2d(
        (x * 1.0).expand(2, 4, 3, 17), (x * y).reshape(-1)[:48].view(6, 2, 2, 2), x[0, :6], (1, 2), (1, 2), (2, 1), 2
    ),
    "cumsum": lambda x, y: x.cumsum(1) + x.cumsum(0),
    "cumprod": lambda x, y: x.cumprod(0),
    "cummax": lambda x, y: x.cummax(1)[0] * x.round().cummax(0)[1] + torch.where(x > 1, torch.nan, x).cummax(1)[1],
    "cummin": lambda x, y: x.cummin(0)[0] + x.round().cummin(1)[1] + (9 * x).long().cummin(1)[0],
    "gather": lambda x, y: x.gather(1, _places(y, 17)) + x.gather(0, _places(y, 3)),
    "index": lambda x, y: x[_places(y[0], 3), _places(y[1], 17)] * x[_places(y[0], 3), 0],
    "index apart": lambda x, y: x.view(3, 17, 1).expand(3, 17, 2)[_places(y[0, :4], 3), :, _places(y[1, :4], 2)],
    "index from the end": lambda x, y: x[:, _places(y[0], 17) - 17],
    "index_select": lambda x, y: x.index_select(1, _places(y[0], 17)),
    "scatter": lambda x, y: x.scatter(1, _places(y, 17)[:, :1], y[:, :1]) + x.scatter(1, _places(y, 17), 3.0),
    "scatter_add": lambda x, y: x.scatter_add(1, _places(y, 17), y) + x.scatter_add(0, _places(y, 3), y),
    "index_add": lambda x, y: x.index_add(0, _places(y[0, :3], 3), y),
    "index_copy": lambda x, y: x.index_copy(1, torch.arange(4) * 4, x[:, :4] * y[:, :4]),
    "index_put": lambda x, y: x.index_put([_places(y[0], 3), _places(y[0], 17)], y[1], accumulate=True),
    "scatter_reduce": lambda x, y: torch.stack(
        [x.scatter_reduce(1, _places(y, 9), y, how, include_self=how < "m") for how in ("amax", "amin", "mean", "sum")]
    ),
    "scatter_reduce of integers": lambda x, y: (9 * x).long().scatter_reduce(0, _places(y, 3), (9 * y).long(), "mean"),
    "index_reduce": lambda x, y: x.index_reduce(0, _places(y[0, :3], 3), y, "amax", include_self=False),
    "linalg_cholesky_ex": lambda x, y: (
        torch.linalg.cholesky(_positive(x)) + torch.linalg.cholesky(_positive(x), upper=True)
    ),
    "linalg_cholesky_ex of none": lambda x, y: (
        torch.linalg.cholesky_ex(x[:, :3] * 0 - 1)[1] + torch.linalg.cholesky(x[:0, :0]).sum()
    ),
    "cholesky_solve": lambda x, y: (
        torch.cholesky_solve(y[:, :2], torch.linalg.cholesky(_positive(x)))
        + torch.cholesky_solve(y[:, :2], torch.linalg.cholesky(_positive(x), upper=True), upper=True)
    ),
    "linalg_solve_triangular": lambda x, y: (
        torch.linalg.solve_triangular(_positive(x), y[:, :5], upper=True)
        + torch.linalg.solve_triangular(_positive(x).mT, y[:, :5], upper=False, unitriangular=True)
        + torch.linalg.solve_triangular(_positive(x).mT, y[:, :5].t(), upper=True, left=False).t()
    ),
    "linalg_lu_factor_ex": lambda x, y: torch.linalg.lu_factor(x[:, :4])[0] * torch.linalg.lu_factor(x[:, :3])[1].sum(),
    "linalg_lu": lambda x, y: sum(p.sum() for p in torch.linalg.lu(_tall(x))) + torch.linalg.lu(x[:, :3])[0],
    "linalg_lu_solve": lambda x, y: (
        torch.linalg.lu_solve(*torch.linalg.lu_factor(_positive(x)), y[:, :4])
        + torch.linalg.lu_solve(*torch.linalg.lu_factor(x[:, :3] + y[:, :3]), y[:, :4], adjoint=True)
        + torch.linalg.lu_solve(*torch.linalg.lu_factor(_positive(x)), y[:, :4].t(), left=False).t()
    ),
    "lu_unpack": lambda x, y: torch.stack(torch.lu_unpack(*torch.linalg.lu_factor(x[:, :3] * y[:, :3]))),
    "_linalg_solve_ex": lambda x, y: (
        torch.linalg.solve(_positive(x), y[:, :4])
        + torch.linalg.solve(x[:, :3] + y[:, :3].t(), y[:, 0])[:, None]
        + torch.linalg.solve(_many(x), _many(y)[:, :, :2], left=True).sum()
        + torch.linalg.solve(_positive(x).mT, y[:, :3], left=False).sum()
    ),
    "linalg_inv_ex": lambda x, y: torch.linalg.inv(_positive(x)) + torch.linalg.inv(_many(x)).sum(0),
    "_linalg_det": lambda x, y: torch.linalg.det(x[:, :3]) + torch.linalg.det(_many(y).mT) + torch.linalg.det(_many(x)),
    "_linalg_slogdet": lambda x, y: torch.linalg.slogdet(x[:, :3])[1] + torch.linalg.slogdet(_many(x).mT)[1],
    "linalg_qr": lambda x, y: (
        torch.linalg.qr(_tall(x))[1][:3] + torch.linalg.qr(x[:, :9])[1][:, :4] * torch.linalg.qr(_many(x))[0].sum()
    ),
    "_linalg_eigh": lambda x, y: _turned(*torch.linalg.eigh(_positive(x))) + torch.linalg.eigvalsh(_positive(y), "U"),
    "linalg_matrix_exp": lambda x, y: (
        torch.linalg.matrix_exp(x[:, :3]) + torch.linalg.matrix_exp(0.1 * _many(y)).sum(0)
    ),
    "cat": lambda x, y: torch.cat([x, y * 2, x[:, :1]], 1),
    "cat of others": lambda x, y: torch.stack([x, y, x * y], 1),
    "constant_pad_nd": lambda x, y: F.pad(x, (2, 3, 1, 0), value=1.5),
    "constant_pad_nd that cuts": lambda x, y: F.pad(x, (-2, 3)),
    "flip": lambda x, y: x.flip(1) + y.flip(0, 1),
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:, :4], 1, 3, 7) + x.slice_scatter(y[:, :4], 1, 3, 10, 2),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[:, 0], 1, 3),
    "unfold": lambda x, y: x.unfold(1, 5, 3) * 2,
    "diagonal_scatter": lambda x, y: torch.diagonal_scatter(x, y[:, 0]),
    "full": lambda x, y: torch.full_like(x, 2.5) * x + torch.ones(17) * torch.zeros_like(y),
    "arange": lambda x, y: x * torch.arange(17),
    "tril_indices": lambda x, y: x[tuple(torch.tril_indices(3, 3))],
    "triu_indices": lambda x, y: x[tuple(torch.triu_indices(3, 3))],
}
TAKEN_APART: dict[str, Body] = {
    "repeat": lambda x, y: x.repeat(2, 3),
    "roll": lambda x, y: x.roll(3, 1) + x.roll((1, -2), (0, 1)) + x.roll(7),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1.0),
    "sort": lambda x, y: x.sort(1)[0] + x.sort(1, descending=True)[1] + x.sort(stable=True, dim=1)[1],
    "topk": lambda x, y: x.topk(3, 1)[0] + x.topk(12, 1, largest=False)[1][:, :3],
    "kthvalue": lambda x, y: x.kthvalue(2, 1)[0] + x.kthvalue(4, 1)[1],
    "median": lambda x, y: x.median(1)[0].sum() + x.median() + torch.where(y > 1, torch.nan, x).nanmedian(0)[0],
    "median of NaN": lambda x, y: torch.where(x > 1, torch.nan, x).median(1)[1] + (9 * x).long().median(1, True)[1],
    "searchsorted": lambda x, y: torch.searchsorted(y.sort(1)[0], x) + torch.bucketize(x, y[0].sort()[0], right=True),
    "logcumsumexp": lambda x, y: x.logcumsumexp(1) + (9 * x).logcumsumexp(0),
    "leaky": lambda x, y: F.leaky_relu(x, 0.1) + F.relu6(x) + F.elu(x) + F.selu(x) + F.celu(x) + F.prelu(x, y[0, :1]),
    "gelu": lambda x, y: F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.mish(x) + F.softplus(20 * x),
    "hard": lambda x, y: F.hardtanh(x) + F.hardswish(x) + F.softsign(x) + F.tanhshrink(x) + F.threshold(x, 0.1, 5.0),
    "logsigmoid": lambda x, y: F.logsigmoid(x) + F.glu(torch.cat([x, y], 1), 1),
    "logit": lambda x, y: x.sigmoid().logit() + torch.xlogy(x, 1 + y.abs()) + torch.logaddexp(x, y) + x.frac(),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.addcdiv(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3) + torch.lerp(x, y, x),
    "mean": lambda x, y: x.mean(1) * x.mean() + x.var(1) + x.std(1, unbiased=False) + torch.var_mean(x, 1)[1],
    "norm": lambda x, y: x.norm(dim=1) + torch.linalg.vector_norm(x, 1, dim=1) + torch.linalg.vector_norm(x, 3, dim=1),
    "norm in another dtype": lambda x, y: torch.linalg.vector_norm(x.float(), 2, dim=1, dtype=torch.float64),
    "softmax": lambda x, y: x.softmax(1) + x.softmax(0) + x.log_softmax(1) * y,
    "logsumexp": lambda x, y: x.logsumexp(1) + torch.where(x > 5, x, -torch.inf).detach().exp().sum(1),
    "logsumexp of infinite": lambda x, y: torch.where(x > 5, x, -torch.inf).detach().logsumexp(1),
    "logsumexp of integers": lambda x, y: (9 * x).long().logsumexp(1),
    "layer_norm": lambda x, y: F.layer_norm(x, (17,), y[0], y[1]),
    "mv": lambda x, y: (x @ y[0]) * (x[0] @ y[0]) + torch.einsum("bi,bj,i->b", x, y, x[0]),
    "tril": lambda x, y: x.tril() + y.triu(1) + x[:, :3] @ torch.eye(3, dtype=x.dtype) @ x[:, :3].t() @ x,
    "embedding": lambda x, y: F.embedding(_places(y, 3), x),
    "count": lambda x, y: torch.count_nonzero(x > 0, dim=1) + (_places(x, 5)[..., None] == torch.arange(5)).sum((1, 2)),
    "one_hot": lambda x, y: F.one_hot(_places(x, 5), 5).sum(1) * F.cosine_similarity(x, y, -1)[:, None],
    "unsafe splits": lambda x, y: torch.unsafe_split_with_sizes(x * y, [10, 7], 1)[1] + torch.unsafe_split(x, 7, 1)[1],
    "windows": lambda x, y: F.adaptive_avg_pool2d(x[None], (2, 5)) * F.adaptive_max_pool1d(y, 5).mean() + x.mean(),
    "windows that reach out": lambda x, y: (
        F.avg_pool2d((x * y)[None], (3, 5), (1, 3), (1, 2), True, count_include_pad=False)
        + F.max_pool2d(torch.where(x > 1, torch.nan, x)[None], 3, 1, 1, ceil_mode=True).nan_to_num().mean()
    ),
    "padding": lambda x, y: F.pad(x[None], (3, 2), "replicate") * F.pad(y[None], (2, 3), "reflect"),
    "padding in circles": lambda x, y: (
        F.pad(x[None], (3, 2), "circular") * F.pad(y[None, None], (1, 0, 2, 1), "replicate").mean()
    ),
    "masked_scatter": lambda x, y: x.masked_scatter(y > 0, y * x) + x.put(_places(y[0], 51), y[0] * x[0]),
    "bilinear": lambda x, y: F.bilinear(x, y, torch.outer(x[0], y[1]).expand(2, 17, 17), y[0, :2]),
    "shrinks": lambda x, y: (
        F.hardshrink(x, 0.3) + F.softshrink(x, 0.3) + x.round(decimals=1) + x.angle() + x.detach().aminmax()[0]
    ),
    "large windows": lambda x, y: F.max_pool2d((x * y)[None], (3, 15), ceil_mode=True)[0] * x.mean(),
    "upsample": lambda x, y: F.interpolate(x[None], size=31, mode="linear")[0] + torch.empty(31).zero_(),
    "halves": lambda x, y: torch.stack([(9 * x.to(h)).to(k).double() for h in _HALVES for k in _KINDS]),
    "largest integers": lambda x, y: torch.maximum((10 * x).long(), (10 * y).int()).amax(1) - (9 * x).long().sum(1),
}
BODIES = {**ROWS, **TAKEN_APART}


def _positive(x: Tensor) -> Tensor:
    """A matrix with positive eigenvalues."""
    return x[:, :3] @ x[:, :3].t() + 3 * torch.eye(3, dtype=x.dtype)


def _many(x: Tensor) -> Tensor:
    """Five regular matrices."""
    return 0.2 * x[:, :15].reshape(5, 3, 3) + torch.eye(3, dtype=x.dtype)


def _tall(x: Tensor) -> Tensor:
    """A matrix of more rows than columns."""
    return x[:, :16].reshape(12, 4)


def _turned(values: Tensor, vectors: Tensor) -> Tensor:
    """What does not depend on the signs of eigenvectors."""
    return (vectors * values.sqrt()) @ vectors.mT


def _places(y: Tensor, size: int) -> Tensor:
    """Indices below `size`, out of floats."""
    return (y.abs() * 1000).long() % size
