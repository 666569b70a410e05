"""Operations that give several tensors, or see several places at once: in the loop, before it and after it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop.loop.compiled.run.plan import Plan, plans
from tests.support.both_ways import AMINMAX_HAS_A_GRADIENT
from tests.support.compiled_cases import check_equal
from tests.support.devices import HERE

B, C, L, T = 2, 3, 7, 4
DTYPE = torch.float64
Body = Callable[[Tensor, Tensor], Any]


def weight(*shape: int) -> Tensor:
    generator = torch.Generator(HERE).manual_seed(5)
    return (torch.randn(shape, dtype=DTYPE, generator=generator) * 0.4).requires_grad_()


KERNEL, BIAS, GROUPED, WIDE = weight(C, C, 3), weight(C), weight(6, 1, 2), weight(C, C, 3, 2)
GROUPS, MEANS = weight(C), weight(C).detach()
CAPTURES = [KERNEL, BIAS, GROUPED, WIDE, GROUPS]


def pooled(h: Tensor, x: Tensor) -> Any:
    values, places = F.max_pool1d(h, 3, 2, 1, return_indices=True)
    return h.cos() + x * values.sum(-1, keepdim=True), places


def attended(h: Tensor, x: Tensor) -> Any:
    query, key = h.unsqueeze(1), x.unsqueeze(1)
    return torch.sin(h) + F.scaled_dot_product_attention(query, key, key, is_causal=True).squeeze(1), h


def spread(h: Tensor, x: Tensor) -> Any:
    low, high = torch.aminmax(h if AMINMAX_HAS_A_GRADIENT else h.detach(), dim=-1, keepdim=True)
    return (h - low) * x / (1 + high.abs()), h.max(1)


def varied(h: Tensor, x: Tensor) -> Any:
    variance, mean = torch.var_mean(h, (0, 2), keepdim=True)
    deviation, _ = torch.std_mean(h, -1, correction=0, keepdim=True)
    return (h - mean) / (variance + 1) + x * deviation, h.var()


def normed(h: Tensor, x: Tensor) -> Any:
    out, mean, scale = torch.native_layer_norm(h + x, [L], None, None, 1e-5)
    return out + x * mean * scale, h


BODIES: dict[str, Body] = {
    "conv of the carry": lambda h, x: (torch.sin(F.conv1d(h, KERNEL, BIAS, padding=1) + x), h),
    "conv of x": lambda h, x: (torch.sin(h + F.conv1d(x, KERNEL, BIAS, padding="same")), h),
    "conv of both": lambda h, x: (torch.sin(F.conv1d(h * x, KERNEL, padding=1)), F.conv1d(h, KERNEL)),
    "conv of what went before": lambda h, x: (torch.sin(h + x), F.conv1d(h, KERNEL, BIAS, stride=2)),
    "grouped conv": lambda h, x: (torch.sin(F.conv1d(h, GROUPED, groups=3, padding=1)[:, ::2, :L] + x), h),
    "conv of a carried kernel": lambda h, x: (torch.sin(h + F.conv1d(x, h[:1, :, :3].expand(C, C, 3), padding=1)), h),
    "transposed conv": lambda h, x: (torch.sin(F.conv_transpose1d(h, KERNEL, BIAS, padding=1) + x), h),
    "transposed conv with strides": lambda h, x: (
        torch.sin(F.conv_transpose1d(h[..., :3], GROUPED.expand(6, 1, 2)[:3], None, 3, 1, 1, 3, 1) + x),
        h,
    ),
    "conv of two dims": lambda h, x: (
        torch.sin(F.conv2d(torch.stack([h, h * x], -1), WIDE, BIAS, padding=(1, 0)).squeeze(-1)),
        h,
    ),
    "group norm": lambda h, x: (F.group_norm(h, 1, GROUPS, BIAS) + x, h),
    "batch norm": lambda h, x: (torch.sin(F.batch_norm(h, MEANS, MEANS.exp(), GROUPS, BIAS) + x), h),
    "layer norm with statistics": normed,
    "attention": lambda h, x: (torch.sin(h) + F.scaled_dot_product_attention(h, x, x), h),
    "causal attention of heads": attended,
    "variances": varied,
    "max pool": pooled,
    "mean pool": lambda h, x: (torch.sin(F.avg_pool1d(h, 3, 1, 1) + x), h),
    "limits": spread,
    "sort": lambda h, x: (torch.sin(h.sort(-1)[0] + x), h.sort(1, descending=True)[1]),
    "sort of x": lambda h, x: (torch.sin(h + x.sort(-1)[0]), x.sort(1)[1]),
    "sort afterwards": lambda h, x: (torch.sin(h + x), h.sort(-1)),
    "largest few": lambda h, x: (torch.sin(h.topk(2, -1)[0].sum(-1, keepdim=True) + x), h.topk(3, 1)),
    "smallest few": lambda h, x: (torch.sin(h * x), h.topk(2, -1, largest=False)),
    "k-th": lambda h, x: (h.sin() + h.kthvalue(2, -1, keepdim=True)[0] * x, h.kthvalue(3, 1)[1]),
    "split": lambda h, x: (torch.cat(h.split([1, 4, 2], -1)[::-1], -1) * x.cos(), h),
    "unbind": lambda h, x: (torch.stack(h.unbind(1)[::-1], 1) * x.cos(), h),
}


def outcome(body: Body, compile: Any) -> tuple[list[Tensor], list[Any]]:
    torch.manual_seed(0)
    h = torch.randn(B, C, L, dtype=DTYPE, requires_grad=True)
    xs = torch.randn(T, B, C, L, dtype=DTYPE, requires_grad=True)
    outputs = tree_leaves(tl.scan(body, h, xs, compile=compile))
    loss = sum((y * torch.arange(1, y.numel() + 1).view(y.shape).cos()).sum() for y in outputs if y.requires_grad)
    return outputs, list(torch.autograd.grad(loss, [h, xs, *CAPTURES], allow_unused=True))  # pyright: ignore


@pytest.mark.parametrize("name", BODIES)
def test_native_both_ways_and_equal_to_the_eager_loop(name: str):
    plans.clear()
    expected, expected_grads = outcome(BODIES[name], False)
    found, grads = outcome(BODIES[name], "strict")
    check_equal(found, expected, 1e-11)
    check_equal(grads, expected_grads, 1e-11)
    (plan,) = (p for p in plans._plans.values() if isinstance(p, Plan))
    assert all(program.lacking is None for program in plan._backward.values())


def test_a_kernels_gradient_is_not_stored_at_each_step():
    plans.clear()
    outcome(BODIES["conv of the carry"], "strict")
    (plan,) = (p for p in plans._plans.values() if isinstance(p, Plan))
    program = next(iter(plan._backward.values()))
    shapes = [tuple(n.meta["val"].shape) for n in program.partition.outs]
    assert shapes
    assert set(shapes) == {(B, C, L)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_order_among_equal_and_odd_elements(size: int, dtype: torch.dtype):
    row = torch.tensor([2.0, math.inf, 1.0, -math.inf, 2.0, math.nan, -0.0, 0.0, math.nan]).repeat(5)[:size]
    first = torch.stack([row, row.flip(0), -row]) if dtype is torch.float32 else row.nan_to_num(3, 5, -5).expand(3, -1)
    first = first.to(dtype)
    k = min(3, size)

    def body(h: Tensor, _: None) -> Any:
        order = [h.sort(-1), h.sort(-1, descending=True), h.kthvalue(k, -1)]
        most, least = h.topk(k, -1), h.topk(k, -1, largest=False)
        taken = [h.gather(-1, found.indices) for found in (most, least)]
        return h.roll(1, -1), (*order, most.values, least.values, *taken)

    found = tree_leaves(tl.scan(body, first, None, 3, compile="strict"))
    expected = tree_leaves(tl.scan(body, first, None, 3))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_a_module_with_convolutions():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv1d(C, 5, 3, padding=1), nn.GroupNorm(5, 5), nn.GELU(), nn.Conv1d(5, C, 1)).to(DTYPE)
    weights = list(net.parameters())

    def run(compile: Any) -> Any:
        torch.manual_seed(3)
        last, ys = tl.scan(lambda h, x: (h + 0.3 * net(h * x), h), torch.randn(1, C, L, dtype=DTYPE),
                           torch.randn(T, 1, C, L, dtype=DTYPE), compile=compile)  # fmt: skip
        return [last, ys], torch.autograd.grad(last.sum() + ys.square().sum(), weights)

    (found, grads), (expected, expected_grads) = run("strict"), run(False)
    check_equal(found, expected, 1e-11)
    check_equal(grads, expected_grads, 1e-11)


def test_what_vmap_does_not_do_or_does_wrong_goes_step_by_step(monkeypatch: pytest.MonkeyPatch):
    """Such an operation alone, forward or backward; all others run for all steps at once."""

    def rolls(h: Tensor, x: Tensor) -> Any:
        return torch.sin(h + x.roll(1, -1)), h

    def selects(h: Tensor, x: Tensor) -> Any:
        return torch.sin(h + x), h.index_select(1, torch.tensor([0, 2]))

    def fails(self: Any, *tensors: Tensor) -> Any:
        raise RuntimeError("no rule")

    def wrong(self: Any, *tensors: Tensor) -> Any:
        return self._in_turn(*(x * 2 if x.is_floating_point() else x for x in tensors))

    for mapped in (fails, wrong):
        plans.clear()
        monkeypatch.setattr("tensorloop.compiler.divide.mapped.Mapped._mapped", mapped)
        for body in (rolls, selects):
            found, grads = outcome(body, "strict")
            expected, expected_grads = outcome(body, False)
            check_equal([*found, *grads], [*expected, *expected_grads], 1e-11)


@pytest.mark.parametrize(
    "body",
    [
        lambda h, x: (h + torch.zeros(L, dtype=DTYPE).index_fill(0, torch.tensor([1]), x.sum()), x[0].trace()),
        lambda h, x: (h * 0.5 + x[0].trace() * h, x[1, :2].trace() ** 2),
        lambda h, x: (h + x[0, 0].max() * (x[0, 0] > 0).sum(), x[1, 1].median() + x[0, 1].nanmean()),
    ],
    ids=["index_fill", "trace", "no_dims"],
)
def test_operations_whose_own_rules_of_vmap_are_wrong(body: Any):
    found, grads = outcome(body, "strict")
    expected, expected_grads = outcome(body, False)
    check_equal([*found, *grads], [*expected, *expected_grads], 1e-11)
