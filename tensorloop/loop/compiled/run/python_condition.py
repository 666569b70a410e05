"""Conditions that are asked in Python: those that give a Python bool, or look at values to find what they give.

The steps are native all the same, one after another; in between the condition gets the carry, as often as an eager loop
asks it. What it does beside answering is its own, as long as the body sees nothing of it.
"""

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import Misuse
from tensorloop._torch.overrides import modes, seen
from tensorloop._torch.versions import Versions
from tensorloop.compiler.graph import complex_pairs
from tensorloop.compiler.refused import STATE, Refused
from tensorloop.loop import advice
from tensorloop.loop.compiled.look import autocast
from tensorloop.loop.compiled.look.frame import CURE_OF_ROWS, ROWS_STOP
from tensorloop.loop.compiled.look.look import Look
from tensorloop.loop.effects.follow import following
from tensorloop.loop.effects.judge import Judge
from tensorloop.loop.effects.notes import Ways
from tensorloop.loop.known_reads import code_of
from tensorloop.loop.loop import Loop
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import refill, written_state

_MOST_KNOWN = 512
_known: set[Any] = set()  # the code of conditions after a step that are asked in Python


def is_known(loop: Loop) -> bool:
    """Whether the condition was seen in a step to answer in Python."""
    condition = loop.until or loop.cond
    return condition is not None and code_of(condition) in _known


def learn(loop: Loop) -> None:
    """Notes that the condition was seen to answer in Python."""
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known.add(code_of(loop.until or loop.cond))


class PythonCondition:
    """A loop's condition, asked in Python between its steps; `going` is what it said last."""

    def __init__(self, loop: Loop) -> None:
        if modes() or autocast.state() is not None:
            raise Refused(
                "the condition is asked in Python, and autocast or another mode is on",
                "let the condition give a tensor, by operations on the carry alone",
            )
        self.loop, self.going = loop, True
        self.stepped = copy.copy(loop)  # the steps, which know of no condition
        self.stepped.cond = self.stepped.until = None
        self._paths = Ways()
        self.stepped.functions = tuple(f for f in loop.functions if f.what == "body_fn")

    def begin(self, look: Look) -> None:
        """Takes what the first step was seen to do, which must have changed nothing in Python."""
        if look.draws:
            raise Refused(
                "random numbers are drawn in a loop of unknown length",
                "draw them before the loop and index them by the step",
            )
        self._look, self._grad, self._like = look, torch.is_grad_enabled(), look.frame.given()

    def __call__(self, state: Sequence[Tensor]) -> bool:
        """Asks, after a step that gave this carry."""
        loop = self.loop
        if loop.cond is not None:
            loop.taken += 1
            if loop.taken == loop.length:
                self.going = False
                return False
        parts = complex_pairs.join_pairs(state, self._like)
        own, foreign = Versions(parts), Versions(self._look.captures)
        held = [sys.getrefcount(x) for x in parts]
        self.going = self._answer(parts)
        if foreign.changed() is not None:
            raise Misuse(
                f"the condition writes to a tensor that the body uses, at step {loop.taken} and not before; "
                f"give compile=False"
            )
        if own.changed() is not None:
            raise Refused("the condition writes to the carry", "write in the body")
        if self._grad and [sys.getrefcount(x) for x in parts] != held:
            raise Refused(
                "the condition keeps the carry elsewhere, where it has no gradient", "read it when the loop is over"
            )
        loop.taken += loop.until is not None
        return self.going

    def _asked(self, ask: Any, tree: Any) -> Any:
        """Asks a condition; refuses it where it changes something in Python, which a plan would not see."""
        given = tree, *self.loop.context_at(self.loop.taken)
        if self._paths.all_known():
            return ask(*given)
        asked = self.loop.asked
        assert asked is not None
        judge, answer = Judge(asked, self._paths), None
        try:
            with asked.asking(), following(judge):
                answer = ask(*given)
        finally:
            judge.end()
            self._paths.next()
        if judge.seen is not None:
            raise Refused(f"the condition {judge.seen.what}", STATE, judge.seen.place)
        return answer

    def _answer(self, parts: Sequence[Tensor]) -> bool:
        loop = self.loop
        carry = list(loop.init)
        for i, more in self._look.frame.loop.counters.items():
            carry[i] += more * (loop.taken + (loop.cond is None))
        for i, x in zip(self._look.frame.places, parts, strict=False):
            carry[i] = refill(carry[i], x) if isinstance(carry[i], TensorArray) else x
        tree = loop.carry.tree.unflatten(carry)
        arrays = [x for x in carry if isinstance(x, TensorArray)]
        before = [written_state(x) for x in arrays]
        what, ask = ("cond_fn", loop.cond) if loop.cond is not None else ("until", loop.until)
        assert ask is not None
        try:
            with seen():  # a default device, which is the one mode that is on
                answer = self._asked(ask, tree)
            if what == "until" and not loop.taken and loop.stops_rows(answer, carry):
                raise Refused(ROWS_STOP, CURE_OF_ROWS)
            answer = loop.truth(answer, what)
            if [written_state(x) for x in arrays] != before:
                raise Refused("the condition writes to a TensorArray in the carry", "write in the body")
        except Refused:
            raise
        except BaseException as error:
            advice.explain(loop, error)
            raise
        return answer if what == "cond_fn" else not answer
