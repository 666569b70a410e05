"""What `tl.attention` refuses, and how it says so."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.attention import attention
from tensorloop.packed import PackedTensor
from tests.support import attention_cases as cases
from tests.support.attention_cases import block_mask
from tests.support.devices import ON

X = torch.randn(2, 5, 4, 3)


def array(*shape: int) -> tl.TensorArray:
    return tl.TensorArray.unstack(torch.randn(shape))


def rows(n: int, *lens: int, heads: int = 2) -> Any:
    return PackedTensor(torch.randn(n, heads, 3), list(lens))


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (X[0], X, X, r"attention: q must be \(B, T, heads, D\), got \(5, 4, 3\)"),
        (X, X[:1], X[:1], "attention: batch sizes of q, k and v differ: 2, 1 and 1"),
        (X, X, X[:, :4], "attention: k has 5 positions, v has 4; each key needs a value"),
        (X, X[..., :2], X, "attention: q has elements of 3 numbers, k of 2; their product needs as many"),
        (X, X, X[:, :, :2], "attention: k has 4 heads, v has 2; each key head needs a value head"),
        (X, X[:, :, :3], X[:, :, :3], "attention: 4 query heads cannot share 3 key heads; make it a multiple of them"),
        (X, X[:, :, :0], X[:, :, :0], "attention: 4 query heads cannot share 0 key heads"),
        (rows(5, 2, 3), rows(5, 5), rows(5, 5), "attention: q has 2 rows, k has 1; row b of q sees row b of k"),
        (
            rows(5, 2, 3),
            rows(5, 2, 3),
            rows(5, 3, 2),
            "attention: k and v: .* row that differs is 0: 2 and 3",
        ),
        (
            PackedTensor(X[0, :, 0], [5]),
            rows(5, 5),
            rows(5, 5),
            r"attention: packed q must be .* elements of shape \(3,\)",
        ),
        (X[0, 0], array(6, 4, 3), array(5, 4, 3), "attention: k has 6 slots, v has 5; each key needs a value"),
        (
            X[0],
            array(6, 2, 4, 3),
            array(6, 2, 4, 3),
            r"the elements of k must be .* got \(2, 4, 3\) for q \(5, 4, 3\)",
        ),
        (X[0, 0, 0], array(6, 4, 3), array(6, 4, 3), r"attention: q must be \(\*batch, heads, D\)"),
    ],
)
def test_shapes_that_do_not_go_together(q: Any, k: Any, v: Any, message: str):
    with pytest.raises(ValueError, match=message):
        attention(q, k, v)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (X, X.double(), X, "dtypes of q, k and v differ: torch.float32, torch.float64 and torch.float32; convert with"),
        (X.long(), X.long(), X.long(), "attention: q must be of a real floating dtype, got torch.int64"),
        (X, X, X.to(torch.complex64), "attention: v must be of a real floating dtype, got torch.complex64"),
        (X, [1.0], X, "attention: k: expected a tensor, got list"),
        (X, X.cpu().to_sparse(), X, "attention: k: expected a dense tensor, got layout torch.sparse_coo"),
        (X, rows(5, 5), rows(5, 5), "packed all three, .* got Tensor, PackedTensor, PackedTensor"),
        (
            rows(5, 5),
            X,
            X,
            "packed all three, tensors all three, or a tensor and two TensorArrays; got PackedTensor, Tensor",
        ),
        (X[0], array(5, 4, 3), X, "got Tensor, TensorArray, Tensor"),
        (array(5, 4, 3), array(5, 4, 3), array(5, 4, 3), "got TensorArray, TensorArray, TensorArray"),
    ],
)
def test_kinds_that_do_not_go_together(q: Any, k: Any, v: Any, message: str):
    with pytest.raises(TypeError, match=message):
        attention(q, k, v)


def test_devices_that_differ():
    with pytest.raises(ValueError, match=f"q, k and v are on {ON}, meta and {ON}; move them with"):
        attention(X, X.to("meta"), X)


@pytest.mark.parametrize("scale", ["1", True, torch.ones(())])
def test_a_scale_that_is_no_number(scale: Any):
    with pytest.raises(TypeError, match=r"attention: scale must be a number or None, got .*; scale q by a tensor"):
        attention(X, X, X, scale=scale)


def test_causal_steps():
    with pytest.raises(ValueError, match="causal=True with TensorArrays: one step sees all slots; slice them to see"):
        attention(X[0, 0], array(5, 4, 3), array(5, 4, 3), causal=True)


def mask(B: int | None = None, H: int | None = None, T: int = 5, S: int = 5) -> Any:
    return block_mask(cases.by_row, B, H, T, S, 4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (mask(T=4), "block_mask is for 4 queries and 5 keys, but there are 5 and 5"),
        (mask(S=9), "block_mask is for 5 queries and 9 keys, but there are 5 and 5"),
        (mask(B=3), "block_mask is for 3 batch entries, not for 1 or 2"),
        (mask(H=2), "block_mask is for 2 heads, not for 1 or 4"),
    ],
)
def test_a_mask_that_does_not_fit(bad: Any, message: str):
    with pytest.raises(ValueError, match=message):
        attention(X, X, X, block_mask=bad)


def test_masks_that_cannot_be_taken():
    with pytest.raises(ValueError, match=r"both causal=True and block_mask; put it in the mask, with and_masks"):
        attention(X, X, X, block_mask=mask(), causal=True)
    with pytest.raises(TypeError, match=r"block_mask must be a BlockMask, .* got a tensor of shape"):
        attention(X, X, X, block_mask=torch.ones(5, 5))
    with pytest.raises(ValueError, match="block_mask with TensorArrays"):
        attention(X[0, 0], array(5, 4, 3), array(5, 4, 3), block_mask=mask())
    with pytest.raises(ValueError, match="block_mask is for 5 queries and 5 keys, but there are 6 and 6 in their long"):
        attention(rows(8, 2, 6), rows(8, 2, 6), rows(8, 2, 6), block_mask=mask())
    with pytest.raises(ValueError, match=f"block_mask is on {ON}, q on meta; move it with"):
        attention(*(X.to("meta"),) * 3, block_mask=mask())
    attention(rows(8, 3, 5), rows(8, 3, 5), rows(8, 3, 5), block_mask=mask(B=2))


def test_nothing_is_broken_by_a_refusal():
    k, v = array(5, 4, 3), array(6, 4, 3)
    with pytest.raises(ValueError, match="5 slots, v has 6"):
        attention(X[0, 0], k, v)
    assert (len(k), len(v)) == (5, 6)
    out: Tensor = attention(X[0, 0], k, k)
    assert out.shape == (4, 3)


def test_values_that_do_not_fit_the_lens_never_reach_a_kernel():
    p = PackedTensor(torch.randn(11, 2, 3), [3, 1, 5, 2])
    bad = p._with(torch.randn(3, 2, 3))
    for q, k, v in ((bad, bad, bad), (p, p, bad), (p, bad, p)):
        with pytest.raises(ValueError, match="attention: lens sum to 11, but there are 3 values"):
            attention(q, k, v)


# ---- the layout of scaled_dot_product_attention

TAKEN = r"^attention: q \(2, 4, {}, 3\) is taken as 4 tokens of {} heads, .* if so, transpose\(1, 2\) q, k, v and"


def turned(tokens: int, heads: int = 4) -> Tensor:
    """(B, heads, T, D) as a model makes it."""
    return torch.randn(2, tokens, heads * 3).view(2, tokens, heads, 3).transpose(1, 2)


def test_heads_before_tokens_are_told():
    for x in (turned(8), turned(100), torch.randn(2, 4, 129, 3)):
        n = x.shape[2]
        with pytest.warns(UserWarning, match=TAKEN.format(n, n)) as told:
            attention(x, x, x, causal=True)
        assert told[0].filename == __file__
        attention(*(y.transpose(1, 2) for y in (x, x, x)), causal=True)


def test_heads_before_tokens_with_shared_heads_are_told():
    with pytest.warns(UserWarning, match=TAKEN.format(20, 20)):
        attention(turned(20), turned(20, 2), turned(20, 2))


def test_ordinary_sizes_are_not_taken_for_another_layout():
    def one(*shape: int) -> Tensor:
        return torch.randn(2, *shape, 3)

    for q, k in (
        (one(1, 256), one(1, 256)),  # a step of one token
        (one(1, 32), one(3, 32)),
        (one(7, 128), one(7, 128)),  # many heads that lie as they are read
        (one(129, 200), one(129, 200)),
        (one(2, 8), one(90, 8)),
        (one(8, 5).transpose(1, 2), one(8, 5).transpose(1, 2)),  # few more tokens than heads
        (one(8, 90).transpose(1, 2), one(8, 90).transpose(1, 2)),
    ):
        attention(q, k, k)
    many = torch.randn(1, 4, 200, 3)
    attention(many, many, many, block_mask=mask(T=4, S=4))  # the mask says what tokens are


def test_a_mask_for_the_other_layout():
    with pytest.raises(ValueError, match=r"there are 4 and 4; they are \(B, T, heads, D\): transpose\(1, 2\) what is"):
        attention(*(X.transpose(1, 2),) * 3, block_mask=mask())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"starts": [0, 1]}, TypeError, r"starts must be a tensor of integers, got list \[0, 1\]"),
        ({"starts": torch.zeros(2)}, TypeError, "starts must be a tensor of integers, got a tensor of shape"),
        ({"starts": torch.zeros(3).long()}, ValueError, r"starts must fit the batch dims of q, \(2,\), got \(3,\)"),
        ({"starts": torch.zeros(2).long().to("meta")}, ValueError, f"starts is on meta, q is on {ON}; move it with"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0; 1 is the query's own slot"),
        ({"window": 2.0}, TypeError, "window must be an int"),
        ({"bias": 1.0}, TypeError, "bias must be a tensor of floats, got float 1.0"),
        ({"bias": torch.ones(5).bool()}, TypeError, "bias must be a tensor of floats"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias must fit \(\*batch, heads, n\), here \(2, 4, 5\), got \(4,\)"),
        ({"bias": torch.zeros(5, device="meta")}, ValueError, f"bias is on meta, q is on {ON}; move it with"),
        ({"softcap": -1.0}, ValueError, "softcap must be above 0, got -1.0; None leaves scores as they are"),
        ({"softcap": "2"}, TypeError, "softcap must be a number or None, got str '2'"),
        ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": None}, TypeError, "dropout must be a number"),
    ],
)
def test_rules_that_are_none(given: dict[str, Any], error: type[Exception], message: str):
    keys = array(5, 2, 4, 3)
    with pytest.raises(error, match=f"attention: {message}"):
        attention(torch.randn(2, 4, 3), keys, keys, **given)
    assert len(keys) == 5


def test_starts_are_for_arrays():
    for x in (X, rows(5, 5)):
        with pytest.raises(
            ValueError, match="attention: starts= is for TensorArrays k and v; elsewhere rows of a Pack"
        ):
            attention(x, x, x, starts=torch.zeros(2).long())  # pyright: ignore


P5 = rows(5, 2, 3)
X5 = X[:, :, :2]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, got 0; 1 is the query's own slot"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"chunk": 2.0}, TypeError, "chunk must be an int"),
        ({"left_chunks": 1}, ValueError, "left_chunks without chunk; chunk=n says how many positions make one"),
        ({"chunk": 2, "left_chunks": -1}, ValueError, "left_chunks must be at least 0, got -1; None leaves all that"),
        ({"softcap": -1.0}, ValueError, "softcap must be above 0, got -1.0; None leaves scores as they are"),
        ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
        ({"bias": 1.0}, TypeError, "bias must be a tensor of floats, got float 1.0"),
        ({"bias": torch.zeros(3, 3, dtype=torch.int64)}, TypeError, "bias must be a tensor of floats, got a tensor"),
        ({"bias": torch.zeros(3, 4)}, ValueError, r"bias must fit \(B, heads, T, S\), .* got \(3, 4\); what follows"),
        ({"bias": torch.zeros(1, 2, 1, 1, 1)}, ValueError, r"bias must fit \(B, heads, T, S\)"),
        ({"bias": torch.zeros(1, device="meta")}, ValueError, f"bias is on meta, q is on {ON}; move it with"),
        ({"relative": X}, TypeError, r"relative must be \(queries, table\), got a tensor of shape"),
        ({"score_mod": 3}, TypeError, r"score_mod must be a function \(score, b, h, q_idx, kv_idx\), got int 3"),
        ({"score_mod": lambda s, *x: torch.stack([s, s])}, ValueError, r"score_mod must give one .* got shape \(2,\)"),
        (
            {"score_mod": lambda s, *x: 0.0},
            ValueError,
            "score_mod must give one number, a 0-d tensor, for one score; got float",
        ),
    ],
)
def test_options_that_are_none(given: dict[str, Any], error: type[Exception], message: str):
    for x in (X5, P5):
        with pytest.raises(error, match=f"attention: {message}"):
            attention(x, x, x, **given)


def test_relative_positions_that_do_not_fit():
    table = torch.randn(5, 2, 3)
    for queries, r, error, message in (
        (X5, table, TypeError, r"relative\[0\] must be of the kind of q, PackedTensor, got Tensor"),
        (rows(5, 1, 4), table, ValueError, r"q and relative\[0\]: .* row that differs is 0: 2 and 1"),
        (rows(5, 2, 3, heads=1), table, ValueError, r"relative\[0\] must be like q, \(1, 5, 2, 3\) torch.float32, got"),
        (
            P5,
            table[1:],
            ValueError,
            r"relative\[1\] must be \(2 c \+ 1, 2 or 1, 3\), a row for each .* got \(4, 2, 3\)",
        ),
        (P5, table.long(), TypeError, r"relative\[1\] must be of a real floating dtype, got torch.int64"),
        (P5, table.to("meta"), ValueError, rf"relative\[1\] is on meta, q is on {ON}; move it with"),
        (P5, [1.0], TypeError, r"relative\[1\]: expected a tensor, got list"),
    ):
        with pytest.raises(error, match=message):
            attention(P5, P5, P5, relative=(queries, r))  # pyright: ignore


def test_what_arrays_do_not_take():
    keys = array(5, 2, 4, 3)
    for given in ({"chunk": 2}, {"left_chunks": 2}, {"relative": (X, X)}, {"score_mod": lambda s, *x: s}):
        with pytest.raises(
            ValueError, match=r"attention: chunk=, left_chunks=, relative= and score_mod= with TensorArr"
        ):
            attention(torch.randn(2, 4, 3), keys, keys, **given)  # pyright: ignore


def test_a_mask_beside_a_window():
    for given in ({"window": 2}, {"chunk": 2}):
        with pytest.raises(
            ValueError, match="both window= or chunk= and block_mask; put it in the mask, with and_masks"
        ):
            attention(X, X, X, block_mask=mask(), **given)  # pyright: ignore


def test_more_tokens_than_slots():
    with pytest.raises(ValueError, match="q has 6 tokens, whose own slots are the last, but k has 5 slots"):
        attention(torch.randn(2, 6, 4, 3), array(5, 2, 4, 3), array(5, 2, 4, 3))
    with pytest.raises(ValueError, match=r"bias must fit \(\*batch, heads, t, n\), here \(2, 4, 3, 5\), got \(2, 5\)"):
        attention(torch.randn(2, 3, 4, 3), array(5, 2, 4, 3), array(5, 2, 4, 3), bias=torch.zeros(2, 5))


def test_a_score_mod_of_other_arguments():
    with pytest.raises(
        TypeError, match=r"^attention: score_mod is called as score_mod\(score, b, h, q_idx, kv_idx\), but"
    ):
        attention(X, X, X, score_mod=lambda score: score)  # pyright: ignore
    with pytest.raises(TypeError, match="unsupported operand"):  # an error of its own stays as it is
        attention(X, X, X, score_mod=lambda score, *places: score + "1")  # pyright: ignore
    with pytest.raises(TypeError, match="attn_mask=; block_mask= takes a BlockMask, bias= numbers to add to scores"):
        attention(X, X, X, attn_mask=torch.ones(5, 5))  # pyright: ignore
