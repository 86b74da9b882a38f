"""Texts -> token ids: the published tokenizers, and a WordPiece learnt from the captions for the small encoder."""

import copy
import re
import shutil
from pathlib import Path

from contrastive.engine.processes import (
    UserError,
    barrier,
    first_line,
    hub_reason,
    opening,
    rank,
    read_json,
    say,
    to_device,
)

import torch


class Tokenizer:
    """Callable: list of str -> {input_ids, attention_mask} (B, L) long, padded to the longest, at most `length` tokens.

    clean: captions go through clean_caption first.   device: of the tensors that it returns."""
    LETTERS = 100  # letters per token kept of a text, which is cut there: a megabyte would take a second to split

    def __init__(self, tokenizer, length, clean=False):
        self.tokenizer, self.length, self.clean = tokenizer, min(length, tokenizer.model_max_length), clean
        self.device = torch.device("cpu")

    def __call__(self, texts):
        texts = [t[:self.LETTERS * self.length] for t in texts]
        texts = [clean_caption(t) for t in texts] if self.clean else texts
        out = self.tokenizer(texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        return {k: to_device(out[k], self.device) for k in ("input_ids", "attention_mask")}

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
        try:
            return Tokenizer(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False), length, clean)
        except Exception as error:  # the library in Rust raises plain ones
            raise UserError(f"{folder}: it holds no complete tokenizer ({first_line(error)})") from error


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
        from transformers import AutoTokenizer
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"--text-encoder {name}: {hub_reason(error)}") from error
        if len({*tokenizer(" ".join("abcdefghijklmnopqrstuvwxyz"))["input_ids"]}) <= 3:  # start, unknown, end
            raise UserError(f"--text-encoder {name}: no tokenizer's vocabulary is there, all words would be unknown; "
                            "save the tokenizer beside the model")
        return Tokenizer(tokenizer, length, clean)
    if rank() == 0 and not (keep and (Path(folder) / "tokenizer.json").is_file()):
        theirs = (Path(start) if Path(start).is_dir() else Path(start).parent) / "tokenizer"
        texts = (c[:Tokenizer.LETTERS * length] for c in captions())
        with opening(folder):
            their_encoder = read_json(theirs.parent / "model.json", {}).get("text_encoder", "small")
            if start and theirs.is_dir() and their_encoder == "small":
                shutil.copytree(theirs, folder, dirs_exist_ok=True)
                say(f"--init-from: with the vocabulary of {theirs}, on which its text encoder was trained")
            else:
                train_wordpiece(map(clean_caption, texts) if clean else texts).save_pretrained(str(folder))
    barrier()
    return Tokenizer.load(folder, length, clean)
