"""Texts: tokenizers, published or learnt from the captions."""

import copy
import math
import re
import shutil
from pathlib import Path

from contrastive.core.processes import UserError, barrier, opening, rank, print_main, to_device

import torch
import torch.nn.functional as F

MAX_LENGTH = 128          # tokens that frozen models read of a text
WORDPIECES = 4000         # most tokens of a vocabulary that is learnt
MAX_WORD = 1000           # letters; Thai sentences have no blanks
GPU_MULTIPLE = 8          # lengths on a GPU: each new length allocates and compiles anew there


# =============================================== tokenizers =======================================
class Tokenizer:
    """Texts -> {input_ids, attention_mask}, (B, L) long each, padded to the longest.

    On a GPU they are padded to a multiple of 8, unless this is more than `length`.

    Args:
        tokenizer: of transformers, or its id or folder.
        length: most tokens of a text; the rest is cut off.
        clean: captions go through clean_caption first.

    Attributes:
        device: of the tensors that it returns.
    """

    def __init__(self, tokenizer, length, clean=False):
        if isinstance(tokenizer, (str, Path)):
            from transformers import AutoTokenizer

            with opening(tokenizer):
                tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
        tokenizer.padding_side = "right"  # encoders pool the first token or the end token
        self.tokenizer = tokenizer
        self.length = min(length, tokenizer.model_max_length)
        self.clean = clean
        self.device = torch.device("cpu")

    def __call__(self, texts):
        if isinstance(texts, str):
            texts = [texts]
        tokens = self.tokenizer(self.clean_texts(texts), padding=True, truncation=True,
                                max_length=self.length, return_tensors="pt")
        longest = tokens["input_ids"].shape[1]
        num_pads = 0
        if self.device.type == "cuda":
            multiple = math.ceil(longest / GPU_MULTIPLE) * GPU_MULTIPLE
            num_pads = min(self.length, multiple) - longest
        ids = F.pad(tokens["input_ids"], (0, num_pads), value=self.tokenizer.pad_token_id)
        mask = F.pad(tokens["attention_mask"], (0, num_pads), value=0)
        return {"input_ids": to_device(ids, self.device),
                "attention_mask": to_device(mask, self.device)}

    def clean_texts(self, texts):
        """The texts as the tokenizer reads them."""
        if not self.clean:
            return list(texts)
        return [clean_caption(text) for text in texts]

    def count_cut(self, texts):
        """How many of these texts have more than `length` tokens, of which the rest is cut off."""
        tokens = self.tokenizer(self.clean_texts(texts), truncation=True, max_length=self.length)
        return sum(len(encoding.overflowing) > 0 for encoding in tokens.encodings)

    def plain(self):
        """A copy that does not clean: for class names and prompts, as in the CC3M trainer."""
        tokenizer = copy.copy(self)
        tokenizer.clean = False
        return tokenizer


def train_wordpiece(captions):
    """A BERT-style WordPiece tokenizer learnt from captions, in lower case. Accents and vowel signs
    stay: without them different words of German, Hindi or Thai are the same."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    captions = list(captions)
    normalizer = normalizers.Sequence([
        normalizers.NFC(), normalizers.BertNormalizer(lowercase=True, strip_accents=False)])
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    letters = set("".join(map(normalizer.normalize_str, captions))) - {" "}

    # The pieces of one letter are special tokens of the trainer, which else numbers them at random.
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    special_tokens += [f"##{letter}" for letter in sorted(letters)]
    learner = Backend(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=WORDPIECES, special_tokens=special_tokens, show_progress=False)
    learner.train_from_iterator(captions, trainer)

    # A tokenizer with the same vocabulary, in which these pieces are ordinary tokens.
    backend = Backend(models.WordPiece(
        learner.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=MAX_WORD))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]")


def clean_caption(text):
    """A caption as the CC3M trainer cleans it: lower case, no punctuation, at most 30 words."""
    text = re.sub(r"([,.'!?\"()*#:;~])", "", text.lower())
    text = text.replace("-", " ").replace("/", " ").replace("<person>", "person")
    return " ".join(text.split()[:30])


def build_tokenizer(name, length, captions=None, folder=None, clean=False, *, keep=False,
                    start=""):
    """The tokenizer of a text encoder; for "small" a WordPiece that the main process learns.

    Args:
        name: "small", or a transformers id or folder.
        length: most tokens of a text.
        captions: function () -> the captions from which a WordPiece is learnt.
        folder: where a learnt tokenizer is saved.
        clean: captions go through clean_caption first.
        keep: a resumed run keeps the tokenizer in its folder.
        start: weights of another run, whose vocabulary is taken over, or "".

    Raises:
        UserError: if there is no tokenizer of that name.
    """
    if name != "small":
        tokenizer = Tokenizer(name, length, clean)
        check_vocabulary(name, tokenizer)
        return tokenizer
    is_ready = keep and (Path(folder) / "tokenizer.json").is_file()
    if rank() == 0 and not is_ready:
        with opening(folder):
            write_wordpiece(captions, folder, clean, start)
    barrier()
    return Tokenizer(folder, length, clean)


def check_vocabulary(name, tokenizer):
    """Raises a UserError for a folder without a vocabulary, for which transformers makes one up."""
    letters = " ".join("abcdefghijklmnopqrstuvwxyz")
    token_ids = set(tokenizer.tokenizer(letters)["input_ids"])
    if len(token_ids) <= 3:
        raise UserError(f"{name}: no tokenizer there; each word would be an unknown token between "
                        "those of the start and the end")


def write_wordpiece(captions, folder, clean, start):
    """Saves the WordPiece of the run that has the weights `start`, or else learns one."""
    run_folder = Path(start)
    if not run_folder.is_dir():
        run_folder = run_folder.parent
    vocabulary = run_folder / "tokenizer"
    if start and vocabulary.is_dir():
        shutil.copytree(vocabulary, folder, dirs_exist_ok=True)
        print_main(f"--init-from: with the vocabulary of {vocabulary}, on which its text encoder "
                   "was trained")
        return
    texts = captions()
    if clean:
        texts = map(clean_caption, texts)
    train_wordpiece(texts).save_pretrained(str(folder))
