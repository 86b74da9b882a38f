"""The tasks by caption: retrieval both ways, multi-instance retrieval, and the modality gap."""

import math

from contrastive.core.metrics import (
    check_finite, embedding_health, mir_chance, mir_metrics, modality_gap, normalize, recalls,
    retrieval_chance, retrieval_ranks)
from contrastive.data.epic import class_relevancy, multi_hot
from contrastive.evaluation.embed import encode_texts

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

DIRECTIONS = ("text_to_image", "image_to_text")
MAX_HEALTH = 4096  # pairs from which the health of the space is computed


# ======================================================= captions =================================
def encode_captions(pieces, model, tokenizer, device):
    """Adds the captions of the encoded images to the pieces of an evaluation. Collective.

    Each caption is a query. An image and a caption are positives of each other if they belong to
    one group or, if the data say so (same_text), if a caption of the image's group has the same
    words.
    """
    data = pieces.data
    texts, owner = captions_of(data, pieces.index)                         # C texts, (C,)
    groups = groups_of_images(data)[pieces.index]                          # (M,)
    of_caption = positives_table(groups[owner], groups)                    # (C, P)
    of_image = positives_table(groups, groups[owner])                      # (M, P)
    captions_of_text = {}  # the captions with these words
    for caption, text in enumerate(texts):
        captions_of_text.setdefault(text, []).append(caption)
    for captions in captions_of_text.values():
        if len(set(groups[owner[captions]])) > 1:
            pieces.num_repeated += len(captions)
    if pieces.num_repeated and data.same_text == "positive":
        of_caption = images_of_same_texts(of_caption, texts)
        of_image = captions_of_same_texts(of_image, texts, captions_of_text)
    pieces.texts, pieces.owner = texts, owner
    pieces.text = encode_texts(model, tokenizer, texts, device)            # (C, D)
    pieces.positives, pieces.positives_of_image = of_caption, of_image
    pieces.num_cut = tokenizer.count_cut(texts)
    pieces.device = device


def captions_of(data, index):
    """The captions of the rows (M,): C texts, and (C,) which of the M rows each belongs to."""
    texts, owner = [], []
    for place, row in enumerate(index):
        captions = data.captions(row)
        texts += captions
        owner += [place] * len(captions)
    return texts, np.array(owner)


def groups_of_images(data):
    """(rows,) numbers; images of one group are positives of each other's captions. If class names
    serve as captions, the groups are the classes."""
    if data.has_captions or data.labels is None:
        return data.groups
    return data.labels


def positives_table(query_groups, gallery_groups):
    """(Q, P) long, padded with -1: the gallery items of each query's group."""
    members = {}
    for item, group in enumerate(gallery_groups):
        members.setdefault(int(group), []).append(item)
    return padded([members[int(group)] for group in query_groups])


def images_of_same_texts(positives, texts):
    """Positives of captions (C, P), to which those of all captions with the same words are added.
    """
    images_of_text = {}
    for text, row in zip(texts, positives.tolist()):
        images = [image for image in row if image >= 0]
        images_of_text.setdefault(text, set()).update(images)
    return padded([sorted(images_of_text[text]) for text in texts])


def captions_of_same_texts(positives, texts, captions_of_text):
    """Positives of images (M, P), to which all captions with the same words are added."""
    rows = []
    for row in positives.tolist():
        captions = set()
        for caption in row:
            if caption >= 0:
                captions.update(captions_of_text[texts[caption]])
        rows.append(sorted(captions))
    return padded(rows)


def padded(rows):
    """Q lists of numbers -> (Q, P) long, padded with -1."""
    rows = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=-1)


# ======================================================= retrieval ================================
def retrieval_both_ways(pieces, image_bias=None, text_bias=None, dsl=0.0):
    """Retrieval of images by texts and of texts by images.

    Args: as in query_ranks.
    Returns: metrics, and their chance levels: {text_to_image, image_to_text, R-Mean, R@1-Mean}.
        R-Mean is the mean of R@1, R@5 and R@10 in both directions (TeMo, Table 4), R@1-Mean that of
        R@1 (MM-TS, Table 1: "Avg.").
    """
    metrics = {}
    for direction, ranks in query_ranks(pieces, image_bias, text_bias, dsl).items():
        metrics[direction] = recalls(ranks)
    to_text, groups = image_to_text_positives(pieces)                      # (M, P), (C,)
    num_ranked = len(pieces.text)
    if groups is not None:
        num_ranked = len(pieces.image)                                     # each with its captions
    chance = {
        "text_to_image": retrieval_chance(pieces.positives, len(pieces.image)),
        "image_to_text": retrieval_chance(to_text, num_ranked)}
    add_means(metrics)
    add_means(chance)
    return metrics, chance


def image_to_text_positives(pieces):
    """What is ranked for an image, and what is right: the captions or, in a grouped set, the images
    by their best caption.

    Returns: positives (M, P), padded with -1, of captions or images; groups (C,), the image of each
        caption, or None.
    """
    if not pieces.data.grouped:
        return pieces.positives_of_image, None
    positives = owners_of_captions(pieces.positives_of_image, pieces.owner)              # (M, P)
    return positives, torch.from_numpy(pieces.owner)


