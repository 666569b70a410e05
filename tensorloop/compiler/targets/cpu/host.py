"""This machine, and LLVM's binding to it."""

from typing import Any

from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.step import Unsupported

OLDEST_LLVM = 17  # text with opaque pointers


def llvm() -> Any:
    """Returns llvmlite's binding, made ready."""
    try:
        import llvmlite.binding as binding
    except ImportError as error:
        raise Unsupported(f"llvmlite cannot be imported: {error}") from None
    if binding.llvm_version_info[0] < OLDEST_LLVM:
        raise Unsupported(
            f"llvmlite stands on LLVM {binding.llvm_version_info[0]}, {OLDEST_LLVM} is the oldest for this"
        )
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


def host() -> Machine:
    """Returns this machine."""
    binding = llvm()
    triple, features = binding.get_process_triple(), binding.get_host_cpu_features()
    x86, arm = triple.startswith("x86_64"), triple.startswith(("aarch64", "arm64"))
    if not arm and not (x86 and features.get("fma")):
        raise Unsupported("this processor has no fused multiply-add that is known here")
    wide = x86 and features.get("avx512f")
    bits = 512 if wide else 256 if x86 and features.get("avx2") else 128
    return Machine(triple, binding.get_host_cpu_name(), features.flatten(), bits, 32 if wide or arm else 16)
