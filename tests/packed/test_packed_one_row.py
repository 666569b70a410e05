"""One row of NaN, or of infinities, changes no bit of the others: values, gradients and second derivatives.

Every function of the tables has a case in `tests/support/packed_cases.py`, or stands there with the reason why not.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop.packed import PackedTensor, StaticPackedTensor, pack_padded
from tensorloop.packed.table.dispatch import HANDLED, HANDLERS
from tensorloop.packed.table.entries import plain
from tensorloop.packed.table.pointwise import is_pointwise
from tensorloop.packed.table.row import CHANNELS, STATIC
from tensorloop.packed.time import convolution
from tests.support import packed_cases as cases
from tests.support.devices import HERE

LENS = [[3, 0, 4, 1, 2], [9, 40, 1]]
POISON = [torch.nan, torch.inf, -torch.inf]
# No bfloat16 in torch, on the CPU.
WIDE = {"quantile", "nanquantile", "stft", "linalg_matrix_norm", "rnn_tanh", "rnn_relu", "lstm", "gru"}

Rows = list[Tensor]


def leaves(out: Any) -> Iterator[Any]:
    if isinstance(out, (tuple, list)):
        for x in out:
            yield from leaves(x)
    else:
        yield out


def tensor_of(x: Any) -> Tensor:
    """The numbers of what a case gives."""
    return x if isinstance(x, Tensor) else tensor_of(x.packed) if hasattr(x, "packed") else x.values


def rows_of(x: Any) -> list[Tensor]:
    x = x.packed if hasattr(x, "packed") else x
    x = x.trim() if isinstance(x, StaticPackedTensor) else x
    return list(x.detach().unbind())


def run(case: Callable[[Any], Any], make: Callable[[Tensor], Any], values: Tensor, lens: list[int]) -> list[Rows]:
    """Rows of all results, of the gradient and of the second derivative."""
    torch.manual_seed(0)
    x = values.clone().requires_grad_()
    try:
        out = list(leaves(case(make(x))))
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        out = list(leaves(case(make(values))))
    found = [rows_of(y) for y in out]
    grads = [y for y in map(tensor_of, out) if y.requires_grad]
    for _ in range(2):
        seeds = [torch.arange(1, y.numel() + 1).view(y.shape).cos().to(y.dtype) for y in grads]
        try:
            grad = torch.autograd.grad(grads, x, seeds, create_graph=True, allow_unused=True)[0] if grads else None
        except RuntimeError as error:
            if "derivative for" not in str(error):
                raise
            break
        if grad is None:
            break
        found.append(list(grad.detach()[: sum(lens)].split(lens)))
        grads = [grad] if grad.requires_grad else []
    return found


def bits(x: Tensor) -> Tensor:
    """Comparable as they are: every NaN the same, and zeros by their signs."""
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_floating_point():
        return x
    x = torch.where(x.isnan(), torch.nan, x).contiguous()
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_rows_apart(
    case: Callable[[Any], Any], make: Callable[..., Any], lens: list[int], dtype: torch.dtype, name: str
) -> None:
    values = torch.randn(sum(lens), cases.FEATURES, dtype=torch.float64, generator=torch.Generator(HERE).manual_seed(1))
    values = values.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what pads says so
        plain = run(case, lambda x: make(x, lens), values, lens)
        for poison in POISON:
            for b in (n for n, size in enumerate(lens) if size):
                spoilt = values.clone()
                spoilt[sum(lens[:b]) : sum(lens[: b + 1])] = poison
                found = run(case, lambda x: make(x, lens), spoilt, lens)
                assert len(found) == len(plain), name
                for part, (wanted, got) in enumerate(zip(plain, found, strict=True)):
                    # A case may leave empty rows out.
                    kept = [n for n, size in enumerate(lens) if size or len(wanted) == len(lens)]
                    assert len(wanted) == len(kept), f"{name}: result {part} has no rows"
                    for row, one, other in zip(kept, wanted, got, strict=True):
                        same = row == b or torch.equal(bits(one), bits(other))
                        assert same, f"{name}: {poison} in row {b} of {lens} changes row {row} of result {part}"


def packed(x: Tensor, lens: list[int]) -> Any:
    return PackedTensor(x, lens)


def turned(x: Tensor, lens: list[int]) -> Any:
    return PackedTensor(x, lens).transpose(1, 2)


def static(x: Tensor, lens: list[int]) -> Any:
    """With free entries that hold NaN."""
    whole = torch.cat([x, x.new_full((3, *x.shape[1:]), torch.nan)])
    return StaticPackedTensor(whole, torch.tensor(lens), max_len=max(lens))


def test_every_function_of_the_tables_has_a_case_or_a_reason() -> None:
    assert set(cases.PACKED) | set(cases.NO_ROWS) == set(HANDLERS)
    assert not set(cases.PACKED) & set(cases.NO_ROWS)
    assert set(cases.CHANNELS_FIRST) | set(cases.CHANNELS_WITHOUT_ROWS) == set(HANDLED[CHANNELS])
    assert set(HANDLED[STATIC]) <= set(cases.PACKED)


each_lens = pytest.mark.parametrize("lens", LENS, ids=str)
# float32 goes through kernels, bfloat16 through torch's operations, float64 through some of both.
each_dtype = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.extended)],
    ids=str,
)


@each_dtype
@each_lens
@pytest.mark.parametrize("name", cases.PACKED)
@pytest.mark.few
def test_functions_of_packed_tensors(name: str, lens: list[int], dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and name in WIDE:
        dtype = torch.float32
    for case in cases.PACKED[name]:
        assert_rows_apart(case, packed, lens, dtype, name)


@each_dtype
@each_lens
@pytest.mark.parametrize("line", [convolution._LINE, 8], ids=lambda n: f"line {n}")
@pytest.mark.parametrize("name", cases.CHANNELS_FIRST)
def test_functions_of_channels(
    name: str, line: int, lens: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_LINE", line)
    for case in cases.CHANNELS_FIRST[name]:
        assert_rows_apart(case, turned, lens, dtype, name)


@each_dtype
@each_lens
@pytest.mark.parametrize("name", cases.OWN)
@pytest.mark.few
def test_functions_of_our_own(name: str, lens: list[int], dtype: torch.dtype) -> None:
    assert_rows_apart(cases.OWN[name], packed, lens, dtype, name)


@each_dtype
@each_lens
@pytest.mark.parametrize("name", sorted(HANDLED[STATIC]))
@pytest.mark.few
def test_functions_of_static_shape(name: str, lens: list[int], dtype: torch.dtype) -> None:
    """Free entries hold NaN in every run. What a case needs of other functions may not be there."""
    tried = 0
    for case in cases.STATIC_INSTEAD.get(name, cases.PACKED[name]):
        try:
            assert_rows_apart(case, static, lens, dtype, name)
        except (TypeError, AttributeError) as error:  # what the case needs besides is not there
            if not re.search("static|is not there|depends on the lens", str(error)):
                raise
        else:
            tried += 1
    assert tried


@each_lens
@pytest.mark.parametrize("name", cases.STATIC_OWN)
def test_functions_of_static_shape_of_our_own(name: str, lens: list[int]) -> None:
    assert_rows_apart(cases.STATIC_OWN[name], static, lens, torch.float32, name)


# -- pointwise functions: all that take one to three tensors of numbers

NAMES = sorted(
    name
    for name in {n for part in (torch, torch.special, torch.nn.functional, Tensor) for n in dir(part)}
    # In place they are the same kernels.
    if name[0] != "_" and name[-1] != "_" and name != "name" and is_pointwise(name) and name not in HANDLERS
)


def find_pointwise(name: str) -> Callable[..., Any]:
    """The torch function, or the method."""
    for part in (torch, torch.nn.functional, torch.special):
        found = getattr(part, name, None)
        if callable(found):
            return found
    return lambda p, *others: getattr(p, name)(*others)


def find_case(name: str) -> Callable[[Any], Any] | None:
    """The function of as many packed tensors as it takes."""
    if name in cases.POINTWISE or name in cases.POINTWISE_ELSEWHERE:
        return cases.POINTWISE.get(name)
    function = find_pointwise(name)
    for count in (1, 2, 3):
        case = lambda p, count=count: function(*[p, *[cases.second(p)] * (count - 1)])  # noqa: E731
        try:
            out = case(packed(torch.rand(6, cases.FEATURES), [2, 4]))
        except (TypeError, RuntimeError):
            continue
        if isinstance(out, PackedTensor | tuple):
            return case
    return None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.extended)], ids=str)
def test_pointwise_functions(name: str, dtype: torch.dtype) -> None:
    case = find_case(name)
    assert case is not None or name in cases.POINTWISE_ELSEWHERE
    if case is not None:
        assert_rows_apart(case, packed, LENS[0], dtype, name)


# -- what is not rows


def test_masked_select_takes_no_number_of_another_row() -> None:
    values = torch.arange(6.0)
    spoilt = torch.where(values < 2, torch.nan, values)
    mask = torch.tensor([True, False, True, True, False, True])
    for x in (values, spoilt):
        p = PackedTensor(x.clone().requires_grad_(), [2, 4])
        found = p.masked_select(PackedTensor(mask, [2, 4]))
        assert found[1:].tolist() == [2.0, 3.0, 5.0]
        assert torch.autograd.grad(found.sum(), p.values)[0].tolist() == mask.float().tolist()


def test_padding_and_free_entries_of_nan_reach_nothing() -> None:
    x = torch.randn(3, 4, cases.FEATURES)
    lens = [2, 0, 4]
    behind = torch.arange(4) >= torch.tensor(lens)[:, None]
    spoilt = x.masked_fill(behind[..., None], torch.nan)
    found = [pack_padded(y.clone(), lens) for y in (x, spoilt)]
    assert torch.equal(found[0].values, found[1].values)
    full = [StaticPackedTensor.from_padded(y, torch.tensor(lens), 9) for y in (x, spoilt)]
    assert torch.equal(full[0].values, full[1].values)


@pytest.mark.parametrize(
    "case",
    [
        lambda p: p * p.mean(),
        lambda p: p.softmax(0),
        lambda p: p * p.values[-1:].detach(),
        lambda p: torch.nn.functional.batch_norm(p.transpose(1, 2), None, None, training=True),
        lambda p: p * 1 + 0 * p.sum((0, 1)),
    ],
)
def test_what_mixes_rows_is_seen(case: Callable[[Any], Any]) -> None:
    with pytest.raises(AssertionError, match="changes row"):
        assert_rows_apart(case, packed, LENS[0], torch.float32, "mixed")


@pytest.mark.parametrize("lens", [[3], [3, 2]])
def test_sizes_of_one_row_and_the_longest_broadcast_as_ordinary_ones(lens: list[int]) -> None:
    """torch.zeros(1, T) is a packed row in a batch of one, and an ordinary tensor in others."""
    p = PackedTensor(torch.randn(sum(lens), 4), lens)

    def run(x: Any) -> tuple[Any, ...]:
        b, t, _ = x.shape
        q = x.view(b, t, 2, 2).transpose(1, 2)
        i = torch.arange(t)
        far = (i.view(1, t) - i.view((t, 1))).abs() * torch.tensor([1.0, 2.0]).view(2, 1, 1)
        w = q @ q.mT - far + torch.arange(t).view(1, t) + i.view(1, t) * torch.ones(2, 1, 1)
        return w.masked_fill(i.view(1, t) == 1, -1.0).softmax(-1) @ q, q + i.view(1, t, 1), far

    for b, row in enumerate(p.unbind()):
        for got, want in zip(run(p)[:2], run(row[None])[:2], strict=True):
            torch.testing.assert_close(got.transpose(1, 2)[b], want.transpose(1, 2)[0])
    assert torch.equal(plain(run(p)[2]), plain(run(p[0][None])[2]))
    if len(lens) == 1:
        with pytest.raises(ValueError, match=r"as the ragged dim take 1 or 3"):
            torch.add(p, torch.zeros(5, 4))
