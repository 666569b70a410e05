"""What mixes the steps of a row, beside torch on each row alone: values, lens, and gradients, to second order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorloop.packed import PackedTensor
from tensorloop.packed.rows.windows import Windows, lay_out
from tensorloop.packed.time import convolution

D = torch.float64
LENS = st.lists(st.integers(0, 7), max_size=4)
MIXED = [3, 0, 7, 1, 2]
OnBoth = Callable[..., Any]


def values(n: int, channels: int = 4) -> Tensor:
    x = torch.randn(channels, n, dtype=D).T  # not contiguous
    return x.requires_grad_()


def rows_alone(x: Tensor, lens: list[int], fn: OnBoth, weights: list[Tensor]) -> list[Tensor]:
    """(C, len) of each row by torch; nothing where the row is empty, or torch says that it is shorter than a window."""
    found = []
    for row in x.split(lens):
        out = row.new_zeros(0, 0)
        if len(row):
            try:
                out = fn(row.T[None], *weights)[0].T
            except RuntimeError as error:
                if not any(text in str(error) for text in ("Kernel size can't", "too small", "output size")):
                    raise
        found.append(out)
    return found


def check(fn: OnBoth, lens: list[int], weights: list[Tensor], channels: int = 4, twice: bool = True) -> None:
    x = values(sum(lens), channels)
    inputs = [x, *(w for w in weights if w.requires_grad)]
    out = fn(seen(x, lens), *weights).transpose(1, 2)
    rows = rows_alone(x, lens, fn, weights)
    assert out.lens.tolist() == [len(row) for row in rows]
    filled = [row for row in rows if row.numel()]
    if not filled:
        grads = torch.autograd.grad(out.values.sum(), inputs, allow_unused=True)
        assert all(g is None or not g.any() for g in grads)
        return
    want = torch.cat(filled)
    torch.testing.assert_close(out.values, want)
    if want.isinf().any():  # a maximum of nothing but padding, whose gradient torch gives to the first entry
        return
    cotangent = torch.randn_like(want)
    firsts = []
    for y in (out.values, want):
        firsts.append(torch.autograd.grad(y, inputs, cotangent, create_graph=True, allow_unused=True))
    compare(*firsts)
    if twice:
        penalties = [torch.stack([g.sin().sum() for g in gs if g is not None]).cumsum(0).sum() for gs in firsts]
        if all(p.requires_grad for p in penalties):
            compare(*(torch.autograd.grad(p, inputs, allow_unused=True) for p in penalties))


def compare(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:  # what does not depend on it at all
            assert all(g is None or not g.any() for g in (a, b))
        else:
            torch.testing.assert_close(a, b)


def weight(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=D, requires_grad=True)


def seen(x: Tensor, lens: list[int]) -> Any:
    """Packed, and channels first."""
    return PackedTensor(x, lens).transpose(1, 2)


@settings(max_examples=60)
@given(
    lens=LENS,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 3),
    groups=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
)
def test_conv1d(
    lens: list[int], kernel: int, stride: int, dilation: int, padding: int, groups: int, bias: bool
) -> None:
    weights = [weight(4, 4 // groups, kernel), *([weight(4)] if bias else [])]

    def fn(x: Any, w: Tensor, b: Tensor | None = None) -> Any:
        return F.conv1d(x, w, b, stride, padding, dilation, groups)

    check(fn, lens, weights)


@settings(max_examples=40)
@given(
    lens=st.lists(st.integers(0, 20), max_size=6),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    line=st.integers(1, 13),
)
def test_conv1d_in_lines(lens: list[int], kernel: int, stride: int, padding: int, line: int) -> None:
    """As a buffer of thousands of slots is cut, with short lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_LINE", line)
        check(lambda x, w, b: F.conv1d(x, w, b, stride, padding), lens, [weight(3, 4, kernel), weight(3)])


def test_a_long_buffer_is_cut_into_lines() -> None:
    lens, w = [3000, 1, 0, 1500], weight(3, 4, 5)
    x = values(sum(lens))
    out: Any = F.conv1d(seen(x, lens), w, padding=2)
    want = torch.cat([F.conv1d(row.T[None], w, padding=2)[0].T for row in x.split(lens) if len(row)])
    torch.testing.assert_close(out.packed.values, want)
    compare(*(torch.autograd.grad(y.sin().sum(), (x, w)) for y in (out.packed.values, want)))


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("lens", [MIXED, [5], [0, 0], []])
def test_same_padding_keeps_the_rows(kernel: int, lens: list[int]) -> None:
    check(lambda x, w: F.conv1d(x, w, padding="same", dilation=2), lens, [weight(3, 4, kernel)])
    p: Any = PackedTensor(values(sum(lens)), lens)
    out: Any = F.conv1d(p.transpose(1, 2), weight(3, 4, kernel), padding="same")
    assert out.transpose(1, 2).dims[0] is p.dims[0]  # nothing to compare where it is added to its input


