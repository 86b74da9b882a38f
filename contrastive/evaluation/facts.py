"""What a run says of itself to eval.py, so that eval.py need not know the flags of each script."""

import dataclasses

from contrastive.core.files import read_json

# The scripts of this project. Only ncl.py has a normalisation; a fork may have another one.
SCRIPTS = ("temperature_schedules", "mmts", "ncl", "mama", "temo")


@dataclasses.dataclass
class EvaluationFacts:
    """What an evaluation has to know of a run: the entry 'evaluation' of its model.json.

    A script hands it to Run.finish.
    """

    # Temperature that divides the cosines, of a learnt one its first value. None = there is none,
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

    Args: run: Path; a folder without args.json is no run, and has the default facts.
    """
    flags = read_json(run / "args.json", {})
    if not flags:
        return EvaluationFacts()
    spec = read_json(run / "model.json", {})
    return EvaluationFacts(**spec.get("evaluation", {}))
