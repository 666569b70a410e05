"""The back ends in order: the first that takes a step makes its core."""

from tensorloop.compiler.step import Core, Step, Unsupported
from tensorloop.compiler.targets.eager import EagerCore


def make_core(step: Step) -> tuple[Core, Unsupported | None]:
    """Returns a core, and why it is not a native one."""
    try:
        return native(step), None
    except Unsupported as lack:
        return EagerCore(step), lack
    except Exception as error:  # a compiler that fails costs speed, no result
        return EagerCore(step), Unsupported(f"the emitter failed, {type(error).__name__}: {error}")


def native(step: Step) -> Core:
    """Returns the core as machine code."""
    from tensorloop.compiler.targets.cpu import emit

    return emit(step)
