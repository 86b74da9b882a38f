"""The rooms behind common.py. What is set here counts before torch, which every room imports after this file."""

import os

# Before torch: its threads spin while they wait, which makes a step on a busy machine 3 to 10 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Set in NVIDIA's containers: it makes all float32 products TF32, also those of losses (encoders: common.tf32).
os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers' threads and forked loader workers do not mix
# Cores that this process may use, which SLURM and taskset restrict; torch's threads may be bound to fewer.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
