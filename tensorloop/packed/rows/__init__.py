"""Rows among values: their lengths and offsets, sums and maxima over them, copies in and out of padding."""
