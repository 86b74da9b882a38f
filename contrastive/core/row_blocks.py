"""Losses whose (B, N) matrix is large run in blocks of rows; backward computes each block again."""

import functools

import torch
from torch.utils.checkpoint import checkpoint

rows_at_a_time = 0  # of by_rows and row_blocks; 0 = as many as fit into memory and cache
WHOLE_MATRIX_BYTES = 2**30  # up to this size a loss runs on the whole (B, N) matrix
BLOCK_BYTES_CPU = 2**26  # size of a block that fits into the cache
BYTES_PER_ELEMENT = 4 * 21  # float32; Algorithm 1 of TeMo keeps about 21 (B, N) matrices


def row_blocks(loss):
    """Decorator: runs a row-wise loss in blocks of rows where its (B, N) matrix is large.

    It cuts the positional tensors into blocks of b rows and joins the results, so that no large
    (B, N) matrix is kept: backward computes each block again. Keyword arguments stay whole.

    Args:
        loss: function (*rows, **whole) -> (b,), or () their mean. Positional tensors with B rows
            are cut into blocks, keyword arguments are passed whole. N is the number of rows of all
            keyword arguments that are matrices together.
    """
    @functools.wraps(loss)
    def wrapped(*rows, **whole):
        num_columns = 0
        for value in whole.values():
            if torch.is_tensor(value) and value.ndim == 2:
                num_columns += len(value)
        return by_rows(functools.partial(loss, **whole), *rows, columns=num_columns)
    return wrapped


def by_rows(loss, *rows, columns):
    """The loss of each row of a (B, N) matrix, in blocks of rows if the matrix is large.

    Args:
        loss: function of slices of `rows` -> (b,), or () their mean. Gradients flow through the
            slices.
        rows: tensors whose first axis is B are sliced; anything else is passed whole.
        columns: N.
    Returns: (B,), or () the mean over all rows.
    """
    B = len(rows[0])
    block = rows_at_a_time or block_size(B, columns, rows[0].is_cuda)
    if block >= B:
        return loss(*rows)
    if torch.is_grad_enabled():
        # else nothing is computed again, and checkpoint of older torch refuses forward mode
        loss = functools.partial(checkpoint, loss, use_reentrant=False, preserve_rng_state=False)
    parts, sizes = [], []
    for start in range(0, B, block):
        block_rows = [slice_rows(x, start, start + block, B) for x in rows]
        parts.append(loss(*block_rows))
        sizes.append(min(block, B - start))                                # the last may be short
    if parts[0].ndim:
        return torch.cat(parts)                                            # (B,)
    return sum(part * (size / B) for part, size in zip(parts, sizes))


def slice_rows(x, start, end, B):
    """Rows start to end of a tensor with B rows; anything else as it is."""
    if torch.is_tensor(x) and x.ndim > 0 and len(x) == B:
        return x[start:end]
    return x


def block_size(B, columns, on_gpu):
    """Rows at a time of a (B, N) matrix: all within 1 GiB, else what fills the cache or the GPU."""
    bytes_per_row = BYTES_PER_ELEMENT * columns
    if B * bytes_per_row <= WHOLE_MATRIX_BYTES:
        return B
    block_bytes = WHOLE_MATRIX_BYTES if on_gpu else BLOCK_BYTES_CPU
    return max(1, block_bytes // bytes_per_row)
