"""What views and scores have of a tensor, by the dispatch: methods, operators, facts of the numbers."""

from typing import Any

from torch import Tensor

from tensorloop.packed.table.base import PackedView, add_operators
from tensorloop.packed.table.dispatch import dispatch, is_taken


class AnyOrder(PackedView):
    """A packed tensor not seen rows first: `_memory` has the numbers, and `_with` puts others in their places."""

    __slots__ = ()

    is_nested = False
    __array_ufunc__ = None
    facts = frozenset({"dtype", "device", "is_cuda", "is_cpu", "is_leaf", "grad_fn", "layout", "requires_grad"})

    @property
    def mT(self) -> Any:
        """The last two dims exchanged."""
        return dispatch(Tensor.transpose, (self, -1, -2), {})

    def dim(self) -> int:
        """The number of dims."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size; those of ragged dims equal None, and are no numbers."""
        return self.shape if dim is None else self.shape[dim]

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The rows, as they are seen; or the slices of another dim."""
        return dispatch(Tensor.unbind, (self, dim), {})

    def __getitem__(self, key: Any) -> Any:
        """x[b], x[:, h], x[..., a:b], x[:, None]: as of a padded tensor in this order."""
        return dispatch(Tensor.__getitem__, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        """x[key] = value: changes in place the entries that x[key] has."""
        dispatch(Tensor.__setitem__, (self, key, value), {})

    def __iter__(self) -> Any:
        """Along dim 0."""
        return iter(self.unbind(0))

    def __bool__(self) -> bool:
        """The truth of the only number there is, as for a tensor."""
        return bool(self._memory)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch function that is given one."""
        return dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """Facts of the numbers, and methods of a tensor that are taken here."""
        if name in self.facts:
            return getattr(self._memory if name in AnyOrder.facts else self.packed, name)
        func = getattr(Tensor, name, None)
        is_method = callable(func) and not name.startswith("__")
        if is_method and is_taken(name, self.form):
            return lambda *args, **kwargs: dispatch(func, (self, *args), kwargs)
        if any(name in getattr(kind, "__slots__", ()) for kind in type(self).__mro__):  # a copy that is not filled yet
            raise AttributeError(name)
        raise self._lacking(name, is_method)

    def _lacking(self, name: str, is_method: bool) -> AttributeError:
        """Returns the error for an attribute that there is none of."""
        raise NotImplementedError


add_operators(AnyOrder, dispatch)
