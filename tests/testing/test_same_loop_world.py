"""`same_loop`: what functions reach beside their arguments is compared, and is put back after each run."""

import math
import random
import types
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.testing import same_loop, world
from tests.testing.test_same_loop import XS, B, F, T


class Slotted:
    __slots__ = ("h",)

    def __init__(self) -> None:
        self.h = torch.zeros(F)


def test_all_that_a_run_changes_is_put_back() -> None:
    """Slots, generators, lists, and the random numbers of torch and Python."""
    slotted, generator, log = Slotted(), torch.Generator().manual_seed(1), [0.5]

    def note(h: Tensor, x: Tensor) -> Tensor:
        return h * random.random() + x * torch.rand(F, generator=generator)

    def plain(xs: Tensor) -> Tensor:
        for x in xs:
            slotted.h = note(slotted.h, x)
        log.append(1.0)
        return slotted.h

    def ported(xs: Tensor) -> Tensor:
        slotted.h = tl.scan(lambda h, x: (note(h, x), None), slotted.h.expand(B, F), xs)[0]
        log.append(1.0)
        return slotted.h

    states = generator.get_state(), torch.get_rng_state(), random.getstate()
    report = same_loop(plain, ported, XS, sizes={"T": (T, 1, 9)}, repeats=1)
    assert report, report
    assert "rand" in report.runs[3].remark  # refused with checkpoints, which is no difference
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == states[2]
    assert log == [0.5]
    assert slotted.h.shape == (F,)
    assert not slotted.h.any()


def test_an_argument_and_a_weight_of_one_name() -> None:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.D = nn.Parameter(torch.ones(F))  # which the method does not read

        def run(self, xs: Tensor, D: Tensor) -> Tensor:
            return torch.stack([x * D for x in xs])

    report = same_loop(Scan().run, lambda xs, D: tl.map(lambda x: x * D, xs), XS, torch.randn(F), sizes={}, repeats=0)
    assert report, report
    assert "args[1]" in report.compared


def test_the_default_dtype_is_double_only_where_all_else_is() -> None:
    def single(xs: Tensor) -> Tensor:
        assert torch.zeros(1).dtype == torch.float32
        return xs.sum(0)

    report = same_loop(single, single, XS, sizes={}, repeats=0)
    assert report, report
    assert report.dtype == "the dtypes given"


class Proxied:
    """Has no dict that could be put back, as proxies of other packages."""

    @property
    def __dict__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return types.MappingProxyType({"rate": 0.5})


def test_an_object_without_a_dict_of_its_own() -> None:
    proxied = Proxied()
    report = same_loop(lambda xs: xs.sum(0) * vars(proxied)["rate"], lambda xs: xs.sum(0) / 2, XS, sizes={}, repeats=0)
    assert report, report


def test_none_is_no_tensor_of_zeros_and_one_no_true() -> None:
    def gives(x: Any) -> Any:
        return lambda xs: (xs.sum(0), x)

    pairs = [(None, torch.zeros(2)), (torch.zeros(2), None), (1, True), (1, 1.0), ("a", "b"), (torch.ones(()), 1.0)]
    for a, b in pairs:
        report = same_loop(gives(a), gives(b), XS, sizes={}, repeats=0)
        assert not report, (a, b)
        assert report.differences[0].startswith("value of output[1]: "), report
    for a in (None, math.nan, 1, "a", torch.tensor([math.nan])):
        assert same_loop(gives(a), gives(a), XS, sizes={}, repeats=0), a


def test_state_in_private_names_arrays_and_containers() -> None:
    """It is compared where it can be, and put back everywhere."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._last, self.wrong = torch.zeros(F), False

        def forward(self, xs: Tensor) -> Tensor:
            self._last = xs[-1, 0].detach() + self.wrong
            return xs.sum(0)

    first, second = Keeps(), Keeps()
    assert same_loop(first, second, XS, sizes={}, repeats=0)
    second.wrong = True
    assert "side effect on _last" in repr(same_loop(first, second, XS, sizes={}, repeats=0))
    assert not first._last.any()

    array, seen, past, raw = np.zeros(T), {0.5}, deque([1.0], maxlen=3), bytearray(2)

    def notes(by: float) -> Any:
        def function(xs: Tensor) -> Tensor:
            array[:] = by
            seen.add(by)
            past.append(2.0)
            raw[0] = 7
            return xs.sum(0)

        return function

    assert same_loop(notes(1.0), notes(1.0), XS, sizes={}, repeats=0)
    report = same_loop(notes(1.0), notes(2.0), XS, sizes={}, repeats=0)
    assert "side effect on array: the original changes it: 6 of 6 numbers differ" in repr(report)
    assert not array.any()
    assert seen == {0.5}
    assert past == deque([1.0])
    assert raw == bytearray(2)


def test_a_gradient_that_is_added_to_in_a_run_is_put_back() -> None:
    weight = torch.ones(F, requires_grad=True)
    weight.grad = torch.ones(F)
    before = weight.grad

    def steps(xs: Tensor) -> Tensor:
        (weight * xs.detach()).sum().backward()
        return xs.sum(0)

    same_loop(steps, steps, XS, sizes={}, repeats=0)
    assert weight.grad is before
    assert torch.equal(before, torch.ones(F))


def test_random_numbers_of_python_and_numpy() -> None:
    def draws(function: Any) -> Any:
        return lambda xs: (function(), xs.sum(0))[1]

    states = random.getstate(), np.random.get_state()[1].tobytes()  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType, reportIndexIssue]
    for function in (random.random, np.random.rand):
        assert same_loop(draws(function), draws(function), XS, sizes={}, repeats=0)
        report = same_loop(draws(function), draws(int), XS, sizes={}, repeats=0)
        assert report.differences == ["random numbers: the port draws more, fewer or others of them"]
    after = random.getstate(), np.random.get_state()[1].tobytes()  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType, reportIndexIssue]
    assert after == states


def test_too_many_objects_are_not_compared_in_part() -> None:
    many = [[i] for i in range(world.MOST)]
    report = same_loop(lambda xs: xs * len(many), lambda xs: xs * len(many), XS, sizes={}, repeats=0)
    assert report.differences == [
        "nothing was compared: more than 20,000 objects are reached; give functions that reach less"
    ]
