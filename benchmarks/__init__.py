"""Programs that measure: claims, speed, a GPU; what they found lies in results/."""
