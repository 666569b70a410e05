"""Texts for GPUs through NVIDIA's own assembler: each is accepted, and needs what a device has. Needs ptxas."""

import pytest
import torch

from tensorloop.compiler.emitter.device.kernel_plan import ENOUGH_LANES
from tensorloop.compiler.step import Unsupported
from tensorloop.compiler.targets.ptx.made import MOST_SPILLED
from tests.support import ptxas
from tests.support.compiled_cases import CASES


@pytest.mark.parametrize(("registers", "lanes"), [(255, ENOUGH_LANES), (128, 512), (64, 1024), (72, 896)])
def test_a_block_has_so_many_registers(registers: int, lanes: int) -> None:
    """As many lanes as a group gets have room whatever ptxas takes."""
    assert ptxas.Needs(registers, 0, 0, lanes).fits
    assert not ptxas.Needs(registers + 1, 0, 0, lanes).fits
    assert not ptxas.Needs(registers, 0, 0, lanes + 128).fits
    assert not ptxas.Needs(registers, MOST_SPILLED + 1, 0, lanes).fits


@pytest.mark.skipif(not ptxas.find_ptxas(), reason="no ptxas, which the extra of that name brings")
@pytest.mark.extended(*(name for name in CASES if name not in ("lstm", "crf", "gru")))
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_accepted_for_each_architecture_and_fits(name: str) -> None:
    for step in ptxas.steps_of(name, torch.float32):
        for arch, most in ptxas.ARCHITECTURES.items():
            try:
                text = ptxas.texts(step, arch)
            except Unsupported:
                continue
            needs = ptxas.assembled(text, arch)
            assert needs.fits, needs
            assert needs.shared <= most
