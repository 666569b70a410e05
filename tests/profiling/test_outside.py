"""The check of a loop and its port: what is the same, what is not, and what a table says of both."""

from typing import Any

import torch
from torch import Tensor

import tensorloop as tl


def _decay(scripts: dict[str, Any], factor: float) -> Any:
    """A loop of a package that is always there, and a port that multiplies by `factor`."""
    check = scripts["outside_check"]

    def make(size: Any) -> Any:
        weight = torch.full((size.width,), 0.9, requires_grad=True)

        def original(xs: Tensor) -> Tensor:
            h, hs = torch.zeros_like(xs[0]), []
            for x in xs:
                h = torch.sin(weight * h) + x
                hs.append(h)
            return torch.stack(hs)

        def port(xs: Tensor, compile: bool | None = None) -> Tensor:
            def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                h = torch.sin(weight * h) * factor + x
                return h, h

            return tl.scan(body, torch.zeros_like(xs[0]), xs, compile=compile)[1]

        return check.Made(original, port, (torch.randn(size.steps, size.rows, size.width),), [weight])

    return check.Loop("torch", "decay", make, others=(1,))


def _checked(scripts: dict[str, Any], factor: float) -> dict[str, Any]:
    size = scripts["outside_check"].Size(5, 2, 3)
    return scripts["outside_check"].check(_decay(scripts, factor), size, size, 0.0, turns=1) | {"package": "torch"}


def test_a_port_that_is_the_same(scripts: dict[str, Any]):
    found = _checked(scripts, 1.0)
    assert (found["same"], found["differences"], found["cases"]) == (True, [], {"T = 1": "same"})
    assert found["apart"] < 1e-14
    assert found["port_lines"] == 5
    row = scripts["outside"].rows_of([found])[0]
    assert row[:3] == ["torch", "decay", "same"]


def test_a_port_that_is_not(scripts: dict[str, Any]):
    found = _checked(scripts, 1 + 1e-5)
    assert not found["same"]
    assert 1e-7 < found["apart"] < 1e-3
    assert found["differences"][0].startswith("value of output")
    assert scripts["outside"].rows_of([found])[0][2] == "wrong"


def test_lines_are_those_of_code(scripts: dict[str, Any]):
    check = scripts["outside_check"]
    assert check.code_lines(check.ast.parse('def f():\n    """Words.\n\n    More."""\n    # why\n    return 1\n')) == 2


def test_what_is_missing_is_named(scripts: dict[str, Any]):
    answers = [
        {"cell": {"package": name}, "raw": [raw]}
        for name, raw in (("a", {"version": "1", "loops": []}), ("b", {"absent": "not installed"}))
    ]
    assert scripts["outside"].versions({"entries": answers}) == "Packages: a 1. Not installed: b."
