"""The targets that there are."""

from tensorloop.compiler.targets.cpu.cpu_target import CpuTarget
from tensorloop.compiler.targets.eager import EagerTarget
from tensorloop.compiler.targets.graphs.graph_target import GraphTarget
from tensorloop.compiler.targets.ptx.ptx_target import PtxTarget
from tensorloop.compiler.targets.target import Target

EAGER = EagerTarget()
CPU, GRAPHS = CpuTarget(EAGER), GraphTarget(EAGER)
TARGETS: tuple[Target, ...] = (CPU, PtxTarget(GRAPHS), GRAPHS, EAGER)  # a device is for the first that is asked for
