"""TeMo's texts: T, a caption, and T~, its paraphrase or another text that says the same."""

import glob

from contrastive.core.processes import opening
from contrastive.data.views import key_hash, pick

import numpy as np

BANNER_CAPTIONS = 20_000  # training captions that are looked up for the banner


def drop_and_swap(text, draws, drop=0.1, swap=0.1):
    """The text without some of its words, and with two neighbours swapped: never empty.

    It takes the place of a paraphrase.

    Args:
        draws: (>= 16,) uniform numbers in 0..1.
        drop: probability of leaving out a word.
        swap: probability of a swap, for each word that is left.
    """
    all_words = text.split()
    n = len(draws) - 2
    words = [word for i, word in enumerate(all_words) if draws[2 + i % n] >= drop]
    words = words or all_words[:1]
    if len(words) > 1 and draws[0] < swap * len(words):
        i = int(draws[1] * (len(words) - 1))
        words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


def choose(options, draw):
    """One of the options, by a uniform number in 0..1."""
    return options[int(draw * len(options))]


def text_pair(captions, draws, paraphrases=None, templates=(), *, augment=True,
              paraphrase_anchor=True):
    """Chooses T and its other view T~ for a batch.

    T~ is a paraphrase from the file, else a template around any caption, else another caption, else
    the caption after word dropout and a swap.

    Args:
        captions: B lists of str.
        draws: (B, 32) uniform numbers in 0..1.
        paraphrases: a Paraphrases or None.
        templates: formats such as "a drawing of {}".
        augment: whether T~ is needed.
        paraphrase_anchor: T is one of the caption and its paraphrases; else it is the caption.

    Returns: two lists of B str; that of T~ is empty without `augment`.
    """
    texts = pick(captions, draws)
    if not augment:
        return texts, []
    paraphrase_lists = [[] for _ in texts]
    if paraphrases:
        paraphrase_lists = paraphrases.get(texts)
    texts_aug = []
    for i, text in enumerate(texts):
        options = paraphrase_lists[i]
        texts_aug.append(augmented_text(text, captions[i], options, templates, draws[i]))
        if paraphrase_anchor:
            texts[i] = choose([text, *options], draws[i][2])
    return texts, texts_aug


def augmented_text(text, captions, paraphrases, templates, draws):
    """T~ of one example, from the first source that there is.

    Args:
        text: its caption T.
        captions: all its captions.
        paraphrases: of T, may be empty.
        templates: formats such as "a drawing of {}", may be empty.
        draws: (32,) uniform numbers in 0..1.
    """
    options = list(paraphrases)
    if not options:
        for caption in captions:
            options += [template.format(caption) for template in templates]
    if not options:
        options = [caption for caption in captions if caption != text]
    if not options:
        return drop_and_swap(text, draws[2:])
    return choose(options, draws[1])


def tokenize_pair(tokenizer, texts, texts_aug):
    """The tokens of T and of T~, both padded to the longest text of the two."""
    tokens = tokenizer([*texts, *texts_aug])                               # (2B, L) each
    text_tokens = {name: x[:len(texts)] for name, x in tokens.items()}     # (B, L) each
    aug_tokens = {name: x[len(texts):] for name, x in tokens.items()}      # (B, L) each
    return text_tokens, aug_tokens


class Paraphrases:
    """Paraphrases by caption, from a file that stays on the disk.

    Memory: 16 bytes for each caption.

    Args:
        path: a JSON-lines file of {"caption": str, "paraphrases": [str, ...]}.
    """

    def __init__(self, path):
        import datasets

        with opening(f"--paraphrases {path}: has to be a file of JSON lines, as tools.paraphrase "
                     "writes it"):
            pattern = glob.escape(str(path))
            self.table = datasets.load_dataset("json", data_files=pattern, split="train")
            captions = self.table["caption"][:]
            hashes = np.array([key_hash(caption) for caption in captions], dtype=np.int64)
        self.order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[self.order]

    def get(self, captions):
        """One list of paraphrases for each caption, empty if the file has none for it."""
        hashes = np.array([key_hash(caption) for caption in captions], dtype=np.int64)
        places = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        rows = self.table[self.order[places]]["paraphrases"]
        lists = []
        for row, is_same in zip(rows, self.hashes[places] == hashes):
            paraphrases = []
            if is_same:
                paraphrases = [text for text in row or () if text]
            lists.append(paraphrases)
        return lists


def describe_texts(train, paraphrases, paraphrase_anchor, source):
    """Where T and T~ come from, in words for the banner. They begin with WARNING if the paper has
    paraphrases and the run has none, or if some captions have none.

    Args:
        train: training data.
        paraphrases: a Paraphrases or None.
        paraphrase_anchor: as in text_pair.
        source: of the recipe; it begins with "paper" if the values are the paper's.
    """
    fallback = "another caption, else word dropout and swap"
    if train.templates:
        fallback = "templates around the captions"
    if not paraphrases:
        words = f"T is the caption, T~ {fallback}"
        if source.startswith("paper"):
            words = ("WARNING: NOT THE PAPER'S T~, paraphrases by PEGASUS (tools/paraphrase.py, "
                     f"--paraphrases FILE); {words}")
        return words

    first_captions = list(train.first_captions(BANNER_CAPTIONS))
    num_missing = paraphrases.get(first_captions).count([])
    words = "T is the caption"
    if paraphrase_anchor:
        words += " or a paraphrase"
    words += f", T~ a paraphrase, of {len(paraphrases.hashes):,} captions"
    if num_missing:
        words += f", for one without {fallback}"
        words = (f"WARNING: {words}; {num_missing:,} of the first {len(first_captions):,} have "
                 "none")
    return words
