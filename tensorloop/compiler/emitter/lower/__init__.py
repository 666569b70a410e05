"""From core operations to kernels."""
