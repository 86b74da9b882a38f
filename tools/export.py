"""A run as a folder that open_clip loads, so that CLIP_benchmark and whatever reads open_clip's models evaluate it.

    python -m tools.export runs/NAME OUT            # then the model's name is local-dir:OUT

What open_clip can express: an image tower of timm at the size that timm gives it, a text tower of transformers (BERT,
RoBERTa, XLM-RoBERTa), a linear projection after each. All else is refused in one line.
"""

import json
import math
import shutil
from pathlib import Path

import common
from contrastive.data import facts_of
from contrastive.engine.flags import OneLine
from contrastive.engine.processes import flatten, opening

import torch
from safetensors.torch import load_file

TEXTS = "bert", "roberta", "xlm-roberta"  # of those that open_clip's hf_configs.py knows
POOLERS = {"cls": "cls_last_hidden_state_pooler", "mean": "mean_pooler"}


def require(holds, run, message):
    """Raises: UserError unless it holds."""
    if not holds:
        raise common.UserError(f"{run}: open_clip has no such model: {message}")


def trunk_of(run, spec, vision):
    """{name: tensor} of the image tower as open_clip's TimmModel names it; refuses what timm would build otherwise."""
    import timm
    name = spec["image_encoder"]
    require(timm.is_model(name), run, f"--image-encoder {name} is none of timm's")
    theirs = timm.create_model(name)
    theirs.reset_classifier(0)
    ours, shapes = vision.body.state_dict(), {k: x.shape for k, x in theirs.state_dict().items()}
    same = shapes == {k: x.shape for k, x in ours.items()} and theirs.num_features == vision.width
    require(same, run, f"{name} at --image-size {spec['image_size']} differs from timm's own")
    return ours


def export(run, out):
    """Writes the folder OUT from a finished run.   Raises: UserError for a model that open_clip cannot have."""
    run, out = Path(run), Path(out)
    spec, args = (common.read_json(run / f"{name}.json") for name in ("model", "args"))
    pooling, kind = spec.get("text_pooling"), (spec.get("text_config") or {}).get("model_type")
    known = kind in TEXTS and not spec.get("questions")
    require(known, run, f"questions, or texts read by {spec['text_encoder'] or 'nothing'}, not one of {TEXTS}")
    require(pooling in POOLERS and spec.get("eval_crop", 1) == 1, run, f"--text-pooling {pooling}, or --eval-crop")
    model, tokenizer, transform = common.load_model(run)
    trunk = trunk_of(run, spec, model.vision)
    learnt = load_file(run / "own.safetensors") if (run / "own.safetensors").is_file() else {}
    log_tau = learnt.get("tau.log_tau", torch.tensor(math.log(args.get("tau") or 0.01)))        # only scales logits
    tensors = {f"visual.trunk.{k}": x for k, x in trunk.items()}
    tensors |= {f"text.transformer.{k}": x for k, x in model.text.body.state_dict().items()
                if not k.startswith("pooler.")}
    tensors |= {"visual.head.proj.weight": model.vision.projection.weight, "logit_scale": -log_tau,
                "text.proj.weight": model.text.projection.weight}
    config = {"model_cfg": {
        "embed_dim": spec["embed_dim"],
        "vision_cfg": {"timm_model_name": spec["image_encoder"], "timm_model_pretrained": False, "timm_pool": "",
                       "timm_proj": "linear", "image_size": spec["image_size"]},
        "text_cfg": {"hf_model_name": spec["text_encoder"], "hf_model_pretrained": False, "hf_proj_type": "linear",
                     "hf_pooler_type": POOLERS[pooling], "hf_tokenizer_name": spec["text_encoder"],
                     "context_length": tokenizer.length}},
        "preprocess_cfg": {"size": spec["image_size"], "mean": transform.mean, "std": transform.std,
                           "interpolation": "bilinear",
                           "resize_mode": {"crop": "shortest", "squash": "squash"}[transform.resize]}}
    with opening(out):
        shutil.copytree(run / "tokenizer", out, dirs_exist_ok=True)
        common.write_tensors(out / "open_clip_model.safetensors", tensors)
        (out / "open_clip_config.json").write_text(json.dumps(config, indent=1), encoding="utf8")
        (out / "README.md").write_text(card(run, spec, args), encoding="utf8")
    cleans = "; WARNING: open_clip does not clean captions, as the run did: its retrieval differs"
    print(f"written to {out}, whose name is local-dir:{out}" + cleans * spec["clean_captions"])


def card(run, spec, args):
    """The model card: data, recipe, numbers, licences."""
    summary = common.read_json(run / "summary.json")
    name, licence = summary["dataset"], facts_of(summary["dataset"]).get("licence", "that of your own data")
    rows = [f"| {k} | {v:.4g} |" for k, v in sorted(flatten(summary["test"]).items()) if isinstance(v, (int, float))]
    start = ", ".join(f"{k} at {v}, under its licence" for k, v in summary["hub"].items()) or "none of the hub"
    return "\n".join([
        "---", "library_name: open_clip", "pipeline_tag: zero-shot-image-classification", "tags: [clip]", "---",
        f"# {run.name}", "", f"{summary['script']}.py with --loss {summary['method']}, seed {summary['seed']}.", "",
        f"- data: {name}; licence: {licence}",
        f"- towers: {spec['image_encoder']} (timm) and {spec['text_encoder']} (transformers), D = {spec['embed_dim']}",
        f"- first weights: {start}",
        f"- recipe: {summary['steps']} steps of {summary['batch']} examples, {args['optimizer']}, lr {args['lr']:g}; "
        f"changed from that of the data set: {' '.join(args['changed']) or 'none'}; commit {summary['commit']}", "",
        "Test split at the end of training, by the run itself:", "", "| metric | value |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    p = OneLine("python -m tools.export", __doc__.splitlines()[0])
    p.add_argument("run", help="folder of a finished run")
    p.add_argument("out", help="folder to write")
    with common.clean_exit():
        export(**vars(p.parse_args()))
