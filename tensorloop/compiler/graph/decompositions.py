"""Operations in terms of simpler ones, so that a back end and the rules for many steps at once need to know few.

Two tables: one for the step as it was written down, below which autograd does not look (a product with a vector becomes
one with a matrix, whose gradients over all steps are a single product), and one for the step with its gradients.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.tracing import decompositions
from tensorloop.compiler.graph import compositions, device_forms
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import Refused

_aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
Table = dict[Any, Callable[..., Any]]


@cache
def before_autograd() -> Table:
    """The operations that are taken apart in a step as it was written down."""
    return {
        _aten.mv.default: _mv,
        _aten.dot.default: compositions.rounded_once(lambda a, b: (a * b).sum()),
        _aten.vdot.default: lambda a, b: (a.conj() * b).sum(),
        _aten.addmv.default: compositions.rounded_once(
            lambda x, a, v, *, beta=1, alpha=1: _added(_mv(a, v), x, beta, alpha)
        ),
        _aten.addmm.default: compositions.rounded_once(
            lambda x, a, b, *, beta=1, alpha=1: _added(torch.mm(a, b), x, beta, alpha)
        ),
        _aten.addbmm.default: compositions.rounded_once(
            lambda x, a, b, *, beta=1, alpha=1: _added(_aten.bmm.default(a, b).sum(0), x, beta, alpha)
        ),
        _aten.baddbmm.default: compositions.rounded_once(
            lambda x, a, b, *, beta=1, alpha=1: _added(torch.bmm(a, b), x, beta, alpha)
        ),
        _aten.addr.default: compositions.rounded_once(
            lambda x, a, b, *, beta=1, alpha=1: _added(a[:, None] * b, x, beta, alpha)
        ),
        _aten.bmm.default: _bmm,
        _aten.masked_scatter.default: _masked_scatter,
        _aten._trilinear.default: _trilinear,
        _aten.max.dim: lambda x, dim, keepdim=False: _extreme(x, _aten.argmax.default, dim, keepdim),
        _aten.min.dim: lambda x, dim, keepdim=False: _extreme(x, _aten.argmin.default, dim, keepdim),
        _aten.unsafe_split.Tensor: _aten.split.Tensor,
        _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
        _aten.unsafe_chunk.default: _aten.chunk.default,
        _aten.lift_fresh.default: lambda x: x,
        _aten.copy.default: lambda x, source, *_: source.to(x.dtype).expand(x.shape),
        _aten._neg_view.default: torch.neg,
        _aten.as_strided.default: _as_strided,
        _aten.as_strided_scatter.default: _as_strided_scatter,
        _aten._linalg_det.default: lambda a: _row_by_row(_aten._linalg_det.default, a),
        _aten._linalg_slogdet.default: lambda a: _row_by_row(_aten._linalg_slogdet.default, a),
        _aten.flip.default: lambda x, dims: NotImplemented if x.dim() else x.clone(),  # vmap takes a dim for granted
        **compositions.TABLE,
        **device_forms.TABLE,
        **_copies(),
        **_older(),
    }


def _older() -> Table:
    """Operations that newer versions of torch have no more: `cholesky` is a Python function from 2.14 on."""
    if not hasattr(_aten, "cholesky"):
        return {}
    return {
        _aten.cholesky.default: lambda a, upper=False: _aten.linalg_cholesky_ex.default(
            a, upper=upper, check_errors=True
        )[0]
    }


# Views of which torch has a form that copies, such as `diagonal_copy`. By name: `dir` knows only those operations of
# torch that this process has met.
_COPIED = (
    *("_conj", "_neg_view", "_reshape_alias", "alias", "as_strided", "diagonal", "expand", "narrow", "permute"),
    *("select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold"),
    *("unsqueeze", "view", "view_as_complex", "view_as_real"),
)


def _copies() -> Table:
    """Operations that copy a view, each as the view and a copy of it."""
    found: Table = {}
    for name in _COPIED:
        packet, view = getattr(_aten, f"{name}_copy"), getattr(_aten, name)
        for overload in set(packet.overloads()) & set(view.overloads()):
            found[getattr(packet, overload)] = partial(_copied, getattr(view, overload))
    return found


def _copied(view: Any, *args: Any, **kwargs: Any) -> Any:
    found = view(*args, **kwargs)
    return found.clone() if isinstance(found, Tensor) else [x.clone() for x in found]


def _mv(a: Tensor, v: Tensor) -> Tensor:
    return _aten.mm.default(a, v.unsqueeze(1)).squeeze(1)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    """Puts the source's numbers one after the other where the mask holds; too few are an index out of range."""
    if not source.numel():
        return NotImplemented
    x, mask = torch.broadcast_tensors(x, mask)
    place = mask.reshape(-1).cumsum(0).reshape(mask.shape) - 1
    return torch.where(mask, source.reshape(-1)[torch.where(mask, place, 0)], x)


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, of_a: Sequence[int], of_b: Sequence[int], of_c: Sequence[int],
    sums: Sequence[int], unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """A sum over dims of three tensors' products; each is given the dims that it lacks."""
    for dims, which in ((of_a, 0), (of_b, 1), (of_c, 2)):
        for dim in sorted(dims):
            a, b, c = (x.unsqueeze(dim) if k == which else x for k, x in enumerate((a, b, c)))
    return (a * b * c).sum(list(sums)) if sums else a * b * c


