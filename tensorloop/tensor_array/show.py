"""An array in a notebook."""

from typing import Any

from tensorloop._common import html


def write_html(array: Any) -> str:
    """Returns HTML that tells what an array is, and what it holds of memory."""
    facts = [
        ("slots", f"{array._length}" + (f", of which {array._holes.count(1)} are holes" if array._holes else "")),
        ("element_shape", str(array.element_shape)),
        ("dtype", str(array.dtype)),
        ("device", str(array.device)),
        ("bytes held", f"{array.nbytes:,}"),
        ("requires_grad", str(array._store is not None and array._store.requires_grad)),
    ]
    return html.fragment(["<p><b>TensorArray</b></p>", html.table(("", ""), facts, (0, 1))])
