"""The shape of each room: how many boxes stand in it, on how many floors, with how many arrows between them.

A box is a file or a folder at one level; an arrow goes from a box to one that it imports; boxes on one floor do not
import each other. Bounds may be lowered as a room gets simpler; what raises one says why in docs/decisions/.
"""

import pytest

from docs.house import graph, layers, modules

# Room -> boxes, floors, arrows.
BOUNDS: dict[str, tuple[int, int, int]] = {
    "_common": (18, 4, 5),
    "_torch": (20, 3, 13),  # 0061
    "attention": (15, 8, 23),
    "beam": (19, 7, 42),
    "compiler": (13, 7, 44),
    "compiler.divide": (6, 4, 5),
    "compiler.emitter": (5, 4, 7),
    "compiler.emitter.device": (14, 7, 30),
    "compiler.emitter.ir": (7, 3, 5),
    "compiler.emitter.lower": (11, 5, 20),
    "compiler.emitter.write": (17, 4, 34),
    "compiler.graph": (12, 5, 14),
    "compiler.targets": (9, 6, 19),
    "compiler.targets.cpu": (10, 4, 14),
    "compiler.targets.graphs": (11, 5, 20),
    "compiler.targets.ptx": (6, 4, 7),
    "distributed": (7, 5, 12),  # 0061
    "hf": (24, 9, 65),  # 0056
    "hf.rows": (8, 4, 13),
    "kernels": (9, 5, 13),
    "kernels.cpu": (20, 4, 51),
    "kernels.eager": (11, 2, 2),
    "loop": (35, 12, 145),  # 0059
    "loop.checkpoint": (32, 11, 81),
    "loop.compiled": (10, 7, 18),  # 0062
    "loop.compiled.in_graphs": (4, 3, 4),
    "loop.compiled.look": (23, 12, 62),
    "loop.compiled.run": (13, 7, 27),
    "loop.effects": (11, 9, 33),
    "memory": (9, 5, 15),
    "memory.counting": (9, 3, 12),
    "memory.report": (8, 6, 14),
    "memory.scaling": (2, 2, 1),
    "ordering": (13, 7, 28),
    "packed": (14, 8, 37),
    "packed.loaders": (2, 1, 0),
    "packed.operations": (14, 4, 9),
    "packed.other_layouts": (3, 1, 0),
    "packed.rows": (6, 2, 5),
    "packed.scores": (7, 4, 8),
    "packed.static": (5, 4, 7),
    "packed.table": (19, 9, 42),
    "packed.time": (6, 2, 3),
    "packed.views": (2, 1, 0),
    "risk": (4, 2, 2),
    "schedule": (9, 5, 19),
    "tensor_array": (14, 6, 29),
    "testing": (7, 4, 10),
}


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
