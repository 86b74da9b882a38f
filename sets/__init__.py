"""Data sets that need knowledge of their own, one file per family; `common.load_data` opens them by name."""
