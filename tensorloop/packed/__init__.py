"""Rows of unequal length without padding: `PackedTensor` and what torch functions do with it."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face
from tensorloop._common.moved import keep_old_names

if TYPE_CHECKING:
    from tensorloop.packed.loaders.batches import collate as collate
    from tensorloop.packed.loaders.batches import pack_padded as pack_padded
    from tensorloop.packed.loaders.sampler import BatchSampler as BatchSampler
    from tensorloop.packed.operations.transducer import pairs as pairs
    from tensorloop.packed.operations.transducer import rnnt_loss as rnnt_loss
    from tensorloop.packed.rows.dim import Dim as Dim
    from tensorloop.packed.static.static import StaticPackedTensor as StaticPackedTensor
    from tensorloop.packed.table.autograd import apply as apply
    from tensorloop.packed.table.fallback import FALLBACKS as FALLBACKS
    from tensorloop.packed.table.fallback import PackedFallbackWarning as PackedFallbackWarning
    from tensorloop.packed.tensor import PackedTensor as PackedTensor

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "packed.table.autograd": ("apply",),
            "packed.loaders.batches": ("collate", "pack_padded"),
            "packed.rows.dim": ("Dim",),
            "packed.table.fallback": ("FALLBACKS", "PackedFallbackWarning"),
            "packed.loaders.sampler": ("BatchSampler",),
            "packed.static.static": ("StaticPackedTensor",),
            "packed.tensor": ("PackedTensor",),
            "packed.operations.transducer": ("pairs", "rnnt_loss"),
        },
    )

# Where modules are that lay in this folder until 0.3.
keep_old_names(
    __name__,
    {
        "rows": "dim size segments segment_reduce alignments time.windows",
        "table": "base types entries autograd layout pointwise refusals fallback dispatch heads_as_rows assign",
        "scores": "score_ops score_parts between by_rows relative",
        "views": "reordered reordered_shapes",
        "operations": "reduce sort norms losses features shape index writes pieces joins rnn transducer time.padding",
        "other_layouts": "interop einops tree",
        "static": "static_ops static_layers static_reduce static_rows",
        "loaders": "batches sampler",
    },
)
