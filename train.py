"""Train a model.

    python train.py config/train_shakespeare_char.py --device=cpu --compile=False
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/llama_7b.py
    python train.py --out_dir=out/x --init_from=resume                # goes on as if it had never stopped
    python train.py config/x.py --init_from=checkpoint:out/x          # a new run, from the weights of another one
    python train.py config/x.py --init_from=hf:DIR                    # from a model of Hugging Face
    python train.py config/x.py --init_from=nanogpt:ckpt.pt           # starts from nanoGPT's weights

Watch it with tensorboard --logdir=out/x. Ctrl-C (SIGINT) or SIGTERM stops the run: it finishes its step or leaves its
evaluation, saves a checkpoint and exits. A second signal ends the run at once, and so does the first one while no step
is done yet.
"""

import os
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the program without a traceback
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # fewer gaps in the memory of a GPU

import gc
import itertools
import math
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from configurator import Config, dump, read_flags, resolve
from data.dataset import DataSet
from data.errors import command, data_errors_end_the_run, require, user_errors
from data.files import writing
from data.loader import Loader, count_windows
from data.objective import open_with_objective
from engine import compilation, fp8, optim
from engine.checkpoint import run as run_state
from engine.checkpoint.saver import Checkpoints
from engine.device import make_deterministic, peak_flops, precision, refuse_nondeterminism, resolve_device
from engine.evaluation import byte_lengths, mean_loss, text_sample
from engine.metrics import Metrics, Silent, check_logger, evaluation_line, log_interval, routing_line
from engine.parallel.ranks import Ranks, check_flags, environment, join, leave
from engine.parallel.sharded import ShardedModel
from engine.plan import accounting, memory
from engine.step import Profile, Spikes, Step, collect_garbage
from engine.stop_signal import StopSignal
from ops import wide_stream

COLLECT = 100  # steps between collections of Python's garbage, in the same steps on all ranks
NEVER = torch.iinfo(torch.int64).max  # larger than the number of any step


def main(argv: list[str] | None = None):
    with ExitStack() as cleanup:
        with user_errors():
            given = read_flags(Config, argv, __doc__)
            stored, origin = run_state.stored_flags(cleanup, asdict(Config()) | given.values)
            cfg = resolve(Config, given, stored, origin)
            if cfg.plan:
                return show_plan(cfg)
            check_logger(cfg)
            environment()  # if it is wrong, the run is refused before out_dir is made
            if not cfg.eval_only and cfg.init_from != "resume":
                cleanup.enter_context(run_state.locked(cfg.out_dir))  # of a resume, stored_flags has locked it
            run_state.resume_after_restart(cfg)
            run_state.check_out_dir(cfg)
            run = Run(cfg, cleanup)
        run.announce()
        with refuse_nondeterminism():
            run.evaluate() if cfg.eval_only else train(run)
        run.stop.finish()
        leave()


def train(run: "Run"):
    """The training loop: evaluate, save, stop, or make a step."""
    cfg, stop = run.cfg, run.stop
    while True:
        stopping = stop.agreed()
        is_best = None  # whether this step's validation loss is the lowest so far; None without an evaluation
        due = run.step == cfg.max_iters or cfg.eval_interval and run.step % cfg.eval_interval == 0
        if due and not stopping:
            is_best = run.evaluate()
            stopping = is_best is None  # a signal came during the evaluation
        if run.is_to_be_saved(is_best, stopping):
            run.save(bool(is_best))
            stopping = stopping or stop.drain()
        if stopping or run.step >= cfg.max_iters:
            return run.end(stopping)

        lr = optim.learning_rate(run.step, cfg)
        run.profile.next()
        loss, grad_norm = run.train_step(lr)
        if run.step % run.log_interval == 0:
            run.log(loss, lr, grad_norm)
        run.step += 1
        if run.step % COLLECT == 0 or gc.isenabled():  # and once after the first step
            collect_garbage()


