"""Clusters of captions, examples or classes, whose sizes give MM-TS its temperatures.

They are made once, and written into clusters.safetensors and clusters.json of the run folder, from
which a resumed run reads them.
"""

import collections
import dataclasses
import functools

from contrastive.core.files import read_json, write_json, write_tensors
from contrastive.core.metrics import normalize, retrieval_ranks
from contrastive.core.processes import UserError, on_main, opening, rank
from contrastive.data.batches import read_batch
from contrastive.data.views import key_hash
from contrastive.encoders.base import TwoTower
from contrastive.encoders.sentences import SentenceEncoder
from contrastive.encoders.towers import VisionEncoder
from contrastive.encoders.transform import EvalTransform
from contrastive.evaluation.by_class import recall_by_frequency
from contrastive.evaluation.embed import encode_images
from contrastive.evaluation.saved_pieces import pack_pictures

import numpy as np
import torch
from safetensors.torch import load_file

CLASSES = ("label", "verb", "noun", "verb-noun")  # columns of the data, or two of them together
NUM_IN_PICTURE = 1000  # embeddings that are kept for a picture


class Clusters:
    """The clusters of a run folder, read from the two files that `make_clusters` wrote.

    Attributes:
        sizes: (K,) largest first.
        kind: 'caption', 'class' or 'example': what is clustered. Captions are looked up by their
            text, the others by their key.
        meta, tensors: contents of the two files.
    """

    def __init__(self, folder, device):
        self.device = device
        self.encoder = None  # made when a caption is new
        self.meta = read_json(folder / "clusters.json")
        with opening(folder / "clusters.safetensors"):
            self.tensors = load_file(folder / "clusters.safetensors")
        self.sizes = self.tensors["sizes"]
        self.kind = self.meta["by"]
        self.ids = self.tensors["ids"].numpy()                             # (M,) sorted
        self.labels = self.tensors["labels"].numpy()                       # (M,)

    def look_up(self, keys, texts):
        """The clusters of B captions, or of the examples with these keys.

        A caption that was not clustered gets the cluster with the nearest centroid.
        Returns: (B,) long, -1 = none; the number of those that were not clustered.
        """
        entries = texts if self.kind == "caption" else keys
        ids = np.array([key_hash(entry) for entry in entries], np.int64)   # (B,)
        index = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)               # (B,)
        labels = np.where(self.ids[index] == ids, self.labels[index], -1)                # (B,)
        missing = np.flatnonzero(labels < 0)
        if len(missing) and self.kind == "caption":
            labels[missing] = self.nearest([texts[i] for i in missing])
        return torch.from_numpy(labels), len(missing)

    def nearest(self, texts):
        """The clusters (n,) with the nearest centroids of n texts."""
        if self.encoder is None:
            self.encoder = SentenceEncoder(self.meta["encoder"], self.device,
                                           state=self.meta["state"])
        distances = torch.cdist(self.encoder(texts), self.tensors["centroids"])          # (n, K)
        return distances.argmin(1).numpy()

    def query_labels(self, pieces):
        """The training clusters of the captions of an evaluation.

        Returns: (C,) long, -1 = none; None if they cannot be known.
        """
        if self.kind == "caption":
            labels, _ = self.look_up(pieces.texts, pieces.texts)
            return labels
        if self.kind != "class":
            return None
        class_of_row = classes_of_rows(pieces.data, self.meta["source"])
        if not class_of_row:
            return None
        numbers = {name: number for number, name in enumerate(self.meta["names"])}
        rows = pieces.index[pieces.owner]                                  # (C,)
        return torch.tensor([numbers.get(class_of_row[row], -1) for row in rows])


def head_mid_tail(pieces, clusters):
    """Text-to-image retrieval by thirds of the queries, sorted by the size of their cluster.

    Args:
        pieces: EvaluationPieces with captions.
        clusters: Clusters of the training data, or None.
    Returns: {"by_cluster_size": {head, mid, tail}}, or {} if the clusters are not known.
    """
    labels = None
    if clusters is not None:
        labels = clusters.query_labels(pieces)                             # (C,) -1 = none
    if labels is None or not (labels >= 0).any():
        return {}
    rows = (labels >= 0).nonzero().flatten()                               # (q,)
    device = pieces.device
    text = pieces.text[rows].to(device)                                    # (q, D)
    image = pieces.image.to(device)                                        # (M, D)
    ranks = retrieval_ranks(text, image, pieces.positives[rows])
    thirds = recall_by_frequency(ranks, clusters.sizes[labels[rows]])
    if not thirds:
        return {}
    return {"by_cluster_size": thirds}


