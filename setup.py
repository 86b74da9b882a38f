"""Refuses `pip install .`: the scripts are read, run and copied where they lie."""

raise SystemExit(
    "This is a repository of scripts, not a package. Clone it with git, install what it needs with "
    "`pip install -r requirements.txt`, and to import from it put the clone on PYTHONPATH.")
