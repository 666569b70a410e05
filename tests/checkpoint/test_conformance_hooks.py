"""Hooks on all that a loop touches, and threads: with checkpoints each hook runs as in a plain loop, or is refused."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import tensorloop as tl
from tests.support.loop_cases import (
    Counter,
    Ours,
    Plain,
    compare,
    inputs,
    randn,
    recurrent,
    rotate,
    with_and_without_checkpoints,
)

D = torch.float64


def clip(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda g: g.clamp(-limit, limit)


def both(checkpoints: Any, run: Callable[[Any], Any], tolerance: float = 1e-9) -> None:
    """What `run` gives is the same with our loops and with Python's."""
    torch.testing.assert_close(run(Ours(checkpoints)), run(Plain()), rtol=tolerance, atol=tolerance)


@with_and_without_checkpoints
def test_a_hook_in_the_body_clips_the_gradient_of_each_step(checkpoints: Any) -> None:
    """Of what the body makes, also where y uses it, of x, and of a copy of the carry."""

    def program(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Any:
        def body(c: Tensor, x: Tensor) -> Any:
            x.register_hook(clip(0.3))
            c = c.clone()
            c.register_hook(clip(0.4))
            h = rotate(c) * w + x
            h.register_hook(clip(0.5))
            return h, h.sin() + c * x

        return loops.scan(body, init * 1, xs)

    compare(program, randn(2), randn(5, 2), randn(2, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_a_hook_in_an_inner_body(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Any:
        def outer(c: Tensor, x: Tensor) -> Any:
            def inner(d: Tensor, z: Tensor) -> Any:
                z.register_hook(clip(0.2))
                e = rotate(d) * w + z
                e.register_hook(clip(0.4))
                return e, e * z

            return loops.scan(inner, c, torch.stack([x, x.sin()]))

        return loops.scan(outer, init, xs)

    compare(program, randn(2), randn(3, 2), randn(2, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_a_hook_on_the_carry_that_the_body_is_given(checkpoints: Any) -> None:
    """With checkpoints it is not the tensor that the last step returned and that its y used: refused."""

    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        def body(c: dict[str, Tensor], x: None) -> Any:
            c["a"].register_hook(clip(0.5))
            h = rotate(c["a"]) * w
            return {"a": h}, h.sin()

        return loops.scan(body, {"a": init * 1}, None, 5)

    if checkpoints is None:
        compare(program, randn(2), randn(2, seed=1))
    else:
        with pytest.raises(RuntimeError, match=r"the body registered a hook on carry\['a'\], its argument") as error:
            program(Ours(checkpoints), randn(2), randn(2, seed=1))
        assert error.value.__notes__ == ["raised in step 0 of scan"]


@with_and_without_checkpoints
@pytest.mark.parametrize("made", [False, True], ids=["leaf", "made"])
def test_a_hook_that_the_body_puts_on_what_it_closes_over(made: bool, checkpoints: Any) -> None:
    """In a plain loop it is there T times; with checkpoints each replay would add another: refused."""

    def run(loops: Any) -> Any:
        init, w = randn(2), randn(2, seed=1)
        v = w.sin() if made else w

        def body(i: int, c: Tensor) -> Tensor:
            out = rotate(c) * v
            v.register_hook(lambda g: g * 0.9)
            return out

        out = loops.fori_loop(0, 4, body, init)
        return [out, *grad(out.sum(), (init, w))]

    if checkpoints is None:
        both(None, run)
    else:
        with pytest.raises(RuntimeError, match=r"which it closes over, .* register it before the loop"):
            run(Ours(checkpoints))


@pytest.mark.eager_only("a compiled loop is one node, with and without checkpoints", cases=["all"])
@with_and_without_checkpoints
def test_a_hook_on_a_result_gets_what_comes_from_outside(checkpoints: Any) -> None:
    """With checkpoints the last carry is an output of the loop: what the last y adds to it is inside."""

    def run(loops: Any) -> Any:
        init, xs, w = inputs()
        carry, ys = recurrent(loops, init, xs, w)
        seen: list[Tensor] = []
        carry.register_hook(seen.append)
        ys.register_hook(lambda g: g * 3)
        found = grad(carry.sin().sum() + ys.sum(), (init, xs, w))
        return [*found, seen[0], carry]

    *found, seen, carry = run(Ours(checkpoints))
    *true, all_of_it, _ = run(Plain())
    torch.testing.assert_close(found, true)
    torch.testing.assert_close(seen, all_of_it if checkpoints is None else carry.cos())


@with_and_without_checkpoints
@pytest.mark.parametrize("hook", [clip(0.5), lambda g: g * 0.9], ids=["clip", "scale"])
def test_a_hook_in_a_second_derivative(hook: Callable[[Tensor], Tensor], checkpoints: Any) -> None:
    """With checkpoints that derivative comes in parts; the same where the hook is linear."""

    def run(loops: Any) -> Tensor:
        def body(c: Tensor, x: Tensor) -> Any:
            h = rotate(c) * w + x
            h.register_hook(hook)
            return h, h * x

        init, xs, w = randn(2), randn(5, 2), randn(2, seed=1)
        carry, ys = loops.scan(body, init, xs)
        first = grad(carry.square().sum() + ys.sin().sum(), (init, w), create_graph=True)
        return grad(first[0].square().sum() + first[1].square().sum(), init)[0]

    same = torch.allclose(run(Ours(checkpoints)), run(Plain()))
    assert same == (checkpoints is None or hook(torch.ones(())) > 0.6)


@with_and_without_checkpoints
def test_hooks_of_nodes_run_once_on_the_callers_graph(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        init, xs, w = inputs()
        calls: list[Tensor] = []
        v = w.sin()
        assert v.grad_fn is not None
        v.grad_fn.register_hook(lambda into, out: calls.append(out[0].clone()))
        v.grad_fn.register_prehook(lambda out: calls.append(out[0].clone()))
        carry, ys = recurrent(loops, init, xs, v)
        z = ys * 1
        z.grad_fn.register_hook(lambda into, out: calls.append(into[0].clone()))
        found = grad(carry.sum() + z.square().sum(), (init, xs, w))
        return [*found, *calls]

    both(checkpoints, run)


@with_and_without_checkpoints
def test_backward_hooks_of_modules_run_once_a_step(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        torch.manual_seed(0)
        linear, calls = nn.Linear(4, 4, dtype=D), Counter(lambda module, into, out: (into[0] * 0.5,))
        linear.register_full_backward_hook(calls)
        init = randn(4)
        out = loops.fori_loop(0, 4, lambda i, c: rotate(c) + linear(c).sin(), init)
        return [out, *grad(out.sum(), (init, *linear.parameters())), torch.tensor(calls.calls)]

    both(checkpoints, run)


@with_and_without_checkpoints
def test_a_hook_that_runs_the_backward_of_another_loop(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        init, w = randn(2), randn(2, seed=1)
        other = loops.fori_loop(0, 3, lambda i, c: rotate(c) * w, init).sum()
        out, inner = loops.fori_loop(0, 3, lambda i, c: rotate(c) * w.cos(), init) * 1, []
        out.register_hook(lambda g: inner.extend(grad(other, (init, w), retain_graph=True)))
        return [*grad(out.sum(), (init, w)), *inner]

    both(checkpoints, run)


# -- threads


@with_and_without_checkpoints
@pytest.mark.parametrize("nodes", [0, 5, 200])
def test_a_tensor_made_in_another_thread(nodes: int, checkpoints: Any) -> None:
    """Each thread numbers its nodes by itself. The capture's hook runs once, and its graph is walked once."""
    w, init = randn(4), randn(4, seed=1)
    found: list[Any] = []

    def make() -> Tensor:
        x = torch.zeros(1, requires_grad=True)
        for _ in range(nodes):
            x = x + 1
        v = w.sin() * 2
        v.register_hook(clip(0.3))
        return v

    def work(task: Callable[[], Any]) -> Any:
        thread = threading.Thread(target=lambda: found.append(task()))
        thread.start()
        thread.join()
        return found.pop()

    def of(loops: Any, v: Tensor) -> Any:
        return grad(loops.fori_loop(0, 5, lambda i, c: rotate(c) * v + v.cos(), init).sum(), (w, init))

    v = work(make)
    torch.testing.assert_close(work(lambda: of(Ours(checkpoints), v)), of(Plain(), make()))


@with_and_without_checkpoints
def test_loops_in_threads_share_their_weights(checkpoints: Any) -> None:
    w, limits = randn(2), torch.tensor([2, 0, 4])
    shared = tl.TensorArray().append(w.sin()).append(w.cos())
    shared.stack()

    def loss(array: tl.TensorArray) -> Tensor:
        def body(carry: Any) -> Any:
            own, x, n, limit = carry
            x = rotate(x) * w + array[0] * array[:2].sum(0)
            return own.append(x).write(0, x * 2), x, n + 1, limit

        start = tl.TensorArray(), randn(3, 2, seed=3, grad=False), torch.zeros(3, dtype=torch.int64), limits
        own, x, *_ = tl.while_loop(lambda c: c[2] < c[3], body, start, compact=True, checkpoints=checkpoints)
        return own.stack().sin().sum() + x.sum()

    true = grad(loss(shared), w, retain_graph=True)
    found: list[Any] = []
    copies = [copy.copy(shared) for _ in range(4)]
    threads = [threading.Thread(target=lambda a=a: found.append(grad(loss(a), w, retain_graph=True))) for a in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, [true] * 4)


@pytest.mark.parametrize("in_thread", [lambda c, w: (c * w).sin(), lambda c, w: c * w])
def test_what_a_thread_of_the_body_makes_is_part_of_the_step(in_thread: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Where its numbers are ahead of those of the loop's own thread; where they are not: `docs/api/loop.md`."""
    with ThreadPoolExecutor(1) as threads:
        ahead = torch.zeros(1, requires_grad=True)
        threads.submit(lambda: [ahead + 1 for _ in range(20_000)]).result()

        def program(loops: Any, init: Tensor, w: Tensor) -> Any:
            there = lambda c: threads.submit(in_thread, c, w).result()  # noqa: E731
            body = lambda i, c: rotate(there(c).cos()) + c  # noqa: E731
            return loops.fori_loop(0, 5, body, init * 1)

        with ThreadPoolExecutor(1) as fresh:  # whose own numbers begin at 0, whatever ran before
            fresh.submit(compare, program, randn(2), randn(2, seed=1), checkpoints=2).result()


def test_a_hook_after_accumulation_in_the_body_is_refused() -> None:
    w = randn(2)

    def body(i: int, c: Tensor) -> Tensor:
        w.register_post_accumulate_grad_hook(lambda x: None)
        return rotate(c) * w

    with pytest.raises(RuntimeError, match=r"the body registers a hook on .*, which it closes over"):
        tl.fori_loop(0, 5, body, randn(2, seed=1), checkpoints=2)
