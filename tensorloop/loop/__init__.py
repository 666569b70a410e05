"""Loops with the gradients of a Python loop: `scan`, `while_loop`, `fori_loop`, `map`, and the parallel ones."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.loop.api import explain as explain
    from tensorloop.loop.api import scan as scan
    from tensorloop.loop.api import while_loop as while_loop
    from tensorloop.loop.associative import associative_scan as associative_scan
    from tensorloop.loop.checkpoint.adjoint import NotConvergedWarning as NotConvergedWarning
    from tensorloop.loop.checkpoint.leaving import HeldTensorWarning as HeldTensorWarning
    from tensorloop.loop.checkpoint.options import Checkpoints as Checkpoints
    from tensorloop.loop.compiled.auto import set_default_compile as set_default_compile
    from tensorloop.loop.compiled.explain import Explanation as Explanation
    from tensorloop.loop.compiled.front import Compile as Compile
    from tensorloop.loop.compiled.front import NotCompiledWarning as NotCompiledWarning
    from tensorloop.loop.counted import fori_loop as fori_loop
    from tensorloop.loop.counted import map as map
    from tensorloop.loop.effects.follow import pure as pure
    from tensorloop.loop.first_step import first_only as first_only
    from tensorloop.loop.implicit import fixed_point as fixed_point
    from tensorloop.loop.linear import linear_recurrence as linear_recurrence
    from tensorloop.loop.module_state import Carrying as Carrying
    from tensorloop.loop.module_state import carrying as carrying
    from tensorloop.loop.options import Condition as Condition
    from tensorloop.loop.options import Plan as Plan
    from tensorloop.loop.rnn import RNN as RNN

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "loop.api": ("explain", "scan", "while_loop"),
            "loop.counted": ("fori_loop", "map"),
            "loop.checkpoint.adjoint": ("NotConvergedWarning",),
            "loop.implicit": ("fixed_point",),
            "loop.checkpoint.leaving": ("HeldTensorWarning",),
            "loop.checkpoint.options": ("Checkpoints",),
            "loop.compiled.front": ("Compile", "NotCompiledWarning"),
            "loop.compiled.auto": ("set_default_compile",),
            "loop.compiled.explain": ("Explanation",),
            "loop.associative": ("associative_scan",),
            "loop.linear": ("linear_recurrence",),
            "loop.effects.follow": ("pure",),
            "loop.first_step": ("first_only",),
            "loop.module_state": ("Carrying", "carrying"),
            "loop.options": ("Condition", "Plan"),
            "loop.rnn": ("RNN",),
        },
    )
