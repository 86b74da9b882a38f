"""Text encoders: CLIP's transformer from scratch, dropout; the recipe of SSB's."""

import common
from contrastive import encoders

import pytest
import torch
import transformers as T

import ncl
import temo
from helpers import write_captions
from test_models import SPEC


def test_clip_s_text_transformer_from_scratch(tmp_path):
    """SLIP's text tower: CLIP's tokenizer of letters and one merge and a configuration, no weights; what the recipe of
    cc12m asks for, in small."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(c + "</w>" for c in letters), "re", "red</w>", "<|startoftext|>", "<|endoftext|>"]
    T.CLIPTokenizer(vocab={w: i for i, w in enumerate(words)}, merges=[("r", "e"), ("re", "d</w>")],
                    model_max_length=77).save_pretrained(tmp_path)
    tower = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    text = tower | dict(vocab_size=len(words), bos_token_id=len(words) - 2, eos_token_id=2)  # 2: as in CLIP's own file
    T.CLIPConfig(text_config=text, vision_config=tower, projection_dim=16).save_pretrained(tmp_path)
    recipe = temo.parse_args(["--dataset", "cc12m", "--text-encoder", str(tmp_path)])
    tokenizer = common.build_tokenizer(recipe.text_encoder, recipe.text_length, clean=recipe.clean_captions)
    ids = tokenizer(["Red, red!", "b"])["input_ids"]
    assert tokenizer.length == 77 and ids[0, 1] == 53 and (ids[:, 0] == 54).all()  # lower case, 'red' is one token
    assert tokenizer(["a" * 300])["input_ids"].shape == (1, 77)
    names = ("text_encoder", "text_length", "text_pooling", "image_stats", "eval_resize")
    spec = SPEC | {k: getattr(recipe, k) for k in names} | dict(embed_dim=16)
    one, two = (common.build_model(dict(spec), tokenizer, recipe.pretrained)[0] for _ in range(2))
    assert one.text.body.embeddings.position_embedding.num_embeddings == 77
    tables = [m.text.body.embeddings.token_embedding.weight for m in (one, two)]
    assert not torch.equal(*tables) and tables[0].std().item() == pytest.approx(0.02, rel=0.1)  # random, as CLIP starts
    assert one.text.projection.weight.std().item() == pytest.approx(24 ** -0.5, rel=0.2)
    one.eval()
    alone, padded = (one.text(**tokenizer(texts))[0] for texts in (["red"], ["red", "a red bird on a tree"]))
    assert torch.allclose(alone, padded, atol=1e-6)  # read at the end of the text, whatever the padding


@pytest.mark.parametrize("kind", ["t5", "distilbert", "bert"])
def test_dropout_of_a_text_encoder_stays_or_goes(tiny, tokenizer, kind):
    text = common.TextEncoder(tiny(kind)[0], 16, pooling="mean")
    model, tokens = common.TwoTower(common.VisionEncoder("small", 16), text), tokenizer(["red apple", "a blue bird"])

    def differ(*modes):
        a, b = (model.train(mode)(tokens=tokens)[1] for mode in modes)
        return not torch.equal(a, b)
    encoders.towers.set_dropout(model, 0.0)
    assert differ(True, True) and not differ(False, False)  # its own
    encoders.towers.set_dropout(model, 0.0, text=False)
    assert not differ(True, False)



def test_recipe(tmp_path):
    """App. C, and what is recalled of SSB; the captioning loss stays beside NCL's."""
    facts = {"msrvtt": (20, 32, 100, 0.1), "msvd": (20, 64, 100, 0.1), "activitynet": (28, 512, 256, 0)}
    scales = {"ncl": 15, "max-margin": 64, "infonce": 15}
    for name, expected in facts.items():
        for loss, scale in scales.items():
            ssb = ["--image-encoder", "ssb", "--feature-dir", str(tmp_path), "--loss", loss]
            args = ncl.parse_args(["--dataset", name, *ssb])
            assert (args.epochs, args.frames, args.text_length, args.dropout) == expected
            assert args.text_dropout == (args.dropout > 0) and args.loss_scale == scale
            assert (args.text_encoder, args.text_pooling, args.embed_dim) == ("google-t5/t5-base", "ssb", 1024)
            assert (args.optimizer, args.lr, args.batch_size, args.grad_clip) == ("adam", 5e-5, 64, 0.2)
            assert (args.tau, args.learnable_tau, args.captioning_weight, args.support_tau) == (0.07, False, 10, 0.1)
            assert args.normalize == ("queue" if loss == "ncl" else "none") and args.chunk_size == 0



def test_the_banner_names_the_recipes_and_the_weights(tmp_path, capsys, monkeypatch):
    """Of a data set without a recipe, and of a timm name without a tag; the weights are not loaded here."""
    import timm
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **more: create(name, **more))
    data = write_captions(tmp_path, 60)
    temo.main(temo.parse_args(["--dataset", str(data), "--image-encoder", "test_vit", "--pretrained", "--text-encoder",
                               "small", "--cpu", "--workers", "0", "--max-steps", "1", "--batch-size", "8",
                               "--output-dir", str(tmp_path / "runs")]))
    said = capsys.readouterr().out
    assert f"{data} has none of its own: --recipe emoji|" in said
    assert "published weights (test_vit.r160_in1k), where there are some" in said
