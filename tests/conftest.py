"""One thread, no network, and no trace outside a folder that goes when the session ends."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
CACHE = tempfile.mkdtemp(prefix="contrastive-tests-")
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=CACHE, HF_DATASETS_CACHE=f"{CACHE}/datasets", OMP_NUM_THREADS="1",
                  OMP_WAIT_POLICY="PASSIVE", MPLCONFIGDIR=f"{CACHE}/matplotlib")

import torch  # noqa: E402  (the variables above are read at import)

torch.set_num_threads(1)


def pytest_sessionfinish():
    shutil.rmtree(CACHE, ignore_errors=True)
