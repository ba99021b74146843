"""What a run says about itself: metrics.jsonl, TensorBoard events, console lines and a progress bar.

    peak = peak_flops(device, dtype)
    metrics = Metrics(...) if rank == 0 else Silent()
    with metrics.paused():
        metrics.evaluation(step, train_loss, val_loss, val_bpb)
    metrics.log(step, loss, lr, grad_norm, tokens)
    metrics.say("saved out/step_00001000")
    metrics.close()

Time inside paused() counts as no step's. Lines go through say(), so that they do not garble the progress bar. All ranks
measure the peak at once, since ranks on one CPU share it.
"""

import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch

from data.files import regular

# ---------------------------------------------------------------------------------------------------------------------
# The machine

# Dense peaks in FLOP/s: bfloat16 (float16 on chips without it) with float32 accumulation, and TF32. From NVIDIA's data
# sheets (halved where they count sparsity) and its GA102, AD102 and GB202 white papers, and AMD's for MI300X.
# A card is the first row whose words all stand in its name.
GPU_PEAKS = {
    "GB200": (2500e12, 1250e12),
    "B200": (2250e12, 1125e12),
    "GH200": (989.4e12, 494.7e12),
    "H200 NVL": (835.5e12, 417.7e12),
    "H200": (989.4e12, 494.7e12),
    "H100 NVL": (835.5e12, 417.7e12),
    "H100 PCIe": (756e12, 378e12),
    "H100": (989.4e12, 494.7e12),
    "A100": (312e12, 156e12),
    "A40": (149.7e12, 74.8e12),
    "A30": (165e12, 82e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 62.5e12),
    "L40S": (362e12, 183e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 60.5e12),
    "RTX 5090": (209.5e12, 104.8e12),
    "RTX 4090": (165.2e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "RTX A6000": (154.8e12, 77.4e12),
    "V100 PCIe": (112e12, None),
    "V100": (125e12, None),
    "T4": (65e12, None),
    "MI300X": (1307.4e12, 653.7e12),
}
LESSER = {"mig", "laptop", "d", "ti", "super"}  # words that make another card, or a part of one, of the same name


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The most `device` can do in FLOP/s, MFU's denominator; None if unknown. On a CPU it is measured, in 0.5 s."""
    if device.type == "cuda":
        return gpu_peak(torch.cuda.get_device_name(device), dtype)
    return cpu_peak() if device.type == "cpu" else None


def gpu_peak(name: str, dtype: torch.dtype) -> float | None:
    """Dense matmul peak of a card in FLOP/s, None if unknown. float32 counts as TF32, even where that is off."""
    words = set(re.split(r"[\s-]+", name.lower()))
    for card, (half, tf32) in GPU_PEAKS.items():
        if words.issuperset(card.lower().split()) and not words & LESSER:
            return tf32 if dtype == torch.float32 else half
    return None


def cpu_peak(seconds: float = 0.5) -> float:
    """The best rate of square float32 matmuls in FLOP/s, on torch's current number of threads.

    float32 for every dtype: it is the fastest one on CPUs without hardware for the others.
    """
    best, end = 0.0, time.perf_counter() + seconds
    a, out = torch.ones(1536, 1536), torch.empty(1536, 1536)
    while (start := time.perf_counter()) < end:
        torch.mm(a, a, out=out)
        best = max(best, 2 * 1536**3 / (time.perf_counter() - start))
    return best


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held at once so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------------------------------------------------------------
# Where it is written


def cut_back(path: Path, step: int):
    """Leaves the lines of steps before `step` in a metrics.jsonl, by one rename. A half-written line goes too."""
    if not path.exists():
        return
    temporary = path.with_suffix(".tmp")
    with open(path, errors="replace", opener=regular) as lines, open(temporary, "w") as f:
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                if json.loads(line)["step"] < step:
                    f.write(line.rstrip("\n") + "\n")
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


class Events:
    """TensorBoard events, one record per write. torch.utils.tensorboard would take 3 s to import, these parts 0.2 s."""

    def __init__(self, folder: Path, step: int):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ValueError(f"{error.name} is not installed; pip install tensorboard") from error
        self.Event, self.Summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.records = RecordWriter(open(folder / name, "wb"))
        self.write(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # readers forget older files from this step on
        self.write(step=step, session_log=start)

    def scalars(self, step: int, prefix: str, figures: dict):
        numbers = {key: x for key, x in figures.items() if isinstance(x, (int, float))}
        values = [self.Summary.Value(tag=f"{prefix}/{key}", simple_value=x) for key, x in numbers.items()]
        self.write(step=step, summary=self.Summary(value=values))

    def write(self, **event):
        self.records.write(self.Event(wall_time=time.time(), **event).SerializeToString())
        self.records.flush()


class Console:
    """Lines on stdout; below them a progress bar, if stderr is a terminal."""

    def __init__(self):
        self.bar, self.draw = "", self._draw if sys.stderr.isatty() else lambda text: None

    def line(self, text: str):
        bar = self.bar
        self.draw("")
        try:
            print(text, flush=True)
        except OSError as error:  # a terminal that is gone, a full disk: metrics.jsonl has it all
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            caught = signal.SIGTERM, signal.SIGINT
            stopping = signal.SIG_DFL in map(signal.getsignal, caught)  # already, as by a Ctrl-C that also ended tee
            if isinstance(error, BrokenPipeError) and not stopping:  # as in `| head`: save and stop, as after SIGTERM
                os.kill(os.getpid(), signal.SIGTERM)
        self.draw(bar)

    def _draw(self, text: str):
        self.bar = text[: shutil.get_terminal_size().columns - 1]  # a bar that wraps could not be erased
        try:
            print(f"\r\x1b[K{self.bar}", end="", file=sys.stderr, flush=True)
        except OSError:  # the terminal is gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            self.draw = lambda text: None


def evaluation_line(step: int, train_loss: float, val_loss: float, val_bpb: float | None) -> str:
    bpb = f", bpb {val_bpb:.4f}" if val_bpb is not None else ""
    return f"step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}{bpb}"


# ---------------------------------------------------------------------------------------------------------------------
# What train.py uses


def slow_steps(cfg, seconds: float) -> str:
    """What to say of steps that take so long at the machine's peak, which may be unknown (nan); "" below a minute."""
    if not seconds > 60:
        return ""
    return (
        f"warning: a step takes {timedelta(seconds=round(seconds))} or more on this machine; lower batch_size="
        f"{cfg.batch_size} or gradient_accumulation_steps={cfg.gradient_accumulation_steps}, or take a smaller model: "
        f"python train.py config/train_pycode.py --dataset={cfg.dataset} --out_dir=out/small"
    )


class Silent:
    """The metrics of every rank but 0: nothing."""

    def log(self, step: int, loss: float, lr: float, grad_norm: float, tokens: int, epoch=None, skipped: int = 0):
        """Figures of step `step`: loss in nats; tokens, skipped steps and epoch (or epoch of each source) so far."""

    def evaluation(self, step: int, train_loss: float, val_loss: float, val_bpb: float | None):
        """The figures after `step` steps: losses in nats per token, val_bpb in bits per byte of text."""

    def paused(self) -> AbstractContextManager:
        """The time spent inside counts as no step's."""
        return nullcontext()

    def say(self, text: str):
        """A line for people."""

    def close(self):
        """Removes the bar and closes the files; may be called twice."""


class Metrics(Silent):
    """Writes out_dir/metrics.jsonl and TensorBoard events beside it, and talks to the console.

    step, tokens: what is done already. On resume the lines of `step` and later go, evaluations too, and the run writes
    them again: a loop that starts over at the top of `step` leaves the same losses as a run that never stopped.
    TensorBoard forgets the same steps. Rates and the time left are this session's.
    flops_per_token: of forward and backward; peak: FLOP/s of all ranks together, None = unknown (mfu is null).
    """

    def __init__(
        self,
        out_dir: str,
        step: int,
        tokens: int,
        max_iters: int,
        flops_per_token: float,
        peak: float | None,
        device: torch.device,
    ):
        folder = Path(out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        cut_back(folder / "metrics.jsonl", step)
        self.file, self.events, self.console = open(folder / "metrics.jsonl", "a"), Events(folder, step), Console()
        self.done, self.tokens, self.max_iters = step, tokens, max_iters
        self.flops_per_token, self.peak, self.device = flops_per_token, peak, device
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
        self.first = None  # (time, steps done) at the first logged step, which may have compiled
        self.since = time.perf_counter()

    def log(self, step: int, loss: float, lr: float, grad_norm: float, tokens: int, epoch=None, skipped: int = 0):
        now = time.perf_counter()
        seconds = now - self.since
        rate = (tokens - self.tokens) / seconds
        figures = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "tokens_per_s": rate,
            "mfu": rate * self.flops_per_token / self.peak if self.peak else None,
            "ms_per_step": 1000 * seconds / (step + 1 - self.done),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }
        figures |= {"epochs" if isinstance(epoch, dict) else "epoch": epoch} if epoch is not None else {}
        figures |= {"skipped": skipped} if skipped else {}
        self.since, self.done, self.tokens = now, step + 1, tokens
        self.first = self.first or (now, self.done)
        mfu = f", mfu {figures['mfu']:.2%}" if self.peak else ""
        speed = f"time {figures['ms_per_step']:.2f}ms, tok/s {rate:,.0f}{mfu}"
        skips = f", skipped {skipped}" if skipped else ""
        self.write(step, "train", figures)
        self.console.line(f"iter {step}: loss {loss:.4f}, {speed}, lr {lr:.2e}, grad norm {grad_norm:.3f}{skips}")
        self.console.draw(self.progress(now))

    def evaluation(self, step: int, train_loss: float, val_loss: float, val_bpb: float | None):
        self.write(step, "eval", {"train_loss": train_loss, "val_loss": val_loss, "val_bpb": val_bpb})
        self.console.line(evaluation_line(step, train_loss, val_loss, val_bpb))

    @contextmanager
    def paused(self):
        self.wait(self.device)  # steps still in the device's queue are steps' time
        start = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - start

    def say(self, text: str):
        self.console.line(text)

    def close(self):
        self.console.draw("")
        for file in (self.file, self.events.records):
            with suppress(OSError):  # of lines that could not be written, which has been said
                file.close()

    def write(self, step: int, kind: str, figures: dict):
        # A float's repr has all its digits; what JSON cannot hold (nan, inf) is null.
        figures = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in figures.items()}
        try:
            self.file.write(json.dumps({"step": step, "kind": kind} | figures) + "\n")
            self.file.flush()
            self.events.scalars(step, kind, figures)
        except OSError as error:  # of a write, it does not say where
            raise OSError(error.errno, error.strerror, self.file.name) from error

    def progress(self, now: float) -> str:
        """'42% [########            ] 420/1000, 0:01:23 left', at the rate since the first logged step."""
        start, done_then = self.first
        left = (now - start) / max(1, self.done - done_then) * max(0, self.max_iters - self.done)
        time_left = f", {timedelta(seconds=round(left))} left" if self.done > done_then else ""
        share = min(1.0, self.done / self.max_iters)
        return f"{share:.0%} [{'#' * int(20 * share):20}] {self.done}/{self.max_iters}{time_left}"
