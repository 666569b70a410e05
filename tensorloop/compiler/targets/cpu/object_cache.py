"""Object code kept in the user's cache folder: nothing is loaded from where others can write."""

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import time
import warnings
from pathlib import Path

MARK = b"tensorloop object 1\n"
_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
MOST = 2000  # entries, of some tens of kilobytes
ABANDONED_S = 3600  # seconds after which nobody is still at work on a file: writing one takes milliseconds


class Folder:
    """Entries by key: each with its own hash, put into place in one move."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._usable: bool | None = None

    def get(self, key: str) -> bytes | None:
        """Returns an entry; None where there is none, or not what was put."""
        if not self._safe():
            return None
        try:
            data = _read(self.path / f"{key}.o")
        except OSError:
            return None
        head = len(MARK) + 32
        body = data[head:]
        return body if data[:head] == MARK + hashlib.sha256(key.encode() + body).digest() else None

    def put(self, key: str, body: bytes) -> None:
        """Keeps an entry; where that fails, one warning, and later ones are compiled again."""
        if not self._safe():
            return
        name = None
        try:
            handle, name = tempfile.mkstemp(dir=self.path, suffix=".part")
            with os.fdopen(handle, "wb") as file:
                file.write(MARK + hashlib.sha256(key.encode() + body).digest() + body)
            os.replace(name, self.path / f"{key}.o")
            self._trim()
        except OSError as error:
            if name is not None and os.path.exists(name):
                os.unlink(name)
            self._refuse(f"cannot be written: {error}")

    def _trim(self) -> None:
        """Drops the half that was used longest ago where there are too many, and what dead processes left behind."""
        with os.scandir(self.path) as found:
            files = [entry for entry in found if entry.name.endswith((".o", ".part"))]
        entries = [entry for entry in files if entry.name.endswith(".o")]
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            for entry in files:
                if entry.name.endswith(".part") and entry.stat().st_mtime < time.time() - ABANDONED_S:
                    os.unlink(entry.path)
            if len(entries) > MOST:
                for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime)[: MOST // 2]:
                    os.unlink(entry.path)

    def _safe(self) -> bool:
        if self._usable is None:
            self._usable = True
            try:
                if not self.path.is_absolute():
                    return self._refuse("is not absolute: there is no home folder; name one in XDG_CACHE_HOME")
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not (_ours(self.path.lstat()) and self.path.is_dir()):
                    self._refuse("is not yours alone; `chmod 700` it or name another in XDG_CACHE_HOME")
            except OSError as error:
                self._refuse(f"cannot be made: {error}")
        return self._usable

    def _refuse(self, why: str) -> bool:
        self._usable = False
        warnings.warn(f"compiled loops are not kept: the folder {self.path} {why}", RuntimeWarning, stacklevel=2)
        return False


def _ours(found: os.stat_result) -> bool:
    """Whether a file is owned by this user, and nobody else may write it."""
    owner = getattr(os, "getuid", lambda: found.st_uid)()
    return (
        found.st_uid == owner and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(found.st_mode)
    )


def _read(place: Path) -> bytes:
    """The bytes of a file that is the user's; none of another.

    What was opened is asked whose it is, not the path, which may lead elsewhere a moment later. Opening does not wait:
    that of a pipe would, for somebody to write.
    """
    handle = os.open(place, os.O_RDONLY | _WITHOUT_WAITING)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not (stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and _ours(found)):
            return b""
        with contextlib.suppress(OSError):  # it was used: a file system that is only read keeps no times
            os.utime(handle)
        return file.read()


def user_folder() -> Folder:
    """Returns the user's folder: one object for each path, so that what is wrong with it is said once."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # which the specification has ignored: it would be another one in each folder
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return _folder(os.path.join(base, "tensorloop"))


@functools.cache
def _folder(path: str) -> Folder:
    return Folder(Path(path))
