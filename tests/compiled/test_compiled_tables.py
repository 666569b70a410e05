"""Tables read at indices: a compiled loop takes memory for the rows that were read, and one table of gradients."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tensorloop as tl
from tests.support.compiled_cases import check_equal

D = torch.float64
pytestmark = pytest.mark.usefixtures("fresh_plans")
T, B, V, W = 40, 3, 30, 8  # the gradients of all steps' tables would be 40 tables; their rows are 4
TABLE = V * W * 8
ROWS = T * B * W * 8
Read = Callable[[Tensor, Any], Tensor]

by_token: dict[str, Read] = {
    "embedding": lambda p, t: F.embedding(t, p),
    "padded": lambda p, t: F.embedding(t, p, padding_idx=7),
    "by_frequency": lambda p, t: F.embedding(t, p, scale_grad_by_freq=True),
    "index": lambda p, t: p[t],
    "negative": lambda p, t: p[t - V],
    "column": lambda p, t: p.t()[:, t].t(),
    "element": lambda p, t: p[t, t % W][:, None],
    "outer": lambda p, t: p[t[:, None], t % W].sum(1, keepdim=True),
    "apart": lambda p, t: p.view(V, 2, W // 2)[t, :, t % 4].sum(1, keepdim=True),
    "lists": lambda p, t: p[t, [0, 1, 2]][:, None],
    "index_select": lambda p, t: p.index_select(0, t),
    "index_select_columns": lambda p, t: p.t().index_select(1, t).t(),
    "gather": lambda p, t: p.gather(0, t[:, None].expand(B, W)),
    "gather_columns": lambda p, t: p.t().gather(1, t.expand(W, B)).t(),
    "gather_few": lambda p, t: p.gather(0, t[:, None]),
    "take_along_dim": lambda p, t: torch.take_along_dim(p, t[:, None], 0),
    "take": lambda p, t: torch.take(p, t)[:, None],
    "of_a_function": lambda p, t: (p * 2).softmax(-1)[t],
    "twice": lambda p, t: p[t] * F.embedding((t + 1) % V, p) + p.sum(0),
    "same_rows": lambda p, t: p[torch.tensor([3, 3, 5])] * t[:, None],
}
by_step: dict[str, Read] = {
    "row": lambda p, i: p[i],
    "from_the_end": lambda p, i: p[-i - 1],
    "column": lambda p, i: p.t()[:, i],
    "select": lambda p, i: p.select(0, i),
    "middle": lambda p, i: p.view(2, V // 2, W)[:, i // 2].sum(0),
    "element": lambda p, i: p[i, 3],
    "again": lambda p, i: p[i % 7],
}
OPTIONS: list[dict[str, Any]] = [{}, {"checkpoints": 8}, {"checkpoints": tl.Checkpoints(budget=100_000)}]


def tokens(steps: int) -> Tensor:
    """Some, of which one comes twice in each step, and one in many steps."""
    found = torch.randint(V, (steps, B), generator=torch.Generator().manual_seed(1))
    found[:, 1] = found[:, 0]
    found[5:9] = 7
    return found


def over_tokens(read: Read, **options: Any) -> Callable[..., Tensor]:
    def loop(p: Tensor, compile: Any, steps: int = T, **more: Any) -> Tensor:
        def body(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(h.flip(-1) + read(p, t))
            return h, h

        return tl.scan(body, torch.zeros(B, W, dtype=D), tokens(steps), compile=compile, **options, **more)[1]

    return loop


def over_steps(read: Read) -> Callable[..., Tensor]:
    def loop(p: Tensor, compile: Any, steps: int = V, **more: Any) -> Tensor:
        def body(i: Any, h: Tensor) -> Tensor:
            return torch.tanh(h.flip(-1) + read(p, i))

        return tl.fori_loop(0, steps, body, torch.zeros(W, dtype=D), compile=compile, **more)

    return loop


def fed_back(p: Tensor, compile: Any, steps: int = T, **more: Any) -> Tensor:
    """A decoder: each step reads the row of the token that the one before it chose."""

    def body(carry: tuple[Tensor, Tensor], _: None) -> tuple[Any, Tensor]:
        h, token = carry
        h = torch.tanh(h.flip(-1) * 1.5 + p[token])
        return (h, (h @ READOUT).argmax(-1)), h

    init = torch.linspace(-1, 1, B * W, dtype=D).view(B, W), torch.tensor([0, 7, 7])
    return tl.scan(body, init, None, length=steps, compile=compile, **more)[1]


READOUT = torch.randn(W, V, dtype=D, generator=torch.Generator().manual_seed(3))
LOOPS = {
    **{f"token_{name}": over_tokens(read) for name, read in by_token.items()},
    **{f"step_{name}": over_steps(read) for name, read in by_step.items()},
    "reversed": over_tokens(by_token["index"], reverse=True),
    "fed_back": fed_back,
}


def table(dtype: torch.dtype = D) -> Tensor:
    return torch.randn(V, W, dtype=D, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


class Largest(TorchDispatchMode):
    """Notes the most bytes of memory that any operation gives."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and not x.is_sparse:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def gradient(loop: Callable[..., Tensor], compile: Any, mode: Any = None, **options: Any) -> list[Tensor]:
    """What a loop gives, and the gradient of its table, computed in a mode."""
    p = table()
    loss = _weighted(y := loop(p, compile, **options))
    with mode or contextlib.nullcontext():
        return [y, *torch.autograd.grad(loss, p)]


