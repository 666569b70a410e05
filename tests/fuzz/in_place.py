"""Random programs that change packed tensors in place: `python -W ignore tests/fuzz/in_place.py --programs 2000`.

A program takes views of packed tensors, changes some of them and their sources in place, and gives back every variable
that it has. It is run on the packed inputs and on each row alone, in float64. What differs, in values or gradients, is
a find. A line that is refused by name, or that torch itself does not take, is left out and counted.

    python -W ignore tests/fuzz/in_place.py --only 17      one seed, with its program
"""

import argparse
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tensorloop.packed import PackedTensor  # noqa: E402

LENS = [[5, 2, 9], [3, 3], [4], [2, 6, 3, 2], [7, 2]]  # two at least: steps 0, 1, -1 and -2 are everywhere
GRAD_MODES = {"enable_grad": 6, "no_grad": 2, "inference_mode": 1}

# Of each kind of variable the views there are: the text, and the kind of what it gives. A kind is (dims, steps): two
# variables of equal kinds have equal shapes. Dims: "btf" (B, T, 4), "bft" channels first, "bhtd" heads first, "bhts"
# scores, "bf" a step, "bth" (B, T, 2), "bt" one feature.
VIEWS: dict[str, list[tuple[str, str, str]]] = {
    "btf": [
        *[(f"{{0}}[:, {s}]", "btf", s) for s in ("1:", ":-1", ":2", "::2", "-2:", "1::2")],
        *[("{0}.narrow(1, 0, 2)", "btf", ":2"), ("{0}.split(2, 1)[0]", "btf", ":2")],
        *[("{0}.tensor_split([1], 1)[1]", "btf", "1:"), ("{0}.tensor_split([2], 1)[0]", "btf", ":2")],
        *[("{0}[:, 0]", "bf", ""), ("{0}[:, -1]", "bf", ""), ("{0}.select(1, 1)", "bf", ""), ("{0}[:, 1]", "bf", "")],
        *[("{0}[..., :2]", "bth", ""), ("{0}[:, 1:, 1:3]", "bth", "1:"), ("{0}[..., 0]", "bt", "")],
        *[("{0}.transpose(1, 2)", "bft", ""), ("{0}.mT", "bft", ""), ("{0}.unflatten(-1, (2, 2))", "bthd", "")],
        *[
            ("{0}[..., [3, 1, 0, 2]]", "btf", "copy"),
            ("{0}.view_as({0})", "btf", ""),
            ("{0}.unsqueeze(-1).squeeze(-1)", "btf", ""),
            ("{0}[:]", "btf", ""),
        ],
    ],
    "bft": [
        *[("{0}.transpose(1, 2)", "btf", ""), ("{0}[:, :, 1:]", "bft", "1:"), ("{0}[..., :-1]", "bft", ":-1")],
        *[("{0}[..., 0]", "bf", ""), ("{0}[:, :, -1]", "bf", ""), ("{0}[:, 0]", "bt", "")],
        *[("{0}.contiguous()", "bft", "copy"), ("{0}.narrow(2, 0, 2)", "bft", ":2"), ("{0}.select(-1, 1)", "bf", "")],
        ("{0}[:, [3, 1, 0, 2]]", "bft", "copy"),
    ],
    "bthd": [("{0}.transpose(1, 2)", "bhtd", ""), ("{0}.flatten(2)", "btf", ""), ("{0}[:, 1:]", "bthd", "1:")],
    "bhtd": [
        *[("{0}.transpose(1, 2)", "bthd", ""), ("{0}[:, 0]", "bth", ""), ("{0}[:, :, 1:]", "bhtd", "1:")],
        *[("{0}[..., 1:, :]", "bhtd", "1:"), ("{0}.unbind(1)[1]", "bth", ""), ("{0}.contiguous()", "bhtd", "copy")],
        ("{0}[:, [1, 0]]", "bhtd", "copy"),
    ],
    "bhts": [
        *[("{0}[:, 0]", "bts", ""), ("{0}.transpose(-1, -2)", "bhts", "T"), ("{0}[..., 0]", "bht", "")],
        *[("{0}.unbind(1)[1]", "bts", ""), ("{0}.narrow(1, 1, 1)", "b1ts", ""), ("{0}.select(1, 0)", "bts", "")],
        *[("{0}[..., 0, :]", "bhs", ""), ("{0}[..., :2]", "bhts", "2"), ("{0}[..., 1:, 1:]", "bhts", "1")],
        *[("{0}[:, [1, 0]]", "bhts", "copy"), ("{0}.split([1, 1], 1)[1]", "b1ts", "")],
    ],
    "bts": [("{0}[..., 1:]", "bts", "1"), ("{0}.mT", "bts", "T"), ("{0}.unsqueeze(1)", "b1ts", "")],
    "b1ts": [("{0}.squeeze(1)", "bts", "")],
    "bth": [("{0}[:, 1:]", "bth", "1:"), ("{0}[..., 0]", "bt", ""), ("{0}[:, 0, :1]", "b1", "")],
    "bt": [("{0}[:, 1:]", "bt", "1:"), ("{0}[:, 0]", "b", "")],
    "bf": [("{0}[:, 1:3]", "b2", ""), ("{0}.view(-1, 2, 2)", "b22", ""), ("{0}[..., 0]", "b", "")],
    "bht": [],
    "bhs": [],
    "b2": [("{0}[:, 0]", "b", "")],
    **{"b22": [], "b1": [], "b": []},
}
# In place; {1} is of the same kind as {0}.
CHANGES = [
    *("{0}.zero_()", "{0}.fill_(0.5)", "{0}.mul_(2)", "{0}.clamp_(min=0)", "{0}.add_({1})", "{0}.copy_({1})"),
    *("{0} += 1", "{0} -= {1}", "{0} *= {1}", "{0} /= 2", "{0} += {0}.sin()", "{0} **= 2"),
    *("F.relu({0}, inplace=True)", "nn.ReLU(inplace=True)({0})", "F.leaky_relu({0}, 0.1, True)", "F.relu_({0})"),
    *("nn.Dropout(0.0, inplace=True)({0})", "nn.SiLU(inplace=True)({0})", "F.dropout({0}, 0.5, False, True)"),
    *("{0}.masked_fill_({1} > 0, 0.5)", "{0}.tanh_()", "{0}.addcmul_({1}, {1}, value=0.5)", "{0}[...] = 0.25"),
    *("{0}[...] = {1} * 2", "{0}.detach().mul_(2)"),
]
# In place in one part of these dims; {1} is of the same kind.
IN_PARTS: dict[str, list[str]] = {
    "btf": [
        *("{0}[:, 1:] = 0", "{0}[:, 1:] = {1}[:, :-1].clone()", "{0}[:, 1:] += {1}[:, 1:]", "{0}[:, 0] = 0.5"),
        *("{0}[:, -1] = {1}[:, 0]", "{0}[:, 0] *= 2", "{0}[..., :2] = 0", "{0}[..., 0] -= 1", "{0}[{1} > 0] = 0.5"),
        *("{0}[:, 1:].zero_()", "{0}[:, 1:].copy_({1}[:, :-1].clone())", "{0}[:, ::2].mul_(3)", "{0}[:, 0].fill_(0.5)"),
        *(
            "{0}[:, 0, 1:3].zero_()",
            "{0}[:, :2, 0].add_(1)",
            "F.relu({0}[:, :-1], inplace=True)",
            "for r in {0}: r.mul_(2)",
        ),
        *(
            "{0}.narrow(1, 0, 2).neg_()",
            "for r in {0}[:, 1:]: r.zero_()",
            "{0}[:, [0, -1]] = 0.5",
            "{0}[:, 1:][:, :1] = 0",
        ),
        *("{0}.transpose(1, 2)[:, 0] = 0.5", "{0}.flatten(0, 1).mul_(2)", "{0}[:, 1:].flatten(0, 1).zero_()"),
        *("{0}.unfold(1, 2, 2).mul_(2)", "{0}.transpose(1, 2)[..., 1:] += 1", "{0}.select(1, 0).sub_({1}[:, 1])"),
        *("{0} -= {1}.mean(-1, True)", "{0} += {1}.amax(1, True)"),
    ],
    "bft": [
        *("{0}[:, 0] = 0.5", "{0}[..., 1:] = 0", "{0}[..., 1:] += 1", "{0}[:, :, 0] = {1}[:, :, 1]"),
        *(
            "{0} -= {1}.mean(-1, True)",
            "{0}[..., 0] *= 2",
            "{0}[:, 1:3] = {1}[:, :2].clone()",
            "{0}[{1} > 0] = 0.5",
            "{0}[:, 0, 1:] = 0.5",
        ),
    ],
    "bhtd": [
        *("{0}[..., 0] = 0", "{0}[:, 0] = {1}[:, 1]", "{0}[:, :, 1:] = 0.5", "{0}[:, :, 0] = 2", "{0}[..., :1] += 1"),
        *("{0}[:, 1, 1:] *= 2", "{0}[:, :, -1].zero_()", "{0}[{1} > 0] = 0.5"),
    ],
    "bhts": [
        *("{0}[..., 0] = 0.5", "{0}[:, 0] = {1}[:, 1]", "{0}[..., 1:] = 0", "{0}[:, 1] += 1", "{0}[..., 0, :] = 1"),
        *("{0}[..., 1:, :-1].zero_()", "{0}[:, 0].mul_(2)", "{0}[{1} > 0] = 0.5", "{0}[..., :2].add_({1}[..., :2])"),
        *("{0} -= {0}.amax(-1, True)", "{0}.transpose(-1, -2)[..., 0] = 0", "for r in {0}: r.zero_()"),
        *("{0}.diagonal(dim1=-2, dim2=-1).fill_(1)", "{0}[:, :, [0, 1], [0, 1]] = 1"),
    ],
    "bts": ["{0}[..., 0] = 1", "{0}[:, [0, 1], [0, 1]] = 1", "{0}[:, 0] = 0.5", "{0}.diagonal(0, 1, 2).zero_()"],
    "bth": ["{0}[:, 1:] = {1}[:, :-1].clone()", "{0}[..., 0] = 0.5", "{0}[:, 0].zero_()"],
    "bf": ["{0}[:, 1:].zero_()", "{0}[..., 0] = 0.5", "{0}[:, :2] += {1}[:, 2:]", "{0}.view(-1, 2, 2)[:, 0].mul_(2)"],
}
# Nothing in place.
NEW = ["{0}.sin()", "{0} + {1}", "{0} * 0.5", "{0}.clone()", "{0} - {1}", "torch.zeros_like({0})", "{0}.exp()"]


