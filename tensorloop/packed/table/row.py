"""What a row of the table of operations says: the words, and how rows are entered."""

from typing import NamedTuple

FORMS = ROWS, VIEWS, CHANNELS, IMAGES, SCORES, STATIC, SIZES = (
    *("rows", "views", "channels", "images", "scores", "static", "sizes"),
)

# Kinds
BY_ENTRY = "by entry"  # it treats entries alike; torch's tag `pointwise` says so of most, which need no row
ALONG = "along"  # it works along the dims that its argument `dim` names, and is right along any of them
LAST = "last"  # it works on the last features of each entry
WHOLE = "whole"  # it does not ask which dim is which: losses of pairs, facts, new tensors, copies
CLASSES = "classes"  # it has classes behind batch and ragged dim, or in dim 1 of (B, V, T*)
LAYER = "layer"  # it mixes the steps of each row, channels first
SHAPE = "shape"  # it moves, adds, drops or regroups dims
PRODUCT = "product"  # it sums over a dim that two tensors share
OTHER = "other"  # it is like no other
UNTAKEN = "untaken"  # packed tensors do not take it; entries of rows, tables made by T, or refusals know it

# What a row says besides, by a word.
SAYS = {
    "drops": "the dim that it works along is gone afterwards, or of size 1",
    "keeps": "its result has the shape of its input",
    "view": "torch gives a view; ours may be a copy, and what is changed in it in place is written to its source",
    "one by one": "it takes dims one by one as well as in a tuple",
    "beside": "it takes ordinary tensors beside packed ones, which are broadcast",
    "of numbers": "it needs no feature dim",
    "pads": "it has no packed kernel for a ragged dim or for a matrix of each row: it pads, and warns",
    "all numbers": "in place, it gives all numbers other values, whatever the form",
    "all dims": "of scores, it is right along queries and keys too",
    "row by row": "of scores, torch's own for each row is faster along keys than one for all segments",
    # of the entries of rows, (N, *F)
    "batch": "entry i of the result is made of entry i of its first argument, whatever the sizes behind",
    "sizes": "it keeps entries in order where it keeps the number of dims",
    "exchanges": "it exchanges two dims",
    "cuts": "it cuts or joins: there and back, all entries are in their place again",
    "regroups": "sizes (B, -1, *F) may be asked of it",
    "asks sizes": "of its second argument it takes the sizes alone, or the dtype",
    "turns": "in place, it changes sizes or all numbers",
    "moves": "it may move entries although its dim is a feature",
    # of tables made by T
    "begins": "nothing comes from a later place along time: the result's beginning is that of a shorter row",
    "fact": "it says nothing of sizes",
    "chooses": "its gradient goes to entries that it chooses among all of a dim; running ones only look back",
    "by number": "somebody may have read the longest row's number from a shape",
    "as it is": "it gives the same numbers elsewhere",
}


class Lacks(NamedTuple):
    """Why a form has no function, and what to write instead."""

    why: str
    cure: str


class Row(NamedTuple):
    """One torch function."""

    name: str
    kind: str
    runs: dict[str, str | Lacks]
    """form -> its handler, `file.function`, or why there is none."""
    says: frozenset[str]
    called: str
    """What errors call it: a name that people know."""


TABLE: dict[str, Row] = {}


def row(kind: str, names: str, rows: str | Lacks = "", says: str = "", called: str = "", **runs: str | Lacks) -> None:
    """Enters functions that differ in their names alone; `says` has words of SAYS with commas between.

    Along the dims of scores goes what drops its dim or keeps it: the keys of each query are a row.
    """
    words = frozenset(filter(None, says.split(", ")))
    assert words <= SAYS.keys(), words
    if kind == ALONG and words & {"drops", "keeps"}:
        runs.setdefault(SCORES, "score_ops.along")
    for name in names.split():
        assert name not in TABLE, name
        TABLE[name] = Row(name, kind, ({ROWS: rows} if rows else {}) | runs, words, called or name)
