"""What a body uses besides its arguments: found while the first sweep runs, checked while steps are replayed.

Three sources, each for what the others cannot see:

- every torch function that the body calls passes through `Captures`, a `TorchFunctionMode`, which notes its tensor
  arguments and their versions, generators, and what is about to be changed in place;
- the autograd graph of the step says which of them carry a gradient: a leaf that is none of the step's arguments, or an
  edge to a node made before the step (`_sequence_nr` counts nodes in the order they are made, per thread);
- arrays report their own use (`Captures.inside`).

A tensor met as an argument and made by no function of the step is a capture if somebody still holds it when the step is
over. What a custom autograd function returned looks the same until then, so it is only held weakly.

Private names of torch, tried with 2.11 and 2.13: `torch.autograd._get_sequence_nr`, `Node._sequence_nr`,
`overrides.unseen`.
"""

import gc
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tensorloop._common.arguments import describe
from tensorloop._common.scope import here
from tensorloop._torch import overrides
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop.loop.checkpoint.array_versions import CapturedArray
from tensorloop.loop.checkpoint.held import held, references
from tensorloop.loop.checkpoint.in_place import Given
from tensorloop.loop.checkpoint.substitutes import leads_to
from tensorloop.loop.checkpoint.writes import UNSEEN, WRITING, may_write
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.friends import store_of

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NONE: dict[str, Any] = {}
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})
_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})


class Met(NamedTuple):
    """A tensor that the body closes over, and what its version was."""

    tensor: Callable[[], Tensor | None]
    version: int | None


