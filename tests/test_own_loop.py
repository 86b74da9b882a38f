"""Losses in somebody's own loop: what tau, gamma and margins may be, and the loops that the pages show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import common

import pytest
import torch

import mama
import mmts
import ncl
import temo
import temperature_schedules as ts
from helpers import unit

ROOT = Path(__file__).resolve().parent.parent
B = 6
X, Y, Z, W = (unit(B, 5, seed=s) for s in range(4))                        # (B, D) each
# every public loss as a function of its temperature or margin -> a number or (B,)
TAU = {"info_nce": lambda t: temo.info_nce(X, Y, t), "multimodal": lambda t: temo.multimodal_loss(X, Y, t),
       "temo": lambda t: temo.temo_loss(X, Y, Z, W, 0.5, tau=t), "cwcl": lambda t: temo.cwcl_loss(X, Y, t),
       "simclr": lambda t: temo.simclr_loss(X, Y, t), "nt_xent": lambda t: ts.nt_xent(X, Y, t),
       "moco": lambda t: ts.moco_loss(X, Y, Z, t), "clip": lambda t: mmts.clip_loss(X, Y, t),
       "mama": lambda t: mama.angular_margin_loss(X, Y, t, 0.2),
       "mama fused": lambda t: mama.fused_margin_loss(X @ Y.T, Y @ X.T, t, 0.2)}
ONE = {"ncl": lambda t: ncl.ncl_loss(X, Y, t), "infonce of ncl": lambda t: ncl.ncl_loss(X, Y, t, 0),
       "sinkhorn": lambda t: ncl.sinkhorn_biases(X @ Y.T, t)[0],
       "tau_min": lambda t: temo.modulated_loss(X, Y, t, 0.1)}
MARGIN = {"max-margin": lambda m: mmts.max_margin_loss(X, Y, m), "hardest": lambda m: ncl.max_margin_loss(X, Y, m),
          "mu": lambda m: mama.angular_margin_loss(X, Y, 0.5, m),
          "mu fused": lambda m: mama.fused_margin_loss(X @ Y.T, Y @ X.T, 0.5, m)}
FIRST = torch.tensor([True, False, False, True, False, False])


@pytest.mark.parametrize("name", [*TAU, *MARGIN])
def test_a_temperature_or_margin_belongs_to_its_anchor(name):
    """Anchors of two temperatures, and the two exchanged: together what the two give alone."""
    loss, low, high = (TAU | MARGIN)[name], 0.1, 0.7
    mixed, other = (loss(torch.where(some, low, high)).mean() for some in (FIRST, ~FIRST))
    one, two = loss(low).mean(), loss(high).mean()
    torch.testing.assert_close(mixed + other, one + two)
    assert abs(mixed - (one + two) / 2) > 1e-4
    torch.testing.assert_close(loss(torch.tensor(low, dtype=torch.float64)).mean(), one)
    assert one.dtype == torch.float64


@pytest.mark.parametrize("name", ["mama", "mama fused", "mu", "mu fused"])
def test_each_pair_has_its_own(name):
    values = torch.linspace(0.1, 0.8, B, dtype=torch.float64)
    loss = (TAU | MARGIN)[name]
    torch.testing.assert_close(loss(values), torch.stack([loss(v.item())[i] for i, v in enumerate(values)]))
    if "fused" not in name:
        pair = (lambda b: mama.angular_margin_loss(X, Y, values, 0.2, b)) if name == "mama" else (
            lambda b: mama.angular_margin_loss(X, Y, 0.5, values, b))
        torch.testing.assert_close(pair(4), loss(values))                  # in blocks of rows


@pytest.mark.parametrize("shape", [(1,), (B - 1,), (B, 1), (1, B), (B, B + 1), (B, B, 1)])
@pytest.mark.parametrize("name", [*TAU, *ONE, *MARGIN])
def test_another_shape_is_refused_in_one_line(name, shape):
    with pytest.raises(ValueError, match=r"give a number") as refusal:
        (TAU | ONE | MARGIN)[name](torch.full(shape, 0.5))
    assert "\n" not in str(refusal.value) and str(shape) in str(refusal.value)


@pytest.mark.parametrize("name", ONE)
def test_one_gamma_serves_all(name):
    with pytest.raises(ValueError, match="give a number or"):
        ONE[name](torch.full((B,), 0.5))
    ONE[name](torch.tensor(0.5))


@pytest.mark.parametrize("value", [0, 0.0, -1, -0.01, float("nan")])
@pytest.mark.parametrize("name", [*TAU, *ONE])
def test_a_number_that_is_not_above_0_is_refused(name, value):
    with pytest.raises(ValueError, match="must be above 0"):
        (TAU | ONE)[name](value)


def test_a_temperature_of_each_pair():
    temo.info_nce(X, Y, torch.full((B, B), 0.5))
    with pytest.raises(ValueError, match=r"\(6, 6\), one per pair"):
        temo.info_nce(X, Y, torch.full((B, B - 1), 0.5))
    with pytest.raises(ValueError, match="or a tensor"):
        temo.info_nce(X, Y, [0.5] * B)


def test_sizes_of_clusters_come_largest_first():
    points = torch.eye(4).repeat_interleave(torch.tensor([1, 5, 2, 8]), 0)  # (16, 4)
    labels, sizes = mmts.cluster_captions(points, 4, seed=0)
    assert sizes.tolist() == [8, 5, 2, 1] == labels.bincount().tolist()
    labels, sizes = mmts.cluster_captions(torch.eye(4), 4, seed=0, counts=[3, 1, 9, 2])
    assert sizes.tolist() == [9, 3, 2, 1] and labels.tolist() == [1, 3, 0, 2]


def code_of(page, word):
    """The python block of a page that holds a word."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf8"), re.S)
    found, = (block for block in blocks if word in block)
    return found