@settings(max_examples=30)
@given(lens=LENS, kernel=st.integers(1, 4), dilation=st.integers(1, 2))
def test_causal_convolution_finds_the_rows_again(lens: list[int], kernel: int, dilation: int) -> None:
    """Padded by hand at the left, as padded code does it."""
    before = dilation * (kernel - 1)

    def fn(x: Any, w: Tensor) -> Any:
        return F.conv1d(F.pad(x, (before, 0)), w, dilation=dilation)

    check(fn, lens, [weight(3, 4, kernel)])
    p = PackedTensor(values(sum(lens)), lens)
    assert fn(p.transpose(1, 2), weight(3, 4, kernel)).transpose(1, 2).dims[0] is p.dims[0]


@settings(max_examples=60)
@given(
    lens=LENS,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 1),
    extra=st.integers(0, 2),
    groups=st.sampled_from([1, 2]),
)
def test_conv_transpose1d(
    lens: list[int], kernel: int, stride: int, dilation: int, padding: int, extra: int, groups: int
) -> None:
    extra = min(extra, max(stride, dilation) - 1)

    def fn(x: Any, w: Tensor, b: Tensor) -> Any:
        return F.conv_transpose1d(x, w, b, stride, padding, extra, groups, dilation)

    check(fn, lens, [weight(4, 3, kernel), weight(3 * groups)])


