"""Which storages are alive, and which line of whose code made them."""
