"""A run and its book-keeping."""
