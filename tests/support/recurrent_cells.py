"""Cells of many kinds as steps: what the emitter meets in models, forward and backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.recurrences import Given


class Cell(NamedTuple):
    """A step and its inputs: shapes in rows B, features H and numbers; `apart` where rows never meet."""

    step: Callable[..., dict[str, Any]]
    invariants: list[tuple[Any, ...]]
    sequences: list[tuple[Any, ...]]
    carry: list[tuple[Any, ...]]
    reverse: bool = False
    apart: bool = True


def inputs(cell: Cell, steps: int, rows: int, features: int, dtype: torch.dtype) -> Given:
    """Random ones, weights small enough that nothing is chaotic."""
    torch.manual_seed(1)

    def size(one: Any) -> int:
        return int(eval(one, {"B": rows, "H": features})) if isinstance(one, str) else one

    def made(shape: tuple[Any, ...], *before: int) -> Tensor:
        return torch.randn([*before, *map(size, shape)], dtype=dtype) * 0.5

    invariants = [made(shape) / max(1, features) ** 0.5 for shape in cell.invariants]
    return invariants, [made(shape, steps) for shape in cell.sequences], [made(shape) for shape in cell.carry]


def lstm(inv, xs, carry):
    (w,), (x,), (h, c) = inv, xs, carry
    i, f, g, o = (x + h @ w).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * c + i * g
    bent = after.tanh()
    return {"carry": [o * bent, after], "outs": [i, f, g, o, bent, o * bent, c]}


def lstm_backward(inv, xs, carry):
    (w,), (dy, i, f, g, o, bent, c), (dh, dc) = inv, xs, carry
    dh = dh + dy
    dc = dc + dh * o * (1 - bent * bent)
    parts = [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * bent * o * (1 - o)]
    gates = torch.cat(parts, 1)
    return {"carry": [gates @ w.t(), dc * f], "outs": [gates], "sums": [gates]}


def rnn(inv, xs, carry):
    (w, b), (x,), (h,) = inv, xs, carry
    after = torch.where(x[:, :1] > 0, torch.addmm(b, h, w).tanh() + x, h)
    return {"carry": [after], "outs": [after, h]}


def rnn_backward(inv, xs, carry):
    (w,), (dy, h), (dh,) = inv, xs, carry
    kept = h[:, :1] > 0
    dh = dh + dy
    d = torch.where(kept, dh, 0.0) * (1 - h * h)
    return {"carry": [torch.where(kept, 0.0, dh) + d @ w.t()], "outs": [d], "sums": [d, d.sum(1)]}


def rnn_bias(inv, xs, carry):
    (w,), (x,), (h,) = inv, xs, carry
    after = (x + h @ w).tanh()
    return {"carry": [after], "outs": [after], "sums": [after.sum(0), h.t() @ after]}


def gru(inv, xs, carry):
    (w, b), (x,), (h,) = inv, xs, carry
    r, z, n = torch.addmm(b, h, w).chunk(3, 1)
    a, c, d = x.chunk(3, 1)
    r, z = (r + a).sigmoid(), (z + c).sigmoid()
    new = (d + r * n).tanh()
    after = (1 - z) * new + z * h
    return {"carry": [after], "outs": [after, r, z, new, n]}


def layer_norm(inv, xs, carry):
    (w, g, b), (x,), (h,) = inv, xs, carry
    a = x + h @ w
    y, mean, scale = torch.ops.aten.native_layer_norm(a, [a.shape[-1]], g, b, 1e-5)
    return {"carry": [y.tanh()], "outs": [y, mean, scale, a]}


def vector(inv, xs, carry):
    (w,), (x,), (h,) = inv, xs, carry
    after = (w @ h + x).tanh()
    return {"carry": [after], "outs": [after], "sums": [torch.outer(after, h)]}


def attention(inv, xs, carry):
    (w, memory), (x,), (h,) = inv, xs, carry
    scores = torch.bmm(memory, (h @ w)[:, :, None])[:, :, 0].softmax(1)
    read = torch.bmm(scores[:, None], memory)[:, 0]
    return {"carry": [(read + x + h).tanh()], "outs": [scores]}


def chain(inv, xs, carry):
    (w,), (x,), (a,) = inv, xs, carry
    after = (a[:, :, None] + w[None]).logsumexp(1) + x
    return {"carry": [after - after.amax(1, keepdim=True)], "outs": [after]}


def viterbi(inv, xs, carry):
    (w,), (x,), (a,) = inv, xs, carry
    best, place = (a[:, :, None] + w[None]).max(1)
    return {"carry": [best + x], "outs": [place]}


def kutta(inv, xs, carry):
    (w,), (x,), (y,) = inv, xs, carry

    def slope(y):
        return (y @ w).sin() - 0.1 * y + x

    a = slope(y)
    b = slope(y + 0.05 * a)
    c = slope(y + 0.05 * b)
    d = slope(y + 0.1 * c)
    return {"carry": [y + 0.1 / 6 * (a + 2 * b + 2 * c + d)], "outs": [y]}


def adam(inv, xs, carry):
    (target,), (_,), (p, m, v, n) = inv, xs, carry
    g = 2 * (p - target)
    m, v, n = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, n + 1
    n = n.abs() + 1
    p = p - 0.1 * (m / (1 - 0.9**n)) / ((v / (1 - 0.999**n)).abs().sqrt() + 1e-8)
    return {"carry": [p, m, v, n], "outs": [((p - target) ** 2).sum()]}


def shifting(inv, xs, carry):
    (taps,), (x,), (line,) = inv, xs, carry
    line = torch.cat([x, line[:, :-1]], 1)
    return {"carry": [line], "outs": [(line * taps).sum(1)]}


def whole_beside_rows(inv, xs, carry):
    """What no row makes, and each row reads a part of: the first group's lanes read there what they have written."""
    (taps,), (x,), (h, m) = inv, xs, carry
    parts = torch.cat([(m * 2).expand(len(h) + 1, -1), m[None]])[: len(h)]
    return {"carry": [torch.tanh(h + parts + x), m * 0.5 + taps], "outs": [h]}


