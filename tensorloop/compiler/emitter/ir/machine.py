"""The machine that code is made for: its name, its features, how wide its vectors are."""

import dataclasses

import torch

BARRIER = 100_000  # operations between two barriers that a thread should have, some microseconds: one costs about one


@dataclasses.dataclass(frozen=True)
class Machine:
    """A processor as LLVM is told of it: `bits` of a vector register, how many of them there are."""

    triple: str
    cpu: str
    features: str
    bits: int
    registers: int

    def lanes(self, dtypes: "set[torch.dtype]") -> int:
        """Elements worked on at once: 4-byte ones fill a register where there are such, else 8-byte ones."""
        return self.bits // (64 if all(dtype.itemsize == 8 for dtype in dtypes) else 32)

    def worth_sharing(self, shared: int, barriers: int) -> bool:
        """Whether threads may do a step together that shares out so many operations and waits so often."""
        return shared >= 2 * barriers * BARRIER
