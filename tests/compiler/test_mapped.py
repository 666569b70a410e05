"""An operation for all steps at once: what is tried of vmap, and what is not."""

import torch
from torch import Tensor, fx

from tensorloop.compiler.divide.mapped import Mapped, TensorArgument

aten = torch.ops.aten


def mapped(target: object, result: Tensor, *given: Tensor) -> Mapped:
    node = fx.Graph().call_function(target)  # pyright: ignore[reportArgumentType]
    node.meta["val"] = result
    places = [TensorArgument(i) for i in range(len(given))]
    return Mapped(node, places, {}, [(x, True) for x in given], torch.device("cpu"))


def test_places_are_never_tried_with_numbers_of_ours():
    """This kernel of torch writes to whatever place it is told: here 0 is the only one."""
    x, at = torch.randn(4, 3, 1, 1), torch.zeros(4, 3, 1, 1, dtype=torch.int64)
    found = mapped(aten.adaptive_max_pool2d_backward.default, x[0], x[0], x[0], at[0])
    assert not found.mapped
    torch.testing.assert_close(found(x, x, at), x)


def test_floats_are_tried():
    x = torch.randn(4, 3, 3)
    found = mapped(aten.matrix_exp.default, x[0], x[0])
    assert found.mapped
    torch.testing.assert_close(found(x), torch.linalg.matrix_exp(x))
