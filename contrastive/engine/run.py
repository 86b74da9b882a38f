"""The book-keeping of a run: folder, log, checkpoints, signals, evaluation, summary, progress."""

import collections
import copy
import functools
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from contrastive.data.batches import Batches
from contrastive.data.hub import COMMITS
from contrastive.data.table import identity_of_files
from contrastive.encoders.base import batchnorms
from contrastive.engine import checkpoints
from contrastive.engine.banner import banner
from contrastive.engine.log import Log, commit, peak_memory_mib, versions
from contrastive.evaluation.report import report, val_line
from contrastive.core.files import write_json, write_tensors
from contrastive.core.metrics import embedding_health, normalize
from contrastive.core.words import command_of
from contrastive.evaluation.saved_pieces import MAX_PICTURES, save_pieces
from contrastive.figures import draw
from contrastive.core.processes import (
    AT_FAILED_START, UserError, barrier, gather, gather_objects, mean_over_processes, on_main,
    opening, print_main, rank, to_device, world_size)

import torch
import torch.distributed as dist
from tqdm import tqdm

ENOUGH_STEPS = 500  # at least, of a run on own data without --epochs and --max-steps
SECONDS_BETWEEN_CHECKPOINTS = 60  # at most, so that kill -9 loses no more; not with --save-every 0
NUM_EVALUATIONS = 6  # on val after the first step, with --eval-every -1


# ===================================================== lengths ====================================
class Steps(NamedTuple):
    """Numbers of optimiser steps."""

    per_epoch: int
    total: int  # the schedules span them
    warmup: int


def count_steps(args, train):
    """The steps of a run: Steps."""
    per_epoch = len(train) // args.batch_size
    total = args.max_steps or max(1, round(args.epochs * per_epoch))
    return Steps(per_epoch, total, warmup=round(args.warmup_fraction * total))


def last_step(args, steps):
    """The step after which a run ends: that of --eval-epoch N, else the end of the schedules.

    Raises: UserError if epoch N is after the end.
    """
    if args.eval_epoch in ("last", "best"):
        return steps.total
    step = max(1, round(args.eval_epoch * steps.per_epoch))
    if step > steps.total:
        raise UserError(f"--eval-epoch {args.eval_epoch:g}: the run ends after epoch "
                        f"{steps.total / steps.per_epoch:g}; give an earlier one, or more --epochs")
    return step


def evaluation_interval(args, evals, last):
    """The steps between evaluations on val, 0 = none on the way: --eval-every, or of -1 as many as
    make NUM_EVALUATIONS, if there is a split to evaluate.

    Args:
        evals: {name: {split: data}} to evaluate.
        last: the last step.
    """
    if args.eval_every >= 0:
        return args.eval_every
    has_val = any("val" in splits for splits in evals.values())
    if not has_val:
        return 0
    return math.ceil(last / NUM_EVALUATIONS)


def adjust_flags_to_data(args, train):
    """A copy of the flags in which the batch and the epochs fit a user's small data.

    A batch that is larger than the data becomes that of fitting_batch. Fewer than 500 steps become
    as many whole epochs as make at least 500. Values on the command line stay, and changes are
    printed.

    Raises: UserError if the data have fewer examples than a batch.
    """
    args = copy.copy(args)
    examples = len(train)
    if examples < 2:
        raise UserError(f"{train.name}: a single training example has no negatives; give some "
                        "hundreds")
    own_data = args.recipe in ("own", "frozen") and not args.resume
    processes = int(os.environ.get("WORLD_SIZE", 1))  # there is no process group yet
    choose_batch = own_data and "--batch-size" not in args.command_line
    if choose_batch and processes < examples < args.batch_size:
        batch_size = fitting_batch(examples, processes)
        print_main(f"--batch-size {args.batch_size} -> {batch_size}, which fits the data")
        args.batch_size = batch_size
    if examples < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: larger than the number of training "
                        f"examples of {train.name}, {examples}; give more data or a smaller batch")
    chooses_length = {"--epochs", "--max-steps"}.intersection(args.command_line)
    if own_data and not args.max_steps and not chooses_length:
        per_epoch = examples // args.batch_size
        epochs = float(math.ceil(ENOUGH_STEPS / per_epoch))
        if args.epochs < epochs:
            num_steps = round(epochs * per_epoch)
            print_main(f"--epochs {args.epochs:g} -> {epochs:g}, which make {num_steps} steps")
            args.epochs = epochs
    return args


