"""Train a model.

    python train.py config/train_shakespeare_char.py --device=cpu --compile=False
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/llama_7b.py
    python train.py --out_dir=out/x --init_from=resume                # goes on as if it had never stopped
    python train.py config/x.py --init_from=checkpoint:out/x          # a new run, from the weights of another one
    python train.py config/x.py --init_from=hf:DIR                    # from a model of Hugging Face
    python train.py config/x.py --init_from=nanogpt:ckpt.pt           # starts from nanoGPT's weights

Watch it with tensorboard --logdir=out/x. Ctrl-C (SIGINT), SIGTERM, SIGUSR1 and a closed ssh (SIGHUP) finish the step
or leave the evaluation, save a checkpoint and exit. A second Ctrl-C or SIGTERM, after the line that answers the first
one, ends the run at once, and so does any signal while no step is done yet.
"""

import os

if __name__ == "__main__":
    from engine import start

    start()
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # fewer gaps in the memory of a GPU

import gc
import itertools
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from configurator import read_flags, resolve, say_left_out
from data.dataset import DataSet
from data.errors import command, data_errors_end_the_run, require, user_errors
from data.files import writing
from data.loader import Loader, windows_per_source
from data.objective import Objective
from engine import optim, settle
from engine import resume as run_state
from engine.checkpoint.saver import Checkpoints
from engine.config import Config
from engine.device import make_deterministic, peak_flops, precision, resolve_device, torch_errors
from engine.evaluation import Evaluation
from engine.help import dump
from engine.metrics import Metrics, Silent, evaluation_text
from engine.parallel.connection import environment, launched, lost_ranks_end_the_run
from engine.parallel.ranks import Ranks, check_flags, leave
from engine.parallel.sharded import ShardedModel
from engine.plan import accounting, memory, plan
from engine.step import FIRST, MOST_LEFT_OUT, Watch, collect_garbage, is_finite, tracing
from engine.stop_signal import StopSignal

SMALLER = "lower --batch_size, --block_size or the model's sizes; --plan=True estimates the memory"
COLLECT = 100  # steps between collections of Python's garbage, in the same steps on all ranks


def main(argv: list[str] | None = None):
    with torch_errors(SMALLER), ExitStack() as cleanup:
        with user_errors():
            given = read_flags(Config, argv, __doc__)
            launched()  # before the environment is read, or out_dir is locked
            chosen = asdict(Config()) | {name: setting.value for name, setting in given.items()}
            stored, origin = run_state.stored_flags(cleanup, chosen)
            cfg = resolve(Config, given, stored, origin)
            say_left_out(cfg)
            if cfg.plan:
                if cfg.vocab_size == 0:
                    settle.by_data(cfg)
                print(plan.report(plan.Plan(cfg)))
                return
            data, objective = settle.by_data(cfg)  # if they are wrong, out_dir is not looked at
            if not cfg.eval_only and cfg.init_from != "resume":
                cleanup.enter_context(run_state.locked(cfg.out_dir))  # of a resume, stored_flags has locked it
            earlier = run_state.check_out_dir(cfg)
            with lost_ranks_end_the_run(cfg.out_dir):
                run = Run(cfg, data, objective, earlier, cleanup)
        run.announce()
        with lost_ranks_end_the_run(cfg.out_dir):
            if cfg.eval_only:
                run.evaluate()
            else:
                train(run)
        run.stop.finish()
        leave()


