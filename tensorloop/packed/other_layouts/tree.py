"""A packed tensor as a pytree of one leaf: its values."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import Packed


def register(cls: type[Packed], rebuilt: Callable[..., Any]) -> None:
    """Makes `cls` known to torch's pytrees; `rebuilt(cls, values, dim)` makes one again.

    The dim belongs to the structure: torch.func would ask a gradient of a leaf of ints.
    """

    def unflatten(children: Iterable[Any], dim: Dim) -> Any:
        (values,) = children
        if type(values) is Tensor and values.shape[:1] != (dim.total,):
            raise ValueError(
                f"PackedTensor: the leaf of its tree must be values ({dim.total}, ...), got {tuple(values.shape)}; "
                "what adds a dim to leaves, as vmap does to outputs, needs p.values in place of p"
            )
        return rebuilt(cls, values, dim)

    _pytree.register_pytree_node(
        cls,
        _flatten,
        unflatten,
        serialized_type_name="tensorloop.PackedTensor",
        to_dumpable_context=lambda dim: [dim.name, dim._host_lens.tolist()],
        from_dumpable_context=lambda dumped: Dim(*dumped),
        flatten_with_keys_fn=_flatten_with_keys,
    )


def _flatten(p: Any) -> tuple[list[Any], Dim]:
    return [p.values], p._dim


def _flatten_with_keys(p: Any) -> tuple[list[tuple[Any, Any]], Dim]:
    return [(_pytree.GetAttrKey("values"), p.values)], p._dim
