"""Results as text, pages, files and pictures."""
