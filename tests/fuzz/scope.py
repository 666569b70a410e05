"""What a program is made of while it is drawn: numbers at random, and the names of a body with an example of each."""

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import prelude


class Draw(random.Random):
    """Random choices from a seed."""

    def chance(self, p: float) -> bool:
        return self.random() < p

    def among(self, weights: Mapping[Any, float]) -> Any:
        """A key, by weights."""
        return self.choices([*weights], [*weights.values()])[0]

    def shape(self) -> tuple[int, ...]:
        """Mostly small ones, of all numbers of dims, now and then with a size of 0 or 1."""
        dims = self.among({0: 1.5, 1: 3, 2: 4, 3: 1.5, 4: 0.5})
        return tuple(self.among({0: 0.12, 1: 0.8, 2: 2, 3: 3, 4: 2, 5: 1}) for _ in range(dims))


class Slots(list):
    """A TensorArray's methods, for examples."""

    def append(self, x: Any) -> "Slots":  # pyright: ignore[reportIncompatibleMethodOverride]
        super().append(x)
        return self

    def stack(self) -> Tensor:
        return torch.stack([*self])

    def gather(self, index: Any) -> Tensor:
        return self.stack()[index]

    def __getitem__(self, i: Any) -> Any:
        found = super().__getitem__(i)
        return torch.stack(found) if isinstance(i, slice) else found