def train(run: "Run"):
    """The training loop: evaluate, save, stop, or make a step."""
    cfg = run.cfg
    while True:
        stopping = run.stop.agreed()
        is_best = None  # whether this step's validation loss is the lowest so far; None without an evaluation
        due = run.step == cfg.max_iters or cfg.eval_interval and run.step % cfg.eval_interval == 0
        if due and not stopping:
            is_best = run.evaluate()
            stopping = is_best is None  # a signal came during the evaluation
        if run.is_to_be_saved(is_best, stopping):
            run.save()
            stopping = stopping or run.stop.drain()
        if stopping or run.step >= cfg.max_iters:
            return run.metrics.end(run.checkpoints.outcome(stopping), stopping)

        lr = optim.learning_rate(run.step, cfg)
        if run.profiler is not None:
            run.profiler.step()
        loss, grad_norm = run.train_step(lr)
        if run.step % run.log_interval == 0:
            run.log(loss, lr, grad_norm)
        run.step += 1
        if run.step % COLLECT == 0 or gc.isenabled():  # and once after the first step
            collect_garbage()


class Run:
    """A training run: its parts, which `__init__` makes, and how far it has come.

    step       optimizer steps that are done
    samples    sequences that all ranks have read
    skipped    steps that were left out: their gradient was not finite, or a spike
    """

    def __init__(self, cfg: Config, data: DataSet, objective: Objective, earlier: dict, cleanup: ExitStack):
        """Make all parts of the run; `cleanup` closes them, however the run ends. `earlier` as in settle.by_machine."""
        self.cfg = cfg
        self.data = data
        streams = {split: data.split(split) for split in ("train", "val")}
        windows_per_source(streams["val"], cfg.block_size)  # ValueError if there are none
        self.ranks, self.work = join_ranks(cfg, objective.lengths, earlier)
        ranks = self.ranks
        self.sharded, self.optimizer, self.scaler, state = build(cfg, ranks, data)
        self.step = state["step"]
        self.samples = state["samples"]
        self.skipped = state["skipped"]
        self.watch = Watch(cfg, ranks.device, state["norms"])
        place, changes = run_state.place_in_data(cfg, state, streams["train"], streams["val"])
        self.notes = [*changes, optim.rescheduled(cfg, state["flags"]), run_state.schedule_of_another(cfg)]
        self.log_interval = cfg.log_interval or (1 if ranks.device.type == "cpu" else 10)  # the host waits for a GPU

        cleanup.callback(gc.enable)
        cleanup.callback(gc.unfreeze)
        micro_steps = map(self.micro_steps, itertools.count(self.step))
        self.loader = Loader(
            streams["train"], objective, cfg.batch_size, micro_steps, ranks.data_rank, ranks.data_size,
            cfg.seed, ranks.device, self.samples, **place,
        )  # fmt: skip
        cleanup.callback(self.loader.close)  # otherwise Python's exit waits for ever for its thread
        self.batches = data_errors_end_the_run(self.loader)
        with writing(cfg.out_dir):
            self.metrics = self.open_metrics(cleanup)
            if not cfg.eval_only:
                run_state.check_shared(cfg.out_dir)
        self.profiler = None
        if cfg.profile_steps and ranks.rank == 0:
            self.profiler = cleanup.enter_context(tracing(cfg, self.metrics.say))
        self.stop = StopSignal(ranks)
        self.evaluation = Evaluation(cfg, data, streams, objective, self.sharded)
        step = self.step if cfg.init_from == "resume" else None
        self.checkpoints = Checkpoints(cfg, self.stop, self.metrics, step, state)

    def open_metrics(self, cleanup: ExitStack) -> Silent:
        """The metrics of the first rank, which also writes the flags and the tokenizer; nothing on other ranks."""
        cfg = self.cfg
        if cfg.eval_only or self.ranks.rank > 0:
            return Silent()
        metrics = Metrics(cfg, self.work, self.ranks.device, self.step, self.samples * cfg.block_size)
        cleanup.callback(metrics.close)
        once = ["init_from"] if cfg.init_from == "resume" else []  # config.py begins a run like this one
        dump(cfg, Path(cfg.out_dir, "config.new"), once)
        run_state.replace_flags(Path(cfg.out_dir), self.step)
        if self.data.tokenizer:
            self.data.tokenizer.save(Path(cfg.out_dir))  # a bpe's file, so that sampling does not need the data
        return metrics

    def announce(self):
        """Print the sizes of model, data and machine, and what the user should know before the first step."""
        cfg, work = self.cfg, self.work
        parameters = f"{work.n_params:,} parameters"
        if work.n_read < work.n_params:
            parameters += f", of which a token reads {work.n_read:,}"
        machine = f"{self.ranks.size} x {self.ranks.device.type}, {precision(self.ranks.device, self.ranks.dtype)}"
        if cfg.deterministic:
            machine += ", deterministic"
        if self.ranks.compile:
            machine += ", compiled"
        tokens = cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size
        data = f"{tokens:,} tokens per step from {self.loader.stream.name}, {self.loader.n_windows:,} windows"
        self.metrics.say(f"{parameters}; {data}; {machine}; attention: {work.attention_kernels}")
        notes = [*self.notes, self.evaluation.why_no_bytes]
        if cfg.profile_steps and cfg.max_iters - self.step <= FIRST:
            notes.append(f"warning: no trace, as this session has at most {FIRST} steps; raise --max_iters")
        if cfg.warmup_iters >= cfg.max_iters:
            notes.append(f"warning: warmup_iters={cfg.warmup_iters} is not over at max_iters={cfg.max_iters}; lower it")
        if cfg.dtype == "float32" and not cfg.fp32_residual:
            notes.append("fp32_residual=False has no effect in float32")
        if self.step >= cfg.max_iters:
            notes.append(f"{cfg.out_dir} is at step {self.step} of max_iters={cfg.max_iters}; raise it to train on")
        for note in filter(None, notes):
            self.metrics.say(note)

    def evaluate(self) -> bool | None:
        """Show the losses. Returns whether the validation loss is the lowest so far, or None if the ranks stop."""
        with self.metrics.paused():
            self.check_finite()
            if unequal := self.sharded.unequal_copies():
                self.checkpoints.fail(f"at step {self.step}, {unequal}")
            of_train, of_val = self.evaluation.losses(self.stop)
            if of_val is None:
                return None
            figures = (self.step, of_train.nats, of_val.nats, of_val.bits)
            is_best = self.checkpoints.is_best(self.step, of_train.nats, of_val.nats)
            if self.cfg.eval_only and self.ranks.rank == 0:
                print(evaluation_text(*figures))
            self.metrics.evaluation(*figures, is_best)
        return is_best

    def is_to_be_saved(self, is_best: bool | None, stopping: bool) -> bool:
        """Whether to save a checkpoint now, after an evaluation if `is_best` is not None."""
        saved = self.step == self.checkpoints.last_step and not is_best
        if saved or self.step == 0 and not stopping:
            return False
        at_interval = self.cfg.save_interval and self.step % self.cfg.save_interval == 0
        if self.watch.not_finite:  # perhaps for ever, with these weights
            at_interval = False
        if stopping or at_interval or self.step == self.cfg.max_iters:
            return True
        return is_best is not None and (is_best or self.cfg.always_save_checkpoint)

    def train_step(self, lr: float) -> tuple[Tensor, Tensor]:
        """One optimizer step at this learning rate; returns (this rank's mean loss, gradient norm)."""
        self.optimizer.set_lr(lr)
        loss = self.sharded.backward(self.batches, self.micro_steps(self.step), self.scaler)
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.sharded.clip(self.cfg.grad_clip)
        self.stop.listen()  # only now, because the norm has waited for all ranks to compute their first step
        finite = is_finite(loss, grad_norm, self.scaler, self.ranks)
        left_out = self.watch.reason_to_skip(self.step, finite, grad_norm)
        if left_out:
            self.metrics.say(f"step {self.step} is left out: {left_out}")
            self.skipped += 1
        if self.step % self.log_interval == 0 or self.ranks.device.type == "cpu":
            self.check_finite()
        if not left_out:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.sharded.model.zero_grad(set_to_none=True)
        self.samples += self.cfg.samples(self.step)
        return loss, grad_norm

    def micro_steps(self, step: int) -> int:
        """The number of micro-batches of this step on this rank."""
        return self.cfg.micro_batches(step) // self.ranks.data_size

    def check_finite(self):
        """End the run, before its weights are saved, if a step was not finite, or too many in a row were left out."""
        bad = self.watch.first_bad_step()
        if bad is not None:
            first = self.samples - sum(map(self.cfg.samples, range(bad, self.step)))  # self.samples begins self.step
            last = first + self.cfg.samples(bad) - 1
            fact = f"the loss or its gradient is not finite at step {bad} (samples {first} to {last})"
            remedy = "leave such steps out with --skip_nonfinite=True, or lower --learning_rate"
            if self.cfg.skip_nonfinite:
                remedy = f"nor is it in the {MOST_LEFT_OUT - 1} steps after it; lower --learning_rate"
            self.checkpoints.fail(f"{fact}; {remedy}", before=bad)

    def save(self):
        with self.metrics.paused():
            self.check_finite()
            tokenizer = self.data.tokenizer
            state = {
                "samples": self.samples, "skipped": self.skipped, "norms": self.watch.norms,
                "scaler": self.scaler.state_dict(), "flags": asdict(self.cfg), "ranks": self.ranks.size,
                "tokenizer": tokenizer and tokenizer.spec, "tokenizer_hash": tokenizer and tokenizer.hash,
                "data": run_state.data_of(self.loader, self.evaluation.streams["val"], self.samples),
            }  # fmt: skip
            self.checkpoints.save(self.step, run_state.tensors_of(self.sharded, self.optimizer), state)

    def log(self, loss: Tensor, lr: float, grad_norm: Tensor):
        """Write the figures of the step that was just made."""
        mean = self.sharded.mean(loss)
        epochs = self.loader.epochs(self.samples)
        progress = {"epochs": epochs} if len(epochs) > 1 else {"epoch": self.samples / self.loader.n_windows}
        if self.skipped:
            progress["skipped"] = self.skipped
        self.metrics.log(self.step, mean, lr, grad_norm.item(), self.samples * self.cfg.block_size, progress)


