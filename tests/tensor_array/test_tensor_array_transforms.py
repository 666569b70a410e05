"""TensorArray under torch.func, forward mode, torch.compile, checkpointing and grad modes. Each case against a list."""

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, grad
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tests.support.devices import HERE

TURN = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)


class Slots(list):
    """What a TensorArray is compared with: a list whose slices stack."""

    def __getitem__(self, i: Any) -> Any:
        return torch.stack(list(self)[i]) if isinstance(i, slice) else super().__getitem__(i)

    def stack(self) -> Tensor:
        return torch.stack(list(self))


def attention(x: Tensor, weight: Tensor, make: Callable = tl.TensorArray) -> Tensor:
    """A small decoder over (T, 2): appends, prefix reads, one overwrite. The body rotates, it does not contract."""
    keys = make()
    o = torch.ones(2, dtype=x.dtype)
    for t in range(len(x)):
        keys.append(TURN.to(x.dtype) @ o + torch.sin(weight @ x[t]))
        o = torch.softmax(keys[: t + 1] @ o, 0) @ keys[: t + 1]
    keys[1] = o * x[0]
    return (keys.stack() ** 3).sum() + (keys[0] * keys[1]).sum()


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1.4, 8, dtype=torch.float64).view(4, 2)


@pytest.fixture
def weight() -> Tensor:
    return torch.tensor([[0.3, -1.1], [0.9, 0.4]], dtype=torch.float64)


