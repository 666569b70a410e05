"""What is made of a look, and how it runs."""
