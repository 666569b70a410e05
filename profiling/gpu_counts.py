"""What gpu.py counts, in a process of its own: launches and waits on the pretended device of tests/device.

python profiling/gpu_counts.py WORKLOAD WAY      # prints them as JSON
"""

import json
import os
import sys
import warnings
from typing import Any

WAYS = {"eager": "eager", "compiled": "compiled", "kernels": "compiled, kernels"}
SHORT, LONG = 20, 84


def main(workload: str, way: str) -> dict[str, Any]:
    """Starts the device and counts."""
    os.environ["TENSORLOOP_PTX"] = "1" if way == "kernels" else "0"
    from tests.device import built

    if why := built.why_not():
        return {"absent": why}
    import torch
    from gpu_workloads import leaves, loss_of
    from workloads import differentiated

    from tests.device import kernels, pretended

    pretended.start()
    kernels.start()
    torch.set_default_device("cuda")
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, steps in (("short", SHORT), ("long", LONG)):
        d = leaves(workload, steps, torch.float32)
        loss, inputs = loss_of(workload, way, d, steps), differentiated(d)
        torch.autograd.grad(loss(), inputs, allow_unused=True)  # which makes the plan
        with pretended.counted() as counts:
            torch.autograd.grad(loss(), inputs, allow_unused=True)
        found[f"{name}_launches"], found[f"{name}_syncs"] = counts.launches, len(counts.syncs)
    return found


def answer_in(said: str, error: str) -> dict[str, Any]:
    """What a process has printed, or its error."""
    lines = said.splitlines()
    return json.loads(lines[-1]) if lines else {"error": error}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
