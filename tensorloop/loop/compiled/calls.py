"""Calls of torch while a body is looked at: some are refused, for a graph of operations would not show what they do.

Around every look there is a mode of this kind, so that what a call does is known before the call is made, on every call
of the loop: a body may register a hook today and none tomorrow, and its operations are the same.
"""

from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tensorloop._common.user_line import user_place
from tensorloop.loop.compiled.refused import Refused

PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})  # classes of tensors that are nothing else
_READS = {
    "numpy": "turns a tensor into an array",
    "__array__": "turns a tensor into an array",
    "tolist": "turns a tensor into a list",
    "__dlpack__": "hands a tensor to another library",
    "__repr__": "prints a tensor",
    "__format__": "prints a tensor",
    "register_hook": "registers a hook",
    "register_post_accumulate_grad_hook": "registers a hook",
    "retain_grad": "retains a gradient",
    "backward": "runs a backward pass",
    "data_ptr": "asks where a tensor is in memory",
    "untyped_storage": "asks where a tensor is in memory",
}
_REFUSED = {
    function: f"the body {what} ({name})" for name, what in _READS.items() if (function := getattr(Tensor, name, None))
}
# Attributes: a node of autograd's graph takes hooks, which no later step would have.
_ATTRIBUTES = {"grad_fn": "the body looks at the graph of a tensor (grad_fn), which may be to register a hook"}
LAYOUT = frozenset({Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset})
_BUILT_IN = BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType


class CallWatch(TorchFunctionMode):
    """Refuses calls that look through a tensor, and knows whether a call runs (`inside`)."""

    inside = False
    asked_layout = False  # whether the body asked how a tensor lies in memory
    asked_grad = False  # whether one requires a gradient, or is a leaf of a graph

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes one call."""
        return self._seen(func, args, kwargs)

    def _seen(self, func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
        """A call during which operations are no surprise."""
        self.asked_layout |= func in LAYOUT
        reason = _REFUSED.get(func)
        if reason is None and type(func) is MethodWrapperType:
            name = getattr(func.__self__, "__name__", "")
            reason = _ATTRIBUTES.get(name)
            self.asked_grad |= name in ("requires_grad", "is_leaf", "grad")
        if reason is not None:
            raise Refused(reason, user_place())
        outer, self.inside = self.inside, True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.inside = outer


def is_torchs(function: Any) -> bool:
    """Whether a function is torch's own: below another's, which it may hand to `__torch_function__`, all may change."""
    if type(function) is FunctionType:
        return function.__module__ == "torch" or function.__module__.startswith("torch.")
    return type(function) in _BUILT_IN
