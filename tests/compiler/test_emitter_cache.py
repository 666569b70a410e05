"""Object code kept on disk: found again, and a right result whatever is wrong with the folder."""

import dataclasses
import errno
import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest
import torch

from tensorloop.compiler.step import Step
from tensorloop.compiler.targets.cpu import compile, emit, object_cache
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.cpu.object_cache import Folder
from tests.support.recurrences import assert_same, recurrence

GIVEN = (), [torch.randn(4, 3)], [torch.randn(3)]


def a_recurrence() -> Step:
    return recurrence(lambda inv, xs, carry: {"carry": [carry[0] * 1.5 + xs[0]], "outs": [carry[0]]}, *GIVEN)


def runs(folder: Folder | None) -> None:
    rec = a_recurrence()
    assert_same(emit(rec, folder=folder), rec, 4, *GIVEN)


def twice(folder: Folder) -> None:
    runs(folder)
    runs(folder)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    real = compile.compiled

    def counted(module, target):
        made.append(module)
        return real(module, target)

    monkeypatch.setattr(compile, "compiled", counted)
    return made


def test_what_was_compiled_is_found_again(tmp_path: Path, compiles: list[str]) -> None:
    for _ in range(2):
        runs(Folder(tmp_path / "cache"))
    assert len(compiles) == 1
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".o"]


def test_the_users_folder_is_below_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs(None)
    assert len(list((tmp_path / "tensorloop").iterdir())) == 1


@pytest.mark.parametrize(
    "spoil", [lambda b: b"", lambda b: b[:-10], lambda b: b[:200] + b"x" + b[201:], lambda b: b[::-1]]
)
def test_a_spoiled_entry_is_made_again(spoil, tmp_path: Path, compiles: list[str]) -> None:
    runs(Folder(tmp_path))
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(spoil(entry.read_bytes()))
    for _ in range(2):
        runs(Folder(tmp_path))
    assert len(compiles) == 2


def test_an_entry_under_another_key_is_not_taken(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.put("a", b"code")
    os.rename(tmp_path / "a.o", tmp_path / "b.o")
    assert folder.get("b") is None
    folder.put("a", b"code")
    assert folder.get("a") == b"code"


def test_a_folder_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "MOST", 10)
    folder = Folder(tmp_path)
    for n in range(25):
        folder.put(str(n), b"code")
        os.utime(tmp_path / f"{n}.o", (n, n))
    assert len(list(tmp_path.iterdir())) <= 10
    assert folder.get("24") == b"code"
    assert folder.get("0") is None


def test_what_was_used_stays_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "MOST", 10)
    folder = Folder(tmp_path)
    for n in range(10):
        folder.put(str(n), b"code")
        os.utime(tmp_path / f"{n}.o", (n, n))
    assert folder.get("0") == b"code"
    folder.put("new", b"code")
    assert {path.stem for path in tmp_path.iterdir()} == {"0", "new", "6", "7", "8", "9"}


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.put("a", b"code")
    for name, age in (("old.part", 2 * object_cache.ABANDONED_S), ("young.part", 5), ("other.txt", 10**8)):
        (tmp_path / name).write_bytes(b"half")
        then = time.time() - age
        os.utime(tmp_path / name, (then, then))
    folder.put("b", b"code")
    assert {path.name for path in tmp_path.iterdir()} == {"a.o", "b.o", "young.part", "other.txt"}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_not_used(mode: int, tmp_path: Path, compiles: list[str]) -> None:
    runs(Folder(tmp_path))
    tmp_path.chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"compiled loops are not kept.*chmod 700") as said:
        twice(Folder(tmp_path))
    assert len(compiles) == 3
    assert len(said) == 1


def test_an_entry_that_others_can_write_is_not_loaded(tmp_path: Path, compiles: list[str]) -> None:
    runs(Folder(tmp_path))
    (entry,) = tmp_path.iterdir()
    entry.chmod(0o666)
    runs(Folder(tmp_path))
    assert len(compiles) == 2


def test_what_was_opened_is_what_is_asked_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    folder.put("a", b"code")
    entry, real = tmp_path / "a.o", os.fstat

    def exchanged(handle: int) -> os.stat_result:  # as somebody who may write the folder above could do at any time
        entry.rename(tmp_path / "away")
        entry.write_bytes(b"code of somebody else")
        return real(handle)

    monkeypatch.setattr(object_cache.os, "fstat", exchanged)
    assert folder.get("a") == b"code"
    monkeypatch.setattr(object_cache.os, "fstat", real)
    assert folder.get("a") is None


@pytest.mark.parametrize("kind", ["pipe", "link", "two names", "folder"])
def test_what_is_no_file_of_ones_own_is_not_read(kind: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "cache")
    folder.put("a", b"code")
    entry = tmp_path / "cache" / "a.o"
    if kind == "two names":
        os.link(entry, tmp_path / "other")
    else:
        entry.rename(tmp_path / "real")
        make = {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(tmp_path / "real"), "folder": os.mkdir}
        make[kind](entry)
    assert folder.get("a") is None  # and does not wait


@pytest.mark.parametrize("name", ["", "relative", "./here", "~/cache"])
def test_a_relative_folder_is_not_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert object_cache.user_folder().path == tmp_path / ".cache" / "tensorloop"


def test_without_a_home_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str]) -> None:
    monkeypatch.setattr(object_cache.os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    object_cache._folder.cache_clear()
    with pytest.warns(RuntimeWarning, match="is not absolute: there is no home folder"):
        runs(None)
    assert len(compiles) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.warns(RuntimeWarning, match="not yours alone"):
        runs(Folder(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.warns(RuntimeWarning, match="not yours alone"):
        runs(Folder(tmp_path / "link"))


@pytest.mark.parametrize("call", ["mkstemp", "replace"])
def test_a_full_or_read_only_folder_is_slow_and_says_so_once(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str]
) -> None:
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(object_cache.tempfile if call == "mkstemp" else object_cache.os, call, refuse)
    folder = Folder(tmp_path)
    with pytest.warns(RuntimeWarning, match="cannot be written: .*No space left") as said:
        twice(folder)
    assert len(compiles) == 2
    assert len(said) == 1
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be made"):
        runs(Folder(tmp_path / "file" / "cache"))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_two_processes_that_compile_the_same(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(3):
            runs(Folder(tmp_path))

    forked = multiprocessing.get_context("fork")
    team = [forked.Process(target=work) for _ in range(2)]
    for one in team:
        one.start()
    for one in team:
        one.join(120)
    assert [one.exitcode for one in team] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_key_holds_the_processor(tmp_path: Path, compiles: list[str]) -> None:
    folder, here = Folder(tmp_path), host()
    other = dataclasses.replace(here, cpu="x86-64" if "x86" in here.triple else "generic")
    module = "define void @run() {\n  ret void\n}\n"
    compile.machine_code(module, here, folder)
    compile.machine_code(module, other, folder)
    compile.machine_code(module, here, folder)
    assert len(compiles) == 2
