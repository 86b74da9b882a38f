"""Big batches on small cards: the gradient of the full batch with the memory of a chunk; opened by common.Chunks."""

import contextlib

import torch


class GradientCache:
    """The embeddings of a batch, encoded in chunks without a graph, and a second pass with one.

    The script computes its loss from the embeddings, and its gradient at them is there; `backward` encodes each chunk
    again with the random state of the first pass and pushes the gradient through.

    Args:
        encode: function of nested dicts of (b, ...) tensors -> tuple of (b, D) embeddings, rows as in the inputs.
        inputs: nested dict of (B, ...) tensors.   chunk: examples at a time.
    Attributes: embeddings: tuple of (B, D), leaves of the loss's graph.
    """

    def __init__(self, encode, inputs, chunk):
        leaves = list(_leaves(inputs))
        self.encode, self.chunk, self.device = encode, chunk, leaves[0].device
        self.pieces = [_slice(inputs, i, i + chunk) for i in range(0, len(leaves[0]), chunk)]
        self.states, parts = [], []
        with torch.no_grad():
            for piece in self.pieces:
                self.states.append(random_state(self.device))
                parts.append(encode(piece))
        self.embeddings = tuple(torch.cat(e).detach().requires_grad_() for e in zip(*parts))  # (B, D) each

    def backward(self, no_sync):
        """Push the gradients of the embeddings into the parameters. no_sync: a context in which processes do not wait
        for each other: they do in the last chunk only."""
        after = random_state(self.device)
        for k, (piece, state) in enumerate(zip(self.pieces, self.states)):
            set_random_state(state, self.device)
            last = k == len(self.pieces) - 1
            rows = slice(k * self.chunk, (k + 1) * self.chunk)
            with contextlib.nullcontext() if last else no_sync():
                again = self.encode(piece)  # (b, D) each, with a graph
                used = [(e, whole.grad[rows]) for e, whole in zip(again, self.embeddings) if whole.grad is not None]
                torch.autograd.backward([e for e, _ in used], [g.to(e.dtype) for e, g in used])
        set_random_state(after, self.device)


def _leaves(x):
    return (t for v in x.values() for t in (_leaves(v) if isinstance(v, dict) else [v]))


def _slice(x, i, j):
    return {k: _slice(v, i, j) if isinstance(v, dict) else v[i:j] for k, v in x.items()}


def random_state(device):
    """Of the CPU and, where that is a GPU, of the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state, device):
    """Put back what random_state gave."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
