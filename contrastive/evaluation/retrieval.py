"""The evaluation of a split: one function, `measure`, does those of the TASKS that its data and the model support.

    retrieval   exact ranks both ways             mir     multi-instance retrieval, as EPIC-KITCHENS-100 scores it
    zero-shot   the nearest class by prompts      knn     the nearest training images
    probe       linear classifiers                gap     the modality gap, and the health of the space
    qa          answers to questions (answers.py)

Scripts use its Evaluator, eval.py `measure` itself; by_class.py has the parts by class, metrics.py the pure metrics.
"""

import functools

from contrastive.data.table import has_clips
from contrastive.engine.processes import UserError, flatten
from contrastive.evaluation import answers
from contrastive.evaluation.by_class import neighbours, probes, zero_shot
from contrastive.evaluation.embed import encode_images, encode_texts, few_queries, on_card, read_batch
from contrastive.evaluation.metrics import (
    class_relevancy,
    embedding_health,
    finite,
    mir_chance,
    mir_metrics,
    modality_gap,
    multi_hot,
    normalize,
    retrieval_chance,
    retrieval_metrics,
)
from contrastive.evaluation.trivial import trivial_accuracy

import numpy as np
import torch

TASKS = "retrieval", "mir", "zero-shot", "knn", "probe", "gap", "qa"
BY_CLASS = "zero-shot", "knn", "probe"
COUNTS = "clips", "images", "captions", "questions", "unreadable", "without_class"  # in a table's first line


# ======================================================= captions ====================================================
def positives_table(query_groups, gallery_groups):
    """(Q, P) long, padded with -1: which gallery items share each query's group."""
    members = {}
    for j, g in enumerate(gallery_groups):
        members.setdefault(int(g), []).append(j)
    width = max(len(m) for m in members.values())
    return torch.tensor([(members[int(g)] + [-1] * width)[:width] for g in query_groups])


def retrieval_pieces(model, tokenizer, data, index, image, device):
    """Encodes the captions of the encoded images, for retrieval metrics and pictures. Every caption is a query.

    Returns: dict of image (M, D), text (C, D), owner (C,) row of each caption's image, texts, index (M,) into data,
        positives both ways; device: where similarities are computed."""
    pairs = [(c, k) for k, i in enumerate(index) for c in data.captions(i)[:data.max_captions or None]]
    texts, owner = [c for c, _ in pairs], np.array([k for _, k in pairs])
    # if class names serve as captions, each image of the class is a positive
    groups = (data.groups if data.has_captions or data.labels is None else data.labels)[index]  # (M,)
    text = encode_texts(model, tokenizer, texts, device)
    return {"image": image, "text": text, "owner": owner, "texts": texts, "index": index, "data": data,
            "device": device, "positives": positives_table(groups[owner], groups),
            "positives_of_image": positives_table(groups, groups[owner])}


def retrieval_both_ways(pieces, image_bias=None, text_bias=None, dsl=0.0):
    """({text_to_image, image_to_text, R-Mean, R@1-Mean}, the same for chance). R-Mean: R@1/5/10 both ways (TeMo,
    Table 4).

    image_bias (M,), text_bias (C,): added to the cosines of the ranked items (NCL), before grouped sets take the
    maximum over the captions of a clip.   dsl: temperature of the dual softmax over the queries of each direction;
    0 = none."""
    image, text = on_card(pieces.get("device"), pieces["image"], pieces["text"])  # (M, D), (C, D)
    to_image, to_text = pieces["positives"], pieces["positives_of_image"]
    groups, ranked = None, len(text)
    if pieces["data"].grouped:
        groups, ranked, to_text = torch.from_numpy(pieces["owner"]), len(image), torch.arange(len(image))[:, None]
    metrics = {"text_to_image": retrieval_metrics(text, image, to_image, image_bias, dsl=dsl),
               "image_to_text": retrieval_metrics(image, text, to_text, text_bias, groups, dsl=dsl)}
    chance = {"text_to_image": retrieval_chance(to_image, len(image)),
              "image_to_text": retrieval_chance(to_text, ranked)}
    for r in (metrics, chance):
        ways = r["text_to_image"], r["image_to_text"]
        r["R-Mean"] = float(np.mean([way[k] for way in ways for k in ("R@1", "R@5", "R@10")]))
        r["R@1-Mean"] = (ways[0]["R@1"] + ways[1]["R@1"]) / 2              # "Avg." of MM-TS's Table 1
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
    images, texts = on_card(device, pieces["image"], text)  # (M, D), (C, D)
    names = {"rows": "image_to_text", "columns": "text_to_image"}
    found = mir_metrics(normalize(images) @ normalize(texts).T, relevancy), mir_chance(relevancy)
    return tuple({names.get(k, k): v for k, v in of.items()} for of in found)


