"""Assertions for tests of loops: bytes saved, their growth with T, leaks, and agreement with a reference.

Bytes and exponents are measured by `tensorloop.memory`; nothing is measured here. An assertion on bytes that
holds returns what was measured, so that a test can go on with it; one that fails gives the figures.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.dispatch import tree_leaves, tree_map
from tensorloop._torch.versions import version_of
from tensorloop.memory import Growth, LiveStorages, Saved, collector_off, growth, saved, saved_bytes
from tensorloop.memory.counting.saved import must_be_function as _must_be_function
from tensorloop.packed.table.base import is_packed
from tensorloop.testing.outcome import as_zeros, gradients_of, inputs_of, listed, outputs_of
from tensorloop.testing.world import is_float

__all__ = [
    "assert_close",
    "assert_growth",
    "assert_linear_memory",
    "assert_matches_reference",
    "assert_no_leak",
    "assert_saved_bytes",
]


def __dir__() -> list[str]:
    return __all__


def assert_saved_bytes(
    fn: Callable[..., Any], *args: Any, at_most: int | None = None, exactly: int | None = None
) -> Saved:
    """Asserts how many bytes `fn(*args)` keeps for its backward pass.

        tl.testing.assert_saved_bytes(fn, x, at_most=10_000)
        tl.testing.assert_saved_bytes(fn, x, exactly=16)

    Args:
        fn: gives tensors, in any nested lists, tuples and dicts. It is called once, as by `tl.memory.saved`.
        args: passed to fn.
        at_most: int, bytes. Default None: no such bound.
        exactly: int, bytes. Default None: no such bound.

    Returns:
        What was measured, a `tl.memory.Saved`.

    Raises:
        AssertionError: with all figures measured.
        ValueError: no bound given.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> tl.testing.assert_saved_bytes(lambda: (w * 2).sin().sum(), exactly=16).bytes  # what sin keeps
        16
    """
    if at_most is None and exactly is None:
        raise ValueError("assert_saved_bytes: no bound; give at_most= or exactly= (bytes)")
    _must_be_function(fn, "assert_saved_bytes")
    found = saved(fn, *args)
    for relation, bound, holds in (
        ("at most", at_most, at_most is None or found.bytes <= at_most),
        ("exactly", exactly, exactly is None or found.bytes == exactly),
    ):
        if not holds:
            raise AssertionError(f"assert_saved_bytes: expected {relation} {bound:,} bytes saved, found {found}")
    return found


def assert_growth(
    make_fn: Callable[[int], Callable[[], Any]],
    Ts: Sequence[int],
    exponent: float,
    tolerance: float = 0.1,
    *,
    subtract: Callable[[int], int] | None = None,
    measure: Callable[[Callable[[], Any]], int] = saved_bytes,
) -> Growth:
    """Asserts that the bytes of `make_fn(T)()` grow as T to the power `exponent`.

    Args:
        make_fn: `make_fn(T)` returns a function of no arguments; its bytes are measured.
        Ts: sequence of int, two or more rising sizes, such as (32, 64, 128).
        exponent: float, the power of T: 1 is linear, 2 is quadratic.
        tolerance: float, default 0.1: how far both exponents measured may be from it: the one fitted over all sizes,
            and that of the last three, in which no constant term can hide growth.
        subtract: `subtract(T)` gives bytes to take off before fitting, such as an input's. Default None: none.
        measure: gives the bytes of such a function; default `tl.memory.saved_bytes`, those kept for backward.

    Returns:
        What was measured, a `tl.memory.Growth`.

    Raises:
        AssertionError: with the table of what was measured.
        ValueError: Ts are not two or more rising sizes.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> make = lambda T: lambda: sum((w * t).sin().sum() for t in range(T))
        >>> tl.testing.assert_growth(make, (8, 16, 32), 1).Ts
        (8, 16, 32)
    """
    found = growth(make_fn, Ts, subtract=subtract, measure=measure)
    if max(abs(found.exponent - exponent), abs(found.marginal - exponent)) > tolerance:
        raise AssertionError(f"assert_growth: expected bytes ~ T^{exponent} within {tolerance}, found\n{found}")
    return found


def assert_linear_memory(
    make_fn: Callable[[int], Callable[[], Any]],
    Ts: Sequence[int],
    tolerance: float = 0.1,
    *,
    subtract: Callable[[int], int] | None = None,
    measure: Callable[[Callable[[], Any]], int] = saved_bytes,
) -> Growth:
    """Asserts that the bytes of `make_fn(T)()` grow with T and no faster; growing slower is fine.

    Args:
        make_fn: `make_fn(T)` returns a function of no arguments; its bytes are measured.
        Ts: sequence of int, two or more rising sizes, such as (32, 64, 128).
        tolerance: float, default 0.1: neither exponent measured may be over 1 + tolerance.
        subtract: `subtract(T)` gives bytes to take off before fitting, such as an input's. Default None: none.
        measure: gives the bytes of such a function; default `tl.memory.saved_bytes`, those kept for backward.

    Returns:
        What was measured, a `tl.memory.Growth`.

    Raises:
        AssertionError: with the table of what was measured.
        ValueError: Ts are not two or more rising sizes.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> tl.testing.assert_linear_memory(lambda T: lambda: (w * torch.ones(T, 1)).sin().sum(), (8, 16, 32)).Ts
        (8, 16, 32)
    """
    found = growth(make_fn, Ts, subtract=subtract, measure=measure)
    if max(found.exponent, found.marginal) > 1 + tolerance:
        raise AssertionError(f"assert_linear_memory: expected at most bytes ~ T^{1 + tolerance}, found\n{found}")
    return found


def assert_no_leak(fn: Callable[..., Any], *args: Any) -> None:
    """Asserts that all that `fn(*args)` makes is freed as soon as its results are dropped.

    That is without the garbage collector, which is off meanwhile: a reference cycle that holds a tensor is a leak. So
    is what stays in a cache or in the `.grad` of an older leaf; call fn once before, or use `torch.autograd.grad`.

    Args:
        fn: what to call, once.
        args: passed to fn.

    Raises:
        AssertionError: with the number of storages and bytes, and how much of it sits in reference cycles.

    Example:
        >>> tl.testing.assert_no_leak(lambda: torch.ones(4, requires_grad=True).exp().sum())
    """
    with collector_off():
        with LiveStorages() as live:
            fn(*args)
        # A device's thread of autograd lets go of its last task a moment after `backward` has returned.
        end = time.monotonic() + torch.cuda.is_initialized()
        while live.count and time.monotonic() < end:
            time.sleep(0.001)
        if not live.count:
            return
        count, held, largest = live.count, live.bytes, live.sizes[0]
        gc.collect()
    raise AssertionError(
        f"assert_no_leak: {held:,} bytes in {count} storages made by fn are alive after its results were "
        f"dropped (the largest has {largest:,}); the garbage collector then freed {held - live.bytes:,} "
        f"bytes in reference cycles, and {live.bytes:,} are still referred to"
    )


def assert_matches_reference(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Asserts that `fn(*args)` gives what `reference(*args)` gives: structure, values, and gradients of every input.

    Args:
        fn, reference: functions that give tensors in any nested lists, tuples and dicts; other leaves are compared by
            ==.
        args: the inputs, nested likewise. Gradients are compared for each float or complex tensor in them that requires
            one. Pass weights here, too: what a function closes over is not compared.
        rtol: float, relative tolerance. Default None: that of `torch.testing.assert_close` for the dtype, or 0 where
            atol is given.
        atol: float, absolute tolerance. Default None: as rtol.

    Gradient: that of the outputs against fixed random cotangents, the same for both. No gradient (None) and a gradient
    of zeros are equal. NaN equals NaN. Shape, dtype and device must be equal; strides need not.

    Raises:
        AssertionError: naming the output or the input, and the largest difference.

    Example:
        >>> x = torch.randn(5, 2, requires_grad=True)
        >>> ours = lambda x: tl.scan(lambda c, x: (c + x, c + x), torch.zeros(2), x)[1]
        >>> tl.testing.assert_matches_reference(ours, lambda x: x.cumsum(0), x)
    """
    if (rtol is None) != (atol is None):
        rtol, atol = rtol or 0.0, atol or 0.0
    given = inputs_of({"args": args})
    inputs = {name: x for name, x in given.items() if is_float(x) and x.requires_grad}
    versions = {name: version_of(x) for name, x in given.items()}
    expected, expected_gradients = _run(reference, args, inputs)
    found, found_gradients = _run(fn, args, inputs)
    changed = [name for name, x in given.items() if version_of(x) != versions[name]]
    if changed:
        raise AssertionError(
            f"assert_matches_reference: {', '.join(changed)} changed in place while fn and reference ran; "
            f"nothing was compared, as one of them saw the other's input"
        )
    if list(found) != list(expected):
        raise AssertionError(
            f"assert_matches_reference: fn gives {listed(found)}; the reference gives {listed(expected)}"
        )
    for name in expected:
        _assert_close(name, found[name], expected[name], rtol, atol)
    for name in inputs:
        gradients = as_zeros(found_gradients[name], expected_gradients[name])
        _assert_close(f"the gradient of {name}", *gradients, rtol, atol)


