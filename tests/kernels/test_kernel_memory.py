"""What a kernel is given and what is in memory: zero tensors, bits that negate and conjugate, strides, no memory."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import kernels, reference
from tensorloop._torch.dispatch import tree_leaves, tree_map_only
from tensorloop.kernels import memory
from tensorloop.kernels.cpu import rows as cpu_rows
from tensorloop.kernels.cpu import segment_reductions
from tensorloop.kernels.eager.past import past_attend
from tensorloop.kernels.sight import Sight
from tensorloop.packed import PackedTensor
from tests.support.cuda_cases import (
    DISGUISES,
    OPERATIONS,
    arguments,
    conjugated,
    expanded,
    kernel,
    negated,
    offsets_of,
    some_moves,
)

PACKAGE = Path(kernels.__file__).parent


@pytest.fixture(autouse=True)
def gather_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "LARGE", 0)
    monkeypatch.setattr(cpu_rows, "LONG", 0)


# ---- arguments for every row of the table


def _slots(dtype: torch.dtype, rows: int) -> tuple[Tensor, ...]:
    return torch.randn(4, rows, 6).to(dtype), torch.arange(rows) % 4, torch.randn(rows, 6).to(dtype)


def _ids(rows: int) -> Tensor:
    return torch.tensor([0, 2][:rows], dtype=torch.int64)


def _edits(rows: int) -> tuple[Any, ...]:
    lens = [3, 0, 5][:rows]
    return torch.randint(0, 4, (sum(lens),)), offsets_of(lens), torch.randint(0, 4, (4 * rows,)), offsets_of([4] * rows)


def _pool(rows: int) -> tuple[Any, ...]:
    pool = [torch.full((rows, 2), -1.0), torch.full((rows, 2), -1.0).double(), torch.zeros(rows, 2).long()]
    ends, bound = -torch.rand(2, rows, 3)
    return (
        (ends, ends.double()),
        (ends + 0.5, bound),
        [*pool, *torch.zeros(2, rows)],
        torch.ones(rows).bool(),
        1,
        "exact",
    )


def _attend(rows: int) -> tuple[Any, ...]:
    q, prefix, slots = torch.randn(rows, 3, 4, 2), torch.randn(2, 5, rows, 2, 2), torch.randn(2, 6, rows, 3, 2, 2)
    return (
        q,
        list(prefix),
        list(slots),
        torch.ones(2, rows).long(),
        torch.full((4, rows, 3), 2),
        Sight(0.5, causal=False),
    )


def _past(rows: int, *, reverse: bool = False) -> tuple[Any, ...]:
    q, k, v = torch.randn(rows, 2, 4, 3), *torch.randn(2, 5, rows, 2, 3)
    sight = Sight(0.5, first=torch.ones(rows).long(), bias=torch.randn(1, 4, 2, 5))
    if not reverse:
        return q, k, v, sight
    return torch.randn_like(q), q, k, v, *past_attend(q, k, v, sight), sight, torch.zeros_like(k), torch.zeros_like(v)


def _ctc(rows: int) -> tuple[Any, ...]:
    frames, tokens = [4, 0, 5][:rows], [1, 0, 2][:rows]
    values = torch.randn(sum(frames), 5).log_softmax(-1)
    return values, offsets_of(frames), torch.randint(0, 4, (sum(tokens),)), offsets_of(tokens), 4


def _rnnt(rows: int) -> tuple[Any, ...]:
    frames, widths = [2, 1, 3][:rows], torch.tensor([2, 1, 3][:rows], dtype=torch.int64)
    sizes = [n * int(width) for n, width in zip(frames, widths, strict=True)]
    return -torch.rand(sum(sizes), 2), offsets_of(sizes), widths


# operation -> the arguments, of a size 0 or about 3, in a dtype where it takes any; which of the tensors it writes to.
CASES: dict[str, Callable[[int, torch.dtype], tuple[Any, ...]]] = {
    **{
        name: lambda n, dtype, name=name: arguments(name, [2, 0, 7, 1][: 2 * n], 5, dtype)  # a call of its own each
        for name in OPERATIONS
    },
    "regroup": lambda n, dtype: ([torch.randn(n, 4).to(dtype), torch.randn(n, 6).to(dtype)], some_moves()),
    "regroup_sums": lambda n, dtype: ([torch.randn(n, w).to(dtype) for w in (5, 7, 0)], some_moves().transposed),
    "write_rows": lambda n, dtype: (*_slots(dtype, n), torch.arange(n) != 1),
    "take_rows": lambda n, dtype: (*_slots(dtype, n)[:2], torch.arange(n) != 1),
    "edit_distance": lambda n, _: _edits(n),
    "edit_cost": lambda n, _: (*_edits(n), 1.0, 0.5, torch.rand(4, 4)),
    "edit_paths": lambda n, _: (*_edits(n), 1.0, 0.5, torch.rand(4, 4)),
    "beam_best": lambda n, _: (-torch.rand(n, 3), -torch.rand(len(_ids(n)), 3, 40), 4, 1, _ids(n)),
    "beam_pool": lambda n, _: _pool(n),
    "beam_chosen": lambda n, _: (torch.ones(n, 3).long(), torch.full((n, 3), 2), _ids(n), 40, 1),
    "beam_ancestors": lambda n, _: (
        torch.ones(4, n, 3).int(), torch.zeros(n, 3).int(), torch.full((n, 3), 2), _ids(n), 0, 2,
    ),
    "beam_trace": lambda n, _: (torch.ones(5, n, 3).long(), torch.full((n, 2), 3), torch.full((n, 2), 2)),
    "beam_attend": lambda n, _: _attend(n),
    "ctc_loss": lambda n, _: _ctc(n),
    "ctc_loss_grad": lambda n, _: (torch.randn(n), *_ctc(n)),
    "rnnt_loss": lambda n, _: _rnnt(n),
    "rnnt_loss_grad": lambda n, _: (torch.randn(n), *_rnnt(n)),
    "linear_recurrence": lambda n, _: (torch.randn(4, n), torch.randn(4, n), torch.randn(1, n), 0, True),
    "matrix_recurrence": lambda n, _: (torch.randn(4, 1, n, n), torch.randn(4, 3, n), torch.randn(1, 3, n), 0, True),
    "past_attend": lambda n, _: _past(n),
    "past_attend_grad": lambda n, _: _past(n, reverse=True),
}  # fmt: skip
WRITTEN = {
    "past_attend_grad": {8, 9},
    "write_rows": {0},
    "take_rows": {0},
    "beam_pool": {4, 5, 6, 7, 8},
    "beam_ancestors": {0, 1},
}
ANY_DTYPE = [
    *(name for name in OPERATIONS if name.endswith("_rows")),
    "regroup",
    "regroup_sums",
    "write_rows",
    "take_rows",
]


def _case(operation: str, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return CASES[operation](rows, dtype)


def _both(operation: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernel, and the torch operations."""
    return _alone("cpu", operation), _alone("eager", operation)


