"""Encoders: a table of their names, towers, tokenizers, others' weights, frozen models."""
