"""One run of a function: its results, gradients and second derivatives, and what it left behind; two runs compared."""

import inspect
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._torch.dispatch import keystr, tree_flatten_with_path, tree_map
from tensorloop.testing.world import World, is_float


class Outcome(NamedTuple):
    """The results of a run. Gradients are by name, None where there is none; `second` is text where there are none."""

    error: BaseException | None = None
    outputs: Mapping[str, Any] = {}
    needs_grad: Mapping[str, bool] = {}
    gradients: Mapping[str, Tensor | None] = {}
    second: Mapping[str, Tensor | None] | str = ""
    left: Mapping[str, Any] = {}  # inputs and all that is reached beside them, after the run
    random_state: bytes = b""  # after the forward pass


class Closeness(NamedTuple):
    """How far two numbers may be apart: relative to the expected one, and to the largest of its tensor."""

    relative: float
    absolute: float


class Difference(NamedTuple):
    """A result of the port that is not the original's."""

    what: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.what} {self.name}: {self.text}".replace(" :", ":")


class Fresh(NamedTuple):
    """Arguments of a run: what the function gets, and the leaves of the graph by name."""

    args: tuple[Any, ...]
    leaves: dict[str, Tensor]
    given: dict[str, Tensor]


def names_of(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of the first arguments of a function."""
    try:
        kinds = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        kinds = ()
    names = [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return (*names, *(f"args[{i}]" for i in range(len(names), count)))


def inputs_of(sample: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a sample, which is given by argument, by name."""
    found = ((name, tree_flatten_with_path(part)[0]) for name, part in sample.items())
    return {f"{name}{keystr(path)}": x for name, leaves in found for path, x in leaves if isinstance(x, Tensor)}


def fresh(sample: Mapping[str, Any], wanted: Callable[[Tensor], bool]) -> Fresh:
    """Copies of a sample. Who changes one in place may: it is no leaf, but made from one."""
    named = {id(x): name for name, x in inputs_of(sample).items()}
    leaves: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        name = named[id(x)]
        if name not in given:
            leaf = x.detach().clone().requires_grad_(is_float(x) and wanted(x))
            if leaf.requires_grad:
                leaves[name] = leaf
            given[name] = leaf.clone()
        return given[name]

    return Fresh(tuple(tree_map(copy, part) for part in sample.values()), leaves, given)


def seed(number: int) -> None:
    """Seeds the random numbers of torch, Python and numpy."""
    torch.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


def random_state() -> bytes:
    """How the random numbers of torch, Python and numpy go on."""
    numpy = sys.modules.get("numpy")
    return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), numpy and numpy.random.get_state()))


def go_on_from(state: bytes) -> None:
    """Makes random numbers go on as they would have where `random_state` was asked."""
    of_torch, of_python, of_numpy = pickle.loads(state)
    torch.set_rng_state(torch.from_numpy(of_torch))
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def run(
    function: Callable[..., Any],
    arguments: Fresh,
    world: World,
    targets: Mapping[str, Tensor],
    number: int,
    second: bool = False,
) -> Outcome:
    """Runs a function and differentiates its results for `targets`; leaves the world as the run left it."""
    seed(number)
    try:
        with torch.enable_grad():
            result = function(*arguments.args)
            outputs = outputs_of(result)
            state = random_state()
            needs_grad = {name: x.requires_grad for name, x in outputs.items() if is_float(x) and x.numel()}
            gradients = gradients_of(outputs, targets, second)
            found: Mapping[str, Tensor | None] | str = ""
            if second:
                found = _second(gradients, targets)
    except (Exception, SystemExit) as error:
        return Outcome(error)
    left = {name: x.detach() for name, x in arguments.given.items()} | world.now()
    return Outcome(None, {name: _cut(x) for name, x in outputs.items()}, needs_grad, gradients, found, left, state)


def outputs_of(result: Any) -> dict[str, Any]:
    """The leaves of a result by name."""
    return {f"output{keystr(path)}": x for path, x in tree_flatten_with_path(result)[0]}


def gradients_of(
    outputs: Mapping[str, Any], targets: Mapping[str, Tensor], create_graph: bool = False
) -> dict[str, Tensor | None]:
    """The gradients of float outputs, against random cotangents that the shapes of the outputs alone decide."""
    draw = torch.Generator().manual_seed(0)
    roots, cotangents = [], []
    for x in outputs.values():
        if is_float(x):
            cotangent = torch.randn(x.shape, dtype=x.dtype, generator=draw)
            if x.requires_grad:
                roots.append(x)
                cotangents.append(cotangent.to(x.device))
    if not roots or not targets:
        return dict.fromkeys(targets)
    found = torch.autograd.grad(
        roots, list(targets.values()), cotangents, allow_unused=True, create_graph=create_graph, retain_graph=True
    )
    return dict(zip(targets, found, strict=True))


def _second(gradients: Mapping[str, Tensor | None], targets: Mapping[str, Tensor]) -> Mapping[str, Tensor | None] | str:
    try:
        return gradients_of({name: x for name, x in gradients.items() if x is not None}, targets)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]


