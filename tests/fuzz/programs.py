"""A seed's program: the text of a loop, of what it takes and of its calls."""

import warnings

import torch

from tests.fuzz.arrays import add_array, use_array
from tests.fuzz.draw import Draw
from tests.fuzz.families import TABLES, WEIGHTS
from tests.fuzz.loops import LONGER, STACKED, TAKE_XS, call_of
from tests.fuzz.samples import sampled
from tests.fuzz.scope import Scope, Slots

KINDS = {
    "scan": 5, "length": 2, "reverse": 1.5, "fori": 2, "while": 1.5, "until": 1.2, "rows": 1, "asked": 0.4,
    "valued": 0.5, "packed": 0.6, "compact": 0.4,
}  # fmt: skip
BY_ROWS = ("rows", "packed", "compact")
DTYPES = {torch.float64: 14, torch.float32: 2, torch.bfloat16: 0.3, torch.complex128: 0.4}
NEXT = {  # of a leaf h of the carry
    "{h} * 0.5 + torch.sin({v}) * 0.5": 3,
    "{v}": 2,
    "{h} * 0.9 + {v}": 1,
    "torch.tanh({h} + {v})": 2,
    "{h} + {v}.sum()": 1.5,
    "{h} * 0.5 + {v}.mean()": 1,
    "{h} * {v}.mean().to({h}.dtype)": 1,
    "({h} + {v}).to({h}.dtype)": 0.5,
    "({h} * 0.5 + {v}.to({h}.dtype).sum())": 1,
    "torch.sqrt({h} - {v})": 0.3,
    "torch.sqrt(({h} - {v}).relu())": 0.4,
    "{h}": 0.2,
}


