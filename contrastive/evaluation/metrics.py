"""Pure metrics, tensors in and numbers out: ranks, neighbours, probes, relevancies, answers. Imports none of ours."""

import math
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F


def normalize(x):
    """Unit rows, in float32 or float64: with 1 / tau = 100 the rounding of bf16 would grow to half a logit."""
    return F.normalize(x if x.dtype == torch.float64 else x.float(), dim=-1)


def finite(**tensors):
    """Raises: ValueError if one of the tensors (None: there is none) holds NaN or infinity: the model is broken."""
    for name, x in tensors.items():
        if x is not None and not all(torch.isfinite(part).all() for part in x.split(4096)):
            raise ValueError(f"{name} holds non-finite values")


# ==================================================== retrieval =====================================================
RECALLS = (1, 5, 10, 50)


def retrieval_metrics(query, gallery, positives, bias=None, groups=None, chunk=4096, ranks=False, dsl=0.0):
    """Exact retrieval ranks of the best positive, by cosine, in chunks of queries.

    Args:
        query (Q, D), gallery (G, D): embeddings, normalised here.
        positives (Q, P) long: indices into the gallery (into the groups when groups are given), padded with -1.
        bias (G,): added to each gallery item's cosine.   chunk: at most this many queries at a time.
        groups (G,) long: groups are ranked instead of items, each by its best item.
        ranks: return the ranks (Q,) themselves, numpy, from 1 (for recall_by_frequency).
        dsl: temperature > 0: multiply each cosine by its softmax over all queries (dual softmax); 0 = cosine alone.
    Returns: dict of R@1 R@5 R@10 R@50 in percent, MdR and MnR (ranks from 1). Ties count against the model.
    Raises: ValueError on non-finite input, or on a query without positives.
    """
    gallery, positives = normalize(gallery), positives.to(query.device)
    finite(query=query, gallery=gallery, bias=bias)
    rows = max(1, min(chunk, 2**22 // len(gallery)))  # 16 MiB of similarities at a time
    known = positives >= 0
    if not known.any(1).all():
        raise ValueError(f"query {int((~known.any(1)).nonzero()[0])} has no positive")
    first = positives.gather(1, known.long().argmax(1, keepdim=True))  # (Q, 1)
    positives = torch.where(known, positives, first)  # padding repeats a positive: no effect on a maximum or a mask
    found, total = [], 0.0
    if dsl:
        masses = ((normalize(part) @ gallery.T).double().div(dsl).logsumexp(0) for part in query.split(rows))
        total = torch.stack([*masses]).logsumexp(0)  # (G,), over all queries
    for i in range(0, len(query), rows):
        sim = normalize(query[i:i + rows]) @ gallery.T  # (c, G)
        if dsl:
            sim = sim.double() * (sim.double() / dsl - total).exp()  # (c, G)
        if bias is not None:
            sim += bias.to(sim)
        if groups is not None:
            index = groups.to(sim.device)
            best_of = sim.new_full((len(sim), int(index.max()) + 1), -math.inf)  # (c, groups)
            sim = best_of.scatter_reduce_(1, index.expand(len(sim), -1), sim, "amax")  # (c, groups)
        own = positives[i:i + rows]
        best = sim.gather(1, own).amax(1, keepdim=True)  # (c, 1)
        sim.scatter_(1, own, -math.inf)  # the other positives are not mistakes
        found.append(1 + (sim >= best).sum(1))
    found = torch.cat(found).cpu().numpy()  # (Q,)
    return found if ranks else recalls(found)


def recalls(ranks):
    """R@1 R@5 R@10 R@50 in percent, MdR and MnR of ranks (Q,), which count from 1."""
    recalls = {f"R@{k}": float(100 * (ranks <= k).mean()) for k in RECALLS}
    return recalls | {"MdR": float(np.median(ranks)), "MnR": float(ranks.mean())}


def retrieval_chance(positives, gallery):
    """The same keys for a random ranking of `gallery` items: positives (Q, P) padded with -1."""
    count = (positives >= 0).sum(1).cpu().numpy()  # (Q,)
    r = np.arange(1, gallery + 1)
    found = np.zeros(gallery)  # probability that the best positive has rank <= r, mean over the queries
    for p, share in zip(*np.unique(count, return_counts=True)):
        miss = np.cumprod(np.maximum(gallery - p - (r - 1), 0) / (gallery - (r - 1)))
        found += (1 - miss) * share / len(count)
    out = {f"R@{k}": float(100 * found[min(k, gallery) - 1]) for k in RECALLS}
    return out | {"MdR": float(1 + np.searchsorted(found, 0.5)), "MnR": float(((gallery + 1) / (count + 1)).mean())}


def normalization_error(sim, gamma):
    """Mean over items j of |1 - sum_i P(j | i) n / m|, P = softmax of sim / gamma along each row (NCL, Eq. 5, where
    n = m). 0 = every item gets its share.

    Args: sim (m, n): similarities of m queries to n items, with biases.   gamma: temperature, > 0.   Returns: float."""
    total = sum(F.softmax(part.double() / gamma, 1).sum(0) for part in sim.split(4096))  # (n,)
    return (1 - total * sim.shape[1] / sim.shape[0]).abs().mean().item()


def modality_gap(a, b):
    """||mean a - mean b|| of unit rows, the distance between two modalities (Liang et al. 2022): a float, 0..2."""
    return (normalize(a).mean(0) - normalize(b).mean(0)).norm().item()


@torch.no_grad()
def embedding_health(image, text, limit=1024):
    """Measures of the embedding space, a dict of floats, over at most `limit` pairs (rows are pairs).

    std: mean over dimensions of the standard deviation times sqrt(D) (1 = spread over the sphere, 0 = collapse);
    alignment: mean squared distance of pairs; uniformity: log mean exp(-2 d^2) of images; pos_cos, neg_cos; pos_std:
    standard deviation of the pairs' cosines (TeMo, App. G: higher under TeMo); gap; info_nce: the loss of both
    directions at a temperature of 0.07, whatever the run's, so that it can be compared along runs and between them."""
    a, b = normalize(image[:limit]), normalize(text[:limit])  # (n, D) each
    sim = a @ b.T  # (n, n)
    info_nce = F.cross_entropy(torch.cat([sim, sim.T]) / 0.07, torch.arange(len(sim), device=sim.device).repeat(2))
    far = torch.pdist(a).pow(2) if len(a) > 1 else a.new_zeros(1)
    pos, root = sim.diagonal(), a.shape[1] ** 0.5
    return {"std_image": a.std(0).mean().item() * root, "std_text": b.std(0).mean().item() * root,
            "alignment": (2 - 2 * pos).mean().item(), "uniformity": far.mul(-2).exp().mean().log().item(),
            **pair_cosines(sim), "pos_std": pos.std(correction=0).item(), "gap": modality_gap(a, b),
            "info_nce": info_nce.item()}


def pair_cosines(sim):
    """{pos_cos, neg_cos} of the cosines (N, N): means of the diagonal (pairs) and of all other entries."""
    pos = sim.diagonal()
    return {"pos_cos": pos.mean().item(), "neg_cos": ((sim.sum() - pos.sum()) / max(1, sim.numel() - len(sim))).item()}


# ===================================================== classes ======================================================
def knn_accuracy(train, train_labels, test, test_labels, k=1, chunk=1024, per_class=False):
    """k-nearest-neighbour classification by cosine, unweighted vote, ties to the smallest class id.

    Args: train (M, D), test (Q, D), labels long.
    Returns: {top1, mean_per_class} in percent (mean over the classes of the test set), with per_class=True also
        per_class {class: percent}.
    Raises: ValueError on non-finite features.
    """
    train, test = normalize(train), normalize(test)
    finite(train=train, test=test)
    train_labels, test_labels = train_labels.to(train.device).long(), test_labels.to(train.device).long()
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    chunk, hits = max(1, min(chunk, 2**26 // len(train))), []  # cosines of a chunk in 256 MiB
    for i in range(0, len(test), chunk):
        near = (test[i:i + chunk] @ train.T).topk(k, dim=1).indices  # (c, k)
        votes = torch.zeros(len(near), classes, device=train.device)  # (c, classes)
        votes.scatter_add_(1, train_labels[near], torch.ones_like(near, dtype=votes.dtype))
        hits.append(votes.argmax(1) == test_labels[i:i + chunk])
    return class_accuracy(torch.cat(hits).cpu(), test_labels.cpu(), per_class)


def class_accuracy(hits, labels, per_class):
    """{top1, mean_per_class} in percent of hits (Q,) bool, with per_class also per_class {class: percent}."""
    hits = hits.double()
    of_class = {int(c): 100 * hits[labels == c].mean().item() for c in labels.unique()}
    result = {"top1": 100 * hits.mean().item(), "mean_per_class": float(np.mean(list(of_class.values())))}
    return result | {"per_class": of_class} if per_class else result


def zero_shot_accuracy(images, labels, class_embeddings, topk=(1, 3, 5)):
    """Classification by the nearest class embedding, in percent: {top1, top3, top5}.

    Args: images (M, D), labels (M,), class_embeddings (C, D). Ties count against the model.
    Raises: ValueError on non-finite input."""
    ranks = retrieval_metrics(images, class_embeddings.to(images), labels[:, None].long(), ranks=True)  # (M,)
    return {f"top{k}": float(100 * (ranks <= k).mean()) for k in topk}


def linear_probe(train, train_labels, test, test_labels, few_shot=None, seed=42, per_class=False):
    """The probe of the TS authors: scikit-learn's LinearSVC (C = 1, one-vs-rest, random_state 42) on unit features.

    Args: train (M, D), test (Q, D), labels long; few_shot: images per class, drawn with `seed` (None = all).
    Returns: {top1, mean_per_class} in percent, with per_class=True also per_class.
    Raises: ValueError on non-finite features or a class smaller than few_shot.
    """
    from sklearn.svm import LinearSVC
    finite(train=train, test=test)
    x, y = normalize(train).cpu().numpy(), train_labels.cpu().numpy()
    q, truth = normalize(test).cpu().numpy(), test_labels.cpu()
    if few_shot:
        order = np.random.RandomState(seed).permutation(len(y))
        rows = [order[y[order] == c][:few_shot] for c in np.unique(y)]
        if min(map(len, rows)) < few_shot:
            raise ValueError(f"few_shot = {few_shot}: the smallest class has {min(map(len, rows))} images")
        x, y = x[np.concatenate(rows)], y[np.concatenate(rows)]
    predicted = LinearSVC(random_state=42).fit(x, y).predict(q)
    return class_accuracy(torch.from_numpy(predicted) == truth, truth, per_class)


def head_mid_tail(train_labels, per_class, limits=None):
    """Mean accuracy over the thirds of the classes by training size, largest first: {head, mid, tail}.

    limits: (a, b): head classes have more than a training images, tail classes fewer than b; (0, 0) = thirds."""
    classes = np.array(sorted(per_class))
    sizes = np.bincount(train_labels, minlength=classes.max() + 1)[classes]
    if sizes.max() == sizes.min():
        return {}
    parts = np.array_split(classes[np.argsort(-sizes, kind="stable")], 3)
    if limits and any(limits):
        head, tail = sizes > limits[0], sizes < limits[1]
        parts = [classes[head], classes[~head & ~tail], classes[tail]]
    named = zip(("head", "mid", "tail"), parts)
    return {name: float(np.mean([per_class[int(c)] for c in part])) for name, part in named if len(part)}


# ================================================ graded relevancies ================================================
MIR = ("mAP", "nDCG", "mAP_binary")


def mir_metrics(sim, relevancy, chunk=1024):
    """Multi-instance retrieval as EPIC-KITCHENS-100 scores it, both ways, in percent.

    mAP averages over the items of relevancy exactly 1. The precision at each sums the relevancies of all items up to
    it, also partial ones: this is what the EPIC-KITCHENS code computes and every paper reports. mAP_binary is the
    textbook's mAP, which counts only relevancy 1; it is never higher. nDCG: over the first k ranks, k = the number of
    the query's items with relevancy > 0, gain linear in the relevancy.

    Args:
        sim (R, C): similarities, rows = queries (clips), columns = items (sentences).
        relevancy (R, C): 0..1, tensor or array.   chunk: at most this many queries at a time.
    Returns: {rows, columns, mAP, nDCG, mAP_binary}. rows: {mAP, nDCG, mAP_binary, queries, no_match, unrelated};
        columns: the same with the columns as queries; the other three are means of both. mAP leaves out queries without
        an item of relevancy 1 (no_match counts them), nDCG those without any above 0 (unrelated). Ties: of equal
        similarities the less relevant item ranks first.
    Raises: ValueError if no mAP is left, shapes differ, similarities are not finite, or relevancies not in 0..1.
    """
    relevancy = torch.as_tensor(relevancy, device=sim.device)
    if sim.ndim != 2 or sim.shape != relevancy.shape:
        raise ValueError(f"similarities {tuple(sim.shape)} and relevancies {tuple(relevancy.shape)} differ in shape")
    finite(similarities=sim)
    if not ((relevancy >= 0) & (relevancy <= 1)).all():
        raise ValueError("relevancies must lie between 0 and 1")
    return _both_ways(_mir_one_way, sim, relevancy, chunk=chunk)


def _both_ways(one_way, *matrices, **more):
    ways = {"rows": one_way(*matrices, **more), "columns": one_way(*(m.T for m in matrices), **more)}
    return ways | {k: (ways["rows"][k] + ways["columns"][k]) / 2 for k in MIR}


def _mir_one_way(sim, relevancy, chunk):
    """mir_metrics in one direction, with the rows as queries."""
    R, C = sim.shape
    rank = torch.arange(1, C + 1, device=sim.device, dtype=torch.float64)  # (C,)
    discount = 1 / torch.log2(rank + 1)  # (C,)
    rows, out = max(1, min(chunk, 2**20 // C)), {k: [] for k in MIR}
    for i in range(0, R, rows):
        rel, up = relevancy[i:i + rows].sort(dim=1, stable=True)  # (c, C) each, least relevant first, for ties
        order = sim[i:i + rows].gather(1, up).sort(dim=1, descending=True, stable=True).indices  # (c, C)
        found, ideal = rel.gather(1, order).double(), rel.flip(1)  # (c, C) each: as ranked, and in the best order
        hit, above = found == 1, (found > 0).sum(1)  # (c, C), (c,)
        ones, top = hit.sum(1), rank <= above[:, None]  # (c,), (c, C)
        dcg, best = (found * discount * top).sum(1), (ideal * discount).sum(1)  # (c,) each
        soft, binary = ((x.cumsum(1) / rank * hit).sum(1) / ones for x in (found, hit))  # (c,) each
        out["mAP"].append(soft[ones > 0])
        out["mAP_binary"].append(binary[ones > 0])
        out["nDCG"].append((dcg / best)[above > 0])
    out = {k: torch.cat(v) for k, v in out.items()}
    if not len(out["mAP"]):
        raise ValueError(f"none of {R} queries has an item of relevancy 1: no mAP")
    counts = {"queries": R, "no_match": R - len(out["mAP"]), "unrelated": R - len(out["nDCG"])}
    return {k: 100 * v.sum().item() / len(v) for k, v in out.items()} | counts


def mir_chance(relevancy):
    """{rows, columns, mAP, nDCG, mAP_binary} of a random order, on average, in percent; relevancy (R, C)."""
    return _both_ways(_mir_chance_one_way, torch.as_tensor(relevancy))


def _mir_chance_one_way(relevancy):
    """An item of relevancy 1 has each rank r with equal probability; the r - 1 items before it have the mean relevancy
    of the others."""
    C = relevancy.shape[1]
    rank = torch.arange(1, C + 1, dtype=torch.float64)  # (C,)
    harmonic, discount = (1 / rank).sum(), 1 / torch.log2(rank + 1)  # (), (C,)
    out = {k: [] for k in MIR}
    for part in relevancy.split(1024):
        rel = torch.from_numpy(np.sort(part.cpu().numpy(), axis=1)).flip(1).double()  # (c, C), numpy's sort is faster
        ones, above, total = (rel == 1).sum(1), (rel > 0).sum(1), rel.sum(1)  # (c,) each
        has, some = ones > 0, above > 0  # (c,) each
        for name, mass in (("mAP", total), ("mAP_binary", ones.double())):
            others = (mass - 1) / max(1, C - 1)  # (c,) mean relevancy of the other items
            out[name].append(((harmonic + (C - harmonic) * others) / C)[has])
        gain = total / C * discount.cumsum(0)[(above - 1).clamp(min=0)]  # (c,) of the first k ranks
        out["nDCG"].append((gain / (rel * discount).sum(1))[some])
    return {k: 100 * torch.cat(v).mean().item() for k, v in out.items()}


def class_relevancy(verbs, nouns, other_verbs, other_nouns, dtype=torch.float32):
    """(R, C) relevancies as in EPIC-KITCHENS-100: 1/2 [verbs equal + |N ^ N'| / |N u N'|], N a set of nouns.

    Args: verbs (R,), other_verbs (C,): class numbers.   nouns (R, K), other_nouns (C, K): from multi_hot, 1 for a noun
        class in the set, at least one per row.   dtype: use float64 if 0.1 must not be rounded to above 0.1.
    """
    verbs, other_verbs = torch.as_tensor(verbs), torch.as_tensor(other_verbs)
    out = []
    for v, n in zip(verbs.split(1024), nouns.split(1024)):
        both = n @ other_nouns.T  # (c, C), exact: counts
        either = n.sum(1, keepdim=True) + other_nouns.sum(1) - both  # (c, C)
        out.append(((v[:, None] == other_verbs).to(dtype) + both.to(dtype) / either.to(dtype)) / 2)
    return torch.cat(out)


def multi_hot(lists, classes):
    """(len(lists), classes) float32: 1 where the class number is in the list."""
    out = torch.zeros(len(lists), classes)
    for row, numbers in enumerate(lists):
        out[row, list(numbers)] = 1
    return out


# ===================================================== answers ======================================================
def answer_vocabulary(answers, size=1500):
    """The most frequent answers of a training split, for open questions; ties are in alphabetical order."""
    counts = Counter(answers)
    return sorted(counts, key=lambda a: (-counts[a], a))[:size]


def answer_hits(scores, answers):
    """(Q,) bool: whether the right answer's score is above all others; ties count against the model.

    Args: scores: (Q, A) of a vocabulary's answers or of the choices, -inf for choices that a question does not have;
        answers: (Q,) long, the right one; -1 = not in the vocabulary, which counts as wrong (see the upper bound).
    Raises: ValueError for NaN or +inf."""
    finite(scores=scores.masked_fill(scores == -math.inf, 0))  # -inf: a choice that is not there
    index = answers.clamp(min=0)[:, None]  # (Q, 1)
    others = scores.scatter(1, index, -math.inf).amax(1)  # (Q,)
    return (answers >= 0) & (scores.gather(1, index)[:, 0] > others)


def question_metrics(hits, types=None, pairs=None, known=None):
    """Accuracy of answers to questions, in percent: {accuracy[, upper_bound], accuracy TYPE for each type}.

    Args:
        hits: (Q,) right or wrong; or the probability of being right, 1 / choices, for the chance level.
        types: Q words, or pairs of words whose first is a family with its own accuracy ("causal why").
        pairs: (Q,) numbers. Rows with the same number are one question, right if all are (Causal-VidQA's answer and
            reason), in `accuracy` and for a family; a type of two words counts only its own rows.
        known: (Q,) whether the answer is in the vocabulary.
    """
    hits = np.asarray(hits, dtype=np.float64)
    def percent(values, rows):
        ids = np.arange(len(rows)) if pairs is None else np.unique(np.asarray(pairs)[rows], return_inverse=True)[1]
        right = np.ones(ids.max() + 1)
        np.multiply.at(right, ids, values[rows])  # a pair is right if both its rows are
        return float(100 * right.mean())

    out = {"accuracy": percent(hits, np.arange(len(hits)))}
    if known is not None:
        out["upper_bound"] = percent(np.asarray(known, dtype=np.float64), np.arange(len(hits)))
    types = np.asarray([] if types is None else types, dtype=object)
    families = np.asarray([t.split()[0] for t in types], dtype=object)
    named = {name: np.flatnonzero((types == name) | (families == name)) for name in {*types, *families}}
    return out | {f"accuracy {name}": percent(hits, rows) for name, rows in sorted(named.items())}
