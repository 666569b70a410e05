"""Tensors whose memory comes from the system, for tests that look at what is resident."""

import mmap

import torch


def fresh_ones(nbytes: int) -> torch.Tensor:
    """Float32 ones in pages of their own, given back to the system with the tensor.

    malloc cannot promise that: a block of any size may come out of what was freed before, and then nothing rises.
    """
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.float32).fill_(1)
