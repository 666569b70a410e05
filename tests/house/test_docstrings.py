"""The API pages name every parameter: in `Args:`, or in `Attributes:` where a class keeps it; and what comes back.

Inside the library, too, a docstring begins with a sentence that stands alone.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_overloads

import pytest
import torch

from docs.site import entries, markdown

ROOT = Path(__file__).parents[2]
LIBRARIES = ("tensorloop", "cuda/tensorloop_cuda")
ITEM = re.compile(r"^- `([\w, ]+)`: ", re.MULTILINE)


def names_in(docstring: str, section: str) -> list[str]:
    """The names that a section lists, as the site shows it."""
    parts = re.split(r"^\*\*(\w+):\*\*", markdown(docstring), flags=re.MULTILINE)
    texts = [text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title == section]
    return [name.strip() for text in texts for names in ITEM.findall(text) for name in names.split(",")]


def complaints(thing: Any) -> list[str]:
    """What the docstring of a function, a method or a class lacks, and what it names that is not there."""
    said = inspect.getdoc(thing) or ""
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return []  # nobody makes one
    signature = inspect.signature(thing)
    parameters = {name for name in signature.parameters if name not in ("self", "cls")}
    args = names_in(said, "Args")
    kept = names_in(said, "Attributes") if isinstance(thing, type) else []
    found = [f"{name} is not in Args:" for name in sorted(parameters - {*args, *kept})]
    found += [f"{name} is no parameter" for name in sorted({*args} - parameters)]
    found += [f"{name} is listed twice" for name in sorted({name for name in args if args.count(name) > 1})]
    returns = not isinstance(thing, type) and signature.return_annotation not in (None, "None")
    if returns and not re.search(r"^Returns:", said, re.MULTILINE):
        found.append("Returns: is missing")
    return found


def methods(kind: type) -> list[str]:
    """The public methods that are written in a class, with a docstring: the pages show no others."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    written = [node.name for node in ast.walk(body) if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
    return [name for name in dict.fromkeys(written) if not name.startswith("_") and callable(getattr(kind, name, None))]


def shown() -> Iterator[tuple[str, Any]]:
    """Every callable that the pages show."""
    for name, path in entries().items():
        module, _, last = path.rpartition(".")
        thing = getattr(importlib.import_module(module), last)
        if isinstance(thing, type):
            yield name, thing
            yield from ((f"{name}.{method}", getattr(thing, method)) for method in methods(thing))
        elif inspect.isroutine(inspect.unwrap(thing)):
            yield name, thing


SHOWN = dict(shown())


def test_every_parameter_and_result_is_described() -> None:
    assert [(name, found) for name, thing in SHOWN.items() for found in complaints(thing)] == []


def calls(thing: Any) -> list[str]:
    """The lines of code before `Args:` that call a function."""
    before = (inspect.getdoc(thing) or "").partition("\nArgs:\n")[0]
    return re.findall(rf"^ {{4}}.*\b{thing.__name__}\(.*$", before, re.MULTILINE)


OVERLOADED = {name: thing for name, thing in SHOWN.items() if get_overloads(inspect.unwrap(thing))}


def test_what_has_overloads_shows_how_it_is_called() -> None:
    """The pages hide overloads: two lines of code or more, before the parameters, stand for them."""
    assert [name for name, thing in OVERLOADED.items() if len(calls(thing)) < 2] == []


def test_calls_are_counted() -> None:
    assert "tensorloop.scan" in OVERLOADED
    assert "tensorloop.fori_loop" not in OVERLOADED
    assert calls(scale) == []


def test_what_the_pages_show_is_found() -> None:
    assert {"tensorloop.scan", "tensorloop.TensorArray", "tensorloop.TensorArray.append"} <= set(SHOWN)
    assert {"tensorloop.cuda.kernel", "tensorloop.attention", "tensorloop.schedule.Schedule.sweep"} <= set(SHOWN)


def scale(x: torch.Tensor, by: float, *more: float, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Multiplies.

    Args:
        x: (*F), any dtype: what is
            multiplied.
        by, more: factors.
        out: where to write; None (the default) makes a tensor.
        options: ignored.

    Returns:
        (*F), of the dtype of x.
    """
    return x * by


class Scaled(NamedTuple):
    """A product.

    Attributes:
        by: the factor.
    """

    by: float


def without(pattern: str, thing: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same signature whose docstring lacks what a pattern finds."""

    def changed() -> None: ...

    changed.__signature__ = inspect.signature(thing)  # pyright: ignore[reportFunctionMemberAccess]
    changed.__doc__, count = re.subn(pattern, "", inspect.getdoc(thing) or "")
    assert count == 1
    return changed


def test_what_is_described_is_not_complained_of() -> None:
    assert complaints(scale) == []
    assert complaints(Scaled) == []


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r" +x: .*\n.*\n", ["x is not in Args:"]),
        (r"by, ", ["by is not in Args:"]),
        (r", more", ["more is not in Args:"]),
        (r" +out: .*\n", ["out is not in Args:"]),
        (r" +options: .*\n", ["options is not in Args:"]),
        (r"Args:\n", [f"{name} is not in Args:" for name in ("by", "more", "options", "out", "x")]),
        (r"Returns:\n.*", ["Returns: is missing"]),
        (r"(?<=    o)ut(?=: )", ["out is not in Args:", "o is no parameter"]),
    ],
)
def test_what_is_taken_out_is_seen(pattern: str, said: list[str]) -> None:
    assert complaints(without(pattern, scale)) == said


def test_a_field_that_is_taken_out_is_seen() -> None:
    class Bare(NamedTuple):
        """A product."""

        by: float

    assert complaints(Bare) == ["by is not in Args:"]
    nothing = type("Nothing", (), {"__doc__": "None.\n\n    Args:\n        by: the factor.\n"})
    assert complaints(nothing) == ["by is no parameter"]


def fragments(source: str) -> list[str]:
    """The functions and classes whose docstrings begin with a part of a sentence."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    said = [
        (node.name, ast.get_docstring(node) or "") for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)
    ]
    return [name for name, text in said if re.match(r"(What|Of)\b", text)]


def test_docstrings_begin_with_a_sentence() -> None:
    # "Of an empty row -inf." needs the signature to be understood, "Returns -inf for an empty row." does not.
    paths = [path for library in LIBRARIES for path in sorted((ROOT / library).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): fragments(path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}
    assert all(any(path.startswith(f"{library}/") for path in found) for library in LIBRARIES)


def test_a_part_of_a_sentence_is_found() -> None:
    source = '''
class Kept:
    """What is kept."""

    def often(self):
        """Offers more than one."""

    async def of(self):
        """
        Of an empty row -inf.
        """

def least():
    """Returns -inf for an empty row.

    What it does otherwise.
    """

def bare(): ...
'''
    assert fragments(source) == ["Kept", "of"]
