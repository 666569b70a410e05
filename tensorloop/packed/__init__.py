"""Rows of unequal length without padding: `PackedTensor` and what torch functions do with it."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.packed.autograd import apply as apply
    from tensorloop.packed.batches import collate as collate
    from tensorloop.packed.batches import pack_padded as pack_padded
    from tensorloop.packed.dim import Dim as Dim
    from tensorloop.packed.fallback import FALLBACKS as FALLBACKS
    from tensorloop.packed.fallback import PackedFallbackWarning as PackedFallbackWarning
    from tensorloop.packed.sampler import BatchSampler as BatchSampler
    from tensorloop.packed.static import StaticPackedTensor as StaticPackedTensor
    from tensorloop.packed.tensor import PackedTensor as PackedTensor
    from tensorloop.packed.transducer import pairs as pairs
    from tensorloop.packed.transducer import rnnt_loss as rnnt_loss

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "packed.autograd": ("apply",),
            "packed.batches": ("collate", "pack_padded"),
            "packed.dim": ("Dim",),
            "packed.fallback": ("FALLBACKS", "PackedFallbackWarning"),
            "packed.sampler": ("BatchSampler",),
            "packed.static": ("StaticPackedTensor",),
            "packed.tensor": ("PackedTensor",),
            "packed.transducer": ("pairs", "rnnt_loss"),
        },
    )