class Scope:
    """A body as it grows: its lines, what they need from outside, and the values that they have in one step."""

    def __init__(self, draw: Draw, dtype: torch.dtype) -> None:
        self.draw, self.dtype = draw, dtype
        self.header: list[str] = []  # binds what the body closes over
        self.leaves: list[str] = []
        self.carry: list[tuple[str, str]] = []  # names in the body and outside
        self.xs: list[tuple[str, str]] = []
        self.arrays: list[str] = []
        self.lines: list[str] = []
        self.hidden: set[str] = set()  # values that no statement takes by chance
        self.steps, self.takes_xs, self.rows = 1, False, 0
        self.values: dict[str, Any] = {k: v for k, v in vars(prelude).items() if not k.startswith("__")}
        self.values["call"] = 0
        self.tensors: list[str] = []
        self.count = 0
        self.fault = False  # whether a statement that raises may stay

    # -- names

    def fresh(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def example(self, name: str) -> Tensor:
        return self.values[name]

    def pick(self, floating: bool = True, dims: int = 0) -> str | None:
        """The name of a tensor, one of the last more often."""
        fitting = [
            name
            for name in self.tensors
            if self.example(name).dim() >= dims
            and (not floating or self.example(name).dtype in (self.dtype, torch.float32, torch.bfloat16))
        ]
        if not fitting:
            return None
        if self.draw.chance(0.5):
            fitting = fitting[-3:]
        return self.draw.choice(fitting)

    def run(self, code: str) -> bool:
        """Carries out statements on the examples; False where that fails."""
        try:
            exec(code, self.values)
        except Exception:
            return False
        return True

    def add(self, code: str) -> bool:
        """Takes statements into the body; the tensors that they bind can be used from then on."""
        before = set(self.values)
        if not self.run(code):
            for name in set(self.values) - before:
                del self.values[name]
            return False
        self.lines += code.splitlines()
        for name in sorted(set(self.values) - before, key=lambda x: (len(x), x)):
            value = self.values[name]
            if (
                isinstance(value, Tensor)
                and name[0] in "vz"
                and value.numel() <= 4000
                and value.layout is torch.strided
            ):
                self.tensors.append(name)
        return True

    # -- what comes from outside

    def seed(self) -> str:
        """The text of a seed for values, which another call may change."""
        return f"{self.draw.randrange(1000)}" + (" + 1000 * call" if self.draw.chance(0.7) else "")

    def input(self, shape: Sequence[int], letter: str, *, grad: float = 0.65, dtype: torch.dtype | None = None,
              low: float = -1.0, high: float = 1.0, plain: bool = False) -> str:  # fmt: skip
        """Makes a tensor outside of the body; it may be of a special kind, or a view of one."""
        name, draw, shape = self.fresh(letter), self.draw, tuple(shape)
        kind = "" if dtype is None or dtype is self.dtype else f", dtype={dtype}"
        kind = f", dtype={self.dtype}" if not kind and self.dtype is not torch.float64 else kind
        wants = f", grad={'call % 2 == 0' if draw.chance(0.05) else 'True'}" if draw.chance(grad) else ""
        dims = "".join(f"{n}, " for n in shape)
        if plain or (low, high) != (-1.0, 1.0) or draw.chance(0.75):
            between = "" if (low, high) == (-1.0, 1.0) else f", low={low!r}, high={high!r}"
            text = f"make({dims}seed={self.seed()}{between}{kind}{wants})"
        else:
            which = draw.among({"zeros": 3, "ones": 2, "ties": 3, "whole": 3, "large": 0.2, "infinite": 0.2})
            text = f'edge({dims}seed={self.seed()}, kind="{which}"{kind}{wants})'
        view = "" if plain else self._view(shape)
        if view and view != "zero":
            text, shown = self._of_view(view, shape, text, dims)
            self.header += [f"{name}_base = {text}", f"{name} = {name}_base{shown}"]
            leaf = f"{name}_base"
        elif view == "zero":
            self.header.append(f"{name} = torch._efficientzerotensor(({dims}), dtype={dtype or self.dtype})")
            leaf, wants = "", ""
        else:
            self.header.append(f"{name} = {text}")
            leaf = name
        self.run("\n".join(self.header[-2:]))
        if wants:
            self.leaves.append(leaf)
        return name

    def _view(self, shape: tuple[int, ...]) -> str:
        """Which view of what was made an input is; mostly none."""
        if not self.draw.chance(0.2):
            return ""
        many, whole = float(len(shape) > 1), float(bool(shape and min(shape)))
        return self.draw.among({"neg": 1, "zero": 0.5, "slice": 1.5, "transpose": 3 * many, "expand": 2 * whole})

    def _of_view(self, view: str, shape: tuple[int, ...], text: str, dims: str) -> tuple[str, str]:
        """(how the base is made, how the view follows from it)"""
        if view == "transpose":
            swapped = "".join(f"{n}, " for n in (*shape[:-2], shape[-1], shape[-2]))
            return text.replace(f"({dims}", f"({swapped}", 1), ".transpose(-1, -2)"
        if view == "expand":
            return text.replace(
                f"({dims}", "(" + "1, " + "".join(f"{n}, " for n in shape[1:]), 1
            ), f".expand({dims[:-2]})"
        if view == "slice":
            return text.replace(f"({dims}", f"(2, {dims}", 1), "[1]"
        return text, "._neg_view()"

    def closure(self, shape: Sequence[int], **options: Any) -> str:
        """A tensor that the body closes over."""
        return self.input(shape, "w", **options)

    def new_x(self, shape: Sequence[int], **options: Any) -> str:
        """A leaf of xs; in the body it has a name of its own."""
        outer = self.input((self.steps, *shape), "s", **options)
        name = f"x{len(self.xs)}"
        self.xs.append((name, outer))
        self.values[name] = self.values[outer][0]
        self.tensors.append(name)
        return name

    def new_carry(self, shape: Sequence[int], **options: Any) -> str:
        """A leaf of the carry."""
        outer = self.input(shape, "i", **options)
        name = f"h{len(self.carry)}"
        self.carry.append((name, outer))
        self.values[name] = self.values[outer] * 1
        self.tensors.append(name)
        return name

    def source(self, shape: Sequence[int], **options: Any) -> str:
        """A tensor from anywhere outside of the body: of xs, of the carry or closed over."""
        kinds = {"closure": 3.0, "carry": 1.0 if not self.rows else 0.0, "xs": 2.0 if self.takes_xs else 0.0}
        which = self.draw.among(kinds)
        if which == "xs":
            return self.new_x(shape, **options)
        return self.new_carry(shape, **options) if which == "carry" else self.closure(shape, **options)

    # -- templates

    def fill(self, template: str) -> str | None:
        """A template's text with names and numbers for what stands in braces; None where there is no such thing."""
        holes = Holes(self)
        try:
            return string.Formatter().vformat(template, (), holes)
        except LookupError:
            return None


class Holes(dict):
    """What a template has in braces.

    v: a tensor; m, M: one of two dims or more, three or more; u: another one; a, b: of v's shape; w: closed over, of a
    shape that goes with v's; W: a matrix for v's last dim; p: a tensor of no dims; d, e: dims of v; n, N: a place along
    d, from 0 or 1; index: several; o: the new name; q: another one; c: a number; k: a small whole number.
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope

    def __missing__(self, key: str) -> str:
        made = self._made(key)
        if made is None:
            raise LookupError(key)
        self[key] = made
        return made

    def main(self) -> str:
        """The tensor that the other names go with."""
        for key in "vmM":
            if key in self:
                return self[key]
        return self["v"]

    def _made(self, key: str) -> str | None:
        scope, draw = self.scope, self.scope.draw
        if key in ("v", "m", "M", "u"):
            return scope.pick(dims={"m": 2, "M": 3}.get(key, 0))
        if key == "q":
            return scope.fresh("t")
        if key == "c":
            return str(draw.choice([0.3, 0.7, 1.3, 2.0, -0.5, 0.0, 1.0, 3]))
        if key == "k":
            return str(draw.randint(1, 3))
        if key == "o":
            return scope.fresh("v")
        main = self.main()
        x = scope.example(main)
        if key in ("d", "e"):
            return str(draw.randrange(-x.dim(), x.dim())) if x.dim() else None
        if key in ("n", "N", "index"):
            return _place(draw, x.shape[int(self["d"])], key)
        if key == "w":
            return scope.closure(_broadcast(draw, x.shape), dtype=x.dtype)
        if key == "W":
            return scope.closure((x.shape[-1], draw.randint(1, 4)), dtype=x.dtype) if x.dim() else None
        if key in ("a", "b"):
            same = [name for name in scope.tensors if scope.example(name).shape == x.shape]
            return draw.choice([name for name in same if scope.example(name).dtype == x.dtype] or same)
        if key == "p":
            numbers = [n for n in scope.tensors if not scope.example(n).dim() and scope.example(n).dtype == x.dtype]
            return (
                draw.choice(numbers)
                if numbers and draw.chance(0.6)
                else f"{main}.{draw.choice(['sum', 'max', 'mean'])}()"
            )
        return None


def _place(draw: Draw, size: int, key: str) -> str | None:
    if not size:
        return None
    if key == "index":
        return f"torch.tensor({[draw.randrange(size) for _ in range(draw.randint(1, 4))]})"
    return str(draw.randrange(size) if key == "n" else draw.randint(1, size))


def _broadcast(draw: Draw, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape that goes with another one."""
    if draw.chance(0.6):
        return tuple(shape)
    kept = draw.randint(0, len(shape))
    return tuple(1 if draw.chance(0.3) else n for n in shape[len(shape) - kept :])
