"""A seed's program: the text of a loop, of what it takes and of its calls."""

import warnings

import torch

from tests.fuzz.arrays import add_array, use_array
from tests.fuzz.samples import sampled
from tests.fuzz.scope import Draw, Scope, Slots
from tests.fuzz.statements import TABLES, WEIGHTS

KINDS = {"scan": 5, "length": 2, "reverse": 1.5, "fori": 2, "while": 1.5, "until": 1.2, "rows": 1, "asked": 0.5}
TAKE_XS = ("scan", "reverse", "until")
DTYPES = {torch.float64: 14, torch.float32: 2, torch.bfloat16: 0.4, torch.complex64: 0.0}


class Program:
    """A program as it is drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = Draw(seed)
        self.kind = draw.among(KINDS)
        self.scope = scope = Scope(draw, draw.among(DTYPES))
        scope.values |= {"Slots": Slots, "compile": False, "i": 1}
        scope.steps, scope.takes_xs = draw.randint(1, 6), self.kind in TAKE_XS
        self.shape = draw.shape()
        if self.kind == "rows":
            scope.rows = draw.randint(1, 4)
            self.shape = (scope.rows, *self.shape[:2])
        self.large = draw.chance(0.01)
        if self.large:
            self.shape = (draw.choice([16, 64]), draw.choice([32, 128]))
        self.more_steps = self.kind in ("length", "fori", "while", "asked") and draw.chance(0.3)
        self._make_inputs()
        self._make_body()

    def _make_inputs(self) -> None:
        draw, scope = self.draw, self.scope
        for _ in range(draw.among({1: 4, 2: 1})):
            scope.new_carry(self.shape)
        if scope.takes_xs:
            for _ in range(draw.among({1: 4, 2: 1})):
                scope.new_x(self.shape if draw.chance(0.6) else draw.shape())
        if scope.rows:
            limits = [draw.randint(0, scope.steps) for _ in range(scope.rows)]
            scope.header.append(f"limits = torch.tensor({limits})")
            scope.run(f"limits = torch.tensor({limits})\nn = torch.zeros_like(limits)")
        if self.kind == "fori":
            scope.values["i"] = 1
        if draw.chance(0.16) and not self.large:
            for _ in range(draw.among({1: 5, 2: 1})):
                add_array(scope)

    def _make_body(self) -> None:
        draw, scope = self.draw, self.scope
        wanted, tries = draw.randint(1, 6), 0
        append_at = draw.randrange(wanted) if draw.chance(0.8) else -1
        done = 0
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
        forms = {
            "{h} * 0.5 + torch.sin({v}) * 0.5": 3,
            "{v}": 2,
            "{h} * 0.9 + {v}": 1,
            "torch.tanh({h} + {v})": 2,
            "{h} + {v}.sum()": 1.5,
            "{h} * 0.5 + {v}.mean()": 1,
            "{h} * {v}.mean().to({h}.dtype)": 1,
            "({h} + {v}).to({h}.dtype)": 0.5,
            "({h} * 0.5 + {v}.to({h}.dtype).sum())": 1,
            "torch.sqrt({h} - {v})": 0.2,
            "{h}": 0.2,
        }
        for _ in range(12):
            v = draw.choice(scope.tensors[-4:])
            text = draw.among(forms).format(h=name, v=v)
            if scope.run(f"_next = {text}"):
                found, old = scope.values["_next"], scope.values[name]
                if (found.shape, found.dtype) == (old.shape, old.dtype):
                    return text
        return f"{name} * 0.9"

    # -- text

    def text(self) -> str:
        """The program."""
        draw, scope = self.draw, self.scope
        takes = "{" + ", ".join(f'"{name}": {name}' for name in scope.leaves) + "}"
        calls = draw.choice(([0, 0], [0, 1], [0, 1, 0], [0, 0, 1]))
        loss = draw.among({"": 4, "ys": 1.5, "carry": 1.5, "carry[0]": 0.5})
        if loss == "ys" and not (self.ys and self.has_ys()):
            loss = ""
        loop = self._loop()
        lines = ["def run(compile, call):", *(f"    {line}" for line in scope.header)]
        lines += [f"    {line}" for line in (*self._functions(), *loop)]
        lines.append(f"    return {{'carry': carry, 'ys': ys}}, {takes}")
        second = draw.chance(0.12)
        return "\n".join([*lines, "", "", f"CALLS, LOSS, SECOND = {calls}, {loss!r}, {second}"]) + "\n"

    def has_ys(self) -> bool:
        """Whether the loop is one that stacks outputs."""
        return self.kind in ("scan", "length", "reverse", "until")

    def _functions(self) -> list[str]:
        """The body and the condition."""
        scope = self.scope
        names = [name for name, _ in scope.carry] + scope.arrays
        counted = self.kind in ("while", "until", "rows", "asked")
        carry = ", ".join([*names, "n"] if counted else names)
        head = {"fori": "i, carry", "while": "carry", "rows": "carry", "asked": "carry"}.get(self.kind, "carry, x")
        lines = [f"def body({head}):", f"    {carry}, = carry"]
        if scope.takes_xs:
            lines.append(f"    {', '.join(name for name, _ in scope.xs)}, = x")
        lines += [f"    {line}" for line in scope.lines]
        after = [*self.next, *scope.arrays, *(["n + 1"] if counted else [])]
        result = f"({', '.join(after)},)"
        ys = f"({''.join(f'{y}, ' for y in self.ys)})"
        lines.append(f"    return {result}, {ys}" if self.has_ys() else f"    return {result}")
        return lines

    def _loop(self) -> list[str]:
        """The call of the loop."""
        draw, scope, steps = self.draw, self.scope, self.scope.steps
        init = [outer for _, outer in scope.carry] + [f"{name}_first" for name in scope.arrays]
        if self.kind in ("while", "until", "asked"):
            init.append("torch.tensor(0)")
        if self.kind == "rows":
            init.append("torch.zeros_like(limits)")
        begin, xs = f"({', '.join(init)},)", f"({''.join(f'{outer}, ' for _, outer in scope.xs)})"
        kept = draw.among({None: 5, 1: 0.7, 2: 0.7, 3: 0.5})
        options = ("" if kept is None else f", checkpoints={kept}") + ", compile=compile"
        count = f"{steps} + call" if self.more_steps else f"{steps}"
        stop = {"asked": f"lambda carry: bool(carry[-1] < {count})", "rows": "lambda carry: carry[-1] < limits"}
        stop = stop.get(self.kind, f"lambda carry: carry[-1] < {count}")
        text = {
            "scan": f"carry, ys = tl.scan(body, {begin}, {xs}{options})",
            "length": f"carry, ys = tl.scan(body, {begin}, length={count}{options})",
            "reverse": f"carry, ys = tl.scan(body, {begin}, {xs}, reverse=True{options})",
            "until": f"carry, ys = tl.scan(body, {begin}, {xs}, until=lambda carry: carry[-1] >= "
            f"{draw.randint(1, steps + 1)}{options})",
            "fori": f"carry, ys = tl.fori_loop(0, {count}, body, {begin}{options}), ()",
        }.get(self.kind, f"carry, ys = tl.while_loop({stop}, body, {begin}{options}), ()")
        return self._around(text)

    def _around(self, text: str) -> list[str]:
        """The call in what may be around it."""
        draw = self.draw
        around = draw.among({"": 40, "autocast": 1, "no_grad": 0.6, "threads": 0.5})
        if around == "threads" or self.large:
            return ["torch.set_num_threads(2)", text]
        if around == "autocast":
            return ['with torch.autocast("cpu", dtype=torch.bfloat16):', f"    {text}"]
        return ["with torch.no_grad():", f"    {text}"] if around == "no_grad" else [text]


def program(seed: int) -> str:
    """The text of a seed's program."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # which may be said once only, and must not make a difference
        torch.manual_seed(seed)
        return Program(seed).text()
