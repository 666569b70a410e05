"""Packed tensors as torch's nested tensors, packed sequences, pytrees and einops' tensors, and back."""
