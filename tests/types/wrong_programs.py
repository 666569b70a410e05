# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""Programs that are wrong, each on one line: `make check` has pyright and mypy find an error in each, where it is.

An `ignore` that hides nothing is an error of its own, in both. Nothing here is run. Of a carry that changes its
structure in a lambda pyright makes a union of both structures, and finds nothing: it is left to mypy and the run.
"""

import torch
from torch import Tensor

import tensorloop as tl


def no_y(h: Tensor, x: Tensor) -> Tensor:
    return h + x


def fine(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return h + x, h


def wrong(h: Tensor, xs: Tensor, packed: tl.PackedTensor, module: torch.nn.Module) -> None:
    # A body that gives no y.
    tl.scan(lambda h, x: h + x, h, xs)  # type: ignore[arg-type, return-value]
    tl.scan(lambda h, x, c: h + x * c, h, xs, context=h)  # type: ignore[arg-type, return-value]
    tl.scan(lambda h, x: torch.tanh(h + x), h, xs, checkpoints=2)  # type: ignore[arg-type, return-value]
    tl.scan(no_y, h, xs)  # type: ignore[arg-type]
    tl.scan(no_y, h, packed)  # type: ignore[arg-type]
    tl.scan(no_y, h, tl.TensorArray())  # type: ignore[arg-type]
    tl.carrying(module).scan(no_y, h, xs)  # type: ignore[arg-type]
    tl.beam_search(no_y, h, batch_size=1, beam_size=2, bos_id=0, eos_id=1)  # type: ignore[arg-type]
    # Three things instead of two; one argument instead of two; a carry of another structure.
    tl.scan(lambda h, x: (h, x, x), h, xs)  # type: ignore[arg-type, return-value]
    tl.scan(lambda h: (h, h), h, xs)  # type: ignore[arg-type, misc]
    tl.scan(fine, (h, h), xs)  # type: ignore[arg-type]
    tl.scan(fine, h, [1, 2])  # type: ignore[arg-type]
    tl.while_loop(lambda h: "no", lambda h: h, h)  # type: ignore[arg-type, return-value]
    # Keywords that are not there, and values that they do not take.
    tl.scan(fine, h, xs, chekpoints=3)  # type: ignore[call-overload]
    tl.scan(fine, h, xs, checkpoints="3")  # type: ignore[call-overload]
    tl.while_loop(lambda h: h.sum() < 3, lambda h: h, h, max_step=3)  # type: ignore[call-overload]
    tl.map(torch.sin, xs, batchsize=2)  # type: ignore[call-overload]
    tl.carrying(module).map(torch.sin, xs, chekpoints=1)  # type: ignore[call-arg]
    tl.attention(packed, packed, packed, casual=True)  # type: ignore[call-overload]
    tl.beam_search(fine, h, batch_size=1, beam_size=2, bos_id=0, eos_id=1, stop="nevre")  # type: ignore[arg-type]
