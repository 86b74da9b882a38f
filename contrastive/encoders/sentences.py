"""Unit embeddings of sentences, by which captions are clustered (MM-TS, and the meta-data of MAMA).
"""

from pathlib import Path

from contrastive.core.metrics import normalize
from contrastive.core.processes import opening
from contrastive.encoders.texts import MAX_LENGTH, build_tokenizer
from contrastive.encoders.towers import TextEncoder

import numpy as np
import torch
from tqdm import tqdm

NUM_WORDS = 1000  # tf-idf has the most frequent words alone


class SentenceEncoder:
    """Unit embeddings of texts. It needs no other process.

    Args:
        name: "tf-idf", or a transformers id or folder. A transformers model is mean-pooled, except
            a CLIP, which has its own pooling and projection.
        device: of the transformers model.
        texts: from which tf-idf learns its words.
        state: of a tf-idf that has learnt them before, in place of `texts`.
    """

    def __init__(self, name, device, texts=None, state=None):
        self.name = name
        self.device = device
        self.state = state or {}
        if name == "tf-idf":
            self.fit_words(texts)
        else:
            self.tokenizer = build_tokenizer(name, MAX_LENGTH)
            self.model = TextEncoder(name, 0, pooling="mean").to(device).eval()
            self.model.requires_grad_(False)

    def fit_words(self, texts):
        """Restores tf-idf from its state, or fits it to the texts."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        if self.state:
            self.model = TfidfVectorizer(dtype=np.float32, vocabulary=self.state["words"])
            self.model.idf_ = np.array(self.state["idf"], np.float32)
            return
        with opening("--cluster-encoder tf-idf"):  # texts without a word
            self.model = TfidfVectorizer(dtype=np.float32, max_features=NUM_WORDS).fit(texts)
        self.state = {"words": self.model.get_feature_names_out().tolist(),
                      "idf": self.model.idf_.tolist()}

    @torch.no_grad()
    def __call__(self, texts, batch=256, bar=False):
        """M texts -> (M, width) float32 on the CPU; clustering them needs as much memory again.

        Args:
            batch: number of texts at a time.
            bar: show a progress bar.
        """
        embeddings = []
        title = f"{Path(self.name).name}: {len(texts):,} texts"
        for i in tqdm(range(0, len(texts), batch), desc=title, disable=not bar):
            embeddings.append(normalize(self.embed(texts[i:i + batch])))
        return torch.cat(embeddings)

    def embed(self, texts):
        """b texts -> (b, width), not normalised."""
        if self.name == "tf-idf":
            return torch.from_numpy(self.model.transform(texts).toarray())  # (b, words)
        tokens = self.tokenizer(texts)
        tokens = {name: ids.to(self.device) for name, ids in tokens.items()}
        return self.model(**tokens).float().cpu()
