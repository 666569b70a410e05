"""The private names of torch that counting memory and comparing results need.

torch describes both for extension writers but keeps them in modules with an underscore: the mode that sees
every operation below autograd (custom Functions and backward included), and the flattening of nested results
with the path of each leaf. Tried with torch 2.13.
"""

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

__all__ = ["TorchDispatchMode", "keystr", "tree_flatten_with_path", "tree_leaves"]
