"""The house rules that can be counted: sizes, no path of one machine, a wheel that holds everything."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from email import message_from_string
from pathlib import Path

import pytest
import torch

from tests.house.test_docs import INLINE_LINK, REFERENCE_LINK, REPOSITORY, prose, python_blocks

ROOT = Path(__file__).parents[2]
SOURCES = [p for folder in ("tensorloop", "cuda", "tests", "docs", "profiling") for p in (ROOT / folder).rglob("*.py")]
TEXTS = [
    *SOURCES,
    *ROOT.glob("*.md"),
    *ROOT.glob("*.t[ox]*"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "profiling").rglob("*.md"),
    ROOT / "Makefile",
    ROOT / ".ci" / "run",
]
LIBRARY = [p for p in SOURCES if p.is_relative_to(ROOT / "tensorloop") or p.is_relative_to(ROOT / "cuda")]

FILE_LINES = 500
LONGER = {Path("tensorloop/reference.py"): 550}  # 0059
FUNCTION_LINES = 90
USUAL_FUNCTION_LINES = 40
MACHINE_PATH = re.compile(r"(?<![\w./:])/(?:home|Users|root|work|opt|mnt|tmp)/\w+")


def function_lengths(source: str) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring) of every function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield node.name, lines


def test_sizes():
    sources = {path.relative_to(ROOT): path.read_text() for path in SOURCES}
    lines = {path: len(source.splitlines()) for path, source in sources.items()}
    assert {path: n for path, n in lines.items() if n > LONGER.get(path, FILE_LINES)} == {}
    functions = [(path, name, n) for path, source in sources.items() for name, n in function_lengths(source)]
    assert [found for found in functions if found[-1] > FUNCTION_LINES] == []


def test_nine_functions_in_ten_are_short():
    lengths = [n for path in LIBRARY for _, n in function_lengths(path.read_text())]
    assert sum(n <= USUAL_FUNCTION_LINES for n in lengths) >= 0.9 * len(lengths) > 0


def test_lengths_are_counted_without_docstrings():
    source = 'def f():\n    """One.\n\n    Two."""\n    return 1\n\nclass C:\n    def g(self):\n        pass\n'
    assert list(function_lengths(source)) == [("f", 2), ("g", 2)]


def test_no_path_of_one_machine():
    found = {path.relative_to(ROOT): MACHINE_PATH.findall(path.read_text()) for path in TEXTS}
    assert {path: paths for path, paths in found.items() if paths} == {}


def test_a_path_of_one_machine_is_seen():
    slash = "/"
    assert MACHINE_PATH.search(f"see {slash}home{slash}somebody/data")
    assert not MACHINE_PATH.search("https://example.org/home/page and tests/home/x")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and source distribution."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_what_a_package_index_shows_is_the_readme_with_links_that_stand_alone(built: Path):
    (wheel,), (source,) = built.glob("tensorloop-*.whl"), built.glob("tensorloop-*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        shown = message_from_string(archive.read(name).decode())
    with tarfile.open(source) as archive:
        member = archive.extractfile(f"{source.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        assert message_from_string(member.read().decode()).get_payload() == shown.get_payload()
    assert shown["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text()
    assert str(shown.get_payload()) == readme
    assert [link for link in links(readme) if not link.startswith("https://")] == []
    assert all(address.split(", ")[1].startswith(REPOSITORY) for address in shown.get_all("Project-URL", []))


def links(text: str) -> list[str]:
    """Targets of all links and pictures."""
    text = re.sub(r"(?<!\[)`[^`\n]*`", "", prose(text))
    found = [*INLINE_LINK.findall(text), *REFERENCE_LINK.findall(text), *re.findall(r"(?:src|href)=\S+", text)]
    assert found
    return found


def test_the_wheel_holds_the_package_and_imports(built: Path, tmp_path: Path):
    (wheel,) = built.glob("tensorloop-*.whl")
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "unpacked")
    roots = {"tensorloop": ROOT / "tensorloop", "tensorloop_cuda": ROOT / "cuda" / "tensorloop_cuda"}
    wanted = {f"{name}/{p.relative_to(root).as_posix()}" for name, root in roots.items() for p in root.rglob("*.py")}
    assert shipped == wanted | {"tensorloop/py.typed", "tensorloop/hf/certificate.json"}
    code = (
        "import tensorloop as tl; from importlib.metadata import version\n"
        "print(tl.__file__, tl.__version__, version('tensorloop'), len(tl.TensorArray()))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "unpacked")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    expected = [str(tmp_path / "unpacked" / "tensorloop" / "__init__.py"), version, version, "0"]
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.parametrize("kind", ["wheel", "source"])
@pytest.mark.extended("wheel")
def test_the_lines_of_the_readme_run_where_nothing_else_is_installed(built: Path, tmp_path: Path, kind: str):
    (source,) = built.glob("tensorloop-*.tar.gz")
    (wheel,) = built.glob("tensorloop-*.whl")
    if kind == "source":
        wheel = wheel_of(source, tmp_path)
    empty = tmp_path / "empty"
    venv.create(empty, with_pip=False, symlinks=True)
    python = empty / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--disable-pip-version-check", str(wheel)], check=True)
    (site,) = empty.glob("lib/python*/site-packages")
    # what it depends on is taken from here, last: a line in a .pth follows the folder that it is in
    (site / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    lines = [code for _, code in python_blocks((ROOT / "README.md").read_text())]
    script = tmp_path / "readme.py"
    script.write_text("\n".join([*lines, "print(tl.__file__)"]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-P", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [str(site / "tensorloop" / "__init__.py")], done.stderr


def wheel_of(source: Path, folder: Path) -> Path:
    """A wheel, built from the source distribution alone."""
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.glob("tensorloop-*")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "--directory", str(folder / "built")]
    subprocess.run(build, cwd=unpacked, check=True, capture_output=True)
    (wheel,) = (folder / "built").glob("*.whl")
    return wheel


def class_names(sources: Iterable[str]) -> Counter[str]:
    return Counter(n.name for text in sources for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef))


def test_a_class_has_a_name_of_its_own():
    assert class_names(["class A: pass\nclass B:\n    class A: pass", "def f():\n    class A: pass"])["A"] == 3
    names = class_names(path.read_text() for path in (ROOT / "tensorloop").rglob("*.py"))
    assert [name for name, times in names.items() if times > 1] == []
