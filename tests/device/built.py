"""Builds the pretended device with g++, once for each version of torch and of the sources, and loads it.

Nothing is built where there is no g++, where torch has CUDA itself, or where the system is not Linux: `why_not` says
which.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

SOURCES = sorted((Path(__file__).parent / "native").iterdir())
OPTIONS = ("-O1", "-w", "-std=c++20", "-shared", "-fPIC")


def why_not() -> str:
    """Why there can be no pretended device here; empty where there can."""
    if torch.backends.cuda.is_built():
        return "this torch is built for CUDA"
    if platform.system() != "Linux":
        return "it is built on Linux alone"
    return "" if shutil.which("g++") else "there is no g++ to build it"


def library() -> ctypes.CDLL:
    """The device, registered with torch from now on until the process ends."""
    path = folder() / f"device-{fingerprint()}.so"
    if not path.exists():
        build(path)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    made = cache / "tensorloop-tests"
    made.mkdir(parents=True, exist_ok=True)
    return made


def fingerprint() -> str:
    """Of everything that decides what is built."""
    parts = [torch.__version__, platform.machine(), *OPTIONS, *(path.read_text() for path in SOURCES)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def build(path: Path) -> None:
    """Makes the library, while other processes wait for it instead of making it again."""
    root = Path(torch.__file__).parent
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        for left in path.parent.glob(f"{path.stem}.[0-9]*"):  # by builds that were killed: the lock went with them
            left.unlink()
        made = path.with_suffix(f".{os.getpid()}")
        sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
        where = [f"-isystem{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run(["g++", *OPTIONS, *sources, "-o", str(made), *where], check=True)
        made.rename(path)