@runs_eagerly
class Captures(TorchFunctionMode):
    """The captures of one checkpointed loop."""

    def __init__(self, name: str, serial: int) -> None:
        super().__init__()
        self.name, self.serial = name, serial
        self.outer = here.notes
        self.met: dict[int, Met] = {}
        self.recorded: dict[int, Tensor] = {}  # those that get a gradient, in the order they were met
        self.arrays: dict[int, CapturedArray] = {}  # by the id of the buffer
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self.changed: dict[int, tuple[Tensor, Tensor]] = {}  # by the body: tensor, its values before
        self.calls = array("q")  # torch functions called in each step that gave a tensor
        self.given = Given()
        self.nodes: list[weakref.ref[Any]] = []  # the nodes of checkpointed loops inside a step
        self.replaying = False
        self.step = 0
        self._seen: dict[int, Tensor] = {}  # arguments, results and captures of this step
        self._fresh: Sequence[tuple[weakref.ref[Tensor], int | None]] = ()
        self._candidates: list[tuple[Tensor, int | None]] = []
        self._written: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # candidates: values before
        self._unseen: set[int] = set()  # written to by functions that raise no version
        self._made: list[int] = []  # results of this step
        self._passing: Sequence[weakref.ref[Tensor]] = ()  # results of the step last done
        self.loops = False  # whether loops in the body were nodes of its graph
        self._given: Sequence[weakref.ref[Tensor]] = ()  # its arguments with gradient
        self.stayed: list[weakref.ref[Tensor]] = []  # such that lived on after their step
        self._left: dict[int, weakref.ref[Tensor]] = {}  # results of earlier ones that somebody still holds
        self._count = 0
        self._walk = False
        self._first = 0

    # -- while the body runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if here.quiet:
            return func(*args, **(kwargs or _NONE))
        seen = self._seen
        for x in args:
            if isinstance(x, Tensor):
                if id(x) not in seen:
                    self._meet(x)
            elif type(x) not in _PLAIN:
                self._look_into(x)
        if kwargs:
            for x in kwargs.values():
                if type(x) not in _PLAIN:
                    self._look_into(x)
        else:
            kwargs = _NONE
        writes = WRITING.get(func)
        if writes is None:
            writes = WRITING[func] = may_write(func)
        if writes or "out" in kwargs:
            with overrides.unseen():  # recorders around this one count what the body makes
                self._before_write(args, kwargs, writes is UNSEEN)
        elif func in _HOOKS and here.notes is self:
            self._before_hook(args[0])
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if not self.given.loosened(error, args, kwargs):
                raise
            out = func(*args, **kwargs)
        if not self._walk and not torch.is_grad_enabled():
            self._walk = True  # maybe in a custom function's forward: its node may have inputs that no function saw
        if isinstance(out, Tensor):
            self._count += 1
            if id(out) not in seen:
                seen[id(out)] = out
                self._made.append(id(out))
        elif type(out) not in _PLAIN and isinstance(out, (tuple, list)):
            for x in out:
                if isinstance(x, Tensor) and id(x) not in seen:
                    seen[id(x)] = x
                    self._made.append(id(x))
        return out

    def note(self, leaves: Iterable[Any]) -> None:
        """These are used where no torch function of the body shows it: by a loop in the body, or as its result."""
        if self.replaying:  # some of them may be stand-ins
            return
        for x in leaves:
            if isinstance(x, Tensor):
                if id(x) not in self._seen:
                    self._meet(x)
            elif isinstance(x, TensorArray) and isinstance(store := store_of(x), Buffer):
                with overrides.unseen():
                    self.meet_array(store)

    def own(self, results: Iterable[Any]) -> None:
        """What a loop in the body gave: no torch function shows that it was made in this step."""
        self.loops = True
        for x in results:
            if isinstance(x, Tensor):
                self._seen[id(x)] = x

    def _look_into(self, x: Any) -> None:
        if isinstance(x, Tensor):
            if id(x) not in self._seen:
                self._meet(x)
        elif isinstance(x, torch.Generator):
            self.generators.setdefault(id(x), (x, x.get_state()))
        elif isinstance(x, dict):
            self._look_into(list(x.values()))
        elif isinstance(x, (tuple, list, set)):
            for y in x:
                self._look_into(y)

    def _meet(self, x: Tensor) -> None:
        self._seen[id(x)] = x
        # Only a tensor that no torch function of this step gave can bring a capture into its graph.
        self._walk = self._walk or x.requires_grad
        if not self._is_met(x):
            self._check_left(x)
            self._candidates.append((x, None if x.is_inference() else x._version))

    def _check_left(self, x: Tensor) -> None:
        left = self._left.get(id(x))
        if left is not None and left() is x:
            raise RuntimeError(
                f"{self.name}: step {self.step} uses {describe(x)} that an earlier step made and kept somewhere else "
                f"than in the carry, so a replay would find another one; put it in the carry"
            )

    def _before_write(self, args: Sequence[Any], kwargs: dict[str, Any], unseen: bool) -> None:
        fresh = {id(x) for x, _ in self._candidates}
        for x in (*args, *kwargs.values()):
            if not isinstance(x, Tensor) or x.requires_grad:
                continue
            if x._base is not None and not self._is_met(x):
                x = x._base  # a write to a view is one to what it is a view of
            if unseen:
                self._unseen.add(id(x))
            if id(x) in self.changed:
                continue
            if self._is_met(x):
                self.changed[id(x)] = (x, x.detach().clone())
            elif id(x) in fresh:
                self._written.setdefault(id(x), (weakref.ref(x), x.detach().clone()))

    def written_to(self) -> list[tuple[Tensor, bool]]:
        """What the body has changed in place, or may have, and whether without a new version."""
        if not self.changed and not self._written:
            return []
        tensors = [x for x, _ in self.changed.values()]
        tensors += [x for reference, _ in self._written.values() if (x := reference()) is not None]
        return [(x, id(x) in self._unseen) for x in tensors]

    def _before_hook(self, x: Tensor) -> None:
        now = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        made = x.grad_fn is not None and self._first <= x.grad_fn._sequence_nr() < now
        if id(x) in self.recorded or (not made and any(y is x for y, _ in self._candidates)):
            raise RuntimeError(
                f"{self.name}: the body registers a hook on {describe(x)}, which it closes over, and would do so again "
                f"in each replay; register it before the loop"
            )

    def inside(
        self, buffer: Buffer, method: Callable[Concatenate[Buffer, _P], _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> _R:
        """Carries out a method of an array that the body uses; one made outside the loop is a capture."""
        with overrides.unseen():
            self.meet_array(buffer)
            return method(buffer, *args, **kwargs)

    def meet_array(self, buffer: Buffer) -> None:
        if self.outer is not None:
            self.outer.meet_array(buffer)
        if buffer.born < self.serial and id(buffer) not in self.arrays:
            if self.replaying:
                raise RuntimeError(
                    f"{self.name}: step {self.step} reads an array in its replay that it did not read before"
                )
            outer, here.notes = here.notes, None
            try:
                captured = self.arrays[id(buffer)] = CapturedArray(buffer, self.name)
            finally:
                here.notes = outer
            captured.enter()

    # -- around one step

    def begin_step(
        self, step: int, state: list[Any], recorded: Sequence[tuple[int, Tensor]], row: Iterable[Any]
    ) -> list[Any]:
        """Before the body of a step: the state as it gets it. Its arguments are that and `row`."""
        self.settle()
        self._count, self._candidates, self._made, self._walk = 0, [], [], False
        self._first = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        self.step = step
        seen = self._seen = dict(self.recorded)
        self.given.leaves = recorded
        if self.given.changed:
            state = self.given.of(state, recorded)
        for x in state:
            if isinstance(x, Tensor):
                seen[id(x)] = x
        for x in row:
            if isinstance(x, Tensor):
                seen[id(x)] = x
        return state

    def end_step(self, outputs: Sequence[Tensor], arguments: Sequence[Tensor], returned: Sequence[Any] = ()) -> None:
        """After the body of a step: what of its use stays to be known; in the sweep, which captures have a gradient."""
        if self.replaying:
            self._check_count()
        else:
            self.calls.append(self._count)
            if self.given.roots:
                arguments = [*arguments, *self.given.roots]
            self._look_for_left({id(x) for x in returned})
            if self._walk or not all(map(self._seen.__contains__, map(id, outputs))):
                self._find_recorded(outputs, {id(x) for x in arguments})
            outside = {id(x) for x, _ in self._candidates}
            self._passing = [
                weakref.ref(x)
                for x in returned
                if isinstance(x, Tensor) and x.requires_grad and id(x) not in outside and id(x) not in self.recorded
            ]
            self._given = [weakref.ref(x) for x in arguments if x.requires_grad]
        if self._candidates:
            self._fresh = [(weakref.ref(x), version) for x, version in self._candidates if id(x) not in self.recorded]
        self._seen, self._candidates = {}, []
        self.given.leaves = self.given.roots = ()

    def _look_for_left(self, returned: set[int]) -> None:
        """Notes the results of this step that live on, but not as what the body returned."""
        for key in held(self._made, self._seen, references()):
            if key not in returned:
                self._left[key] = weakref.ref(self._seen[key])

    def settle(self) -> None:
        """After everything of a step is gone: what is left of what it met was not its own."""
        if self.nodes:
            self.let_go()
        if self.replaying:
            self._check_fresh()
        else:
            for reference, version in self._fresh:
                if (x := reference()) is not None and not self._is_met(x):
                    self.met[id(x)] = Met(reference, version)
        if self._written:
            for key, (reference, before) in self._written.items():
                if (x := reference()) is not None:
                    self.changed[key] = (x, before)
            self._written = {}
        if self.given.loose:
            self.given.release()
        for reference in self._given:
            if (x := reference()) is not None:
                self._left[id(x)] = reference
                self.stayed.append(reference)
        for reference in self._passing:
            if (x := reference()) is not None:
                self._left[id(x)] = reference
        self._fresh = self._passing = self._given = ()

    def tensors(self) -> list[Tensor]:
        """What the body has used so far that it did not make."""
        references = [met.tensor for met in self.met.values()] + [reference for reference, _ in self._fresh]
        return [x for reference in references if (x := reference()) is not None]

    def let_go(self) -> None:
        """Empties the nodes of loops inside a step that is over.

        A node holds the body of its loop, and that may hold the node, by a name or an array that the loop's result went
        to. The collector does not see a cycle that leads through torch's own nodes.
        """
        for reference in self.nodes:
            if (node := reference()) is not None:
                node.record = None
        self.nodes.clear()

    def _is_met(self, x: Tensor) -> bool:
        met = self.met.get(id(x))  # of x, or of one that is gone and had that id
        return met is not None and met.tensor() is x

    def _check_fresh(self) -> None:
        """Raises where a replayed step used what the sweep did not, and somebody holds it still."""
        for generation in (0, 2):
            if self._unknown() is None:
                return
            # The step itself may have made it, and a cycle hold it: a loop inside, whose body uses a name that is bound
            # to the loop's result afterwards, and which no gradient has reached.
            gc.collect(generation)
        if (unknown := self._unknown()) is not None:
            raise RuntimeError(
                f"{self.name}: step {self.step} used {unknown} in its replay, which the forward pass did not use; "
                f"a body must close over the same tensors until backward has run"
            )

    def _unknown(self) -> str | None:
        """The first of what the step met that is still there and no capture: in words, which keep nothing alive."""
        for reference, _ in self._fresh:
            if (x := reference()) is not None and not self._is_met(x):
                return describe(x)
        return None

    def _check_count(self) -> None:
        before = self.calls[self.step]
        if self._count != before:
            raise RuntimeError(
                f"{self.name}: step {self.step} did not repeat itself: it made {before} tensors in the "
                f"forward pass and {self._count} in its replay; a body must depend on nothing that changes in between"
            )

    def check_versions(self) -> None:
        """Raises where a captured tensor was changed in place, by anybody but a buffer's own update."""
        for key, met in self.met.items():
            x = met.tensor()
            if x is not None and met.version is not None and x._version != met.version and key not in self.changed:
                raise RuntimeError(
                    f"{self.name}: {describe(x)}, which the body closes over, was changed in place "
                    f"{'before or during backward' if self.replaying else 'in the loop'}; "
                    f"put it in the carry, or change it after backward"
                )

    # -- the graph of a step

    def _find_recorded(self, outputs: Iterable[Tensor], arguments: set[int]) -> None:
        visited: set[Any] = set()
        stack: list[Any] = []
        edges: dict[bool, dict[Any, Tensor]] = {}
        first, last = self._first, torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        for out in outputs:
            if out.grad_fn is None:
                if id(out) not in arguments:
                    self._record(out)
                continue
            made = out.grad_fn._sequence_nr()
            elsewhere = made >= last and id(out) not in self._made
            if made < first or (elsewhere and not leads_to(out.grad_fn, arguments)):
                self._record(out)
            else:
                stack.append(out.grad_fn)
        while stack:
            node = stack.pop()
            if node in visited:
                continue
            visited.add(node)
            for below, number in node.next_functions:
                if below is None or below in visited:
                    continue
                variable = getattr(below, "variable", None)
                if variable is not None and type(below).__name__ == "AccumulateGrad":
                    visited.add(below)
                    if id(variable) not in arguments:
                        self._record(variable)
                    continue
                made = below._sequence_nr()
                captured = None if first <= made < last else self._at((below, number), made < first, edges)
                if captured is None or (made >= last and leads_to(below, arguments)):
                    stack.append(below)
                else:
                    self._record(captured)

    def _at(self, edge: tuple[Any, int], older: bool, edges: dict[bool, dict[Any, Tensor]]) -> Tensor | None:
        """The capture behind an edge to a node that this thread did not make in this step.

        A number that is still to come is another thread's: that of a capture, or of what a thread of the body made, or
        None where a backward pass of the body ran on a device, in a thread of its own. `edges` keeps what is known of
        the step.
        """
        if older not in edges:
            given = [*self.recorded.values(), *(x for x, _ in self._candidates)]
            given += self._seen.values() if older else ()
            edges[older] = {(node, x.output_nr): x for x in given if (node := _node(x)) is not None}
        if older and edge not in edges[older]:
            raise RuntimeError(
                f"{self.name}: step {self.step} depends on the result of {edge[0].name()}, a tensor that no "
                f"torch function of the body was given; pass it in the carry, or use it in an operation"
            )
        return edges[older].get(edge)

    def _record(self, x: Tensor) -> None:
        if id(x) not in self.recorded:
            self.recorded[id(x)] = x
            version = next((v for y, v in self._candidates if y is x), x._version)
            self.met[id(x)] = Met(lambda: x, version)

    # -- in backward

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """Replays: captured arrays as they were, captured tensors unchanged, their hooks silent."""
        self.settle()
        self.replaying = True
        self.check_versions()
        now = [(x, x.detach().clone()) for x, _ in self.changed.values()]
        try:
            for captured in self.arrays.values():
                captured.enter()
            with silent(self.recorded.values()):
                yield
            self.settle()
            self.check_versions()
        finally:
            self.replaying = False
            self._fresh, self._candidates, self._seen, self._written = [], [], {}, {}
            for captured in self.arrays.values():
                captured.leave()
            for x, values in now:
                x.data.copy_(values)

    def end_sweep(self) -> None:
        """The arrays that were met are the caller's again."""
        for captured in self.arrays.values():
            captured.leave()

    def buffers(self) -> dict[int, Tensor]:
        """The values now of what the body changes, for a snapshot."""
        return {key: x.detach().clone() for key, (x, _) in self.changed.items()}

    def set_buffers(self, values: dict[int, Tensor]) -> None:
        """Puts back the values of a snapshot; what was changed later only has those of before."""
        for key, (x, before) in self.changed.items():
            x.data.copy_(values.get(key, before))


@contextmanager
def silent(tensors: Iterable[Tensor]) -> Iterator[None]:
    """No hook of these tensors runs, and no `.grad` is kept: backward will call them once, with the sum."""
    hooked = [(x._backward_hooks, dict(x._backward_hooks)) for x in tensors if x._backward_hooks]
    kept = [(x, x.grad) for x in tensors if not x.is_leaf and x.retains_grad]
    try:
        for hooks, _ in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, saved in hooked:
            hooks.update(saved)
        for x, grad in kept:
            x.grad = grad


def _node(x: Tensor) -> Any:
    """What made x, where that is in a graph."""
    try:
        return x.grad_fn
    except RuntimeError:  # a view made without grad of what was changed in place, as a custom function may
        return None
