"""The same slots, reached by every way of filling a TensorArray: `KINDS[name](values)` holds `values.unbind(0)`."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

import tensorloop as tl


class Tagged(torch.Tensor):
    """A tensor subclass: the array then keeps a list of slots instead of a buffer."""


def appended(values: Tensor) -> tl.TensorArray:
    array = tl.TensorArray()
    for x in values.unbind(0):
        array.append(x)
    return array


def extended(values: Tensor) -> tl.TensorArray:
    return tl.TensorArray().extend(values)


def overwritten(values: Tensor) -> tl.TensorArray:
    array = appended(torch.zeros_like(values))
    for i, x in enumerate(values.unbind(0)):
        array[i] = x
    return array


def scattered(values: Tensor) -> tl.TensorArray:
    return tl.TensorArray().scatter(range(len(values) - 1, -1, -1), values.flip(0))


def unstacked(values: Tensor) -> tl.TensorArray:
    return tl.TensorArray.unstack(values.clone())


def forked(values: Tensor) -> tl.TensorArray:
    """A copy that did not get the free tail of the shared buffer."""
    array = appended(values[:-1])
    twin = copy.copy(array)
    array.append(torch.zeros_like(values[-1]))
    return twin.append(values[-1])


def listed(values: Tensor) -> tl.TensorArray:
    return appended(values.as_subclass(Tagged))


def waiting(values: Tensor) -> tl.TensorArray:
    """Every slot waits to be copied."""
    return appended(values.detach().clone().requires_grad_())


def partly_waiting(values: Tensor) -> tl.TensorArray:
    """The last slots wait: one with a gradient, and one without that came behind it."""
    array = waiting(values[:-2])
    array.stack()
    return array.append(values[-2].clone().requires_grad_()).append(values[-1])


def flushed(values: Tensor) -> tl.TensorArray:
    """The values need a gradient and are in the buffer."""
    array = waiting(values)
    array.stack()
    return array


def unstacked_with_gradient(values: Tensor) -> tl.TensorArray:
    return tl.TensorArray.unstack(values.clone().requires_grad_())


Kind = Callable[[Tensor], tl.TensorArray]
PLAIN: dict[str, Kind] = {
    f.__name__: f for f in (appended, extended, overwritten, scattered, unstacked, forked, listed)
}
WITH_GRADIENT: dict[str, Kind] = {f.__name__: f for f in (waiting, partly_waiting, flushed, unstacked_with_gradient)}
KINDS: dict[str, Kind] = PLAIN | WITH_GRADIENT


def holds(array: tl.TensorArray, values: Tensor) -> bool:
    """Whether the array has these slots, by single reads and by bulk reads."""
    singles = [array.read(i) for i in range(len(array))]
    return (
        len(array) == len(values)
        and all(torch.equal(a, b) for a, b in zip(singles, values.unbind(0), strict=True))
        and torch.equal(array.stack(), values)
        and all(x.dtype == values.dtype and x.shape == values.shape[1:] for x in singles)
        and (array.dtype, array.device, array.element_shape) == (values.dtype, values.device, tuple(values.shape[1:]))
    )
