"""What bodies close over: modules, hidden tensors, results of other loops, arrays; and that it stays what it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import tensorloop as tl
from tests.support.loop_cases import Ours, Plain, cell, compare, randn, rotate, with_and_without_checkpoints


class Scale(nn.Module):
    """A parameter, and a buffer."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.register_buffer("factor", torch.tensor(1.25, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.factor


class Model(nn.Module):
    """A loop in forward, over modules reached through self."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.ModuleDict({"scale": Scale()})
        self.linear = nn.Linear(3, 4, dtype=torch.float64)
        self.unused = nn.Linear(2, 2)

    def forward(self, loops: Any, init: Tensor, xs: Tensor) -> Any:
        def body(carry: Tensor, x: Tensor) -> Any:
            carry = rotate(self.inner["scale"](carry)) + self.linear(x)
            return carry, carry.tanh()

        return loops.scan(body, init, xs)


@with_and_without_checkpoints
@pytest.mark.parametrize("grad_of_init", [False, True])
def test_parameters_and_buffers_of_modules(grad_of_init: bool, checkpoints: Any) -> None:
    def grads(loops: Any) -> list[Tensor | None]:
        model = Model()
        init, xs = randn(4, grad=grad_of_init), randn(5, 3, grad=False)
        carry, ys = model(loops, init, xs)
        (carry.sin().sum() + ys.sum()).backward()
        return [init.grad, *(p.grad for p in model.parameters())]

    ours, true = grads(Ours(checkpoints)), grads(Plain())
    assert [g is None for g in ours] == [g is None for g in true]
    torch.testing.assert_close([g for g in ours if g is not None], [g for g in true if g is not None])


@with_and_without_checkpoints
@pytest.mark.parametrize("part", ["carry", "ys"])
def test_the_weight_gradients_of_nn_rnn(part: str, checkpoints: Any) -> None:
    torch.manual_seed(0)
    rnn = nn.RNN(3, 4, dtype=torch.float64)
    xs, init = randn(6, 2, 3, grad=False), torch.zeros(2, 4, dtype=torch.float64)
    names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    w_in, w_rec, b_in, b_rec = (weights := [getattr(rnn, name) for name in names])

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(x @ w_in.T + b_in + h @ w_rec.T + b_rec)
        return h, h

    carry, ys = tl.scan(body, init, xs, checkpoints=checkpoints)
    true_ys, true_carry = rnn(xs)
    chosen, true = (carry, true_carry[0]) if part == "carry" else (ys, true_ys)
    torch.testing.assert_close(chosen, true)
    torch.testing.assert_close(grad(chosen.cos().sum(), weights), grad(true.cos().sum(), weights))


class Callable_:
    """A callable object that holds a tensor in a list in a dict."""

    def __init__(self, w: Tensor) -> None:
        self.held = {"w": [w, 2]}

    def __call__(self, c: Tensor) -> Tensor:
        w, n = self.held["w"]
        return c * w * n


def helper(c: Tensor, w: Tensor) -> Tensor:
    return rotate(c) * w


class Twice(torch.autograd.Function):
    """A function with a derivative of its own; its tensors are seen by no torch function before apply."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return 2 * a * b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return 2 * grads[0] * b, 2 * grads[0] * a


HIDDEN: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "cell": lambda w: lambda c: c * w,
    "dict": lambda w: (lambda d: lambda c: c * d["a"][0][1])({"a": [(1, w)]}),
    "default": lambda w: lambda c, held=w: c * held,
    "inner function": lambda w: lambda c: (lambda: c * w)(),
    "callable object": lambda w: Callable_(w),
    "helper": lambda w: lambda c: helper(c, w),
    "partial": lambda w: __import__("functools").partial(helper, w=w),
    "generator": lambda w: lambda c: sum((c * v for v in (w, w)), torch.zeros(4)),
    "list of tensors": lambda w: lambda c: torch.stack([c, w, w]).prod(0),
    "keyword": lambda w: lambda c: torch.mul(input=c, other=w),
    "operator": lambda w: lambda c: 1.5 - w / 2 + c,
    "method": lambda w: w.mul,
    "view": lambda w: lambda c: c * w[None].T[:, 0],
    "einsum": lambda w: lambda c: torch.einsum("a,a->a", c, w),
    "Function": lambda w: lambda c: Twice.apply(c, w),
    "Function of it alone": lambda w: lambda c: c + Twice.apply(w, w),
    "linear": lambda w: lambda c: nn.functional.linear(c, torch.diag(w)),
    "not used with carry": lambda w: lambda c: w * 1,
    "itself": lambda w: lambda c: w,
}


