"""The cluster of each caption or example, and the size of each cluster, from which MM-TS derives its temperatures.

    clusters = open_clusters(run_folder, args, train, device, kmeans)
    labels, lost = clusters.look_up(keys, texts)      # (B,) numbers into clusters.sizes, largest first; -1 = none

They are made once and kept in the run folder: clusters.safetensors (ids, labels, sizes, centroids) and clusters.json
(settings, sizes, five captions of the largest and the smallest clusters). A resumed run reads them.
"""

import functools
import json
import warnings
from pathlib import Path

from contrastive.data.views import key_hash
from contrastive.encoders.tokenizers import build_tokenizer
from contrastive.encoders.two_tower import EvalTransform, TextEncoder, TwoTower, VisionEncoder
from contrastive.engine.processes import (
    UserError,
    first_line,
    gather_objects,
    on_card,
    on_main,
    read_json,
    write_json,
    write_tensors,
)
from contrastive.evaluation.by_class import recall_by_frequency
from contrastive.evaluation.embed import encode_images
from contrastive.evaluation.metrics import normalize, retrieval_metrics

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

CLASSES = ("label", "verb", "noun", "verb-noun")  # columns of the data, or two of them together
STREAMED = 20_000  # captions of a stream that are clustered; others get the cluster with the nearest centroid
SAMPLE = 1000  # embeddings kept for a picture


class Clusters:
    """The cluster of each training caption or example, read from the files that `make_clusters` wrote.

    A caption is looked up by its text (so that the encoded text and the cluster always agree), an example by its key,
    a caption of a cluster file by both. A caption that is not found gets the nearest centroid's cluster, others get -1.

    Attributes: sizes (K,) largest first; by: 'caption', 'class', 'example' or 'both'; meta, tensors: the two files.
    """

    def __init__(self, folder, device):
        self.device, self.encoder, self.of_split = device, None, {}
        try:
            self.meta = read_json(folder / "clusters.json", {})
            self.tensors = load_file(folder / "clusters.safetensors")
            self.sizes, self.by = self.tensors["sizes"], self.meta["by"]
            self.ids, self.labels = self.tensors["ids"].numpy(), self.tensors["labels"].numpy()  # (M,), ids sorted
        except (OSError, SafetensorError, KeyError, UserError) as error:
            why = first_line(error)
            raise UserError(f"{folder}: its clusters are damaged ({why}); delete clusters.json in it, and they are "
                            "made again") from error

    def look_up(self, keys, texts):
        """Clusters of B captions of the examples with these keys: (B,) long, -1 = none; and how many were not found."""
        wanted = np.array([key_hash(entry(self.by, k, t)) for k, t in zip(keys, texts)], np.int64)  # (B,)
        at = np.searchsorted(self.ids, wanted).clip(max=len(self.ids) - 1)
        labels = np.where(self.ids[at] == wanted, self.labels[at], -1)  # (B,)
        lost = np.flatnonzero(labels < 0)
        if len(lost) and self.by == "caption":
            labels[lost] = self.nearest([texts[i] for i in lost])
        return torch.from_numpy(labels), len(lost)

    def nearest(self, texts):
        """(n,) the number of the centroid that is nearest to each text's embedding."""
        if self.encoder is None:
            self.encoder = SentenceEncoder(self.meta["encoder"], self.device, state=self.meta["state"])
        return torch.cdist(self.encoder(texts), self.tensors["centroids"]).argmin(1).numpy()

    def of_queries(self, pieces):
        """Training cluster of each caption of an evaluation: (C,) long, -1 = none; None if it cannot be known."""
        data = pieces["data"]
        place = data.name, data.split, len(pieces["texts"])
        if place not in self.of_split and self.by == "caption":
            self.of_split[place] = self.look_up([""] * len(pieces["texts"]), pieces["texts"])[0]
        elif place not in self.of_split:
            named = class_names(data, self.meta["source"]) if self.by == "class" else None
            numbers = {name: c for c, name in enumerate(self.meta["names"] or ())}
            rows = pieces["index"][pieces["owner"]]  # (C,)
            self.of_split[place] = torch.tensor([numbers.get(named[i], -1) for i in rows]) if named else None
        return self.of_split[place]