def _alone(backend: str, operation: str) -> Callable[..., Any]:
    """An operation without what a loss hands to its backward, which is each backend's own."""
    run = kernel(backend, operation)
    if operation in ("ctc_loss", "rnnt_loss"):
        return lambda *args: run(*args)[0]
    if operation in ("ctc_loss_grad", "rnnt_loss_grad"):
        forward = kernel(backend, operation.removesuffix("_grad"))
        return lambda grad, *args: run(grad, *args, *forward(*args))
    return run


def _disguised(args: Any, place: int, disguise: Callable[[Tensor], Tensor]) -> Any:
    """The arguments with the tensor of that number as another of its kind."""
    numbers = iter(range(len(tree_leaves(args))))
    return tree_map_only(Tensor, lambda x: disguise(x) if next(numbers) == place else x, args)


def _told(function: Callable[..., Any], args: Any) -> Any:
    """What comes of a call, and what stands in its arguments then; the kind of error where it is refused."""
    try:
        out = function(*args)
    except (RuntimeError, ValueError, IndexError) as error:
        return type(error)
    return [x + 0 for x in tree_leaves((out, args)) if isinstance(x, Tensor | int)]


def test_disguises_are_disguises() -> None:
    x = torch.randn(3, 2, dtype=torch.complex64)
    assert all(disguise(x)._is_zerotensor() for disguise in DISGUISES[:2])
    assert negated(x).is_neg()
    assert conjugated(x).is_conj()
    assert all(torch.equal(disguise(x), x) for disguise in DISGUISES[2:-1])