def test_the_loop_with_weights(monkeypatch):
    """docs/forking.md: the weight network learns, and its weights are in the encoders' loss."""
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.video, self.text = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

        def forward(self, video, text):
            return self.video(video), self.text(text)
    torch.manual_seed(0)
    model = Pair()
    loader = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(3)]
    names = dict(model=model, loader=loader, meta_loader=loader[::-1], lr=5e-6, tau=0.5,
                 optimizer=torch.optim.SGD(model.parameters(), 0.1))
    code = code_of("forking.md", "weightnet_gradient")
    assert code.count("\n") <= 22
    before = model.video.weight.clone()
    exec(code, names)
    fresh = {k: v.clone() for k, v in names["weight_net"].state_dict().items()}
    assert not torch.equal(before, model.video.weight) and names["gradient"][0].abs().max() > 0
    assert max((p - fresh[k]).abs().max() for k, p in mama.WeightNet().state_dict().items()) > 0
    sizes = names["gradient"][0].abs()                                     # the page: 1e-8 to 1e-7
    assert sizes[sizes > 0].median() < 1e-7, sizes


def test_a_model_gives_embeddings_that_the_page_normalises():
    assert "not of unit length" in common.load_model.__doc__
    assert "not of unit length" in (ROOT / "docs" / "running.md").read_text(encoding="utf8")


TRAIN = """
import torch
import utils
from my_data import Pairs
from mycode import common
from temo import temo_loss
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Pairs(), 4, num_workers=1, multiprocessing_context="spawn")
    print([temo_loss(x, y, x, y, 0.5).isfinite().item() for x, y in loader], utils.OURS, common.OURS)
"""
DATA = """
import torch
import temo                                                # a spawned worker finds the clone as well
class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.randn(4), temo.modulated_temperature(torch.rand(4))
"""


def elsewhere(folder, *words):
    """What Python says in somebody's folder, with the clone on its path."""
    done = subprocess.run([sys.executable, *words], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def test_from_another_folder_beside_its_own_files(tmp_path):
    """Modules, folders and a package of the user's, and spawned workers."""
    for name, text in {"train.py": TRAIN, "my_data.py": DATA, "utils.py": "OURS = 1", "tools/notes.py": "",
                       "mycode/common.py": "OURS = 2", "mycode/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert elsewhere(tmp_path, "train.py").strip() == "[True, True] 1 2"


def test_a_common_py_of_the_user_s_is_named(tmp_path):
    """As docs/running.md has it."""
    (tmp_path / "common.py").write_text("OURS = 2")
    said = elsewhere(tmp_path, "-c", "from temo import temo_loss").splitlines()[-1]
    assert re.fullmatch(r"ImportError: cannot import name '\w+' from 'common' \(.*common\.py\)", said)
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf8")
    assert "ImportError: cannot import name ... from 'common'" in page and "from mycode import common" in page