class SentenceEncoder:
    """Unit embeddings of texts, by 'tf-idf' (fitted to `texts`, or restored from `state`) or by a transformers id or
    folder, mean-pooled (CLIP: its own pooling and projection). It needs no other process."""
    WORDS = 1000  # the most frequent words, which tf-idf counts

    def __init__(self, name, device, texts=None, state=None):
        self.name, self.device, self.state = name, device, state or {}
        try:
            if name == "tf-idf":
                self._count_words(texts)
            else:
                self.tokenizer = build_tokenizer(name, 128)
                self.model = TextEncoder(name, 0, pooling="mean").to(device).eval().requires_grad_(False)
        except UserError as error:
            raise UserError(str(error).replace("--text-encoder", "--cluster-encoder", 1)) from error

    def _count_words(self, texts):
        from sklearn.feature_extraction.text import TfidfVectorizer
        options = {"vocabulary": self.state["words"]} if self.state else {"max_features": self.WORDS}
        self.model = TfidfVectorizer(dtype=np.float32, **options)
        if self.state:
            self.model.idf_ = np.array(self.state["idf"], np.float32)
            return
        try:
            self.model.fit(texts)
        except ValueError as error:
            raise UserError(f"--cluster-encoder tf-idf: {first_line(error)}; take a model") from error
        self.state = {"words": self.model.get_feature_names_out().tolist(), "idf": self.model.idf_.tolist()}

    @torch.no_grad()
    def __call__(self, texts, batch=256, bar=False):
        """M texts -> (M, width) float32 on the CPU; clustering them needs as much memory again. bar: show a progress
        bar."""
        from tqdm import tqdm
        out, title = None, f"{Path(self.name).name}: {len(texts):,} texts"
        for i in tqdm(range(0, len(texts), batch), desc=title, disable=not bar):
            some = texts[i:i + batch]
            if self.name == "tf-idf":
                x = torch.from_numpy(self.model.transform(some).toarray())  # (b, words)
            else:
                tokens = {k: v.to(self.device) for k, v in self.tokenizer(some).items()}  # (b, L)
                x = self.model(**tokens).float().cpu()  # (b, width)
            out = torch.empty(len(texts), x.shape[1]) if out is None else out
            out[i:i + batch] = normalize(x)
        return out


# ======================================================= frequent and rare queries =================================
def head_mid_tail(pieces, clusters):
    """Text-to-image retrieval by thirds of the queries, sorted by the size of their training cluster."""
    labels = clusters.of_queries(pieces) if clusters else None  # (C,) -1 = none
    rows = [] if labels is None else (labels >= 0).nonzero().flatten()  # (q,)
    if not len(rows):
        return {}
    text, image = on_card(pieces.get("device"), pieces["text"][rows], pieces["image"])  # (q, D), (M, D)
    ranks = retrieval_metrics(text, image, pieces["positives"][rows], ranks=True)
    found = recall_by_frequency(ranks, clusters.sizes[labels[rows]])
    return {"by_cluster_size": found} if found else {}


