"""What loops do over several processes: folds over ranks, losses over all of them; the engine is torch.distributed."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.distributed.fold import all_gather as all_gather
    from tensorloop.distributed.fold import exclusive_fold as exclusive_fold
    from tensorloop.distributed.means import count_over_all as count_over_all
    from tensorloop.distributed.means import mean_over_all as mean_over_all

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "distributed.fold": ("all_gather", "exclusive_fold"),
            "distributed.means": ("count_over_all", "mean_over_all"),
        },
    )
