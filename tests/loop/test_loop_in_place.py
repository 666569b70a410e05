"""Bodies that change their carry in place, as in a Python loop, and conditions, which may not where replays follow."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import tensorloop as tl
from tensorloop import reference
from tests.support.loop_cases import compare, randn, rotate, with_and_without_checkpoints

STEPS = 7


def with_weight(c: Tensor, w: Tensor, i: int) -> Tensor:
    c += w * (i + 1)
    return rotate(c)


def first_entry(c: Tensor, w: Tensor, i: int) -> Tensor:
    c[0] = 0
    return rotate(c) + (c * w).sin()


def activation(c: Tensor, w: Tensor, i: int) -> Tensor:
    return rotate(nn.ReLU(inplace=True)(c) + w)


def product(c: Tensor, w: Tensor, i: int) -> Tensor:
    return c.mul_(w.cos()).sin() + w


def through_a_view(c: Tensor, w: Tensor, i: int) -> Tensor:
    half = c.view(2, 2)[1]
    half *= w[:2]
    return rotate(c) + w


def at_a_late_step(c: Tensor, w: Tensor, i: int) -> Tensor:
    before = c.sum().sin() * w
    if i == 4:
        c[1:3].copy_(w[:2])
    return rotate(c) + before


def of_a_list(c: Tensor, w: Tensor, i: int) -> Tensor:
    torch._foreach_mul_([c], [w.cos()])  # pyright: ignore[reportPrivateImportUsage]
    return rotate(c) + w


def without_gradient(c: Tensor, w: Tensor, i: int) -> Tensor:
    with torch.no_grad():
        c.mul_(1.1)
    return rotate(c) + w


def in_both_ways(c: Tensor, w: Tensor, i: int) -> Tensor:
    """A step that also differentiates inside."""
    if c.requires_grad:
        c += grad((c.clone() * w).sin().sum(), c, create_graph=True)[0]
    return rotate(c)


BODIES = [
    *(with_weight, first_entry, activation, product, through_a_view, at_a_late_step, of_a_list, without_gradient),
    in_both_ways,
]


@with_and_without_checkpoints
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_carry_changed_in_place_has_the_gradient_of_a_python_loop(
    body: Callable[..., Tensor], checkpoints: Any
) -> None:
    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        return loops.fori_loop(0, STEPS, lambda i, c: body(c, w, i), init * 1)

    compare(program, randn(4), randn(4, seed=1), checkpoints=checkpoints)
    compare(program, randn(4, grad=False), randn(4, seed=1), checkpoints=checkpoints)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_its_second_derivative_and_a_second_backward_are_right(body: Callable[..., Tensor]) -> None:
    def derivatives(checkpoints: Any) -> list[Tensor]:
        init, w = randn(4), randn(4, seed=1)
        out = tl.fori_loop(0, STEPS, lambda i, c: body(c, w, i), init, checkpoints=checkpoints).sin().sum()
        first = grad(out, [init, w], retain_graph=True)
        again = grad(out, [init, w], create_graph=True)
        second = grad(torch.stack(again).sin().sum(), [init, w], allow_unused=True)
        assert torch.equal(init, randn(4))
        return [*first, *again, *(torch.zeros(4, dtype=torch.float64) if g is None else g for g in second)]

    true = derivatives(None)
    for checkpoints in (1, 3, STEPS):
        torch.testing.assert_close(derivatives(checkpoints), true)


def test_the_step_of_the_first_change_leaves_nothing_behind() -> None:
    """There a leaf becomes a result, of itself among others: a cycle that no collector sees."""
    w, made = randn(4), list[Any]()

    def body(i: int, c: Tensor) -> Tensor:
        made.append(weakref.ref(c))
        c += (c.sum() * w).sin()
        return rotate(c)

    out = tl.fori_loop(0, STEPS, body, randn(4), checkpoints=2)
    assert [x() for x in made] == [None] * STEPS
    assert out.requires_grad


@pytest.mark.parametrize("compact", [False, True])
def test_rows_that_stop_may_be_changed_in_place(compact: bool) -> None:
    limits = torch.tensor([2, 6, 4, 0])

    def gradients(checkpoints: Any, inner: Any = None) -> list[Tensor]:
        init, w = randn(4, 2), randn(2, seed=1)

        def body(carry: Any) -> Any:
            h, n = carry
            h += w
            return (tl.fori_loop(0, 2, lambda i, c: rotate(c.mul_(w.cos())), h, checkpoints=inner), n + 1)

        def cond(carry: Any, limits: Tensor) -> Tensor:
            return carry[1] < limits

        start = (init, torch.zeros(4, dtype=torch.int64))
        h, n = tl.while_loop(
            cond, lambda c, _: body(c), start, context=limits, compact=compact, checkpoints=checkpoints
        )
        assert n.tolist() == limits.tolist()
        return [h, *grad(h.sin().sum(), [init, w])]

    true = gradients(None)
    for checkpoints in (1, 2, 6):
        for inner in (None, 1):
            torch.testing.assert_close(gradients(checkpoints, inner), true)


def test_leaves_that_share_memory_are_refused_where_the_body_changes_them() -> None:
    """In a Python loop a change of one reaches the other; a snapshot would part them."""
    init = randn(2)

    def body(i: int, carry: Any) -> Any:
        a, _ = carry
        a += i
        return a, a

    for checkpoints in (1, 2, STEPS):
        with pytest.raises(RuntimeError, match=r"fori_loop: .* returns carry\[[01]\] and carry\[[01]\], which share"):
            tl.fori_loop(0, STEPS, body, (init, init), checkpoints=checkpoints)


@pytest.mark.parametrize("after", ["kept", "set anew"])
def test_so_are_those_without_a_gradient(after: str) -> None:
    """One becomes the other at a step, and is written into at the next."""
    weight = randn(2)

    def body(i: int, carry: Any) -> Any:
        a, b = carry
        if i == 2:
            b = a
        a += i
        total = (b * weight).detach()
        return a, (total if i > 2 and after == "set anew" else b)

    init = torch.zeros(2, dtype=weight.dtype), torch.ones(2, dtype=weight.dtype)
    for checkpoints in (1, 2, STEPS):
        with pytest.raises(RuntimeError, match=r"fori_loop: .* (returns|is given) carry\[[01]\] and carry\[[01]\]"):
            tl.fori_loop(0, STEPS, body, init, checkpoints=checkpoints)


def test_a_hook_on_a_carry_that_is_changed_in_place_is_refused_as_ever() -> None:
    def body(i: int, c: Tensor) -> Tensor:
        c += i
        if i == 3:
            c.register_hook(lambda g: g * 2)
        return rotate(c)

    with pytest.raises(RuntimeError, match="the body registered a hook on carry"):
        tl.fori_loop(0, STEPS, body, randn(2), checkpoints=2)


def test_a_closed_over_leaf_is_still_no_bodys_to_change() -> None:
    w = randn(2)

    def body(i: int, c: Tensor) -> Tensor:
        w.add_(c)
        return rotate(c)

    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        tl.fori_loop(0, STEPS, body, randn(2), checkpoints=2)


# -- conditions look


def stepped(carry: Any) -> Any:
    h, n = carry
    return (h * n).sin() + h, n + 1


def changes_from_step(first: int) -> Callable[[Any], bool]:
    def ask(carry: Any) -> bool:
        if carry[1] >= first:
            carry[1].add_(1)
        return bool(carry[1] < 5)

    return ask


@pytest.mark.parametrize("checkpoints", [1, 2, 8])
@pytest.mark.parametrize("first", [0, 3])
def test_a_condition_that_changes_the_carry_is_refused(first: int, checkpoints: int) -> None:
    """Gradients depended on K, as replays ask no condition."""
    ask, h, n = changes_from_step(first), randn(2), torch.zeros((), dtype=torch.float64)
    with pytest.raises(RuntimeError, match=rf"while_loop: cond_fn changed carry\[1\] in place at step {first}; .*copy"):
        tl.while_loop(ask, stepped, (h, n), checkpoints=checkpoints)
    assert n == 0
    with pytest.raises(RuntimeError, match=r"scan: until changed carry\[1\] in place at step [02]; .*copy"):
        tl.scan(lambda c, _: (stepped(c), None), (h, n), until=lambda c: not ask(c), checkpoints=checkpoints)
    assert torch.isfinite(tl.while_loop(ask, stepped, (h, n))[0]).all()


@pytest.mark.parametrize("compact", [False, True])
def test_a_condition_by_rows_that_changes_the_carry_is_refused(compact: bool) -> None:
    def ask(carry: Any) -> Tensor:
        carry[1].add_(1)
        return carry[1] < torch.tensor([3, 6])[: len(carry[1])]

    init = randn(2, 1), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"cond_fn changed carry\[1\] in place at step 0"):
        tl.while_loop(ask, lambda c: (c[0].sin(), c[1]), init, compact=compact, checkpoints=2)


@pytest.mark.parametrize("how", ["append", "overwrite"])
def test_a_condition_that_writes_to_a_carried_array_is_refused(how: str) -> None:
    def ask(carry: Any) -> bool:
        past = carry["past"]
        if how == "append":
            past.append(carry["h"])
        elif len(past):
            past[0] = carry["h"]
        return len(past) < 6

    def body(carry: Any) -> Any:
        return {"past": carry["past"].append(carry["h"]), "h": rotate(carry["h"])}

    start = {"past": tl.TensorArray(), "h": randn(2)}
    with pytest.raises(RuntimeError, match=r"while_loop: cond_fn wrote to carry\['past'\] in place at step [01]"):
        tl.while_loop(ask, body, start, checkpoints=2)
    with pytest.raises(RuntimeError, match=r"scan: until wrote to carry\['past'\] in place at step 0"):
        tl.scan(lambda c, _: (body(c), None), start, until=lambda c: not ask(c), checkpoints=2)


def test_a_condition_may_read_carried_arrays() -> None:
    def going(carry: Any) -> bool:
        past = carry["past"]
        return len(past) < 6 and not (len(past) and (past[-1] + past[:].sum(0) > 100).any())

    def body(carry: Any) -> Any:
        return {"past": carry["past"].append(carry["h"]), "h": rotate(carry["h"])}

    h = randn(2)
    start = {"past": tl.TensorArray(), "h": h}
    by_k = [grad(tl.while_loop(going, body, start, checkpoints=k)["h"].sum(), h)[0] for k in (None, 1, 3)]
    torch.testing.assert_close(by_k[1:], [by_k[0]] * 2)


def test_a_buffer_that_body_and_condition_change_is_refused() -> None:
    count = torch.zeros(())

    def ask(_: Tensor) -> Tensor:
        return count.add_(1) < 8

    def body(c: Tensor) -> Tensor:
        count.add_(1)
        return rotate(c) * count.cos()

    message = r"cond_fn changed a tensor of shape \(\) .*, which the body uses, in place at step 1"
    with pytest.raises(RuntimeError, match=message):
        tl.while_loop(ask, body, randn(2), checkpoints=2)


@pytest.mark.parametrize("batches_counted", [True, False])
def test_a_batch_norm_that_the_condition_trains_is_refused(batches_counted: bool) -> None:
    """Its statistics change in native code, without a new version."""
    norm = nn.BatchNorm1d(2, dtype=torch.float64)
    if not batches_counted:
        norm.num_batches_tracked = None

    def ask(carry: Any) -> bool:
        return bool(norm(carry[0]).isfinite().all()) and carry[1] < 5

    def body(carry: Any) -> Any:
        return rotate(norm(carry[0])), carry[1] + 1

    with pytest.raises(RuntimeError, match=r"which the body uses, in place at step 1 \(as a batch norm"):
        tl.while_loop(ask, body, (randn(4, 2), 0), checkpoints=2)


def test_a_batch_norm_in_eval_mode_may_be_asked() -> None:
    def gradient(checkpoints: Any) -> Tensor:
        norm, init = nn.BatchNorm1d(2, dtype=torch.float64).eval(), randn(4, 2)
        norm.running_mean[0] = torch.nan  # pyright: ignore[reportOptionalSubscript]

        def ask(carry: Any) -> bool:
            norm(carry[0])
            return carry[1] < 5

        def body(carry: Any) -> Any:
            return rotate(norm(carry[0])), carry[1] + 1

        return grad(tl.while_loop(ask, body, (init, 0), checkpoints=checkpoints)[0].sin().sum(), init)[0]

    torch.testing.assert_close(gradient(2), gradient(None), equal_nan=True)


def test_a_body_that_sets_the_mode_of_a_module_is_refused() -> None:
    """A replay would begin in the mode that the last step has left."""
    norm = nn.BatchNorm1d(2, dtype=torch.float64)

    def body(i: int, c: Tensor) -> Tensor:
        c = rotate(norm(c))
        norm.eval()
        return c

    with pytest.raises(RuntimeError, match=r"the body calls eval\(\) of a module"):
        tl.fori_loop(0, 3, body, randn(4, 2), checkpoints=2)
    assert norm.training


@with_and_without_checkpoints
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"until": lambda c: c.sum() > 90}])
def test_a_y_that_is_the_carry_is_what_it_was_when_its_step_returned_it(options: Any, checkpoints: Any) -> None:
    """As in the definition; a list of what a Python loop's steps return would hold one tensor, in its last state."""

    def body(c: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        c += x
        return c, {"carry": c, "view": c[:2]}

    init, xs = torch.zeros(3), torch.arange(12.0).view(4, 3)
    carry, ys = tl.scan(body, init, xs, checkpoints=checkpoints, **options)
    true_carry, true_ys = reference.scan(body, init, xs, **options)
    torch.testing.assert_close((carry, ys), (true_carry, true_ys))
    assert not torch.equal(ys["carry"][0], ys["carry"][1])
    assert init.count_nonzero() == 0


@pytest.mark.eager_only("a compiled loop keeps ys where no step changes them")
def test_a_y_that_waits_for_backward_may_not_change_at_a_later_step() -> None:
    def body(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        c += x
        return c, c

    xs = randn(4, 3)
    with pytest.raises(RuntimeError, match=r"y: the output of step 0 was changed in place .* return y\.clone\(\)"):
        tl.scan(body, torch.zeros(3).double(), xs)
    with_clones = tl.scan(lambda c, x: (body(c, x)[0], c.clone()), torch.zeros(3).double(), xs)[1]
    torch.testing.assert_close(with_clones, reference.scan(body, torch.zeros(3).double(), xs)[1])


def test_a_tensor_that_the_first_step_gives_twice_stays_one() -> None:
    """As in a Python loop, a write to one leaf is seen in the other, also where that step runs by itself."""

    def body(carry: Any, x: Any) -> Any:
        h, q = (torch.ones(1),) * 2 if carry is None else carry
        h.add_(1.0)
        q.mul_(2.0)
        return (h, q), q.clone()

    def run(**options: Any) -> list[float]:
        return tl.scan(body, tl.first_only(None), length=3, **options)[1].flatten().tolist()

    assert run() == [4.0, 10.0, 22.0]
    with pytest.warns(tl.loop.NotCompiledWarning, match="a leaf of the carry shares memory with another leaf of it"):
        assert run(compile=True) == [4.0, 10.0, 22.0]
    with pytest.raises(RuntimeError, match=r"carry\[0\] and carry\[1\], which share memory"):
        run(checkpoints=2)