def join_ranks(cfg: Config, lengths: tuple[int, int]) -> tuple[Ranks, accounting.Work]:
    """Check that the run fits this machine, join the other ranks, and count its work; returns (ranks, work). `lengths`
    are those of the objective's sequences, (T, S).

    Settles the flags dtype, fp32_residual and compile: their auto becomes this machine's choice, which a resume keeps.
    """
    check_flags(cfg)
    make_deterministic(cfg.deterministic)
    place = environment()
    memory.check_training(cfg, resolve_device(cfg.device, place.local_rank), place.size)
    ranks = join(cfg)
    cfg.dtype = str(ranks.dtype)[6:]  # without "torch."
    cfg.fp32_residual = wide_stream(cfg.fp32_residual, ranks.device, ranks.dtype)
    if cfg.fp8:
        fp8.check(cfg, lengths, ranks.device)
    run_state.check_same_start(cfg, ranks)
    peak = peak_flops(ranks.device, ranks.dtype)
    work = accounting.count_work(cfg, lengths, ranks.device.type, ranks.dtype, peak and peak * ranks.size)
    return compilation.settle(cfg, ranks), work


def build(cfg: Config, ranks: Ranks, data: DataSet) -> tuple[Step, dict]:
    """This rank's part of the model with its optimizer, and the state of the run, both as at the beginning of a run
    or as in the checkpoint that it resumes."""
    sharded = ShardedModel(cfg, ranks)
    if cfg.init_from != "resume":
        run_state.initialize(cfg, sharded, data.tokenizer)
    torch.manual_seed(cfg.seed + 1 + ranks.rank)  # from here on every rank draws its own random numbers
    stepper = Step(cfg, sharded)
    if cfg.init_from != "resume":
        return stepper, {"step": 0, "samples": 0, "skipped": 0, "best_val_loss": None, "flags": {}}
    state = run_state.restore(cfg, ranks, sharded, stepper.optimizer)
    require(
        state["tokenizer_hash"] == (data.tokenizer and data.tokenizer.hash),
        f"dataset={cfg.dataset} has another tokenizer than the checkpoint in {cfg.out_dir}; use the same data",
    )
    run_state.restore_scaler(stepper.scaler, state["scaler"], cfg.out_dir)
    return stepper, state


