"""Beam search that one can train through, of hypotheses of unknown length, with a certificate."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.beam.api import beam_search as beam_search
    from tensorloop.beam.choose import Sample as Sample
    from tensorloop.beam.choose import StochasticBeam as StochasticBeam
    from tensorloop.beam.choose import TopK as TopK
    from tensorloop.beam.length import GNMT as GNMT
    from tensorloop.beam.length import BoundedReward as BoundedReward
    from tensorloop.beam.length import Power as Power
    from tensorloop.beam.length import Sum as Sum
    from tensorloop.beam.result import Hypotheses as Hypotheses
    from tensorloop.beam.result import Lattice as Lattice
    from tensorloop.beam.scores import linear_log_softmax as linear_log_softmax

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "beam.choose": ("Sample", "StochasticBeam", "TopK"),
            "beam.length": ("BoundedReward", "GNMT", "Power", "Sum"),
            "beam.result": ("Hypotheses", "Lattice"),
            "beam.scores": ("linear_log_softmax",),
            "beam.api": ("beam_search",),
        },
    )