# ---- banner and pictures ----
def temperature_banner(args, limits, clusters):
    """Lines of the banner on the temperatures or margins of a run, and its clusters: {title: text}.

    Args:
        limits: lowest and highest temperature or margin.
        clusters: Clusters, or None.
    """
    low, high = limits
    lines = {}
    if args.learnable_tau:
        lines["temperature"] = f"learnt, {args.tau:g} at first"
    elif args.loss == "max-margin":
        lines["margin"] = f"{low:g} .. {high:g}"
    else:
        lines["temperature"] = f"{low:g} .. {high:g}"
    if clusters is None:
        return lines
    sizes = clusters.sizes                                                 # (K,)
    lines["clusters"] = (f"{len(sizes):,} by {args.clusters}; largest {sizes[0]:,}, smallest "
                         f"{sizes[-1]:,}")
    num_without = clusters.meta["without"]
    if num_without:
        lines["examples"] = (f"{num_without:,} without a cluster are treated as in the smallest "
                             "one")
    return lines


def save_temperatures(run, periods, values_at):
    """Writes the temperature or margin of each cluster over a run, for Figs. 3, 5 and 8 to 11.

    The tensors of temperatures.safetensors are steps (S,) and values (S, K).

    Args:
        periods: of the schedule in the run, each of which gets 20 steps or more, if it has them.
        values_at: function of step=... -> (K,).
    """
    if rank() > 0:
        return
    total_steps = run.steps.total
    num_points = min(total_steps, max(1000, round(20 * periods)))
    steps = torch.linspace(0, total_steps, num_points + 1).round().unique()              # (S,)
    values = torch.stack([values_at(step) for step in steps.tolist()])                   # (S, K)
    write_tensors(run.folder / "temperatures.safetensors", {"steps": steps, "values": values})


# ---- making the clusters ----
def check_clusters(train, args):
    """Checks that the data have the classes of --clusters, and that --cluster-encoder is trained.

    Raises: UserError.
    """
    if args.cluster_encoder == "small":
        raise UserError("--cluster-encoder small: it has no trained weights; give tf-idf, or a "
                        "transformers id or folder")
    if args.clusters in CLASSES:
        for column in args.clusters.split("-"):
            if train.column(column) is None:
                raise UserError(f"--clusters {args.clusters}: {train.name} has no {column}; "
                                "--clusters captions needs none")


def open_clusters(folder, args, train, device, kmeans):
    """The clusters of a run, made by the main process; a resumed run reads its own. Collective.

    Args:
        folder: of the run.
        kmeans: function (embeddings, k=..., counts=...) -> labels, sizes.
    Returns: Clusters, or None with --clusters none.
    """
    if args.clusters == "none":
        return None
    if not args.resume:
        items = None
        if args.clusters == "vision":
            # all processes share this work
            items = picture_items(args, train, device)
        make = functools.partial(make_clusters, folder, args, train, device=device, items=items)
        on_main(make, kmeans)
    return Clusters(folder, device)


@dataclasses.dataclass
class Items:
    """What is clustered: M captions or examples.

    Attributes:
        kind: 'caption', 'class' or 'example', as in Clusters.
        rows: M, the first row of each in the data.
        captions: M captions, or None if examples are clustered.
        names: M names of clusters, or None if K-Means makes them.
        embeddings: (M, D) for K-Means.
        counts: M, how often each occurs in the data; None = once.
        state: what the encoder of the embeddings has learnt from the captions.
    """

    kind: str
    rows: list
    captions: list | None = None
    names: list | None = None
    embeddings: torch.Tensor | None = None
    counts: list | None = None
    state: dict = dataclasses.field(default_factory=dict)


