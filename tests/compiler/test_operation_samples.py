"""Operations with the arguments of torch's own tests, in loops of one operation: the same compiled as not."""

from typing import Any

import pytest
import torch

from tensorloop.compiler.graph.simplify import functional
from tests.support.operation_loops import PLACEMENTS, Verdict, judged
from tests.support.operation_samples import samples_of

# Each has a way of its own through a compiled loop: kinds of the emitter's, rules for all steps, decompositions, views
# and their copies, gradients that write in place (index_add_, pow_, masked_fill_, div_, copy_, put_).
GROUPS: dict[str, list[str]] = {
    "pointwise": ["pow", "clamp", "where", "xlogy", "nn.functional.gelu", "sgn", "round"],
    "reductions": ["amax", "std_mean", "prod", "logsumexp", "norm", "cummax", "norm.inf"],
    "views": ["diag", "expand_copy", "as_strided", "unfold", "tensor_split", "reshape", "diagonal_scatter"],
    "indexing": ["index_fill", "index_add", "index_copy", "take_along_dim", "masked_fill", "put"],
    "products": ["addmv", "addr", "baddbmm", "cdist", "tensordot", "trace"],
    "linalg": ["linalg.inv", "linalg.solve_triangular", "linalg.qr", "lu_solve"],
    "nets": ["nn.functional.group_norm", "nn.functional.normalize", "nn.functional.conv_transpose1d",
             "nn.functional.max_pool2d", "nn.functional.nll_loss", "nn.functional.embedding"],
}  # fmt: skip
OTHER_DTYPES = {
    torch.complex64: ["pow", "sgn", "prod", "addmv"],
    torch.int64: ["pow", "addmv", "amax", "clamp", "cummax", "div.floor_rounding"],
    torch.bool: ["addr", "amax", "where", "masked_fill", "cat"],
    torch.bfloat16: ["pow", "nn.functional.group_norm", "std_mean", "addmv", "nn.functional.gelu"],
}
MOST = 3  # samples of an operation: all of them are for `python tests/fuzz/operations.py`
# What torch's formulas for gradients do to tensors of their own.
IN_GRADIENTS = {
    *("pow_.Scalar", "pow_.Tensor", "masked_fill_.Scalar", "masked_fill_.Tensor", "div_.Tensor", "div_.Scalar"),
    *("mul_.Tensor", "mul_.Scalar", "add_.Tensor", "add_.Scalar", "sub_.Tensor", "sub_.Scalar", "copy_.default"),
    *("index_add_.default", "index_copy_.default", "index_put_.default", "index_fill_.int_Scalar", "put_.default"),
    *("scatter_.src", "scatter_.value", "scatter_add_.default", "fill_.Scalar", "fill_.Tensor", "zero_.default"),
    *(
        "neg_.default",
        "exp_.default",
        "log_.default",
        "sqrt_.default",
        "sgn_.default",
        "tril_.default",
        "triu_.default",
    ),
    *("clamp_.default", "clamp_min_.default", "squeeze_.dim", "unsqueeze_.default", "conj_physical_.default"),
}


def finds(name: str, dtype: torch.dtype, extras: bool) -> list[Any]:
    """What differs, of some samples of all kinds: (operation, sample, placement, why)."""
    samples = samples_of(name, dtype, 2 if extras else 1, extras)
    samples = [samples[i * len(samples) // MOST] for i in range(MOST)] if len(samples) > MOST else samples
    places = [(s, place) for i, s in enumerate(samples) for place in (PLACEMENTS if not i else PLACEMENTS[:3])]
    verdicts = [(name, s.name, place, judged(s, place)) for s, place in places]
    return [v for v in verdicts if v[-1].kind == "different"]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.extended
def test_floats(group: str):
    assert [find for name in GROUPS[group] for find in finds(name, torch.float64, True)] == []


def test_determinants_of_transposed_matrices():
    """The formula of their gradient asks how a matrix is laid out, when the step is written down."""
    samples = [s for s in samples_of("linalg.det", torch.float64) if s.layout == "transposed"]
    assert samples
    assert [v for s in samples for p in PLACEMENTS if (v := judged(s, p)).kind == "different"] == []


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
@pytest.mark.extended("int64", "bool", "complex64")
def test_other_dtypes(dtype: torch.dtype):
    assert [find for name in OTHER_DTYPES[dtype] for find in finds(name, dtype, False)] == []


@pytest.mark.parametrize("name", ["nn.functional.gelu", "nn.functional.normalize", "diff", "linalg.norm"])
def test_second_derivatives(name: str):
    sample = samples_of(name, torch.float64, 1, False)[0]
    assert [judged(sample, place, second=True) for place in ("carry", "xs", "closed")] == [Verdict("equal")] * 3


def test_what_writes_in_place_has_a_form_that_does_not():
    """The overload of that name may be another: in `pow.Scalar` the base is a number, in `pow_.Scalar` the exponent."""
    found = {}
    for operation in in_place_operations():
        anew = functional(operation)
        if anew is not None:
            found[str(operation).removeprefix("aten.")] = anew
            assert arguments(anew) == arguments(operation), operation
            assert not anew._schema.is_mutable
    assert sorted(IN_GRADIENTS - set(found)) == []
    assert found["pow_.Scalar"] == torch.ops.aten.pow.Tensor_Scalar


def in_place_operations() -> list[Any]:
    """All of torch's."""
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name.removeprefix("aten::") for s in schemas if s.name.startswith("aten::") and s.name.endswith("_")}
    packets = [getattr(torch.ops.aten, name) for name in sorted(names) if not name.startswith("__")]
    overloads = [getattr(packet, n) for packet in packets for n in packet.overloads()]
    return [operation for operation in overloads if operation._schema.is_mutable]


def arguments(operation: Any) -> list[Any]:
    """What a call of it is made of."""
    return [(a.name, str(a.type), a.kwarg_only, a.default_value) for a in operation._schema.arguments]
