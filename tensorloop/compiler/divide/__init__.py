"""What of a step runs once, what for all steps together, what in the loop, and which values are kept."""
