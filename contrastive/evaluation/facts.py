"""What a run says of itself to eval.py, so that eval.py need not know the flags of each script."""

import dataclasses

from contrastive.core.files import read_json

# The scripts of this project. Only ncl.py has a normalisation; a fork may have another one.
SCRIPTS = ("temperature_schedules", "mmts", "ncl", "mama", "temo")
# values of flags that did not exist when a run was made
BEFORE_THE_FLAG = {
    "class_names": "wordnet", "eval_frames": 0, "expert_inputs": "training", "image_lr": 0.0,
    "matching_weight": 0.0, "modalities": "v", "projection_bias": False, "prompts": "openai",
    "randaugment_strengths": "torchvision", "test_fraction": 0.0}


@dataclasses.dataclass
class EvaluationFacts:
    """What an evaluation has to know of a run: the entry 'evaluation' of its model.json.

    The function evaluation_facts of a script makes it from the flags of the run.
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


def read_facts(run):
    """The EvaluationFacts of a run folder.

    Args: run: Path; a folder without args.json is no run, and has the default facts.
    """
    flags = read_json(run / "args.json", {})
    if not flags:
        return EvaluationFacts()
    spec = read_json(run / "model.json", {})
    if "evaluation" in spec:
        return EvaluationFacts(**spec["evaluation"])
    return facts_of_flags(flags)


def facts_of_flags(flags):
    """The facts of a run that has written none, from its args.json: scripts did not always."""
    loss = flags.get("loss")
    changes_over_time = loss == "ts" or flags.get("schedule") is True  # temo.py, mmts.py
    changes_between_pairs = (
        flags.get("shifts")  # mmts.py
        or loss in ("dystress", "dystress-shifted")  # temo.py
        or loss == "temo" and not flags.get("base") and flags.get("unimodal") != "plain")
    tau = flags.get("tau")
    if changes_over_time or changes_between_pairs or loss == "max-margin":
        tau = None
    return EvaluationFacts(
        tau=tau,
        learnable_tau=flags.get("learnable_tau", False),
        normalize=flags.get("normalize", "none"),
        iterations=flags.get("iterations") or 4,
        knn_features=flags.get("knn_features") or "projected",
        long_tail="imbalance_ratio" in flags,
        train_features=flags.get("train_features", "clean"),
        shot_limits=flags.get("shot_limits"))
