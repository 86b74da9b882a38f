"""Paraphrases of the captions of a training set, for TeMo's texts T~ (paper: five per caption, by PEGASUS).

    python -m tools.paraphrase --dataset coco --out coco_paraphrases.jsonl
    python temo.py --dataset coco --paraphrases coco_paraphrases.jsonl

The file has one JSON object per line, {"caption": str, "paraphrases": [str, ...], "by": str}. A stopped call goes on
with it, but not with another model.
"""

import json
from pathlib import Path

import common
from contrastive.data import data_options
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import UserError, clean_exit, opening, say
from contrastive.engine.ranges import count

import torch

LENGTH, EACH = 60, 5  # tokens of a caption and of a paraphrase; paraphrases of each caption


def paraphraser(name, device):
    """texts -> list of lists of EACH str, by beam search: no random numbers."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    with opening(f"--model {name} (PEGASUS's tokenizer needs: pip install sentencepiece protobuf)"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
    model = model.to(device).eval()

    @torch.inference_mode()
    def answers(texts):
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt").to(device)
        tokens.pop("token_type_ids", None)
        out = model.generate(**tokens, num_beams=10, num_return_sequences=EACH, max_new_tokens=LENGTH,
                             no_repeat_ngram_size=2, repetition_penalty=1.2)
        words = tokenizer.batch_decode(out, skip_special_tokens=True)      # EACH * len(texts)
        return [words[k:k + EACH] for k in range(0, len(words), EACH)]
    return answers


def main(argv=None):
    """The command line. Raises: UserError."""
    p = OneLine("python -m tools.paraphrase", __doc__.splitlines()[0])
    p.add_argument("--dataset", required=True, help="name, folder, file or hub id, as for temo.py")
    p.add_argument("--out", required=True, metavar="FILE", help="JSON lines to write, or to go on with")
    p.add_argument("--model", default="tuner007/pegasus_paraphrase", help="seq2seq model on the hub or in a folder")
    p.add_argument("--batch", type=count, default=16, help="captions at a time")
    p.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    for flag in ("--data-dir", "--video-dir", "--image-column", "--caption-column"):
        p.add_argument(flag, default="", help="as in training")
    args = p.parse_args(argv)
    out, by = Path(args.out), f"{args.model}, {LENGTH} tokens"
    with opening(f"--out {out}"):
        lines = out.read_text(encoding="utf8").splitlines(keepends=True) if out.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill has cut the last one
        if others := {row["by"] for row in rows} - {by}:
            raise UserError(f"--out {out}: has paraphrases by {others.pop()}, not by {by}; name another file")
        if len(rows) < len(lines):
            out.write_text("".join(lines[:len(rows)]), encoding="utf8")
    done, data = {row["caption"] for row in rows}, common.load_data(args.dataset, "train", **data_options(args))
    todo = [caption for caption in dict.fromkeys(data.first_captions()) if caption not in done]
    say(f"{len(done)} captions are in {out}, {len(todo)} to do")
    answers = paraphraser(args.model, "cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    from tqdm import tqdm
    with opening(out), open(out, "a", encoding="utf8") as f:
        for i in tqdm(range(0, len(todo), args.batch), desc="paraphrases", unit="batch"):
            texts = todo[i:i + args.batch]
            for text, found in zip(texts, answers(texts), strict=True):
                f.write(json.dumps({"caption": text, "paraphrases": found, "by": by}) + "\n")
            f.flush()


if __name__ == "__main__":
    with clean_exit():
        main()
