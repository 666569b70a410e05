"""Notebooks hold the cells of their tutorials, run, and show what they should."""

import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what notebooks are built on warns of itself
    import nbclient  # noqa: F401
    import nbformat

from docs.notebooks import FOLDER, TUTORIALS, cells, notebook, run


def shown(made: Any) -> str:
    return "".join(
        output.data.get("text/html", "")
        for cell in made.cells
        for output in cell.get("outputs", ())
        if output.output_type == "execute_result"
    )


def errors(made: Any) -> list[Any]:
    return [x for cell in made.cells for x in cell.get("outputs", ()) if x.output_type == "error"]


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_notebook_is_its_tutorial(name: str):
    kept = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert [(cell.cell_type, cell.source) for cell in kept.cells] == cells(name), "python -m docs.notebooks"
    assert shown(kept)
    assert not errors(kept)
    assert "ipykernel" not in shown(kept)  # lines are named by their cell


def test_outputs_of_the_page_are_in_no_cell():
    assert not [source for _, source in cells("decoder") if "```" in source]


@pytest.mark.filterwarnings("ignore")  # of sockets and event loops, by what notebooks are built on
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("decoder", ("torch.cat", "cell 1:", "<b>TensorArray</b>")),
        ("ragged", ("<b>PackedTensor</b>", "title=12")),
        ("unknown_length", ("bytes", "cell ")),
        ("search", ("<b>PackedTensor</b>", "coverage")),
        ("compiled", ("bytes", "cell ")),
        ("find_the_line", ("torch.cat", "T^")),
    ],
)
@pytest.mark.extended
def test_a_notebook_runs_and_shows(name: str, wanted: tuple[str, ...]):
    made = run(notebook(name))
    assert not errors(made)
    page = shown(made)
    for text in wanted:
        assert text in page


def test_every_tutorial_is_a_notebook_and_says_so():
    pages = {page.stem: page.read_text() for page in (FOLDER.parent / "tutorials").glob("*.md")}
    assert set(TUTORIALS) == pages.keys() - {"README"}
    for name in TUTORIALS:
        assert f"](../notebooks/{name}.ipynb)" in pages[name]
