"""The rooms of the library and the imports between them, read from the source, and drawn: `python -m docs.house`.

The picture is `docs/images/house.svg`; a test holds that it is current. An arrow goes from a room to one that it
imports; where a longer way leads to the same room the short arrow is left out. The ground, which everybody may use, is
the bar below; what stands at the side uses the rooms, and no room uses it.
"""

import ast
import functools
import graphlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "tensorloop"
PICTURE = Path(__file__).parent / "images" / "house.svg"
GROUND = {"_torch", "_common"}  # everybody may import these; `_common` stands on `_torch`
SIDE = {"memory", "testing", "same", "reference"}  # these may import anything, and nobody imports them
WHAT = {  # what is in a room, in so many words as a box takes
    "hf": "transformers models in loops",
    "beam": "beam search, trained through",
    "risk": "objectives over hypotheses",
    "ordering": "sparse block masks",
    "loop": "scan, while_loop, map",
    "attention": "packed, padded, buffers",
    "packed": "PackedTensor, Dim",
    "tensor_array": "the loop buffer",
    "compat": "torch's loops, by name",
    "distributed": "time that processes share",
    "regroup": "columns of many tensors",
    "compiler": "a step's graph to machine code",
    "kernels": "operation x device",
    "schedule": "which carries to keep",
    "cuda": "door to tensorloop_cuda",
    "memory": "bytes, lines, pictures",
    "testing": "assertions, ports compared",
    "same": "python -m tensorloop.same",
    "reference": "the oracle",
    "_common": "pytrees, arguments, scope, errors",
    "_torch": "private names of torch, each once",
}
_BOX, _HEIGHT, _GAP, _RISE = 196, 48, 28, 58


class Import(NamedTuple):
    """What one module names of another: `from a import b` is `a.b`; a late one is an argument as written."""

    name: str
    late: bool = False


def modules() -> dict[str, str]:
    """Dotted names below tensorloop (`regroup`, `packed.dim`; a face is `packed`) -> source."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path.read_text()
    return found


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """All that is in a source."""
    return list(ast.walk(ast.parse(source)))


@functools.cache
def imports(source: str) -> list[Import]:
    """Everything that a source imports, in functions too, and what it loads by `import_module` or `late`."""
    found: list[Import] = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += [Import(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (f"{node.module}." if node.module else "")
            found += [Import(base + alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "late"):
            found.append(Import(ast.unparse(node.args[0]), late=True))
    return found


def room(module: str) -> str:
    """The folder or single file that a module is in."""
    return module.split(".")[0]


def target(name: str, known: Mapping[str, str]) -> str:
    """The module of ours that `tensorloop.a.b.c` is in."""
    inner = name.split(".")[1:]
    prefixes = (".".join(inner[:n]) for n in range(len(inner), 0, -1))
    return next((prefix for prefix in prefixes if prefix in known), "__init__")


def graph(known: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports, late doors left out."""
    edges: dict[str, set[str]] = {module: set() for module in known}
    for module, source in known.items():
        for found in imports(source):
            if not found.late and found.name.split(".")[0] == "tensorloop":
                edges[module].add(target(found.name, known))
        edges[module].discard(module)
    return edges


