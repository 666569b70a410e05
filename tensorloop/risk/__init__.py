"""Training objectives over hypotheses, and the risks they take: edit distance and sentence BLEU."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.risk.bleu import sentence_bleu as sentence_bleu
    from tensorloop.risk.edits import EDITS as EDITS
    from tensorloop.risk.edits import edit_distance as edit_distance
    from tensorloop.risk.objectives import leave_one_out as leave_one_out
    from tensorloop.risk.objectives import minimum_risk as minimum_risk
    from tensorloop.risk.objectives import mwer as mwer
    from tensorloop.risk.objectives import stochastic_beam_risk as stochastic_beam_risk
    from tensorloop.risk.token_rows import TokenRows as TokenRows

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "risk.bleu": ("sentence_bleu",),
            "risk.edits": ("EDITS", "edit_distance"),
            "risk.objectives": ("leave_one_out", "minimum_risk", "mwer", "stochastic_beam_risk"),
            "risk.token_rows": ("TokenRows",),
        },
    )
