"""What a run of NCL leaves for its figures and for eval.py: recalls by queue size, and queues."""

from contrastive.core.files import write_tensors
from contrastive.core.processes import rank
from contrastive.evaluation.retrieval import retrieval_both_ways

import torch


def recall_by_queue_size(pieces, texts, videos, biases_of):
    """R@1 with the biases of the last 16, 32, 64, ... training queries (Fig. 5).

    Args:
        pieces: EvaluationPieces of a split, which has captions.
        texts, videos: (K, D) training queries, oldest first.
        biases_of: function (items=(n, D), queries=(k, D)) -> biases of the items (n,).
    Returns: {size: {'text_to_image', 'image_to_text': R@1 in percent}}.
    """
    image, text = pieces.image.to(texts.device), pieces.text.to(texts.device)  # (M, D), (C, D)
    recalls = {}
    for size in sorted({min(len(texts), 2**k) for k in range(4, 20)}):
        image_bias = biases_of(items=image, queries=texts[-size:])         # (M,)
        text_bias = biases_of(items=text, queries=videos[-size:])          # (C,)
        metrics, _ = retrieval_both_ways(pieces, image_bias, text_bias)
        recalls[size] = {
            way: metrics[way]["R@1"] for way in ("text_to_image", "image_to_text")}
    return recalls


def save_queues(run, gamma, texts, videos):
    """Writes queues.safetensors, for eval.py --normalize queue and the pictures.

    Args:
        gamma: temperature, a number or ().
        texts, videos: (K, D) training queries, oldest first.
    """
    if rank() == 0:
        gamma = torch.as_tensor(gamma, dtype=torch.float64).detach().reshape(1)
        write_tensors(run.folder / "queues.safetensors", {
            "texts": texts, "videos": videos, "gamma": gamma})
