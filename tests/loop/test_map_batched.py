"""map with a batch_size, against the stack of what fn gives for each element."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.utils._pytree import tree_leaves, tree_map

import tensorloop as tl
from tensorloop._common.errors import named
from tensorloop.loop.chunked_map import map_in_chunks
from tensorloop.testing import assert_linear_memory, assert_matches_reference, assert_no_leak, assert_saved_bytes
from tests.support.devices import ON
from tests.support.parallel_cases import work

Fn = Callable[[Any], Any]

_mapped = named("map")(map_in_chunks)


def chunked(fn: Fn, xs: Any, dim: int = 0, batch_size: int = 3) -> Any:
    return _mapped(fn, xs, dim, batch_size)


def one_by_one(fn: Fn, xs: Any, dim: int = 0) -> Any:
    """`fn` of each element; ys of tensors, stacked along `dim`."""
    T = tree_leaves(xs)[0].shape[dim]
    outs = [fn(tree_map(lambda x, t=t: x.select(dim, t), xs)) for t in range(T)]
    return tree_map(lambda *ys: torch.stack(ys, dim), *outs)


def turned(v: Tensor) -> Tensor:
    """A rotation of (2, ...) by an angle that depends on it: of norm 1, not linear."""
    angle = v.sum()
    return torch.stack([angle.cos() * v[0] - angle.sin() * v[1], angle.sin() * v[0] + angle.cos() * v[1]])


def doubles(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)


# -- values


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5, 8, 15, 16, 17, 100])
def test_equals_the_stack_for_every_chunk_size_and_fn_sees_one_element(batch_size: int) -> None:
    xs = {"v": doubles(16, 2, 3), "k": [torch.arange(16)]}
    seen: list[Any] = []

    def fn(x: dict[str, Any]) -> Any:
        seen.append((x["v"].shape, x["k"][0].shape))
        return [turned(x["v"]), {"k": x["k"][0] * 2, "m": x["v"].amax(0)}]

    expected = one_by_one(fn, xs)
    seen.clear()
    torch.testing.assert_close(chunked(fn, xs, batch_size=batch_size), expected)
    assert seen == [((2, 3), ())] * -(-16 // batch_size)


@given(T=st.integers(1, 9), batch_size=st.integers(1, 10), dim=st.integers(-3, 2))
def test_values_and_gradients_along_any_dim(T: int, batch_size: int, dim: int) -> None:
    shape = [2, 3]
    shape.insert(dim if dim >= 0 else dim + 3, T)
    assert_matches_reference(
        lambda x: chunked(turned, x, dim, batch_size),
        lambda x: one_by_one(turned, x, dim),
        doubles(*shape, requires_grad=True),
    )


def test_an_output_of_few_dims_has_the_loop_dim_where_it_can() -> None:
    x = doubles(2, 5, 3)
    for dim, shapes in ((1, [(2, 5, 3), (3, 5), (5,), (5,)]), (-2, [(2, 5, 3), (5, 3), (5,), (5,)])):
        ys = chunked(lambda v: (turned(v), v[0], v.sum(), 1.5), x, dim)
        assert [tuple(y.shape) for y in ys] == shapes
        torch.testing.assert_close(ys[1], x[0] if dim < 0 else x[0].mT)
        assert all(y.is_contiguous() for y in ys)


class Pair(NamedTuple):
    x: Any
    rest: Any


def test_none_stays_and_numbers_become_tensors() -> None:
    def fn(x: Pair) -> Pair:
        assert x.rest is None
        return Pair(None, {"int": 3, "bool": True, "float": 0.5, "complex": 1j, "tensor": x.x * 2, "deep": [(None,)]})

    ys = chunked(fn, Pair(torch.ones(5, 2), None))
    assert type(ys) is Pair
    assert ys.x is None
    assert ys.rest["deep"] == [(None,)]
    for name, value in (("int", 3), ("bool", True), ("float", 0.5), ("complex", 1j)):
        assert torch.equal(ys.rest[name], torch.tensor([value] * 5))
    assert chunked(lambda x: None, torch.ones(5)) is None
    assert chunked(lambda x: (), torch.ones(5)) == ()


def test_an_array_gives_its_slots_whatever_dim_is() -> None:
    values = doubles(5, 2, requires_grad=True)
    array = tl.TensorArray().extend(values)
    ys = chunked(lambda x: x["array"] * x["x"], {"array": array, "x": doubles(2, 5)}, dim=1)
    assert ys.shape == (2, 5)
    assert grad(ys.sum(), values)[0].shape == (5, 2)


def test_dtypes_are_kept() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int8, torch.int64, torch.bool):
        x = torch.randint(0, 2, (7, 2)).to(dtype)
        y = chunked(lambda v: (v.flip(0), v == v[0]), x)
        assert y[0].dtype == dtype
        assert torch.equal(y[0], x.flip(1))
        assert y[1].dtype == torch.bool


def test_random_numbers_differ_between_elements_and_chunks() -> None:
    masks = chunked(lambda x: torch.nn.functional.dropout(x), torch.ones(7, 64), batch_size=3)
    assert len({tuple(m.tolist()) for m in masks}) == 7


@pytest.mark.parametrize("batch_size", [2, 5, 9])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_ys_share_no_memory_and_a_change_in_place_stays_inside(batch_size: int, requires_grad: bool) -> None:
    x, captured = doubles(5, 2, requires_grad=requires_grad), doubles(2)
    before, held = x.detach().clone(), captured.clone()
    for y in chunked(lambda v: (v, v[:1], captured), x, 0, batch_size):
        y.detach().fill_(7)
    if requires_grad:
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            chunked(lambda v: v.add_(1), x, 0, batch_size)
    with torch.no_grad():
        torch.testing.assert_close(chunked(lambda v: v.add_(1), x, 0, batch_size), before + 1)
    assert torch.equal(x.detach(), before)
    assert torch.equal(captured, held)


def test_maps_and_scans_nest() -> None:
    x = doubles(4, 5, 2, 2, requires_grad=True)

    def products(v: Tensor) -> Tensor:
        return tl.associative_scan(lambda a, b: b @ a, torch.linalg.matrix_exp(v - v.mT))

    assert_matches_reference(lambda v: chunked(products, v), lambda v: one_by_one(products, v), x)
    inner = chunked(lambda v: chunked(turned, v, 0, 2), x)
    torch.testing.assert_close(inner, one_by_one(lambda v: one_by_one(turned, v), x))


# -- no elements


def test_no_elements_give_the_shapes_of_one() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))

    def fn(x: Tensor) -> Any:
        return {"h": x @ weight, "n": 1, "none": None, "view": x.reshape(-1)[:2], "k": x > 0, "r": torch.rand(2)}

    for dim in (0, 1, -2):
        none, six = ([2, 3], [2, 3])
        none.insert(dim % 3, 0)
        six.insert(dim % 3, 6)
        ys, expected = chunked(fn, torch.zeros(none), dim), chunked(fn, torch.zeros(six), dim)
        assert ys.pop("none") is expected.pop("none") is None
        for name in ys:
            assert ys[name].shape == tuple(0 if n == 6 else n for n in expected[name].shape), name
            assert ys[name].dtype == expected[name].dtype


def test_no_elements_change_nothing_that_fn_closes_over() -> None:
    count, state = torch.zeros((), dtype=torch.int64), torch.get_rng_state()
    norm = torch.nn.BatchNorm1d(2)

    def fn(x: Tensor) -> Tensor:
        count.add_(1)
        return torch.nn.functional.dropout(x) + torch.rand(2) + norm.weight.add(1)

    with torch.no_grad():
        assert chunked(fn, torch.zeros(0, 2)).shape == (0, 2)
    assert count == 0
    assert torch.equal(torch.get_rng_state(), state)
    chunked(fn, torch.zeros(4, 2))
    assert count == 2  # once a chunk


def test_no_elements_under_transforms() -> None:
    weight = doubles(4, 2, 3)
    ys = torch.vmap(lambda w: chunked(lambda v: v @ w, doubles_of_none()))(weight)
    assert ys.shape == (4, 0, 3)
    zero = torch.func.grad(lambda w: chunked(lambda v: v @ w, doubles_of_none()).sum())(weight[0])
    assert torch.equal(zero, torch.zeros_like(zero))


def doubles_of_none() -> Tensor:
    return torch.zeros(0, 2, dtype=torch.float64)


def test_an_error_for_no_elements_says_that_the_element_was_a_fake() -> None:
    with pytest.raises(RuntimeError, match="data-dependent control flow") as caught:
        chunked(lambda v: v if v.sum() > 0 else -v, torch.zeros(0, 2))
    assert caught.value.__notes__ == ["map: xs have no elements; fn was called on a fake tensor for the shapes of ys"]


# -- refusals


def never(x: Any) -> Any:
    raise AssertionError("called")


REFUSED: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("fn", (3, torch.ones(3), 0, 1), TypeError, "fn must be callable, got int 3"),
    ("size 0", (never, torch.ones(3), 0, 0), ValueError, "batch_size must be at least 1, got 0"),
    ("size -2", (never, torch.ones(3), 0, -2), ValueError, "batch_size must be at least 1, got -2"),
    ("size bool", (never, torch.ones(3), 0, True), TypeError, "batch_size must be an int or a 0-d integer tensor, got"),
    ("size float", (never, torch.ones(3), 0, 2.0), TypeError, "batch_size must be an int or a 0-d integer tensor, got"),
    ("dim", (never, torch.ones(3), 0.0, 1), TypeError, "dim must be an int"),
    ("no tensor", (never, [None, {}], 0, 1), TypeError, "xs holds no tensor"),
    ("number", (never, [torch.ones(3), 4], 0, 1), TypeError, "xs[1]: expected a tensor, got int 4"),
    ("0-d", (never, [torch.ones(()), None], 0, 1), ValueError, "xs[0] has no dim 0 to loop over: its shape is ()"),
    ("rank", (never, torch.ones(3), 1, 1), ValueError, "xs has no dim 1 to loop over: its shape is (3,)"),
    ("lengths", (never, {"a": torch.ones(3), "b": torch.ones(4)}, 0, 1), ValueError, "xs['a'] has 3, xs['b'] has 4"),
    ("text", (lambda x: {"s": ["x"]}, torch.ones(3), 0, 1), TypeError, "y['s'][0] is str; expected tensors, numbers"),
    ("array", (lambda x: tl.TensorArray().append(x), torch.ones(3), 0, 1), TypeError, "return its stack()"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_bad_arguments_and_outputs_are_refused(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    fn, xs, dim, batch_size = arguments
    with pytest.raises(error) as caught:
        tl.map(fn, xs, dim=dim, batch_size=batch_size)
    assert str(caught.value).startswith("map: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("later", "diff"),
    [
        (lambda x: [x, 1.0], ["- [1]: int", "+ [1]: float"]),
        (
            lambda x: [x[:1], None],
            [f"- [0]: Tensor (2,) float32 {ON}", f"+ [0]: Tensor (1,) float32 {ON}", "- [1]: int", "+ [1]: None"],
        ),
        (lambda x: (x, 1), ["- [*, *]", "+ (*, *)"]),
        (lambda x: 4, ["- [*, *]", "+ * (int)"]),
    ],
)
def test_a_later_chunk_with_another_kind_of_output_is_refused(later: Fn, diff: list[str]) -> None:
    chunks = 0

    def fn(x: Tensor) -> Any:
        nonlocal chunks
        chunks += 1
        return [x, 1] if chunks == 1 else later(x)

    with pytest.raises(TypeError) as caught:
        chunked(fn, torch.ones(7, 2))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("map: fn must return the same for every chunk as for the first; ")
    assert [line.strip() for line in lines] == diff
    assert chunks == 2


def test_an_exception_of_fn_comes_out_as_it_is() -> None:
    class Own(Exception): ...

    def fn(x: Tensor) -> Tensor:
        raise Own

    with pytest.raises(Own) as caught:
        chunked(fn, torch.ones(4))
    assert caught.traceback[-1].name == "fn"
    assert chunked(torch.neg, torch.ones(4)).tolist() == [-1.0] * 4


# -- gradients and transforms


def test_first_and_second_derivatives_are_those_of_finite_differences() -> None:
    x, w = doubles(4, 2, requires_grad=True), doubles(2, 2, requires_grad=True)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return chunked(lambda v: turned(w @ v), x)

    assert gradcheck(run, (x, w), check_forward_ad=True)
    assert gradgradcheck(run, (x, w))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_gradients_of_some_inputs_and_outputs_without(needs: tuple[bool, bool]) -> None:
    def run(mapped: Callable[..., Any], x: Tensor, w: Tensor) -> Any:
        def fn(v: list[Tensor]) -> Any:
            with torch.no_grad():
                still = w @ v[0]
            return [turned(w @ v[0]), [still, [v[0].detach()]], v[1] * 2]

        return mapped(fn, [x, torch.arange(5)])

    x, w = (doubles(*shape, requires_grad=need) for shape, need in zip([(5, 2), (2, 2)], needs, strict=True))
    assert_matches_reference(lambda *v: run(chunked, *v), lambda *v: run(one_by_one, *v), x, w)
    flags = [[y.requires_grad for y in tree_leaves(run(mapped, x, w))] for mapped in (chunked, one_by_one)]
    assert flags[0] == flags[1] == [True, False, False, False]


def test_gradients_reach_the_parameters_of_a_module() -> None:
    layer = torch.nn.Linear(2, 3).double()
    x = doubles(7, 2)
    chunked(layer, x).sin().sum().backward()
    found = [p.grad for p in layer.parameters()]
    torch.testing.assert_close(found, list(grad(layer(x).sin().sum(), list(layer.parameters()))))


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian"])
def test_func_derivatives(name: str) -> None:
    x, w = doubles(4, 2), doubles(2, 2)

    def loss(mapped: Callable[..., Any], x: Tensor, w: Tensor) -> Tensor:
        return (mapped(lambda v: turned(w @ v), x) ** 3).sum()

    found, expected = (
        getattr(torch.func, name)(lambda x, w, m=m: loss(m, x, w), argnums=(0, 1))(x, w) for m in (chunked, one_by_one)
    )
    torch.testing.assert_close(found, expected)


def test_vmap_around_it_and_grad_inside_it() -> None:
    x = doubles(3, 5, 2)
    found = torch.vmap(lambda v: chunked(turned, v))(x)
    torch.testing.assert_close(found, torch.stack([chunked(turned, v) for v in x]))
    slope = torch.func.grad(lambda v: turned(v).pow(3).sum())
    torch.testing.assert_close(chunked(slope, x[0]), one_by_one(slope, x[0]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_takes_it_as_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    x = doubles(5, 2, requires_grad=True)

    def run(v: Tensor) -> Any:
        return chunked(lambda u: (turned(u), 1, None), v)

    found, expected = torch.compile(run, backend=backend, fullgraph=True)(x), run(x)
    torch.testing.assert_close(found[:2], expected[:2])
    torch.testing.assert_close(grad(found[0].sum(), x), grad(expected[0].sum(), x))


# -- cost


def test_the_backward_pass_is_linear_in_the_number_of_chunks() -> None:
    def of(T: int, mapped: Fn) -> int:
        x = torch.randn(T, 2, requires_grad=True)
        return work(lambda: mapped(x).sum())

    def one_row(x: Tensor) -> Tensor:
        return chunked(turned, x, 0, 1)

    assert of(128, one_row) < 2.1 * of(64, one_row)
    # What vmap itself does, which the bound would see:
    sliced = torch.func.vmap(turned, chunk_size=1)
    assert of(256, sliced) > 2.5 * of(128, sliced)


def test_saved_bytes_are_those_of_fn() -> None:
    def make(T: int) -> Callable[[], Tensor]:
        x = torch.randn(T, 2, requires_grad=True)
        return lambda: chunked(lambda v: v.exp().sin(), x, 0, 4)

    for T in (16, 17):
        assert_saved_bytes(make(T), exactly=T * 2 * 4)  # the exp, which both of its uses save
    assert_linear_memory(make, [32, 64, 128])


def test_nothing_stays_after_backward() -> None:
    x = doubles(7, 2, requires_grad=True)
    assert_no_leak(lambda: grad(chunked(turned, x).sum(), x))
