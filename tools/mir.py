"""Multi-instance retrieval as EPIC-KITCHENS-100 scores it: mAP and nDCG over graded relevancies of clips and sentences.

The names are common's, which opens this file when one is asked for.
"""

import common

import numpy as np
import torch

MIR = ("mAP", "nDCG", "mAP_binary")


def mir_metrics(sim, relevancy, chunk=1024):
    """Multi-instance retrieval as EPIC-KITCHENS-100 scores it, both ways, in percent.

    mAP: the items of relevancy exactly 1 are counted, and the precision at each sums the relevancies of all items up to
    it, the partly relevant ones too: what the EPIC-KITCHENS code computes and every paper reports. mAP_binary is the
    textbook's, with ones alone in that sum: never higher. nDCG: over the first k ranks, k = the number of the query's
    items with relevancy > 0, gain linear in the relevancy.

    Args:
        sim (R, C): similarities, rows = queries (clips), columns = items (sentences).
        relevancy (R, C): 0..1, tensor or array.   chunk: queries at a time, at most.
    Returns: {rows, columns, mAP, nDCG, mAP_binary}. rows and columns: {mAP, nDCG, mAP_binary, queries, no_match,
        unrelated}, columns with the columns as queries; the last three are the means of both. A query without an item
        of relevancy 1 counts for no mAP (no_match tells how many), one without any above 0 for no nDCG (unrelated).
        Ties: of equal similarities the less relevant item stands first.
    Raises: ValueError where nothing is left to average, on shapes that differ or a relevancy outside 0..1; NotFinite.
    """
    relevancy = torch.as_tensor(relevancy, device=sim.device)
    if sim.ndim != 2 or sim.shape != relevancy.shape:
        raise ValueError(f"similarities {tuple(sim.shape)} and relevancies {tuple(relevancy.shape)} differ in shape")
    if not all(torch.isfinite(part).all() for part in sim.split(chunk)):
        raise common.NotFinite("similarities hold non-finite values")
    if not all(((part >= 0) & (part <= 1)).all() for part in relevancy.split(chunk)):
        raise ValueError("relevancies must lie between 0 and 1")
    ways = {"rows": _mir_one_way(sim, relevancy, chunk), "columns": _mir_one_way(sim.T, relevancy.T, chunk)}
    return ways | {k: (ways["rows"][k] + ways["columns"][k]) / 2 for k in MIR}


