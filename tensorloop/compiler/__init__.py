"""From the graph of one step to code for a device; knows no loops and no Python of the user's."""
