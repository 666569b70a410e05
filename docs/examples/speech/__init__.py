"""Speech to phones: a Conformer with CTC on packed rows, beside the same weights on padded ones."""
