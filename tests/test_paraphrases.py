"""tools.paraphrase: captions in other words, by a tiny model."""

import json

from contrastive.encoders.texts import Paraphrases
from contrastive.engine.processes import UserError

import pytest
import torch

from helpers import (
    write_images,
    write_rows,
)
from tools import paraphrase


@pytest.fixture(scope="module")
def pegasus(tmp_path_factory):
    """A tiny PEGASUS of random weights with a word tokenizer, saved as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PegasusConfig, PegasusForConditionalGeneration, PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("pegasus")
    words = ["<pad>", "</s>", "<unk>", *"a the cat dog cow sat on mat red blue".split()]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = PegasusConfig(vocab_size=len(words), d_model=16, encoder_layers=1, decoder_layers=1,
                           encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
                           max_position_embeddings=64, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    PegasusForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def test_write_paraphrases(pegasus, tmp_path):
    captions = ["a cat", "a dog sat", "a cat", "the red cow", "on a mat"]
    rows = [(name, text, "train") for name, text in zip(write_images(tmp_path, range(5)), captions)]
    write_rows(tmp_path / "own.csv", ["image", "caption", "split"], rows)
    path = tmp_path / "p.jsonl"
    flags = f"--dataset {tmp_path}/own.csv --model {pegasus} --batch 2 --cpu --out".split()
    with pytest.raises(UserError, match="^--model .*none"):                # and leaves no empty file behind
        paraphrase.main([*flags, str(path), "--model", str(tmp_path / "none")])
    assert not path.exists()
    paraphrase.main([*flags, str(path)])
    lines = path.read_text(encoding="utf8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    assert [r["caption"] for r in rows] == ["a cat", "a dog sat", "the red cow", "on a mat"]  # the duplicate once
    assert all(len(r["paraphrases"]) == 5 and all(isinstance(p, str) for p in r["paraphrases"]) for r in rows)

    done = json.dumps(rows[0] | {"paraphrases": ["kept"] * 5}) + "\n"
    path.write_text(done + lines[1] + lines[2][:len(lines[2]) // 2], encoding="utf8")  # a kill in the third line
    paraphrase.main([*flags, str(path)])
    assert path.read_text(encoding="utf8").splitlines(keepends=True) == [done, lines[1], lines[2], lines[3]]
    assert len(Paraphrases(path).hashes) == 4 and Paraphrases(path).get(["a cat"]) == [["kept"] * 5]
    path.write_text(path.read_text(encoding="utf8").replace('"by": "', '"by": "other '), encoding="utf8")
    with pytest.raises(UserError, match="^--out [^ ]*: has paraphrases by other .*, not by .*name another file$"):
        paraphrase.main([*flags, str(path)])
    own = (tmp_path / "own.csv").read_text()                               # somebody's data
    with pytest.raises(UserError, match="^--out "):
        paraphrase.main([*flags, str(tmp_path / "own.csv")])
    assert (tmp_path / "own.csv").read_text() == own
