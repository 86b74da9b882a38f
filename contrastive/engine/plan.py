"""--plan: an estimate of the memory that a run needs on each GPU, without data, weights or a GPU.

Parameters, gradients and optimiser states are counted. The activations that the encoders keep per example for the
backward pass are measured on the CPU, in the precision of the run (fp16 as bf16), with random weights. GB are 10^9
bytes: a card sold by that name has some 6 % more, which is left for fragmentation.
"""

import contextlib
import os

from common import build_model, rows_at_once, spec_of

import torch

from contrastive.encoders.base import FEATURES, VIDEO, VIDEO_SWIN, has_batchnorm
from contrastive.engine.base import UserError
from contrastive.sets import MODULES

VIDEOS = tuple(f"contrastive.sets.{f}" for f in ("videos", "questions", "epic", "ssv2", "moving_emoji"))  # of clips
CHOICES = 5  # of a question, in all sets of the paper
CONTEXT = 1.5e9  # bytes that CUDA, cuDNN, NCCL and the compiler's kernels take
STAND_INS = {  # name -> (transformers' configuration, its arguments): models of the same size, for use without the hub
    "openai/clip-vit-base-patch32": ("CLIPConfig", {}),
    "openai/clip-vit-base-patch16": ("CLIPConfig", {"vision_config": {"patch_size": 16}}),
    "laion/CLIP-ViT-B-16-laion2B-s34B-b88K": ("CLIPConfig", {"vision_config": {"patch_size": 16}}),
    "distilbert/distilbert-base-uncased": ("DistilBertConfig", {}),
    "google-bert/bert-base-uncased": ("BertConfig", {}),
    "t5-base": ("T5Config", {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 3072})}
# (views, texts) of an example in one forward pass of a loss; TeMo has two of each for its unimodal losses
VIEWS = {"slip": (3, 1), "simclr": (2, 0), "sdclr": (2, 0), "moco": (1, 0)}


class Words:
    """Takes the place of a tokenizer: every text has the maximal length."""

    def __init__(self, length, vocabulary=4000):
        self.length, self.tokenizer = length, range(vocabulary)

    def __call__(self, texts):
        ids = torch.ones(len(texts), self.length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids.clone()}


def config_of(name):
    """The configuration of a transformers encoder as a dict, from the cache or else from STAND_INS; None for other
    encoders, which load their own."""
    import transformers
    name = name.rpartition(":")[2]  # after clip_vip:
    with contextlib.suppress(OSError, ValueError):
        if "/" in name or os.path.isdir(name):
            return transformers.AutoConfig.from_pretrained(name, local_files_only=True).to_dict()
    kind, arguments = STAND_INS.get(name, (None, None))
    return getattr(transformers, kind)(**arguments).to_dict() if kind else None


