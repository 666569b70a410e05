"""The shape of each room: how many boxes stand in it, on how many floors, with how many arrows between them.

A box is a file or a folder at one level; an arrow goes from a box to one that it imports; boxes on one floor do not
import each other. Bounds may be lowered as a room gets simpler; what raises one says why in docs/decisions/.
"""

import pytest

from docs.house import graph, layers, modules

# Room -> boxes, floors, arrows.
BOUNDS: dict[str, tuple[int, int, int]] = {}


def shape(room: str, edges: dict[str, set[str]]) -> tuple[int, int, int]:
    """Boxes, floors and arrows of a room."""
    inside = {module: _box(room, module) for module in edges if module.startswith(f"{room}.")}
    found: dict[str, set[str]] = {box: set() for box in inside.values()}
    for module, box in inside.items():
        found[box] |= {inside[there] for there in edges[module] if there in inside} - {box}
    return len(found), len(layers(found)), sum(map(len, found.values()))


def _box(room: str, module: str) -> str:
    return module.removeprefix(f"{room}.").split(".")[0]


def test_bounds_are_of_rooms_that_there_are() -> None:
    folders = {module.rpartition(".")[0] for module in modules()} - {""}
    assert folders | {room for folder in folders for room in _around(folder)} == BOUNDS.keys()


def _around(folder: str) -> set[str]:
    parts = folder.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


@pytest.mark.parametrize("room", BOUNDS)
def test_a_room_is_no_larger_than_it_was(room: str) -> None:
    found = shape(room, graph(modules()))
    assert all(n <= most for n, most in zip(found, BOUNDS[room], strict=True)), f"{room} has {found}"


def test_a_shape_is_counted() -> None:
    edges = {"a.b": {"a.c.d", "a.e"}, "a.c.d": {"a.e", "a.c.f"}, "a.c.f": set[str](), "a.e": set[str](), "g": {"a.b"}}
    assert shape("a", edges) == (3, 3, 3)
    assert shape("a.c", edges) == (2, 2, 1)
