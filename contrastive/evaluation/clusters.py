"""The cluster of each caption or example, and the size of each cluster, from which MM-TS derives its temperatures.

They are made once, into clusters.safetensors and clusters.json of the run folder, where a resumed run reads them.
"""

import collections
import functools

from contrastive.data.views import key_hash
from contrastive.encoders.base import TwoTower
from contrastive.encoders.models import EvalTransform, VisionEncoder
from contrastive.encoders.sentences import SentenceEncoder
from contrastive.engine.processes import UserError, on_main, opening, read_json, say, write_json, write_tensors
from contrastive.evaluation.by_class import recall_by_frequency
from contrastive.evaluation.embed import encode_images
from contrastive.evaluation.metrics import normalize, retrieval_metrics

import numpy as np
import torch
from safetensors.torch import load_file

CLASSES = ("label", "verb", "noun", "verb-noun")  # columns of the data, or two of them together
STREAMED = 20_000  # captions of a stream that are clustered; others get the cluster with the nearest centroid


class Clusters:
    """What `make_clusters` wrote: a caption's cluster is found by its text, as it is encoded, an example's by key.

    Attributes: sizes (K,) largest first; by: 'caption', 'class' or 'example'; meta, tensors: the two files."""

    def __init__(self, folder, device):
        self.device, self.encoder = device, None
        self.meta = read_json(folder / "clusters.json")
        with opening(folder / "clusters.safetensors"):
            self.tensors = load_file(folder / "clusters.safetensors")
        self.sizes, self.by = self.tensors["sizes"], self.meta["by"]
        self.ids, self.labels = self.tensors["ids"].numpy(), self.tensors["labels"].numpy()  # (M,), ids sorted

    def look_up(self, keys, texts):
        """Clusters of B captions of the examples with these keys: (B,) long, -1 = none; and how many were not found."""
        entries = texts if self.by == "caption" else keys
        wanted = np.array([key_hash(e) for e in entries], np.int64)  # (B,)
        at = np.searchsorted(self.ids, wanted).clip(max=len(self.ids) - 1)
        labels = np.where(self.ids[at] == wanted, self.labels[at], -1)  # (B,)
        lost = np.flatnonzero(labels < 0)
        if len(lost) and self.by == "caption":  # the nearest centroid's
            self.encoder = self.encoder or SentenceEncoder(self.meta["encoder"], self.device, state=self.meta["state"])
            embeddings = self.encoder([texts[i] for i in lost])  # (n, width)
            labels[lost] = torch.cdist(embeddings, self.tensors["centroids"]).argmin(1).numpy()
        return torch.from_numpy(labels), len(lost)

    def of_queries(self, pieces):
        """Training cluster of each caption of an evaluation: (C,) long, -1 = none; None if it cannot be known."""
        if self.by == "caption":
            return self.look_up(pieces["texts"], pieces["texts"])[0]
        named = names_of(pieces["data"], self.meta["source"]) if self.by == "class" else None
        numbers = {name: c for c, name in enumerate(self.meta["names"])}
        return torch.tensor([numbers.get(named[i], -1) for i in pieces["index"][pieces["owner"]]]) if named else None


def head_mid_tail(pieces, clusters):
    """Text-to-image retrieval by thirds of the queries, sorted by the size of their training cluster."""
    labels = clusters.of_queries(pieces) if clusters else None  # (C,) -1 = none
    rows = [] if labels is None else (labels >= 0).nonzero().flatten()  # (q,)
    if not len(rows):
        return {}
    text, image = (x.to(pieces.get("device")) for x in (pieces["text"][rows], pieces["image"]))  # (q, D), (M, D)
    ranks = retrieval_metrics(text, image, pieces["positives"][rows], ranks=True)
    found = recall_by_frequency(ranks, clusters.sizes[labels[rows]])
    return {"by_cluster_size": found} if found else {}


