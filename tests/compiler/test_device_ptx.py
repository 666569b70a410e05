"""Device text as PTX: what LLVM makes of it, for three generations of devices."""

from collections.abc import Callable

import pytest
import torch

from tensorloop.compiler.emitter.device import devices, kernel
from tensorloop.compiler.emitter.device.kernel import device_text
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.step import Step, Unsupported
from tests.compiler.test_emitter_random import MIXING, STEPS, drawn
from tests.compiler.test_emitter_team import MEETING, case
from tests.support.ptx_checks import ARCHITECTURES, check_ptx
from tests.support.recurrences import recurrence
from tests.support.recurrent_cells import CELLS, inputs


def cell(name: str) -> Step:
    found = CELLS[name]
    return recurrence(found.step, *inputs(found, 3, 8, 32, torch.float32), reverse=found.reverse)


MAKE: dict[str, Callable[[], Step]] = {
    **{name: lambda n=name: cell(n) for name in CELLS},
    **{name: lambda n=name: case(n, torch.float32)[0] for name in MEETING},
    **{f"random {seed}": lambda n=seed: drawn(n, STEPS + MIXING)[0] for seed in range(12)},
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.extended(*(f"[{name}]" for name in [*MAKE][6:]))
def test_a_step_is_ptx(name: str) -> None:
    kernels = lowered(MAKE[name]())
    for arch in ARCHITECTURES:
        check_ptx(kernels, arch)


def test_scratch_that_is_too_large_lies_in_the_memory_of_the_caller() -> None:
    kernels = lowered(cell("lstm"))
    text, found = check_ptx(kernels, "sm_90", local=0)
    assert not text.local
    assert "shared" not in found
    text, found = check_ptx(kernels, "sm_90")
    assert text.local
    assert "ld.shared" in found


DTYPES = [torch.float64, torch.float32, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_kind_of_value_is_handed_from_lane_to_lane(dtype: torch.dtype) -> None:
    def step(invariants, slices, carry):
        (x,) = slices
        return {"carry": carry, "outs": [x.any()] if dtype == torch.bool else [x.amax(), x.argmax()]}

    rec = recurrence(step, [], [torch.ones(1, 40, dtype=dtype)], [torch.zeros(2)])
    assert "shfl.sync.bfly.b32" in check_ptx(lowered(rec), "sm_80")[1]


def test_what_no_device_has_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = lowered(cell("lstm"))
    monkeypatch.setattr(devices, "_KNOWN", set())
    with pytest.raises(Unsupported, match="no device has"):
        device_text(kernels, devices.Nvptx("sm_90"))
    monkeypatch.setattr(kernel, "MOST_ARGUMENTS", 5)
    with pytest.raises(Unsupported, match="tensors, of which a kernel takes at most 5"):
        device_text(kernels, devices.Nvptx("sm_90"))
