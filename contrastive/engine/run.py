"""The book-keeping of a run: folder, log, checkpoints, signals, evaluation, summary, progress bar."""

import collections
import functools
import math
import os
import signal
import sys
import time
from pathlib import Path

from contrastive.data.batches import Batches
from contrastive.data.clips import feature_shape
from contrastive.data.table import COMMITS, frames_of

from contrastive.encoders.base import (  # isort: skip
    CLIP_VIP, FROM_FILES, VIDEO, batchnorms, channels_last, clip_width, recompute, sync_batchnorm)
from contrastive.encoders.models import build_model, spec_of, untrained
from contrastive.encoders.texts import build_tokenizer
from contrastive.engine import checkpoints
from contrastive.engine.log import Log, commit, peak_memory_mb, versions

from contrastive.engine.processes import (  # isort: skip
    UserError, barrier, gather_objects, mean_over_processes, on_main, opening, rank, say, set_up, to_device,
    world, write_json, write_tensors)
from contrastive.evaluation.retrieval import report
from contrastive.figures.base import similarity_histograms

import torch
import torch.distributed as dist

ENOUGH_STEPS = 500  # of own data without --epochs and --max-steps


class Run:
    """The book-keeping of a run. It never runs a forward, a loss, a backward or an optimiser step: the script does.

    Scripts call, in this order: Run(...), towers(), wrap(...), resume(), batches(...), begin(...), then in each step
    set_lr(...), check_finite(...), done(...), and at last finish(...).

    Attributes: step (done so far), total (of the schedules), last (where this run ends), per_epoch, warmup (steps);
    device, fused (of Adam), folder, args, train, evals, log; start (published weights or not, --init-from); tensors
    (more tensors of the checkpoint, by name); val (the latest result).
    """

    def __init__(self, file, args, train, evals, recipes=None):
        self.started, self.script = time.time(), Path(file).stem  # a resume moves the start back by the time before
        self.args, self.train, self.evals, self.recipes = args, train, evals, recipes or {}
        self.remark = self.recipes.get(args.recipe, {}).get("recipe", "")
        if self.remark.startswith(("paper", "the paper")) and not (args.cpu or torch.cuda.is_available()):
            with opening(f"recipe {args.recipe} without a card is for --cpu; torch"):
                torch.cuda.init()  # torch's own reason, such as an old driver
        self.fitted = self._fit()
        self.per_epoch = train.examples // args.batch_size
        self.total = self.last = args.max_steps or max(1, round(args.epochs * self.per_epoch))
        self.warmup = min(round(args.warmup_epochs * self.per_epoch), self.total // 10)
        self.warmup = round(args.warmup_fraction * self.total) or self.warmup
        self.accelerator = set_up(args)
        self.device = self.accelerator.device
        self.fused = True if self.device.type == "cuda" else None  # Adam in one kernel; None: torch chooses
        self.lagged = self.device.type == "cuda"  # what a step says is read a step later, so that no step waits for it
        self.folder = on_main(self._open_folder)
        self.step, self.positions, self.tensors, self.bad = 0, {}, {}, {}
        self.said, self.asked, self.signal, self.in_loop = collections.deque(), 0, 0, False
        self.commit = commit()  # as it is now: files may change
        self.loss_word, self.tau_word = "loss", "tau"  # in the bar and the banner; columns of the log, or others
        self.negatives = args.batch_size - 1  # of an anchor, for the banner

    # ---------------------------------------- set-up ------------------------------------------------------------------
    def _fit(self):
        """Own data without --batch-size take the batch that fits them; without --epochs and --max-steps, as many epochs
        as make 500 steps.   Returns: words for the banner.   Raises: UserError for a batch that does not fit."""
        args, examples, said = self.args, self.train.examples, ""
        processes = int(os.environ.get("WORLD_SIZE", 1))  # there is no process group yet
        fits_data = args.recipe == "own" and not args.resume
        if fits_data and "--batch-size" not in args.given and processes < examples < args.batch_size:
            fits = examples // processes * processes
            said, args.batch_size = f"; --batch-size {args.batch_size} -> {fits}, which fits the data", fits
        if examples < args.batch_size:
            raise UserError(f"--batch-size {args.batch_size}: larger than the {examples} training examples of "
                            f"{self.train.name}")
        epochs = float(math.ceil(ENOUGH_STEPS / (examples // args.batch_size)))
        if fits_data and not {"--epochs", "--max-steps"} & {*args.given} and args.epochs < epochs:
            said += f"; --epochs {args.epochs:g} -> {epochs:g}, which make {ENOUGH_STEPS} steps"
            args.epochs, args.warmup_epochs = epochs, args.warmup_epochs * epochs / args.epochs
        return said

    def _open_folder(self):
        args, stamp = self.args, time.strftime("%Y%m%d-%H%M%S")
        name = args.run_name or f"{self.script}__{Path(args.dataset).stem}__s{args.seed}__{stamp}"
        folder = checkpoints.folder_of(args.resume) if args.resume else Path(args.output_dir) / name
        if not args.resume and (folder / "metrics.jsonl").exists():
            raise UserError(f"{folder}: holds a run already; --resume {folder}, or another --run-name")
        with opening(folder):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        return folder

    def towers(self, texts=None, questions=None):
        """(TwoTower on the device, tokenizer or None, EvalTransform) that the model flags describe.

        texts: the texts that a tokenizer learns from, instead of the captions; questions: keywords of QuestionAnswerer.
        """
        args, tokenizer, both = self.args, None, "--image-encoder" in self.args.given
        if both and getattr(args, "text_encoder", "") and "--text-encoder" not in args.given:
            if width := clip_width(args.image_encoder):  # a CLIP is the text encoder, too, with its projections' width
                args.text_encoder = args.image_encoder.removeprefix(CLIP_VIP)
                args.embed_dim = args.embed_dim if "--embed-dim" in args.given else width
        self.spec = spec_of(args)
        if self.spec["text_encoder"]:
            texts = texts or functools.partial(self.train.first_captions, 200_000)
            tokenizer = build_tokenizer(args.text_encoder, args.text_length, texts, self.folder / "tokenizer",
                                        args.clean_captions, keep=bool(args.resume), start=args.init_from)
        if args.image_encoder in FROM_FILES:
            self.spec["features"] = feature_shape(self.train, args.image_encoder)
        if args.image_encoder.startswith(VIDEO) and (frames := frames_of(self.train)):
            self.spec["frames"] = frames
        self.spec |= {"questions": questions} if questions else {}
        again = args.resume and checkpoints.checkpoints_of(self.folder)  # its weights are in the checkpoint
        self.start = (False, "") if again else (args.pretrained, args.init_from)
        self.tower, transform = build_model(self.spec, tokenizer, *self.start)
        if args.grad_checkpointing:
            recompute(self.tower)
        self.tower.to(self.device)
        if self.device.type == "cuda":
            channels_last(self.tower.vision)
        if tokenizer:
            tokenizer.device = self.device  # not before: build_model tries texts where the model is
        self.tokenizer = tokenizer
        return self.tower, tokenizer, transform

    def wrap(self, trained, own, optimizer, second=None):
        """(model, optimizer) as a step uses them: SyncBatchNorm, torch.compile, DDP.

        Args: trained: the module that DDP wraps.   own: parameters and buffers of the loss, outside DDP.
            second: an optimiser of the loss's own parameters, which is also saved; the script runs its step.
        """
        self.trained, self.own = sync_batchnorm(trained, self.args), own
        learnt = (p for p in own.parameters() if p.requires_grad)  # without MoCo's second encoder
        self.parameters = sum(p.numel() for p in (*self.trained.parameters(), *learnt))
        torch.manual_seed(self.args.seed + rank())  # the weights are the same on all processes; dropout should not be
        # DDP sends all buffers in each forward; only BatchNorm's on CPUs differ between processes (sync_batchnorm)
        self.accelerator.ddp_handler.broadcast_buffers = self.device.type == "cpu" and bool(batchnorms(self.trained))
        model = torch.compile(self.trained) if self.args.compile else self.trained
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        parts = {"model": self.trained, "own": own, "optimizer": self.optimizer, "second": second,
                 "scaler": self.accelerator.scaler}
        self.parts = {name: part for name, part in parts.items() if part}  # of a checkpoint: what has a state_dict
        return self.model, self.optimizer

    def resume(self):
        """With --resume, restores weights, optimisers, step and random state. Always opens the log."""
        if self.args.resume:
            checkpoints.load(self)
        self.log = Log(self)

    def batches(self, views, transform):
        """The training batches from here to the last step; views: one Augment for each view."""
        args = self.args
        self.data = Batches(self.train, views, transform, args.batch_size, args.seed, self.step, self.last, self.device,
                            args.workers, args.max_bad_fraction, self.folder, self.positions, args.compile)
        self.data.bad = dict(self.bad)  # check_finite counts the bad samples
        return self.data

    def begin(self, evaluator, guess, lines, after_val=None):
        """Banner, the evaluation before the first step (the left end of every curve), progress bar. Collective.

        Args:
            evaluator: of evaluation/retrieval.py.   lines: {word: text}, the script's own lines of the banner.
            guess: the loss of a random guess at the start and at the end of the run; None = not said, as in a fork.
            after_val: function(row, pieces) that adds to each row of a val evaluation.
        """
        from tqdm import tqdm
        self.evaluator, self.after_val = evaluator, after_val
        self.args.hub = getattr(self.args, "hub", {}) | COMMITS  # a resumed run reads no published weights
        if rank() == 0:  # a resume that is refused before leaves the flags of the run
            write_json(self.folder / "args.json", {"script": self.script} | vars(self.args) | {"resume": ""})
        self.banner(guess, lines)
        if self.step == 0 or self.due("eval", 0):  # of a checkpoint, which is written before its evaluation
            self.evaluate_val()
        if self.step == 0 and rank() == 0 and self.tokenizer:
            before = {name: similarity_histograms(p) for name, p in self.val_pieces.items() if "owner" in p}
            write_json(self.folder / "similarity_before.json", before)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        self.bar = tqdm(total=self.last, initial=self.step, disable=rank() > 0, dynamic_ncols=True, unit="step")
        self.trained.train()
        self.own.train()
        self.clock, self.logged, self.waited = time.perf_counter(), self.step, 0.0
        self.in_loop = True

    def banner(self, guess, lines):
        """Prints once, before training, what the flags amount to."""
        args, train = self.args, self.train
        recipe = f"{args.recipe} ({self.remark})" + f", but {', '.join(args.changed)} by flag" * bool(args.changed)
        sizes = [f"{name}: " + ", ".join(f"{len(d):,} {d.split}" + f" ({d.note})" * (d.note not in ("", train.note))
                                         for d in of.values()) for name, of in self.evals.items()]
        if args.recipe == "own" != args.dataset:
            recipe += f"; {args.dataset} has none of its own: --recipe {'|'.join(self.recipes)}"
        timm = getattr(getattr(self.tower.vision.body, "vit", self.tower.vision.body), "pretrained_cfg", {})
        tag = f" ({timm['architecture']}.{timm['tag']})" if timm.get("tag") else ""  # a name without one has one, too
        weights = f"weights of {self.start[1]}" if self.start[1] else f"published weights{tag}, where there are some"
        weights = weights if any(self.start) else "from scratch"
        towers = ", ".join([args.image_encoder] + ([args.text_encoder] if self.tower.text else []))
        size, parts = args.batch_size, f" in chunks of {args.chunk_size}" * bool(args.chunk_size)
        start, end = ("" if value is None else f"{value:.3f}" for value in guess or (None, None))  # "": of a fork
        words = {
            "recipe": recipe,
            "data": f"{train.examples:,} training examples" + f"; {train.note}" * bool(train.note),
            "evaluation": "; ".join(sizes),
            "model": f"{towers}: {self.parameters / 1e6:.1f} M parameters; {weights}",
            "processes": f"{world()} x {torch.get_num_threads()} threads on {self.device}, precision "
                         f"{args.mixed_precision}, {self.data.workers} workers each",
            "batch": f"{size} = {world()} x {size // world()}{parts}" + bool(start) * f"; {self.negatives:,} negatives",
            "random guess": start and f"{self.loss_word} {start}" + f" at the start, {end} at the end" * (start != end),
            "steps": f"{self.total:,} ({self.total / self.per_epoch:.1f} epochs of {self.per_epoch:,}); warm-up "
                     f"{self.warmup}; lr {args.lr:g} -> {args.lr_end:g}, {args.lr_schedule}{self.fitted}",
            **lines, "run": self.folder}
        say("\n".join([f"{self.script}.py"] + [f"  {k:<12} {v}" for k, v in words.items() if v]))

    # ---------------------------------------- in the loop -------------------------------------------------------------
    def set_lr(self, lr):
        """Write the learning rate into the optimiser: in a group with `lr_scale`, times that factor."""
        self.lr = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1)

    def due(self, what, ahead=1):
        """Is 'log', 'eval' or 'save' due after the step in progress? An interval of 0 = only at the end. Where the log
        is due, `done` takes numbers, which other steps need not compute."""
        step, args = self.step + ahead, self.args
        every = {"log": args.log_every, "eval": args.eval_every, "save": args.save_every}[what]
        return step == self.last or bool(every and step % every == 0)

    def check_finite(self, loss, tau, embeddings, batch):
        """The one message of a step: a loss that is not finite, a bad sample, a signal, on any process? Collective.

        A loss that is not finite stops all processes. On a card the answer is read a step later, except before a
        checkpoint or an evaluation."""
        numbers = to_device(torch.tensor([self.asked, len(batch["bad"])], dtype=torch.float), self.device)
        answer = torch.cat([numbers, 1 - loss.detach().isfinite().float()[None]])  # (3,)
        if world() > 1:
            dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        there = torch.cuda.Event() if self.device.type == "cuda" else None
        of_step = loss.detach(), tau, [e.detach() for e in embeddings], batch, self.step
        self.said.append((answer.to("cpu", non_blocking=True), there, of_step))
        if there:
            there.record()
        self._hear(but=int(self.lagged and not (self.due("save") or self.due("eval"))))

    def _hear(self, but=0):
        """Acts on what all but the last `but` steps said."""
        while len(self.said) > but:
            answer, there, (loss, tau, embeddings, batch, step) = self.said.popleft()
            if there:
                there.synchronize()
            number, bad, broken = answer.tolist()
            self.signal = max(self.signal, int(number))  # of any process
            if bad:
                self.data.count_bad(batch["bad"], step)
            if broken:
                norms = [e.float().norm(dim=-1) for e in embeddings]  # (B,) each
                rows = torch.stack(norms).isfinite().all(0).logical_not().nonzero().flatten().tolist()
                keys = [batch["keys"][i] for i in rows or range(len(batch["keys"]))][:8]
                mine = f"process {rank()}: norms up to {', '.join(f'{n.max():.3g}' for n in norms)}, keys {keys}"
                lines = gather_objects("" if loss.isfinite() else mine)
                tau = tau.mean() if torch.is_tensor(tau) else tau
                raise UserError(f"the loss is not finite at step {step} (tau {tau:.4g}); "
                                f"{'; '.join(filter(None, lines))}. Try a lower learning rate, --grad-clip 1 or a "
                                "higher temperature")

    def done(self, batch, loss, tau, numbers=None):
        """Call it after each optimiser step. It counts the step, logs, saves and evaluates if these are due, and ends
        the run if a signal asked for it. Collective.

        Args: loss: () tensor of this process; tau: float, () or (B,), whose mean over processes is logged, too;
            numbers: further columns of the log, as they are logged."""
        log, evaluate, save = map(self.due, ("log", "eval", "save"))
        self.step += 1
        self.waited += batch["seconds"]
        if log:
            steps = self.step - self.logged
            seconds = (time.perf_counter() - self.clock) / steps
            means = {"loss": loss, "data_s": self.waited / steps, "tau": tau.mean() if torch.is_tensor(tau) else tau}
            means = mean_over_processes(means, self.device)
            tau = means["tau"] if torch.is_tensor(tau) else tau  # a number as it is, without the rounding of a mean
            row = {"step": self.step, "epoch": batch["epoch"], "samples_seen": self.step * self.args.batch_size,
                   "loss": means["loss"], "lr": self.lr, self.tau_word: tau, "step_s": seconds,
                   "data_s": means["data_s"], "samples_per_s": self.args.batch_size / seconds} | (numbers or {})
            self.log.write(row)
            shown = {self.loss_word: f"{row.get(self.loss_word, row['loss']):.3f}",
                     self.tau_word: f"{row.get('tau_pos', tau):.3f}"}
            self.bar.set_postfix(shown | {"samples": f"{row['samples_per_s']:.0f}/s"}, refresh=False)
        self.bar.update()
        stopping = self.signal and self.step < self.last
        if save or evaluate or stopping:  # a signal may end an evaluation at once: all before it is saved
            self._hear()  # a step whose loss is not finite is not saved
            checkpoints.save(self)
        if stopping:
            self.bar.close()
            say(f"stopped after step {self.step} by {signal.Signals(self.signal).name}; to go on: python {sys.argv[0]} "
                f"--resume {self.folder} (with the same launcher)")
            barrier()
            self.accelerator.end_training()
            raise SystemExit(128 + self.signal)
        if evaluate:
            self.in_loop = False
            self.evaluate_val()
            self.in_loop = True
        if log or save or evaluate:  # the next speed and waiting for data are those of the steps after this one
            self.clock, self.logged, self.waited = time.perf_counter(), self.step, 0.0

    def _signalled(self, number, _):
        """In the loop, a signal ends the run after the step in which all processes have heard of it; elsewhere, or at
        a second Ctrl-C, at once."""
        if not self.in_loop or number == self.asked == signal.SIGINT:
            raise SystemExit(128 + number)
        self.asked = number

    def evaluate_val(self):
        """Evaluates the val splits, logs the result, keeps it in self.val and picture pieces in val_pieces."""
        if self.step == self.last and self.args.compile:  # the last evaluations are in float32, as those of eval.py
            vars(self.trained).pop("_original_forward", None)  # only the compiled module has autocast; nothing calls it
        elif self.step == self.last:
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.val, self.chance, self.val_pieces = self.evaluator("val")
        row = {"step": self.step, "samples_seen": self.step * self.args.batch_size, "eval": self.val}
        if self.after_val and self.val_pieces:
            self.after_val(row, self.val_pieces)
        self.log.write(row)

    # ---------------------------------------- the end -----------------------------------------------------------------
    def finish(self, draw, **extra):
        """Saves the encoders, evaluates them on test, writes summary.json, prints, draws. Collective.

        Args: draw: function(run) for the pictures.   extra: further entries of the summary, which is returned."""
        self.in_loop = False
        self.bar.close()
        on_main(self.save_model)
        test, chance, self.test_pieces = self.evaluator("test", functools.partial(untrained, self.spec, self.args.seed))
        args, wall = self.args, time.time() - self.started
        summary = {
            "script": self.script, "dataset": args.dataset, "method": getattr(args, "loss", self.script),
            "seed": args.seed, "steps": self.step, "epochs": self.step / self.per_epoch, "wall_s": wall,
            "samples_per_s": self.step * args.batch_size / wall, "processes": world(),
            "peak_memory_mb": max(gather_objects(peak_memory_mb())), "parameters": self.parameters,
            "batch": args.batch_size, "bad_samples": len(self.data.bad), "val": self.val, "test": test,
            "chance": chance, "commit": self.commit, "hub": args.hub,
            "versions": versions(args.cpu), **extra}
        if rank() == 0:
            write_json(self.folder / "summary.json", summary)
            say(report(summary, self.folder))
            draw(self)
        barrier()
        self.accelerator.end_training()  # trackers and the process group are closed
        return summary

    def save_model(self):
        """Writes the encoders, which load_model reads (model.safetensors, model.json, tokenizer/), and own.safetensors,
        the parameters of the loss, if it has any."""
        write_tensors(self.folder / "model.safetensors", self.tower.state_dict())
        if own := {k: p for k, p in self.own.named_parameters() if p.requires_grad}:
            write_tensors(self.folder / "own.safetensors", own)
        write_json(self.folder / "model.json", self.spec)
        if self.tokenizer:
            self.tokenizer.tokenizer.save_pretrained(self.folder / "tokenizer")
