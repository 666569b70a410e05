"""Walks along the edges of a graph: what a node leads to, and what it is made from."""

from collections.abc import Iterable

from torch import fx


def depends_on(nodes: Iterable[fx.Node], roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots, and all nodes that anything of them goes into."""
    found = set(roots)
    for n in nodes:
        if any(a in found for a in n.all_input_nodes):
            found.add(n)
    return found


def needed_for(targets: Iterable[fx.Node | None], stop: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The targets and all that goes into them; what goes into a node of `stop` does not count."""
    stops, found = set(stop), set[fx.Node]()
    left = [n for n in targets if n is not None]
    while left:
        n = left.pop()
        if n not in found:
            found.add(n)
            if n not in stops:
                left += n.all_input_nodes
    return found
