"""The CUDA driver, as torch has loaded it: what a device is, modules of PTX, launches of their functions.

The library is called by its own names and with its own codes; a code that is not 0 becomes a `DriverError`. Nothing
here starts CUDA: who has a tensor on a device has a driver that runs, and its primary context is torch's.
"""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tensorloop.compiler.step import Unsupported

_P, _I, _U, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
# What is called, with the types of its arguments. Handles are words, and a plain int of ctypes' is half of one.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (_I, _P),
    "cuGetErrorString": (_I, _P),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuCtxPushCurrent_v2": (_P,),
    "cuCtxPopCurrent_v2": (_P,),
    "cuModuleLoadDataEx": (_P, _P, _U, _P, _P),
    "cuModuleUnload": (_P,),
    "cuModuleGetFunction": (_P, _P, _P),
    "cuFuncGetAttribute": (_P, _I, _P),
    "cuFuncSetAttribute": (_P, _I, _I),
    "cuStreamCreate": (_P, _U),
    "cuLaunchKernel": (_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P),
}
NOT_RUN = (2, 701)  # no memory left, or too much asked of a block: a launch that gave these has done nothing
PLAIN_SHARED = 48 * 1024  # bytes of shared memory a block that a function may have without asking
MOST_ARGUMENTS = 4096  # bytes, of any device and driver
_LOG = 4096  # bytes of what the driver's compiler says


class DriverError(RuntimeError):
    """A call of the driver's that failed: its code, and whether what it was to start has surely not run."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"the CUDA driver's {call} gave {name} ({code}): {text}")
        self.code, self.not_run = code, code in NOT_RUN


class DeviceFacts(NamedTuple):
    """A device's own numbers: its compute capability, and what a block may have at most."""

    capability: tuple[int, int]
    multiprocessors: int
    threads: int
    shared: int


class FunctionFacts(NamedTuple):
    """A function's needs, by the driver's compiler: registers a thread; bytes a thread and a block; threads."""

    registers: int
    local: int
    shared: int
    threads: int


def open_library() -> Any:
    """The driver's library; raises `Unsupported` where there is none."""
    windows = sys.platform == "win32"
    try:
        library = ctypes.CDLL("nvcuda.dll" if windows else "libcuda.so.1")
        for name, types in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, _I
    except (OSError, AttributeError) as error:
        raise Unsupported(f"there is no CUDA driver: {error}") from None
    return library


def stream_of(device: torch.device) -> int:
    """The driver's own name of torch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream


class CudaDevice:
    """One device in this process: its facts, and its primary context, which torch uses too."""

    def __init__(self, index: int, library: Any) -> None:
        self._library = library
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(number), index)
        major, minor, units, threads, shared = (self._attribute(number.value, n) for n in (75, 76, 16, 1, 97))
        self.facts = DeviceFacts((major, minor), units, threads, shared)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number.value)
        self._context = context.value

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver; raises `DriverError` where it gives a code."""
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DriverError(name, code, self._said("cuGetErrorName", code), self._said("cuGetErrorString", code))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """A block in which this device's context is this thread's; behind it torch has the device that it had."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def new_stream(self) -> int:
        """Makes a stream that waits for no other one, and that nobody else has; it lasts as long as the process."""
        stream = ctypes.c_void_p()
        with self.current():
            self.call("cuStreamCreate", ctypes.byref(stream), 1)  # CU_STREAM_NON_BLOCKING
        assert stream.value
        return stream.value

    def _said(self, name: str, code: int) -> str:
        text = ctypes.c_char_p()
        unknown = getattr(self._library, name)(code, ctypes.byref(text))
        return "unknown" if unknown or text.value is None else text.value.decode(errors="replace")

    def _attribute(self, number: int, attribute: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, number)
        return value.value


def device_of(index: int) -> CudaDevice:
    """The device of this number as torch counts them; raises `Unsupported` where the driver does not give it."""
    try:
        return cached_device(index, os.getpid())
    except DriverError as error:
        raise Unsupported(str(error)) from None


@functools.cache  # by process: a driver does not outlive a fork
def cached_device(index: int, process: int) -> CudaDevice:
    """Returns a device of a process; there is one object for each."""
    return CudaDevice(index, open_library())


_unloaded: list[tuple[CudaDevice, Any]] = []  # modules that nobody needs any more


def unload() -> None:
    """Unloads what nobody needs any more; not for a thread that records."""
    while _unloaded:
        device, module = _unloaded.pop()
        with contextlib.suppress(DriverError), device.current():
            device.call("cuModuleUnload", module)


class LoadedKernel:
    """A function of a module on a device; the module goes with it, but for one that a graph of the user's may hold."""

    def __init__(self, device: CudaDevice, ptx: bytes, name: str) -> None:
        self._device, self._module = device, ctypes.c_void_p()
        self.recorded = False  # whether it was launched while a stream was captured
        self._function = ctypes.c_void_p()
        unload()
        with device.current():
            self._load(ptx)
            device.call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
            threads, shared, local, registers = (self._attribute(n) for n in (0, 1, 3, 4))
        self.facts = FunctionFacts(registers, local, shared, threads)

    def _load(self, ptx: bytes) -> None:
        """Has the driver's compiler make machine code; what it says of an error is put to the error."""
        log = ctypes.create_string_buffer(_LOG)
        options = (ctypes.c_int * 2)(5, 6)  # a buffer for errors, and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG)
        try:
            self._device.call(
                "cuModuleLoadDataEx", ctypes.byref(self._module), ctypes.c_char_p(ptx + b"\0"), 2, options, values
            )
        except DriverError as error:
            if said := log.value.decode(errors="replace").strip():
                error.add_note(said)
            raise

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self._device.call("cuFuncGetAttribute", ctypes.byref(value), attribute, self._function)
        return value.value

    def allow_shared(self, size: int) -> None:
        """Asks for so many bytes of shared memory a block that launches may name, where that has to be asked for."""
        if size + self.facts.shared > PLAIN_SHARED:
            with self._device.current():
                self._device.call("cuFuncSetAttribute", self._function, 8, size)

    def launch(self, stream: int, groups: int, lanes: int, shared: int, arguments: Sequence[int]) -> None:
        """Puts one launch into a stream: every argument is a word, and they lie one behind the other."""
        words = (ctypes.c_uint64 * len(arguments))(*arguments)
        size = ctypes.c_size_t(ctypes.sizeof(words))
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(words), 2, ctypes.addressof(size), 0)
        with self._device.current():
            self._device.call("cuLaunchKernel", self._function, groups, 1, 1, lanes, 1, 1, shared, stream, None, extra)

    def __del__(self) -> None:
        """Unloads the module. A graph that was recorded with it may be replayed at any time, so it stays for that.

        While this thread records something the driver unloads nothing: it would end the recording.
        """
        if self._module.value and not self.recorded and not sys.is_finalizing():
            _unloaded.append((self._device, self._module))
            if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                unload()
