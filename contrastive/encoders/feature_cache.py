"""What a run with frozen encoders (--freeze) reads in place of pixels and tokens: features that are
computed once (data/feature_cache.py)."""

import dataclasses
import functools
import json
from importlib import metadata

from contrastive.data.batches import cached_text_draws
from contrastive.data.feature_cache import (
    NUM_VIEWS, ImageFeatures, cache_folder, hash_of, hash_of_tensors, open_tables)
from contrastive.data.table import ROWS_AT_ONCE
from contrastive.encoders.texts import Tokenizer
from contrastive.core.processes import UserError, to_device

import torch

# features depend on the versions of these libraries
LIBRARIES = ("torch", "torchvision", "timm", "transformers")
TEXTS_AT_ONCE = 64


@dataclasses.dataclass
class FeatureCache:
    """The features of a run's frozen encoders; without such, nothing but its tokenizer."""

    tokenizer: object  # Tokenizer, or CachedTokenizer of a frozen text encoder
    images: ImageFeatures | None = None
    num_texts: int = 0  # texts T~ of an example that are kept; 0 = the text encoder learns


def open_feature_cache(args, run, model, tokenizer, transform, draw_texts=None):  # noqa: PLR0917
    """The FeatureCache of a run, with the features of all its texts. Collective.

    It comes after Run.resume, which may read the weights of the encoders.

    Args:
        run: its data and device.
        model, tokenizer, transform: as build_model returns them.
        draw_texts: function (captions, u) -> two lists of texts, T and T~ of some examples;
            None = T is a caption, and there is no T~.
    Raises: UserError for an encoder of whole clips.
    """
    cache = FeatureCache(tokenizer)
    is_frozen = model.vision.frozen or getattr(model.text, "frozen", False)
    if not is_frozen or args.feature_cache == "none":
        return cache
    advice = "give --feature-cache none, which computes them in each step"
    root = cache_folder(args.feature_cache)
    if model.vision.frozen:
        if model.vision.kind.whole_clips:
            raise UserError(f"--freeze {args.freeze}: the features of {args.image_encoder}, which "
                            f"reads whole clips, are not kept; {advice}")
        cache.images = ImageFeatures(
            root, hash_of_encoder(model.vision), functools.partial(encode_frames, model.vision),
            transform, device=run.device, workers=args.workers)
        model.cached_images = cache.images  # for evaluation
    if model.text.frozen:
        cache.num_texts = NUM_VIEWS
        cache.tokenizer = CachedTokenizer(tokenizer, model.text, root, run.device)
        cache.tokenizer.load_or_encode(run.train.first_captions(), f"{run.train.name} (train)")
        for name, splits in run.evals.items():
            for split, data in splits.items():
                cache.tokenizer.load_or_encode(data.first_captions(), f"{name} ({split})")
        if draw_texts is not None:
            texts = drawn_texts(run.train, draw_texts, cache.num_texts)
            title = f"{run.train.name} (train), {cache.num_texts} draws"
            cache.tokenizer.load_or_encode(texts, title)
    return cache


def hash_of_encoder(encoder):
    """A hash of an encoder, its weights and the libraries that compute its features."""
    versions = {name: metadata.version(name) for name in LIBRARIES}
    return hash_of(name=encoder.name, body=type(encoder.body).__name__, config=encoder.config,
                   weights=hash_of_tensors(encoder.body.state_dict()), versions=versions)


def encode_frames(vision, pixels):
    """Pixels (b, 3, S, S) -> (b, width), or clips (b, T, 3, S, S) -> (b, T, width)."""
    frames = pixels
    if vision.kind.reads == "images":
        frames = pixels.flatten(0, -4)                                     # (b * T, 3, S, S)
        # convolutions on a CPU take half the time
        frames = frames.contiguous(memory_format=torch.channels_last)
    features = vision.frames(frames)                                       # (b * T, width)
    if pixels.ndim == 5:
        return features.unflatten(0, (len(pixels), -1))
    return features


