"""The examples in the docstrings of public names: each has one, and it gives what it says."""

import doctest
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tensorloop as tl


def example_of(name: str) -> doctest.DocTest:
    thing: Any = getattr(tl, name)
    names = {"torch": torch, "tl": tl, "F": F}
    return doctest.DocTestParser().get_doctest(thing.__doc__, names, name, None, None)


def failures(test: doctest.DocTest) -> str:
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", tl.__all__)
def test_every_public_name_has_an_example_that_holds(name: str) -> None:
    torch.manual_seed(0)
    test = example_of(name)
    assert test.examples, f"the docstring of {name} has no example"
    assert failures(test) == ""


def test_an_example_that_does_not_hold_is_seen() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert "Expected:\n    3\nGot:\n    2" in failures(test)
