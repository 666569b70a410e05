"""Kernels in torch operations: any device, any dtype."""
