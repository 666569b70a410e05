"""The size of a ragged dim: torch makes tensors by it, and it is no number for anybody who takes it for one."""

import copy
import dis
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorloop as tl
from tensorloop.packed import PackedTensor
from tensorloop.packed.table.entries import plain
from tests.support.devices import HERE

P = PackedTensor(torch.randn(5, 3), [2, 3])
PADDED = torch.randn(2, 1, 3)
T: Any = P.shape[1]
LENS = [[2, 3], [3, 0, 1, 5], [4, 4], [0, 0], [1], []]


def packed(lens: list[int], *features: int) -> PackedTensor:
    return PackedTensor(torch.randn(sum(lens), *features, dtype=torch.float64), torch.tensor(lens, dtype=torch.int64))


def test_it_equals_none_in_a_shape():
    assert P.shape == (2, None, 3)
    assert (2, None, 3) == P.shape == P.size()
    assert P.shape[1] == P.size(1) == None  # noqa: E711
    assert P.shape != (2, None, 4)
    assert (repr(P.shape), f"{T}") == ("(2, *, 3)", "*")
    assert P.transpose(0, 1).shape == (None, 2, 3)
    for other in (copy.copy(T), copy.deepcopy(T), pickle.loads(pickle.dumps(T))):
        assert other == T
        assert (2, other) == (2, T)


def test_no_cache_by_shapes_holds_the_rows_of_a_batch():
    for size in (T, 2 * T, P.shape):
        with pytest.raises(TypeError, match="unhashable"):
            hash(size)


def test_once_a_size_is_itself():
    for size in (1 * T, T * 1):
        assert size is T
    one = packed([3], 4)
    b, t, _ = one.shape
    assert b * t == 3
    assert one.view(b * t, 2, 2).shape == (3, 2, 2)
    assert one.view(b * t, 4).view(b, t, 4).shape == (1, None, 4)


def test_shapes_are_equal_where_lens_are():
    assert P.shape == PackedTensor(torch.randn(5, 3), [2, 3]).shape
    assert P.shape != PackedTensor(torch.randn(5, 3), [4, 1]).shape
    assert P.shape != PackedTensor(torch.randn(6, 3), [3, 3]).shape
    assert T == P[..., 0].size(1) != P[:1].size(1)
    # As the padded tensor: code compares the sizes of a padded mask.
    assert P.pad().shape == P.shape == (2, 3, 3)
    assert P.shape != (2, 2, 3)
    assert T != "ragged"


def test_whether_there_is_more_than_one_step_is_answered_by_the_longest_row():
    """As models ask that have a way for a decoder's one query beside one for all."""
    for lens, several in (([3, 1], True), ([0, 4], True), ([1, 1], False), ([1, 0], False), ([0], False)):
        size = packed(lens).shape[1]
        assert (size > 1, size >= 2, size.__gt__(1)) == (several,) * 3
        assert (size <= 1, size < 2, size != 1) == (not several, not several, max(lens) != 1)
        assert (size > 0, size >= 1, bool(size)) == (max(lens) > 0,) * 3
        assert not size < 0


def test_it_is_compared_where_all_rows_agree():
    assert T > 1
    assert not T > 3
    assert T <= 3
    assert T < 3.5
    assert P[:, :2].shape[1] <= T
    assert bool(T)
    assert (min(T, 1), max(T, 9)) == (1, 9)
    assert not packed([0, 0]).shape[1]
    empty = packed([]).shape[1]
    assert not empty
    assert empty < 1
    for compare in (lambda: T > 2, lambda: T < 3, lambda: packed([2, 0]).shape[1] > 1.5):
        with pytest.raises(TypeError, match=r"rows 0 and 1, of 2 and [30] entries, answer differently"):
            compare()


