"""Compiled loops: one step traced and split into what runs once, for all steps at once, and in a native loop."""
