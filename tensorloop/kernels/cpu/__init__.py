"""Kernels compiled by numba for the CPU, a module for each kind of operation."""
