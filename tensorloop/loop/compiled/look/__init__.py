"""One step of the user's body, run once to see what it does."""
