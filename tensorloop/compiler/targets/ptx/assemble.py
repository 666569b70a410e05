"""The emitter's text for a device made PTX: by LLVM, or from the folder of earlier ones."""

import hashlib
from typing import Any

from tensorloop.compiler.step import Unsupported
from tensorloop.compiler.targets.cpu import object_cache
from tensorloop.compiler.targets.cpu.host import llvm

TRIPLE = "nvptx64-nvidia-cuda"
LEVEL = 3
# The oldest LLVM whose PTX of our text is valid. That of LLVM 20 (llvmlite 0.45 to 0.47) calls the barrier as if it
# were a function, and says nothing of the threads of a block; llvmlite 0.48 to 0.50 stand on LLVM 22, none on 21.
OLDEST_PTX, ITS_LLVMLITE = 22, "0.48"
# Compute capabilities that it knows. PTX for one runs on all later ones: a device that is not here gets that of the
# last before it. The version of PTX is the lowest that LLVM has for it, so that the driver may be as old as the device.
KNOWN = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]


def arch_of(capability: tuple[int, int]) -> str:
    """The name that LLVM has for a device of this compute capability; `Unsupported` below the first, or of old ones."""
    version = llvm().llvm_version_info[0]
    if version < OLDEST_PTX:
        raise Unsupported(
            f"llvmlite stands on LLVM {version}, whose PTX of barriers is invalid; {OLDEST_PTX} is the oldest for "
            f"kernels, in llvmlite {ITS_LLVMLITE}"
        )
    known = [one for one in KNOWN if one <= capability]
    if not known:
        here, least = (".".join(map(str, one)) for one in (capability, min(KNOWN)))
        raise Unsupported(f"the device's compute capability is {here}; {least} is the least")
    return "sm_{}{}".format(*max(known))


def ptx_of(module: str, arch: str, folder: object_cache.Folder | None = None) -> bytes:
    """The PTX of a module; taken from the folder where it is there."""
    folder = folder or object_cache.user_folder()
    versions = ".".join(map(str, llvm().llvm_version_info))
    key = hashlib.sha256("\0".join((module, TRIPLE, arch, versions, str(LEVEL))).encode()).hexdigest()
    found = folder.get(key)
    if found is None:
        found = _assembled(module, arch).encode()
        folder.put(key, found)
    return found


def _assembled(module: str, arch: str) -> str:
    binding = llvm()
    parsed = binding.parse_assembly(module)
    parsed.verify()
    machine = _machine(arch)
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=LEVEL))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


def _machine(arch: str) -> Any:
    """LLVM's generator of PTX. It joins no multiplication with an addition that the text has apart."""
    binding = llvm()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple(TRIPLE)
    except RuntimeError as error:  # a build of LLVM for one processor alone
        raise Unsupported(f"llvmlite's LLVM makes no PTX: {error}") from None
    return target.create_target_machine(cpu=arch, features="", opt=LEVEL)
