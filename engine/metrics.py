"""A run's figures: metrics.jsonl, TensorBoard events, wandb, lines on the console and a progress bar.

    metrics = Metrics(...) if rank == 0 else Silent()
    with metrics.paused():
        metrics.evaluation(step, train_loss, val_loss, val_bpb)
    metrics.log(step, loss, lr, grad_norm, tokens)
    metrics.say("saved out/step_00001000")
    metrics.close()

The time inside paused() is not part of any step. Print through say(), so that the progress bar stays below the lines.
"""

import importlib.util
import json
import math
import os
import signal
import socket
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from data.errors import say
from data.files import open_regular, writing
from engine.device import peak_memory_bytes

POSITIVE = {"tokens", "flops", "tokens_per_s", "ms_per_step", "peak_memory_bytes"}  # figures that are divided by
FIGURES = POSITIVE | {"loss", "lr", "grad_norm", "mfu", "train_loss", "val_loss", "val_bpb"}
LARGEST = 1e100  # more than float32 holds; sums and squares of such numbers are still finite


def is_row(row: dict) -> bool:
    """Whether the figures of a row have values that Metrics writes. Each row has a step, and may have any figures."""

    def fits(name: str, x: object) -> bool:
        if type(x) in (int, float):
            return (1 / LARGEST if name in POSITIVE else -LARGEST) <= x <= LARGEST
        return x is None or name not in FIGURES

    return type(row["step"]) is int and 0 <= row["step"] < 2**53 and all(fits(*each) for each in row.items())


def read_metrics(path: Path) -> Iterator[tuple[dict, str]]:
    """Yields each row of a metrics.jsonl with its line. Lines that are half written or no rows are left out."""
    with open(path, errors="replace", opener=open_regular) as lines:
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                row = json.loads(line)
                if is_row(row):
                    yield row, line


def truncate_metrics(path: Path, step: int):
    """Removes the lines of `step` and later steps from a metrics.jsonl, and lines that are no rows, atomically."""
    if not path.exists():
        return
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as f:
        for row, line in read_metrics(path):
            if row["step"] < step:
                f.write(line.rstrip("\n") + "\n")
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


class Events:
    """Writes TensorBoard events. These imports take 0.2 s; torch.utils.tensorboard would take 3 s."""

    def __init__(self, folder: Path):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ValueError(f"{error.name} is not installed; pip install tensorboard") from error
        self.Event, self.Summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.records = RecordWriter(open(folder / name, "wb"))
        self.start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self.write(file_version="brain.Event:2")

    def begin(self, step: int):
        """Lets readers drop the events of `step` and later that are there."""
        self.write(step=step, session_log=self.start)

    def scalars(self, step: int, figures: dict):
        values = [self.Summary.Value(tag=tag, simple_value=x) for tag, x in figures.items()]
        self.write(step=step, summary=self.Summary(value=values))

    def text(self, step: int, tag: str, text: str):
        """Writes a text for the page TEXT, indented because this page reads Markdown."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self.write(step=step, summary=text_pb(tag, textwrap.indent(text, "    ", lambda line: True)))

    def hparams(self, flags: dict):
        """Writes the flags for the page HPARAMS, which shows them with the last value of each scalar."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        self.write(summary=hparams_pb(flags, trial_id=""))  # which would group runs of equal flags

    def write(self, **event):
        self.records.write(self.Event(wall_time=time.time(), **event).SerializeToString())
        self.records.flush()


class Wandb:
    """Sends figures to Weights & Biases (https://docs.wandb.ai); a resume continues the same run there."""

    def __init__(self, folder: Path, flags: dict):
        import wandb

        identity = folder / "wandb_id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex[:8])
        name = flags["wandb_run_name"] or folder.name
        try:
            self.run = wandb.init(
                project=flags["wandb_project"], name=name, id=identity.read_text(), resume="allow", dir=folder,
                config=flags,
            )  # fmt: skip
        except Exception as error:  # of its own classes
            reason = str(error).strip().partition("\n")[0][:200]
            remedy = "log in by wandb login, set WANDB_MODE=offline, or leave wandb_log out"
            raise ValueError(f"wandb_log=True: wandb cannot start: {reason}; {remedy}") from error

    def scalars(self, step: int, figures: dict):
        self.run.log(figures, step=step)


