"""How far numbers may be from others that were computed in another way: one table for all that proves itself."""

import torch

# Absolute and relative.
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.complex64: 1e-5, torch.complex128: 1e-12}
