"""The evaluation of a split: one function, `measure`, does those of the TASKS that its data and the model support.

    retrieval   exact ranks both ways             mir     multi-instance retrieval, as EPIC-KITCHENS-100 scores it
    zero-shot   the nearest class by prompts      knn     the nearest training images
    probe       linear classifiers                gap     the modality gap, and the health of the space
    qa          answers to questions (answers.py)

Scripts use its Evaluator, eval.py `measure` itself; by_class.py has the parts by class, metrics.py the pure metrics.
"""

from contrastive.data.table import frames_of
from contrastive.engine.processes import UserError, flatten
from contrastive.evaluation import answers
from contrastive.evaluation.by_class import class_metrics, labelled, view_of, zero_shot
from contrastive.evaluation.embed import encode_images, encode_texts
from contrastive.evaluation.trivial import trivial_accuracy

from contrastive.evaluation.metrics import (  # isort: skip
    class_relevancy, embedding_health, finite, mir_chance, mir_metrics, modality_gap, multi_hot, normalize,
    retrieval_chance, retrieval_metrics)

import numpy as np
import torch

TASKS = "retrieval", "mir", "zero-shot", "knn", "probe", "gap", "qa"
BY_CAPTION, LEARNT, BY_CLASS = {"retrieval", "gap", "mir"}, {"knn", "probe"}, {"knn", "probe", "zero-shot"}
# in a table's first line
COUNTS = ("clips", "images", "captions", "questions", "captions_cut", "repeated_captions_positive",
          "repeated_captions_wrong", "texts_cut", "unreadable", "without_class")
FEW_QUERIES = 50  # with fewer, a single query moves the numbers


# ======================================================= captions ====================================================
def positives_table(query_groups, gallery_groups):
    """(Q, P) long, padded with -1: which gallery items share each query's group."""
    members = {}
    for j, g in enumerate(gallery_groups):
        members.setdefault(int(g), []).append(j)
    return padded([members[int(g)] for g in query_groups])


def padded(rows):
    """Q lists of numbers -> (Q, P) long, padded with -1."""
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def retrieval_pieces(model, tokenizer, data, index, image, device):
    """Encodes the captions of the encoded images, for retrieval metrics and pictures. Every caption is a query.

    Returns: dict of image (M, D), text (C, D), owner (C,) row of each caption's image, texts, index (M,) into data,
        positives both ways, those of repeated texts as data.same_text says; device: where similarities are computed;
        cut, repeated: how many texts are cut, and how many items of several groups have, word for word."""
    pairs = [(c, k) for k, i in enumerate(index) for c in data.captions(i)[:data.max_captions or None]]
    texts, owner = [c for c, _ in pairs], np.array([k for _, k in pairs])
    # if class names serve as captions, each image of the class is a positive
    groups = (data.groups if data.has_captions or data.labels is None else data.labels)[index]  # (M,)
    to_text, places = positives_table(groups, groups[owner]), {}           # (M, P); where each text stands
    for c, t in enumerate(texts):
        places.setdefault(t, []).append(c)
    repeated = sum(len(of) for of in places.values() if len({*groups[owner[of]]}) > 1)
    if repeated and data.same_text == "positive":
        to_text = padded([sorted({c for k in row if k >= 0 for c in places[texts[k]]}) for row in to_text.tolist()])
    text = encode_texts(model, tokenizer, texts, device)
    return {"image": image, "text": text, "owner": owner, "texts": texts, "index": index, "data": data,
            "cut": tokenizer.cut(texts), "device": device, "positives": positives_table(groups[owner], groups),
            "positives_of_image": to_text, "repeated": repeated}


