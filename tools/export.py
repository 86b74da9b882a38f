"""Exports a run as a folder that open_clip loads.

    python -m tools.export runs/NAME OUT            # then the model's name is local-dir:OUT

CLIP_benchmark, and whatever else reads open_clip's models, can evaluate it. What open_clip can
express: an image tower of timm at the size that timm gives it, a text tower of transformers (BERT,
RoBERTa, XLM-RoBERTa), a linear projection after each. All else is refused in one line.
"""

import json
import math
import shutil
from pathlib import Path

import common
from contrastive.data.registry import find_data_set
from contrastive.engine.flags import OneLineErrorParser
from contrastive.core.files import flatten
from contrastive.core.processes import opening

import torch
from safetensors.torch import load_file

TEXT_TOWERS = "bert", "roberta", "xlm-roberta"  # of those that open_clip's hf_configs.py knows
POOLERS = {"cls": "cls_last_hidden_state_pooler", "mean": "mean_pooler"}
RESIZE_MODES = {"crop": "shortest", "squash": "squash"}


def require(condition, run, message):
    """Raises: UserError unless the condition holds."""
    if not condition:
        raise common.UserError(f"{run}: open_clip has no such model: {message}")


def require_text_tower(run, spec):
    """Refuses a text tower that open_clip cannot have, and models of questions."""
    kind = (spec.get("text_config") or {}).get("model_type")
    require(kind in TEXT_TOWERS and not spec.get("questions"), run,
            f"questions, or texts read by {spec['text_encoder'] or 'nothing'}, not one of "
            f"{TEXT_TOWERS}")
    pooling = spec.get("text_pooling")
    require(pooling in POOLERS and spec.get("eval_crop", 1) == 1, run,
            f"--text-pooling {pooling}, or --eval-crop")
    require(not spec.get("projection_bias"), run, "--projection-bias")


def trunk_tensors(run, spec, vision):
    """{name: tensor} of the image tower, by the names of open_clip's TimmModel.

    Raises: UserError for a tower that timm would build otherwise.
    """
    import timm

    name = spec["image_encoder"]
    require(timm.is_model(name), run, f"--image-encoder {name} is none of timm's")
    theirs = timm.create_model(name)
    theirs.reset_classifier(0)
    tensors = vision.body.state_dict()
    shapes = {key: x.shape for key, x in tensors.items()}
    their_shapes = {key: x.shape for key, x in theirs.state_dict().items()}
    require(shapes == their_shapes and theirs.num_features == vision.width, run,
            f"{name} at --image-size {spec['image_size']} differs from timm's own")
    return tensors


def log_temperature(run, args):
    """(): the logarithm of the run's temperature, which only scales logits."""
    if (run / "own.safetensors").is_file():
        loss_parameters = load_file(run / "own.safetensors")
        if "tau.log_tau" in loss_parameters:
            return loss_parameters["tau.log_tau"]
    return torch.tensor(math.log(args.get("tau") or 0.01))


def model_tensors(run, spec, args, model):
    """{name: tensor} of a model, by open_clip's names."""
    tensors = {}
    for key, x in trunk_tensors(run, spec, model.vision).items():
        tensors[f"visual.trunk.{key}"] = x
    for key, x in model.text.body.state_dict().items():
        if not key.startswith("pooler."):
            tensors[f"text.transformer.{key}"] = x
    tensors["visual.head.proj.weight"] = model.vision.projection.weight
    tensors["text.proj.weight"] = model.text.projection.weight
    tensors["logit_scale"] = -log_temperature(run, args)
    return tensors


