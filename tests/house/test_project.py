"""The house rules that can be counted: sizes, no path of one machine, a wheel that holds everything."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import pytest

from tests.house.test_docs import INLINE_LINK, OUTSIDE, REFERENCE_LINK, fenced_blocks, prose

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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path):
    source = path.read_text()
    assert len(source.splitlines()) <= FILE_LINES
    assert [(name, n) for name, n in function_lengths(source) if n > FUNCTION_LINES] == []


def test_nine_functions_in_ten_are_short():
    lengths = [n for path in LIBRARY for _, n in function_lengths(path.read_text())]
    assert sum(n <= USUAL_FUNCTION_LINES for n in lengths) >= 0.9 * len(lengths) > 0


def test_lengths_are_counted_without_docstrings():
    source = 'def f():\n    """One.\n\n    Two."""\n    return 1\n\nclass C:\n    def g(self):\n        pass\n'
    assert list(function_lengths(source)) == [("f", 2), ("g", 2)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_path_of_one_machine(path: Path):
    assert MACHINE_PATH.findall(path.read_text()) == []


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


def test_what_a_package_index_shows_has_no_link_to_a_file_beside_it(built: Path):
    (wheel,), (source,) = built.glob("tensorloop-*.whl"), built.glob("tensorloop-*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        shown = message_from_string(archive.read(name).decode())
    with tarfile.open(source) as archive:
        member = archive.extractfile(f"{source.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        assert message_from_string(member.read().decode()).get_payload() == shown.get_payload()
    assert shown["Description-Content-Type"] == "text/markdown"
    text, readme = str(shown.get_payload()), (ROOT / "README.md").read_text()
    assert links(readme)
    assert links(text) == []
    assert list(fenced_blocks_without_lines(text)) == list(fenced_blocks_without_lines(readme))
    headings = re.findall("^#+ .*", prose(readme), re.MULTILINE)
    assert re.findall("^#+ .*", prose(text), re.MULTILINE) == headings
    assert "`docs/README.md`" in text
    assert len(text) > 0.9 * len(readme)


def links(text: str) -> list[str]:
    """Targets of all links and pictures that are no addresses, headings of the same page among them."""
    text = re.sub(r"(?<!\[)`[^`\n]*`", "", prose(text))
    found = [*INLINE_LINK.findall(text), *REFERENCE_LINK.findall(text), *re.findall(r"(?:src|href)=\S+", text)]
    return [link for link in found if not link.startswith(OUTSIDE)]


def fenced_blocks_without_lines(text: str) -> Iterator[tuple[str, str]]:
    return ((info, code) for _, info, code in fenced_blocks(text))


def test_links_that_are_code_or_addresses_stay():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (
        "![a](b.png)\n\n[`x`](docs/x.md), [y\nz](y.md#z), `d[i](x)`, [w](https://example.org) [h](#here)\n"
        "```python\nd[i](x)\n```\n[v](v.md)\n"
    )
    assert module.for_an_index(text) == (
        "`x`, y\nz, `d[i](x)`, [w](https://example.org) h\n```python\nd[i](x)\n```\nv\n"
    )


def test_the_wheel_holds_the_package_and_imports(built: Path, tmp_path: Path):
    (wheel,) = built.glob("tensorloop-*.whl")
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "unpacked")
    roots = {"tensorloop": ROOT / "tensorloop", "tensorloop_cuda": ROOT / "cuda" / "tensorloop_cuda"}
    wanted = {f"{name}/{p.relative_to(root).as_posix()}" for name, root in roots.items() for p in root.rglob("*.py")}
    assert shipped == wanted | {"tensorloop/py.typed"}
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
