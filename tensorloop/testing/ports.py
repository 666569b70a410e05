"""`same_loop`: a loop and its port side by side, in values, gradients, side effects, bytes and time."""

import functools
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorloop._common.arguments import describe
from tensorloop._common.errors import WrongType, named
from tensorloop._torch.dispatch import tree_leaves, tree_map
from tensorloop.loop import run as loops
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.memory import saved_bytes
from tensorloop.testing.outcome import (
    Closeness,
    Difference,
    Outcome,
    compare,
    fresh,
    go_on_from,
    gradients_of,
    inputs_of,
    names_of,
    outputs_of,
    random_state,
    run,
    seed,
)
from tensorloop.testing.report import LoopReport, RunCost
from tensorloop.testing.samples import Sizes, bytes_of, named_sizes, refuse_iterators, resized
from tensorloop.testing.steps import first_difference
from tensorloop.testing.world import MOST, World, doubled, in_double, is_float

_DOUBLE, _SINGLE = Closeness(1e-6, 1e-9), Closeness(1e-3, 1e-4)
Sample = Mapping[str, Any]  # by argument
_LARGEST = 2**30  # bytes of sample and weights in double precision; some six copies are made


@named("same_loop")
def same_loop(
    original: Callable[..., Any],
    ported: Callable[..., Any],
    *sample: Any,
    sizes: Sizes = None,
    rtol: float | None = None,
    atol: float | None = None,
    random_seed: int = 0,
    repeats: int = 5,
) -> LoopReport:
    """Compares a loop with its port to tensorloop: one report that a person reads and a test asserts.

        report = tl.testing.same_loop(old_layer, new_layer, x, h0, sizes={"T": 7, "B": 3})
        print(report)
        assert report

    Compared are results and their `requires_grad`, gradients and second derivatives, what either changes (arguments,
    buffers of modules, attributes, lists), and the random numbers that it draws. The port runs eagerly, compiled, and
    with a budget of half the bytes, where its loops leave `compile=` and `checkpoints=` open. A difference is a result,
    never an exception: so is an original that fails or gives other numbers at each run.

    Args:
        original: the loop as it was: a function or a module.
        ported: the same with a loop of this library, called alike.
        sample: the arguments of both: tensors of any shape in nested lists, tuples and dicts, and anything else. Each
            run gets copies. Small ones do: some 10 steps.
        sizes: dict of str to int, the sizes to vary, such as {"T": 7}: dims of 7 and ints of 7 in the sample become 0,
            1 and the next odd number. {"T": (7, 0, 12)} says which. Default None: the sizes of the sample's dims that
            no weight has. A size for which the original fails is no difference, and is named.
        rtol: float, relative tolerance. Default None: 1e-6, or 1e-3 where double precision cannot be had.
        atol: float, absolute tolerance as a share of the largest number in the tensor. Default None: 1e-9, or 1e-4.
        random_seed: int, default 0: each run begins with it, for torch, Python and numpy.
        repeats: int, default 5: how often each way is timed, in turn; the median is given. 0: no times.

    Returns:
        A `tl.testing.LoopReport`: `.same`, `.differences`, `.first`, `.cases`, `.runs`.

    Gradient: asked for every float tensor of the sample and each that wants one in closures, globals, modules and
    objects that the functions reach; weights of the port are those of the original by identity, or by name. Everything
    is put back afterwards.
    Dtypes: double precision, where everything that is reached can be cast; else as given, and the report says so.
    Cost: some thirty runs, two of them watched line by line where something differs.

    Raises:
        TypeError: original or ported cannot be called; sizes are no such dict.
        ValueError: a size that no dim of the sample has.

    Example:
        >>> w = torch.tensor(0.5, requires_grad=True)
        >>> def original(xs):
        ...     h, out = torch.zeros(2), []
        ...     for x in xs:
        ...         h = torch.tanh(w * h + x)
        ...         out.append(h)
        ...     return torch.stack(out)
        >>> def ported(xs):
        ...     return tl.scan(lambda h, x: (h := torch.tanh(w * h + x), h), torch.zeros(2), xs)[1]
        >>> report = tl.testing.same_loop(original, ported, torch.randn(7, 2), sizes={"T": 7})
        >>> report.same, report.cases["T = 1"]
        (True, 'same')
    """
    for function, what in ((original, "original"), (ported, "ported")):
        if not callable(function):
            raise WrongType(f"{what} must be a function or a module, got {describe(function)}")
    refuse_iterators(sample)
    report = LoopReport()
    both = _Both(original, ported, sample, random_seed)
    variants = named_sizes(sizes, sample, both.tensors())
    size = both.bytes()
    if size > _LARGEST:
        report.differences.append(
            f"nothing was compared: sample and weights take {size:,} bytes; give a smaller sample"
        )
        return report
    if not all(world.is_whole for world in both.worlds):
        report.differences.append(
            f"nothing was compared: more than {MOST:,} objects are reached; give functions that reach less"
        )
        return report
    try:
        if _compare(both, report, variants, (rtol, atol)) and repeats:
            report.runs = list(_timed(both, repeats))
    finally:
        both.end()
    return report


