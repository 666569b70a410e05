"""Layers and returns over a time dim that processes share, and a training that goes on after a process was killed."""
