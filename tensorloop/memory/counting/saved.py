"""How many bytes one run of a function keeps for its backward pass, and its peak."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensorloop._torch.dispatch import tree_leaves
from tensorloop.memory.counting.storages import LiveStorages, collector_off, storages_of


@dataclass(frozen=True)
class Saved:
    """The bytes that one run of a function keeps alive for its backward pass, in unique storages.

    Attributes:
        bytes: int, made by the function and held by the graph of its result, or by anything else that outlives the run.
        count: int, how many storages `bytes` is made of.
        seen_by_hooks: int, the part of `bytes` that saved-tensor hooks see.
        hidden: int, the rest of `bytes`: held on a `ctx`, in closures, in lists.
        inputs: int, bytes of older storages (arguments, parameters) that saved-tensor hooks see; not in `bytes`.
        outputs: int, bytes made by the function and held by nothing but the tensors it returned; not in `bytes`.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> tl.memory.saved(lambda: (w * 2).sin().sum())
        Saved(bytes=16, count=1, seen_by_hooks=16, hidden=0, inputs=0, outputs=4)
    """

    bytes: int
    count: int
    seen_by_hooks: int
    hidden: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return (
            f"{self.bytes:,} bytes in {self.count} storages ({self.seen_by_hooks:,} seen by hooks, "
            f"{self.hidden:,} hidden); besides {self.inputs:,} of inputs, {self.outputs:,} of outputs"
        )


def must_be_function(fn: Any, name: str) -> None:
    """Raises for the result of a function in its place."""
    if not callable(fn):
        raise TypeError(f"{name}: fn must be a function; got {type(fn).__name__}. Pass f, not f(x)")


def graph_of(result: Any) -> list[Any]:
    """Returns what keeps the graph of a result alive without its tensors; what is no tensor comes as it is."""
    # An edge, not the node: in torch 2.11 the node of a Python function dies with its outputs, whoever holds it.
    edge = torch.autograd.graph.get_gradient_edge
    leaves = tree_leaves(result)
    return [(edge(x) if x.grad_fn is not None else None) if isinstance(x, torch.Tensor) else x for x in leaves]


def saved(fn: Callable[..., Any], *args: Any) -> Saved:
    """Counts what one run of a function, forward only, keeps alive for its backward pass.

    Args:
        fn: function that gives tensors, in any nested lists, tuples and dicts. Another object in its result is kept
            whole while bytes are counted, with all that it holds.
        args: passed to `fn`.

    Returns:
        `Saved`: bytes, in all and by what holds them.

    Grad mode is on. The tensors returned are dropped before counting and their graph is kept, so the loss itself does
    not count unless the graph holds it, too. The garbage collector is off from beginning to end: what sits in a
    reference cycle counts, always. What a first call leaves in a cache counts; call `fn` once before.

    One run gives all figures. Our hooks hand back the storage they are given, so `bytes` is the same without them. As
    under any hooks, PyTorch checks no versions: a backward inside `fn` misses in-place changes. Hooks that `fn` itself
    enters come before ours, and what goes to them is `hidden` here. Hooks entered *around* this call are replaced
    during the run: enter them inside `fn`.

    Cost: one forward pass, some microseconds an operation; keeps no tensor.

    Raises:
        TypeError: `fn` cannot be called.
        RuntimeError: from torch, where `fn` calls `torch.func.grad`, which refuses to run under any hooks.
            `LiveStorages` works there.
        Exception: from torch, where `fn` calls its loop operators (`scan`, `while_loop`): what those make is out of the
            sight of any mode, so they refuse to run under one.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> tl.memory.saved(lambda: (w * 2).sin().sum()).bytes  # 4 floats for the derivative of sin
        16
    """
    must_be_function(fn, "saved")
    seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def pack(x: torch.Tensor) -> torch.Tensor:
        for _, storage in storages_of(x):
            seen.add(storage)
        # Not `x` itself: an operation that saves its own output would then hold itself, in a cycle through C++.
        return x.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with collector_off(), torch.enable_grad(), LiveStorages() as live, hooks:
        result = fn(*args)
        with_result = live.bytes
        graph = graph_of(result)
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
    """Runs a function once and gives the most bytes that its operations had alive at one time.

    Older storages do not count. Call backward inside `fn` to include it. The garbage collector is off.

    Args:
        fn: function to run.
        args: passed to `fn`.

    Returns:
        Bytes, an int.

    Raises:
        TypeError: `fn` cannot be called.

    Example:
        >>> tl.memory.peak(lambda: torch.ones(1000).sum())
        4004
    """
    must_be_function(fn, "peak")
    with collector_off(), LiveStorages() as live:
        fn(*args)
    return live.peak


def saved_bytes(fn: Callable[[], Any]) -> int:
    """Gives `saved(fn).bytes` as a number: a `measure` for `growth`.

    Args:
        fn: function without arguments that gives tensors.

    Returns:
        Bytes, an int.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> tl.memory.saved_bytes(lambda: (w * 2).sin().exp().sum())
        32
    """
    must_be_function(fn, "saved_bytes")
    return saved(fn).bytes