def test_every_kernel_has_arguments_here() -> None:
    assert CASES.keys() == kernels.TABLE.keys()


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("operation", CASES)
@pytest.mark.extended("zero_further_on", "turned", "apart")
def test_a_tensor_is_what_it_reads_as(operation: str, disguise: Callable[[Tensor], Tensor]) -> None:
    dtype = torch.complex64 if operation in ANY_DTYPE else torch.float32
    by_numba, by_torch = _both(operation)
    tensors = [x for x in tree_leaves(_case(operation, 3, dtype)) if isinstance(x, Tensor)]
    for place in range(len(tensors)):
        if disguise is expanded and place in WRITTEN.get(operation, ()):
            continue
        plain = _disguised(_case(operation, 3, dtype), place, lambda x: torch.clone(disguise(x).contiguous()))
        expected = _told(by_numba, plain)
        given = _disguised(_case(operation, 3, dtype), place, disguise)
        found = _told(by_numba, given)
        if "zero" in disguise.__name__ and place in WRITTEN.get(operation, ()):
            assert found is RuntimeError  # nobody can write there
            continue
        if not isinstance(expected, list):
            assert found is expected
            continue
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        if not tensors[place].is_floating_point():  # torch itself ends the process where a zero tensor is an index
            given = _disguised(_case(operation, 3, dtype), place, lambda x: torch.clone(disguise(x).contiguous()))
        else:
            given = _disguised(_case(operation, 3, dtype), place, disguise)
        torch.testing.assert_close(found, _told(by_torch, given), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("operation", CASES)
def test_empty_tensors(operation: str) -> None:
    by_numba, by_torch = _both(operation)
    found, expected = (_told(function, _case(operation, 0)) for function in (by_numba, by_torch))
    assert isinstance(found, list)
    torch.testing.assert_close(found, expected)


# ---- what has no memory


def test_where_nothing_is_in_memory_a_kernel_says_so() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, offsets = torch.randn(5, 4), offsets_of([2, 3])
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    seen = []

    def of_a_transform(row: Tensor) -> Tensor:
        with pytest.raises(TypeError, match=r"a Tensor on cpu of layout torch\.strided has none here"):
            cpu_rows.spread_rows(row, offsets, 5)
        seen.append(row)
        return row

    torch.func.vmap(of_a_transform)(x.expand(2, 5, 4)[:, :2])
    assert seen
    kinds = {"a Tensor on meta": x.to("meta"), "a FakeTensor on cpu": fake}
    for by_numba in (
        lambda x: cpu_rows.gather_rows(x, offsets[1:]),
        lambda x: segment_reductions.segment_sum(x, offsets),
    ):
        for kind, other in kinds.items():
            with pytest.raises(TypeError, match=f"kernels read numbers in memory, and {kind}"):
                by_numba(other)
    with pytest.raises(TypeError, match=r"of layout torch\.sparse_coo has none here"):
        memory.address(x.to_sparse())


def test_an_empty_tensor_has_an_address_or_none() -> None:
    assert memory.address(torch.empty(0, 3)) >= 0
    assert memory.address(torch.zeros(2)[2:]) >= 0
    assert memory.address(torch._efficientzerotensor((0, 3))) == 0  # pyright: ignore[reportPrivateImportUsage]


def test_addresses_come_from_one_place() -> None:
    found = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"data_ptr|\.numpy\(\)|from_dlpack|__array_interface__", path.read_text())
    }
    assert found == {"memory.py"}


