"""The same operations in torch's own: any device, any dtype, any kind of tensor."""
