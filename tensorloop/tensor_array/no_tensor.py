"""What an array says where somebody takes it for a tensor."""

from typing import TYPE_CHECKING, Any, Never

from torch import Tensor

_OTHERS = {"push": "append", "push_back": "append", "set": "write", "get": "read", "concat": "stack", "cat": "stack"}


class NoTensor:
    """Refuses what takes an array for a tensor, and says what to write instead."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Never:
        """Called by torch where a function that takes tensors is given an array."""
        name = getattr(func, "__name__", func)
        raise TypeError(
            f"{name}: a TensorArray is no tensor; give it .stack(), all slots as one, or [a:b], some of them"
        )

    if not TYPE_CHECKING:  # a checker would take any name for one of ours

        def __getattr__(self, name: str) -> Any:
            of_tensors = not name.startswith("_") and hasattr(Tensor, name)
            hint = f"; .stack() is the tensor of all slots: .stack().{name}" if of_tensors else ""
            hint = f"; did you mean .{_OTHERS[name]}()" if name in _OTHERS else hint
            raise AttributeError(f"'TensorArray' object has no attribute '{name}'{hint}", name=name, obj=self)
