"""The templates of statements by family, and how often each family is drawn."""

from tests.fuzz.edges import EDGES, INDICES, MAXIMA, SURROUNDINGS
from tests.fuzz.statements import POINTWISE, SUMS, VIEWS, WRITES

FAMILIES = {
    "pointwise": (POINTWISE, 5.0),
    "views": (VIEWS, 3.0),
    "writes": (WRITES, 2.0),
    "maxima": (MAXIMA, 3.0),
    "edges": (EDGES, 3.0),
    "indices": (INDICES, 2.0),
    "sums": (SUMS, 3.0),
    "surroundings": (SURROUNDINGS, 1.0),
}


def templates(text: str) -> list[str]:
    """The templates of a family, each binding {o}."""
    lines = [line.replace("\\n", "\n") for line in text.strip().splitlines()]
    return [line if "{o}" in line else f"{{o}} = {line}" for line in lines]


TABLES = {name: templates(text) for name, (text, _) in FAMILIES.items()}
WEIGHTS = {name: weight for name, (_, weight) in FAMILIES.items()}
