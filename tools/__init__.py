"""Programs to run by hand: python -m tools.NAME."""
