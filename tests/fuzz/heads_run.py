"""Random attention on packed tensors beside each row alone: `python -W ignore tests/fuzz/heads_run.py --programs 500`.

Lines are drawn by `heads.py` and run at once, on packed inputs and on every row. A line that is refused is left out and
counted by its message. What differs from the rows, and errors that name no function of torch, are finds; they come with
the program that made them. At the end of a program gradients are compared, and a row of NaN is put in.

    python -W ignore tests/fuzz/heads_run.py --only 17      one seed, with its program
"""

import argparse
import re
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from tensorloop._common.errors import Fact  # noqa: E402
from tensorloop.packed import PackedTensor  # noqa: E402
from tests.fuzz.heads import SHARES  # noqa: E402
from tests.fuzz.heads_shapes import Line, Writer, is_ragged  # noqa: E402

D = torch.float64
ALL = -1  # in place of the number of a row
LENGTHS = [([3, 0, 4, 1], [2, 3, 1, 0]), ([2, 2], [3, 3]), ([1], [2]), ([4, 2, 5], [4, 2, 5]), ([3, 3, 1], [1, 4, 4])]
LENGTHS += [([], []), ([0, 2], [1, 0])]


class Shared:
    """What packed and single rows have together: layers, weights, tables, by name or by number."""

    def __init__(self, seed: int, lens: dict[str, list[int]]) -> None:
        self.lens, self.weights, self.tables = lens, {}, {}
        torch.manual_seed(seed)
        make = {"dropout": 0.0, "batch_first": True, "dtype": D}
        self.layers = nn.ModuleDict(
            {
                "mha": nn.MultiheadAttention(12, 2, **make),
                "encoder": nn.TransformerEncoderLayer(12, 2, 8, **make),
                "encoder_first": nn.TransformerEncoderLayer(12, 3, 8, norm_first=True, **make),
                "decoder": nn.TransformerDecoderLayer(12, 2, 8, **make),
            }
        )

    def parameters(self) -> list[Tensor]:
        """All that gradients are compared of."""
        return [*self.weights.values(), *self.layers.parameters()]

    def weight(self, *shape: int) -> Tensor:
        """The weight of this shape."""
        if shape not in self.weights:
            made = torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(prod(shape)))
            self.weights[shape] = (made / shape[-1] ** 0.5).requires_grad_()
        return self.weights[shape]

    def given(self, row: int, number: int, kind: str, *dims: Any) -> Tensor:
        """A table of the longest rows, or what a row sees of it."""
        longest = {"B": len(self.lens["T"]), **{k: max(v, default=0) for k, v in self.lens.items()}}
        shape: list[Any] = [longest.get(d, d) for d in dims]
        if kind == "heads":
            shape[0] *= 2
        key = number, kind, *dims
        if key not in self.tables:
            made = torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(number))
            self.tables[key] = made if kind != "bool" else made > -0.5
        found = self.tables[key].clone() if number % 2 else self.tables[key]
        if row == ALL:
            return found
        step = 2 if kind == "heads" else 1
        for i, d in enumerate(dims):
            if d == "B":
                found = found.narrow(i, row * step, step)
            elif d in self.lens:
                found = found.narrow(i, 0, self.lens[d][row])
        return found


class Side:
    """The variables of a program on one kind of input: packed, or the row of this number."""

    def __init__(self, shared: Shared, inputs: dict[str, Any], row: int) -> None:
        self.row, self.lens = row, shared.lens
        one = slice(None) if row == ALL else slice(row, row + 1)
        self.names: dict[str, Any] = {
            **{"torch": torch, "F": F, "nn": nn, "weight": shared.weight, **shared.layers},
            **{"given": lambda *args: shared.given(row, *args)},
            **{f"lens_{k}": torch.tensor(v, dtype=torch.int64)[one] for k, v in shared.lens.items()},
            **inputs,
        }
        exec("B, T, _ = x.shape\nU = y.shape[1]", self.names)

    def run(self, text: str) -> Exception | None:
        """Runs a line; its error."""
        try:
            with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels have no second derivative
                exec(text, self.names)
        except Exception as error:
            return error
        return None


class Find(NamedTuple):
    """What is wrong, and the program."""

    what: str
    lines: list[str]


