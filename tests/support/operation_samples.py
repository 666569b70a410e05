"""Samples of torch's operations: torch's own for its tests, and ours of other layouts, sizes and values at an edge.

A sample calls an operation with tensors, of which there are others for each of three steps. `samples_of(name, dtype)`
gives a bounded list of them, the same at each call.
"""

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # sparse tensors are in beta
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

STEPS = 3
MOST_ELEMENTS = 2000
MOST_LOOKED_AT = 400  # of torch's samples of one operation
_NO_VALUES = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_NO_ORDER_OF_TIES = {"kthvalue", "argsort", "sort", "topk"}  # torch promises none, and none of the indices
_ROUNDED = {"nn.functional.hardsigmoid": 1e-7, "nn.functional.celu": 1e-7}  # torch's gradients: a factor of 32 bits
_CONTIGUOUS = {"native_group_norm"}  # what torch takes for granted, and does not check
_CASTS = {"byte", "char", "short", "int", "long"}  # of what does not fit in
_NO_SIGNS = {"linalg.eigh"}  # of eigenvectors, of which torch promises none
_GRADIENTS_OF_THEIR_OWN = {"polar", "prod", "var", "std"}  # torch's, of zero and of infinite numbers
OPERATIONS: dict[str, Any] = {
    f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op
    for op in op_db
    if op.name not in _NO_VALUES and "jiterator" not in op.name
}


@dataclass(frozen=True)
class Sample:
    """`form(operation, *tensors)`, for the tensors of each step, in memory in one of the ways of `laid_out`."""

    name: str
    form: Callable[..., Any]
    operation: Callable[..., Any]
    steps: Sequence[Sequence[Tensor]]
    grads: Sequence[bool]
    kind: Any = None  # other samples of it are less of an addition
    layout: str = "plain"
    edge: bool = False  # infinite results are to be expected
    tolerance: float = 0.0
    written: bool = True  # whether the operation that writes to its first tensor is tried, too

    def function(self, *tensors: Tensor) -> Any:
        """What the body of a loop calls."""
        return self.form(self.operation, *tensors)

    def one(self, i: int) -> Tensor:
        """The i-th tensor of the first step."""
        return laid_out(self.steps[0][i], 0, self.layout)

    def stacked(self, i: int) -> Tensor:
        """The i-th tensors of all steps."""
        return laid_out(torch.stack([step[i] for step in self.steps]), 1, self.layout)

    def with_floats(self, change: Callable[[Tensor], Tensor], name: str, edge: bool = True) -> "Sample":
        """With other numbers in the tensors of floats."""
        steps = [[change(x) if x.is_floating_point() or x.is_complex() else x for x in step] for step in self.steps]
        return replace(self, steps=steps, name=f"{self.name} {name}", edge=edge, written=False)


def laid_out(x: Tensor, lead: int, layout: str) -> Tensor:
    """The numbers of x in another order in memory, or of its first row; `lead` dims in front stay where they are."""
    if layout == "plain" or x.dim() <= lead:
        return x
    if layout == "transposed":
        dims = [*range(lead), *reversed(range(lead, x.dim()))]
        return x.permute(dims).contiguous().permute(dims)
    if layout == "stepped":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    assert layout == "expanded"
    return x.narrow(lead, 0, min(1, x.shape[lead])).expand(x.shape)


def samples_of(name: str, dtype: torch.dtype, most: int = 4, extras: bool = True) -> list[Sample]:
    """At most so many of torch's samples of an operation, of as many kinds as there are, and ours."""
    op = OPERATIONS[name]
    found = spread_out(torchs_samples(op, dtype), most)
    if extras:
        found += list(our_samples(op, dtype, found))
    found = [replace(s, tolerance=_ROUNDED.get(name, 0.0)) for s in found]
    if op.inplace_variant is not None:
        found += [in_place(op, s) for s in found if s.written]
    return found


def in_place(op: Any, sample: Sample) -> Sample:
    """The operation that writes to its first tensor, which is the body's own."""

    def form(operation: Any, first: Tensor, *rest: Tensor) -> Any:
        return sample.form(operation, first.clone() if first.dtype is torch.bool else first * 1, *rest)

    return replace(sample, name=f"{sample.name} in place", form=form, operation=op.inplace_variant)


def has_gradients(op: Any, dtype: torch.dtype) -> bool:
    """Whether torch has gradients of an operation for a dtype."""
    return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")


