"""Recurrences as native functions: LLVM IR written as text, compiled through llvmlite."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.loop.compiled.emitter.core import emit as emit
    from tensorloop.loop.compiled.emitter.core import rows_meet as rows_meet
    from tensorloop.loop.compiled.emitter.threads import alone as alone

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = face(
        __name__, {"loop.compiled.emitter.core": ("emit", "rows_meet"), "loop.compiled.emitter.threads": ("alone",)}
    )
