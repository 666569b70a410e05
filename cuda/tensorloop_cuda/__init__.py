"""tensorloop's kernels for NVIDIA GPUs, in numba-CUDA. They take checked tensors on one device.

Kernels run on torch's current stream and wait for nothing. They are compiled when first called, and kept on disk. To
import this package starts no CUDA. `offsets` (B+1,) int64 cut N rows of values into B segments: segment b is
[offsets[b], offsets[b+1]), and may be empty. Whatever `offsets` and indices hold, memory outside the tensors is
neither read nor written. Rows are moved in any dtype, segments are reduced in float32 and float64, tokens are int64.
"""

from tensorloop_cuda.edits import edit_distance
from tensorloop_cuda.moves import SUMMED, regroup, regroup_sums
from tensorloop_cuda.ready import why_not
from tensorloop_cuda.rows import gather_rows, pack_rows, pad_rows, spread_rows
from tensorloop_cuda.segment_reductions import (
    segment_cumsum,
    segment_extreme_grad,
    segment_logsumexp,
    segment_logsumexp_grad,
    segment_max,
    segment_min,
    segment_softmax,
    segment_softmax_grad,
    segment_sum,
)
from tensorloop_cuda.slots import take_rows, write_rows

__all__ = [
    "SUMMED",
    "edit_distance",
    "gather_rows",
    "pack_rows",
    "pad_rows",
    "regroup",
    "regroup_sums",
    "segment_cumsum",
    "segment_extreme_grad",
    "segment_logsumexp",
    "segment_logsumexp_grad",
    "segment_max",
    "segment_min",
    "segment_softmax",
    "segment_softmax_grad",
    "segment_sum",
    "spread_rows",
    "take_rows",
    "why_not",
    "write_rows",
]
