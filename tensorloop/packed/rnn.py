"""torch's recurrent layers on packed tensors: `nn.LSTM(..., batch_first=True)(p)` gives a packed output.

torch runs them on entries in time order, longest row first, which is a permutation of the values and its inverse.
Both directions see the rows alone; the last state of a row is that after its own last entry.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tensorloop.packed import segments
from tensorloop.packed.base import is_packed, refusal
from tensorloop.packed.dispatch import handles
from tensorloop.packed.interop import TimeOrder, order_by_time


@handles("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(func: Any, input: Any, hx: Any, params: Any, has_biases: bool, *settings: Any) -> Any:
    """Every row by itself, in both directions; an empty row keeps its first state."""
    name = func.__name__
    settings, batch_first = settings[:-1], settings[-1]  # num_layers, dropout, train, bidirectional, batch_first
    if not batch_first:
        raise refusal("a packed tensor is (B, T*, F)", "make the layer with batch_first=True")
    if not is_packed(input):
        raise refusal("only the state is packed", "a state is (layers, B, H)")
    states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
    rows, steps = len(input._dim), input._dim.max_len
    if steps and rows * steps == input._dim.total:  # rows of one length: a padded tensor without padding
        whole = input.values.unflatten(0, (rows, steps))
        out, *ended = func(whole, hx, params, has_biases, *settings, True)
        return (input._with(out.flatten(0, 1)), *ended)
    order = order_by_time(input._dim)
    result, state = _find_dtypes(name, input.values, states[0], params[0])
    if not len(order.rows):  # nothing to run on: no entry, and every state stays
        size = states[0].shape[-1] * (2 if settings[-1] else 1)
        return (input._with(input.values.new_zeros(0, size, dtype=result)), *(h.to(state) for h in states))
    begun = [h.index_select(1, order.rows) for h in states]
    data = segments.permute(input.values, order.forth, order.back)
    given = begun if isinstance(hx, (tuple, list)) else begun[0]
    out, *ended = func(data, order.batch_sizes, given, params, has_biases, *settings)
    values = segments.permute(out.to(result), order.back, order.forth)
    return (input._with(values), *(_put_back(h, new, order).to(state) for h, new in zip(states, ended, strict=True)))


def _put_back(before: Tensor, after: Tensor, order: TimeOrder) -> Tensor:
    """The states in the rows' own order; an empty row keeps what it began with."""
    return before.to(after.dtype).index_copy(1, order.rows, after)


def _find_dtypes(name: str, input: Tensor, state: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the output and of the states, as a padded tensor of these would give them."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return input.dtype, state.dtype
    return _ask_autocast(name, kind, torch.get_autocast_dtype(kind), (input.dtype, state.dtype, weight.dtype))


@functools.cache
def _ask_autocast(
    name: str, kind: str, to: torch.dtype, given: tuple[torch.dtype, ...]
) -> tuple[torch.dtype, torch.dtype]:
    """Autocast has another rule for entries in time order than for a padded tensor: the smallest of these is asked."""
    gates = {"lstm": 4, "gru": 3}.get(name, 1)
    x, h, w = (torch.zeros(n, 1, 1, dtype=d, device=kind) for n, d in zip((1, 1, gates), given, strict=True))
    hx = (h, h) if name == "lstm" else h
    with torch.no_grad():
        out, *ended = getattr(torch, name)(x, hx, [w.squeeze(1)] * 2, False, 1, 0.0, False, False, True)
    return out.dtype, ended[0].dtype