class Trial:
    """One program: its lines, those that were refused, and finds."""

    def __init__(self, seed: int) -> None:
        self.writer = Writer(seed, SHARES)
        t, u = LENGTHS[self.writer.random.randrange(len(LENGTHS))]
        self.lens = {"T": t, "U": u}
        self.shared = Shared(seed, self.lens)
        gen = torch.Generator().manual_seed(seed)
        self.values = {
            k: torch.randn(sum(self.lens[d]), 12, dtype=D, generator=gen) for k, d in (("x", "T"), ("y", "U"))
        }
        for v in self.values.values():
            v.requires_grad_()
        self.packed = self.side(self.values)
        self.rows = [self.row(b) for b in range(len(t))]
        # Of no rows there is nothing to compare with; a padded batch of none says which lines torch takes.
        self.judges = self.rows or [Side(self.shared, {k: v[None, :0][:0] for k, v in self.values.items()}, ALL)]
        self.lines: list[str] = []
        self.refused: Counter[str] = Counter()
        self.finds: list[Find] = []
        self.taken: Counter[str] = Counter()

    def side(self, values: dict[str, Tensor]) -> Side:
        """The packed side."""
        packed = {k: PackedTensor(v, self.lens[d]) for (k, v), d in zip(values.items(), "TU", strict=True)}
        return Side(self.shared, packed, ALL)

    def row(self, b: int) -> Side:
        """The side of one row, (1, T, D)."""
        inputs = {}
        for (k, v), d in zip(self.values.items(), "TU", strict=True):
            begin = sum(self.lens[d][:b])
            inputs[k] = v[begin : begin + self.lens[d][b]][None]
        return Side(self.shared, inputs, b)

    def go(self, most: int) -> "Trial":
        """Draws and runs lines, then compares gradients."""
        for _ in range(most):
            name, line = self.writer.draw()
            self.step(name, line)
            if self.finds:
                return self
        self.gradients()
        self.nan_row()
        return self

    def step(self, name: str, line: Line) -> None:
        """A line on both sides."""
        text = f"{name} = {line.text}"
        if line.fresh:
            text += "\n" + line.fresh.format(name)
        errors = [e for side in self.judges if (e := side.run(text)) is not None]
        error = self.packed.run(text)
        if error is not None:
            if not errors:
                self.note(error, text)
            return
        if errors:
            self.taken[_short(errors[0])] += 1
            return
        if "scaled_dot_product" in text and any(bool(side.names[name].isnan().any()) for side in self.rows):
            return  # torch's fast kernel gives 0 for queries of NaN that see few keys
        self.lines.append(text)
        wrong = self.compare(name, line)
        if wrong:
            self.finds.append(Find(wrong, self.program()))
        self.writer.keep(name, line)

    def note(self, error: Exception, text: str) -> None:
        """An error of the packed side alone."""
        if _is_helpful(error):
            self.refused[_short(error)] += 1
        else:
            self.finds.append(Find(f"{type(error).__name__}: {error}", [*self.program(), text]))

    def program(self) -> list[str]:
        """Its lens and lines."""
        return [f"# {self.lens}", *self.lines]

    def compare(self, name: str, line: Line) -> str:
        """What of a variable is not as in the rows."""
        ours = self.packed.names[name]
        ragged = any(is_ragged(d) for d in line.dims)
        if ours.dim() != len(line.dims):
            return f"{name} has {ours.dim()} dims, {line.dims} expected"
        if ragged and isinstance(ours, Tensor):
            return f"{name} is an ordinary tensor of {tuple(ours.shape)}, {line.dims} expected"
        padded = ours.pad() if ragged else ours
        for side in self.rows:
            want = side.names[name]
            got = _cut(padded, want, line.dims, side.row)
            if got.shape != want.shape or got.dtype != want.dtype:
                return f"{name} of row {side.row}: {_show(got)}, expected {_show(want)}"
            if not torch.allclose(got, want, rtol=1e-5, atol=1e-7, equal_nan=True):
                return f"{name} of row {side.row} differs: {_show(got)}, expected {_show(want)}"
        return self.compare_lens(ours, name, line) if ragged else ""

    def compare_lens(self, ours: Any, name: str, line: Line) -> str:
        """Whether the lens are those of the rows."""
        if not hasattr(ours, "lens") or len(self.rows) == 1:  # any dim of size 1 may be the batch of one row
            return ""
        at = next(i for i, d in enumerate(line.dims) if is_ragged(d))
        heads = next((d[1] for d in line.dims if isinstance(d, tuple)), 1)
        want = [side.names[name].shape[at] for side in self.rows for _ in range(heads)]
        return "" if ours.lens.tolist() == want else f"{name} has lens {ours.lens.tolist()}, {want} expected"

    def gradients(self) -> None:
        """First and second ones of the last few variables."""
        losses = [torch.zeros((), dtype=D), torch.zeros((), dtype=D)]
        for v in self.writer.pool[2:][-3:]:
            ours = self.packed.names[v.name]
            if ours.dtype != D:
                continue
            padded = (ours if isinstance(ours, Tensor) else ours.pad()).nan_to_num(0, 0, 0)
            factor = torch.randn(padded.shape, dtype=D)
            losses[0] = losses[0] + (padded.clamp(-9, 9) * factor).sum()
            for side in self.rows:
                want = side.names[v.name]
                found = want.nan_to_num(0, 0, 0).clamp(-9, 9) * _cut(factor, want, v.dims, side.row)
                losses[1] = losses[1] + found.sum()
        self.compare_gradients(losses, 1)

    def compare_gradients(self, losses: list[Tensor], order: int) -> None:
        """Those of both sides."""
        inputs = [*self.values.values(), *self.shared.parameters()]
        if any(not x.requires_grad for x in losses):
            return
        try:
            ours = torch.autograd.grad(losses[0], inputs, allow_unused=True, create_graph=order < 2)
        except Exception as error:
            self.finds.append(Find(f"backward {order}: {type(error).__name__}: {error}", self.program()))
            return
        try:
            theirs = torch.autograd.grad(losses[1], inputs, allow_unused=True, create_graph=order < 2)
        except RuntimeError:  # torch has no second derivative of some views
            return
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a, b = (torch.zeros_like(inputs[i]) if g is None else g for g in (a, b))
            known = ~b.isnan()
            if not torch.allclose(a[known], b[known], rtol=1e-4, atol=1e-6):
                what = [*self.values, *map(str, self.shared.weights), *["a layer's weight"] * 99][i]
                self.finds.append(Find(f"gradient {order} of {what}: {_show(a)}, {_show(b)} expected", self.program()))
                return
        if order == 1:
            zero = torch.zeros((), dtype=D)
            both = [[g for g in gs if g is not None and g.requires_grad] for gs in (ours, theirs)]
            self.compare_gradients([sum(((g * g.sin()).sum() for g in gs), zero) for gs in both], 2)

    def nan_row(self) -> None:
        """A row of NaN changes no other."""
        rows = [b for b, n in enumerate(self.lens["T"]) if n]
        if not rows:
            return
        bad = rows[self.writer.random.randrange(len(rows))]
        values = {}
        for (k, v), d in zip(self.values.items(), "TU", strict=True):
            values[k] = v.detach().clone()
            begin = sum(self.lens[d][:bad])
            values[k][begin : begin + self.lens[d][bad]] = torch.nan
        spoilt = self.side(values)
        for text in self.lines:
            if (error := spoilt.run(text)) is not None:
                self.finds.append(Find(f"with a row of NaN: {type(error).__name__}: {error}", [*self.program(), text]))
                return
        for v in self.writer.pool[2:]:
            ours = [side.names[v.name] for side in (spoilt, self.packed)]
            ours = [x if isinstance(x, Tensor) else x.pad() for x in ours]
            for side in self.rows:
                if side.row != bad:
                    got, want = (_cut(x, side.names[v.name], v.dims, side.row) for x in ours)
                    if not torch.allclose(got, want, equal_nan=True):
                        self.finds.append(
                            Find(f"{v.name} of row {side.row} changed by NaN in row {bad}", self.program())
                        )
                        return