def _row_by_row(operation: Any, a: Tensor) -> Any:
    """A determinant: which way the matrices lie says whether they or their transposes are factored."""
    contiguous = a.is_contiguous() or a.is_complex()
    return NotImplemented if contiguous else operation(a.clone(memory_format=torch.contiguous_format))


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """Elements at places of a tensor that is all there is of its memory; two of them may be one."""
    return torch.index_select(x.reshape(-1), 0, _places(x, size, stride, offset)).reshape(list(size))


def _as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    """A copy with the elements at such places replaced."""
    return x.reshape(-1).scatter(0, _places(x, size, stride, offset), source.reshape(-1)).reshape(x.shape)


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    """The places of strided elements. Refused for a part of a tensor, which may lie elsewhere at another step."""
    whole = x.is_contiguous() and not x.storage_offset() and x.untyped_storage().nbytes() == x.nbytes
    last = (offset or 0) + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if not whole or (last >= x.numel() and 0 not in size):
        raise Refused(
            "as_strided() of a tensor that is a part of its memory, or transposed in it",
            "index, or use unfold() or narrow()",
        )
    places = torch.zeros(list(size), dtype=torch.int64)
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        places = places + torch.arange(n).mul(step).reshape([n] + [1] * (len(size) - dim - 1))
    return (places + (offset or 0)).reshape(-1)


def _added(product: Tensor, x: Tensor, beta: Any, alpha: Any) -> Tensor:
    if not (product.is_floating_point() or product.is_complex()):  # torch makes the factors numbers of that kind too
        kind = bool if product.dtype is torch.bool else int
        beta, alpha = kind(beta), kind(alpha)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (x if beta == 1 else x * beta)


def _bmm(a: Tensor, b: Tensor) -> Any:
    if a.shape[0] != 1:
        return NotImplemented
    return _aten.mm.default(a.squeeze(0), b.squeeze(0)).unsqueeze(0)