class HowToRun(NamedTuple):
    """A way to run the port: what its loops are told, None for nothing."""

    name: str
    told: loops.Otherwise | None = None


class _Both:
    """The two functions, their sample, and what they reach beside it; `wanted` says which inputs have gradients."""

    def __init__(self, original: Any, ported: Any, sample: tuple[Any, ...], random_seed: int) -> None:
        self.functions, self.random_seed = (original, ported), random_seed
        self.beside = [x for x in tree_leaves(sample) if not isinstance(x, Tensor | int | float | str | None)]
        self.wanted: Callable[[Tensor], bool] = lambda x: True
        self.random_state = random_state()
        self.look()
        self.first = self.worlds
        taken = {re.split(r"[.[]", name)[0] for world in self.worlds for name in world.leaves}
        names = names_of(original, len(sample))
        self.sample: Sample = {
            f"args[{i}]" if name in taken else name: x for i, (name, x) in enumerate(zip(names, sample, strict=True))
        }

    def look(self) -> None:
        """Notes how everything is now, to be put back after each run."""
        first = World(self.functions[0], *self.beside)
        second = World(self.functions[1], *self.beside, other=first)
        self.worlds = first, second
        wants = {name: x for name, x in first.tensors().items() if is_float(x) and x.requires_grad}
        modules = all(isinstance(function, nn.Module) for function in self.functions)
        self.targets = wants, _counterparts(wants, second.tensors(), modules)
        self.start = second.before | first.before

    def tensors(self) -> list[Tensor]:
        """All tensors beside the sample."""
        return [x for world in self.worlds for x in world.tensors().values()]

    def bytes(self) -> int:
        """Returns the bytes of everything, in double precision."""
        unique = {id(x): x for x in [*self.tensors(), *tree_leaves(self.sample)]}
        return 2 * bytes_of(iter(unique.values()))

    def before(self, sample: Sample) -> Mapping[str, Any]:
        """All that a run may change, by name, as it is before."""
        return {**self.start, **inputs_of(sample)}

    def put_back(self) -> None:
        """Makes everything what it was."""
        for world in self.worlds:
            world.put_back()

    def end(self) -> None:
        """Makes everything what it was at first."""
        self.worlds = self.first
        self.put_back()
        go_on_from(self.random_state)

    def run(self, which: int, sample: Sample, way: HowToRun, second: bool = False) -> Outcome:
        """Runs the original (0) or the port (1)."""
        arguments = fresh(sample, self.wanted)
        targets = {**arguments.leaves, **self.targets[which]}
        try:
            with way_of(way):
                return run(self.functions[which], arguments, self.worlds[which], targets, self.random_seed, second)
        finally:
            self.put_back()

    def outputs(self, which: int, sample: Sample) -> Mapping[str, Any]:
        """The results of one, with their graph."""
        seed(self.random_seed)
        try:
            with torch.enable_grad(), way_of(EAGER):
                return outputs_of(self.functions[which](*fresh(sample, self.wanted).args))
        finally:
            self.put_back()

    def kept(self, which: int, sample: Sample) -> int:
        """Bytes that one keeps for its backward pass."""
        arguments = fresh(sample, self.wanted).args
        with torch.enable_grad():
            return saved_bytes(lambda: self.functions[which](*arguments))

    def within(self, sample: Sample, budget: int) -> HowToRun:
        """The port with a budget of so many bytes, or the least that it takes."""
        way = HowToRun(f"budget of {budget:,} bytes", loops.Otherwise(False, Checkpoints(budget=budget)))
        said = re.search(r"give at least ([\d,]+)", str(self.run(1, sample, way).error))
        least = int(said[1].replace(",", "")) if said else 0
        return self.within(sample, least) if least > budget else way


