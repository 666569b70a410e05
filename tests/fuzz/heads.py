"""Random lines of attention as it is written, for packed tensors: `heads_run.py` runs them."""

from typing import Any

from tests.fuzz import heads_shapes
from tests.fuzz.heads_shapes import Dims, Line, Var, Writer, is_ragged

# -- products


def product(w: Writer, v: Var) -> Line | None:
    """A matrix product with another variable: scores, or scores with values."""
    found = [(u, out) for u in w.pool if (out := _matmul(v.dims, u.dims)) is not None]
    if not found:
        return None
    u, out = w.random.choice(found)
    ways = ["{0} @ {1}", "torch.matmul({0}, {1})", "{0}.matmul({1})"]
    if len(v.dims) == len(u.dims) == 3:
        ways += [
            "torch.bmm({0}, {1})",
            "torch.baddbmm(torch.empty(1, dtype=torch.float64), {0}, {1}, beta=0, alpha=0.5)",
        ]
    if len(v.dims) == len(u.dims) == len(out) and v.dims[:-2] == u.dims[:-2]:
        lead = "abcefg"[: len(out) - 2]
        ways += [f"torch.einsum('{lead}ij,{lead}jk->{lead}ik', {{0}}, {{1}})"] * 2
    return Line(w.random.choice(ways).format(v.name, u.name), out)


def _matmul(a: Dims, b: Dims) -> Dims | None:
    if min(len(a), len(b)) < 2 or a[-1] != b[-2] or a[-1] == "B" or isinstance(a[-1], tuple):
        return None
    n = max(len(a), len(b)) - 2
    leads = [(1,) * (n + 2 - len(x)) + x[:-2] for x in (a, b)]
    if any(p != q and 1 not in (p, q) for p, q in zip(*leads, strict=True)):
        return None
    return (*(q if p == 1 else p for p, q in zip(*leads, strict=True)), a[-2], b[-1])


def scores(w: Writer, v: Var) -> Line | None:
    """Of the variable with itself, or with one of the same heads."""
    if len(v.dims) < 3 or not is_ragged(v.dims[-2]) or not isinstance(v.dims[-1], int):
        return None
    keys = [u for u in w.pool if u.dims[:-2] == v.dims[:-2] and u.dims[-1] == v.dims[-1] and is_ragged(u.dims[-2])]
    u = w.random.choice(keys)
    lead = "abcefg"[: len(v.dims) - 2]
    ways = ["{0} @ {1}.transpose(-2, -1)", "torch.matmul({0}, {1}.transpose(-1, -2)) / 2", "({0} * 0.5) @ {1}.mT"]
    ways.append(f"torch.einsum('{lead}id,{lead}jd->{lead}ij', {{0}}, {{1}})")
    return Line(w.random.choice(ways).format(v.name, u.name), (*v.dims[:-1], u.dims[-2]))


def einsum(w: Writer, v: Var) -> Line | None:
    """Time before heads: (B, T, H, d) with (B, S, H, d)."""
    if len(v.dims) != 4 or v.dims[0] != "B" or not is_ragged(v.dims[1]):
        return None
    u = w.random.choice([u for u in w.pool if len(u.dims) == 4 and u.dims[2:] == v.dims[2:] and is_ragged(u.dims[1])])
    if u.dims[0] != "B":
        return None
    return Line(f"torch.einsum('bihd,bjhd->bhij', {v.name}, {u.name})", ("B", v.dims[2], v.dims[1], u.dims[1]))


# -- attention


def sdpa(w: Writer, v: Var) -> Line | None:
    """torch's function, with its options."""
    if len(v.dims) < 3 or v.dims[-2] not in ("T", "U") or not isinstance(v.dims[-1], int):
        return None
    d = v.dims[-1]
    keys = [u for u in w.pool if u.dims[:-2] == v.dims[:-2] and u.dims[-1] == d and u.dims[-2] in ("T", "U")]
    k = w.random.choice(keys)
    value = w.random.choice([u for u in w.pool if u.dims[:-1] == k.dims[:-1] and isinstance(u.dims[-1], int)])
    options = w.random.choice(
        ["", "", ", is_causal=True", ", scale=0.3", ", dropout_p=0.0", ", is_causal=True, scale=1.0"]
    )
    if w.random.random() < 0.5 and v.dims[0] == "B":
        options = f", {_mask_of(w, v, k)}"
    return Line(
        f"F.scaled_dot_product_attention({v.name}, {k.name}, {value.name}{options})", (*v.dims[:-1], value.dims[-1])
    )


