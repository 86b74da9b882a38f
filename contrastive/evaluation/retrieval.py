"""Evaluation of a data set by its captions: embeddings of all images and texts, exact ranks both ways, and the table.

Scripts that train on captions use its Evaluator, and eval.py uses its functions. by_class.py evaluates by class, mir.py
by relevancy, answers.py answers to questions; metrics.py has the pure metrics.
"""

import math

from contrastive.data.table import has_clips
from contrastive.engine.processes import UserError, lost_another, on_card, say, with_place
from contrastive.evaluation.by_class import nearest
from contrastive.evaluation.embed import encode_images, encode_texts, few_queries, read_batch, say_unreadable, together
from contrastive.evaluation.metrics import modality_gap, retrieval_chance, retrieval_metrics
from contrastive.evaluation.mir import mir_of, table_lines

import numpy as np
import torch


# ======================================================= evaluation ==================================================
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
    """({text_to_image, image_to_text, R-Mean}, the same for chance). R-Mean: R@1/5/10 both ways (TeMo, Table 4).

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
        recalls = [r[way][k] for way in ("text_to_image", "image_to_text") for k in ("R@1", "R@5", "R@10")]
        r["R-Mean"] = float(np.mean(recalls))
    return metrics, chance


def evaluate(model, tokenizer, transform, data, device, train=None, batch=256, workers=0, knn_features="projected"):
    """Retrieval both ways and modality gap; multi-instance retrieval if there are relevancies; kNN@1 if there are
    labels and a training set, of the embeddings ('projected') or the features before the projection ('backbone').

    Returns: metrics, the same keys for chance, and the pieces from which pictures are drawn.
    """
    index, image, features, bad = encode_images(model, data, transform, device, batch, workers)
    say_unreadable(data, bad)
    pieces = retrieval_pieces(model, tokenizer, data, index, image, device)
    metrics, chance = together(retrieval_both_ways, pieces)
    metrics["modality_gap"] = modality_gap(image, pieces["text"])
    chance["modality_gap"] = math.sqrt(1 / len(image) + 1 / len(pieces["text"]))
    found, by_chance = mir_of(model, tokenizer, pieces, device)
    if found:
        metrics["mir"], chance["mir"] = found, by_chance
    labelled = train is not None and train.labels is not None and data.labels is not None
    if labelled and train.label_names == data.label_names:
        rows, projected, known, _ = encode_images(model, train, transform, device, batch, workers)
        known, asked = (projected, image) if knn_features == "projected" else (known, features)    # (K, D), (M, D)
        metrics["knn@1"], chance["knn@1"] = together(nearest, known, train.labels[rows], asked, data.labels[index],
                                                     device)
    counts = {"images": len(image), "captions": len(pieces["text"]), "unreadable": len(bad)}
    if has_clips(data):
        counts["clips"] = len(image)
    return metrics | counts, chance, pieces


SHOWN = ("text_to_image", "image_to_text", "R-Mean", "mir", "knn@1", "modality_gap", "images", "captions", "unreadable",
         "clips")  # the numbers that have a line of their own in metrics_table


def metrics_table(title, metrics, chance):
    """The result as lines of text, each number with its chance level, then a method's own numbers."""
    keys, it = ["R@1", "R@5", "R@10", "MdR"], "video" if "clips" in metrics else "image"
    number = f"{metrics['clips']} clips" if "clips" in metrics else f"{metrics['images']} images"
    lines = [f"{title}: {number}, {metrics['captions']} captions",
             f"{'':<22}" + "".join(f"{k:>8} (chance)" for k in keys)]
    ways = (("text_to_image", f"text -> {it}"), ("image_to_text", f"{it} -> text"))
    for name, label in ways:
        cells = [f"{metrics[name][k]:8.1f} ({chance[name][k]:6.1f})" for k in keys]
        lines.append(f"{label:<22}" + "".join(cells))
    first = (metrics["text_to_image"]["R@1"] + metrics["image_to_text"]["R@1"]) / 2
    lines.append(f"{'R-Mean':<22}{metrics['R-Mean']:8.1f} ({chance['R-Mean']:6.1f})  of R@1/5/10 both ways; "
                 f"of both R@1 {first:.1f}")                               # the second: "Avg." of MM-TS's Table 1
    if "mir" in metrics:
        lines += table_lines(metrics["mir"], chance["mir"], ways)
    if "knn@1" in metrics:
        m, c = metrics["knn@1"], chance["knn@1"]
        lines.append(f"{f'kNN@1 ({it})':<22}{m['top1']:8.1f} ({c['top1']:6.1f})  mean per class "
                     f"{m['mean_per_class']:.1f} ({c['mean_per_class']:.1f})")
    gap, random_gap = metrics["modality_gap"], chance["modality_gap"]
    lines.append(f"{'modality gap':<22}{gap:8.3f} ({random_gap:6.3f})  random unit vectors")
    for name in (k for k in metrics if k not in SHOWN):  # for deeper dicts the method has its own table
        numbers = metrics[name] if isinstance(metrics[name], dict) else {"": metrics[name]}
        if numbers and all(isinstance(x, (int, float)) for x in numbers.values()):
            lines.append(f"{name:<22}" + " ".join(f"{k:>8} {x:.3f}" for k, x in numbers.items()))
    lines.append(few_queries(**{"texts": metrics["captions"], f"{it}s": metrics["images"]}))
    return "\n".join(line for line in lines if line)


