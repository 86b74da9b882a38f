"""Pictures of runs and evaluations: base.py for all runs, and one file per paper."""
