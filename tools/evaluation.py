"""Evaluation of a data set by its captions: embeddings of all images and texts, exact ranks both ways, and the table.

common.Evaluator opens it for the scripts that train on captions, eval.py for any model. Evaluation by class stands in
by_class.py, by relevancy in mir.py, of answers in answers.py.
"""

import math
import re

import common

import numpy as np
import torch

RECALLS = (1, 5, 10, 50)
FEW_QUERIES = 50  # below, a single query moves the numbers


class NotFinite(ValueError):
    """Embeddings or features that hold NaN or infinity: the model is broken, not the data."""


# ======================================================= metrics =====================================================
def retrieval_metrics(query, gallery, positives, bias=None, groups=None, chunk=4096, ranks=False):
    """Exact retrieval ranks of the best positive, by cosine, in chunks of queries.

    Args:
        query (Q, D), gallery (G, D): embeddings, normalised here.
        positives (Q, P) long: indices into the gallery (into the groups when groups are given), padded with -1.
        bias (G,): added to each gallery item's cosine.   chunk: queries at a time, at most.
        groups (G,) long: items of a group count as one, by their maximum, and groups are ranked.
        ranks: give the ranks (Q,) themselves, numpy, from 1 (for recall_by_frequency).
    Returns: dict of R@1 R@5 R@10 R@50 in percent, MdR and MnR (ranks from 1). Ties count against the model.
    Raises: ValueError on non-finite input, or on a query without positives.
    """
    gallery, positives = common.normalize(gallery), positives.to(query.device)
    for name, x in (("query", query), ("gallery", gallery), ("bias", bias)):
        if x is not None and not all(torch.isfinite(part).all() for part in x.split(chunk)):
            raise NotFinite(f"{name} holds non-finite values")
    rows = max(1, min(chunk, 2**22 // len(gallery)))  # 16 MiB of similarities at a time
    known = positives >= 0
    if not known.any(1).all():
        raise ValueError(f"query {int((~known.any(1)).nonzero()[0])} has no positive")
    first = positives.gather(1, known.long().argmax(1, keepdim=True))  # (Q, 1)
    positives = torch.where(known, positives, first)  # padding repeats a positive: no effect on a maximum or a mask
    found = []
    for i in range(0, len(query), rows):
        sim = common.normalize(query[i:i + rows]) @ gallery.T  # (c, G)
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
    """R@1 R@5 R@10 R@50 in percent, MdR and MnR of ranks (Q,) from 1."""
    recalls = {f"R@{k}": float(100 * (ranks <= k).mean()) for k in RECALLS}
    return recalls | {"MdR": float(np.median(ranks)), "MnR": float(ranks.mean())}


def retrieval_chance(positives, gallery):
    """The same keys for a random ranking of `gallery` items: positives (Q, P) padded with -1."""
    count = (positives >= 0).sum(1).cpu().numpy()  # (Q,)
    r = np.arange(1, gallery + 1)
    found = np.zeros(gallery)  # probability that the best positive stands at rank <= r, mean over the queries
    for p, share in zip(*np.unique(count, return_counts=True)):
        miss = np.cumprod(np.maximum(gallery - p - (r - 1), 0) / (gallery - (r - 1)))
        found += (1 - miss) * share / len(count)
    out = {f"R@{k}": float(100 * found[min(k, gallery) - 1]) for k in RECALLS}
    return out | {"MdR": float(1 + np.searchsorted(found, 0.5)), "MnR": float(((gallery + 1) / (count + 1)).mean())}


# ======================================================= embeddings of a data set ====================================
def own_words(error):
    """Kind and first line of an error; of one that a loader worker raised, its own, not the traceback around it."""
    lines = str(error).strip().splitlines()
    if len(lines) > 2 and "DataLoader worker" in lines[0]:
        return re.sub(r"^[\w.]*UserError: ", "", lines[-1])
    kind = "" if isinstance(error, common.UserError) else f"{type(error).__name__}: "
    return kind + common.first_line(error)


class _EvalImages(torch.utils.data.Dataset):
    def __init__(self, data, rows, transform):
        self.data, self.rows, self.transform = data, rows, transform

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        i = int(self.rows[k])
        try:
            return i, self.transform.raw(self.data.read(i)), ""
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            if words := common.plain_words(error):  # any other sample would fail like this one
                raise common.UserError(words) from error
            return i, None, common.first_line(error)


def _collate_eval(items):
    """One tensor a batch: a worker sends every tensor as an open file, and 1,024 of these is the usual limit."""
    good = [(i, x) for i, x, _ in items if x is not None]
    pixels = torch.stack([x for _, x in good]) if good else None  # (b, [T,] 3, S, S)
    return [i for i, _ in good], pixels, [(i, why) for i, x, why in items if x is None]


def _heed_signals():
    if common.signals:  # of this process; the others learn of it when all have come to the end of their share
        raise common.Stopped


def _raise_first(failures):
    """What went wrong on any process, on all of them: words, or that a signal came."""
    for failure in filter(None, failures):
        raise failure if isinstance(failure, common.Stopped) else RuntimeError(failure)


@torch.no_grad()
def encode_images(model, data, transform, device, batch=256, workers=0, rows=None, forward=None):
    """Embeddings of a data set's images or clips, each item once over all processes; batch: images, or frames of clips.

    forward: function (rows, pixels (b, ...)) -> what stands in for image (b, D) and features (b, width).
    Returns: index (M,) numpy, image (M, D), features (M, width) on the CPU, {key: reason} of what could not be read."""
    rows = np.arange(len(data)) if rows is None else np.asarray(rows)
    mine, training = rows[common.rank()::common.world()], model.training
    model.eval()
    index, image, features, bad = [], [], [], {}
    batch = max(1, batch // common.frames_of(data))
    few = data.pixels is not None or len(mine) < 2 * batch  # starting workers costs more than they save
    workers = 0 if few else min(workers, common.CORES)
    loader = common.Loader(_EvalImages(data, mine, transform), batch_size=batch, num_workers=workers,
                                         collate_fn=_collate_eval, generator=torch.Generator().manual_seed(0),
                                         **common.worker_options(workers))
    failure = None
    try:
        for good, pixels, broken in common.watched(loader, workers):
            _heed_signals()
            bad |= {data.key(i): why for i, why in broken}
            if good:
                pixels = pixels.to(device)
                if pixels.dtype == torch.uint8:
                    pixels = transform.normalise(pixels.float() / 255)
                e, f = forward(good, pixels) if forward else model(pixels)[::2]  # (b, D), (b, width)
                index += good
                image.append(e.float().cpu())
                features.append(f.float().cpu())
    except Exception as error:  # no process may wait for one that failed
        failure = error if isinstance(error, common.Stopped) else own_words(error)
    model.train(training)
    mine = [torch.cat(x) if x else None for x in (image, features)]
    parts = common.gather_objects((np.array(index, dtype=np.int64), *mine, bad, failure))
    _raise_first(p[4] for p in parts)
    index = np.concatenate([p[0] for p in parts])
    if not len(index):
        first = next((f", first {key}: {why}" for p in parts for key, why in p[3].items()), "")
        raise common.UserError(f"{data.name} ({data.split}): none of its {len(rows)} images can be read{first}")
    order = np.argsort(index)
    image, features = (torch.cat([p[k] for p in parts if p[k] is not None])[order] for k in (1, 2))
    return index[order], image, features, {k: v for p in parts for k, v in p[3].items()}


@torch.no_grad()
def encode_texts(model, tokenizer, texts, device, batch=512):
    """Embeddings (len(texts), D) on the CPU, each text once over all processes."""
    training = model.training
    model.eval()
    mine = list(range(len(texts)))[common.rank()::common.world()]
    out, failure = [], None
    try:
        for j in range(0, len(mine), batch):
            _heed_signals()
            tokens = {k: v.to(device) for k, v in tokenizer([texts[i] for i in mine[j:j + batch]]).items()}
            out.append(model(tokens=tokens)[1].float().cpu())
    except Exception as error:  # no process may wait for one that failed
        failure = error if isinstance(error, common.Stopped) else own_words(error)
    model.train(training)
    parts = common.gather_objects((np.array(mine, dtype=np.int64), torch.cat(out) if out else None, failure))
    _raise_first(p[2] for p in parts)
    order = np.argsort(np.concatenate([p[0] for p in parts]))
    return torch.cat([p[1] for p in parts if p[1] is not None])[order]


def say_unreadable(data, bad):
    """How many images an evaluation has left out; bad: {key: reason}."""
    if bad:
        common.say(f"{data.name} ({data.split}): {len(bad)} of {len(data)} images cannot be read and are left out, "
                   f"first {next(iter(bad.items()))}")


# ======================================================= evaluation ==================================================
def positives_table(query_groups, gallery_groups):
    """(Q, P) long, padded with -1: which gallery items share each query's group."""
    members = {}
    for j, g in enumerate(gallery_groups):
        members.setdefault(int(g), []).append(j)
    width = max(len(m) for m in members.values())
    return torch.tensor([(members[int(g)] + [-1] * width)[:width] for g in query_groups])


def retrieval_pieces(model, tokenizer, data, index, image, device):
    """Embed the captions of the encoded images; what retrieval metrics and pictures need. Every caption is a query.

    Returns: dict of image (M, D), text (C, D), owner (C,) row of each caption's image, texts, index (M,) into data,
        positives both ways."""
    pairs = [(c, k) for k, i in enumerate(index) for c in data.captions(i)[:data.max_captions or None]]
    texts, owner = [c for c, _ in pairs], np.array([k for _, k in pairs])
    # class names that stand in for captions: each image of the class is meant
    groups = (data.groups if data.has_captions or data.labels is None else data.labels)[index]  # (M,)
    text = common.encode_texts(model, tokenizer, texts, device)
    return {"image": image, "text": text, "owner": owner, "texts": texts, "index": index, "data": data,
            "positives": positives_table(groups[owner], groups),
            "positives_of_image": positives_table(groups, groups[owner])}


def retrieval_both_ways(pieces, image_bias=None, text_bias=None):
    """({text_to_image, image_to_text, R-Mean}, the same for chance). R-Mean: R@1/5/10 both ways (TeMo, Table 4).

    image_bias (M,), text_bias (C,): added to the cosines of the items that are ranked (NCL); grouped sets take the
    maximum over the captions of a clip after that."""
    image, text, to_image, to_text = (pieces[k] for k in ("image", "text", "positives", "positives_of_image"))
    groups, ranked = None, len(text)
    if pieces["data"].grouped:
        groups, ranked, to_text = torch.from_numpy(pieces["owner"]), len(image), torch.arange(len(image))[:, None]
    metrics = {"text_to_image": retrieval_metrics(text, image, to_image, image_bias),
               "image_to_text": retrieval_metrics(image, text, to_text, text_bias, groups)}
    chance = {"text_to_image": retrieval_chance(to_image, len(image)),
              "image_to_text": retrieval_chance(to_text, ranked)}
    for r in (metrics, chance):
        recalls = [r[way][k] for way in ("text_to_image", "image_to_text") for k in ("R@1", "R@5", "R@10")]
        r["R-Mean"] = float(np.mean(recalls))
    return metrics, chance


def evaluate(model, tokenizer, transform, data, device, train=None, batch=256, workers=0):
    """Retrieval both ways, modality gap, multi-instance retrieval where there are relevancies, and kNN@1 where there
    are labels and a training set.

    Returns: metrics, the same keys for chance, and the pieces pictures are drawn from.
    """
    index, image, features, bad = common.encode_images(model, data, transform, device, batch, workers)
    common.say_unreadable(data, bad)
    pieces = retrieval_pieces(model, tokenizer, data, index, image, device)
    metrics, chance = retrieval_both_ways(pieces)
    metrics["modality_gap"] = common.modality_gap(image, pieces["text"])
    chance["modality_gap"] = math.sqrt(1 / len(image) + 1 / len(pieces["text"]))
    with common.where_there():
        mir_of = common.open_room("tools.mir", "multi-instance retrieval").mir_of
        found, by_chance = mir_of(model, tokenizer, pieces, device)
        metrics |= {"mir": found} if found else {}
        chance |= {"mir": by_chance} if found else {}
    labelled = train is not None and train.labels is not None and data.labels is not None
    if labelled and train.label_names == data.label_names:
        rows, _, known, _ = common.encode_images(model, train, transform, device, batch, workers)
        with common.where_there():
            nearest = common.open_room("tools.by_class", "kNN").nearest
            metrics["knn@1"], chance["knn@1"] = nearest(known, train.labels[rows], features, data.labels[index])
    counts = {"images": len(image), "captions": len(pieces["text"]), "unreadable": len(bad)}
    if common.has_clips(data):
        counts["clips"] = len(image)
    return metrics | counts, chance, pieces


def few_queries(**counts):
    """What one query is worth where there are few, for under a table: {what it is: how many} -> text or ""."""
    few = [f"of {n} {kind} one is worth {100 / n:.1f} points" for kind, n in counts.items() if 0 < n < FEW_QUERIES]
    return "FEW QUERIES: " + ", ".join(few) if few else ""


SHOWN = ("text_to_image", "image_to_text", "R-Mean", "mir", "knn@1", "modality_gap", "images", "captions", "unreadable",
         "clips")  # what metrics_table has a place for


def metrics_table(title, metrics, chance):
    """The result as lines of text, each number beside its chance level; a method's own numbers as they come."""
    keys, it = ["R@1", "R@5", "R@10", "MdR"], "video" if "clips" in metrics else "image"
    number = f"{metrics['clips']} clips" if "clips" in metrics else f"{metrics['images']} images"
    lines = [f"{title}: {number}, {metrics['captions']} captions",
             f"{'':<22}" + "".join(f"{k:>8} (chance)" for k in keys)]
    ways = (("text_to_image", f"text -> {it}"), ("image_to_text", f"{it} -> text"))
    for name, label in ways:
        cells = [f"{metrics[name][k]:8.1f} ({chance[name][k]:6.1f})" for k in keys]
        lines.append(f"{label:<22}" + "".join(cells))
    if "R-Mean" in metrics:
        lines.append(f"{'R-Mean':<22}{metrics['R-Mean']:8.1f} ({chance['R-Mean']:6.1f})  of R@1/5/10 both ways")
    if "mir" in metrics:
        lines += common.open_room("tools.mir").table_lines(metrics["mir"], chance["mir"], ways)
    if "knn@1" in metrics:
        m, c = metrics["knn@1"], chance["knn@1"]
        lines.append(f"{f'kNN@1 ({it})':<22}{m['top1']:8.1f} ({c['top1']:6.1f})  mean per class "
                     f"{m['mean_per_class']:.1f} ({c['mean_per_class']:.1f})")
    gap, random_gap = metrics["modality_gap"], chance["modality_gap"]
    lines.append(f"{'modality gap':<22}{gap:8.3f} ({random_gap:6.3f})  random unit vectors")
    for name in (k for k in metrics if k not in SHOWN):  # nested deeper, the method has a table of its own
        numbers = metrics[name] if isinstance(metrics[name], dict) else {"": metrics[name]}
        if numbers and all(isinstance(x, (int, float)) for x in numbers.values()):
            lines.append(f"{name:<22}" + " ".join(f"{k:>8} {x:.3f}" for k, x in numbers.items()))
    lines.append(few_queries(texts=metrics["captions"], images=metrics["images"]))
    return "\n".join(line for line in lines if line)
