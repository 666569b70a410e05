"""The back ends in order: the first that takes a recurrence makes its core."""

from tensorloop.compiler.step import Core, Recurrence, Unsupported
from tensorloop.compiler.targets.eager import EagerCore


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
    from tensorloop.compiler.targets.cpu import emit

    return emit(recurrence)
