"""Texts for GPUs through NVIDIA's own assembler: each is accepted, and needs what a device has. Needs ptxas."""

import pytest
import torch

from tensorloop.compiler.step import Unsupported
from tests.support import ptxas
from tests.support.compiled_cases import CASES

pytestmark = pytest.mark.skipif(not ptxas.find_ptxas(), reason="no ptxas, which the extra of that name brings")


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
