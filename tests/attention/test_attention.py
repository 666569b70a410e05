"""`tl.attention` held to its definition: values and gradients of packed and padded tensors, any heads, any lengths."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tensorloop import reference
from tensorloop.attention import attention, engine, strips
from tensorloop.kernels.sight import Sight
from tensorloop.packed import Dim, PackedTensor
from tensorloop.testing import assert_matches_reference
from tests.support.attention_cases import tensors
from tests.support.devices import HERE


def packed_values(q: Tensor, k: Tensor, v: Tensor, *, q_lens: list[int], k_lens: list[int], causal: bool) -> Tensor:
    return attention(PackedTensor(q, q_lens), PackedTensor(k, k_lens), PackedTensor(v, k_lens), causal=causal).values


@pytest.fixture(params=["flash", "matmul"])
def strip_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute a strip; the one for other devices with strips of a few weights."""
    if request.param == "matmul":
        monkeypatch.setattr(engine, "_has_flash", lambda q: False)
        monkeypatch.setattr(engine, "_WEIGHTS", 100)
    return request.param


@pytest.fixture(autouse=True)
def bucket_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows suffice for a bucket, so that small cases have some."""
    monkeypatch.setattr(strips, "FEW", 2)


LENS = st.lists(st.one_of(st.integers(0, 12), st.integers(30, 40)), max_size=5)


@pytest.mark.parametrize("causal", [False, True])
@given(lens=LENS, heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]), D=st.sampled_from([1, 4]))
@settings(max_examples=25)
def test_packed_self_attention_is_that_of_each_row(causal: bool, lens: list[int], heads: tuple[int, int], D: int):
    n, (H, G) = sum(lens), heads
    assert_matches_reference(
        functools.partial(packed_values, q_lens=lens, k_lens=lens, causal=causal),
        functools.partial(reference.attention_packed, q_lens=lens, k_lens=lens, causal=causal),
        *tensors((n, H, D), (n, G, D), (n, G, D)),
    )


@pytest.mark.parametrize("causal", [False, True])
@given(lens=st.lists(st.tuples(*[st.one_of(st.integers(0, 9), st.integers(31, 35))] * 2), max_size=5))
@settings(max_examples=25)
def test_packed_cross_attention_aligns_first_positions_and_gives_zeros_to_rows_without_keys(
    causal: bool, lens: list[tuple[int, int]]
):
    q_lens, k_lens = [n for n, _ in lens], [m for _, m in lens]
    assert_matches_reference(
        functools.partial(packed_values, q_lens=q_lens, k_lens=k_lens, causal=causal),
        functools.partial(reference.attention_packed, q_lens=q_lens, k_lens=k_lens, causal=causal),
        *tensors((sum(q_lens), 4, 3), (sum(k_lens), 2, 3), (sum(k_lens), 2, 5)),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_both_kernels_agree_on_rows_long_and_short(strip_kernel: str, causal: bool):
    q_lens, k_lens = [3, 50, 0, 7, 8, 33, 6, 1], [5, 50, 4, 0, 8, 40, 2, 32]
    assert_matches_reference(
        functools.partial(packed_values, q_lens=q_lens, k_lens=k_lens, causal=causal),
        functools.partial(reference.attention_packed, q_lens=q_lens, k_lens=k_lens, causal=causal),
        *tensors((sum(q_lens), 4, 4), (sum(k_lens), 2, 4), (sum(k_lens), 2, 4)),
    )
    lens = [3, 50, 0, 7, 8, 33, 6, 1]
    assert_matches_reference(
        functools.partial(packed_values, q_lens=lens, k_lens=lens, causal=causal),
        functools.partial(reference.attention_packed, q_lens=lens, k_lens=lens, causal=causal),
        *tensors(*[(sum(lens), 2, 4)] * 3),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(5, 5), (3, 7), (7, 3), (1, 1), (0, 4), (4, 0), (70, 90)])
@pytest.mark.parametrize(("B", "H", "G", "D", "Dv"), [(2, 2, 2, 4, 4), (1, 4, 2, 3, 5), (3, 2, 1, 5, 2)])
def test_padded(strip_kernel: str, causal: bool, sizes: tuple[int, int], B: int, H: int, G: int, D: int, Dv: int):
    T, S = sizes
    assert_matches_reference(
        functools.partial(attention, causal=causal),
        functools.partial(reference.attention, causal=causal),
        *tensors((B, T, H, D), (B, S, G, D), (B, S, G, Dv)),
    )


def test_an_empty_batch():
    q, k, v = tensors((0, 3, 2, 4), (0, 5, 2, 4), (0, 5, 2, 4))
    out = attention(q, k, v)
    assert out.shape == (0, 3, 2, 4)
    assert [x.shape[0] for x in torch.autograd.grad(out.sum(), [q, k, v])] == [0, 0, 0]
    q, k, v = tensors((0, 2, 4), (3, 2, 4), (3, 2, 4))
    assert packed_values(q, k, v, q_lens=[0, 0], k_lens=[1, 2], causal=False).shape == (0, 2, 4)
    assert packed_values(q[:0], k[:0], v[:0], q_lens=[], k_lens=[], causal=True).shape == (0, 2, 4)


@pytest.mark.parametrize(("H", "D", "Dv"), [(0, 3, 3), (2, 0, 0), (2, 0, 3), (2, 3, 0)])
def test_sizes_of_zero(strip_kernel: str, H: int, D: int, Dv: int):
    leaves = tensors((2, 5, H, D), (2, 4, H, D), (2, 4, H, Dv))
    out = attention(*leaves)
    assert out.shape == (2, 5, H, Dv)
    if out.numel():  # all scores are 0
        torch.testing.assert_close(out, leaves[2].mean(1, keepdim=True).expand(out.shape))
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == x.shape


def test_scale():
    q, k, v = tensors((1, 4, 2, 3), (1, 4, 2, 3), (1, 4, 2, 3))
    torch.testing.assert_close(attention(q, k, v, scale=2), reference.attention(q, k, v, scale=2.0))
    torch.testing.assert_close(attention(q, k, v, scale=0.0), v.mean(1, keepdim=True).expand(1, 4, 2, 3))
    torch.testing.assert_close(attention(q, k, v), attention(q, k, v, scale=3**-0.5))


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("lens", [[5], [3, 7, 0, 4], [40, 2]])
def test_causal_with_a_scale_that_is_not_positive(strip_kernel: str, scale: float, lens: list[int]):
    q, k, v = tensors(*[(sum(lens), 2, 3)] * 3)
    out = attention(*(PackedTensor(x, lens) for x in (q, k, v)), causal=True, scale=scale).unbind()
    rows = zip(*(x.split(lens) for x in (q, k, v)), strict=True)
    wanted = [reference.attention(*(x[None] for x in row), causal=True, scale=scale)[0] for row in rows]
    weights = [torch.randn_like(x) for x in wanted]
    torch.testing.assert_close(list(out), wanted)
    losses = (sum((x * w).sum() for x, w in zip(found, weights, strict=True)) for found in (out, wanted))
    torch.testing.assert_close(*(torch.autograd.grad(loss, (q, k, v)) for loss in losses))  # pyright: ignore


def test_the_output_has_the_rows_of_the_queries():
    time = Dim("time", [3, 0, 4])
    q, k = PackedTensor(torch.randn(7, 2, 3), time), PackedTensor(torch.randn(9, 2, 3), [2, 2, 5])
    assert attention(q, k, k).unpacked_dims == (3, time, 2, 3)
    assert attention(q, k, k).dims[0] is q.dims[0]  # `time` itself on the CPU


def test_lengths_that_are_equal_by_value():
    x, y = torch.randn(7, 2, 3), torch.randn(7, 1, 3)
    time = Dim("time", [3, 0, 4])
    one, other = PackedTensor(y, time), PackedTensor(y, [3, 0, 4])
    wanted = attention(PackedTensor(x, time), one, one, causal=True).values
    torch.testing.assert_close(attention(PackedTensor(x, time), other, one, causal=True).values, wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_and_padded_are_the_same_code(causal: bool):
    """A layer of self-attention, written once."""
    w_in, w_out = torch.randn(24, 8, dtype=torch.float64) / 3, torch.randn(8, 8, dtype=torch.float64) / 3

    def layer(x: Any) -> Any:
        q, k, v = torch.nn.functional.linear(x, w_in).unflatten(-1, (3, 2, 4)).unbind(-3)
        return x + torch.nn.functional.linear(attention(q, k, v, causal=causal).flatten(-2), w_out)

    x = PackedTensor(torch.randn(15, 8, dtype=torch.float64), [5, 1, 0, 9])
    rows = [layer(row[None])[0] for row in x.unbind()]
    torch.testing.assert_close(layer(x).values, torch.cat(rows))


@pytest.mark.parametrize("causal", [False, True])
def test_a_short_row_does_not_depend_on_its_batch_mates(causal: bool):
    q, k, v = (x.detach() for x in tensors(*[(50, 2, 4)] * 3, dtype=torch.float32))
    lens = [9, 11, 16, 10, 4]
    together = packed_values(q, k, v, q_lens=lens, k_lens=lens, causal=causal).split(lens)
    for b, (row, start) in enumerate(zip(together, torch.tensor([0, *lens]).cumsum(0).tolist(), strict=False)):
        alone = attention(*(x[None, start : start + lens[b]] for x in (q, k, v)), causal=causal)[0]
        torch.testing.assert_close(row, alone)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bad", [1, 2])
def test_what_is_not_of_a_row_is_never_read(strip_kernel: str, causal: bool, bad: int):
    """Neither a long row nor one that is padded together with others reaches them, forward or backward."""
    lens = [3, 40, 5, 12, 6, 0]
    start, stop = sum(lens[:bad]), sum(lens[: bad + 1])
    q, k, v = (x.detach() for x in tensors(*[(sum(lens), 2, 4)] * 3))
    for x in (q, k, v):
        x[start:stop] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = packed_values(*leaves, q_lens=lens, k_lens=lens, causal=causal)
    for x in (out, *torch.autograd.grad(out.sum(), leaves)):
        assert x[start:stop].isnan().any()
        assert not x[:start].isnan().any()
        assert not x[stop:].isnan().any()


def test_large_scores_do_not_overflow(strip_kernel: str):
    q, k, v = tensors(*[(1, 6, 1, 4)] * 3, dtype=torch.float32)
    out = attention(q * 1e4, k * 1e4, v)
    torch.testing.assert_close(out, reference.attention(q.double() * 1e4, k.double() * 1e4, v.double()).float())
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_dtypes(strip_kernel: str, dtype: torch.dtype, tolerance: float):
    wide = tensors((40, 4, 8), (40, 2, 8), (40, 2, 8))
    narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
    lens = [3, 35, 0, 2]
    out = packed_values(*narrow, q_lens=lens, k_lens=lens, causal=True)
    expected = reference.attention_packed(*wide, q_lens=lens, k_lens=lens, causal=True)
    assert out.dtype is dtype
    cotangent = torch.randn_like(expected)
    grads = torch.autograd.grad(out, narrow, cotangent.to(dtype))
    assert [x.dtype for x in grads] == [dtype] * 3
    for found, wanted in zip([out, *grads], [expected, *torch.autograd.grad(expected, wide, cotangent)], strict=True):
        assert (found.double() - wanted).abs().max() < tolerance * wanted.abs().max()


def test_autocast_casts_and_gradients_come_back_in_the_dtype_of_the_inputs(strip_kernel: str):
    leaves = tensors(*[(2, 5, 2, 4)] * 3, dtype=torch.float32)
    cast = [x.detach().to(torch.bfloat16).requires_grad_() for x in leaves]
    wanted = attention(*cast)
    with torch.autocast(HERE.type, torch.bfloat16):
        for some in (leaves, [leaves[0], cast[1], leaves[2]]):  # a key may have been cast before
            torch.testing.assert_close(attention(*some), wanted, rtol=0, atol=0)
        found = torch.autograd.grad(attention(*leaves).sum(), leaves)
    grads = [g.float() for g in torch.autograd.grad(wanted.sum(), cast)]
    torch.testing.assert_close(list(found), grads, rtol=0, atol=0)
    wide = [x.double() for x in leaves]
    with torch.autocast(HERE.type, torch.bfloat16):
        torch.testing.assert_close(attention(*wide), reference.attention(*wide))


def test_under_autocast_what_stays_float64_does_not_mix():
    q, k, v = tensors(*[(1, 3, 1, 2)] * 3)
    with torch.autocast(HERE.type, torch.bfloat16), pytest.raises(TypeError, match="dtypes of q, k and v differ"):
        attention(q, k.float(), v.float())


def test_a_device_without_values():
    q, k, v = (torch.empty(2, n, heads, 3, device="meta", requires_grad=True) for n, heads in ((5, 4), (6, 2), (6, 2)))
    out = attention(q, k, v, causal=True)
    assert (out.shape, out.device.type) == ((2, 5, 4, 3), "meta")
    assert [x.shape for x in torch.autograd.grad(out.sum(), [q, k, v])] == [x.shape for x in (q, k, v)]


def test_any_strides():
    whole = torch.randn(3, 4, 6, 2, 5, dtype=torch.float64).requires_grad_()

    def parts(x: Tensor, attend: object) -> Tensor:
        q, k, v = x.permute(0, 4, 2, 3, 1).unbind(0)  # (B, T, heads, D), D not last in memory
        return attend(q, k.expand(q.shape), v)  # pyright: ignore[reportCallIssue]

    assert_matches_reference(
        functools.partial(parts, attend=attention), functools.partial(parts, attend=reference.attention), whole
    )
    assert torch.autograd.gradgradcheck(
        lambda x: parts(x, attention), whole[:, :1, :2, :, :2].detach().requires_grad_()
    )
    x = torch.randn(1, 1, 1, 4, dtype=torch.float64).requires_grad_()
    both = [
        f(x.expand(2, 5, 2, 4), x.expand(2, 7, 1, 4), x.expand(2, 7, 1, 4)) for f in (attention, reference.attention)
    ]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in both))


def test_the_same_tensor_as_query_key_and_value():
    (x,) = tensors((2, 5, 2, 3))
    assert_matches_reference(
        lambda x: attention(x, x, x, causal=True), lambda x: reference.attention(x, x, x, causal=True), x
    )
    out = attention(x, x.sin(), x, causal=True).sin().sum()
    recorded, plain = (torch.autograd.grad(out, x, create_graph=record, retain_graph=True) for record in (True, False))
    torch.testing.assert_close(recorded, plain)
    assert torch.autograd.gradgradcheck(lambda x: attention(x, x.sin(), x, causal=True), x)


# -- gradients


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Dv", [2, 3])
def test_gradients_of_first_and_second_order(strip_kernel: str, causal: bool, Dv: int):
    q_lens, k_lens = [2, 0, 3, 1], [2, 3, 1, 0]
    leaves = tensors((6, 2, 2), (6, 1, 2), (6, 1, Dv))
    fn = functools.partial(packed_values, q_lens=q_lens, k_lens=k_lens, causal=causal)
    assert torch.autograd.gradcheck(fn, leaves)
    assert torch.autograd.gradgradcheck(fn, leaves)
    padded = [x[None] for x in leaves]
    assert torch.autograd.gradgradcheck(functools.partial(attention, causal=causal), padded)


@pytest.mark.parametrize("causal", [False, True])
def test_recorded_gradients_are_those_of_an_ordinary_backward(strip_kernel: str, causal: bool):
    q_lens, k_lens = [2, 0, 3, 1, 40], [2, 3, 1, 0, 33]
    leaves = tensors((46, 4, 3), (39, 2, 3), (39, 2, 3))
    out = packed_values(*leaves, q_lens=q_lens, k_lens=k_lens, causal=causal).sin().sum()
    wanted = torch.autograd.grad(out, leaves, retain_graph=True)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either, where a query sees nothing
        torch.testing.assert_close(torch.autograd.grad(out, leaves, create_graph=True), wanted)


@pytest.mark.parametrize("lens", [None, [2, 1], [2, 0, 1, 3, 40]])
def test_batched_gradients(lens: list[int] | None):
    if lens is None:
        leaves = tensors((1, 3, 2, 2), (1, 3, 1, 2), (1, 3, 1, 2))
        out = attention(*leaves, causal=True)
    else:
        leaves = tensors((sum(lens), 2, 2), (sum(lens), 1, 2), (sum(lens), 1, 2))
        out = packed_values(*leaves, q_lens=lens, k_lens=lens, causal=True)
    basis = torch.eye(out.numel(), dtype=out.dtype).view(-1, *out.shape)
    found = torch.autograd.grad(out, leaves, basis, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, leaves, row, retain_graph=True) for row in basis]
    for i, wanted in enumerate(zip(*one_by_one, strict=True)):
        torch.testing.assert_close(found[i], torch.stack(wanted))


@pytest.mark.parametrize("needed", [[0], [1], [2], [0, 2]])
def test_partial_gradients(needed: list[int]):
    leaves = tensors(*[(7, 2, 3)] * 3)
    inputs = [x if i in needed else x.detach() for i, x in enumerate(leaves)]
    lens = [4, 0, 3]
    some = [leaves[i] for i in needed]
    wanted = torch.autograd.grad(reference.attention_packed(*inputs, q_lens=lens, k_lens=lens).sin().sum(), some)
    out = packed_values(*inputs, q_lens=lens, k_lens=lens, causal=False)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), some), wanted)
    out = packed_values(*inputs, q_lens=lens, k_lens=lens, causal=False)
    (first,) = torch.autograd.grad(out.sin().sum(), some[:1], create_graph=True)
    assert first.requires_grad
    torch.testing.assert_close(first, wanted[0])


def test_backward_twice_and_without_a_graph():
    q, k, v = tensors(*[(1, 4, 1, 2)] * 3)
    out = attention(q, k, v)
    first = torch.autograd.grad(out.sum(), q, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(out.sum(), q))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), q)
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    assert not attention(q.detach(), k.detach(), v.detach()).requires_grad


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_input_changed_before_backward_is_caught(which: int):
    leaves = tensors(*[(1, 4, 1, 2)] * 3)
    inputs = [x * 1 for x in leaves]
    out = attention(*inputs)
    inputs[which].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -- torch.func


def test_function_transforms():
    q, k, v = (x.detach() for x in tensors((2, 3, 2, 2), (2, 4, 1, 2), (2, 4, 1, 3)))
    ours, theirs = (functools.partial(f, causal=True) for f in (attention, reference.attention))
    close = torch.testing.assert_close
    loss = lambda f: lambda *x: f(*x).sin().sum()  # noqa: E731
    close(torch.func.grad(loss(ours), (0, 1, 2))(q, k, v), torch.func.grad(loss(theirs), (0, 1, 2))(q, k, v))
    close(torch.func.jacrev(ours)(q, k, v), torch.func.jacrev(theirs)(q, k, v))
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))
    close(torch.func.jvp(ours, (q, k, v), tangents), torch.func.jvp(theirs, (q, k, v), tangents))
    close(torch.func.hessian(loss(ours), 1)(q, k, v), torch.func.hessian(loss(theirs), 1)(q, k, v))
    many = [torch.randn(5, *x.shape, dtype=x.dtype) for x in (q, k, v)]
    close(torch.func.vmap(ours)(*many), torch.stack([theirs(*x) for x in zip(*many, strict=True)]))
    close(torch.func.vmap(ours, (0, None, None))(many[0], k, v), torch.stack([theirs(x, k, v) for x in many[0]]))


def test_a_packed_tensor_inside_a_transform():
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    time = Dim("time", [4, 0, 2])

    def loss(x: Tensor, attend: Any) -> Tensor:
        return attend(x).sin().sum()

    ours = torch.func.grad(functools.partial(loss, attend=lambda x: attention(*[PackedTensor(x, time)] * 3).values))(x)
    theirs = functools.partial(
        loss, attend=lambda x: reference.attention_packed(x, x, x, q_lens=[4, 0, 2], k_lens=[4, 0, 2])
    )
    torch.testing.assert_close(ours, torch.func.grad(theirs)(x))


def test_inside_torch_checkpoint_and_with_hooks_on_what_is_saved():
    leaves = tensors(*[(1, 5, 2, 3)] * 3)
    wanted = torch.autograd.grad(attention(*leaves, causal=True).sin().sum(), leaves)
    out = checkpoint(functools.partial(attention, causal=True), *leaves, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), leaves), wanted)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = attention(*leaves, causal=True)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), leaves), wanted)


def test_packed_under_transforms():
    lens, other = [2, 0, 3], [1, 2, 3]
    q, k, v = (x.detach() for x in tensors((5, 2, 2), (6, 1, 2), (6, 1, 2)))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return engine.attend(q[None], k[None], v[None], Sight(0.5, ends=False, offsets=([0, 2, 2, 5], [0, 1, 3, 6])))[0]

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention_packed(q, k, v, lens, other, causal=True, scale=0.5)

    torch.testing.assert_close(torch.func.jacrev(ours)(q, k, v), torch.func.jacrev(theirs)(q, k, v))
    torch.testing.assert_close(torch.func.jacfwd(ours)(q, k, v), torch.func.jacrev(theirs)(q, k, v))
    many = torch.randn(3, 5, 2, 2, dtype=q.dtype)
    torch.testing.assert_close(
        torch.func.vmap(ours, (0, None, None))(many, k, v), torch.stack([theirs(x, k, v) for x in many])
    )


@pytest.mark.usefixtures("on_the_cpu")
def test_short_rows_are_padded_together_and_long_ones_and_few_ones_are_views(monkeypatch: pytest.MonkeyPatch):
    lens = [3, 5, 40, 0, 12, 6, 33, 8, 1, 4, 2, 7]
    monkeypatch.setattr(strips, "FEW", 6)
    offsets = torch.tensor([0, *lens]).cumsum(0).tolist()
    q = torch.randn(1, sum(lens), 1, 2)
    found = list(strips.cut(Sight(ends=False, offsets=(offsets, offsets)), q, q))
    taken = [strip.q.take(q) for strip in found if strip.q is not None]
    assert sorted(tuple(x.shape[:2]) for x in taken) == [(1, 12), (1, 33), (1, 40), (8, 8)]
    assert [x._base is q for x in taken] == [x.shape[0] == 1 for x in taken]
