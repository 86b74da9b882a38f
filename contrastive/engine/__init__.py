"""A run and its book-keeping."""

from contrastive import CORES  # noqa: F401
