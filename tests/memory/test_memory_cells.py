"""A notebook's cell is called by its number, where lines are named."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

import tensorloop as tl
from tensorloop._common.user_line import cell_name
from tensorloop.memory.counting.sites import Site

FILE = "/ipykernel_29652/3477379381.py"
CELL = """
w = torch.ones(4, requires_grad=True)
kept = tl.memory.saved_residuals(lambda: w.exp().sum())

def looks(h, x):
    h = h * float(h.sum())
    return torch.sin(h + x), h

why = tl.explain(looks, torch.zeros(8), torch.randn(20, 8))
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython as a kernel has it, with one cell that ran third."""
    names = {FILE: ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)


@pytest.mark.usefixtures("notebook")
def test_a_cell_is_called_by_its_number():
    assert str(Site(FILE, 19, "f", "x")) == "cell 3:19"
    assert Site(FILE, 19, "f", "x").as_dict()["file"] == "cell 3"
    assert str(Site("/other.py", 19, "f", "x")) == "/other.py:19"


@pytest.mark.usefixtures("notebook")
def test_tables_and_explanations_name_cells():
    names = {"torch": torch, "tl": tl}
    exec(compile(CELL, FILE, "exec"), names)
    assert "cell 3:3" in str(names["kept"])
    assert "cell 3:3" in names["kept"]._repr_html_()
    assert "\n  at cell 3:6\n" in names["why"].text
    assert "ipykernel" not in str(names["kept"]) + names["kept"]._repr_html_() + names["why"].text


def test_outside_of_notebooks_no_file_is_a_cell(monkeypatch: pytest.MonkeyPatch):
    assert cell_name(FILE) is None
    for missing in (SimpleNamespace(), SimpleNamespace(get_ipython=lambda: None)):
        monkeypatch.setitem(sys.modules, "IPython", missing)
        assert cell_name(FILE) is None


def test_ipython_names_cells_so(monkeypatch: pytest.MonkeyPatch):
    """What is asked of IPython is there, in the one that is installed."""
    from IPython.core.compilerop import CachingCompiler

    compiler = CachingCompiler()
    file = compiler.cache("1 + 1", 7)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(compile=compiler))
    assert cell_name(file) == "cell 7"
    assert cell_name(re.sub(r"\d", "x", file)) is None
