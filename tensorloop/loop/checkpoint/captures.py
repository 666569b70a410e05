"""What a body uses besides its arguments: found while the first sweep runs, checked while steps are replayed.

Three sources, each for what the others cannot see:

- every torch function that the body calls passes through `Captures`, a `TorchFunctionMode`, which notes its tensor
  arguments and their versions (`step_use`), generators, and what is about to be changed in place (`writes`);
- the autograd graph of the step says which of them carry a gradient (`capture_graph`);
- arrays report their own use (`Captures.record_use`).

A tensor met as an argument and made by no function of the step is a capture if somebody still holds it when the step is
over. What a custom autograd function returned looks the same until then, so it is only held weakly.

Errors raised while the body runs name the loop: functions of other loops may be between it and the user.
"""

import gc
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from tensorloop._common.arguments import check_memory, describe
from tensorloop._common.errors import Misuse
from tensorloop._common.scope import here
from tensorloop._torch import graph, overrides
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.engine import silent
from tensorloop._torch.versions import version_of
from tensorloop.loop.checkpoint.ambient_state import GpuStates, RngState
from tensorloop.loop.checkpoint.array_versions import CapturedArray
from tensorloop.loop.checkpoint.asked_of_autograd import AskedOfAutograd
from tensorloop.loop.checkpoint.capture_graph import StepGraph, find_captures
from tensorloop.loop.checkpoint.in_place import Given
from tensorloop.loop.checkpoint.step_use import StepUse, find_held, own_references
from tensorloop.loop.checkpoint.writes import AUTOGRAD, ESCAPES, UNSEEN, WRITING, Writes, may_write
from tensorloop.loop.effects.follow import rest, rests, resume
from tensorloop.loop.effects.judge import Judge
from tensorloop.loop.effects.known import tells_numbers
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.internals import store_of

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NONE: dict[str, Any] = {}
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})
_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad})


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
        self.outer = here.recorder
        self.met: dict[int, Met] = {}
        self.recorded: dict[int, Tensor] = {}  # those that get a gradient, in the order they were met
        self.arrays: dict[int, CapturedArray] = {}  # by the id of the buffer
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self.gpus: set[int] = set()  # whose tensors steps have used
        self.gpu_states = GpuStates()
        self.writes = Writes()
        self.calls = array("q")  # torch functions called in each step that gave a tensor
        self.given = Given()
        self.autograd = AskedOfAutograd()
        self.nodes: list[weakref.ref[Any]] = []  # the nodes of checkpointed loops inside a step
        self.escapes = False  # whether steps have taken hold of memory, so that they may write to it unseen
        self.replaying = False
        self.hooks = False  # whether steps registered hooks
        self.judge: Judge | None = None  # who follows the body's Python, and rests while torch runs
        self.modes = 0  # that see each operation of a step: where there are fewer, one of them carries it out
        self.told = False  # whether the body's Python was told of numbers in tensors
        self.step = 0
        self.use = StepUse({})  # of this step; from its end on, of the next
        self.loops = False  # whether loops in the body were nodes of its graph
        self.stayed: list[weakref.ref[Tensor]] = []  # arguments with gradient that lived on after their step
        # Of the step last done: what may be a capture; results and arguments with gradient.
        self._fresh: Sequence[tuple[weakref.ref[Tensor], int | None]] = ()
        self._passing: Sequence[weakref.ref[Tensor]] = ()
        self._given: Sequence[weakref.ref[Tensor]] = ()
        self._left: dict[int, weakref.ref[Tensor]] = {}  # results of earlier ones that somebody still holds

    # -- while the body runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (judge := self.judge) is not None and not judge.resting and rests(func):
            self.judge = None
            rest()
            try:
                out = self.__torch_function__(func, types, args, kwargs)
                self.told = self.told or tells_numbers(func, args, kwargs or _NONE, out)
                return out
            finally:
                self.judge = judge
                resume()
        if here.in_library or (type(func) is OpOverload and overrides.modes_below() < self.modes):
            return func(*args, **(kwargs or _NONE))
        use = self.use
        seen = use.seen
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
        if writes is UNSEEN and kwargs.get("training") is False:  # the statistics are read alone
            writes = False
        if writes is AUTOGRAD:
            if not self.replaying:
                with overrides.unseen():
                    self.autograd.check(self, func, args, kwargs)
        elif writes is ESCAPES:
            self.escapes = True
        elif writes or "out" in kwargs:
            with overrides.unseen():  # recorders around this one count what the body makes
                candidates = {id(x) for x, _ in use.candidates}
                self.writes.before((*args, *kwargs.values()), writes is UNSEEN, self._is_met, candidates)
        elif func in _HOOKS:
            self.hooks = True
            if here.recorder is self and func is not Tensor.retain_grad:
                self._before_hook(args[0])
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if not self.given.loosened(error, args, kwargs):
                raise
            out = func(*args, **kwargs)
        if not use.leads_out and not torch.is_grad_enabled():
            use.leads_out = True  # maybe in a custom function's forward: its node may have inputs that no function saw
        if isinstance(out, Tensor):
            use.count += 1
            if id(out) not in seen:
                seen[id(out)] = out
                use.made.append(id(out))
        elif type(out) not in _PLAIN and isinstance(out, (tuple, list)):
            for x in out:
                if isinstance(x, Tensor) and id(x) not in seen:
                    seen[id(x)] = x
                    use.made.append(id(x))
        return out

    def note(self, leaves: Iterable[Any]) -> None:
        """These are used where no torch function of the body shows it: by a loop in the body, or as its result."""
        if self.replaying:  # some of them may be stand-ins
            return
        for x in leaves:
            if isinstance(x, Tensor):
                self._look_into(x)
            elif isinstance(x, TensorArray) and isinstance(store := store_of(x), Buffer):
                with overrides.unseen():
                    self.meet_array(store)

    def own(self, results: Iterable[Any], loops: bool = True) -> None:
        """Notes results of a loop in the body, or of arrays, as made in this step, which no torch function shows."""
        self.loops = self.loops or loops
        for x in results:
            if isinstance(x, Tensor):
                self.use.seen[id(x)] = x

    def _look_into(self, x: Any) -> None:
        if isinstance(x, Tensor):
            if id(x) not in self.use.seen:
                self._meet(x)
        elif isinstance(x, torch.Generator):
            self.generators.setdefault(id(x), (x, x.get_state()))
        elif isinstance(x, dict):
            self._look_into(list(x.values()))
        elif isinstance(x, (tuple, list, set)):
            for y in x:
                self._look_into(y)

    def _meet(self, x: Tensor) -> None:
        self.use.seen[id(x)] = x
        # Only a tensor that no torch function of this step gave can bring a capture into its graph.
        self.use.leads_out = self.use.leads_out or x.requires_grad
        if not self._is_met(x):
            self._check_left(x)
            self.use.candidates.append((x, version_of(x)))

    def _check_left(self, x: Tensor) -> None:
        left = self._left.get(id(x))
        if left is not None and left() is x:
            raise RuntimeError(
                f"{self.name}: step {self.step} uses {describe(x)} that an earlier step stored outside the carry; a "
                f"replay would see a different value. Put it in the carry (or use tl.carrying)"
            )

    def _before_hook(self, x: Tensor) -> None:
        numbers = range(self.use.first, graph.next_number())
        made = x.grad_fn is not None and graph.number_of(x.grad_fn) in numbers
        if id(x) in self.recorded or (not made and any(y is x for y, _ in self.use.candidates)):
            raise RuntimeError(
                f"{self.name}: the body registers a hook on {describe(x)}, which it closes over, and would do so again "
                f"in each replay; register it before the loop"
            )

    def record_use(
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
            outer, here.recorder = here.recorder, None
            try:
                captured = self.arrays[id(buffer)] = CapturedArray(buffer, self.name)
            finally:
                here.recorder = outer
            captured.enter()

    # -- around one step

    def begin_step(
        self,
        step: int,
        state: list[Any],
        recorded: Sequence[tuple[int, Tensor]],
        row: Iterable[Any],
        goes_on: bool = False,
    ) -> list[Any]:
        """Before the body of a step: the state as it gets it. Its arguments are that and `row`.

        `goes_on`: the graph of the step before is still there, so that what is left of it may be its own.
        """
        if not goes_on:
            self.settle()
        self.use.first, self.modes = graph.next_number(), overrides.modes_below()
        self.step = step
        self.given.leaves = recorded
        if self.given.changed:
            state = self.given.of(state, recorded)
        seen = self.use.seen
        for arguments in (state, row):
            for x in arguments:
                if isinstance(x, Tensor):
                    seen[id(x)] = x
        return state

    def end_step(self, outputs: Sequence[Tensor], arguments: Sequence[Tensor], returned: Sequence[Any] = ()) -> None:
        """After the body of a step: what of its use stays to be known; in the sweep, which captures have a gradient."""
        use = self.use
        if self.replaying:
            self._check_count()
        else:
            self.autograd.end_step(self, returned)
            self.calls.append(use.count)
            if torch.cuda.is_initialized():
                self.gpus.update(x.get_device() for x in use.seen.values() if x.is_cuda)
            if self.given.roots:
                arguments = [*arguments, *self.given.roots]
            self._look_for_left({id(x) for x in returned})
            if use.leads_out or not all(map(use.seen.__contains__, map(id, outputs))):
                self._find_recorded(outputs, {id(x) for x in arguments})
            outside = {id(x) for x, _ in use.candidates}
            self._passing = [
                weakref.ref(x)
                for x in returned
                if isinstance(x, Tensor) and x.requires_grad and id(x) not in outside and id(x) not in self.recorded
            ]
            self._given = [weakref.ref(x) for x in arguments if x.requires_grad]
        if use.candidates:
            fresh = [(weakref.ref(x), version) for x, version in use.candidates if id(x) not in self.recorded]
            self._fresh = [*self._fresh, *fresh]
        self.use = StepUse(self.recorded)
        self.given.leaves = self.given.roots = ()

    def _find_recorded(self, outputs: Iterable[Tensor], arguments: set[int]) -> None:
        use = self.use
        numbers = range(use.first, graph.next_number())
        known = [*self.recorded.values(), *(x for x, _ in use.candidates)]
        for x in find_captures(outputs, StepGraph(self.step, arguments, numbers, use.made, known, use.seen.values())):
            if id(x) not in self.recorded:
                self.recorded[id(x)] = x
                version = next((v for y, v in use.candidates if y is x), version_of(x))
                self.met[id(x)] = Met(lambda x=x: x, version)

    def _look_for_left(self, returned: set[int]) -> None:
        """Notes the results of this step that live on, but not as what the body returned."""
        seen = self.use.seen
        for key in find_held(self.use.made, seen, own_references()):
            if key not in returned:
                self._left[key] = weakref.ref(seen[key])

    def settle(self) -> None:
        """After everything of a step is gone: what is left of what it met was not its own."""
        if self.nodes:
            self.let_go()
        if self.replaying:
            if self._unknown() is not None:
                self._refuse_unknown()
        else:
            for reference, version in self._fresh:
                if (x := reference()) is not None and not self._is_met(x):
                    self.met[id(x)] = Met(reference, version)
            self.autograd.settle(self)
        if self.writes.fresh:
            self.writes.settle()
        if self.given.loose:
            self.given.release()
        for reference in self._given:
            if reference() is not None:
                self.stayed.append(reference)
        for reference in (*self._given, *self._passing):
            if (x := reference()) is not None:
                self._left[id(x)] = reference
        self._fresh = self._passing = self._given = ()

    def tensors(self) -> list[Tensor]:
        """Lists the tensors that the body has used so far and did not make."""
        references = [met.tensor for met in self.met.values()] + [reference for reference, _ in self._fresh]
        return [x for reference in references if (x := reference()) is not None]

    def let_go(self) -> None:
        """Empties the nodes of loops inside a step that is over.

        A node holds the body of its loop, and that may hold the node, by a name or an array that the loop's result went
        to. The collector does not see a cycle that leads through torch's own nodes.
        """
        for reference in self.nodes:
            if (node := reference()) is not None:
                node.replay = None
        self.nodes.clear()

    def _is_met(self, x: Tensor) -> bool:
        met = self.met.get(id(x))  # of x, or of one that is gone and had that id
        return met is not None and met.tensor() is x

    def _refuse_unknown(self) -> None:
        """Raises where a replayed step used what the sweep did not, and somebody holds it still.

        The step itself may have made it, and a cycle hold it: a loop inside, whose body uses a name that is bound to
        the loop's result afterwards, and which no gradient has reached.
        """
        for generation in (0, 2):
            gc.collect(generation)
            if (unknown := self._unknown()) is None:
                return
        raise Misuse(
            f"step {self.step} used {unknown} in its replay, which the forward pass did not use; "
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
        if self.use.count != before:
            raise Misuse(
                f"step {self.step} did not repeat itself: it made {before} tensors in the forward pass and "
                f"{self.use.count} in its replay; a body must depend on nothing that changes in between"
            )

    def check_versions(self) -> None:
        """Raises where a captured tensor was changed in place, by anybody but a buffer's own update."""
        for key, met in self.met.items():
            x = met.tensor()
            if x is not None and self.replaying:
                check_memory([x], "which the body closes over")
            if x is not None and version_of(x) != met.version and key not in self.writes.changed:
                raise Misuse(
                    f"{describe(x)}, which the body closes over, was changed in place "
                    f"{'before or during backward' if self.replaying else 'in the loop'}; "
                    f"put it in the carry, or change it after backward"
                )

    # -- in backward

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """Replays: captured arrays as they were, captured tensors unchanged, their hooks silent."""
        self.settle()
        self.replaying = True
        self.check_versions()
        now = self.writes.values()
        try:
            for captured in self.arrays.values():
                captured.enter()
            with silent(self.recorded.values()):
                yield
            self.settle()
            self.check_versions()
        finally:
            self.replaying = False
            self._fresh, self.use = [], StepUse(self.recorded)
            self.writes.fresh = {}
            self.end_sweep()
            self.writes.restore(now)

    def end_sweep(self) -> None:
        """The arrays that were met are the caller's again."""
        for captured in self.arrays.values():
            captured.leave()

    def end_arrays(self) -> dict[CapturedArray, Tensor | None]:
        """After a step: the token of each array's reads in it, and the next one begins anew."""
        return {captured: captured.end_step() for captured in self.arrays.values()}

    def rng_state(self) -> RngState:
        """Returns the states of generators that the body may draw from; before the first step is over, of all GPUs'.

        What is drawn on a GPU is a tensor there, which the step makes: so later it is enough to ask those of which
        steps have used tensors.
        """
        generators = (generator for generator, _ in self.generators.values())
        return RngState(generators, self.gpu_states, self.gpus if self.calls else None)
