"""What the arguments of a step depend on in a loop whose graph goes back through all steps.

Compiled and checkpointed loops run each step on tensors that depend on nothing. That shows where the body takes a
gradient by `torch.autograd.grad`: in the plain loop it also goes from one argument, by earlier steps, to what it is
taken for. So each step is followed: of which tensors from outside, and of which of its other arguments, each argument
is made.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import count

from tensorloop._torch import graph
from tensorloop._torch.graph import End

Name = End | int
_names = count()  # of tensors that steps made


class Dependence:
    """Knows it before one step: at first from tensors before the loop, those of the carry and of xs, by `end_of`.

    If it is not `known`, what is in the carry may be each of these and of `others`, and arguments depend on everything.
    Places are those of the arguments of a step: the carry's, then those of xs.
    """

    def __init__(self, carry: Sequence[End], xs: Sequence[End], *, known: bool, others: Iterable[End] = ()) -> None:
        self._known = known
        self._on: list[set[Name]] = [{*graph.reached(x)} for x in (*carry, *xs)]
        self._are: list[set[Name]] = [{x} if known else {*carry, *others} for x in carry]  # by what name

    def misses(self, places: Mapping[End, int], outputs: Iterable[End], target: End) -> bool:
        """Whether a gradient for what the step did not make has other ways to it than those in the step."""
        n, place, found = len(self._are), places.get(target, -1), graph.reached(*outputs)
        if place >= n:
            return False  # a slice of xs is new in each step
        names = {target} if place < 0 else self._are[place]
        others = {places[x] for x in found if x in places} - {place}
        ways = [self._on[i] for i in others] + ([found] if place >= 0 else [])  # the latter by what the loop was given
        return bool(others and not self._known) or not all(map(names.isdisjoint, ways))

    def step(self, places: Mapping[End, int], carry: Sequence[End], first: int, made: Collection[int] = ()) -> None:
        """Goes on by a step that gave this carry; its nodes are those from `first` on, its leaves are `made`."""
        if not self._known:
            return
        n, found = len(self._are), [graph.reached(x) for x in carry]
        handed = [places.get(x, n if graph.is_from(x, first, made) else -1) for x in carry]
        self._are = [
            self._are[i] if 0 <= i < n else {x if i < 0 else next(_names)} for i, x in zip(handed, carry, strict=True)
        ]
        names, on = set[Name]().union(*self._are), list[set[Name]]()
        for seen in found:
            inside = [are for x, are in zip(carry, self._are, strict=True) if x in seen]
            below = set[Name]().union(*inside, *(self._on[places[x]] for x in seen if x in places))
            on.append({x for x in seen if not graph.is_from(x, first, made)})
            on[-1] |= {x for x in below if not isinstance(x, int) or x in names}
        self._on[:n] = on

    def state(self) -> Hashable:
        """Returns what is known so far as a key that does not depend on the names of what steps made."""
        made = dict.fromkeys(x for are in self._are for x in are if isinstance(x, int))
        numbers: dict[Name, int] = {x: i for i, x in enumerate(made)}
        return tuple(frozenset(numbers.get(x, x) for x in some) for some in (*self._are, *self._on))