def check_logger(cfg):
    """ValueError if the training is to be logged by a package that is not installed."""
    if cfg.wandb_log and not cfg.eval_only and importlib.util.find_spec("wandb") is None:
        remedy = "pip install wandb, or set wandb_log=False and watch the run by tensorboard --logdir=OUT_DIR"
        raise ValueError(f"wandb_log=True: wandb is not installed; {remedy}")


def log_interval(cfg, device: torch.device) -> int:
    """Steps between logged steps. A logged step waits for a GPU, so by default not every step is logged there."""
    return cfg.log_interval or (1 if device.type == "cpu" else 10)


class Console:
    """Prints lines on stdout and, if stderr is a terminal, a progress bar of the steps below them."""

    def __init__(self, max_iters: int):
        self.max_iters, self.terminal, self.bar = max_iters, sys.stderr.isatty(), None

    def advance(self, steps: int):
        """Sets the number of steps done, for the next redraw. Rate and time left are computed since the first call."""
        if self.bar is not None:
            self.bar.n = steps
        elif self.terminal:
            from tqdm import tqdm

            options = {"unit": "step", "smoothing": 0, "dynamic_ncols": True, "leave": False}
            self.bar = tqdm(initial=steps, total=self.max_iters, **options)

    def line(self, text: str):
        """Prints a line above the bar."""
        if self.bar is not None:
            self.bar.clear()
        try:
            print(text, flush=True)
        except OSError as error:  # the terminal is gone, or the disk is full: metrics.jsonl has all figures
            caught = signal.SIGTERM, signal.SIGINT
            stopping = signal.SIG_DFL in map(signal.getsignal, caught)  # for example by a Ctrl-C that also ended tee
            if not isinstance(error, BrokenPipeError):
                say(f"warning: stdout: {error.strerror}; the run goes on, and metrics.jsonl has its figures")
            elif not stopping:  # as in `| head`: save and stop, as after SIGTERM
                os.kill(os.getpid(), signal.SIGTERM)
        if self.bar is not None:
            self.bar.refresh()

    def close(self):
        """Removes the bar."""
        if self.bar is not None:
            self.bar.close()


def evaluation_line(step: int, train_loss: float, val_loss: float, val_bpb: float | None) -> str:
    """The console's line for an evaluation."""
    line = f"step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"
    return line if val_bpb is None else f"{line}, bpb {val_bpb:.4f}"


def routing_line(routing: dict[str, float]) -> str:
    return (
        "experts: the largest load is {expert_load:.2f} times the mean, {idle_experts:.0%} are idle; the routers' "
        "entropy is {router_entropy:.2f} nats".format(**routing)
    )


class Silent:
    """The metrics of a rank that writes nothing: of all but the first, and under eval_only of every rank."""

    def log(self, *args, **figures):
        """Does nothing."""

    norms = evaluation = sample = say = close = log

    def paused(self) -> AbstractContextManager:
        return nullcontext()


