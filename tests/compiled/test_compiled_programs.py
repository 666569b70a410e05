"""Small programs of many kinds, compiled and not: the same values and gradients, and no warning."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning
from tests.support.devices import HERE

D = torch.float64
Program = Callable[[Any], list[Tensor]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(HERE).manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=D, generator=generator).requires_grad_()


def grads(out: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out, inputs, allow_unused=True, materialize_grads=True))


TURN = torch.linalg.qr(randn(4, 4).detach())[0]


@program
def loops_in_a_loop(compile: Any) -> list[Tensor]:
    w, x = randn(4, 4), randn(3, 4)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return tl.fori_loop(0, 3, lambda i, h: torch.sin(h @ w) + h, h + x, compile=compile), h

    h, ys = tl.scan(body, x, randn(5, 3, 4, seed=2), compile=compile)
    return [h, ys, *grads(h.sin().sum() + ys.square().sum(), [w, x])]


@program
def closures_made_anew(compile: Any) -> list[Tensor]:
    total, w = torch.zeros((), dtype=D), randn(4)
    for k in range(4):

        def body(h: Tensor, x: Tensor, s: Tensor = randn(4), k: int = k) -> tuple[Tensor, Tensor]:  # noqa: B008
            return torch.sin(h * w + x * s) * (1 + k), h

        total = total + tl.scan(body, torch.zeros(4, dtype=D), randn(7, 4), compile=compile)[0].sum()
    return [total, *grads(total, [w])]


@dataclasses.dataclass
class State:
    h: Tensor
    total: Tensor
    tag: str = "a"


@program
def a_dataclass(compile: Any) -> list[Tensor]:
    w = randn(4, 4)

    def body(s: State, x: Tensor) -> tuple[State, Any]:
        h = torch.tanh(x @ w + s.h)
        return dataclasses.replace(s, h=h, total=s.total * 0.9 + h), {"y": h, "rest": (s.total, None)}

    s, ys = tl.scan(body, State(randn(2, 4), randn(2, 4)), randn(6, 2, 4), compile=compile)
    assert (s.tag, ys["rest"][1]) == ("a", None)
    return [s.h, s.total, ys["y"], ys["rest"][0], *grads(s.total.sum() + ys["y"].sin().sum(), [w])]


@program
def writes_in_place(compile: Any) -> list[Tensor]:
    w = randn(4)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = h * 1
        y.add_(x)
        y[..., 0] *= w[0]
        y.clamp_(-2, 2)
        z = torch.zeros_like(h)
        z[1:] = y[1:]
        z[0].copy_(y[0] * w)
        return z, y.relu()

    h, ys = tl.scan(body, randn(3, 4, seed=4), randn(6, 3, 4), compile=compile)
    return [h, ys, *grads(h.sum() + ys.sum(), [w])]


@program
def a_mask_beside_a_clamp(compile: Any) -> list[Tensor]:
    x, xs = randn(3, 4), randn(5, 3, 4)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = h * 1.3 + x
        mask = y >= -2.0  # torch's gradient of clamp writes to its own
        return torch.where(mask, torch.clamp(y, -2, 2), y * 0.9), mask

    h, ys = tl.scan(body, x, xs, compile=compile)
    return [h, ys, *grads(h.sum(), [x, xs])]


@program
def writes_to_the_carry(compile: Any) -> list[Tensor]:
    w = randn(4)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h.mul_(1.1)
        h += x * w
        return h, h * 2

    h, ys = tl.scan(body, randn(3, 4).detach(), randn(6, 3, 4), compile=compile)
    return [h, ys, *grads(h.sum() + ys.sum(), [w])]


def recurrent(rows: int, features: int, steps: int) -> Program:
    def run(compile: Any) -> list[Tensor]:
        w, init, xs = randn(features, features), randn(rows, features), randn(steps, rows, features)
        h, ys = tl.scan(lambda h, x: (torch.sin(h @ w + x), h.sum(-1)), init, xs, compile=compile)
        return [h, ys, *grads(h.sum() + ys.sum(), [w, init, xs])]

    return run


PROGRAMS |= {"no_rows": recurrent(0, 4, 5), "no_features": recurrent(3, 0, 5), "no_steps": recurrent(3, 4, 0)}
PROGRAMS |= {"one_step": recurrent(3, 4, 1), "one_number": recurrent(1, 1, 5)}


@program
def branches_of_python(compile: Any) -> list[Tensor]:
    w, found = randn(4), list[Tensor]()
    for mode in ("a", "b", "a"):

        def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return (h * w + x, h) if mode == "a" else (torch.sin(h) + x * w, h * 2)  # noqa: B023

        h, ys = tl.scan(body, randn(4, seed=1), randn(6, 4), compile=compile)
        found += [h, ys, *grads(ys.sum(), [w])]
    return found


@program
def a_module_with_a_hook(compile: Any) -> list[Tensor]:
    torch.manual_seed(1)
    module = nn.Linear(4, 4).double()
    module.register_forward_hook(lambda module, args, out: out.mul(2))
    h, _ = tl.scan(lambda h, x: (torch.sin(module(h) + x), None), randn(2, 4), randn(5, 2, 4), compile=compile)
    return [h, *grads(h.sum(), [module.weight])]


@program
def a_functional_call(compile: Any) -> list[Tensor]:
    cell = nn.GRUCell(4, 4).double()
    weights = {name: randn(*x.shape, seed=i) for i, (name, x) in enumerate(cell.named_parameters())}

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.func.functional_call(cell, weights, (x, h))
        return h, h

    h, ys = tl.scan(body, randn(2, 4), randn(5, 2, 4), compile=compile)
    return [h, *grads(ys.sum(), list(weights.values()))]


@program
def second_derivatives(compile: Any) -> list[Tensor]:
    w, x = randn(4, 4), randn(2, 4)
    h, _ = tl.scan(lambda h, x: (torch.tanh(h @ w + x), None), x, randn(5, 2, 4, seed=3), compile=compile)
    found = torch.autograd.grad(h.square().sum(), [w, x], create_graph=True)
    total = found[0].sin().sum() + found[1].sin().sum()
    return [h, *found, *grads(total, [w, x])]


@program
def transforms_around(compile: Any) -> list[Tensor]:
    def loss(w: Tensor) -> Tensor:
        return tl.fori_loop(0, 5, lambda i, h: torch.tanh(h @ w), torch.ones(2, 4, dtype=D), compile=compile).sum()

    ws = randn(3, 4, 4).detach()
    slope = torch.func.jvp(loss, (ws[0],), (torch.ones_like(ws[0]),))[1]
    return [torch.func.vmap(torch.func.grad(loss))(ws), slope]


@program
def a_batched_backward(compile: Any) -> list[Tensor]:
    def looped(x: Tensor) -> Tensor:
        return tl.fori_loop(0, 5, lambda i, h: torch.sin(h @ TURN) * x, x, compile=compile)

    return [torch.autograd.functional.jacobian(looped, randn(4), vectorize=True)]  # pyright: ignore[reportReturnType]


@program
def transforms_inside(compile: Any) -> list[Tensor]:
    x, w = randn(3, 4), randn(3, 4, seed=1)

    def body(i: int, h: Tensor) -> Tensor:
        h = torch.func.vmap(lambda a, b: torch.sin(a * b))(h, w)
        return h - 0.1 * torch.func.grad(lambda z: (z**3).sum())(h)

    h = tl.fori_loop(0, 5, body, x, compile=compile)
    return [h, *grads(h.sum(), [x, w])]


@program
def leaves_that_trade_places(compile: Any) -> list[Tensor]:
    x, y = randn(3), randn(3, seed=1)
    a, b = tl.fori_loop(0, 7, lambda i, s: (s[1], s[0] + s[1]), (x, y), compile=compile)
    return [a, b, *grads(a.sum() + b.square().sum(), [x, y])]


@program
def one_tensor_in_many_places(compile: Any) -> list[Tensor]:
    x, w = randn(3), randn(3, seed=1)

    def body(s: tuple[Tensor, Tensor], x: Tensor) -> Any:
        y = torch.sin(s[0] + x)
        return (y, y), (y, s[1], x, w)

    (a, b), ys = tl.scan(body, (x, x), randn(5, 3), compile=compile)
    return [a, b, *ys, *grads(a.sum() + b.sum() + sum(k * y.sum() for k, y in enumerate(ys)), [x, w])]


@program
def carries_that_stay_or_are_given_away(compile: Any) -> list[Tensor]:
    x, w = randn(3), randn(3, seed=1)
    a, b = tl.fori_loop(0, 4, lambda i, s: (w, s[1]), (x, x), compile=compile)
    return [a, b, *grads(a.square().sum() + b.sin().sum(), [x, w])]


@program
def memory_in_another_order(compile: Any) -> list[Tensor]:
    xs, w, b = randn(3, 5, 4).transpose(0, 1), randn(4, 4).t(), randn(1).expand(4)
    h, ys = tl.scan(lambda h, x: (torch.sin(h @ w + x * b), h.t()), randn(4, 3).t(), xs, reverse=True, compile=compile)
    return [h, ys, *grads(ys.sum() + h.sum(), [w, b, xs])]


@program
def normalization_and_dropout(compile: Any) -> list[Tensor]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.3)).double()
    h, ys = tl.scan(lambda h, x: (module(h) + x, h), randn(2, 4), randn(6, 2, 4), compile=compile)
    return [h, ys, torch.rand(2), *grads(ys.sum(), list(module.parameters()))]


@program
def attention_with_a_mask(compile: Any) -> list[Tensor]:
    w, memory, mask = randn(8, 8), randn(2, 2, 5, 4, seed=3), torch.zeros(2, 1, 3, 5, dtype=D)
    mask[:, :, :, -1] = mask[0, 0, 0] = -math.inf
    seen, attend = torch.ones(3, 3).tril().bool(), functional.scaled_dot_product_attention

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        q = (h @ w).view(2, 3, 2, 4).transpose(1, 2)
        found = attend(q, memory, memory * 2, attn_mask=mask)
        found = found + attend(q, q, q, is_causal=True, scale=0.3) + attend(q, q, q, attn_mask=seen)
        return torch.tanh(found.transpose(1, 2).reshape(2, 3, 8) + x), h.sum(-1)

    h, ys = tl.scan(body, randn(2, 3, 8), randn(5, 2, 3, 8), compile=compile)
    return [h, ys, *grads(ys.sum() + h.sum(), [w, memory])]


@program
def multihead_attention(compile: Any) -> list[Tensor]:
    torch.manual_seed(1)
    module = nn.MultiheadAttention(8, 2, batch_first=True).double()
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True).double()

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = module(h, x, x)
        return torch.tanh(layer(out) + module(x, h, h, need_weights=False)[0]), weights

    h, ys = tl.scan(body, randn(2, 3, 8), randn(4, 2, 3, 8), compile=compile)
    return [h, ys, *grads(h.sum() + ys.square().sum(), [*module.parameters(), *layer.parameters()])]


@program
def a_decoder(compile: Any) -> list[Tensor]:
    table = randn(7, 4)

    def body(state: tuple[Tensor, Tensor], _: None) -> Any:
        h = torch.sin(state[0] @ TURN + functional.embedding(state[1], table))
        scores = h @ table.t()
        token = scores.argmax(-1)
        return (h, token), (token, scores.log_softmax(-1))

    init = randn(3, 4), torch.tensor([1, 2, 3])
    (h, token), (tokens, scores) = tl.scan(body, init, length=6, compile=compile)
    return [h, token, tokens, scores, *grads(scores.sum(), [table])]


@program
def sorting_and_scattering(compile: Any) -> list[Tensor]:
    w, index = randn(4), torch.tensor([2, 0, 1, 1])

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sin(h.sort(-1).values * w + x.flip(-1).cumsum(-1)).roll(1, -1)
        return torch.zeros_like(h).index_add(1, index, h) + h.gather(1, index.expand(3, 4)), h.topk(2, -1).values

    h, ys = tl.scan(body, randn(3, 4), randn(5, 3, 4), compile=compile)
    return [h, ys, *grads(ys.sum() + h.sum(), [w])]


@program
def masks_of_infinities(compile: Any) -> list[Tensor]:
    mask, w = torch.tensor([0.0, -math.inf, 0.0, 0.0], dtype=D), randn(4, 4)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.logsumexp(h.unsqueeze(-1) + w + mask, 0) + x, torch.where(h > 0, h.clamp(min=1e-3).sqrt(), h)

    h, ys = tl.scan(body, randn(4), randn(5, 4), compile=compile)
    return [h, ys, *grads(h[h > -1e9].sum(), [w])]


@program
def a_gradient_that_is_cut(compile: Any) -> list[Tensor]:
    w = randn(4)
    h, ys = tl.scan(lambda h, x: (torch.sin(h.detach() * w + x), h), randn(4), randn(5, 4), compile=compile)
    return [h, *grads(ys.sum() + h.sum(), [w])]


@program
def weights_in_parts(compile: Any) -> list[Tensor]:
    w, again = randn(8, 4), functools.partial(checkpoint, use_reentrant=False)

    def body(scale: float, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return again(lambda h: torch.sin(h @ w[:4] + x @ w[4:]) * scale, h), h  # pyright: ignore[reportReturnType]

    h, ys = tl.scan(functools.partial(body, 1.2), randn(2, 4), randn(5, 2, 4), compile=compile)
    return [h, *grads(ys.sum() + h.sum(), [w])]


@program
def backward_more_than_once(compile: Any) -> list[Tensor]:
    w = randn(4)
    h, _ = tl.scan(lambda h, x: (torch.sin(h * w + x), None), randn(4), randn(5, 4), compile=compile, checkpoints=2)
    return [*torch.autograd.grad(h.sum(), w, retain_graph=True), *torch.autograd.grad(h.sum(), w)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    for _ in range(2):  # the second time the step is known
        torch.manual_seed(0)
        expected = PROGRAMS[name](False)
        torch.manual_seed(0)
        if name == "weights_in_parts" and hasattr(checkpointing, "_NoopSaveInputs"):  # torch 2.11, which reads grad_fn
            with pytest.warns(NotCompiledWarning, match="_NoopSaveInputs"):
                found = PROGRAMS[name](True)
        elif name == "transforms_around":
            with pytest.warns(NotCompiledWarning, match="a torch.func transform .* is around the loop"):
                found = PROGRAMS[name](True)
        else:
            found = PROGRAMS[name]("strict")
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, equal_nan=True)
