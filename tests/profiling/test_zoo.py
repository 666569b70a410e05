"""The zoo's check of a module: what is right, what is wrong, what is refused, and what runs with lines changed."""

from typing import Any

import torch
from torch import nn


class _Right(nn.Linear):
    def forward(self, input: Any) -> Any:
        return super().forward(input).relu()


class _Wrong(nn.Linear):
    """Sees padding: the mean is over the longest row."""

    def forward(self, input: Any) -> Any:
        whole = input if isinstance(input, torch.Tensor) else input.pad()
        return super().forward(input) + whole.mean(1, keepdim=True)


class _WrongGradient(nn.Linear):
    def forward(self, input: Any) -> Any:
        y = super().forward(input)
        return y if isinstance(input, torch.Tensor) else y.detach() + 0 * y


class _Refused(nn.Linear):
    def forward(self, input: Any) -> Any:
        return super().forward(input.sum(1) / input.size(1))


def _check(scripts: dict[str, Any], kind: Any, **options: Any) -> Any:
    check = scripts["zoo_check"]
    return check.check(check.Module("here", "", lambda: kind(check.WIDTH, check.WIDTH), **options))


def test_what_a_check_finds(scripts: dict[str, Any]):
    found = _check(scripts, _Right)
    assert (found.result, found.apart < 1e-14) == ("unchanged", True)
    assert _check(scripts, _Wrong).result == "wrong"
    assert _check(scripts, _WrongGradient).result == "wrong"
    found = _check(scripts, _Refused)
    assert found.result == "refused"
    assert found.error.startswith("TypeError: rtruediv: the ragged dim")


def test_lines_that_are_changed(scripts: dict[str, Any]):
    before = _Refused.forward
    edit = scripts["zoo_check"].Edit(
        f"{__name__}._Refused.forward",
        (("return super().forward(input.sum(1) / input.size(1))", "return nn.Linear.forward(self, input.mean(1))"),),
    )
    found = _check(scripts, _Refused, edits=(edit,))
    assert (found.result, found.changed) == ("changed", 1)
    assert "truediv" in found.error
    assert _Refused.forward is before
    assert edit.diff.splitlines()[1:] == [f"{mark}{line}" for mark, line in zip("-+", edit.lines[0], strict=True)]
