"""Metrics: pure functions of tensors, which return numbers in percent unless they say otherwise.

Shapes: Q queries, G gallery items, P positives of a query, M training examples, D embedding width,
C classes. A broken model must not get a plausible number: in a ranking ties count against the
model, and metrics that rank or classify raise ValueError on input that is not finite. Measures of
the space (normalization_error, modality_gap, embedding_health) become NaN.
"""

import math
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F


def normalize(x):
    """Unit rows, in float32 or float64: with 1 / tau = 100, the rounding of bf16 would become half
    a logit."""
    if x.dtype != torch.float64:
        x = x.float()
    return F.normalize(x, dim=-1)


def check_finite(**tensors):
    """Raises ValueError if a tensor holds NaN or infinity. A tensor may be None."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        for part in tensor.split(4096):
            if not torch.isfinite(part).all():
                raise ValueError(f"{name} holds non-finite values")


# ======================================================= retrieval ================================
RECALLS = (1, 5, 10, 50)


def retrieval_metrics(query, gallery, positives, bias=None, groups=None, *, chunk=4096, dsl=0.0):
    """Recall at k, median and mean rank of the best positive, by cosine over the whole gallery.

    Args: as in retrieval_ranks.
    Returns: {R@1, R@5, R@10, R@50} in percent; MdR and MnR, ranks that count from 1.
    Raises: ValueError on non-finite input, or for a query without positives.
    """
    return recalls(retrieval_ranks(query, gallery, positives, bias, groups, chunk=chunk, dsl=dsl))


def retrieval_ranks(query, gallery, positives, bias=None, groups=None, *, chunk=4096, dsl=0.0):
    """The exact rank of each query's best positive, by cosine: (Q,) numpy, from 1.

    Args:
        query, gallery: (Q, D), (G, D) embeddings of any length.
        positives: (Q, P) long, indices of gallery items (of groups, if given), padded with -1.
        bias: (G,) is added to the cosine of each gallery item.
        groups: (G,) long; groups are ranked in place of items, each by its best item.
        chunk: at most this many queries at a time.
        dsl: temperature of the dual softmax of CAMoE (Cheng et al. 2021), which multiplies each
            cosine by its softmax over all queries; 0 = the cosine alone.
    Raises: ValueError on non-finite input, or for a query without positives.
    """
    gallery = normalize(gallery)                                           # (G, D)
    check_finite(query=query, gallery=gallery, bias=bias)
    positives = fill_padding(positives.to(query.device))                   # (Q, P)
    block_size = max(1, min(chunk, 2**22 // len(gallery)))  # 16 MiB of similarities at a time
    if dsl:
        log_total = log_softmax_total(query, gallery, dsl, block_size)     # (G,)
    ranks = []
    for start in range(0, len(query), block_size):
        block = slice(start, start + block_size)
        sim = normalize(query[block]) @ gallery.T                          # (c, G)
        if dsl:
            sim = sim.double() * (sim.double() / dsl - log_total).exp()    # (c, G)
        if bias is not None:
            sim += bias.to(sim)
        if groups is not None:
            sim = best_of_groups(sim, groups.to(sim.device))               # (c, groups)
        ranks.append(ranks_of_best(sim, positives[block]))                 # (c,)
    return torch.cat(ranks).cpu().numpy()


def fill_padding(positives):
    """Positives (Q, P) in which the first one of a query takes the place of its padding, -1.

    Raises: ValueError for a query without positives.
    """
    is_positive = positives >= 0                                           # (Q, P)
    has_positive = is_positive.any(1)                                      # (Q,)
    if not has_positive.all():
        raise ValueError(f"query {int((~has_positive).nonzero()[0])} has no positive")
    first_column = is_positive.long().argmax(1, keepdim=True)              # (Q, 1)
    first = positives.gather(1, first_column)                              # (Q, 1)
    return torch.where(is_positive, positives, first)


def log_softmax_total(query, gallery, tau, block_size):
    """log sum_q exp(<q, g> / tau) of each gallery item, over all queries: (G,) float64."""
    totals = []
    for block in query.split(block_size):
        sim = normalize(block) @ gallery.T                                 # (c, G)
        totals.append(sim.double().div(tau).logsumexp(0))                  # (G,)
    return torch.stack(totals).logsumexp(0)


def best_of_groups(sim, groups):
    """The highest similarity of each group: (c, G), (G,) long -> (c, groups)."""
    num_groups = int(groups.max()) + 1
    best = sim.new_full((len(sim), num_groups), -math.inf)                 # (c, groups)
    return best.scatter_reduce_(1, groups.expand(len(sim), -1), sim, "amax")


def ranks_of_best(sim, positives):
    """The rank of the best positive: (c, G), (c, P) -> (c,), from 1. Overwrites `sim`."""
    best = sim.gather(1, positives).amax(1, keepdim=True)                  # (c, 1)
    # the other positives are no mistakes
    sim.scatter_(1, positives, -math.inf)
    return 1 + (sim >= best).sum(1)


def recalls(ranks):
    """{R@1, R@5, R@10, R@50} in percent, MdR and MnR of ranks (Q,), which count from 1."""
    metrics = {}
    for k in RECALLS:
        metrics[f"R@{k}"] = float(100 * (ranks <= k).mean())
    metrics["MdR"] = float(np.median(ranks))
    metrics["MnR"] = float(ranks.mean())
    return metrics


def retrieval_chance(positives, gallery):
    """What a random ranking gets on average in retrieval_metrics: the same keys.

    With p positives among G items, the best one has a rank above r with probability
    C(G - p, r) / C(G, r); its mean rank is (G + 1) / (p + 1).

    Args: positives: (Q, P) padded with -1. gallery: number of items G.
    """
    num_positives = (positives >= 0).sum(1).cpu().numpy()                  # (Q,)
    rank = np.arange(1, gallery + 1)                                       # (G,)
    within = np.zeros(gallery)             # (G,) probability of a rank <= r, mean over the queries
    for p, num_queries in zip(*np.unique(num_positives, return_counts=True)):
        others = np.maximum(gallery - p - (rank - 1), 0)                   # (G,)
        above = np.cumprod(others / (gallery - (rank - 1)))                # (G,)
        within += (1 - above) * num_queries / len(num_positives)
    chance = {}
    for k in RECALLS:
        chance[f"R@{k}"] = float(100 * within[min(k, gallery) - 1])
    chance["MdR"] = float(1 + np.searchsorted(within, 0.5))
    chance["MnR"] = float(((gallery + 1) / (num_positives + 1)).mean())
    return chance


# ======================================================= the space ================================
def normalization_error(sim, gamma):
    """Mean over items j of |1 - n / m sum_i P(j | i)| (NCL, Eq. 5, where n = m); 0 = fair shares.

    P(j | i) is the softmax of sim / gamma along row i.

    Args: sim: (m, n) similarities of m queries to n items, with biases. gamma: temperature > 0.
    """
    total = sim.new_zeros(sim.shape[1], dtype=torch.float64)               # (n,)
    for block in sim.split(4096):
        total = total + F.softmax(block.double() / gamma, dim=1).sum(0)    # (n,)
    num_queries, num_items = sim.shape
    return (1 - total * num_items / num_queries).abs().mean().item()


def modality_gap(a, b):
    """||mean a - mean b|| of unit rows, 0 to 2: the distance of two modalities (Liang et al. 2022).

    Args: a, b: (M, D), (C, D).
    """
    return (normalize(a).mean(0) - normalize(b).mean(0)).norm().item()


@torch.no_grad()
def embedding_health(image, text, limit=1024, names=("image", "text")):
    """Measures of the space, from the first `limit` pairs: row i of both (n, D) is a pair.

    Returns: floats, by name:
        std_image, std_text: standard deviation times sqrt(D), mean over dimensions; 1 = spread over
            the sphere, 0 = collapse. `names` replaces image and text in these two.
        alignment: mean squared distance of pairs (Wang and Isola 2020).
        uniformity: log mean exp(-2 d^2) of images (as there).
        pos_cos, neg_cos, pos_std: mean cosine of pairs and of all others, and the standard
            deviation of the pairs' (TeMo, App. G: higher under TeMo).
        gap: modality_gap.
        info_nce: InfoNCE, the mean of both directions, at a temperature of 0.07 in all runs, so
            that they can be compared.
    """
    image, text = normalize(image[:limit]), normalize(text[:limit])        # (n, D)
    sim = image @ text.T                                                   # (n, n)
    pair_cos = sim.diagonal()                                              # (n,)
    root = image.shape[1] ** 0.5
    squared_distances = image.new_zeros(1)
    if len(image) > 1:
        squared_distances = torch.pdist(image).pow(2)                      # (n (n - 1) / 2,)
    target = torch.arange(len(sim), device=sim.device).repeat(2)           # (2n,)
    logits = torch.cat([sim, sim.T]) / 0.07                                # (2n, n)
    return {
        f"std_{names[0]}": image.std(0).mean().item() * root,
        f"std_{names[1]}": text.std(0).mean().item() * root,
        "alignment": (2 - 2 * pair_cos).mean().item(),
        "uniformity": squared_distances.mul(-2).exp().mean().log().item(),
        **pair_cosines(sim),
        "pos_std": pair_cos.std(correction=0).item(),
        "gap": modality_gap(image, text),
        "info_nce": F.cross_entropy(logits, target).item()}


def pair_cosines(sim):
    """{pos_cos, neg_cos}: the mean of the diagonal of cosines (N, N), and that of the others."""
    pair_cos = sim.diagonal()                                              # (N,)
    num_negatives = max(1, sim.numel() - len(sim))
    neg_cos = (sim.sum() - pair_cos.sum()) / num_negatives
    return {"pos_cos": pair_cos.mean().item(), "neg_cos": neg_cos.item()}


# ======================================================= classes ==================================
def knn_accuracy(train, train_labels, test, test_labels, k=1, *, chunk=1024, per_class=False):
    """k-nearest-neighbour classification by cosine: an unweighted vote, ties to the smallest class.

    Args:
        train, test: (M, D), (Q, D) features of any length.
        train_labels, test_labels: (M,), (Q,) long.
        chunk: at most this many test rows at a time.
        per_class: return the accuracy of each class too.
    Returns: {top1, mean_per_class[, per_class]} as class_accuracy.
    Raises: ValueError on non-finite features.
    """
    train, test = normalize(train), normalize(test)
    check_finite(train=train, test=test)
    train_labels = train_labels.to(train.device).long()
    test_labels = test_labels.to(train.device).long()
    num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    chunk = max(1, min(chunk, 2**26 // len(train)))  # cosines of a chunk in 256 MiB
    hits = []
    for start in range(0, len(test), chunk):
        block = slice(start, start + chunk)
        nearest = (test[block] @ train.T).topk(k, dim=1).indices           # (c, k)
        votes = torch.zeros(len(nearest), num_classes, device=train.device)              # (c, C)
        votes.scatter_add_(1, train_labels[nearest], torch.ones_like(nearest, dtype=votes.dtype))
        hits.append(votes.argmax(1) == test_labels[block])                 # (c,)
    return class_accuracy(torch.cat(hits).cpu(), test_labels.cpu(), per_class)


def class_accuracy(hits, labels, per_class=False):
    """Accuracy of hits (Q,) bool with labels (Q,), over rows and as the mean over their classes.

    Returns: {top1, mean_per_class} in percent; with per_class=True also per_class {class: percent}.
    """
    hits = hits.double()
    of_class = {}
    for label in labels.unique().tolist():
        of_class[label] = 100 * hits[labels == label].mean().item()
    result = {
        "top1": 100 * hits.mean().item(),
        "mean_per_class": float(np.mean(list(of_class.values())))}
    if per_class:
        result["per_class"] = of_class
    return result


def zero_shot_accuracy(images, labels, class_embeddings, topk=(1, 3, 5)):
    """Classification by the nearest class embedding (Radford et al. 2021).

    Args: images: (M, D). labels: (M,). class_embeddings: (C, D).
    Returns: {top1, top3, top5} in percent; ties count against the model.
    Raises: ValueError on non-finite input.
    """
    class_embeddings = class_embeddings.to(images)
    ranks = retrieval_ranks(images, class_embeddings, labels[:, None].long())            # (M,)
    return {f"top{k}": float(100 * (ranks <= k).mean()) for k in topk}


def linear_probe(train, train_labels, test, test_labels, few_shot=None, *, seed=42,
                 per_class=False):
    """Accuracy of a linear classifier on unit features, as TS's authors have it.

    It is scikit-learn's LinearSVC: C = 1, one against the rest, random_state 42.

    Args:
        train, test: (M, D), (Q, D) features of any length.
        train_labels, test_labels: (M,), (Q,) long.
        few_shot: training images of each class, drawn with `seed`; None = all.
        per_class: return the accuracy of each class too.
    Returns: {top1, mean_per_class[, per_class]} as class_accuracy.
    Raises: ValueError on non-finite features, or for a class smaller than few_shot.
    """
    from sklearn.svm import LinearSVC
    check_finite(train=train, test=test)
    features = normalize(train).cpu().numpy()                              # (M, D)
    labels = train_labels.cpu().numpy()                                    # (M,)
    if few_shot:
        rows = draw_few_shot(labels, few_shot, seed)                       # (C * few_shot,)
        features, labels = features[rows], labels[rows]
    classifier = LinearSVC(random_state=42).fit(features, labels)
    predicted = classifier.predict(normalize(test).cpu().numpy())          # (Q,)
    test_labels = test_labels.cpu()
    return class_accuracy(torch.from_numpy(predicted) == test_labels, test_labels, per_class)


def draw_few_shot(labels, few_shot, seed):
    """Rows of `few_shot` examples of each class, in a random order: labels (M,) -> (C * few_shot,).

    Raises: ValueError if a class has fewer examples.
    """
    order = np.random.RandomState(seed).permutation(len(labels))           # (M,)
    rows = [order[labels[order] == c][:few_shot] for c in np.unique(labels)]
    smallest = min(map(len, rows))
    if smallest < few_shot:
        raise ValueError(f"few_shot = {few_shot}: the smallest class has {smallest} images")
    return np.concatenate(rows)


def accuracy_by_class_size(train_labels, per_class, limits=None):
    """Mean accuracy over classes with many, some and few training images (Kukleva et al. 2023).

    Args:
        train_labels: (M,) numpy.
        per_class: {class: percent}.
        limits: (a, b): head classes have more than a training images, tail classes fewer than b.
            None or (0, 0) = thirds of the classes by size, the largest first.
    Returns: {head, mid, tail} in percent, without empty ones; {} if all classes are equally large.
    """
    classes = np.array(sorted(per_class))                                  # (C,)
    sizes = np.bincount(train_labels, minlength=classes.max() + 1)[classes]              # (C,)
    if sizes.max() == sizes.min():
        return {}
    if limits and any(limits):
        is_head, is_tail = sizes > limits[0], sizes < limits[1]            # (C,)
        head, mid, tail = classes[is_head], classes[~is_head & ~is_tail], classes[is_tail]
    else:
        head, mid, tail = np.array_split(classes[np.argsort(-sizes, kind="stable")], 3)
    result = {}
    for name, part in (("head", head), ("mid", mid), ("tail", tail)):
        if len(part):
            result[name] = float(np.mean([per_class[label] for label in part.tolist()]))
    return result


# ======================================================= graded relevancies =======================
MIR = ("mAP", "nDCG", "mAP_binary")


def mir_metrics(sim, relevancy, chunk=1024):
    """Multi-instance retrieval in both directions, as EPIC-KITCHENS-100 scores it, in percent.

    mAP: mean over a query's items of relevancy exactly 1 of the precision at their rank. This
        precision sums the relevancies of all items up to it, also partial ones: the code of
        EPIC-KITCHENS computes it so, and every paper reports it.
    mAP_binary: the textbook's mAP, which counts relevancy 1 alone; it is never higher.
    nDCG: over the first k ranks, k = the number of the query's items with a relevancy above 0; the
        gain is linear in the relevancy (Damen et al. 2022).

    Args:
        sim: (R, C) similarities; rows are queries (clips), columns items (sentences).
        relevancy: (R, C) in 0..1, tensor or array.
        chunk: at most this many queries at a time.
    Returns:
        rows: {mAP, nDCG, mAP_binary, queries, no_match, unrelated}. no_match counts the queries
            without an item of relevancy 1, which mAP leaves out; unrelated those without one
            above 0, which nDCG leaves out.
        columns: the same with the columns as queries.
        mAP, nDCG, mAP_binary: means of both.
        Of equal similarities the less relevant item ranks first.
    Raises: ValueError if no mAP is left, shapes differ, similarities are not finite, or relevancies
        are not in 0..1.
    """
    relevancy = torch.as_tensor(relevancy, device=sim.device)
    if sim.ndim != 2 or sim.shape != relevancy.shape:
        raise ValueError(f"similarities {tuple(sim.shape)} and relevancies "
                         f"{tuple(relevancy.shape)} differ in shape")
    check_finite(similarities=sim)
    if not ((relevancy >= 0) & (relevancy <= 1)).all():
        raise ValueError("relevancies must lie between 0 and 1")
    return both_directions(mir_of_rows(sim, relevancy, chunk),
                           mir_of_rows(sim.T, relevancy.T, chunk))


def both_directions(rows, columns):
    """{rows, columns} of two dicts of MIR's numbers, and the means of these numbers."""
    result = {"rows": rows, "columns": columns}
    for name in MIR:
        result[name] = (rows[name] + columns[name]) / 2
    return result


