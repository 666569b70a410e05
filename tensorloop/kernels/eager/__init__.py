"""Kernels in torch operations, without autograd: for any device, any dtype, any kind of tensor."""
