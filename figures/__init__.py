"""Pictures of runs and evaluations: base.py for all, a file for each paper."""