def query_ranks(pieces, image_bias=None, text_bias=None, dsl=0.0):
    """Rank of the best positive of each query by cosine.

    In a grouped set, images are not ranked by all texts but by their best one.

    Args:
        pieces: EvaluationPieces with captions.
        image_bias, text_bias: (M,), (C,), added to the cosines of the ranked items (NCL).
        dsl: temperature of the dual softmax over the queries of a direction; 0 = none.
    Returns: {text_to_image: (C,), image_to_text: (M,)} int, from 1.
    """
    image, text = pieces.image.to(pieces.device), pieces.text.to(pieces.device)  # (M, D), (C, D)
    to_text, groups = image_to_text_positives(pieces)                      # (M, P), (C,)
    return {
        "text_to_image": retrieval_ranks(text, image, pieces.positives, image_bias, dsl=dsl),
        "image_to_text": retrieval_ranks(image, text, to_text, text_bias, groups, dsl=dsl)}


def owners_of_captions(positives, owner):
    """The images of each query's captions: (M, P) of captions, padded with -1 -> (M, P')."""
    rows = []
    for row in positives.tolist():
        captions = [caption for caption in row if caption >= 0]
        rows.append(sorted(set(owner[captions].tolist())))
    return padded(rows)


def add_means(result):
    """Adds R-Mean and R@1-Mean to the numbers of both directions."""
    values = []
    for direction in DIRECTIONS:
        values.append([result[direction][name] for name in ("R@1", "R@5", "R@10")])
    values = np.array(values)                                              # (2, 3)
    result["R-Mean"] = float(values.mean())
    result["R@1-Mean"] = float(values[:, 0].mean())


# ======================================================= multi-instance retrieval =================
def multi_instance_retrieval(pieces, model, tokenizer, device):
    """Multi-instance retrieval, as EPIC-KITCHENS-100 scores it. Collective.

    The items are the set's own sentences, if it has such (EPIC-KITCHENS-100), else its distinct
    captions, with relevancies from their classes.

    Returns: metrics, and their chance levels: {image_to_text, text_to_image, mAP, nDCG,
        mAP_binary}.
    """
    data = pieces.data
    if data.sentences is not None:
        text = encode_texts(model, tokenizer, data.sentences.texts, device)              # (C, D)
        relevancy = data.sentences.relevancy(data.rows[pieces.index])      # (M, C)
    else:
        columns, relevancy = relevancy_of_captions(pieces)                 # C rows, (M, C)
        text = pieces.text[columns]                                        # (C, D)
    image = pieces.image.to(device)                                        # (M, D)
    sim = normalize(image) @ normalize(text.to(device)).T                  # (M, C)
    return by_direction(mir_metrics(sim, relevancy)), by_direction(mir_chance(relevancy))


def relevancy_of_captions(pieces):
    """One caption of each kind, and how relevant it is to each image, by their classes.

    Captions of one kind have the same words, the same verb and the same nouns.

    Returns: the captions, a list of C numbers; relevancies (M, C).
    """
    data, index, owner = pieces.data, pieces.index, pieces.owner
    verb = data.column("verb")[index]                                      # (M,)
    noun_lists = nouns_of(data, index)                                     # M lists
    first_of_kind = {}
    for caption, text in enumerate(pieces.texts):
        image = owner[caption]
        kind = text, verb[image], tuple(sorted(noun_lists[image]))
        first_of_kind.setdefault(kind, caption)
    captions = list(first_of_kind.values())
    num_nouns = 1 + max(max(nouns) for nouns in noun_lists)
    nouns = multi_hot(noun_lists, num_nouns)                               # (M, K)
    images = owner[captions]                                               # (C,)
    return captions, class_relevancy(verb, nouns, verb[images], nouns[images])


def nouns_of(data, index):
    """The noun classes of each of the rows (M,): M lists."""
    if data.column("nouns") is None:
        return [[noun] for noun in data.column("noun")[index]]
    all_nouns = data.column("nouns")
    return [all_nouns[row] for row in index]


def by_direction(result):
    """The result of mir_metrics or mir_chance, with the names of the directions of retrieval."""
    result = dict(result)
    rows, columns = result.pop("rows"), result.pop("columns")
    return {"image_to_text": rows, "text_to_image": columns, **result}


# ======================================================= modality gap =============================
def gap_and_health(pieces):
    """The modality gap of all images and texts, and the health of the space.

    embedding_health reads one image of each group, with its first caption alone: other images and
    captions of a group would be among the negatives. Of more than MAX_HEALTH groups so many are
    drawn, the same ones for all models.

    Returns: metrics {modality_gap, embeddings: {...}}; as chance, the gap of random unit vectors
        and the InfoNCE of a random guess.
    """
    image, text = pieces.image, pieces.text                                # (M, D), (C, D)
    check_finite(image=image, text=text)
    images, first_captions = np.unique(pieces.owner, return_index=True)    # (n,) of captions
    groups = groups_of_images(pieces.data)[pieces.index[images]]           # (n,)
    _, rows = np.unique(groups, return_index=True)                         # (groups,)
    if len(rows) > MAX_HEALTH:
        rows = np.random.default_rng(42).permutation(rows)[:MAX_HEALTH]
    rows = np.sort(rows)
    metrics = {"modality_gap": modality_gap(image, text)}
    chance = {"modality_gap": (1 / len(image) + 1 / len(text)) ** 0.5}
    if len(rows) > 1:
        metrics["embeddings"] = embedding_health(
            image[images[rows]], text[first_captions[rows]], limit=MAX_HEALTH)
        del metrics["embeddings"]["gap"]  # of these pairs alone
        chance["embeddings"] = {"info_nce": math.log(len(rows))}
    return metrics, chance
