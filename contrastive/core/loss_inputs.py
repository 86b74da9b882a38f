"""What a loss does with its inputs first: float32, and temperatures in a shape that fits."""

import functools

import numpy as np
import torch


def fp32(loss):
    """Decorator of a loss, which then runs in float32 outside autocast, whatever the caller does.

    Half precision becomes float32; float64 stays. The dict of the keyword `terms`, which a loss
    fills for the log, is handed on as it is. A numpy array is a TypeError.
    """
    @functools.wraps(loss)
    def wrapped(*args, **kwargs):
        from accelerate.utils import convert_to_fp32, find_device
        for value in (*args, *kwargs.values()):
            if isinstance(value, np.ndarray):
                raise TypeError(f"{loss.__name__}: got a numpy array; give torch tensors")
        converted = convert_to_fp32(kwargs)
        if "terms" in kwargs:
            converted["terms"] = kwargs["terms"]                           # the caller's own dict
        with torch.autocast(find_device((args, kwargs)).type, enabled=False):
            return loss(*convert_to_fp32(args), **converted)
    return wrapped


def per_anchor(value, anchor, name="tau", positive=True, columns=0):
    """A temperature or margin in a shape that divides or shifts the logits (B, N) of the anchors.

    Args:
        value: a number, () or (B,), one for each anchor; or a function, which stays as it is.
        anchor: (B, D).
        name: of the value, for the message.
        positive: whether a number must be above 0. The values of a tensor are not checked, since
            that would wait for the GPU.
        columns: N, if the loss also accepts (B, N), one for each pair.
    Returns: a number, (), (B, N), or (B,) as (B, 1).
    Raises: ValueError for any other shape, which would broadcast wrongly.
    """
    if callable(value):
        return value
    if not torch.is_tensor(value):
        return one_number(value, name, positive)
    B = len(anchor)
    if value.ndim == 0 or value.shape == (B, columns):
        return value
    if value.shape == (B,):
        return value[:, None]                                              # (B, 1)
    pairs = f", or ({B}, {columns}), one per pair" if columns else ""
    raise ValueError(f"{name}: a tensor of shape {tuple(value.shape)}; give a number, or a tensor "
                     f"of shape () or ({B},), one value per anchor of this process{pairs}")


def one_number(value, name="tau", positive=True):
    """Checks that a temperature or margin is one number, and returns it as it is.

    Args:
        value: a number, or a tensor of shape ().
        name, positive: as in per_anchor.
    Raises: ValueError for any other shape, and for a number that is not above 0.
    """
    if torch.is_tensor(value):
        if value.ndim > 0:
            raise ValueError(f"{name}: a tensor of shape {tuple(value.shape)}; give a number or a "
                             "tensor of shape ()")
        return value
    if np.ndim(value) > 0:
        raise ValueError(f"{name}: an array of shape {np.shape(value)}; give a number or a tensor")
    if positive and not value > 0:
        raise ValueError(f"{name} {value}: must be above 0; the cosines are divided by it")
    return value
