"""Keywords of other libraries: the error names ours."""

import inspect
from typing import Any

import pytest
import torch

import tensorloop as tl
from tensorloop import risk


@pytest.mark.parametrize(
    ("keyword", "ours"),
    [
        ("max_length", "max_steps="),
        ("num_beams", "beam_size="),
        ("num_return_sequences", "n_best="),
        ("length_penalty", r"length=tl.beam.Power\(alpha\)"),
        ("eos_token_id", "eos_id="),
        ("n_bests", r"did you mean n_best="),
        ("colour", "it takes step_fn, init_carry, batch_size"),
    ],
)
def test_beam_search_names_its_own(keyword: str, ours: str):
    arguments: dict[str, Any] = {"batch_size": 1, "beam_size": 2, "bos_id": 0, "eos_id": 1, keyword: 3}
    with pytest.raises(TypeError, match=f"^beam_search: there is no argument {keyword}=; {ours}"):
        tl.beam_search(lambda carry, tokens: (carry, tokens), None, **arguments)


@pytest.mark.parametrize("name", ["minimum_risk", "mwer", "leave_one_out", "stochastic_beam_risk"])
@pytest.mark.parametrize(("keyword", "ours"), [("mask", "valid="), ("lengths", "lens="), ("reductions", "did you")])
def test_objectives_name_their_own(name: str, keyword: str, ours: str):
    with pytest.raises(TypeError, match=f"^{name}: there is no argument {keyword}=; {ours}"):
        getattr(risk, name)(torch.zeros(1, 2), torch.zeros(1, 2), **{keyword: 3})


def test_signatures_stay_what_they_are():
    assert list(inspect.signature(tl.minimum_risk).parameters)[:3] == ["scores", "risks", "alpha"]
    assert "eos_id" in inspect.signature(tl.beam_search).parameters
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'risks'"):
        tl.minimum_risk(torch.zeros(1, 2))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("call", "ours"),
    [
        (lambda loop: loop.scan(lambda c, x: (c, x), 0, length=2, unroll=2), "unroll=; here that is compile="),
        (lambda loop: loop.while_loop(bool, abs, carried_inputs=(1,)), "carried_inputs=; here that is init="),
        (lambda loop: loop.while_loop(cond=bool, body=abs, loop_vars=1), "cond=; here that is cond_fn="),
        (lambda loop: loop.scan(f=lambda c, x: (c, x), init=0, xs=range(2)), "f=; here that is body_fn="),
        (lambda loop: loop.associative_scan(combine_fn=torch.add, xs=torch.ones(2)), "combine_fn=; here that is fn="),
    ],
)
def test_loops_name_their_own(call: Any, ours: str):
    with pytest.raises(TypeError, match=f"there is no argument {ours}"):
        call(tl)


@pytest.mark.parametrize(("name", "ours"), [("push_back", "append"), ("concat", "stack"), ("get", "read")])
def test_arrays_name_their_own_methods(name: str, ours: str):
    with pytest.raises(
        AttributeError, match=rf"'TensorArray' object has no attribute '{name}'; did you mean .{ours}\(\)"
    ):
        getattr(tl.TensorArray(), name)
    assert not hasattr(tl.TensorArray(), name)


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda n: tl.fori_loop(0, n, lambda i, c: c, 0), "upper .* use while_loop with the bound in cond_fn"),
        (lambda n: tl.fori_loop(n, 9, lambda i, c: c, 0), "lower .* use while_loop with the number in the carry"),
        (lambda n: tl.scan(lambda c, x: (c, x), 0, length=n), "length .* use while_loop with the length in cond_fn"),
        (lambda n: tl.while_loop(bool, abs, 0, max_steps=n), "max_steps .* let cond_fn end the loop"),
    ],
)
def test_a_bound_for_each_row(call: Any, cure: str):
    with pytest.raises(TypeError, match=f"{cure}.* by a bool for each row"):
        call(torch.tensor([2, 3]))