def k_means(x, k, seed, counts=None):
    """K-Means of unit embeddings x (M, D), numpy, from k-means++; above 100,000 in mini-batches.

    Returns: (M,) long, numbers without gaps; fewer than k if points coincide.   counts: (M,) weights, or None."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from threadpoolctl import threadpool_limits
    kind = KMeans if len(x) <= 100_000 else functools.partial(MiniBatchKMeans, batch_size=10_240)
    with threadpool_limits(1):  # one thread: the same sums on any machine
        found = kind(k, n_init=1, random_state=seed).fit(x, sample_weight=counts).labels_  # (M,)
    return torch.from_numpy(np.unique(found, return_inverse=True)[1])  # (M,) without empty clusters


def check_source(train, source):
    """Before any process group. Raises: UserError if the data do not have what `source` needs."""
    if train.streamed and source not in ("captions", "none"):
        raise UserError(f"--clusters {source}: a stream has only captions; leave out --streaming")
    for column in source.split("-") if source in CLASSES else ():
        if train.column(column) is None:
            raise UserError(f"--clusters {source}: {train.name} has no {column}; --clusters captions needs none")


def open_clusters(folder, args, train, device, kmeans):
    """The clusters of a run, made by the main process while the others wait; a resumed run reads its own. None with
    --clusters none. kmeans: function(embeddings, k=..., counts=...) -> labels, sizes. Collective."""
    if args.clusters == "none":
        return None
    if not args.resume:
        pictures = embed_pictures(args, train, device) if args.clusters == "vision" else None
        on_main(make_clusters, folder, args, train, device, kmeans, pictures)
    return Clusters(folder, device)


def make_clusters(folder, args, train, device, kmeans, pictures=None):
    """Makes the clusters and writes both files. pictures: (rows, (M, D) embeddings) for --clusters vision.

    Tensors: ids (M,) sorted, labels (M,), sizes (K,); of K-Means also centroids (K, D), a sample and its labels."""
    source, counts, state, embeddings, first = args.clusters, None, {}, None, None
    if source == "captions":
        by, (entries, rows, counts) = "caption", distinct_captions(train)
        encoder = SentenceEncoder(args.cluster_encoder, device, entries)
        embeddings, state = encoder(entries, bar=True), encoder.state  # (M, D)
    elif source == "vision":
        by, first, (rows, embeddings) = "example", first_rows(train), pictures
    else:
        by, first, named = "class" if source in CLASSES else "example", first_rows(train), names_of(train, source)
        rows = [i for i in first if named[i] is not None]
        found = [named[i] for i in rows]
        if not found:
            raise UserError(f"--clusters {source}: no example of {train.name} has one")
    entries = [train.key(i) for i in rows] if first else entries
    if embeddings is not None:
        k = args.num_clusters or min(200, max(2, len(embeddings) // 4), len(embeddings))
        with opening(f"--clusters {source}"):  # too few of them, or not finite
            found, _ = kmeans(embeddings, k=k, counts=counts)  # (M,)
    labels, sizes, names = largest_first(found, counts)
    ids, place = np.unique([key_hash(e) for e in entries], return_index=True)  # (M,), (M,)
    tensors = {"ids": torch.from_numpy(ids), "labels": labels[torch.from_numpy(place)], "sizes": sizes}
    if embeddings is not None:
        some = np.random.default_rng(args.seed).permutation(len(labels))[:1000]  # for a picture
        tensors |= {"centroids": centroids(embeddings, labels, counts), "sample": embeddings[some],
                    "sample_labels": labels[some]}
    K, examples = len(sizes), []
    for c in sorted({*range(min(5, K)), K // 2, *range(max(0, K - 5), K)}):  # Tables 10 to 12, Fig. 6
        inside = np.random.default_rng([args.seed, c]).permutation((labels == c).nonzero().flatten().numpy())[:5]
        texts = [entries[j] if by == "caption" else train.captions(rows[j])[0] for j in inside]
        examples.append({"cluster": c, "size": sizes[c].item(), "captions": texts, "rows": [rows[j] for j in inside]})
    write_tensors(folder / "clusters.safetensors", tensors)
    write_json(folder / "clusters.json", {
        "source": source, "encoder": args.cluster_encoder, "by": by, "without": len(first or rows) - len(rows),
        "sizes": sizes.tolist(), "names": names, "examples": examples, "state": state})


def first_rows(train):
    """The first row of each key: each example once, even if its captions are unfolded into rows."""
    return np.sort(np.unique([*train.keys()], return_index=True)[1]).tolist()


def distinct_captions(train):
    """Three lists: the distinct captions, the first row of each, and how often each occurs."""
    if train.streamed:
        pairs = [(-1, text) for text in train.first_captions(STREAMED)]
        say(f"clusters: of {len(pairs):,} captions of the stream's start; another one gets the nearest centroid's")
    else:
        pairs = [(i, text) for i in range(len(train)) for text in train.captions(i)]
    counts = collections.Counter(text for _, text in pairs)
    first = {text: i for i, text in reversed(pairs)}
    return [*counts], [first[text] for text in counts], [*counts.values()]


def names_of(data, source):
    """Cluster of each row, None for a row without: its class (of verb-noun both, joined), or what a file says, JSON
    {"KEY": cluster}; [] without such a column."""
    if source not in CLASSES:
        with opening(source):
            known = {key: str(cluster) for key, cluster in read_json(source).items()}
        return [known.get(key) for key in data.keys()]
    columns = [(data.column(c), data.names(c)) for c in source.split("-")]
    if any(values is None for values, _ in columns):
        return []
    def name(v, names):
        return None if v is None or v != v or v == -1 else names[int(v)] if names else str(v)  # v != v: NaN
    rows = zip(*([name(v, names) for v in values] for values, names in columns))
    return [" ".join(parts) if all(parts) else None for parts in rows]


def embed_pictures(args, train, device):
    """(rows, embeddings (M, D)) of the training images or clips; the processes share the work. Collective."""
    with opening(f"--cluster-encoder {args.cluster_encoder}"):  # a model of texts, say
        vision = VisionEncoder(args.cluster_encoder, 0, True, args.image_size)
        transform, tower = EvalTransform(args.image_size, *vision.stats), TwoTower(vision, None).to(device)
        found = encode_images(tower, train, transform, device, workers=args.workers, rows=first_rows(train))
    return found[0].tolist(), normalize(found[1])


def largest_first(found, counts=None):
    """Renumbers clusters by size: found (M,), numbers or names -> labels (M,), sizes (K,), old names (list of K)."""
    names, labels = np.unique(found, return_inverse=True)
    sizes = np.bincount(labels, counts).round().astype(np.int64)  # (K,)
    order = np.argsort(-sizes, kind="stable")
    return torch.from_numpy(np.argsort(order)[labels]), torch.from_numpy(sizes[order]), names[order].tolist()


def centroids(embeddings, labels, counts=None):
    """Mean of the unit embeddings of each cluster: (M, D), (M,) -> (K, D)."""
    weight = torch.ones(len(labels)) if counts is None else torch.tensor(counts, dtype=torch.float32)  # (M,)
    total = torch.zeros(int(labels.max()) + 1, embeddings.shape[1])  # (K, D)
    total.index_add_(0, labels, embeddings * weight[:, None])
    return total / torch.zeros(len(total)).index_add_(0, labels, weight)[:, None]