def both(run: Callable[[Callable], object]) -> None:
    torch.testing.assert_close(run(tl.TensorArray), run(Slots), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian"])
def test_func_derivatives(name: str, x: Tensor, weight: Tensor) -> None:
    both(lambda make: getattr(torch.func, name)(lambda v: attention(v, weight, make))(x))


def test_vjp_and_jvp(x: Tensor, weight: Tensor) -> None:
    both(lambda make: torch.func.vjp(lambda v: attention(v, weight, make), x)[1](torch.tensor(2.0).double()))
    both(lambda make: torch.func.jvp(lambda v: attention(v, weight, make), (x,), (torch.cos(x),)))


def test_nested_transforms(x: Tensor, weight: Tensor) -> None:
    xs = torch.stack([x, 2 * x, x + 1])
    both(lambda make: torch.func.vmap(lambda v: attention(v, weight, make))(xs))
    both(lambda make: torch.func.vmap(torch.func.grad(lambda v: attention(v, weight, make)))(xs))
    both(lambda make: torch.func.grad(lambda w: torch.vmap(lambda v: attention(v, w, make))(xs).sum())(weight))
    both(lambda make: torch.func.jacfwd(torch.func.jacrev(lambda v: attention(v, weight, make)))(x))
    both(
        lambda make: torch.vmap(lambda w: torch.vmap(lambda v: attention(v, w, make))(xs))(torch.stack([weight, TURN]))
    )


def test_functional_call_and_per_sample_gradients(x: Tensor) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(TURN + 0.1)

        def forward(self, v: Tensor, make: Callable) -> Tensor:
            return attention(v, self.weight, make)

    model = Model()
    state = dict(model.named_parameters())
    xs = torch.stack([x, x + 1])
    both(
        lambda make: torch.vmap(
            torch.func.grad(lambda p, v: torch.func.functional_call(model, p, (v, make))), in_dims=(None, 0)
        )(state, xs)["weight"]
    )


def test_every_write_and_read_under_vmap(x: Tensor) -> None:
    def with_array(v: Tensor) -> Tensor:
        array = tl.TensorArray.unstack(v)
        array.extend(v * 2).scatter([0, 0], v[:2] * 3)
        array.write_rows(torch.tensor([1, 8]), v[2] * 5, torch.tensor([True, True]))
        return torch.cat([array.gather([0, 0, 7]), array.stack(), array[::-2]])

    def with_list(v: Tensor) -> Tensor:
        s = [*v, *(2 * v)]
        s[0] = v[1] * 3
        s[1] = torch.stack([v[2, 0] * 5, s[1][1]])
        s.append(torch.stack([v[2, 0] * 0, v[2, 1] * 5]))
        return torch.cat([torch.stack([s[0], s[0], s[7]]), torch.stack(s), torch.stack(s[::-2])])

    xs = torch.stack([x, x * x])
    torch.testing.assert_close(torch.vmap(with_array)(xs), torch.stack([with_list(v) for v in xs]))
    torch.testing.assert_close(torch.func.jacrev(with_array)(x), torch.func.jacrev(with_list)(x))


def test_write_rows_at_batched_positions() -> None:
    def one(pos: Tensor, x: Tensor) -> Tensor:
        return tl.TensorArray(capacity=3).write_rows(pos, x).stack()

    pos = torch.tensor([[0, 2], [1, 1]])
    x = torch.arange(8.0).view(2, 2, 2) + 1
    out = torch.vmap(one)(pos, x)
    assert out[0, :, 0, 0].tolist() == [1, 0, 0]
    assert out[0, :, 1, 0].tolist() == [0, 0, 3]
    assert out[1, :, 1, 0].tolist() == [0, 7, 0]


def test_what_vmap_may_batch_of_an_outer_array(x: Tensor) -> None:
    base = x[0].clone().requires_grad_()
    outer = tl.TensorArray().append(base * 2).append(base * 3)
    rows = torch.vmap(outer.gather)(torch.tensor([[0, 1], [1, 1]]))
    assert torch.equal(rows[1, 0], base * 3)
    (d,) = grad(rows.sum(), base)
    assert d.tolist() == [11, 11]
    with pytest.raises(RuntimeError, match="vmap must not batch indices"):
        torch.vmap(lambda i: tl.TensorArray.unstack(x).scatter(i, x[:1]).stack())(torch.tensor([[0], [1]]))
    out = torch.vmap(
        lambda w: tl.TensorArray(capacity=2).write_rows(torch.tensor([0, 1]), torch.ones(2, 1), w).stack()
    )(torch.tensor([[True, False], [False, True]]))
    assert out[:, :, :, 0].tolist() == [[[1, 0], [0, 0]], [[0, 0], [0, 1]]]


def test_constants_may_be_written_to_an_outer_array_inside_a_transform(x: Tensor) -> None:
    one = torch.ones(2, dtype=torch.float64)
    two = torch.stack([one, one])
    outer = tl.TensorArray().append(x[0]).append(x[1])

    def body(v: Tensor) -> Tensor:
        outer[0] = one
        outer.append(one).extend(two)
        return (v * outer[0]).sum()

    assert torch.func.grad(body)(x[0]).tolist() == [1, 1]
    assert outer.stack()[:, 0].tolist() == [1, x[1, 0].item(), 1, 1, 1]


def test_an_outer_array_is_read_inside_a_transform_and_gets_its_gradient(x: Tensor) -> None:
    base = torch.ones(2, dtype=torch.float64).requires_grad_()
    outer = tl.TensorArray().append(base * 2).append(base * 3)
    inner = torch.func.grad(lambda v: (v * outer.stack().sum(0)).sum() + (v * outer[1]).sum())(x[0])
    assert inner.tolist() == [8, 8]
    (d,) = grad(outer.stack().sum(), base)
    assert d.tolist() == [5, 5]


def test_a_transformed_tensor_is_refused_by_an_outer_array(x: Tensor) -> None:
    outer = tl.TensorArray().append(x[0])

    def body(v: Tensor) -> Tensor:
        outer.append(v)
        return v.sum()

    for transform, argument in ((torch.func.grad, x[0]), (torch.vmap, x)):
        with pytest.raises(RuntimeError, match=r"slot 1.*made outside the transform; make the array inside"):
            transform(body)(argument)
    assert len(outer) == 1

    def nested(v: Tensor) -> Tensor:
        middle = tl.TensorArray()
        torch.func.grad(lambda u: middle.append(u).stack().sum())(v)
        return v.sum()

    with pytest.raises(RuntimeError, match="made outside the transform"):
        torch.func.grad(nested)(x[0])


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_forward_mode_tangents_are_not_dropped(made: str, x: Tensor, weight: Tensor) -> None:
    array = tl.TensorArray().append(x[1]) if made == "outside" else None
    with forward_ad.dual_level():
        v = forward_ad.make_dual(x, torch.cos(x))
        if array is None:
            array = tl.TensorArray().append(x[1])
        array.append(v[0] * v[2])
        out = (array[:2] ** 2).sum() + array[1].sum() + attention(v, weight)
        expected = (torch.stack([x[1], v[0] * v[2]]) ** 2).sum() + (v[0] * v[2]).sum() + attention(v, weight, Slots)
        ours, theirs = forward_ad.unpack_dual(out), forward_ad.unpack_dual(expected)
    torch.testing.assert_close(ours.tangent, theirs.tangent)
    assert ours.tangent is not None
    assert ours.tangent.abs().item() > 0.1


# After any graph break dynamo looks at the .grad of inputs that are no leaves; torch shows that only to `-W error`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_gives_right_results(backend: str, x: Tensor, weight: Tensor) -> None:
    torch._dynamo.reset()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    compiled = torch.compile(attention, backend=backend)
    torch.testing.assert_close(grad(compiled(x, weight), (x, weight)), grad(attention(x, weight, Slots), (x, weight)))

    def body(array: tl.TensorArray, v: Tensor) -> Tensor:
        y = torch.sin(v) * 2
        array.append(y)
        return torch.cos(array.stack() * y).sum() + array[0].sum()

    def total(step: Callable) -> Tensor:
        array = tl.TensorArray()
        return torch.stack([step(array, v) for v in x]).sum()

    torch.testing.assert_close(grad(total(torch.compile(body, backend=backend)), x), grad(total(body), x))


def test_fullgraph_compilation_says_why_it_cannot(x: Tensor, weight: Tensor) -> None:
    torch._dynamo.reset()
    from torch._dynamo.exc import Unsupported  # a second to import, needed here alone

    with pytest.raises(Unsupported, match="TensorArray works in place"):
        torch.compile(attention, backend="eager", fullgraph=True)(x, weight)


def test_using_arrays_does_not_import_dynamo() -> None:
    code = (
        "import sys, torch, tensorloop as tl; before = 'torch._dynamo' in sys.modules;"
        "x = torch.ones(2, requires_grad=True); a = tl.TensorArray().append(x * 2);"
        "a[0] = x; a.stack().sum().backward();"
        "print(before, 'torch._dynamo' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_torch_checkpoint(reentrant: bool, x: Tensor, weight: Tensor) -> None:
    x, weight = x.requires_grad_(), weight.requires_grad_()
    outer = tl.TensorArray().append(weight[0] * 2)

    def run(v: Tensor, w: Tensor) -> Tensor:
        return attention(v, w) * (outer[:1] ** 2).sum()

    out = checkpoint(run, x, weight, use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    out.backward()
    dx, dw = x.grad, weight.grad
    expected = grad(attention(x, weight, Slots) * (weight[0] * 2).pow(2).sum(), (x, weight))
    torch.testing.assert_close((dx, dw), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_does_not_write_twice_into_an_outer_array(reentrant: bool, x: Tensor) -> None:
    """A list would: read its own new value in the recomputation, and give a wrong gradient."""
    x = x.requires_grad_()
    outer = tl.TensorArray().append(x[0] * 2)

    def body(v: Tensor) -> Tensor:
        outer[0] = torch.sin(outer[0]) * v
        return (outer[0] ** 2).sum()

    out = checkpoint(body, x[1], use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    with pytest.raises(RuntimeError, match="slot 0: the array was made outside the function that"):
        out.backward()

    def total(run: Callable) -> Tensor:
        fresh = tl.TensorArray().append(x[0] * 2)

        def on_a_copy(v: Tensor) -> Tensor:
            array = copy.copy(fresh)
            array[0] = torch.sin(array[0]) * v
            return (array[0] ** 2).sum()

        x.grad = None
        run(on_a_copy, x[1]).backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(total(lambda f, v: checkpoint(f, v, use_reentrant=reentrant)), total(lambda f, v: f(v)))


def test_hooks_may_collect_gradients_in_an_array(x: Tensor) -> None:
    x = x.requires_grad_()
    kept = tl.TensorArray()
    array = tl.TensorArray()
    for v in x:
        y = v * 2
        y.register_hook(lambda g: kept.append(g) and None)
        array.append(y)
    (array.stack() ** 2).sum().backward()
    assert kept.stack().shape == (4, 2)
    assert kept[0].tolist() == (4 * x[3]).tolist()


def test_saved_tensor_hooks_of_the_user_run(x: Tensor, weight: Tensor) -> None:
    x = x.requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        out = attention(x, weight)
    torch.testing.assert_close(grad(out, x), grad(attention(x, weight, Slots), x))


def test_grad_modes(x: Tensor) -> None:
    x = x.requires_grad_()
    with torch.inference_mode():
        made_in_inference = tl.TensorArray().append(x[0] * 2)
        assert not made_in_inference.stack().requires_grad
    made_in_inference.append(x[1] * 2)
    torch.testing.assert_close(grad(made_in_inference.stack().sum(), x)[0].sum(1).tolist(), [0.0, 4.0, 0.0, 0.0])

    array = tl.TensorArray().append(x[0] * 2)
    with torch.inference_mode():
        value = torch.ones(2, dtype=torch.float64)
        assert array.stack().shape == (1, 2)  # moves what waits; recorded all the same
        array.append(value)
        another = value + 1
    array.append(another)
    (d,) = grad((array.stack() ** 2).sum(), x)
    torch.testing.assert_close(d[0], 8 * x[0].detach())


def test_autocast_and_anomaly_mode(x: Tensor, weight: Tensor) -> None:
    x = x.requires_grad_()
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        torch.testing.assert_close(grad(attention(x, weight), x), grad(attention(x, weight, Slots), x))

    def under_autocast(make: Callable) -> Tensor:
        array = make()
        with torch.autocast(HERE.type, dtype=torch.bfloat16):
            for v in x.float():
                array.append(weight.float() @ v)  # bfloat16, and kept so
        assert array[:2].dtype == torch.bfloat16
        return grad((array.stack() ** 2).sum(), x)[0]

    torch.testing.assert_close(under_autocast(tl.TensorArray), under_autocast(Slots))
