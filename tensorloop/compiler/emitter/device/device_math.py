"""Functions of floats where there is no C library: a device has none."""

from tensorloop.compiler.emitter.ir.code import Value
from tensorloop.compiler.emitter.ir.vector_math import Math


class DeviceMath(Math):
    """The same functions, for devices."""

    def beyond(self, name: str, x: Value, made: Value) -> Value:
        """`made`, and NaN where x is so large that too few digits of pi are known here."""
        return made
