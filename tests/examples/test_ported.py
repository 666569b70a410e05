"""Programs of papers before and after their loops are ported: losses, gradients, and what is kept for backward."""

import importlib
from collections.abc import Iterator

import pytest
import torch

from tensorloop import memory

NAMES = ["dnc", "maml", "mamba", "ntm", "ode", "pondering", "pondernet", "tacotron", "transducer", "whisper"]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """All of a test in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.extended("dnc")
def test_the_forms_agree(name: str):
    program = importlib.import_module(f"docs.examples.ported.{name}")
    torch.manual_seed(0)
    args = program.make(7)
    parameters = list(args[0].parameters())
    forms = [getattr(program, form) for form in ("before", "after", "by_hand") if hasattr(program, form)]
    losses = [form(*args) for form in forms]
    grads = [torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True) for loss in losses]
    assert any(g.abs().max() > 0 for g in grads[0])
    for loss, of_loss in zip(losses[1:], grads[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(of_loss, grads[0], rtol=1e-8, atol=1e-10)


# how much less is kept at T = 32: the bytes of both forms are counted, not sampled
SAVES = {
    "dnc": 4,
    "maml": 8,
    "mamba": 2,
    "ntm": 4,
    "ode": 5,
    "pondering": 4,
    "pondernet": 4,
    "tacotron": 4,
    "transducer": 5,
    "whisper": 2,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.extended("dnc")
def test_the_ported_form_keeps_less(name: str):
    program = importlib.import_module(f"docs.examples.ported.{name}")
    torch.manual_seed(0)
    args = program.make(32)
    memory.saved_bytes(lambda: program.after(*args))  # what a compiled loop leaves in caches is there then
    before, after = (memory.saved_bytes(lambda form=form: form(*args)) for form in (program.before, program.after))
    assert after * SAVES[name] < before
