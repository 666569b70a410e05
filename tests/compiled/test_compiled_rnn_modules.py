"""Modules of torch that are loops themselves, in the body of a compiled loop: a controller of one step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("train", [True, False])
def test_a_layer_of_one_step_is_compiled(kind: Any, options: dict[str, Any], train: bool) -> None:
    layer = kind(4, 5, batch_first=True, **options).train(train)
    n = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    state = torch.zeros(n, 3, 5)
    init = (state, state) if kind is nn.LSTM else state

    def body(carry: Any, x: Tensor) -> tuple[Any, Tensor]:
        y, carry = layer(x.unsqueeze(1), carry)
        return carry, y[:, 0]

    def run(**how: Any) -> tuple[Tensor, ...]:
        ys = tl.scan(body, init, torch.linspace(-1, 1, 20 * 3 * 4).view(20, 3, 4), **how)[1]
        return ys, *torch.autograd.grad(ys.sin().sum(), list(layer.parameters()))

    enabled = torch.backends.mkldnn.enabled
    torch.testing.assert_close(run(compile="strict"), run(), rtol=1e-4, atol=1e-5)
    assert torch.backends.mkldnn.enabled == enabled
