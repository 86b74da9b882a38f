"""One thread, no network, and no trace outside a folder that goes when the session ends."""

import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
CACHE = tempfile.mkdtemp(prefix="contrastive-tests-")
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=CACHE, HF_DATASETS_CACHE=f"{CACHE}/datasets", OMP_NUM_THREADS="1",
                  OMP_WAIT_POLICY="PASSIVE", MPLCONFIGDIR=f"{CACHE}/matplotlib")

import pytest  # noqa: E402
import torch  # noqa: E402  (the variables above are read at import)

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def without_pictures(request):
    """Runs draw nothing, which takes them four seconds, but in a module that says DRAWS = True: {script: its draw}."""
    names = ("temo", "temperature_schedules", "ncl", "mmts", "mama")
    scripts = [sys.modules[name] for name in names if name in sys.modules]
    with pytest.MonkeyPatch.context() as patch:
        draws = {script: script.draw for script in scripts}
        for script in scripts if not getattr(request.module, "DRAWS", False) else ():
            patch.setattr(script, "draw", lambda *_, **__: None)
        yield draws


@pytest.fixture(scope="session")
def tokenizer():
    """A WordPiece of a few captions, at most 12 tokens a text."""
    from contrastive.encoders.texts import Tokenizer, train_wordpiece
    captions = ["red apple", "green pear", "blue bird on a tree", "yet another of them,", "one number 0123456789"]
    return Tokenizer(train_wordpiece(captions * 3), 12)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tokenizer):
    """Function of a kind of helpers.tiny_model -> its folder, made once, and the model."""
    from helpers import tiny_model
    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda kind: (str(root / kind), tiny_model(kind, root / kind, tokenizer)))


def pytest_sessionfinish():
    shutil.rmtree(CACHE, ignore_errors=True)
