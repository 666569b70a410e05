"""Packed tensors beside custom `autograd.Function`s, checkpoints and saving: no gradient is lost in silence."""

import io
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop.packed import Dim, PackedTensor
from tensorloop.packed.table import autograd

D = torch.float64
LENS = [3, 0, 4, 1]


class Reversed(Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -ctx.alpha * grad, None


class Swish(Function):
    """x * sigmoid(x), of which x alone is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert type(x) is Tensor
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))


class Scaled(Function):
    """Several results, of which some are entries; in the style that `torch.func` takes."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, w: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * y * w, w.sum(), (x * y).sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y, w = ctx.saved_tensors
        of_product = grads[0] * w + grads[2].unsqueeze(1)
        return of_product * y, of_product * x, (grads[0] * x * y).sum(0) + grads[1]


class Calling(Function):
    """Calls what it is given, without gradient."""

    @staticmethod
    def forward(ctx: Any, f: Callable[..., Any], *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * 9


def values() -> Tensor:
    return torch.randn(8, 3, dtype=D, requires_grad=True)


def test_a_gradient_reversal_reaches_what_is_before_it():
    encoder = nn.Linear(3, 2, dtype=D)
    p = PackedTensor(values(), LENS)
    straight = torch.autograd.grad(encoder(p).sum(1).square().sum(), encoder.weight)
    turned = torch.autograd.grad(tl.packed.apply(Reversed, encoder(p), 2.0).sum(1).square().sum(), encoder.weight)
    torch.testing.assert_close(turned[0], -2 * straight[0])


def test_apply_differentiates_twice():
    def run(x: Tensor) -> Tensor:
        return tl.packed.apply(Swish, PackedTensor(x, LENS)).values

    x = values()
    assert gradcheck(run, (x,))
    assert gradgradcheck(run, (x,))


def test_apply_packs_what_has_the_entries_and_no_more():
    x, w = values(), torch.randn(3, dtype=D, requires_grad=True)
    p, q = PackedTensor(x, LENS), PackedTensor(x.detach(), LENS)
    product, total, sums = tl.packed.apply(Scaled, p, q, w)
    assert product.shape == (4, None, 3)
    assert type(total) is Tensor
    assert sums.shape == (4, None)
    got = torch.autograd.grad(product.values.square().sum() + total + sums.values.square().sum(), (x, w))
    y = x.detach()
    loss = (x * y * w).square().sum() + w.sum() + (x * y).sum(1).square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(loss, (x, w)))


def test_apply_under_transforms_and_without_packed_arguments():
    w, y = torch.randn(3, dtype=D), values().detach()

    def loss(x: Tensor) -> Tensor:
        return tl.packed.apply(Scaled, PackedTensor(x, LENS), PackedTensor(y, LENS), w)[0].values.square().sum()

    expected = torch.func.grad(lambda x: (x * y * w).square().sum())(y)
    torch.testing.assert_close(torch.func.grad(loss)(y), expected)
    assert torch.equal(tl.packed.apply(Swish, y), Swish.apply(y))
    with torch.no_grad():
        assert not tl.packed.apply(Swish, PackedTensor(values(), LENS)).requires_grad


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p: tl.packed.apply(cast(Any, print), p),
            TypeError,
            "function must be a subclass of autograd.Function, got builtin",
        ),
        (lambda p: tl.packed.apply(Reversed, [p], 2.0), TypeError, r"args\[0\] holds a packed tensor; autograd sees"),
        (
            lambda p: tl.packed.apply(Scaled, p, PackedTensor(p.values, [3, 1, 3, 1]), 1.0),
            ValueError,
            "packed.apply: packed tensors of different lens; the first row that differs is 1: 0 and 1",
        ),
    ],
    ids=["no Function", "in a list", "rows"],
)
def test_what_apply_refuses(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call(PackedTensor(values(), LENS))


LINEAR = nn.Linear(3, 3, dtype=D)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "view": lambda p: p.view_as(p),
    "add": lambda p: p + 1,
    "linear": LINEAR,
    "slice": lambda p: p[:, :1],
    "row": lambda p: p[0],
    "pad": lambda p: p.pad(),
    "rows": list,
    "amax": lambda p: p.amax(1, initial=0.0),
    "cat": lambda p: torch.cat([p, p], -1),
    "keyword": lambda p: torch.sum(input=p, dim=1),
    "attention": lambda p: tl.attention(*[p] * 3),
    "scan": lambda p: tl.scan(lambda c, x: (c + x, c), torch.zeros(4, 3, 1, dtype=D), p),
    "nested": lambda p: p.to_nested(),
}