def test_operations_on_packed_tensors_take_it_for_the_ragged_dim():
    b, t, d = P.shape
    wide: Any = P[..., None]
    assert P.view(b, t, d, 1).shape == P.reshape(-1, t, 3, 1).shape == P.view((b, t, -1, 1)).shape == (2, None, 3, 1)
    assert wide.expand(b, t, d, 4).shape == wide.expand(-1, t, -1, 4).shape == (2, None, 3, 4)
    assert P.expand(P.shape).shape == P.expand_as(P).shape == (2, None, 3)
    assert torch.equal(P[:, :t].values, P.values)
    assert P[:, t:].lens.tolist() == [0, 0]
    shorter = P[:, 1:].shape[1]
    assert P[:, :shorter].lens.tolist() == [1, 2]
    assert P[:, shorter:].lens.tolist() == [1, 1]
    for refused in (lambda: P.view(b, shorter, d), lambda: P.expand(b, shorter, d), lambda: P.view(b * shorter, d)):
        with pytest.raises(ValueError, match=r"a size of other rows.* the first row that differs is 0: 2 and 1"):
            refused()


ROWS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "zeros": lambda b, t, x: torch.zeros(b, t, 2),
    "ones of a shape": lambda b, t, x: torch.ones((b, t), dtype=torch.float64),
    "full": lambda b, t, x: torch.full((b, t, 2, 3), 0.5),
    "size": lambda b, t, x: torch.zeros(size=(b, t)),
    "new_zeros": lambda b, t, x: x.new_zeros(b, t, 4),
    "new_full": lambda b, t, x: x.new_full((b, t), 2),
    "new_ones": lambda b, t, x: torch.ones(1).new_ones((b, t)),
    "one longer": lambda b, t, x: torch.zeros(b, t + 1, 2),
    "positions": lambda b, t, x: torch.arange(t).unsqueeze(0).expand(b, t),
    "broadcast_to": lambda b, t, x: torch.arange(t).broadcast_to((b, t)),
    "repeat": lambda b, t, x: torch.arange(b * 2.0).view(b, 1, 2).repeat(1, t, 1)[:1],
    "tile": lambda b, t, x: torch.arange(2.0).tile(b, t, 1),
    "table": lambda b, t, x: x + torch.arange(60.0).sin().view(1, 20, 3)[:, :t],
    "one longer of a table": lambda b, t, x: x + torch.arange(60.0).sin().view(1, 20, 3)[:, 1 : t + 1],
    "table without a batch": lambda b, t, x: x + torch.arange(60.0).sin().view(20, 3)[:t],
    "expand a table": lambda b, t, x: torch.arange(60.0).view(1, 20, 3)[:, :t].expand(b, -1, -1) * x,
    "expand to rows": lambda b, t, x: torch.arange(60.0).view(1, 20, 3)[:, :t].expand(b, t, -1),
    "position embedding": lambda b, t, x: x + F.embedding(torch.arange(t), torch.arange(60.0).view(20, 3)),
    "masked steps": lambda b, t, x: x.masked_fill(((torch.arange(t) >= 1) & (torch.arange(t) < 3))[None, :, None], 0),
    "chosen steps": lambda b, t, x: torch.where(torch.arange(t)[None, :, None] % 2 == 0, x, -x),
    "triangle": lambda b, t, x: torch.tril(torch.ones((t, t)), 1)[:, :1].sum(1) + x[..., 0],
    "eye": lambda b, t, x: torch.eye(t)[:, :1].sum(1) + x[..., 0],
    "there and back": lambda b, t, x: (x.view(b * t, 3) * 2).view(b, t, 3, 1),
    "there and back by -1": lambda b, t, x: (x.reshape(-1, 3) * 2).reshape((b, t, 3)),
    "unflatten": lambda b, t, x: x.flatten(0, 1).unflatten(0, (b, t)),
    "narrow": lambda b, t, x: x + torch.arange(60.0).view(20, 3).narrow(0, 0, t),
}


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS.keys())
def test_what_is_made_by_sizes_is_that_of_every_row_alone(make: Callable[..., Any], lens: list[int]):
    x = packed(lens, 3)
    out = make(x.shape[0], x.shape[1], x)
    assert len(out.unbind()) == (min(1, len(lens)) if out.shape[0] == 1 != len(lens) else len(lens))
    for b, row in enumerate(out.unbind()):
        alone = x[b].unsqueeze(0)
        expected = make(1, alone.shape[1], alone)[0]
        assert (row.shape, row.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(row, expected)


def test_what_is_drawn_by_sizes_is_packed():
    torch.manual_seed(0)
    b, t, d = P.shape
    made: Any = torch.empty(b, t, d)
    assert made.lens.tolist() == [2, 3]
    made = torch.rand(b, t), torch.randint(9, (b, t))
    assert made[0].values.shape == made[1].values.shape == (5,)
    assert torch.randint(3, 9, size=(b, t, 2)).shape == torch.randn(b, t, 2, dtype=torch.float64).shape


def test_what_has_no_rows_is_of_the_longest():
    b, t, d = P.shape
    assert plain(torch.arange(t)).tolist() == plain(torch.arange(0, end=t)).tolist() == [0, 1, 2]
    assert plain(torch.arange(1, t, 2, dtype=torch.float32)).tolist() == [1]
    assert torch.zeros(1, t, d).shape == (1, 3, 3)
    assert torch.zeros((t, t)).shape == torch.eye(t).shape == torch.ones(b, t, t)[0].shape == (3, 3)
    assert torch.zeros((t, b, d)).shape == (3, 2, 3)
    assert torch.zeros(7, t).shape == nn.Transformer.generate_square_subsequent_mask(t)[:1].expand(7, t).shape == (7, 3)
    assert F.one_hot(torch.arange(2), t).shape == (2, 3)
    assert torch.ones(4).expand(5, t, 4).shape == torch.ones(1, 1, 4).repeat(5, t, 1).shape == (5, 3, 4)
    padded = torch.randn(2, 3, 4)
    for again in (padded.view(b, t, 2, 2), padded.view(b * t, 4).view(b, t, 2, 2)):
        assert torch.equal(plain(again), padded.view(2, 3, 2, 2))
    table = torch.zeros(1, 9)
    table[:, :t] = 1
    assert table.sum() == 3


def test_minus_one_is_found_where_it_is_clear_what_is_padding():
    b, t, _ = P.shape
    assert torch.zeros(5, 4).view(b * t, -1).shape == (5, 4)
    assert torch.zeros(5, 4).view(b, t, 2, -1).shape == (2, None, 2, 2)
    assert torch.zeros(2, 3, 4).view(b * t, -1).shape == (6, 4)
    assert torch.equal(plain(torch.zeros(2, 3, 4).view(b, t, -1)), torch.zeros(2, 3, 4))
    equal = packed([3, 3], 1)
    assert torch.zeros(2, 3, 4).view(2, equal.shape[1], 2, -1).shape == (2, None, 2, 2)
    assert torch.zeros(2, 3, 4).view(2 * equal.shape[1], -1).shape == (6, 4)
    unclear: Any = packed([2, 0]).shape[1]
    assert torch.zeros(2, 2, 4).view(2, unclear, 4).shape == (2, 2, 4)
    assert torch.zeros(2, 4).view(2, unclear, 4).shape == (2, None, 4)
    for view in (lambda x: x.view(2, unclear, -1), lambda x: x.view(2 * unclear, -1)):
        with pytest.raises(TypeError, match=r"view: \(2, 2, 4\) may be padded or not; write all sizes as numbers"):
            view(torch.zeros(2, 2, 4))


@pytest.mark.parametrize("lens", [[3, 2, 1], [3, 0], [3], [1, 1]])
def test_minus_one_rows_are_those_of_the_size(lens: list[int]) -> None:
    p = packed(lens, 4)
    n: Any = p.shape[1]
    flat = p.reshape(-1, 4)  # [3, 2, 1] has as many entries as two rows of the longest have
    for again in (flat.view(-1, n, 4), flat.reshape((-1, n, 2, 2)).flatten(2), flat.unflatten(0, (-1, n))):
        assert again.lens.tolist() == lens
        assert torch.equal(again.values, p.values)
    with pytest.raises(TypeError, match=r"view: .* mixes entries of rows; write the number of rows for -1"):
        flat.view(-1, n, 2)


def test_gradients_come_through_what_sizes_make():
    x = packed([2, 0, 3], 4).requires_grad_()
    b, t, d = x.shape
    weight, first = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 1, 4, dtype=torch.float64).requires_grad_()
    y = ((x.view(b * t, d) @ weight).view(b, t, d) + first.expand(b, t, d)).sin()
    y.values.sum().backward()
    for n, row, given in zip(x.grad.unbind(), x.unbind(), first.detach(), strict=True):  # pyright: ignore
        alone = row.detach().requires_grad_()
        (alone @ weight + given).sin().sum().backward()
        torch.testing.assert_close(n, alone.grad)
    assert first.grad is not None
    assert first.grad[1].eq(0).all()
    assert not first.grad[2].eq(0).any()


