"""Paraphrases of the captions of a training set, for TeMo's texts T~.

    python -m tools.paraphrase --dataset coco --out coco_paraphrases.jsonl
    python temo.py --dataset coco --paraphrases coco_paraphrases.jsonl

The paper has five per caption, by PEGASUS. The file has one JSON object per line, {"caption": str,
"paraphrases": [str, ...], "by": str}. A stopped call goes on with it, but not with another model.
"""

import json
from pathlib import Path

import common
from contrastive.data import data_options
from contrastive.engine.flags import OneLineErrorParser
from contrastive.core.processes import UserError, clean_exit, join, opening, print_main
from contrastive.core.number_types import int_ge1

import torch
from tqdm import tqdm

NUM_TOKENS = 60  # of a caption and of a paraphrase, at most
NUM_PARAPHRASES = 5  # of each caption


def make_paraphraser(name, device):
    """Function of texts -> a list of NUM_PARAPHRASES texts each, by beam search."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    with opening(f"--model {name} (PEGASUS's tokenizer needs: pip install sentencepiece protobuf)"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForSeq2SeqLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=False)
    model = model.to(device).eval()

    @torch.inference_mode()
    def paraphrase(texts):
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=NUM_TOKENS,
                           return_tensors="pt").to(device)
        tokens.pop("token_type_ids", None)
        ids = model.generate(
            **tokens, num_beams=10, num_return_sequences=NUM_PARAPHRASES,
            max_new_tokens=NUM_TOKENS, no_repeat_ngram_size=2, repetition_penalty=1.2)
        words = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [words[k:k + NUM_PARAPHRASES] for k in range(0, len(words), NUM_PARAPHRASES)]

    return paraphrase


def read_finished(out, model):
    """The captions whose paraphrases a file already has; cuts an incomplete last line.

    Args:
        model: what this call writes as 'by'.
    Raises: UserError if the file is by another model.
    """
    with opening(f"--out {out}"):
        if not out.exists():
            return set()
        lines = out.read_text(encoding="utf8").splitlines(keepends=True)
        complete = [line for line in lines if line.endswith("\n")]  # a kill has cut the last one
        rows = [json.loads(line) for line in complete]
        for row in rows:
            if row["by"] != model:
                raise UserError(f"--out {out}: has paraphrases by {row['by']}, not by {model}; "
                                "name another file")
        if len(complete) < len(lines):
            out.write_text("".join(complete), encoding="utf8")
    return {row["caption"] for row in rows}


def main(argv=None):
    """The command line. Raises: UserError."""
    p = OneLineErrorParser("python -m tools.paraphrase", __doc__.splitlines()[0])
    p.add_argument("--dataset", required=True, help="name, folder, file or hub id, as for temo.py")
    p.add_argument("--out", required=True, metavar="FILE",
                   help="JSON lines to write, or to go on with")
    p.add_argument("--model", default="tuner007/pegasus_paraphrase",
                   help="seq2seq model on the hub or in a folder")
    p.add_argument("--batch", type=int_ge1, default=16, help="captions at a time")
    p.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    for flag in ("--data-dir", "--video-dir", "--image-column", "--caption-column"):
        p.add_argument(flag, default="", help="as in training")
    args = p.parse_args(argv)
    out = Path(args.out)
    model = f"{args.model}, {NUM_TOKENS} tokens"
    finished = read_finished(out, model)
    data = common.load_data(args.dataset, "train", data_options(args))
    captions = dict.fromkeys(data.first_captions())  # each once
    captions = [caption for caption in captions if caption not in finished]
    print_main(f"{len(finished)} captions are in {out}, {len(captions)} to do")

    paraphrase = make_paraphraser(args.model, join(args.cpu))
    starts = range(0, len(captions), args.batch)
    with opening(out), open(out, "a", encoding="utf8") as file:
        for i in tqdm(starts, desc="paraphrases", unit="batch"):
            texts = captions[i:i + args.batch]
            for text, paraphrases in zip(texts, paraphrase(texts), strict=True):
                row = {"caption": text, "paraphrases": paraphrases, "by": model}
                file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    with clean_exit():
        main()