@settings(max_examples=60)
@given(
    lens=LENS,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2),
    ceil=st.booleans(),
)
def test_max_pool1d(lens: list[int], kernel: int, stride: int, dilation: int, padding: int, ceil: bool) -> None:
    padding = min(padding, kernel // 2)
    check(lambda x: F.max_pool1d(x, kernel, stride, padding, dilation, ceil), lens, [])
    p = PackedTensor(values(sum(lens)), lens)
    x: Any = p.transpose(1, 2)
    pool: Any = F.max_pool1d
    found, places = pool(x, kernel, stride, padding, dilation, ceil, return_indices=True)
    same = pool(x, kernel, stride, padding, dilation, ceil)
    assert torch.equal(found, same)
    reached = places.packed.values < p.lens[places.packed.row_ids].unsqueeze(1)
    assert reached.all()
    if not found.packed.values.isinf().any():  # torch's place of nothing but padding is outside of the row
        at = places.packed.values + p.offsets[places.packed.row_ids].unsqueeze(1)
        assert torch.equal(p.values.gather(0, at), found.packed.values)


@settings(max_examples=40)
@given(lens=LENS, size=st.integers(2, 4))
def test_windows_side_by_side(lens: list[int], size: int) -> None:
    """What no window holds is not looked at, and nothing is laid out but what windows hold."""
    for pool in (F.max_pool1d, F.avg_pool1d):
        check(lambda x, pool=pool: pool(x, size), lens, [])
    weight = torch.randn(8, 2, size, dtype=D).requires_grad_()
    check(lambda x, w: F.conv1d(x, w, stride=size, groups=2), lens, [weight])
    p = PackedTensor(values(sum(lens)), lens)
    if (held := p.positions < (p.lens // size * size)[p.row_ids]).any():
        layout = lay_out(p._dim, Windows(size, size))
        assert (layout.slots, layout.windows) == (int(held.sum()), None)
        spoilt = PackedTensor(torch.where(held[:, None], p.values, torch.nan), p.lens)
        assert not F.avg_pool1d(seen(spoilt.values, lens), size).isnan().any()


@settings(max_examples=60)
@given(
    lens=LENS,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    ceil=st.booleans(),
    counted=st.booleans(),
)
def test_avg_pool1d(lens: list[int], kernel: int, stride: int, padding: int, ceil: bool, counted: bool) -> None:
    padding = min(padding, kernel // 2)
    check(lambda x: F.avg_pool1d(x, kernel, stride, padding, ceil, counted), lens, [])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("pool", [F.adaptive_avg_pool1d, F.adaptive_max_pool1d])
def test_bins_of_whole_rows(size: int, pool: Any) -> None:
    lens = [3, 7, 1, 2]
    x = values(sum(lens))
    out = pool(seen(x, lens), size)
    want = torch.cat([pool(row.T[None], size) for row in x.split(lens)])
    torch.testing.assert_close(out, want)
    cotangent = torch.randn_like(out)
    compare(*(torch.autograd.grad(y, x, cotangent) for y in (out, want)))


@pytest.mark.parametrize("lens", [MIXED, [1, 5], [6]])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_that_of_all_entries(lens: list[int], training: bool) -> None:
    x, layers = values(sum(lens)), [torch.nn.BatchNorm1d(4).to(D).train(training) for _ in range(2)]
    for layer in layers:
        torch.nn.init.uniform_(layer.weight)
    layers[1].load_state_dict(layers[0].state_dict())
    out = layers[0](seen(x, lens)).transpose(1, 2)
    want = layers[1](x.T[None])[0].T
    torch.testing.assert_close(out.values, want)
    for name, buffer in layers[0].named_buffers():
        torch.testing.assert_close(buffer, dict(layers[1].named_buffers())[name])
    check_twice(out.values, want, [x], [layer.weight for layer in layers])


def check_twice(ours: Tensor, theirs: Tensor, inputs: list[Tensor], own: list[Tensor]) -> None:
    """Gradients of two results, to second order, for inputs that both have and one that each has of its own."""
    cotangent = torch.randn_like(ours)
    found = []
    for y, w in zip((ours, theirs), own, strict=True):
        firsts = torch.autograd.grad(y, [*inputs, w], cotangent, create_graph=True)
        found.append((firsts, torch.autograd.grad(torch.stack([g.sin().sum() for g in firsts]).sum(), [*inputs, w])))
    for order in range(2):
        compare(found[0][order], found[1][order])


@pytest.mark.parametrize("groups", [1, 2, 4])
@settings(max_examples=15)
@given(lens=LENS)
def test_group_norm(groups: int, lens: list[int]) -> None:
    lens = [n + (n == 1 and groups == 4) for n in lens]  # of one number torch takes no variance
    check(lambda x, w, b: F.group_norm(x, groups, w, b), lens, [weight(4), weight(4)])


@settings(max_examples=15)
@given(lens=LENS)
def test_instance_norm(lens: list[int]) -> None:
    lens = [n + (n == 1) for n in lens]  # of one entry torch has no variance
    check(lambda x, w, b: F.instance_norm(x, None, None, w, b), lens, [weight(4), weight(4)])


def test_running_statistics_of_instance_norm() -> None:
    lens, x = [3, 0, 5], values(8)
    layers = [torch.nn.InstanceNorm1d(4, affine=True, track_running_stats=True).to(D) for _ in range(2)]
    layers[0](seen(x, lens))
    rows = [row.T[None] for row in x.split(lens) if len(row)]
    ends = []
    for row in rows:
        layers[1].reset_running_stats()
        layers[1](row)
        ends.append([buffer.clone() for buffer in layers[1].buffers()])
    for found, *want in list(zip(layers[0].buffers(), *ends, strict=True))[:2]:
        torch.testing.assert_close(found, torch.stack(want).mean(0))
    out = layers[0].eval()(seen(x, lens))
    torch.testing.assert_close(out[0], layers[0](rows[0])[0])


@settings(max_examples=40)
@given(
    lens=LENS,
    how=st.sampled_from([{"size": n} for n in (1, 2, 5)] + [{"scale_factor": s} for s in (2, 0.5, 1.7, 3.0, 1.0)]),
    mode=st.sampled_from(["nearest", "nearest-exact", "linear", "corners"]),
    again=st.booleans(),
)
def test_interpolate(lens: list[int], how: dict[str, Any], mode: str, again: bool) -> None:
    more: dict[str, Any] = {"mode": "linear", "align_corners": True} if mode == "corners" else {"mode": mode}
    if "scale_factor" in how:
        more["recompute_scale_factor"] = again
    check(lambda x: F.interpolate(x, **how, **more), lens, [])


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("sizes", [(1, 0), (0, 2), (2, 1)])
def test_padding_from_the_row_itself(mode: str, sizes: tuple[int, int]) -> None:
    check(lambda x: F.pad(x, sizes, mode), [3, 0, 7, 4], [])


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
@pytest.mark.parametrize("sizes", [(1, -1), (-1, 1), (2, -3), (-2, 2), (-1, -1)], ids=str)
def test_padding_at_one_end_and_cutting_at_the_other(mode: str, sizes: tuple[int, int]) -> None:
    """What torch gives for a row, also where all that is left is padding; lens grow by the sum in every row."""
    rows = [torch.arange(1.0, n + 1) for n in range(4, 9)] + [torch.ones(1), torch.ones(2)] * (mode == "replicate")
    p = PackedTensor.from_list([row[:, None] for row in rows]).transpose(1, 2)
    out: Any = F.pad(p, sizes, mode).transpose(1, 2)
    want = [F.pad(row[None, None], sizes, mode)[0, 0] for row in rows if len(row) + sum(sizes) > 0]
    torch.testing.assert_close(out.values[:, 0], torch.cat(want))
    assert out.lens.tolist() == [max(len(row) + sum(sizes), 0) for row in rows]
    with pytest.raises(TypeError, match=r"pad: mode 'circular' that adds .* at the other; slice"):
        F.pad(p, (1, -1), "circular")


@settings(max_examples=20)
@given(lens=LENS, sizes=st.tuples(*[st.integers(-2, 3)] * 2))
def test_padding_with_a_constant(lens: list[int], sizes: tuple[int, int]) -> None:
    x = values(sum(lens))
    p = PackedTensor(x, lens)
    out: Any = F.pad(p.transpose(1, 2), sizes, value=2.0).transpose(1, 2)
    rows = [F.pad(row, (0, 0, max(sizes[0], 0), max(sizes[1], 0)), value=2.0) for row in x.split(lens)]
    want = [row[max(-sizes[0], 0) : len(row) + min(sizes[1], 0)] for row in rows]
    assert out.lens.tolist() == [len(row) for row in want]
    torch.testing.assert_close(out.values, torch.cat([x[:0], *want]))
    assert F.pad(p.transpose(1, 2), (0, 0, 1, 0)).shape == (len(lens), 5, None)


@settings(max_examples=30)
@given(lens=LENS, size=st.integers(1, 4), step=st.integers(1, 3))
def test_unfold(lens: list[int], size: int, step: int) -> None:
    x = values(sum(lens))
    out: Any = PackedTensor(x, lens).unfold(1, size, step)
    want = [row.unfold(0, size, step) for row in x.split(lens) if len(row) >= size]
    assert out.lens.tolist() == [max((n - size) // step + 1, 0) for n in lens]
    assert out.shape == (len(lens), None, 4, size)
    if want:
        torch.testing.assert_close(out.values, torch.cat(want))
        cotangent = torch.randn_like(out.values)
        compare(*(torch.autograd.grad(y, x, cotangent) for y in (out.values, torch.cat(want))))


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("mode", ["reflect", "constant"])
@pytest.mark.parametrize(("size", "hop", "width"), [(4, 1, 4), (5, 3, 3), (4, 6, 2)])
def test_stft(center: bool, mode: str, size: int, hop: int, width: int) -> None:
    lens = [9, 0, 3, 17] if center else [9, 0, 3, 17, 4]
    x = torch.randn(sum(lens), dtype=D, requires_grad=True)
    window = torch.hann_window(width, periodic=False, dtype=D) + 0.1

    def fn(x: Any, normalized: bool = False) -> Any:
        return torch.stft(
            x, size, hop, width, window, center, mode, normalized=normalized, onesided=True, return_complex=True
        )

    for normalized in (False, True):
        out = fn(PackedTensor(x, lens), normalized).transpose(1, 2)
        rows = [row for row in x.split(lens) if len(row) and (center or len(row) >= size)]
        want = torch.cat([fn(row[None], normalized)[0].T for row in rows])
        torch.testing.assert_close(out.values, want)
        assert out.lens[1] == 0
        powers = [y.abs().square().sin().sum() for y in (out.values, want)]
        firsts = [torch.autograd.grad(y, x, create_graph=True)[0] for y in powers]
        compare(firsts[:1], firsts[1:])
        compare(*(torch.autograd.grad(g.sin().sum(), x, retain_graph=True) for g in firsts))


def test_stft_without_what_may_be_left_out() -> None:
    lens = [9, 5]
    x = torch.randn(14, dtype=D)
    several: list[dict[str, Any]] = [{}, {"onesided": False}]
    for options in several:
        out: Any = PackedTensor(x, lens).stft(4, return_complex=True, window=torch.ones(4, dtype=D), **options)
        rows = [row.stft(4, return_complex=True, window=torch.ones(4, dtype=D), **options) for row in x.split(lens)]
        torch.testing.assert_close(out.packed.values, torch.cat([row.T for row in rows]))
    z = torch.randn(14, dtype=torch.complex128)
    out = torch.stft(PackedTensor(z, lens), 4, 2, window=torch.ones(4, dtype=D), return_complex=True)
    rows = [torch.stft(row, 4, 2, window=torch.ones(4, dtype=D), return_complex=True) for row in z.split(lens)]
    torch.testing.assert_close(out.packed.values, torch.cat([row.T for row in rows]))
