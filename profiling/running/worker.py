"""One process that answers cell after cell: a script's imports, and the start of a device, are paid once.

For cells that leave nothing behind which another one would notice; where the process ends, the next cell has a new one.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from running import harness
from running.harness import Cell

MANY = "-"  # in the place of `--cell JSON`: cells come line by line


class Worker:
    """The process of a script, which begins with its first cell."""

    def __init__(self, script: Path) -> None:
        path = os.pathsep.join(
            filter(None, [str(harness.ROOT), str(harness.ROOT / "profiling"), os.environ.get("PYTHONPATH")])
        )
        self.errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(script), "--cell", MANY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        )

    def answer(self, cell: Cell) -> dict[str, Any]:
        """As `harness.spawn`: what stops the process is an answer, too."""
        limit = cell.get("limit_s", harness.TIMEOUT_S)
        late = threading.Timer(limit, self.process.kill)
        late.start()
        try:
            return self._asked(cell)
        except (EOFError, BrokenPipeError):
            status = self.end()
            over = not late.is_alive()
            return {"error": f"not done after {limit} s" if over else f"exit status {status}: {self.last_line()}"}
        finally:
            late.cancel()

    def _asked(self, cell: Cell) -> dict[str, Any]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(cell) + "\n")
        stdin.flush()
        for line in stdout:  # libraries may print lines of their own
            if line.startswith("{"):
                return json.loads(line)
        raise EOFError

    def last_line(self) -> str:
        self.errors.seek(0)
        return harness.last_line(self.errors.read())

    def end(self) -> int:
        """Its exit status; no answer comes of it any more."""
        try:
            return self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):  # what it was to read and will not
            self.process.communicate()
        self.errors.close()


_workers: dict[Path, Worker] = {}


def ask(script: Path, cell: Cell) -> dict[str, Any]:
    """The answer of the one process of this script."""
    worker = _workers.get(script) or _workers.setdefault(script, Worker(script))
    found = worker.answer(cell)
    if worker.process.poll() is not None:
        _workers.pop(script).close()
    return found


@atexit.register
def end_all() -> None:
    """No process stays behind."""
    while _workers:
        _workers.popitem()[1].close()
