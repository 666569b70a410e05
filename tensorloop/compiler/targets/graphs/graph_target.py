"""CUDA graphs as a target: any step of torch's operations that a device can record."""

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
