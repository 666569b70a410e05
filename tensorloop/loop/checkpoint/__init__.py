"""Loops that keep few carries: a sweep, its snapshots, and a backward that runs steps again."""
