"""The book-keeping of a run: processes, folder, log, checkpoints, evaluation, summary, progress bar."""

import collections
import functools
import signal
import time
from pathlib import Path

import common

import torch
import torch.distributed as dist

from contrastive.encoders.base import FROM_FILES, VIDEO, channels_last, has_batchnorm
from contrastive.engine import base, checkpoints
from contrastive.engine.base import UserError, join_notes, rank, say, world
from contrastive.engine.checkpoints import latest_checkpoint, listen, resume, stop
from contrastive.engine.data import few_steps, fit_to, repeated_captions
from contrastive.engine.folder import Log, commit, method_of, peak_memory_mb, save_model, start_run
from contrastive.engine.processes import ask, batchnorm_policy, set_up, settle
from contrastive.engine.verify import compare, verify
from contrastive.evaluation.embed import few_queries
from contrastive.evaluation.retrieval import report
from contrastive.figures.base import draw_picture, similarity_histograms
from contrastive.readers.clips import feature_shape


class Run:
    """The book-keeping of a run: processes, folder, log, checkpoints, evaluation, summary, progress bar.

    It never runs a forward, a loss, a backward or an optimiser step: the script does. Scripts call, in this order:
    Run(...), towers(), wrap(...), resume(), batches(...), begin(...), done(...) after each step, finish(...).

    Attributes: step (done so far), total (of the schedules), last (where this run ends), per_epoch, warmup (steps);
    device, fused (of Adam), lagged (see check_finite), folder, args, train, evals, log; start (published weights or
    not, --init-from); tensors (more tensors of the checkpoint, by name); val (the latest result).
    """

    def __init__(self, file, args, train, evals, recipes=None):
        self.started, self.script = time.time(), Path(file).stem
        self.args, self.train, self.evals, self.recipes = args, train, evals, recipes or {}
        self.fitted = fit_to(args, train)
        self.count_steps()
        self.accelerator = set_up(args)
        self.device = self.accelerator.device
        self.fused = True if self.device.type == "cuda" else None  # Adam in one kernel; None: torch chooses
        self.lagged = self.device.type == "cuda"
        self.checked, self.unread = None, collections.deque()  # see engine/processes.py
        self.folder, self.lock = start_run(args, self.script)
        self.unreadable = {}
        if args.verify_images:
            self.train, self.evals, self.unreadable = verify(self.folder, train, evals, args.max_bad_fraction,
                                                            args.resume)
            self.fitted |= fit_to(args, self.train)
            self.count_steps()
        files = {f"--{k.replace('_', '-')}": getattr(args, k) for k in ("meta_set", "paraphrases") if hasattr(args, k)}
        if train.streamed:
            files["--streaming"] = train.identity
        self.twins = base.on_main(compare, self.folder, self.train, self.evals, args.resume, files)
        self.step, self.wall_before, self.tracker_id, self.positions, self.tensors = 0, 0.0, None, {}, {}
        self.unevaluated, self.bad, self.bar, self.handlers = False, {}, None, {}
        self.method, self.new_method, self.commit = method_of(file), False, commit()  # as they are now: code may change
        self.loss_word, self.tau_word = "loss", "tau"  # in the bar and the banner; columns of the log, or others
        self.negatives = args.batch_size - 1  # of an anchor, for the banner

    # ---------------------------------------- set-up ------------------------------------------------------------------
    def count_steps(self):
        """Computes the steps of an epoch, the run and the warm-up from the training set as it is now."""
        args = self.args
        self.per_epoch = self.train.examples // args.batch_size
        self.total = self.last = args.max_steps or max(1, round(args.epochs * self.per_epoch))
        self.warmup = min(round(args.warmup_epochs * self.per_epoch), self.total // 10)

    def towers(self, texts=None, questions=None):
        """(TwoTower on the device, tokenizer or None, EvalTransform) that the model flags describe.

        texts: the texts that a tokenizer learns from, instead of the captions; questions: keywords of QuestionAnswerer.
        """
        args, tokenizer = self.args, None
        self.spec = common.spec_of(args)
        if self.spec["text_encoder"]:
            texts = texts or (lambda: self.train.first_captions(200_000))
            tokenizer = common.build_tokenizer(args.text_encoder, args.text_length, texts, self.folder / "tokenizer",
                                        args.clean_captions, keep=bool(args.resume), start=args.init_from)
        if args.image_encoder in FROM_FILES:
            self.spec["features"] = feature_shape(self.train, args.image_encoder)
            for data in (d for of in self.evals.values() for d in of.values() if hasattr(d.clip, "width")):
                data.clip.width = self.spec["features"][1]
        if args.image_encoder.startswith(VIDEO) and common.has_clips(self.train):
            self.spec["frames"] = common.frames_of(self.train)
        if questions:
            self.spec["questions"] = questions
        self.start = args.pretrained, args.init_from
        if args.resume and latest_checkpoint(self.folder):
            self.start = False, ""  # its weights are in the checkpoint; without one, it starts from scratch
        self.tower, transform = common.build_model(self.spec, tokenizer, *self.start)
        self.tower.to(self.device)
        if self.device.type == "cuda":
            channels_last(self.tower.vision)
        self.tokenizer = tokenizer
        if tokenizer:
            tokenizer.device = self.device
        return self.tower, tokenizer, transform

    def wrap(self, trained, own, optimizer, second=None):
        """(model, optimizer) as a step uses them: SyncBatchNorm, torch.compile, DDP.

        Args: trained: the module that DDP wraps.   own: parameters and buffers of the loss, outside DDP.
            second: an optimiser of the loss's own parameters, which is also saved; the script runs its step.
        """
        args, self.second = self.args, second
        if has_batchnorm(trained):
            trained = batchnorm_policy(trained, args)
        self.trained, self.own = trained, own
        torch.manual_seed(args.seed + rank())  # the weights are the same on all processes; dropout should not be
        model = torch.compile(trained) if args.compile else trained
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        return self.model, self.optimizer

    def resume(self):
        """With --resume, restores weights, optimisers, step and random state. Always opens the log."""
        args = self.args
        if args.resume:
            state = resume(self)
            self.step, self.tracker_id = state.get("step", 0), state.get("tracker_id")
            self.wall_before = state.get("wall_s", 0.0)
            self.unevaluated = state.get("unevaluated", False)  # stopped during the evaluation after that step
            self.bad = state.get("bad", {})
            self.new_method = state.get("method", self.method) != self.method
        first = self.step in (0, self.last) or self.unevaluated
        self.log = Log(self.folder, self.accelerator, args.tracker, self.tracker_id, vars(args), self.step, first)

    def batches(self, views, transform):
        """The training batches from here to the last step; views: one Augment for each view."""
        args = self.args
        self.data = common.Batches(
            self.train, views, transform, args.batch_size, args.seed, self.step, self.last, self.device, args.workers,
            args.max_bad_fraction, self.folder, self.positions, args.compile)
        self.data.lagged, self.data.bad = self.lagged, dict(self.bad)
        return self.data

    def begin(self, evaluator, guess, lines, after_val=None):
        """Banner, the evaluation before the first step (the left end of every curve), progress bar. Collective.

        Args:
            evaluator: Evaluator or ClassEvaluator.   lines: {word: text}, the script's own lines of the banner.
            guess: the loss of a random guess at the start and at the end of the run.
            after_val: function(row, pieces) that adds to each row of a val evaluation.
        Returns: picture pieces of the val split before training; {} in a resumed run.
        """
        from tqdm import tqdm
        self.evaluator, self.after_val = evaluator, after_val
        self.banner(guess, lines)
        evaluator.check()
        listen(self)
        if self.step == self.last:
            self.in_float32()
        pieces = self.evaluate_val() if self.step in (0, self.last) or self.unevaluated else {}
        failed = {place.rpartition("/")[0] for place in evaluator.errors}
        if self.step == 0 and failed and failed >= {*self.evals}:  # every set: it would fail at the end, too
            raise UserError(f"evaluation failed before the first step: {'; '.join(evaluator.errors.values())}")
        if self.step == 0 and rank() == 0 and self.tokenizer:
            before = {name: similarity_histograms(p) for name, p in pieces.items() if "owner" in p}
            base.write_json(self.folder / "similarity_before.json", before)
        tqdm.monitor_interval = 0  # no monitor thread: if memory is short, tqdm would wait for one that cannot start
        self.bar = tqdm(total=self.last, initial=self.step, disable=rank() > 0, dynamic_ncols=True, unit="step",
                        mininterval=1.0, miniters=1)
        self.trained.train()
        self.own.train()
        self.start_clock()
        return pieces if self.step == 0 else {}

    def banner(self, guess, lines):
        """Prints once, before training, what the flags amount to."""
        args, train, tower = self.args, self.train, self.tower
        recipe = self.recipes.get(args.dataset, self.recipes.get("own", {})).get("recipe", "")
        examples = f"a stream of about {train.examples:,}" if train.streamed else f"{len(train):,}"
        def size(data):  # the note of the training set is not repeated
            few = few_queries(**{"videos" if common.has_clips(data) else "images": len(data)})
            words = join_notes(data.note if data.note != train.note else "", few)
            return f"{len(data):,} {data.split}" + (f" ({words})" if words else "")
        sizes = [f"{name}: " + ", ".join(map(size, splits.values())) for name, splits in self.evals.items()]
        towers = [f"{args.image_encoder} {millions(tower.vision):.1f} M"]
        if tower.text:
            towers.append(f"{args.text_encoder} {millions(tower.text):.1f} M")
        new_image = args.image_encoder in ("small", "resnet18-cifar", *FROM_FILES)  # it has no published weights
        new_text = not tower.text or tower.text.name == "small"
        which = " of the text encoder" if new_image else " of the image encoder" if tower.text and new_text else ""
        start = "from scratch" if new_image and new_text or not args.pretrained else "published weights" + which
        side = getattr(tower.vision.body, "pretrained_cfg", {}).get("input_size", [args.image_size])[-1]  # timm's
        if args.pretrained and not new_image and side != args.image_size:
            start += f" for {side} px, here at {args.image_size}"
        start = "weights of --init-from" if args.init_from else start
        beside = millions(self.trained) + millions(self.own) - sum(millions(t) for t in (tower.vision, tower.text) if t)
        local, chunks = args.batch_size // world(), f" in chunks of {args.chunk_size}" if args.chunk_size else ""
        fast = " with TF32 in the encoders" * (args.tf32 and self.device.type == "cuda")
        repeated = repeated_captions(train) if tower.text else ""
        first, end = guess
        guessed = f"{self.loss_word} {first:.3f}" + (f" at the start, {end:.3f} at the end" if end != first else "")
        changed = f"WARNING: {self.script}.py has changed since the checkpoint; the run continues with its new code"
        words = {
            "recipe": f"{args.dataset} ({recipe})",
            "data": join_notes(f"{examples} training examples", train.note, repeated),
            "evaluation": "; ".join(sizes), **({"WARNING": self.twins} if self.twins else {}),
            "model": f"{', '.join(towers)} parameters, {start}" + (f", beside them {beside:.2f} M" if beside else ""),
            "processes": f"{world()} x {torch.get_num_threads()} threads on {self.device}, precision "
                         f"{args.mixed_precision}{fast}, {self.data.workers} workers each",
            "batch": f"{args.batch_size} = {world()} x {local}{chunks}; {self.negatives:,} negatives per anchor",
            "random guess": guessed,
            "steps": f"{self.total:,} ({self.total / self.per_epoch:.1f} epochs of {self.per_epoch:,}); warm-up "
                     f"{self.warmup}; lr {args.lr:g} -> {args.lr_end:g}, {args.lr_schedule}"
                     + self.fitted.get("--epochs", "") + few_steps(args, self.total, self.per_epoch),
            **lines, **({"LOWERED": self.fitted["--batch-size"]} if "--batch-size" in self.fitted else {}),
            **({"METHOD": changed} if self.new_method else {}), "run": self.folder}
        say("\n".join([f"{self.script}.py"] + [f"  {k:<12} {v}" for k, v in words.items()]))

    # ---------------------------------------- in the loop -------------------------------------------------------------
    def set_lr(self, lr):
        """Write the learning rate into the optimiser: in a group with `lr_scale`, times that factor."""
        self.lr = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1)

    def check_finite(self, loss, tau, embeddings, batch, rates="--lr"):
        """Stops all processes together, with one message, if the loss is not finite on any of them. Collective.

        A lagged run asks in `done` and acts on the answer a step later, so that no step waits for the card; a step that
        logs, evaluates or saves is checked here.   rates: the flags of the learning rates that may be too high."""
        tau = tau.detach().mean() if torch.is_tensor(tau) else tau
        self.checked = loss.detach(), self.step, tau, [e.detach() for e in embeddings], batch["keys"], rates
        if not self.lagged or any(self._due(self.step + 1).values()):
            settle(self)
            common.check_finite(*self.checked)

    def logs_now(self):
        """Whether the step in progress is logged: then `done` takes numbers, which other steps need not compute."""
        return bool(self._due(self.step + 1)["log"])

    def _due(self, step):
        """Which of log, eval and save are due at this step, counted from 1; an interval of 0 = only at the end."""
        every = {"log": self.args.log_every, "eval": self.args.eval_every, "save": self.args.save_every}
        return {k: step == self.last or (n and step % n == 0) for k, n in every.items()}

    def done(self, batch, loss, tau, numbers=None):
        """Call it after each optimiser step. It counts the step, logs, evaluates and saves if these are due, and ends
        the run if a signal asked for it. Collective.

        Args: loss: () tensor of this process; tau: float, () or (B,), whose mean over processes is logged, too;
            numbers: further columns of the log, as they are logged.
        Raises: UserError on all processes if the weights are not finite."""
        self.step += 1
        self.waited += batch["seconds"]
        due = self._due(self.step)
        ask(self, batch)
        number = settle(self, but=int(self.lagged and not any(due.values())))
        if due["log"]:
            steps = self.step - self.logged
            seconds = (time.perf_counter() - self.clock) / steps
            means = {"loss": loss, "data_s": self.waited / steps, "tau": tau.mean() if torch.is_tensor(tau) else tau}
            means = common.mean_over_processes(means, self.device)
            tau = means["tau"] if torch.is_tensor(tau) else tau  # a number as it is, without the rounding of a mean
            row = {"step": self.step, "epoch": batch["epoch"], "samples_seen": self.step * self.args.batch_size,
                   "loss": means["loss"], "lr": self.lr, self.tau_word: tau, "step_s": seconds,
                   "data_s": means["data_s"], "samples_per_s": self.args.batch_size / seconds} | (numbers or {})
            self.log.write(row)
            self.start_clock()
            shown = {self.loss_word: f"{row.get(self.loss_word, row['loss']):.3f}",
                     self.tau_word: f"{row.get('tau_pos', tau):.3f}"}
            self.bar.set_postfix(shown | {"samples": f"{row['samples_per_s']:.0f}/s"}, refresh=False)
        self.bar.update()
        if self.step == self.last:
            self.in_float32()
        if due["eval"]:
            self.evaluate_val()
        if due["save"]:
            self.save()
        if due["eval"] or due["save"]:
            self.start_clock()  # so that the speed is that of training only
            number = self.asked_to_stop()
        if number and self.step < self.last:
            stop(self, number, saved=due["save"])

    def start_clock(self):
        """Speed and waiting for data are those of the steps after this call."""
        self.clock, self.logged, self.waited = time.perf_counter(), self.step, 0.0

    def in_float32(self):
        """The last evaluations are in float32, as those of eval.py."""
        if self.args.compile:  # only the compiled module has autocast, and evaluations never call it
            vars(self.trained).pop("_original_forward", None)
        else:
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    def asked_to_stop(self):
        """The number of a signal that came to any of the processes, or 0. Collective."""
        return int(base.all_sum(max(base.signals, default=0), device=self.device, op=dist.ReduceOp.MAX)[0])

    def ignore_no_more(self):
        """Restores the signal handlers of before `listen`."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def evaluate(self, split):
        """Returns the evaluator's results, or ends the run if a signal asked for it. Collective."""
        settle(self)
        try:
            return self.evaluator(split)
        except base.Stopped:
            self.unevaluated = True
            saved = split == "test" or self.bar is None  # before the loop there is nothing new
            return stop(self, self.asked_to_stop(), saved)

    def evaluate_val(self):
        """Evaluates the val splits, logs the result and keeps it in self.val. Returns: picture pieces. Collective."""
        self.val, _, self.val_pieces = self.evaluate("val")
        self.unevaluated = False
        row = {"step": self.step, "samples_seen": self.step * self.args.batch_size, "eval": self.val}
        if self.after_val and self.val_pieces:
            self.after_val(row, self.val_pieces)
        self.log.write(row)
        return self.val_pieces

    def save(self):
        """Write a checkpoint. Collective."""
        settle(self)
        checkpoints.save(self)

    def wall(self):
        """Seconds of this run so far, including those before a resume."""
        return self.wall_before + time.time() - self.started

    # ---------------------------------------- the end -----------------------------------------------------------------
    def finish(self, draw, table=None, more=None, **extra):
        """Saves the encoders, evaluates them on test, writes summary.json, draws, prints. Collective.

        Args: draw: function(run) for the pictures.   table: function(title, metrics, chance) -> lines of text.
            more: function(test metrics) -> text after the tables.   extra: further entries of the summary.
        Returns: the summary."""
        from safetensors.torch import load_file
        self.bar.close()
        save = functools.partial(save_model, self.folder, self.tower, self.tokenizer, self.spec)
        base.main_writes(f"the model in {self.folder}", save)
        self.tower.load_state_dict(load_file(self.folder / "model.safetensors"))
        test, chance, self.test_pieces = self.evaluate("test")
        self.ignore_no_more()
        summary, problems = self.summarize(test, chance) | extra, []
        if rank() == 0:
            try:
                base.write_json(self.folder / "summary.json", summary)
            except UserError as error:  # the numbers are still printed below
                problems.append(str(error))
            draw_picture(self.folder / "the rest of the pictures", lambda _: draw(self))
        say(report(summary, self.folder, table))
        if more:
            say(more(test))
        base.barrier()
        self.accelerator.end_training()  # trackers and the process group are closed
        if self.lock:
            self.lock.close()
        if summary["errors"]:
            what = "; ".join(f"{k}: {v}" for k, v in summary["errors"].items())
            problems.append(f"evaluation failed: {what}; the model and all else are in {self.folder}")
        if problems:
            raise UserError("; ".join(problems))
        return summary

    def picture(self, name, function, *args, **options):
        """Draws one picture into the run folder by function(*args, path, **options), in the format of --figures. If it
        fails, a message names it, and the run goes on."""
        draw_picture((self.folder / name).with_suffix(f".{self.args.figures}"), function, *args, **options)

    def summarize(self, test, chance):
        """The content of summary.json. Collective."""
        args, wall = self.args, self.wall()
        memory = base.gather_objects(peak_memory_mb())
        own = (p for p in self.own.parameters() if p.requires_grad)  # without MoCo's second encoder
        parameters = sum(p.numel() for p in (*self.trained.parameters(), *own))
        bad = len(self.data.bad) + sum(map(len, self.unreadable.values()))
        return {"script": self.script, "dataset": args.dataset, "method": getattr(args, "loss", self.script),
                "seed": args.seed, "steps": self.step, "epochs": self.step / self.per_epoch, "wall_s": wall,
                "samples_per_s": self.step * args.batch_size / wall,
                "peak_memory_mb": max(memory), "parameters": parameters, "processes": world(), "batch": args.batch_size,
                "bad_samples": bad, "val": self.val, "test": test, "chance": chance,
                "errors": self.evaluator.errors,
                "commit": self.commit}


def millions(module):
    """Parameters of a module, in millions."""
    return sum(p.numel() for p in module.parameters()) / 1e6
