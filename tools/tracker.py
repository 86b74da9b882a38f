"""A tracker (tensorboard, wandb, trackio) beside metrics.jsonl, through accelerate; opened where --tracker asks."""

import hashlib


def open_tracker(tracker, folder, accelerator, tracker_id, config):
    """Starts it in the run folder, or goes on with `tracker_id` of a run before; returns the id. config: the flags."""
    digest = hashlib.sha1(str(folder.resolve()).encode()).hexdigest()[:6]
    tracker_id = tracker_id or f"{folder.name}-{digest}"
    options = {"wandb": {"id": tracker_id, "name": folder.name, "resume": "allow", "dir": str(folder)},
               "trackio": {"name": tracker_id, "resume": "allow"}}
    flat = {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in config.items()}
    accelerator.project_configuration.logging_dir = str(folder)
    project = "tracker" if tracker == "tensorboard" else "contrastive-temperature"
    mine = {k: v for k, v in options.items() if k == tracker}
    accelerator.init_trackers(project, config=flat, init_kwargs=mine)
    return tracker_id
