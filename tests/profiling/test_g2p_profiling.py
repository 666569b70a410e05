"""The profiling scripts of g2p, packed beside padded, compiled beside eager, and Phonetisaurus: the reports hold.

No time is looked at.
"""

import importlib
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.examples.test_g2p_runs import write_lexicon

FOLDER = Path(__file__).parents[2] / "profiling"
NAMES = (
    "captions",
    "g2p_compiled",
    "g2p_padded",
    "g2p_padding",
    "g2p_phonetisaurus",
    "harness",
    "names",
    "partial",
    "resident",
    "script",
    "sentences",
)


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """profiling/g2p_padding.py in this process, with small models and batches of four words."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    module = importlib.import_module("g2p_padding")
    sys.path[:] = before
    sizes = {n: replace(s, hidden=8, embed=6, batch_size=4, learning_rate=1e-4) for n, s in module.SIZES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SIZES", sizes)
        patch.setattr(module, "FEW", {"quick": {"limit": 30, "batches": 3}})
        patch.setattr(module, "gc", SimpleNamespace(collect=int))  # there is much to collect in a process of tests
        patch.setattr(module.harness, "spawn", lambda path, cell: json.loads(json.dumps(module.run_cell(cell))))
        yield module
    for name in NAMES:
        sys.modules.pop(name, None)


def quick(out: Path, *options: str) -> list[str]:
    return ["--quick", "--out", str(out), *options]


def test_a_run_and_its_report(script: Any, tmp_path: Path):
    out = tmp_path / "quick.json"
    assert script.SCRIPT.main(quick(out)) == 0
    result = json.loads(out.read_text())
    assert len(result["checks"]) == len(result["entries"]) == 4
    assert all(entry["raw"][0]["apart"] <= 1e-10 for entry in result["checks"])
    for entry in result["entries"]:
        (raw,) = entry["raw"]
        assert len(raw["padded_s"]) == len(raw["packed_s"]) == len(raw["ragged"]) == 3
        assert 0 < raw["losses_apart"] < 1e-4  # not the same program, and weights that go the same way
    text = out.with_suffix(".md").read_text()
    assert len(re.findall(r"^\| (of similar length|in random order), `--size (small|full)`, 30 words", text, re.M)) == 4
    out.with_suffix(".md").unlink()
    assert script.SCRIPT.main(["--report", "--out", str(out)]) == 0
    assert out.with_suffix(".md").read_text() == text


def test_rows_that_are_not_measured_again_are_kept(script: Any, tmp_path: Path):
    out = tmp_path / "some.json"
    for order in ("length", "random"):
        assert script.SCRIPT.main(quick(out, "--size", "small", "--order", order)) == 0
    entries = json.loads(out.read_text())["entries"]
    assert sorted(entry["cell"]["order"] for entry in entries) == ["length", "random"]


def test_nothing_is_timed_where_they_differ(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = script.mean_loss
    monkeypatch.setattr(script, "mean_loss", lambda *given: right(*given) * (1 + 1e-9))
    monkeypatch.setattr(script, "timed", None)
    out = tmp_path / "wrong.json"
    assert script.SCRIPT.main(quick(out, "--size", "small")) == 1
    assert not out.exists()


def test_damaged_weights_do_not_agree(script: Any):
    settings, (examples, vocabulary) = script.SIZES["small"], script.words(30)
    runs = {way: script.Run(loss_of(examples), settings, vocabulary) for way, loss_of in script.WAYS.items()}
    deal = script.epoch(examples, "random", 4)[0]
    assert script.apart(runs, deal) <= 1e-10
    for run in runs.values():
        torch.nn.init.constant_(run.model.output.bias, math.nan)
    assert script.apart(runs, deal) == math.inf


def test_batches_stand_for_all_lengths_in_the_order_of_the_epoch(script: Any):
    steps = [7, 1, 6, 2, 5, 3, 4, 8, 9]
    deals = [script.Deal(torch.arange(2), 2 * n, n) for n in steps]
    assert [deal.steps for deal in script.spread(deals, 3)] == [2, 5, 8]
    assert script.spread(deals, 99) == deals
    ragged = deals[3]._replace(phones=3)
    assert script.extremes([ragged, deals[2]]) == [deals[2], ragged]


def test_figures_are_medians_scaled_to_an_epoch(script: Any):
    raws = [{"padded_s": [1.0 * k, 3.0], "packed_s": [2.0, 2.0 * k], "losses_apart": 2e-7} for k in (1, 2, 9)]
    same = {"words_a_batch": 4, "batches_an_epoch": 10, "without_padding": 7, "padding": 0.25, "ragged": [False, True]}
    cell = {"size": "small", "order": "length", "limit": 1234}
    result = {"entries": [{"cell": cell, "raw": [raw | same for raw in raws]}]}
    title = "of similar length, `--size small`, 1,234 words"
    assert script.row(result, "small", "length") == [title, "4", "25 %", "25.0", "30.0", "1.20"]
    assert script.row(result, "full", "length") is None
    (note,) = script.notes(result)
    assert note.endswith(
        "in 7 of the 10 batches all words have equally many phones. "
        "Packed : padded is 1.00 in those, 1.33 in the others."
    )
    result["entries"][0]["raw"] = [{"error": "no words"}]
    assert script.row(result, "small", "length") == [title, *5 * ["error"]]


# ---- compiled ----


def test_compiled_loops_train_as_eager_ones(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        compiled = importlib.import_module("g2p_compiled")
    monkeypatch.setattr(script.harness, "spawn", lambda path, cell: json.loads(json.dumps(compiled.run_cell(cell))))
    out = tmp_path / "quick.json"
    assert compiled.SCRIPT.main(quick(out, "--size", "full")) == 0
    result = json.loads(out.read_text())
    assert [check["raw"][0]["apart"] <= 1e-9 for check in result["checks"]] == [True]
    (raw,) = result["entries"][0]["raw"]
    assert len(raw["eager_s"]) == len(raw["compiled_s"]) == 2
    assert 0 < len(raw["making_s"]) <= 2
    assert raw["losses_apart"] < 1e-4
    assert raw["shapes"] > 1
    assert re.search(r"^\| `--size full`, 30 words", out.with_suffix(".md").read_text(), re.M)


# ---- Phonetisaurus ----

PROGRAM = """#!{python}
import pathlib, sys
model = pathlib.Path(sys.argv[sys.argv.index("--model") + 1])
if sys.argv[1] == "train":
    model.write_text(pathlib.Path(sys.argv[-1]).read_text())
