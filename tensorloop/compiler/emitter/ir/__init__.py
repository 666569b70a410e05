"""What text is made of: values, arithmetic, arrays, kernels, and what a machine can do."""
