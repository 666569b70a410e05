"""Phonetisaurus (joint n-grams) on the files of the example g2p: trained on all its training words, scored as we score.

    python profiling/g2p_phonetisaurus.py --phonetisaurus VENV/bin/phonetisaurus    # some minutes

`pip install phonetisaurus` in a virtual environment of its own has the program. The row goes
between the markers of docs/examples/g2p/README.md.
"""

import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from running import harness
from running.script import Place, Result, Script

from docs.examples.g2p import data
from docs.examples.g2p.scoring import score

PROGRAM = Place("phonetisaurus", "PROGRAM", "the program; without it nothing is measured")
WORDS = {"quick": (300, 50), "short": (10_000, 1000), "usual": (None, None)}  # of training and of test; None: all


def cells(args: Namespace) -> list[harness.Cell]:
    train, test = WORDS[args.set]
    return [{"kind": "train", "train": train, "test": test, "limit_s": 3600}]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    if PROGRAM.path is None:
        return {"absent": "not installed"}
    train, test = (
        data.sample(data.read_lexicon(path), limit)
        for path, limit in ((data.TRAIN_FILE, cell["train"]), (data.TEST_FILE, cell["test"]))
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.fst"
        seconds = trained(PROGRAM.path, model, train)
        result = score(pronounced(PROGRAM.path, model, list(test)), test)
    return {"per": result.per, "wer": result.wer, "seconds": seconds}


def trained(program: Path, model: Path, train: data.Lexicon) -> float:
    """Writes the model; the seconds that took."""
    lexicon = model.with_name("train.lexicon")
    lexicon.write_text("".join(f"{word} {' '.join(phones)}\n" for word, several in train.items() for phones in several))
    corpus = str(model.with_name("corpus"))
    command = [program, "train", "--corpus", corpus, "--model", str(model), "--casing", "ignore", str(lexicon)]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"phonetisaurus train: {harness.last_line(done.stderr)}")
    return time.perf_counter() - begun


def pronounced(program: Path, model: Path, words: list[str]) -> dict[str, tuple[str, ...]]:
    """The best pronunciation of each word; none where the model finds none."""
    command = [program, "predict", "--model", str(model), "--casing", "ignore"]
    done = subprocess.run(command, input="\n".join(words) + "\n", capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"phonetisaurus predict: {harness.last_line(done.stderr)}")
    found: dict[str, tuple[str, ...]] = dict.fromkeys(words, ())
    for line in done.stdout.splitlines():
        word, *phones = line.split()
        found[word] = found[word] or tuple(phones)
    return found


def section(result: Result, picture: str) -> str:
    per, wer, seconds = (harness.figure(result, key, kind="train") for key in ("per", "wer", "seconds"))
    why = harness.why_not(result, kind="train")
    rates = [why if x is None else f"{x:.2f}" for x in (per, wer)]
    spent = why if seconds is None else f"{seconds:.0f} s"
    header = ["model", "PER %", "WER %", "training"]
    return harness.table(header, [["Phonetisaurus, as its own trainer makes it, on the same files", *rates, spent]])


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    rounds={"quick": 1, "short": 1, "usual": 1},
    places=[PROGRAM],
    page=("docs/examples/g2p/README.md", "phonetisaurus"),
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
