"""Device text as PTX, by LLVM, and what must not be in it."""

import re
import tempfile
from pathlib import Path
from typing import Any

from tensorloop.compiler.emitter.device.devices import Nvptx
from tensorloop.compiler.emitter.device.kernel import DeviceText, device_text
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.targets.cpu.object_cache import Folder
from tensorloop.compiler.targets.ptx.assemble import ptx_of

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# What rounds otherwise than the text says, a function of a library, an address of unknown kind, a register in memory.
# Without its rounding said, a product and a sum would be taken together by who reads the PTX.
WRONG = (
    # A reciprocal's approximation is what Newton's method begins with.
    *(r"(?<!rcp)\.approx", r"(?<!rcp\.approx)\.ftz", r"\bcall\b", r"\.extern \.func", r"\b(?:mul|add|sub)\.f(?:32|64)"),
    *(r"\b(?:ld|st)\.(?!global|shared|param)\w", r"\.local\b"),
)


def check_ptx(kernels: LoweredStep, arch: str, **more: Any) -> tuple[DeviceText, str]:
    """A step's text and its PTX, which has nothing that it must not have."""
    text = device_text(kernels, Nvptx(arch, **more))
    with tempfile.TemporaryDirectory() as folder:
        found = ptx_of(text.module, arch, Folder(Path(folder))).decode()
    assert f".target {arch}" in found
    assert f".maxntid {text.lanes}" in found
    assert len(re.findall(r"\bbar\.sync", found)) >= text.barriers
    for pattern in WRONG:
        assert not (lines := [line for line in found.splitlines() if re.search(pattern, line)]), lines[:3]
    return text, found