def retrieval_both_ways(pieces, image_bias=None, text_bias=None, dsl=0.0):
    """({text_to_image, image_to_text, R-Mean, R@1-Mean}, the same for chance). R-Mean: R@1/5/10 both ways (TeMo,
    Table 4).

    image_bias (M,), text_bias (C,): added to the cosines of the ranked items (NCL), before grouped sets take the
    maximum over the captions of a clip.   dsl: temperature of the dual softmax over the queries of each direction;
    0 = none."""
    image, text = (pieces[kind].to(pieces.get("device")) for kind in ("image", "text"))  # (M, D), (C, D)
    to_image, to_text = pieces["positives"], pieces["positives_of_image"]
    groups, ranked = None, len(text)
    if pieces["data"].grouped:
        groups, ranked = torch.from_numpy(pieces["owner"]), len(image)
        to_text = padded([sorted({*pieces["owner"][[c for c in row if c >= 0]]}) for row in to_text.tolist()])
    metrics = {"text_to_image": retrieval_metrics(text, image, to_image, image_bias, dsl=dsl),
               "image_to_text": retrieval_metrics(image, text, to_text, text_bias, groups, dsl=dsl)}
    chance = {"text_to_image": retrieval_chance(to_image, len(image)),
              "image_to_text": retrieval_chance(to_text, ranked)}
    for r in (metrics, chance):
        recalls = np.array([[r[way][k] for k in ("R@1", "R@5", "R@10")] for way in ("text_to_image", "image_to_text")])
        r["R-Mean"], r["R@1-Mean"] = float(recalls.mean()), float(recalls[:, 0].mean())    # MM-TS's Table 1: "Avg."
    return metrics, chance


def mir_of(model, tokenizer, pieces, device):
    """mir_metrics as {image_to_text, text_to_image, mAP, nDCG, mAP_binary}, and the same for chance. Collective.

    The texts are the set's own sentences (EPIC-KITCHENS). Other sets use their distinct captions, with relevancies from
    the columns verb and noun, or nouns."""
    data, index, text = pieces["data"], pieces["index"], pieces["text"]
    if data.sentences is not None:
        text = encode_texts(model, tokenizer, data.sentences.texts, device)  # (C, D)
        relevancy = data.sentences.relevancy(data.rows[index])  # (M, C)
    else:
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
    sim = normalize(pieces["image"].to(device)) @ normalize(text.to(device)).T  # (M, C)
    names = {"rows": "image_to_text", "columns": "text_to_image"}
    found = mir_metrics(sim, relevancy), mir_chance(relevancy)
    return tuple({names.get(k, k): v for k, v in of.items()} for of in found)


def gap_of(pieces):
    """The modality gap of all images and texts, and embedding_health of each image with its first caption (another
    caption of an image would be among its negatives); and the gap of random unit vectors."""
    image, text = pieces["image"], pieces["text"]  # (M, D), (C, D)
    finite(image=image, text=text)
    owner, first = np.unique(pieces["owner"], return_index=True)
    health = embedding_health(image[owner], text[first], limit=4096) if len(owner) > 1 else {}
    health.pop("gap", None)  # of these pairs
    return ({"modality_gap": modality_gap(image, text), "embeddings": health},
            {"modality_gap": (1 / len(image) + 1 / len(text)) ** 0.5})


# ======================================================= a split =====================================================
def usual_tasks(model, tokenizer, data):
    """The tasks of a split where none are named, in training and in eval.py; `lacks` says which of them it supports."""
    if hasattr(model, "answers"):
        return ("qa",)
    by_name = () if data.has_captions else ("zero-shot",)                  # TeMo, Fig. 7
    return ("retrieval", "gap", "mir", "knn", *by_name) if tokenizer else ("knn", "probe")


def lacks(tasks, data, towers, train=None, names=False, knn_features="projected"):
    """{task: why it cannot be done on these data with this model, in words; "" if it can}.

    names: class names serve as captions where there are no others, as in training.   knn_features: as in measure."""
    model, tokenizer, _ = towers
    answering, similarity = hasattr(model, "answers"), getattr(model, "similarity", "")
    why_no_answers = answers.lacking(data, not model.answers) if answering else "the model answers no questions"
    without_mir = data.sentences is None and any(data.column(c) is None for c in ("verb", "noun"))
    others = train is not None and not train.streamed and train.label_names == data.label_names
    needs_boxes = getattr(model, "model", "") == "vgt" and model.vision.name != "regions"
    embedded = {*TASKS} - {"qa", "probe"} - ({"knn"} if knn_features == "backbone" else set())
    reasons = [  # the first that holds: the tasks that it concerns, whether it holds, its words
        ({"qa"}, why_no_answers, why_no_answers),
        (BY_CAPTION, not (data.has_captions or names), "the set has no captions"),
        ({"mir"}, without_mir, "the set has no relevancies (no verb and noun classes)"),
        (BY_CLASS, data.labels is None or not (data.labels >= 0).any(), "the set has no classes"),
        (LEARNT, not others, "there are no other training images of the same classes"),
        ({"zero-shot"}, not data.label_names, "the classes have no names"),
        ({*TASKS} - {"qa"} - LEARNT, not tokenizer, "the model has no text encoder"),
        (embedded, similarity == "fused",
         "the model was trained with --qa-similarity fused, not its embeddings before the fusion"),
        (embedded, similarity == "none",
         "the model was trained with --contrastive-weight 0, on answers alone, not its embeddings"),
        ({*TASKS} - {"qa"}, needs_boxes, "the model needs boxes, which only questions bring: --tasks qa")]
    return {task: next((why for concerned, holds, why in reasons if task in concerned and holds), "")
            for task in tasks}


