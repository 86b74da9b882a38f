"""Pictures of temo.py: curves, retrieval, and those of the paper's Figures 2 to 7 that one run can show."""

from contrastive.engine.processes import read_json
from contrastive.figures import base
from contrastive.figures.base import draw_curves


def draw(run):
    """The pictures of a run: curves, retrieval, and the paper's Figures 2 to 7."""
    args, log = run.args, run.log
    per_pair = bool(log.column("tau_pos")[0])
    tau = {"positive pairs": "tau_pos", "negative pairs": "tau_neg"} if per_pair else {"tau": "tau"}
    names = "L_MM", "L_M-MM", "L_M-I2I", "L_M-T2T", "L_I2I", "L_T2T", "L_E-image", "L_E-text"
    terms = {name: name for name in names if log.column(name)[0]}
    run.picture("curves.png", draw_curves, log, [
        ("loss" + " (its weights change along the run)" * (args.row in ("e", "g")), "loss",
         {"the run's loss": "loss"} | terms),
        ("temperature (Fig. 2)", "mean over the batch", tau), *base.BATCH])
    before = read_json(run.folder / "similarity_before.json", {})
    for name, suffix, pieces in base.by_set(run.val_pieces or run.test_pieces):
        it = base.kind_of(pieces)
        ways = (("text_to_image", f"to {it}"), ("image_to_text", "to text"))
        recalls = {f"{k} {label}": f"eval/{name}/{way}/{k}" for way, label in ways for k in ("R@1", "R@10")}
        knn = {"top-1": f"eval/{name}/knn@1/top1", "mean per class": f"eval/{name}/knn@1/mean_per_class"}
        top = {f"top-{k}": f"eval/{name}/zero-shot/top{k}" for k in (1, 3, 5)}
        zero = [("zero-shot by prompts, val (Fig. 7)", "%", top)] if log.column(top["top-1"])[0] else []
        run.picture(f"evaluation{suffix}.png", draw_curves, log, [
            ("retrieval, val", "%", recalls), *zero,
            ("modality gap, val (Fig. 3)", "distance of the means", {"gap": f"eval/{name}/modality_gap"}),
            (f"kNN@1 of {it}s, val (Fig. 3)", "%", knn)], x="samples_seen")
        stages = {"before training": before[name]} if name in before else {}
        stages[f"after {args.loss}"] = base.similarity_histograms(pieces)
        run.picture(f"similarities{suffix}.png", base.draw_histograms, stages,
                    title=f"{name} ({pieces['data'].split}): {it}-text cosines (Fig. 4)")
        run.picture(f"positive_pairs{suffix}.png", base.draw_pairs, pieces)
    for _, suffix, pieces in base.by_set(run.test_pieces):
        run.picture(f"retrieval{suffix}.png", base.draw_retrieval, pieces)
