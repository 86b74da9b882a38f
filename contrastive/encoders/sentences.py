"""Unit embeddings of sentences, by which captions are clustered (MM-TS, and the meta data of MAMA)."""

from pathlib import Path

from contrastive.encoders.models import TextEncoder
from contrastive.encoders.texts import build_tokenizer
from contrastive.engine.processes import opening
from contrastive.evaluation.metrics import normalize

import numpy as np
import torch


class SentenceEncoder:
    """Unit embeddings of texts, by 'tf-idf' (fitted to `texts`, or restored from `state`) or by a transformers id or
    folder, mean-pooled (CLIP: its own pooling and projection). It needs no other process."""

    def __init__(self, name, device, texts=None, state=None):
        self.name, self.device, self.state = name, device, state or {}
        if name != "tf-idf":
            self.tokenizer = build_tokenizer(name, 128)
            self.model = TextEncoder(name, 0, pooling="mean").to(device).eval().requires_grad_(False)
            return
        from sklearn.feature_extraction.text import TfidfVectorizer
        if self.state:
            self.model = TfidfVectorizer(dtype=np.float32, vocabulary=self.state["words"])
            self.model.idf_ = np.array(self.state["idf"], np.float32)
        else:
            with opening("--cluster-encoder tf-idf"):  # texts without a word
                self.model = TfidfVectorizer(dtype=np.float32, max_features=1000).fit(texts)  # the most frequent words
            self.state = {"words": self.model.get_feature_names_out().tolist(), "idf": self.model.idf_.tolist()}

    @torch.no_grad()
    def __call__(self, texts, batch=256, bar=False):
        """M texts -> (M, width) float32 on the CPU; clustering them needs as much memory again. bar: show progress."""
        from tqdm import tqdm
        out, title = [], f"{Path(self.name).name}: {len(texts):,} texts"
        for i in tqdm(range(0, len(texts), batch), desc=title, disable=not bar):
            some = texts[i:i + batch]
            if self.name == "tf-idf":
                x = torch.from_numpy(self.model.transform(some).toarray())  # (b, words)
            else:
                tokens = {k: v.to(self.device) for k, v in self.tokenizer(some).items()}  # (b, L)
                x = self.model(**tokens).float().cpu()  # (b, width)
            out.append(normalize(x))
        return torch.cat(out)
