"""One thread, no network, and no trace outside a folder that goes when the session ends."""

import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
CACHE = tempfile.mkdtemp(prefix="contrastive-tests-")
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HOME=CACHE,
    XDG_CACHE_HOME=CACHE,
    HF_DATASETS_CACHE=f"{CACHE}/datasets",
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    MPLCONFIGDIR=f"{CACHE}/matplotlib",
)

import pytest  # noqa: E402
import torch  # noqa: E402  (the variables above are read at import)

from helpers import tiny_model  # noqa: E402  (and with it the scripts, which draw nothing here)

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    """A WordPiece of a few captions, at most 12 tokens a text."""
    from contrastive.encoders.texts import Tokenizer, train_wordpiece

    captions = [
        "red apple", "green pear", "blue bird on a tree", "yet another of them,",
        "one number 0123456789"]
    return Tokenizer(train_wordpiece(captions * 3), 12)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tokenizer):
    """Function of a kind of helpers.tiny_model -> its folder, made once, and the model."""
    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(
        lambda kind: (str(root / kind), tiny_model(kind, root / kind, tokenizer)))


@pytest.fixture
def frozen_packages(monkeypatch):
    """The packages of --recipe frozen, which are not among the requirements."""
    from contrastive.encoders import weights

    monkeypatch.setattr(weights, "path_in_package", lambda package, path: path)


def pytest_sessionfinish():
    shutil.rmtree(CACHE, ignore_errors=True)
