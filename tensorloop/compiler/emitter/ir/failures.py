"""The word by which a loop says that a matrix was singular: of all steps, checks, matrices, the first that failed.

It is MOST less a number that has the step, the check, the matrix and its info, from the highest bits on. So 0 says that
nothing failed, and the largest of several words is that of the first.
"""

from typing import NamedTuple

from tensorloop.compiler.emitter.ir.code import Code, Index, Value

MOST = 2**62
INFO, ELEMENT, CHECK = 8, 16, 6  # bits


def note(code: Code, where: str, check: int, element: Index, info: Value) -> None:
    """Writes down a matrix with this info, unless one is there that failed earlier."""
    step = code.op(f"shl i64 %turn, {INFO + ELEMENT + CHECK}", "i64").text
    key = code.add(step, code.times(element, 2**INFO), info.text, check * 2 ** (INFO + ELEMENT))
    word = code.op(f"sub i64 {MOST}, {key}", "i64").text
    code.op(f"atomicrmw max ptr {where}, i64 {word} seq_cst", "i64")


def goes_on(code: Code, failed: str) -> Value:
    """Whether a loop goes on to its next step: where no matrix of this step, or of one before it, has failed.

    Threads may be at other steps, and see what fails in a later step than theirs when they have not come there.
    """
    word = code.op(f"load atomic i64, ptr {failed} monotonic, align 8", "i64").text
    key = code.op(f"sub i64 {MOST}, {word}", "i64").text
    step = code.op(f"lshr i64 {key}, {INFO + ELEMENT + CHECK}", "i64").text
    none = code.op(f"icmp eq i64 {word}, 0", "i1")
    return code.binary("or", none, code.op(f"icmp ugt i64 {step}, %turn", "i1"))


class Failure(NamedTuple):
    """The failure that a word tells of: at which step, in which check, of which matrix, and its info."""

    step: int
    check: int
    element: int
    info: int


def failure(word: int) -> Failure:
    """Reads the word of what failed."""
    key = MOST - word
    element, check = key >> INFO, key >> (INFO + ELEMENT)
    return Failure(key >> (INFO + ELEMENT + CHECK), check % 2**CHECK, element % 2**ELEMENT, key % 2**INFO)
