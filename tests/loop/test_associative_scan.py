"""associative_scan: its values, and what it refuses. Gradients and costs are in test_associative_scan_gradients.py."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad, gradcheck
from torch.utils._pytree import tree_leaves, tree_map

import tensorloop as tl
from tensorloop import reference
from tensorloop.loop.associative import associative_scan
from tensorloop.testing import assert_matches_reference
from tests.support.devices import ON
from tests.support.parallel_cases import (
    Affine,
    Fn,
    assert_like_the_fold,
    both_ways,
    product,
    recurrence,
    rotations,
    then,
)


@both_ways
@pytest.mark.parametrize("T", [0, 1, 2, 3, 5, 10, 1000])
def test_equals_cumsum_over_every_axis(T: int, reverse: bool) -> None:
    for dim in range(-3, 3):
        shape = [2, 3, 1]
        shape[dim] = T
        x = torch.randint(-9, 9, shape)
        expected = x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)
        found = associative_scan(torch.add, x, dim=dim, reverse=reverse)
        assert torch.equal(found, expected)


@given(T=st.integers(1, 40), dim=st.sampled_from([0, 1, -3]), rows=st.integers(1, 3), reverse=st.booleans())
def test_non_commutative_operators_of_any_length(T: int, dim: int, rows: int, reverse: bool) -> None:
    assert_like_the_fold(product, rotations(T, rows, requires_grad=True).movedim(0, dim), dim, reverse)
    assert_like_the_fold(then, recurrence(T, requires_grad=True), 0, reverse)


def test_reverse_is_flip_scan_flip_and_gives_the_later_one_first() -> None:
    x = recurrence(7)
    flipped = associative_scan(then, Affine(x.a.flip(0), x.b.flip(0)))
    found = associative_scan(then, x, reverse=True)
    torch.testing.assert_close(found, Affine(flipped.a.flip(0), flipped.b.flip(0)))
    index = torch.arange(6)
    assert associative_scan(lambda a, b: a, index).tolist() == [0] * 6
    assert associative_scan(lambda a, b: a, index, reverse=True).tolist() == [5] * 6
    assert associative_scan(lambda a, b: b, index, reverse=True).tolist() == index.tolist()


@pytest.mark.parametrize("T", [1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 1000])
def test_calls_are_logarithmic_and_pairs_linear(T: int) -> None:
    pairs: list[int] = []

    def fn(a: Tensor, b: Tensor) -> Tensor:
        pairs.append(len(a))
        return a + b

    associative_scan(fn, torch.ones(T))
    assert len(pairs) <= 2 * math.log2(T)
    assert sum(pairs) < 2 * T
    assert min(pairs, default=1) > 0


def test_fn_sees_slabs_with_the_pairs_first() -> None:
    seen: list[Any] = []

    def fn(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(tree_map(lambda x: tuple(x.shape), (a, b)))
        return {key: a[key] + b[key] for key in a}

    xs = {"x": torch.ones(3, 5, 4), "n": torch.ones(3, 5)}
    ys = associative_scan(fn, xs, dim=1)
    assert ys["x"].shape == (3, 5, 4)
    assert ys["n"][2].tolist() == [1, 2, 3, 4, 5]
    slabs = [{"x": (pairs, 3, 4), "n": (pairs, 3)} for pairs in (2, 1, 2)]
    assert seen == [(slab, slab) for slab in slabs]


def test_operators_that_are_sensitive_to_shape() -> None:
    free = rotations()
    x = rotations(9, requires_grad=True)
    assert_like_the_fold(lambda a, b: b @ free @ a, x)
    assert_like_the_fold(lambda a, b: torch.linalg.solve(torch.linalg.inv(b), a), x)


OF_DTYPE: list[tuple[torch.dtype, Fn]] = [
    (torch.float64, torch.add),
    (torch.float32, torch.maximum),
    (torch.float16, torch.minimum),
    (torch.bfloat16, torch.maximum),
    (torch.complex64, torch.add),
    (torch.uint8, torch.bitwise_or),
    (torch.int16, torch.add),
    (torch.int32, torch.mul),
    (torch.int64, torch.add),
    (torch.bool, torch.logical_xor),
]


@pytest.mark.parametrize(("dtype", "fn"), OF_DTYPE, ids=lambda v: getattr(v, "__name__", str(v)))
def test_dtypes_are_kept(dtype: torch.dtype, fn: Fn) -> None:
    x = torch.randint(0, 2, (11, 3)).to(dtype)
    for reverse in (False, True):
        found = associative_scan(fn, x, reverse=reverse)
        assert found.dtype == dtype
        assert torch.equal(found, reference.associative_scan(fn, x, 0, reverse))


def test_trees_of_any_containers_and_mixed_dtypes() -> None:
    xs = {"h": recurrence(6), "rest": [torch.arange(6), (torch.arange(12).view(6, 2) % 3 == 0,)]}

    def fn(a: Any, b: Any) -> Any:
        (n, (m,)), (k, (o,)) = a["rest"], b["rest"]
        return {"rest": [n + k, (m | o,)], "h": then(a["h"], b["h"])}

    found = associative_scan(fn, xs)
    torch.testing.assert_close(found, reference.associative_scan(fn, xs))
    assert list(found) == ["h", "rest"]
    assert type(found["h"]) is Affine
    assert [y.dtype for y in tree_leaves(found["rest"])] == [torch.int64, torch.bool]


def test_strided_and_expanded_inputs() -> None:
    wide = torch.randn(6, 2, 9, dtype=torch.float64)
    for x, dim in ((wide.mT, 1), (wide[:, :, ::2], 2), (wide[:1].expand(5, 2, 9), 0), (wide[:, :, 1], 0)):
        torch.testing.assert_close(associative_scan(torch.add, x, dim=dim), x.cumsum(dim))


def test_what_fn_returns_may_be_an_argument_a_view_or_expanded() -> None:
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    for fn in (lambda a, b: a, lambda a, b: b, lambda a, b: b[:], lambda a, b: torch.cat([b, a], 1)[:, :4]):
        assert_like_the_fold(fn, x)
        assert_like_the_fold(fn, x, reverse=True)
    assert_like_the_fold(lambda a, b: ((a.sum(1) + b.sum(1)) / 4)[:, None].expand_as(b), x)
    assert_like_the_fold(lambda a, b: torch.zeros(()).expand_as(b), torch.randn(5, 2))


@pytest.mark.parametrize("T", [0, 1, 2, 3, 8])
def test_the_result_shares_no_memory_with_xs(T: int) -> None:
    x = torch.randn(T, 2)
    before = x.clone()
    for fn in (torch.add, lambda a, b: b):
        for reverse in (False, True):
            associative_scan(fn, x, reverse=reverse).fill_(7)
            assert torch.equal(x, before)


def test_an_array_gives_its_slots() -> None:
    values = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    array = tl.TensorArray().extend(values)
    found: Any = associative_scan(lambda a, b: {key: a[key] + b[key] for key in a}, {"array": array, "x": values})
    torch.testing.assert_close(found["array"], values.cumsum(0))
    torch.testing.assert_close(grad(found["array"].sum(), values)[0][:, 0].tolist(), [5.0, 4.0, 3.0, 2.0, 1.0])


def test_scans_over_two_dims_in_opposite_directions() -> None:
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    found = associative_scan(torch.add, associative_scan(torch.add, x), dim=1, reverse=True)
    torch.testing.assert_close(found, x.cumsum(0).flip(1).cumsum(1).flip(1))
    assert gradcheck(lambda v: associative_scan(torch.mul, associative_scan(torch.mul, v), dim=1, reverse=True), x)


def test_a_loop_a_branch_vmap_and_a_scan_inside_fn() -> None:
    x = rotations(7, 3, requires_grad=True)

    def rows(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([b[:, i] @ a[:, i] for i in range(3)], 1)

    def branch(a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(b, a) if a.sum() > 0 else b @ a

    def mapped(a: Tensor, b: Tensor) -> Tensor:
        return torch.vmap(torch.vmap(lambda p, q: q @ p))(a, b)

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return associative_scan(product, torch.stack([a, b]))[1]

    for fn in (rows, branch, mapped, inner):
        assert_matches_reference(
            lambda v, fn=fn: associative_scan(fn, v), lambda v: reference.associative_scan(product, v), x
        )


# -- refusals


def half_wrong(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {"x": a["x"].double(), "pair": [b["pair"][0], b["pair"][1].sum(), b["pair"][2]]}


TREE = {"x": torch.ones(4, 3), "pair": [torch.ones(4), torch.ones(4, 2), torch.arange(4)]}
WANTED = "{'x': *, 'pair': [*, *, *]}"
REFUSED: list[tuple[str, Fn, type[Exception], str]] = [
    ("fn", lambda a, b: associative_scan(3, TREE), TypeError, "fn must be callable, got int 3"),  # pyright: ignore
    ("dim of float", lambda a, b: associative_scan(a, TREE, dim=1.0), TypeError, "dim must be an int"),  # pyright: ignore
    ("reverse", lambda a, b: associative_scan(a, TREE, reverse=1), TypeError, "True or False, got int 1"),  # pyright: ignore
    ("no leaf", lambda a, b: associative_scan(a, {}), TypeError, "xs holds no tensor"),
    ("int", lambda a, b: associative_scan(a, {"x": [b, 4]}), TypeError, "xs['x'][1]: expected a tensor, got int 4"),
    ("none", lambda a, b: associative_scan(a, (b, None)), TypeError, "xs[1]: expected a tensor, got NoneType"),
    ("0-d", lambda a, b: associative_scan(a, torch.ones(())), ValueError, "xs has no dim 0 to loop over: its shape"),
    ("rank", lambda a, b: associative_scan(a, TREE, dim=1), ValueError, "xs['pair'][0] has no dim 1"),
    ("negative", lambda a, b: associative_scan(a, torch.ones(3), dim=-2), ValueError, "no dim -2"),
    (
        "lengths",
        lambda a, b: associative_scan(a, {"x": torch.ones(2, 3), "y": torch.ones(2, 4)}, dim=1),
        ValueError,
        "same length along dim 1, but xs['x'] has 3, xs['y'] has 4",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_bad_arguments_are_refused_before_fn_runs(call: Fn, error: type[Exception], words: str) -> None:
    def fn(a: Any, b: Any) -> Any:
        raise AssertionError("called")

    with pytest.raises(error) as caught:
        call(fn, torch.ones(3))
    assert str(caught.value).startswith("associative_scan: ")
    assert words in str(caught.value)


RETURNS: list[tuple[Fn, Any, list[str]]] = [
    (lambda a, b: (a, b), TREE, [f"- {WANTED}", f"+ ({WANTED}, {WANTED})"]),
    (lambda a, b: None, TREE, [f"- {WANTED}", "+ * (None)"]),
    (lambda a, b: (), TREE, [f"- {WANTED}", "+ ()"]),
    (lambda a, b: None, torch.ones(4), [f"- Tensor (2,) float32 {ON}", "+ None"]),
    (lambda a, b: [a, b], torch.ones(4), ["- *", "+ [*, *]"]),
    (lambda a, b: (a + b).to("meta"), torch.ones(4), [f"- Tensor (2,) float32 {ON}", "+ Tensor (2,) float32 meta"]),
    (lambda a, b: a[0], torch.ones(4, 2), [f"- Tensor (2, 2) float32 {ON}", f"+ Tensor (2,) float32 {ON}"]),
    (lambda a, b: a[:1], torch.ones(4), [f"- Tensor (2,) float32 {ON}", f"+ Tensor (1,) float32 {ON}"]),
    (lambda a, b: a / b, torch.arange(1, 5), [f"- Tensor (2,) int64 {ON}", f"+ Tensor (2,) float32 {ON}"]),
    (
        half_wrong,
        TREE,
        [
            f"- ['x']: Tensor (2, 3) float32 {ON}",
            f"+ ['x']: Tensor (2, 3) float64 {ON}",
            f"- ['pair'][1]: Tensor (2, 2) float32 {ON}",
            f"+ ['pair'][1]: Tensor () float32 {ON}",
        ],
    ),
]


@pytest.mark.parametrize(("fn", "xs", "diff"), RETURNS)
def test_all_that_differs_in_what_fn_returns_is_listed(fn: Fn, xs: Any, diff: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        associative_scan(fn, xs)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("associative_scan: fn must return slabs like those it gets, of 2 pairs; ")
    assert [line.strip() for line in lines] == diff


def test_a_change_at_a_later_call_is_reported() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return (a + b).double() if len(a) == 1 else a + b

    with pytest.raises(TypeError, match="of 1 pairs"):
        associative_scan(fn, torch.ones(4))


def test_an_exception_of_fn_comes_out_as_it_is() -> None:
    class Own(Exception): ...

    def fn(a: Tensor, b: Tensor) -> Tensor:
        raise Own

    with pytest.raises(Own) as caught:
        associative_scan(fn, torch.ones(4))
    assert caught.traceback[-1].name == "fn"
    assert associative_scan(torch.add, torch.ones(4)).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("T", [2, 3, 9])
def test_a_change_in_place_is_refused_or_stays_inside(T: int, requires_grad: bool) -> None:
    leaf = torch.randn(T, 2, dtype=torch.float64, requires_grad=requires_grad)
    for fn in (lambda a, b: a.add_(b), lambda a, b: b.add_(a), lambda a, b: a[:, :].add_(b)):
        for x in (leaf, leaf * 1):
            before = x.detach().clone()
            if requires_grad:
                with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                    associative_scan(fn, x)
                with torch.no_grad():
                    found = associative_scan(fn, x)
            else:
                found = associative_scan(fn, x)
                with torch.inference_mode():
                    torch.testing.assert_close(associative_scan(fn, x), found)
            torch.testing.assert_close(found, before.cumsum(0))
            assert torch.equal(x.detach(), before)


def test_a_change_in_place_behind_autograd_is_reported() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            a += b
        return a

    with pytest.raises(RuntimeError, match=r"fn changed an argument in place under no_grad"):
        associative_scan(fn, torch.randn(4, requires_grad=True))
