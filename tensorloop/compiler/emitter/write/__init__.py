"""From kernels to LLVM's text."""
