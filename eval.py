"""Evaluate any checkpoint of any script, or any CLIP or image + text pair by name, on any data set.

    python eval.py --checkpoint runs/NAME                                             # retrieval, kNN and the gap on the run's own data set
    python eval.py --checkpoint runs/NAME --datasets coco flickr30k                   # the papers' retrieval tables
    python eval.py --checkpoint runs/NAME --datasets cifar10 cifar100 --tasks zero-shot knn probe
    python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets coco          # any CLIP, by id or folder
    python eval.py --image-encoder tf_efficientnet_lite0 --text-encoder FOLDER ...    # any pair (the projections are random: knn and probe only)
    python eval.py --checkpoint runs/NAME --normalize queue                           # NCL's test-time normalisation, on any checkpoint of any script
    python eval.py --checkpoint openai/clip-vit-base-patch32 --datasets msrvtt=ANNOTATIONS --video-dir VIDEOS --normalize queue
    python eval.py --checkpoint runs/NAME --query "red apple" --dataset photos/       # search a folder and draw the hits
    accelerate launch eval.py ... / torchrun --nproc_per_node 2 eval.py ... --cpu     # the same numbers on any number of processes

Tasks
    retrieval     R@1/5/10/50, MdR, MnR both ways; every caption is a query; R-Mean = mean of R@1/5/10 both ways (TeMo, Table 4);
                  --normalize adds NCL's biases and shows the result without, with a queue of training queries and with the test queries themselves
    zero-shot     top-1/3/5 of the class names (--prompts names, as TeMo) or of the mean of normalised template embeddings (--prompts templates)
    knn           k = 1 and 10, cosine, unweighted vote, ties to the smallest class, mean per-class accuracy, head / mid / tail
    probe         LinearSVC (C = 1, random_state 42) on L2-normalised features, as the authors of TS: few-shot (the smallest class's size) and all
    gap           modality gap, alignment, uniformity
    histograms    densities of positive and negative cosines
The result is a table, eval.json, and pictures in --output-dir.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import common
import ncl
from common import UserError, say

TASKS = ("retrieval", "zero-shot", "knn", "probe", "gap", "histograms")


def parse_args(argv=None):
    """Flags; see the module docstring for the tasks."""
    p = common.Parser(prog="eval.py", description="Evaluate any checkpoint.", allow_abbrev=False, formatter_class=common.Help)
    g = p.add_argument_group("model")
    g.add_argument("--checkpoint", default="", help="run folder, or a CLIP by transformers id or folder")
    g.add_argument("--image-encoder", default="", help="without --checkpoint: image encoder by name")
    g.add_argument("--text-encoder", default="", help="without --checkpoint: text encoder by name")
    g.add_argument("--init-from", default="", help="weights loaded into that pair: .safetensors, .pt or .bin")
    g.add_argument("--pretrained", action=argparse.BooleanOptionalAction, default=True, help="published weights for that pair")
    g.add_argument("--text-pooling", choices=["cls", "mean"], default="cls", help="of that text encoder")
    g.add_argument("--image-size", type=int, default=0, help="pixels of a side; 0 = the checkpoint's own, 224 for a model by name")
    g.add_argument("--image-stats", choices=["own", "imagenet", "clip", "half", "cifar"], default="own",
                   help="mean and std of the pixels: own = as trained; cifar = CIFAR's (the CC3M trainer's habit, worth several points either way)")
    g = p.add_argument_group("data")
    g.add_argument("--datasets", nargs="*", default=[], metavar="NAME[=DIR]", help="sets by name or path, each with an optional local copy; none = the run's own")
    g.add_argument("--split", choices=["test", "val", "train"], default="test", help="split that is evaluated")
    g.add_argument("--image-column", default="", help="as in training")
    g.add_argument("--caption-column", default="", help="as in training")
    g.add_argument("--video-dir", default="", help="as in training")
    g.add_argument("--frames", type=int, default=0, help="frames of a clip; 0 = as in training, 12 for a model by name")
    g.add_argument("--frame-cache", default="", metavar="DIR", help="as in training")
    g.add_argument("--feature-dir", nargs="+", default=[], metavar="DIR", help="as in training")
    g.add_argument("--label-column", default="", help="as in training")
    g.add_argument("--max-captions", type=int, default=0, help="captions used of an image; 5 = the 25,000 of COCO's usual protocol; 0 = all")
    g.add_argument("--limit", type=int, default=0, help="examples used, the first; 0 = all")
    g = p.add_argument_group("tasks")
    g.add_argument("--tasks", nargs="+", choices=TASKS, default=["retrieval", "knn", "gap"], help="what to measure; a task that a set cannot have is named and left out")
    g.add_argument("--prompts", choices=["names", "templates"], default="templates", help="zero-shot class texts: names alone (TeMo) or the set's templates")
    g.add_argument("--knn-k", type=int, nargs="+", default=[1, 10], help="neighbours")
    g.add_argument("--few-shot", type=int, default=0, help="images per class of the few-shot probe; 0 = the smallest class")
    g.add_argument("--seed", type=int, default=42, help="of the few-shot draw; TS authors: 42")
    g.add_argument("--normalize", choices=["none", "queue", "oracle"], default="none", help="NCL's biases at test time: from training queries (the run's queue, or its training set), or from the test queries themselves (no fair result)")
    g.add_argument("--queue-size", type=int, default=16_384, help="training queries used of each kind, the latest; paper 16,384")
    g.add_argument("--queue-split", choices=["run", "train", "val"], default="run", help="where these queries come from: the run's own queue (the training set where it has none), or that split encoded anew")
    g.add_argument("--gamma", type=float, default=0.0, help="temperature of that normalisation, divides the cosine; 0 = the checkpoint's own")
    g.add_argument("--iterations", type=int, default=0, help="rounds of Sinkhorn-Knopp; 0 = the checkpoint's own, else the paper's 4")
    g.add_argument("--query", default="", help="a text: search --dataset for it and draw the hits instead of the tasks")
    g.add_argument("--dataset", default="", help="folder of images (or any set) that --query searches")
    g.add_argument("--top", type=int, default=5, help="hits of a query")
    g = p.add_argument_group("run")
    g.add_argument("--output-dir", default="", help="where eval.json and the pictures go; empty = RUN_DIR/eval, or runs/eval")
    g.add_argument("--eval-batch", type=int, default=256, help="images at a time")
    g.add_argument("--workers", type=int, default=4, help="loader processes")
    g.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=False, help="stay on the CPU")
    g.add_argument("--threads", type=int, default=0, help="CPU threads of each process; 0 = cores / local processes")
    args = p.parse_args(argv)
    if not args.checkpoint and not (args.image_encoder and args.text_encoder):
        p.error("--checkpoint RUN_DIR, or --image-encoder and --text-encoder, say what to evaluate")
    if bool(args.query) != bool(args.dataset):
        p.error("--query TEXT and --dataset FOLDER go together; --datasets is for the tasks")
    for name in ("max_captions", "limit", "few_shot", "image_size", "workers", "threads", "frames", "gamma", "iterations"):
        if getattr(args, name) < 0:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 0")
    for name in ("eval_batch", "top", "queue_size"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.normalize == "queue" and args.queue_split == args.split:
        p.error(f"--queue-split {args.queue_split}: these are the queries of --split {args.split} themselves; that is --normalize oracle")
    if min(args.knn_k) < 1:
        p.error(f"--knn-k {min(args.knn_k)}: must be at least 1")
    return args


def open_model(args):
    """(model, tokenizer, transform, own data set): a run folder, a CLIP by name, or a pair by name."""
    folder = Path(args.checkpoint) if args.checkpoint else None
    if folder and (folder / "model.json").is_file():
        if args.image_size:
            say("--image-size: a run keeps its own")
        own = common.read_json(folder / "args.json", {})
        return *common.load_model(folder), own
    if folder and folder.is_dir() and (folder / "checkpoints").is_dir():
        raise UserError(f"--checkpoint {folder}: this run has not ended (no model.json); continue it with --resume {folder}")
    image, text = (args.checkpoint, args.checkpoint) if args.checkpoint else (args.image_encoder, args.text_encoder)
    if "small" in (image, text):
        raise UserError("--image-encoder and --text-encoder small have no weights without a run; give --checkpoint RUN_DIR")
    width = _clip_width(image)
    tokenizer = common.build_tokenizer(text, 77)
    spec = dict(image_encoder=image, text_encoder=text, embed_dim=width or 256, image_size=args.image_size or 224, text_length=77, text_pooling=args.text_pooling,
                image_stats="encoder", eval_resize="crop")
    torch.manual_seed(args.seed)
    model, transform = common.build_model(spec, tokenizer, args.pretrained, args.init_from)
    if not width:
        say("the projections of this pair are random: only its image features (knn, probe) mean anything")
    return model.eval(), tokenizer, transform, {}


def _clip_width(name):
    """projection_dim of a CLIP by name, else 0."""
    if "/" not in name and not Path(name).is_dir():
        return 0
    import transformers
    try:
        return getattr(transformers.AutoConfig.from_pretrained(name), "projection_dim", 0)
    except (OSError, ValueError) as error:
        raise UserError(f"--checkpoint {name}: neither a run folder nor a model ({common._hub_reason(error)})") from error


# ======================================================= tasks =======================================================
def zero_shot(model, tokenizer, data, image, labels, args, device):
    """Top-1/3/5 against class embeddings: names alone, or the mean of normalised template embeddings (CLIP)."""
    templates = ["{c}"] if args.prompts == "names" else list(data.prompts or ["a photo of a {c}."])
    names = [n.replace("_", " ") for n in data.label_names]
    texts = [t.replace("{c}", n) for n in names for t in templates]
    embeddings = common.normalize(common.encode_texts(model, tokenizer, texts, device)).view(len(names), len(templates), -1)  # (C, P, D)
    result = common.zero_shot_accuracy(image, labels, embeddings.mean(1))
    chance = {f"top{k}": 100 * min(1.0, k / len(names)) for k in (1, 3, 5)}
    return result | {"classes": len(names), "prompts": len(templates)}, chance


def stand_ins(model, tokenizer, transform, name, options, args, own, device):
    """(texts (K, D), videos (K, D), gamma) for --normalize: the queues of an NCL run, else embeddings of training examples and of their captions, drawn once. Collective."""
    gamma, file = args.gamma or own.get("tau") or 0.01, Path(args.checkpoint) / "queues.safetensors"
    last = common.latest_checkpoint(args.checkpoint) if own.get("learnable_tau") else None
    if last and not args.gamma and "tau.log_tau" in (extra := load_file(last / "extra.safetensors")):
        gamma = extra["tau.log_tau"].exp().item()
    if args.checkpoint and file.is_file():
        queues = load_file(file)
        gamma = args.gamma or queues["gamma"].item()
        if name == own.get("dataset") and args.queue_split == "run":       # other sets have queries of their own
            return queues["texts"][-args.queue_size:], queues["videos"][-args.queue_size:], gamma
    if args.normalize == "oracle":
        return None, None, gamma
    train = common.load_data(name, "val" if args.queue_split == "val" else "train", **options)
    if isinstance(train, common.Stream):
        raise UserError("--normalize queue: the training set is a stream and the checkpoint has no queue")
    rows = np.sort(np.random.default_rng(args.seed).permutation(len(train))[:args.queue_size])
    index, videos, _, _ = common.encode_images(model, train, transform, device, args.eval_batch, args.workers, rows)
    texts = [c for i in index for c in train.captions(i)]
    texts = [texts[k] for k in np.sort(np.random.default_rng(args.seed).permutation(len(texts))[:args.queue_size])]
    return common.encode_texts(model, tokenizer, texts, device), videos, gamma


def evaluate(model, tokenizer, transform, name, options, args, own, device, folder):
    """All tasks of one data set -> (metrics, chance, {task: why it is left out}); own: the run's flags; pictures go to folder. Collective."""
    sets, iterations = None, args.iterations or own.get("iterations") or 4
    if own.get("script") == "temperature_schedules" and name == own["dataset"]:  # its long tail, its held-out images, the classes it counts
        sets = common.labelled_sets(name, own["imbalance_ratio"], own["split_seed"], **options | {k: own[k] for k in ("index_file", "test_file") if own[k]})
    data, train = sets[args.split] if sets else common.load_data(name, args.split, **options), None
    if args.limit:
        data = common.subset(data, np.arange(min(args.limit, len(data))), args.split)
    if args.max_captions:
        data.max_captions = args.max_captions
    index, image, features, bad = common.encode_images(model, data, transform, device, args.eval_batch, args.workers)
    if bad:
        say(f"{name} ({args.split}): {len(bad)} of {len(data)} images cannot be read and are left out, first {next(iter(bad.items()))}")
    metrics, chance, left_out = {"images": len(image), "unreadable": len(bad)}, {}, {}
    labels = None if data.labels is None else torch.from_numpy(np.asarray(data.labels)[index])
    pieces = None
    if {"retrieval", "gap", "histograms"} & set(args.tasks) and data.has_captions:
        pieces = common.retrieval_pieces(model, tokenizer, data, index, image, device)
        metrics["captions"] = len(pieces["text"])
    for task in args.tasks:
        try:
            if task in ("retrieval", "gap", "histograms") and pieces is None:
                raise UserError("the set has no captions")
            if task in ("zero-shot", "knn", "probe") and labels is None:
                raise UserError("the set has no labels")
            if task in ("knn", "probe") and train is None:
                train = sets["train"] if sets else common.load_data(name, "train", **options)
                if isinstance(train, common.Stream):
                    raise UserError("the training set is a stream: no kNN or probe")
                if train.label_names != data.label_names:
                    raise UserError("train and test name different classes")
                rows, _, known, _ = common.encode_images(model, train, transform, device, args.eval_batch, args.workers)
                known_labels = torch.from_numpy(np.asarray(train.labels)[rows])
            if task == "retrieval":
                metrics[task], chance[task] = common.retrieval_both_ways(pieces)
                if args.normalize != "none":
                    task = "normalize"                                     # what is left out if this fails
                    texts, videos, gamma = stand_ins(model, tokenizer, transform, name, options, args, own, device)
                    results, pieces["biases"] = ncl.normalized_retrieval(pieces, gamma, iterations, texts, videos)
                    metrics["retrieval"] = {k: v for k, v in results[args.normalize].items() if k != "error"}
                    metrics["normalize"] = results
                    if common.rank() == 0:
                        ncl.draw_normalization(pieces, gamma, iterations, {"texts": [] if texts is None else texts, "videos": videos}, folder / f"normalization_{common.slug(name)}.png")
            elif task == "gap":
                image_of_text = pieces["image"][pieces["owner"]]           # (C, D)
                metrics[task] = {"modality_gap": common.modality_gap(pieces["image"], pieces["text"]),
                                 **{k: v for k, v in common.embedding_health(image_of_text, pieces["text"], limit=4096).items() if k != "gap"}}
                chance[task] = {"modality_gap": (1 / len(pieces["image"]) + 1 / len(pieces["text"])) ** 0.5}
            elif task == "histograms":
                metrics[task] = common.similarity_histograms(pieces)
                if common.rank() == 0:
                    common.draw_histograms({args.checkpoint or "model": metrics[task]}, folder / f"similarities_{common.slug(name)}.png", f"{name} ({args.split}): image-text cosines")
            elif task == "zero-shot":
                if not data.label_names:
                    raise UserError("the set has no class names")
                metrics[task], chance[task] = zero_shot(model, tokenizer, data, image, labels, args, device)
            elif task == "knn":
                metrics[task], chance[task] = {}, {}
                for k in args.knn_k:
                    result = common.knn_accuracy(known, known_labels, features, labels, k=k, per_class=True)
                    per_class = result.pop("per_class")
                    metrics[task][f"k={k}"] = result | common.head_mid_tail(known_labels.numpy(), per_class)
                    chance[task][f"k={k}"] = common.knn_chance(known_labels.numpy(), labels.numpy())
            elif task == "probe":
                smallest = int(np.bincount(known_labels.numpy())[np.unique(known_labels.numpy())].min())
                shots = args.few_shot or smallest
                metrics[task] = {f"few-shot ({shots} a class)": common.linear_probe(known, known_labels, features, labels, few_shot=shots, seed=args.seed),
                                 "all": common.linear_probe(known, known_labels, features, labels, seed=args.seed)}
                chance[task] = {k: {"top1": 100 / len(np.unique(known_labels.numpy()))} for k in metrics[task]}
        except (UserError, ValueError) as error:
            left_out[task] = str(error)
    if common.rank() == 0 and pieces is not None and "retrieval" in args.tasks:
        common.draw_retrieval(pieces, folder / ("retrieval.png" if name == args.names[0] else f"retrieval_{common.slug(name)}.png"), bias=pieces.get("biases", {}).get(args.normalize, (None,))[0])
    return metrics, chance, left_out