def _extreme(x: Tensor, which: Any, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    index = which(x, dim, True)
    values = torch.gather(x, dim, index)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


# Torch's own serve for these: pointwise formulas and short compositions.
_TORCHS = (
    "addcdiv addcmul celu deg2rad elu elu_backward embedding eye gelu_backward glu glu_backward hardsigmoid "
    "hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward heaviside huber_loss isneginf "
    "isposinf leaky_relu leaky_relu_backward lerp linspace log_sigmoid_backward log_sigmoid_forward _log_softmax "
    "_log_softmax_backward_data logit_backward masked_fill mish mish_backward mse_loss mse_loss_backward "
    "nan_to_num native_dropout_backward nll_loss_backward nll_loss_forward rad2deg relu6 rsub selu "
    "sigmoid_backward silu silu_backward smooth_l1_loss smooth_l1_loss_backward _softmax _softmax_backward_data "
    "softplus softplus_backward softshrink tanh_backward threshold threshold_backward trace tril triu "
    "unfold_backward xlogy"
)


@cache
def after_autograd() -> Table:
    """The operations that are taken apart in a step with its gradients."""
    torchs = decompositions([getattr(_aten, name) for name in _TORCHS.split() if hasattr(_aten, name)])
    return torchs | {
        **compositions.WITH_GRADIENTS,
        _aten.native_layer_norm.default: _layer_norm,
        _aten.native_layer_norm_backward.default: _layer_norm_backward,  # torch's loads sympy
        _aten.logsumexp.default: compositions.rounded_once(_logsumexp),
        _aten.mean.default: lambda x, *, dtype=None: _mean(x, None, False, dtype),
        _aten.mean.dim: lambda x, dim, keepdim=False, *, dtype=None: _mean(x, dim, keepdim, dtype),
        _aten.add.Tensor: lambda a, b, *, alpha=1: NotImplemented if alpha == 1 else a + b * alpha,
        _aten.sub.Tensor: lambda a, b, *, alpha=1: NotImplemented if alpha == 1 else a - b * alpha,
        _aten.add.Scalar: lambda a, b, alpha=1: a + b * alpha,
        _aten.sub.Scalar: lambda a, b, alpha=1: a - b * alpha,
        _aten.floor_divide.default: lambda a, b: torch.div(a, b, rounding_mode="floor"),
        _aten.max.default: lambda x: torch.amax(x, list(range(x.dim()))),
        _aten.min.default: lambda x: torch.amin(x, list(range(x.dim()))),
        _aten._unsafe_index.Tensor: _aten.index.Tensor,
        _aten._unsafe_index_put.default: _aten.index_put.default,
        _aten.split.Tensor: _split,
        _aten.split_with_sizes.default: _split_with_sizes,
        _aten.unbind.int: lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])],
        _aten.roll.default: _roll,
        _aten.repeat.default: _repeat,
        _aten.stack.default: lambda xs, dim=0: torch.cat([x.unsqueeze(dim) for x in xs], dim),
        _aten.select_backward.default: _select_backward,
        _aten.slice_backward.default: _slice_backward,
        _aten.convolution_backward.default: _convolution_backward,
        _aten.mm.default: lambda a, b: _in_float32(_aten.mm.default, a, b),
        _aten.bmm.default: lambda a, b: _in_float32(_aten.bmm.default, a, b),
        _aten.convolution.default: lambda *args: _in_float32(_aten.convolution.default, *args),
        _aten.gelu.default: compositions.rounded_once(_gelu),
        _aten.linalg_vector_norm.default: compositions.rounded_once(_vector_norm),
        _aten.square.default: lambda x: x * x,
        _aten.angle.default: _angle,
        _aten.round.decimals: compositions.rounded_once(_round_to),
        **{  # these compare with the number itself, not with it rounded
            one: compositions.rounded_once(torchs[one])
            for one in (_aten.softshrink.default, _aten.threshold_backward.default)
        },
        _aten.put.default: lambda x, index, source, accumulate=False: (
            x.reshape(-1).index_put([index.reshape(-1)], source.reshape(-1), accumulate).reshape(x.shape)
        ),
        _aten.hardshrink_backward.default: _shrink_backward,
        _aten.softshrink_backward.default: _shrink_backward,
        **{
            getattr(getattr(_aten, f"__{side[0]}shift__"), kind): partial(
                _shifted, getattr(torch, f"bitwise_{side}_shift")
            )
            for side in ("left", "right")
            for kind in ("Tensor", "Scalar")
        },
        **_of_plain_dtypes(torchs, _aten.tanh_backward.default, lambda grad, y: grad * (1 - y * y)),
        **_of_plain_dtypes(torchs, _aten.sigmoid_backward.default, lambda grad, y: grad * (y * (1 - y))),
        _aten.fill.Scalar: lambda x, value: _filled(x, value, {}),
        _aten.fill.Tensor: lambda x, value: value.to(x.dtype).expand(x.shape),
        _aten.empty.memory_format: lambda size, **options: _aten.full.default(size, 0, **_typed(options)),
        _aten.empty_strided.default: lambda size, _, **options: _aten.full.default(size, 0, **_typed(options)),
        _aten.empty_like.default: lambda x, **options: _filled(x, 0, options),
        _aten.new_empty.default: lambda x, size, **options: _filled(x, 0, options, size),
        _aten.ones_like.default: lambda x, **options: _filled(x, 1, options),
        _aten.zeros_like.default: lambda x, **options: _filled(x, 0, options),
        _aten.full_like.default: lambda x, value, **options: _filled(x, value, options),
        _aten.new_zeros.default: lambda x, size, **options: _filled(x, 0, options, size),
        _aten.new_ones.default: lambda x, size, **options: _filled(x, 1, options, size),
        _aten.new_full.default: lambda x, size, value, **options: _filled(x, value, options, size),
        _aten.zeros.default: lambda size, **options: _aten.full.default(size, 0, **_typed(options)),
        _aten._efficientzerotensor.default: lambda size, **options: _aten.full.default(size, 0, **_typed(options)),
        _aten.ones.default: lambda size, **options: _aten.full.default(size, 1, **_typed(options)),
        _aten.scalar_tensor.default: lambda value, **options: _aten.full.default([], value, **_typed(options)),
        _aten._reshape_alias.default: lambda x, size, stride: x.reshape(size),
        _aten.new_empty_strided.default: lambda x, size, stride, **options: _filled(x, 0, options, size),
    }