class Run:
    """A training run: its parts, which `__init__` makes, and how far it has come.

    step       optimizer steps that are done
    samples    sequences that all ranks have read
    skipped    steps that were left out: their gradient was not finite, or a spike
    """

    def __init__(self, cfg: Config, cleanup: ExitStack):
        """Make all parts of the run; `cleanup` closes them, however the run ends."""
        self.cfg = cfg
        self.data, objective, cfg.vocab_size = open_with_objective(cfg)
        self.streams = {split: self.data.split(split) for split in ("train", "val")}
        # With eval_iters=0 the whole validation set is evaluated, and at most 100 batches of the training set.
        self.val_batches = math.ceil(count_windows(self.streams["val"], cfg.block_size) / cfg.batch_size)
        self.ranks, self.work = join_ranks(cfg, objective.lengths)
        ranks, tokenizer = self.ranks, self.data.tokenizer
        self.stepper, state = build(cfg, ranks, self.data)
        self.sharded = self.stepper.sharded
        self.step, self.samples, self.skipped = state["step"], state["samples"], state["skipped"]
        self.stored_flags, self.spikes = state["flags"], Spikes(cfg.spike_factor, state.get("norms", []))
        self.first_bad_step = torch.full((), NEVER, device=ranks.device)  # whose gradient was not finite
        self.graphs_of_first_step = None
        self.log_interval = log_interval(cfg, ranks.device)

        cleanup.callback(gc.enable)
        cleanup.callback(gc.unfreeze)
        micro_steps = map(self.stepper.micro_steps, itertools.count(self.step))
        self.loader = Loader(
            self.streams["train"], objective, cfg.batch_size, micro_steps, ranks.data_rank, ranks.data_size,
            cfg.seed, ranks.device, start=self.samples,
        )  # fmt: skip
        cleanup.callback(self.loader.close)  # otherwise Python's exit waits for ever for its thread
        self.batches = data_errors_end_the_run(self.loader)
        with writing(cfg.out_dir):
            self.metrics = self.open_metrics(cleanup)
        self.profile = Profile(cfg, ranks, self.metrics.say)
        cleanup.callback(self.profile.close)
        self.stop = cleanup.enter_context(StopSignal(ranks))
        token_bytes, self.why_no_bytes = byte_lengths(cfg, self.data, ranks)
        self.mean_loss = partial(mean_loss, cfg, ranks, self.sharded, objective, token_bytes, self.stop)
        writes = cfg.objective == "causal" and tokenizer and not (self.sharded.divides or cfg.cp > 1)
        self.text_sample = writes and partial(text_sample, ranks, self.sharded.model, tokenizer, self.streams["val"])
        step = self.step if cfg.init_from == "resume" else None
        self.checkpoints = Checkpoints(cfg, ranks, self.stop, self.metrics, step, state["best_val_loss"])

    def open_metrics(self, cleanup: ExitStack) -> Silent:
        """The metrics of the first rank, which also writes the flags and the tokenizer; nothing on other ranks."""
        cfg, work, folder = self.cfg, self.work, Path(self.cfg.out_dir)
        if cfg.eval_only or not self.ranks.first:
            return Silent()
        metrics = Metrics(
            cfg.out_dir, self.step, self.samples * cfg.block_size, cfg.max_iters,
            work.flops_per_sample / cfg.block_size, work.peak_flops, self.ranks.device, asdict(cfg),
        )  # fmt: skip
        cleanup.callback(metrics.close)
        dump(cfg, folder / "config.new")
        run_state.replace_flags(folder, self.step)
        if self.data.tokenizer:
            self.data.tokenizer.save(folder)  # a bpe's file, so that sampling does not need the data
        return metrics

    def announce(self):
        """Print the sizes of model, data and machine, and what the user should know before the first step."""
        cfg, ranks, work, stream = self.cfg, self.ranks, self.work, self.streams["train"]
        parameters = f"{work.n_params:,} parameters"
        if work.n_read < work.n_params:
            parameters += f", of which a token reads {work.n_read:,}"
        machine = f"{ranks.size} x {ranks.device.type}, {precision(ranks.device, ranks.dtype)}"
        if cfg.deterministic:
            machine += ", deterministic"
        if ranks.compile:
            machine += ", compiled"
        self.metrics.say(
            f"{parameters}; {work.samples_per_step * cfg.block_size:,} tokens per step from "
            f"{stream.name}, {self.loader.n_windows:,} windows; {machine}; attention: {work.attention_kernels}"
        )
        for note in (optim.rescheduled(self.step, cfg, self.stored_flags), self.why_no_bytes):
            if note:
                self.metrics.say(note)
        if cfg.dtype == "float32" and not cfg.fp32_residual:
            self.metrics.say("fp32_residual=False has no effect in float32")
        if self.step >= cfg.max_iters:
            at = f"{cfg.out_dir} is at step {self.step} of max_iters={cfg.max_iters}"
            self.metrics.say(f"{at}; raise --max_iters to train on")

    def evaluate(self) -> bool | None:
        """Show the losses. Returns whether the validation loss is the lowest so far, or None if the ranks have agreed
        to stop meanwhile."""
        cfg, model = self.cfg, self.sharded.model
        with self.metrics.paused():
            self.check_finite()
            if unequal := self.sharded.unequal_copies():
                self.checkpoints.fail(f"at step {self.step}, {unequal}")
            model.eval()
            of_train = self.mean_loss(self.streams["train"], cfg.eval_iters or min(self.val_batches, 100))
            of_val = of_train and self.mean_loss(self.streams["val"], cfg.eval_iters)
            self.sharded.reshard_after_eval()
            if of_val is None:
                return None
            val_loss, figures = of_val[0], (self.step, of_train[0], *of_val)
            routing = self.sharded.routing_figures()
            if cfg.eval_only and self.ranks.first:
                print(evaluation_line(*figures))
                if routing:
                    print(routing_line(routing))
            with user_errors():
                self.metrics.evaluation(*figures, routing)
                if self.text_sample:
                    self.metrics.sample(self.step, self.text_sample)
            model.train()
        return self.checkpoints.is_best(val_loss)

    def is_to_be_saved(self, is_best: bool | None, stopping: bool) -> bool:
        """Whether to save a checkpoint now, after an evaluation if `is_best` is not None."""
        cfg, step = self.cfg, self.step
        if step == self.checkpoints.last_queued_step and not is_best:  # it is saved already
            return False
        if stopping:
            return True
        if step == 0:
            return False
        if cfg.save_interval and step % cfg.save_interval == 0:
            return True
        return is_best is not None and (is_best or cfg.always_save_checkpoint)

    def train_step(self, lr: float) -> tuple[Tensor, Tensor]:
        """One optimizer step at this learning rate; returns (this rank's mean loss, gradient norm)."""
        cfg, ranks, stepper = self.cfg, self.ranks, self.stepper
        stepper.optimizer.set_lr(lr)
        loss, grad_norm = stepper.backward(self.batches, self.step), stepper.clip()
        self.stop.unsaved_steps = True  # on all ranks: the norm needs them all, so no rank has ended in its first step
        # With a scaler, an infinite gradient may only mean that its scale was too large, so there the loss decides.
        figure = ranks.sum(loss.clone()) if stepper.scaler.is_enabled() else grad_norm  # the same on all ranks
        finite = torch.isfinite(figure)
        if not cfg.skip_nonfinite:
            self.first_bad_step = torch.where(finite, self.first_bad_step, self.first_bad_step.clamp(max=self.step))
            # Reading the value makes the host wait for a GPU, so it is read only in steps that are logged.
            if self.step % self.log_interval == 0 or ranks.device.type == "cpu":
                self.check_finite()
        skip = cfg.skip_nonfinite and not finite
        if cfg.spike_factor and (spike := self.spikes.look(grad_norm.item())):  # the host waits for a GPU
            skip = True
            self.metrics.say(f"step {self.step} is left out: {spike}")
        self.skipped += skip
        stepper.update(skip)
        self.samples += cfg.samples(self.step)
        if ranks.compile and self.graphs_of_first_step is None:
            self.graphs_of_first_step = compilation.graphs()
            for cause in compilation.graph_breaks():
                self.metrics.say(f"warning: torch.compile leaves a part of each step uncompiled: {cause}")
        return loss, grad_norm

    def check_finite(self):
        """End the run if a gradient was not finite, so that the weights after it are never saved."""
        if self.first_bad_step == NEVER:
            return
        self.checkpoints.wait()
        bad, saved = int(self.first_bad_step), self.checkpoints.last_written_step
        first = self.samples - sum(map(self.cfg.samples, range(bad, self.step)))  # self.samples begins self.step
        kept = "nothing is saved yet" if saved is None else f"the checkpoint of step {saved} is good"
        self.checkpoints.fail(
            f"the loss or its gradient is not finite at step {bad} (samples {first} to "
            f"{first + self.cfg.samples(bad) - 1}); {kept}; lower --learning_rate, or leave such steps out with "
            "--skip_nonfinite=True"
        )

    def save(self, is_best: bool):
        """Save a checkpoint; see `Checkpoints.save`."""
        with self.metrics.paused():
            self.check_finite()
            tokenizer = self.data.tokenizer
            state = {
                "samples": self.samples, "skipped": self.skipped, "norms": self.spikes.norms,
                "scaler": self.stepper.scaler.state_dict(), "flags": asdict(self.cfg), "ranks": self.ranks.size,
                "tokenizer": tokenizer and tokenizer.spec, "tokenizer_hash": tokenizer and tokenizer.hash,
            }  # fmt: skip
            tensors = run_state.run_tensors(self.sharded, self.stepper.optimizer) | run_state.random_states(self.ranks)
            self.checkpoints.save(self.step, tensors, state, is_best)

    def log(self, loss: Tensor, lr: float, grad_norm: Tensor):
        """Write the figures of the step that was just made."""
        cfg, mean, epochs = self.cfg, self.sharded.mean(loss), self.loader.epochs(self.samples)
        epoch = epochs if len(epochs) > 1 else self.samples / self.loader.n_windows
        with user_errors():
            tokens = self.samples * cfg.block_size
            self.metrics.log(self.step, mean, lr, grad_norm.item(), tokens, epoch, self.skipped)
            if self.ranks.first:
                self.metrics.norms(self.step, self.sharded.norms())

    def end(self, stopped: bool):
        """Wait for the last checkpoint, and say how the run has ended."""
        self.checkpoints.wait()
        if stopped:
            self.metrics.say(
                f"stopped by {self.stop.name or 'a signal to another rank'} with step "
                f"{self.checkpoints.last_written_step} saved; go on with python train.py --out_dir={self.cfg.out_dir} "
                "--init_from=resume"
            )
        if self.graphs_of_first_step is not None:  # None: no step was made, or the run is not compiled
            first, later = self.graphs_of_first_step, compilation.graphs() - self.graphs_of_first_step
            self.metrics.say(f"torch.compile: {first} graphs, and {later} after the first step")


def show_plan(cfg: Config):
    """Print what the run would cost on cfg.world_size GPUs. Without --vocab_size the data must be there."""
    from engine.plan import plan

    if cfg.vocab_size == 0:
        try:
            _, _, cfg.vocab_size = open_with_objective(cfg)
        except (ValueError, OSError) as error:
            raise ValueError(f"vocab_size=0 is the data's, but {error}; or plan with --vocab_size=50304") from None
    print(plan.report(plan.estimate(cfg)))


if __name__ == "__main__":
    command(record(main))  # record: torchrun reports the error of the rank that failed first