def _show(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} {x.flatten()[:5].tolist()}"


def _cut(padded: Tensor, want: Tensor, dims: tuple[Any, ...], row: int) -> Tensor:
    for i, d in enumerate(dims):
        if d == "B" or isinstance(d, tuple):
            n = 1 if d == "B" else d[1]
            padded = padded.narrow(i, row * n, n)
        elif is_ragged(d):
            padded = padded.narrow(i, 0, min(want.shape[i], padded.shape[i]))
    return padded


def _short(error: Exception) -> str:
    """Its text without what is in brackets and numbers."""
    text = re.sub(r"\([^()]*\)|\[[^\]]*\]|\d+", "#", str(error).split("\n")[0])
    return f"{type(error).__name__}: {text[:180]}"


def _is_helpful(error: Exception) -> bool:
    """Whether it is one of ours: it names a function, a reason and a cure."""
    if not isinstance(error, (TypeError, ValueError, IndexError, AttributeError)) or isinstance(error, Fact):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return (
        last is not None
        and "tensorloop" in last.tb_frame.f_code.co_filename
        and re.search(": .*;|; ", str(error)) is not None
    )


def run(seed: int, lines: int) -> Trial:
    """The program of a seed; an error of the comparison itself is a find too."""
    trial = Trial(seed)
    try:
        return trial.go(lines)
    except Exception as error:
        trial.finds.append(Find(f"comparing: {type(error).__name__}: {error}", trial.program()))
    return trial


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for; 1 where there are finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="how many seeds, from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--lines", type=int, default=25, help="lines drawn for each program")
    parser.add_argument("--only", type=int, help="one seed, with its program")
    asked = parser.parse_args(arguments)
    seeds = range(asked.seed, asked.seed + asked.programs) if asked.only is None else [asked.only]
    refused: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    finds: dict[str, list[tuple[int, Find]]] = {}
    kept = 0
    for seed in seeds:
        trial = run(seed, asked.lines)
        refused += trial.refused
        taken += trial.taken
        kept += len(trial.lines)
        if asked.only is not None:
            print("\n".join(trial.program()))
        for find in trial.finds:
            finds.setdefault(_short(ValueError(find.what))[:90], []).append((seed, find))
    _print(finds, {"refused": refused, "taken where torch refuses": taken})
    counts = f"{sum(refused.values())} refused, {sum(map(len, finds.values()))} finds"
    print(f"\n{len(seeds)} programs, {kept} lines kept, {counts}")
    return int(bool(finds))


def _print(finds: dict[str, list[tuple[int, Find]]], counters: dict[str, Counter[str]]) -> None:
    for group in finds.values():
        _, find = group[0]
        print(f"\n== {len(group)} times, seeds {[seed for seed, _ in group][:8]}: {find.what[:600]}")
        print("\n".join(find.lines))
    for what, counter in counters.items():
        print(f"\n{what}:")
        print("\n".join(f"{n:5d} {text}" for text, n in counter.most_common(60)))


if __name__ == "__main__":
    sys.exit(main())
