"""Text made machine code: by LLVM, or from the folder of earlier ones."""

import ctypes
import hashlib
from typing import Any

from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.targets.cpu import object_cache
from tensorloop.compiler.targets.cpu.host import llvm

LEVEL = 3


def machine_code(module: str, target: Machine, folder: object_cache.Folder | None) -> bytes:
    """The object file for a module; taken from the folder where it is there."""
    binding = llvm()
    versions = ".".join(map(str, binding.llvm_version_info))
    key = hashlib.sha256(
        "\0".join((module, target.triple, target.cpu, target.features, versions, str(LEVEL))).encode()
    ).hexdigest()
    found = None if folder is None else folder.get(key)
    if found is None:
        found = compiled(module, target)
        if folder is not None:
            folder.put(key, found)
    return found


def compiled(module: str, target: Machine) -> bytes:
    """Compiles a module with LLVM and returns the object file."""
    binding = llvm()
    parsed = binding.parse_assembly(module)
    parsed.verify()
    return machine(target).emit_object(parsed)


def machine(target: Machine) -> Any:
    """LLVM's generator of code for a target."""
    binding = llvm()
    if target.triple != binding.get_process_triple():
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
    made = binding.Target.from_triple(target.triple)
    return made.create_target_machine(
        target.cpu, target.features, opt=LEVEL, reloc="default", codemodel="jitdefault", jit=True
    )


class Loaded:
    """Functions of an object file, in this process; they go when this goes."""

    def __init__(self, code: bytes, target: Machine) -> None:
        binding = llvm()
        empty = binding.parse_assembly(f'target triple = "{target.triple}"')
        self._engine = binding.create_mcjit_compiler(empty, machine(target))
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        address, word = self._engine.get_function_address, ctypes.c_int64
        self.member = address("member")
        self.alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.member)
        # calls through ctypes let other Python threads run
        self.prepare = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address("prepare"))
        self.run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, word, word, word, ctypes.c_void_p, word)(address("run"))
