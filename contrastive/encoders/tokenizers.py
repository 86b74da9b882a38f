"""Texts -> token ids: the published tokenizers, and a WordPiece learnt from the captions for the small encoder."""

import copy
import math
import re
import shutil
from pathlib import Path

from contrastive.engine.processes import UserError, barrier, opening, rank, read_json, say, to_device

import torch
import torch.nn.functional as F


class Tokenizer:
    """Callable: list of str -> {input_ids, attention_mask} (B, L) long, padded to the longest, at most `length` tokens;
    on a card to a multiple of 8 if `length` allows, since each new length allocates and compiles anew there.

    clean: captions go through clean_caption first.   device: of the tensors that it returns."""

    def __init__(self, tokenizer, length, clean=False):
        self.tokenizer, self.length, self.clean = tokenizer, min(length, tokenizer.model_max_length), clean
        tokenizer.padding_side, self.device = "right", torch.device("cpu")  # encoders pool the first or the end token

    def __call__(self, texts):
        texts = [clean_caption(t) if self.clean else t for t in texts]
        out = self.tokenizer(texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        longest = out["input_ids"].shape[1]
        more = min(self.length, math.ceil(longest / 8) * 8) - longest if self.device.type == "cuda" else 0
        pads = {"input_ids": self.tokenizer.pad_token_id, "attention_mask": 0}
        return {k: to_device(F.pad(out[k], (0, more), value=pad), self.device) for k, pad in pads.items()}

    def plain(self):
        """The same, for texts that are not captions: the CC3M trainer does not clean class names and prompts."""
        other = copy.copy(self)
        other.clean = False
        return other

    def save(self, folder):
        self.tokenizer.save_pretrained(str(folder))

    @staticmethod
    def load(folder, length, clean=False):
        from transformers import AutoTokenizer
        with opening(folder):
            return Tokenizer(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False), length, clean)


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

    keep: a resumed run keeps the one in its folder.   start: weights of another run; if its text encoder is small, too,
    its vocabulary is taken over."""
    if name != "small":
        tokenizer = Tokenizer.load(name, length, clean)
        if len({*tokenizer.tokenizer(" ".join("abcdefghijklmnopqrstuvwxyz"))["input_ids"]}) <= 3:
            raise UserError(f"{name}: no tokenizer there; each word would be start, unknown, end")
        return tokenizer
    if rank() == 0 and not (keep and (Path(folder) / "tokenizer.json").is_file()):
        theirs = (Path(start) if Path(start).is_dir() else Path(start).parent) / "tokenizer"
        their_encoder = read_json(theirs.parent / "model.json", {}).get("text_encoder", "small")
        with opening(folder):
            if start and theirs.is_dir() and their_encoder == "small":
                shutil.copytree(theirs, folder, dirs_exist_ok=True)
                say(f"--init-from: with the vocabulary of {theirs}, on which its text encoder was trained")
            else:
                texts = map(clean_caption, captions()) if clean else captions()
                train_wordpiece(texts).save_pretrained(str(folder))
    barrier()
    return Tokenizer.load(folder, length, clean)
