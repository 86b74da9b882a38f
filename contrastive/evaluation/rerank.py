"""Retrieval in which the matching head of VAST ranks the first candidates of each query anew.

The first K by cosine are ranked by their probability of a match alone: by its logit, which is the
same order, since a probability near 1 is rounded to 1 and would tie with others. The other
candidates stay behind them in the order of their cosines; VAST gives them the score 0. No recall at
1 to K depends on that.
"""

from contrastive.core.metrics import (
    best_of_groups, fill_padding, normalize, ranks_of_best, recalls)
from contrastive.evaluation.embed import check_outputs, outputs_of_images
from contrastive.evaluation.retrieval import add_means, image_to_text_positives

import torch

# most numbers in the clips' tokens of the pairs that are classified at a time: 1 GiB
PAIR_NUMBERS = 2**28
ROWS = 1024  # queries that are ranked at a time


def reranked_retrieval(pieces, towers, top, *, workers=0):
    """Retrieval both ways, with the first `top` candidates ranked by the matching head. Collective.

    Each clip is encoded once more, and classified with all captions that need it.

    Args:
        pieces: EvaluationPieces with captions.
        towers: Towers of a Vast with a matching head.
        top: K.
        workers: loader processes.
    Returns: {text_to_image, image_to_text, R-Mean, R@1-Mean}, as retrieval_both_ways.
    """
    image, text = normalize(pieces.image), normalize(pieces.text)          # (M, D), (C, D)
    best_images = best_candidates(text, image, top)                        # (C, K)
    best_texts = best_candidates(image, text, top)                         # (M, K)
    is_pair = torch.zeros(len(image), len(text), dtype=torch.bool)         # (M, C)
    is_pair[torch.arange(len(image))[:, None], best_texts] = True
    is_pair.T[torch.arange(len(text))[:, None], best_images] = True
    logits = matching_logits(pieces, towers, is_pair, workers)             # (M, C)

    to_text, groups = image_to_text_positives(pieces)                      # (M, P), (C,)
    metrics = {
        "text_to_image": recalls(ranks(text, image, logits.T, best_images, pieces.positives)),
        "image_to_text": recalls(ranks(image, text, logits, best_texts, to_text,
                                       groups=groups))}
    add_means(metrics)
    return metrics


def best_candidates(query, gallery, top):
    """(Q, K) the K nearest candidates of each query; all of them if there are fewer."""
    top = min(top, len(gallery))
    parts = [(block @ gallery.T).topk(top).indices for block in query.split(ROWS)]
    return torch.cat(parts)


def ranks(query, gallery, logits, best, positives, *, groups=None):
    """The rank of each query's best positive, (Q,) numpy, from 1.

    Args:
        query, gallery: (Q, D), (G, D) of unit length.
        logits: (Q, G) of the probability of a match; those of `best` alone are read.
        best: (Q, K) the candidates that are ranked by them.
        positives, groups: as in retrieval_ranks.
    """
    positives = fill_padding(positives)                                    # (Q, P)
    parts = []
    for start in range(0, len(query), ROWS):
        block = slice(start, start + ROWS)
        sim = (query[block] @ gallery.T).double()                          # (c, G) -1..1
        # float64, so that no two logits of float32 become equal
        best_logits = logits[block].double().gather(1, best[block])        # (c, K)
        lowest = best_logits.amin(1, keepdim=True)                         # (c, 1)
        sim.scatter_(1, best[block], 2 + best_logits - lowest)             # above all cosines
        if groups is not None:
            sim = best_of_groups(sim, groups)                              # (c, groups)
        parts.append(ranks_of_best(sim, positives[block]))
    return torch.cat(parts).numpy()


def matching_logits(pieces, towers, is_pair, workers):
    """(M, C) logits of the probability that clip and caption match, 0 where `is_pair` is False.
    Collective.

    Raises: UserError if one is not finite.
    """
    from contrastive.encoders.vast import Pairs

    model, tokenizer, transform = towers
    device = pieces.device
    place = {row: number for number, row in enumerate(pieces.index)}       # among the M
    tokens = tokenizer(pieces.texts)                                       # (C, L) each
    ids, mask = tokens["input_ids"].to(device), tokens["attention_mask"].to(device)

    def classify(rows, pixels):
        wanted = is_pair[[place[row] for row in rows]]                     # (b, C)
        condition = model.matching.condition(model.clip_tokens(pixels))
        clips, texts = wanted.nonzero(as_tuple=True)                       # (P,) each
        logits_of_pairs = []
        size = max(1, PAIR_NUMBERS // condition[0].numel())
        for clip, caption in zip(clips.split(size), texts.split(size)):
            clip, caption = clip.to(device), caption.to(device)
            pairs = Pairs(clip, ids[caption], mask[caption], None)
            no_match, match = model.match(condition, pairs).float().unbind(1)            # (p,) each
            logits_of_pairs.append((match - no_match).cpu())
        logits = torch.zeros(wanted.shape)                                 # (b, C)
        logits[clips, texts] = torch.cat(logits_of_pairs)
        return (logits,)

    _, (logits,), _, _ = outputs_of_images(
        model, pieces.data, transform, device, forward=classify, workers=workers,
        rows=pieces.index)
    check_outputs(pieces.data.full_name, logits)
    return logits
