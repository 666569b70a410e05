"""Hooks of what a loop is given: called as in a plain loop, and not at all where no gradient comes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl

KINDS = [{}, {"checkpoints": 2}, {"compile": True}, {"checkpoints": 2, "compile": True}]
INPUTS = ["w", "v", "a", "b", "xs"]


def given(leaves: bool) -> dict[str, Tensor]:
    """The inputs of `run`: two weights, the first carries of two states, xs."""
    values = [[0.5, 0.7], [0.3, 0.2], [1.0, 0.5], [0.1, 0.2], [[0.1, 0.4], [0.8, 0.6], [0.3, 0.9]]]
    made = {name: torch.tensor(x, requires_grad=True) for name, x in zip(INPUTS, values, strict=True)}
    return made if leaves else {name: x.sin() for name, x in made.items()}


def run(options: Any, w: Tensor, v: Tensor, a: Tensor, b: Tensor, xs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two states that know nothing of each other, b without xs; a plain loop where `options` is None."""

    def body(carry: Any, x: Tensor) -> Any:
        a, b = carry
        return (torch.tanh(a * w + x), b * v), a * 2

    if options is not None:
        (a, b), ys = tl.scan(body, (a, b), xs, **options)
        return a, b, ys
    ys = []
    for x in xs.unbind():
        (a, b), y = body((a, b), x)
        ys.append(y)
    return a, b, torch.stack(ys)


def seen(options: Any, name: str, leaves: bool, part: int, *, again: bool = False, graph: bool = False) -> list[Tensor]:
    """What a hook of one input gets where one part of the results is differentiated."""
    inputs, calls = given(leaves), []
    inputs[name].register_hook(lambda g: calls.append(g if g is None else g.detach().clone()))
    result = run(options, **inputs)[part].square().sum()
    if again:
        result.backward(retain_graph=True)
    if graph:
        result = torch.autograd.grad(result, inputs["a"], create_graph=True)[0].square().sum()
    result.backward()
    return calls


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_hooks_of_inputs_get_what_they_get_in_a_plain_loop(name: str, leaves: bool, options: Any) -> None:
    for part in range(3):
        for again in (False, True):
            expected = seen(None, name, leaves, part, again=again)
            torch.testing.assert_close(seen(options, name, leaves, part, again=again), expected)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("name", ["w", "a", "xs"])
def test_hooks_are_called_once_for_a_second_derivative(name: str, options: Any) -> None:
    torch.testing.assert_close(seen(options, name, True, 0, graph=True), seen(None, name, True, 0, graph=True))


@pytest.mark.parametrize("options", [None, *KINDS])
def test_a_hook_is_there_again_once_it_was_spared(options: Any) -> None:
    inputs, calls = given(True), []
    v = inputs["v"]
    handle = v.register_hook(lambda g: calls.append("hook"))
    v.register_post_accumulate_grad_hook(lambda x: calls.append(x.grad))
    run(options, **inputs)[0].sum().backward()
    assert calls == []
    run(options, **inputs)[1].sum().backward()
    assert calls == ["hook", v.grad]
    run(options, **inputs)[0].sum().backward()
    a, b, _ = run(options, **inputs)
    (a.sum() + b.sum()).backward()
    assert calls == ["hook", v.grad] * 2
    (run(options, **inputs)[0].sum() + v.sum()).backward()  # a gradient that comes from elsewhere
    assert calls == ["hook", v.grad] * 3
    run(options, **inputs)[0].sum().backward(inputs=[inputs["a"]])
    handle.remove()
    run(options, **inputs)[1].sum().backward()
    assert calls == [*(["hook", v.grad] * 3), v.grad]


@pytest.mark.parametrize("options", KINDS)
def test_loops_in_a_row_pass_on_that_there_is_no_gradient(options: Any) -> None:
    inputs, calls = given(True), []
    for name in ("v", "b"):
        inputs[name].register_hook(calls.append)
    a, b, _ = run(options, **inputs)
    run(options, **{**inputs, "a": a, "b": b})[0].sum().backward()
    assert calls == []
