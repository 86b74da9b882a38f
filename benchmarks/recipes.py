"""Estimates of what a recipe needs: GPU memory, hours, cores; without a GPU, data or weights.

    python -m benchmarks.speed memory "temo.py --dataset cc3m" "ncl.py --dataset msrvtt"

Counted on tensors without memory. Writes results/recipes.json and .md.

GB of GPU memory are 10^9 bytes: weights, gradients and the optimiser's states; what the encoders
keep of a step for the backward, in the recipe's precision; pixels; the loss's temporaries; CUDA's
own 1.5 GB. FLOPs are those of the encoders, a backward counted as two forwards, MAMA's look-ahead
by its measured time (`mama_step`). Hours are of an A100 at 30 % of its peak (312 TFLOP/s in bf16,
156 in TF32). Cores are those that decode, by `cc3m_views` and `decode_clips`.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import common
from contrastive.data.registry import find_data_set
from contrastive.encoders.base import enable_grad_checkpointing
from contrastive.encoders.kinds import encoder_kind
from contrastive.data.sound import BANDS, SLICE_LENGTH
from contrastive.encoders.models import model_of_spec, spec_of
from contrastive.encoders.vast import SUBTITLE_LENGTH, Pairs
from contrastive.engine.log import commit
from contrastive.core.files import read_json, write_json

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
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
from variants import mmts_vast

CLIP_B16 = ("CLIPConfig", {"vision_config": {"patch_size": 16}})
CONFIGS = {  # transformers' configurations of the recipes' encoders
    "openai/clip-vit-base-patch32": ("CLIPConfig", {}),
    "openai/clip-vit-base-patch16": CLIP_B16,
    "laion/CLIP-ViT-B-16-laion2B-s34B-b88K": CLIP_B16,
    "distilbert/distilbert-base-uncased": ("DistilBertConfig", {}),
    "google-bert/bert-base-uncased": ("BertConfig", {}),
}
SCRIPTS = {
    "temo.py": temo,
    "temperature_schedules.py": temperature_schedules,
    "ncl.py": ncl,
    "mmts.py": mmts,
    "variants/mmts_vast.py": mmts_vast,
    "mama.py": mama,
}
# families of sets whose examples are clips
CLIP_FAMILIES = ("videos", "questions", "epic", "moving_emoji")
# captions of a clip, where each pair is an example
CAPTIONS_OF_CLIP = {"msrvtt": 20, "msvd": 40.6}
PEAK_FLOPS = {"bf16": 312e12, "fp16": 312e12, "no": 156e12}  # FLOP/s of an A100
UTILISATION = 0.3
CUDA_BYTES = 1.5e9


class FusedAttention(TorchFunctionMode):
    """Attention as a GPU computes it, without its (B, H, L, L) matrix.

    Masks are left out; they take no part in the sizes.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            attention = torch.ops.aten._scaled_dot_product_efficient_attention
            return attention(query, key, value, None, True)[0]
        return function(*args, **kwargs or {})


class FullTexts:
    """Stands in for a tokenizer: every text has as many tokens as it may."""

    def __init__(self, length):
        self.length = length
        self.tokenizer = range(4000)  # as long as a vocabulary

    def __call__(self, texts):
        ids = torch.ones(len(texts), self.length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids.clone()}


# ----------------------------------------------------- models -------------------------------------
def encoder_config(name):
    """The configuration of an encoder of transformers as a dict; None if CONFIGS lacks it."""
    import transformers

    if name not in CONFIGS:
        return None
    kind, options = CONFIGS[name]
    return getattr(transformers, kind)(**options).to_dict()


def answers_questions(args):
    """Whether the flags train a model of questions."""
    return getattr(args, "task", "retrieval") != "retrieval"


def has_matching(args):
    """Whether the flags train VAST's matching head, with a second pass in any case."""
    return encoder_kind(args.image_encoder).family == "vast"


def model_of(args, has_clips):
    """(the model of these flags with random weights, its FullTexts).

    Args:
        has_clips: whether the examples are clips, not images.
    """
    spec = spec_of(args)
    spec["vision_config"] = encoder_config(args.image_encoder)
    spec["text_config"] = encoder_config(getattr(args, "text_encoder", ""))
    spec["frames"] = 0
    if has_clips and encoder_kind(args.image_encoder).fixed_frames:
        spec["frames"] = args.frames
    if has_matching(args):
        spec["modalities"] = args.modalities
    tokenizer = None
    if spec["text_encoder"]:
        tokenizer = FullTexts(args.text_length)
    if answers_questions(args):
        answers = []
        if args.task == "qa-open":
            answers = ["?"] * args.answers
        spec["questions"] = {
            "answers": answers, "model": args.qa_model, "layers": args.fusion_layers,
            "frames": args.frames, "similarity": args.qa_similarity}
    without_memory = contextlib.nullcontext()
    if "modalities" in spec:  # VAST has 1.2 billion parameters
        without_memory = init_empty_weights(include_buffers=True)
    with without_memory:
        model, _ = model_of_spec(spec, tokenizer, pretrained=False)
    if getattr(args, "freeze", "") == "clip4clip":
        common.freeze_as_clip4clip(model)
    return model.train(), tokenizer


