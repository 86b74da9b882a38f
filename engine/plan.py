"""--plan: the memory that a run asks of each card, by arithmetic, without data, weights or a card.

Parameters, gradients and what the optimiser keeps are counted; what the encoders keep of an example for the way back is
measured on the CPU, in the precision of the run (fp16 as bf16), on encoders with random weights. GB are 10^9 bytes: a
card sold by that name has some 6 % more, which is left for fragments.
"""

import contextlib
import os

from common import build_model, rows_at_once, spec_of
from engine.base import UserError

import torch

from encoders.base import VIDEO, VIDEO_SWIN, has_batchnorm
from sets import MODULES

VIDEOS = ("sets.videos", "sets.questions", "sets.epic", "sets.ssv2", "sets.moving_emoji")  # sets of clips
CONTEXT = 1.5e9  # bytes that CUDA, cuDNN, NCCL and the compiler's kernels take
STAND_INS = {  # name -> (transformers' configuration, its arguments): of the same size, for who has no hub
    "openai/clip-vit-base-patch32": ("CLIPConfig", {}),
    "openai/clip-vit-base-patch16": ("CLIPConfig", {"vision_config": {"patch_size": 16}}),
    "laion/CLIP-ViT-B-16-laion2B-s34B-b88K": ("CLIPConfig", {"vision_config": {"patch_size": 16}}),
    "distilbert/distilbert-base-uncased": ("DistilBertConfig", {}),
    "google-bert/bert-base-uncased": ("BertConfig", {}),
    "t5-base": ("T5Config", {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 3072})}
# views and texts of an example that one forward of a loss sees; TeMo sees both twice for the losses within a modality
VIEWS = {"slip": (3, 1), "simclr": (2, 0), "sdclr": (2, 0), "moco": (1, 0)}


class Words:
    """Stands in for a tokenizer: texts as long as they may be."""

    def __init__(self, length, vocabulary=4000):
        self.length, self.tokenizer = length, range(vocabulary)

    def __call__(self, texts):
        ids = torch.ones(len(texts), self.length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids.clone()}


def config_of(name):
    """The configuration of a transformers encoder as a dict: from the cache, else a stand-in; None for others, which
    their own reader asks for."""
    import transformers
    name = name.rpartition(":")[2]  # after clip_vip:
    with contextlib.suppress(OSError, ValueError):
        if "/" in name or os.path.isdir(name):
            return transformers.AutoConfig.from_pretrained(name, local_files_only=True).to_dict()
    kind, arguments = STAND_INS.get(name, (None, None))
    return getattr(transformers, kind)(**arguments).to_dict() if kind else None


def saved_bytes(model, function):
    """Bytes that a forward keeps for the way back, each storage once, without the model's own tensors."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    seen = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        kept = function()  # alive until all is counted: a freed place would be used again
    return sum(seen.values()) if kept is not None else 0


def measure(model, inputs, precision):
    """(bytes of each example, bytes of a forward whatever the batch: weights in half precision).

    inputs: function of a number of examples -> keywords of model."""
    sizes = []
    for n in (1, 2):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "no"):
            sizes.append(saved_bytes(model, lambda n=n: model(**inputs(n))))
    return sizes[1] - sizes[0], max(0, 2 * sizes[0] - sizes[1])


def encoders_of(args, clips):
    """The model of these flags, with random weights, and its Words.   Raises: UserError without its configuration."""
    spec = spec_of(args) | {"vision_config": config_of(args.image_encoder)}
    if getattr(args, "qa_model", "") == "vgt":
        raise UserError("--plan: VGT is not counted; beside BERT it has 8 million parameters")
    if args.image_encoder == "features":
        raise UserError("--plan: --image-encoder features is as wide as its files; its towers need little memory")
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
    """Bytes that an example keeps, of its images or frames, of its texts; of weights in half precision; of its pixels.

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
    if asked:  # the fusion too
        whole, weights = measure(model, lambda n: pixels(n) | {"tokens": words([""] * n), "question": words([""] * n)},
                                 precision)
    pixels_bytes = 4 * views * (args.frames if clips else 1) * 3 * side * side * 1.25  # float32 and uint8
    return whole, image, text, weights, pixels_bytes


def plan(args, script):
    """What `--plan` prints.   Raises: UserError where it cannot be told."""
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
    if getattr(args, "weighting", "") in ("meta", "l2rw") and args.loss == "mama":  # in float32, before the step itself
        exact = of_an_example(model, words, args, clips, "no")[0] if half else whole
        ahead = exact * max(local, args.meta_batch_size // processes) + 12 * learnt
    need = fixed + max(whole * local, ahead)
    limit = args.gpu_memory * 1e9
    chunk = min(local, int((limit - fixed) // whole)) if limit else 0
    asked = min(args.chunk_size or local, local)
    now = fixed + max(whole * asked, ahead)

    def gb(x):
        return f"{x / 1e9:.1f} GB"
    lines = {
        "for each of": f"{processes} card{'s' * (processes > 1)}" + (f" of {args.gpu_memory:g} GB" if limit else "")
                       + f", --batch-size {args.batch_size} = {processes} x {local}",
        "parameters": f"{P / 1e6:.1f} M: " + ", ".join(f"{k} {gb(v)}" for k, v in copies.items()),
        "activations": f"{whole / 1e6:.1f} MB an example: " + (f"{args.frames} frames " if clips else "images ")
                       + f"{image / 1e6:.1f}, texts {text / 1e6:.1f}",
        "beside": f"pixels {gb(pixels * local)}, matrices of the loss {gb(min(loss, 2**30))}, CUDA {gb(CONTEXT)}",
        **({"look-ahead": f"{gb(ahead)} in float32, before the activations of the step"} if ahead else {}),
        "whole batch": gb(need)}
    if args.chunk_size and asked < local:
        lines[f"--chunk-size {asked}"] = gb(now)
    if limit:
        if now <= limit:
            verdict = "fits as it is"
        elif chunk < 1 or ahead + fixed > limit:
            verdict = "does not fit, not even one example at a time: more cards, or a smaller --batch-size"
        elif has_batchnorm(model):
            verdict = "does not fit, and BatchNorm should not see chunks: more cards, or an encoder without it"
        else:
            verdict = f"does not fit; --chunk-size {floor_of(chunk)} does (where {script} takes chunks)"
        lines["verdict"] = verdict
    return "\n".join([f"{script}, memory by arithmetic, not measured on a card"]
                     + [f"  {k:<16} {v}" for k, v in lines.items()])


def floor_of(chunk):
    """The largest power of two, or three halves of one, that is not above a number of examples."""
    power = 2 ** (chunk.bit_length() - 1)
    return power * 3 // 2 if power > 1 and power * 3 // 2 <= chunk else power