def search(model, tokenizer, transform, args, device, folder):
    """The images of --dataset nearest to --query: printed and drawn."""
    data = common.load_images(args.dataset, image_column=args.image_column)
    index, image, _, bad = common.encode_images(model, data, transform, device, args.eval_batch, args.workers)
    sim = (common.normalize(common.encode_texts(model, tokenizer, [args.query], device)) @ common.normalize(image).T)[0]  # (M,)
    best = sim.topk(min(args.top, len(sim)))
    hits = [{"key": data.key(int(index[j])), "cosine": round(c, 4)} for c, j in zip(best.values.tolist(), best.indices.tolist())]
    if common.rank() == 0:
        fig, axes = common.figure(len(hits), width=1.8, height=2.2)
        for ax, hit, j in zip(axes, hits, best.indices.tolist()):
            ax.imshow(data.picture(int(index[j])))
            ax.set(xticks=[], yticks=[])
            ax.set_title(f"cos {hit['cosine']:.2f}", fontsize=9)
            ax.set_xlabel(Path(hit["key"]).name[-24:], fontsize=7)
        fig.suptitle(f'"{args.query}", {len(sim)} images', fontsize=10)
        common.save_figure(fig, folder / "query.png")
    say("\n".join(f"{h['cosine']:.4f}  {h['key']}" for h in hits))
    return {"query": args.query, "dataset": args.dataset, "images": len(sim), "unreadable": len(bad), "hits": hits}


