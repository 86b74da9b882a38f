"""Training queries in place of test queries: eval.py --normalize computes its biases from them (NCL)."""

from pathlib import Path

from contrastive.engine.processes import UserError, opening, say

import numpy as np
from safetensors.torch import load_file

SCRIPTS = "temperature_schedules", "mmts", "ncl", "mama", "temo"


def stand_ins(case):
    """(texts (K, D), videos (K, D), gamma) for --normalize: the queues of an NCL run, else embeddings of randomly drawn
    training examples and of their captions; (None, None, gamma) if only the test queries are used (oracle without a
    queue, dsl).

    Raises: UserError if there are no such queries."""
    subject, args = case.subject, case.args
    if subject.own.get("script", "ncl") not in SCRIPTS:
        say(f"WARNING: --normalize: by ncl.py's functions; those of {subject.own['script']}.py may differ")
    split, queues = args.queue_split.replace("run", "train"), queues_of(args)
    gamma = args.gamma or (queues["gamma"].item() if queues else _gamma(subject))
    if args.normalize == "dsl":
        return None, None, gamma
    if queues and case.name == subject.own.get("dataset") and args.queue_split == "run":
        texts, videos = queues["texts"][-args.queue_size:], queues["videos"][-args.queue_size:]
        where = "the run's queue"
    elif args.normalize == "oracle":
        return None, None, gamma
    else:                                                                  # the set's own training queries
        train = case.open(split)
        if train.streamed:
            raise UserError("--normalize queue: the training set is a stream and the checkpoint has no queue")
        some = np.sort(_some(len(train), args))                            # encode_images returns them in this order
        index, videos, _, _ = subject.images(train, subject.view("retrieval", case.name), some)
        captions = [c for i in index for c in train.captions(i)]
        texts, where = subject.texts([captions[k] for k in _some(len(captions), args)]), f"its {split} split"
        videos = videos[_some(len(videos), args)]                          # Fig. 5 takes the last ones
    if not len(texts) and args.normalize == "queue":
        raise UserError(f"--normalize queue: no queries in {where}")
    say(f"{case.name}: --normalize queue: {len(texts):,} texts and {len(videos):,} items of {where}, gamma {gamma:.3g}")
    return texts, videos, gamma


def queues_of(args):
    """{texts (K, D), videos (K, D), gamma (1,)} saved by an NCL run, {} if there are none."""
    file = Path(args.checkpoint) / "queues.safetensors"
    if not args.checkpoint or not file.is_file():
        return {}
    with opening(file):
        queues = load_file(file)
    return queues


def _gamma(subject):
    """The temperature of the run: the learnt one, or its --tau. Raises: UserError if it has none or lost it."""
    own = subject.own
    if own.get("loss") == "max-margin":
        raise UserError("--normalize: the run's loss has no temperature; give --gamma")
    of_pairs = own.get("shifts") or own.get("loss") in ("ts", "dystress", "dystress-shifted")
    if of_pairs or own.get("schedule") is True:                            # mmts.py's
        raise UserError("--normalize: the run has no single temperature (its own change over time or pairs); give "
                        "--gamma, such as the middle of them")
    if own.get("loss") == "temo":
        say("--normalize: gamma is the run's --tau, of L_MM; its other terms have a temperature for each pair")
    learnt = Path(subject.args.checkpoint) / "own.safetensors"
    if own.get("learnable_tau"):
        with opening(learnt):
            return load_file(learnt)["tau.log_tau"].exp().item()
    return own.get("tau") or 0.01


def _some(n, args):
    """At most --queue-size of n rows, drawn with --seed, in random order."""
    return np.random.default_rng(args.seed).permutation(n)[:args.queue_size]
