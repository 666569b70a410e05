"""What the tests of the compiler share with those of compiled loops."""

from tests.support.compiled_fixtures import blocks, fresh_plans, guards, held, runs, verified

__all__ = ["blocks", "fresh_plans", "guards", "held", "runs", "verified"]
