"""Encoders: a table of their names, tokenizers, weights from files, the model of a run, experts."""
