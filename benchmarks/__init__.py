"""Programs that measure the papers' claims, speed, and what only a GPU shows; their results are in results/."""