class Var(NamedTuple):
    """A variable, and its kind: its dims, and which steps it has."""

    name: str
    kind: tuple[str, ...]


# Heads and scores, with which some programs begin.
FIRST = [
    ("h = x.unflatten(-1, (2, 2)).transpose(1, 2)", Var("h", ("bhtd",))),
    ("s = h @ (h * 0.5).transpose(-1, -2)", Var("s", ("bhts",))),
    ("u = s.tanh()", Var("u", ("bhts",))),
]


class Draws:
    """The lines of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lens = self.random.choice(LENS)
        self.mode = self.random.choices([*GRAD_MODES], [*GRAD_MODES.values()])[0]
        self.pool = [Var("x", ("btf",)), Var("y", ("btf",))]
        self.first = FIRST[: self.random.choice([0, 0, 1, 2, 3])]

    def like(self, kind: tuple[str, ...]) -> str:
        """Another variable of this kind, or a new tensor of it."""
        found = [v.name for v in self.pool if v.kind == kind]
        return self.random.choice([*found, f"({self.random.choice(found)} * 0.7)"])

    def line(self) -> tuple[str, Var | None]:
        """A line, and the variable that it makes."""
        if self.first:
            (text, made), *self.first = self.first
            return text, made
        recent = self.pool[-4:] if self.random.random() < 0.6 else self.pool
        v = self.random.choice(recent)
        dims, *steps = v.kind
        name = f"v{len(self.pool)}"
        share = self.random.random()
        if share < (0.6 if dims == "bthd" else 0.35) and VIEWS[dims]:
            text, dims, step = self.random.choice(VIEWS[dims])
            # Of one step a row's is a view, and that of longer rows is none; a copy lies in memory as torch's does not.
            if (steps and "contiguous" in text) or ("copy" in steps and "flatten" in text):
                return f"{name} = {v.name}", Var(name, v.kind)
            kind = dims, *steps, *filter(None, [step])
            return f"{name} = {text.format(v.name)}", Var(name, kind)
        if share < 0.6 and dims == "bhtd":
            return f"{name} = {v.name} @ {self.like(v.kind)}.transpose(-1, -2)", Var(name, ("bhts", *steps))
        if share < 0.5:
            text = self.random.choice(NEW).format(v.name, self.like(v.kind))
            return f"{name} = {text}", Var(name, v.kind)
        if share < 0.53:
            return f"{name} = {v.name}", Var(name, v.kind)
        if share < 0.8 and dims in IN_PARTS:
            return self.random.choice(IN_PARTS[dims]).format(v.name, self.like(v.kind)), None
        return self.random.choice(CHANGES).format(v.name, self.like(v.kind)), None


class Side:
    """The variables of a program, on packed inputs or on the row of this number."""

    def __init__(self, x: Any, y: Any, mode: str) -> None:
        self.mode = getattr(torch, mode)
        with self.mode():
            self.names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "x": x * 1, "y": y * 1}

    def run(self, line: str) -> Exception | None:
        """Runs a line; its error."""
        try:
            with self.mode():
                exec(line, self.names)
        except Exception as error:
            return error
        return None


def row_of(out: Any, b: int) -> Tensor:
    """Row b of a packed result."""
    return out[b : b + 1] if isinstance(out, Tensor) else out.unbind()[b].unsqueeze(0)


class Trial:
    """One program of the lines that were taken; what was refused, and what was found."""

    def __init__(self, seed: int, count: int = 12) -> None:
        draws = Draws(seed)
        self.seed, self.lens, self.mode, self.vars = seed, draws.lens, draws.mode, draws.pool
        self.lines: list[str] = []
        self.refused: list[str] = []
        self.found = ""
        self._start()
        for _ in range(count):
            self._step(*draws.line())
            if self.found:
                return
        if self.mode == "enable_grad":
            self.found = self._compare_gradients()

    def _start(self) -> None:
        """The inputs, and the lines so far."""
        gen = torch.Generator().manual_seed(self.seed)
        x, y = (torch.randn(sum(self.lens), 4, dtype=torch.float64, generator=gen) for _ in "xy")
        self.leaves = [v.requires_grad_() for v in (x, y)]
        self.row_leaves = [[part.detach()[None].clone() for part in v.split(self.lens)] for v in self.leaves]
        for leaf in (leaf for leaves in self.row_leaves for leaf in leaves):
            leaf.requires_grad_()
        self.packed = Side(PackedTensor(x, self.lens), PackedTensor(y, self.lens), self.mode)
        self.rows = [Side(*row, self.mode) for row in zip(self.row_leaves[0], self.row_leaves[1], strict=True)]
        for side in (self.packed, *self.rows):
            for line in self.lines:
                side.run(line)

    def _step(self, line: str, made: Var | None) -> None:
        errors = [row.run(line) for row in self.rows]
        error = None if any(errors) else self.packed.run(line)
        if error is not None:
            self.refused.append(f"{line} | {type(error).__name__}: {str(error).splitlines()[0]}")
            if not isinstance(error, (TypeError, ValueError, AttributeError, RuntimeError, IndexError)):
                self.found = f"{line}: {error!r}"
        if error is not None or any(errors):  # what was changed before the error is put back
            self._start()
            return
        self.lines.append(line)
        if made is not None:
            self.vars.append(made)
        self.found = next(filter(None, (self._differs(v.name) for v in self.vars)), "")

    def _differs(self, name: str) -> str:
        for b, row in enumerate(self.rows):
            want = row.names[name]
            with torch.no_grad():
                got = row_of(self.packed.names[name], b)
                if got.shape != want.shape or not torch.allclose(got, want, rtol=1e-9, atol=1e-9, equal_nan=True):
                    return f"{name} of row {b} differs"
        return ""

    def _compare_gradients(self) -> str:
        def loss(side: Side, total: Any) -> Tensor:
            return sum((total(side.names[v.name].sin()) * (i + 1) for i, v in enumerate(self.vars)), torch.tensor(0.0))

        def packed_sum(x: Any) -> Tensor:
            return x.sum() if isinstance(x, Tensor) else sum((row.sum() for row in x.unbind()), torch.tensor(0.0))

        leaves = zip(*self.row_leaves, strict=True)
        try:
            wanted = [
                torch.autograd.grad(loss(side, Tensor.sum), given)
                for side, given in zip(self.rows, leaves, strict=True)
            ]
        except RuntimeError:
            return ""  # torch needs what was changed in place
        try:
            got = torch.autograd.grad(loss(self.packed, packed_sum), self.leaves)
        except RuntimeError as error:
            return f"backward: {error}".splitlines()[0]
        for k, grad in enumerate(got):
            for b, part in enumerate(grad.split(self.lens)):
                if not torch.allclose(part, wanted[b][k][0], rtol=1e-8, atol=1e-8, equal_nan=True):
                    return f"gradient of {'xy'[k]}, row {b}"
        return ""

    def program(self) -> str:
        """Its text."""
        return "\n".join([f"# lens {self.lens}, torch.{self.mode}()", *self.lines])


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for; 1 where there are finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500, help="how many seeds, from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="one seed, with its program")
    parser.add_argument("--show", type=int, default=3, help="how many finds to show whole")
    asked = parser.parse_args(arguments)
    seeds = range(asked.seed, asked.seed + asked.programs) if asked.only is None else [asked.only]
    refused: Counter[str] = Counter()
    finds, lines = 0, 0
    for seed in seeds:
        trial = Trial(seed)
        lines += len(trial.lines)
        refused.update(trial.refused)
        if trial.found:
            finds += 1
        if asked.only is not None or (trial.found and finds <= asked.show):
            print(f"seed {seed}: {trial.found or 'right'}\n{trial.program()}\n")
    print(f"{len(seeds)} programs of {lines} lines, {finds} finds, {sum(refused.values())} lines refused")
    for text, n in refused.most_common(40 if asked.only is None else 0):
        print(f"{n:6} {text[:200]}")
    return int(finds > 0)


if __name__ == "__main__":
    sys.exit(main())
