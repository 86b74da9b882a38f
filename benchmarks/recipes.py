"""What a recipe asks of cards, counted on tensors without memory: no card, no data, no weights, no hub. Estimates.

    python -m benchmarks.speed memory "temo.py --dataset cc3m" "ncl.py --dataset msrvtt"     # results/recipes.json, .md

GB of a card are 10^9 bytes: weights, gradients and the optimiser's states; what the encoders keep of a step for the way
back, in the recipe's precision; pixels; the loss's temporaries; CUDA's own 1.5 GB. FLOPs are those of the encoders, a
backward counted as two forwards, MAMA's look-ahead by its measured time (`mama_step`). Hours are of an A100 at 30 % of
its peak (312 TFLOP/s in bf16, 156 in TF32). Cores are those that decode, by `cc3m_views` and `decode_clips`.
"""

import math

import common
from contrastive.data import facts_of
from contrastive.encoders.base import VIDEO, recompute
from contrastive.encoders.models import spec_of
from contrastive.engine.log import commit
from contrastive.engine.processes import read_json, write_json

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import mama
import mmts
import ncl
import temo
import temperature_schedules
from benchmarks.compare import RESULTS, machine, markdown

CLIP_B16 = ("CLIPConfig", {"vision_config": {"patch_size": 16}})
CONFIGS = {  # transformers' configurations of the recipes' encoders
    "openai/clip-vit-base-patch32": ("CLIPConfig", {}), "openai/clip-vit-base-patch16": CLIP_B16,
    "laion/CLIP-ViT-B-16-laion2B-s34B-b88K": CLIP_B16,
    "distilbert/distilbert-base-uncased": ("DistilBertConfig", {}), "google-bert/bert-base-uncased": ("BertConfig", {})}
SCRIPTS = {f"{module.__name__}.py": module for module in (temo, temperature_schedules, ncl, mmts, mama)}
OF_CLIPS = ("videos", "questions", "epic", "moving_emoji")  # families of sets whose examples are clips
CAPTIONS = {"msrvtt": 20, "msvd": 40.6}  # of a clip, where each pair is an example
PEAK, BUSY, CUDA = {"bf16": 312e12, "fp16": 312e12, "no": 156e12}, 0.3, 1.5e9  # FLOP/s, share of it, bytes


class Fused(TorchFunctionMode):
    """Attention as a card computes it, without its (B, H, L, L) matrix; masks take no part in the sizes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_efficient_attention(*args[:3], None, True)[0]
        return function(*args, **kwargs or {})


class Words:
    """Stands in for a tokenizer: every text has as many tokens as it may."""

    def __init__(self, length):
        self.length, self.tokenizer = length, range(4000)

    def __call__(self, texts):
        ids = torch.ones(len(texts), self.length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids.clone()}


def model_of(args, clips):
    """(the model of these flags with random weights, its Words)."""
    import transformers
    config = {}
    for half in ("image", "text"):
        kind, how = CONFIGS.get(getattr(args, f"{half}_encoder", ""), (None, {}))
        config[half] = getattr(transformers, kind)(**how).to_dict() if kind else None
    spec = spec_of(args) | {"vision_config": config["image"], "text_config": config["text"]}
    spec["frames"] = args.frames if clips and args.image_encoder.startswith(VIDEO) else 0
    words = Words(args.text_length) if spec["text_encoder"] else None
    if getattr(args, "task", "retrieval") != "retrieval":
        answers = ["?"] * args.answers if args.task == "qa-open" else []
        spec["questions"] = {"answers": answers, "model": args.qa_model, "layers": args.fusion_layers,
                             "frames": args.frames, "similarity": args.qa_similarity}
    model, _ = common.build_model(spec, words, pretrained=False)
    if getattr(args, "freeze", "") == "clip4clip":
        common.freeze_as_clip4clip(model)
    return model.train(), words


def forward_of(model, inputs, precision):
    """(bytes that a forward keeps for backward beside the model's own, FLOPs, bytes of the largest layer)."""
    kept, before, largest, alive = {}, {}, [0], []
    layers = {layer for m in model.modules() if isinstance(m, (nn.Sequential, nn.ModuleList)) for layer in m}

    def note(x):
        alive.append(x)  # an address stays one tensor's
        kept.setdefault(x.untyped_storage()._cdata, x.untyped_storage().nbytes())
        return x

    def enter(module, _):
        before[module] = sum(kept.values())

    def leave(module, *_):
        if module in layers:
            largest.append(sum(kept.values()) - before[module])
    hooks = nn.modules.module
    hooks = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
    with FakeTensorMode(), Fused(), torch.device("cuda"):
        tensors = {k: torch.empty(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad)
                   for k, x in (*model.named_parameters(), *model.named_buffers())}
        kept |= {x.untyped_storage()._cdata: 0 for x in tensors.values()}
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", precision != "no")  # torch.autocast asks for a card
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), FlopCounterMode(display=False) as flops:
            alive.append(torch.func.functional_call(model, tensors, (), inputs()))
        torch.set_autocast_enabled("cuda", False)
    for hook in hooks:
        hook.remove()
    return sum(kept.values()), flops.get_total_flops(), max(largest)


