"""A user's functions, called from inside a checkpointed loop: what they do is theirs, not the loop's own."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.errors import Misuse
from tensorloop._common.scope import here
from tensorloop._torch import engine
from tensorloop._torch.overrides import unseen
from tensorloop._torch.shards import without_fsdp
from tensorloop._torch.versions import read_version
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.checkpoint.constants import Constants
from tensorloop.loop.effects.follow import following
from tensorloop.loop.effects.judge import Judge
from tensorloop.loop.effects.notes import OfBackward, StepNotes, Ways
from tensorloop.loop.effects.reads import Reads
from tensorloop.loop.known_reads import known_reads, root_of, roots_of
from tensorloop.loop.loop import Body, Loop


class Watched:
    """The body of a loop, under the eyes of its captures while these are watching."""

    def __init__(self, loop: Loop, captures: Captures) -> None:
        self.body, self.captures = loop.body, captures
        self.on = True  # whether calls are recorded
        self.fills = False  # whether the last step has set what it found missing: there a replay may go another way
        self.foreign: tuple[Tensor, int] | None = None  # a leaf of the carry that a step gave and had not made
        self.notes, self.paths = loop.notes or StepNotes(), Ways()
        # Of the user's functions that differentiate steps: custom Functions, hooks. Only where steps have written.
        self._backward: OfBackward | None = None
        self._backward_paths = Ways()
        self.loop, self.root = loop, root_of(loop)
        # Whether all steps go one way, of which nothing is left to see: as those of an earlier loop that was followed.
        self._earlier = known_reads.find(self.root, loop)
        self.is_known = self._earlier is not None
        self.alike = loop.steps_alike and loop.name != "fori_loop"
        self.alike &= not loop.compact
        if loop.slices is not None:
            self.alike &= loop.slices.steps_alike and not loop.slices.ranges
        self.alike &= all(isinstance(x, (Tensor, type(None))) for x in loop.init)
        self.reads = Reads(roots_of(loop)) if self._earlier is None else self._earlier.reads

    def __call__(self, *args: Any) -> Any:
        # No context manager sets and resets these: at every step it would cost as much as all the rest here.
        in_library, here.in_library = here.in_library, False
        outer, nodes, here.nodes = here.recorder, here.nodes, self.captures.nodes
        try:
            if not self.on:
                return self.body(*args)
            here.recorder = self.captures
            with without_fsdp(self._refuse_gathered), self.captures:
                if self.is_known or self.paths.all_known() or not torch.is_grad_enabled():
                    return self.body(*args)
                return self._followed(args)
        finally:
            here.recorder, here.nodes, here.in_library = outer, nodes, in_library

    def _refuse_gathered(self, module: str) -> Exception:
        return RuntimeError(
            f"{self.captures.name}: the body calls {module}, a module of FSDP, which gathers its parameters at each "
            "call; in a step that runs again in backward they would be reduced too early. Give fully_shard() the "
            "module that runs the whole loop, or leave checkpoints out and call the layers by torch.utils.checkpoint"
        )

    def forget(self) -> Constants:
        """The sweep is over: what its steps have written is no matter any more. What they read must stay."""
        seen = self._earlier is None and (self.is_known or self.paths.all_known())
        if seen and not (self.notes.wrote() or self.captures.generators or self.foreign):
            known_reads.add(self.root, self.loop, self.reads, None)
        self.reads.end()
        self._backward = OfBackward(self.notes) if self.notes.wrote() else None
        self.notes = StepNotes()
        return Constants(self.reads, roots_of(self.loop))

    def _followed(self, args: tuple[Any, ...]) -> Any:
        """Runs the body, and refuses what its Python does that a replay would do again, or find changed."""
        judge, out = Judge(self.notes, self.paths, args, self.reads), None
        self.captures.judge, judge.generators = judge, self.captures.generators
        try:
            with following(judge):
                out = self.body(*args)
        finally:
            self.captures.judge = None
            if out is not None and self.foreign is None:
                self.foreign = _foreign(judge, out[0], args)
            scripted = judge.changed_by_script()
            judge.end()
            self.paths.next(self.notes.news)
            self.fills = self.notes.fills
            told = self.captures.told or self.captures.generators or self.notes.wrote()
            self.is_known = self.alike and self.paths.settled and not told
            self.notes.next()
        _refuse(judge, self.notes)
        if scripted is not None:
            raise Misuse(
                f"the body calls TorchScript, which changes {scripted}, and would change it again in backward, which "
                f"runs steps again; use the module or function that was scripted, or call eval() before the loop"
            )
        return out

    def gradients(self, *args: Any) -> Any:
        """`engine.gradients` of steps: what it calls of the user's must not use what steps have written."""
        notes, paths = self._backward, self._backward_paths
        if notes is None or paths.all_known():
            return engine.gradients(*args)
        judge, found = Judge(notes, paths), ()
        try:
            with following(judge):
                found = engine.gradients(*args)
        finally:
            judge.end()
            paths.next()
        _refuse(judge, notes)
        return found


def noted(body: Body, notes: StepNotes) -> Body:
    """The body of a first step that runs by itself: refused as those of the loop are, and noted for them."""

    def step(*args: Any) -> Any:
        judge, out = Judge(notes, given=args), None
        try:
            with following(judge):
                out = body(*args)
        finally:
            judge.end()
            notes.next()
        _refuse(judge, notes)
        return out

    return step


def _refuse(judge: Judge, notes: StepNotes) -> None:
    """Refuses what a judge has seen, and puts back what the steps have written."""
    if (effect := judge.seen) is not None:
        file, line = effect.place
        notes.undo()
        raise Misuse(
            f"the body {effect.what} ({file}:{line}), and backward runs steps again, with what the last step has "
            f"left; put it in the carry, or let tl.carrying do so, or give no checkpoints (tl.loop.pure(fn) says "
            f"that what fn does has no effect on the loop)"
        ) from None


def _foreign(judge: Judge, carry: Any, args: tuple[Any, ...]) -> tuple[Tensor, int] | None:
    """A tensor without gradient in the carry that the step was not given and did not make, and its version."""
    given = set(map(id, pytree.leaves(args)))
    with unseen():
        for x in pytree.leaves(carry):
            if isinstance(x, Tensor) and not x.requires_grad and id(x) not in given:
                x = x._base if x._base is not None else x
                if id(x) not in given and not judge.is_new(x):
                    return x, read_version(x)
    return None


def as_users(condition: Any) -> Any:
    """A condition, as a function of the user's: recorders of loops around this one see what it uses."""

    def ask(*args: Any) -> Any:
        in_library, here.in_library = here.in_library, False
        try:
            return condition(*args)
        finally:
            here.in_library = in_library

    return None if condition is None else ask
