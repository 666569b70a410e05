"""`Blocks`: another schedule, of which a step is a block of several, run with residuals and reversed at once."""

from collections.abc import Iterator, Sequence

from tensorloop.schedule.actions import Action, Advance, Backward, Drop, Forward, Restore, Snapshot, as_count
from tensorloop.schedule.base import Schedule


class Blocks(Schedule):
    """Another schedule in blocks of steps: snapshots lie between blocks, and backward reverses a block at once.

    What a block saves for its gradient is held together, so that fewer steps are run again: with a snapshot for each
    block, those of the forward pass and no others.

    Args:
        of: `Schedule`, whose steps the blocks are.
        steps: int, how many steps a block has; the last one may have fewer.

    Raises:
        TypeError: `of` is no Schedule, steps no int.
        ValueError: steps < 1.

    Example:
        >>> plan = tl.schedule.Blocks(tl.schedule.Binomial(2), 4)
        >>> list(plan.reverse(6, [0, 4]))[:3]
        [Restore(step=4), Drop(step=4), Backward(step=4, steps=2)]
        >>> tl.schedule.advances(plan, 8), tl.schedule.advances(tl.schedule.Binomial(2), 8)
        (8, 17)
    """

    def __init__(self, of: Schedule, steps: int) -> None:
        if not isinstance(of, Schedule):
            raise TypeError(f"Blocks: of must be a Schedule, got {type(of).__name__} {of!r}")
        self.of, self.steps, self.k = of, as_count(steps, 1, "Blocks", "steps"), of.k

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """Yields the actions of the forward pass.

        Args:
            length: int, the number of steps; None where it is not known.

        Returns:
            An iterator of `tl.schedule.Forward` actions.

        Raises: what the other schedule raises.
        """
        length = None if length is None else as_count(length, 0, "Blocks.sweep", "length")
        for action in self.of.sweep(self._blocks(length)):
            yield self._in_steps(action, length)  # pyright: ignore[reportReturnType]

    def reverse(self, length: int, held: Sequence[int]) -> Iterator[Action]:
        """Yields the actions of the backward pass.

        Args:
            length: int, the number of steps that were taken.
            held: sequence of int, the steps of the snapshots that the sweep left.

        Returns:
            An iterator of `tl.schedule.Action`.

        Raises: what the other schedule raises; ValueError: a snapshot that is not between blocks.
        """
        if any(step % self.steps for step in held):
            raise ValueError(f"Blocks.reverse: held must be the starts of blocks of {self.steps} steps; got {[*held]}")
        blocks = self._blocks(as_count(length, 0, "Blocks.reverse", "length"))
        for action in self.of.reverse(blocks, [step // self.steps for step in held]):  # pyright: ignore[reportArgumentType]
            yield self._in_steps(action, length)

    def _blocks(self, length: int | None) -> int | None:
        return None if length is None else -(-length // self.steps)

    def _in_steps(self, action: Action, length: int | None) -> Action:
        """What an action on blocks does to steps."""

        def at(block: int) -> int:
            return block * self.steps if length is None else min(block * self.steps, length)

        match action:
            case Advance(start, stop):
                return Advance(at(start), at(stop))
            case Snapshot(block, place):
                return Snapshot(at(block), place)
            case Restore(block) | Drop(block):
                return type(action)(at(block))
            case Backward(block, blocks):
                return Backward(at(block), at(block + blocks) - at(block))