EAGER = HowToRun("port", loops.Otherwise(False, None))
_AS_IS = HowToRun("original")


@contextmanager
def way_of(way: HowToRun) -> Iterator[None]:
    """Loops inside run in this way; what they warn of is not shown."""
    loops.told, before = way.told, loops.told
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        loops.told = before
    if way.told is not None:
        way.told.warned += [str(w.message) for w in caught if issubclass(w.category, NotCompiledWarning)]


def _counterparts(wanted: Mapping[str, Tensor], there: Mapping[str, Tensor], modules: bool) -> dict[str, Tensor]:
    """The port's tensors for the original's: the same ones, else those of the same name, else of modules in order."""
    ids = {id(x) for x in there.values()}
    found = {name: x for name, x in wanted.items() if id(x) in ids}
    found |= {name: there[name] for name in wanted.keys() - found if name in there and is_float(there[name])}
    used = {id(x) for x in found.values()}
    left = {name: x for name, x in wanted.items() if name not in found}
    free = [x for x in there.values() if is_float(x) and x.requires_grad and id(x) not in used]
    if modules and [x.shape for x in left.values()] == [x.shape for x in free]:
        found |= dict(zip(left, free, strict=True))
    return {name: found[name] for name in wanted if name in found}


def _compare(both: _Both, report: LoopReport, variants: Mapping[str, Any], given: tuple[Any, Any]) -> bool:
    """Fills the report; whether there is something to time. In double precision if that can be, with all gradients."""
    expected = found = Outcome()
    for double, wanted in ((True, True), (True, False), (False, True), (False, False)):
        with in_double(both.tensors()) if double else nullcontext(True) as may:
            if not may:
                continue
            sample = _cast(both.sample) if double else both.sample
            both.look()
            both.wanted = (lambda x: True) if wanted else (lambda x: x.requires_grad)
            try:
                expected = both.run(0, sample, _AS_IS)
                found = both.run(1, sample, EAGER)
                if not (expected.error or found.error):
                    default = _DOUBLE if double else _SINGLE
                    rtol, atol = (b if a is None else a for a, b in zip(given, default, strict=True))
                    report.dtype = "double precision" if double else "the dtypes given"
                    return _compare_here(both, report, sample, variants, Closeness(rtol, atol))
            finally:
                both.put_back()
    if expected.error:
        report.differences.append(f"nothing was compared: the original fails for the sample: {_told(expected.error)}")
    else:
        report.differences.append(f"the port fails for the sample: {_told(found.error)}")
    return False


def _compare_here(
    both: _Both, report: LoopReport, sample: Sample, variants: Mapping[str, Any], tolerance: Closeness
) -> bool:
    """Compares all ways for the sample, and eager and compiled ones for its other sizes."""
    expected, again = (both.run(0, sample, _AS_IS, True) for _ in range(2))
    if unsteady := compare(expected, again, both.before(sample), tolerance):
        report.differences.append(
            f"nothing was compared: the original gives other results at each run from equal seeds ({unsteady[0]})"
        )
        return False
    if lacking := _other_weights(both):
        report.differences.append(lacking)
        return False
    second = isinstance(expected.second, Mapping)
    parts = [
        "values",
        "gradients for " + (", ".join(expected.gradients) or "nothing"),
        *(["second derivatives"] if second else []),
    ]
    report.compared = ", ".join([*parts, "side effects", "random numbers"])
    worst = sample, compare(expected, both.run(1, sample, EAGER, second), both.before(sample), tolerance)
    report.differences += map(str, worst[1])
    for way in () if worst[1] else _ways(both, sample):
        found = both.run(1, sample, way, second)
        if found.error is None:
            apart = compare(expected, found, both.before(sample), tolerance)
            report.differences += [f"{way.name}: {difference}" for difference in apart]
        elif way.told is not None and way.told.checkpoints is not None:  # the port did not ask for them
            report.cases[way.name] = f"the port fails: {_told(found.error)}"
        else:
            report.differences.append(f"{way.name}: the port fails: {_told(found.error)}")
    for name, (size, others) in variants.items():
        for other in others:
            other_sample = resized(sample, size, other)
            text, differences = _case(both, other_sample, tolerance)
            report.cases[f"{name} = {other}" if not name.startswith("size ") else f"{name} -> {other}"] = text
            if text.startswith(_DIFFERS) and not worst[1]:
                report.differences.append(f"{name} = {other}: {text}")
                worst = other_sample, differences
    if worst[1]:
        in_gradients = all(difference.what == "gradient of" for difference in worst[1])
        first, second = (functools.partial(both.outputs, which, worst[0]) for which in (0, 1))
        try:
            report.first = first_difference(first, second, tolerance, in_gradients)
        except Exception as error:  # of what runs otherwise when it is watched
            report.first = f"not found: {_told(error)}"
        if in_gradients and not report.first:
            report.first = "no variable of a step has another gradient: what is named is not used alike, or is a copy"
    return True


