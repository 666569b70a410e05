"""One step's query against loop buffers: the numbers of stacked tensors, in loops of every kind."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import reference
from tensorloop.attention import attention
from tensorloop.packed import PackedTensor
from tensorloop.testing import assert_matches_reference
from tests.support import attention_cases as cases
from tests.support.attention_cases import tensors

B, H, G, D = 2, 4, 2, 3


def of_step(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q (B, H, D) over keys (n, B, G, D)."""
    return reference.attention(q[:, None], keys.transpose(0, 1), values.transpose(0, 1))[:, 0]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)])
def test_a_step_sees_all_slots(batch: tuple[int, ...]):
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, tl.TensorArray.unstack(k), tl.TensorArray.unstack(v))

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return of_step(q.reshape(-1, H, D), k.reshape(5, -1, G, D), v.reshape(5, -1, G, D + 1)).reshape(
            *batch, H, D + 1
        )

    if batch == (0,):
        assert ours(*tensors((0, H, D), (5, 0, G, D), (5, 0, G, D + 1))).shape == (0, H, D + 1)
    else:
        assert_matches_reference(ours, theirs, *tensors((*batch, H, D), (5, *batch, G, D), (5, *batch, G, D + 1)))


def test_without_slots_the_output_is_zero():
    array = tl.TensorArray(element_shape=(B, G, D), dtype=torch.float64)
    out = attention(torch.ones(B, H, D, dtype=torch.float64), array, array)
    torch.testing.assert_close(out, torch.zeros_like(out))
    with pytest.raises(ValueError, match="the array is empty and its element shape is None"):
        attention(torch.ones(B, H, D), tl.TensorArray(), tl.TensorArray())


def weights() -> list[Tensor]:
    return [torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0].requires_grad_() for n in (12, 12)]


def step(h: Tensor, x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, q, k, v) of one step of a rotation."""
    h = torch.sin(h @ w + x)
    z = h @ u
    return h, z.view(B, H, D), z[:, :6].view(B, G, D), z[:, 6:].reshape(B, G, D)


def python_loop(xs: Tensor, h: Tensor, w: Tensor, u: Tensor, arrays: bool) -> Tensor:
    ks, vs = (tl.TensorArray(), tl.TensorArray()) if arrays else ([], [])
    for x in xs.unbind(0):
        h, q, k, v = step(h, x, w, u)
        ks.append(k)
        vs.append(v)
        if isinstance(ks, list) and isinstance(vs, list):
            out = of_step(q, torch.stack(ks), torch.stack(vs))
        else:
            out = attention(q, ks, vs)  # pyright: ignore
        h = h + out.flatten(1)
    return h


def scan_loop(xs: Tensor, h: Tensor, w: Tensor, u: Tensor, checkpoints: Any) -> Tensor:
    def body(carry: Any, x: Tensor) -> Any:
        h, ks, vs = carry
        h, q, k, v = step(h, x, w, u)
        ks, vs = ks.append(k), vs.append(v)
        h = h + attention(q, ks, vs).flatten(1)
        return (h, ks, vs), None

    (h, _, _), _ = tl.scan(body, (h, tl.TensorArray(), tl.TensorArray()), xs, checkpoints=checkpoints)
    return h


STACKED = functools.partial(python_loop, arrays=False)


def loop_inputs(T: int = 9) -> list[Tensor]:
    return [*tensors((T, B, 12), (B, 12)), *weights()]


def test_in_a_python_loop():
    assert_matches_reference(functools.partial(python_loop, arrays=True), STACKED, *loop_inputs())


@pytest.mark.parametrize("checkpoints", [None, 1, 3, 100])
def test_in_scan(checkpoints: int | None):
    assert_matches_reference(functools.partial(scan_loop, checkpoints=checkpoints), STACKED, *loop_inputs())


def test_in_a_while_loop_with_checkpoints_of_unknown_length():
    xs, h, w, u = loop_inputs()

    def run(xs: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Tensor:
        def body(carry: Any) -> Any:
            t, h, ks, vs = carry
            h, q, k, v = step(h, xs[t], w, u)
            ks, vs = ks.append(k), vs.append(v)
            return t + 1, h + attention(q, ks, vs).flatten(1), ks, vs

        arrays = tl.TensorArray(), tl.TensorArray()
        return tl.while_loop(lambda c: c[0] < len(xs), body, (0, h, *arrays), checkpoints=3)[1]

    assert_matches_reference(run, STACKED, xs, h, w, u)


@pytest.mark.parametrize("checkpoints", [None, 3])
def test_second_derivatives_through_loops(checkpoints: int | None):
    inputs = loop_inputs(4)

    def second(run: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(run(*inputs).sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)  # pyright: ignore[reportArgumentType, reportCallIssue]

    torch.testing.assert_close(second(functools.partial(scan_loop, checkpoints=checkpoints)), second(STACKED))


def test_function_transforms_of_a_loop():
    inputs = tuple(x.detach() for x in loop_inputs(3))

    def gradients(run: Any) -> Any:
        return torch.func.grad(lambda x: run(*x).sum())(inputs)

    for run in (functools.partial(python_loop, arrays=True), functools.partial(scan_loop, checkpoints=2)):
        torch.testing.assert_close(gradients(run), gradients(STACKED))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_packed_and_masked_attention_inside_a_loop(checkpoints: int | None, masked: bool):
    lens = [3, 0, 4]
    mask = cases.block_mask(cases.causal, None, None, 4, 4, 2) if masked else None

    def ours(h: Tensor, w: Tensor) -> Tensor:
        def body(h: Tensor, _: None) -> tuple[Tensor, None]:
            x = PackedTensor(h @ w, lens)
            if masked:
                return h + attention(x, x, x, block_mask=mask).values, None
            return h + attention(x, x, x, causal=True).values, None

        return tl.scan(body, h, length=5, checkpoints=checkpoints)[0]

    def theirs(h: Tensor, w: Tensor) -> Tensor:
        for _ in range(5):
            x = h @ w
            h = h + reference.attention_packed(x, x, x, q_lens=lens, k_lens=lens, causal=True)
        return h

    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0].requires_grad_()
    assert_matches_reference(ours, theirs, *tensors((7, 2, 3)), rotation)


# Dynamo looks at .grad of what comes back from the break, and torch warns it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_inside_torch_compile():
    q, k, v = tensors(*[(1, 5, 2, 4)] * 3)

    @functools.partial(torch.compile, backend="eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, causal=True) + 1

    assert_matches_reference(compiled, lambda q, k, v: reference.attention(q * 2, k, v, causal=True) + 1, q, k, v)
