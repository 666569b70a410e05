"""State that lives on modules: loops that carry the attributes and buffers that their bodies set."""

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Literal, NamedTuple, TypeVar, Unpack, overload

from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import Misuse, WrongType, named
from tensorloop._common.scope import called_as, here
from tensorloop._common.slots import slots_of
from tensorloop.loop import api, counted
from tensorloop.loop.advice import refuse_arguments
from tensorloop.loop.attributes import Attributes, State
from tensorloop.loop.called import Called, check_body, check_callable, name_of_carry, pair_of
from tensorloop.loop.carry import Carry
from tensorloop.loop.compiled import around
from tensorloop.loop.first_step import FirstOnly, first_only
from tensorloop.loop.options import Body, Condition, Function, LoopOptions, ScanOptions, WhileOptions
from tensorloop.loop.slices import refuse_packed_sequence
from tensorloop.packed.table.base import any_packed
from tensorloop.tensor_array.array import TensorArray

C = TypeVar("C")
R = TypeVar("R")
Y = TypeVar("Y")


@named("carrying")
def carrying(*objects: Any, names: Sequence[str] = ()) -> "Carrying":
    """Runs loops over a body that keeps its state on modules (`self.h = ...`): that state becomes part of the carry.

        ys = tl.carrying(decoder).map(decoder.step, xs, checkpoints=16)
        carry, ys = tl.carrying(decoder, memory).scan(body_fn, init, xs)  # several objects

    Each step finds the attributes, buffers and items that the step before has set. When the loop is over the last ones
    are on the objects, as after a Python loop; where it raises, the objects are as before it. Parameters are left
    alone.

    Args:
        objects: modules (with all modules in them), objects with attributes or slots, or dicts; at least one.
        names: sequence of str, default (): the paths (`"cell.h"`) of attributes that only a later step sets. Those that
            the first step sets are found by themselves, also where they were missing or None before it.

    Returns:
        A `tl.loop.Carrying`, whose methods `scan`, `map`, `while_loop` and `fori_loop` take what those of `tl` take.

    Shapes: from the first step on the state is a carry: tensors, TensorArrays, numbers, None and containers of these,
    which keep structure, shapes and types. A tensor that steps write into is written into when the loop is over.
    Gradient: as the Python loop's, also through the state, and to what was on the objects before.
    Cost: a loop's with such a carry. The first step runs by itself and keeps what it saves for backward; it takes a
    copy of each tensor on the objects that is no parameter. ys are copied once more.

    Raises:
        TypeError: no object, or one without attributes; from the loop: state that changes its kind, packed xs, a
            condition that gives a bool for each row.
        ValueError: from the loop: a path in names that is not there.
        RuntimeError: from the loop: an attribute that a later step sets and the first does not.

    Example:
        >>> counter = torch.nn.Module()
        >>> counter.total = None
        >>> def step(x):
        ...     counter.total = x if counter.total is None else counter.total + x
        ...     return counter.total
        >>> tl.carrying(counter).map(step, torch.arange(4)), counter.total
        (tensor([0, 1, 3, 6]), tensor(6))
    """
    for i, x in enumerate(objects):
        has_attributes = isinstance(x, dict) or hasattr(x, "__dict__") or bool(slots_of(x))
        if not has_attributes or isinstance(x, type | Tensor | TensorArray | MethodType):
            raise WrongType(
                f"objects[{i}] is {describe(x)}; expected a module, an object with attributes or a dict"
                + ("; give the object whose method it is" if isinstance(x, MethodType) else "")
            )
    if not objects:
        raise WrongType("there are no objects; give the modules whose attributes the body sets")
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise WrongType(f"names must be a sequence of paths, got {names!r}")
    return Carrying(objects, tuple(names))


