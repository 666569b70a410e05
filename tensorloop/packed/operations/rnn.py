"""torch's recurrent layers on packed tensors: `nn.LSTM(..., batch_first=True)(p)` gives a packed output.

A layer without `batch_first` takes the view (T*, B, F). `pack_padded_sequence` makes torch's own PackedSequence.

torch runs them on entries in time order, longest row first, which is a permutation of the values and its inverse.
Both directions see the rows alone; the last state of a row is that after its own last entry.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop._common.user_line import warn
from tensorloop._torch import transforms
from tensorloop.packed.other_layouts.interop import TimeOrder, order_by_time
from tensorloop.packed.rows import segments
from tensorloop.packed.table.base import Packed, PackedView, is_packed, refusal
from tensorloop.packed.table.dispatch import dispatch, handles
from tensorloop.packed.table.fallback import PackedFallbackWarning
from tensorloop.packed.table.layout import ViewLayout, layout_of, see

_TIME_FIRST = ViewLayout(1, 0, 3)


@handles
def _recurrent(func: Any, input: Any, hx: Any, params: Any, has_biases: bool, *settings: Any) -> Any:
    """Every row by itself, in both directions; an empty row keeps its first state."""
    name = func.__name__
    settings, batch_first = settings[:-1], settings[-1]  # num_layers, dropout, train, bidirectional, batch_first
    if not batch_first:
        raise refusal("a packed tensor is (B, T*, F)", "make the layer with batch_first=True")
    if not is_packed(input):
        raise refusal("only the state is packed", "a state is (layers, B, H)")
    states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
    if transforms.maybe_level() is not None and any(map(transforms.is_batched, (input.values, *states, *params))):
        raise refusal("torch has no rule of vmap for it", "call it for each example, or write the cell in tl.scan")
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
    if transforms.maybe_level() is not None:  # where torch takes no PackedSequence
        return _run_row_by_row(func, input, states, params, has_biases, settings)
    begun = [h.index_select(1, order.rows) for h in states]
    data = segments.permute(input.values, order.forth, order.back)
    given = begun if isinstance(hx, (tuple, list)) else begun[0]
    out, *ended = func(data, order.batch_sizes, given, params, has_biases, *settings)
    values = segments.permute(out.to(result), order.back, order.forth)
    return (input._with(values), *(_put_back(h, new, order).to(state) for h, new in zip(states, ended, strict=True)))


def _run_row_by_row(
    func: Any, input: Packed, states: list[Tensor], params: Any, has_biases: bool, settings: tuple[Any, ...]
) -> Any:
    """A call for each row: under a transform of `torch.func`."""
    warn(f"{func.__name__}: under torch.func each packed row is a call of its own", PackedFallbackWarning)
    outs, ended = [], []
    for b, row in enumerate(input.unbind()):
        given = [h[:, b : b + 1] for h in states]
        if len(row):
            first = given if len(given) > 1 else given[0]
            out, *given = func(row[None], first, params, has_biases, *settings, True)
            outs.append(out[0])
        ended.append(given)
    return (input._with(torch.cat(outs)), *(torch.cat(parts, 1) for parts in zip(*ended, strict=True)))


@handles
def _recurrent_time_first(func: Any, input: Any, *rest: Any) -> Any:
    """Runs a recurrent layer without batch_first on (T*, B, F)."""
    batch_first = rest[-1]
    if not isinstance(input, PackedView):
        raise refusal("only the state is packed", "a state is (layers, B, H)")
    if batch_first or layout_of(input) != _TIME_FIRST:
        raise refusal(f"its input is {input.shape}", "make the layer with batch_first=True and give it (B, T*, F)")
    out, *ended = dispatch(func, (input.packed, *rest[:-1], True), {})
    return (see(out, 1, 0), *ended)


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


# -- what torch calls packing


@handles
def _pack(func: Any, input: Any, lengths: Any, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The values in time order, and how many rows reach each step; rows are sorted by now."""
    if not batch_first or not is_packed(input):
        raise refusal("a packed tensor is (B, T*, *F)", "call it with batch_first=True")
    lens = input._dim._host_lens
    if isinstance(lengths, PackedView) or is_packed(lengths) or lengths.tolist() != lens.tolist():
        raise WrongValue(f"lengths must be those of the packed rows, {lens.tolist()}, got {lengths}")
    if bool((lens.diff() > 0).any()):
        raise WrongValue(
            f"rows of {lens.tolist()} entries are not sorted, longest first; call it with enforce_sorted=False"
        )
    if not len(lens) or not int(lens[-1]):
        raise WrongValue("a PackedSequence has no empty rows; leave them out: p[p.lens > 0]")
    order = order_by_time(input._dim)
    return segments.permute(input.values, order.forth, order.back), order.batch_sizes.clone()


@handles
def _pack_time_first(func: Any, input: Any, lengths: Any, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Packs (T*, B, *F) for `pack_padded_sequence` without batch_first."""
    if not isinstance(input, PackedView) or batch_first or layout_of(input)[:2] != (1, 0):
        raise refusal("the input is no (T*, B, *F)", "pack (B, T*, *F) with batch_first=True")
    return dispatch(func, (input.packed, lengths, True), {})
