"""eval.py --query: finds the images of a folder or a set that are nearest to a text."""

from pathlib import Path

from contrastive.data import load_data
from contrastive.data.table import IMAGE_TYPES, Data, make_table
from contrastive.engine.processes import UserError, rank, say
from contrastive.evaluation.answers import refuse_untrained
from contrastive.evaluation.metrics import normalize
from contrastive.figures.base import draw_examples, draw_picture, picture


def search(subject, options):
    """Prints and draws the images of --dataset that are nearest to --query. options: of common.load_data. Collective.
    """
    args = subject.args
    refuse_untrained(subject.model)
    if not subject.tokenizer:
        raise UserError(f"--query: {args.checkpoint} has no text encoder")
    data = load_images(args.dataset, options)
    index, image, _, bad = subject.images(data, subject.view("retrieval", args.dataset))
    sim = (normalize(subject.texts([args.query])) @ normalize(image).T)[0]  # (M,)
    best = sim.topk(min(args.top, len(sim)))
    rows = [int(index[j]) for j in best.indices.tolist()]
    hits = [{"key": data.key(i), "cosine": round(c, 4)} for i, c in zip(rows, best.values.tolist())]
    if rank() == 0:
        title = f'"{args.query}", {len(sim)} images'
        draw_picture(subject.folder / f"query.{args.figures}", draw_hits, title, data, rows, hits)
    say("\n".join(f"{h['cosine']:.4f}  {h['key']}" for h in hits))
    return {"query": args.query, "dataset": args.dataset, "images": len(sim), "unreadable": len(bad), "hits": hits}


def draw_hits(title, data, rows, hits, path):
    """Draws the images of these rows, nearest first, with cosines above and file names below."""
    row = [(picture(data, i), f"cos {hit['cosine']:.2f}", Path(hit["key"]).name[-24:], False)
           for hit, i in zip(hits, rows)]
    draw_examples([("", row)], path, title, width=1.8)


def load_images(name, options):
    """The images to search: all of a folder and its subfolders, with or without captions, or a set's test split."""
    path = Path(name).expanduser()
    if not path.is_dir() or any(path.rglob("*.tar")):
        return load_data(name, "test", **options)
    files = sorted(str(f) for f in path.rglob("*") if f.suffix.lower().lstrip(".") in IMAGE_TYPES)
    if not files:
        raise UserError(f"--dataset {name}: the folder holds no images ({', '.join(IMAGE_TYPES)})")
    return Data(name, "all", make_table([[""]] * len(files), files, files))
