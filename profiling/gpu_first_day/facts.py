"""What the machine is, and what the rest depends on: versions, the driver, what a launch and a node of a graph cost."""

import gc
import importlib.metadata
import os
import platform
import shutil
from typing import Any

import torch
from gpu_first_day.kept import ABSENT
from gpu_first_day.world import PRETENDED, Items, World

PACKAGES = (
    "torch",
    "triton",
    "numba",
    "llvmlite",
    "numba-cuda",
    "numpy",
    "pytest",
    "hypothesis",
    "transformers",
    "jax",
)
TOOLS = ("ptxas", "nvcc", "cuobjdump", "nvdisasm", "ncu", "compute-sanitizer", "g++", "nvidia-smi")
ANYWHERE = ("versions", "tools")
ADDITIONS = 100
TAKEN = 2**20  # bytes: a workspace of cuBLAS is more


def items(world: World) -> Items:
    return {
        "versions": versions,
        "tools": tools,
        "device": lambda: device(world),
        "kernels": kernels,
        "a launch and a node of a graph": lambda: launches(world),
        "a small kernel by numba-CUDA beside torch": lambda: small_kernel(world),
        "workspaces of graphs on one stream": lambda: workspaces(world),
        "streams of torch's pool": lambda: streams(world),
    }


def tool_at(tool: str) -> str:
    """Where a tool of NVIDIA's is: on the PATH, or where CUDA is usually installed."""
    home = os.environ.get("CUDA_HOME", os.sep + os.path.join("usr", "local", "cuda"))
    return shutil.which(tool) or shutil.which(tool, path=os.path.join(home, "bin")) or ""


def tools() -> dict[str, Any]:
    found = {tool: tool_at(tool) or "not there" for tool in TOOLS}
    return found | {"said": ", ".join(tool for tool in TOOLS if found[tool] != "not there") or "none"}


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    try:
        import llvmlite.binding as llvm

        found["LLVM"] = ".".join(str(n) for n in llvm.llvm_version_info)
    except Exception as error:  # numba without llvmlite, or one that does not load
        found["LLVM"] = f"not there: {error}"
    found["CUDA of torch"] = torch.version.cuda or "none"
    return found | {"said": ", ".join(f"{name} {version}" for name, version in found.items())}


def device(world: World) -> dict[str, Any]:
    if world.rehearsed:
        return {"name": "pretended", "said": "a pretended device: nothing here is a time, or a driver's"}
    found = torch.cuda.get_device_properties(0)
    told = {"name": found.name, "capability": f"{found.major}.{found.minor}", "memory": found.total_memory}
    told["multiprocessors"] = found.multi_processor_count
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    status, text = world.ran([tool_at("nvidia-smi") or "nvidia-smi", query, "--format=csv,noheader"])
    told["driver and clocks"] = text.strip() if not status else "nvidia-smi failed"
    return told | {"said": f"{found.name}, {told['driver and clocks']}"}


def kernels() -> dict[str, Any]:
    """Whether kernels can be: those of loops by the driver, the others by numba-CUDA."""
    from tensorloop import cuda
    from tensorloop.compiler.step import Unsupported
    from tensorloop.compiler.targets.ptx import driver

    try:
        loops: Any = driver.device_of(0).facts._asdict()
    except Unsupported as lack:
        loops = lack.reason
    return {"numba-cuda": cuda.why_not() or "ready", "the driver": loops, "said": cuda.why_not() or "ready"}


def launches(world: World) -> dict[str, Any]:
    x = torch.zeros(8)

    def add(times: int) -> None:
        for _ in range(times):
            x.add_(1)

    eager = world.microseconds(lambda: add(ADDITIONS)) / ADDITIONS
    graph, side, nodes = torch.cuda.CUDAGraph(), torch.cuda.Stream(), 10 * ADDITIONS
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        add(1)
        graph.capture_begin()
        add(nodes)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    node = world.microseconds(graph.replay) / nodes
    said = f"a launch {eager:.2f} us, a node of a graph {node:.2f} us"
    return {"launch_us": eager, "node_us": node, "said": said}


def small_kernel(world: World) -> dict[str, Any]:
    """What a launch by numba-CUDA costs where there is next to nothing to do."""
    from tensorloop import cuda
    from tests.support.cuda_cases import kernel

    if why := cuda.why_not():
        return {ABSENT: why}
    values, offsets = torch.randn(64, 8), torch.tensor([0, 10, 30, 64])
    ours, theirs = cuda.kernel("segment_sum"), kernel("eager", "segment_sum")
    found = [world.microseconds(lambda f=f: f(values, offsets)) for f in (ours, theirs)]
    return {"numba_cuda_us": found[0], "torch_us": found[1], "said": f"{found[0]:.1f} us, torch {found[1]:.1f} us"}


def workspaces(world: World) -> dict[str, Any]:
    """Whether a graph that goes takes the workspace of others that were recorded on its stream, as torch 2.12 may."""
    if world.rehearsed:
        return {ABSENT: PRETENDED}
    a, stream = torch.randn(512, 512), torch.cuda.Stream()

    def recorded() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            torch.mm(a, a)
            graph.capture_end()
        return graph

    with torch.cuda.stream(stream):
        torch.mm(a, a)
    torch.cuda.synchronize()
    graphs = [recorded(), recorded()]
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    graphs.pop()
    gc.collect()
    torch.cuda.synchronize()
    gone = held - torch.cuda.memory_allocated()
    return {"bytes": gone, "said": f"{gone:,} bytes went with one of two graphs: {'taken' if gone > TAKEN else 'kept'}"}


def streams(world: World) -> dict[str, Any]:
    if world.rehearsed:
        return {ABSENT: PRETENDED}
    found = len({torch.cuda.Stream().cuda_stream for _ in range(200)})
    return {"different": found, "said": f"200 streams asked for are {found}"}