def fitting_batch(examples, processes):
    """The largest global batch that the examples fill and that the processes can share.

    From 8 examples on it is a multiple of 8 on 1, 2, 4 and 8 processes, and so the same.
    """
    multiple = 8
    if examples < multiple or multiple % processes:
        multiple = processes
    return examples // multiple * multiple


# ===================================================== a run ======================================
def make_folder(path):
    """Makes a folder that no other process has made: path or, if that exists, PATH-2, PATH-3, ...

    Runs that start in the same second have the same name.
    Returns: the path of the folder.
    """
    with opening(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = checkpoints.free_path(path)
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue  # another process was faster


class StepReport(NamedTuple):
    """What the processes have told each other after a step."""

    # (4,) signal, number of bad samples, 1 if the last checkpoint is a minute old, 1 if the loss is
    # not finite
    maxima: torch.Tensor
    ready: object  # CUDA event after which the maxima lie on the CPU, or None
    step: int
    keys: list  # of the samples of this process
    bad: list  # its samples that could not be read
    numbers: dict  # loss and columns of the step
    embeddings: list  # (B, D) each


class Run:
    """The book-keeping of a run: folder, log, checkpoints, signals, evaluation, summary, pictures.

    It runs no forward, loss, backward or optimiser step, and a script changes none of its
    attributes. A script calls, in this order: Run(...), resume(...), batches(...), start(...),
    after each optimiser step end_step(...), and at last finish(...).

    Args:
        file: the script's __file__, which names it.
        args: the flags, which a Run does not change.
        accelerator: as make_accelerator returns it.
        train, evals: training data; {name: {split: data}} to evaluate.
        steps: Steps, as count_steps returns them.
        last: the last step, if the run ends before its schedules do; None = as --eval-epoch says.
    Attributes:
        step: optimiser steps so far.
        folder: of the run.
        val_pieces: EvaluationPieces of the last evaluation on val, by data set.
    """

    def __init__(self, file, args, accelerator, train, evals, steps, last=None):  # noqa: PLR0917
        self.started = time.time()  # a resume moves it back by the time before
        self.script = Path(file).stem
        self.command = command_of(file)
        self.args = args
        self.accelerator = accelerator
        self.device = accelerator.device
        self.train = train
        self.evals = evals
        self.steps = steps
        self.last = last or last_step(args, steps)
        self.eval_every = evaluation_interval(args, evals, self.last)
        self.best_step = 0  # of the evaluation with the best result on val; 0 = none yet
        self.has_best = False  # whether its weights are restored
        self.step = 0
        self.require_val()
        self.folder = on_main(self.open_folder)
        self.commit = commit()  # as it is now: files may change
        self.hub = args.hub  # {id: commit} of what was read from the hub

        # of a resumed run, for its batches
        self.positions = {}
        self.bad_samples = {}
        self.reports = collections.deque()  # StepReport of each step that is not read yet
        # they are read a step late on a GPU, so that no step waits for it
        self.report_delay = 1 if self.device.type == "cuda" else 0
        self.signal_here = 0  # number of the signal that this process has received
        self.signal = 0  # the same over all processes
        self.minute_is_over = False  # since the last checkpoint, the same over all processes
        self.in_loop = False

    # ---------------------------------------- set-up ----------------------------------------------
    def require_val(self):
        """Refuses --eval-epoch best without evaluations on val."""
        if self.args.eval_epoch != "best":
            return
        if not any("val" in splits for splits in self.evals.values()):
            raise UserError("--eval-epoch best: no set that is evaluated has a val split; see "
                            "--holdout-fraction and --eval-datasets")
        if not self.eval_every:
            raise UserError("--eval-epoch best: there is no evaluation during training; add "
                            "--eval-every N")

    def open_folder(self):
        """Makes the folder of the run, or finds that of --resume."""
        args = self.args
        if args.resume:
            folder = checkpoints.folder_of(args.resume)
        elif args.run_name:
            folder = Path(args.output_dir) / args.run_name
            if (folder / "args.json").exists() or (folder / "metrics.jsonl").exists():
                raise UserError(f"{folder}: holds a run already; --resume {folder}, or another "
                                "--run-name")
        else:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            name = f"{self.script}__{Path(args.dataset).stem}__s{args.seed}__{stamp}"
            folder = make_folder(Path(args.output_dir) / name)
        with opening(folder):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        if not args.resume:
            AT_FAILED_START.append(functools.partial(shutil.rmtree, folder, ignore_errors=True))
        return folder

    def has_checkpoint(self):
        """Whether --resume names a run that has saved one."""
        return bool(self.args.resume and checkpoints.checkpoints_of(self.folder))

    def resume(self, model, optimizer, **others):
        """Names what checkpoints hold, and with --resume restores it.

        Args:
            model: the model, without DDP; it is also what is evaluated and saved.
            optimizer: as accelerator.prepare returns it.
            others: by name, what else has a state: modules of the loss, queues, a second optimizer.
                None is left out.
        """
        others = {name: part for name, part in others.items() if part is not None}
        self.model = model
        self.optimizer = optimizer
        self.loss_modules = {}
        for name, part in others.items():
            if isinstance(part, torch.nn.Module):
                self.loss_modules[name] = part
        self.parts = {"model": model, "optimizer": optimizer, **others}
        if self.accelerator.scaler:
            self.parts["scaler"] = self.accelerator.scaler
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.num_parameters += sum(p.numel() for p in self.loss_parameters().values())
        if self.args.resume:
            checkpoints.load(self)
        self.log = Log(self)

    def loss_parameters(self):
        """{name: parameter} of the modules of the loss that learn."""
        parameters = {}
        for name, module in self.loss_modules.items():
            for path, p in module.named_parameters():
                if p.requires_grad:
                    parameters[f"{name}.{path}"] = p
        return parameters

    def batches(self, views, transform, cache=None):
        """The training batches from here to the last step.

        Args:
            views: an Augment for each view.
            cache: FeatureCache of frozen encoders, or None.
        """
        args = self.args
        self.data = Batches(
            self.train, views, transform, args.batch_size, args.seed,
            first=self.step, last=self.last, device=self.device, workers=args.workers,
            max_bad_fraction=args.max_bad_fraction, folder=self.folder,
            positions=self.positions, compiled=args.compile, cache=cache)
        self.data.bad = dict(self.bad_samples)
        return self.data

    def start(self, evaluator, *, shown=("loss", "tau"), after_val=None, pair=("image", "text"),
              score="R-Mean", **lines):
        """Prints the banner, evaluates before the first step, starts the progress bar. Collective.

        Args:
            evaluator: the Evaluator of the script's data.
            shown: columns of the log in the progress bar, if the log has them.
            after_val: function (row, pieces) that adds to each row of a val evaluation.
            pair: names of the first two embeddings of end_step in the log, std_image and std_text.
            score: the number by which --eval-epoch best compares evaluations on val: an entry of
                the row, which after_val has added, or of the metrics, a mean over the data sets.
            lines: title=text, more lines of the banner.
        """
        self.evaluator = evaluator
        self.shown = shown
        self.after_val = after_val
        self.pair = pair
        self.score = score
        self.hub = self.hub | COMMITS  # a resumed run reads no published weights
        # from here on nothing refuses a resume: until then its folder stays as it was
        if self.step < self.last:
            on_main(checkpoints.remove_final_files, self)
        self.log.open(self)
        self.note_best_step()
        self.write_args()
        print_main(banner(self, lines))
        # in a file or a pipe, log_step writes lines in place of a bar
        self.has_bar = rank() == 0 and sys.stderr.isatty()
        # a checkpoint is written before the evaluation of its step
        if self.step == 0 or self.is_due("eval", self.step):
            self.evaluate_val()
        AT_FAILED_START.clear()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        self.bar = tqdm(total=self.last, initial=self.step, disable=not self.has_bar,
                        dynamic_ncols=True, unit="step")
        for module in [self.model, *self.loss_modules.values()]:
            module.train()
        self.restart_clock()
        self.saved_at = time.monotonic()
        self.in_loop = True

    def write_args(self):
        """Writes args.json."""
        if rank() == 0:
            flags = {"script": self.script} | vars(self.args) | {"resume": "", "hub": self.hub}
            write_json(self.folder / "args.json", flags)

    # ---------------------------------------- in the loop -----------------------------------------
    def logs_next(self):
        """Whether the step that goes on will be logged: only then `end_step` needs all columns."""
        return self.is_due("log", self.step + 1)

    def is_due(self, action, step):
        """Whether 'log', 'eval' or 'save' is due after so many steps; always after the last one."""
        intervals = {
            "log": self.args.log_every, "eval": self.eval_every, "save": self.args.save_every}
        interval = intervals[action]
        if step == self.last:
            return True
        return interval > 0 and step % interval == 0

    def end_step(self, batch, loss, columns, embeddings):
        """Ends a step: counts it, logs, saves, evaluates, and stops where it must. Collective.

        Call it after each optimiser step. All processes stop at a loss that is not finite, at too
        many bad samples, or at a signal to one of them.

        Args:
            batch: the batch of the step.
            loss: () of this process.
            columns: {name: () or number} of this process; the log has the means over processes.
            embeddings: (B, D) each. The log has the health of the space of the first two, a pair.
        """
        self.exchange_reports(batch, {"loss": loss, **columns}, embeddings)
        self.step += 1
        log = self.is_due("log", self.step)
        evaluate = self.is_due("eval", self.step)
        save = self.is_due("save", self.step) or self.minute_is_over
        self.seconds_waited += batch["seconds"]
        if log:
            self.log_step(batch, {"loss": loss, **columns}, embeddings)
        self.bar.update()
        stopping = self.signal and self.step < self.last
        if save or evaluate or stopping:
            self.read_reports()  # a step whose loss is not finite is not saved
            checkpoints.save(self)
            self.saved_at = time.monotonic()
            self.minute_is_over = False
        if stopping:
            self.stop_by_signal()
        if evaluate:
            self.in_loop = False  # a signal may end an evaluation at once: all before it is saved
            self.evaluate_val()
            self.in_loop = True
        if log or save or evaluate:
            self.restart_clock()

    def exchange_reports(self, batch, numbers, embeddings):
        """Tells all processes of signals, bad samples, a loss that is not finite, and whether the
        last checkpoint is a minute old. Collective.

        On a GPU the answer is read one step later, so that the host does not wait for the step,
        except before a checkpoint or an evaluation.
        """
        seconds = time.monotonic() - self.saved_at
        minute_is_over = self.args.save_every > 0 and seconds > SECONDS_BETWEEN_CHECKPOINTS
        counts = torch.tensor(
            [self.signal_here, len(batch["bad"]), minute_is_over], dtype=torch.float)
        counts = to_device(counts, self.device)                            # (3,)
        not_finite = 1 - numbers["loss"].detach().isfinite().float()[None] # (1,)
        maxima = torch.cat([counts, not_finite])                           # (4,)
        if world_size() > 1:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        maxima = maxima.to("cpu", non_blocking=True)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        detached = [x.detach() for x in embeddings]
        self.reports.append(StepReport(
            maxima, ready, self.step, batch["keys"], batch["bad"], detach(numbers), detached))
        delay = self.report_delay
        step = self.step + 1
        if self.is_due("save", step) or self.is_due("eval", step):
            delay = 0
        self.read_reports(keep=delay)

    def read_reports(self, keep=0):
        """Acts on the reports of all but the last `keep` steps."""
        while len(self.reports) > keep:
            report = self.reports.popleft()
            if report.ready:
                report.ready.synchronize()
            signal_number, num_bad, minute_is_over, not_finite = report.maxima.tolist()
            self.signal = max(self.signal, int(signal_number))
            self.minute_is_over = self.minute_is_over or minute_is_over > 0
            if num_bad:
                self.data.count_bad(report.bad, report.step)
            if not_finite:
                self.stop_not_finite(report)

    def stop_not_finite(self, report):
        """Raises: UserError that names step, columns, norms and samples. Collective."""
        line = ""
        if not report.numbers["loss"].isfinite():
            norms = [x.float().norm(dim=-1) for x in report.embeddings]    # (B,) each
            is_finite = torch.stack(norms).isfinite().all(0)               # (B,)
            rows = is_finite.logical_not().nonzero().flatten().tolist()
            rows = rows or range(len(is_finite))
            keys = [report.keys[row] for row in rows][:8]
            largest = ", ".join(f"{norm.max():.3g}" for norm in norms)
            line = f"process {rank()}: norms up to {largest}, keys {keys}"
        lines = [line for line in gather_objects(line) if line]
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in report.numbers.items())
        advice = f"try less than --lr {self.args.lr:g}, or a higher temperature"
        if not self.args.grad_clip:
            advice += ", or --grad-clip 1"
        raise UserError(f"the loss is not finite at step {report.step}: {advice}; {numbers}; "
                        f"{'; '.join(lines)}")

    @torch.no_grad()
    def log_step(self, batch, numbers, embeddings):
        """Writes a row of the log and shows it in the progress bar. Collective."""
        num_steps = self.step - self.step_of_clock
        seconds = (time.perf_counter() - self.clock) / num_steps
        waited = self.seconds_waited / num_steps
        means = mean_over_processes(numbers | {"data_s": waited}, self.device)
        batch_size = self.args.batch_size
        row = {"step": self.step, "epoch": batch["epoch"], "samples_seen": self.step * batch_size,
               "loss": means.pop("loss"), "lr": self.optimizer.param_groups[0]["lr"],
               "step_s": seconds, "data_s": means.pop("data_s"),
               "samples_per_s": batch_size / seconds}
        row.update(means)
        first, second = [gather(normalize(x)) for x in embeddings[:2]]     # (N, D)
        row.update(embedding_health(first, second, names=self.pair))
        self.log.write(row)
        self.show(row)

    def show(self, row):
        """Shows a row of the log in the progress bar or, without a terminal, as a line."""
        texts = {name: f"{row[name]:.3f}" for name in self.shown if name in row}
        texts["samples"] = f"{row['samples_per_s']:.0f}/s"
        if self.has_bar:
            self.bar.set_postfix(texts, refresh=False)
        else:
            seconds = (self.last - self.step) * row["step_s"]
            remaining = f"{seconds:.0f} s"
            if seconds > 90:
                remaining = f"{seconds / 60:.0f} min"
            words = ", ".join(f"{name} {text}" for name, text in texts.items())
            print_main(f"step {self.step:,} of {self.last:,}: {words}, {remaining} left")

    def restart_clock(self):
        """Speed and waiting for data are measured from here."""
        self.clock = time.perf_counter()
        self.step_of_clock = self.step
        self.seconds_waited = 0.0

    def on_signal(self, number, _):
        """In the loop, a signal ends the run after a step, when all processes have heard of it.

        Elsewhere, or at a second Ctrl-C, it ends at once.
        """
        is_second = number == signal.SIGINT and self.signal_here == signal.SIGINT
        if is_second or not self.in_loop:
            raise SystemExit(128 + number)
        self.signal_here = number

    def stop_by_signal(self):
        """Ends the process after a checkpoint and says how to go on. Collective."""
        self.bar.close()
        name = signal.Signals(self.signal).name
        print_main(f"stopped after step {self.step} by {name}; to go on: python {self.command} "
                   f"--resume {self.folder} (with the same launcher)")
        barrier()
        self.accelerator.end_training()
        raise SystemExit(128 + self.signal)

    def evaluate_val(self):
        """Evaluates and logs the val splits: val, chance and val_pieces. Collective."""
        if self.step == self.last:
            # takes autocast off the encoders: the last evaluation is in float32, as in eval.py
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.share_statistics()
        self.val, self.chance, self.val_pieces = self.evaluator("val")
        samples_seen = self.step * self.args.batch_size
        row = {"step": self.step, "samples_seen": samples_seen, "eval": self.val}
        if self.after_val and self.val_pieces:
            self.after_val(row, self.val_pieces)
        self.log.write(row)
        self.note_best_step()
        self.show_val()

    def show_val(self):
        """Prints the evaluation of val in a line."""
        line = val_line(self.val)
        if not line:
            return
        line = f"step {self.step:,} of {self.last:,}: {line}"
        if self.has_bar:
            tqdm.write(line)
        else:
            print_main(line)

    def note_best_step(self):
        """Sets best_step by the rows of the log, with --eval-epoch best; of ties, the first."""
        if self.args.eval_epoch != "best":
            return
        highest = -math.inf
        for row in self.log.rows:
            if "eval" in row:
                score = val_score(row, self.score)
                if row["step"] > 0 and score > highest:  # step 0 has no checkpoint
                    highest = score
                    self.best_step = row["step"]

    def restore_best(self):
        """With --eval-epoch best, restores the weights of best_step and evaluates val. Collective.

        `finish` calls it; a script calls it before, to write what belongs to the same weights.
        """
        if self.args.eval_epoch != "best" or self.has_best:
            return
        self.has_best = True
        print_main(f"--eval-epoch best: step {self.best_step}, by {self.score} on val")
        if self.best_step != self.step:
            path = self.folder / "checkpoints" / f"step_{self.best_step}.pt"
            checkpoints.load_parts(self, path, {"model": self.model, **self.loss_modules})
            self.val, self.chance, self.val_pieces = self.evaluator("val")

    def share_statistics(self):
        """Gives all processes the BatchNorm statistics of the first, which are saved. Collective.

        On CPUs each process has its own, and would evaluate its images with them.
        """
        if world_size() > 1:
            for layer in batchnorms(self.model):
                for buffer in layer.buffers():
                    dist.broadcast(buffer, 0)

    # ---------------------------------------- the end ---------------------------------------------
    def finish(self, figures, **extra):
        """Saves the model, evaluates the test splits, writes summary.json, draws. Collective.

        Args:
            figures: name of the module of contrastive/figures that draws; it stays in a copy of the
                script.
            extra: more entries of the summary.
        Returns: the summary.
        """
        self.in_loop = False
        self.bar.close()
        self.restore_best()
        on_main(self.save_model)
        test, chance, test_pieces = self.evaluator("test")
        summary = self.summary(test, chance, extra)
        if rank() == 0:
            write_json(self.folder / "summary.json", summary)
            print_main(report(summary, self.folder))
            save_pieces(self.folder / "val.safetensors", self.val_pieces)
            save_pieces(self.folder / "test.safetensors", test_pieces, MAX_PICTURES)
            draw(figures, self.folder)
        barrier()
        self.accelerator.end_training()  # closes trackers and the process group
        return summary

    def summary(self, test, chance, extra):
        """The content of summary.json. Collective."""
        args, seconds = self.args, time.time() - self.started
        return {
            "script": self.script, "dataset": args.dataset,
            "method": getattr(args, "loss", self.script), "seed": args.seed, "steps": self.step,
            "epochs": self.step / self.steps.per_epoch,
            "tested_step": self.best_step or self.step, "wall_s": seconds,
            "samples_per_s": self.step * args.batch_size / seconds, "processes": world_size(),
            "peak_memory_mib": max(gather_objects(peak_memory_mib())),
            "parameters": self.num_parameters,
            "batch": args.batch_size, "bad_samples": len(self.data.bad), "val": self.val,
            "test": test, "chance": chance, "val_chance": self.chance,
            "commit": self.commit, "hub": self.hub,
            "training_set": identity_of_files(self.train),
            "versions": versions(args.cpu, self.commit), **extra}

    def save_model(self):
        """Writes what load_model reads; own.safetensors has the parameters of the loss, if any."""
        _, tokenizer, _ = self.evaluator.towers
        write_tensors(self.folder / "model.safetensors", self.model.state_dict())
        parameters = self.loss_parameters()
        if parameters:
            write_tensors(self.folder / "own.safetensors", parameters)
        write_json(self.folder / "model.json", self.model.spec)
        # that of the small encoder is there since the start: a resume would not write it again
        if tokenizer and self.args.text_encoder != "small":
            tokenizer.tokenizer.save_pretrained(self.folder / "tokenizer")


def val_score(row, name):
    """The score of a val row of the log, as Run.start describes it."""
    if name in row:
        return row[name]
    scores = [metrics[name] for metrics in row["eval"].values() if name in metrics]
    if not scores:
        raise UserError(f"--eval-epoch best: the evaluation on val has no {name}; give last")
    return sum(scores) / len(scores)


def detach(numbers):
    """{name: () or number} without the graphs of the tensors."""
    detached = {}
    for name, value in numbers.items():
        detached[name] = value.detach() if torch.is_tensor(value) else value
    return detached