def seeded(seed: int) -> None:
    """Everything that torch's samples draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


# -- torch's own


def torchs_samples(op: Any, dtype: torch.dtype) -> list[Sample]:
    """Those that are small and plain, with the numbers of another seed at each step."""
    lists = []
    for seed in range(STEPS):
        seeded(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = op.sample_inputs("cpu", dtype, requires_grad=has_gradients(op, dtype))
            lists.append([x for x, _ in zip(drawn, range(MOST_LOOKED_AT), strict=False)])
    if len({len(one) for one in lists}) > 1:
        lists = [lists[0]] * STEPS
    made = (_sample(op, str(i), list(same)) for i, same in enumerate(zip(*lists, strict=True)))
    return [s for s in made if s is not None]


def _sample(op: Any, name: str, inputs: Sequence[Any]) -> Sample | None:
    flat = [tree_flatten((s.input, s.args, s.kwargs)) for s in inputs]
    leaves, tree = flat[0]
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    plain = all(leaves[i].layout is torch.strided and not leaves[i].is_quantized for i in places)
    drawn = any(isinstance(x, torch.Generator) for x in leaves)
    if drawn or not plain or sum(leaves[i].numel() for i in places) > MOST_ELEMENTS:
        return None
    same = [one for one, _ in flat if _alike(one, leaves)]
    steps = [[same[t % len(same)][i].detach().clone().contiguous() for i in places] for t in range(STEPS)]

    def form(operation: Any, *tensors: Tensor) -> Any:
        filled = list(leaves)
        for i, x in zip(places, tensors, strict=True):
            filled[i] = x
        first, args, kwargs = tree_unflatten(filled, tree)
        found = operation(first, *args, **kwargs)
        return (found[0], found[1].abs()) if op.name in _NO_SIGNS else found

    options = [
        type(x).__name__ if isinstance(x, (int, float)) else repr(x) for x in leaves if not isinstance(x, Tensor)
    ]
    shapes = [(x.dim(), 0 in x.shape, 1 in x.shape) for x in steps[0]]
    kind = str((tree, options, shapes))
    return Sample(name, form, op.op, steps, [leaves[i].requires_grad for i in places], kind)


def _alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether arguments differ in numbers of tensors alone."""

    def kind(x: Any) -> Any:
        return (x.shape, x.dtype) if isinstance(x, Tensor) else repr(x)

    return [kind(x) for x in a] == [kind(x) for x in b]


def spread_out(samples: Sequence[Sample], most: int) -> list[Sample]:
    """So many of them, of as many kinds as there are: other arguments, other ranks, a size of 0 or 1."""
    kinds: dict[Any, list[Sample]] = {}
    for s in samples:
        kinds.setdefault(s.kind, []).append(s)
    groups = list(kinds.values())
    if len(groups) > most:  # as far from each other as they come
        groups = [groups[i * (len(groups) - 1) // max(most - 1, 1)] for i in range(most)]
    found: list[Sample] = []
    while len(found) < most and any(groups):
        found += [group.pop(len(group) // 2) for group in groups if group]
    return found[:most]


# -- ours

_UNARY = ([], [4], [0], [1], [2, 3], [2, 0, 3], [3, 1, 2])
_BINARY = (([], []), ([], [3]), ([3], []), ([2, 3], [3]), ([2, 1], [1, 3]), ([0, 3], [1, 3]), ([1], [1]),
           ([2, 3], [2, 1]))  # fmt: skip
_INFINITE = (float("inf"), float("-inf"), float("nan"))
# 24 and 12 squared: torch's loops of vectors and of what is left over differ where numbers are NaN
_EDGES = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    -2.0,
    0.5,
    -0.5,
    1.5,
    -1.5,
    2.5,
    -2.5,
    3.0,
    -3.0,
    6.0,
    20.0,
    -30.0,
    1e-8,
    0.1,
    -0.1,
    100.0,
)
_FEW_EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.0, -3.0)
_TIES = ([1.0, 1.0, 0.0, 0.0, -1.0, 1.0], [0.0] * 6, [2.0, float("inf"), 1.0, float("-inf"), 2.0, 2.0],
         [1.0, float("nan"), 3.0, 0.0, -0.0, 3.0])  # fmt: skip


def our_samples(op: Any, dtype: torch.dtype, torchs: Sequence[Sample]) -> Iterator[Sample]:
    """Of all shapes, layouts and edges that the kind of operation has."""
    if isinstance(op, UnaryUfuncInfo):
        yield from _of_shapes(op, dtype, [(shape,) for shape in _UNARY])
        yield from _at_edges(op, dtype, [_EDGES if op.name in _CASTS else (*_EDGES, *_INFINITE)])
    elif isinstance(op, BinaryUfuncInfo):
        yield from _of_shapes(op, dtype, _BINARY)
        if op.name not in _GRADIENTS_OF_THEIR_OWN:
            yield from _at_edges(op, dtype, [(*_FEW_EDGES, *_INFINITE)] * 2)
        yield from _of_two_dtypes(op, dtype)
    elif isinstance(op, ReductionOpInfo):
        yield from _reductions(op, dtype)
    wide = [s for s in torchs if any(x.dim() > 1 and x.numel() > 1 for x in s.steps[0])]
    for layout in ("transposed", "stepped", "expanded") if wide and op.name not in _CONTIGUOUS else ():
        yield replace(wide[0], name=f"{wide[0].name} {layout}", layout=layout, written=False)
    if torchs and dtype.is_floating_point and not isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo)):
        some = wide[0] if wide else torchs[0]
        if op.name not in _NO_ORDER_OF_TIES:
            yield some.with_floats(torch.round, "rounded")
            yield some.with_floats(torch.zeros_like, "zeros")
            yield some.with_floats(torch.ones_like, "equal")


