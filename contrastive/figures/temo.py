"""Figures of TeMo: of a run, curves, retrieval and the paper's Figures 2 to 5 and 7; of several
runs, Figures 2 to 6."""

from contrastive.core.files import read_json
from contrastive.core.processes import UserError
from contrastive.evaluation.similarities import similarity_histograms
from contrastive.figures import base
from contrastive.figures.base import draw_curves, draw_training_curves, figure, save_figure

TERMS = (
    "L_MM", "L_M-MM", "L_M-I2I", "L_M-T2T", "L_I2I", "L_T2T", "L_CWCL",
    "L_E-image", "L_E-text", "L_image")  # in the log


# ======================================================= one run ==================================
def draw(folder):
    """Draws the figures of a run into its folder."""
    run = base.FinishedRun(folder)
    draw_training(run)
    before = read_json(run.folder / "similarity_before.json", {})
    for name, suffix, pieces in base.by_set(run.val or run.test):
        if run.val:
            draw_evaluation(run, name, suffix, pieces.kind)
        stages = {}
        if name in before:
            stages["before training"] = before[name]
        stages["after training"] = similarity_histograms(pieces)
        title = f"{pieces.title}: {pieces.kind}-text cosines (Fig. 4)"
        base.draw_histograms(stages, run.folder / f"similarities{suffix}.png", title=title)
    for _, suffix, pieces in base.by_set(run.test, min_queries=1):
        base.draw_retrieval(pieces, run.folder / f"retrieval{suffix}.png")


def draw_training(run):
    """Draws curves.png: what the log has of the training steps."""
    logged = {name for row in run.rows for name in row}
    terms = {name: name for name in TERMS if name in logged}
    tau = {"tau": "tau"}
    if "tau_pos" in logged:
        tau = {"positive pairs": "tau_pos", "negative pairs": "tau_neg"}
    panels = [
        ("terms of the loss, without their weights", "loss", terms),
        base.recall_panel(run),
        ("total loss, with the weights of the terms", "loss", {"loss": "loss"}),
        ("temperature (Fig. 2)", "mean over the batch", tau),
        *base.batch_panels()]
    draw_training_curves(run, panels)


def draw_evaluation(run, name, suffix, kind):
    """Draws evaluation.png: metrics of a val split along the training (Figs. 3 and 7)."""
    zero_shot = {f"top-{k}": f"eval/{name}/zero-shot/top{k}" for k in (1, 3, 5)}
    gap = {"gap": f"eval/{name}/modality_gap"}
    knn = {
        "top-1": f"eval/{name}/knn@1/top1",
        "mean per class": f"eval/{name}/knn@1/mean_per_class"}
    panels = [
        ("zero-shot by prompts, val (Fig. 7)", "%", zero_shot),
        ("modality gap, val (Fig. 3)", "distance of the means", gap),
        (f"kNN@1 of {kind}s, val (Fig. 3)", "%", knn)]
    if suffix:  # curves.png has that of the first set
        panels.insert(0, base.recall_panel(run, name))
    path = run.folder / f"evaluation{suffix}.png"
    draw_curves(run, panels, path, x="samples_seen")


# ======================================================= several runs =============================
def draw_temperatures(folders, path):
    """Fig. 2: the mean temperature of positive and of negative pairs along training."""
    fig, axes = figure(2)
    lines = []
    titles = {"tau_pos": "positive pairs (Fig. 2)", "tau_neg": "negative pairs (Fig. 2)"}
    for ax, (column, title) in zip(axes, titles.items()):
        for name, run in base.read_runs(folders).items():
            steps, values = run.column(column)
            if not steps:  # of pairs that all have one temperature
                steps, values = run.column("tau")
            if not steps:
                raise UserError(f"{name}: its log has no temperature, which this figure compares; "
                                "give runs with one")
            ax.plot(steps, values, label=name)
            lines.append(f"{title}, {name}: {values[0]:.4f} first, {values[-1]:.4f} last")
        ax.set_title(title)
        ax.set_xlabel("step")
        ax.set_ylabel("mean temperature of the batch")
        base.whole_ticks(ax)
        base.legend_above(ax)
    save_figure(fig, path)
    return lines


def draw_gap(folders, path):
    """Fig. 3: the modality gap on test, and the nearest neighbour's accuracy if a run has it."""
    gap = {}
    knn = {}
    for run, files in base.read_runs(folders).items():
        gap[run] = {}
        knn[run] = {}
        for name, metrics in files.summary["test"].items():
            if "modality_gap" in metrics:
                gap[run][name] = metrics["modality_gap"]
            for k in (1, 10):
                accuracies = metrics.get(f"knn@{k}")
                if accuracies:
                    knn[run][f"{name}\nkNN@{k}"] = accuracies["mean_per_class"]
    panels = {"modality gap (Fig. 3)": gap}
    if any(knn.values()):
        panels["kNN, mean per class, % (Fig. 3)"] = knn
    return base.draw_bars(panels, path)


def draw_similarities(folders, path):
    """Figs. 4 and 5: densities of the cosines of positive and of negative pairs."""
    pieces = base.first_test_sets(base.read_runs(folders))
    base.require_texts(pieces)
    histograms = {}
    lines = []
    for run, run_pieces in pieces.items():
        histograms[run] = similarity_histograms(run_pieces)
        threshold = histograms[run]["threshold"]
        if threshold is not None:
            threshold = round(threshold, 3)
        lines.append(f"{run}: threshold {threshold}")
    title = next(iter(pieces.values())).title
    base.draw_histograms(histograms, path, f"{title}: image-text cosines (Figs. 4, 5)")
    return lines


def draw_false_positives(folders, path):
    """Fig. 6: the five pairs whose cosine falls most from the first to the last run."""
    pieces = base.first_test_sets(base.read_runs(folders))
    base.require_texts(pieces)
    cosines = {}                                                           # {run: (c,)}
    for run, run_pieces in pieces.items():
        shown = base.with_pictures(run_pieces)
        cosines[run] = shown.cosines_of_pairs()
    runs = list(cosines)
    fall = cosines[runs[0]] - cosines[runs[-1]]                            # (c,)
    examples = []
    lines = []
    for row in fall.argsort(descending=True)[:5].tolist():
        values = ", ".join(f"{run} {cosine[row]:.2f}" for run, cosine in cosines.items())
        pixels = shown.picture(shown.owner[row])
        examples.append(base.Example(pixels, values, base.wrap(shown.texts[row], 20)))
        lines.append(f"{values}: {shown.texts[row]}")
    title = f"{shown.title}: pairs whose cosine falls most (Fig. 6)"
    base.draw_examples([("", examples)], path, title, width=2.4, words=1.0)
    return lines


FIGURES = {
    "temperatures": draw_temperatures,
    "gap": draw_gap,
    "similarities": draw_similarities,
    "false-positives": draw_false_positives}
