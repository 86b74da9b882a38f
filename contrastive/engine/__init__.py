"""A run and its book-keeping."""

import sys
import tempfile

from contrastive import CORES  # noqa: F401

try:
    tempfile.gettempdir()  # torch needs one before it can be imported
except OSError as nowhere:
    print(f"error: no folder takes temporary files ({nowhere.strerror}): is the disk full? TMPDIR names another",
          file=sys.stderr, flush=True)
    sys.exit(2)
