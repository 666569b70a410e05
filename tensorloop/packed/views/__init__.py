"""Packed tensors whose dims are seen in another order, without a copy."""
