"""Microseconds of single operations on a TensorArray, and of the pieces they are made of.

An operation is timed `COUNT` times in a row, forward and backward apart; a piece is timed alone, without
gradient. `ACCOUNTS` says which pieces an operation needs at the least; what is left over is the rest of its
cost: attribute access, the autograd engine, bookkeeping.
"""

import gc
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop import TensorArray, kernels

B, D = 8, 64
SMALL = 32  # slots of a small array
COUNT = 512  # operations in a row, a multiple of SMALL
REPEATS = 5


class Trial(NamedTuple):
    """What to run on the clock, and what its backward pass is asked for."""

    forward: Callable[[], Sequence[Tensor]]
    inputs: list[Tensor]
    grads: list[Tensor]  # one for each output


def elements(count: int) -> list[Tensor]:
    return [torch.randn(B, D).requires_grad_() for _ in range(count)]


def stacked(xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and gradients of a trial whose only output is (len(xs), B, D)."""
    return xs, [torch.ones(len(xs), B, D)]


# ---- operations: (operation, variant) -> a fresh trial; all of it but `forward` is off the clock ----


def append_tensor_array() -> Trial:
    xs = elements(COUNT)

    def forward() -> list[Tensor]:
        array = TensorArray()
        for x in xs:
            array.append(x)
        return [array.stack()]

    return Trial(forward, *stacked(xs))


def append_list() -> Trial:
    xs = elements(COUNT)

    def forward() -> list[Tensor]:
        ys = []
        for x in xs:
            ys.append(x)
        return [torch.stack(ys)]

    return Trial(forward, *stacked(xs))


def growing(start: Callable[[], Any], grow: Callable[[Any, Tensor], tuple[Any, Tensor]]) -> Trial:
    """Many short sequences of SMALL steps, each of which appends one element and reads all so far."""
    xs = elements(COUNT)
    ones = torch.ones(SMALL, B, D)

    def forward() -> list[Tensor]:
        outs = []
        for first in range(0, COUNT, SMALL):
            state = start()
            for x in xs[first : first + SMALL]:
                state, prefix = grow(state, x)
                outs.append(prefix)
        return outs

    return Trial(forward, xs, [ones[: i % SMALL + 1] for i in range(COUNT)])


def append_read_tensor_array() -> Trial:
    def grow(array: TensorArray, x: Tensor) -> tuple[TensorArray, Tensor]:
        array.append(x)
        return array, array[: len(array)]

    return growing(TensorArray, grow)


def append_read_list() -> Trial:
    def grow(ys: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        ys.append(x)
        return ys, torch.stack(ys)

    return growing(list, grow)


def append_read_cat() -> Trial:
    def grow(ys: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ys = torch.cat([ys, x[None]])
        return ys, ys

    return growing(lambda: torch.zeros(0, B, D), grow)


def many(read: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> Trial:
    return Trial(lambda: [read() for _ in range(COUNT)], inputs, [grad] * COUNT)


def prefix_tensor_array() -> Trial:
    xs = elements(SMALL)
    array = TensorArray().extend(torch.stack(xs))
    array.stack()  # nothing waits any more
    return many(lambda: array[: SMALL - 1], xs, torch.ones(SMALL - 1, B, D))


def prefix_slice() -> Trial:
    xs = elements(SMALL)
    values = torch.stack(xs)
    return many(lambda: values[: SMALL - 1], xs, torch.ones(SMALL - 1, B, D))


def prefix_list() -> Trial:
    xs = elements(SMALL)
    return many(lambda: torch.stack(xs[: SMALL - 1]), xs, torch.ones(SMALL - 1, B, D))


def each(source: Callable[[], Any], inputs: list[Tensor]) -> Trial:
    """Every element read once, by its index, then one stack to end in one tensor."""

    def forward() -> list[Tensor]:
        values = source()
        return [torch.stack([values[i] for i in range(COUNT)])]

    return Trial(forward, inputs, [torch.ones(COUNT, B, D)])


def read_tensor_array() -> Trial:
    xs = elements(COUNT)
    array = TensorArray()
    for x in xs:
        array.append(x)
    array.stack()
    return each(lambda: array, xs)


def read_index() -> Trial:
    xs = elements(COUNT)
    values = torch.stack(xs)
    return each(lambda: values, xs)


def read_unbind() -> Trial:
    xs = elements(COUNT)
    values = torch.stack(xs)
    return each(values.unbind, xs)


def leaf() -> Tensor:
    return torch.randn(COUNT, B, D).requires_grad_()


def unstack_tensor_array() -> Trial:
    values = leaf()
    return each(lambda: TensorArray.unstack(values), [values])


def unstack_index() -> Trial:
    values = leaf()
    return each(lambda: values, [values])


def unstack_unbind() -> Trial:
    values = leaf()
    return each(values.unbind, [values])


def overwriting(start: Any, finish: Callable[[Any], Tensor]) -> Trial:
    """Every slot of a small array written again and again; `start` holds SMALL elements."""
    xs = elements(COUNT)

    def forward() -> list[Tensor]:
        for i, x in enumerate(xs):
            start[i % SMALL] = x
        return [finish(start)]

    return Trial(forward, xs, [torch.ones(SMALL, B, D)])


def overwrite_tensor_array() -> Trial:
    array = TensorArray().extend(torch.stack(elements(SMALL)))
    array.stack()
    return overwriting(array, TensorArray.stack)


def overwrite_list() -> Trial:
    return overwriting(elements(SMALL), torch.stack)


def overwrite_inplace() -> Trial:
    return overwriting(torch.stack(elements(SMALL)), torch.clone)


OPERATIONS: dict[str, dict[str, Callable[[], Trial]]] = {
    "append": {"tensor_array": append_tensor_array, "list": append_list},
    "append, prefix read": {
        "tensor_array": append_read_tensor_array,
        "stack": append_read_list,
        "cat": append_read_cat,
    },
    "prefix read": {"tensor_array": prefix_tensor_array, "slice": prefix_slice, "stack": prefix_list},
    "read": {"tensor_array": read_tensor_array, "index": read_index, "unbind": read_unbind},
    "read, unstack": {"tensor_array": unstack_tensor_array, "index": unstack_index, "unbind": unstack_unbind},
    "overwrite": {
        "tensor_array": overwrite_tensor_array,
        "list": overwrite_list,
        "inplace": overwrite_inplace,
    },
}


def cost(build: Callable[[], Trial]) -> tuple[list[float], list[float]]:
    """Microseconds for one operation, forward and backward; the first trial warms up and is not kept."""
    forward, backward = [], []
    for _ in range(1 + REPEATS):
        trial = build()
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        outs = trial.forward()
        middle = time.perf_counter()
        torch.autograd.grad(outs, trial.inputs, trial.grads, allow_unused=True)
        end = time.perf_counter()
        gc.enable()
        forward.append((middle - start) / COUNT * 1e6)
        backward.append((end - middle) / COUNT * 1e6)
        del outs, trial
    return forward[1:], backward[1:]


def operation_costs(operation: str) -> dict[str, list[float]]:
    """`variant forward` and `variant backward` -> microseconds of each repeat."""
    found = {}
    for variant, build in OPERATIONS[operation].items():
        found[f"{variant} forward"], found[f"{variant} backward"] = cost(build)
    return found


# ---- pieces ----


class Empty(torch.autograd.Function):
    """Does nothing, with the arguments of a recorded operation: a token, an element, four constants.

    A Function must give a tensor of its own, so one `expand` is part of it.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, token: Tensor, x: Tensor, block: tuple[Tensor, Tensor], write: int, length: int, read: slice
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        nothing, ctx.grad_x = block
        ctx.write, ctx.read = write, read
        return nothing.expand(length, B, D)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        return grad, ctx.grad_x, None, None, None, None


def function_calls() -> Trial:
    """Calls of `Empty`, one after the other on a token."""
    xs = elements(COUNT)
    block = torch.zeros(1, 1, 1), torch.zeros(B, D)

    def forward() -> list[Tensor]:
        token = block[0].expand(SMALL, B, D)
        for x in xs:
            token = Empty.apply(token, x, block, 0, SMALL, slice(0, SMALL))
        return [token]

    return Trial(forward, xs, [torch.ones(SMALL, B, D)])


def check(x: object, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """What a write has to know about its argument."""
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype is not dtype or x.device != device:
        raise ValueError
    return x.requires_grad and torch.is_grad_enabled()


def simple_pieces() -> Iterator[tuple[str, Callable[[], object], int]]:
    """(name, call, by how many its time is divided)."""
    xs = elements(COUNT)
    x, values, many_values = torch.randn(B, D), torch.randn(SMALL, B, D), torch.randn(COUNT, B, D)
    slot, prefix, more = values[0], values[: SMALL - 1], torch.randn(SMALL - 1, B, D)
    shape, dtype, device = x.shape, x.dtype, x.device
    yield "check", lambda: check(x, shape, dtype, device), 1
    yield "slot view", lambda: values[7], 1
    yield "prefix view", lambda: values[: SMALL - 1], 1
    yield "slot copy_", lambda: slot.copy_(x), 1
    yield "slot clone", slot.clone, 1
    yield "slot zero_", slot.zero_, 1
    yield "slot add_", lambda: slot.add_(x), 1
    yield "prefix add_", lambda: prefix.add_(more), 1
    yield "stack, a slot", lambda: torch.stack(xs), COUNT
    yield "unbind, a slot", many_values.unbind, COUNT


def piece_costs() -> dict[str, list[float]]:
    """Microseconds of each piece, a value for each repeat."""
    found = {}
    found["function"], found["function backward"] = cost(function_calls)
    with torch.no_grad():
        for name, call, slots in simple_pieces():
            number = max(4, 4 * COUNT // slots)
            seconds = timeit.Timer(call).repeat(1 + REPEATS, number)[1:]
            found[name] = [s / number / slots * 1e6 for s in seconds]
    return found


# ---- rows at slots of their own, by a kernel and by torch operations ----

ROWS = ((4, 64), (32, 256), (256, 256), (2048, 256))  # rows, and numbers in each
ROW_SLOTS, ROW_LOOPS = 64, 7


def row_costs(rows: int, numbers: int) -> dict[str, list[float]]:
    """Microseconds of one write of rows, and of a loop of ROW_SLOTS of them, forward and backward, in both ways."""
    kept = {name: kernels.TABLE[name] for name in ("write_rows", "take_rows")}
    found = {}
    try:
        for way in ("kernel", "torch"):
            if way == "torch":  # as on a device that has no kernels
                for name in kept:
                    kernels.TABLE[name] = kept[name]._replace(cpu=kernels.NO)
            found[f"{way} write"] = row_write(rows, numbers)
            found[f"{way} loop"] = row_loop(rows, numbers)
    finally:
        kernels.TABLE.update(kept)
    return found


def row_write(rows: int, numbers: int) -> list[float]:
    slots, x = torch.zeros(ROW_SLOTS, rows, numbers), torch.randn(rows, numbers)
    pos, where = torch.arange(rows) % ROW_SLOTS, torch.ones(rows, dtype=torch.bool)
    write = kernels.find("write_rows", slots, x)
    seconds = timeit.Timer(lambda: write(slots, pos, x, where)).repeat(1 + REPEATS, COUNT // 8)[1:]
    return [s / (COUNT // 8) * 1e6 for s in seconds]


def row_loop(rows: int, numbers: int) -> list[float]:
    xs = [torch.randn(rows, numbers).requires_grad_() for _ in range(ROW_SLOTS)]
    positions = [(torch.arange(rows) + t) % ROW_SLOTS for t in range(ROW_SLOTS)]

    def loop() -> None:
        array = TensorArray.unstack(torch.zeros(ROW_SLOTS, rows, numbers))
        for x, pos in zip(xs, positions, strict=True):
            array.write_rows(pos, x)
        torch.autograd.grad(array.stack().sum(), xs)

    return [s * 1e6 for s in timeit.Timer(loop).repeat(1 + ROW_LOOPS, 1)[1:]]


# Columns of the breakdown -> the pieces that go into each.
GROUPS = {
    "checks": ("check",),
    "Function": ("function", "function backward"),
    "views": ("slot view", "prefix view", "unbind, a slot"),
    "copies": ("slot copy_", "slot clone", "slot zero_", "stack, a slot"),
    "adds": ("slot add_", "prefix add_"),
}

# Operation -> direction -> pieces that it needs at the least. Reads end in a stack, whose share is in too.
ACCOUNTS: dict[str, dict[str, tuple[str, ...]]] = {
    "append": {"forward": ("check", "stack, a slot"), "backward": ("unbind, a slot",)},
    "append, prefix read": {
        "forward": ("check", "check", "function", "slot view", "slot copy_", "prefix view"),
        "backward": ("function backward", "prefix view", "prefix add_", "slot view", "slot clone"),
    },
    "prefix read": {
        "forward": ("check", "function", "prefix view"),
        "backward": ("function backward", "prefix view", "prefix add_"),
    },
    "read": {
        "forward": ("check", "function", "slot view", "slot clone", "stack, a slot"),
        "backward": ("function backward", "slot view", "slot add_", "unbind, a slot"),
    },
    "read, unstack": {
        "forward": ("check", "unbind, a slot", "stack, a slot"),
        "backward": ("unbind, a slot", "stack, a slot"),
    },
    "overwrite": {
        "forward": ("check", "function", "slot view", "slot copy_"),
        "backward": ("function backward", "slot view", "slot clone", "slot view", "slot zero_"),
    },
}


def breakdown(operation: str, direction: str, pieces: dict[str, float]) -> dict[str, float]:
    """Microseconds of each group of pieces in one operation, from the cost of single pieces."""
    parts = ACCOUNTS[operation][direction]
    return {group: sum(pieces[p] for p in parts if p in names) for group, names in GROUPS.items()}
