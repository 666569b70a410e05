"""Steps as native functions: LLVM IR written as text, compiled through llvmlite."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.compiler.targets.cpu.core import emit as emit
    from tensorloop.compiler.targets.cpu.core import rows_meet as rows_meet
    from tensorloop.compiler.targets.cpu.threads import alone as alone

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = face(
        __name__, {"compiler.targets.cpu.core": ("emit", "rows_meet"), "compiler.targets.cpu.threads": ("alone",)}
    )
