"""What cannot be compiled runs as the eager loop: right, with one warning that names the line, or refused by strict."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.compiled.front import NotCompiledWarning

SEEN: list[Any] = []


def reads_an_item(h: Tensor, x: Tensor) -> Any:
    return h * x.sum().item(), h


def counts_by_a_value(h: Tensor, x: Tensor) -> Any:
    return sum([h * 0.5] * int(x.abs().sum()), x), h


def prints(h: Tensor, x: Tensor) -> Any:
    print(f"{h}", end="")
    return h + x, h


def turns_to_numpy(h: Tensor, x: Tensor) -> Any:
    return h + float(x.detach().numpy().sum()), h


def lists(h: Tensor, x: Tensor) -> Any:
    return h + x.tolist()[0], h


def draws(h: Tensor, x: Tensor) -> Any:
    return h + torch.poisson(x.detach().exp()).sum(), h


def seeds(h: Tensor, x: Tensor) -> Any:
    torch.manual_seed(7)
    return h + torch.randn_like(x), h


def draws_apart(h: Tensor, x: Tensor) -> Any:
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        y = nn.functional.dropout(h, 0.5)
    return y + x, h


def draws_in_python(h: Tensor, x: Tensor) -> Any:
    return h + x * random.random(), h


def draws_in_numpy(h: Tensor, x: Tensor) -> Any:
    return h + x * float(numpy.random.rand()), h


def writes_outside(h: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        TOTAL.add_(x)
    return h + TOTAL.sum(), h


def writes_outside_with_gradients(h: Tensor, x: Tensor) -> Any:
    TOTAL.add_(x.detach())
    return h + x, h


def holds(h: Tensor, x: Tensor) -> Any:
    SEEN.append(h * 2)
    return h + x, h


def hooks(h: Tensor, x: Tensor) -> Any:
    y = h + x
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y, h


def has_a_shape_of_values(h: Tensor, x: Tensor) -> Any:
    return h + x[x > 0].sum(), h


def writes_to_what_was_detached(h: Tensor, x: Tensor) -> Any:
    y = (h * x).detach()
    y[0] = x[1] * h[0]
    return y + h, h


def detaches_in_place(h: Tensor, x: Tensor) -> Any:
    y = h * x
    y.detach_()
    return torch.sin(y) + h, y


def has_other_memory(h: Tensor, x: Tensor) -> Any:
    y = h * x
    y.data = x * 2
    return torch.sin(y), h


def looks_behind(h: Tensor, x: Tensor) -> Any:
    return h + x.data, h


def has_a_linear_recurrence(h: Tensor, x: Tensor) -> Any:
    return torch.sin(h + tl.linear_recurrence(x, h)), h


def has_a_fixed_point(h: Tensor, x: Tensor) -> Any:
    return tl.fixed_point(lambda z: torch.sin(0.3 * z + x), h), h


TOTAL = torch.zeros(3)
BODIES: list[tuple[Callable[..., Any], str]] = [
    (reads_an_item, r"\.item\(\) reads a value in Python"),
    (counts_by_a_value, r"int\(\) of a tensor reads a value in Python"),
    (prints, "the body prints a tensor"),
    (turns_to_numpy, "the body turns a tensor into an array"),
    (lists, "the body turns a tensor into a list"),
    (draws, r"poisson\(\) draws random numbers"),
    (seeds, r"the body calls torch\.(cuda\.)?random\.manual_seed\w*\(\)"),
    (draws_apart, r"the body (calls set_state\(\) of a torch\.Generator|sets the state of a generator)"),
    (draws_in_python, r"the body calls random\(\) of a Random from outside"),
    (draws_in_numpy, r"the body calls rand\(\)"),
    (writes_outside, "add_"),
    (writes_outside_with_gradients, "add_ writes to a tensor from outside"),
    (holds, r"the body calls append\(\) of a list from outside"),
    (has_a_linear_recurrence, "the body calls tl.linear_recurrence"),
    (has_a_fixed_point, "the body calls tl.fixed_point"),
    (hooks, "registers a hook"),
    (has_a_shape_of_values, "whose shape depends on values"),
    (detaches_in_place, r"the body takes a tensor out of its graph in place \(detach_\)"),
    (has_other_memory, r"the body gives a tensor other memory \(x.data = ...\)"),
    (writes_to_what_was_detached, "copy_ writes to a tensor that was detached before"),
]


def run(body: Callable[..., Any], compile: Any) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    TOTAL.zero_()
    SEEN.clear()
    h, xs = torch.randn(3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    last, ys = tl.scan(body, h, xs, compile=compile)
    grads = torch.autograd.grad(last.sum() + ys.square().sum(), (h, xs), allow_unused=True)
    return [last, ys], [g for g in grads if g is not None]


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize(("body", "reason"), BODIES, ids=[body.__name__ for body, _ in BODIES])
def test_a_body_that_is_more_than_its_operations_runs_eagerly(body: Callable[..., Any], reason: str):
    expected = run(body, False)
    with pytest.warns(
        NotCompiledWarning, match=f"^scan: not compiled: .*{reason}.*; it runs as an eager loop. Cure: [^ ]"
    ) as told:
        found = run(body, True)
    assert len(told) == 1
    assert "test_compiled_fallback.py:" in str(told[0].message)
    if body is not writes_outside:  # which has written for one step more
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("body", "reason"), BODIES, ids=[body.__name__ for body, _ in BODIES])
def test_strict_raises(body: Callable[..., Any], reason: str):
    with pytest.raises(RuntimeError, match=f"^scan: not compiled: .*{reason}.*; with compile=True it would"):
        run(body, "strict")


def test_the_warning_names_the_line_and_comes_once():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            run(reads_an_item, True)
    (warning,) = told
    assert warning.filename.endswith("test_compiled_fallback.py")
    assert warning.lineno == reads_an_item.__code__.co_firstlineno + 1


def test_data_is_cut_from_the_graph():
    torch.testing.assert_close(run(looks_behind, "strict"), run(looks_behind, False), rtol=0, atol=0)


def test_a_python_number_that_changes_is_named():
    with pytest.raises(RuntimeError, match=r"carry\['n'\] is a Python int that changes .* Cure: carry a tensor"):
        tl.scan(lambda c, x: ({"n": c["n"] * 2}, x), {"n": 1}, torch.zeros(3), compile="strict")


def test_numbers_that_stay_are_no_trouble():
    carry, ys = tl.scan(
        lambda c, x: ((c[0] + x * c[1], c[1], None), 2), (torch.zeros(()), 3, None), torch.ones(4), compile="strict"
    )
    assert (carry[0].item(), carry[1:], torch.as_tensor(ys).tolist()) == (12, (3, None), [2, 2, 2, 2])


def test_arrays_with_holes_run_eagerly():
    holed = tl.TensorArray(capacity=3).write(1, torch.ones(()))
    with pytest.warns(NotCompiledWarning, match="an array in the carry has holes"):
        array, _ = tl.scan(lambda a, x: (a.append(x), None), holed, torch.arange(3.0), compile=True)
    assert array[1:].tolist() == [1, 0, 1, 2]


def test_a_counter_in_the_closure_is_seen():
    n = 0

    def body(h: Tensor, x: Tensor) -> Any:
        nonlocal n
        n += 1
        return h + x * n, None

    with pytest.raises(RuntimeError, match="the body sets n, a variable of its closure"):
        tl.scan(body, torch.zeros(()), torch.ones(4), compile="strict")
    assert n == 0


def test_errors_of_a_body_are_those_of_the_eager_loop():
    with pytest.raises(TypeError, match="the body changed the carry at step 0"):
        tl.scan(lambda h, x: (h.double(), None), torch.zeros(3), torch.ones(4, 3), compile=True)
    with pytest.raises(ZeroDivisionError):
        tl.scan(lambda h, x: (h / (1 // 0), None), torch.zeros(3), torch.ones(4, 3), compile="strict")
