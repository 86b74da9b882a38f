"""Variants of the scripts that change the loop: `accelerate launch -m variants.temo_experts`."""