def make_clusters(folder, args, train, kmeans, *, device, items):
    """Makes the clusters and writes clusters.safetensors and clusters.json.

    The tensors are ids (M,) sorted, labels (M,), sizes (K,); of K-Means also centroids (K, D), a
    sample of the embeddings and its labels; for Fig. 6 a few pictures.

    Args:
        items: Items of --clusters vision, else None.
    """
    if args.clusters == "captions":
        items = caption_items(args, train, device)
    elif args.clusters != "vision":
        items = named_items(args.clusters, train)
    item_clusters = items.names                                            # (M,)
    encoder = ""
    if item_clusters is None:
        encoder = args.cluster_encoder
        num_items = len(items.embeddings)
        # --num-clusters 0, the default on own data: a quarter of the items, 2 to 200
        k = args.num_clusters or min(200, max(2, num_items // 4), num_items)
        with opening(f"--clusters {args.clusters}"):  # too few items, or not finite
            item_clusters, _ = kmeans(items.embeddings, k=k, counts=items.counts)
    labels, sizes, names = largest_first(item_clusters, items.counts)

    # the texts or keys by which Clusters.look_up finds the items
    entries = items.captions
    num_without = 0
    if entries is None:
        entries = [train.key(row) for row in items.rows]
        num_without = len(first_rows(train)) - len(entries)
    hashes = [key_hash(entry) for entry in entries]
    ids, index = np.unique(hashes, return_index=True)                      # (M,), (M,)
    tensors = {"ids": torch.from_numpy(ids), "labels": labels[torch.from_numpy(index)],
               "sizes": sizes}
    if items.embeddings is not None:
        sample = np.random.default_rng(args.seed).permutation(len(labels))[:NUM_IN_PICTURE]
        tensors["centroids"] = centroids(items.embeddings, labels, items.counts)
        tensors["sample"] = items.embeddings[sample]
        tensors["sample_labels"] = labels[sample]
    examples = example_captions(items, labels, sizes, train, args.seed)
    tensors.update(example_pictures(examples, train, args.image_size))
    write_tensors(folder / "clusters.safetensors", tensors)
    write_json(folder / "clusters.json", {
        "source": args.clusters, "encoder": encoder, "by": items.kind,
        "without": num_without, "sizes": sizes.tolist(), "names": names,
        "examples": examples, "state": items.state})


def example_captions(items, labels, sizes, train, seed):
    """Five captions of each of the five largest clusters, the middle one and the five smallest
    (Tables 10 to 12).

    Returns: list of {cluster, size, captions, rows}, the largest cluster first.
    """
    K = len(sizes)
    numbers = {*range(min(5, K)), K // 2, *range(max(0, K - 5), K)}
    examples = []
    for number in sorted(numbers):
        members = (labels == number).nonzero().flatten().numpy()
        members = np.random.default_rng([seed, number]).permutation(members)[:5]
        captions = []
        for i in members:
            if items.captions is None:
                captions.append(train.captions(items.rows[i])[0])
            else:
                captions.append(items.captions[i])
        examples.append({"cluster": number, "size": sizes[number].item(), "captions": captions,
                         "rows": [items.rows[i] for i in members]})
    return examples


def example_pictures(examples, train, image_size):
    """Pictures of the largest, a middle and the smallest cluster, three of each (Fig. 6).

    Args: examples: as example_captions returns them; those clusters get 'pictured', the numbers of
        their captions that have a picture.
    Returns: {jpeg, jpeg_ends} as pack_pictures returns them.
    """
    transform = EvalTransform(image_size, (0.0,) * 3, (1.0,) * 3)
    rows = []
    for number in sorted({0, len(examples) // 2, len(examples) - 1}):
        example = examples[number]
        example_rows = example["rows"][:3]
        readable, _, _, _ = read_batch(train, transform, example_rows)
        example["pictured"] = [k for k, row in enumerate(example_rows) if row in readable]
        rows += [row for row in example_rows if row in readable]
    jpeg, jpeg_ends = pack_pictures(train, rows)
    return {"jpeg": jpeg, "jpeg_ends": jpeg_ends}


# ---- what is clustered ----
def caption_items(args, train, device):
    """Items of the distinct captions, with their embeddings."""
    captions, rows, counts = distinct_captions(train)
    encoder = SentenceEncoder(args.cluster_encoder, device, captions)
    embeddings = encoder(captions, bar=True)                               # (M, D)
    return Items("caption", rows, captions, embeddings=embeddings, counts=counts,
                 state=encoder.state)


def distinct_captions(train):
    """The distinct captions, the first row of each, and how often each occurs: three lists."""
    first_row = {}
    count = collections.Counter()
    for row in range(len(train)):
        for caption in train.captions(row):
            first_row.setdefault(caption, row)
            count[caption] += 1
    return list(count), list(first_row.values()), list(count.values())


def picture_items(args, train, device):
    """Items of the training images or clips that can be read, with their embeddings. Collective."""
    # a text encoder here ends in an error of one line
    with opening(f"--cluster-encoder {args.cluster_encoder}"):
        vision = VisionEncoder(args.cluster_encoder, 0, True, args.image_size)
        transform = EvalTransform(args.image_size, *vision.stats)
        tower = TwoTower(vision, None).to(device)
        encoded = encode_images(
            tower, train, transform, device, workers=args.workers, rows=first_rows(train))
    return Items("example", encoded.index.tolist(), embeddings=normalize(encoded.image))


def named_items(source, train):
    """Items of the examples whose cluster is given: a class, or by a file."""
    if source in CLASSES:
        kind = "class"
        name_of_row = classes_of_rows(train, source)
    else:
        kind = "example"
        name_of_row = names_in_file(train, source)
    rows = [row for row in first_rows(train) if name_of_row[row] is not None]
    if not rows:
        raise UserError(f"--clusters {source}: no example of {train.name} has a cluster")
    return Items(kind, rows, names=[name_of_row[row] for row in rows])


def first_rows(train):
    """The first row of each key: each example once, even if its captions are unfolded into rows."""
    keys = list(train.keys())
    _, rows = np.unique(keys, return_index=True)
    return np.sort(rows).tolist()


def names_in_file(data, file):
    """The cluster of each row by a JSON file of {key: cluster}; None for a row without one."""
    with opening(file):
        clusters = {key: str(cluster) for key, cluster in read_json(file).items()}
    return [clusters.get(key) for key in data.keys()]


def classes_of_rows(data, source):
    """The class of each row, of verb-noun both joined; None for a row without one.

    Args:
        source: one of CLASSES.
    Returns: list; None if the data lack a column.
    """
    columns = []
    for column in source.split("-"):
        values, names = data.column(column), data.names(column)
        if values is None:
            return None
        columns.append([name_of_class(value, names) for value in values])
    classes = []
    for parts in zip(*columns):
        name = None
        if None not in parts:
            name = " ".join(parts)
        classes.append(name)
    return classes


def name_of_class(value, names):
    """The name of a class; None for None, NaN and -1.

    Args:
        names: of the classes by number, or None if the values are words.
    """
    if value is None or value != value or value == -1:
        return None
    if names:
        return names[int(value)]
    return str(value)


# ---- K-Means ----
def k_means(x, k, seed, counts=None):
    """K-Means from k-means++, one start; above 100,000 points in mini-batches.

    Args:
        x: (M, D) unit embeddings, numpy.
        counts: (M,) weights, or None.
    Returns: (M,) long, cluster numbers without gaps; fewer than k if points coincide.
    """
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    if len(x) <= 100_000:
        model = KMeans(k, n_init=1, random_state=seed)
    else:
        model = MiniBatchKMeans(k, n_init=1, random_state=seed, batch_size=10_240)
    # one thread, so that sums are the same on any machine
    with threadpool_limits(1):
        model.fit(x, sample_weight=counts)
    _, labels = np.unique(model.labels_, return_inverse=True)              # (M,)
    return torch.from_numpy(labels)


def largest_first(names, counts=None):
    """Renumbers clusters by their size, the largest first.

    Args:
        names: (M,) names or numbers of clusters.
        counts: (M,) weights, or None.
    Returns: labels (M,) long; sizes (K,) long; the names of the K clusters, a list.
    """
    names, labels = np.unique(names, return_inverse=True)                  # (K,), (M,)
    sizes = np.bincount(labels, counts).round().astype(np.int64)           # (K,)
    order = np.argsort(-sizes, kind="stable")                              # (K,)
    new_label = np.argsort(order)                                          # (K,)
    return (torch.from_numpy(new_label[labels]), torch.from_numpy(sizes[order]),
            names[order].tolist())


def centroids(embeddings, labels, counts=None):
    """The mean embedding of each cluster: (M, D), (M,) -> (K, D).

    Args:
        counts: (M,) weights, or None.
    """
    weights = torch.tensor(counts or [1.0] * len(labels), dtype=torch.float32)           # (M,)
    size = torch.bincount(labels, weights)                                 # (K,)
    total = torch.zeros(len(size), embeddings.shape[1])
    total.index_add_(0, labels, embeddings * weights[:, None])             # (K, D)
    return total / size[:, None]
