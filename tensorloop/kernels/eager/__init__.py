"""The same operations in torch's own, without autograd: any device, any dtype, any kind of tensor."""
