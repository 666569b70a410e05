"""Models on rows that stand one after another, without padding: a pass, log-probabilities, and what layers see."""
