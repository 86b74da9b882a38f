"""Encoders by name: their parts, timm and transformers, towers over whole clips, weights of others, frozen models."""
