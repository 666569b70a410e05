"""Compiled loops where their tensors are: what they wait for, and what no other device than their own makes right."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.graph.decompositions import before_autograd
from tensorloop.compiler.place import HOST
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run.plan import plans
from tests.device import pretended

STEPS, ROWS, WIDTH = 6, 3, 4
ON, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
Body = Callable[[Tensor, Tensor], Any]


def numbers(*size: int, device: torch.device = ON, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator(HOST).manual_seed(seed), device=HOST).to(device)


def rnn(w: Tensor) -> Body:
    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h

    return body


def outcome(body: Body, w: Tensor, compile: Any, device: torch.device = ON, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    h, xs = numbers(ROWS, WIDTH, device=device), numbers(STEPS, ROWS, WIDTH, device=device, seed=1)
    last, ys = tl.scan(body, h.requires_grad_(), xs.requires_grad_(), compile=compile, **options)
    return [last, ys, *torch.autograd.grad([last.sum() + ys.square().sum()], [h, xs, w])]


def check_both(body: Callable[[Tensor], Body], device: torch.device = ON, **options: Any) -> None:
    w = (numbers(WIDTH, WIDTH, device=device, seed=2) / 2).requires_grad_()
    found, expected = (outcome(body(w), w, compile, device, **options) for compile in ("strict", False))
    torch.testing.assert_close(found, expected)


def test_two_devices_are_two_plans() -> None:
    made = plans.made
    for device in (ON, OTHER, ON):
        check_both(rnn, device)
    assert plans.made - made == 2


@pytest.mark.parametrize("number", [torch.tensor(1.5, device=HOST), torch.tensor(2, device=HOST)])
def test_a_number_of_the_hosts_is_as_good_as_one_there(number: Tensor) -> None:
    check_both(lambda w: lambda h, x: (torch.sin(h @ w * number + x), h + number * torch.tensor(0.5, device=HOST)))


def test_a_number_of_the_hosts_has_its_gradient_there() -> None:
    def run(compile: Any) -> list[Tensor]:
        by = torch.tensor(0.7, device=HOST, requires_grad=True)
        last, _ = tl.scan(lambda h, x: (h * by + x, None), numbers(ROWS), numbers(STEPS, ROWS), compile=compile)
        (grad,) = torch.autograd.grad(last.sum(), by)
        assert grad.device == HOST
        return [last, grad]

    torch.testing.assert_close(run("strict"), run(False))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda h, x: (h + x.cpu().to(h.device), None), "a tensor on cpu is used or made in a loop on cuda:0"),
        (lambda h, x: (h + x.to(OTHER).to(ON), None), "a tensor on cuda:1 is used or made in a loop on cuda:0"),
        (lambda h, x: (h + x, torch.zeros((), device=HOST)), "a y is on cpu, and the loop on cuda:0"),
        (lambda h, x: (h + x * torch.rand((), device=HOST), None), "random numbers are drawn on cpu in a loop on cuda"),
    ],
    ids=["to the host and back", "to another device", "a y of the host's", "drawn on the host"],
)
def test_what_is_elsewhere_is_named(body: Body, reason: str) -> None:
    h, xs = numbers(ROWS), numbers(STEPS, ROWS)
    torch.manual_seed(0)
    with pytest.warns(NotCompiledWarning, match=reason):
        found = tl.scan(body, h, xs, compile=True)
    torch.manual_seed(0)
    torch.testing.assert_close(found, tl.scan(body, h, xs))


def test_a_carry_of_two_devices_is_named() -> None:
    init = torch.zeros((), device=HOST), numbers(ROWS)
    body = lambda s, x: ((s[0] + 1, s[1] + x), None)  # noqa: E731
    with pytest.warns(NotCompiledWarning, match="the tensors of the loop are on cpu and on cuda:0"):
        found = tl.scan(body, init, numbers(STEPS, ROWS), compile=True)
    torch.testing.assert_close(found, tl.scan(body, init, numbers(STEPS, ROWS)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_device(dtype: torch.dtype) -> None:
    w = (numbers(WIDTH, WIDTH) / 2).requires_grad_()

    def run(compile: Any) -> list[Tensor]:
        with torch.autocast("cuda", dtype):
            return outcome(lambda h, x: ((h @ w).float() + x, h @ w), w, compile)

    found, exact = run("strict"), outcome(lambda h, x: (h @ w + x, h @ w), w, False)
    torch.testing.assert_close(found, run(False), rtol=5e-2, atol=5e-2)
    assert found[1].dtype is dtype
    assert not torch.allclose(found[0], exact[0], 1e-5, 1e-5)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_dropout_draws_from_the_devices_generator(checkpoints: int | None) -> None:
    check_both(
        lambda w: lambda h, x: (F.dropout(torch.sin(h @ w), 0.4) + F.dropout(x, 0.2), h), checkpoints=checkpoints
    )


def test_another_device_is_current_in_backward() -> None:
    w = (numbers(WIDTH, WIDTH) / 2).requires_grad_()

    def run(compile: Any) -> list[Tensor]:
        last, ys = tl.scan(rnn(w), numbers(ROWS, WIDTH), numbers(STEPS, ROWS, WIDTH), compile=compile, checkpoints=2)
        torch.cuda.set_device(OTHER)
        try:
            return [last, *torch.autograd.grad(last.sum() + ys.sum(), w)]
        finally:
            torch.cuda.set_device(ON)

    torch.testing.assert_close(run("strict"), run(False))


def test_threads_share_a_plan() -> None:
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                check_both(rnn)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_hosts_numbers_choose_nothing_on_a_device() -> None:
    """The draw of a device that compares at once is no other draw and a comparison: the loop stays eager."""
    with pytest.raises(RuntimeError, match=r"bernoulli\(\) draws by the values of a tensor, on cuda:0"):
        tl.scan(lambda h, x: (h + torch.bernoulli(x), None), numbers(3), torch.ones(2, 3), compile="strict")


# -- operations that only CUDA has


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


ATEN = torch.ops.aten
MASK = numbers(1, 1, 5, 6, device=HOST)
Q, K, V = (numbers(2, 4, n, 8, device=HOST, seed=n) for n in (5, 6, 6))
FEW = K[:, :2], V[:, :2]
FORMS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], Callable[[], Tensor]]] = {
    "flash": (ATEN._scaled_dot_product_flash_attention.default, (Q, K, V), {}, lambda: attention(Q, K, V)),
    "flash, causal": (
        ATEN._scaled_dot_product_flash_attention.default,
        (Q, K[:, :, :5], V[:, :, :5], 0.0, True, False),
        {"scale": 0.3},
        lambda: attention(Q, K[:, :, :5], V[:, :, :5], is_causal=True, scale=0.3),
    ),
    "flash, heads in groups": (
        ATEN._scaled_dot_product_flash_attention.default,
        (Q, *FEW),
        {},
        lambda: attention(Q, *FEW, enable_gqa=True),
    ),
    "masked": (
        ATEN._scaled_dot_product_efficient_attention.default,
        (Q, K, V, MASK, True),
        {},
        lambda: attention(Q, K, V, attn_mask=MASK),
    ),
    "cudnn": (
        ATEN._scaled_dot_product_cudnn_attention.default,
        (Q, K, V, None, True, 0.0, False, False),
        {"scale": 0.2},
        lambda: attention(Q, K, V, scale=0.2),
    ),
    "norm": (
        ATEN.cudnn_batch_norm.default,
        (Q, Q[0, :, 0, 0], Q[0, :, 1, 0], Q[0, :, 2, 0], Q[0, :, 3, 0].abs(), False, 0.1, 1e-5),
        {},
        lambda: F.batch_norm(Q, Q[0, :, 2, 0], Q[0, :, 3, 0].abs(), Q[0, :, 0, 0], Q[0, :, 1, 0]),
    ),
    "softmax": (ATEN._softmax.default, (Q.half(), -1, True), {}, lambda: torch.softmax(Q.half(), -1, torch.float32)),
    "log_softmax": (
        ATEN._log_softmax.default,
        (Q.half(), 1, True),
        {},
        lambda: torch.log_softmax(Q.half(), 1, torch.float32),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_operations_of_cuda_alone_have_a_form_for_any_device(name: str) -> None:
    operation, args, kwargs, expected = FORMS[name]
    found = before_autograd()[operation](*args, **kwargs)
    given = len(operation._schema.returns)
    if given > 1:
        assert len(found) == given
        found = found[0]
    torch.testing.assert_close(found, expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", [torch.nn.LSTMCell, torch.nn.GRUCell])
def test_cells_are_taken_apart_as_on_the_host(cell: Any) -> None:
    made = cell(WIDTH, WIDTH).to(ON)
    one = cell is torch.nn.GRUCell

    def body(state: Any, x: Tensor) -> Any:
        state = made(x, state)
        return state, state if one else state[0]

    def run(compile: Any) -> list[Tensor]:
        h = numbers(ROWS, WIDTH)
        _, ys = tl.scan(body, h if one else (h, h), numbers(STEPS, ROWS, WIDTH), compile=compile)
        return [ys, *torch.autograd.grad(ys.square().sum(), list(made.parameters()))]

    torch.testing.assert_close(run("strict"), run(False))


# -- waits


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_loop_of_known_length_waits_for_nothing(checkpoints: int | None) -> None:
    w = numbers(WIDTH, WIDTH).requires_grad_()
    h, xs, by = numbers(ROWS, WIDTH), numbers(STEPS, ROWS, WIDTH), torch.tensor(0.5, device=HOST)

    def body(h: Tensor, x: Tensor) -> Any:
        h = F.dropout(torch.tanh(h @ w + x * by), 0.3)
        return h, h

    def run() -> None:
        last, ys = tl.scan(body, h, xs, compile="strict", checkpoints=checkpoints)
        torch.autograd.grad(last.sum() + ys.sum(), w)

    run()  # makes the plan, and waits for that
    with pretended.counted() as counts:
        run()
    assert counts.syncs == []


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("used", ["last", "ys", "both"])
def test_a_gradient_in_a_graph_of_the_caller_s(used: str, checkpoints: int | None) -> None:
    """Where the last carry has no gradient, nobody asks whether zeros for it did no harm: that would wait."""
    w = numbers(WIDTH, WIDTH).requires_grad_()
    h, xs = numbers(ROWS, WIDTH), numbers(STEPS, ROWS, WIDTH)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        return h, h * 2

    def run(compile: Any) -> Tensor:
        last, ys = tl.scan(body, h, xs, compile=compile, checkpoints=checkpoints)
        loss = {"last": last.sum(), "ys": ys.square().sum(), "both": last.sum() + ys.square().sum()}[used]
        return torch.autograd.grad(loss, w)[0]

    run("strict")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run("strict")
    xs.normal_()
    graph.replay()
    torch.testing.assert_close(found, run(False))


def test_no_plan_is_made_while_the_caller_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    h, xs = numbers(ROWS, 2), numbers(STEPS, ROWS, 2)
    body = lambda h, x: (torch.sin(h) + x * 3, None)  # noqa: E731
    expected = tl.scan(body, h, xs)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(NotCompiledWarning, match="its plan would be made while a CUDA graph is captured"):
        torch.testing.assert_close(tl.scan(body, h, xs, compile=True), expected)


def test_appends_copy_no_array() -> None:
    """Of 40 steps that append a row each, the rows alone are written; the array before them stays where it is."""
    w, h, xs = numbers(WIDTH, WIDTH).requires_grad_(), numbers(ROWS, WIDTH), numbers(40, ROWS, WIDTH)

    def body(carry: Any, x: Tensor) -> Any:
        h, first, both = carry
        h = torch.tanh(h @ w + x)
        return (h, first.append(h), both.append(h * 2).append(x)), first[-1]

    def run(compile: Any) -> list[Tensor]:
        start = tl.TensorArray()
        start.append(h)
        (_, first, both), ys = tl.scan(body, (h, start, tl.TensorArray()), xs, compile=compile)
        values = [first.stack(), both.stack(), ys]
        return [*values, *torch.autograd.grad([x.square().sum() for x in values], [w])]

    run("strict")
    with pretended.counted() as counts:
        found = run("strict")
    torch.testing.assert_close(found, run(False))
    assert counts.operations["aten::cat"] <= 4, counts.places()


@pytest.mark.parametrize("part", [slice(1, 3), slice(3), slice(-3, None)])
def test_a_part_that_an_array_does_not_have_yet_is_not_taken_for_one_of_its_length(part: slice) -> None:
    def run(compile: bool) -> Any:
        def body(carry: Any, x: Tensor) -> Any:
            h, array = carry
            mean = array.stack()[part].mean(0)
            array.append(x)
            return (torch.sin(h + mean), array), mean

        array = tl.TensorArray.unstack(numbers(2, ROWS, seed=3))
        (last, array), ys = tl.scan(body, (numbers(ROWS), array), numbers(STEPS, ROWS, seed=1), compile=compile)
        return last, array.stack(), ys

    with pytest.warns(NotCompiledWarning, match="depends on the length of an array"):
        found = run(True)
    torch.testing.assert_close(found, run(False))


def test_attention_without_a_gradient() -> None:
    """Its operation there is told whether one will be wanted, which is no difference between two looks at a step."""
    xs = numbers(3, 2, 1, 4, 8)

    def run(compile: Any) -> Tensor:
        body = lambda h, x: (h + attention(x + h, x, x), None)  # noqa: E731
        return tl.scan(body, torch.zeros_like(xs[0]), xs, compile=compile)[0]

    torch.testing.assert_close(run("strict"), run(False))


def test_a_number_that_changes_is_given_to_one_plan_there() -> None:
    made = plans.made
    for tau in (1.0, 0.5, 0.25, 0.125):
        check_both(lambda w, tau=tau: lambda h, x: (torch.sin(h @ w * tau + x), h - tau))
    assert plans.made - made == 2
