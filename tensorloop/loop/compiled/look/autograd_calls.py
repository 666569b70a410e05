"""What a body has to do with autograd: its custom Functions, and gradients that it takes in the step.

A Function's forward and backward are Python on tensors, so both are looked at. Forward runs as it is called, and then
its backward, on gradients of ones: what that does is part of the step's key, like everything else, and in the trace it
stands between marks (`compiler/custom_functions`). `torch.autograd.grad` in the body runs as ever, and its operations
are some of the step's; what it is asked for is noted, for in a loop one tensor may depend on another by way of earlier
steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorloop._common.user_line import user_place
from tensorloop._torch import functions, graph, transforms
from tensorloop._torch.functions import Ctx, unrecorded
from tensorloop._torch.overrides import unseen
from tensorloop._torch.versions import Versions
from tensorloop.compiler.custom_functions import BEGIN, COMING, END
from tensorloop.compiler.operations import aten
from tensorloop.compiler.refused import FUNCTION, Refused, Signal
from tensorloop.compiler.trace import Operation, Ref

MOST_NONE = 4  # results of a Function that may have no gradient: what backward does then is tried for each set of them


class NeedsGradients(Signal):
    """The step has to be looked at with inputs that have gradients: the body ends here."""


class Notes(Protocol):
    """What writes a step down, or follows its calls."""

    def mark(self, function: Any, args: Sequence[Any], made: Sequence[Tensor], more: Sequence[Any] = ()) -> None:
        """Notes an operation that nobody runs, and takes these tensors for what it makes; `more` is in no key."""

    def is_outside(self, x: Tensor) -> bool:
        """Whether a tensor was not made in the step."""
        ...


class AutogradCalls:
    """Sees them in one run of a step, whose inputs are `given`.

    `live`: whether inputs have gradients, so that what depends on this is seen. `checks`: whether backwards are tried
    out with fewer gradients asked for, and coming.
    """

    def __init__(self, notes: Notes, watch: Any, given: Sequence[Tensor], *, live: bool, checks: bool = False) -> None:
        self.notes: Any = notes
        self.watch: Any = watch
        self.live, self.checks = live, checks
        self.met: list[Any] = []  # the `ctx` of each Function that was noted
        self.once = False  # whether one of them may be differentiated once
        self.asked: list[tuple[list[graph.End], graph.End]] = []  # outputs, and an input that the step did not make
        # What the inputs are in the step's graph, before it writes to any; where rows stop, what the body gets of them.
        self.ends = [graph.end_of(x) for x in given] if live else []  # else nobody asks
        self.fed: dict[graph.End, int] = {}
        self.first = graph.next_number()  # of the nodes that the step makes
        self.takes = False  # whether there was any
        self.running = False  # whether torch.autograd.grad does
        self._count = 0
        self._origins: dict[int, int] = {}  # of what detach() gave, by number
        self._again: set[int] = set()  # such as torch.autograd.grad makes

    def __call__(self, ctx: Any) -> None:
        """A Function is called; its forward comes next."""
        with unseen():
            registered = functions.is_registered(ctx)  # an operation like torch's own: autograd knows its gradient
            if not registered and torch.is_grad_enabled() and transforms.maybe_level() is None:
                _CallOfFunction(self, ctx)

    def end(self) -> None:
        """The step is over. Nothing is held in a circle: that would be there until Python looks for such."""
        self.notes = self.watch = None

    def next(self) -> int:
        """The number of another Function."""
        self._count += 1
        return self._count - 1

    def grad(self, args: Any, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """What `torch.autograd.grad` gives; it is noted what it is asked for."""
        if not self.live:
            raise NeedsGradients
        given = dict(zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"), args, strict=False))
        given |= kwargs
        if kwargs.get("is_grads_batched"):
            raise _refused("the body calls torch.autograd.grad with is_grads_batched=True", "call it for each gradient")
        if self.once and given.get("create_graph"):
            raise _refused("a gradient with create_graph=True may reach a once_differentiable Function", FUNCTION)
        with unseen():
            outputs, inputs = (graph.ends_of(given.get(name)) for name in ("outputs", "inputs"))
            self.asked += [(outputs, x) for x in inputs if x in self.fed or self._is_outside(x)]
        self.takes = True
        outer, self.running = self.running, True
        try:
            return run()
        finally:
            self.running = outer

    def _is_outside(self, x: graph.End) -> bool:
        return not graph.is_from(x, self.first) if isinstance(x, tuple) else self.notes.is_outside(x())

    def detached(self, x: int, out: int) -> None:
        """Notes of which tensor a detached one is made, by their numbers."""
        self._origins[out] = self._origins.get(x, x)
        if self.running:
            self._again.add(out)

    def original(self, number: int, x: Tensor) -> int:
        """The number of a tensor; what autograd keeps of a result, and gives with its graph again, is that result."""
        if not self.running or number not in self._origins or not x.requires_grad:
            return number
        if x.grad_fn is not None:
            return self._origins[number]
        if number in self._again and torch.is_grad_enabled():  # it may stand for another leaf, or be one by itself
            raise _refused(
                "a gradient with create_graph=True goes through what is computed anew (torch.utils.checkpoint)",
                "call the function itself: compiled loops have checkpoints=",
            )
        return number

    def gives(self, x: Any) -> None:
        """The body says that a tensor requires a gradient, or that it does not."""
        with unseen():
            inside = transforms.maybe_level() is not None  # torch.func.grad says so of its own
            if not inside and isinstance(x, Tensor) and self.notes.is_outside(x) and not x.requires_grad:
                raise _refused(
                    "the body calls requires_grad_() on what it is given", "call it on x.detach(), or before the loop"
                )


class _CallOfFunction:
    """One call of a Function: around its forward, and `setup_context` where there is one."""

    def __init__(self, calls: AutogradCalls, ctx: Any) -> None:
        self._calls, self._ctx = calls, ctx
        self._cls = functions.class_of(ctx)
        self._name = self._cls.__name__
        self._sets_up = functions.has_setup(self._cls)
        self._materializes = True
        self._place = user_place()
        ctx.set_materialize_grads = self._set_materialize_grads
        functions.call_instead(self._cls, "forward", self._forward)

    def _set_materialize_grads(self, value: bool) -> None:
        self._ctx.materialize_grads = self._materializes = value

    def _refused(self, reason: str, cure: str = FUNCTION) -> Refused:
        return Refused(reason, cure, self._place)

    def _forward(self, original: Callable[..., Any], *args: Any) -> Any:
        given = args if self._sets_up else args[1:]
        tensors = [x for x in given if isinstance(x, Tensor)]
        with unseen():
            if not self._calls.live:
                raise NeedsGradients
            versions, wants = Versions(tensors), any(x.requires_grad for x in tensors)
            if not wants:  # no step will ever ask for its gradient
                del self._ctx.set_materialize_grads
        if not wants:
            return original(*args)
        asked = self._calls.watch.asked_grad
        out = original(*args)
        self._calls.watch.asked_grad = asked
        results = [_own(y, tensors) for y in (out if isinstance(out, tuple) else (out,))]
        with unseen():
            if self._ctx.dirty_tensors or versions.changed() is not None:
                raise self._refused(f"the custom Function {self._name} writes to its inputs", "write to a clone()")
            if len({id(y) for y in results}) < len(results):
                raise self._refused(f"the custom Function {self._name} returns a tensor twice", "return a clone()")
        if self._sets_up:
            functions.call_instead(self._cls, "setup_context", lambda f, *rest: self._set_up(f, given, results, *rest))
        else:
            self._note(given, results)
        return tuple(results) if isinstance(out, tuple) else results[0]

    def _set_up(self, original: Callable[..., Any], given: Sequence[Any], results: Sequence[Any], *rest: Any) -> None:
        original(*rest)
        self._note(given, results)

    def _note(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        """Notes what forward gave, and runs the backward."""
        ctx, notes = self._ctx, self._calls.notes
        tensors = [x for x in given if isinstance(x, Tensor)]
        with unseen():
            del ctx.set_materialize_grads
            off, saved = [id(y) for y in ctx.non_differentiable or ()], tuple(ctx.to_save or ())
            made = [y for y in results if isinstance(y, Tensor)]
            flowing = [y for y in made if _has_gradient(y) and id(y) not in off]
        self._calls.met.append(ctx)
        if not flowing:
            return
        backward, once = functions.backward_of(self._cls)
        self._calls.once |= once
        number = self._calls.next()
        with unrecorded():
            comings = [torch.ones_like(y).requires_grad_() for y in flowing]
            for y in flowing:
                y.requires_grad_()
        with unseen():
            notes.mark(BEGIN, [made, tensors, number, self._name], made)
            for y, g in zip(flowing, comings, strict=True):
                notes.mark(COMING, [y, number], [g])
        left = iter(comings)
        grads = [next(left) if any(y is z for z in flowing) else self._zeros(y) for y in results]
        needs = tuple(isinstance(x, Tensor) and _has_gradient(x) for x in given)
        with torch.set_grad_enabled(not once):
            found = self._run(backward, saved, needs, grads, given)
        linear = True
        if self._calls.checks:
            with unrecorded():
                linear = self._try(backward, saved, needs, grads, comings, given, once)
        with unrecorded():
            for y in flowing:
                y.requires_grad_(False)
        with unseen():
            notes.mark(END, [tensors, comings, found, number, once], [], [linear])

    def _zeros(self, y: Any) -> Any:
        return torch.zeros_like(y) if self._materializes and isinstance(y, Tensor) else None

    def _run(
        self,
        backward: Callable[..., Any],
        saved: tuple[Any, ...],
        needs: tuple[bool, ...],
        grads: Sequence[Any],
        given: Sequence[Any],
    ) -> list[Tensor | None]:
        """What the user's backward gives for the tensors among what forward was given."""
        try:
            found = backward(Ctx(vars(self._ctx), saved, needs), *grads)
        except Refused:
            raise
        except NotImplementedError as error:
            raise self._refused(f"the backward of the custom Function {self._name} uses {error}") from None
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            said = f"the backward of the custom Function {self._name} raises {type(error).__name__}: {text}"
            cure = "write its formula out" if isinstance(error, RecursionError) else "mend it"
            raise self._refused(said, f"{cure}, or set compile=False") from None
        found = found if isinstance(found, tuple) else (found,)
        if len(found) < len(given) or any(g is not None for g in found[len(given) :]):
            raise self._refused(
                f"the backward of the custom Function {self._name} gives {len(found)} gradients, where forward has "
                f"{len(given)} inputs",
                "return a gradient for each input, None for what has none",
            )
        for i, (x, g) in enumerate(zip(given, found, strict=False)):
            with unseen():
                if not (g is None or (isinstance(x, Tensor) and isinstance(g, Tensor) and _fits(g, x))):
                    raise self._refused(
                        f"the backward of the custom Function {self._name} gives {_said(g)} as the gradient of input "
                        f"{i}, which is {_said(x)}",
                        "return a gradient like the input, None for what has none",
                    )
        return [g for x, g in zip(given, found, strict=False) if isinstance(x, Tensor)]

    def _try(
        self,
        backward: Callable[..., Any],
        saved: tuple[Any, ...],
        needs: tuple[bool, ...],
        grads: Sequence[Any],
        comings: Sequence[Tensor],
        given: Sequence[Any],
        once: bool,
    ) -> bool:
        """Whether it is linear. It has to give the same if one gradient alone is wanted or comes, or it is recorded."""
        values = {id(g): _some(g) for g in comings}
        grads = [values.get(id(g), g) for g in grads]
        there = {id(g) for g in values.values()}

        def run(needs: tuple[bool, ...], grads: Sequence[Any], record: bool = False) -> list[Tensor | None]:
            with torch.set_grad_enabled(record):
                return self._run(backward, saved, needs, grads, given)

        def differ(a: list[Any], b: list[Any], places: Sequence[int]) -> bool:
            pairs = [(a[i], b[i]) for i in places]
            return any((p is None) != (q is None) or (p is not None and not _same(p, q)) for p, q in pairs)

        whole = run(needs, grads)
        wanted = [need for x, need in zip(given, needs, strict=True) if isinstance(x, Tensor)]
        if not once and differ(whole, run(needs, grads, record=True), range(len(whole))):
            raise self._refused(
                f"the backward of the custom Function {self._name} gives something else where it is recorded itself"
            )
        for i, need in enumerate(needs):
            place = sum(isinstance(x, Tensor) for x in given[:i])
            alone = tuple(k == i for k in range(len(needs)))
            if need and sum(wanted) > 1 and differ(whole, run(alone, grads), [place]):
                raise self._refused(
                    f"a gradient of the custom Function {self._name} is another where it is the only one that is wanted"
                )
        if not self._materializes and len(comings) > 1:
            self._try_none(run, differ, needs, grads, [i for i, g in enumerate(grads) if g is not None])
        return self._is_linear(run, needs, [i for i, g in enumerate(grads) if id(g) in there], grads)

    def _is_linear(self, run: Any, needs: tuple[bool, ...], there: list[int], a: Sequence[Any]) -> bool:
        """Whether the backward gives of a sum, and of many times a gradient, what that of each says."""
        b = [g.flip(list(range(g.dim()))).cos() if i in there else g for i, g in enumerate(a)]

        def of(x: float, y: float) -> list[Tensor | None]:
            return run(needs, [x * p + y * q if i in there else p for i, (p, q) in enumerate(zip(a, b, strict=True))])

        one, other = of(1, 0), of(0, 1)
        for x, y in ((1, 1), (-1, 0), (0, 0), (1e-6, 0), (1e6, 0)):
            for p, q, r in zip(one, other, of(x, y), strict=True):
                if p is None or q is None or r is None:
                    if p is not q or p is not r:
                        return False
                elif not _same(r, x * p + y * q, 1e-3):
                    return False
        return True

    def _try_none(self, run: Any, differ: Any, needs: tuple[bool, ...], grads: Sequence[Any], there: list[int]) -> None:
        """Of several results, some may have no gradient: to the compiled step these are zeros."""
        sets = range(1, 2 ** len(there) - 1) if len(there) <= MOST_NONE else [0]
        for chosen in sets:
            off = [i for k, i in enumerate(there) if chosen >> k & 1]
            zeros = [torch.zeros_like(g) if i in off else g for i, g in enumerate(grads)]
            none = [None if i in off else g for i, g in enumerate(grads)]
            a, b = run(needs, zeros), run(needs, none)
            a = [None if y is None and x is not None and not x.any() else x for x, y in zip(a, b, strict=True)]
            if not off or differ(a, b, range(len(a))):
                raise self._refused(
                    f"the backward of the custom Function {self._name} takes None for something else than zeros",
                    "leave set_materialize_grads(False) away, or set compile=False",
                )