class Metrics(Silent):
    """Writes out_dir/metrics.jsonl, TensorBoard events beside it, and lines on the console.

    step, tokens: number done before. A resume removes the lines of `step` and later, also evaluations, and the run
    writes them again. So metrics.jsonl has the same losses as that of a run without interruption, if the loop restarts
    at the top of `step`. TensorBoard drops the same steps. Rates and the time left are those of this session.
    flops_per_token: of forward and backward. peak: FLOP/s of all ranks together, None if unknown (mfu is null then).
    flags: of the run, for TensorBoard.
    """

    def __init__(
        self, out_dir: str, step: int, tokens: int, max_iters: int, flops_per_token: float, peak: float | None,
        device: torch.device, flags: dict,
    ):  # fmt: skip
        folder = Path(out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.events = folder / "metrics.jsonl", Events(folder)
        truncate_metrics(self.path, step)
        self.file, self.steps = open(self.path, "a"), step
        self.events.begin(step)
        self.loggers = [self.events, *([Wandb(folder, flags)] if flags.get("wandb_log") else [])]
        self.console, self.tokens = Console(max_iters), tokens
        self.flops_per_token, self.peak, self.device = flops_per_token, peak, device
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
        self.events.hparams(flags)
        self.since = self.sampled = time.perf_counter()  # start of the interval to the next log, end of the last sample

    def log(self, step: int, loss: float, lr: float, grad_norm: float, tokens: int, epoch=None, skipped: int = 0):
        """Logs step `step`: loss in nats; tokens, skipped steps and epoch (or epoch per source) since the start."""
        now = time.perf_counter()
        seconds = now - self.since
        rate = (tokens - self.tokens) / seconds
        figures = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "flops": tokens * self.flops_per_token,
            "tokens_per_s": rate,
            "mfu": rate * self.flops_per_token / self.peak if self.peak else None,
            "ms_per_step": 1000 * seconds / (step + 1 - self.steps),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }
        line = f"iter {step}: loss {loss:.4f}, time {figures['ms_per_step']:.2f}ms, tok/s {rate:,.0f}"
        if self.peak:
            line += f", mfu {figures['mfu']:.2%}"
        line += f", lr {lr:.2e}, grad norm {grad_norm:.3f}"
        if isinstance(epoch, dict):
            figures["epochs"] = epoch
        elif epoch is not None:
            figures["epoch"] = epoch
        if skipped:
            figures["skipped"] = skipped
            line += f", skipped {skipped}"
        self.since, self.steps, self.tokens = now, step + 1, tokens
        self.write(step, "train", figures)
        self.console.advance(self.steps)  # first called after the first logged step, which may have compiled
        self.console.line(line)

    def evaluation(self, step: int, train_loss: float, val_loss: float, val_bpb: float | None, routing=None):
        """Logs an evaluation after `step` steps: losses in nats per token, val_bpb in bits per byte of text, and the
        figures of ShardedModel.routing_figures."""
        figures = {"train_loss": train_loss, "val_loss": val_loss, "val_bpb": val_bpb}
        self.write(step, "eval", figures | (routing or {}))
        self.console.line(evaluation_line(step, train_loss, val_loss, val_bpb))
        if routing:
            self.console.line(routing_line(routing))

    def norms(self, step: int, norms: dict[str, float]):
        """Logs norms by tag, such as grad_norm/blocks.0, in TensorBoard and wandb only."""
        with writing(self.path):
            for logger in self.loggers:
                logger.scalars(step, norms)

    def sample(self, step: int, write_text: Callable[[float], str]):
        """Logs the text of write_text(seconds) in TensorBoard only. It ends its text after so many seconds, which are a
        hundredth of the time since the last sample, or since the start."""
        text = write_text((time.perf_counter() - self.sampled) / 100)
        with writing(self.path):
            self.events.text(step, "eval/sample", text)
        self.sampled = time.perf_counter()

    @contextmanager
    def paused(self):
        """A context whose time is not part of any step."""
        self.synchronize(self.device)  # the work still queued on the device belongs to the steps
        start = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - start

    def say(self, text: str):
        """Prints a line on the console only."""
        self.console.line(text)

    def close(self):
        """Removes the progress bar and closes the files. A second call does nothing."""
        self.console.close()
        for logger in self.loggers[1:]:
            logger.run.finish()
        for file in (self.file, self.events.records):
            with suppress(OSError):  # lines that could not be written, which has been reported
                file.close()

    def write(self, step: int, kind: str, figures: dict):
        # A float's repr has all its digits. JSON has no nan and inf; they become null.
        figures = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in figures.items()}
        with writing(self.path):
            self.file.write(json.dumps({"step": step, "kind": kind} | figures) + "\n")
            self.file.flush()
            numbers = {f"{kind}/{key}": x for key, x in figures.items() if isinstance(x, (int, float))}
            for logger in self.loggers:
                logger.scalars(step, numbers)
