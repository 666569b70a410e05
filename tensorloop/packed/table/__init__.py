"""The table of torch functions that take packed tensors, and what every handler in it stands on."""
