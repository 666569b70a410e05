"""How much memory is free."""

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that a device could give now: of a GPU what its driver and torch's cache have free, else of the system."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        return min(available + _of_the_group())
    except (OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _of_the_group() -> list[int]:
    """Bytes that a container's limit leaves; none where there is no limit."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return [] if most == "max" else [max(int(most) - int(used), 0)]
    except (OSError, ValueError):
        return []
