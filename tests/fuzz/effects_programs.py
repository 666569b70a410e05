"""The text of a seed's program: a loop whose body has one to four statements with state, or that look as if."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.draw import Draw
from tests.fuzz.effects_acts import BY_X, HANDS_ON, WRITES
from tests.fuzz.effects_families import FAMILIES, PURE_FAMILIES, SWITCHES
from tests.fuzz.effects_kinds import PURE, Kind

LOOPS = {"scan": 4, "length": 2, "fori": 3, "while": 2, "until": 1.5, "map": 1.5, "range": 1}
_SHAPES = {  # what stands around a body
    "body": 7, "lambda *a: body(*a)": 0.7, "functools.partial(body)": 0.7, "Net().forward": 0.7, "Net()": 0.7,
}  # fmt: skip
_NET = "class Net:\n    def forward(self, *a):\n        return body(*a)\n    __call__ = forward"
_USES = {
    "number": [
        "h = torch.tanh(h + 0.1 * (VALUE % 5))", "h = h * (1.0 if VALUE <= N else 0.5)",
        "if VALUE % 2 >= 1:\n    h = h.sin()",
        "h = h + VALUE % 5 * 0.05 * w", "h = h * [0.9, 0.7, 0.5][int(VALUE) % 3]", "h = h.roll(int(VALUE) % 3)",
        "h = h - torch.full((3,), float(VALUE % 7)).sigmoid()", "if VALUE > N:\n    h = h * 0.8",
        "h = h * torch.tensor(VALUE % 3 + 0.5)",
        "h = h * (1.0 if VALUE < N else 0.5)", "h = h ** (1 + int(VALUE) % 2)",
        "for _ in range(int(VALUE) % 3):\n    h = h.sin()",
    ],
    "tensor": ["h = torch.tanh(h + 0.3 * (VALUE))", "h = h * VALUE.sum().sigmoid()", "h = h * 0.8 + 0.2 * VALUE"],
    "bool": ["h = h * (1.0 if VALUE else 0.5)", "if VALUE:\n    h = h.sin()", "h = h + (0.1 if VALUE else 0.2) * w"],
    "either": ["h = torch.tanh(h + 0.3 * VALUE)", "h = h * 0.8 + 0.2 * VALUE", "h = h * (1 + 0.3 * VALUE)"],
    "": [""],
}  # fmt: skip
_BRANCHES = [
    "if x[0] > 0:\n    h = h.sin()",
    "if h.sum() > 0:\n    h = h.cos()",
    "if (h[0] > 0).item():\n    h = h * 0.5",
]
_STEPS = [
    ("", "h = torch.tanh(h * w + 0.3)"), ("", "h = torch.sin(h + w)"), ("", "h = h * 0.8 + 0.3 * w"),
    ("x", "h = torch.tanh(h * w + x)"), ("x", "h = h * 0.7 + 0.5 * x"), ("q", "h = torch.tanh(h + 0.5 * q)"),
    ("q", "h = h * 0.5 + q.cos() * w"), ("i", "h = h * 0.8 + 0.1 * i"),
]  # fmt: skip
_NEXT_Q = {"q": 2, "h": 2, "q * 0.9 + 0.1 * h": 2, "torch.sin(q + 0.1)": 1, "h * 2": 0.7, "g": 1.5, "q + 0.1 * g": 0.5}
_NEXT_P = {"q * 2": 2, "h": 1, "h * 0.5 + q": 1, "torch.sin(q)": 1, "p": 0.5, "p + q": 0.5}
_WORDS = re.compile(r"\b(OBJ|CLS|FUN|TMP|SCOPE|CALLS|CREATE|C|N)\b")


@dataclass
class Statement:
    """A statement of a program, its words replaced."""

    family: str
    mode: str
    setup: list[str]
    scope: list[str]  # the lines `nonlocal ...`
    step: list[str]
    use: list[str]
    peek: str  # what is compared of its state, "" of one without
    later: bool  # whether it changes outside of the body
    result: str = ""  # what may be a y


class Program:
    """A program as it is drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = Draw(seed)
        self.loop = draw.among(LOOPS)
        self.steps, self.calls = draw.randint(3, 7), draw.among({1: 1, 2: 2, 3: 0.3})
        self.scope = draw.choice(["nonlocal", "global"])
        self.names = {*{"fori": "i", "scan": "x", "until": "x", "range": "xr", "map": "x"}.get(self.loop, "")}
        if self.loop == "until" and draw.chance(0.4):
            self.names = set()
        if self.loop != "map":
            self.names |= {name for name, p in (("q", 0.4), ("m", 0.1), ("a", 0.05)) if draw.chance(p)}
        self.statements: list[Statement] = []
        self.condition: Statement | None = None
        self.asked = self.loop in ("while", "until") and draw.chance(0.2)
        self.next = {"h": "h", "q": draw.among(_NEXT_Q), "m": "m + 1", "a": "a", "n": "n + 1"}
        self.by_x = False  # whether x says when a carry depends on another one
        wanted = draw.among({1: 5, 2: 3, 3: 1, 4: 0.7})
        self.grad = draw.chance(0.7)
        self._add_statements(wanted)
        self.switch, self.turns = list[str](), 0
        if seed % 8 == 7:
            self._add_switch(Draw(seed + 2**32))

    def _add_statements(self, wanted: int) -> None:
        draw = self.draw
        for _ in range(wanted):
            name = draw.among({name: family.weight for name, family in FAMILIES.items()})
            if name == "shared":
                if self._can_have("q") and not any(s.family == "shared" for s in self.statements):
                    self._share()
                continue
            family = FAMILIES[name]
            kind = family.draw(draw)
            if name == "grad of carry" and "x" in self.names and self.loop in ("scan", "until") and draw.chance(0.4):
                kind, self.by_x = draw.choice(BY_X), True
                self.next |= {"h": "h", "q": "q"}
            if not self._can_have(kind.needs):
                kind, name, family = draw.choice(PURE), "pure", FAMILIES["pure"]
            self.names |= {*kind.needs}
            mode = draw.among(family.modes) if family.state else "does"
            self._add(name, mode, kind)
        if draw.chance(0.15):
            text = draw.choice(_BRANCHES if "x" in self.names and self.loop in ("scan", "until") else _BRANCHES[1:])
            self._add("branch", "does", Kind("", text, "", "", ""))
        families = {s.family for s in self.statements}
        if "grad of carry" in families and "shared" not in families and not self.by_x and draw.chance(0.6):
            self._depend()
        if any("grad" in family for family in families):
            self.grad = True

    def _add_switch(self, draw: Draw) -> None:
        """Has a statement run from some call on: those before are known then as loops without it."""
        if not (found := [s for s in self.statements if s.peek and s.step and not s.later]):
            return
        statement, self.turns = draw.choice(found), draw.randint(1, 3)
        self.calls, (setup, test, change) = self.turns + 2, draw.choice(SWITCHES)
        statement.step = [f"if {test}:", *_indented([*statement.step, *statement.use])]
        statement.use, statement.mode = [], f"{statement.mode} switched"
        statement.setup += setup.splitlines()
        scope = [f"{self.scope} sw"] if change.startswith("sw = ") else []
        self.switch = ["def turn():", *_indented([*scope, change])]

    def _can_have(self, needs: str) -> bool:
        return all(name in self.names or (name in "qma" and self.loop != "map") for name in needs)

    def _depend(self) -> None:
        """Carries that depend on each other by several steps, or by what x is."""
        draw = self.draw
        if draw.chance(0.6):
            self.names |= {"p"}
            self.next |= {
                "p": draw.among(_NEXT_P),
                "h": draw.choice(["p", "p", "h"]),
                "q": draw.choice(["q", "q", "p"]),
            }

    def _share(self) -> None:
        """A write in place, and a next carry whose tensors may share memory."""
        draw, self.grad = self.draw, False
        self.names |= {"q"}
        h, q = draw.choice(HANDS_ON)
        step = draw.choice(WRITES) + (f"\n{draw.choice(WRITES)}" if draw.chance(0.3) else "")
        setup = "OBJ = torch.zeros(3)" if "OBJ" in f"{h}{q}{step}" else ""
        self._add("shared", "does", Kind(setup, step, "", setup and "OBJ", ""))
        name = f"a{len(self.statements) + bool(self.condition)}"
        self.next |= {"h": h.replace("OBJ", name), "q": q.replace("OBJ", name)}

    def _add(self, family: str, mode: str, kind: Kind) -> None:
        draw, number = self.draw, len(self.statements) + 1 + bool(self.condition)
        value = kind.peek if mode in ("read", "between", "backward") else kind.value
        words = {
            "SCOPE": self.scope,
            "CALLS": f"{(self.steps + 4 * self.asked) * self.calls}",
            "CREATE": f"{draw.chance(0.5)}",
        }
        words |= {"C": f"{draw.uniform(-0.4, 0.6):.1f}", "N": f"{draw.randint(1, 6)}"}
        simple = re.fullmatch(r"[\w.]+(\([^()]*\))?", value)
        small = {"OBJ": "a", "CLS": "C", "FUN": "f", "TMP": "t"}

        def fill(text: str) -> list[str]:
            text = re.sub(r"\bVALUE\b", lambda _: value if simple else f"({value})", text)
            text = re.sub(r"\b(CLS|FUN)(\d)\b", lambda found: f"{small[found[1]]}{number}_{found[2]}", text)
            text = _WORDS.sub(lambda found: words.get(found[0]) or f"{small[found[0]]}{number}", text)
            return text.splitlines()

        lines = fill(kind.step)
        scope = [line for line in lines if line.startswith(("nonlocal ", "global "))]
        step = [line for line in lines if line not in scope]
        later = mode in ("between", "backward")
        if later and re.search(r"\bh\b", kind.step):
            mode, later = "read", False
        if mode == "late":
            step = [f"if h.sum() > {draw.choice([0.5, 1.0, 1.5])}:", *(f"    {line}" for line in step)]
            value = kind.peek
        use = [] if mode == "write" or not value else fill(draw.choice(_USES[kind.reads]))
        stateful = family not in PURE_FAMILIES and kind.peek not in ("", "0")
        made = Statement(
            family, mode, fill(kind.setup), scope, step, use, fill(kind.peek)[0] if stateful else "", later
        )
        if mode == "read":
            made.step, made.scope = [], []
        if (kind.reads == "tensor" and mode == "feedback") or "grad" in family:
            made.result = fill(value)[0]
        in_condition = (
            self.asked and not self.condition and kind.reads == "number" and mode in ("feedback", "write", "read")
        )
        if in_condition or (self.asked and not self.condition and family == "caught read"):
            made.use = [] if mode == "write" else fill("bound = int(VALUE > N)")
            self.condition = made
        else:
            self.statements.append(made)

    @property
    def all_statements(self) -> list[Statement]:
        """Those of the body, and that of the condition."""
        return [*self.statements, *([self.condition] if self.condition else [])]

    def said(self) -> dict[str, Any]:
        """What is known of the program before it runs."""
        families = sorted({s.family for s in self.all_statements})
        modes = sorted({s.mode for s in self.all_statements})
        return {
            "loop": self.loop,
            "families": families,
            "modes": modes,
            "pure": not {*families} - PURE_FAMILIES,
            "ways": {},
        }

    # -- text

    def text(self) -> str:
        """The program."""
        said = "; ".join(f"{s.family}, {s.mode}" for s in self.all_statements)
        begin = ["w = make(3, seed=1, grad=True)", *(line for s in self.all_statements for line in s.setup)]
        inner = [*begin, *self._body(), *self._condition(), *self._around()]
        if self.scope == "global":
            lines = [*inner, "", "def program(loops, report, **options):", *_indented(self._calls())]
        else:
            lines = ["def program(loops, report, **options):", *_indented([*inner, *self._calls()])]
        return "\n".join([f"# {self.loop}: {said}", *lines]) + "\n"

    def _carry(self) -> list[str]:
        counts = ["n"] if self.loop in ("while", "until") else []
        return ["h", *(name for name in "qpma" if name in self.names), *counts]

    def _body(self) -> list[str]:
        draw, names = self.draw, self._carry()
        arguments = {"fori": "i, carry", "while": "carry", "map": "x"}.get(self.loop, "carry, x")
        lines = [line for s in self.statements if not s.later for line in s.scope]
        alone = names == ["h"]
        lines += ["h = x"] if self.loop == "map" else ["h = carry" if alone else f"{', '.join(names)} = carry"]
        if not any(s.family == "shared" for s in self.statements) or draw.chance(0.3):
            mixed = "" if self.by_x else self.names
            lines.append(draw.choice([text for need, text in _STEPS if not need or need in mixed]))
        if "a" in names:
            lines.append("a.append(h.detach())")
        outside, results = [], []
        for number, s in enumerate(self.statements):
            inside = [*([] if s.later else s.step), *s.use]
            if (
                s.family != "shared"
                and draw.chance(0.2)
                and not re.search(r"\b[iqxampg]\b", "\n".join(inside))
                and inside
            ):
                outside += [f"def helper{number}(h):", *_indented([*([] if s.later else s.scope), *inside, "return h"])]
                inside = [f"h = helper{number}(h)"]
                lines = [line for line in lines if line not in s.scope]
            elif s.result:
                results.append(s.result)
            lines += inside
        result = self._result(names, results)
        if re.search(r"\bg\b", "\n".join([*lines, result])):
            at = next(i for i, line in enumerate(lines) if line.endswith(("= carry", "h = x")))
            lines.insert(at + 1, "g = h")
        shape = draw.among(_SHAPES)
        around = [*(_NET.splitlines() if "Net" in shape else []), f"step = {shape}"]
        return [*outside, f"def body({arguments}):", *_indented([*lines, f"return {result}"]), *around]

    def _result(self, names: list[str], results: list[str]) -> str:
        draw = self.draw
        ys = [draw.choice(["h.sum()", "h", "h.clone()"]), *(r for r in results if draw.chance(0.7) or "p" in names)]
        if "q" in names and draw.chance(0.4):
            ys.append("q.clone()")
        y = f"({', '.join(ys)},)" if len(ys) > 1 else ys[0]
        if self.loop == "map":
            return y
        carry = _tuple(self.next[name] for name in names)
        return carry if self.loop in ("fori", "while") else f"{carry}, {y}"

    def _condition(self) -> list[str]:
        if self.loop not in ("while", "until"):
            return []
        names, s = self._carry(), self.condition
        test = f"n {'<' if self.loop == 'while' else '>='} {self.steps}"
        if s is None:
            return ["def cond(carry):", f"    return carry[-1] {test[2:]}"]
        lines = [*s.scope, f"{', '.join(names)} = carry", *s.step, *s.use]
        bound = f"n - bound {test[2:]}" if s.use else test
        return ["def cond(carry):", *_indented([*lines, f"return {bound}"])]

    def _around(self) -> list[str]:
        """What is left behind, and what changes outside of the loop."""
        changed = [s for s in self.statements if s.later]
        lines = ["def left():", f"    return [{', '.join(s.peek for s in self.all_statements if s.peek)}]"]
        if changed:
            inside = [*(line for s in changed for line in s.scope), *(line for s in changed for line in s.step)]
            lines += ["def later():", *_indented(inside)]
        return lines + self.switch

    def _calls(self) -> list[str]:
        first = {"q": "q", "p": "p", "m": "0", "a": "tl.TensorArray()", "n": "torch.tensor(0)"}
        init = ", ".join(["h", *(first[name] for name in self._carry()[1:])])
        init = f"({init})" if len(self._carry()) > 1 else init
        steps, xs = f"{self.steps}", f"range({self.steps})" if self.loop == "range" else "xs"
        rows = self.steps + (3 if self.loop == "until" else 0)
        along = "xs" if "x" in self.names else f"length={rows}"
        call = {
            "fori": f"carry, ys = loops.fori_loop(0, {steps}, step, {init}, **options), ()",
            "while": f"carry, ys = loops.while_loop(cond, step, {init}, **options), ()",
            "map": "carry, ys = (), loops.map(step, xs, **options)",
            "length": f"carry, ys = loops.scan(step, {init}, length={steps}, **options)",
            "until": f"carry, ys = loops.scan(step, {init}, {along}, until=cond, **options)",
        }.get(self.loop, f"carry, ys = loops.scan(step, {init}, {xs}, **options)")
        between = any(s.later and s.mode == "between" for s in self.statements)
        before = any(s.later and s.mode == "backward" for s in self.statements)
        lines = [
            f"h = make(3, seed=10 + call, grad={self.grad})",
            f"xs = make({rows}, 3, seed=30 + call, grad={self.grad})",
        ]
        more = [name for name in "qp" if name in self.names]
        lines += [f"{name} = make(3, seed={50 + 7 * i} + call, grad={self.grad})" for i, name in enumerate(more)]
        if between:
            lines.append("if call:\n    later()")
        if self.switch:
            lines.append(f"if call == {self.turns}:\n    turn()")
        options = ", later" if before else ""
        if any("grad" in s.family or s.family == "tensors" for s in self.all_statements):
            options += ", keep=True"
        lines += [call, f"report(carry, ys, [{', '.join(['h', *more, 'xs', 'w'])}], left{options})"]
        return [f"for call in range({self.calls}):", *_indented(lines)]


def _tuple(parts: Iterable[str]) -> str:
    """A tuple, or what alone is there."""
    parts = [*parts]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else line for text in lines for line in text.splitlines() or [""]]


def program(seed: int) -> Program:
    """A seed's program."""
    return Program(seed)
