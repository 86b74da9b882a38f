"""Training on a card that is not there (card.py): no step waits for it, and all processes meet in the same collectives.

`main` of each script runs as it is, with the two modes around it.
"""

import importlib

from contrastive.engine import run as engine
from contrastive.engine.run import Run

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import temo
from card import CARD, Names, Waits
from helpers import of_set

pytestmark = pytest.mark.filterwarnings("ignore")  # of a card that torch does not find
TOY = "--dataset moving-emoji --clips 48 16 16 --image-size 16 --frames 2 --batch-size 16 --max-steps 5 " \
      "--log-every 4 --eval-every 0 --save-every 0 --workers 0 --cpu --run-name run --output-dir"


def train(line, folder, monkeypatch, place_of=0, processes=1, said=None):
    """Four steps of a script on a card -> its Waits, those of the third step, which neither logs nor saves.

    With several processes this is the one with number `place_of`; `said`: objects that process 0 has sent."""
    script, *flags = line.split()
    module, waits, names = importlib.import_module(script), Waits(), Names()
    set_up, done, backward_of_torch = engine.set_up, Run.done, torch.autograd._engine_run_backward

    def with_card(args):
        accelerator = set_up(args)
        accelerator.state.device = CARD
        if processes > 1:  # after the accelerator, which would wrap in DDP: that cannot see meta tensors
            dist.init_process_group("fake", rank=place_of, world_size=processes, store=FakeStore())
        return accelerator

    def noted(run, *args, **more):
        done(run, *args, **more)
        waits.step, waits.on = run.step, run.step == 2
        if run.step == 4:
            raise SystemExit

    def backward_with_names(*args, **kwargs):  # it runs in a handler of functions, where the mode is off
        with names:
            return backward_of_torch(*args, **kwargs)

    def all_gather_object(values, value):
        waits.collectives.append((waits.step, "object", False, []))
        if place_of == 0:
            said.append(value)
        values[:] = [said[[name for _, name, *_ in waits.collectives].count("object") - 1]] * processes

    class Event:
        def record(self):
            self.step = waits.step

        def synchronize(self):
            if self.step == waits.step:
                waits.note("this step", "Event.synchronize")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "set_up", with_card)
        patch.setattr(Run, "done", noted)
        patch.setattr(Run, "evaluate_val", lambda run: vars(run).update(val={}, chance={}, val_pieces={}))
        patch.setattr(torch.autograd, "_engine_run_backward", backward_with_names)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1))
        patch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
        patch.setattr(dist, "all_gather_object", all_gather_object)
        args = module.parse_args([*of_set([*TOY.split(), folder], flags), *flags])
        try:
            with waits, names, pytest.raises(SystemExit):
                module.main(args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return waits


SCRIPTS = ["temo", "temperature_schedules", "ncl", "mmts --num-clusters 4", "mama --meta-size 8 --meta-batch-size 8"]
MORE = ["temo --loss infonce --learnable-tau --jitter .4 --chunk-size 8 --grad-clip 1", "temo --loss slip",
        "temperature_schedules --loss moco --queue-size 32 --tau-head .1 --tau-tail .2",
        "mmts --num-clusters 4 --loss max-margin", "mama --weighting l2rw --meta-size 8 --meta-batch-size 8"]


@pytest.mark.parametrize("line", MORE)
def test_no_step_waits_for_the_card(line, tmp_path, monkeypatch):
    assert not train(line, tmp_path, monkeypatch).waits


@pytest.mark.parametrize("kind", ["clip", "bert"])
def test_no_mask_of_transformers_waits_for_the_card(kind, tiny, tmp_path, monkeypatch):
    line = f"temo --text-encoder {tiny(kind)[0]} --text-length 12"  # pads to a multiple of 8 end there
    assert not train(line, tmp_path, monkeypatch).waits


PLANTS = {"a value": lambda x: x.sum().item(), "a shape": lambda x: x[x > 0],
          "a copy to": lambda x: torch.ones(3).to(x.device), "a copy from": lambda x: x.detach().cpu()}


def test_planted_waits_are_found(tmp_path, monkeypatch):
    loss = temo.temo_loss
    monkeypatch.setattr(temo, "temo_loss", lambda image, *x, **y: ([plant(image) for plant in PLANTS.values()],
                                                                   loss(image, *x, **y))[1])
    found = train("temo", tmp_path, monkeypatch).waits
    assert len(found) == 4 and all(where.startswith("test_waits.py") for *_, where in found)
    assert all(any(kind in what for what, *_ in found) for kind in PLANTS)


def test_a_planted_tensor_of_the_host_is_refused(tmp_path, monkeypatch):
    loss = temo.temo_loss
    monkeypatch.setattr(temo, "temo_loss", lambda *x, **y: loss(*x, **y) * torch.ones(1))
    with pytest.raises(AssertionError, match="host among those of the card, test_waits.py"):
        train("temo", tmp_path, monkeypatch)


def test_a_check_that_is_read_in_its_own_step_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "lagged", property(lambda run: False, lambda run, value: None), raising=False)
    assert [what for what, *_ in train("temo", tmp_path, monkeypatch).waits] == ["this step"]


@pytest.mark.parametrize("line", SCRIPTS)
def test_processes_meet_in_the_same_collectives(line, tmp_path, monkeypatch):
    """Without DDP's own, which are torch's; those of a step carry tensors of the card alone; nor does a step wait."""
    said = []
    first, other = (train(line, tmp_path, monkeypatch, place, 8, said) for place in (0, 5))
    assert first.collectives == other.collectives and not first.waits
    of_step = [on_card for step, _, on_card, *_ in first.collectives if step == 2]
    assert len(of_step) >= 5 and all(of_step)  # two embeddings there and back, and the check


def test_texts_have_few_lengths_on_a_card(tokenizer):
    """Pads up to a multiple of 8, or to the most tokens that the encoder takes (12)."""
    texts = ["a", "red apple", "red apple green pear blue bird on a tree, one number 0123456789"]
    plain = [tokenizer([text]) for text in texts]
    with Names():
        there = tokenizer.plain()
        there.device = CARD
        shapes = [there([text])["input_ids"].shape[1] for text in texts]
    assert shapes == [8 if of["input_ids"].shape[1] <= 8 else 12 for of in plain] and {*shapes} == {8, 12}
