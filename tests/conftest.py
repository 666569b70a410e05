"""What every test shares: one thread, one seed, and property tests that repeat themselves."""

import hypothesis
import pytest
import torch

# Machines of any speed run the same examples: no deadline, no random choice, nothing remembered between runs.
hypothesis.settings.register_profile("tensorloop", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("tensorloop")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