@with_and_without_checkpoints
@pytest.mark.parametrize("how", HIDDEN)
def test_tensors_hidden_anywhere(how: str, checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, w: Tensor, v: Tensor) -> Any:
        leaf, made = HIDDEN[how](w), HIDDEN[how](v.sin() + 1)
        return loops.scan(lambda c, x: (rotate(leaf(c)), made(c)), init, None, 4)

    w, v = randn(4, seed=1), randn(4, seed=2)
    compare(program, randn(4), w, v, checkpoints=checkpoints)
    compare(program, randn(4, grad=False), w, v, checkpoints=checkpoints)
    compare(program, randn(4), w.detach(), v, checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("how", HIDDEN)
def test_hidden_tensors_of_which_one_is_made_from_the_other(how: str, checkpoints: Any) -> None:
    """The gradient of the later one flows on to the earlier one, once."""

    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        leaf, made = HIDDEN[how](w), HIDDEN[how](w.sin() + 1)
        return loops.scan(lambda c, x: (rotate(leaf(c)), made(c)), init, None, 4)

    compare(program, randn(4), randn(4, seed=1), checkpoints=checkpoints)
    compare(program, randn(4, grad=False), randn(4, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_captures_made_by_other_operations(checkpoints: Any) -> None:
    """Non-leaf, the result of an earlier loop, and each other's ancestors; all three count once."""

    def program(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Any:
        turned = w.T.clone()
        earlier, rows = loops.scan(cell(w), init, xs)

        def body(carry: Tensor, x: Tensor) -> Any:
            carry = rotate(carry) + x @ w + turned @ x + earlier.sin()
            return carry, (rows @ carry).sum() + w.sum()

        return loops.scan(body, init, xs), earlier, rows

    compare(program, randn(4), randn(5, 3), randn(3, 4), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_a_capture_that_is_also_an_argument(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor) -> Any:
        half = init * 0.5
        return loops.scan(lambda c, x: (rotate(c) * half + xs[0] * x, c * init + xs.sum(0)), half, xs)

    compare(program, randn(2), randn(4, 2), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_first_touched_at_a_late_step(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, w: Tensor, v: Tensor) -> Any:
        def body(i: int, c: Tensor) -> Tensor:
            return rotate(c) * (w if i == 4 else 1) + (v.sin() if i == 5 else 0)

        return loops.fori_loop(0, 6, body, init)

    compare(program, randn(2), randn(2, seed=1), randn(2, seed=2), checkpoints=checkpoints)
    compare(program, randn(2, grad=False), randn(2, seed=1), randn(2, seed=2), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_work_that_is_the_same_at_every_step(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, a: Tensor, b: Tensor) -> Any:
        return loops.fori_loop(0, 5, lambda i, c: rotate(c) * a.sin().sum() + (a @ b).cos(), init)

    compare(program, randn(2), randn(3), randn(3, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_an_array_that_the_body_reads(checkpoints: Any) -> None:
    def program(loops: Any, values: Tensor, init: Tensor) -> Any:
        array = loops.array().append(init * 2).append(values[0]).append(values[1] * init)

        def body(i: int, c: Tensor) -> Tensor:
            return rotate(c) + array[i % 3] * array.stack().sum(0) + array[:2].prod(0)

        out = loops.fori_loop(0, 5, body, init)
        array.append(out)  # the caller's own again
        return out, array.stack(), array[0] * 2

    compare(program, randn(2, 2), randn(2), checkpoints=checkpoints)
    compare(program, randn(2, 2, grad=False), randn(2, grad=False), checkpoints=checkpoints)
    compare(program, randn(2, 2), randn(2, grad=False), checkpoints=checkpoints, flags=False)


@with_and_without_checkpoints
def test_what_only_a_condition_uses_gets_no_gradient(checkpoints: Any) -> None:
    init, limit = randn(2), torch.tensor(3.5, dtype=torch.float64, requires_grad=True)
    out, steps = tl.while_loop(
        lambda c: c[1] < limit,
        lambda c: (rotate(c[0]), c[1] + 1),
        (init, 0),
        return_steps=True,
        checkpoints=checkpoints,
    )
    assert steps == 4
    assert grad(out[0].sum(), (init, limit), allow_unused=True)[1] is None
    start: Any = (init, 0)
    ys = tl.scan(
        lambda c, x: ((rotate(c[0]), c[1] + 1), c[0]), start, until=lambda c: c[1] > limit, checkpoints=checkpoints
    )[1]
    assert len(ys) == 4
    assert grad(ys.sum(), (init, limit), allow_unused=True)[1] is None


@with_and_without_checkpoints
def test_a_second_call_sees_new_values(checkpoints: Any) -> None:
    held: dict[str, Any] = {}

    def call() -> Tensor:
        return tl.fori_loop(0, 2, lambda i, c: c * held["w"] + held["n"], torch.ones(2), checkpoints=checkpoints)

    for w, n in [(2.0, 1), (3.0, 1), (3.0, 5)]:
        held.update(w=torch.full((2,), w, requires_grad=True), n=n)
        out = call()
        assert out.tolist() == [(w + n) * w + n] * 2
        (found,) = grad(out.sum(), held["w"])
        assert found.tolist() == [2 * w + n] * 2


# -- between forward and backward


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda w: w.add_(1),
    "copy_": lambda w: w.copy_(torch.zeros_like(w)),
    "item": lambda w: w.__setitem__(0, 5.0),
    "view": lambda w: w[:1].mul_(3),
    "zero_": lambda w: w.zero_(),
}


@with_and_without_checkpoints
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("which", ["weight", "constant", "made", "init", "xs"])
def test_changed_in_place_before_backward_raises_or_uses_the_forward_value(
    which: str, how: str, checkpoints: Any
) -> None:
    given: dict[str, Tensor] = {
        "weight": randn(2),
        "constant": randn(2, seed=1, grad=False),
        "init": randn(2, seed=2),
        "xs": randn(4, 2, seed=3),
    }
    given["made"] = (given["weight"] * 2 if which == "made" else given["weight"]).sin()

    def loop(checkpoints: Any) -> Tensor:
        def body(c: Tensor, x: Tensor) -> Any:
            c = rotate(c) * given["weight"] + given["constant"] * c * x
            return c, c * given["made"] * given["constant"]

        carry, ys = tl.scan(body, given["init"], given["xs"], checkpoints=checkpoints)
        return carry.sum() + ys.sum()

    wanted = [given["weight"], given["init"], given["xs"]]
    true = grad(loop(None), wanted, retain_graph=True)
    out = loop(checkpoints)
    with torch.no_grad():
        CHANGES[how](given[which])
    try:
        found = grad(out, wanted)
    except RuntimeError as error:
        assert "in place" in str(error) or "inplace" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, true)


@with_and_without_checkpoints
@pytest.mark.parametrize("kind", ["tensor", "result", "module", "array", "array of results"])
def test_a_name_that_is_rebound_before_backward_raises_or_uses_the_forward_value(kind: str, checkpoints: Any) -> None:
    """Never silently the new one. (A number that is rebound goes unseen: docs/api/loop.md.)"""
    init = randn(2)
    linear = [nn.Linear(2, 2, dtype=torch.float64) for _ in range(2)]
    made: dict[str, Callable[[Tensor], Any]] = {
        "tensor": lambda out: randn(2, seed=2),
        "result": lambda out: out * 2,
        "module": lambda out: linear[1],
        "array": lambda out: tl.TensorArray().append(init * 3),
        "array of results": lambda out: tl.TensorArray().append(out),
    }
    first = linear[0] if kind == "module" else randn(2, seed=1)
    w: Any = tl.TensorArray().append(init * 2) if kind.startswith("array") else first
    calls = list[int]()

    @tl.loop.pure
    def count() -> None:
        calls.append(1)
        assert len(calls) < 100, "endless recursion"

    def body(i: int, c: Tensor) -> Tensor:
        count()
        return rotate(w(c) if kind == "module" else c * (w[0] if kind.startswith("array") else w))

    (true,) = grad(tl.fori_loop(0, 4, body, init).sum(), init, retain_graph=True)
    out = tl.fori_loop(0, 4, body, init, checkpoints=checkpoints)
    w = made[kind](out)
    try:
        (found,) = grad(out.sum(), init)
    except RuntimeError as error:
        expected = ("did not", "same tensors", "the variable w, which the body uses, was Linear")
        assert any(x in str(error) for x in expected)  # noqa: PT017
    else:
        torch.testing.assert_close(found, true)


@with_and_without_checkpoints
def test_an_array_written_before_backward_stays_what_the_body_read(checkpoints: Any) -> None:
    values, init = randn(3, 2), randn(2)

    def run(late: bool) -> tuple[Tensor, ...]:
        array = tl.TensorArray().extend([x * 2 for x in values])
        out = tl.fori_loop(
            0, 3, lambda i, c: rotate(c) * array.stack().sum(0) + array[i], init, checkpoints=checkpoints
        )
        if late:
            array[0] = init * 0
            array.append(init)
            array.stack()
        return grad(out.sum(), (values, init))

    torch.testing.assert_close(run(True), run(False))


@with_and_without_checkpoints
@pytest.mark.parametrize("change", [lambda w: w.add_(1), lambda w: w.mul_(2)], ids=["add", "mul"])
def test_a_weight_changed_by_a_loop_during_the_loop_is_refused(
    change: Callable[[Tensor], Any], checkpoints: Any
) -> None:
    """Autograd's own rule for plain loops: the step before needs the value that is gone."""
    w, init = randn(2), randn(2, seed=1)

    def body(i: int, c: Tensor) -> Tensor:
        c = rotate(c) * w
        with torch.no_grad():
            change(w)
        return c

    with pytest.raises(RuntimeError, match=r"in.?place"):
        grad(tl.fori_loop(0, 3, body, init, checkpoints=checkpoints).sum(), init)


# -- buffers that the body changes


@with_and_without_checkpoints
@pytest.mark.parametrize("where", ["body", "cond"])
def test_a_counter_counts_real_steps_once_and_in_order(where: str, checkpoints: Any) -> None:
    counter, log, init = torch.zeros((), dtype=torch.int64), torch.zeros(6, dtype=torch.int64), randn(2)

    def count() -> None:
        log[int(counter)] = counter + 10
        counter.add_(1)

    def cond(c: Any) -> bool:
        if where == "cond":
            count()
        return c[1] < 5

    def body(c: Any) -> Any:
        if where == "body":
            count()
        return rotate(c[0]) * (1 + c[0].sin()), c[1] + 1

    out, _ = tl.while_loop(cond, body, (init, 0), checkpoints=checkpoints)
    n = 5 if where == "body" else 6
    found = init
    for _ in range(2):
        assert counter.item() == n
        assert log.tolist() == [10, 11, 12, 13, 14, 15 if n == 6 else 0]
        (found,) = grad(out.sum(), init, retain_graph=True)
    true = init
    for _ in range(5):
        true = rotate(true) * (1 + true.sin())
    torch.testing.assert_close(found, grad(true.sum(), init)[0])


@with_and_without_checkpoints
def test_a_buffer_that_feeds_back_is_put_back(checkpoints: Any) -> None:
    """The values that each step saw are those of the replay; afterwards the buffer is what the loop left."""
    init, w = randn(2), randn(2, seed=1)

    def run(loop: Callable[..., Any]) -> tuple[Any, ...]:
        average = torch.full((2,), 0.5, dtype=torch.float64)

        def body(i: int, c: Tensor) -> Tensor:
            average.lerp_(c.detach(), 0.3)
            return rotate(c) * w + c * average.clone()

        out = loop(0, 6, body, init)
        before = average.clone()
        grads = grad(out.sum(), (init, w), retain_graph=True)
        again = grad(out.sum(), (init, w))
        torch.testing.assert_close(grads, again)
        assert torch.equal(average, before)
        return out, before, *grads

    ours = run(lambda *args: tl.fori_loop(*args, checkpoints=checkpoints))
    torch.testing.assert_close(ours, run(Plain().fori_loop))


@with_and_without_checkpoints
def test_batch_norm_in_training_updates_its_statistics_once_a_step(checkpoints: Any) -> None:
    init = randn(5, 4)

    def run(loops: Any) -> list[Any]:
        norm = nn.BatchNorm1d(4, dtype=torch.float64)
        carry, ys = loops.scan(lambda c, x: (rotate(norm(c)) + c, c), init, None, 5)
        grads = grad(carry.square().sum() + ys.sin().sum(), (init, *norm.parameters()))
        return [carry, *grads, norm.running_mean, norm.running_var, norm.num_batches_tracked]

    torch.testing.assert_close(run(Ours(checkpoints)), run(Plain()))