def test_gradcheck_of_an_expanded_tensor():
    b, t, _ = packed([2, 0, 1], 1).shape
    x = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: x.expand(b, t, 2).values, x)
    assert torch.autograd.gradcheck(lambda x: x.repeat(1, t, 2).values, x)
    steps = torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: x.expand(b, t, 2).values, steps)


def test_sizes_are_subtracted_where_the_difference_is_one_number():
    x = packed([3, 1, 5])
    t: Any = x.shape[1]
    longer, shorter = t + 2, t - 1
    assert (t - t, longer - t, t - longer, shorter - t) == (0, 2, -2, -1)
    assert t + 0 == t == t - 0 == longer - 2
    assert shorter == x[:, 1:].shape[1]
    assert (t >= t, t > t, t <= longer, t < longer, t == longer) == (True, False, True, True, False)
    assert torch.arange(t - t, t).shape == (t,)
    assert packed([]).shape[1] - packed([]).shape[1] == 0
    other: Any = packed([3, 1, 4]).shape[1]
    for refused in (lambda: t - other, lambda: t - 2, lambda: t - packed([3, 1]).shape[1]):
        with pytest.raises(TypeError, match=r"(sub|compare): .*write p\.max_len"):
            refused()


@pytest.mark.parametrize("lens", [lens for lens in LENS if lens], ids=str)
def test_heads_that_are_joined_with_the_batch_leave_sizes_equal(lens: list[int]):
    x = packed(lens, 6)
    b, t, _ = x.shape
    q = x.view(b, t, 3, 2).transpose(1, 2).reshape(b * 3, -1, 2)
    s = q @ q.transpose(1, 2)
    assert s.size() == (b * 3, t, t)
    assert q.size(1) == t
    assert (q.size(1) - t, q.size(1) >= t, t > q.size(1)) == (0, True, False)
    if len(set(lens)) > 1:
        assert q.size(1) != x[:, 1:].shape[1] != t
        assert q.size(1) != packed(lens[::-1] * 3).shape[1]


