"""Peak resident memory of this process (Linux, glibc). The standard library alone, so that every peer can import it."""

import ctypes
import gc
import re
from pathlib import Path


def settle() -> int:
    """Gives freed memory back, resets the kernel's high-water mark (VmHWM), and tells the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # 5: reset the high-water mark (proc(5))
    return _status_bytes("VmRSS")


def high_water() -> int:
    """The most resident bytes since `settle`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no {field} in the process status: peak memory is measured on Linux only")
    return int(found[1]) * 1024
