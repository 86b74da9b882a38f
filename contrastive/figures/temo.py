"""Pictures of temo.py: curves, retrieval, and those of the paper's Figures 2 to 7 that one run can show."""

from contrastive.engine.processes import read_json
from contrastive.figures import base
from contrastive.figures.base import draw_curves


def draw(run):
    """The pictures of a run: curves, retrieval, and the paper's Figures 2 to 7."""
    logged = {name for row in run.log.rows for name in row}
    tau = {"positive pairs": "tau_pos", "negative pairs": "tau_neg"} if "tau_pos" in logged else {"tau": "tau"}
    names = "L_MM", "L_M-MM", "L_M-I2I", "L_M-T2T", "L_I2I", "L_T2T", "L_E-image", "L_E-text"
    draw_curves(run, [
        ("terms of the loss, without their weights", "loss", {name: name for name in names if name in logged}),
        ("retrieval, val", "%", base.recalls(run)),
        ("temperature (Fig. 2)", "mean over the batch", tau), *base.BATCH,
        ("their weighted sum (Eq. 8), whose weights grow along the run", "loss", {"loss": "loss"})
    ], run.folder / "curves.png", rest=True)
    before = read_json(run.folder / "similarity_before.json", {})
    for name, suffix, pieces in base.by_set(run.val_pieces or run.test_pieces):
        it = base.kind_of(pieces)
        knn = {"top-1": f"eval/{name}/knn@1/top1", "mean per class": f"eval/{name}/knn@1/mean_per_class"}
        zero_shot = {f"top-{k}": f"eval/{name}/zero-shot/top{k}" for k in (1, 3, 5)}
        if run.val_pieces:
            draw_curves(run, [
                ("retrieval, val", "%", base.recalls(run, name)),
                ("zero-shot by prompts, val (Fig. 7)", "%", zero_shot),
                ("modality gap, val (Fig. 3)", "distance of the means", {"gap": f"eval/{name}/modality_gap"}),
                (f"kNN@1 of {it}s, val (Fig. 3)", "%", knn)], run.folder / f"evaluation{suffix}.png", x="samples_seen")
        stages = {"before training": before[name]} if name in before else {}
        stages[f"after {run.args.loss}"] = base.similarity_histograms(pieces)
        base.draw_histograms(stages, run.folder / f"similarities{suffix}.png",
                             title=f"{name} ({pieces['data'].split}): {it}-text cosines (Fig. 4)")
        base.draw_pairs(pieces, run.folder / f"positive_pairs{suffix}.png")
    for _, suffix, pieces in base.by_set(run.test_pieces):
        base.draw_retrieval(pieces, run.folder / f"retrieval{suffix}.png")
