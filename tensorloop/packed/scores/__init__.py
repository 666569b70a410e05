"""Scores between the entries of a row, of two ragged dims: what makes them, what they take, and their parts."""

from tensorloop._common.moved import hands_on

__getattr__ = hands_on(__name__, "tensorloop.packed.scores.scores", "PackedScores")
