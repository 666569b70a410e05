"""What a program is made of while it is drawn: the names of its body, with an example of each."""

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import inputs, prelude
from tests.fuzz.draw import Draw


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
        self.steps, self.takes_xs, self.rows = 1, False, 0
        self.longer = False  # whether other calls have other numbers of steps
        self.values: dict[str, Any] = {k: v for k, v in vars(prelude).items() if not k.startswith("__")}
        self.values["call"] = 0
        self.tensors: list[str] = []
        self.count = 0

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
            and self.example(name).device.type == "cpu"
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

    def input(
        self,
        shape: Sequence[int],
        letter: str,
        *,
        grad: float = 0.65,
        dtype: torch.dtype | None = None,
        low: float = -1.0,
        high: float = 1.0,
        first: str = "",
    ) -> str:
        """Makes a tensor outside of the body; it may be of a special kind, or a view of one.

        `first` is the text of the first dim, where that is no number.
        """
        name, draw, shape, dtype = self.fresh(letter), self.draw, tuple(shape), dtype or self.dtype
        wants = draw.chance(grad) and (dtype.is_floating_point or dtype.is_complex)
        dims = [str(n) for n in shape]
        if first:
            dims[0] = first
        view = inputs.view_of(draw, shape, dtype)
        if view == "zero":
            lines, wants = (
                [f"{name} = torch._efficientzerotensor(({''.join(f'{n}, ' for n in dims)}), dtype={dtype})"],
                False,
            )
        elif view:
            base, shown = inputs.seen(view, dims)
            text = inputs.made(draw, base, dtype, (low, high), wants)
            lines = [f"{name}_base = {text}", f"{name} = {name}_base{shown}"]
        else:
            lines = [f"{name} = {inputs.made(draw, dims, dtype, (low, high), wants)}"]
        self.header += lines
        self.run("\n".join(lines))
        if wants:
            self.leaves.append(f"{name}_base" if view else name)
        return name

    def closure(self, shape: Sequence[int], **options: Any) -> str:
        """A tensor that the body closes over."""
        return self.input(shape, "w", **options)

    def new_x(self, shape: Sequence[int], **options: Any) -> str:
        """A leaf of xs; in the body it has a name of its own."""
        first = f"{self.steps} + call" if self.longer else ""
        outer = self.input((self.steps, *shape), "s", first=first, **options)
        name = f"x{len(self.xs)}"
        self.xs.append((name, outer))
        self.values[name] = self.values[outer][0]
        self.tensors.append(name)
        return name

    def new_packed(self, shape: Sequence[int], entries: int) -> None:
        """Packed xs of `lens`, which are one leaf."""
        values = self.input((entries, *shape[1:]), "s")
        self.header.append(f"{values}_packed = tl.PackedTensor({values}, lens)")
        self.xs.append(("x0", f"{values}_packed"))
        self.values["x0"] = torch.zeros(tuple(shape), dtype=self.dtype) + 0.5
        self.tensors.append("x0")

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
        if key == "z":
            whole = [name for name in scope.tensors if scope.example(name).dtype is torch.int64]
            if whole and draw.chance(0.8):
                return draw.choice(whole)
            return scope.closure((), dtype=torch.int64, low=0.0, high=5.0)
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
