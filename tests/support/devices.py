"""Where tests run: on the CPU, or with `--device` on the pretended device."""

import time

import torch

HERE = torch.get_default_device()
ON = str(HERE)  # as messages say it


def let_go() -> None:
    """Waits until a device's thread of autograd has dropped its last task, which is a moment after `backward`."""
    if HERE.type != "cpu":
        time.sleep(0.1)
