"""Tensors of single steps that somebody still holds when a checkpointed loop is over, and the warning about them."""

import gc
import time
from collections.abc import Hashable

from torch import Tensor

from tensorloop._common import user_line
from tensorloop._common.arguments import describe
from tensorloop._common.user_line import UserLine, user_place
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.checkpoint.step_use import StepUse


class HeldTensorWarning(UserWarning):
    """Warns that a tensor left the body of a checkpointed loop other than as its result: gradients reach one step only.

    Return the tensor as a y, or keep its `detach()`.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", tl.loop.HeldTensorWarning)  # a tensor that leaves otherwise is an error
        ...     tl.scan(lambda c, x: (c + x, c), torch.zeros(()), torch.ones(3), checkpoints=1)[0]
        tensor(3.)
    """


# Bodies, and where their loops stand -> whether what lived on was held, and no cycle that waits for the collector.
_FOUND: dict[tuple[Hashable, UserLine | None], bool] = {}
_MOMENT_S = 0.05


class Leaving:
    """Finds tensors that a sweep's steps were given, or computed from these, and that somebody still holds after it.

    A tensor that a body makes of closed-over ones alone, as `spectral_norm` keeps its weight, has its whole graph.
    """

    def __init__(self, captures: Captures) -> None:
        self.captures = captures
        # Recorders of loops around this one see all that its steps do. What their steps had met before:
        self.around: list[tuple[StepUse, tuple[int, int]]] = []
        outer = captures.outer
        while isinstance(outer, Captures):
            self.around.append((outer.use, outer.use.mark()))
            outer = outer.outer

    def tensors(self) -> list[Tensor]:
        """Those that are alive when all of the sweep is gone. A graph that is alive keeps the leaves it begins at."""
        # A loop that was one node and whose result its own body refers to is a cycle that the collector does not see.
        if not self.captures.stayed or self.captures.loops:
            return []
        self._release()
        return [x for reference in self.captures.stayed if (x := reference()) is not None]

    def _release(self) -> None:
        """Has the recorders around forget what the steps used and nobody else holds."""
        released = [use.release(mark) for use, mark in self.around]
        for (use, mark), part in zip(self.around, released, strict=True):
            use.take_back(mark, part)


def warn(name: str, body: Hashable, leaving: Leaving) -> None:
    """Warns where tensors left.

    What takes its time, the collector and a moment for threads that are about to let go of something (those of a
    process group, say), comes once for each body and place.
    """
    if not (tensors := leaving.tensors()):
        return
    place = body, user_place()
    if place not in _FOUND:
        del tensors
        gc.collect()
        if leaving.tensors():
            time.sleep(_MOMENT_S)
        tensors = leaving.tensors()
        _FOUND[place] = bool(tensors)
    if not _FOUND[place]:
        return
    text = (
        f"{name}: a value that the body computed from its argument, {describe(tensors[0])}, is still referenced after "
        f"the loop. With checkpoints, gradients through it reach only its own step. Return it as a y or in the carry, "
        f"or keep .detach()"
    )
    user_line.warn(text, HeldTensorWarning)
