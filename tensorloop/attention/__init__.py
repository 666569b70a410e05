"""Attention over packed tensors, padded ones and loop buffers, trained on any device in bytes of O(N)."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.attention.api import ScoreMod as ScoreMod
    from tensorloop.attention.api import attend_trees as attend_trees
    from tensorloop.attention.api import attention as attention
    from tensorloop.attention.past import attend_past as attend_past
    from tensorloop.attention.trees import TokenTree as TokenTree
    from tensorloop.kernels.scores import whole as whole
    from tensorloop.kernels.sight import Sight as Sight

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "attention.api": ("ScoreMod", "TokenTree", "attend_trees", "attention"),
            "attention.past": ("Sight", "attend_past", "whole"),
        },
    )