# ---- as it comes: a second derivative of an L1 loss


def _rows_of(x: Tensor) -> list[Tensor]:
    return list(x.split([2, 3]))


OPERATIONS_OF_ROWS: dict[str, tuple[Callable[[PackedTensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "pad": (lambda p: p.pad()[:, :, :], lambda x: torch.nn.utils.rnn.pad_sequence(_rows_of(x), batch_first=True)),
    "sum": (lambda p: p.sum(1), lambda x: torch.stack([row.sum(0) for row in _rows_of(x)])),
    "mean": (lambda p: p.mean(1), lambda x: torch.stack([row.mean(0) for row in _rows_of(x)])),
    "std": (lambda p: p.std(1), lambda x: torch.stack([row.std(0) for row in _rows_of(x)])),
    "amax": (lambda p: p.amax(1), lambda x: torch.stack([row.amax(0) for row in _rows_of(x)])),
    "max": (lambda p: p.max(1).values, lambda x: torch.stack([row.max(0).values for row in _rows_of(x)])),
    "softmax": (lambda p: p.softmax(1).values, lambda x: torch.cat([row.softmax(0) for row in _rows_of(x)])),
    "log_softmax": (
        lambda p: p.log_softmax(1).values, lambda x: torch.cat([row.log_softmax(0) for row in _rows_of(x)]),
    ),
    "logsumexp": (lambda p: p.logsumexp(1), lambda x: torch.stack([row.logsumexp(0) for row in _rows_of(x)])),
    "cumsum": (lambda p: p.cumsum(1).values, lambda x: torch.cat([row.cumsum(0) for row in _rows_of(x)])),
    "flip": (lambda p: p.flip(1).values, lambda x: torch.cat([row.flip(0) for row in _rows_of(x)])),
    "attention": (
        lambda p: tl.attention(*(p.unflatten(-1, (2, 2)),) * 3).values,
        lambda x: reference.attention_packed(*[x.unflatten(-1, (2, 2))] * 3, q_lens=[2, 3], k_lens=[2, 3]),
    ),
    "regroup": (
        lambda p: torch.cat(tl.regroup([p.values], [["a", "b"]], [[1, 3]], [["b", "a"], ["a", "a"]]), 1),
        lambda x: torch.cat([x[:, 1:], x[:, :1], x[:, :1], x[:, :1]], 1),
    ),
    "array": (
        lambda p: tl.TensorArray.unstack(p.values)[:4] + tl.TensorArray.unstack(p.values)[1:5],
        lambda x: x[:4] + x[1:5],
    ),
    "write_rows": (
        lambda p: tl.TensorArray(capacity=2).write_rows(torch.zeros(5, dtype=torch.int64), p.values).stack(),
        lambda x: x[None],
    ),
    "scan": (
        lambda p: tl.scan(lambda c, x: (torch.sin(c + x), c), p.values[0], p.values, checkpoints=2)[1],
        lambda x: reference.scan(lambda c, y: (torch.sin(c + y), c), x[0], x)[1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("operation", OPERATIONS_OF_ROWS)
@pytest.mark.few
def test_second_derivatives_of_an_absolute_value(operation: str, dtype: torch.dtype) -> None:
    ours, plain = OPERATIONS_OF_ROWS[operation]
    torch.manual_seed(3)
    v = torch.randn(5, 4, dtype=dtype, requires_grad=True)
    found = []
    for out in (ours(PackedTensor(v, [2, 3])), plain(v)):
        (grad,) = torch.autograd.grad(out.abs().sum(), v, create_graph=True)
        found.append((grad, *torch.autograd.grad(grad.square().sum(), v, materialize_grads=True)))
    tolerance = {torch.float16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)
