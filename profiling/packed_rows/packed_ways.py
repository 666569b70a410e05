"""Packing, padding, reductions over rows, permutations, layers of channels: with tensorloop, and as others have them.

All ways of a case take one tensor and give one. Rows have lengths uniform in 1..1000; what others need beyond the
tensor (masks, indices, offsets) is made beforehand, so that it is not on the clock.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import rnn

from tensorloop.packed import Dim, PackedTensor, pack_padded
from tensorloop.packed.rows import segments

ROWS, STEPS, FEATURES = 64, 1000, 256
PERMUTED = 16384


class Way(NamedTuple):
    run: Callable[[Tensor], Tensor]
    compared: Callable[[Tensor], Tensor] | None = None  # `run` with its rows in everybody's order, where it has its own
    weights: tuple[Tensor, ...] = ()  # whose gradients are on the clock, too


class Ragged(NamedTuple):
    """The rows' lengths, in every form that somebody asks for."""

    lens: Tensor
    list: list[int]
    offsets: Tensor
    n: int
    steps: int
    mask: Tensor  # (B, T) bool
    slots: Tensor  # (N,): places in (B * T,)
    row_ids: Tensor  # (N,)
    counts: Tensor  # (B, 1) float32
    dim: Dim


@cache
def ragged() -> Ragged:
    lens = torch.randint(1, STEPS + 1, (ROWS,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    steps = int(lens.max())
    mask = torch.arange(steps) < lens[:, None]
    slots = mask.flatten().nonzero()[:, 0]
    row_ids = torch.arange(ROWS).repeat_interleave(lens)
    n, dim = int(offsets[-1]), Dim("time", lens)
    return Ragged(lens, lens.tolist(), offsets, n, steps, mask, slots, row_ids, lens[:, None].float(), dim)


def inputs(case: str) -> Tensor:
    r = ragged()
    lead = {"pack": (ROWS, r.steps), "permute": (1, PERMUTED)}.get(case, (r.n,))
    return torch.randn(*lead, FEATURES, generator=torch.Generator().manual_seed(1)).requires_grad_()


def pack() -> dict[str, Way]:
    r = ragged()

    def sequence(x: Tensor) -> Tensor:
        return rnn.pack_padded_sequence(x, r.lens, batch_first=True, enforce_sorted=False).data

    def narrow(x: Tensor) -> Tensor:
        starts = torch.zeros(ROWS, dtype=torch.int64)
        return torch.nested.narrow(x, 1, starts, r.lens, layout=torch.jagged).contiguous().values()

    return {
        "pack_padded": Way(lambda x: pack_padded(x, r.dim).values),
        "x[mask]": Way(lambda x: x[r.mask]),
        "index_select": Way(lambda x: x.view(-1, FEATURES).index_select(0, r.slots)),
        "masked_select": Way(lambda x: x.masked_select(r.mask[..., None]).view(-1, FEATURES)),
        "cat of slices": Way(lambda x: torch.cat([x[b, :t] for b, t in enumerate(r.list)])),
        "torch.nested": Way(narrow),
        "pack_padded_sequence": Way(sequence, lambda x: sequence(x)[time_major().argsort()]),
        "FBGEMM": Way(lambda x: operators().dense_to_jagged(x, [r.offsets], r.n)[0]),
    }


def time_major() -> Tensor:
    """(N,): the order that PackedSequence has the entries in."""
    r = ragged()
    numbers = torch.zeros(ROWS, r.steps, dtype=torch.int64).masked_scatter(r.mask, torch.arange(r.n))
    return rnn.pack_padded_sequence(numbers, r.lens, batch_first=True, enforce_sorted=False).data


def pad() -> dict[str, Way]:
    r = ragged()
    sequence = rnn.pack_padded_sequence(torch.zeros(ROWS, r.steps), r.lens, batch_first=True, enforce_sorted=False)

    def mask(v: Tensor) -> Tensor:
        out = v.new_zeros(ROWS, r.steps, FEATURES)
        out[r.mask] = v
        return out

    def index_copy(v: Tensor) -> Tensor:
        return v.new_zeros(ROWS * r.steps, FEATURES).index_copy_(0, r.slots, v).view(ROWS, r.steps, FEATURES)

    def nested(v: Tensor) -> Tensor:
        made = torch.nested.nested_tensor_from_jagged(v, r.offsets, min_seqlen=min(r.list), max_seqlen=r.steps)
        return made.to_padded_tensor(0.0)

    def from_sequence(v: Tensor) -> Tensor:
        rows = rnn.PackedSequence(v, sequence.batch_sizes, sequence.sorted_indices, sequence.unsorted_indices)
        return rnn.pad_packed_sequence(rows, batch_first=True)[0]

    return {
        "p.pad()": Way(lambda v: PackedTensor(v, r.dim).pad()),
        "zeros, out[mask] = v": Way(mask),
        "index_copy_": Way(index_copy),
        "masked_scatter": Way(lambda v: v.new_zeros(ROWS, r.steps, FEATURES).masked_scatter(r.mask[..., None], v)),
        "pad_sequence of a split": Way(lambda v: rnn.pad_sequence(v.split(r.list), batch_first=True)),
        "torch.nested": Way(nested),
        "pad_packed_sequence": Way(from_sequence, lambda v: from_sequence(v[time_major()])),
        "FBGEMM": Way(lambda v: operators().jagged_to_padded_dense(v, [r.offsets], [r.steps])),
    }


def operators() -> Any:
    """FBGEMM's, where it is installed."""
    import fbgemm_gpu  # noqa: F401  # pyright: ignore[reportMissingImports]

    return torch.ops.fbgemm


def nested(v: Tensor) -> Tensor:
    r = ragged()
    return torch.nested.nested_tensor_from_jagged(v, r.offsets, min_seqlen=min(r.list), max_seqlen=r.steps)


def by_row(reduce: Callable[[Tensor], Tensor]) -> Way:
    return Way(lambda v: torch.stack([reduce(row) for row in v.split(ragged().list)]))


def padded(v: Tensor, fill: float) -> Tensor:
    r = ragged()
    out = v.new_full((ROWS, r.steps, FEATURES), fill)
    out[r.mask] = v
    return out


def scattered(v: Tensor, reduce: str) -> Tensor:
    rows = ragged().row_ids[:, None].expand(-1, FEATURES)
    return v.new_zeros(ROWS, FEATURES).scatter_reduce(0, rows, v, reduce, include_self=False)


def reduced(v: Tensor, reduce: str) -> Tensor:
    return torch.segment_reduce(v, reduce, lengths=ragged().lens)


def added(v: Tensor) -> Tensor:
    return v.new_zeros(ROWS, FEATURES).index_add(0, ragged().row_ids, v)


def segment_sum() -> dict[str, Way]:
    return {
        "p.sum(1)": Way(lambda v: PackedTensor(v, ragged().dim).sum(1)),
        "index_add": Way(added),
        "segment_reduce": Way(lambda v: reduced(v, "sum")),
        "scatter_reduce": Way(lambda v: scattered(v, "sum")),
        "pad, sum": Way(lambda v: padded(v, 0).sum(1)),
        "row by row": by_row(lambda row: row.sum(0)),
        "torch.nested": Way(lambda v: nested(v).sum(1)),
    }


def segment_mean() -> dict[str, Way]:
    return {
        "p.mean(1)": Way(lambda v: PackedTensor(v, ragged().dim).mean(1)),
        "index_add, divide": Way(lambda v: added(v) / ragged().counts),
        "segment_reduce": Way(lambda v: reduced(v, "mean")),
        "scatter_reduce": Way(lambda v: scattered(v, "mean")),
        "row by row": by_row(lambda row: row.mean(0)),
        "torch.nested": Way(lambda v: nested(v).mean(1)),
    }


def segment_max() -> dict[str, Way]:
    return {
        "p.amax(1)": Way(lambda v: PackedTensor(v, ragged().dim).amax(1)),
        "segment_reduce": Way(lambda v: reduced(v, "max")),
        "scatter_reduce": Way(lambda v: scattered(v, "amax")),
        "pad, amax": Way(lambda v: padded(v, -torch.inf).amax(1)),
        "row by row": by_row(lambda row: row.amax(0)),
        "torch.nested": Way(lambda v: nested(v).amax(1)),
    }


def segment_softmax() -> dict[str, Way]:
    def scatter(v: Tensor, top: Tensor, sum: Callable[[Tensor], Tensor]) -> Tensor:
        rows = ragged().row_ids
        shifted = (v - top.detach().index_select(0, rows)).exp()
        return shifted / sum(shifted).index_select(0, rows)

    return {
        "p.softmax(1)": Way(lambda v: PackedTensor(v, ragged().dim).softmax(1).values),
        "segment_reduce, gathers": Way(lambda v: scatter(v, reduced(v.detach(), "max"), lambda x: reduced(x, "sum"))),
        "scatter_reduce, gathers": Way(lambda v: scatter(v, scattered(v.detach(), "amax"), added)),
        "pad, softmax, mask": Way(lambda v: padded(v, -torch.inf).softmax(1)[ragged().mask]),
        "row by row": Way(lambda v: torch.cat([row.softmax(0) for row in v.split(ragged().list)])),
        "torch.nested": Way(lambda v: torch.softmax(nested(v), 1).values()),
        "FBGEMM": Way(lambda v: operators().jagged_softmax(v, ragged().offsets, STEPS)[0]),
    }


def segment_logsumexp() -> dict[str, Way]:
    def scatter(v: Tensor) -> Tensor:
        top = scattered(v.detach(), "amax")
        return added((v - top.index_select(0, ragged().row_ids)).exp()).log() + top

    return {
        "p.logsumexp(1)": Way(lambda v: PackedTensor(v, ragged().dim).logsumexp(1)),
        "scatter_reduce, gathers": Way(scatter),
        "pad, logsumexp": Way(lambda v: padded(v, -torch.inf).logsumexp(1)),
        "row by row": by_row(lambda row: row.logsumexp(0)),
        "torch.nested": Way(lambda v: torch.logsumexp(nested(v), 1)),
    }


def permute() -> dict[str, Way]:
    """There and back: x to another order of rows, and from it to the first one."""
    index = torch.randperm(PERMUTED, generator=torch.Generator().manual_seed(2))
    inverse = index.argsort()

    def gathers(x: Tensor) -> Tensor:
        there = segments.permute(x.squeeze(0), index, inverse)  # x[0] would have a gradient of its own, a copy
        return segments.permute(there, inverse, index)[None]

    return {
        "permute": Way(gathers),
        "index_select": Way(lambda x: x.index_select(1, index).index_select(1, inverse)),
        "x[:, index]": Way(lambda x: x[:, index][:, inverse]),
        "gather": Way(
            lambda x: x.gather(1, index[None, :, None].expand_as(x)).gather(1, inverse[None, :, None].expand_as(x))
        ),
    }


def of_channels(layer: Callable[[Any], Any], step: int, fill: float, *weights: Tensor) -> dict[str, Way]:
    """A layer of torch's on (B, C, T): packed, on as many entries in rows of one length, and padded.

    `step`: how many entries become one. Rows of one length are (B, C, T) from the start, nothing is turned round for
    them; they have other numbers, so that the padded way stands for them in the comparison.
    """
    r = ragged()
    equal = next(d for d in range(min(ROWS, r.n), 0, -1) if r.n % d == 0)
    kept = (torch.arange(r.steps // step) < (r.lens // step)[:, None]).flatten().nonzero()[:, 0]

    def pad(v: Tensor) -> Tensor:
        out = layer(padded(v, fill).mT).mT
        return out.reshape(-1, FEATURES).index_select(0, kept)

    return {
        "p.transpose(1, 2)": Way(lambda v: layer(PackedTensor(v, r.dim).transpose(1, 2)).packed.values, None, weights),
        "as many entries in equal rows": Way(lambda v: layer(v.view(equal, FEATURES, r.n // equal)), pad, weights),
        "pad, the layer, index_select": Way(pad, None, weights),
    }


def conv1d() -> dict[str, Way]:
    weight, bias = (torch.randn(FEATURES, *size).mul_(0.05).requires_grad_() for size in ((FEATURES, 5), ()))
    return of_channels(lambda x: F.conv1d(x, weight, bias, padding=2), 1, 0.0, weight, bias)


def depthwise() -> dict[str, Way]:
    weight = torch.randn(FEATURES, 1, 15).mul_(0.1).requires_grad_()
    return of_channels(lambda x: F.conv1d(x, weight, padding=7, groups=FEATURES), 1, 0.0, weight)


def max_pool() -> dict[str, Way]:
    return of_channels(lambda x: F.max_pool1d(x, 2), 2, 0.0)


def avg_pool() -> dict[str, Way]:
    return of_channels(lambda x: F.avg_pool1d(x, 2), 2, 0.0)


def batch_norm() -> dict[str, Way]:
    """Padded, the statistics are those of the mask."""
    weight, bias = (torch.randn(FEATURES).requires_grad_() for _ in range(2))
    ways = of_channels(lambda x: F.batch_norm(x, None, None, weight, bias, True), 1, 0.0, weight, bias)
    r = ragged()

    def masked(v: Tensor) -> Tensor:
        x, mask = padded(v, 0.0), r.mask[..., None]
        mean = x.sum((0, 1)) / r.n
        var = torch.where(mask, x - mean, 0).square().sum((0, 1)) / r.n
        return ((x - mean) * (var + 1e-5).rsqrt() * weight + bias)[r.mask]

    equal = ways["as many entries in equal rows"]
    return {
        "p.transpose(1, 2)": ways["p.transpose(1, 2)"],
        "as many entries in equal rows": equal._replace(compared=masked),
        "pad, statistics by a mask": Way(masked, None, (weight, bias)),
    }


CASES: dict[str, Callable[[], dict[str, Way]]] = {
    "pack": pack,
    "pad": pad,
    "sum": segment_sum,
    "mean": segment_mean,
    "max": segment_max,
    "softmax": segment_softmax,
    "logsumexp": segment_logsumexp,
    "permute": permute,
    "conv1d": conv1d,
    "depthwise": depthwise,
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "batch_norm": batch_norm,
}