NUMBERS: dict[str, Any] = {
    "range": lambda: range(T),
    "mean": lambda: P.sum(1) / T,
    "half": lambda: T // 2,
    "less than there is": lambda: T - 3,
    "less than a number": lambda: 5 - T,
    "longer by what is no int": lambda: T + 0.5,
    "two sizes": lambda: T + T,
    "twice": lambda: 3 * T,
    "negative and more": lambda: 1 - T + 4,
    "of a table, from the end": lambda: torch.ones(5)[-T:],
    "power": lambda: T**-0.5,
    "times a tensor": lambda: PADDED * T,
    "packed": lambda: P / T,
    "in place": lambda: torch.ones(3).div_(T),
    "alpha": lambda: torch.add(PADDED, PADDED, alpha=T),
    "tensor's order": lambda: torch.arange(3) < T,
    "tensor's equality": lambda: torch.arange(3) == T,
    "where": lambda: torch.where(PADDED > 0, PADDED, T),
    "masked_fill": lambda: PADDED.masked_fill(PADDED > 0, T),
    "fill": lambda: torch.full((2,), T),
    "full": lambda: torch.full((2, T), T),
    "full_like": lambda: torch.full_like(P, T),
    "new_full": lambda: PADDED.new_full((2,), T),
    "new_tensor": lambda: PADDED.new_tensor(T),
    "new_tensor of a list": lambda: P.new_tensor([T, T]),
    "tensor": lambda: torch.tensor(T, dtype=torch.int64),
    "tensor of a list": lambda: torch.tensor([T] * 2, dtype=torch.float32),
    "LongTensor": lambda: torch.LongTensor([T]),
    "write": lambda: torch.zeros(3).__setitem__(0, T),
    "from the end": lambda: torch.arange(T, 0, -1),
    "from there on": lambda: torch.arange(T, 9),
    "steps": lambda: torch.arange(0, 9, T),
    "linspace": lambda: torch.linspace(0, 1, T),
    "window": lambda: torch.hann_window(T),
    "randperm": lambda: torch.randperm(T),
    "randint": lambda: torch.randint(T, (2,)),
    "randint up to it": lambda: torch.randint(0, T, (2, T)),
    "topk": lambda: PADDED.topk(T, 1),
    "roll": lambda: PADDED.roll(T, 1),
    "diagonal": lambda: torch.ones(3, 3).triu(T),
    "tril_indices": lambda: torch.tril_indices(T, T),
    "sum": lambda: PADDED.sum(T),
    "select": lambda: PADDED.select(1, T),
    "F.pad": lambda: F.pad(PADDED, (0, T)),
    "interpolate": lambda: F.interpolate(PADDED, size=T),
    "pool": lambda: F.adaptive_avg_pool1d(PADDED, T),
    "entry": lambda: PADDED[0, T],
    "step": lambda: P[:, T],
    "item of a list": lambda: [1, 2, 3, 4][T],
    "int": lambda: int(T),
    "float": lambda: float(T),
    "round": lambda: round(T),
    "sqrt": lambda: math.sqrt(T),
    "factorial": lambda: math.factorial(T),
    "gcd": lambda: math.gcd(T, 2),
    "ceil": lambda: math.ceil(T),
    "hex": lambda: hex(T),
    "list": lambda: [0] * T,
    "numpy": lambda: np.zeros((2, T)),
    "numpy's arange": lambda: np.arange(T),
    "numpy's function": lambda: np.log(T),
    "numpy's number": lambda: np.float64(3) * T,
    "numpy's array": lambda: np.ones(3) / T,
    "numpy's int": lambda: np.int64(T),
    "fori_loop": lambda: tl.fori_loop(0, T, lambda i, c: c, torch.zeros(1)),
    "length": lambda: tl.scan(lambda c, x: (c, c), torch.zeros(1), length=T),
    "P.pad": lambda: P.pad(max_len=T),
    "packed equality": lambda: P == T,
    "unequal": lambda: torch.arange(3) != T,
    "equality from the left": lambda: T == torch.arange(3),  # noqa: SIM300
    "equality of all entries": lambda: torch.arange(3) == 2 * T,
    "a call in an index": lambda: PADDED[:, : int(T)],
    "all entries": lambda: 1 * (2 * T),
    "per entry": lambda: P.sum() / (2 * T),
    "a list of all entries": lambda: [0] * (2 * T),
    "a slice of all entries": lambda: PADDED[:, : 2 * T],
    "as many zeros": lambda: torch.zeros((2 * T, 3)),
    "zeros of twice the length": lambda: torch.zeros(2, 2 * T),
    "expanded": lambda: torch.zeros(1).expand(2 * T),
    "all entries counted": lambda: torch.arange(2 * T),
    "order of all entries": lambda: 2 * T > 3,
}


