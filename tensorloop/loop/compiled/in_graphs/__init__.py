"""Loops inside of torch.compile and torch.export."""
