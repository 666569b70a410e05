"""Orderings under which block masks are sparse, and the masks in the new order."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.ordering.graph import Graph as Graph
    from tensorloop.ordering.methods import best as best
    from tensorloop.ordering.methods import docs_pack as docs_pack
    from tensorloop.ordering.methods import given as given
    from tensorloop.ordering.methods import hilbert as hilbert
    from tensorloop.ordering.methods import improve as improve
    from tensorloop.ordering.methods import metis as metis
    from tensorloop.ordering.methods import moore as moore
    from tensorloop.ordering.methods import morton as morton
    from tensorloop.ordering.methods import natural as natural
    from tensorloop.ordering.methods import patches as patches
    from tensorloop.ordering.methods import rcm as rcm
    from tensorloop.ordering.methods import slabs as slabs
    from tensorloop.ordering.methods import sort_axis as sort_axis
    from tensorloop.ordering.methods import spectral as spectral
    from tensorloop.ordering.ordering import Ordering as Ordering
    from tensorloop.ordering.permutation import Permutation as Permutation
    from tensorloop.ordering.problem import Orders as Orders
    from tensorloop.ordering.report import Report as Report

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "ordering.graph": ("Graph",),
            "ordering.methods": (
                *("best", "docs_pack", "given", "hilbert", "improve", "metis", "moore", "morton", "natural"),
                *("patches", "rcm", "slabs", "sort_axis", "spectral"),
            ),
            "ordering.ordering": ("Ordering",),
            "ordering.permutation": ("Permutation",),
            "ordering.problem": ("Orders",),
            "ordering.report": ("Report",),
        },
    )