def arrows(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Room -> rooms that it imports."""
    found: dict[str, set[str]] = {}
    for module, used in edges.items():
        found.setdefault(room(module), set()).update(room(other) for other in used)
    for name, used in found.items():
        used.discard(name)
    found.pop("__init__", None)
    return found


def layers(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """From the top down, each just above the highest that it imports; what imports nothing, just below its users.

    A circle is a `graphlib.CycleError`.
    """
    height: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(edges).static_order():
        height[name] = max((height[other] + 1 for other in edges.get(name, ())), default=0)
    for name in [name for name in height if not edges.get(name)]:
        height[name] = min((height[user] - 1 for user, used in edges.items() if name in used), default=0)
    return [sorted(name for name in height if height[name] == n) for n in range(max(height.values()), -1, -1)]


def direct(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The edges that no longer way replaces."""
    below: dict[str, set[str]] = {}
    for name in graphlib.TopologicalSorter(edges).static_order():
        below[name] = {far for other in edges.get(name, ()) for far in {other, *below[other]}}
    return {name: used - {far for other in used for far in below[other]} for name, used in edges.items()}


def draw(known: Mapping[str, str]) -> str:
    """The picture, as SVG."""
    between = arrows(graph(known))
    rooms = {name: used - GROUND for name, used in between.items() if name not in GROUND | SIDE}
    rows = layers(rooms)
    inner = max(len(row) for row in rows) * (_BOX + _GAP) - _GAP
    width = inner + _BOX + 4 * _GAP
    top = {name: _GAP + n * (_HEIGHT + _RISE) for n, row in enumerate(rows) for name in row}
    left = _places(rows, rooms, inner)
    bottom = len(rows) * (_HEIGHT + _RISE) - _RISE + 2 * _GAP
    height = bottom + 2 * _HEIGHT + 8 + _GAP
    parts = [
        _arrow(left[a], top[a], left[b], top[b]) for a, used in sorted(direct(rooms).items()) for b in sorted(used)
    ]
    parts += [_box(left[name], top[name], name) for name in sorted(rooms)]
    for k, name in enumerate(sorted(SIDE)):
        parts.append(_box(width - _BOX - _GAP, _GAP + k * (_HEIGHT + _GAP), name, dashed=True))
    for k, name in enumerate(sorted(GROUND)):
        parts.append(_box(_GAP, bottom + k * (_HEIGHT + 8), name, width - 2 * _GAP))
    return frame(width, height, parts)


def frame(width: int, height: int, parts: Sequence[str], background: str = 'fill="#ffffff"') -> str:
    """An SVG of that size around its parts, whose arrows may end in `url(#tip)`."""
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f'<defs>{tip}<path d="M0 0 8 4 0 8z" fill="#444444"/></marker></defs>',
            f'<rect width="{width}" height="{height}" {background}/>',
            *parts,
            "</svg>\n",
        ]
    )


def _places(rows: list[list[str]], rooms: Mapping[str, set[str]], width: int) -> dict[str, int]:
    """The left edge of each box: from the top down, in the order of the middles of those that use it."""
    left: dict[str, int] = {}
    for row in rows:
        above = {name: [left[user] for user, used in rooms.items() if name in used and user in left] for name in row}
        wanted = {name: sum(xs) / len(xs) if xs else width / 2 for name, xs in above.items()}
        gap = (width - len(row) * _BOX) // (len(row) + 1) if len(row) > 1 else (width - _BOX) // 2
        gap = max(gap, 0)
        for k, name in enumerate(sorted(row, key=lambda name: (wanted[name], name))):
            left[name] = _GAP + gap + k * (_BOX + gap)
    return left


def _box(x: int, y: int, name: str, width: int = _BOX, *, dashed: bool = False) -> str:
    stroke = ' stroke-dasharray="5 3"' if dashed else ""
    fill = "#eef3f8" if name in GROUND else "#ffffff"
    middle = x + width // 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{_HEIGHT}" rx="4" fill="{fill}" stroke="#444444"{stroke}/>'
        f'<text x="{middle}" y="{y + 20}" text-anchor="middle" font-size="15" font-weight="bold">{escape(name)}</text>'
        f'<text x="{middle}" y="{y + 38}" text-anchor="middle" font-size="12">{escape(WHAT[name])}</text>'
    )


def _arrow(x0: int, y0: int, x1: int, y1: int) -> str:
    """From the bottom of one box to the top of another, bent so that it leaves and enters upright."""
    a, b = x0 + _BOX // 2, x1 + _BOX // 2
    start, end = y0 + _HEIGHT, y1 - 2
    bend = (end - start) // 2
    path = f"M{a} {start} C{a} {start + bend} {b} {end - bend} {b} {end}"
    return f'<path d="{path}" fill="none" stroke="#444444" stroke-width="1.3" marker-end="url(#tip)"/>'


def main() -> None:
    """Draws the picture, and prints what there is in figures."""
    known = modules()
    edges = graph(known)
    between = arrows(edges)
    files = sum("." not in module and not (PACKAGE / module).is_dir() for module in known)
    lines = sum(source.count("\n") for source in known.values())
    print(f"{len(known)} modules, {files} of them files at the top; {lines:,} lines")
    print(f"layers: {len(layers(edges))} of modules, {len(layers(between))} of rooms")
    print(f"arrows between rooms: {sum(map(len, between.values()))}")
    PICTURE.write_text(draw(known))


if __name__ == "__main__":
    main()
