"""Programs that measure the papers' claims, speed and memory; their results are in results/."""
