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