# ======================================================= making them =================================================
def k_means(x, k, seed, starts=1, counts=None):
    """K-Means of unit embeddings x (M, D), numpy, from k-means++; above 100,000 in mini-batches.

    Returns: (M,) long, numbers without gaps; fewer than k if points coincide.   counts: (M,) weights, or None."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits
    kind = KMeans if len(x) <= 100_000 else functools.partial(MiniBatchKMeans, batch_size=10_240)
    with threadpool_limits(1), warnings.catch_warnings():  # one thread: the same sums on any machine
        warnings.simplefilter("ignore", ConvergenceWarning)  # for points that coincide: the banner says so
        found = kind(k, n_init=starts, random_state=seed).fit(x, sample_weight=counts).labels_  # (M,)
    return torch.from_numpy(np.unique(found, return_inverse=True)[1])  # (M,) without empty clusters


def check_source(train, source):
    """Before any process group. Raises: UserError if the data do not have what `source` needs."""
    if train.streamed and source not in ("captions", "none"):
        raise UserError(f"--clusters {source}: a stream has only captions; leave out --streaming")
    for column in source.split("-") if source in CLASSES else ():
        if train.column(column) is None:
            has = ", ".join(c for c in ("label", "verb", "noun") if train.column(c) is not None)
            raise UserError(f"--clusters {source}: {train.name} has no {column}; "
                            + (f"it has {has}; " if has else "") + "--clusters captions needs none")


def open_clusters(folder, args, train, device, kmeans):
    """The clusters of a run, made by the main process; a resumed run, whose flags and data must be the same, reads its
    own. None with --clusters none. Collective.

    kmeans: function(embeddings, k=..., counts=...) -> labels, sizes.   Raises: UserError."""
    if args.clusters == "none":
        return None
    path = folder / "clusters.json"
    if not args.resume or not gather_objects(path.is_file())[0]:
        pictures = embed_pictures(args, train, device) if args.clusters == "vision" else None
        on_main(make_clusters, folder, args, train, device, kmeans, pictures)
    return Clusters(folder, device)


def first_rows(train):
    """{key: its first row}: each example once, even if its captions are unfolded into rows."""
    rows = {}
    for i, key in enumerate(train.keys()):
        rows.setdefault(key, i)
    return rows


def make_clusters(folder, args, train, device, kmeans, pictures=None):
    """Makes the clusters and writes both files. pictures: (rows, (M, D) embeddings) for --clusters vision.

    Tensors: ids (M,) sorted, labels (M,), sizes (K,); if there are embeddings, also centroids (K, D), sample (S, D) and
    sample_labels (S,)."""
    source, counts, state, without, embeddings = args.clusters, None, {}, 0, None
    if source == "captions":
        by, (entries, rows, counts) = "caption", distinct_captions(train)
        if len(entries) < args.num_clusters:
            raise UserError(f"--num-clusters {args.num_clusters}: more than the {len(entries):,} different captions of "
                            f"{args.dataset}; lower it")
        encoder = SentenceEncoder(args.cluster_encoder, device, entries)
        embeddings, state = encoder(entries, bar=True), encoder.state  # (M, D)
    elif source == "vision":
        by, (rows, embeddings) = "example", pictures
        entries, without = [train.key(i) for i in rows], len(first_rows(train)) - len(rows)
    elif source in CLASSES:
        by, named, of_key = "class", class_names(train, source), first_rows(train)
        entries = [key for key, i in of_key.items() if named[i]]
        rows = [of_key[key] for key in entries]
        found, without = [named[i] for i in rows], len(of_key) - len(rows)
        if not found:
            raise UserError(f"--clusters {source}: no example of {train.name} has one")
    else:
        by, entries, rows, found, without = read_clusters(source, train)
    tensors = {}
    if embeddings is not None:
        k = args.num_clusters or min(200, max(2, len(embeddings) // 4), len(embeddings))
        found, _ = kmeans(embeddings, k=k, counts=counts)  # (M,)
    labels, sizes, names = largest_first(found, counts)
    if embeddings is not None:
        some = np.random.default_rng(args.seed).permutation(len(labels))[:SAMPLE]
        tensors = {"centroids": centroids(embeddings, labels, counts), "sample": embeddings[some],
                   "sample_labels": labels[some]}
    ids, place = np.unique([key_hash(e) for e in entries], return_index=True)  # (M,), (M,)
    tensors |= {"ids": torch.from_numpy(ids), "labels": labels[torch.from_numpy(place)], "sizes": sizes}
    K, examples = len(sizes), []
    for c in sorted({*range(min(5, K)), K // 2, *range(max(0, K - 5), K)}):
        inside = np.random.default_rng([args.seed, c]).permutation((labels == c).nonzero().flatten().numpy())[:5]
        texts = [words_of(by, entries[j], rows[j], train) for j in inside]
        examples.append({"cluster": c, "size": sizes[c].item(), "captions": texts,
                         "rows": [int(rows[j]) for j in inside]})
    write_tensors(folder / "clusters.safetensors", tensors)
    write_json(folder / "clusters.json", {
        "source": source, "encoder": args.cluster_encoder, "by": by, "without": without, "sizes": sizes.tolist(),
        "names": names if embeddings is None else None, "examples": examples, "state": state})


def entry(by, key, text):
    """The text that identifies a caption or example: its words, its key, or both."""
    return {"caption": text, "both": f"{key}\n{text}"}.get(by, key)


def words_of(by, entry, row, train):
    """The caption that belongs to an entry; for an example, its first caption."""
    if by == "both":
        return entry[len(train.key(row)) + 1:]
    return entry if by == "caption" else train.captions(row)[0]


def distinct_captions(train):
    """Three lists: the distinct captions, the first row of each, and how often each occurs."""
    place, rows, counts = {}, [], []
    if train.streamed:
        pairs = ((-1, text) for text in train.first_captions(STREAMED))
    else:
        pairs = ((i, text) for i in range(len(train)) for text in train.captions(i))
    for i, text in pairs:
        if place.setdefault(text, len(rows)) == len(rows):
            rows.append(i)
            counts.append(0)
        counts[place[text]] += 1
    return list(place), rows, counts


def class_names(data, source):
    """Name of each row's class (of verb-noun both, joined), None for a row without; [] without such a column."""
    def of(column):
        values, names = data.column(column), data.names(column)
        known = [v is not None and v == v and v != -1 for v in values]  # v != v: NaN
        return [(names[int(v)] if names else str(v)) if k else None for v, k in zip(values, known)]
    columns = source.split("-")
    if any(data.column(c) is None for c in columns):
        return []
    return [" ".join(parts) if all(parts) else None for parts in zip(*map(of, columns))]


