"""A module of another package on packed rows beside itself on every row alone: values and gradients, in float64.

The module's code is run as it is. What calls it gives the packed tensor where padded code gives the padded one, and
masks or lengths where the module asks for some.
"""

import copy
import inspect
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tensorloop as tl

LENS = (7, 12, 1, 9)
WIDTH = 8
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}  # the most that results may be apart, relative to the largest


class Batch(NamedTuple):
    """What a module is called with: packed rows, or one row alone."""

    x: Any
    """(B, T*, ...) packed, or (1, T, ...)."""
    lens: Tensor
    """(B,)"""

    @property
    def padding(self) -> Tensor:
        """(B, T) of the longest row, true behind the ends."""
        return torch.arange(int(self.lens.max())) >= self.lens[:, None]

    @property
    def causal(self) -> Tensor:
        """(T, T) of the longest row, true where a later step would be seen."""
        steps = int(self.lens.max())
        return torch.ones(steps, steps, dtype=torch.bool).triu(1)


class Edit(NamedTuple):
    """Lines to change in one function of a package, where a module is refused as it is."""

    path: str
    """The function, or a method as Class.method, by its dotted name."""
    lines: tuple[tuple[str, str], ...]
    """Each as it is and as it is to be; the package's indentation is not looked at."""

    @property
    def diff(self) -> str:
        """For the page."""
        return "\n".join([f"# {self.path}", *(f"-{old}\n+{new}" for old, new in self.lines)])

    @contextmanager
    def made(self) -> Iterator[None]:
        """The function with these lines in its place."""
        owner, name = _find_owner(self.path)
        before = vars(owner)[name]
        source = textwrap.dedent(inspect.getsource(before))
        for old, new in self.lines:
            if source.count(old) != 1:
                raise AssertionError(f"{self.path} has {source.count(old)} times: {old}")
            source = source.replace(old, new)
        found: dict[str, Any] = {}
        exec(compile(source, self.path, "exec"), before.__globals__, found)
        setattr(owner, name, found[name])
        try:
            yield
        finally:
            setattr(owner, name, before)


class Module(NamedTuple):
    """A module of the zoo, and how it is called."""

    package: str
    name: str
    make: Callable[[], nn.Module]
    call: Callable[[Any, Batch], Any] = lambda module, batch: module(batch.x)
    """Gives (B, T*, ...), or something else that has rows, in the order of the batch."""
    lens: tuple[int, ...] = LENS
    features: tuple[int, ...] = (WIDTH,)
    classes: int = 0
    """Not 0: the input is (B, T*) of that many classes."""
    train: bool = True
    """Whether a row in training does not depend on the others: false of batch norm."""
    dtype: torch.dtype = torch.float64
    """float32 of modules that take no other."""
    note: str = ""
    edits: tuple[Edit, ...] = ()


class Found(NamedTuple):
    """What came of a module."""

    result: str
    """"unchanged", "changed" (lines of it), "refused" or "wrong"."""
    apart: float = 0.0
    error: str = ""
    line: str = ""
    """Of the module's package, where it stopped as it is."""
    changed: int = 0
    """Lines."""


def check(module: Module) -> Found:
    """Runs a module as it is; where it is refused and lines to change are known, with those."""
    found = _check(module, ())
    if found.result != "refused" or not module.edits:
        return found
    again = _check(module, module.edits)
    if again.result == "unchanged":
        again = again._replace(result="changed", changed=sum(len(edit.lines) for edit in module.edits))
    return again._replace(error=found.error, line=found.line)


def _check(module: Module, edits: Sequence[Edit]) -> Found:
    """In eval, and in training where a row is by itself there."""
    torch.manual_seed(0)
    made = module.make().to(module.dtype)
    with torch.no_grad():
        for weight in made.parameters():  # weights of 0 hide what is behind them
            weight.add_(torch.randn_like(weight) * 0.1)
    apart = 0.0
    for training in (False, True) if module.train else (False,):
        made.train(training)
        expected = _run_alone(module, copy.deepcopy(made))
        with ExitStack() as stack:
            for edit in edits:
                stack.enter_context(edit.made())
            try:
                found = _run_packed(module, copy.deepcopy(made))
            except Exception as error:
                return Found("refused", error=f"{type(error).__name__}: {error}", line=_line_of(error))
        apart = max(apart, *_compare(found, expected))
    return Found("unchanged" if apart <= CLOSE[module.dtype] else "wrong", apart)


def _find_owner(path: str) -> tuple[Any, str]:
    """What holds a function, and its name there."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:-1]:
            owner = getattr(owner, name)
        return owner, parts[-1]
    raise ModuleNotFoundError(path)


def _draw(module: Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if module.classes:
        return [torch.randint(module.classes, (n,), generator=generator) for n in module.lens]
    return [
        torch.randn(n, *module.features, generator=generator, dtype=torch.float64).to(module.dtype) for n in module.lens
    ]


def _run_packed(module: Module, made: nn.Module) -> list[Any]:
    """The rows of the result, and the gradients of the input's rows and of every parameter."""
    lens = torch.tensor(module.lens)
    values = torch.cat(_draw(module)).requires_grad_(not module.classes)
    rows = _rows_of(module.call(made, Batch(tl.PackedTensor(values, lens), lens)), lens)
    grads = _differentiate(rows, [values], made)
    return [*rows, *(grads[0].split(list(module.lens)) if not module.classes else ()), *grads[1:]]


def _run_alone(module: Module, made: nn.Module) -> list[Any]:
    """The same of every row by itself."""
    given = [x.requires_grad_(not module.classes) for x in _draw(module)]
    rows: list[Tensor] = []
    for x in given:
        lens = torch.tensor([len(x)])
        rows += _rows_of(module.call(made, Batch(x[None], lens)), lens)
    grads = _differentiate(rows, given, made)
    count = len(given)
    return [*rows, *(grads[:count] if not module.classes else ()), *grads[count:]]


def _rows_of(out: Any, lens: Tensor) -> list[Tensor]:
    """Rows of a packed result, of a view with the batch first, of a tensor (B, ...), or of (padded, lens)."""
    if isinstance(out, tuple):
        padded, ends = out
        return [row[: int(n)] for row, n in zip(padded, ends, strict=True)]
    found = list(out.unbind(0))
    if len(found) != len(lens):
        raise AssertionError(f"{len(found)} rows for {len(lens)}")
    return found


def _differentiate(rows: list[Tensor], given: list[Tensor], made: nn.Module) -> list[Tensor]:
    """Gradients of `given` and the parameters for directions that depend on the row alone."""
    loss = torch.zeros(())
    for b, row in enumerate(rows):
        direction = torch.randn(row.shape, generator=torch.Generator().manual_seed(b), dtype=row.dtype)
        loss = loss + (row * direction).sum()
    wanted = [x for x in (*given, *made.parameters()) if x.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
    return [next(found) if x.requires_grad else x for x in (*given, *made.parameters())]


def _compare(found: list[Any], expected: list[Any]) -> list[float]:
    """How far apart, relative to the largest number of each; infinity where shapes differ or one is not finite."""
    apart = [0.0]
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            return [float("inf")]
        if b.numel() and (a != b).any():
            worst = ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
            apart.append(worst if worst == worst else float("inf"))
    return apart


def _line_of(error: Exception) -> str:
    """The last line that is neither of torch nor of tensorloop."""
    ours = (str(Path(tl.__file__).parent), str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if not f.filename.startswith(ours)), frames[-1])
    path = Path(frame.filename)
    return f"{path.parent.name}/{path.name}:{frame.lineno}: {frame.line}"