@pytest.mark.parametrize("compute", NUMBERS.values(), ids=NUMBERS.keys())
def test_who_computes_with_it_is_told_what_to_write(compute: Any):
    with pytest.raises(TypeError, match=r"the ragged dim of a packed tensor has no one size.*write p\.max_len"):
        compute()


OTHERS: dict[str, tuple[Any, str]] = {
    "time first": (lambda: nn.LSTM(3, 2)(P), "make the layer with batch_first=True"),
    "format": (lambda: f"{T:d}", "unsupported format string"),
    "percent": (lambda: "%d" % T, "real number is required, not RaggedSize"),  # noqa: UP031
    "tensor": (lambda: torch.tensor(T), "Could not infer dtype of RaggedSize"),
    "list": (lambda: torch.tensor([T, T]), "Could not infer dtype of RaggedSize"),
    "first of several": (
        lambda: torch.zeros(T, 3),
        r"zeros\(\) (takes 1 positional argument|received an invalid combination)",
    ),
    "repeats of steps": (lambda: torch.ones(2, 4, 3).repeat(1, T, 1), "a dim that is repeated by a ragged size"),
}


@pytest.mark.parametrize(("compute", "said"), OTHERS.values(), ids=OTHERS.keys())
def test_others_refuse_it_in_their_own_words(compute: Any, said: str):
    with pytest.raises((TypeError, RuntimeError), match=said):
        compute()


