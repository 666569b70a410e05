"""Operations that fail by the values that they are given, where the body would catch that.

A step is looked at with the values of one step. An operation that passes there may raise at another, and a body that
catches it goes another way then, which no plan knows of.
"""

import sys
import types
from typing import Any

from torch import Tensor

from tensorloop._common.user_line import UserLine
from tensorloop.loop.effects import known
from tensorloop.loop.effects.instructions import kind_of_handler
from tensorloop.loop.effects.operands import UNKNOWN, handlers, on_stack, words

# By the names that aten has. All else raises by shapes and dtypes alone, which no step changes.
_FAILS = words(
    "_linalg_check_errors cholesky cholesky_inverse index index_put index_put_ index_select gather "
    "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ "
    "index_copy index_copy_ index_fill index_fill_ embedding embedding_bag _embedding_bag take put put_ "
    "multinomial one_hot bincount nll_loss_forward nll_loss2d_forward nll_loss repeat_interleave "
    "bernoulli normal poisson binomial _assert_async _assert_scalar _linalg_eigh _linalg_svd linalg_eig "
    "linalg_lstsq linalg_qr geqrf take_along_dim masked_scatter masked_scatter_ cdist histc quantile "
    "searchsorted linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex linalg_ldl_factor_ex"
)
# The modules that call a body, or a condition, of a loop that is looked at.
_CALL_BODIES = tuple(f"tensorloop.loop.compiled.{name}" for name in ("look.frame", "front", "in_graphs"))
_DIVIDES = words("floor_divide floor_divide_ remainder remainder_ fmod fmod_ div div_")


def may_fail(func: Any, args: Any) -> bool:
    """Whether an operation raises for some values of its arguments."""
    name = func.overloadpacket.__name__
    if name in _DIVIDES:
        return not any(
            isinstance(x, float) or (isinstance(x, Tensor) and x.is_floating_point()) for x in args[:2]
        ) and (not name.startswith("div") or "mode" in func._overloadname)
    return name in _FAILS


def caught_at() -> UserLine | None:
    """The user's line that runs now and would catch an error there; None where it would come out of the step."""
    for frame in known.above(sys._getframe(1)):
        module = known.module_of(frame)
        if module.startswith(_CALL_BODIES):
            return None
        if not known.is_trusted(module) and _catches(frame):
            return frame.f_code.co_filename, frame.f_lineno
    return None


def _catches(frame: types.FrameType) -> bool:
    at = frame.f_lasti  # what a handler raises again is the next one's, outside of it
    while found := next((x for x in handlers(frame.f_code) if x[0] <= at < x[1] and x[2] > at), None):
        _, _, at, depth, _ = found
        kind = kind_of_handler(frame.f_code, at)
        if kind == "except" or (kind == "with" and _may_suppress(on_stack(frame, depth - 1))):
            return True
    return False


def _may_suppress(leave: Any) -> bool:
    """Whether an `__exit__` may keep an exception to itself."""
    if leave is UNKNOWN:
        return True
    kind = type(getattr(leave, "__self__", None))
    return not known.is_trusted(kind.__module__ or "") and kind.__name__ not in ("nullcontext", "lock", "RLock")


def is_made_above(frame: types.FrameType, name: str) -> bool:
    """Whether a variable of a closure belongs to a function that runs further up, within the step."""
    for outer in known.above(frame.f_back):
        if known.module_of(outer).startswith("tensorloop."):
            return False
        if name in outer.f_code.co_cellvars and frame.f_code in outer.f_code.co_consts:
            return True
    return False