def gap_of(pieces):
    """The modality gap of all images and texts, and embedding_health of each image with its first caption (another
    caption of an image would be among its negatives); and the gap of random unit vectors."""
    image, text = pieces["image"], pieces["text"]  # (M, D), (C, D)
    finite(image=image, text=text)
    owner, first = np.unique(pieces["owner"], return_index=True)
    health = {}
    if len(owner) > 1:
        health = embedding_health(image[owner], text[first], limit=4096)
        health.pop("gap")  # of these pairs
    return ({"modality_gap": modality_gap(image, text), "embeddings": health},
            {"modality_gap": (1 / len(image) + 1 / len(text)) ** 0.5})


# ======================================================= a split =====================================================
def lacks(task, data, towers, train=None, names=False):
    """Why a task cannot be done on these data with this model, in words; "" if it can.

    names: class names serve as captions where there are no others, as in training."""
    model, tokenizer, _ = towers
    if task == "qa" and not hasattr(model, "answers"):
        return "the model answers no questions"
    if task == "qa":
        return answers.lacking(data, not model.answers)
    if task in BY_CLASS and (data.labels is None or not (data.labels >= 0).any()):
        return "the set has no classes"
    if task == "zero-shot" and not data.label_names:
        return "the classes have no names"
    if task in ("knn", "probe") and (train is None or train.streamed or train.label_names != data.label_names):
        return "there are no other training images of the same classes"
    if task in ("retrieval", "gap", "mir") and not (data.has_captions or names):
        return "the set has no captions"
    if task == "mir" and data.sentences is None and (data.column("verb") is None or data.column("noun") is None):
        return "the set has no relevancies (no verb and noun classes)"
    if task not in ("knn", "probe") and not tokenizer:
        return "the model has no text encoder"
    graph = getattr(model, "model", "") == "vgt"
    return answers.untrained(model) if graph or task not in ("knn", "probe") else ""


def measure(towers, data, device, tasks, train=None, few=None, limits=None, knn_features="projected", batch=256,
            workers=0, seen=None, trivial=None):
    """(metrics, chance, pieces for pictures) of one split: tasks that nothing `lacks`; qa alone. Collective.

    Args: towers: (model, tokenizer, transform); train, few: Data of the training images of knn and probe, and of the
        few-shot probe; limits: of head_mid_tail; knn_features: projected (embeddings) or backbone (features before the
        projection); seen: the transform of the tasks by class, if it is another; trivial: function () -> {name: model}
        of those measured beside raw pixels and colours, which chance gets as `trivial`; None: nothing trivial."""
    model, tokenizer, transform = towers
    if "qa" in tasks:
        return answers.evaluate(*towers, data, device, batch, workers)
    encode = functools.partial(encode_images, model, device=device, batch=batch, workers=workers)
    index, image, features, bad = encode(data, transform=transform)
    metrics = {"clips": len(index)} if has_clips(data) else {}
    metrics |= {"images": len(index), "unreadable": len(bad)}
    chance, pieces = {}, {"index": index, "data": data, "image": image}

    def add(found, by_chance):
        metrics.update(found)
        chance.update(by_chance)
    if {"retrieval", "gap", "mir"} & set(tasks):
        pieces = retrieval_pieces(model, tokenizer, data, index, image, device)
        metrics["captions"] = len(pieces["text"])
    if "retrieval" in tasks:
        add(*retrieval_both_ways(pieces))
    if "gap" in tasks:
        add(*gap_of(pieces))
    if "mir" in tasks:
        add(*({"mir": of} for of in mir_of(model, tokenizer, pieces, device)))
    if not set(BY_CLASS) & set(tasks):
        return metrics, chance, pieces
    labels = data.labels[index]
    if (labels < 0).any():
        metrics["without_class"] = int((labels < 0).sum())
    if seen:
        _, image, features, _ = encode(data, transform=seen)
    if "zero-shot" in tasks:
        add(*({"zero-shot": of} for of in zero_shot(model, tokenizer, image, labels, data, device)))
    if not {"knn", "probe"} & set(tasks):
        return metrics, chance, pieces

    def known(some):
        rows, embeddings, of_backbone, _ = encode(some, transform=seen or transform)
        return embeddings, of_backbone, some.labels[rows]
    embeddings, of_backbone, train_labels = known(train)                   # (K, D), (K, width), (K,)
    if "knn" in tasks:
        pair = (embeddings, image) if knn_features == "projected" else (of_backbone, features)
        found, by_chance, pieces["per_class"] = neighbours(pair[0], train_labels, pair[1], labels, limits, device)
        add(found, by_chance)
    if "probe" in tasks:
        add(*probes(of_backbone, train_labels, features, labels, few and known(few)[1:], limits))
        pieces |= {"train_features": of_backbone, "train_labels": train_labels, "features": features, "labels": labels,
                   "names": data.label_names}
    if trivial:
        models = {name: of.to(device) for name, of in trivial().items()}
        chance["trivial"] = trivial_accuracy(train, data, few if "probe" in tasks else None, seen or transform, device,
                                             tasks, models, limits, knn_features == "projected", workers)
    return metrics, chance, pieces


