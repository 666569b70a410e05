"""Steps as kernels for NVIDIA GPUs: the text of the emitter made PTX by LLVM, loaded by the CUDA driver."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.compiler.targets.ptx.made import describe as describe
    from tensorloop.compiler.targets.ptx.made import emit as emit

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = face(__name__, {"compiler.targets.ptx.made": ("describe", "emit")})
