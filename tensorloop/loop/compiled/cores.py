"""The back ends in order: the first that takes a recurrence makes its core."""

from tensorloop.loop.compiled.eager_core import EagerCore
from tensorloop.loop.compiled.recurrence import Core, Recurrence, Unsupported


def made(recurrence: Recurrence) -> tuple[Core, Unsupported | None]:
    """A core, and why it is not a native one."""
    try:
        return native(recurrence), None
    except Unsupported as lack:
        return EagerCore(recurrence), lack
    except Exception as error:  # a compiler that fails costs speed, no result
        return EagerCore(recurrence), Unsupported(f"the emitter failed, {type(error).__name__}: {error}")


def native(recurrence: Recurrence) -> Core:
    """The core as machine code."""
    from tensorloop.loop.compiled.emitter import emit  # llvmlite is loaded when a plan is made

    return emit(recurrence)
