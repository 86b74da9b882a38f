"""The packages behind common.py.

What is set here must be set before torch is imported; every module of ours imports this file first.
"""

import os

# torch's threads would spin while they wait: a step on a busy machine takes 3 to 10 times as long
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# NVIDIA's containers set it: it makes all float32 products TF32, also those of losses. (Encoders:
# common.tf32.)
os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)
# tokenizers' threads and forked loader workers do not work together
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# cores that this process may use, which SLURM and taskset restrict; torch's threads may have fewer
if hasattr(os, "sched_getaffinity"):
    CORES = len(os.sched_getaffinity(0))
else:
    CORES = os.cpu_count() or 1
