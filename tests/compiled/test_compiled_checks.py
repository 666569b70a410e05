"""Where PyTorch raises for a value, a compiled loop does, or the loop runs eagerly; and what users set stays set."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tensorloop as tl
from tensorloop.loop.compiled import pays
from tensorloop.loop.compiled.front import NotCompiledWarning

H, XS = torch.ones(3), torch.linspace(0, 1, 12).reshape(4, 3)
NUMBERS = torch.tensor([1, 0, 2])
BELOW = torch.tensor([0, -1, 1])


@pytest.mark.parametrize("divide", [lambda h, i: h // i, lambda h, i: h % i, lambda h, i: torch.fmod(h, i)])
def test_integers_are_divided_by_a_tensor_in_torch(divide: Any):
    def run(compile: Any, numbers: Any) -> Any:
        return tl.scan(lambda h, i: (divide(h, i), h), torch.tensor(7), numbers, compile=compile)

    for compile in (False, "strict"):
        with pytest.raises(RuntimeError, match="ZeroDivisionError") as raised:
            run(compile, NUMBERS)
        assert raised.value.__notes__ == ["raised in step 1 of scan"]
    assert all(torch.equal(a, b) for a, b in zip(run("strict", NUMBERS + 1), run(False, NUMBERS + 1), strict=True))


def test_what_fails_before_the_loop_for_all_steps_fails_where_the_loop_comes_to_that_step():
    def run(compile: Any, most: int) -> Any:
        body = lambda h, i: (h + 6 // i, h)  # noqa: E731
        return tl.scan(body, torch.tensor(0), NUMBERS, until=lambda h: h >= most, compile=compile)

    for compile in (False, "strict"):
        with pytest.raises(RuntimeError, match="ZeroDivisionError") as raised:
            run(compile, 7)
        assert raised.value.__notes__ == ["raised in step 1 of scan"]
        assert run(compile, 6)[0] == 6


def test_integers_divided_by_a_number_are_compiled():
    def run(compile: Any) -> Any:
        body = lambda h, i: (h // 2 + i - h % 3 + torch.fmod(h, -4), h)  # noqa: E731
        return tl.scan(body, torch.tensor([7, -9, 4]), NUMBERS, compile=compile)

    assert all(torch.equal(a, b) for a, b in zip(run("strict"), run(False), strict=True))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        tl.scan(lambda h, i: (h // 0, h), torch.tensor(7), NUMBERS, compile="strict")


REFUSE = {
    "gather": lambda h, i: h + h.gather(0, i[None]),
    "index_select": lambda h, i: h + h.index_select(0, i[None]),
    "scatter": lambda h, i: h.scatter(0, i[None], h[:1]),
    "scatter_add": lambda h, i: h.scatter_add(0, i[None], h[:1]),
    "index_add": lambda h, i: h.index_add(0, i[None], h[:1]),
    "index_copy": lambda h, i: h.index_copy(0, i[None], h[:1]),
    "embedding": lambda h, i: h + F.embedding(i[None], h[:, None])[0],
    "cross_entropy": lambda h, i: h + F.cross_entropy(h[None], i[None]),
}


@pytest.mark.parametrize("name", REFUSE)
def test_indices_below_0_are_refused_where_torch_refuses_them(name: str):
    for compile in (False, "strict"):
        with pytest.raises((IndexError, RuntimeError)):
            tl.scan(lambda h, i: (REFUSE[name](h, i), None), torch.ones(3), BELOW, compile=compile)  # pyright: ignore[reportArgumentType]


COUNT = {
    "index": lambda h, i: h + h[i[None]],
    "index_put": lambda h, i: h.index_put((i[None],), h[:1] * 2),
    "two indices": lambda h, i: h + (h[:, None] * h)[i[None], i[None]],
}


@pytest.mark.parametrize("name", COUNT)
def test_indices_below_0_count_from_the_end_where_they_do_in_torch(name: str):
    def run(compile: Any) -> Tensor:
        init = torch.tensor([0.5, 1.5, 2.5])
        return tl.scan(lambda h, i: (COUNT[name](h, i), None), init, BELOW, compile=compile)[0]

    torch.testing.assert_close(run("strict"), run(False))


def test_select_by_the_number_of_the_step_counts_from_the_end():
    table = torch.arange(3.0)

    def run(compile: Any) -> Tensor:
        return tl.fori_loop(-2, 1, lambda i, h: h + torch.select(table, 0, i) + h[0], H, compile=compile)

    torch.testing.assert_close(run("strict"), run(False))


def test_an_assertion_is_not_dropped():
    def body(h: Tensor, x: Tensor) -> Any:
        torch._assert_async((h < 3).all())  # pyright: ignore[reportPrivateImportUsage]
        return h + x + 1, None

    with pytest.raises(RuntimeError, match="raises where a value is not as it should be"):
        tl.scan(body, H, XS, compile="strict")


def test_sparse_tensors_made_in_the_body_are_refused():
    def body(h: Tensor, x: Tensor) -> Any:
        return torch.mv(torch.eye(3).to_sparse(), h) + x, None

    with pytest.warns(NotCompiledWarning, match=r"a tensor of layout torch\.sparse_coo is made"):
        found = tl.scan(body, H, XS, compile=True)[0]
    torch.testing.assert_close(found, tl.scan(body, H, XS)[0])


def test_tensors_made_under_inference_mode_may_be_given_to_a_loop_with_gradients():
    with torch.inference_mode():
        xs, w = XS * 1, torch.full((3,), 0.5)

    def run(compile: Any) -> list[Tensor]:
        h = torch.ones(3, requires_grad=True)
        last = tl.scan(lambda h, x: (torch.tanh(h * 0.5 + x + w), None), h, xs, compile=compile)[0]
        return [last, *torch.autograd.grad(last.sum(), h)]

    torch.testing.assert_close(run("strict"), run(False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_places_of_the_largest_of_two_byte_floats(name: str, dtype: torch.dtype):
    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h + x)
        found = getattr(h, name)(-1)
        return (h, found) if isinstance(found, Tensor) else (h + found[0], found[1])

    xs = torch.randn(5, 4).to(dtype)
    found, expected = (tl.scan(body, xs[0] * 0, xs, compile=c) for c in ("strict", False))
    torch.testing.assert_close(found, expected)


def test_vmap_of_numbers_in_the_body():
    def run(compile: Any) -> Tensor:
        return tl.scan(lambda h, x: (torch.func.vmap(lambda a: a * 2 + 1)(h) * x, None), H, XS, compile=compile)[0]

    torch.testing.assert_close(run("strict"), run(False))


def test_a_strict_loop_in_the_body_of_a_loop_of_no_steps():
    def body(h: Tensor, x: Tensor) -> Any:
        return tl.scan(lambda a, y: (a + y, None), h, x[None].expand(2, 3), compile="strict")[0], h

    assert tl.scan(body, H, XS[:0])[1].shape == (0, 3)


@pytest.mark.filterwarnings("ignore")
def test_tracing_unrolls_the_loop():
    def run(x: Tensor) -> Tensor:
        return tl.scan(lambda h, x: (h + x, None), H, x, compile=True)[0]

    traced: Any = torch.jit.trace(run, (XS,))
    torch.testing.assert_close(traced(XS * 2), run(XS * 2))


def test_a_first_run_within_a_backward_pass_is_no_replay():
    def hook(g: Tensor) -> Tensor:
        with torch.enable_grad():
            h = H.clone().requires_grad_()
            inner = lambda h, x: (tl.scan(lambda a, y: (a + y, None), h, XS, compile="strict")[0], None)  # noqa: E731
            return g * tl.scan(inner, h, XS, checkpoints=2)[0].detach()

    y = torch.ones(3, requires_grad=True) * 2
    y.register_hook(hook)
    with pytest.raises(RuntimeError, match="an eager loop with checkpoints"):
        y.sum().backward()


INNER = {
    "while_loop": (lambda h, x: tl.while_loop(lambda h: h.sum() < 9, lambda h: h + 1, h) + x, "ends by a condition"),
    "until": (
        lambda h, x: tl.scan(lambda h, x: (h + x, h), h, XS, until=lambda h: h.sum() > 9)[0] + x,
        "ends by a condition",
    ),
    "array": (
        lambda h, x: h + tl.scan(lambda s, x: ((s[0] + x, s[1].append(s[0])), None), (h, tl.TensorArray()), XS)[0][0],
        "with a TensorArray in its carry",
    ),
    "no steps": (lambda h, x: h + tl.scan(lambda h, x: (h + x, h), h, XS[:0])[0] + x, "scan of no steps"),
}


@pytest.mark.parametrize("name", INNER)
def test_inner_loops_that_are_no_part_of_a_step_are_named(name: str):
    body, reason = INNER[name]

    def run(compile: Any) -> Tensor:
        return tl.scan(lambda h, x: (body(h, x), None), H, XS, compile=compile)[0]  # pyright: ignore[reportArgumentType]

    with pytest.warns(NotCompiledWarning, match=f"the body runs .*{reason}"):
        found = run(True)
    torch.testing.assert_close(found, run(False))


def test_a_condition_of_one_row_is_one_bool():
    def run(compile: Any) -> Any:
        init = torch.ones(3), torch.tensor(3)
        return tl.while_loop(lambda s: (s[1] > 0)[None], lambda s: (s[0] * 0.5, s[1] - 1), init, compile=compile)

    torch.testing.assert_close(run("strict"), run(False))


@pytest.mark.parametrize("compile", [False, True, "strict"])
def test_a_condition_that_gives_an_int_is_an_error(compile: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match=r"got int 1; wrap it with bool"):
            tl.while_loop(lambda h: int(h.sum() < 9), lambda h: h + 1, H, compile=compile)  # pyright: ignore


# -- torch.set_num_threads in a body and in a condition


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("two_threads", "fresh_plans")
def test_a_guard_of_the_number_of_threads_in_a_body_restores_it():
    def body(h: Tensor, x: Tensor) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        y = torch.tanh(h * 0.3 + x)
        torch.set_num_threads(before)
        return y, h

    for _ in range(4):
        tl.scan(body, H, XS, compile="strict")
        assert (torch.get_num_threads(), of_a_new_thread()) == (2, 2)


@pytest.mark.usefixtures("two_threads", "fresh_plans")
@pytest.mark.parametrize("team", [True, False])
def test_a_number_of_threads_that_a_condition_sets_stays(team: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pays.Pays, "team", lambda self: team)
    asked = []

    def going(h: Tensor) -> bool:
        asked.append(0)
        if len(asked) == 3:
            torch.set_num_threads(3)
        return bool(h.sum() < 20)

    tl.while_loop(going, lambda h: h + 1, H, compile="strict")
    assert (torch.get_num_threads(), of_a_new_thread()) == (3, 3)
