"""An operation of one step for all steps at once, where it has no rule of its own: by vmap, or step by step."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop._torch.overrides import unseen
from tensorloop.compiler.place import HOST

LARGE = 2**20  # elements of one step


class TensorArgument:
    """The place of a tensor among the arguments of a mapped operation."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"<{self.index}>"


class Mapped:
    """An operation for all steps. In its arguments each tensor is a `TensorArgument`; some of those `given` move."""

    def __init__(
        self, node: fx.Node, args: Any, kwargs: Any, given: Sequence[tuple[Tensor, bool]], device: torch.device
    ) -> None:
        self.target: Any = node.target
        self.args, self.kwargs = args, kwargs
        self.dims = tuple(0 if moves else None for _, moves in given)
        self._orders = [_order_of(value) if moves else None for value, moves in given]
        value = node.meta["val"]
        self.there = None if isinstance(value, Tensor) else [x is not None for x in value]  # of several results
        self.__name__ = f"mapped_{getattr(self.target, '_opname', 'operation')}"
        self.mapped = self._vmap_is_right(given)  # on the host
        if "device" in kwargs:
            self.kwargs = {**kwargs, "device": device}

    def __call__(self, *tensors: Tensor) -> Any:
        """The operation for all steps.

        What it is given lies in memory as it did when the step was traced: kernels and gradients of some factorisations
        ask for that, and go by it.
        """
        tensors = tuple(_laid(x, order) for x, order in zip(tensors, self._orders, strict=True))
        return self._mapped(*tensors) if self.mapped else self._in_turn(*tensors)

    def _in_turn(self, *tensors: Tensor) -> Any:
        """Runs the operation step by step and stacks the results."""
        steps = next(len(x) for x, dim in zip(tensors, self.dims, strict=True) if dim is not None)
        outs = []
        for t in range(steps):
            given = [x if dim is None else x[t] for x, dim in zip(tensors, self.dims, strict=True)]
            outs.append(self.target(*_filled(self.args, given), **_filled(self.kwargs, given)))
        if self.there is None:
            return torch.stack(outs)
        pairs = zip(zip(*outs, strict=True), self.there, strict=True)
        return tuple(torch.stack(xs) if there else None for xs, there in pairs)

    def _mapped(self, *tensors: Tensor) -> Any:
        def one(*tensors: Tensor) -> Any:
            out = self.target(*_filled(self.args, tensors), **_filled(self.kwargs, tensors))
            return out if self.there is None else tuple(x for x in out if x is not None)

        found = torch.func.vmap(one, self.dims)(*tensors)
        if self.there is None:
            return found
        left = iter(found)
        return tuple(next(left) if there else None for there in self.there)

    def _vmap_is_right(self, given: Sequence[tuple[Tensor, bool]]) -> bool:
        """Whether vmap gives what the operation itself gives step by step, on a few steps of random numbers.

        For some operations torch's own rules are wrong. Those go step by step, and those of which no numbers that were
        tried here have a value. Of large tensors one trial is enough. Integers are never tried: they may be places, or
        pivots, and not every kernel of torch looks whether they are in its memory.
        """
        if any(_is_whole(x.dtype) for x, _ in given):
            return False
        generator, tried = torch.Generator(HOST).manual_seed(0), False
        with unseen(), torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trials = (3, False), (5, True)  # of two steps, rolled by two, each is where it was
            large = sum(x.numel() for x, _ in given) > LARGE
            for steps, positive in trials[: 1 if large else 2]:
                shapes = [(steps, *x.shape) if moves else x.shape for x, moves in given]
                dtypes = [x.dtype for x, _ in given]
                tensors = [_numbers(*x, generator, positive=positive) for x in zip(shapes, dtypes, strict=True)]
                with contextlib.suppress(Exception):  # of such numbers it has no value
                    expected = self._in_turn(*tensors)
                    tried |= _says_something(expected)
                    if not self._agrees(tensors, expected):
                        tried = False
                        break
        return tried and not said  # vmap warns where it goes step by step itself

    def _agrees(self, tensors: Sequence[Tensor], expected: Any) -> bool:
        found: list[Any] = []
        try:
            _Heard.apply(lambda: found.append(self._mapped(*tensors)))
        except Exception:
            return False
        return _agree(found[0], expected)


class _Heard(torch.autograd.Function):
    """Runs something in a call of torch's, which makes Python's warnings of those in C++, else printed."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], object]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Runs it."""
        run()


def _numbers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, *, positive: bool) -> Tensor:
    """Returns random numbers of a dtype: floats are of both signs or, where `positive`, near one."""
    options: Any = {"generator": generator, "device": HOST}
    if dtype.is_floating_point or dtype.is_complex:
        numbers = torch.rand(shape, **options) + 0.5 if positive else torch.randn(shape, **options)
        return numbers.to(dtype)
    return torch.randint(0, 2, tuple(shape), **options).to(dtype)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _order_of(value: Tensor) -> list[int]:
    """The dims of one step's value, the one with the widest strides first."""
    return sorted(range(value.dim()), key=lambda d: -value.stride(d))


def _laid(x: Tensor, order: list[int] | None) -> Tensor:
    """A tensor of all steps with the dims of a step in this order in memory."""
    if order is None:
        return x
    dims = [0, *(d + 1 for d in order)]
    return x.permute(dims).contiguous().permute([dims.index(d) for d in range(x.dim())])


def _says_something(x: Any) -> bool:
    """Whether there is a number in a result that is not NaN."""
    if not isinstance(x, Tensor):
        return x is not None and any(map(_says_something, x))
    return not x.numel() or not bool(torch.isnan(x).all())


def _agree(a: Any, b: Any) -> bool:
    """Whether two results are the same but for rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (a is not None and b is not None and all(map(_agree, a, b)))
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    small = torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() or a.is_complex() else 0
    return torch.allclose(a, b, small, small, equal_nan=True)


def _filled(x: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(x, TensorArgument):
        return tensors[x.index]
    if isinstance(x, dict):
        return {k: _filled(y, tensors) for k, y in x.items()}
    return [_filled(y, tensors) for y in x] if isinstance(x, (list, tuple)) else x