def _cut(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def compare(expected: Outcome, found: Outcome, start: Mapping[str, Any], tolerance: Closeness) -> list[Difference]:
    """Finds what differs between two runs, neither of which failed; `start` is what they could change, as it was."""
    if [*found.outputs] != [*expected.outputs]:
        text = f"the original gives {listed(expected.outputs)}; the port gives {listed(found.outputs)}"
        return [Difference("structure of the results", "", text)]
    differences = _unequal("value of", expected.outputs, found.outputs, tolerance)
    differences += [
        Difference("requires_grad of", name, f"{found.needs_grad[name]}, the original's is {wants}")
        for name, wants in expected.needs_grad.items()
        if found.needs_grad.get(name, wants) != wants
    ]
    differences += _unequal("gradient of", *_without_none(expected.gradients, found.gradients), tolerance)
    if isinstance(expected.second, Mapping) and not differences:  # else they differ, too, and say nothing new
        if isinstance(found.second, Mapping):
            looser = Closeness(tolerance.relative * 10, tolerance.absolute * 10)
            differences += _unequal("second derivative for", *_without_none(expected.second, found.second), looser)
        else:
            differences.append(Difference("second derivatives", "", f"the port has none: {found.second}"))
    differences += _effects(expected.left, found.left, start, tolerance)
    if expected.random_state != found.random_state:
        differences.append(Difference("random numbers", "", "the port draws more, fewer or others of them"))
    return differences


def listed(outputs: Mapping[str, Any]) -> str:
    """The names of results in a row."""
    return ", ".join(outputs) or "no output"


def _without_none(
    expected: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Gradients of both, with zeros for those that one of them has and the other has not."""
    pairs = {name: as_zeros(x, found.get(name)) for name, x in expected.items()}
    return {name: a for name, (a, _) in pairs.items()}, {name: b for name, (_, b) in pairs.items()}


def as_zeros(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Two gradients, with zeros where one is None: no gradient is one of zeros."""
    return (torch.zeros_like(b) if a is None and b is not None else a), (
        torch.zeros_like(a) if b is None and a is not None else b
    )


def _unequal(
    what: str, expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: Closeness
) -> list[Difference]:
    pairs = ((name, x, found.get(name)) for name, x in expected.items())
    return [Difference(what, name, text) for name, a, b in pairs if (text := unlike(a, b, tolerance))]


def unlike(expected: Any, found: Any, tolerance: Closeness) -> str:
    """In what two results differ, or "" where they are close."""
    if not (isinstance(expected, Tensor) and isinstance(found, Tensor)):
        return "" if _equal(expected, found) else f"{_shown(found)}, the original's is {_shown(expected)}"
    for fact in ("shape", "dtype", "device"):
        a, b = getattr(expected, fact), getattr(found, fact)
        if a != b:
            return f"{fact} {_plain(b)}, the original's is {_plain(a)}"
    if not (bad := wrong_at(expected, found, tolerance)).any():
        return ""
    at = tuple(bad.nonzero()[0].tolist())
    found, expected = found.detach(), expected.detach()
    largest = (found.double() - expected.double() if not found.is_complex() else found - expected).abs()[bad].max()
    many = f"{int(bad.sum()):,} of {bad.numel():,} numbers differ, by up to {float(largest):.3g}; "
    return f"{many if bad.dim() else ''}{found[at].item():.6g}, the original's is {expected[at].item():.6g}" + (
        f" at {list(at)}" if at else ""
    )


def wrong_at(expected: Tensor, found: Tensor, tolerance: Closeness) -> Tensor:
    """Where two tensors of one shape are too far apart; NaN is close to NaN."""
    if not is_float(expected):
        return expected != found
    finite = expected.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    scale = float(finite.max()) if finite.numel() else 0.0
    return ~torch.isclose(
        found.detach(), expected.detach(), tolerance.relative, tolerance.absolute * max(scale, 1e-30), equal_nan=True
    )


def _shown(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def _equal(a: Any, b: Any) -> bool:
    """Whether two things that are not both tensors are of one type and equal; NaN is equal to NaN."""
    if a is b or type(a) is not type(b):
        return a is b
    try:
        return bool(a == b or (a != a and b != b))
    except Exception:
        return False


def _plain(x: Any) -> Any:
    return tuple(x) if isinstance(x, torch.Size) else x


def _effects(
    expected: Mapping[str, Any], found: Mapping[str, Any], start: Mapping[str, Any], tolerance: Closeness
) -> list[Difference]:
    """Finds what one of two runs changed and the other did not change alike; that is after either, and before."""
    differences: list[Difference] = []
    for name in {**expected, **found}:
        sides = [side[name] for side in (expected, found) if name in side]
        if all(name in start and not unlike(start[name], x, tolerance) for x in sides):
            continue  # it is what it was, on each side that has it
        apart = unlike(sides[0], sides[1], tolerance) if len(sides) == 2 else ""
        if len(sides) == 2 and not apart:
            continue
        if name not in expected and name not in start:
            continue  # something of the port's own
        changed = name in expected and (name not in start or bool(unlike(start[name], expected[name], tolerance)))
        text = "the original changes it" if changed else "the original does not change it"
        if apart:
            text += f": {apart}"
        elif changed:
            text += ", and the port reaches nothing of this name"
        differences.append(Difference("side effect on", name, text))
    return differences