def _random(shape: Sequence[int], dtype: torch.dtype, domain: Any = (None, None)) -> Tensor:
    low, high = (None if x is None else x + d for x, d in zip(domain, (0.1, -0.1), strict=True))
    return torch.testing.make_tensor(list(shape), dtype=dtype, device="cpu", low=low, high=high)


def _domains(op: Any) -> Sequence[Any]:
    if isinstance(op, UnaryUfuncInfo):
        return [op.domain]
    return [(s.get("low"), s.get("high")) for s in (op.lhs_make_tensor_kwargs, op.rhs_make_tensor_kwargs)]


def _plain(op: Any) -> Callable[..., Any]:
    """A form with the arguments that the operation needs beside its tensors."""
    options = op.sample_kwargs("cpu", torch.float64, torch.ones(()))[0] if isinstance(op, UnaryUfuncInfo) else {}
    return lambda operation, *tensors: operation(*tensors, **options)


def _of_shapes(op: Any, dtype: torch.dtype, shapes: Sequence[Any]) -> Iterator[Sample]:
    for each in shapes:
        seeded(0)
        steps = [[_random(s, dtype, d) for s, d in zip(each, _domains(op), strict=True)] for _ in range(STEPS)]
        name = "of " + " ".join(str(s) for s in each)
        yield Sample(name, _plain(op), op.op, steps, [has_gradients(op, dtype)] * len(each), written=len(each) < 2)


def _at_edges(op: Any, dtype: torch.dtype, values: Sequence[Sequence[float]]) -> Iterator[Sample]:
    """Zeros, ones, halves, infinite ones, NaN, each with each other."""
    if not dtype.is_floating_point:
        return
    tensors = [torch.tensor(v, dtype=dtype) for v in values]
    if len(tensors) > 1:
        tensors = list(torch.cartesian_prod(*tensors).t().contiguous())
    steps = [[x.roll(t) if len(values) == 1 else x for x in tensors] for t in range(STEPS)]
    yield Sample("edges", _plain(op), op.op, steps, [has_gradients(op, dtype)] * len(values), edge=True)


def _of_two_dtypes(op: Any, dtype: torch.dtype) -> Iterator[Sample]:
    """Tensors of two dtypes, and one without dims, which yields to the other."""
    for other in (torch.int64, torch.bool, torch.float32) if dtype is torch.float64 else ():
        if not op.supports_dtype(other, "cpu"):
            continue
        for shapes in (([3], [3]), ([3], []), ([], [3])):
            for dtypes in ((dtype, other), (other, dtype)):
                seeded(0)
                like = list(zip(shapes, dtypes, _domains(op), strict=True))
                steps = [[_random(*each) for each in like] for _ in range(STEPS)]
                grads = [has_gradients(op, dtype) and d.is_floating_point for d in dtypes]
                name = " ".join(f"{str(d)[6:]}{s}" for s, d, _ in like)
                written = shapes[0] == [3] and dtypes[0] is dtype
                yield Sample(name, _plain(op), op.op, steps, grads, edge=True, written=written)


def _reductions(op: Any, dtype: torch.dtype) -> Iterator[Sample]:
    """Over all, one dim and none, of ties, of nothing."""
    args, kwargs = next(iter(op.generate_args_kwargs(torch.ones(2, 3), dim=0)), ((), {}))
    kwargs = {k: v for k, v in kwargs.items() if k not in ("dim", "keepdim", "mask")}
    grads = [has_gradients(op, dtype)]
    forms: list[dict[str, Any]] = [{}, {"dim": 0}, {"dim": -1, "keepdim": True}]
    for options in forms:

        def form(operation: Any, x: Tensor, options: dict[str, Any] = options) -> Any:
            return operation(x, *args, **kwargs, **options)

        said = " ".join(f"{k}={v}" for k, v in options.items())
        for shape in ([], [4], [1], [0], [2, 3], [2, 1, 3], [2, 0]):
            seeded(0)
            steps = [[_random(shape, dtype)] for _ in range(STEPS)]
            yield Sample(f"of {shape} {said}", form, op.op, steps, grads)
        for i, ties in enumerate(_TIES if dtype.is_floating_point else ()):
            if op.name.removeprefix("masked.") in _GRADIENTS_OF_THEIR_OWN and not all(map(math.isfinite, ties)):
                continue
            steps = [[torch.tensor(ties, dtype=dtype).roll(t).view(2, 3)] for t in range(STEPS)]
            yield Sample(f"ties {i} {said}", form, op.op, steps, grads, edge=True)