# ============================================== texts =============================================
def drawn_texts(train, draw_texts, num_texts):
    """The texts T and T~ of each caption of a training set in the draws that are kept: a dict.

    Args:
        draw_texts: as in open_feature_cache.
        num_texts: draws.
    """
    texts = {}
    for start in range(0, len(train), ROWS_AT_ONCE):
        rows, choices, captions = [], [], []
        for row in range(start, min(start + ROWS_AT_ONCE, len(train))):
            captions_of_row = train.captions(row)
            for number in range(len(captions_of_row)):
                rows.append(row)
                # of the first number, which chooses a caption
                choices.append((number + 0.5) / len(captions_of_row))
                captions.append(captions_of_row)
        for epoch in range(num_texts):
            u = cached_text_draws(epoch, rows)                               # (B, 32)
            u[:, 0] = choices
            for list_of_texts in draw_texts(captions, u):
                texts.update(dict.fromkeys(list_of_texts))
    return texts


def facts_of_tokenizer(tokenizer):
    """What tokens depend on, of a tokenizer of transformers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.get_vocab()
    facts = json.loads(backend.to_str())
    for name in ("padding", "truncation"):  # those of the last call
        del facts[name]
    return facts


class CachedTokenizer(Tokenizer):
    """Texts -> {features: (B, width)} of a frozen text encoder, in place of a Tokenizer.

    load_or_encode has the features of many texts in files. Any other text is encoded when it is
    asked for, and its features stay in memory.

    Args:
        tokenizer: Tokenizer of the encoder.
        encoder: TextEncoder.
        root: Path of all folders of features.
        device: of the features.
    """

    def __init__(self, tokenizer, encoder, root, device):
        self.uncached = tokenizer
        self.tokenizer = tokenizer.tokenizer
        self.length = tokenizer.length
        self.clean = tokenizer.clean
        self.device = device
        self.encoder = encoder
        self.root = root
        self.places = {}  # {text: (FeatureTable, row)} of texts in files
        self.others = {}  # {text: (width,) features} of all others
        self.hash = hash_of(
            encoder=hash_of_encoder(encoder), pooling=encoder.pooling, length=self.length,
            clean=self.clean, tokenizer=facts_of_tokenizer(self.tokenizer))

    def __call__(self, texts):
        new_texts = []
        for text in dict.fromkeys(texts):
            if text not in self.places and text not in self.others:
                new_texts.append(text)
        if new_texts:
            features = torch.cat(list(self.encode(new_texts)))             # (n, width)
            self.others.update(zip(new_texts, features.cpu()))
        features = []
        for text in texts:
            if text in self.others:
                features.append(self.others[text])
            else:
                table, row = self.places[text]
                features.append(table.row(row))
        return {"features": to_device(torch.stack(features), self.device)}  # (B, width)

    def plain(self):
        """The Tokenizer itself, for class names and prompts: the encoder reads their tokens."""
        return self.uncached.plain()

    def load_or_encode(self, texts, title):
        """Reads the features of these texts from files, in which they are kept. Collective."""
        new_texts = {text for text in texts if text not in self.places}
        if not new_texts:
            return
        # those of a length together, so that there is little padding
        new_texts = sorted(sorted(new_texts), key=len)
        folder = self.root / hash_of(encoder=self.hash, texts=new_texts)
        table, = open_tables(
            [folder], len(new_texts), self.device,
            functools.partial(self.encode_blocks, new_texts), title=f"texts of {title}")
        for row, text in enumerate(new_texts):
            self.places[text] = table, row

    def encode_blocks(self, texts, blocks):
        """Yields the features of texts, as open_tables wants them."""
        for block in blocks:
            for features in self.encode(texts[block.rows.start:block.rows.stop]):
                yield [features]

    @torch.no_grad()
    def encode(self, texts):
        """Yields features (b, width) of texts."""
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            tokens = self.uncached(texts[start:start + TEXTS_AT_ONCE])      # (b, L) each
            tokens = {name: ids.to(self.device) for name, ids in tokens.items()}
            _, features = self.encoder.states(**tokens)                     # (b, width)
            yield features.float()

