"""Operations that `__torch_function__` does not see. Private names of torch, tried with 2.11 to 2.15."""

import torch

unseen = torch._C.DisableTorchFunction  # neither by modes nor by classes
unseen_by_classes = torch._C.DisableTorchFunctionSubclass


def modes() -> int:
    """How many of the caller's modes see each call of torch in this thread."""
    return torch._C._len_torch_function_stack()