def measure(towers, data, device, tasks, train=None, few=None, limits=None, knn_features="projected", workers=0,
            seen=None, trivial=None):
    """(metrics, chance, pieces for pictures) of one split: tasks that nothing `lacks`; qa alone. Collective.

    Args: towers: (model, tokenizer, transform); train, few: Data of the training images of knn and probe, and of the
        few-shot probe; limits: of head_mid_tail; knn_features: projected (embeddings) or backbone (features before the
        projection); seen: the transform of the tasks by class, if it is another; trivial: function () -> the untrained
        model, measured beside raw pixels and colours, which chance gets as `trivial`; None: nothing trivial."""
    model, tokenizer, transform = towers
    if "qa" in tasks:
        return answers.evaluate(*towers, data, device, workers)
    index, image, features, bad = encode_images(model, data, transform, device, workers=workers)
    counts = {"clips": len(index)} if frames_of(data) else {}
    counts |= {"images": len(index), "unreadable": len(bad)}
    found, pieces = [(counts, {})], {"index": index, "data": data, "image": image}
    if BY_CAPTION & {*tasks}:
        pieces = retrieval_pieces(model, tokenizer, data, index, image, device)
        counts["captions"] = len(pieces["text"])
        counts |= {"captions_cut": pieces["cut"]} if pieces["cut"] else {}
    if "retrieval" in tasks:
        found.append(retrieval_both_ways(pieces))
        if pieces["repeated"]:
            counts[f"repeated_captions_{data.same_text}"] = pieces["repeated"]
    if "gap" in tasks:
        found.append(gap_of(pieces))
    if "mir" in tasks:
        found.append(tuple({"mir": of} for of in mir_of(model, tokenizer, pieces, device)))
    if BY_CLASS & {*tasks}:
        if seen:
            _, image, features, _ = encode_images(model, data, seen, device, workers=workers)
        rows = np.flatnonzero(data.labels[index] >= 0)                     # those of a class
        image, features, labels = image[rows], features[rows], data.labels[index[rows]]
        if len(rows) < len(index):
            counts["without_class"] = len(index) - len(rows)
    if "zero-shot" in tasks:
        found.append(tuple({"zero-shot": of} for of in zero_shot(model, tokenizer, image, labels, data, device)))
    if LEARNT & {*tasks}:
        projected, few = knn_features == "projected", few if "probe" in tasks else None
        how = seen or transform, device, workers, projected
        known = labelled(model, train, *how)
        test = image if projected else features, features, labels
        *numbers, of_class = class_metrics(tasks, known, test, few and labelled(model, few, *how), limits, device)
        found.append(numbers)
        pieces["per_class"] = of_class.get("knn@1")
        if "probe" in tasks:
            pieces |= {"train_features": known[1], "train_labels": known[2], "features": features, "labels": labels,
                       "names": data.label_names}
        if trivial:
            untrained = trivial()                                          # None of a model by name
            models = {"untrained": untrained.to(device)} if untrained else {}
            found.append(({}, {"trivial": trivial_accuracy(train, data, few, *how, tasks, models, limits)}))
    metrics, chance = {}, {}
    for numbers, by_chance in found:
        metrics |= numbers
        chance |= by_chance
    return metrics, chance, pieces