class Evaluator:
    """All evaluation sets of a run: evaluator('val') -> metrics, chance and picture pieces, each by data set.

    Args: sets: {name: {val, test}}; train: for knn and probe; also: function of the pieces -> a method's own metrics;
        few: Data from which the few-shot probe learns. Without a text encoder it does knn and probe
        (temperature_schedules.py), of a model that answers questions qa, else all other tasks that a set supports.
    Collective: every process calls it."""

    def __init__(self, model, tokenizer, transform, sets, train, device, args, also=None, few=None):
        self.towers, self.sets, self.train, self.device = (model, tokenizer, transform), sets, train, device
        self.args, self.also, self.few = args, also, few

    def tasks_of(self, data):
        """{task: "", or why it cannot be done} of one split."""
        model, tokenizer, _ = self.towers
        train = self.train if self.train.name == data.name else None
        usual = ("retrieval", "gap", "mir", "knn") if tokenizer else ("knn", "probe")
        usual += ("zero-shot",) if tokenizer and not data.has_captions else ()         # TeMo, Fig. 7
        tasks = ("qa",) if hasattr(model, "answers") else usual
        return {task: lacks(task, data, self.towers, train, names=True) for task in tasks}

    def check(self):
        """Before training. Raises: UserError if a split supports none of the tasks, or none of its first images can be
        read."""
        for name, data in ((name, data) for name, splits in self.sets.items() for data in splits.values()):
            if all(why := self.tasks_of(data).values()):
                raise UserError(f"--eval-datasets {name}: its {data.split} split: {next(iter(why))}")
            first = range(min(len(data), 100))
            if not any(read_batch(data, self.towers[2], [i])[0] for i in first):
                raise UserError(f"--eval-datasets {name}: none of the first {len(first)} images of its {data.split} "
                                f"split can be read, first {data.key(0)}")

    def __call__(self, split, trivial=None):
        args, found = self.args, {}
        how = {"workers": args.workers}
        for name, splits in self.sets.items():
            if split in splits:
                tasks = [task for task, why in self.tasks_of(splits[split]).items() if not why]
                found[name] = measure(self.towers, splits[split], self.device, tasks, self.train, self.few,
                                      getattr(args, "shot_limits", None), getattr(args, "knn_features", "projected"),
                                      trivial=trivial, **how)
                found[name][0].update(self.also(found[name][2]) if self.also else {})
            elif not self.towers[1]:                                       # TS measures and draws the training images
                rows, _, features, _ = encode_images(self.towers[0], self.train, self.towers[2], self.device, **how)
                found[name] = {}, {}, {"train_features": features, "train_labels": self.train.labels[rows]}
        return tuple({name: of[k] for name, of in found.items()} for k in range(3))


# ======================================================= its table ===================================================
def table(title, metrics, chance):
    """The result as lines of text, one for each group of numbers, each number with its chance level in brackets."""
    by_chance, groups, clips = flatten(chance), {}, "clips" in metrics
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
        beside = {name: of[group]["mean_per_class"] for name, of in chance.get("trivial", {}).items() if group in of}
        if beside:
            said = ", ".join(f"{name} {value:.2f}" for name, value in beside.items())
            lines.append(f"  {'':<24} mean_per_class of {said}")
    few = few_queries(**{k: n for k, n in counts.items() if k in COUNTS[:4]})
    return "\n".join([*lines, few] if few else lines)


def report(summary, folder):
    """The text at the end of a run: one table per evaluation set, its speed, and the run folder."""
    tables = [table(f"\n{name} (test)", metrics, summary["chance"][name]) for name, metrics in summary["test"].items()]
    end = (f"{summary['steps']} steps, {summary['wall_s']:.0f} s, "
           f"{summary['samples_per_s']:.0f} samples/s with evaluations, "
           f"{summary['peak_memory_mb']:.0f} MiB, {summary['bad_samples']} bad samples")
    return "\n".join([*tables, "", end, f"run folder: {folder}"])
