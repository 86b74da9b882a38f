"""The book-keeping of a run: folder, log, checkpoints, signals, evaluation, summary, progress."""

import collections
import copy
import math
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

from contrastive.data.batches import Batches
from contrastive.data.hub import COMMITS
from contrastive.data.table import identity_of_files
from contrastive.encoders.base import batchnorms, sync_batchnorm
from contrastive.engine import checkpoints
from contrastive.engine.banner import banner
from contrastive.engine.flags import unread_flags
from contrastive.engine.log import Log, commit, peak_memory_mb, versions
from contrastive.evaluation.report import report
from contrastive.core.files import write_json, write_tensors
from contrastive.evaluation.retrieval import query_ranks
from contrastive.core.processes import (
    UserError, barrier, gather_objects, mean_over_processes, on_main, opening, rank, say, set_up,
    to_device, world)

import torch
import torch.distributed as dist
from tqdm import tqdm

ENOUGH_STEPS = 500  # at least, of a run on own data without --epochs and --max-steps


# ===================================================== lengths ====================================
class Steps(NamedTuple):
    """Numbers of optimiser steps."""

    per_epoch: int
    total: int  # the schedules span them
    warmup: int


def count_steps(args, train):
    """The steps of a run: Steps."""
    per_epoch = train.examples // args.batch_size
    total = args.max_steps or max(1, round(args.epochs * per_epoch))
    warmup = min(round(args.warmup_epochs * per_epoch), total // 10)
    if args.warmup_fraction:
        warmup = round(args.warmup_fraction * total)
    return Steps(per_epoch, total, warmup)


def fit_to_data(args, train):
    """A copy of the flags in which the batch and the epochs fit a user's small data.

    A batch that is larger than the data becomes that of fitting_batch. Fewer than 500 steps become
    as many whole epochs as make at least 500, with a warm-up in proportion. Values on the command
    line stay, and changes are printed.

    Raises: UserError if the data have fewer examples than a batch.
    """
    args = copy.copy(args)
    examples = train.examples
    own_data = args.recipe in ("own", "frozen") and not args.resume
    processes = int(os.environ.get("WORLD_SIZE", 1))  # there is no process group yet
    choose_batch = own_data and "--batch-size" not in args.command_line
    if choose_batch and processes < examples < args.batch_size:
        batch_size = fitting_batch(examples, processes)
        say(f"--batch-size {args.batch_size} -> {batch_size}, which fits the data")
        args.batch_size = batch_size
    if examples < args.batch_size:
        raise UserError(f"--batch-size {args.batch_size}: larger than the {examples} training "
                        f"examples of {train.name}")
    chooses_length = {"--epochs", "--max-steps"}.intersection(args.command_line)
    if own_data and not args.max_steps and not chooses_length:
        per_epoch = examples // args.batch_size
        epochs = float(math.ceil(ENOUGH_STEPS / per_epoch))
        if args.epochs < epochs:
            say(f"--epochs {args.epochs:g} -> {epochs:g}, which make {epochs * per_epoch:.0f} "
                "steps")
            if "--warmup-epochs" not in args.command_line:
                args.warmup_epochs = scaled_warmup(args, epochs / args.epochs)
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


def scaled_warmup(args, factor):
    """--warmup-epochs times a factor, which is printed if there is such a warm-up."""
    warmup_epochs = args.warmup_epochs * factor
    if args.warmup_epochs and not args.warmup_fraction:
        say(f"--warmup-epochs {args.warmup_epochs:g} -> {warmup_epochs:g}, in proportion")
    return warmup_epochs


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


class CheckedLoss(NamedTuple):
    """What the message about a loss that is not finite names."""

    loss: torch.Tensor  # () of this process
    tau: object  # a number or a tensor
    embeddings: list  # (B, D) each


class StepReport(NamedTuple):
    """What the processes have told each other after a step."""

    maxima: torch.Tensor  # (3,) signal, number of bad samples, 1 if the loss is not finite
    ready: object  # CUDA event after which the maxima lie on the CPU, or None
    checked: object  # CheckedLoss, or None if the script has not called check_finite
    keys: list  # of the samples of this process
    bad: list  # its samples that could not be read
    step: int


class Run:
    """The book-keeping of a run. It never runs a forward, a loss, a backward or an optimiser step.

    Scripts call, in this order: Run(...), wrap(...), resume(), batches(...), begin(...), in each
    step set_lr(...), check_finite(...) and done(...), and at last finish(...).

    Args:
        file: the script's __file__, which names it.
        args: the flags, which a Run does not change.
        train, evals: training data; {name: {split: data}} to evaluate.
        steps: Steps, as count_steps returns them.
        recipes: RECIPES of the script, for the banner.
    Attributes, beside the arguments:
        step: optimiser steps so far.
        last: step at which the run ends; a script may lower it.
        device: of the encoders.
        fused: argument of Adam.
        folder: of the run.
        remark: whose values the recipe has.
        log: rows of metrics.jsonl.
        tensors: {name: tensor}, which a script may fill and which checkpoints hold.
        val, val_pieces, test_pieces: latest results on val, and embeddings for the pictures.
        loss_column, tau_column: columns of the log in the progress bar.
        negatives: of an anchor, for the banner.
    """

    def __init__(self, file, args, train, evals, steps, recipes=None):  # noqa: PLR0917
        self.started = time.time()  # a resume moves it back by the time before
        self.script = Path(file).stem
        self.args = args
        self.steps = steps
        self.train = train
        self.evals = evals
        self.recipes = recipes or {}
        self.remark = self.recipes.get(args.recipe, {}).get("recipe", "")
        self.require_gpu()
        self.accelerator = set_up(args)
        self.device = self.accelerator.device
        on_gpu = self.device.type == "cuda"
        self.fused = True if on_gpu else None  # Adam in one kernel; None: torch chooses
        # reports are read a step late on a GPU, so that no step waits for it
        self.report_delay = 1 if on_gpu else 0
        self.folder = on_main(self.open_folder)
        self.commit = commit()  # as it is now: files may change
        self.hub = args.hub  # {id: commit} of what was read from the hub

        self.step = 0
        self.last = steps.total
        self.tensors = {}
        # of a resumed run, for its batches
        self.positions = {}
        self.bad_samples = {}
        self.checked = None  # CheckedLoss of the step that goes on
        self.reports = collections.deque()  # StepReport of each step that is not read yet
        self.signal_here = 0  # number of the signal that this process has received
        self.signal = 0  # the same over all processes
        self.in_loop = False
        self.loss_column, self.tau_column = "loss", "tau"
        self.negatives = args.batch_size - 1

    # ---------------------------------------- set-up ----------------------------------------------
    def require_gpu(self):
        """Refuses a paper's recipe without a GPU unless the user asks for the CPU."""
        gpu_is_missing = not self.args.cpu and not torch.cuda.is_available()
        if gpu_is_missing and self.remark.startswith(("paper", "the paper")):
            with opening(f"recipe {self.args.recipe} needs a GPU; without one add --cpu; torch"):
                torch.cuda.init()  # raises torch's reason, such as an old driver

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
        return folder

    def has_checkpoint(self):
        """Whether --resume names a run that has saved one."""
        return bool(self.args.resume and checkpoints.checkpoints_of(self.folder))

    def wrap(self, trained, loss_modules, optimizer, second=None):
        """Prepares module and optimiser for a step: SyncBatchNorm, torch.compile and DDP.

        Args:
            trained: the module that DDP wraps.
            loss_modules: parameters and buffers of the loss, outside DDP.
            optimizer: the script's optimiser.
            second: another optimiser, which is saved; the script runs its step.
        Returns: model, optimizer.
        """
        self.trained = sync_batchnorm(trained, self.args)
        self.loss_modules = loss_modules
        parameters = [*self.trained.parameters()]
        for p in loss_modules.parameters():
            if p.requires_grad:  # MoCo's second encoder is not counted
                parameters.append(p)
        self.parameters = sum(p.numel() for p in parameters)
        # all processes have made the same weights by now; dropout differs from here on
        torch.manual_seed(self.args.seed + rank())
        # DDP would send all buffers in each forward; only BatchNorm's differ, and on CPUs alone
        on_cpu = self.device.type == "cpu"
        self.accelerator.ddp_handler.broadcast_buffers = on_cpu and bool(batchnorms(self.trained))
        model = torch.compile(self.trained) if self.args.compile else self.trained
        with warnings.catch_warnings():
            # accelerate hands the old name of this option to DDP
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

        # what has a state_dict, by its key in a checkpoint
        self.parts = {"model": self.trained, "optimizer": self.optimizer}
        if len(loss_modules) > 0:
            self.parts["own"] = loss_modules
        if second:
            self.parts["second"] = second
        if self.accelerator.scaler:
            self.parts["scaler"] = self.accelerator.scaler
        return self.model, self.optimizer

    def resume(self):
        """Restores a checkpoint with --resume, and reads the log up to it."""
        if self.args.resume:
            checkpoints.load(self)
        self.first = self.step
        self.log = Log(self)

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

    def begin(self, evaluator, random_guess=None, lines=None, after_val=None):
        """Prints the banner, evaluates before the first step, starts the progress bar. Collective.

        Args:
            evaluator: the Evaluator of the script's data.
            random_guess: loss of a random guess at the start and at the end; None = unknown.
            lines: {title: text}, more lines of the banner.
            after_val: function (row, pieces) that adds to each row of a val evaluation.
        """
        self.evaluator, self.after_val = evaluator, after_val
        self.hub = self.hub | COMMITS  # a resumed run reads no published weights
        # from here on nothing refuses a resume: until then its folder stays as it was
        checkpoints.set_newer_aside(self)
        self.log.open(self)
        self.write_args()
        say(banner(self, random_guess, lines or {}))
        # a checkpoint is written before the evaluation of its step
        if self.step == 0 or self.due("eval", self.step):
            self.evaluate_val()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        # in a file or a pipe, log_step writes lines in place of a bar
        self.has_bar = rank() == 0 and sys.stderr.isatty()
        self.bar = tqdm(total=self.last, initial=self.step, disable=not self.has_bar,
                        dynamic_ncols=True, unit="step")
        self.trained.train()
        self.loss_modules.train()
        self.restart_clock()
        self.in_loop = True

    def write_args(self):
        """Writes args.json."""
        if rank() == 0:
            flags = {"script": self.script} | vars(self.args) | {"resume": "", "hub": self.hub}
            write_json(self.folder / "args.json", flags)

    # ---------------------------------------- in the loop -----------------------------------------
    def set_lr(self, lr):
        """Writes the learning rate into the optimiser, times a group's `lr_scale` if it has one."""
        self.lr = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1)

    def due(self, action, step):
        """Whether 'log', 'eval' or 'save' is due after so many steps; always after the last one."""
        intervals = {"log": self.args.log_every, "eval": self.args.eval_every,
                     "save": self.args.save_every}
        interval = intervals[action]
        if step == self.last:
            return True
        return interval > 0 and step % interval == 0

    def check_finite(self, loss, tau, embeddings):
        """Lets `done` stop all processes if the loss of one of them is not finite.

        Args:
            loss: () of this process.
            tau, embeddings: for the message: a number or a tensor; (B, D) tensors.
        """
        detached = [x.detach() for x in embeddings]
        self.checked = CheckedLoss(loss.detach(), tau, detached)

    def exchange_reports(self, batch):
        """Tells all processes of signals, bad samples and a loss that is not finite. Collective.

        On a GPU the answer is read one step later, so that the host does not wait for the step,
        except before a checkpoint or an evaluation.
        """
        counts = torch.tensor([self.signal_here, len(batch["bad"])], dtype=torch.float)
        counts = to_device(counts, self.device)                            # (2,)
        if self.checked is None:
            not_finite = counts.new_zeros(1)
        else:
            not_finite = 1 - self.checked.loss.isfinite().float()[None]    # (1,)
        maxima = torch.cat([counts, not_finite])                           # (3,)
        if world() > 1:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        maxima = maxima.to("cpu", non_blocking=True)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        self.reports.append(StepReport(
            maxima, ready, self.checked, batch["keys"], batch["bad"], self.step))
        self.checked = None
        delay = self.report_delay
        step = self.step + 1
        if self.due("save", step) or self.due("eval", step):
            delay = 0
        self.read_reports(keep=delay)

    def read_reports(self, keep=0):
        """Acts on the reports of all but the last `keep` steps."""
        while len(self.reports) > keep:
            report = self.reports.popleft()
            if report.ready:
                report.ready.synchronize()
            signal_number, num_bad, not_finite = report.maxima.tolist()
            self.signal = max(self.signal, int(signal_number))
            if num_bad:
                self.data.count_bad(report.bad, report.step)
            if not_finite:
                self.stop_not_finite(report)

    def stop_not_finite(self, report):
        """Raises: UserError that names step, temperature, norms and samples. Collective."""
        loss, tau, embeddings = report.checked
        line = ""
        if not loss.isfinite():
            norms = [x.float().norm(dim=-1) for x in embeddings]           # (B,) each
            is_finite = torch.stack(norms).isfinite().all(0)               # (B,)
            rows = is_finite.logical_not().nonzero().flatten().tolist()
            rows = rows or range(len(is_finite))
            keys = [report.keys[row] for row in rows][:8]
            largest = ", ".join(f"{norm.max():.3g}" for norm in norms)
            line = f"process {rank()}: norms up to {largest}, keys {keys}"
        lines = [line for line in gather_objects(line) if line]
        if torch.is_tensor(tau):
            tau = tau.mean()
        raise UserError(
            f"the loss is not finite at step {report.step} (tau {tau:.4g}); {'; '.join(lines)}. "
            "Try a lower learning rate, --grad-clip 1 or a higher temperature")

    def done(self, batch, loss, tau, columns=None):
        """Ends a step: counts it, logs, saves, evaluates, and stops where it must. Collective.

        Call it after each optimiser step. All processes stop at a loss that is not finite (if the
        script has called check_finite), at too many bad samples, or at a signal to one of them.

        Args:
            batch: the batch of the step.
            loss: () of this process.
            tau: of the step, a number, () or (B,), whose mean over processes is logged.
            columns: more columns of the log. Only steps need them after which 'log' is due.
        """
        self.exchange_reports(batch)
        self.step += 1
        log = self.due("log", self.step)
        evaluate = self.due("eval", self.step)
        save = self.due("save", self.step)
        self.seconds_waited += batch["seconds"]
        if self.step == self.first + 1:
            self.warn_of_unread_flags()
        if log:
            self.log_step(batch, loss, tau, columns or {})
        self.bar.update()
        stopping = self.signal and self.step < self.last
        if save or evaluate or stopping:
            self.read_reports()  # a step whose loss is not finite is not saved
            checkpoints.save(self)
        if stopping:
            self.stop_by_signal()
        if evaluate:
            self.in_loop = False  # a signal may end an evaluation at once: all before it is saved
            self.evaluate_val()
            self.in_loop = True
        if log or save or evaluate:
            self.restart_clock()

    def warn_of_unread_flags(self):
        """Prints a warning for each flag of the command line that nothing has read so far."""
        for flag in unread_flags(self.args):
            say(f"WARNING: {flag} has no effect beside the other flags: nothing has read it")

    def log_step(self, batch, loss, tau, columns):
        """Writes a row of the log and shows it in the progress bar. Collective."""
        num_steps = self.step - self.step_of_clock
        seconds = (time.perf_counter() - self.clock) / num_steps
        tau_is_tensor = torch.is_tensor(tau)
        numbers = {"loss": loss, "data_s": self.seconds_waited / num_steps}
        if tau_is_tensor:
            numbers["tau"] = tau.mean()
        means = mean_over_processes(numbers, self.device)
        tau = means.get("tau", tau)
        batch_size = self.args.batch_size
        row = {"step": self.step, "epoch": batch["epoch"], "samples_seen": self.step * batch_size,
               "loss": means["loss"], "lr": self.lr, self.tau_column: tau, "step_s": seconds,
               "data_s": means["data_s"], "samples_per_s": batch_size / seconds}
        row.update(self.scalars_of_loss())
        row.update(columns)
        self.log.write(row)
        self.show(row)

    def scalars_of_loss(self):
        """{name: number} of the scalar parameters of the loss; tau has a column of its own."""
        scalars = {}
        for name, p in self.loss_modules.named_parameters():
            if p.ndim == 0 and p.requires_grad and name != "tau.log_tau":
                scalars[name] = p.item()
        return scalars

    def show(self, row):
        """Shows a row of the log in the progress bar or, without a terminal, as a line."""
        loss = row.get(self.loss_column, row["loss"])
        column = self.tau_column
        if "tau_pos" in row:
            column = "tau_pos"  # the mean temperature of positive pairs
        shown = {self.loss_column: f"{loss:.3f}", column: f"{row[column]:.3f}",
                 "samples": f"{row['samples_per_s']:.0f}/s"}
        if self.has_bar:
            self.bar.set_postfix(shown, refresh=False)
        else:
            seconds = (self.last - self.step) * row["step_s"]
            remaining = f"{seconds:.0f} s"
            if seconds > 90:
                remaining = f"{seconds / 60:.0f} min"
            words = ", ".join(f"{name} {value}" for name, value in shown.items())
            say(f"step {self.step:,} of {self.last:,}: {words}, {remaining} left")

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
        say(f"stopped after step {self.step} by {name}; to go on: python {sys.argv[0]} --resume "
            f"{self.folder} (with the same launcher)")
        barrier()
        self.accelerator.end_training()
        raise SystemExit(128 + self.signal)

    def evaluate_val(self):
        """Evaluates and logs the val splits: val, chance and val_pieces. Collective."""
        if self.step == self.last and not self.args.compile:
            # Takes autocast off the encoders: the last evaluation is in float32, as in eval.py.
            # With --compile it stands around the compiled module, which no evaluation calls.
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.share_statistics()
        self.val, self.chance, self.val_pieces = self.evaluator("val")
        samples_seen = self.step * self.args.batch_size
        row = {"step": self.step, "samples_seen": samples_seen, "eval": self.val}
        if self.after_val and self.val_pieces:
            self.after_val(row, self.val_pieces)
        self.log.write(row)

    def share_statistics(self):
        """Gives all processes the BatchNorm statistics of the first, which are saved. Collective.

        On CPUs each process has its own, and would evaluate its images with them.
        """
        if world() > 1:
            for layer in batchnorms(self.trained):
                for buffer in layer.buffers():
                    dist.broadcast(buffer, 0)

    # ---------------------------------------- the end ---------------------------------------------
    def finish(self, draw, **extra):
        """Saves the encoders, evaluates the test splits, writes summary.json, draws. Collective.

        Args:
            draw: function (run) for the pictures.
            extra: more entries of the summary.
        Returns: the summary.
        """
        self.in_loop = False
        self.bar.close()
        on_main(self.save_model)
        test, chance, self.test_pieces = self.evaluator("test", with_trivial=True)
        summary = self.summary(test, chance, extra)
        if rank() == 0:
            self.write_ranks()
            write_json(self.folder / "summary.json", summary)
            say(report(summary, self.folder))
            draw(self)
        barrier()
        self.accelerator.end_training()  # closes trackers and the process group
        return summary

    def summary(self, test, chance, extra):
        """The content of summary.json. Collective."""
        args, seconds = self.args, time.time() - self.started
        return {
            "script": self.script, "dataset": args.dataset,
            "method": getattr(args, "loss", self.script), "seed": args.seed, "steps": self.step,
            "epochs": self.step / self.steps.per_epoch, "wall_s": seconds,
            "samples_per_s": self.step * args.batch_size / seconds, "processes": world(),
            "peak_memory_mb": max(gather_objects(peak_memory_mb())), "parameters": self.parameters,
            "batch": args.batch_size, "bad_samples": len(self.data.bad), "val": self.val,
            "test": test, "chance": chance, "commit": self.commit, "hub": self.hub,
            "training_set": identity_of_files(self.train),
            "versions": versions(args.cpu, self.commit), **extra}

    def write_ranks(self):
        """Writes the rank of each test query by cosine to test_ranks.safetensors.

        They serve comparisons of runs, and are without the biases of ncl.py's reported recalls.
        """
        tensors = {}
        for name, pieces in self.test_pieces.items():
            if pieces.text is not None:
                for direction, ranks in query_ranks(pieces).items():
                    tensors[f"{name}/{direction}"] = torch.from_numpy(ranks)
        if tensors:
            write_tensors(self.folder / "test_ranks.safetensors", tensors)

    def save_model(self):
        """Writes what load_model reads; own.safetensors has the parameters of the loss, if any."""
        tower, tokenizer, _ = self.evaluator.towers
        write_tensors(self.folder / "model.safetensors", tower.state_dict())
        parameters = {}
        for name, p in self.loss_modules.named_parameters():
            if p.requires_grad:
                parameters[name] = p
        if parameters:
            write_tensors(self.folder / "own.safetensors", parameters)
        write_json(self.folder / "model.json", tower.spec)
        # that of the small encoder is there since the start: a resume would not write it again
        if tokenizer and self.args.text_encoder != "small":
            tokenizer.tokenizer.save_pretrained(self.folder / "tokenizer")
