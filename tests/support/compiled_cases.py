"""What the tests of compiled loops share: bodies of many kinds, and a comparison of each with the eager loop.

One list, however long: every test draws from all of it. A case is a function of a dtype that gives a `Case`: made anew,
from the same numbers, for each run.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tensorloop as tl

B, F, H, T = 3, 5, 4, 7


@dataclasses.dataclass
class Case:
    """A loop: what it is called with, and the tensors that its body closes over."""

    body: Callable[..., Any]
    init: Any
    xs: Any = None
    captures: Sequence[Tensor] = ()
    loop: str = "scan"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    only: str = ""  # "carry" or "ys": what the loss is made of

    def run(self, compile: Any) -> tuple[Any, Any]:
        """(carry, ys) of the loop."""
        options = self.options | {"compile": compile}
        if self.loop == "scan":
            return tl.scan(self.body, self.init, self.xs, **options)
        if self.loop == "map":
            return None, tl.map(self.body, self.xs, **options)
        if self.loop == "fori_loop":
            return tl.fori_loop(3, 3 + T, self.body, self.init, **options), None
        cond = options.pop("cond")
        return tl.while_loop(cond, self.body, self.init, return_steps=True, **options)

    def leaves(self) -> list[Tensor]:
        """The tensors that get gradients."""
        found = [x for x in tree_leaves((self.init, self.xs, list(self.captures))) if isinstance(x, Tensor)]
        return [x for x in found if x.requires_grad]


CASES: dict[str, Callable[[torch.dtype], Case]] = {}


def case(make: Callable[[torch.dtype], Case]) -> Callable[[torch.dtype], Case]:
    """Puts a case into the table."""
    CASES[make.__name__] = make
    return make


def leaf(dtype: torch.dtype, *shape: int, scale: float = 0.4) -> Tensor:
    """Small numbers that want a gradient."""
    return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def rotation(dtype: torch.dtype) -> Tensor:
    """(H, H): a body that multiplies by it does not contract."""
    angle = torch.tensor(0.3, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    return torch.block_diag(turn, turn).to(dtype).requires_grad_()


@case
def lstm(d: torch.dtype) -> Case:
    W, U, b = leaf(d, F, 4 * H), leaf(d, H, 4 * H), leaf(d, 4 * H)

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, c = state
        i, f, g, o = (x @ W + h @ U + b).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h

    return Case(body, (leaf(d, B, H), leaf(d, B, H)), leaf(d, T, B, F), [W, U, b])


@case
def lstm_cell(d: torch.dtype) -> Case:
    cell = nn.LSTMCell(F, H).to(d)

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, c = cell(x, state)
        return (h, c), h

    return Case(body, (leaf(d, B, H), leaf(d, B, H)), leaf(d, T, B, F), [*cell.parameters()])


@case
def gru_cell_backwards(d: torch.dtype) -> Case:
    cell = nn.GRUCell(F, H).to(d)

    def body(h: Tensor, x: Tensor) -> Any:
        h = cell(x, h)
        return h, h * 2

    return Case(body, leaf(d, B, H), leaf(d, T, B, F), [*cell.parameters()], options={"reverse": True})


@case
def tanh_where(d: torch.dtype) -> Case:
    W, U = leaf(d, F, H), rotation(d)

    def body(h: Tensor, row: tuple[Tensor, Tensor]) -> Any:
        x, mask = row
        h = torch.where(mask[:, None], torch.tanh(x @ W + h @ U), h)
        return h, h

    return Case(body, leaf(d, B, H), (leaf(d, T, B, F), torch.rand(T, B) > 0.3), [W, U])


@case
def layer_norm_rnn(d: torch.dtype) -> Case:
    norm, linear, U = nn.LayerNorm(H).to(d), nn.Linear(F, H).to(d), rotation(d)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(norm(linear(x) + h @ U))
        return h, h.logsumexp(-1)

    return Case(body, leaf(d, B, H), leaf(d, T, B, F), [U, *norm.parameters(), *linear.parameters()])


@case
def runge_kutta(d: torch.dtype) -> Case:
    a, k = rotation(d), leaf(d)

    def f(x: Tensor) -> Tensor:
        return torch.sin(x @ a) * k - x

    def body(x: Tensor, _: None) -> Any:
        k1 = f(x)
        k2 = f(x + 0.05 * k1)
        k3 = f(x + 0.05 * k2)
        k4 = f(x + 0.1 * k3)
        return x + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return Case(body, leaf(d, B, H), None, [a, k], options={"length": T})


@case
def attention(d: torch.dtype) -> Case:
    memory, W, U = leaf(d, B, 6, H), leaf(d, H, H), leaf(d, F, H)

    def body(h: Tensor, x: Tensor) -> Any:
        weights = torch.einsum("bh,bmh->bm", h @ W, memory).softmax(-1)
        h = torch.tanh(torch.einsum("bm,bmh->bh", weights, memory) + x @ U)
        return h, weights

    return Case(body, leaf(d, B, H), leaf(d, T, B, F), [memory, W, U])


@case
def crf(d: torch.dtype) -> Case:
    A = leaf(d, H, H)

    def body(alpha: Tensor, e: Tensor) -> Any:
        return torch.logsumexp(alpha[:, :, None] + A, 1) + e, None

    return Case(body, leaf(d, B, H), leaf(d, T, B, H), [A])


@case
def kalman(d: torch.dtype) -> Case:
    A, C = rotation(d), leaf(d, 1, H)
    Q, R = torch.eye(H, dtype=d), torch.eye(1, dtype=d)

    def body(state: tuple[Tensor, Tensor], z: Tensor) -> Any:
        m, P = state
        m, P = A @ m, A @ P @ A.T + Q
        S = C @ P @ C.T + R
        K = P @ C.T / S
        e = z - C @ m
        return (m + K @ e, P - K @ C @ P), (e * e).sum()

    return Case(body, (leaf(d, H), torch.eye(H, dtype=d)), leaf(d, T, 1), [A, C])


@case
def iir(d: torch.dtype) -> Case:
    b, a = leaf(d, 3), leaf(d, 2)

    def body(s: Tensor, x: Tensor) -> Any:
        y = b[0] * x + s[0]
        return torch.stack([b[1] * x - a[0] * y + s[1], b[2] * x - a[1] * y]), y

    return Case(body, leaf(d, 2, B), leaf(d, T, B), [b, a])


@case
def adam(d: torch.dtype) -> Case:
    rate = leaf(d)

    def body(state: tuple[Tensor, ...], batch: tuple[Tensor, Tensor]) -> Any:
        (w, m, v, t), (x, y) = state, batch
        g = x.T @ (x @ w - y)
        m, v, t = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g, t + 1
        w = w - rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-3)
        return (w, m, v, t), (w * w).sum()

    zeros = torch.zeros(F, dtype=d)
    xs = torch.randn(T, B, F, dtype=d), torch.randn(T, B, dtype=d)
    return Case(body, (leaf(d, F), zeros, zeros, torch.zeros((), dtype=d)), xs, [rate])


@case
def min_gru(d: torch.dtype) -> Case:
    W, V = leaf(d, F, H), leaf(d, F, H)

    def body(h: Tensor, x: Tensor) -> Any:
        z = torch.sigmoid(x @ W)
        h = (1 - z) * h + z * (x @ V)
        return h, h

    return Case(body, leaf(d, B, H), leaf(d, T, B, F), [W, V])


@case
def viterbi(d: torch.dtype) -> Case:
    A = leaf(d, H, H)

    def body(s: Tensor, e: Tensor) -> Any:
        best, i = (s[:, :, None] + A).max(1)
        s = best + e
        return s, i

    return Case(body, leaf(d, B, H), leaf(d, T, B, H), [A])


@case
def tokens_and_counts(d: torch.dtype) -> Case:
    W = leaf(d, 10, H)

    def body(state: tuple[Tensor, Tensor], token: Tensor) -> Any:
        h, n = state
        h, n = torch.tanh(h + W[token]), n + (token > 3).long()
        return (h, n), (n, h.sum(), 3.0, None)

    return Case(body, (leaf(d, B, H), torch.zeros(B, dtype=torch.int64)), torch.randint(0, 10, (T, B)), [W])


@case
def embedding(d: torch.dtype) -> Case:
    table, U = nn.Embedding(10, H).to(d), rotation(d)

    def body(h: Tensor, token: Tensor) -> Any:
        h = torch.sin(h @ U + table(token))
        return h, h

    return Case(body, leaf(d, B, H), torch.randint(0, 10, (T, B)), [table.weight, U])


@case
def last_state_alone(d: torch.dtype) -> Case:
    U = rotation(d)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.sin(h @ U) + x
        return h, (h, h * 2)

    return Case(body, leaf(d, B, H), leaf(d, T, B, H), [U], only="carry")


@case
def outputs_alone(d: torch.dtype) -> Case:
    U = rotation(d)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.sin(h @ U) + x
        return h, (h, x)

    return Case(body, leaf(d, B, H), leaf(d, T, B, H), [U], only="ys")


@case
def along_another_dim(d: torch.dtype) -> Case:
    W = leaf(d, F, H)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.sin(h + x @ W)
        return h, h * 1

    return Case(body, leaf(d, B, H), leaf(d, B, T, F), [W], options={"dim": 1})


@case
def writes_in_place(d: torch.dtype) -> Case:
    W = leaf(d, F, H)

    def body(h: Tensor, x: Tensor) -> Any:
        h.mul_(0.5)
        h.add_(x @ W)
        return h.sin(), h.clone()

    return Case(body, leaf(d, B, H), leaf(d, T, B, F), [W])


@case
def writes_into_zeros(d: torch.dtype) -> Case:
    k = leaf(d)

    def body(h: Tensor, x: Tensor) -> Any:
        new = torch.zeros_like(h)
        new[:, 0] = h[:, 1] * k
        new[:, 1:] = h[:, :-1] + x[:, 1:H]
        scaled = torch.ones_like(h)
        scaled[:, 1:] *= x[:, 1:H]
        return new, scaled.mul_(h)

    return Case(body, leaf(d, B, H), leaf(d, T, B, F), [k])


@case
def until(d: torch.dtype) -> Case:
    U = rotation(d)

    def body(h: Tensor, x: Tensor) -> Any:
        h = h @ U + x.abs() + 0.3
        return h, h

    return Case(body, torch.zeros(B, H, dtype=d), leaf(d, T, B, H), [U], options={"until": lambda h: h.norm() > 3.0})


@case
def swap(d: torch.dtype) -> Case:
    def body(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        a, b = state
        return (b, a * x), (a, b)

    return Case(body, (leaf(d, B), leaf(d, B)), leaf(d, T, B))


@case
def gelu_and_log_softmax(d: torch.dtype) -> Case:
    W, a, b = leaf(d, F, H), nn.Linear(H, H).to(d), nn.Linear(H, 9).to(d)

    def body(h: Tensor, x: Tensor) -> Any:
        h = nn.functional.gelu(a(h)) + x @ W
        return h, nn.functional.log_softmax(b(torch.relu(h)), -1)

    return Case(body, leaf(d, B, H), leaf(d, T, B, F), [W, *a.parameters(), *b.parameters()])


@case
def unbatched(d: torch.dtype) -> Case:
    W, U = leaf(d, H, F), rotation(d)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.sin(U @ h + W @ x)
        return h, h.dot(h)

    return Case(body, leaf(d, H), leaf(d, T, F), [W, U])


@case
def hidden_markov(d: torch.dtype) -> Case:
    A, E = leaf(d, H, H), leaf(d, H, 6)

    def body(alpha: Tensor, seen: Tensor) -> Any:
        alpha = (alpha @ A.softmax(-1)) * E.softmax(-1).t()[seen]
        total = alpha.sum(-1, keepdim=True)
        return alpha / total, total.log().squeeze(-1)

    start = torch.full((B, H), 1 / H, dtype=d)
    return Case(body, start, torch.randint(0, 6, (T, B)), [A, E])


@case
def moving_average(d: torch.dtype) -> Case:
    rate = leaf(d, H)

    def body(m: Tensor, x: Tensor) -> Any:
        keep = torch.sigmoid(rate)
        m = keep * m + (1 - keep) * x
        return m, m

    return Case(body, leaf(d, B, H), leaf(d, T, B, H), [rate])


@case
def numbered(d: torch.dtype) -> Case:
    U, data = rotation(d), leaf(d, 20, H)

    def body(i: int, h: Tensor) -> Tensor:
        h = torch.sin(h @ U) * (i + 1) / (2 * i + 3) + torch.select(data, 0, i + 2) * 0.9**2
        return torch.where(h > i - 5, h, h * 2)

    return Case(body, leaf(d, B, H), None, [U, data], "fori_loop")


@case
def not_numbered(d: torch.dtype) -> Case:
    U = rotation(d)
    return Case(lambda i, h: torch.sin(h @ U), leaf(d, B, H), None, [U], "fori_loop")


@case
def while_one(d: torch.dtype) -> Case:
    U = rotation(d)

    def body(state: tuple[Tensor, Tensor]) -> Any:
        h, n = state
        return torch.sin(h @ U + 0.1), n + 1

    options = {"cond": lambda state: state[1] < 150}
    return Case(body, (leaf(d, B, H), torch.zeros((), dtype=d)), None, [U], "while_loop", options)


@case
def while_rows(d: torch.dtype) -> Case:
    U, limit = rotation(d), torch.tensor([3, 90, 0])

    def body(state: tuple[Tensor, Tensor, Tensor]) -> Any:
        h, n, shared = state
        return torch.sin(h @ U + h) + 0.1 * shared.sin(), n + 1, shared + 1.0

    init = leaf(d, B, H), torch.zeros(B, dtype=torch.int64), torch.zeros((), dtype=d)
    return Case(body, init, None, [U], "while_loop", {"cond": lambda state: state[1] < limit})


@case
def while_rows_near_a_pole(d: torch.dtype) -> Case:
    """Where a row has stopped, its next step would have no finite gradient."""

    def body(h: Tensor) -> Tensor:
        return (h - 1).sqrt() * math.sqrt(2.0)

    init = torch.tensor([3.0, 9.0, 41.0], dtype=d).requires_grad_()
    return Case(body, init, None, [], "while_loop", {"cond": lambda h: h > 2.5, "max_steps": 9})


@case
def while_rows_cut_short(d: torch.dtype) -> Case:
    loop = while_rows(d)
    loop.options["max_steps"] = 5
    return loop


@case
def while_one_cut_short(d: torch.dtype) -> Case:
    loop = while_one(d)
    loop.options["max_steps"] = 70
    return loop


@case
def mapped(d: torch.dtype) -> Case:
    W = leaf(d, F, H)
    return Case(lambda x: (torch.tanh(x @ W), x.sum()), None, leaf(d, T, B, F), [W], "map")


def outcome(
    make: Callable[[torch.dtype], Case], dtype: torch.dtype, compile: Any, **options: Any
) -> tuple[list[Tensor], list[Any]]:
    """(what the loop gives, the gradients of a loss of it)."""
    torch.manual_seed(0)
    loop = make(dtype)
    loop.options |= options
    carry, ys = loop.run(compile)
    asked = {"": (carry, ys), "carry": carry, "ys": ys}[loop.only]
    outputs = [x for x in tree_leaves(asked) if isinstance(x, Tensor)]
    torch.manual_seed(1)
    terms = [(x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in outputs if x.requires_grad]
    leaves = loop.leaves()
    grads = torch.autograd.grad(torch.stack(terms).sum(), leaves, allow_unused=True) if leaves and terms else ()
    return [x for x in tree_leaves((carry, ys)) if isinstance(x, Tensor)], list(grads)


def bytes_kept(loop: Case, compile: Any) -> int:
    """What autograd keeps for a backward pass, each memory once, without what the loop was given."""
    given = {x.untyped_storage().data_ptr() for x in loop.leaves()}
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = loop.run(compile)
    kept = sum(x.untyped_storage().nbytes() for pointer, x in found.items() if pointer not in given)
    del result
    return kept


def check_equal(found: Sequence[Any], expected: Sequence[Any], tolerance: float) -> None:
    """The same numbers, as far as rounding goes."""
    for x, y in zip(found, expected, strict=True):
        if x is None or y is None:
            assert all(z is None or not z.any() for z in (x, y))
            continue
        assert (x.shape, x.dtype, x.requires_grad) == (y.shape, y.dtype, y.requires_grad)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
