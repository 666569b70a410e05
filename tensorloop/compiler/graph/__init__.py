"""From what a step did to one graph of core operations."""
