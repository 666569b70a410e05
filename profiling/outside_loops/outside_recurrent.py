"""The 41 layers of torchrecurrent, and their own cells in `tl.scan`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from outside_loops.outside_check import AT_MOST, Loop, Made, Size, find
from torch import Tensor

import tensorloop as tl

SINGLE = (
    *("AntisymmetricRNN", "GatedAntisymmetricRNN", "ATR", "BR", "NBR", "CFN", "DSGU", "FastRNN", "FastGRNN", "IndRNN"),
    *("LiGRU", "LightRU", "MGU", "MinimalRNN", "MiRU1", "MiRU2", "MUT1", "MUT2", "MUT3", "SGU", "SGRN", "STAR"),
    *("TRNN", "UGRNN"),
)
DOUBLE = (
    *("coRNN", "JANET", "LEM", "MultiplicativeLSTM", "NAS", "OriginalLSTM", "PeepholeLSTM", "RAN", "ResLSTM", "SCRN"),
    *("UnICORNN", "WMCLSTM"),
)
EARLIER = ("TGRU", "TLSTM")  # which carry the input of the step before
SIXTH = "torch's gradient of hardsigmoid has a sixth of float32 in float64 too; a compiled loop has one of float64"
SIXTHS = ("DSGU", "SGU")
BASE = "torchrecurrent.base.{}RecurrentLayerBase.forward"


def layer_of(name: str, size: Size) -> tuple[Any, Tensor]:
    """A layer with parameters that are not zero anywhere, and its input (T, B, F)."""
    layer = find(f"torchrecurrent.{name}")(size.width, size.width)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return layer, torch.randn(size.steps, size.rows, size.width, requires_grad=True)


def single(name: str, size: Size) -> Made:
    layer, xs = layer_of(name, size)
    cell = layer.cells[0]

    def port(xs: Tensor, compile: bool | None = None):
        def body(h, x):
            h = cell(x, h)
            return h, h

        h, ys = tl.scan(body, xs.new_zeros(xs.shape[1], layer.hidden_size), xs, compile=compile)
        return ys, h[None]

    return Made(layer, port, (xs,), list(layer.parameters()))


def double(name: str, size: Size) -> Made:
    layer, xs = layer_of(name, size)
    cell = layer.cells[0]

    def port(xs: Tensor, compile: bool | None = None):
        def body(state, x):
            state = cell(x, state)
            return state, state[0]

        zeros = xs.new_zeros(xs.shape[1], layer.hidden_size)
        (h, c), ys = tl.scan(body, (zeros, zeros), xs, compile=compile)
        return ys, (h[None], c[None])

    return Made(layer, port, (xs,), list(layer.parameters()))


def decoupled(name: str, size: Size) -> Made:
    layer, xs = layer_of(name, size)
    cell = layer.cells[0]
    pair = name == "MCLSTM"

    def port(xs: Tensor, compile: bool | None = None):
        def body(state, x):
            y, state = cell(x, state)
            return state, y

        zeros = xs.new_zeros(xs.shape[1], layer.hidden_size)
        state, ys = tl.scan(body, (zeros, zeros) if pair else zeros, xs, compile=compile)
        return ys, tuple(s[None] for s in state) if pair else state[None]

    return Made(layer, port, (xs,), list(layer.parameters()))


def earlier(name: str, size: Size) -> Made:
    layer, xs = layer_of(name, size)
    cell = layer.cells[0]

    def port(xs: Tensor, compile: bool | None = None):
        def body(state, x):
            state = cell(x, state)
            return state if name == "TGRU" else state[1], state[0]

        init = xs.new_zeros(xs.shape[1], layer.hidden_size), torch.zeros_like(xs[0])
        (h, x), ys = tl.scan(body, init, xs, compile=compile)
        return ys, (h[None], (x,))

    return Made(layer, port, (xs,), list(layer.parameters()))


def delayed(size: Size) -> Made:
    layer, xs = layer_of("tauGRU", size)
    cell = layer.cells[0]

    def port(xs: Tensor, compile: bool | None = None):
        def body(carry, x):
            h, history = carry
            h, history = cell(x, h, history[0]), [*history[1:], h]
            return (h, history), h

        zeros = xs.new_zeros(xs.shape[1], layer.hidden_size)
        (h, _), ys = tl.scan(body, (zeros, [zeros] * layer.delay), xs, compile=compile)
        return ys, h[None]

    return Made(layer, port, (xs,), list(layer.parameters()))


def listed(names: Sequence[str], make: Callable[[str, Size], Made], found: str, group: str) -> list[Loop]:
    return [
        Loop(
            "torchrecurrent",
            name,
            partial(make, name),
            found,
            wraps=True,
            at_most=1e-7 if name in SIXTHS else AT_MOST,
            group=group,
            note=SIXTH if name in SIXTHS else "",
        )
        for name in names
    ]


LOOPS = [
    *listed(SINGLE, single, BASE.format("SingleState"), "one state"),
    *listed(DOUBLE, double, BASE.format("DoubleState"), "two states"),
    *listed(["IntersectionRNN"], decoupled, BASE.format("DecoupledSingleState"), "an output of its own"),
    *listed(["MCLSTM"], decoupled, BASE.format("DecoupledDoubleState"), "an output of its own"),
    *listed(EARLIER, earlier, "torchrecurrent.TGRU.forward", "the input before in the carry"),
    Loop(
        "torchrecurrent",
        "tauGRU",
        delayed,
        "torchrecurrent.tauGRU.forward",
        wraps=True,
        group="the states before in the carry",
    ),
]
