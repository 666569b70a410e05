"""The text that calls a loop: which one, with which options, inside of what."""

from tests.fuzz.draw import Draw
from tests.fuzz.scope import Scope

TAKE_XS = ("scan", "reverse", "until")
STACKED = ("scan", "length", "reverse", "until", "packed")
LONGER = ("scan", "reverse", "length", "fori", "while", "asked")  # may have more steps in another call


def call_of(draw: Draw, scope: Scope, kind: str, threads: bool = False) -> list[str]:
    """The lines that bind `carry` and `ys`."""
    kept = draw.among({None: 5, 1: 0.7, 2: 0.7, 3: 0.5})
    options = ("" if kept is None else f", checkpoints={kept}") + ", compile=compile"
    init = [outer for _, outer in scope.carry] + [f"{name}_first" for name in scope.arrays]
    if kind in ("while", "until", "asked", "valued"):
        init.append("torch.tensor(0)")
    if kind in ("rows", "compact"):
        init.append("torch.zeros_like(limits)")
    begin = f"({', '.join(init)},)"
    text = _scan(draw, scope, kind, begin, options) or _other(scope, kind, begin, options)
    return _around(draw, text, threads)


def _scan(draw: Draw, scope: Scope, kind: str, begin: str, options: str) -> str:
    """The call of a scan; "" where the loop is another one."""
    count = _count(scope)
    xs = f"({''.join(f'{outer}, ' for _, outer in scope.xs)})"
    stop = f"lambda carry: carry[-1] >= {draw.randint(1, scope.steps + 1)}"
    rest = {
        "scan": xs,
        "length": f"length={count}",
        "reverse": f"{xs}, reverse=True",
        "until": f"{xs}, until={stop}",
        "packed": scope.xs[0][1] if scope.xs else "",
    }.get(kind)
    return f"carry, ys = tl.scan(body, {begin}, {rest}{options})" if rest else ""


def _other(scope: Scope, kind: str, begin: str, options: str) -> str:
    count = _count(scope)
    if kind == "fori":
        return f"carry, ys = tl.fori_loop(0, {count}, body, {begin}{options}), ()"
    conditions = {
        "asked": f"bool(carry[-1] < {count})",
        "rows": "carry[-1] < limits",
        "compact": "carry[-1] < limits",
        "valued": f"(carry[0].abs().sum() < 40) & (carry[-1] < {count})",
        "while": f"carry[-1] < {count}",
    }
    if kind == "compact":
        begin, options = begin.replace(",)", ", limits)"), options + ", compact=True"
        conditions["compact"] = "carry[-2] < carry[-1]"
        return (
            f"carry, ys = tl.while_loop(lambda carry: {conditions[kind]}, "
            f"lambda carry: (*body(carry[:-1]), carry[-1]), {begin}{options}), ()"
        )
    return f"carry, ys = tl.while_loop(lambda carry: {conditions[kind]}, body, {begin}{options}), ()"


def _count(scope: Scope) -> str:
    return f"{scope.steps} + call" if scope.longer else f"{scope.steps}"


def _around(draw: Draw, text: str, threads: bool) -> list[str]:
    """The call in what may be around it."""
    around = draw.among({"": 40, "autocast": 1, "no_grad": 0.6, "threads": 0.5})
    if around == "threads" or threads:
        return ["torch.set_num_threads(2)", text]
    if around == "autocast":
        return ['with torch.autocast("cpu", dtype=torch.bfloat16):', f"    {text}"]
    return ["with torch.no_grad():", f"    {text}"] if around == "no_grad" else [text]
