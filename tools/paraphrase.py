"""Paraphrases of the captions of a training set, for TeMo's texts T~ (paper: five per caption, by PEGASUS).

    python -m tools.paraphrase --dataset coco --out coco_paraphrases.jsonl
    python temo.py --dataset coco --paraphrases coco_paraphrases.jsonl

The file has one JSON object per line, {"caption": str, "paraphrases": [str, ...], "by": str}. A stopped call goes on
with it, but not with another model or number.
"""

import json
from importlib.metadata import distributions
from pathlib import Path

import common
from contrastive.data import data_options
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import UserError, clean_exit, first_line, hub_reason, opening, say
from contrastive.engine.ranges import count

MODEL = "tuner007/pegasus_paraphrase"


def write_paraphrases(captions, path, model=MODEL, per_caption=5, batch=16, device="cpu", max_tokens=60):
    """Writes paraphrases of each distinct caption as JSON lines and goes on where an earlier call stopped.

    Args: captions: iterable of str; model: seq2seq model on the hub or in a folder; per_caption: paraphrases of each;
        batch: captions at a time; max_tokens: limit for a caption and for a paraphrase.
    Raises: UserError if the model or its tokenizer's packages are missing, or the file cannot be read or written.
    """
    path = Path(path)
    by = f"{model}, {max_tokens} tokens"
    done = _finished(path, by, per_caption)
    todo = [c for c in dict.fromkeys(captions) if c not in done]
    say(f"{len(done)} captions are in {path}, {len(todo)} to do")
    if not todo:
        return
    answers = _paraphraser(model, per_caption, device, max_tokens)
    from tqdm import tqdm
    with opening(path), open(path, "a", encoding="utf8") as f:
        for i in tqdm(range(0, len(todo), batch), desc="paraphrases", unit="batch"):
            texts = todo[i:i + batch]
            for text, lines in zip(texts, answers(texts), strict=True):
                f.write(json.dumps({"caption": text, "paraphrases": lines, "by": by}) + "\n")
            f.flush()


def _finished(path, by, per_caption):
    """The captions that the file already has. Removes a last line that a crash has cut. Raises: UserError for another
    file, and for one made by another model or with other numbers."""
    if not path.exists():
        if not path.parent.is_dir():  # refused now, not after the model's download
            raise UserError(f"--out {path}: cannot be written (there is no folder {path.parent})")
        return set()
    try:
        with open(path, encoding="utf8") as f:
            lines = list(f)
        whole = lines[:-1] if lines and not lines[-1].rstrip().endswith("}") else lines
        found = [(row["caption"], row.get("by", by), len(row["paraphrases"])) for row in map(json.loads, whole)]
        if lines and not lines[-1].endswith("\n"):  # cut by a crash, or only its end of line
            path.write_text("".join(line.rstrip("\n") + "\n" for line in whole), encoding="utf8")
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = first_line(error)
        raise UserError(f"--out {path}: exists already and is not a file of paraphrases ({why})") from error
    for _, was, n in found:  # older files do not say by what
        if (was, n) != (by, per_caption):
            raise UserError(f"--out {path}: has {n} paraphrases of a caption by {was}, not {per_caption} by {by}; name "
                            "another file")
    return {caption for caption, _, _ in found}


def _paraphraser(model, per_caption, device, max_tokens):
    """texts -> list of lists of str, by beam search: no random numbers."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        network = AutoModelForSeq2SeqLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    except (ImportError, ValueError, OSError, AttributeError) as error:
        missing = sorted({"sentencepiece", "protobuf"} - {package.name for package in distributions()})
        hint = f"; its tokenizer may need: pip install {' '.join(missing)}" if missing else ""
        raise UserError(f"--model {model}: {hub_reason(error)}{hint}") from error
    network = network.to(device).eval()

    @torch.inference_mode()
    def answers(texts):
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt").to(device)
        tokens.pop("token_type_ids", None)
        out = network.generate(**tokens, num_beams=max(10, per_caption), num_return_sequences=per_caption,
                               max_new_tokens=max_tokens, no_repeat_ngram_size=2, repetition_penalty=1.2)
        # (len(texts) * per_caption, length)
        words = tokenizer.batch_decode(out, skip_special_tokens=True)
        return [words[k:k + per_caption] for k in range(0, len(words), per_caption)]
    return answers


def main(argv=None):
    """The command line. Raises: UserError."""
    p = OneLine("python -m tools.paraphrase", __doc__.splitlines()[0])
    p.add_argument("--dataset", required=True, help="name, folder, file or hub id, as for temo.py")
    p.add_argument("--out", required=True, metavar="FILE", help="JSON lines to write, or to go on with")
    p.add_argument("--model", default=MODEL, help="seq2seq model on the hub or in a folder")
    p.add_argument("--per-caption", type=count, default=5, help="paraphrases of each caption")
    p.add_argument("--batch", type=count, default=16, help="captions at a time")
    p.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    p.add_argument("--data-dir", help="where annotations lie and relative paths start")
    p.add_argument("--video-dir", help="folder of the videos")
    p.add_argument("--image-column", help="column of the images; else found by its name")
    p.add_argument("--caption-column", help="column of the captions; else found by its name")
    args = p.parse_args(argv)
    data = common.load_data(args.dataset, "train", **data_options(args))
    import torch
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    write_paraphrases(data.first_captions(), args.out, args.model, args.per_caption, args.batch, device)


if __name__ == "__main__":
    with clean_exit():
        main()
