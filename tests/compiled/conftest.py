"""What the tests of compiled loops share."""

from tests.support.compiled_fixtures import blocks, fresh_plans, guards, held, runs, verified

__all__ = ["blocks", "fresh_plans", "guards", "held", "runs", "verified"]
