"""What bodies write with the number of a step and the length of an array: native and right, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop import TensorArray

D, T = 4, 6
Read = Callable[[Tensor, TensorArray], Tensor]


def leaf(*shape: int) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * 0.5).requires_grad_()


torch.manual_seed(0)
W, X, ROWS, DEEP, BETA = leaf(D, D), leaf(D, T + 2), leaf(T + 2, D), leaf(2, T + 2, D), leaf()
TABLE, BIAS = leaf(40, D), leaf(40)
LEAVES = [W, X, ROWS, DEEP, BETA, TABLE, BIAS]


def new(h: Tensor) -> Tensor:
    return torch.tanh(h @ W)


def compare(run: Callable[[Any], Any], second: bool = False) -> None:
    """A compiled loop gives what the eager one does, and its gradients."""
    outcomes = []
    for compile in (False, "strict"):
        found = [x.stack() if isinstance(x, TensorArray) else x for x in tree_leaves(run(compile))]
        floats = [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]
        loss = torch.stack([(x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in floats]).sum()
        grads: Any = ()
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, LEAVES, create_graph=second, allow_unused=True)
        if second:
            more = torch.stack([g.sin().sum() for g in grads if g is not None]).sum()
            grads = (*grads, *torch.autograd.grad(more, LEAVES, allow_unused=True))
        outcomes.append((found, grads))
    torch.testing.assert_close(*outcomes, rtol=1e-9, atol=1e-11)


def refused(run: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{reason}[^\0]* Cure: (?!set compile=False)"):
        run("strict")


# -- the number of a step


def h_and(*shape: int) -> Any:
    return lambda: (torch.ones(D, dtype=torch.float64), torch.ones(*shape, dtype=torch.float64))


def only_h() -> Any:
    return torch.ones(D, dtype=torch.float64)


def writes(write: Callable[[Tensor, Any, Tensor], Any]) -> Callable[[Any, Any], Any]:
    def body(i: Any, carry: Any) -> Any:
        h, c = carry[0], carry[1].clone()
        write(c, i, new(carry[0]))
        return new(h) + c.sum() * 0.01, c

    return body


def reads(read: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda i, h: torch.tanh(h @ W + read(i))


def times(factor: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda i, h: new(h) * factor(i)


def put(c: Tensor, index: Any, v: Any) -> None:
    c[index] = v


def add_to(c: Tensor, index: Any, v: Any) -> None:
    c[index] += v


CUT = "a slice whose shape depends on i"
# name: (body, init, what refuses it)
NUMBERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[], Any], str]] = {
    "c[i] = v": (writes(lambda c, i, v: put(c, i, v)), h_and(T + 1, D), ""),
    "c[i] += v": (writes(lambda c, i, v: add_to(c, i, v)), h_and(T + 1, D), ""),
    "c[:, i] = v": (writes(lambda c, i, v: put(c, (slice(None), i), v)), h_and(D, T + 1), ""),
    "c[:, i] += v": (writes(lambda c, i, v: add_to(c, (slice(None), i), v)), h_and(D, T + 1), ""),
    "X[..., i]": (reads(lambda i: X[..., i]), only_h, ""),
    "X[None, :, i]": (reads(lambda i: DEEP[None, :, i].sum((0, 1))), only_h, ""),
    "X[[0, 1, 2], i]": (reads(lambda i: X[[0, 1, 2], i].sum()), only_h, ""),
    "X[:, i:i + 1]": (reads(lambda i: X[:, i : i + 1].squeeze(1)), only_h, ""),
    "X[:, :i]": (reads(lambda i: X[:, :i].sum(1)), only_h, CUT),
    ".9 ** i": (times(lambda i: 0.9**i), only_h, ""),
    "beta ** (i + 1)": (times(lambda i: BETA.sigmoid() ** (i + 1)), only_h, ""),
}
MORE: dict[str, tuple[Callable[[Any, Any], Any], Callable[[], Any], str]] = {
    "a write to a view": (writes(lambda c, i, v: [c[i].add_(v)]), h_and(T + 1, D), ""),
    "a write to a part of a view": (writes(lambda c, i, v: [c[i][1:3].mul_(v[1:3])]), h_and(T + 1, D), ""),
    "c[i, 1:3] = v": (writes(lambda c, i, v: put(c, (i, slice(1, 3)), v[1:3])), h_and(T + 1, D), ""),
    "c[i, i % 3] += v": (writes(lambda c, i, v: add_to(c, (i, i % 3), v.sum())), h_and(T + 1, D), ""),
    "c[i][i % 3] = v": (writes(lambda c, i, v: put(c[i], i % 3, v.sum())), h_and(T + 1, D), ""),
    "c[i:i + 2] += v": (writes(lambda c, i, v: add_to(c, slice(i, i + 2), v)), h_and(T + 1, D), ""),
    "c[i - 2] = c[i - 1]": (writes(lambda c, i, v: put(c, i - 2, c[i - 1].clone() * v)), h_and(T + 1, D), ""),
    "c.t()[:, i] = v": (writes(lambda c, i, v: put(c.t(), (slice(None), i), v)), h_and(T + 1, D), ""),
    "c[i] = i": (writes(lambda c, i, v: put(c, i, i)), h_and(T + 1, D), ""),
    "c[2] = i / 2": (writes(lambda c, i, v: put(c, 2, i / 2)), h_and(T + 1, D), ""),
    "c[i][v > 0] = 0": (writes(lambda c, i, v: put(c[i], v > 0, 0.0)), h_and(T + 1, D), ""),
    "X[:, i:i + 3:2]": (reads(lambda i: X[:, i : i + 3 : 2].sum(1)), only_h, ""),
    "narrow": (reads(lambda i: X.narrow(1, i, 2).sum(1)), only_h, "needs i, the number of the step"),
    "cut short": (reads(lambda i: X[:, i : i + 5].sum(1)), only_h, "is not whole at every step"),
    "from the end": (reads(lambda i: X[:, i - 1 : i + 1].sum(1)), only_h, "is not whole at every step"),
    "a mask": (reads(lambda i: torch.where(torch.arange(T + 2) < i, X, 0.0).sum(1)), only_h, ""),
    "tensor(i)": (times(lambda i: torch.tensor(i) + torch.as_tensor(i, dtype=torch.float64)), only_h, ""),
    "1 / (i + 1)": (times(lambda i: 1 / (i + 1)), only_h, ""),
    "(i + 1) ** .5": (times(lambda i: (i + 1) ** 0.5), only_h, ""),
    "powers": (times(lambda i: i * i * 0.01 + 2**i * 0.1 + (i - 2) ** 2 * (-1) ** i), only_h, ""),
    "Adam": (times(lambda i: 0.1 / (1 - 0.9 ** (i + 1))), only_h, ""),
    "of integers": (times(lambda i: torch.arange(D) * 0.5**i + torch.tensor(3) * 0.5**i), only_h, ""),
    "of float32": (times(lambda i: torch.tensor(0.3) * 0.9**i + torch.tensor(0.3) * i), only_h, ""),
    "a comparison": (times(lambda i: 2.0 if i < 100 else 3.0), only_h, ""),
    "a pole": (times(lambda i: 1 / (i - 2.5)), only_h, "has no value at some step"),
    "large": (times(lambda i: (1.0 + 2 ** (13 * i)) * 1e-18), only_h, "or too large a one"),
}


def of_number(name: str) -> Callable[[Any], Any]:
    body, init, _ = {**NUMBERS, **MORE}[name]
    return lambda compile: tl.fori_loop(0, T, body, init(), compile=compile)


@pytest.mark.parametrize("name", [*NUMBERS, *MORE])
def test_the_number_of_a_step_is_used_as_pythons_ints_are(name: str):
    reason = {**NUMBERS, **MORE}[name][2]
    if reason:
        refused(of_number(name), reason)
        with pytest.warns(tl.loop.NotCompiledWarning, match=reason):
            of_number(name)(True)
    else:
        compare(of_number(name))


@pytest.mark.parametrize("name", ["c[i] += v", "c[:, i] = v", "X[:, i:i + 1]", ".9 ** i", "X[..., i]"])
def test_second_derivatives_by_the_number_of_a_step(name: str):
    compare(of_number(name), second=True)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_loops_of_any_length_from_any_number(steps: int):
    body, init, _ = NUMBERS["c[i] += v"]
    for lower in (0, 1, -2):
        compare(lambda compile, lower=lower: tl.fori_loop(lower, lower + steps, body, init(), compile=compile))
    with pytest.raises(IndexError):
        tl.fori_loop(T, T + 2, body, init(), compile="strict")


def test_a_part_taken_before_its_tensor_is_written_to_is_not_looked_at():
    def body(i: Any, carry: Any) -> Any:
        c = carry[1].clone()
        row, other = c[i], c[i - 1]
        c[i] = new(carry[0])
        return carry[0] + other + row, c

    def run(compile: Any) -> Any:
        return tl.fori_loop(0, T, body, h_and(T + 1, D)(), compile=compile)

    refused(run, "looks at a part that it took by i")
    with pytest.warns(tl.loop.NotCompiledWarning, match="looks at a part"), torch.no_grad():
        found = run(True)
    with torch.no_grad():
        torch.testing.assert_close(found, run(False))


def test_ints_that_count_in_a_carry_index_and_are_powers():
    def body(carry: Any, x: Any) -> Any:
        h, c, k = carry
        c = c.clone()
        c[k] += new(h) * 0.9**k
        return (h + c[k - 1] + ROWS[k], c, k + 1), h

    compare(lambda compile: tl.scan(body, (*h_and(T + 1, D)(), 1), length=T, compile=compile))


# -- counters of loops with a condition


def counts(h: Tensor, k: int) -> tuple[Tensor, int]:
    return new(h) * 0.9**k + ROWS[k % 3], k + 1


CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda c: c[0].norm() < 1e9,
    "an int": lambda c: c[1] < 5,
    "an int and a value": lambda c: c[1] < 5 and float(c[0].norm()) < 1e9,
    "an int in a tensor": lambda c: (c[0].norm() < 1e9) & (c[1] < 5),
    "a product": lambda c: c[0].norm() * 0 + c[1] < 5,
    "a tensor of an int": lambda c: torch.tensor(c[1]) < 5,
}


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_python_counter_in_a_while_loop(name: str, checkpoints: int | None):
    numbers = []

    def run(compile: Any) -> Any:
        h, k = tl.while_loop(
            CONDITIONS[name], lambda c: counts(*c), (only_h(), 0), max_steps=7, checkpoints=checkpoints, compile=compile
        )
        numbers.append(k)
        return h

    compare(run)
    assert numbers == [7 if name == "a tensor" else 5] * 2
    assert all(type(k) is int for k in numbers)


def test_a_counter_and_a_branch_in_a_while_loop():
    def body(carry: Any) -> Any:
        h, k = carry
        return (new(h) if k < 3 else h * BETA) * 0.5**k, k + 2

    compare(lambda compile: tl.while_loop(lambda c: c[0].norm() > 0.05, body, (only_h(), 1), compile=compile))


def test_counters_that_are_refused():
    def run(compile: Any) -> Any:
        rows = torch.ones(3, D, dtype=torch.float64)
        return tl.while_loop(
            lambda c: c[0].norm(dim=-1) > 0.1, lambda c: (c[0] * 0.5, c[1] + 1), (rows, 0), compile=compile
        )

    refused(run, r"carry\[1\] is a Python int that changes .* as torch.tensor\(0\)|carry\[1\]")
    grows = {"k": lambda c: (c[0] * 1.1 ** c[1], c[1] + 1)}
    refused(
        lambda c: tl.while_loop(lambda c: c[0].norm() < 9, grows["k"], (only_h(), 0), compile=c), "no value at some"
    )


# -- the length of an array


def places(a: TensorArray) -> Tensor:
    return torch.arange(len(a))


def back(a: TensorArray) -> Tensor:
    return len(a) - 1 - torch.arange(len(a))


def attends(h: Tensor, a: TensorArray, bias: Callable[[Tensor], Tensor]) -> Tensor:
    k = a.stack()
    return torch.softmax(bias(k @ h), 0) @ k


def of_part(a: TensorArray) -> Tensor:
    return BIAS[: len(a)]


def write_slot(a: TensorArray, h: Tensor) -> Tensor:
    c = TABLE.clone()
    c[len(a) - 1] = h
    return c.sum(0)


FLOAT, LENGTH = r"depends on the length[^\0]* torch.full\(\(\), len\(array\)\) for a float", "depends on the length"
NO_SLOT = "no slot of an array in the carry, or of what its length indexes"
# name: (what a body reads, what refuses it)
LENGTHS: dict[str, tuple[Read, str]] = {
    "arange": (lambda h, a: (places(a)[:, None] * a.stack()).sum(0) * 0.1, ""),
    "table[:n]": (lambda h, a: attends(h, a, lambda s: s + of_part(a)), ""),
    "ALiBi": (lambda h, a: attends(h, a, lambda s: s - 0.5 * back(a)), ""),
    "decay": (lambda h, a: 0.9 ** back(a).double() @ a.stack(), ""),
    "decay by a tensor": (lambda h, a: BETA.sigmoid() ** back(a) @ a.stack(), ""),
    "cumsum": (lambda h, a: a.stack().cumsum(0)[-1] * 0.1, ""),
    "relative": (lambda h, a: attends(h, a, lambda s: s + BIAS[back(a).clamp(max=3)]), ""),
    "window": (lambda h, a: attends(h, a, lambda s: s.masked_fill(places(a) < len(a) - 3, -torch.inf)), ""),
    "sines": (lambda h, a: torch.sin(places(a)[:, None] * torch.ones(D, dtype=h.dtype) / 3).sum(0) * a[-1], ""),
    "embedding": (lambda h, a: torch.nn.functional.embedding(places(a), TABLE).tanh().sum(0) + TABLE[len(a) - 1], ""),
    "all pairs": (lambda h, a: (a.stack() @ a.stack().T).sum() * h, "two sizes that follow the lengths"),
}
OTHERS: dict[str, tuple[Read, str]] = {
    "cumsum of scores": (lambda h, a: attends(h, a, lambda s: s.cumsum(0)), ""),
    "from the end": (lambda h, a: a.stack().flip(0).cumsum(0).flip(0).tanh().sum(0), ""),
    "running mean": (lambda h, a: (a.stack().cumsum(0) / (places(a) + 1)[:, None]).tanh().sum(0), ""),
    "cumsum of ints": (lambda h, a: places(a).cumsum(0).double() @ a.stack(), ""),
    "along elements": (lambda h, a: a.stack().cumsum(1).tanh().sum(0), ""),
    "arange by steps": (lambda h, a: torch.arange(2, 2 * len(a) + 2, 2).double() @ a.stack(), ""),
    "arange down": (lambda h, a: torch.arange(len(a) - 1, -1, -1).double() @ a.stack(), ""),
    "of float32": (lambda h, a: (0.9 ** torch.arange(len(a), dtype=torch.float32)).double() @ a.stack(), ""),
    "a gather": (lambda h, a: a.stack()[back(a)].tanh().sum(0), ""),
    "a scatter": (lambda h, a: BIAS.new_zeros(3, D).index_add(0, places(a) % 3, a.stack()).tanh().sum(0), ""),
    "columns": (lambda h, a: (TABLE.T[:, : len(a)] @ a.stack()).sum(0), ""),
    "a larger part": (lambda h, a: BIAS[: 3 * len(a)].sum() * h, ""),
    "two of a table": (lambda h, a: BIAS[len(a) - 1 : len(a) + 1].sum() * h, ""),
    "a tensor of the length": (lambda h, a: a.stack().sum(0) / torch.full((), len(a), dtype=h.dtype).sqrt(), ""),
    "cut short": (lambda h, a: BIAS[: len(a) + 36].sum() * h, NO_SLOT),
    "the rest": (lambda h, a: BIAS[len(a) - 1 :].sum() * h, LENGTH),
    "before the first": (lambda h, a: BIAS[len(a) - 3].sum() * h, NO_SLOT),
    "every other": (lambda h, a: BIAS[: len(a) : 2].sum() * h, LENGTH),
    "a write": (lambda h, a: write_slot(a, h), LENGTH),
    "a root": (lambda h, a: a.stack().sum(0) / len(a) ** 0.5, FLOAT),
    "a quotient": (lambda h, a: h * (1 / len(a)), FLOAT),
}


def remembers(name: str) -> Callable[[Any, Any], Any]:
    read, _ = {**LENGTHS, **OTHERS}[name]

    def body(carry: Any, x: Tensor) -> Any:
        h, a = carry
        h = torch.tanh(h @ W + x)
        a.append(h)
        h = h + read(h, a)
        return (h, a), h

    return body


def of_length(name: str, steps: int = T, **options: Any) -> Callable[[Any], Any]:
    body, xs = remembers(name), ROWS[:steps]
    return lambda compile: tl.scan(body, (only_h(), TensorArray()), xs, compile=compile, **options)


@pytest.mark.parametrize("name", [*LENGTHS, *OTHERS])
@pytest.mark.few(
    "table[:n]",
    "ALiBi",
    "decay by a tensor",
    "relative",
    "all pairs",
    "running mean",
    "from the end",
    "arange down",
    "a scatter",
    "columns",
    "cut short",
    "the rest",
    "before the first",
    "a write",
    "a quotient",
)
def test_the_length_of_an_array_is_used_as_pythons_ints_are(name: str):
    reason = {**LENGTHS, **OTHERS}[name][1]
    if reason:
        with pytest.raises(RuntimeError, match=reason):
            of_length(name)("strict")
        with pytest.warns(tl.loop.NotCompiledWarning, match=reason):
            found = of_length(name)(True)
        torch.testing.assert_close(found[1], of_length(name)(False)[1])
    else:
        compare(of_length(name))


@pytest.mark.parametrize("name", [n for n, (_, reason) in LENGTHS.items() if not reason])
def test_second_derivatives_by_the_length_of_an_array(name: str):
    compare(of_length(name), second=True)


@pytest.mark.parametrize("options", [{"checkpoints": 2}, {"steps": 1}, {"steps": 2}], ids=str)
@pytest.mark.parametrize("name", ["table[:n]", "ALiBi", "cumsum", "embedding"])
def test_lengths_with_checkpoints_and_few_steps(name: str, options: dict[str, Any]):
    compare(of_length(name, **options))


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_shared_out_among_threads(threads: int):
    def body(carry: Any, x: Tensor) -> Any:
        h, a = carry
        h = torch.tanh(h @ W + x)
        a.append(h)
        whole = a.stack() * BIAS[: len(a), None, None] + torch.arange(len(a))[:, None, None] * 0.1
        return (h + whole.cumsum(0).tanh().sum(0), a), h

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        init = torch.ones(7, D, dtype=torch.float64)
        compare(lambda compile: tl.scan(body, (init, TensorArray()), ROWS[:, None].expand(-1, 7, -1), compile=compile))
    finally:
        torch.set_num_threads(before)


# -- all of them


def test_most_of_these_bodies_are_native():
    native = 0
    for name, (body, init, reason) in NUMBERS.items():
        explained = tl.explain(lambda c, i, body=body: (body(i, c), None), init(), range(T))
        assert explained.compiled is (not reason), name
        native += "forward: one native function" in explained.text and "backward: one native" in explained.text
    for name, (_, reason) in LENGTHS.items():
        explained = tl.explain(remembers(name), (only_h(), TensorArray()), ROWS[:T])
        assert explained.compiled is (not reason), name
        native += "native function" in explained.text
    assert native == len(NUMBERS) + len(LENGTHS) - 2 >= 18
