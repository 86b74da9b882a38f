"""TF32 on NVIDIA GPUs: for encoders, never for a loss."""

import contextlib

import torch


@contextlib.contextmanager
def tf32(enabled=True):
    """Context in which a CUDA GPU multiplies float32 matrices in TF32 (11 bits, not 24).

    For encoders, never for a loss, which divides the cosines by 0.01.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
