"""Gradient caching: a large batch in the memory of a small one, with the same gradient."""

import contextlib

from contrastive.engine.precision import tf32

import torch
from accelerate.utils import find_batch_size, slice_tensors


class GradCache:
    """Encodes a batch in chunks, with the gradient of the whole batch (Gao et al. 2021).

        image, text, _ = grad_cache.encode(pixels=pixels, tokens=tokens)   # (B, D)
        accelerator.backward(loss_of(image, text))

    The first pass encodes chunk by chunk without a graph. In the backward pass of the loss, when
    its gradient at the embeddings is known, each chunk is encoded again with the random state of
    its first pass, and the gradient goes on through it. The memory is that of one chunk.

    Without chunks, and under torch.no_grad(), `encode` is a plain call of the model.

    Args:
        model: as accelerator.prepare returns it.
        accelerator: the Accelerator.
        chunk_size: examples at a time on this process; 0 = all.
        encode: function of the inputs -> tuple of (b, D); None = the model itself.
    """

    def __init__(self, model, accelerator, chunk_size=0, encode=None):
        self.model = model
        self.accelerator = accelerator
        self.chunk_size = chunk_size
        self.forward = encode or model
        self.device = accelerator.device
        # encoders multiply float32 in TF32, forward and backward
        self.uses_tf32 = self.device.type == "cuda"
        self.in_encoders = False
        self.settings = contextlib.ExitStack()  # of the backward pass of the encoders

    def encode(self, **inputs):
        """Inputs of the model, (nested dicts of) (B, ...) tensors -> tuple of (B, D) embeddings."""
        num_examples = find_batch_size(inputs)
        if self.is_in_chunks(num_examples):
            if torch.is_grad_enabled():
                # one input must need a gradient, else autograd calls no backward
                return _EncodeInChunks.apply(self, inputs, torch.zeros((), requires_grad=True))
            embeddings, _ = self.encode_in_chunks(inputs)
            return embeddings
        with tf32(self.uses_tf32):
            embeddings = self.forward(**inputs)                            # (B, D) each
        return _EncodersBelow.apply(self, *embeddings)

    def is_in_chunks(self, num_examples):
        """Whether a batch of so many examples is encoded in chunks, and so twice."""
        return 0 < self.chunk_size < num_examples

    def encode_in_chunks(self, inputs):
        """The first pass. Returns: embeddings (B, D) each; [(inputs of a chunk, random state)]."""
        chunks, parts = [], []
        with tf32(self.uses_tf32):
            for start in range(0, find_batch_size(inputs), self.chunk_size):
                chunk = slice_tensors(inputs, slice(start, start + self.chunk_size))
                chunks.append((chunk, random_state(self.device)))
                parts.append(self.forward(**chunk))                        # (b, D) each
        embeddings = []
        for embeddings_of_chunks in zip(*parts, strict=True):
            if embeddings_of_chunks[0] is None:                            # there are no texts
                embeddings.append(None)
            else:
                embeddings.append(torch.cat(embeddings_of_chunks))         # (B, D)
        return tuple(embeddings), chunks

    def backward_in_chunks(self, chunks, gradients):
        """The second pass: encodes each chunk with a graph, and passes its gradient through it.

        Args: gradients: (B, D) at each embedding, or None.
        """
        state_after = random_state(self.device)
        for k, (chunk, state) in enumerate(chunks):
            set_random_state(state, self.device)
            sync = contextlib.nullcontext()
            if k < len(chunks) - 1:
                # processes average their gradients in the last chunk only
                sync = self.accelerator.no_sync(self.model)
            with sync, torch.enable_grad(), tf32(self.uses_tf32):
                self.backward_of_chunk(chunk, k * self.chunk_size, gradients)
        set_random_state(state_after, self.device)

    def backward_of_chunk(self, chunk, start, gradients):
        outputs, gradients_of_chunk = [], []
        for output, gradient in zip(self.forward(**chunk), gradients, strict=True):
            # a frozen encoder has no gradient, and the loss may use only some embeddings
            if gradient is not None and output.requires_grad:
                rows = gradient[start:start + len(output)]                 # (b, D)
                outputs.append(output)
                gradients_of_chunk.append(rows.to(output.dtype))
        torch.autograd.backward(outputs, gradients_of_chunk)

    def enter_encoders(self):
        """Called when a backward pass comes from the loss to the encoders.

        Autograd runs later nodes first, so that no part of the loss comes after them. The callback
        is the hook that DDP uses, too: it runs when this backward ends.
        """
        if self.in_encoders:
            return
        self.in_encoders = True
        self.settings.enter_context(tf32(self.uses_tf32))
        torch.autograd.Variable._execution_engine.queue_callback(self.leave_encoders)

    def leave_encoders(self):
        """Called at the end of that backward pass."""
        self.settings.close()
        self.in_encoders = False


class _EncodeInChunks(torch.autograd.Function):
    """Both passes of a GradCache as one function of autograd."""

    @staticmethod
    def forward(ctx, grad_cache, inputs, _):
        ctx.grad_cache = grad_cache
        ctx.set_materialize_grads(False)
        embeddings, ctx.chunks = grad_cache.encode_in_chunks(inputs)
        return embeddings

    @staticmethod
    def backward(ctx, *gradients):
        ctx.grad_cache.backward_in_chunks(ctx.chunks, gradients)
        return None, None, None


class _EncodersBelow(torch.autograd.Function):
    """The identity of embeddings; tells a GradCache when backward enters their encoders."""

    @staticmethod
    def forward(ctx, grad_cache, *embeddings):
        ctx.grad_cache = grad_cache
        ctx.set_materialize_grads(False)
        return tuple(x if x is None else x.view_as(x) for x in embeddings)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.grad_cache.enter_encoders()
        return None, *gradients


def random_state(device):
    """Random states of the CPU and, if the device is a GPU, of the device."""
    cuda = None
    if device.type == "cuda":
        cuda = torch.cuda.get_rng_state(device)
    return torch.get_rng_state(), cuda


def set_random_state(state, device):
    """Restores what random_state returned."""
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
