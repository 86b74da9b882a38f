"""Figures of temo.py: curves, retrieval, and those of the paper's Figures 2 to 5 and 7."""

from contrastive.core.files import read_json
from contrastive.evaluation.similarities import similarity_histograms
from contrastive.figures import base
from contrastive.figures.base import draw_curves, draw_training_curves

TERMS = (
    "L_MM", "L_M-MM", "L_M-I2I", "L_M-T2T", "L_I2I", "L_T2T", "L_CWCL",
    "L_E-image", "L_E-text", "L_image")  # in the log


def draw(run):
    """Draws the figures of a run: curves, retrieval, and the paper's Figures 2 to 5 and 7."""
    draw_training(run)
    before = read_json(run.folder / "similarity_before.json", {})
    for name, suffix, pieces in base.by_set(run.val_pieces or run.test_pieces):
        if run.val_pieces:
            draw_evaluation(run, name, suffix, pieces)
        stages = {}
        if name in before:
            stages["before training"] = before[name]
        loss = getattr(run.args, "loss", run.script)  # a variant has one loss
        stages[f"after {loss}"] = similarity_histograms(pieces)
        title = f"{base.title_of(pieces.data)}: {base.kind_of(pieces)}-text cosines (Fig. 4)"
        base.draw_histograms(stages, run.folder / f"similarities{suffix}.png", title=title)
        base.draw_pairs(pieces, run.folder / f"positive_pairs{suffix}.png")
    for _, suffix, pieces in base.by_set(run.test_pieces):
        base.draw_retrieval(pieces, run.folder / f"retrieval{suffix}.png")


def draw_training(run):
    """Draws curves.png: what the log has of the training steps."""
    logged = {name for row in run.log.rows for name in row}
    terms = {name: name for name in TERMS if name in logged}
    tau = {"tau": "tau"}
    if "tau_pos" in logged:
        tau = {"positive pairs": "tau_pos", "negative pairs": "tau_neg"}
    total_loss = "total loss"
    blended_terms = terms.keys() - {"L_MM", "L_E-image", "L_E-text", "L_image"}
    if "L_MM" in terms and blended_terms and run.args.blend == "quadratic":
        total_loss = "total loss (weights change along the run, Eq. 8)"
    panels = [
        ("terms of the loss, without their weights", "loss", terms),
        base.recall_panel(run),
        (total_loss, "loss", {"loss": "loss"}),
        ("temperature (Fig. 2)", "mean over the batch", tau),
        *base.batch_panels()]
    draw_training_curves(run, panels)


def draw_evaluation(run, name, suffix, pieces):
    """Draws evaluation.png: metrics of a val split along the training (Figs. 3 and 7)."""
    zero_shot = {f"top-{k}": f"eval/{name}/zero-shot/top{k}" for k in (1, 3, 5)}
    gap = {"gap": f"eval/{name}/modality_gap"}
    knn = {
        "top-1": f"eval/{name}/knn@1/top1",
        "mean per class": f"eval/{name}/knn@1/mean_per_class"}
    panels = [
        base.recall_panel(run, name),
        ("zero-shot by prompts, val (Fig. 7)", "%", zero_shot),
        ("modality gap, val (Fig. 3)", "distance of the means", gap),
        (f"kNN@1 of {base.kind_of(pieces)}s, val (Fig. 3)", "%", knn)]
    path = run.folder / f"evaluation{suffix}.png"
    draw_curves(run, panels, path, x="samples_seen")
