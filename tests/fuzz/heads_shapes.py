"""Random lines for packed tensors, entry by entry and of shapes; `heads.py` has those of attention.

A line makes a variable of one or two others. Its text is the same for packed and padded tensors; what a line knows of
its variables is their dims: "B", ragged ones "T", "U" and those that a slice made, `("B", h)` for heads joined with the
batch, and numbers.
"""

import random
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

Dims = tuple[Any, ...]


class Var(NamedTuple):
    """A variable of a program and its dims."""

    name: str
    dims: Dims


class Line(NamedTuple):
    """What is assigned to a new variable, and its dims; `fresh` are sizes that the line after it gives a name."""

    text: str
    dims: Dims
    fresh: str = ""


def is_ragged(d: Any) -> bool:
    """Whether a dim is one of lengths."""
    return isinstance(d, str) and d != "B"


def size(d: Any) -> str:
    """The text of a size."""
    return f"B * {d[1]}" if isinstance(d, tuple) else str(d)


def sizes(dims: Dims) -> str:
    """The text of several."""
    return ", ".join(map(size, dims))


class Writer:
    """Draws lines for one seed. The caller says which of them were kept."""

    def __init__(self, seed: int, shares: dict[Any, int]) -> None:
        self.random = random.Random(seed)
        self.kinds, self.weights = [*shares], [*shares.values()]
        self.pool = [Var("x", ("B", "T", 12)), Var("y", ("B", "U", 12))]
        self.count = 0

    def draw(self) -> tuple[str, Line]:
        """A name and what it is assigned to."""
        while True:
            recent = self.pool[-4:] if self.random.random() < 0.7 else self.pool
            line = self.random.choices(self.kinds, self.weights)[0](self, self.random.choice(recent))
            if line is not None and len(line.dims) <= 6 and _is_sound(line.dims):
                return self.name(), line

    def name(self) -> str:
        """A name that is not used yet."""
        self.count += 1
        return f"v{self.count}"

    def keep(self, name: str, line: Line) -> None:
        """The line ran; others may use what it made."""
        self.pool.append(Var(name, line.dims))

    def dim(self, v: Var, wanted: Callable[[Any], bool]) -> int | None:
        """A dim of this kind, at random."""
        places = [i for i, d in enumerate(v.dims) if wanted(d)]
        return self.random.choice(places) if places else None

    def signed(self, v: Var, i: int) -> int:
        """The dim, counted from either end."""
        return i - len(v.dims) if self.random.random() < 0.4 else i

    def table(self, dims: Dims, kind: str = "float") -> str:
        """An ordinary tensor that broadcasts against these dims."""
        cut = self.random.choice([0, *range(len(dims))])
        shape = [1 if isinstance(d, tuple) or (d not in ("B", "T", "U") and is_ragged(d)) else d for d in dims[cut:]]
        shape = [1 if self.random.random() < 0.3 else d for d in shape]
        return f"given({self.random.randrange(99)}, {kind!r}, {', '.join(map(repr, shape)) or 1})"


def _is_sound(dims: Dims) -> bool:
    if sum(d == "B" or isinstance(d, tuple) for d in dims) > 1:  # of a row beside others a row alone knows nothing
        return False
    return prod(d if isinstance(d, int) else d[1] if isinstance(d, tuple) else 1 for d in dims) <= 200


def _replace(dims: Dims, i: int, *by: Any, n: int = 1) -> Dims:
    return (*dims[:i], *by, *dims[i + n :])


# -- entry by entry

