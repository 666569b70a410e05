"""Packed tensors of static shape: what ordinary ones give, whatever stands in free entries, and no length is read."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop._torch.fake import fake_tensors
from tensorloop.packed import StaticPackedTensor
from tensorloop.packed.table import pointwise
from tests.support.devices import ON

LENS = [[3, 0, 4, 1], [0, 0], [5], [], [2, 2, 0]]
torch.manual_seed(0)
TABLE = torch.randn(6, 6, dtype=torch.float64)
ROWS, STEPS, WEIGHT = torch.randn(4, 1, 6).double(), torch.randn(5, 6).double(), torch.randn(6).double()

# Functions of a packed tensor (B, T*, 6) and its max_len, ordinary or static. Of an ordinary one amax needs initial.
SAME: dict[str, Callable[..., Any]] = {
    "pointwise": lambda p: torch.sigmoid(p).tanh() * p.exp() + p,
    "reciprocal": lambda p: 1 / p + p.abs().log() + p.abs().sqrt(),
    "where": lambda p: torch.where(p > 0, p, -2.0),
    "linear": lambda p: F.linear(p, TABLE, WEIGHT).relu(),
    "matmul": lambda p: p @ TABLE,
    "layer_norm": lambda p: F.layer_norm(p, (6,), WEIGHT, WEIGHT),
    "rms_norm": lambda p: F.rms_norm(p, (6,), WEIGHT),
    "features": lambda p: p * WEIGHT + p.softmax(-1) + p.sum(-1, keepdim=True),
    "heads": lambda p: p.unflatten(-1, (2, 3)).transpose(2, 3).flatten(2, 3),
    "chunk": lambda p: torch.cat(p.chunk(2, -1)[::-1], -1),
    "stack": lambda p: torch.stack([p, p.sin()], 2).unsqueeze(2).squeeze(2).flatten(2),
    "sum": lambda p: p.sum(1),
    "sum kept": lambda p: p - p.sum(1, keepdim=True),
    "sum of both": lambda p: p.sum((1, 2)),
    "sum of all": lambda p: p.square().sum(),
    "mean": lambda p: p.mean(1),
    "mean of both": lambda p: p.mean((1, 2)),
    "mean of all": lambda p: p.mean(),
    "mean of entries": lambda p: p.mean((0, 1)),
    "mean of all kept": lambda p: p - p.mean((0, 1), keepdim=True),
    "amax of all": lambda p: p.amax((0, 1), initial=-9.0),
    "sum by its axis": lambda p: p.sum(axis=1),
    "amax": lambda p: p.amax(1, initial=-9.0),
    "amin": lambda p: p.amin((1, 2), initial=0.5),
    "logsumexp": lambda p: p.logsumexp(1),
    "softmax": lambda p: p.softmax(1),
    "log_softmax": lambda p: p.log_softmax(1),
    "cumsum": lambda p: p.cumsum(1),
    "cumsum of features": lambda p: p.cumsum(-1),
    "flip": lambda p: p.flip(1),
    "flip of features": lambda p: p.flip(1, 2),
    "amax of features": lambda p: p.amax(-1, initial=0.5).square(),
    "pad": lambda p: p.pad() if isinstance(p, StaticPackedTensor) else p.pad(max_len=5),
    "pad with ones": lambda p: p.pad(1.0) if isinstance(p, StaticPackedTensor) else p.pad(1.0, max_len=5),
    "any": lambda p: (p > 0.5).any(1).double() + (p > -0.5).all(1).double() + (p > 0).any(),
    "argmax": lambda p: p.argmax(-1).sum(1)[:, None] + F.glu(p).sum(1),
    "mse": lambda p: F.mse_loss(p, p.sin()),
    "bce": lambda p: F.binary_cross_entropy_with_logits(p, p.sigmoid(), reduction="sum"),
    "cross entropy": lambda p: F.cross_entropy(p, (p.sum(-1) > 0).long(), label_smoothing=0.1),
    "losses": lambda p: F.kl_div(p, p.sigmoid(), reduction="none"),
    "batchmean": lambda p: F.kl_div(p, p.sigmoid(), reduction="batchmean"),
    "probabilities": lambda p: F.cross_entropy(p, p.detach().softmax(-1)),
}


def pair(lens: list[int], free: int = 3, features: int = 6) -> tuple[Tensor, Tensor]:
    """Values with NaN behind the rows, and lens."""
    values = torch.randn(sum(lens) + free, features, dtype=torch.float64)
    values[sum(lens) :] = torch.nan
    return values, torch.tensor(lens, dtype=torch.int64)


def numbers(out: Any, total: int) -> Tensor:
    if isinstance(out, StaticPackedTensor):
        assert not out.values[total:].any()
        return out.values[:total]
    return out.values if isinstance(out, tl.PackedTensor) else out


def derivatives(out: Tensor, x: Tensor) -> list[Tensor]:
    """The gradient, and that of its square."""
    if not out.requires_grad:  # no entry at all
        return [torch.zeros_like(x)] * 2
    (first,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    if not first.requires_grad:
        return [first, torch.zeros_like(x)]
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [first, second]


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("name", SAME)
def test_values_and_derivatives_are_those_of_a_packed_tensor(name: str, lens: list[int]) -> None:
    function, total = SAME[name], sum(lens)
    values, rows = pair(lens)
    x, y = values.clone().requires_grad_(), values[:total].clone().requires_grad_()
    found = numbers(function(StaticPackedTensor(x, rows, max_len=5)), total)
    expected = numbers(function(tl.PackedTensor(y, rows)), total)
    torch.testing.assert_close(found, expected, equal_nan=True)
    for ours, theirs in zip(derivatives(found, x), derivatives(expected, y), strict=True):
        assert not ours[total:].any()
        torch.testing.assert_close(ours[:total], theirs, equal_nan=True)


@pytest.mark.parametrize(
    "function", [lambda p, w: w / p, lambda p, w: p * w, lambda p, w: w.abs() ** p], ids=["over", "times", "power"]
)
@pytest.mark.parametrize("shape", [(), (6,), (4, 1, 6), (5, 6), (4, 5, 6), (1, 1, 1)], ids=str)
def test_the_gradient_of_what_is_broadcast_has_nothing_of_free_entries(function: Any, shape: tuple[int, ...]) -> None:
    values, lens = pair([3, 0, 5, 1])
    w = torch.randn(shape, dtype=torch.float64)
    found, expected = w.clone().requires_grad_(), w.clone().requires_grad_()
    ours = function(StaticPackedTensor(values, lens, max_len=5), found)
    theirs = function(tl.PackedTensor(values[:9], lens), expected)
    torch.testing.assert_close(numbers(ours, 9), theirs.values)
    torch.testing.assert_close(derivatives(numbers(ours, 9), found), derivatives(theirs.values, expected))


def test_the_gradient_of_weights_has_nothing_of_free_entries() -> None:
    values, lens = pair([3, 0, 4])
    layers = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3)).double()
    both = []
    for p in (StaticPackedTensor(values, lens), tl.PackedTensor(values[:7], lens)):
        (1 / layers(p)).log().abs().sum().backward()
        both.append([w.grad for w in layers.parameters()])
        layers.zero_grad()
    torch.testing.assert_close(*both)


def test_embedding_counts_no_free_index() -> None:
    index = torch.tensor([1, 0, 2, 99, -5])
    lens, found, expected = torch.tensor([1, 2]), TABLE.clone().requires_grad_(), TABLE.clone().requires_grad_()
    F.embedding(StaticPackedTensor(index, lens), found).sin().sum(1).prod().backward()
    F.embedding(tl.PackedTensor(index[:3], lens), expected).sin().sum(1).prod().backward()
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lens", [[3, 0, 5, 1], [0, 0], []], ids=str)
def test_attention_is_that_of_packed_tensors(lens: list[int], causal: bool) -> None:
    total, rows = sum(lens), torch.tensor(lens, dtype=torch.int64)
    parts = [pair(lens)[0].requires_grad_() for _ in range(3)]
    static = [StaticPackedTensor(x, rows, max_len=5).unflatten(-1, (2, 3)) for x in parts]
    packed = [tl.PackedTensor(x[:total], rows).unflatten(-1, (2, 3)) for x in parts]
    found = numbers(static[0].attend(*static[1:], causal=causal), total)
    expected = tl.attention(*packed, causal=causal).values
    torch.testing.assert_close(found, expected)
    if not lens:
        return
    ours, theirs = (torch.autograd.grad(x.sin().sum(), parts) for x in (found, expected))
    assert all(not grad[total:].any() for grad in ours)
    torch.testing.assert_close(ours, theirs)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 3), st.integers(0, 2))
def test_any_sizes(lens: list[int], free: int, features: int) -> None:
    values, rows = pair(lens, free, features)
    total, steps = sum(lens), max(lens, default=0)
    p, q = StaticPackedTensor(values, rows, max_len=steps, check=True), tl.PackedTensor(values[:total], rows)
    for function in (lambda p: p.softmax(1).cumsum(1).flip(1), lambda p: p.logsumexp(1), lambda p: p.pad()):
        torch.testing.assert_close(numbers(function(p), total), numbers(function(q), total))
    assert p.trim().equal(q)
    assert p.pack(p.pad()).trim().equal(q)
    assert StaticPackedTensor.from_padded(q.pad(), rows, total + free).trim().equal(q)
    assert StaticPackedTensor.from_packed(q, total + free).trim().equal(q)
    assert p.row_ids[total:].tolist() == [len(lens)] * free
    assert p.row_ids[:total].tolist() == q.row_ids.tolist()
    assert p.positions[:total].tolist() == q.positions.tolist()
    assert bool(p.fits)


@pytest.mark.parametrize("function", [SAME["softmax"], SAME["logsumexp"], SAME["cumsum"], SAME["amax"]])
def test_gradcheck(function: Any) -> None:
    values, lens = pair([2, 0, 1], 0, 2)
    free = torch.zeros(1, 2, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        out = function(StaticPackedTensor(torch.cat([x, free * torch.nan]), lens))
        return numbers(out, 3).nan_to_num(neginf=0)

    assert torch.autograd.gradcheck(run, values.requires_grad_())
    assert torch.autograd.gradgradcheck(run, values)


def test_noncontiguous_and_shared_values() -> None:
    values, lens = pair([3, 0, 4])
    turned = values.t().contiguous().t()
    p, q = StaticPackedTensor(turned, lens), StaticPackedTensor(turned, lens)
    torch.testing.assert_close((p * q).softmax(1).values, (p.square()).softmax(1).values)


def test_rows_of_minus_infinity_and_half_precision() -> None:
    x = torch.tensor([-torch.inf, -torch.inf, 1.0], requires_grad=True)
    p = StaticPackedTensor(x, torch.tensor([2, 1]))
    out = p.logsumexp(1)
    assert out.tolist() == [-torch.inf, 1.0]
    (grad,) = torch.autograd.grad(out, x, torch.ones(2))
    assert grad.tolist() == [0.0, 0.0, 1.0]
    many = StaticPackedTensor(torch.ones(5000, dtype=torch.float16), torch.tensor([4000]))
    assert many.sum(1).item() == 4000
    assert many.mean().item() == 1


def test_integers_divide_although_free_entries_are_zero() -> None:
    p = StaticPackedTensor(torch.tensor([2, 5, 0]), torch.tensor([2]))
    assert (10 // p).values.tolist() == [5, 2, 0]
    assert (7 % p).values.tolist() == [1, 2, 0]
    assert p.amax(1).tolist() == [5]
    assert p.sum(1).tolist() == [7]


def test_rows_that_do_not_fit_are_cut_and_said_to() -> None:
    p = StaticPackedTensor(torch.arange(4.0), torch.tensor([3, 3, 2]), max_len=2)
    assert not p.fits
    assert p.sum(1).tolist() == [3, 3, 0]
    assert p.mean(1)[:2].tolist() == [1, 3]
    assert p.pad().tolist() == [[0, 1], [3, 0], [0, 0]]
    with pytest.raises(ValueError, match="trim: lens sum to 8, more than the capacity, 4"):
        p.trim()


# -- no length is read


def layers(values: Tensor, lens: Tensor, weight: Tensor, target: Tensor) -> list[Any]:
    p = StaticPackedTensor(values, lens, max_len=5)
    outs = [function(p) for function in SAME.values()]
    heads: Any = F.linear(p, weight).unflatten(-1, (2, 3))
    outs.append(heads.attend(heads, heads, causal=True))
    outs.append(F.cross_entropy(p, p.like(target)))
    outs.append(F.dropout(p, 0.5) * weight[0] + p * p.mean(1, keepdim=True))
    outs += [p.fits, StaticPackedTensor.from_padded(p.pad(), lens, 11), p.pack(p.pad().cumsum(1))]
    return [x.values if isinstance(x, StaticPackedTensor) else x for x in outs]


def test_nothing_is_read_of_tensors_without_numbers() -> None:
    values, lens = pair([3, 0, 4, 1])
    target = torch.zeros(len(values), dtype=torch.int64)
    with fake_tensors() as fake:
        x, weight = fake(values).requires_grad_(), fake(TABLE).requires_grad_()
        outs = layers(x, fake(lens), weight, fake(target))
        total = torch.stack([out.square().sum() for out in outs if out.is_floating_point()]).sum()
        assert all(g is not None for g in torch.autograd.grad(total, [x, weight], create_graph=True))


def test_reading_would_be_seen() -> None:
    values, lens = pair([3, 0, 4, 1])
    with fake_tensors() as fake:
        p = StaticPackedTensor(fake(values), fake(lens))
        with pytest.raises(Exception, match=r"item|data|tolist|scalar"):
            p.trim()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.extended("[eager]")
def test_a_compiled_model_has_no_breaks_and_is_compiled_once(backend: str) -> None:
    torch.manual_seed(1)
    embed, up, norm, down = nn.Embedding(9, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 9)

    def loss(tokens: Tensor, target: Tensor, lens: Tensor) -> Tensor:
        p = StaticPackedTensor(tokens, lens, max_len=6)
        x = embed(p)
        heads: Any = up(x).unflatten(-1, (2, 3))
        x = norm(x + heads.attend(heads, heads, causal=True).flatten(2))
        x = F.gelu(x) * x.softmax(1) + x.mean(1, keepdim=True) - x.logsumexp(1, keepdim=True)
        return F.cross_entropy(down(x), p.like(target)) + x.amax(1, initial=0.0).sum()

    frames = []

    def counted(graph: Any, examples: Any) -> Any:
        frames.append(len(examples))
        return compiler(graph, examples)

    torch._dynamo.reset()
    compiler = torch._dynamo.lookup_backend(backend)
    compiled = torch.compile(loss, backend=counted, fullgraph=True)
    weights = [w for layer in (embed, up, norm, down) for w in layer.parameters()]
    for lens in ([3, 0, 4, 1], [0, 6, 0, 0], [1, 2, 3, 4]):
        tokens, target, rows = torch.randint(9, (12,)), torch.randint(9, (12,)), torch.tensor(lens)
        tokens[sum(lens) :] = -(10**9)
        expected, found = loss(tokens, target, rows), compiled(tokens, target, rows)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights))
    assert len(frames) == 1


def test_a_method_may_be_compiled_before_it_ever_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "_POINTWISE", {})
    values, lens = pair([3, 0, 4, 1])
    found = torch.compile(lambda v: StaticPackedTensor(v, lens).tanh(), backend="eager", fullgraph=True)(values)
    torch.testing.assert_close(found.values[:8], values[:8].tanh())


def test_one_is_given_to_and_returned_by_a_compiled_function() -> None:
    values, lens = pair([3, 0, 4, 1])
    p = StaticPackedTensor(values, lens)
    found = torch.compile(lambda p: p.softmax(1) * 2, backend="eager", fullgraph=True)(p)
    torch.testing.assert_close(found.values, (p.softmax(1) * 2).values)
    assert torch.equal(found.lens, lens)


def test_a_function_of_autograd_would_lose_the_gradient() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, p: Any) -> Any:
            return (p * 2).values

    p = StaticPackedTensor(VALUES.clone().requires_grad_(), GIVEN)
    with pytest.raises(TypeError, match=r"in Double.apply, .*; give it p.values, and what comes to p.like"):
        Double.apply(p)
    with torch.no_grad():
        assert not (p * 2).values.requires_grad


def test_checkpoint_and_copies() -> None:
    values, lens = pair([3, 0, 4])
    x = values.requires_grad_()
    p = StaticPackedTensor(x, lens)
    out = checkpoint(lambda p: p.softmax(1).sin(), p, use_reentrant=False)
    (found,) = torch.autograd.grad(out.values.sum(), x)
    (expected,) = torch.autograd.grad(StaticPackedTensor(x, lens).softmax(1).sin().values.sum(), x)
    torch.testing.assert_close(found, expected)
    same = pickle.loads(pickle.dumps(p.detach()))
    assert torch.equal(same.softmax(1).values, p.softmax(1).values)
    assert same.float().dtype is torch.float32
    assert same.to(torch.bfloat16).sum(1).dtype is torch.bfloat16


def test_torch_func_differentiates_through_one() -> None:
    values, lens = pair([3, 0, 4])

    def loss(x: Tensor) -> Tensor:
        return StaticPackedTensor(x, lens).log_softmax(1).cumsum(1).sin().sum()

    grad = torch.func.grad(loss)(values)
    assert not grad[7:].any()
    ordinary = torch.func.grad(lambda x: tl.PackedTensor(x, lens).log_softmax(1).cumsum(1).sin().sum())(values[:7])
    torch.testing.assert_close(grad[:7], ordinary)
    along = torch.func.jvp(loss, (values,), (values,))[1]
    torch.testing.assert_close(along, (ordinary * values[:7]).sum())


def test_facts() -> None:
    values, lens = pair([3, 0, 1])
    p = StaticPackedTensor(values, lens)
    assert p.offsets.tolist() == [0, 3, 3, 4]
    assert (p.dim(), p.size(), p.size(2), p.device, p.requires_grad) == (3, p.shape, 6, values.device, False)
    assert StaticPackedTensor(values.requires_grad_(), lens).requires_grad
    assert p.long().long() is p.long() or torch.equal(p.long().abs().values, p.long().values.abs())


@pytest.mark.parametrize("causal", [False, True])
def test_a_document_mask_is_that_of_the_ordinary_one(causal: bool) -> None:
    values, lens = pair([3, 0, 1])
    n = torch.arange(4)
    ours, theirs = (
        x.document_mask(causal)(torch.tensor(0), torch.tensor(0), n[:, None], n)
        for x in (StaticPackedTensor(values, lens), tl.PackedTensor(values[:4], lens))
    )
    assert torch.equal(ours, theirs)
    free = StaticPackedTensor(values, lens).document_mask(causal)
    assert not free(n[0], n[0], n, torch.tensor(5)).any()  # nobody sees free entries


# -- what is refused

VALUES, GIVEN = torch.ones(5, 2), torch.tensor([2, 1])
P: Any = StaticPackedTensor(VALUES, GIVEN)
LIST: Any = [2, 1]
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: P[0], TypeError, r"indexing: the shape of its result depends on the lens; use p.pad\(\)\[b\]"),
    (lambda: list(P), TypeError, "iteration: the shape of its result depends on the lens; p.trim"),
    (lambda: bool(P), TypeError, "bool: a static packed tensor has no truth"),
    (lambda: torch.sort(P, 1), TypeError, r"sort: it is not there .*; use p.pack\(f\(p.pad\(\)\)\)"),
    (lambda: F.conv1d(P, VALUES), TypeError, "conv1d: it is not there for packed tensors of static shape"),
    (lambda: torch.nonzero(P), TypeError, "nonzero: the shape of its result depends on the lens"),
    (lambda: P.add_(1), TypeError, "add: a static packed tensor is not changed in place; use add"),
    (lambda: P + tl.PackedTensor(VALUES, [3, 2]), TypeError, "add: of a packed tensor and a static one; make both"),
    (lambda: tl.PackedTensor(VALUES, [3, 2]) + P, TypeError, "add: a packed tensor and a static one; make both"),
    (lambda: P + StaticPackedTensor(VALUES, GIVEN.clone()), TypeError, "add: .* of separate lens, .* p.like"),
    (lambda: P + P.sum(-1), ValueError, "add: static packed tensors of 3 and 2 dims; unsqueeze"),
    (lambda: P + torch.ones(3, 2), ValueError, r"add: \(1, 3, 2\) does not broadcast against \(2, 5"),
    (lambda: torch.cat([P, P], 1), TypeError, "cat: dim 1 is the ragged dim; join .pad"),
    (lambda: P.sum(0), TypeError, "sum: it does not reduce the batch dim alone"),
    (lambda: P.softmax(0), TypeError, "softmax: dim 0 is the batch dim; it works on feature dims"),
    (lambda: P.softmax(3), IndexError, "softmax: dim 3 is out of range for 3 dims"),
    (lambda: P.long().mean(1), TypeError, "mean: a mean needs floating point, got torch.int64"),
    (lambda: P @ torch.ones(2, 2, 2), TypeError, "matmul: it takes"),
    (lambda: P.like(VALUES[:4]), ValueError, r"like: values must be \(5, \*F\), got shape \(4, 2\)"),
    (lambda: P.pack(VALUES), ValueError, r"pack: x must be \(B, max_len, \*F\), \(2, 5\), got shape \(5, 2\)"),
    (lambda: P.attend(P, P), ValueError, r"attend: q and k must be \(B, T\*, heads, D\)"),
    (lambda: P.attend(VALUES, P), TypeError, "attend: k must be a StaticPackedTensor, got"),
    (lambda: F.mse_loss(P, VALUES), TypeError, "mse_loss: one argument is a static packed tensor, another is not"),
    (lambda: F.embedding(P.long(), VALUES, max_norm=1.0), TypeError, "embedding: max_norm and"),
    (lambda: StaticPackedTensor(VALUES, LIST), TypeError, "StaticPackedTensor: lens must be an int64 tensor"),
    (lambda: StaticPackedTensor(VALUES, GIVEN.int()), ValueError, r"lens must be int64 \(B,\), got torch.int32"),
    (lambda: StaticPackedTensor(torch.ones(()), GIVEN), ValueError, r"values must be \(N, \*F\), got a 0-d"),
    (lambda: StaticPackedTensor(VALUES, GIVEN, max_len=1, check=True), ValueError, r"lens\[0\] is 2, expected 0 to 1"),
    (lambda: StaticPackedTensor(VALUES[:2], GIVEN, check=True), ValueError, "lens sum to 3, more than the capacity, 2"),
    (lambda: StaticPackedTensor(VALUES, GIVEN, max_len=-1), ValueError, "max_len is -1; it is a number of entries"),
    (lambda: StaticPackedTensor.from_padded(VALUES, GIVEN, 4), ValueError, "from_padded: x must be"),
    (lambda: StaticPackedTensor.from_packed(P.trim(), 2), ValueError, "from_packed: capacity is 2, but there are 3"),
    (lambda: P * np.ones(2), TypeError, "mul: a NumPy array beside a packed tensor"),
    (lambda: np.ones(2) * P, TypeError, "mul: a NumPy array beside a packed tensor"),
    (lambda: np.asarray(P), TypeError, "NumPy: a static packed tensor is no array"),
    (lambda: tl.attention(P, P, P), TypeError, "attention: "),
    (lambda: tl.scan(lambda c, x: (c, x), 0, P), TypeError, "scan: "),
    (lambda: torch.max(P, 1), TypeError, "max: its indices are not there; use amax"),
    (lambda: torch.equal(P, P), TypeError, "equal: it is not there"),
    (lambda: (P > 0).amax(1), TypeError, "amax: of bools; use any or all"),
    (lambda: F.mse_loss(P, P, reduce=False), TypeError, "mse_loss: reduce is not taken; give reduction="),
    (lambda: P.argmax(1), TypeError, "argmax: dim 1 is the ragged dim; it works on feature dims"),
    (lambda: P.values_of, AttributeError, "values_of: it is not there"),
    (lambda: StaticPackedTensor.from_padded(VALUES[None], GIVEN[:1], -1), ValueError, "capacity is -1; it is a number"),
    (lambda: StaticPackedTensor.from_packed(P, 9), TypeError, "p must be a PackedTensor, got StaticPackedTensor"),  # pyright: ignore
    (lambda: StaticPackedTensor.from_packed(P.trim(), 9, max_len=1), ValueError, "max_len is 1, but a row has 2"),
    (
        lambda: StaticPackedTensor(VALUES, GIVEN.to("meta")),
        ValueError,
        f"lens are on meta, values on {ON}; a copy would",
    ),
    (lambda: P.__setitem__(0, 1), TypeError, "__setitem__: "),
    (lambda: P.to("meta"), TypeError, "rows stay on the device of lens"),
    (lambda: P.flip(0), TypeError, r"dim 0 would put rows in another order; use p.pad\(\).flip\(0\)"),
    (lambda: P.argmax(), TypeError, "argmax: without dim it counts the entries of a padded tensor"),
    (lambda: F.softmax(P), TypeError, "give dim; a packed tensor has no default for it"),
    (lambda: P.unsqueeze(1), IndexError, "dim is 1; a new feature dim is one of 2 to 3, or -1"),
    (lambda: F.layer_norm(P, (2, 2)), TypeError, "it needs 2 feature dims, the tensor is"),
    (lambda: F.linear(P.sum(-1), VALUES), TypeError, "it needs a feature dim, the tensor is"),
    (lambda: F.linear(VALUES, P), TypeError, "only its input may be packed"),
    (lambda: F.cross_entropy(P.sum(-1), P.sum(-1).long()), TypeError, "has no dim of classes"),
    (lambda: F.mse_loss(P, P, reduction="all"), ValueError, "reduction must be 'none', 'mean' or 'sum', got 'all'"),
    (lambda: P.nonzero(), AttributeError, "nonzero: the shape of its result depends on the lens"),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_refusals(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