# ======================================================= main ========================================================
def table(name, metrics, chance):
    """One data set's result as lines, every number beside its chance level where it has one."""
    known = common.flatten(chance)
    lines = [f"\n{name}: {metrics['images']} images" + (f", {metrics['captions']} captions" if "captions" in metrics else "")]
    for task in TASKS:
        rows = common.flatten(metrics.get(task, {})) if task != "histograms" else {}
        groups = {}
        for key, value in rows.items():
            groups.setdefault(key.rpartition("/")[0], []).append((key.rpartition("/")[2], value, known.get(f"{task}/{key}")))
        for group, cells in groups.items():
            text = "  ".join(f"{k} {v:.2f}" + (f" ({c:.2f})" if c is not None else "") if isinstance(v, float) else f"{k} {v}" for k, v, c in cells)
            lines.append(f"  {(task + ' ' + group.replace('_', ' ')).strip():<26} {text}")
    return "\n".join(lines)


def main(args):
    """Evaluate, print, write eval.json; returns its content."""
    common.set_up_evaluation(args)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu", int(os.environ.get("LOCAL_RANK", 0)) if torch.cuda.is_available() and not args.cpu else None)
    model, tokenizer, transform, own = open_model(args)
    model = model.to(device)
    if args.image_stats != "own":
        transform.mean, transform.std = common.STATS[args.image_stats]
    folder = Path(args.output_dir or (Path(args.checkpoint) / "eval" if (Path(args.checkpoint) / "model.json").is_file() else "runs/eval"))
    common.make_folder(folder, "--output-dir")
    result = {"command": " ".join([Path(sys.executable).name] + sys.argv), "checkpoint": args.checkpoint or f"{args.image_encoder} + {args.text_encoder}", "split": args.split,
              "versions": common.versions().splitlines(), "processes": common.world()}
    if args.query:
        result |= search(model, tokenizer, transform, args, device, folder)
    else:
        words = args.datasets or own.get("eval_datasets") or ([f"{own['dataset']}={own.get('data_dir', '')}"] if own.get("dataset") else [])
        wanted = [(w, "", "") if Path(w).exists() else w.partition("=") for w in words] or [("", "", "")]
        if not args.datasets:
            wanted = [w for w in wanted if args.split in common.splits_of(w[0])] or wanted
        if not wanted[0][0]:
            raise UserError("--datasets is needed: a model by name has no data set of its own")
        args.names, result["datasets"], result["errors"] = [w[0] for w in wanted], {}, {}
        for name, _, data_dir in wanted:
            saved = {k: own[k] for k in common.DATA_FLAGS if own.get(k)} if name == own.get("dataset") else {k: own[k] for k in ("frames",) if own.get(k)}
            options = saved | common.data_options(args) | {"image_size": transform.size} | ({"data_dir": data_dir} if data_dir else {})
            try:
                metrics, chance, left_out = evaluate(model, tokenizer, transform, name, options | {"unfold_captions": False, "caption_noise": 0.0}, args, own, device, folder)
            except (UserError, ValueError, RuntimeError) as error:
                if len(wanted) == 1:
                    raise
                result["errors"][name] = str(error)
                say(f"\n{name} is left out: {error}")
                continue
            result["datasets"][name] = {"metrics": metrics, "chance": chance, "left_out": left_out}
            say(table(name, metrics, chance) + (ncl.normalization_table({name: metrics}) if "normalize" in metrics else ""))
            for task, why in left_out.items():
                say(f"  {task:<26} left out: {why}")
    if common.rank() == 0:
        common.write_json(folder / "eval.json", result)
    say(f"\nwritten to {folder}")
    return json.loads(json.dumps(result, default=str))


if __name__ == "__main__":
    with common.clean_exit():
        main(parse_args())