class Carrying:
    """The loops of tensorloop, with the state of some objects in their carry: made by `tl.carrying`.

    Args:
        objects, names: as in `tl.carrying`, which checks them; call that.

    Example:
        >>> counter = torch.nn.Module()
        >>> counter.total = torch.tensor(0)
        >>> def add(i, h):
        ...     counter.total = counter.total + i
        ...     return h * 2
        >>> tl.carrying(counter).fori_loop(0, 4, add, torch.tensor(1)), counter.total
        (tensor(16), tensor(6))
    """

    def __init__(self, objects: Sequence[Any], names: Sequence[str]) -> None:
        self._objects, self._names = objects, names

    @named("carrying.scan")
    def scan(
        self,
        body_fn: Body[C, Any, Y],
        init: C,
        xs: Any = None,
        length: int | None = None,
        **options: Unpack[ScanOptions],
    ) -> tuple[C, Y]:
        """Runs `tl.scan`; body_fn and until find the state on the objects.

        Args:
            body_fn, init, xs, length: as in `tl.scan`; xs are not packed.
            options: the other arguments of `tl.scan`.

        Returns:
            carry: body_fn's own, without the objects' state.
            ys: the outputs, stacked.

        Example:
            >>> counter = torch.nn.Module()
            >>> def step(h, x):
            ...     counter.seen = x
            ...     return h + x, h
            >>> tl.carrying(counter).scan(step, torch.tensor(0), torch.arange(4)), counter.seen
            ((tensor(6), tensor([0, 0, 1, 3])), tensor(3))
        """
        check_callable(body_fn=body_fn)
        check_body(body_fn)
        called = Called("body_fn", body_fn, ("carry", "x", *_context_of(options)))
        return self._scan("scan", called, lambda *args: pair_of(body_fn(*args)), init, xs, length, options)

    def _scan(
        self,
        name: str,
        called: Called,
        step: Callable[..., tuple[Any, Any]],
        init: Any,
        xs: Any,
        length: Any,
        options: Any,
    ) -> tuple[Any, Any]:
        """A scan that does `step(carry, x)` of the user's function `called`."""
        refuse_packed_sequence(xs)
        if any_packed(xs):
            raise WrongType("xs is packed, where rows end at steps of their own; a state on modules has all rows")
        run = self._begin(init, called, name)

        def body(carried: Carried, x: Any, *context: Any) -> tuple[Carried, Any]:
            return run.step(carried, lambda carry: step(carry, x, *context))

        if callable(until := options.get("until")):
            options["until"] = run.asked(until, "until")
        carried, ys = run.over(lambda start: api.facts_of_scan(body, start, xs, length, **options))
        return run.end(carried), ys

    @named("carrying.map")
    def map(self, fn: Function[Any, Y], xs: Any = None, length: int | None = None, **options: Unpack[ScanOptions]) -> Y:
        """Calls fn on each slice of xs, in order, and stacks the results; steps see the state that earlier ones left.

        Args:
            fn: `fn(x)`, or `fn(x, context)` with `context`. It finds the state on the objects.
            xs, length: as in `tl.scan`; xs are not packed.
            options: the other arguments of `tl.scan`.

        Returns:
            The results of all steps, stacked.

        Example:
            >>> cell, xs = torch.nn.Module(), torch.ones(3)
            >>> cell.h = torch.zeros(())
            >>> def step(x):
            ...     cell.h = cell.h + x
            ...     return cell.h
            >>> tl.carrying(cell).map(step, xs, checkpoints=2)
            tensor([1., 2., 3.])
        """
        check_callable(fn=fn)
        called = Called("fn", fn, ("x", *_context_of(options)))
        return self._scan("map", called, lambda carry, *args: (carry, fn(*args)), None, xs, length, options)[1]

    @overload
    def while_loop(
        self,
        cond_fn: Function[C, Condition],
        body_fn: Function[C, C],
        init: C,
        *,
        context: Any = None,
        return_steps: Literal[False] = False,
        **options: Unpack[WhileOptions],
    ) -> C: ...
    @overload
    def while_loop(
        self,
        cond_fn: Function[C, Condition],
        body_fn: Function[C, C],
        init: C,
        *,
        context: Any = None,
        return_steps: Literal[True],
        **options: Unpack[WhileOptions],
    ) -> tuple[C, int]: ...
    @named("carrying.while_loop")
    def while_loop(self, cond_fn: Callable[..., Any], body_fn: Callable[..., Any], init: Any, **options: Any) -> Any:
        """Runs `tl.while_loop`; both functions find the state on the objects.

            carry = tl.carrying(net).while_loop(cond_fn, body_fn, init)
            carry, steps = tl.carrying(net).while_loop(cond_fn, body_fn, init, return_steps=True)

        Args:
            cond_fn: as in `tl.while_loop`, with one bool for all rows.
            body_fn, init: as in `tl.while_loop`.
            options: the other arguments of `tl.while_loop`.

        Returns:
            The last carry; with `return_steps=True`, (carry, steps).

        Example:
            >>> counter = torch.nn.Module()
            >>> counter.n = torch.tensor(0)
            >>> def step(h):
            ...     counter.n = counter.n + 1
            ...     return h * 2
            >>> tl.carrying(counter).while_loop(lambda h: counter.n < 3, step, torch.tensor(1))
            tensor(8)
        """
        check_callable(cond_fn=cond_fn, body_fn=body_fn)
        run = self._begin(init, Called("body_fn", body_fn, ("carry",)), "while_loop")

        def body(carried: Carried, *context: Any) -> Carried:
            return run.step(carried, lambda carry: (body_fn(carry, *context), None))[0]

        out = run.over(lambda start: api.facts_of_while_loop(run.asked(cond_fn, "cond_fn"), body, start, **options))
        return (run.end(out[0]), out[1]) if options.get("return_steps") else run.end(out)

    @named("carrying.fori_loop")
    def fori_loop(
        self,
        lower: int | Tensor,
        upper: int | Tensor,
        body_fn: Callable[[int, C], C],
        init: C,
        **options: Unpack[LoopOptions],
    ) -> C:
        """Runs `tl.fori_loop`; body_fn finds the state on the objects.

        Args:
            lower, upper, body_fn, init: as in `tl.fori_loop`.
            options: the other arguments of `tl.fori_loop`.

        Returns:
            The last carry.

        Example:
            >>> counter = torch.nn.Module()
            >>> def step(i, h):
            ...     counter.last = h
            ...     return h + i
            >>> tl.carrying(counter).fori_loop(0, 4, step, torch.tensor(0)), counter.last
            (tensor(6), tensor(3))
        """
        check_callable(body_fn=body_fn)
        run = self._begin(init, Called("body_fn", body_fn, ("i", "carry")), "fori_loop")

        def body(i: int, carried: Carried) -> Carried:
            return run.step(carried, lambda carry: (body_fn(i, carry), None))[0]

        return run.end(run.over(lambda start: counted.facts_of_fori_loop(lower, upper, body, start, **options)))

    def _begin(self, init: Any, called: Called, name: str) -> "_LoopRun":
        around.check_whole("carrying")
        return _LoopRun(Attributes(self._objects), self._names, init, called, f"carrying.{name}")


