"""Encoders by name: what they are built from, timm and transformers, whole clips, weights of elsewhere, experts."""
