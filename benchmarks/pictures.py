"""The README's pictures, from real runs: one of each method, small files below results/pictures/.

    python benchmarks/pictures.py --keep RUNS      # the folder that claims.py --keep filled

Each picture is that of seed 0 of the trial that val chose. TS, MM-TS and MAMA: as the run drew it. NCL: retrieved
clips before any normalisation at test time, by eval.py. TeMo: the temperature of every pair of a batch of test.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # noqa: E402
from engine.base import read_json  # noqa: E402

import temo  # noqa: E402
from benchmarks import claims  # noqa: E402
from evaluation.metrics import normalize  # noqa: E402
from figures.base import figure, save_figure  # noqa: E402

WIDTH, COLOURS = 1100, 128  # px and colours of a small file
SOURCES = {  # picture: (claim, arm, picture of the run)
    "ts": ("ts-long-tail", "cosine", "figures.png"), "mmts": ("mmts-all", "TS and ICS", "clusters.png"),
    "mmts_tau": ("mmts-all", "TS and ICS", "temperatures.png"), "ncl": ("ncl-training", "NCL", ""),
    "mama": ("mama-weights", "meta", "weights.png"), "temo": ("temo-retrieval", "TeMo", "")}


def run_of(claim, arm, keep, trials):
    """(folder of the kept run of seed 0, its words), or None."""
    _, words = claims.chosen(claim, arm, trials, 1) or (None, None)
    folder = words and Path(keep) / claims.file_of(words).stem
    return (folder, words) if folder and folder.is_dir() else None


def retrieved(run, path):
    """NCL: queries and the clips that are nearest to them."""
    with tempfile.TemporaryDirectory() as folder:
        claims.evaluate(run, folder)
        Path(path).write_bytes((Path(folder) / "retrieval.png").read_bytes())


def temperatures(run, path, pairs=20):
    """TeMo: cosines of pairs that stand far apart in the test split, and the temperatures made of them."""
    import numpy as np
    import torch

    args = read_json(run / "args.json")
    model, tokenizer, transform = common.load_model(run)
    options = {k: args[k] for k in ("clips", "image_size", "frames")}
    data = common.load_data("moving-emoji", "test", **options)
    rows = np.linspace(0, len(data) - 1, pairs).round().astype(int)
    clips = torch.stack([transform(data.read(int(i))) for i in rows])                    # (B, T, 3, S, S)
    with torch.no_grad():
        video = normalize(model(clips)[0])                                        # (B, D)
        text = normalize(model(tokens=tokenizer([data.captions(int(i))[0] for i in rows]))[1])
    sim = text @ video.T                                                                 # (B, B)
    tau = temo.modulated_temperature(sim, args["tau_min"], args["tau_alpha"])            # Eq. 4
    fig, axes = figure(2, width=5.4, height=4.6)
    titles = ("cosine, text x video", "temperature of each pair (Eq. 4)")
    for ax, values, title in zip(axes, (sim, tau), titles, strict=True):
        ax.set(title=title, xlabel="video", ylabel="text", xticks=[], yticks=[])
        fig.colorbar(ax.imshow(values.numpy(), cmap="viridis"), ax=ax, shrink=0.85)
    save_figure(fig, path)


def shrink(path, width=WIDTH):
    """Fewer pixels and colours: a small file."""
    from PIL import Image
    image = Image.open(path).convert("RGB")
    image.thumbnail((width, width))
    image.quantize(COLOURS).save(path, optimize=True)


def main(argv=None):
    """Make what can be made of the kept runs, and results/pictures/commands.md, which says of which."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--keep", required=True, help="folder of the run folders that claims.py --keep left")
    p.add_argument("--trials", type=int, default=3, help="as for claims.py")
    p.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES), help="which")
    args = p.parse_args(argv)
    folder = claims.RESULTS / "pictures"
    folder.mkdir(exist_ok=True)
    listed = folder / "commands.md"
    known = listed.read_text().splitlines() if listed.is_file() else []
    lines = {line.split("`")[1]: line for line in known if line.startswith("- `")}
    for name in args.only:
        claim, arm, source = SOURCES[name]
        found = run_of(claim, arm, args.keep, args.trials)
        path = folder / f"{name}.png"
        if not found:
            print(f"{name}: no such run below {args.keep}; left as it is")
            continue
        run, words = found
        if source:
            path.write_bytes((run / source).read_bytes())
        else:
            (retrieved if name == "ncl" else temperatures)(run, path)
        shrink(path)
        lines[path.name] = f"- `{path.name}`: `python {' '.join(words)}`"
        print(f"{path}: {path.stat().st_size // 1024} KiB")
    listed.write_text("".join(f"{line}\n" for line in lines.values()))


if __name__ == "__main__":
    main()