_POINTWISE = (
    *("{0}.sin()", "{0} * 0.5", "-{0}", "1 - {0}", "F.gelu({0})", "torch.tanh({0})", "{0}.clone().mul_(2)"),
    *("{0}.clone().tanh_()", "{0}.contiguous()", "{0}.clone()", "{0}.to(torch.float64)", "{0} ** 2", "{0} / 3"),
    *("F.dropout({0}, 0.0)", "F.dropout({0}, 0.3, training=False)", "{0}.clamp(min=-0.5)", "{0}.double()"),
    *("torch.where({0} > 0, {0}, 0.1)", "torch.zeros_like({0}) + {0}", "{0}.masked_fill({0} > 1, 0.5)"),
    *("{0} + {0}.detach()", "{0}.type_as({0})", "{0}.float().double()", "{0}.exp().log1p()", "{0}.relu().sqrt() * 0"),
    *("{0}.to({0}.device)", "{0}.masked_fill(~({0} <= 1), -2.0)", "torch.addcmul({0}, {0}, {0}, value=0.1)"),
    *("{0}.add({0}, alpha=2)", "torch.lerp({0}, {0}.sin(), 0.3)", "{0}.reshape({0}.shape)", "{0}.view({0}.shape)"),
    *("{0}.expand({0}.shape)", "{0}.view_as({0})", "{0}.expand_as({0})", "{0}[:]", "{0}[...]", "{0}.nan_to_num()"),
)


def pointwise(w: Writer, v: Var) -> Line:
    """One operand."""
    return Line(w.random.choice(_POINTWISE).format(v.name), v.dims)


def beside(w: Writer, v: Var) -> Line:
    """An ordinary tensor beside it."""
    op = w.random.choice(
        ["{0} + {1}", "{1} - {0}", "{0} * {1}", "torch.add({0}, {1}, alpha=0.5)", "{0}.clone().add_({1})"]
    )
    return Line(op.format(v.name, w.table(v.dims)), v.dims)


def two(w: Writer, v: Var) -> Line | None:
    """Two variables of the same dims, or of dims that broadcast."""
    others = [u for u in w.pool if _broadcasts(u.dims, v.dims)]
    u = w.random.choice(others)
    op = w.random.choice(["{0} + {1}", "{1} * {0}", "torch.maximum({0}, {1})", "torch.where({0} > {1}, {0}, {1})"])
    return Line(op.format(v.name, u.name), v.dims)


def _broadcasts(small: Dims, large: Dims) -> bool:
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False))


def mask(w: Writer, v: Var) -> Line:
    """Numbers put where a mask says so: causal, of padding, or at random."""
    hidden = w.table(v.dims, "bool")
    last = v.dims[-2:]
    if len(v.dims) > 2 and last in (("T", "T"), ("U", "U"), ("T", "U"), ("U", "T")):
        a, b = last
        hidden = w.random.choice(
            [
                f"torch.ones(({a}, {b}), dtype=torch.bool).triu(1)",
                f"~(torch.arange({b}) <= torch.arange({a})[:, None])",
                f"torch.triu(torch.ones(({a}, {b})), 1).bool()[None, None]" if len(v.dims) > 3 else hidden,
                f"(torch.arange({b}) >= lens_{b}[:, None])[:, {'None, ' * (len(v.dims) - 2)}:]"
                if v.dims[0] == "B"
                else hidden,
                f"(torch.arange({b})[None] - torch.arange({a})[:, None]).abs() > 2",
            ]
        )
    value = w.random.choice(["-1e9", "float('-inf')", "0.0"] if a_softmax(v.dims) else ["0.0", "0.5"])
    op = w.random.choice(
        ["{0}.masked_fill({1}, {2})", "torch.where({1}, {2}, {0})", "{0}.clone().masked_fill_({1}, {2})"]
    )
    return Line(op.format(v.name, hidden, value), v.dims)


def a_softmax(dims: Dims) -> bool:
    """Whether they are dims of scores of one input, where the diagonal is always seen."""
    return len(dims) > 2 and dims[-1] == dims[-2] and is_ragged(dims[-1])


# -- shapes


