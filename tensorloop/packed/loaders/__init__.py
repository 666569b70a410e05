"""Batches of rows for a DataLoader: collated, and sampled by their lengths."""
