"""Layers that keep a state in the place of attention, on packed rows: convolutions, gated and linear attention, Mamba.

Each row is padded at its end, where nothing before it can see that, and run by itself. So such a layer costs what it
costs in the padded batch, and the rest of the model what packed rows cost.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tensorloop._common.errors import WrongValue
from tensorloop.attention import TokenTree
from tensorloop.hf.certificate import find_readers, is_mixer
from tensorloop.hf.rows.attention import CallRows
from tensorloop.hf.signature import CACHES
from tensorloop.packed import Dim

_Layout = tuple[Tensor, Tensor, Tensor]  # of _lay


def run_by_rows(copied: nn.Module, rows: CallRows) -> int:
    """Makes mixers of a copied model run each row by itself; returns how often layers are to look at rows."""
    attention, mixers = find_readers(copied)
    layout = _lay(rows.dim, rows.trees)
    for module in mixers:
        if not is_mixer(type(module)):
            raise WrongValue(f"model has {type(module).__name__}, which was not compared on packed rows; pad the batch")
        plain = vars(module).get("forward")  # another library's, in place of the method
        held = weakref.ref(module)  # a cycle would outlive the graph
        vars(module)["forward"] = partial(_by_rows, held, plain, rows, layout)
    return len(attention) + len(mixers)


def _lay(dim: Dim, trees: list[TokenTree] | None) -> _Layout:
    """Places (R, T) of the tokens of each row, which of them are tokens, and where each of N tokens is first, flat."""
    device = dim.offsets.device
    if trees is None:
        starts, lens = dim.offsets[:-1], dim.lens
        place = torch.arange(int(lens.amax()) if len(lens) else 0, device=device)
        seen = place < lens[:, None]
        places = torch.where(seen, starts[:, None] + place, 0)
    else:
        found: list[Tensor] = []
        for start, stem, branches in trees:
            begin = start + stem
            for length in branches:
                found.append(torch.cat([torch.arange(start, start + stem), torch.arange(begin, begin + length)]))
                begin += length
        places = nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-1).to(device)
        seen, places = places >= 0, places.clamp(min=0)
    flat = torch.arange(places.numel(), device=device).view_as(places)
    first = flat.new_full((dim.total,), places.numel()).scatter_reduce(0, places[seen], flat[seen], "amin")
    return places, seen, first


def _by_rows(held: Any, plain: Any, rows: CallRows, layout: _Layout, *args: Any, **options: Any) -> Any:
    module, (places, seen, first) = held(), layout
    rows.calls += 1

    def spread(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[:2] != (1, rows.dim.total):
            return x
        return x[0][places].masked_fill(~seen.view(*seen.shape, *(1,) * (x.dim() - 2)), 0)

    options = {name: None if name in ("attention_mask", *CACHES) else x for name, x in options.items()}
    args, options = tree_map(spread, (args, options))
    out = plain(*args, **options) if plain is not None else type(module).forward(module, *args, **options)

    def pack(x: Any) -> Any:
        fits = isinstance(x, Tensor) and x.shape[:2] == places.shape
        return x.flatten(0, 1)[first][None] if fits else x

    return tree_map(pack, out)