class Program:
    """A program as it is drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = Draw(seed)
        self.kind = draw.among(KINDS)
        self.scope = scope = Scope(draw, draw.among(DTYPES))
        scope.values |= {"Slots": Slots, "compile": False, "i": 1}
        scope.steps, scope.takes_xs = draw.randint(1, 6), self.kind in TAKE_XS
        scope.longer = self.kind in LONGER and draw.chance(0.25)
        self.shape, self.large = draw.shape(), draw.chance(0.01)
        if self.kind in BY_ROWS:
            scope.rows = draw.randint(1, 4)
            self.shape = (scope.rows, *self.shape[:2])
        if self.large:
            self.shape = (draw.choice([16, 64]), draw.choice([32, 128]))
            scope.rows = min(scope.rows, 1) * self.shape[0]
        self._make_inputs()
        self._make_body()

    def _make_inputs(self) -> None:
        draw, scope = self.draw, self.scope
        for _ in range(draw.among({1: 4, 2: 1})):
            scope.new_carry(self.shape, grad=0.75)
        if draw.chance(0.06) and not scope.rows:
            scope.new_carry(draw.choice([(), self.shape]), dtype=torch.int64, low=0.0, high=4.0)
        if scope.takes_xs:
            for _ in range(draw.among({1: 4, 2: 1})):
                scope.new_x(self.shape if draw.chance(0.6) else draw.shape())
        if scope.rows:
            limits = [draw.randint(0, scope.steps) for _ in range(scope.rows)]
            self._given("limits", f"torch.tensor({limits})")
            lens = [draw.randint(0 if draw.chance(0.2) else 1, scope.steps) for _ in range(scope.rows)]
            if self.kind == "packed":
                self._given("lens", f"{lens}")
                scope.new_packed(self.shape, sum(lens))
        if draw.chance(0.16) and not self.large and scope.dtype is not torch.complex128:
            for _ in range(draw.among({1: 5, 2: 1})):
                add_array(scope)

    def _given(self, name: str, text: str) -> None:
        self.scope.header.append(f"{name} = {text}")
        self.scope.run(self.scope.header[-1])

    def _make_body(self) -> None:
        draw, scope = self.draw, self.scope
        wanted, tries, done = draw.randint(1, 6), 0, 0
        append_at = draw.randrange(wanted) if draw.chance(0.8) else -1
        while done < wanted and tries < 30:
            tries += 1
            if scope.arrays and done == append_at:
                use_array(scope, append=True)
                append_at = -1
            done += self._statement()
        self.next = [self._next(name) for name, _ in scope.carry]
        outputs = [n for n in scope.tensors if n not in dict(scope.xs) or draw.chance(0.3)]
        count = draw.among({0: 1, 1: 4, 2: 2, 3: 1})
        self.ys = [draw.choice(outputs[-4:] if draw.chance(0.7) else outputs) for _ in range(count)]

    def _statement(self) -> bool:
        draw, scope = self.draw, self.scope
        if scope.arrays and draw.chance(0.5):
            return use_array(scope)
        if draw.chance(0.12):
            text = sampled(scope)
        elif self.kind == "fori" and draw.chance(0.1):
            text = scope.fill(draw.choice(["{o} = {v} * i", "{o} = {v} + i * {c}", "{o} = {v} * (i + 1) / 3"]))
        else:
            text = scope.fill(draw.choice(TABLES[draw.among(WEIGHTS)]))
        return text is not None and scope.add(text)

    def _next(self, name: str) -> str:
        """The text of a leaf's next value, of the leaf's shape and dtype."""
        draw, scope = self.draw, self.scope
        old = scope.example(name)
        if old.dtype is torch.int64:  # what is not finite becomes no number that anybody promises
            return draw.choice(
                [f"{name} + 1", f"({name} * 3 + 1) % 7", f"{name}.flip(0)" if old.dim() else f"{name} // 2"]
            )
        for _ in range(12):
            text = draw.among(NEXT).format(h=name, v=draw.choice(scope.tensors[-4:]))
            if scope.run(f"_next = {text}"):
                found = scope.values["_next"]
                if (found.shape, found.dtype, found.device) == (old.shape, old.dtype, old.device):
                    return text
        return f"{name} * 0.9"

    # -- text

    def text(self) -> str:
        """The program."""
        draw, scope = self.draw, self.scope
        takes = "{" + ", ".join(f'"{name}": {name}' for name in scope.leaves) + "}"
        calls = draw.choice(([0, 0], [0, 1], [0, 1, 0], [0, 0, 1]))
        loss = draw.among({"": 4, "ys": 1.5, "carry": 1.5, "carry[0]": 0.5, "ys[0]": 0.5})
        if loss.startswith("ys") and not (self.ys and self.kind in STACKED):
            loss = ""
        second = draw.chance(0.12) and scope.dtype is not torch.bfloat16
        lines = ["def run(compile, call):", *(f"    {line}" for line in scope.header)]
        if "overridden" in "\n".join(scope.lines):
            lines.append("    switch[0] = call % 2")
        lines += [f"    {line}" for line in (*self._body(), *call_of(draw, scope, self.kind, threads=self.large))]
        lines.append(f"    return {{'carry': carry, 'ys': ys}}, {takes}")
        return "\n".join([*lines, "", "", f"CALLS, LOSS, SECOND = {calls}, {loss!r}, {second}"]) + "\n"

    def _body(self) -> list[str]:
        scope = self.scope
        names = [name for name, _ in scope.carry] + scope.arrays
        counted = ["n"] if self.kind not in ("scan", "length", "reverse", "fori", "packed") else []
        head = "i, carry" if self.kind == "fori" else "carry, x" if self.kind in STACKED else "carry"
        lines = [f"def body({head}):", f"    {', '.join([*names, *counted])}, = carry"]
        if scope.xs:
            lines.append(
                "    x0 = x" if self.kind == "packed" else f"    {', '.join(name for name, _ in scope.xs)}, = x"
            )
        lines += [f"    {line}" for line in scope.lines]
        result = f"({', '.join([*self.next, *scope.arrays, *(f'{n} + 1' for n in counted)])},)"
        ys = f"({''.join(f'{y}, ' for y in self.ys)})"
        return [*lines, f"    return {result}, {ys}" if self.kind in STACKED else f"    return {result}"]


def program(seed: int) -> str:
    """The text of a seed's program."""
    with torch.device("cpu"), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # whatever the default is
        warnings.simplefilter("ignore")  # which may be said once only, and must not make a difference
        torch.manual_seed(seed)
        return Program(seed).text()