def _mask_of(w: Writer, v: Var, k: Var) -> str:
    a, b, n = v.dims[-2], k.dims[-2], len(v.dims)
    ones, none = ", 1" * (n - 2), "None, " * (n - 2)
    ways = [
        f"attn_mask=torch.ones(({a}, {b}), dtype=torch.bool).tril()",
        f"attn_mask=(torch.arange({b}) < lens_{b}[:, None])[:, {none}:]",
        f"attn_mask=given({w.random.randrange(9)}, 'float', {a!r}, {b!r})",
        f"attn_mask=given({w.random.randrange(9)}, 'float', {a!r}, {b!r}).requires_grad_()",
        f"attn_mask=given({w.random.randrange(9)}, 'float', 'B'{ones}, {b!r})",
        f"attn_mask=given({w.random.randrange(9)}, 'float', {', '.join(map(repr, v.dims[:-1]))}, {b!r})",
        f"attn_mask=torch.zeros(B, 1, {a}, {b}, dtype=torch.float64)" if n == 4 else "attn_mask=None",
        f"attn_mask=(torch.arange({b}) - torch.arange({a})[:, None]).abs() < 3",
        f"attn_mask=given({w.random.randrange(9)}, 'bool', {a!r}, {b!r})",
        f"attn_mask=torch.full(({a}, {b}), -torch.inf, dtype=torch.float64).triu(1)",
        f"attn_mask=torch.triu(torch.full(({a}, {b}), -1e9, dtype=torch.float64), 1)",
    ]
    return w.random.choice(ways)


def grouped(w: Writer, v: Var) -> Line | None:
    """Fewer heads of keys than of queries."""
    if len(v.dims) != 4 or v.dims[0] != "B" or v.dims[2] not in ("T", "U") or not isinstance(v.dims[1], int):
        return None
    if not isinstance(v.dims[3], int):
        return None
    keys = [
        u
        for u in w.pool
        if len(u.dims) == 4 and u.dims[0] == "B" and u.dims[2] in ("T", "U") and u.dims[3] == v.dims[3]
    ]
    keys = [u for u in keys if isinstance(u.dims[1], int) and v.dims[1] % u.dims[1] == 0]
    k = w.random.choice(keys)
    return Line(f"F.scaled_dot_product_attention({v.name}, {k.name}, {k.name}, enable_gqa=True)", v.dims)


def layer_of_torch(w: Writer, v: Var) -> Line | None:
    """nn.MultiheadAttention, encoder and decoder layers, with masks."""
    if v.dims not in (("B", "T", 12), ("B", "U", 12)):
        return None
    t = v.dims[1]
    k = w.random.choice([u for u in w.pool if u.dims in (("B", "T", 12), ("B", "U", 12))])
    s = k.dims[1]
    masks = w.random.choice(
        [
            "",
            "",
            f", attn_mask=torch.triu(torch.ones(({t}, {s}), dtype=torch.bool), 1)",
            f", attn_mask=given({w.random.randrange(9)}, 'float', {t!r}, {s!r})",
            f", key_padding_mask=torch.arange({s}) >= lens_{s}[:, None]",
            f", key_padding_mask=torch.zeros(B, {s}, dtype=torch.bool)",
            f", key_padding_mask=given({w.random.randrange(9)}, 'float', 'B', {s!r})",
            f", attn_mask=given({w.random.randrange(9)}, 'heads', 'B', {t!r}, {s!r})",
        ]
    )
    call = f"mha({v.name}, {k.name}, {k.name}{masks}"
    if t == s and w.random.random() < 0.4:
        mask_of = f"nn.Transformer.generate_square_subsequent_mask({t}, dtype=torch.float64)"
        which = w.random.choice(["encoder", "encoder_first"])
        options = w.random.choice(
            [
                "",
                f", {mask_of}",
                f", src_mask={mask_of}, is_causal=True",
                f", src_key_padding_mask=torch.arange({t}) >= lens_{t}[:, None]",
            ]
        )
        return Line(f"{which}({v.name}{options})", v.dims)
    if w.random.random() < 0.3:
        mask_of = f"torch.ones(({t}, {t}), dtype=torch.bool).triu(1)"
        options = w.random.choice(
            ["", f", tgt_mask={mask_of}", f", memory_key_padding_mask=torch.arange({s}) >= lens_{s}[:, None]"]
        )
        return Line(f"decoder({v.name}, {k.name}{options})", v.dims)
    if w.random.random() < 0.3:
        return Line(f"{call})[1]", ("B", t, s))
    if w.random.random() < 0.3:
        return Line(f"{call}, average_attn_weights=False)[1]", ("B", 2, t, s))
    return Line(f"{call}, need_weights={w.random.random() < 0.5})[0]", v.dims)


SHARES: dict[Any, int] = heads_shapes.SHARES | {
    **{product: 8, scores: 6, einsum: 3, sdpa: 5, grouped: 2, layer_of_torch: 3},
}
