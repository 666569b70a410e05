"""Tensors whose memory somebody frees while a loop still needs it, as sharded modules do: an error that names them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import tensorloop as tl

LOST = "a tensor of shape .* has lost its memory"
LOOPS: list[dict[str, Any]] = [
    {"checkpoints": 2, "compile": False},
    {"compile": "strict"},
    {"compile": "strict", "checkpoints": 2},
]


def free(x: Tensor, part: float = 0) -> None:
    storage = x.untyped_storage()
    storage.resize_(int(storage.nbytes() * part))


@pytest.mark.parametrize("options", LOOPS, ids=str)
@pytest.mark.parametrize("what", ["xs", "captured", "a part"])
def test_before_backward(options: dict[str, Any], what: str):
    h, xs, table = torch.ones(999, requires_grad=True), torch.ones(4, 999), torch.ones(3, 999)
    row = table[1]
    last = tl.scan(lambda h, x: ((h * x * row).sin(), None), h, xs, **options)[0]
    free(xs if what == "xs" else table, 1 / 3 if what == "a part" else 0)
    with pytest.raises(RuntimeError, match=f"{LOST}|out of bounds for storage"):
        grad(last.sum(), h)


@pytest.mark.parametrize("options", LOOPS[1:], ids=str)
def test_before_a_compiled_loop(options: dict[str, Any]):
    h, w = torch.ones(999, requires_grad=True), torch.ones(999)

    def run() -> Tensor:
        return tl.scan(lambda h, _: ((h * w).sin(), None), h, length=4, **options)[0]

    run()
    run()
    free(w)
    with pytest.raises(RuntimeError, match=LOST):
        run()
    free(h)
    with pytest.raises(RuntimeError, match=LOST):
        run()


def test_a_buffer_that_the_body_changes():
    h, buffer = torch.ones(999, requires_grad=True), torch.ones(999)

    def body(h: Tensor, _: None) -> Any:
        buffer.add_(1)
        return (h * 0.5 + buffer[0]).sin(), None

    last = tl.scan(body, h, length=4, checkpoints=2)[0]
    free(buffer)
    with pytest.raises(RuntimeError, match=LOST):
        grad(last.sum(), h)
    with pytest.raises(RuntimeError, match=LOST):
        tl.scan(body, h, length=4, checkpoints=2)


def test_what_backward_does_not_read_may_go():
    h, b = torch.ones(9, requires_grad=True), torch.ones(9)
    last = tl.scan(lambda h, _: ((h * 0.5 + b).sin(), None), h, length=4, compile="strict")[0]
    free(b)
    assert grad(last.sum(), h)[0].isfinite().all()