def join_ranks(cfg: Config, lengths: tuple[int, int], earlier: dict) -> tuple[Ranks, accounting.Work]:
    """Check that the run fits this machine, join the other ranks, and count its work on sequences of these lengths."""
    check_flags(cfg)
    make_deterministic(cfg.deterministic)
    place = environment()
    memory.check_training(cfg, resolve_device(cfg.device, place.local_rank), place.size)
    ranks = settle.by_machine(cfg, earlier)
    peak = peak_flops(ranks.device, ranks.dtype)
    return ranks, accounting.Work(cfg, lengths, ranks.device.type, ranks.dtype, peak and peak * ranks.size)


def build(cfg: Config, ranks: Ranks, data: DataSet) -> tuple[ShardedModel, optim.Optimizer, torch.amp.GradScaler, dict]:
    """This rank's part of the model, its optimizer, the gradient scaler of float16, and the state of the run, a new one
    or that of a checkpoint."""
    sharded = ShardedModel(cfg, ranks)
    if cfg.init_from != "resume":
        run_state.initialize(cfg, sharded, data.tokenizer)
    torch.manual_seed(cfg.seed + 1 + ranks.rank)  # from here on every rank draws its own random numbers
    optimizer = optim.build(sharded.model, cfg, sharded, ranks.dtype)
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=ranks.dtype == torch.float16)
    if cfg.init_from != "resume":
        return sharded, optimizer, scaler, {**run_state.NEW}
    state = run_state.restore(cfg, sharded, optimizer, scaler)
    same = state["tokenizer_hash"] in (None, data.tokenizer and data.tokenizer.hash)  # None: the data had none
    require(same, f"dataset={cfg.dataset} has another tokenizer than the run in {cfg.out_dir}; use the same data")
    return sharded, optimizer, scaler, state


if __name__ == "__main__":
    command(record(main))  # record: torchrun reports the error of the rank that failed first