def saved_bytes(model, function):
    """Bytes that a forward pass keeps for the backward pass: each storage once, without the model's own tensors."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    seen = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        kept = function()  # kept alive until all is counted, so that no memory is reused
    return sum(seen.values()) if kept is not None else 0


def measure(model, inputs, precision):
    """(bytes per example, bytes per forward pass that do not depend on the batch: half-precision weights).

    inputs: function, number of examples -> keywords of model."""
    sizes = []
    for n in (2, 3):  # BatchNorm on a 1 x 1 map needs two
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "no"):
            sizes.append(saved_bytes(model, lambda n=n: model(**inputs(n))))
    return sizes[1] - sizes[0], max(0, 3 * sizes[0] - 2 * sizes[1])


def encoders_of(args, clips):
    """The model of these flags with random weights, and its Words.   Raises: UserError without its configuration."""
    spec = spec_of(args) | {"vision_config": config_of(args.image_encoder)}
    if getattr(args, "qa_model", "") == "vgt":
        raise UserError("--plan: VGT is not counted; beside BERT it has 8 million parameters")
    if args.image_encoder in FEATURES:
        raise UserError(f"--plan: --image-encoder {args.image_encoder}: its width is that of its files, so it is not "
                        "counted")
    words = None
    if spec["text_encoder"]:
        spec["text_config"] = config_of(args.text_encoder)
        words = Words(args.text_length)
    if args.image_encoder.startswith(VIDEO) and clips:
        spec["frames"] = args.frames
    if getattr(args, "task", "retrieval") != "retrieval":
        known = ["?"] * args.answers if args.task == "qa-open" else []
        spec["questions"] = {"answers": known, "model": args.qa_model, "layers": args.fusion_layers,
                             "frames": args.frames, "similarity": args.qa_similarity}
    model, _ = build_model(spec, words, pretrained=False)
    return model.train(), words


def of_an_example(model, words, args, clips, precision):
    """Bytes of (an example's activations, its images' part, its texts' part, half-precision weights, its pixels).

    Frames that are encoded one by one are measured one by one."""
    views, texts = VIEWS.get(args.loss, (1, 1 if words else 0))
    if args.loss == "temo" and args.unimodal != "none":
        views, texts = 2, 2
    side, asked = args.image_size, getattr(args, "task", "retrieval") != "retrieval"
    together = clips and (model.vision.whole_clips or args.image_encoder in VIDEO_SWIN or asked)
    shape = (args.frames, 3, side, side) if together else (3, side, side)
    frames = args.frames if clips and not together else 1

    def pixels(n):
        return {"pixels": torch.zeros(n, *shape)}
    image, weights = measure(model, pixels, precision)
    text, more = measure(model, lambda n: {"tokens": words([""] * n)}, precision) if words else (0, 0)
    image, text, weights = image * views * frames, text * texts, weights + more
    whole = image + text
    if asked:  # the fusion too, for each of the choices
        def question(n):
            inputs = pixels(n) | {"tokens": words([""] * n), "question": words([""] * n)}
            if args.task == "qa-choice":
                choices = {k: v.unflatten(0, (n, CHOICES)) for k, v in words([""] * CHOICES * n).items()}
                inputs["choices"] = choices | {"there": torch.ones(n, CHOICES, dtype=torch.bool)}
            return inputs
        whole, weights = measure(model, question, precision)
    pixels_bytes = 4 * views * (args.frames if clips else 1) * 3 * side * side * 1.25  # float32 and uint8
    return whole, image, text, weights, pixels_bytes


def plan(args, script):
    """The text that `--plan` prints.   Raises: UserError if no estimate is possible."""
    processes = args.plan
    local = args.batch_size // processes
    if local * processes != args.batch_size:
        raise UserError(f"--plan {processes}: --batch-size {args.batch_size} is not divisible by it; use "
                        f"{max(1, local) * processes}")
    clips = MODULES.get(args.dataset) in VIDEOS or bool(args.video_dir)
    model, words = encoders_of(args, clips)
    half = args.mixed_precision != "no"
    whole, image, text, weights, pixels = of_an_example(model, words, args, clips, args.mixed_precision)

    P = sum(p.numel() for p in model.parameters())
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = 2 if args.optimizer != "sgd" else int(args.beta1 > 0)
    copies = {"weights": 4 * P, "gradients": 4 * learnt, args.optimizer: 4 * moments * learnt}
    copies |= {f"copies in {args.mixed_precision}": weights} if half else {}
    copies |= {"key encoder": 4 * P} if args.loss == "moco" else {}
    fixed = sum(copies.values()) + CONTEXT + pixels * local
    loss = min(local, rows_at_once(local, args.batch_size, torch.device("cuda"))) * 84 * args.batch_size
    fixed += min(loss, 2**30)
    ahead = 0
    if getattr(args, "weighting", "") in ("meta", "l2rw") and args.loss == "mama":  # the look-ahead, in float32
        exact = of_an_example(model, words, args, clips, "no")[0] if half else whole
        exact *= 2.6 if args.meta_gradient == "second-order" else 1  # measured: 3.4 against 1.3 of a plain step
        ahead = exact * max(local, args.meta_batch_size // processes) + 12 * learnt
    together = getattr(args, "meta_memory", "") == "fast"  # the step's activations are then kept meanwhile
    need = fixed + (whole * local + ahead if together else max(whole * local, ahead))
    limit = args.gpu_memory * 1e9
    chunk = min(local, int((limit - fixed) // whole)) if limit else 0
    asked = min(args.chunk_size or local, local)
    now = fixed + (whole * asked + ahead if together else max(whole * asked, ahead))
    experts = getattr(args, "image_expert", "") or getattr(args, "text_expert", "")
    beside = ["experts"] * bool(experts) + ["SLIP's head"] * (args.loss == "slip")

    def gb(x):
        return f"{x / 1e9:.1f} GB"
    kind = f"{args.frames} frames" if clips else "images"
    kind += " (clips with --video-dir)" * (not clips and args.dataset not in MODULES)
    lines = {
        "for each of": f"{processes} card{'s' * (processes > 1)}" + (f" of {args.gpu_memory:g} GB" if limit else "")
                       + f", --batch-size {args.batch_size} = {processes} x {local}",
        "parameters": f"{P / 1e6:.1f} M: " + ", ".join(f"{k} {gb(v)}" for k, v in copies.items())
                      + (f"; not counted: {', '.join(beside)}" if beside else ""),
        "activations": f"{whole / 1e6:.1f} MB per example: {kind} {image / 1e6:.1f}, texts {text / 1e6:.1f}",
        "beside": f"pixels {gb(pixels * local)}, matrices of the loss {gb(min(loss, 2**30))}, CUDA {gb(CONTEXT)}",
        **({"look-ahead": f"{gb(ahead)} in float32, before the activations of the step"} if ahead else {}),
        "whole batch": gb(need)}
    if args.chunk_size and asked < local:
        lines[f"--chunk-size {asked}"] = gb(now)
    if limit:
        if now <= limit:
            verdict = "fits as it is"
        elif ahead:
            verdict = "does not fit, and a look-ahead takes the whole batch: use more cards, or a smaller --batch-size"
        elif chunk < 1:
            verdict = "does not fit, not even one example at a time: use more cards, or a smaller --batch-size"
        elif has_batchnorm(model):
            verdict = "does not fit, and BatchNorm should not see chunks: use more cards, or an encoder without it"
        else:
            verdict = f"does not fit; --chunk-size {floor_of(chunk)} does (where {script} takes chunks)"
        lines["verdict"] = verdict
    return "\n".join([f"{script}, memory by arithmetic, not measured on a card"]
                     + [f"  {k:<16} {v}" for k, v in lines.items()])


def floor_of(chunk):
    """The largest power of two, or 3/2 of one, that is at most `chunk` examples."""
    power = 2 ** (chunk.bit_length() - 1)
    return power * 3 // 2 if power > 1 and power * 3 // 2 <= chunk else power
