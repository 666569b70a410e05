"""Loops whose rows leave the batch, for tests of compiled loops: over packed xs, and with `compact=True`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tensorloop.packed import Dim, PackedTensor
from tests.support.compiled_cases import Case, F, H, leaf, rotation

LENS = [3, 0, 5, 1, 5, 2]
CASES: dict[str, Callable[..., Case]] = {}


def case(make: Callable[..., Case]) -> Callable[..., Case]:
    """Puts a case into the table: a function of a dtype and of lens."""
    CASES[make.__name__] = make
    return make


@case
def lstm_with_a_context(d: torch.dtype, lens: list[int] = LENS) -> Case:
    cell, b = nn.LSTMCell(F, H, dtype=d), len(lens)
    values, scale = leaf(d, sum(lens), F), leaf(d, b, H)

    def body(state: Any, x: Tensor, context: Any) -> Any:
        h, c = cell(x, state)
        h = h + 0.1 * context["scale"] * torch.ones(len(h), 1, dtype=d)
        return (h, c), (h * 2, None, 3)

    init = leaf(d, b, H), leaf(d, b, H)
    options = {"context": {"scale": scale}}
    return Case(body, init, PackedTensor(values, lens), [*cell.parameters(), values, scale], options=options)


@case
def several_xs(d: torch.dtype, lens: list[int] = LENS) -> Case:
    dim, values, table, turn = Dim(None, torch.tensor(lens)), leaf(d, sum(lens), H), leaf(d, 7, H), rotation(d)
    tokens = torch.arange(sum(lens)) % 7

    def body(state: Any, x: Any) -> Any:
        h, n, shared = state
        h = h @ turn + x["a"].sin() * table[x["token"]] + shared.cos()
        return (h, n + 1, shared + 0.1), {"y": h.sum(-1), "n": n}

    init = leaf(d, len(lens), H), torch.zeros(len(lens), dtype=torch.int64), torch.zeros((), dtype=d)
    xs = {"a": PackedTensor(values, dim), "none": None, "token": PackedTensor(tokens, dim)}
    return Case(body, init, xs, [values, table, turn])


@case
def attention_to_a_context(d: torch.dtype, lens: list[int] = LENS) -> Case:
    b, turn, values = len(lens), rotation(d), leaf(d, sum(lens), H)
    memory, mask = leaf(d, b, 3, H), torch.zeros(b, 3, dtype=d)
    mask[:, 2] = -torch.inf

    def body(h: Tensor, x: Tensor, context: Any) -> Any:
        memory, mask = context
        scores = torch.einsum("bh,bsh->bs", h, memory) + mask
        read = torch.einsum("bs,bsh->bh", scores.softmax(-1), memory)
        h = torch.tanh(h @ turn + read + x)
        return h, h

    return Case(
        body, leaf(d, b, H), PackedTensor(values, lens), [turn, values, memory], options={"context": (memory, mask)}
    )


@case
def near_a_pole(d: torch.dtype, lens: list[int] = LENS) -> Case:
    """No finite gradient has the step after a row's last, nor one of a row without entries, nor one with a 0 for x."""
    values, w = torch.ones(sum(lens), dtype=d).requires_grad_(), leaf(d)
    depth = torch.tensor(lens, dtype=d).requires_grad_()

    def body(h: Tensor, x: Tensor) -> Any:
        return h - x * (1 + w * x.log()), h.sqrt()

    return Case(body, depth, PackedTensor(values, lens), [values, w])


@case
def counts_into_a_table(d: torch.dtype, lens: list[int] = LENS) -> Case:
    """After its last entry a row would count out of its table."""
    values, table, turn = leaf(d, sum(lens), H), leaf(d, len(lens), max(lens), H), rotation(d)

    def body(state: Any, x: Tensor, table: Tensor) -> Any:
        h, left = state
        index = (left - 1).view(-1, 1, 1).expand(-1, 1, H)
        h = h @ turn + x * table.gather(1, index).squeeze(1)
        return (h, left - 1), h

    init = leaf(d, len(lens), H), torch.tensor(lens)
    return Case(body, init, PackedTensor(values, lens), [values, table, turn], options={"context": table})
