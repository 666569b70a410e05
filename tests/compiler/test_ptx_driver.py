"""The CUDA driver as the library calls it, without one: what is loaded, launched and let go; each error by its name."""

import ctypes
import gc

import pytest
import torch

import tensorloop as tl
from tensorloop.compiler.step import Unsupported
from tensorloop.compiler.targets.cpu.object_cache import Folder
from tensorloop.compiler.targets.ptx import assemble, driver
from tensorloop.compiler.targets.ptx.driver import CudaDevice, DriverError, LoadedKernel
from tests.support.pretended_driver import NAMES, PretendedDriver

TEXT = """target triple = "nvptx64-nvidia-cuda"
define ptx_kernel void @run(ptr addrspace(1) %a, i64 %steps) {
  %x = load float, ptr addrspace(1) %a
  %y = fmul float %x, %x
  %z = fadd float %y, %x
  %w = fdiv float %z, %x
  store float %w, ptr addrspace(1) %a
  ret void
}
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def ptx(folder: Folder) -> bytes:
    return assemble.ptx_of(TEXT, "sm_80", folder)


# ---- from text to PTX


def test_ptx_is_for_the_lowest_version_that_its_device_has_and_joins_no_operations(ptx: bytes) -> None:
    assert b".version 7.0\n.target sm_80\n" in ptx
    assert b".visible .entry run(" in ptx
    for operation in (b"mul.rn.f32", b"add.rn.f32", b"div.rn.f32"):
        assert operation in ptx
    assert b"fma" not in ptx


def test_ptx_is_taken_from_the_folder(folder: Folder, ptx: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "_assembled", lambda *_: pytest.fail("it is assembled again"))
    assert assemble.ptx_of(TEXT, "sm_80", folder) == ptx
    with pytest.raises(pytest.fail.Exception, match="again"):
        assemble.ptx_of(TEXT, "sm_90", folder)


def test_a_device_gets_ptx_of_the_last_one_before_it_that_is_known() -> None:
    capabilities = [(7, 0), (8, 0), (8, 6), (8, 7), (9, 0), (10, 0), (10, 1), (11, 0), (12, 0), (99, 0)]
    known = ["sm_70", "sm_80", "sm_86", "sm_86", "sm_90", "sm_100", "sm_100", "sm_103", "sm_120", "sm_121"]
    assert [assemble.arch_of(one) for one in capabilities] == known
    with pytest.raises(Unsupported, match=r"compute capability is 6\.1; 7\.0 is the least"):
        assemble.arch_of((6, 1))


def test_an_llvm_whose_text_is_invalid_makes_no_kernel_and_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    older = type("binding", (), {"llvm_version_info": (20, 1, 8)})
    monkeypatch.setattr(assemble, "llvm", lambda: older)
    why = "llvmlite stands on LLVM 20, whose PTX of barriers is invalid; 22 is the oldest for kernels, in llvmlite 0.48"
    with pytest.raises(Unsupported, match=why):
        assemble.arch_of((8, 0))
    said = str(tl.explain(lambda c, x: (torch.tanh(c + x), None), torch.zeros(2), torch.ones(3, 2), device="cuda"))
    assert f"no kernel: {why}" in said
    assert "one launch" not in said


@pytest.mark.parametrize("capability", assemble.KNOWN)
def test_llvm_knows_each_device_of_the_table(capability: tuple[int, int], folder: Folder) -> None:
    arch = assemble.arch_of(capability)
    assert f".target {arch}\n".encode() in assemble.ptx_of(TEXT, arch, folder)


# ---- the driver


def test_a_module_stays_while_its_thread_records(ptx: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    library, records = PretendedDriver(), [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: records[0])
    device = CudaDevice(0, library)
    kernel = LoadedKernel(device, ptx, "run")
    del kernel
    assert not library.calls["cuModuleUnload"]
    records[0] = False
    kernel = LoadedKernel(device, ptx, "run")
    assert library.calls["cuModuleUnload"] == 1
    del kernel
    assert library.calls["cuModuleUnload"] == 2


def test_a_kernel_is_loaded_launched_and_let_go(ptx: bytes) -> None:
    library = PretendedDriver()
    device = CudaDevice(1, library)
    assert device.facts == ((9, 0), 132, 1024, 227 * 1024)
    kernel = LoadedKernel(device, ptx, "run")
    assert kernel.facts == (32, 0, 0, 1024)
    assert list(library.modules.values()) == [ptx]
    high = 0x7F12_3456_789A_BCDE
    kernel.launch(0x7FFF_0000_0010, 3, 256, 1024, [high, 7])
    assert library.launches == [(ptx, "run", 3, 256, 1024, 0x7FFF_0000_0010, (high, 7))]
    del kernel
    gc.collect()
    assert not library.modules
    assert not library.contexts  # the one before is current again


def test_a_kernel_that_a_graph_may_hold_stays(ptx: bytes) -> None:
    library = PretendedDriver()
    kernel = LoadedKernel(CudaDevice(0, library), ptx, "run")
    kernel.recorded = True
    del kernel
    gc.collect()
    assert list(library.modules.values()) == [ptx]


def test_much_shared_memory_is_asked_for(ptx: bytes) -> None:
    library = PretendedDriver()
    kernel = LoadedKernel(CudaDevice(0, library), ptx, "run")
    kernel.allow_shared(driver.PLAIN_SHARED)
    assert not library.allowed
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        kernel.launch(0, 1, 32, 100_000, [])
    kernel.allow_shared(100_000)
    kernel.launch(0, 1, 32, 100_000, [])
    with pytest.raises(DriverError, match="cuFuncSetAttribute gave CUDA_ERROR_INVALID_VALUE"):
        kernel.allow_shared(300_000)


@pytest.mark.parametrize("code", [*NAMES, 12345])
def test_each_code_of_each_call_is_an_error_by_its_name(code: int, ptx: bytes) -> None:
    library = PretendedDriver()
    device = CudaDevice(0, library)
    kernel = LoadedKernel(device, ptx, "run")
    name, text = NAMES.get(code, ("unknown", "unknown"))
    tried = {
        "cuDeviceGet": lambda: CudaDevice(0, library),
        "cuDeviceGetAttribute": lambda: CudaDevice(0, library),
        "cuDevicePrimaryCtxRetain": lambda: CudaDevice(0, library),
        "cuModuleLoadDataEx": lambda: LoadedKernel(device, ptx, "run"),
        "cuModuleGetFunction": lambda: LoadedKernel(device, ptx, "run"),
        "cuFuncGetAttribute": lambda: LoadedKernel(device, ptx, "run"),
        "cuLaunchKernel": lambda: kernel.launch(0, 1, 32, 0, []),
        "cuCtxPushCurrent_v2": lambda: kernel.launch(0, 1, 32, 0, []),
    }
    for call, what in tried.items():
        library.fails = {call: code}
        with pytest.raises(DriverError) as found:
            what()
        assert str(found.value) == f"the CUDA driver's {call} gave {name} ({code}): {text}"
        assert found.value.not_run == (code in (2, 701))
    library.fails = {}
    gc.collect()
    assert list(library.modules.values()) == [ptx]  # what was loaded before an error is let go
    assert not library.contexts


def test_what_the_drivers_compiler_says_is_told(ptx: bytes) -> None:
    library = PretendedDriver()
    library.fails, library.log = {"cuModuleLoadDataEx": 218}, b"ptxas application ptx input, line 9; error"
    with pytest.raises(DriverError, match="INVALID_PTX") as found:
        LoadedKernel(CudaDevice(0, library), ptx, "run")
    assert found.value.__notes__ == ["ptxas application ptx input, line 9; error"]


def test_without_a_driver_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(Unsupported, match=r"there is no CUDA driver: libcuda\.so\.1"):
        driver.open_library()


def test_a_driver_without_devices_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    library = PretendedDriver()
    library.fails = {"cuDeviceGet": 3}
    monkeypatch.setattr(driver, "open_library", lambda: library)
    driver.cached_device.cache_clear()
    with pytest.raises(Unsupported, match="cuDeviceGet gave CUDA_ERROR_NOT_INITIALIZED"):
        driver.device_of(0)
    library.fails = {}
    assert driver.device_of(0) is driver.device_of(0)
    driver.cached_device.cache_clear()