class Evaluator:
    """All evaluation sets of a run: evaluator('val') -> metrics, chance and picture pieces, each by data set.

    also: function of the pieces -> a method's own metrics. A set that fails is reported in .errors, and the others are
    still evaluated. Collective: every process calls it."""

    def __init__(self, model, tokenizer, transform, sets, train, device, args, also=None):
        self.model, self.tokenizer, self.transform, self.sets, self.device = model, tokenizer, transform, sets, device
        self.train, self.args, self.also, self.errors = train, args, also, {}

    def check(self):
        """Checks every split before training. Raises: UserError if one has no readable image or no caption among its
        first."""
        for name, splits in self.sets.items():
            for split, data in splits.items():
                first = range(min(len(data), 100))
                if all(read_batch(data, self.transform, [i])[2] for i in first):
                    why = read_batch(data, self.transform, [0])[2][0]
                    raise UserError(f"--eval-datasets {name}: none of the first {len(first)} images of its {split} "
                                    f"split can be read, first {data.key(0)}: {why}")
                if not any(data.captions(i) for i in first):
                    raise UserError(f"--eval-datasets {name}: its {split} split has no captions")

    def __call__(self, split):
        metrics, chance, pieces = {}, {}, {}
        for name, splits in self.sets.items():
            if split not in splits:
                continue
            train = self.train if self.train.name == name and not self.train.streamed else None
            try:
                found, by_chance, piece = self.measure(splits[split], train)
                found |= together(self.also, piece) if self.also else {}
                metrics[name], chance[name], pieces[name] = found, by_chance, piece
            except (UserError, ValueError, RuntimeError, OSError) as error:
                if lost_another(error):
                    raise
                self.errors[f"{name}/{split}"] = with_place(error)
                say(f"evaluation of {name} ({split}) failed and is left out: {with_place(error)}")
        return metrics, chance, pieces

    def measure(self, data, train):
        """metrics, chance and pieces of one split."""
        towers = self.model, self.tokenizer, self.transform
        how = {"workers": self.args.workers, "knn_features": self.args.knn_features}
        return evaluate(*towers, data, self.device, train, **how)


def report(summary, folder, table=None):
    """The text at the end of a run: one table per evaluation set, its speed, and the run folder."""
    table = table or metrics_table
    tables = [table(f"\n{name} (test)", metrics, summary["chance"][name]) for name, metrics in summary["test"].items()]
    errors = [f"left out: {k}: {v}" for k, v in summary["errors"].items()]
    end = (f"{summary['steps']} steps, {summary['wall_s']:.0f} s, "
           f"{summary['samples_per_s']:.0f} samples/s with evaluations, "
           f"{summary['peak_memory_mb']:.0f} MiB, {summary['bad_samples']} bad samples")
    return "\n".join([*tables, *errors, "", end, f"run folder: {folder}"])
