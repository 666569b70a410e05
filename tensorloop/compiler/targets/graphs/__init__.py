"""Steps as CUDA graphs: torch's own operations, recorded once and replayed by one launch for many steps."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.compiler.targets.graphs.drawn import DrawGraphs as DrawGraphs
    from tensorloop.compiler.targets.graphs.made import describe as describe
    from tensorloop.compiler.targets.graphs.made import emit as emit
    from tensorloop.compiler.targets.graphs.made import launched as launched

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "compiler.targets.graphs.drawn": ("DrawGraphs",),
            "compiler.targets.graphs.made": ("describe", "emit", "launched"),
        },
    )
