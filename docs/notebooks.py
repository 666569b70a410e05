"""The tutorials as notebooks, with what their cells show: `python -m docs.notebooks` writes them anew.

A paragraph becomes a text cell and a Python block a code cell, whose output comes from this run and not from the page.
`<!-- notebook: expression -->`, which no page shows, becomes a cell that shows the expression as notebooks do. A test
holds that the cells are those of the tutorials, and runs them.
"""

import os
import re
import warnings
from pathlib import Path
from typing import Any

from docs.site import SOURCE

HERE = Path(__file__).parent
FOLDER = HERE / "notebooks"
TUTORIALS = ("decoder", "ragged", "unknown_length", "search", "compiled", "find_the_line")
_PART = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n+```output\n.*?^```$)?|^<!-- notebook: (?P<shown>.*?) -->$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\((?!\w+://|#)([^)#\s]+)")


def cells(name: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a tutorial's notebook."""
    text, found, at = (HERE / "tutorials" / f"{name}.md").read_text(), [], 0
    for part in _PART.finditer(text):
        found.append(("markdown", _absolute(text[at : part.start()].strip())))
        found.append(("code", (part["code"] or part["shown"]).strip()))
        at = part.end()
    found.append(("markdown", _absolute(text[at:].strip())))
    return [(kind, source) for kind, source in found if source]


def _absolute(text: str) -> str:
    """Links as they are found from anywhere."""

    def link(found: re.Match[str]) -> str:
        path = (HERE / "tutorials" / found[1]).resolve().relative_to(HERE.parent)
        return f"]({SOURCE}/blob/main/{path.as_posix()}"

    return _LINK.sub(link, text)


def notebook(name: str) -> Any:
    """The notebook of a tutorial, not yet run."""
    from nbformat import v4

    makers = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
    made = [makers[kind](source, id=f"{name}-{i}") for i, (kind, source) in enumerate(cells(name))]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=made, metadata={"kernelspec": kernel})


def run(made: Any) -> Any:
    """Runs it in a kernel of its own; the first error of a cell is raised."""
    from nbclient import NotebookClient

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of event loops, by what it is built on
        client = NotebookClient(made, timeout=300, resources={"metadata": {"path": str(HERE.parent)}})
        client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})  # as in the tests: two would wait for each other
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # when, to the microsecond
    made.metadata.pop("language_info", None)  # which Python
    return made


def main() -> None:
    """Writes all."""
    import nbformat

    FOLDER.mkdir(exist_ok=True)
    for name in TUTORIALS:
        nbformat.write(run(notebook(name)), FOLDER / f"{name}.ipynb")
        print(f"docs/notebooks/{name}.ipynb")


if __name__ == "__main__":
    main()
