"""Texts: tokenizers, published or learnt from the captions; TeMo's texts T and T~, a caption and its paraphrase."""

import copy
import math
import re
import shutil
from pathlib import Path

from contrastive.data.views import key_hash, pick
from contrastive.engine.processes import UserError, barrier, opening, rank, say, to_device

import numpy as np
import torch
import torch.nn.functional as F

LOOKED_AT = 20_000  # training examples whose captions are checked for the banner


class Tokenizer:
    """Callable: list of str -> {input_ids, attention_mask} (B, L) long, padded to the longest, at most `length` tokens;
    on a card to a multiple of 8 if `length` allows, since each new length allocates and compiles anew there.

    tokenizer: of transformers, or its id or folder.   clean: captions go through clean_caption first.
    device: of the tensors that it returns."""

    def __init__(self, tokenizer, length, clean=False):
        if isinstance(tokenizer, (str, Path)):
            from transformers import AutoTokenizer
            with opening(tokenizer):
                tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
        self.tokenizer, self.length, self.clean = tokenizer, min(length, tokenizer.model_max_length), clean
        tokenizer.padding_side, self.device = "right", torch.device("cpu")  # encoders pool the first or the end token

    def __call__(self, texts):
        texts = [clean_caption(t) if self.clean else t for t in texts]
        out = self.tokenizer(texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        longest = out["input_ids"].shape[1]
        more = min(self.length, math.ceil(longest / 8) * 8) - longest if self.device.type == "cuda" else 0
        pads = {"input_ids": self.tokenizer.pad_token_id, "attention_mask": 0}
        return {k: to_device(F.pad(out[k], (0, more), value=pad), self.device) for k, pad in pads.items()}

    def cut(self, texts):
        """How many of these texts have more than `length` tokens, of which the rest is cut."""
        texts = [clean_caption(t) if self.clean else t for t in texts]
        found = self.tokenizer(texts, truncation=True, max_length=self.length).encodings
        return sum(bool(encoding.overflowing) for encoding in found)

    def plain(self):
        """The same, for texts that are not captions: the CC3M trainer does not clean class names and prompts."""
        other = copy.copy(self)
        other.clean = False
        return other


def train_wordpiece(captions, vocabulary=4000):
    """A BERT-style WordPiece tokenizer learnt from an iterable of captions (lower case, accents stripped)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    special, captions = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], list(captions)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    letters = sorted(set("".join(map(normalizer.normalize_str, captions))) - {" "})
    pieces = [f"##{c}" for c in letters]  # as special tokens: else the trainer numbers them at random
    learner = Backend(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special + pieces, show_progress=False)
    learner.train_from_iterator(captions, trainer)
    backend = Backend(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))  # the same words; `pieces` are no
    backend.normalizer, backend.pre_tokenizer = learner.normalizer, learner.pre_tokenizer  # special tokens any more
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
                                   sep_token="[SEP]", mask_token="[MASK]")


def clean_caption(text, max_words=30):
    """Caption cleaning of the CC3M trainer: lower case, punctuation off, <person> -> person, at most 30 words."""
    text = re.sub(r"([,.'!?\"()*#:;~])", "", text.lower())
    text = text.replace("-", " ").replace("/", " ").replace("<person>", "person")
    return " ".join(text.split()[:max_words])


def build_tokenizer(name, length, captions=None, folder=None, clean=False, keep=False, start=""):
    """The tokenizer of a text encoder; for 'small' a WordPiece learnt from captions() by the main process.

    keep: a resumed run keeps the one in its folder.   start: weights of another run, whose vocabulary is taken over."""
    if name != "small":
        tokenizer = Tokenizer(name, length, clean)
        if len({*tokenizer.tokenizer(" ".join("abcdefghijklmnopqrstuvwxyz"))["input_ids"]}) <= 3:
            raise UserError(f"{name}: no tokenizer there; each word would be start, unknown, end")
        return tokenizer
    if rank() == 0 and not (keep and (Path(folder) / "tokenizer.json").is_file()):
        theirs = (Path(start) if Path(start).is_dir() else Path(start).parent) / "tokenizer"
        with opening(folder):
            if start and theirs.is_dir():
                shutil.copytree(theirs, folder, dirs_exist_ok=True)
                say(f"--init-from: with the vocabulary of {theirs}, on which its text encoder was trained")
            else:
                texts = map(clean_caption, captions()) if clean else captions()
                train_wordpiece(texts).save_pretrained(str(folder))
    barrier()
    return Tokenizer(folder, length, clean)


def drop_and_swap(text, u, drop=0.1, swap=0.1):
    """Word dropout and one swap of neighbours, from draws u (>= 16,): a poor man's paraphrase. Never an empty text."""
    words = text.split()
    kept = [w for i, w in enumerate(words) if u[2 + i % (len(u) - 2)] >= drop] or words[:1]
    if len(kept) > 1 and u[0] < swap * len(kept):
        i = int(u[1] * (len(kept) - 1))
        kept[i], kept[i + 1] = kept[i + 1], kept[i]
    return " ".join(kept)


def text_pair(captions, u, paraphrases=None, templates=(), second=True, anchor=True):
    """Pick T and its other view T~ for a batch.

    Args: captions: B lists of str; u (B, 32) draws; paraphrases: a Paraphrases or None; templates: formats such as
        "a drawing of {}"; anchor: T is drawn from the caption and its paraphrases, else it is the caption. T~ is a
        paraphrase from the file, else a template around any caption, else another caption, else word dropout and swap.
    Returns: two lists of B str (the second is empty when `second` is False).
    """
    first = pick(captions, u)
    if not second:
        return first, []
    known = paraphrases.get(first) if paraphrases else [[]] * len(first)
    texts, other = [], []
    for text, found, all_captions, r in zip(first, known, captions, u):
        texts.append([text, *found][int(r[2] * (1 + len(found)))] if anchor else text)
        options = found or [t.format(c) for c in all_captions for t in templates]
        options = options or [c for c in all_captions if c != text]
        other.append(options[int(r[1] * len(options))] if options else drop_and_swap(text, r[2:]))
    return texts, other


class Paraphrases:
    """Paraphrases by caption, from a JSON-lines file of {"caption": str, "paraphrases": [str, ...]}, memory-mapped.

    `get(captions)` returns one list per caption ([] if the file has none for it). Memory: 16 bytes per caption."""

    def __init__(self, path):
        import datasets
        with opening(f"--paraphrases {path}"):
            self.table = datasets.load_dataset("json", data_files=str(path), split="train")
            hashes = np.array([key_hash(k) for k in self.table["caption"][:]], dtype=np.int64)
        self.order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[self.order]

    def get(self, captions):
        wanted = np.array([key_hash(c) for c in captions], dtype=np.int64)
        at = np.searchsorted(self.hashes, wanted).clip(max=len(self.hashes) - 1)
        found = self.hashes[at] == wanted
        lists = self.table[self.order[at]]["paraphrases"]
        return [[p for p in texts or () if p] if ok else [] for texts, ok in zip(lists, found)]


def text_words(train, paraphrases, anchor, recipe):
    """The sources of T and T~, for the banner, with a warning if paraphrases are lacking; recipe: its remark."""
    other = "templates around the captions" if train.templates else "another caption, else word dropout and swap"
    if not paraphrases:
        warning = "WARNING: NOT THE PAPER'S T~, paraphrases by PEGASUS (tools/paraphrase.py, --paraphrases FILE); "
        return warning * recipe.startswith("paper") + f"T is the caption, T~ {other}"
    note = f"T is the caption{' or a paraphrase' * anchor}, T~ a paraphrase, of {len(paraphrases.hashes):,} captions"
    some = [] if train.streamed else [*train.first_captions(LOOKED_AT)]
    missing = sum(not p for p in paraphrases.get(some))
    note += f", for one without {other}" * bool(missing or train.streamed)
    return f"WARNING: {note}; {missing:,} of the first {len(some):,} have none" if missing else note
