"""Whether a tensor has memory behind it. A private name of torch, tried with 2.11 to 2.15."""

import torch

has_storage = torch._C._has_storage  # pyright: ignore[reportAttributeAccessIssue]
