"""Steps as native functions: LLVM IR written as text, compiled through llvmlite."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.compiler.targets.cpu.loop_threads import alone as alone
    from tensorloop.compiler.targets.cpu.native_core import emit as emit
    from tensorloop.compiler.targets.cpu.native_core import rows_meet as rows_meet

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {"compiler.targets.cpu.native_core": ("emit", "rows_meet"), "compiler.targets.cpu.loop_threads": ("alone",)},
    )
