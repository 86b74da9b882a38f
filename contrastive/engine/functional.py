"""A model as a function of its parameters, for MAMA's look-ahead."""

import warnings

from contrastive.engine.grad_cache import random_state, set_random_state

import torch


def trained_parameters(model):
    """{name: parameter} of the model, without frozen ones."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def functional_encoder(model):
    """The model as a function of its parameters: (parameters, inputs) -> its outputs.

    Each call draws the same dropout. The weights, statistics and random state do not change.
    """
    # PyTorch warns of a function that its own forward mode calls
    warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)
    device = next(model.parameters()).device
    state = random_state(device)
    devices = []                                                           # the CPU is implied
    if device.type == "cuda":
        devices.append(device)

    def encode(parameters, inputs):
        tensors = dict(parameters)
        for name, buffer in model.named_buffers():
            tensors[name] = buffer.clone()
        with torch.random.fork_rng(devices):
            set_random_state(state, device)
            return torch.func.functional_call(model, tensors, kwargs=inputs)
    return encode
