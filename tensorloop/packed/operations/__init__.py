"""What torch functions do with packed tensors, one file for each kind of function."""