def _mir_one_way(sim, relevancy, chunk):
    """mir_metrics of the rows as queries."""
    exact = torch.float32 if sim.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    R, C = sim.shape
    rank = torch.arange(1, C + 1, device=sim.device, dtype=exact)  # (C,)
    discount = 1 / torch.log2(rank + 1)  # (C,)
    rows, sums = max(1, min(chunk, 2**20 // C)), {k: 0.0 for k in MIR}
    matched = related = 0
    for i in range(0, R, rows):
        rel, up = relevancy[i:i + rows].sort(dim=1, stable=True)  # (c, C) each, least relevant first: for ties
        order = sim[i:i + rows].gather(1, up).sort(dim=1, descending=True, stable=True).indices  # (c, C)
        found, ideal = rel.gather(1, order).to(exact), rel.flip(1)  # (c, C) each: as ranked, and in the best order
        ones, above = (found == 1).sum(1), (found > 0).sum(1)  # (c,) each
        hit, top = found == 1, rank <= above[:, None]  # (c, C) each
        dcg, best = (found * discount * top).sum(1), (ideal * discount).sum(1)  # (c,) each
        soft = (found.cumsum(1) / rank * hit).sum(1)  # (c,)
        binary = (hit.cumsum(1) / rank * hit).sum(1)  # (c,)
        has, any_above = ones > 0, above > 0  # (c,) each
        sums["mAP"] += (soft[has] / ones[has]).sum().item()
        sums["mAP_binary"] += (binary[has] / ones[has]).sum().item()
        sums["nDCG"] += (dcg[any_above] / best[any_above]).sum().item()
        matched, related = matched + int(has.sum()), related + int(any_above.sum())
    if not matched:
        raise ValueError(f"none of {R} queries has an item of relevancy 1: no mAP")
    out = {k: 100 * v / (related if k == "nDCG" else matched) for k, v in sums.items()}
    return out | {"queries": R, "no_match": R - matched, "unrelated": R - related}


def mir_chance(relevancy):
    """{rows, columns, mAP, nDCG, mAP_binary} that a random order has on average, in percent; relevancy (R, C)."""
    relevancy = torch.as_tensor(relevancy)
    ways = {"rows": _mir_chance_one_way(relevancy), "columns": _mir_chance_one_way(relevancy.T)}
    return ways | {k: (ways["rows"][k] + ways["columns"][k]) / 2 for k in MIR}


def _mir_chance_one_way(relevancy):
    """An item of relevancy 1 stands at each rank r alike; before it the others have their mean relevancy, r - 1
    times."""
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
    """(R, C) relevancies as EPIC-KITCHENS-100 has them: 1/2 [verbs equal + |N ^ N'| / |N u N'|], N a set of nouns.

    Args: verbs (R,), other_verbs (C,): class numbers.   nouns (R, K), other_nouns (C, K): 1 where a noun class is in
        the set, of multi_hot; at least one in each row.   dtype: float64 where 0.1 must not become more than 0.1.
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


def mir_of(model, tokenizer, pieces, device):
    """({image_to_text, text_to_image, mAP, nDCG, mAP_binary}, the same for chance) of mir_metrics; ({}, {}) where the
    set has no relevancies. Collective.

    The texts are the set's own sentences (EPIC-KITCHENS), else the different captions; relevancies then come from the
    columns verb and noun, or nouns."""
    data, index, text = pieces["data"], pieces["index"], pieces["text"]
    if data.sentences is not None:
        text = common.encode_texts(model, tokenizer, data.sentences.texts, device)  # (C, D)
        relevancy = data.sentences.relevancy(data.rows[index])  # (M, C)
    elif data.column("verb") is not None and data.column("noun") is not None:
        verb, single = data.column("verb")[index], data.column("noun")[index]  # (M,) each
        several = data.column("nouns")
        lists = [[n] for n in single] if several is None else [several[i] for i in index]
        nouns = multi_hot(lists, 1 + max(max(n) for n in lists))  # (M, K)
        owner, first = pieces["owner"], {}  # owner (C,)
        for c, t in enumerate(pieces["texts"]):
            first.setdefault((t, verb[owner[c]], tuple(sorted(lists[owner[c]]))), c)
        columns = list(first.values())
        text, said = text[columns], owner[columns]
        relevancy = class_relevancy(verb, nouns, verb[said], nouns[said])  # (M, C)
    else:
        return {}, {}
    sim = common.normalize(pieces["image"]) @ common.normalize(text).T  # (M, C)
    names = {"rows": "image_to_text", "columns": "text_to_image"}
    both = mir_metrics(sim, relevancy), mir_chance(relevancy)
    metrics, chance = ({names.get(k, k): v for k, v in m.items()} for m in both)
    return metrics, chance


def table_lines(metrics, chance, ways):
    """mir_of as lines of a table, each number beside its chance level. ways: ((name of a way, how to call it), ...)."""
    lines = []
    for label, m, c in (*((label, metrics[name], chance[name]) for name, label in ways), ("both", metrics, chance)):
        cells = [f"{k} {m[k]:5.1f} ({c[k]:5.1f})" for k in MIR]
        lines.append(f"{'MIR ' + label:<22}   {'   '.join(cells)}")
    left_out = metrics["image_to_text"]["no_match"] + metrics["text_to_image"]["no_match"]
    if left_out:
        lines.append(f"{'':<22}   queries without an item of relevancy 1, in no mAP: {left_out}")
    return lines


def task(case):
    """The task mir of eval.py: writes the numbers of a Case (tools/case.py) into case.metrics and case.chance."""
    subject = case.subject
    metrics, chance = mir_of(subject.model, subject.tokenizer, case.pieces, subject.device)
    if not metrics:
        raise common.UserError("the set has no relevancies (no verb and noun classes)")
    case.metrics["mir"], case.chance["mir"] = metrics, chance
