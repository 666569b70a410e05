"""Core operations as kernels, and kernels as LLVM's text."""
