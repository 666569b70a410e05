"""Steps as kernels for NVIDIA GPUs: the text of the emitter made PTX by LLVM, loaded by the CUDA driver."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.compiler.targets.ptx.made import describe as describe
    from tensorloop.compiler.targets.ptx.made import emit as emit
    from tensorloop.compiler.targets.ptx.piece_kernels import PieceFailed as PieceFailed
    from tensorloop.compiler.targets.ptx.piece_kernels import PieceKernels as PieceKernels
    from tensorloop.compiler.targets.ptx.piece_kernels import describe_piece as describe_piece

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "compiler.targets.ptx.made": ("describe", "emit"),
            "compiler.targets.ptx.piece_kernels": ("PieceFailed", "PieceKernels", "describe_piece"),
        },
    )