def write_cut(func: Any, args: list[Any], kwargs: Any, first: int, calls: "AutogradCalls | None") -> list[Operation]:
    """A write without gradients to a tensor that has one; three tensors, from the number `first` on, are made for it.

    The tensor has new values and its old gradient: what a Function gives whose backward hands on what comes.
    """
    assert calls is not None
    number, place, old = calls.next(), user_place(), kwargs.get("out", args[0])
    new, result, coming = (Ref(first + k) for k in range(3))
    given = (args, kwargs | {"out": new}) if "out" in kwargs else ([new, *args[1:]], kwargs)
    return [
        Operation(aten.clone.default, [old], {}, new, place, cut=True),
        Operation(func, *given, new, place, cut=True),
        Operation(BEGIN, [[new], [old], number, ""], {}, [result], place),
        Operation(COMING, [result, number], {}, coming, place),
        Operation(END, [[old], [coming], [coming], number, False, True], {}, None, place),
        Operation(aten.copy_.default, [old, result], {}, old, place),
    ]


def _own(y: Any, tensors: Sequence[Tensor]) -> Any:
    """A result that is an input as a view of it, as torch makes one."""
    return y.view_as(y) if any(y is x for x in tensors) else y


def _some(x: Tensor) -> Tensor:
    """Numbers of both signs in the shape of a tensor."""
    return torch.linspace(-1.5, 2, x.numel(), device=x.device).reshape(x.shape).to(x.dtype)


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _fits(grad: Tensor, x: Tensor) -> bool:
    """Whether autograd takes it: it adds up what is too large in a dim, and casts."""
    if x.dtype.is_complex < grad.dtype.is_complex and not x.is_floating_point():
        return False
    sizes = zip(reversed(x.shape), reversed(grad.shape), strict=False)
    return grad.dim() >= x.dim() and all(a in (1, b) for a, b in sizes) and grad.device == x.device


def _said(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _same(a: Tensor, b: Tensor, close: float = 1e-5) -> bool:
    """Whether tensors are the same, within so much of their largest number."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    a, b = a.detach(), b.detach()
    return torch.allclose(
        a, b, 0, close * b.nan_to_num(0, 0, 0).abs().amax().item() if b.numel() else 0, equal_nan=True
    )


def _refused(reason: str, cure: str) -> Refused:
    return Refused(reason, cure, user_place())
