"""Which torch functions take packed tensors, in which form: the page `docs/packed_functions.md`, made from the table.

    python -m docs.packed_functions

A test holds that the page is current.
"""

from pathlib import Path

import tensorloop.packed.by_size
import tensorloop.packed.static.static  # noqa: F401 - the handlers of each form are entered
from tensorloop.packed.table.dispatch import ALONG_FEATURES, HANDLED, is_taken
from tensorloop.packed.table.operations import TABLE
from tensorloop.packed.table.row import (
    ALONG,
    CHANNELS,
    CLASSES,
    IMAGES,
    LAST,
    LAYER,
    OTHER,
    PRODUCT,
    ROWS,
    SCORES,
    SHAPE,
    STATIC,
    VIEWS,
    WHOLE,
    Lacks,
    Row,
)

PAGE = Path(__file__).parent / "packed_functions.md"
SECTIONS = {
    ALONG: ("Along a dim", "They are right along any dim, the ragged one among them: each row by itself."),
    LAST: ("On the last features", "They see the features of one entry."),
    WHOLE: ("Losses of pairs, facts, new tensors", "They do not ask which dim is which."),
    CLASSES: ("Losses of classes", "Classes are dim 2 of (B, T\\*, V), or dim 1 of (B, V, T\\*)."),
    LAYER: ("Layers that mix time", "They take channels first: `p.transpose(1, 2)` for (B, C, T\\*)."),
    SHAPE: ("Shapes", "Batch and ragged dim may stand anywhere; features move among themselves."),
    PRODUCT: ("Products", "A ragged dim that both factors have gives scores, or is summed over."),
    OTHER: ("Others", ""),
}
HEAD = """# Functions of packed tensors

torch functions that take a [packed tensor](packed.md), by what they do. The page is made from the table that the
library itself looks functions up in: `python -m docs.packed_functions`. Functions that treat entries alike (`exp`,
`add`, `where`, `dropout` ...) are taken in every form, and are not listed; torch's tag `pointwise` tells them.

*Rows first* is (B, T\\*, \\*F). *Turned* has the same dims in another order, heads first or time first. *Channels
first* is (B, C, T\\*), or (B, C, T\\*, F) where it says images. *Scores* are (B, H, T\\*, S\\*). *Static* is a
`StaticPackedTensor`, where *features* means along feature dims alone. *Pads* means that rows are padded for it, with a
`PackedFallbackWarning`. A dash is a `TypeError` that says what to write.

"""
COLUMNS = "| function | rows first | turned | channels first | scores | static |\n" + "| --- " * 6 + "|"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(text())


def text() -> str:
    """Returns the page."""
    parts = [HEAD.rstrip("\n")]
    for kind, (title, about) in SECTIONS.items():
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in TABLE.values():
            if row.kind == kind and any(cell != "-" for cell in _cells(row)):
                groups.setdefault(_cells(row), []).append(row.name)
        lines = [
            f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(cells)} |" for cells, names in groups.items()
        ]
        parts.append("\n\n".join(filter(None, (f"## {title}", about, "\n".join((COLUMNS, *lines))))))
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    layers = [form for form in (CHANNELS, IMAGES) if row.name in HANDLED[form]]
    turned = _cell(row, VIEWS) if row.kind != LAYER else "-"
    channels = "images" if layers == [IMAGES] else "yes" if layers else turned
    return _cell(row, ROWS), turned, channels, _cell(row, SCORES), _cell(row, STATIC)


def _cell(row: Row, form: str) -> str:
    if form == STATIC and row.name in ALONG_FEATURES and row.name not in HANDLED[STATIC]:
        return "features"
    if is_taken(row.name, form):
        return "pads" if form == ROWS and "pads" in row.says else "yes"
    found = row.runs.get(form)
    return f"- ({found.cure})" if isinstance(found, Lacks) and form != ROWS else "-"


if __name__ == "__main__":
    main()