CELLS = {
    "lstm": Cell(lstm, [("H", "4*H")], [("B", "4*H")], [("B", "H"), ("B", "H")]),
    "lstm backward": Cell(lstm_backward, [("H", "4*H")], [("B", "H")] * 7, [("B", "H"), ("B", "H")], True),
    "rnn": Cell(rnn, [("H", "H"), ("H",)], [("B", "H")], [("B", "H")]),
    "rnn backward": Cell(rnn_backward, [("H", "H")], [("B", "H")] * 2, [("B", "H")], True),
    "rnn with sums over rows": Cell(rnn_bias, [("H", "H")], [("B", "H")], [("B", "H")], apart=False),
    "gru": Cell(gru, [("H", "3*H"), ("3*H",)], [("B", "3*H")], [("B", "H")]),
    "layer norm": Cell(layer_norm, [("H", "H"), ("H",), ("H",)], [("B", "H")], [("B", "H")]),
    "vector": Cell(vector, [("H", "H")], [("H",)], [("H",)], apart=False),
    "attention": Cell(attention, [("H", "H"), ("B", 5, "H")], [("B", "H")], [("B", "H")]),
    "chain": Cell(chain, [("H", "H")], [("B", "H")], [("B", "H")]),
    "viterbi": Cell(viterbi, [("H", "H")], [("B", "H")], [("B", "H")]),
    "kutta": Cell(kutta, [("H", "H")], [("B", "H")], [("B", "H")]),
    "adam": Cell(adam, [("B", "H")], [(1,)], [("B", "H"), ("B", "H"), ("B", "H"), ()], apart=False),
    "whole beside rows": Cell(whole_beside_rows, [("H",)], [("B", "H")], [("B", "H"), ("H",)]),
    "shifting": Cell(shifting, [("H",)], [("B", 1)], [("B", "H")]),
}
