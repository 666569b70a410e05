"""What the Python of a step does beside returning values: seen as it happens, and refused before it is done."""