def read_clusters(path, train):
    """Reads a cluster file, JSON {"KEY": cluster} or {"KEY": [cluster of each caption]}, for the captions of train.

    Returns: by ('example' or 'both'); the lists of entries, rows and clusters; how many have no cluster.
    """
    known = read_json(path)
    if not known or not isinstance(known, dict) or not all(isinstance(v, (int, str, list)) for v in known.values()):
        raise UserError(f'--clusters {path}: expected JSON, {{"KEY": cluster}} or {{"KEY": [cluster of each caption]}}')
    for key, value in known.items():
        several = value if isinstance(value, list) else [value]  # NaN, 1.0 and lists name no cluster
        odd = [c for c in several if not (c is None or isinstance(c, int) or isinstance(c, str) and c.strip())]
        if odd:
            raise UserError(f"--clusters {path}: {json.dumps(odd[0])[:40]} of {key[:100]} is not a cluster; write a "
                            "whole number or a name, and in a list null for a caption without one")
    by, found, without = "both" if any(isinstance(v, list) for v in known.values()) else "example", {}, set()
    for i in range(len(train)):
        key, texts = train.key(i), train.captions(i)
        numbers = range(len(texts)) if train.which is None else [int(train.which[i])]  # unfolded: one caption per row
        for k, text in zip(numbers, texts):
            cluster = known.get(key)
            if isinstance(cluster, list):
                has = len(train.texts[i]["captions"])
                if len(cluster) > has:  # fewer: captions added later (--extra-captions) have no cluster
                    raise UserError(f"--clusters {path}: {len(cluster)} clusters for the {has} captions of {key}; a "
                                    "list has one for each caption in order, without the empty captions")
                cluster = cluster[k] if k < len(cluster) else None
            if cluster is None:
                without.add(entry(by, key, text))
            else:
                found.setdefault(entry(by, key, text), (i, str(cluster)))
    if not found:
        raise UserError(f"--clusters {path}: it has none of the {len(train):,} examples of {train.name}, first "
                        f"{train.key(0)}; its own first is {next(iter(known))}")
    return by, list(found), [i for i, _ in found.values()], [c for _, c in found.values()], len(without)


def embed_pictures(args, train, device):
    """(rows, embeddings (M, D)) of the training images or clips; the processes share the work. Collective."""
    try:
        vision = VisionEncoder(args.cluster_encoder, 0, True, args.image_size)
        transform = EvalTransform(args.image_size, *vision.stats)
        tower = TwoTower(vision, None).to(device)
        rows, embeddings, _, _ = encode_images(tower, train, transform, device, args.eval_batch, args.workers,
                                               list(first_rows(train).values()))
    except (RuntimeError, TypeError, UserError) as error:
        words = first_line(error).replace("--image-encoder", "--cluster-encoder")
        raise UserError(f"--clusters vision: {words}; --cluster-encoder must name an image encoder") from error
    return rows.tolist(), normalize(embeddings)


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