_DIFFERS = "differs: "


def _case(both: _Both, sample: Sample, tolerance: Closeness) -> tuple[str, list[Difference]]:
    """Compares for a sample of another size."""
    expected = both.run(0, sample, _AS_IS)
    if expected.error:  # a port may not even end there
        return f"the original fails: {_told(expected.error)}", []
    for way in (EAGER, HowToRun("compiled", loops.Otherwise(True, None))):
        found = both.run(1, sample, way)
        if found.error:
            return f"{_DIFFERS}the port fails: {_told(found.error)}", []
        if differences := compare(expected, found, both.before(sample), tolerance):
            # Of a compiled loop no step can be watched.
            return (
                (_DIFFERS + str(differences[0]), differences)
                if way is EAGER
                else (f"{_DIFFERS}compiled, {differences[0]}", [])
            )
    return "same", []


def _ways(both: _Both, sample: Sample) -> list[HowToRun]:
    """The ways in which the loops of the port may run, beside eagerly."""
    told = loops.Otherwise(False, None)
    with way_of(HowToRun("", told)):
        kept = both.kept(1, sample)
    both.put_back()
    if not told.loops:
        return []
    return [HowToRun("compiled", loops.Otherwise(True, None)), both.within(sample, max(kept // 2, 1))]


def _other_weights(both: _Both) -> str:
    """Says that weights of the port have other values than those of the original, where that is so."""
    for name, x in both.targets[0].items():
        y = both.targets[1].get(name, x)
        if y.shape != x.shape or not torch.equal(y.detach(), x.detach()):
            return (
                f"nothing was compared: {name} of the port has other values than the original's; copy them, as by "
                f"ported.load_state_dict(original.state_dict())"
            )
    return ""


def _timed(both: _Both, repeats: int) -> Iterator[RunCost]:
    """Bytes and processor time of each way, in turns, in the dtypes given."""
    both.look()
    ways = [(0, _AS_IS), (1, EAGER), *((1, way) for way in _ways(both, both.sample))]
    seconds: list[list[float]] = [[] for _ in ways]
    kept: list[int | None] = [None for _ in ways]
    remarks = ["" for _ in ways]
    for turn in range(repeats + 1):
        for i, (which, way) in enumerate(ways):
            if remarks[i]:
                continue
            try:
                with way_of(way):
                    if turn:
                        seconds[i].append(_clocked(both, which))
                    else:  # what is made in a first call is made here
                        _clocked(both, which)
                        kept[i] = both.kept(which, both.sample)
            except Exception as error:
                remarks[i] = _told(error)
            finally:
                both.put_back()
    for i, (_, way) in enumerate(ways):
        warned = way.told.warned[:1] if way.told is not None else []
        clock = statistics.median(seconds[i]) * 1e3 if seconds[i] else None
        yield RunCost(way.name, kept[i], clock, remark=remarks[i] or "".join(warned))


def _clocked(both: _Both, which: int) -> float:
    """Seconds of processor time, forward and backward."""
    arguments = fresh(both.sample, both.wanted)
    seed(both.random_seed)
    begin = time.process_time()
    with torch.enable_grad():
        outputs = outputs_of(both.functions[which](*arguments.args))
        gradients_of(outputs, {**arguments.leaves, **both.targets[which]})
    return time.process_time() - begin


def _cast(sample: Sample) -> Sample:
    def double(x: Any) -> Any:
        return doubled(x.detach()).requires_grad_(x.requires_grad) if is_float(x) else x

    return {name: tree_map(double, part) for name, part in sample.items()}


def _told(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