def _of_plain_dtypes(torchs: Table, operation: Any, formula: Callable[..., Tensor]) -> Table:
    """A formula in the place of torch's, which casts and, for that, loads sympy; other dtypes need the casts."""

    def simpler(grad: Tensor, y: Tensor) -> Any:
        return (formula if y.dtype in (torch.float32, torch.float64) else torchs[operation])(grad, y)

    return {operation: simpler}


def _angle(x: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    return torch.where(x < 0, torch.full_like(x, math.pi), torch.where(x != x, x, torch.zeros_like(x)))


def _shifted(operation: Any, x: Tensor, by: Any) -> Any:
    return NotImplemented if x.is_floating_point() else operation(x, by)


def _round_to(x: Tensor, *, decimals: int) -> Tensor:
    """Rounds to decimals; each operation on the way is rounded, as in torch's own except for two-byte floats."""
    if not x.is_floating_point() or not decimals:
        return torch.round(x)
    scale = 10.0 ** abs(decimals)
    return torch.round(x * scale) / scale if decimals > 0 else torch.round(x / scale) * scale


def _shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, grad)


def _filled(x: Tensor, value: Any, options: dict[str, Any], size: Sequence[int] | None = None) -> Tensor:
    dtype = options.get("dtype") or x.dtype
    return _aten.full.default(list(x.shape if size is None else size), value, dtype=dtype, device=x.device)


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    dtype = options.get("dtype")
    device = options.get("device")
    return {"dtype": torch.get_default_dtype() if dtype is None else dtype, "device": device or HOST}


