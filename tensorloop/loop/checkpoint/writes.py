"""Which torch functions may change an argument in place, by their names."""

from typing import Any

UNSEEN = "without a version"
WRITING: dict[Any, bool | str] = {}  # functions met so far -> whether they may, or `UNSEEN`

_WRITES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__", "__ixor__"}
)
_KEEPS = frozenset({"requires_grad_", "retain_grad", "__setattr__"})
_STATISTICS = ("batch_norm", "instance_norm")  # they change running_mean and running_var


def may_write(func: Any) -> bool | str:
    """Whether a torch function may change an argument; `UNSEEN` where the change raises no version."""
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return name not in _KEEPS
    return name in _WRITES or (UNSEEN if name.endswith(_STATISTICS) else False)
