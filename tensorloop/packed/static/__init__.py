"""Packed tensors whose shape does not change with their lengths, for graphs that are captured once."""

from tensorloop._common.moved import hands_on

__getattr__ = hands_on(__name__, "tensorloop.packed.static.static", "StaticPackedTensor")
