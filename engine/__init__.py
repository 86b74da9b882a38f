"""A run and its book-keeping. Imports nothing of ours and comes first: what is set here counts before torch."""

import os
import sys
import tempfile

# Before torch: its threads spin while they wait, which makes a step on a busy machine 3 to 10 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Set in NVIDIA's containers: it makes all float32 products TF32, also those of losses (encoders: common.tf32).
os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers' threads and forked loader workers do not mix
# Cores that this process may use, which SLURM and taskset restrict; torch's threads may be bound to fewer.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

try:
    tempfile.gettempdir()  # torch needs one before it can be imported
except OSError as nowhere:
    print(f"error: no folder takes temporary files ({nowhere.strerror}): is the disk full? TMPDIR names another",
          file=sys.stderr, flush=True)
    sys.exit(2)