def _mean(x: Tensor, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if x.dtype in _HALVES:
        return _mean(x.float(), dim, keepdim, None).to(x.dtype)
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    total = x.sum(dims, keepdim) if dims else x
    return total / math.prod(x.shape[d] for d in dims if x.dim())


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if x.dtype in _HALVES:
        out, *statistics = _layer_norm(x.float(), shape, weight, bias, eps)
        dtype = x.dtype if weight is None else weight.dtype
        return out.to(x.dtype), *(s.to(dtype) for s in statistics)  # pyright: ignore[reportReturnType]
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = _mean(x, dims, True, None)
    centred = x - mean
    scale = torch.rsqrt(_mean(centred * centred, dims, True, None) + eps)
    out = centred * scale
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, scale


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    if x.dtype in _HALVES:
        w, b = (None if y is None else y.float() for y in (weight, bias))
        found = _layer_norm_backward(grad.float(), x.float(), shape, mean.float(), scale.float(), w, b, wanted)
        dtypes = [None if y is None else y.dtype for y in (x, weight, bias)]
        return tuple(None if g is None else g.to(dtype) for g, dtype in zip(found, dtypes, strict=True))
    rank = x.dim() - len(shape)
    outer, inner = list(range(rank)), list(range(rank, x.dim()))
    normal = (x - mean) * scale

    def over_rows(g: Tensor) -> Tensor:
        return g.sum(outer) if outer else g

    direct = grad if weight is None else grad * weight
    found = None
    if wanted[0]:
        found = scale * (direct - _mean(direct, inner, True, None) - normal * _mean(direct * normal, inner, True, None))
    of_weight = over_rows(grad * normal) if wanted[1] and weight is not None else None
    return found, of_weight, over_rows(grad) if wanted[2] and bias is not None else None


def _in_float32(operation: Any, *args: Any) -> Any:
    """A product of two-byte floats: exact in float32, whose sums are rounded once, as torch's are."""
    if args[0].dtype not in _HALVES:
        return NotImplemented
    dtype = args[0].dtype
    found = operation(*(x.float() if isinstance(x, Tensor) else x for x in args))
    if isinstance(found, Tensor):
        return found.to(dtype)
    return tuple(None if x is None else x.to(dtype) for x in found)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, sizes: Any, *options: Any) -> Any:
    """One operation for each gradient: that of the input stays in a loop, those of the weights are had after it."""
    if x.dtype in _HALVES:
        return _in_float32(_aten.convolution_backward.default, grad, x, weight, sizes, *options)
    wanted = options[-1]
    if sum(wanted) == 1 and not wanted[2]:
        return NotImplemented
    found: list[Tensor | None] = [None, None, grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None]
    for k in range(2):
        if wanted[k]:
            one = [i == k for i in range(3)]
            found[k] = _aten.convolution_backward.default(grad, x, weight, None, *options[:-1], one)[k]
    return tuple(found)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _vector_norm(x: Tensor, p: Any = 2, dim: Any = None, keep: bool = False, *, dtype: Any = None) -> Tensor:
    if x.is_complex() or (not x.numel() and p in (math.inf, -math.inf)):
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if not dims:
        return torch.abs(x) if p else (x != 0).to(x.dtype)
    if p in (math.inf, -math.inf):
        return (torch.amax if p > 0 else torch.amin)(torch.abs(x), dims, keep)
    if p == 0:
        return (x != 0).to(x.dtype).sum(dims, keep)
    if p == 1:
        return torch.abs(x).sum(dims, keep)
    if p == 2:
        return torch.sqrt((x * x).sum(dims, keep))
    return torch.pow(torch.pow(torch.abs(x), p).sum(dims, keep), 1 / p)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    if not x.numel() or x.is_complex():
        return NotImplemented
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    dims = [dim] if isinstance(dim, int) else list(dim)
    top = torch.amax(x, dims, True)
    top = torch.where(torch.abs(top) == float("inf"), torch.zeros((), dtype=x.dtype, device=x.device), top)
    found = torch.log(torch.exp(x - top).sum(dims, True)) + top
    return found if keepdim else found.squeeze(tuple(dims))


def _split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    whole = x.shape[dim]
    starts = range(0, whole, size) if whole else [0]
    return [x.narrow(dim, start, min(size, whole - start)) for start in starts]


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    return [x.narrow(dim, sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True) if x.numel() and x.dim() else ():
        cut = shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, x.shape[dim] - cut, cut), x.narrow(dim, 0, x.shape[dim] - cut)], dim) if cut else x
    return x


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    sizes = [*(1 for _ in repeats[x.dim() :]), *x.shape]
    apart = x.reshape([n for size in sizes for n in (1, size)])
    wide = apart.expand([n for pair in zip(repeats, sizes, strict=True) for n in pair])
    return wide.reshape([times * size for times, size in zip(repeats, sizes, strict=True)])


def _select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    dim, n = dim % len(sizes), sizes[dim]
    index %= n
    return _padded(grad.unsqueeze(dim), len(sizes), dim, index, n - index - 1)


def _slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    if step != 1:
        return torch.slice_scatter(grad.new_zeros(list(sizes)), grad, dim, start, end, step)
    dim, n = dim % len(sizes), sizes[dim]
    start = min(max(start + n if start < 0 else start, 0), n)
    return _padded(grad, len(sizes), dim, start, n - start - grad.shape[dim])


def _padded(x: Tensor, rank: int, dim: int, before: int, after: int) -> Tensor:
    if not before and not after:
        return x
    return _aten.constant_pad_nd.default(x, [0, 0] * (rank - 1 - dim) + [before, after], 0)
