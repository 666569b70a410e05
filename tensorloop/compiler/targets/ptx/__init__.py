"""Steps as kernels for NVIDIA GPUs: the text of the emitter made PTX by LLVM, loaded by the CUDA driver."""
