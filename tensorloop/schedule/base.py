"""`Schedule`, and those that need no table: Revolve's for a known length, periodic ones, all states, blocks."""

import abc
import sys
from collections.abc import Iterator, Sequence

from tensorloop._common.saved import saved
from tensorloop.schedule.actions import Action, Advance, Backward, Drop, Forward, Release, Restore, Snapshot, as_count
from tensorloop.schedule.spans import binomial_segments, in_segments, reverse_segments


class Schedule(abc.ABC):
    """The base class of schedules: a way to reverse a loop with few snapshots. Subclass it to write one of your own.

    Say in `sweep` which states the forward pass keeps. `reverse` may be replaced, too; the one here is the best there
    is for the snapshots that the sweep left. Give an instance to a loop: `checkpoints=Ends()`.

    Attributes:
        k: int, the most snapshots held at once; None (default): nothing bounds them. Set it in the class or in
            `__init__`.

    Example:
        >>> class Ends(tl.schedule.Schedule):
        ...     def sweep(self, length):
        ...         yield tl.schedule.Snapshot(0)
        ...         yield tl.schedule.Advance(0, length)
        >>> x = torch.ones(2, requires_grad=True)
        >>> tl.fori_loop(0, 9, lambda i, x: x.sin(), x, checkpoints=Ends()).sum().backward()
    """

    k: int | None = None

    @abc.abstractmethod
    def sweep(self, length: int | None) -> Iterator[Forward]:
        """Yields the actions of the forward pass.

        The first is Snapshot(0). With a known length the Advances cover 0..length exactly, and no snapshot is taken at
        `length`; a loop of length 0 has no actions. Without one they go on for ever: the loop stops asking when it
        ends, also in the middle of an Advance.

        Args:
            length: int, the number of steps; None where it is not known.

        Returns:
            An iterator of `tl.schedule.Forward` actions.

        Example:
            >>> list(tl.schedule.Periodic(2).sweep(4))
            [Snapshot(step=0), Advance(start=0, stop=2), Snapshot(step=2), Advance(start=2, stop=4)]
        """

    def reverse(self, length: int, held: Sequence[int]) -> Iterator[Action]:
        """Yields the actions of the backward pass, which reverse steps length-1 .. 0.

        As few extra steps as `held` and k allow (Revolve's optimum in each segment between two snapshots), and no more
        Snapshots than those need. Where k is None, each state of a segment is kept. Every snapshot is dropped by the
        end. One at `length` is dropped first: there is no such step.

        Args:
            length: int, the number of steps that were taken.
            held: sequence of int, the steps of the snapshots that the sweep left, in any order.

        Returns:
            An iterator of `tl.schedule.Action`.

        Cost: amortised O(1) of time an action; bytes for k numbers, or for the longest segment where k is None.

        Raises:
            TypeError: length is no int.
            ValueError: `held` lacks step 0, reaches beyond `length`, or is more than k.

        Example:
            >>> list(tl.schedule.StoreAll().reverse(1, [0]))
            [Restore(step=0), Drop(step=0), Backward(step=0)]
        """
        return reverse_segments(length, self._checked(length, held), self.k)

    def _checked(self, length: int, held: Sequence[int]) -> list[int]:
        """The steps of the snapshots that `reverse` was given, in order."""
        name = f"{type(self).__name__}.reverse"
        length = as_count(length, 0, name, "length")
        snapshots = sorted(set(held))
        if length and snapshots[:1] != [0]:
            raise ValueError(f"{name}: held must contain step 0, where the loop starts again; got {snapshots}")
        if snapshots and not 0 <= snapshots[0] <= snapshots[-1] <= length:
            raise ValueError(f"{name}: held must be steps from 0 to the length {length}; got {snapshots}")
        if self.k is not None and len(snapshots) > self.k:
            raise ValueError(f"{name}: {len(snapshots)} snapshots are held, but k is {self.k}; sweep() keeps too many")
        return snapshots

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


@saved("k")
class Binomial(Schedule):
    """The fewest extra steps that k snapshots allow, for loops of known length (Revolve).

    Args:
        k: int, the most snapshots held at once, that of step 0 included.

    Extra steps: T for T <= k; 2T - k for T < (k+1)(k+2)/2; about r T with C(k + r, k) = T beyond.
    Cost: O(k) of time for the sweep.

    Raises:
        TypeError: k is no int.
        ValueError: k < 1.

    Source: Griewank and Walther 2000, Algorithm 799: Revolve.

    Example:
        >>> [a.step for a in tl.schedule.Binomial(3).sweep(10) if isinstance(a, tl.schedule.Snapshot)]
        [0, 4, 7]
    """

    def __init__(self, k: int) -> None:
        self.k = as_count(k, 1, "Binomial", "k")

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """Yields the actions of the forward pass.

        Args:
            length: int, the number of steps; it must be known, as the placement depends on it.

        Returns:
            An iterator of `tl.schedule.Forward` actions.

        Raises: TypeError, ValueError (length is None or below 0).
        """
        assert self.k is not None
        if length is None:
            raise ValueError(
                f"Binomial.sweep: length is None, but this placement depends on it; use Online({self.k}), "
                "which chooses as the loop goes"
            )
        return in_segments(binomial_segments(as_count(length, 0, "Binomial.sweep", "length"), self.k))


@saved("every")
class Periodic(Schedule):
    """Takes a snapshot every `every` steps; backward keeps all states of one such segment at a time.

    Args:
        every: int, the number of steps between two snapshots.

    Extra steps: 2T - ceil(T / every), as no step is advanced over more than twice.
    Snapshots: at most ceil(T / every) + every - 1, fewest with `every` near the root of T.

    Raises:
        TypeError: every is no int.
        ValueError: every < 1.

    Example:
        >>> [a.step for a in tl.schedule.Periodic(4).sweep(10) if isinstance(a, tl.schedule.Snapshot)]
        [0, 4, 8]
    """

    def __init__(self, every: int) -> None:
        self.every = as_count(every, 1, "Periodic", "every")

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """Yields the actions of the forward pass.

        Args:
            length: int, the number of steps; None where it is not known.

        Returns:
            An iterator of `tl.schedule.Forward` actions.

        Raises: TypeError, ValueError (length is below 0).
        """
        return _every(self.every, sys.maxsize if length is None else as_count(length, 0, "Periodic.sweep", "length"))


@saved()
class StoreAll(Schedule):
    """Takes a snapshot of every state: T snapshots, T extra steps; backward runs each step once.

    Example:
        >>> tl.schedule.advances(tl.schedule.StoreAll(), 100)
        100
    """

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """Yields the actions of the forward pass.

        Args:
            length: int, the number of steps; None where it is not known.

        Returns:
            An iterator of `tl.schedule.Forward` actions.

        Raises: TypeError, ValueError (length is below 0).
        """
        return _every(1, sys.maxsize if length is None else as_count(length, 0, "StoreAll.sweep", "length"))


@saved("of", "steps")
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
        """Returns what an action on blocks does to steps."""

        def at(block: int) -> int:
            return block * self.steps if length is None else min(block * self.steps, length)

        match action:
            case Advance(start, stop, keep):
                return Advance(at(start), at(stop), keep)
            case Release(start, stop):
                return Release(at(start), at(stop))
            case Snapshot(block, place):
                return Snapshot(at(block), place)
            case Restore(block) | Drop(block):
                return type(action)(at(block))
            case Backward(block, blocks):
                return Backward(at(block), at(block + blocks) - at(block))


def _every(every: int, end: int) -> Iterator[Forward]:
    for start in range(0, end, every):
        yield Snapshot(start)
        yield Advance(start, min(start + every, end))
