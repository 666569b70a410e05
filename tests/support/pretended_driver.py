"""A CUDA driver that is not there: an object with the functions that the library calls."""

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

NAMES = {
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
    200: ("CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"),
    209: ("CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"),
    218: ("CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"),
    222: ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    701: ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"),
    719: ("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
    999: ("CUDA_ERROR_UNKNOWN", "unknown error"),
}


class Launch(NamedTuple):
    """One launch: the PTX of its module, the function's name, its shape, the stream, the words it is given."""

    ptx: bytes
    name: str
    groups: int
    lanes: int
    shared: int
    stream: int
    words: tuple[int, ...]


class PretendedDriver:
    """`run` does what a launch is to do; `fails` has the code that a function gives instead of doing something."""

    def __init__(
        self, run: Callable[[Launch], None] = lambda launch: None, capability: tuple[int, int] = (9, 0)
    ) -> None:
        self.run, self.fails = run, dict[str, int]()
        self.calls, self.launches = Counter[str](), list[Launch]()
        self.attributes = {1: 1024, 16: 132, 75: capability[0], 76: capability[1], 97: 227 * 1024}
        self.needs = {0: 1024, 1: 0, 3: 0, 4: 32}  # of a function: threads, bytes of a block and a thread, registers
        self.log = b""  # what the driver's compiler says of PTX
        self.contexts: list[int] = []
        self.pushed: list[int] = []  # all that ever were current
        self.modules: dict[int, bytes] = {}
        self.functions: dict[int, tuple[int, str]] = {}
        self.allowed: dict[int, int] = {}  # bytes of shared memory that a launch may ask for
        self._handle = 0x7F00_0000_1000

    def __getattr__(self, name: str) -> Callable[..., int]:
        """The function of a driver: counted, failing where it is to, else what is done here."""
        done = object.__getattribute__(self, f"_{name}")

        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            if code := self.fails.get(name):
                if name == "cuModuleLoadDataEx":
                    ctypes.memmove(arguments[4][0], self.log, len(self.log))
                return code
            return done(*map(_told, arguments)) or 0

        return call

    def _new(self) -> int:
        self._handle += 16
        return self._handle

    def _cuGetErrorName(self, code: int, to: Any) -> int:
        return self._text(code, to, 0)

    def _cuGetErrorString(self, code: int, to: Any) -> int:
        return self._text(code, to, 1)

    def _text(self, code: int, to: Any, which: int) -> int:
        if code not in NAMES:
            return 1
        to.value = NAMES[code][which].encode()
        return 0

    def _cuDeviceGet(self, to: Any, index: int) -> None:
        to.value = index

    def _cuDeviceGetAttribute(self, to: Any, attribute: int, device: int) -> None:
        to.value = self.attributes[attribute]

    def _cuDevicePrimaryCtxRetain(self, to: Any, device: int) -> None:
        to.value = 0x5000 + device

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        self.contexts.append(context)
        self.pushed.append(context)

    def _cuCtxPopCurrent_v2(self, to: Any) -> None:
        to.value = self.contexts.pop()

    def _cuModuleLoadDataEx(self, to: Any, image: Any, count: int, options: Any, values: Any) -> int:
        if not self.contexts:
            return 201
        to.value = self._new()
        self.modules[to.value] = image.value
        return 0

    def _cuModuleUnload(self, module: Any) -> int:
        del self.modules[module.value]
        return 0 if self.contexts else 201

    def _cuModuleGetFunction(self, to: Any, module: Any, name: bytes) -> int:
        if f".entry {name.decode()}(".encode() not in self.modules[module.value]:
            return 500
        to.value = self._new()
        self.functions[to.value] = module.value, name.decode()
        return 0

    def _cuFuncGetAttribute(self, to: Any, attribute: int, function: Any) -> None:
        to.value = self.needs[attribute]

    def _cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.allowed[function.value] = value
        return 0 if attribute == 8 and value <= self.attributes[97] else 1

    def _cuStreamCreate(self, to: Any, flags: int) -> int:
        to.value = self._new()
        return 0 if self.contexts and flags == 1 else 201

    def _cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        groups, _, _, lanes, _, _, shared, stream, parameters, extra = rest
        if shared > self.allowed.get(function.value, 48 * 1024) or lanes > self.needs[0] or not self.contexts:
            return 1
        assert parameters is None
        assert list(extra)[::2] == [1, 2, None]
        size = ctypes.c_size_t.from_address(extra[3]).value
        words = tuple((ctypes.c_uint64 * (size // 8)).from_address(extra[1]))
        module, name = self.functions[function.value]
        self.launches.append(Launch(self.modules[module], name, groups, lanes, shared, stream or 0, words))
        self.run(self.launches[-1])
        return 0


def _told(argument: Any) -> Any:
    """What a reference refers to."""
    return getattr(argument, "_obj", argument)