def model_config(spec, tokenizer, transform):
    """The content of open_clip_config.json."""
    return {
        "model_cfg": {
            "embed_dim": spec["embed_dim"],
            "vision_cfg": {
                "timm_model_name": spec["image_encoder"],
                "timm_model_pretrained": False,
                "timm_pool": "",
                "timm_proj": "linear",
                "image_size": spec["image_size"],
            },
            "text_cfg": {
                "hf_model_name": spec["text_encoder"],
                "hf_model_pretrained": False,
                "hf_proj_type": "linear",
                "hf_pooler_type": POOLERS[spec["text_pooling"]],
                "hf_tokenizer_name": spec["text_encoder"],
                "context_length": tokenizer.length,
            },
        },
        "preprocess_cfg": {
            "size": spec["image_size"],
            "mean": transform.mean,
            "std": transform.std,
            "interpolation": "bilinear",
            "resize_mode": RESIZE_MODES[transform.resize],
        },
    }


def model_card(run, spec, args):
    """The text of the model card: data, recipe, numbers, licences."""
    summary = common.read_json(run / "summary.json")
    name = summary["dataset"]
    data_set = find_data_set(name)
    licence = "that of your own data"
    if data_set is not None:
        licence = data_set.licence
    weights = []
    for file, version in summary["hub"].items():
        weights.append(f"{file} at {version}, under its licence")
    rows = []
    for metric, value in sorted(flatten(summary["test"]).items()):
        if isinstance(value, (int, float)):
            rows.append(f"| {metric} | {value:.4g} |")
    return "\n".join([
        "---", "library_name: open_clip", "pipeline_tag: zero-shot-image-classification",
        "tags: [clip]", "---",
        f"# {run.name}", "",
        f"{summary['script']}.py with --loss {summary['method']}, seed {summary['seed']}.", "",
        f"- data: {name}; licence: {licence}",
        f"- towers: {spec['image_encoder']} (timm) and {spec['text_encoder']} (transformers), "
        f"D = {spec['embed_dim']}",
        f"- first weights: {', '.join(weights) or 'none of the hub'}",
        f"- recipe: {summary['steps']} steps of {summary['batch']} examples, {args['optimizer']}, "
        f"lr {args['lr']:g}; changed from that of the data set: "
        f"{' '.join(args['changed']) or 'none'}; commit {summary['commit']}", "",
        "Test split at the end of training, by the run itself:", "",
        "| metric | value |", "|---|---|", *rows, ""])


def warnings_of(spec):
    """Sentences on what may differ or fail where open_clip loads the model of a spec."""
    warnings = []
    if spec.get("clean_captions"):
        warnings.append("WARNING: open_clip does not clean captions, as the run did: its retrieval "
                        "differs")
    text_encoder = spec["text_encoder"]
    if Path(text_encoder).is_dir():
        warnings.append(f"WARNING: open_clip reads the configuration of the text encoder from "
                        f"{text_encoder}; where this folder is not, write another path or hub id "
                        "of it into open_clip_config.json")
    return warnings


def export(run, out):
    """Writes the folder OUT from a finished run.

    Raises: UserError for a model that open_clip cannot have.
    """
    run, out = Path(run), Path(out)
    spec = common.read_json(run / "model.json")
    args = common.read_json(run / "args.json")
    require_text_tower(run, spec)
    model, tokenizer, transform = common.load_model(run)
    tensors = model_tensors(run, spec, args, model)
    config = model_config(spec, tokenizer, transform)
    with opening(out):
        shutil.copytree(run / "tokenizer", out, dirs_exist_ok=True)
        common.write_tensors(out / "open_clip_model.safetensors", tensors)
        text = json.dumps(config, indent=1)
        (out / "open_clip_config.json").write_text(text, encoding="utf8")
        (out / "README.md").write_text(model_card(run, spec, args), encoding="utf8")
    print(f"written to {out}, whose name is local-dir:{out}", *warnings_of(spec), sep="\n")


def main(argv=None):
    """The command line. Raises: UserError."""
    p = OneLineErrorParser("python -m tools.export", __doc__.splitlines()[0])
    p.add_argument("run", help="folder of a finished run")
    p.add_argument("out", help="folder to write")
    args = p.parse_args(argv)
    export(args.run, args.out)


if __name__ == "__main__":
    with common.clean_exit():
        main()
