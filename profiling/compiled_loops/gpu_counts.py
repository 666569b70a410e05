"""What gpu.py counts, in a process of its own: launches and waits on the pretended device of tests/device.

python profiling/compiled_loops/gpu_counts.py WORKLOAD      # prints them as JSON
"""

import json
import os
import sys
import warnings
from typing import Any

WAYS = {"eager": "eager", "compiled": "compiled", "kernels": "compiled, kernels"}
SHORT, LONG = 20, 84


def pretend() -> str:
    """Starts the device in this process; or the reason why it cannot be."""
    from tests.device import built

    if why := built.why_not():
        return why
    from tests.device import kernels, pretended

    pretended.start()
    kernels.start()
    return ""


def main(workload: str) -> dict[str, Any]:
    """Starts the device and counts what each way asks of it."""
    if why := pretend():
        return {"absent": why}
    import torch

    torch.set_default_device("cuda")
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    refused = refusals()
    for way in WAYS:
        os.environ["TENSORLOOP_PTX"] = "1" if way == "kernels" else "0"
        for name, steps in (("short", SHORT), ("long", LONG)):
            try:
                found[f"{way}_{name}_launches"], found[f"{way}_{name}_waits"] = counted(workload, way, steps)
            except Exception as error:  # the other ways are counted all the same
                found[f"{way}_error"] = f"{type(error).__name__}: {error}"
    return found | ({"refused": refused[0]} if refused else {})


def refusals() -> list[str]:
    """From now on, why steps that kernels are asked for get none: they run as graphs."""
    from tensorloop.compiler.step import Unsupported
    from tensorloop.compiler.targets.ptx import made

    told, text_for = list[str](), made.text_for

    def telling(*given: Any) -> Any:
        try:
            return text_for(*given)
        except Unsupported as lack:
            told.append(lack.reason)
            raise

    made.text_for = telling
    return told


def counted(workload: str, way: str, steps: int) -> tuple[int, int]:
    """(launches, waits) of forward + backward, once the plan is made."""
    import torch
    from compiled_loops.gpu_workloads import leaves, loss_of
    from plain_loops.workloads import differentiated

    from tests.device import pretended

    d = leaves(workload, steps, torch.float32)
    loss, inputs = loss_of(workload, way, d, steps), differentiated(d)
    torch.autograd.grad(loss(), inputs, allow_unused=True)
    with pretended.counted() as counts:
        torch.autograd.grad(loss(), inputs, allow_unused=True)
    return counts.launches, len(counts.syncs)


def answer_in(said: str, error: str) -> dict[str, Any]:
    """What a process has printed, or its error."""
    lines = said.splitlines()
    return json.loads(lines[-1]) if lines else {"error": error}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
