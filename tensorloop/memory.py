"""How many bytes a loop keeps for its backward pass, and how they grow with the number of steps.

What counts is the *storage*: the allocation behind a tensor. Tensors that share one, views included, count it
once and whole, because any of them keeps all of it alive. Bytes are counted, never sampled, so two runs of
the same code give the same figures.

Every operation passes a dispatch mode, below autograd, which notes the storages it makes by weak reference.
So it does not matter how a storage is held: saved for backward, put on the `ctx` of a custom Function, in a
closure, in a list. Nothing here walks an autograd graph or keeps a tensor alive.

Out of sight are bytes that no operation makes: NumPy arrays that never became tensors,
`torch.UntypedStorage(n)`, scratch space inside one kernel, opaque (MKL-DNN) tensors, what other threads make.
"""

import gc
import math
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tensorloop._dispatch import OperationMode, tree_leaves

_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


class LiveStorages(OperationMode):
    """The storages that operations make inside a `with` block, for as long as they are alive.

    The figures stay current after the block: drop an array, read `bytes` again. Storages that are older than
    the block never count, nor do views of them.

    Cost: a few microseconds an operation, about 300 bytes a live storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._now = 0
        self._peak = 0
        me = weakref.ref(self)

        def died(ref: weakref.ref[torch.UntypedStorage]) -> None:
            if (live := me()) is not None:
                live._now -= live._sizes.pop(ref)

        self._died = died

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage alive now, largest first; empty ones are left out."""
        alive = [storage for ref in list(self._sizes) if (storage := ref()) is not None]
        return sorted((n for storage in alive if (n := storage.nbytes())), reverse=True)

    @property
    def bytes(self) -> int:
        """Bytes alive now."""
        return sum(self.sizes)

    @property
    def count(self) -> int:
        """How many storages are alive now."""
        return len(self.sizes)

    @property
    def peak(self) -> int:
        """The most bytes alive after any one operation in the block, or since `reset_peak`.

        Through backward it is an upper bound: PyTorch adds some gradients out of place while a dispatch mode
        is on.
        """
        return self._peak

    def reset_peak(self) -> None:
        """Starts `peak` afresh from what is alive now."""
        self._peak = self._now

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage was made in the block."""
        return weakref.ref(storage) in self._sizes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and notes the storages it made."""
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # a wrapper subclass: the operations on its parts come through here next
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for storage in _storages(out):
            # `lift_fresh` announces memory made without an operation (torch.tensor, from_numpy).
            if (
                storage in self
                or func is torch.ops.aten.lift_fresh.default
                or not any(storage is given for given in _storages((args, tuple(kwargs.values()))))
            ):
                self._note(storage)
        self._peak = max(self._peak, self._now)
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        """Adds a storage, or brings the size of a known one up to date (`resize_`)."""
        known, size = weakref.ref(storage), storage.nbytes()
        old = self._sizes.get(known)
        if old is None:
            self._sizes[weakref.ref(storage, self._died)] = size
        elif old != size:
            self._sizes[known] = size
        self._now += size - (old or 0)


@dataclass(frozen=True)
class Saved:
    """What one run of a function keeps alive for its backward pass, in bytes of unique storages."""

    bytes: int
    """Made by the function and held by the graph of its result, or by anything else that outlives the run."""
    count: int
    """How many storages `bytes` is made of."""
    seen_by_hooks: int
    """The part of `bytes` that saved-tensor hooks see."""
    hidden: int
    """The rest of `bytes`: held on a `ctx`, in closures, in lists."""
    inputs: int
    """Older storages (arguments, parameters) that saved-tensor hooks see; not in `bytes`."""
    outputs: int
    """Made by the function and held by nothing but the tensors it returned; not in `bytes`."""

    def __str__(self) -> str:
        return (
            f"{self.bytes:,} bytes in {self.count} storages ({self.seen_by_hooks:,} seen by hooks, "
            f"{self.hidden:,} hidden); besides {self.inputs:,} of inputs, {self.outputs:,} of outputs"
        )


def saved(fn: Callable[..., Any], *args: Any) -> Saved:
    """Runs `fn(*args)` once, forward only, and counts what stays alive for backward.

    Args:
        fn: gives tensors, in any nested lists, tuples and dicts. Another object in its result is kept whole
            while bytes are counted, with all that it holds.
        args: passed to `fn`.

    Grad mode is on. The tensors returned are dropped before counting and their graph is kept, so the loss
    itself does not count unless the graph holds it, too. The garbage collector is off from beginning to end:
    what sits in a reference cycle counts, always. What a first call leaves in a cache counts; call `fn` once
    before.

    One run gives all figures. Our hooks hand back the storage they are given, so `bytes` is the same without
    them. As under any hooks, PyTorch checks no versions: a backward inside `fn` misses in-place changes. Hooks
    that `fn` itself enters come before ours, and what goes to them is `hidden` here. Hooks entered *around*
    this call are replaced during the run: enter them inside `fn`.

    Cost: one forward pass, some microseconds an operation; keeps no tensor.

    Raises:
        RuntimeError: from torch, where `fn` calls `torch.func.grad`, which refuses to run under any hooks.
            `LiveStorages` works there.
        Exception: from torch, where `fn` calls its loop operators (`scan`, `while_loop`): what those make is out
            of the sight of any mode, so they refuse to run under one.
    """
    seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def pack(x: torch.Tensor) -> torch.Tensor:
        for storage in _storages(x):
            seen.add(storage)
        # Not `x` itself: an operation that saves its own output would then hold itself, in a cycle through C++.
        return x.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with collector_off(), torch.enable_grad(), LiveStorages() as live, hooks:
        result = fn(*args)
        with_result = live.bytes
        graph = [leaf.grad_fn if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(result)]
        del result
        sizes = live.sizes
        made = sum(storage.nbytes() for storage in seen if storage in live)
        older = sum(storage.nbytes() for storage in seen if storage not in live)
        del graph
    return Saved(
        bytes=sum(sizes),
        count=len(sizes),
        seen_by_hooks=made,
        hidden=sum(sizes) - made,
        inputs=older,
        outputs=with_result - sum(sizes),
    )


