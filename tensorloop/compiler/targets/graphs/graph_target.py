"""CUDA graphs as a target: any step of torch's operations that a device can record."""

from collections.abc import Sequence

from torch import fx

from tensorloop.compiler.step import Core, Step
from tensorloop.compiler.targets import graphs
from tensorloop.compiler.targets.target import Target


class GraphTarget(Target):
    """Runs a step in torch's operations, as CUDA graphs record them."""

    name, device = "graphs", "cuda"

    def make_core(self, step: Step) -> Core:
        """Returns the step as graphs."""
        return graphs.emit(step)

    def describe(self, step: Step) -> list[str]:
        """Returns what graphs of a step ask of the device, a line each, or why there are none."""
        return graphs.describe(step)

    def launched(self, step: Step) -> list[tuple[int, Sequence[fx.Node]]]:
        """Returns the launches of a step in its graphs, and which operations each does."""
        return graphs.launched(step)
