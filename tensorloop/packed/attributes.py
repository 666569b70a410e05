"""What a packed tensor has of a tensor beside operations: facts, its place in autograd, changes in place, lists."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, named
from tensorloop.packed.table.base import Packed, is_packed, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.pointwise import check_partner, to_values

# Attributes of a tensor that are those of the values.
ATTRIBUTES = frozenset(
    {
        *("grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn", "is_mps", "is_quantized", "is_sparse"),
        *("is_xpu", "itemsize", "layout", "nbytes", "output_nr", "retains_grad", "_version"),
    }
)


class InAutograd(Packed):
    """The part of `PackedTensor` that autograd knows: gradients and hooks are packed as it is."""

    __slots__ = ()

    @property
    def requires_grad(self) -> bool:
        """Whether the values require a gradient."""
        return self.values.requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.values.requires_grad = wanted

    @property  # pyright: ignore[reportIncompatibleVariableOverride]
    def grad(self) -> Self | None:
        """The gradient of the values, packed; None where there is none yet. It can be set, to None too."""
        return None if self.values.grad is None else self._with(self.values.grad)

    @grad.setter
    @named("grad")
    def grad(self, grad: Packed | None) -> None:
        if grad is not None and not is_packed(grad):
            raise WrongType(f"the gradient of a packed tensor is packed, or None, got {type(grad).__name__}")
        self.values.grad = None if grad is None else check_partner(self, grad).values

    @property
    def data(self) -> Self:
        """A packed tensor of these values, outside of autograd."""
        return self._with(self.values.data)

    def requires_grad_(self, requires_grad: bool = True) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Marks the values as in need of a gradient."""
        self.values.requires_grad_(requires_grad)
        return self

    def backward(self, gradient: Packed | None = None, **kwargs: Any) -> None:
        """Backward from these values, with a packed gradient."""
        if gradient is not None and not is_packed(gradient):
            why = f"backward: gradient must be packed as the tensor is, got {arguments.describe(gradient)}"
            raise TypeError(f"{why}; write PackedTensor(gradient, p.lens) for (N, *F), or p.values.backward(gradient)")
        self.values.backward(None if gradient is None else gradient.values, **kwargs)

    def _refuse_parameter(self, wanted: bool) -> None:
        raise TypeError("Parameter: a packed tensor is no parameter; write nn.Parameter(p.values), and pack it in use")

    _is_param: Any = property(lambda self: False, _refuse_parameter)  # nn.Parameter(p) sets it

    def retain_grad(self) -> None:
        """Keeps `grad` of these values although they are no leaf."""
        self.values.retain_grad()

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Calls `hook` with the gradient, packed, in backward; what it returns, packed or None, replaces it."""
        like = self._with(None)  # without the values, whose graph would hold itself

        def on_values(grad: Tensor) -> Tensor | None:
            new = hook(like._with(grad))
            return new.values if is_packed(new) else new

        return self.values.register_hook(on_values)

    def tolist(self) -> list[Any]:
        """The rows, each as nested lists."""
        return [row.tolist() for row in self.values.split(self._dim._host_lens.tolist())]

    def ndimension(self) -> int:
        """The number of dims, batch and ragged dim included."""
        return self.ndim


@handles
def _fill(func: Any, input: Any, *value: Any, **kwargs: Any) -> Any:
    """In place."""
    func(input.values, *value, **kwargs)
    return input


@handles
def _copy(func: Any, input: Any, src: Any, non_blocking: bool = False) -> Any:
    """In place, from a packed tensor of the same rows or from what broadcasts."""
    if not is_packed(input):
        raise refusal("a padded tensor cannot be changed in place by a packed one", "use p.pad()")
    if is_packed(src):
        check_partner(input, src)
    func(input.values, to_values(src, input) if isinstance(src, Tensor) or is_packed(src) else src, non_blocking)
    return input


@handles
def _of_values(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what torch says of the values."""
    return func(input._memory, *args, **kwargs)


@handles
def _grad(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> tuple[Any, ...]:
    """Runs `torch.autograd.grad`: the gradient of a packed input is packed."""
    of, by, along = (x if isinstance(x, (tuple, list)) else (x,) for x in (outputs, inputs, grad_outputs))
    found = func(*([getattr(x, "_memory", x) for x in given] for given in (of, by, along)), **kwargs)
    return tuple(g if g is None or isinstance(x, Tensor) else x._with(g) for x, g in zip(by, found, strict=True))


@handles
def _equal(func: Any, input: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether two packed tensors are of the same rows, and their values are equal or close."""
    if not (is_packed(input) and is_packed(other)):
        raise refusal("only one of the two is packed", "pack the other: pack_padded(x, p.lens), or compare p.pad()")
    if not input._dim.same(other._dim):
        return False
    return func(input.values, other.values, *args, **kwargs)