def assert_close(actual: Any, expected: Any, **options: Any) -> None:
    """Asserts that two results are close: `torch.testing.assert_close`, which also takes packed tensors.

    They may stand alone or in nested lists, tuples and dicts. Packed tensors are close where their lens are equal and
    their values close. torch's own function refuses them: "No comparison pair was able to handle inputs of type
    PackedTensor".

    Args:
        actual, expected: tensors, packed tensors, numbers, or trees of these, of one structure.
        options: those of `torch.testing.assert_close` (rtol, atol, equal_nan, check_dtype, msg, ...).

    Raises:
        AssertionError: naming the place, `['lens']` or `['values']`, and the largest difference.
        TypeError: one is packed, the other is not.

    Example:
        >>> p = tl.PackedTensor(torch.ones(3), [1, 2])
        >>> tl.testing.assert_close([p, 2 * p], [p, p + p])
    """
    for a, b in zip(tree_leaves(actual, is_leaf=is_packed), tree_leaves(expected, is_leaf=is_packed), strict=False):
        if is_packed(a) != is_packed(b):
            kinds = " and ".join("packed" if is_packed(x) else type(x).__name__ for x in (a, b))
            raise TypeError(f"assert_close: {kinds} do not compare; pack the other: pack_padded(x, p.lens)")
    torch.testing.assert_close(_opened(actual), _opened(expected), **options)


def _opened(tree: Any) -> Any:
    """Packed tensors as dicts of lens and values."""
    return tree_map(lambda x: {"lens": x.lens, "values": x.values} if is_packed(x) else x, tree, is_leaf=is_packed)


def _run(
    fn: Callable[..., Any], args: tuple[Any, ...], inputs: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """(outputs, gradients of `inputs`, both by name) of one call."""
    with torch.enable_grad():
        outputs = outputs_of(fn(*args))
    return outputs, gradients_of(outputs, inputs)


def _assert_close(what: str, found: Any, expected: Any, rtol: float | None, atol: float | None) -> None:
    def report(text: str) -> str:
        return f"assert_matches_reference: {what} differs from the reference's. {text}"

    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        torch.testing.assert_close(
            found, expected, rtol=rtol, atol=atol, equal_nan=True, check_layout=False, msg=report
        )
    elif isinstance(found, Tensor) or isinstance(expected, Tensor) or found != expected:
        raise AssertionError(report(f"Found {found!r}, expected {expected!r}."))
