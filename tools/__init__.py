"""Programs that a person starts: python -m tools.NAME."""
