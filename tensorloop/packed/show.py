"""A packed tensor as text, and in a notebook."""

from typing import Any

from tensorloop._common import html


def write_text(packed: Any) -> str:
    """Shape, rows and values in one line."""
    dim = packed._dim
    rows = len(dim)
    lens = dim._host_lens[:8].tolist() if rows > 10 else dim._host_lens.tolist()
    shown = ", ".join(map(str, lens)) + (f", ... ({rows} rows)" if rows > 10 else "")
    sizes = ", ".join(map(str, packed.shape))
    named = f"name={dim.name!r}, " if dim.name is not None else ""
    return f"PackedTensor(({sizes}), {named}lens=[{shown}], values={packed.values!r})"


def write_html(packed: Any) -> str:
    """Returns HTML that tells what a packed tensor is, what padding would hold, and how long its rows are."""
    lens = packed.lens.tolist()
    padded, values = len(lens) * max([0, *lens]), packed.values
    facts = [
        ("shape", str(packed.shape)),
        ("entries", f"{sum(lens):,} of {padded:,} when padded" if padded else "0"),
        ("bytes of values", f"{values.nbytes:,}"),
        ("dtype", str(values.dtype)),
        ("device", str(values.device)),
        ("requires_grad", str(values.requires_grad)),
    ]
    return html.fragment(["<p><b>PackedTensor</b></p>", html.table(("", ""), facts, (0, 1)), html.bars(lens)])