def second(loop: Callable[..., Tensor], compile: Any) -> list[Tensor]:
    """The gradient of a table, and that of a function of it."""
    p = table()
    (g,) = torch.autograd.grad(_weighted(loop(p, compile)), p, create_graph=True)
    return [g, *torch.autograd.grad(_weighted(g), p)]


def _weighted(x: Tensor) -> Tensor:
    return (x.square() * torch.linspace(-1, 1, W, dtype=D)).sum()


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "checkpoints", "budget"])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.few
def test_the_gradient_of_a_table_takes_memory_for_its_rows(name: str, options: dict[str, Any]) -> None:
    expected = gradient(LOOPS[name], False, **options)
    found = gradient(LOOPS[name], "strict", largest := Largest(), **options)
    check_equal(found, expected, 1e-11)
    assert largest.bytes <= max(TABLE, ROWS) < T * TABLE // 4


@pytest.mark.parametrize("name", LOOPS)
def test_the_gradient_of_that_gradient(name: str) -> None:
    check_equal(second(LOOPS[name], "strict"), second(LOOPS[name], False), 1e-10)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("name", ["token_embedding", "token_gather", "step_row", "fed_back"])
def test_loops_of_no_step_and_of_one(name: str, steps: int) -> None:
    p, q = table(), table()
    found, expected = LOOPS[name](p, "strict", steps), LOOPS[name](q, False, steps)
    check_equal([found], [expected], 1e-12)
    if expected.requires_grad:
        grads = (torch.autograd.grad(y.square().sum(), x, allow_unused=True) for y, x in ((found, p), (expected, q)))
        check_equal(next(grads), next(grads), 1e-12)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch 2.11
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "checkpoints", "budget"])
def test_a_sparse_gradient_stays_sparse(options: dict[str, Any]) -> None:
    loop = over_tokens(lambda p, t: F.embedding(t, p, sparse=True))
    y, found = gradient(loop, "strict", largest := Largest(), **options)
    expected = gradient(loop, False, **options)
    assert found.is_sparse
    assert found._nnz() <= T * B
    check_equal([y, found.to_dense()], [expected[0], expected[1].to_dense()], 1e-11)
    assert largest.bytes <= ROWS


def test_one_sparse_gradient_of_two_tables() -> None:
    p, q = table(), table()

    def body(h: Tensor, t: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(h + F.embedding(t, p + q, sparse=True)), None

    def found(compile: Any) -> list[Tensor]:
        h, _ = tl.scan(body, torch.zeros(B, W, dtype=D), tokens(T), compile=compile, **OPTIONS[2])
        return [g.to_dense() for g in torch.autograd.grad(_weighted(h), (p, q))]

    check_equal(found("strict"), found(False), 1e-12)


def test_halves_are_added_up_in_more_bits() -> None:
    steps = 2000
    p = torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()

    def body(h: Tensor, t: Tensor) -> tuple[Tensor, None]:
        return h + p[t], None

    zeros, index = torch.zeros(1, 1, dtype=torch.bfloat16), torch.zeros(steps, 1, dtype=torch.int64)
    h, _ = tl.scan(body, zeros, index, compile="strict")
    (g,) = torch.autograd.grad(h.sum(), p)
    assert g[0].item() == 2000  # one after the other in two bytes, the sum would stop at 256


unbounded: dict[str, Read] = {
    "of_no_known_kind": lambda p, t: F.embedding_bag(t[None], p, mode="sum")[0],
    "of_one_row_for_many": lambda p, t: p.index_select(0, t).sum(0),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [("of_no_known_kind", {}), ("of_no_known_kind", {"checkpoints": 8}), ("of_one_row_for_many", {})],
)
def test_gradients_larger_than_their_rows_are_there_for_few_steps(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorloop.loop.compiled.run.looped.FREE_BYTES", 4 * TABLE)
    monkeypatch.setattr("tensorloop.loop.compiled.run.blocks.FREE_BYTES", 4 * TABLE)
    index = torch.randint(V, (T, V), generator=torch.Generator().manual_seed(4))

    def loop(p: Tensor, compile: Any) -> Tensor:
        def body(h: Tensor, t: Tensor) -> tuple[Tensor, None]:
            return torch.tanh(h.flip(-1) + unbounded[name](p, t)), None

        return tl.scan(body, torch.zeros(W, dtype=D), index, compile=compile, **options)[0]

    found = gradient(loop, "strict", largest := Largest())
    check_equal(found, gradient(loop, False), 1e-11)
    assert largest.bytes <= 8 * TABLE  # of 40 tables
