"""Phonetisaurus (joint n-grams) on the files of the example g2p: trained on all its training words, scored as we score.

    python profiling/g2p_phonetisaurus.py --phonetisaurus VENV/bin/phonetisaurus    # some minutes

`pip install phonetisaurus` in a virtual environment of its own has the program.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from docs.examples.g2p import data
from docs.examples.g2p.scoring import Score, score


def pronounced(program: str, folder: Path, words: list[str]) -> dict[str, tuple[str, ...]]:
    """The best pronunciation of each word; none where the model finds none."""
    command = [program, "predict", "--model", str(folder / "model.fst"), "--casing", "ignore"]
    done = subprocess.run(command, input="\n".join(words) + "\n", capture_output=True, text=True, check=True)
    found: dict[str, tuple[str, ...]] = dict.fromkeys(words, ())
    for line in done.stdout.splitlines():
        word, *phones = line.split()
        found[word] = found[word] or tuple(phones)
    return found


def measure(program: str, folder: Path) -> tuple[Score, float]:
    """The score on the test words, and the seconds of training."""
    lexicon = folder / "train.lexicon"
    entries = data.read_lexicon(data.TRAIN_FILE).items()
    lexicon.write_text("".join(f"{word} {' '.join(phones)}\n" for word, several in entries for phones in several))
    begun = time.perf_counter()
    corpus, model = str(folder / "corpus"), str(folder / "model.fst")
    command = [program, "train", "--corpus", corpus, "--model", model, "--casing", "ignore", str(lexicon)]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - begun
    test = data.read_lexicon(data.TEST_FILE)
    return score(pronounced(program, folder, list(test)), test), seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phonetisaurus", default="phonetisaurus", help="the program; %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result, seconds = measure(args.phonetisaurus, Path(folder))
    print(f"{result}; trained in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
