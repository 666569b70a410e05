"""What the tests of loops share: one program run by our loops and by plain Python ones; bodies that do not contract.

A *program* is a function `program(loops, *inputs)` that gives a pytree of tensors. `loops` has the functions of
tensorloop, once as `Ours(checkpoints)` and once as `Plain()`: a Python loop under ordinary autograd, arrays as lists.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop import reference
from tests.support.devices import HERE

CHECKPOINTS = [None, 1, 3]
NAMES = ["all", "K=1", "K=3"]
with_and_without_checkpoints = pytest.mark.parametrize("checkpoints", CHECKPOINTS, ids=NAMES)

Program = Callable[..., Any]


class Slots(list):
    """What a TensorArray is compared with: a list whose slices stack and whose writers return it."""

    def __getitem__(self, i: Any) -> Any:
        return torch.stack(list(self)[i]) if isinstance(i, slice) else super().__getitem__(i)

    def append(self, x: Tensor) -> "Slots":  # pyright: ignore[reportIncompatibleMethodOverride]
        super().append(x)
        return self

    def write(self, i: int, x: Tensor) -> "Slots":
        if i == len(self):
            return self.append(x)
        self[i] = x
        return self

    def stack(self) -> Tensor:
        return torch.stack(list(self))

    @classmethod
    def unstack(cls, values: Tensor) -> "Slots":
        return cls(values.unbind(0))


class Plain:
    """Python loops under ordinary autograd."""

    array: Any = Slots

    def scan(self, *args: Any, **options: Any) -> Any:
        return reference.scan(*args, **options)

    def while_loop(self, *args: Any, **options: Any) -> Any:
        cond_fn, body_fn, init = args
        return reference.while_loop(cond_fn, body_fn, _own(init), **options)[0]

    def fori_loop(self, lower: int, upper: int, body_fn: Callable[..., Any], init: Any) -> Any:
        carry = _own(init)
        for i in range(lower, upper):
            carry = body_fn(i, carry)
        return carry

    def map(self, fn: Callable[..., Any], xs: Any, **options: Any) -> Any:
        return reference.scan(lambda carry, x: (carry, fn(x)), (), xs, **options)[1]


class Ours:
    """The loops of tensorloop, with or without checkpoints."""

    array: Any = tl.TensorArray

    def __init__(self, checkpoints: Any = None) -> None:
        self.checkpoints = checkpoints

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(tl, name)
        return lambda *args, **options: function(*args, checkpoints=self.checkpoints, **options)


def _own(init: Any) -> Any:
    """Lists stand for arrays, which a loop copies before it writes to them."""
    return _pytree.tree_map(lambda x: copy.copy(x) if isinstance(x, Slots) else x, init)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a result, arrays stacked; numbers as tensors, so that they are compared too."""
    leaves = [x.stack() if isinstance(x, Slots | tl.TensorArray) else x for x in tree_leaves(tree)]
    return [torch.as_tensor(x) for x in leaves if isinstance(x, Tensor | bool | int | float | complex)]


def fresh(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]


def cotangents(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator(HERE).manual_seed(1)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]


def run(program: Program, loops: Any, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[bool], list[Tensor]]:
    """(outputs, which of them carry a gradient, the gradients of all inputs that want one)"""
    inputs = fresh(inputs)
    outputs = tensors(program(loops, *inputs))
    flags = [x.requires_grad for x in outputs]
    wanted = [x for x in inputs if x.requires_grad]
    live = [(x, c) for x, c in zip(outputs, cotangents(outputs), strict=True) if x.requires_grad]
    if not live or not wanted:
        return outputs, flags, [torch.zeros_like(x) for x in wanted]
    grads = torch.autograd.grad([x for x, _ in live], wanted, [c for _, c in live], allow_unused=True)
    return outputs, flags, [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)]


def compare(
    program: Program, *inputs: Tensor, checkpoints: Any = None, tolerance: float = 1e-11, flags: bool = True
) -> None:
    """Values, which outputs carry a gradient (unless not `flags`), and all gradients are those of the Python loop."""
    before = fresh(inputs)
    outputs, recorded, grads = run(program, Ours(checkpoints), inputs)
    true_outputs, true_recorded, true_grads = run(program, Plain(), inputs)
    torch.testing.assert_close(outputs, true_outputs, rtol=tolerance, atol=tolerance)
    assert not flags or recorded == true_recorded
    torch.testing.assert_close(grads, true_grads, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "the caller's tensors changed"


def randn(*shape: int, seed: int = 0, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator(HERE).manual_seed(1000 * seed + math.prod(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)


def rotate(x: Tensor, angle: float | Tensor = 0.9) -> Tensor:
    """Turns pairs of features (*, 2 n): a carry keeps its size, so early steps count as much as late ones."""
    a, b = x.chunk(2, -1)
    angle = torch.as_tensor(angle, dtype=x.dtype)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def cell(weight: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A recurrent body over a carry (*, 4) and x (*, 3) that closes over weight (3, 4); y (*, 4)."""

    def body(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = rotate(carry) + torch.sin(x @ weight) * carry.cos()
        return carry, carry * carry.flip(-1)

    return body


def recurrent(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Any:
    """A program: `cell` scanned."""
    return loops.scan(cell(w), init, xs)


def inputs(init: bool = True, xs: bool = True, w: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of `recurrent`, and which of them want a gradient."""
    return randn(4, grad=init), randn(7, 3, grad=xs), randn(3, 4, grad=w)


class Counter:
    """Counts the calls of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)