def exchange(w: Writer, v: Var) -> Line | None:
    """Dims in another order."""
    n = len(v.dims)
    a, b = w.random.randrange(n), w.random.randrange(n)
    if w.random.random() < 0.6:
        order = [*range(n)]
        order[a], order[b] = b, a
        text = w.random.choice(["{}.transpose({}, {})", "{}.swapaxes({}, {})"]).format(
            v.name, w.signed(v, a), w.signed(v, b)
        )
        return Line(text, tuple(v.dims[i] for i in order))
    order = w.random.sample(range(n), n)
    if w.random.random() < 0.5:
        rest = [i for i in range(n) if i != a]
        return Line(f"{v.name}.movedim({a}, {b})", tuple(v.dims[i] for i in (*rest[:b], a, *rest[b:])))
    return Line(f"{v.name}.permute({', '.join(map(str, order))})", tuple(v.dims[i] for i in order))


def heads_first(w: Writer, v: Var) -> Line | None:
    """(B, T, D) as (B, heads, T, d), in one of the ways that people write."""
    if len(v.dims) != 3 or v.dims[0] != "B" or not is_ragged(v.dims[1]) or not isinstance(v.dims[2], int):
        return None
    t, n = v.dims[1:]
    h = w.random.choice([h for h in (1, 2, 3, 4) if n % h == 0])
    text = w.random.choice(
        [
            f"{v.name}.view(B, {t}, {h}, {n // h}).transpose(1, 2)",
            f"{v.name}.view(B, -1, {h}, {n // h}).transpose(1, 2)",
            f"{v.name}.reshape(B, {t}, {h}, -1).permute(0, 2, 1, 3)",
            f"{v.name}.unflatten(-1, ({h}, -1)).transpose(1, 2)",
            f"{v.name}.view(*{v.name}.shape[:2], {h}, -1).transpose(1, 2)",
            f"torch.stack({v.name}.chunk({h}, -1), 1)",
            f"{v.name}.transpose(0, 1).contiguous().view({t}, B * {h}, {n // h}).transpose(0, 1).view(B, {h}, {t}, -1)",
            f"{v.name}.transpose(1, 2).unflatten(1, ({h}, -1)).transpose(-1, -2)",
        ]
    )
    return Line(text, ("B", h, t, n // h))


_OF_ENTRIES = (
    *("{0}", "{0}.sin()", "F.linear({0}, weight({n}, {n}))", "F.layer_norm({0}, ({n},))", "{0}.softmax(-1)"),
    *("{0} * given(7, 'float', {n})", "torch.cat({0}.chunk(2, -1), 1)", "{0}[:, None].flatten(1)", "{0}.sort(-1)[0]"),
    *("{0}.view(-1, 1).relu().view(-1, {n})", "{0}.clone().masked_fill_({0} > 0, 0.5)", "{0} @ weight({n}, {n})"),
    *(
        "torch.stack([{0}, {0}], 1).mean(1)",
        "{0}[:, torch.arange({n}).flip(0)]",
        "{0}[..., None].mT",
    ),
)


def through_entries(w: Writer, v: Var) -> Line | None:
    """(B, T, *F) as all entries, and back; who moves entries is refused, though here they come to where they were."""
    if (
        len(v.dims) < 3
        or v.dims[0] != "B"
        or not is_ragged(v.dims[1])
        or not all(isinstance(d, int) for d in v.dims[2:])
    ):
        return None
    n = prod(v.dims[2:])
    flat = w.random.choice([f"{v.name}.reshape(-1, {n})", f"{v.name}.flatten(2).flatten(0, 1)"])
    back = w.random.choice(["view(B, -1, {0})", "reshape((B, -1, {0}))", "unflatten(0, (B, -1)).view(B, -1, {0})"])
    text = w.random.choice(_OF_ENTRIES).format("a", n=n)
    return Line(f"(lambda a: {text})({flat}).{back.format(sizes(v.dims[2:]))}", v.dims)


def heads_back(w: Writer, v: Var) -> Line | None:
    """(B, heads, T, d) as (B, T, D)."""
    if len(v.dims) != 4 or v.dims[0] != "B" or not is_ragged(v.dims[2]):
        return None
    _, h, t, d = v.dims
    if not isinstance(h, int) or not isinstance(d, int):
        return None
    text = w.random.choice(
        [
            f"{v.name}.transpose(1, 2).reshape(B, {t}, -1)",
            f"{v.name}.transpose(1, 2).contiguous().view(B, -1, {h} * {d})",
            f"{v.name}.permute(0, 2, 1, 3).flatten(2)",
            f"{v.name}.transpose(1, 2).flatten(-2)",
            f"torch.cat({v.name}.unbind(1), -1)",
            f"torch.cat([a.squeeze(1) for a in {v.name}.chunk({h}, 1)], -1)",
        ]
    )
    return Line(text, ("B", t, h * d))


def part(w: Writer, v: Var) -> Line | None:
    """A feature as two."""
    i = w.dim(v, lambda d: isinstance(d, int) and d > 1)
    if i is None:
        return None
    n = v.dims[i]
    a = w.random.choice([a for a in range(1, n + 1) if n % a == 0])
    dims = _replace(v.dims, i, a, n // a)
    text = w.random.choice(
        [f"unflatten({w.signed(v, i)}, ({a}, {n // a}))", f"view({sizes(dims)})", f"reshape({sizes(dims)})"]
    )
    return Line(f"{v.name}.{text}", dims)


def merge(w: Writer, v: Var) -> Line | None:
    """Two dims as one: features, or the batch with heads."""
    pairs = [i for i in range(len(v.dims) - 1) if isinstance(v.dims[i + 1], int) and not is_ragged(v.dims[i])]
    pairs = [i for i in pairs if not isinstance(v.dims[i], tuple)]
    if not pairs:
        return None
    i = w.random.choice(pairs)
    a, b = v.dims[i : i + 2]
    dims = _replace(v.dims, i, ("B", b) if a == "B" else a * b, n=2)
    with_minus = [*map(size, dims)]
    with_minus[i] = "-1"
    text = w.random.choice(
        [
            f"flatten({i}, {i + 1})",
            f"reshape({sizes(dims)})",
            f"contiguous().view({sizes(dims)})",
            f"reshape({', '.join(with_minus)})",
        ]
    )
    return Line(f"{v.name}.{text}", dims)


def unmerge(w: Writer, v: Var) -> Line | None:
    """The batch without its heads."""
    i = w.dim(v, lambda d: isinstance(d, tuple))
    if i is None:
        return None
    dims = _replace(v.dims, i, "B", v.dims[i][1])
    text = w.random.choice(
        [f"view({sizes(dims)})", f"unflatten({i}, (B, {v.dims[i][1]}))", f"unflatten({i}, (-1, {v.dims[i][1]}))"]
    )
    return Line(f"{v.name}.{text}", dims)


def widen(w: Writer, v: Var) -> Line:
    """A new dim of size 1."""
    i = w.random.randrange(len(v.dims) + 1)
    key = ", ".join([":"] * i + ["None"])
    text = w.random.choice([f"{v.name}.unsqueeze({i})", f"{v.name}[{key}]", f"{v.name}[{key}, ...]"])
    return Line(text, _replace(v.dims, i, 1, n=0))


def narrow(w: Writer, v: Var) -> Line | None:
    """Without a dim of size 1."""
    i = w.dim(v, lambda d: d == 1)
    if i is None:
        return None
    key = ", ".join([":"] * i + ["0"])
    text = w.random.choice([f"{v.name}.squeeze({w.signed(v, i)})", f"{v.name}[{key}]", f"{v.name}.select({i}, 0)"])
    return Line(text, _replace(v.dims, i))


def repeat(w: Writer, v: Var) -> Line | None:
    """Features repeated."""
    i = w.dim(v, lambda d: isinstance(d, int))
    if i is None:
        return None
    if v.dims[i] == 1:
        dims = _replace(v.dims, i, 2)
        every = [size(d) if w.random.random() < 0.5 or k == i else "-1" for k, d in enumerate(dims)]
        return Line(f"{v.name}.expand({', '.join(every)})", dims)
    times = ", ".join("2" if k == i else "1" for k in range(len(v.dims)))
    text = w.random.choice(
        [f"repeat_interleave(2, {w.signed(v, i)})", f"repeat({times})", f"repeat_interleave(2, dim={i})"]
    )
    return Line(f"{v.name}.{text}", _replace(v.dims, i, v.dims[i] * 2))


def piece(w: Writer, v: Var) -> Line | None:
    """Some of a feature dim, or all in another order."""
    i = w.dim(v, lambda d: isinstance(d, int) and d > 1)
    if i is None:
        return None
    n, s = v.dims[i], w.signed(v, i)
    a = w.random.randrange(1, n)
    lead = ":, " * i
    same = [
        f"torch.cat([{v.name}.narrow({i}, {a}, {n - a}), {v.name}.narrow({i}, 0, {a})], {s})",
        f"{v.name}.flip({s})",
    ]
    same += [f"{v.name}.roll({a}, {s})", f"torch.cat({v.name}.split([{a}, {n - a}], dim={s})[::-1], dim={s})"]
    same += [f"{v.name}.index_select({i}, torch.arange({n}).flip(0))", f"torch.stack({v.name}.unbind({s}), {s})"]
    if w.random.random() < 0.5:
        return Line(w.random.choice(same), v.dims)
    if w.random.random() < 0.3:
        text = w.random.choice([f"{v.name}[{lead}{a}]", f"{v.name}.select({s}, {a})", f"{v.name}.unbind({s})[{a}]"])
        return Line(text, _replace(v.dims, i))
    text = w.random.choice(
        [f"{v.name}[{lead}:{a}]", f"{v.name}.narrow({s}, 0, {a})", f"{v.name}.split([{a}, {n - a}], {s})[0]"]
    )
    return Line(text, _replace(v.dims, i, a))


def join(w: Writer, v: Var) -> Line | None:
    """Two variables side by side."""
    u = w.random.choice([u for u in w.pool if u.dims == v.dims])
    if w.random.random() < 0.4:
        i = w.random.randrange(len(v.dims) + 1)
        return Line(f"torch.stack([{v.name}, {u.name}], {i})", _replace(v.dims, i, 2, n=0))
    i = w.dim(v, lambda d: isinstance(d, int))
    if i is None:
        return None
    return Line(f"torch.cat(({v.name}, {u.name}), dim={w.signed(v, i)})", _replace(v.dims, i, 2 * v.dims[i]))


def steps(w: Writer, v: Var) -> Line | None:
    """Some of the ragged dim, or all in another order."""
    i = w.dim(v, is_ragged)
    if i is None:
        return None
    lead, s = ":, " * i, w.signed(v, i)
    if w.random.random() < 0.5:
        same = [f"{v.name}.flip({s})", f"{v.name}.roll(1, {s})", f"{v.name}.cumsum({s})", f"{v.name}.softmax({s})"]
        return Line(w.random.choice(same), v.dims)
    new = f"T{w.count}"
    text = w.random.choice(
        [
            f"{v.name}[{lead}1:]",
            f"{v.name}[{lead}:2]",
            f"{v.name}[{lead}:-1]",
            f"{v.name}[{lead}::2]",
            f"F.pad({v.name}, ({'0, ' * 2 * (len(v.dims) - 1 - i)}1, 0))",
        ]
    )
    return Line(text, _replace(v.dims, i, new), f"{new} = {{}}.shape[{i}]")


def over(w: Writer, v: Var) -> Line | None:
    """A reduction, a norm or a softmax over a dim that is not the batch."""
    i = w.dim(v, lambda d: d != "B" and not isinstance(d, tuple))
    if i is None:
        return None
    s = w.signed(v, i)
    kept = [
        f"{v.name}.softmax({s})",
        f"F.softmax({v.name}, dim={s}, dtype=torch.float64)",
        f"{v.name}.log_softmax(dim={s})",
    ]
    kept += [
        f"F.softmax({v.name}.float(), {s}, dtype=torch.float32).to(torch.float64)",
        f"torch.softmax({v.name}, {s})",
    ]
    kept += [f"{v.name} - {v.name}.mean({s}, keepdim=True)", f"{v.name} / (1 + {v.name}.norm(dim={s}, keepdim=True))"]
    kept += [f"{v.name} - {v.name}.logsumexp({s}, keepdim=True)", f"F.normalize({v.name}, dim={s})"]
    if w.random.random() < 0.7:
        return Line(w.random.choice(kept), v.dims)
    how = w.random.choice(["sum", "mean", "amax", "logsumexp", "std"])
    if w.random.random() < 0.3 and isinstance(v.dims[i], int):
        return Line(f"{v.name}.{how}({s}, keepdim=True)", _replace(v.dims, i, 1))
    return Line(f"{v.name}.{how}({s})", _replace(v.dims, i))


def layer(w: Writer, v: Var) -> Line | None:
    """What works on the last dim."""
    n = v.dims[-1]
    if not isinstance(n, int):
        return None
    m = w.random.choice([4, 6, 12, n])
    text = w.random.choice(
        [
            f"F.linear({v.name}, weight({m}, {n}))",
            f"F.linear({v.name}, weight({m}, {n}), weight({m}))",
            f"{v.name} @ weight({n}, {m})",
            f"torch.matmul({v.name}, weight({n}, {m}))",
        ]
    )
    if w.random.random() < 0.4:
        m, text = n, w.random.choice([f"F.layer_norm({v.name}, ({n},))", f"F.rms_norm({v.name}, ({n},), weight({n}))"])
    return Line(text, (*v.dims[:-1], m))


def rotary(w: Writer, v: Var) -> Line | None:
    """Positions turned into the last dim, by halves or by complex numbers, or a table of them added."""
    if len(v.dims) < 3 or v.dims[-2] not in ("T", "U") or not isinstance(v.dims[-1], int) or v.dims[-1] % 2:
        return None
    t, n = v.dims[-2:]
    half = n // 2
    angles = f"(torch.arange({t})[:, None] * given(1, 'float', {half}))"
    twice = f"torch.cat([{angles}] * 2, -1)"
    turned = f"torch.cat([-{v.name}[..., {half}:], {v.name}[..., :{half}]], -1)"
    pairs = f"torch.view_as_complex({v.name}.unflatten(-1, ({half}, 2)).contiguous())"
    ones = f"torch.ones((99, {half}), dtype=torch.float64)"
    text = w.random.choice(
        [
            f"{v.name} * {twice}.cos() + {turned} * {twice}.sin()",
            f"torch.view_as_real({pairs} * torch.polar(torch.ones_like({angles}), {angles})).flatten(-2)",
            f"torch.view_as_real({pairs} * torch.polar({ones}, given(2, 'float', 99, {half}))[:{t}]).flatten(-2)",
            f"{v.name} + given(3, 'float', 99, {n})[:{t}]",
            f"{v.name} + given(3, 'float', 99, {n})[torch.arange({t})]",
            f"{v.name} + F.embedding(torch.arange({t}), given(3, 'float', 99, {n}))",
        ]
    )
    return Line(text, v.dims)


SHARES: dict[Any, int] = {
    **{pointwise: 4, beside: 4, two: 3, mask: 4, exchange: 5, heads_first: 8, heads_back: 5, part: 3, merge: 3},
    **{unmerge: 3, widen: 2, narrow: 3, repeat: 2, piece: 3, join: 2, steps: 2, over: 4, layer: 4, rotary: 4},
    through_entries: 3,
}