def _context_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the name of the argument that a loop's functions get last; nothing where they get no context."""
    return () if options.get("context") is None else ("context",)


class Carried(NamedTuple):
    """The carry of a loop with the state of objects in it."""

    carry: Any  # the user's
    state: State | None  # None before the first step


class _LoopRun:
    """One loop."""

    def __init__(self, attributes: Attributes, names: Sequence[str], init: Any, called: Called, title: str) -> None:
        self.attributes, self.names, self.called, self.title = attributes, names, called, title
        if isinstance(init, FirstOnly):
            self.init, self.like = init.carry, None
        else:
            self.init, self.like = init, Carry(init, lambda: name_of_carry((called,)))

    def over(self, loop: Callable[[Any], R]) -> R:
        """The loop, from its first carry on."""
        try:
            with called_as(self.title):
                found = loop(first_only(Carried(self.init, None)))
            if (late := self.attributes.find_late()) is not None:
                raise Misuse(late)
        except BaseException as error:
            begun = self.attributes.begun and not isinstance(error, Misuse)
            if begun and (late := self.attributes.find_late()) is not None:
                error.add_note(late)
            self.attributes.put_back()
            raise
        return found

    def step(self, carried: Carried, call: Callable[[Any], tuple[Any, Any]]) -> tuple[Carried, Any]:
        """(the next carry, y) of one step."""
        caller, here.caller = here.caller, None  # loops in the body have their own names
        try:
            if carried.state is not None:
                (carry, y), state = self.attributes.around(carried.state, lambda: call(carried.carry))
            else:
                (carry, y), state = self.attributes.first(lambda: call(carried.carry), self.names)
        except TypeError as error:
            refuse_arguments([self.called], error)
            raise
        finally:
            here.caller = caller
        if carried.state is None and self.like is not None:
            self.like.check(carry, 0)
        return Carried(carry, state), y

    def asked(self, condition: Callable[..., Any], what: str) -> Callable[..., Any]:
        """A condition that finds the state where the body does."""

        def ask(carried: Carried, *context: Any) -> Any:
            with called_as(None):
                if carried.state is None:
                    answer = condition(carried.carry, *context)
                else:
                    answer, _ = self.attributes.around(carried.state, lambda: condition(carried.carry, *context))
            if isinstance(answer, Tensor) and answer.numel() != 1:
                raise WrongType(
                    f"{what} gave {describe(answer)}, but what is on modules has no rows of its own that could stop; "
                    f"reduce it to one bool, as with .any()"
                )
            return answer

        return ask

    def end(self, carried: Carried) -> Any:
        """Puts the last state on the objects; the user's carry."""
        if carried.state is None:
            self.attributes.put_back()  # what no step was done for, a call on fake tensors has set
        else:
            self.attributes.put_last(carried.state)
        return carried.carry