class Evaluator:
    """All evaluation sets of a run: evaluator('val') -> metrics, chance and picture pieces, each by data set.

    Args: sets: {name: {val, test}}; train: for knn and probe; also: function of the pieces -> a method's own metrics;
        few: Data from which the few-shot probe learns. It does those of the usual_tasks that a set supports.
    Raises: UserError if a split supports none of the tasks. Collective: every process calls it."""

    def __init__(self, model, tokenizer, transform, sets, train, device, args, also=None, few=None):
        train = train if train.streamed else train.folded()                # neighbours are clips, not their captions
        self.towers, self.sets, self.train, self.device = (model, tokenizer, transform), sets, train, device
        self.args, self.also, self.few, self.tasks = args, also, few, {}
        for name, split, data in ((name, *of) for name, splits in sets.items() for of in splits.items()):
            tasks, known = usual_tasks(model, tokenizer, data), train.name == data.name
            why = lacks(tasks, data, self.towers, train if known else None, names=True)
            if all(why.values()):
                raise UserError(f"--eval-datasets {name}: its {split} split: {why[tasks[0]]}")
            self.tasks[name, split] = [task for task in tasks if not why[task]]

    def __call__(self, split, trivial=None):
        args, found = self.args, {}
        limits, knn_features = getattr(args, "shot_limits", None), getattr(args, "knn_features", "projected")
        for name, splits in self.sets.items():
            if split in splits:
                seen, _ = view_of(self.towers[2], name, args.dataset)
                found[name] = measure(self.towers, splits[split], self.device, self.tasks[name, split], self.train,
                                      self.few, limits, knn_features, args.workers, seen, trivial)
                found[name][0].update(self.also(found[name][2]) if self.also else {})
            elif not self.towers[1]:                                       # TS measures and draws the training images
                known = labelled(self.towers[0], self.train, self.towers[2], self.device, args.workers, True)
                found[name] = {}, {}, {"train_features": known[1], "train_labels": known[2]}
        return tuple({name: of[k] for name, of in found.items()} for k in range(3))


# ======================================================= its table ===================================================
def table(title, metrics, chance):
    """The result as lines of text, one for each group of numbers, each number with its chance level in brackets."""
    by_chance, groups, clips, trivial = flatten(chance), {}, "clips" in metrics, chance.get("trivial", {}).items()
    for key, value in flatten({k: v for k, v in metrics.items() if k not in COUNTS}).items():
        group, _, name = key.rpartition("/")
        said = f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
        groups.setdefault(group, []).append(said + (f" ({by_chance[key]:.2f})" if key in by_chance else ""))
    counts = {k: metrics[k] for k in COUNTS if metrics.get(k) and not (clips and k == "images")}
    said = ", ".join(f"{n} {kind}".replace("_", " ") for kind, n in counts.items())
    lines = [f"{title}: {said}; number (chance)"]
    for group, cells in groups.items():
        label = group.replace("_to_", " -> ").replace("_", " ")
        lines.append(f"  {label.replace('image', 'video') if clips else label:<24} {'  '.join(cells)}")
        beside = [f"{k} {of[group]['mean_per_class']:.2f}" for k, of in trivial if group in of]
        lines += [f"  {'':<24} mean_per_class of {', '.join(beside)}"] if beside else []
    if any(kind.startswith("repeated") for kind in counts):
        it = "video" if clips else "image"
        lines.append(f"  repeated captions: another {it} has the same words; in text -> {it} nothing tells them apart")
    few = [f"of {n} {kind} one is worth {100 / n:.1f} points" for kind, n in counts.items()
           if kind in COUNTS[:4] and n < FEW_QUERIES]
    return "\n".join(lines + ["FEW QUERIES: " + ", ".join(few)] if few else lines)


def report(summary, folder):
    """The text at the end of a run: one table per evaluation set, its speed, and the run folder."""
    tables = [table(f"\n{name} (test)", metrics, summary["chance"][name]) for name, metrics in summary["test"].items()]
    end = (f"{summary['steps']} steps, {summary['wall_s']:.0f} s, "
           f"{summary['samples_per_s']:.0f} samples/s with evaluations, "
           f"{summary['peak_memory_mb']:.0f} MiB, {summary['bad_samples']} bad samples")
    return "\n".join([*tables, "", end, f"run folder: {folder}"])
