"""Whether a tensor has memory, and its numbers stand there. A private name of torch, tried with 2.11 to 2.15."""

import torch
from torch import Tensor, nn

has_storage = torch._C._has_storage  # pyright: ignore[reportAttributeAccessIssue]
# Classes of tensors whose numbers are in that memory; another subclass may have them anywhere. Entries of packed rows
# add theirs.
PLAIN: set[type] = {Tensor, nn.Parameter, nn.Buffer}