def peak(fn: Callable[..., Any], *args: Any) -> int:
    """Runs `fn(*args)` once and gives the most bytes that its operations had alive at one time.

    Older storages do not count. Call backward inside `fn` to include it. The garbage collector is off.
    """
    with collector_off(), LiveStorages() as live:
        fn(*args)
    return live.peak


def saved_bytes(fn: Callable[[], Any]) -> int:
    """`saved(fn).bytes`: what `growth` measures unless told otherwise."""
    return saved(fn).bytes


@dataclass(frozen=True)
class Growth:
    """Bytes at several sizes, and the power of T that they follow. `str()` gives a table."""

    Ts: tuple[int, ...]
    bytes: tuple[int, ...]
    exponent: float
    """Slope of the least-squares line through (log T, log bytes)."""
    marginal: float
    """The p of a curve a + b T^p through the last three sizes, -4 to 8: no constant term can hide it."""

    def __str__(self) -> str:
        rows = [f"{'T':>8} {'bytes':>16} {'bytes/T':>14} {'exponent':>9}"]
        for i, (T, n) in enumerate(zip(self.Ts, self.bytes, strict=True)):
            step = f"{_exponent(self.Ts[i - 1 : i + 1], self.bytes[i - 1 : i + 1]):9.3f}" if i else ""
            rows.append(f"{T:>8} {n:>16,} {n / T:>14,.1f} {step}".rstrip())
        last = f"bytes ~ T^{self.exponent:.3f}; T^{self.marginal:.3f} beside a constant"
        return "\n".join([*rows, last])


def growth(
    make_fn: Callable[[int], Callable[[], Any]],
    Ts: Sequence[int],
    *,
    subtract: Callable[[int], int] | None = None,
    measure: Callable[[Callable[[], Any]], int] = saved_bytes,
) -> Growth:
    """Measures the bytes of a function at several sizes and fits the power of T that they follow.

    Args:
        make_fn: `make_fn(T)` gives a function without arguments. What is made here (inputs) does not count.
        Ts: at least two sizes, rising.
        subtract: `subtract(T)` gives the bytes of a term that was counted by hand and is to be left out.
        measure: takes the function, gives bytes; `peak` measures the peak instead of what is saved.

    A constant term makes `exponent` too small; `marginal` is free of it. It is taken from the last three sizes
    (from the last two, and then no better than `exponent`, where there are no more), as a linear term beside a
    quadratic one is felt least there; the column of exponents in `str()` shows whether they still rise. Larger
    sizes, or `subtract`, mend that. Bytes that do not grow have exponent 0.

    Raises:
        ValueError: fewer than two sizes, sizes that do not rise from 1 on, or no bytes left at one size.
    """
    Ts = tuple(Ts)
    if len(Ts) < 2 or Ts[0] < 1 or any(a >= b for a, b in pairwise(Ts)):
        raise ValueError(f"growth: Ts must be two or more rising sizes from 1 on, such as (32, 64, 128); got {Ts}")
    sizes = tuple(measure(make_fn(T)) - (subtract(T) if subtract else 0) for T in Ts)
    if any(sizes) and min(sizes) <= 0:
        figures = ", ".join(f"{n:,} at T={T}" for T, n in zip(Ts, sizes, strict=True))
        what = "after subtract, " if subtract else ""
        raise ValueError(f"growth: {what}bytes must be positive at every T to fit a power of T; got {figures}")
    return Growth(Ts, sizes, _exponent(Ts, sizes), _marginal(Ts[-3:], sizes[-3:]))


@contextmanager
def collector_off() -> Iterator[None]:
    """Switches Python's garbage collector off for a while, so that nothing depends on when it runs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _exponent(Ts: Sequence[int], sizes: Sequence[int]) -> float:
    if not any(sizes):
        return 0.0
    return statistics.linear_regression([math.log(T) for T in Ts], [math.log(n) for n in sizes]).slope


def _marginal(Ts: Sequence[int], sizes: Sequence[int]) -> float:
    """The p of a + b T^p through three points, by bisection: the ratio of the two increments rises with p."""
    if len(Ts) < 3:
        return _exponent(Ts, sizes)
    first, second = (b - a for a, b in pairwise(sizes))
    if first == second == 0:
        return 0.0
    if first < 0:  # bytes that fall: the same p with a negative b
        first, second = -first, -second
    low, high = -4.0, 8.0
    near, far = (math.log(b / a) for a, b in pairwise(Ts))
    for _ in range(60):
        p = (low + high) / 2 or 1e-9
        ratio = math.exp(p * near) * math.expm1(p * far) / math.expm1(p * near)
        low, high = (p, high) if second > ratio * first else (low, p)
    return (low + high) / 2


def _storages(x: Any) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor or nested lists and tuples of tensors; none behind anything else."""
    if isinstance(x, list | tuple):
        for item in x:
            yield from _storages(item)
    elif not isinstance(x, torch.Tensor):
        return
    elif hasattr(x, "__tensor_flatten__"):
        names, _ = x.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        yield from _storages([getattr(x, name) for name in names])
    elif x.layout in _PARTS:
        yield from _storages([getattr(x, part)() for part in _PARTS[x.layout]])
    elif x.layout == torch.strided and not x.is_meta:
        storage = x.untyped_storage()
        if storage.device.type != "meta":  # a fake tensor claims another device than its storage
            yield storage
