"""What a run says of itself to eval.py, so that eval.py need not know the flags of each script."""

import dataclasses

from contrastive.core.files import read_json

# the scripts whose normalisation, if they have one, is that of ncl.py
SCRIPTS = ("temperature_schedules", "mmts", "ncl", "mama", "temo")


@dataclasses.dataclass
class EvaluationFacts:
    """What an evaluation has to know of a run: the entry 'evaluation' of its model.json.

    The function evaluation_facts of a script makes it from the flags of the run.
    """

    # Temperature that divides the cosines, from which it is learnt if it is; None = there is none,
    # or it changes over time or between pairs.
    tau: float | None = None
    learnable_tau: bool = False  # own.safetensors has the temperature
    normalize: str = "none"  # mode of NCL's biases in the reported numbers
    iterations: int = 4  # rounds of Sinkhorn-Knopp of these biases
    knn_features: str = "projected"  # embeddings; 'backbone': features before the projection
    long_tail: bool = False  # its splits are those of data.long_tail
    train_features: str = "clean"  # view of the training images in kNN and probes, or 'augmented'
    shot_limits: list | None = None  # of core.metrics.accuracy_by_class_size
    shuffled_videos: bool = False  # a control: each question had the video of another


def read_facts(run):
    """The EvaluationFacts of a run folder.

    Args: run: Path; a folder without model.json is no run, and has the default facts.
    """
    spec = read_json(run / "model.json", {})
    return EvaluationFacts(**spec.get("evaluation", {}))
