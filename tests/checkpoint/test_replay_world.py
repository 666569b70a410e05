"""What a replay must find as it was: random numbers, autocast, buffers, captured tensors; and hooks that fire once."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tensorloop as tl
from tests.support.devices import HERE
from tests.support.loop_cases import randn

D = torch.float64
K = pytest.mark.parametrize("k", [1, 2, 4])


@pytest.fixture
def w() -> Tensor:
    return torch.linalg.qr(torch.randn(3, 3, dtype=D))[0].requires_grad_()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, dtype=D, requires_grad=True)


def run(body, w, x, k, n=7) -> list[Tensor]:
    """Final carry, gradients, and the next random number."""
    torch.manual_seed(1)
    h = tl.fori_loop(0, n, body, x, checkpoints=k)
    return [h.detach(), *torch.autograd.grad((h**3).sum(), [w, x]), torch.rand(1)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@K
def test_dropout_draws_the_same_masks_and_leaves_the_generator_where_it_was(k, w, x):
    def body(i, h):
        return F.dropout(h @ w, 0.4) + h.sin()

    expected = run(body, w, x, None)
    for _ in range(3):
        assert_same(run(body, w, x, k), expected)


@K
@pytest.mark.parametrize("first", [0, 3])
def test_a_generator_of_the_users(k, first, w, x):
    generator = torch.Generator(HERE)

    def body(i, h):
        return h @ w * torch.rand(2, 3, generator=generator, dtype=D) if i >= first else h @ w

    def both(k):
        generator.manual_seed(5)
        return [*run(body, w, x, k), generator.get_state()]

    assert_same(both(k), both(None))


@K
def test_a_condition_that_draws_random_numbers(k, w, x):
    def loop(k):
        torch.manual_seed(3)
        i, h = tl.while_loop(
            lambda c: torch.rand(()) < 0.9, lambda c: (c[0] + 1, F.dropout(c[1] @ w, 0.3) + c[1]), (0, x), checkpoints=k
        )
        assert i > 3
        return [h.detach(), *torch.autograd.grad((h**2).sum(), [w, x]), torch.rand(1)]

    assert_same(loop(k), loop(None))


@K
def test_batch_norm_statistics_change_once_a_step(k):
    def train(k):
        torch.manual_seed(0)
        norm, linear = nn.BatchNorm1d(3).double(), nn.Linear(3, 3).double()
        h = tl.fori_loop(0, 6, lambda i, h: norm(linear(h)) + h.cos(), torch.randn(4, 3, dtype=D), checkpoints=k)
        norm(torch.randn(4, 3, dtype=D))  # between forward and backward
        (h**2).sum().backward()
        return [
            norm.running_mean,
            norm.running_var,
            torch.as_tensor(norm.num_batches_tracked).double(),
            linear.weight.grad,
            norm.weight.grad,
        ]

    assert_same(train(k), train(None))


@K
@pytest.mark.parametrize("first", [0, 3])
def test_a_counter_that_the_body_changes_and_uses(k, first, w, x):
    def count(k):
        counter = torch.ones((), dtype=D)

        def body(i, h):
            if i >= first:
                counter.add_(0.5)
            return h @ w * counter.clone() + h.sin()

        return [*run(body, w, x, k), counter]

    assert_same(count(k), count(None))


@pytest.mark.eager_only("the error is torch's own")
@pytest.mark.parametrize("recorded", [True, False])
def test_a_capture_changed_before_backward_is_an_error(recorded, w, x):
    c = torch.randn(3, dtype=D, requires_grad=recorded)
    h = tl.fori_loop(0, 5, lambda i, h: h @ w + c, x, checkpoints=2)
    with torch.no_grad():
        c.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(3,\).* was changed in place"):
        h.sum().backward()


@pytest.mark.eager_only("the error is torch's own")
def test_init_or_xs_changed_before_backward_is_an_error(w):
    for change in ("init", "xs"):
        given = {"init": torch.randn(2, 3, dtype=D), "xs": torch.randn(4, 2, 3, dtype=D)}
        if change == "xs":
            given["xs"].requires_grad_()
        h, _ = tl.scan(lambda h, x: ((h @ w) * x.cos(), None), given["init"], given["xs"], checkpoints=2)
        with torch.no_grad():
            given[change].mul_(2)
        with pytest.raises(RuntimeError, match="was changed in place"):
            h.sum().backward()


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
@pytest.mark.parametrize("recorded", [True, False])
def test_a_name_bound_to_another_tensor_before_backward_is_an_error(recorded, w, x):
    c = [torch.randn(3, dtype=D, requires_grad=recorded)]
    h = tl.fori_loop(0, 5, lambda i, h: h @ w + c[0], x, checkpoints=2)
    c[0] = torch.randn(3, dtype=D, requires_grad=recorded)
    with pytest.raises(RuntimeError, match="in its replay, which the forward pass did not use") as raised:
        h.sum().backward()
    assert raised.value.__notes__ == ["raised in the replay of step 3 of fori_loop"]


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
def test_a_step_that_does_not_repeat_itself_is_named(w, x):
    replaying = []
    is_replay = tl.loop.pure(lambda: bool(replaying))

    def body(i, h):
        return (h @ w).sin().cos() if is_replay() and i == 2 else (h @ w).sin()

    h = tl.fori_loop(0, 5, body, x, checkpoints=2)
    replaying.append(1)
    with pytest.raises(RuntimeError, match="step 2 did not repeat itself: it made 2 tensors in the forward pass and 3"):
        h.sum().backward()


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
def test_a_replay_of_another_shape_is_named(w, x):
    replaying = []
    is_replay = tl.loop.pure(lambda: bool(replaying))
    h = tl.fori_loop(0, 5, lambda i, h: (h @ w)[:1] if is_replay() else (h @ w)[:2], x, checkpoints=2)
    replaying.append(1)
    with pytest.raises(TypeError, match=r"(?s)changed the carry at step .* \+ h: Tensor \(1, 3\)"):
        h.sum().backward()


def test_hooks_fire_once_and_get_the_sum(w, x):
    def train(k):
        w.grad, calls = None, []
        v = w * 1.5
        v.retain_grad()
        handles = [
            w.register_hook(lambda g: calls.append(("w", g.clone()))),
            v.register_hook(lambda g: calls.append(("v", g.clone()))),
        ]
        handles.append(w.register_post_accumulate_grad_hook(lambda p: calls.append(("post", p.grad.clone()))))
        tl.fori_loop(0, 6, lambda i, h: (h @ v + h @ w).sin() + h, x, checkpoints=k).sum().backward()
        for handle in handles:
            handle.remove()
        return calls, v.grad

    (calls, v_grad), (expected, expected_v) = train(2), train(None)
    assert [name for name, _ in calls] == [name for name, _ in expected] == ["v", "w", "post"]
    assert_same([g for _, g in calls] + [v_grad], [g for _, g in expected] + [expected_v])


def test_autocast_is_set_again(w, x):
    def train(k):
        weight = w.detach().float().requires_grad_()
        with torch.autocast(HERE.type, dtype=torch.bfloat16):
            h = tl.fori_loop(0, 6, lambda i, h: (h @ weight).float() + h.sin(), x.detach().float(), checkpoints=k)
        h.sum().backward()
        return h.detach(), weight.grad

    (h, grad), (h0, grad0) = train(2), train(None)
    assert torch.equal(h, h0)  # bfloat16 products in both
    # The plain loop adds the gradients of six steps in bfloat16, ours in float32.
    torch.testing.assert_close(grad, grad0, rtol=0.02, atol=0.02)
    assert not torch.equal(h, tl.fori_loop(0, 6, lambda i, h: h @ w.float() + h.sin(), x.detach().float()))


@pytest.mark.eager_only("a backward does not run the body, so nothing is raised there")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_replay_leaves_everything_usable(error, w, x):
    armed = []
    is_armed = tl.loop.pure(lambda: bool(armed))

    def body(i, h):
        if is_armed() and i == 3:
            raise error("stop")
        return F.dropout(h @ w, 0.2) + h.sin()

    torch.manual_seed(1)
    h = tl.fori_loop(0, 6, body, x, checkpoints=2)
    loss = (h**3).sum()
    state = torch.get_rng_state()
    armed.append(1)
    with pytest.raises(error, match="stop") as raised:
        torch.autograd.grad(loss, [w, x], retain_graph=True)
    assert "raised in the replay of step 3 of fori_loop" in raised.value.__notes__
    assert torch.equal(torch.get_rng_state(), state)
    armed.clear()
    found = torch.autograd.grad(loss, [w, x])
    assert_same(list(found), run(body, w, x, None, 6)[1:3])


def test_an_exception_in_the_sweep_names_the_step_and_keeps_the_users_type(w, x):
    class Own(Exception):
        pass

    def body(i, h):
        if i == 4:
            raise Own("mine")
        return h @ w

    with pytest.raises(Own, match="mine") as raised:
        tl.fori_loop(0, 6, body, x, checkpoints=2)
    assert raised.value.__notes__ == ["raised in step 4 of fori_loop"]
    assert tl.fori_loop(0, 2, body, x, checkpoints=2).requires_grad


def held_by(make) -> weakref.ref:
    """A reference to the weight of a module that `make` uses; it alone must not keep it alive."""
    module = nn.Linear(3, 3).double()
    reference = weakref.ref(module.weight)
    make(module)
    return reference


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_everything_is_freed_without_the_garbage_collector(arrays, backward, x):
    def loop(module):
        def body(i, c):
            h, array = c
            array.append(module(h))
            return (array[:].mean(0) + h, array) if arrays else (module(h), array)

        h, _ = tl.fori_loop(0, 6, body, (x, tl.TensorArray()), checkpoints=2)
        if backward:
            h.sum().backward()

    loop(nn.Linear(3, 3).double())  # torch's first import of dynamo leaves a cycle that holds the frames around it
    gc.collect()
    gc.disable()
    try:
        assert held_by(loop)() is None
    finally:
        gc.enable()


def test_after_backward_the_output_no_longer_holds_the_body(x):
    class Scale:
        def __init__(self):
            self.factor = torch.ones(3, dtype=D)

    scale = Scale()
    reference = weakref.ref(scale)
    h = tl.fori_loop(0, 6, lambda i, h, scale=scale: h.sin() * scale.factor, x, checkpoints=2)
    h.sum().backward()
    del scale
    assert reference() is None
    assert h.grad_fn is not None


@K
def test_a_body_writes_with_a_tensor_whose_elements_share_memory(w: Tensor, x: Tensor, k: int):
    """What such a one is multiplied into is written to; to put its own values back, torch would have to write to it."""
    scale = torch.full((1,), 0.5, dtype=D).expand(3)

    def body(i: int, h: Tensor) -> Tensor:
        part = h.clone()
        part.unsqueeze(0).mul_(scale)
        return torch.tanh(part @ w + h)

    assert_same(run(body, w, x, k), run(body, w, x, None))


def test_the_innermost_default_device_is_set_again() -> None:
    w = torch.ones(2, device="cpu", requires_grad=True)
    with torch.device("meta"), torch.device("cpu"):
        out = tl.fori_loop(0, 3, lambda i, c: (c * w).cos() + torch.ones(2), torch.zeros(2), checkpoints=1)
        out.sum().backward()
    assert w.grad is not None
    assert w.grad.device.type == "cpu"


class Passes(TorchDispatchMode):
    """Carries out each operation, as counters of operations do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("plan", [1, 4, tl.Checkpoints(budget=100_000)], ids=str)
def test_a_mode_below_autograd_around_the_forward_pass_alone(plan: Any) -> None:
    """What it calls is no call of the body's."""
    init, xs = randn(2, 8), randn(6, 2, 8, seed=1)

    def body(carry: Any, x: Tensor) -> Any:
        h, past = carry
        past = past.append(h[:, None])
        return (x + tl.attention(h[:, None], past, past, scale=1.0)[:, 0], past), None

    def found(plan: Any, mode: Any) -> list[Tensor]:
        with mode:
            (h, _), _ = tl.scan(body, (init, tl.TensorArray()), xs, checkpoints=plan)
        return [h, *torch.autograd.grad(h.sin().sum(), [init, xs])]

    torch.testing.assert_close(found(plan, Passes()), found(None, nullcontext()))
