"""A program in a process of its own, so that a crash or a hang is a find."""

import contextlib
import faulthandler
import functools
import gc
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

SECONDS = 30.0


@functools.cache
def prepare(device: bool = False) -> None:
    """Readies this process for forks: modules are loaded, no thread has been started, little memory is to be copied.

    With `device` a pretended CUDA device is the default one from now on.
    """
    from tests.fuzz.check import check
    from tests.fuzz.planted import plant
    from tests.fuzz.programs import program
    from tests.fuzz.samples import operations

    torch.set_num_threads(1)
    operations()
    with plant(0, ""):  # every module of the fuzzer is loaded, as it may be changed while this runs
        program(0)
        # Autograd learns at its first backward which devices there are, and starts a thread for each, which no fork
        # has. So where there are some the first backward is a child's.
        if device:
            _start_device()
        else:
            check(_WARM)
    _forget_plans()
    gc.collect()
    gc.freeze()


def _start_device() -> None:
    """The pretended device of the tests, and its kernels."""
    from tests.device import kernels, pretended

    pretended.start()
    kernels.start()
    torch.set_default_device("cuda")


_WARM = """
def run(compile, call):
    w, xs = make(3, 3, seed=1, grad=True), make(2, 3, seed=2)
    def body(h, x):
        return torch.tanh(h @ w) + x.amax(), h
    carry, ys = tl.scan(body, make(3, seed=3), xs, compile=compile)
    return {"carry": carry, "ys": ys}, {"w": w}

CALLS, LOSS, SECOND = [0], "", False
"""


def _forget_plans() -> None:
    from tensorloop.loop.compiled.run.plan import plans

    plans.clear()


def apart(work: Callable[[], dict[str, Any]], seconds: float = SECONDS) -> dict[str, Any]:
    """What `work` gives in a forked process, or how that ended: {"outcome": "crash" or "hang", "finds": [...]}."""
    with tempfile.TemporaryFile() as said:
        read, write = os.pipe()
        process = os.fork()
        if not process:
            _in_child(work, write, said.fileno())
        os.close(write)
        text, ended = _read(read, time.monotonic() + seconds)
        os.close(read)
        if not ended:
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if not ended:
            return {"outcome": "hang", "finds": [f"hang: nothing after {seconds:g} s"]}
        if status or not text:
            said.seek(0)
            return {"outcome": "crash", "finds": [_how(status, said.read().decode(errors="replace"))]}
    return json.loads(text)


def _in_child(work: Callable[[], dict[str, Any]], write: int, said: int) -> None:
    """Does the work and ends the process, whatever comes."""
    code = 1
    with contextlib.suppress(BaseException):
        os.dup2(said, 2)
        os.dup2(said, 1)
        faulthandler.enable(said)
        _team_of_this_process()
        try:
            found = work()
        except Exception as error:
            found = {"outcome": "failed", "reason": f"{type(error).__name__}: {error}", "finds": []}
        data = json.dumps(found).encode()
        while data:
            data = data[os.write(write, data) :]
        code = 0
    os._exit(code)


def _team_of_this_process() -> None:
    """Lets compiled loops have threads although this process was forked: its parent had none."""
    with contextlib.suppress(ImportError, AttributeError):
        from tensorloop.compiler.targets.cpu import loop_threads

        loop_threads._BORN[0] = os.getpid()


def _read(pipe: int, until: float) -> tuple[bytes, bool]:
    """(what came, whether the other end was closed in time)"""
    found = b""
    while (left := until - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            continue
        data = os.read(pipe, 1 << 16)
        if not data:
            return found, True
        found += data
    return found, False


def _how(status: int, said: str) -> str:
    """How a process ended, and the innermost lines of Python's trace."""
    code = os.waitstatus_to_exitcode(status)
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    frames = [line.replace("File ", "") for line in lines if line.startswith("File ") and "tensorloop" in line]
    messages = [line for line in lines if not line.startswith(("File ", "Thread", "Current", "Extension"))]
    return f"crash: {name}: {'; '.join(messages[:2])} {' < '.join(frames[:3])}"
