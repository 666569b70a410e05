"""Loop buffers that grow, are overwritten and are read back, with gradients in O(T)."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.tensor_array.array import TensorArray as TensorArray

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(__name__, {"tensor_array.array": ("TensorArray",)})
