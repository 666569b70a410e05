"""What runs under compute-sanitizer: some compiled loops as kernels, or a kernel that is wrong on purpose.

python -m gpu_first_day.sanitized ours|memcheck|racecheck CASES [--rehearse]
"""

import contextlib
import os
import sys
import warnings
from typing import Any

import torch
from compiled_loops import gpu_counts
from gpu_first_day.world import kernels

from tensorloop.compiler.targets.ptx import driver

THREADS = 64
HEAD = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry run(.param .u64 out)
{
  .reg .b32 %r<4>;
  .reg .b64 %a<4>;
  .shared .align 4 .b8 held[256];
  ld.param.u64 %a0, [out];
  cvta.to.global.u64 %a0, %a0;
  mov.u32 %r0, %tid.x;
"""
TAIL = "  ret;\n}\n"
FAR = "  mul.wide.u32 %a1, %r0, 16777216;\n  add.u64 %a1, %a0, %a1;\n  st.global.u32 [%a1], %r0;\n"  # 16 MiB a thread
RACE = """  mov.u32 %r1, held;
  st.shared.u32 [%r1], %r0;
  ld.shared.u32 %r2, [%r1];
  st.global.u32 [%a0], %r2;
"""
PLANTED = {"memcheck": FAR, "racecheck": RACE}


def main(what: str, cases: str, *rehearse: str) -> None:
    if rehearse and (why := gpu_counts.pretend()):
        sys.exit(why)
    torch.set_default_device("cuda")
    warnings.simplefilter("always")
    if what == "ours":
        ours(int(cases))
    elif not rehearse:
        planted(PLANTED[what])
    torch.cuda.synchronize()


def ours(number: int) -> None:
    """Cases of the tests, as kernels; how many launches of ours there were is told, since none finds nothing."""
    from tests.support.compiled_cases import CASES, outcome

    launches = counted()
    for name in list(CASES)[:number]:
        with kernels(True):
            outcome(CASES[name], torch.float32, True)
        torch.cuda.synchronize()
        print("ran", name, flush=True)
        print("launches", launches.pop("launches", 0), flush=True)


def counted() -> dict[str, int]:
    """Where each launch of a loaded kernel is counted from now on."""
    found, launch = dict[str, int](), driver.LoadedKernel.launch

    def counting(*given: Any, **options: Any) -> Any:
        found["launches"] = found.get("launches", 0) + 1
        return launch(*given, **options)

    driver.LoadedKernel.launch = counting
    return found


def planted(text: str) -> None:
    """By the driver itself, as our kernels are launched."""
    out = torch.zeros(THREADS, dtype=torch.int32)
    kernel = driver.LoadedKernel(driver.device_of(0), (HEAD + text + TAIL).encode(), "run")
    # The context may be lost by it: the tool's exit status is that of its findings only where this program's is 0.
    with contextlib.suppress(RuntimeError):
        kernel.launch(torch.cuda.current_stream().cuda_stream, 1, THREADS, 0, [out.data_ptr()])
        torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
