"""What workloads are called: a title on pages and in pictures, a word on the command line.

Results on disk and the code know the loops of `loop_inputs.py` by short keys, which stay what they are, so that every
file of results can be read. No page shows a key.
"""

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable

TITLES = {
    "W1": "ys[t] = xs[t] * sqrt(t), slice by slice",
    "W2": "an LSTM, B=32, H=256",
    "W3": "a decoder that attends to its past, B=8, D=64",
    "W4": "a loop of unknown length, B=64, D=256",
    "W5": "an RNN whose rows stop on their own, B=32, H=128",
    "ring": "a memory of 64 slots, B=8, D=64",
}
WORDS = {
    "W1": "slices",
    "W2": "lstm",
    "W2s": "lstm_small",
    "W3": "decoder",
    "W4": "unknown_length",
    "W5": "stopping_rows",
    "RNN": "rnn",
    "RNNs": "rnn_small",
}
KEYS = {word: key for key, word in WORDS.items()}


def heading(key: str) -> str:
    """A title that begins a line."""
    title = TITLES[key]
    return title if title.startswith("ys") else title[0].upper() + title[1:]


def word(key: str) -> str:
    return WORDS.get(key, key)


def worded(command: str) -> str:
    """A command as it would be typed today: words in the place of keys."""
    return re.sub(r"(?<=\s)(W\d\w?|RNNs?)(?=\s|$)", lambda found: word(found[1]), command)


def add_only(parser: ArgumentParser, keys: Iterable[str], text: str = "measure these alone") -> None:
    """Adds --only NAME ..., which takes words, and keys as well."""
    known = {word(key): key for key in keys}

    def key_of(name: str) -> str:
        found = known.get(name, name)
        if found not in known.values():
            raise ArgumentTypeError(f"there is no {name!r}; expected one of {', '.join(known)}")
        return found

    parser.add_argument("--only", nargs="+", type=key_of, metavar="NAME", help=f"{text}: {', '.join(known)}")