def test_all_entries_are_a_size_and_no_number():
    entries = 2 * T
    assert entries == T * 2 == 5 != 6
    assert repr(entries) == "B * *"
    assert pickle.loads(pickle.dumps(entries)) == entries
    assert torch.zeros(5, 3).view(entries, 3).shape == P.view(entries, -1).shape == (5, 3)
    assert P.view(-1, 3).view(2, T, -1).shape == (2, None, 3)
    assert packed([0, 0], 4).view(2 * packed([0, 0]).shape[1], -1).shape == (0, 4)
    assert torch.ones(0, 4).view(2, packed([0, 0]).shape[1], 2, -1).shape == (2, None, 2, 2)


def test_only_the_end_of_a_slice_asks_for_the_longest_row():
    def asks(source: str, where: dict[str, Any]) -> Any:
        return eval(compile(source, "asks", "eval"), where)

    table, size = list(range(9)), slice(0, T)
    assert asks("x[:t]", {"x": table, "t": T}) == asks("x[0:t:1]", {"x": table, "t": T}) == [0, 1, 2]
    for source in ("x[s]", "x[t]", "x.__getitem__(s)", "f(t)", "t.__index__()"):
        with pytest.raises(TypeError, match="the ragged dim"):
            asks(source, {"x": table, "s": size, "t": T, "f": range})
    assert "BUILD_SLICE" in dis.opmap  # what the instruction before is looked at for


def test_two_slices_and_assignments():
    mask = torch.ones(9, 9)
    assert mask[:T, :T].shape == mask[None, :T, :T][0].shape == (3, 3)
    assert mask[..., :T].shape == (9, 3)
    mask[:T, :T] = 0
    mask[:T] = 0
    assert mask.sum() == 54


def test_an_index_that_says_why_it_is_none_is_heard():
    with pytest.raises(TypeError, match=r"length must be an int.*got ndarray.*; only integer scalar arrays"):
        tl.scan(lambda c, x: (c, c), torch.zeros(1), length=np.array([1, 2]))  # pyright: ignore


def test_a_sinusoidal_table_is_added_as_in_padded_code():
    class Positions(nn.Module):
        def __init__(self, longest: int, d: int) -> None:
            super().__init__()
            angles = torch.arange(longest)[:, None] * torch.exp(torch.arange(0, d, 2) * (-math.log(1e4) / d))
            self.pe = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[None]

        def forward(self, x: Any) -> Any:
            if self.pe.size(1) >= x.size(1):
                return x * 2 + self.pe[:, : x.size(1)]
            raise ValueError("too long")

    module, x = Positions(9, 4), PackedTensor(torch.randn(5, 4), [2, 3])
    for row, alone in zip(module(x).unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(row, module(alone[None])[0])
    with pytest.raises(TypeError, match=r"le: rows 0 and 1.*answer differently"):
        Positions(2, 4)(x)
    with pytest.raises(ValueError, match="too long"):
        Positions(1, 4)(x)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_slice_in_a_loop_and_under_a_default_device(checkpoints: int | None) -> None:
    """Where a function mode stands between the line and torch."""
    x, table = packed([2, 3], 3), torch.arange(60.0).view(1, 20, 3)
    wanted = x + table[:, : x.shape[1]]
    with torch.device(HERE):
        assert torch.equal((x + table[:, : x.shape[1]]).values, wanted.values)
        with pytest.raises(TypeError, match="has no one size"):
            table[0, x.shape[1]]
    found = tl.fori_loop(
        0, 2, lambda i, c: c + (x + table[:, : x.shape[1]]).values, wanted.values, checkpoints=checkpoints
    )
    torch.testing.assert_close(found, 3 * wanted.values)
