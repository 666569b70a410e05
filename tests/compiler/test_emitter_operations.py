"""Every operation once, against torch's own kernels on the same graph."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorloop.compiler.step import CoreCall, Step
from tensorloop.compiler.targets.cpu import emit
from tensorloop.compiler.targets.cpu.cache import Folder
from tests.support.recurrences import interpreted, places, recurrence

aten = torch.ops.aten
Body = Callable[[Tensor, Tensor], Tensor]

# of two (3, 17) tensors; what is not a float is made of comparisons and casts
FLOAT: dict[str, Body] = {
    "add": lambda x, y: x + y,
    "alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "sub": lambda x, y: torch.sub(x, y, alpha=3),
    "rsub": lambda x, y: 2 - x,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder": lambda x, y: torch.remainder(x, y),
    "fmod": lambda x, y: torch.fmod(x, y),
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "sign": lambda x, y: x.sign(),
    "square": lambda x, y: x.square(),
    "pow 2": lambda x, y: x**2,
    "pow 3": lambda x, y: x**3,
    "pow 4": lambda x, y: x**4,
    "pow half": lambda x, y: x.abs() ** 0.5,
    "pow -1": lambda x, y: x**-1,
    "pow": lambda x, y: x.abs() ** y,
    "pow of number": lambda x, y: 2**x,
    "exp": lambda x, y: x.exp(),
    "exp2": lambda x, y: x.exp2(),
    "expm1": lambda x, y: x.expm1(),
    "log": lambda x, y: x.log(),
    "log2": lambda x, y: x.abs().log2(),
    "log10": lambda x, y: x.abs().log10(),
    "log1p": lambda x, y: x.log1p(),
    "sqrt": lambda x, y: x.sqrt(),
    "rsqrt": lambda x, y: x.rsqrt(),
    "reciprocal": lambda x, y: x.reciprocal(),
    "tanh": lambda x, y: x.tanh(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "sin": lambda x, y: (100 * x).sin(),
    "cos": lambda x, y: (100 * x).cos(),
    "tan": lambda x, y: x.tan(),
    "sinh": lambda x, y: x.sinh(),
    "cosh": lambda x, y: x.cosh(),
    "asinh": lambda x, y: x.asinh(),
    "acosh": lambda x, y: (1 + x.abs()).acosh(),
    "atanh": lambda x, y: (0.3 * x).atanh(),
    "atan": lambda x, y: (3 * x).atan(),
    "asin": lambda x, y: (0.3 * x).asin(),
    "acos": lambda x, y: (0.3 * x).acos(),
    "atan2": lambda x, y: torch.atan2(x, y),
    "erf": lambda x, y: x.erf(),
    "erfc": lambda x, y: x.erfc(),
    "hypot": lambda x, y: torch.hypot(x, y),
    "relu": lambda x, y: x.relu(),
    "relu6": lambda x, y: F.relu6(x),
    "leaky": lambda x, y: F.leaky_relu(x, 0.1),
    "elu": lambda x, y: F.elu(x),
    "selu": lambda x, y: F.selu(x),
    "celu": lambda x, y: F.celu(x),
    "gelu": lambda x, y: F.gelu(x),
    "gelu tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "silu": lambda x, y: F.silu(x),
    "mish": lambda x, y: F.mish(x),
    "softplus": lambda x, y: F.softplus(20 * x),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "hardsigmoid": lambda x, y: F.hardsigmoid(x),
    "hardswish": lambda x, y: F.hardswish(x),
    "softsign": lambda x, y: F.softsign(x),
    "tanhshrink": lambda x, y: F.tanhshrink(x),
    "threshold": lambda x, y: F.threshold(x, 0.1, 5.0),
    "glu": lambda x, y: F.glu(torch.cat([x, y], 1)),
    "prelu": lambda x, y: F.prelu(x, y[0, :1]),
    "logit": lambda x, y: x.sigmoid().logit(),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "floor": lambda x, y: (3 * x).floor(),
    "ceil": lambda x, y: (3 * x).ceil(),
    "trunc": lambda x, y: (3 * x).trunc(),
    "round": lambda x, y: (3 * x).round(),
    "frac": lambda x, y: (3 * x).frac(),
    "clamp": lambda x, y: x.clamp(-0.5, 0.7),
    "clamp tensors": lambda x, y: torch.clamp(x, -y.abs(), y.abs()),
    "clamp_min": lambda x, y: x.clamp_min(0.1),
    "clamp_max": lambda x, y: x.clamp_max(0.1),
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "where": lambda x, y: torch.where(x > 0, y, 1.0),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1.0),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp tensor": lambda x, y: torch.lerp(x, y, x),
    "copysign": lambda x, y: torch.copysign(x, y),
    "double": lambda x, y: (x.double() + 1).to(x.dtype),
    "scalar": lambda x, y: x + y.new_full((), 2.0),
    "compare": lambda x, y: ((x < y) | (x >= 0.5)).to(x.dtype),
    "logical": lambda x, y: ((x > 0) & ~(y > 0) ^ (x == y)).to(x.dtype),
    "isnan": lambda x, y: (x.log().isnan() | y.isinf() | x.isfinite()).to(x.dtype),
    "logical_not": lambda x, y: (x * (x > 0)).logical_not().to(x.dtype),
    # reductions
    "sum": lambda x, y: x.sum(),
    "sum 0": lambda x, y: x.sum(0),
    "sum 1": lambda x, y: x * x.sum(1, keepdim=True),
    "sum of bools": lambda x, y: (x > 0).sum(1),
    "mean": lambda x, y: x.mean(1) * x.mean(),
    "prod": lambda x, y: x.prod(1),
    "amax": lambda x, y: x.amax(1) + x.amin(1),
    "amax 0": lambda x, y: x.amax(0) + x.amin(0),
    "amax all": lambda x, y: x.amax() + x.max() + x.min(),
    "max dim": lambda x, y: torch.stack([x.max(1)[0], x.max(1)[1].to(x.dtype), x.min(1)[1].to(x.dtype)]),
    "max dim 0": lambda x, y: torch.stack([x.max(0)[0], x.max(0)[1].to(x.dtype), x.min(0)[1].to(x.dtype)]),
    "argmax": lambda x, y: x.argmax(1) + x.argmax() + x.argmin(1),
    "var": lambda x, y: x.var(1) + x.std(1, unbiased=False),
    "var_mean": lambda x, y: torch.var_mean(x, 1)[0] + torch.var_mean(x, 1)[1],
    "norm": lambda x, y: x.norm(dim=1) + torch.linalg.vector_norm(x, 1, dim=1),
    "any": lambda x, y: (x > 1.5).any(1) | (x > -2).all(1),
    "softmax": lambda x, y: x.softmax(1),
    "softmax 0": lambda x, y: x.softmax(0),
    "log_softmax": lambda x, y: x.log_softmax(1),
    "softmax backward": lambda x, y: aten._softmax_backward_data(x, y.softmax(1), 1, x.dtype),
    "log_softmax backward": lambda x, y: aten._log_softmax_backward_data(x, y.log_softmax(1), 1, x.dtype),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "logsumexp 3d": lambda x, y: (x[:, :, None] + y.sum(0)).logsumexp(1),
    "logsumexp inf": lambda x, y: torch.where(x > 5, x, -torch.inf).logsumexp(1),
    "layer_norm": lambda x, y: F.layer_norm(x, (17,), y[0], y[1]),
    "rms_norm": lambda x, y: x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * y[0],
    "cumsum": lambda x, y: x.cumsum(1) + x.cumsum(0),
    "cumprod": lambda x, y: x.cumprod(0),
    "count": lambda x, y: torch.count_nonzero(x > 0, dim=1),
    # products
    "mm": lambda x, y: x @ y.t(),
    "mm of columns": lambda x, y: x.t() @ y,
    "addmm": lambda x, y: torch.addmm(y[:, :3], x, y.t()),
    "addmm scaled": lambda x, y: torch.addmm(y[:, :3], x, y.t(), beta=0.5, alpha=2),
    "mv": lambda x, y: x @ y[0],
    "dot": lambda x, y: x[0] @ y[0],
    "bmm": lambda x, y: x[:, :, None] @ y[:, None, :],
    "bmm inner": lambda x, y: x[:, None, :] @ y[:, :, None],
    "baddbmm": lambda x, y: torch.baddbmm(y[:, :5, None], x[:, :5, None], y[:, None, :1]),
    "outer": lambda x, y: torch.outer(x[0], y[1]),
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "einsum": lambda x, y: torch.einsum("bi,bj,i->bj", x, y, x[0]),
    # movement
    "view": lambda x, y: x.view(17, 3) + y.reshape(17, 3),
    "transpose": lambda x, y: x.t() * 2 + y.t(),
    "reshape of t": lambda x, y: x.t().reshape(3, 17) + y,
    "permute": lambda x, y: x.view(3, 17, 1).permute(2, 0, 1) + y,
    "expand": lambda x, y: x[:, None, :].expand(3, 2, 17) * y[:, :2, None],
    "split": lambda x, y: torch.split(x + y, [3, 5, 9], 1)[2] * 2,
    "split pieces": lambda x, y: torch.stack((x + y)[:, :15].split(5, 1)).sum(0),
    "chunk": lambda x, y: torch.cat([c * n for n, c in enumerate((x * y)[:, :16].chunk(4, 1))][::-1], 1),
    "unbind": lambda x, y: x.unbind(0)[1] * y.unbind(1)[2][0],
    "select": lambda x, y: x[1] + y[:, 3].sum(),
    "slice step": lambda x, y: x[:, 1:12:3] * y[:, ::5],
    "diagonal": lambda x, y: (x[:, :3] @ y[:3, :3]).diagonal(),
    "unfold": lambda x, y: x.unfold(1, 5, 3) * 2,
    "cat": lambda x, y: torch.cat([x, y * 2, x[:, :1]], 1),
    "cat 0": lambda x, y: torch.cat([x, y, x], 0),
    "stack": lambda x, y: torch.stack([x, y, x * y], 1),
    "flip": lambda x, y: x.flip(1) + y.flip(0, 1),
    "roll": lambda x, y: x.roll(3, 1) + y.roll((1, -2), (0, 1)) + x.roll(7),
    "pad": lambda x, y: F.pad(x, (2, 3, 1, 0), value=1.5),
    "pad negative": lambda x, y: F.pad(x, (-2, 3)),
    "tril": lambda x, y: x.tril() + y.triu(1),
    "repeat": lambda x, y: x.repeat(2, 3),
    "shift": lambda x, y: torch.cat([y[:, :1], x[:, :-1]], 1),
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:, :4], 1, 3, 7),
    "slice_scatter step": lambda x, y: torch.slice_scatter(x, y[:, :4], 1, 3, 10, 2),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[:, 0], 1, 3),
    "diagonal_scatter": lambda x, y: torch.diagonal_scatter(x, y[:, 0]),
    "select_backward": lambda x, y: aten.select_backward(x[:, 0], [3, 9], 1, 4),
    "slice_backward": lambda x, y: aten.slice_backward(x[:, :4], [3, 9], 1, 2, 6, 1),
    "gather": lambda x, y: x.gather(1, _places(y, 17)),
    "gather 0": lambda x, y: x.gather(0, _places(y, 3)),
    "index_select": lambda x, y: x.index_select(1, _places(y[0], 17)),
    "index": lambda x, y: x[_places(y[0], 3)],
    "index two": lambda x, y: x[_places(y[0], 3), _places(y[1], 17)],
    "index apart": lambda x, y: x.view(3, 17, 1).expand(3, 17, 2)[_places(y[0, :4], 3), :, _places(y[1, :4], 2)],
    "index negative": lambda x, y: x[:, _places(y[0], 17) - 17],
    "embedding": lambda x, y: F.embedding(_places(y, 3), x),
    "one_hot": lambda x, y: (_places(y, 5)[..., None] == torch.arange(5)).to(x.dtype),
    "scatter": lambda x, y: x.scatter(1, _places(y, 17)[:, :1], y[:, :1]),
    "scatter value": lambda x, y: x.scatter(1, _places(y, 17), 3.0),
    "scatter_add": lambda x, y: x.scatter_add(1, _places(y, 17), y),
    "scatter_add 0": lambda x, y: x.scatter_add(0, _places(y, 3), y),
    "index_add": lambda x, y: x.index_add(0, _places(y[0, :3], 3), y),
    "index_put": lambda x, y: aten.index_put(x, [None, _places(y[0], 17)], y, True),
    "full": lambda x, y: torch.full_like(x, 2.5) + torch.ones(17) * torch.zeros_like(y) + torch.arange(17),
    "eye": lambda x, y: x[:, :3] @ torch.eye(3, dtype=x.dtype) + torch.linspace(0, 1, 3, dtype=x.dtype),
    "ints": lambda x, y: ((10 * x).long() // 3 + (10 * y).int() % 7 - (5 * x).to(torch.int8)).to(x.dtype),
    "int bits": lambda x, y: ((10 * x).long() & 5 | (10 * y).long() ^ 3) * ~(10 * x).long(),
    "int division": lambda x, y: (10 * x).long() / (1 + (10 * y).long().abs()),
    "int extremes": lambda x, y: torch.maximum((10 * x).long(), (10 * y).int()).amax(1) - (9 * x).long().sum(1),
    "conv1d": lambda x, y: F.conv1d(x[:, None, :], y[:1, None, :3]),
    "conv of each channel": lambda x, y: F.conv1d(x[None], y[:, None, :4], groups=3, padding=3),
    "conv2d": lambda x, y: F.conv2d(
        (x * 1.0).expand(2, 4, 3, 17), y.reshape(-1)[:48].view(6, 2, 2, 2), y[0, :6], (1, 2), (1, 2), (2, 1), 2
    ),
}


def _places(y: Tensor, size: int) -> Tensor:
    """Indices below `size`, out of floats."""
    return (y.abs() * 1000).long() % size


_X, _YS = (torch.randn(shape, generator=torch.Generator().manual_seed(3)).double() for shape in ((3, 17), (2, 3, 17)))
_RESULTS = {name: body(_X, _YS[0]) for name, body in FLOAT.items()}
# One compilation for many operations: tracing and LLVM cost less for each than alone.
GROUPS = [list(FLOAT)[n : n + 12] for n in range(0, len(FLOAT), 12)]


def check(names: list[str], rec: Step, ys: list[Tensor], x: Tensor, folder: Folder, tolerances: list[float]) -> None:
    """The outs are those of torch; `names` has the operation of each."""
    found, expected = places(rec, 2)[0], places(rec, 2)[0]
    emit(rec, folder=folder)(CoreCall(2, (), ys, [x], found, ()))
    interpreted(rec, CoreCall(2, (), ys, [x], expected, ()))
    for name, mine, theirs, tolerance in zip(names, found, expected, tolerances, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance / 10, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.getbasetemp() / "cache")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_operations_give_what_torch_gives(group: list[str], folder: Folder) -> None:
    def step(invariants, slices, carry):
        return {"carry": [carry[0] * 1.5], "outs": [FLOAT[name](carry[0], slices[0]) for name in group]}

    ys, x = [_YS.float()], _X.float()
    check(group, recurrence(step, (), ys, [x]), ys, x, folder, [3e-5] * len(group))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_operations_and_what_their_gradients_are_made_of_in_double(group: list[str], folder: Folder) -> None:
    floats = [name for name in group if _RESULTS[name].is_floating_point()]
    grads = [torch.randn(2, *_RESULTS[name].shape).double() for name in floats]
    named: list[str] = []

    def step(invariants, slices, carry):
        y, *coming = slices
        outs: list[Tensor] = []
        for name in group:
            if name in floats:
                value, back, *_ = torch.func.vjp(FLOAT[name], carry[0], y)
                new = [value, *back(coming[floats.index(name)])]
            else:
                new = [FLOAT[name](carry[0], y)]
            outs += new
            named.extend([name] * len(new))
        return {"carry": [carry[0] * 1.5], "outs": outs}

    rec = recurrence(step, (), [_YS, *grads], [_X])
    # torch's own hardsigmoid has a sixth in float32
    tolerances = [1e-7 if name == "hardsigmoid" else 1e-11 for name in named]
    check(named, rec, [_YS, *grads], _X, folder, tolerances)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_of_two_bytes_become_integers_and_bools(dtype: torch.dtype, folder: Folder) -> None:
    kinds = [torch.int64, torch.int32, torch.int8, torch.bool, torch.float64]

    def step(invariants, slices, carry):
        return {"carry": [carry[0] * 1.5], "outs": [(9 * slices[0].to(dtype)).to(kind) for kind in kinds]}

    ys, x = [_YS.float().round(decimals=1)], _X.float()
    check([str(kind) for kind in kinds], recurrence(step, (), ys, [x]), ys, x, folder, [0.0] * len(kinds))


def test_what_is_taken_apart_sees_no_memory_that_nobody_wrote(folder: Folder) -> None:
    """The embedding's gradient takes indices, which it follows: those that memory happens to hold lead anywhere."""

    def step(invariants, slices, carry):
        _, back, *_ = torch.func.vjp(FLOAT["embedding"], carry[0], slices[0])
        return {"carry": [carry[0] * 1.5], "outs": [back(slices[1])[0]]}

    ys = [_YS, torch.randn(2, 3, 17, 17).double()]
    rec = recurrence(step, (), ys, [_X])
    torch.use_deterministic_algorithms(True)  # new memory holds the greatest number
    try:
        check(["embedding"], rec, ys, _X, folder, [1e-11])
    finally:
        torch.use_deterministic_algorithms(False)
