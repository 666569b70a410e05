"""For tests: assertions on values, gradients and bytes, and `same_loop`, which holds a port against its original."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.testing.assertions import assert_close as assert_close
    from tensorloop.testing.assertions import assert_growth as assert_growth
    from tensorloop.testing.assertions import assert_linear_memory as assert_linear_memory
    from tensorloop.testing.assertions import assert_matches_reference as assert_matches_reference
    from tensorloop.testing.assertions import assert_no_leak as assert_no_leak
    from tensorloop.testing.assertions import assert_saved_bytes as assert_saved_bytes
    from tensorloop.testing.ports import same_loop as same_loop
    from tensorloop.testing.report import LoopReport as LoopReport

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "testing.assertions": (
                *("assert_close", "assert_growth", "assert_linear_memory", "assert_matches_reference"),
                *("assert_no_leak", "assert_saved_bytes"),
            ),
            "testing.ports": ("same_loop",),
            "testing.report": ("LoopReport",),
        },
    )