else:
    known = dict(line.split(" ", 1) for line in model.read_text().splitlines())
    for word in sys.stdin.read().split()[1:]:
        print(word, known.get(word, "NO SUCH"))
"""


@pytest.fixture
def phonetisaurus(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which learns what it is tested on."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("g2p_phonetisaurus")
    lexicon = write_lexicon(tmp_path / "lexicon")
    monkeypatch.setattr(module.data, "TRAIN_FILE", lexicon)
    monkeypatch.setattr(module.data, "TEST_FILE", lexicon)
    monkeypatch.setattr(module, "WORDS", {"quick": (None, 20)})
    monkeypatch.setattr(module.harness, "spawn", lambda path, cell: json.loads(json.dumps(module.run_cell(cell))))
    monkeypatch.delenv("PHONETISAURUS_PROGRAM", raising=False)
    return module


def test_words_that_another_program_has_learnt(phonetisaurus: Any, tmp_path: Path):
    program, out = tmp_path / "program", tmp_path / "quick.json"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    assert phonetisaurus.SCRIPT.main(["--quick", "--phonetisaurus", str(program), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["about"]["command"].endswith(" --phonetisaurus PROGRAM")
    assert result["entries"][0]["raw"][0]["wer"] == 5  # it knows all but the first of 20 words
    assert "|  5.00 |" in out.with_suffix(".md").read_text()


def test_a_program_that_fails_or_is_not_there(phonetisaurus: Any, tmp_path: Path):
    out = tmp_path / "quick.json"
    assert phonetisaurus.SCRIPT.main(["--quick", "--out", str(out)]) == 0
    assert "| not installed | not installed |" in out.with_suffix(".md").read_text()
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no words >&2; exit 3\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="phonetisaurus train: no words"):
        phonetisaurus.SCRIPT.main(["--quick", "--phonetisaurus", str(program), "--out", str(out)])