class ForwardCost(NamedTuple):
    """What a forward costs."""

    kept_bytes: int  # for the backward, beside the parameters and buffers
    flops: int
    largest_layer: int  # bytes that one layer keeps, at most


def forward_cost(model, make_inputs, precision):
    """The ForwardCost of a model, on tensors without memory.

    Args:
        make_inputs: function -> keyword arguments of the model.
        precision: 'no', 'bf16' or 'fp16'.
    """
    sizes = {}  # {address of a storage: its bytes}
    alive = []  # tensors: an address stays that of one tensor
    start_bytes = {}  # {module: bytes before its forward}
    layer_sizes = [0]
    layers = set()
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            layers.update(module)

    def save(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        sizes.setdefault(storage._cdata, storage.nbytes())
        return tensor

    def enter(module, _):
        start_bytes[module] = sum(sizes.values())

    def leave(module, *_):
        if module in layers:
            layer_sizes.append(sum(sizes.values()) - start_bytes[module])

    hooks = [nn.modules.module.register_module_forward_pre_hook(enter),
             nn.modules.module.register_module_forward_hook(leave)]
    saving = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(), FusedAttention(), torch.device("cuda"):
        tensors = {}
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            tensors[name] = torch.empty(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad)
            sizes[tensors[name].untyped_storage()._cdata] = 0
        # not torch.autocast, which asks for a GPU
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", precision != "no")
        with saving, counter:
            alive.append(torch.func.functional_call(model, tensors, (), make_inputs()))
        torch.set_autocast_enabled("cuda", False)
    for hook in hooks:
        hook.remove()
    return ForwardCost(sum(sizes.values()), counter.get_total_flops(), max(layer_sizes))


# ----------------------------------------------------- estimates ----------------------------------
class Views(NamedTuple):
    """What an example sends through the encoders."""

    images: int  # with a gradient
    texts: int  # with a gradient
    again_without_gradient: bool  # whether as many pass without one


def views_of(script, args):
    """The Views of an example of a script."""
    if script == "temperature_schedules.py":
        if args.loss == "moco":
            return Views(1, 0, True)
        return Views(2, 0, False)
    if script != "temo.py":
        return Views(1, 1, False)
    has_augmented = args.loss == "temo" and args.unimodal != "none"        # I~, T~
    if has_augmented and args.grad_augmented:
        return Views(2, 2, False)
    if args.loss == "slip":
        return Views(3, 1, False)
    return Views(1, 1, has_augmented)


def inputs_of(args, views, tokenizer, shape, n):
    """What the model reads of n examples with pixels of this shape."""
    inputs = {"pixels": torch.zeros(n * views.images, *shape)}
    if views.texts:
        inputs["tokens"] = tokenizer([""] * n * views.texts)
    if getattr(args, "modalities", "v") != "v":
        inputs["pixels"] = {
            "frames": inputs["pixels"],
            "sound": torch.zeros(len(inputs["pixels"]), SLICE_LENGTH, BANDS),
            "subtitle": FullTexts(SUBTITLE_LENGTH)([""] * len(inputs["pixels"]))}
    if has_matching(args):  # three captions of each clip
        clips = torch.arange(n).repeat_interleave(3)
        texts = tokenizer([""] * 3 * n)
        inputs["pairs"] = Pairs(clips, texts["input_ids"], texts["attention_mask"], clips)
    if answers_questions(args):
        inputs["question"] = tokenizer([""] * n)
    return inputs


def weight_bytes(args, model):
    """Bytes of the weights, their gradients and the optimiser's states."""
    states = 2  # of Adam
    if args.optimizer == "sgd":
        states = 1
    num_bytes = 0
    for p in model.parameters():
        num_bytes += 4 * p.numel()
        if p.requires_grad:
            num_bytes += 4 * p.numel() * (1 + states)
    return num_bytes


def run_hours(args, data_set, samples_per_s):
    """Hours of the whole run; None where the size of the set is unknown."""
    if data_set is None or not data_set.splits.get("train"):
        return None
    samples = args.epochs * data_set.splits["train"]
    if getattr(args, "unfold_captions", False):
        samples *= CAPTIONS_OF_CLIP.get(args.dataset, 1)
    return samples / samples_per_s / 3600


def decoding_cores(data_set, has_clips, samples_per_s, measured):
    """Cores that decode for a GPU; None where the set lies in memory.

    Args:
        measured: content of speed.json.
    """
    if data_set is not None and data_set.full_set:  # a long tail of it
        return None
    if has_clips:
        return samples_per_s / measured["decode_clips"]["file_clips_per_s"]
    return samples_per_s / measured["cc3m_views"]["ours_samples_per_s"]


def estimate(line, num_gpus):
    """What a recipe needs on so many GPUs: {column: number}.

    Args:
        line: its command, such as 'temo.py --dataset cc3m'.
    Returns: {} if the GPUs do not share the batch evenly. Hours are None where the size of the set
        is unknown, cores where the set lies in memory.
    """
    script, *flags = line.split()
    args = SCRIPTS[script].parse_args(flags)
    if args.batch_size % num_gpus:
        return {}
    measured = read_json(RESULTS / "speed.json")
    data_set = find_data_set(args.dataset)
    has_clips = data_set is not None and data_set.module in CLIP_FAMILIES
    views = views_of(script, args)
    local = args.batch_size // num_gpus
    chunk = min(args.chunk_size or local, local)
    shape = (3, args.image_size, args.image_size)
    if has_clips:
        shape = (args.frames, *shape)
    model, tokenizer = model_of(args, has_clips)

    def cost(n, precision=args.mixed_precision):
        make_inputs = functools.partial(inputs_of, args, views, tokenizer, shape, n)
        return forward_cost(model, make_inputs, precision)

    kept_bytes, flops, largest_layer = cost(chunk)
    num_passes = 3  # a backward counts as two forwards
    images = views.images
    if views.again_without_gradient:
        num_passes += 1
        images *= 2
    if chunk < local or args.grad_checkpointing or has_matching(args):
        num_passes += 1
    if getattr(args, "weighting", "") in ("meta", "l2rw"):
        # the look-ahead comes before the step, in float32, with the whole batch
        batch = max(local, args.meta_batch_size // num_gpus)
        kept_bytes = max(kept_bytes, cost(batch, "no").kept_bytes)
        num_passes *= measured["mama_step"]["ratio_forward_M32"]
    elif args.grad_checkpointing:  # and what one layer keeps while it runs again
        enable_grad_checkpointing(model)
        kept_bytes = largest_layer + cost(chunk).kept_bytes
    pixel_bytes = 4 * local * images * math.prod(shape)                    # float32
    loss_bytes = min(2**30, 84 * args.batch_size * local)                  # common.by_rows
    need = weight_bytes(args, model) + kept_bytes + pixel_bytes + loss_bytes + CUDA_BYTES

    step_flops = num_passes * flops / chunk
    samples_per_s = PEAK_FLOPS[args.mixed_precision] * UTILISATION / step_flops
    return {
        "GB": need / 1e9,
        "GB kept": kept_bytes / 1e9,
        "M parameters": sum(p.numel() for p in model.parameters()) / 1e6,
        "chunk": chunk,
        "GFLOP of a sample": step_flops / 1e9,
        "samples/s": samples_per_s,
        "hours": run_hours(args, data_set, samples_per_s),
        "cores": decoding_cores(data_set, has_clips, samples_per_s, measured)}


def main(lines):
    """Estimates of recipes on one and on eight GPUs, added to recipes.json and recipes.md."""
    path = RESULTS / "recipes.json"
    results = read_json(path, {})
    for line in lines:
        results[line] = estimate(line, 1) | {
            "GB of 8 GPUs": estimate(line, 8).get("GB"),
            "command": f'python -m benchmarks.speed memory "{line}"',
            "commit": commit(), "machine": machine(), "torch": torch.__version__}
        print(line, results[line], flush=True)
        write_json(path, results)
    columns = ["GB", "GB of 8 GPUs", "chunk", "GFLOP of a sample", "samples/s", "hours", "cores"]
    rows = []
    for line, result in results.items():
        row = [f"`{line}`"]
        for column in columns:
            if result[column] is None:
                row.append("-")
            else:
                row.append(f"{result[column]:,.3g}")
        rows.append(row)
    table = markdown(["recipe", *columns], rows)
    text = "\n".join([__doc__.splitlines()[0], "", *table, ""])
    path.with_suffix(".md").write_text(text, encoding="utf8")