@pytest.mark.parametrize("run", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_a_function_that_is_given_a_packed_tensor_is_refused(run: Callable[[Any], Any]):
    p: Any = PackedTensor(values(), LENS)
    p = p[..., None] if run in (OPERATIONS["attention"], OPERATIONS["scan"]) else p
    with pytest.raises(TypeError, match=r"in Calling.apply, autograd sees no packed tensor.*packed\.apply\(Calling, "):
        Calling.apply(run, p)


@pytest.mark.parametrize("wrap", [lambda p: [p], lambda p: (0, [p]), lambda p: {"x": {"y": p}}], ids=range(3))
def test_also_where_it_is_in_a_container(wrap: Callable[[Any], Any]):
    p = PackedTensor(values(), LENS)
    with pytest.raises(TypeError, match=r"packed\.apply"):
        Calling.apply(lambda _: p * 2, wrap(p))


def test_a_reentrant_checkpoint_is_refused_and_the_other_is_right():
    p: Any = PackedTensor(values(), LENS)

    def block(p: Any, *_: Any) -> Any:
        return LINEAR(p).relu().softmax(1)

    with pytest.raises(TypeError, match=r"linear: in a checkpoint with use_reentrant=.*write use_reentrant=False"):
        checkpoint(block, p, torch.ones(1, requires_grad=True), use_reentrant=True)
    kept, again = block(p), cast(Any, checkpoint(block, p, use_reentrant=False))
    inputs = (p.values, LINEAR.weight)
    expected = torch.autograd.grad(kept.values.square().sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad(again.values.square().sum(), inputs), expected)


def test_evaluation_is_not_refused():
    x = values()
    p: Any = PackedTensor(x, LENS)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal((p * 2).sum(1), (p.detach() * 2).sum(1))
            assert len(torch.cat([p, p], -1).unbind()) == 4
    # A Function that is given other tensors, no gradient to lose, or the values beside the packed tensor.
    for args in ((x,), (PackedTensor(x.detach(), LENS),), (p.values, p), ({"x": 1}, [2])):
        assert Calling.apply(lambda *given: (p if len(given) != 1 else p.detach()) * 2, *args) is not None
    assert torch.equal(Calling.apply(lambda p: p * 2, p.detach()).values, x * 2)  # pyright: ignore


def test_loading_what_was_saved():
    file = io.BytesIO()
    p: Any = PackedTensor(values().detach(), Dim("time", LENS))
    torch.save({"p": p, "dim": p.dims[0], "more": [p * 2]}, file)
    file.seek(0)
    back = torch.load(file)
    assert torch.equal(back["p"], p)
    assert back["dim"] == p.dims[0]
    assert back["dim"].name == "time"
    assert torch.equal(back["more"][0], p * 2)


@pytest.mark.parametrize("lens", [LENS, [2, 2]], ids=str)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.filterwarnings("ignore::tensorloop.packed.PackedFallbackWarning")
def test_recurrent_layers_under_transforms(kind: Any, lens: list[int]) -> None:
    layer = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True, dtype=D)
    x = torch.randn(sum(lens), 3, dtype=D)
    first = torch.randn(4, len(lens), 4, dtype=D)

    def loss(x: Tensor, first: Tensor) -> Tensor:
        out, ended = layer(PackedTensor(x, lens), (first, first.cos()) if kind is nn.LSTM else first)
        return out.values.sin().sum() + sum((i + 1) * h.cos().sum() for i, h in enumerate([*ended]))

    x.requires_grad_()
    want = torch.autograd.grad(loss(x, first), [x, *layer.parameters()])
    torch.testing.assert_close(torch.func.grad(loss)(x.detach(), first), want[0])

    def by_weights(weights: dict[str, Tensor]) -> Tensor:
        out = torch.func.functional_call(layer, weights, PackedTensor(x.detach(), lens))
        return out[0].values.sin().sum()

    weights = {name: w.detach() for name, w in layer.named_parameters()}
    got = torch.func.grad(by_weights)(weights)
    out = layer(PackedTensor(x, lens))[0].values.sin().sum()
    torch.testing.assert_close(list(got.values()), list(torch.autograd.grad(out, list(layer.parameters()))))
    name = {"RNN": "rnn_tanh"}.get(kind.__name__, kind.__name__.lower())
    with pytest.raises(TypeError, match=f"{name}: torch has no rule of vmap for it; call it for each example"):
        torch.func.vmap(loss, (0, None))(torch.stack([x.detach()] * 2), first)


def test_a_recurrent_layer_says_that_it_runs_row_by_row():
    layer = nn.GRU(3, 4, batch_first=True)
    with pytest.warns(tl.packed.PackedFallbackWarning, match="gru: under torch.func each packed row is a call of its"):
        torch.func.grad(lambda x: layer(PackedTensor(x, LENS))[0].values.sum())(torch.ones(8, 3))


def test_a_list_that_holds_itself_is_looked_through_to_some_depth() -> None:
    x = PackedTensor(torch.ones(3), [2, 1])
    held: list[object] = [x]
    held.append(held)
    found = autograd._find_packed(held)
    assert len(found) == autograd._DEPTH
    assert all(one is x for one in found)
