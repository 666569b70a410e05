"""Losses of packed tensors beside torch's of padded ones: over classes, and over the alignments of rows."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tensorloop as tl
from tensorloop import reference
from tensorloop.packed import PackedTensor, pack_padded
from tensorloop.packed.rows import alignments
from tensorloop.testing import assert_linear_memory, assert_saved_bytes

D = torch.float64
ctc_loss: Any = F.ctc_loss  # its stub takes no packed targets, and no None
LENS = [3, 0, 5, 1]


def leaf(*shape: int, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


# ---- classes


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_cross_entropy_of_packed_and_padded(reduction: str, smoothing: float, ignored: int):
    x, weight = leaf(4, 5, 6), torch.rand(6, dtype=D)
    y = torch.randint(0, 6, (4, 5))
    lens = torch.tensor(LENS)
    behind = torch.arange(5) >= lens[:, None]
    options: Any = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    found = F.cross_entropy(pack_padded(x, lens), pack_padded(y, lens), weight, **options)
    padded = y.masked_fill(behind, ignored)
    wanted = F.cross_entropy(x.transpose(1, 2), padded, weight, **options)
    if reduction == "none":
        assert isinstance(found, PackedTensor)
        wanted, found = wanted[~behind], found.values
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(z.square().sum(), x)[0] for z in (found, wanted)))


def test_cross_entropy_of_probabilities_and_of_more_dims():
    x, y = leaf(9, 4), leaf(9, 4).softmax(-1).detach()
    p, q = PackedTensor(x, LENS), PackedTensor(y, LENS)
    assert torch.equal(F.cross_entropy(p, q), F.cross_entropy(x, y))
    x, y = leaf(9, 4, 2), torch.randint(0, 4, (9, 2))
    found: Any = F.cross_entropy(PackedTensor(x, LENS), PackedTensor(y, LENS), reduction="none")
    assert found.shape == (4, None, 2)
    assert torch.equal(found.values, F.cross_entropy(x, y, reduction="none"))


def test_nll_loss_and_means_of_rows():
    x, y = leaf(9, 4), torch.randint(0, 4, (9,))
    p, q = PackedTensor(x, LENS), PackedTensor(y, LENS)
    log = p.log_softmax(-1)
    assert torch.equal(F.nll_loss(log, q, ignore_index=1), F.nll_loss(log.values, y, ignore_index=1))
    each: Any = F.nll_loss(log, q, reduction="none")
    rows = each[each.lens > 0].mean(1)
    wanted = [F.cross_entropy(a, b) for a, b in zip(x.split(LENS), y.split(LENS), strict=True) if len(a)]
    torch.testing.assert_close(rows, torch.stack(wanted))
    assert torch.autograd.gradgradcheck(lambda x: F.cross_entropy(PackedTensor(x, LENS), q, label_smoothing=0.1), x)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_of_pairs_with_weights(reduction: str):
    x, y, w = leaf(9, 4), torch.rand(9, 4, dtype=D), torch.rand(9, 4, dtype=D)
    p, q = PackedTensor(x, LENS), PackedTensor(y, LENS)
    wanted = F.binary_cross_entropy_with_logits(x, y, w, reduction=reduction)
    for weight in (PackedTensor(w, LENS), pack_padded(PackedTensor(w, LENS).pad(), LENS)):
        found: Any = F.binary_cross_entropy_with_logits(p, q, cast(Any, weight), reduction=reduction)
        assert torch.equal(found.values if reduction == "none" else found, wanted)
    one = F.binary_cross_entropy_with_logits(x, y, w[:1], reduction=reduction)
    found = F.binary_cross_entropy_with_logits(p, q, w[:1], reduction=reduction)
    assert torch.equal(found.values if reduction == "none" else found, one)
    with pytest.raises(ValueError, match=r"the first row that differs is 0: 3 and 2"):
        F.binary_cross_entropy_with_logits(p, q, PackedTensor(w, [2, 1, 5, 1]))  # pyright: ignore


def test_losses_of_classes_refuse():
    p, y = PackedTensor(torch.randn(9, 4), LENS), torch.zeros(9, dtype=torch.int64)
    with pytest.raises(TypeError, match="cross_entropy: input and target must both be packed; pack the other"):
        F.cross_entropy(p, y)
    with pytest.raises(ValueError, match=r"cross_entropy: .* row that differs is 0: 3 and 2"):
        F.cross_entropy(p, PackedTensor(y, [2, 1, 5, 1]))
    with pytest.raises(TypeError, match=r"nll_loss: input \(4, \*\) has no dim of classes"):
        F.nll_loss(PackedTensor(torch.randn(9), LENS), PackedTensor(y, LENS))


# ---- CTC


def ctc_case(lens: list[int], sizes: list[int], dtype: torch.dtype = D, V: int = 5) -> tuple[Tensor, PackedTensor]:
    """Log-probabilities (sum of lens, V), and targets with repeats."""
    tokens = torch.randint(1, 3, (sum(sizes),)) * torch.randint(1, (V + 1) // 2, (sum(sizes),))
    return leaf(sum(lens), V, dtype=dtype).log_softmax(-1).detach().requires_grad_(), PackedTensor(tokens, sizes)


def torch_s(values: Tensor, lens: list[int], targets: PackedTensor, **options: Any) -> Tensor:
    padded = PackedTensor(values, lens).pad(max_len=max(1, *lens)).transpose(0, 1)
    return ctc_loss(padded, targets.values, torch.tensor(lens), targets.lens, **options)


def close(dtype: torch.dtype) -> Any:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-9, "atol": 1e-9}


ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=5)


@given(rows=ROWS, blank=st.integers(0, 4))
@settings(max_examples=20)
def test_ctc_is_that_of_each_row(rows: list[tuple[int, int]], blank: int):
    lens, sizes = [min(n, 6) for n, _ in rows], [min(m, 3) for _, m in rows]
    values, targets = ctc_case(lens, sizes)
    targets = PackedTensor((targets.values + blank) % 5, sizes)
    found = ctc_loss(PackedTensor(values, lens), targets, None, None, blank, "none", True)
    pairs = zip(values.split(lens), targets.unbind(), strict=True)
    each = torch.stack([reference.ctc_loss(x, y.tolist(), blank) for x, y in pairs])
    torch.testing.assert_close(found, torch.where(each == torch.inf, 0, each))


@pytest.mark.parametrize("dtype", [torch.float32, D])
@given(
    rows=ROWS, reduction=st.sampled_from(["none", "mean", "sum"]), zero_infinity=st.booleans(), blank=st.integers(0, 4)
)
@settings(max_examples=60)
def test_ctc_is_torch_s(
    dtype: torch.dtype, rows: list[tuple[int, int]], reduction: str, zero_infinity: bool, blank: int
):
    lens, sizes = [n for n, _ in rows], [m for _, m in rows]
    values, targets = ctc_case(lens, sizes, dtype)
    options: Any = {"reduction": reduction, "zero_infinity": zero_infinity, "blank": blank}
    targets = PackedTensor((targets.values + blank) % 5, sizes)
    found = ctc_loss(PackedTensor(values, lens), targets, None, None, **options)
    wanted = torch_s(values, lens, targets, **options)
    torch.testing.assert_close(found, wanted, **close(dtype))
    assert found.dtype is dtype
    if sum(lens) and bool(wanted.isfinite().all()):
        scale = torch.randn_like(found)
        ours, theirs = (torch.autograd.grad((x * scale).sum(), values)[0] for x in (found, wanted))
        torch.testing.assert_close(ours, theirs, **close(dtype))


def test_rows_without_a_path():
    lens, sizes = [2, 4, 0], [2, 2, 1]
    values, _ = ctc_case(lens, sizes, torch.float32)
    targets = PackedTensor(torch.tensor([1, 1, 1, 1, 3]), sizes)
    for x in (values, values.detach().double().requires_grad_()):
        found = ctc_loss(PackedTensor(x, lens), targets, None, None, reduction="none")
        assert found.isinf().tolist() == [True, False, True]
        (grad,) = torch.autograd.grad(found.sum(), x, retain_graph=True)
        assert grad[:2].isnan().all()  # as torch has it
        assert grad[2:].isfinite().all()
        found = ctc_loss(PackedTensor(x, lens), targets, None, None, reduction="none", zero_infinity=True)
        assert found[0] == found[2] == 0
        (grad,) = torch.autograd.grad(found.sum(), x)
        assert grad[:2].eq(0).all()


def test_values_of_minus_infinity_and_long_rows():
    lens, sizes = [300, 40], [50, 3]
    values, targets = ctc_case(lens, sizes, torch.float32, V=20)
    values = values.detach().clone()
    values[::7, 4] = -torch.inf
    values.requires_grad_()
    found = ctc_loss(PackedTensor(values, lens), targets, None, None, reduction="none")
    wanted = torch_s(values.double(), lens, targets, reduction="none")
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=0)
    ours, theirs = (torch.autograd.grad(x.sum(), values)[0] for x in (found, wanted))
    assert ours.isfinite().all()  # torch's is NaN where a value is -inf
    single = torch.autograd.grad(torch_s(values, lens, targets, reduction="none").sum(), values)[0]
    errors = ((x - theirs).masked_fill(values == -torch.inf, 0).abs().max() for x in (ours, single))
    assert next(errors) <= 2 * next(errors) < 1e-3
    peaky = torch.full((60, 4), -200.0)  # a path that no linear scale could hold
    peaky[:, 0] = 0
    targets = PackedTensor(torch.tensor([1, 2, 3] * 5), [15])
    found = ctc_loss(PackedTensor(peaky, [60]), targets, None, None, reduction="sum")
    torch.testing.assert_close(found, torch_s(peaky.double(), [60], targets, reduction="sum").float())


def test_derivatives_of_ctc():
    lens, sizes = [4, 0, 1, 3], [2, 0, 1, 1]
    logits, targets = leaf(8, 4), PackedTensor(torch.tensor([1, 1, 2, 3]), sizes)

    def loss(logits: Tensor) -> Tensor:
        return ctc_loss(PackedTensor(logits, lens).log_softmax(-1), targets, None, None, reduction="none")

    assert torch.autograd.gradcheck(loss, logits)
    assert torch.autograd.gradgradcheck(loss, logits)
    plain = logits.detach()
    torch.testing.assert_close(torch.func.jacrev(loss)(plain), torch.autograd.functional.jacobian(loss, plain))
    torch.testing.assert_close(torch.func.jacfwd(loss)(plain), torch.autograd.functional.jacobian(loss, plain))
    torch.testing.assert_close(
        torch.func.vmap(loss)(torch.stack([plain, plain * 2])), torch.stack([loss(plain), loss(plain * 2)])
    )
    leaves = logits.log_softmax(-1).detach().requires_grad_()  # torch's gradient, also where it is recorded
    p = ctc_loss(PackedTensor(leaves, lens), targets, None, None, reduction="none")
    ours = torch.autograd.grad(p[:1].sum(), leaves, create_graph=True)[0]
    torch.testing.assert_close(
        ours, torch.autograd.grad(torch_s(leaves, lens, targets, reduction="none")[0], leaves)[0]
    )


def test_what_targets_and_lengths_may_be():
    lens, sizes = [5, 3, 6], [2, 0, 3]
    values, targets = ctc_case(lens, sizes)
    p = PackedTensor(values, lens)
    wanted = ctc_loss(p, targets, None, None)
    for others, n in (
        (targets.values, targets.lens),
        (targets.pad(value=3), targets.lens),
        (targets, sizes),
        (targets.pad(), tuple(sizes)),
    ):
        for m in (None, p.lens, lens):
            torch.testing.assert_close(ctc_loss(p, others, m, n), wanted)  # pyright: ignore
    torch.testing.assert_close(ctc_loss(p.transpose(0, 1), targets.values, p.lens, targets.lens), wanted)
    torch.testing.assert_close(torch.nn.CTCLoss()(p, targets, p.lens, targets.lens), wanted)
    short = [4, 3, 2]
    found = ctc_loss(p, targets, torch.tensor(short), None, reduction="none")
    cropped = torch.cat([row[:n] for row, n in zip(values.split(lens), short, strict=True)])
    torch.testing.assert_close(found, torch_s(cropped, short, targets, reduction="none"))
    half = ctc_loss(PackedTensor(values.bfloat16(), lens), targets, None, None)
    assert abs(float((half - wanted).detach())) < 0.05


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda p, t: ctc_loss(p, t.values, p.lens, None), ValueError, "target_lengths are needed for targets"),
    (lambda p, t: ctc_loss(p, t, p.lens, [2, 1, 2]), ValueError, "target_lengths are not the lens of targets"),
    (lambda p, t: ctc_loss(p, t, [6, 3, 6], None), ValueError, r"input_lengths\[0\] is 6, but row 0 has 5 entries"),
    (lambda p, t: ctc_loss(p, t, [5, 3], None), ValueError, r"input_lengths must be \(3,\), got \(2,\)"),
    (lambda p, t: ctc_loss(p, t.values, None, [2, 0, 2]), ValueError, "target_lengths sum to 4, but there are 5"),
    (lambda p, t: ctc_loss(p, t.values, None, [5]), ValueError, "log_probs have 3 rows, targets 1"),
    (lambda p, t: ctc_loss(p, t.pad(), None, [4, 0, 1]), ValueError, "target_lengths go up to 4, targets have 3"),
    (lambda p, t: ctc_loss(p, t + 4, None, None), IndexError, r"targets\[0\] is \d, expected 0 <= index < 5"),
    (lambda p, t: ctc_loss(p, t.double(), None, None), TypeError, "targets have dtype torch.float64, but"),
    (lambda p, t: ctc_loss(p, t, None, None, blank=5), ValueError, "blank is 5, expected 0 <= blank < 5"),
    (lambda p, t: ctc_loss(p, t, None, None, reduction="row"), ValueError, "reduction must be 'none', 'mean'"),
    (lambda p, t: ctc_loss(p[..., 0], t, None, None), ValueError, r"log_probs must be packed \(B, T\*, V\), got"),
    (lambda p, t: ctc_loss(p.pad(), t, p.lens, t.lens), TypeError, "its log_probs are not packed"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_what_ctc_refuses(call: Any, error: type[Exception], message: str):
    values, targets = ctc_case([5, 3, 6], [2, 0, 3])
    with pytest.raises(error, match=f"ctc_loss: .*{message}"):
        call(PackedTensor(values, [5, 3, 6]), targets)


def test_ctc_of_nothing():
    for dtype in (torch.float32, D):
        p = PackedTensor(leaf(0, 5, dtype=dtype), [])
        loss: Tensor = ctc_loss(p, PackedTensor(torch.zeros(0, dtype=torch.int64), []), None, None, reduction="sum")
        assert loss.tolist() == 0
        assert torch.autograd.grad(loss, p.values)[0].shape == (0, 5)
        p = PackedTensor(leaf(0, 5, dtype=dtype), [0, 0])
        assert ctc_loss(p, PackedTensor(torch.tensor([1]), [0, 1]), None, None, reduction="none").tolist() == [
            0,
            torch.inf,
        ]


@pytest.mark.usefixtures("on_the_cpu")
def test_ctc_keeps_a_number_a_state_and_frame():
    lens, sizes = [50, 3, 0, 20], [7, 1, 0, 6]
    values, targets = ctc_case(lens, sizes, torch.float32, V=30)
    p = PackedTensor(values, lens)
    states = sum(n * (2 * m + 1) for n, m in zip(lens, sizes, strict=True))
    run = lambda: ctc_loss(p, targets, None, None, reduction="none")  # noqa: E731
    assert_saved_bytes(run, exactly=4 * (states + len(lens)))

    def step(n: int) -> Any:
        values, targets = ctc_case([n] + [2] * 31, [4] + [1] * 31, torch.float32)
        return lambda: ctc_loss(PackedTensor(values, [n] + [2] * 31), targets, None, None)

    assert_linear_memory(step, [128, 256, 512], tolerance=0.2)


def test_ctc_in_a_loop_with_checkpoints():
    values, targets = ctc_case([6, 3], [2, 1])
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=D))[0]

    def body(i: int, carry: Any) -> Any:
        x, total = carry
        p = PackedTensor(x @ turn, [6, 3])
        return p.values, total + ctc_loss(p.log_softmax(-1), targets, None, None)

    found = []
    for checkpoints in (None, 2):
        _, total = tl.fori_loop(0, 4, body, (values, values.new_zeros(())), checkpoints=checkpoints)
        found.append((total, torch.autograd.grad(total, values)[0]))
    torch.testing.assert_close(found[0], found[1])


def test_the_formula_is_the_loss():
    values, targets = ctc_case([5, 1, 4], [2, 0, 2])
    rest = PackedTensor(values, [5, 1, 4]).offsets, targets.values, targets.offsets, 0
    ours, theirs = alignments.ctc(values, *rest), alignments.ctc_formula(values, *rest)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), values)[0] for x in (ours, theirs)))


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.size = max(self.size, x.numel())
        return out


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("order", [1, 2, "func"])
def test_ctc_pads_no_row(order: Any) -> None:
    """One long row among short ones: padded they would have thirty times as many numbers."""
    lens, classes = [60] + [1] * 39, 50
    values = torch.randn(sum(lens), classes, requires_grad=True)
    targets = PackedTensor(torch.ones(40, dtype=torch.int64), [1] * 40)

    def loss(values: Tensor) -> Tensor:
        return F.ctc_loss(PackedTensor(values, lens).log_softmax(-1), targets, None, None, reduction="sum")  # pyright: ignore

    with Largest() as seen:
        if order == "func":
            torch.func.grad(loss)(values.detach())
        else:
            (grad,) = torch.autograd.grad(loss(values), values, create_graph=order == 2)
            if order == 2:
                torch.autograd.grad(grad.square().sum(), values)
    assert seen.size <= values.numel()
    assert 40 * 60 * classes > 20 * values.numel()