def views_of(script, args):
    """(views, texts) of an example that have a gradient, and whether as many go through the encoders without."""
    if script == "temperature_schedules.py":
        return (1, 0, True) if args.loss == "moco" else (2, 0, False)
    if script != "temo.py":
        return 1, 1, False
    augmented = temo.parts_of(args)["augmented"]  # I~, T~
    if augmented and args.grad_augmented:
        return 2, 2, False
    return (3, 1, False) if args.loss == "slip" else (1, 1, augmented)


def estimate(line, cards):
    """What a recipe needs on so many cards: {column: number}; hours None where the size of the set is not known, {} if
    the batch does not part among the cards."""
    script, *flags = line.split()
    args, measured = SCRIPTS[script].parse_args(flags), read_json(RESULTS / "speed.json")
    if args.batch_size % cards:
        return {}
    clips = str(common.SETS.get(args.dataset)).rpartition(".")[2] in OF_CLIPS
    views, texts, more = views_of(script, args)
    local, shape = args.batch_size // cards, (args.frames,) * clips + (3, args.image_size, args.image_size)
    chunk, precision = min(args.chunk_size or local, local), args.mixed_precision
    model, words = model_of(args, clips)

    def inputs(n):
        found = {"pixels": torch.zeros(n * views, *shape)} | ({"tokens": words([""] * n * texts)} if texts else {})
        return found | ({"question": words([""] * n)} if getattr(args, "task", "retrieval") != "retrieval" else {})
    kept, flops, largest = forward_of(model, lambda: inputs(chunk), precision)
    ahead = getattr(args, "weighting", "") in ("meta", "l2rw")
    if ahead:  # before the step, in float32, of the whole batch
        whole = max(local, args.meta_batch_size // cards)
        kept = max(kept, forward_of(model, lambda: inputs(whole), "no")[0])
    elif args.grad_checkpointing:  # and what one layer keeps while it runs again
        recompute(model)
        kept = largest + forward_of(model, lambda: inputs(chunk), precision)[0]
    every = sum(p.numel() for p in model.parameters())
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = 1 if args.optimizer == "sgd" else 2
    pixels = 4 * local * views * (1 + more) * math.prod(shape)  # float32
    loss = min(2**30, 84 * args.batch_size * local)  # common.by_rows
    need = 4 * every + 4 * learnt * (1 + moments) + kept + pixels + loss + CUDA
    again = chunk < local or args.grad_checkpointing
    passes = (3 + more + again) * (measured["mama_step"]["ratio_forward_M32"] if ahead else 1)
    a_second = PEAK[precision] * BUSY / (passes * flops / chunk)
    a_core = measured["decode_clips"]["file_clips_per_s"] if clips else measured["cc3m_views"]["ours_samples_per_s"]
    captions = CAPTIONS.get(args.dataset, 1) if getattr(args, "unfold_captions", False) else 1
    facts = facts_of(args.dataset)
    rows = facts.get("splits", {}).get("train")
    return {"GB": need / 1e9, "GB kept": kept / 1e9, "M parameters": every / 1e6, "chunk": chunk,
            "GFLOP of a sample": passes * flops / chunk / 1e9, "samples/s": a_second,
            "hours": args.epochs * rows * captions / a_second / 3600 if rows else None,
            "cores": None if "base" in facts else a_second / a_core}  # cut from a set that lies in memory


def main(lines):
    """Estimates of recipes on one and on eight cards, added to recipes.json and recipes.md."""
    path = RESULTS / "recipes.json"
    results = read_json(path, {})
    for line in lines:
        one, eight = (estimate(line, cards) for cards in (1, 8))
        results[line] = one | {
            "GB of 8 cards": eight.get("GB"), "command": f'python -m benchmarks.speed memory "{line}"',
            "commit": commit(), "machine": machine(), "torch": torch.__version__}
        print(line, results[line], flush=True)
        write_json(path, results)
    columns = ["GB", "GB of 8 cards", "chunk", "GFLOP of a sample", "samples/s", "hours", "cores"]
    rows = [[f"`{line}`", *("-" if r[c] is None else f"{r[c]:,.3g}" for c in columns)] for line, r in results.items()]
    path.with_suffix(".md").write_text("\n".join([*__doc__.splitlines()[:1], "", *markdown(["recipe", *columns], rows),
                                                  ""]))
