"""Compiled loops: one step traced, split into what runs once, batched, and in the loop; the loop emitted as one function."""
