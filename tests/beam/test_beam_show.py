"""What one sees of a search: text, a table, a picture, progress."""

from collections.abc import Iterator

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from tensorloop import beam
from tests.support.beam_cases import Table


@pytest.fixture
def axes() -> Iterator[object]:
    matplotlib.use("Agg")
    yield
    plt.close("all")


def test_hypotheses_print_with_scores():
    hyps = Table.random(3, 4, seed=1).search(2)
    lines = str(hyps).splitlines()
    assert lines[0] == "Hypotheses(3 rows, 2 best)"
    assert lines[1].startswith("row 0: exact, coverage 0.")
    assert f"{hyps.scores[0, 0]:.4f}" in lines[2]
    assert lines[2].split()[1:] == [str(x) for x in hyps.tokens[0].tolist()] or "(empty)" in lines[2]
    assert repr(hyps) == str(hyps)
    assert hyps.text(rows=1).splitlines()[-1] == "... 2 more rows"


def test_names_of_tokens():
    hyps = Table.random(1, 4, seed=2).search(4)
    names = ["BOS", "EOS", "a", "b"]
    text = hyps.text(names)
    assert text == hyps.text(names.__getitem__)
    assert set(text.replace("(empty)", "").split()[9:]) & {"a", "b"}


def test_what_has_not_ended_and_what_is_not_there():
    hyps = Table.random(1, 3, seed=2, eos=-5).search(6, max_steps=2, stop="never", n_best=9)
    text = str(hyps)
    assert text.count(" ...") == int((hyps.valid & ~hyps.finished).sum()) > 0
    assert text.count("\n") == 1 + int(hyps.valid.sum())
    assert "capped, gap inf" in text


def test_a_table_for_notebooks():
    hyps = Table.random(12, 4).search(2)
    html = hyps._repr_html_()
    assert html.count("<tr>") == 1 + 10 * 2
    assert "2 more rows" in html
    assert "<table>" in html


def test_the_lattice_prints_short():
    hyps = Table.random(3, 4).search(2, max_steps=3, stop="never")
    assert repr(hyps.lattice) == "Lattice(3 steps, 3 rows, 2 hypotheses)"


def test_the_lattice_draws_itself(axes: object):
    hyps = Table.random(2, 5, seed=3).search(4)
    ax = hyps.lattice.draw(1, names="0123456789")
    steps = int(hyps.lattice.steps[1])
    alive = int((hyps.lattice.scores[:steps, 1] > -torch.inf).sum())
    assert len(ax.lines) == alive
    assert len(ax.texts) == alive
    bold = sum(line.get_linewidth() > 1 for line in ax.lines)
    assert 0 < bold < alive
    assert hyps.lattice.draw(0, ax=ax) is ax


def test_progress_shows_steps_and_what_runs(capsys: pytest.CaptureFixture[str]):
    table = Table.random(3, 4)
    shown = table.search(3, progress=True, max_steps=20)
    text = capsys.readouterr().err
    assert "beam_search" in text
    assert "rows=" in text
    assert "hypotheses=" in text
    assert torch.equal(shown.scores, table.search(3, max_steps=20).scores)
    assert capsys.readouterr().err == ""


def test_what_is_public():
    assert beam.beam_search.__doc__
    for name in vars(beam)["__all__"]:
        assert getattr(beam, name).__doc__, name