def mir_of_rows(sim, relevancy, chunk):
    """mir_metrics with the rows as queries."""
    num_queries, num_items = sim.shape
    rank = torch.arange(1, num_items + 1, device=sim.device, dtype=torch.float64)        # (C,)
    discount = 1 / torch.log2(rank + 1)                                    # (C,)
    block_size = max(1, min(chunk, 2**20 // num_items))
    values = {name: [] for name in MIR}
    for sim_block, relevancy_block in zip(sim.split(block_size), relevancy.split(block_size)):
        ranked, ideal = ranked_relevancies(sim_block, relevancy_block)     # (c, C)
        is_match = ranked == 1                                             # (c, C)
        num_matches = is_match.sum(1)                                      # (c,)
        num_related = (ranked > 0).sum(1)                                  # (c,)
        has_match, has_related = num_matches > 0, num_related > 0          # (c,)

        precision = ranked.cumsum(1) / rank                                # (c, C)
        binary_precision = is_match.cumsum(1) / rank                       # (c, C)
        mean_ap = (precision * is_match).sum(1) / num_matches              # (c,)
        binary_ap = (binary_precision * is_match).sum(1) / num_matches     # (c,)
        values["mAP"].append(mean_ap[has_match])
        values["mAP_binary"].append(binary_ap[has_match])

        in_top_k = rank <= num_related[:, None]                            # (c, C)
        dcg = (ranked * discount * in_top_k).sum(1)                        # (c,)
        ideal_dcg = (ideal * discount).sum(1)                              # (c,)
        values["nDCG"].append((dcg / ideal_dcg)[has_related])

    values = {name: torch.cat(parts) for name, parts in values.items()}
    if not len(values["mAP"]):
        raise ValueError(f"none of {num_queries} queries has an item of relevancy 1: no mAP")
    result = {}
    for name in MIR:
        result[name] = 100 * values[name].sum().item() / len(values[name])
    result["queries"] = num_queries
    result["no_match"] = num_queries - len(values["mAP"])
    result["unrelated"] = num_queries - len(values["nDCG"])
    return result


def ranked_relevancies(sim, relevancy):
    """Relevancies of the items (c, C) as the similarities rank them, and in the best order.

    Of equal similarities the less relevant item ranks first.
    """
    ascending, items = relevancy.sort(dim=1, stable=True)                  # (c, C)
    order = sim.gather(1, items).sort(dim=1, descending=True, stable=True).indices       # (c, C)
    return ascending.gather(1, order).double(), ascending.flip(1).double()


def mir_chance(relevancy):
    """What a random order gets on average in mir_metrics, in percent.

    Args: relevancy: (R, C) in 0..1, tensor or array.
    Returns: {rows, columns, mAP, nDCG, mAP_binary}.
    """
    relevancy = torch.as_tensor(relevancy)
    return both_directions(mir_chance_of_rows(relevancy), mir_chance_of_rows(relevancy.T))


def mir_chance_of_rows(relevancy):
    """mir_chance with the rows as queries.

    An item of relevancy 1 has each rank r with equal probability, and the r - 1 items before it
    have the mean relevancy of the others.
    """
    num_items = relevancy.shape[1]
    rank = torch.arange(1, num_items + 1, dtype=torch.float64)             # (C,)
    harmonic = (1 / rank).sum()                                            # ()
    discount = 1 / torch.log2(rank + 1)                                    # (C,)
    values = {name: [] for name in MIR}
    for block in relevancy.split(1024):
        ascending = np.sort(block.cpu().numpy(), axis=1)                   # faster than torch's
        ideal = torch.from_numpy(ascending).flip(1).double()               # (c, C)
        num_matches = (ideal == 1).sum(1)                                  # (c,)
        num_related = (ideal > 0).sum(1)                                   # (c,)
        total = ideal.sum(1)                                               # (c,)
        has_match, has_related = num_matches > 0, num_related > 0          # (c,)
        for name, mass in (("mAP", total), ("mAP_binary", num_matches.double())):
            mean_of_others = (mass - 1) / max(1, num_items - 1)            # (c,)
            precision = (harmonic + (num_items - harmonic) * mean_of_others) / num_items
            values[name].append(precision[has_match])
        last_rank = (num_related - 1).clamp(min=0)                         # (c,) from 0
        dcg = total / num_items * discount.cumsum(0)[last_rank]            # (c,)
        ideal_dcg = (ideal * discount).sum(1)                              # (c,)
        values["nDCG"].append((dcg / ideal_dcg)[has_related])
    return {name: 100 * torch.cat(parts).mean().item() for name, parts in values.items()}


# ======================================================= answers ==================================
def answer_vocabulary(answers, size=1500):
    """The `size` most frequent answers of a training split; equally frequent ones by alphabet."""
    most_frequent = Counter(sorted(answers)).most_common(size)
    return [answer for answer, _ in most_frequent]


def answer_hits(scores, answers):
    """(Q,) bool: whether the right answer has the highest score; ties count against the model.

    Args:
        scores: (Q, A) of the answers of a vocabulary or of the choices, -inf for choices that a
            question does not have.
        answers: (Q,) long, the right one; -1 = not in the vocabulary, which counts as wrong.
    Raises: ValueError for NaN or +inf.
    """
    check_finite(scores=scores.masked_fill(scores == -math.inf, 0))
    index = answers.clamp(min=0)[:, None]                                  # (Q, 1)
    right_score = scores.gather(1, index)[:, 0]                            # (Q,)
    best_other = scores.scatter(1, index, -math.inf).amax(1)               # (Q,)
    return (answers >= 0) & (right_score > best_other)


def question_metrics(hits, types=None, pairs=None, known=None):
    """Accuracy of answers to questions, in percent.

    Args:
        hits: (Q,) 1 for a right answer, else 0; or the probability of a right one, for the chance.
        types: Q words, or pairs of words whose first is a family with its own accuracy, such as
            "causal why".
        pairs: (Q,) numbers. Rows with the same number are one question, right if all are right:
            Causal-VidQA's answer and reason, in `accuracy` and for a family. A type of two words
            counts its own rows alone.
        known: (Q,) whether the answer is in the vocabulary.
    Returns: {accuracy[, upper_bound], "accuracy TYPE" for each type and family}.
    """
    hits = np.asarray(hits, dtype=np.float64)                              # (Q,)
    every_row = np.arange(len(hits))
    metrics = {"accuracy": percent_right(hits, every_row, pairs)}
    if known is not None:
        in_vocabulary = np.asarray(known, dtype=np.float64)                # (Q,)
        metrics["upper_bound"] = percent_right(in_vocabulary, every_row, pairs)
    if types is None:
        return metrics
    families = [question_type.split()[0] for question_type in types]
    types, families = np.asarray(types, dtype=object), np.asarray(families, dtype=object)
    for name in sorted({*types, *families}):
        rows = np.flatnonzero((types == name) | (families == name))
        metrics[f"accuracy {name}"] = percent_right(hits, rows, pairs)
    return metrics


def percent_right(hits, rows, pairs=None):
    """Percent of right questions among these rows of hits (Q,); pairs as in question_metrics."""
    if pairs is None:
        return float(100 * hits[rows].mean())
    _, question = np.unique(np.asarray(pairs)[rows], return_inverse=True)  # (rows,)
    right = np.ones(question.max() + 1)                                    # (questions,)
    # a pair is right if both its rows are
    np.multiply.at(right, question, hits[rows])
    return float(100 * right.mean())
