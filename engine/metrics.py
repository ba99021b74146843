"""A run's figures: metrics.jsonl, TensorBoard events, lines on the console and a progress bar.

    peak = peak_flops(device, dtype)
    metrics = Metrics(...) if rank == 0 else Silent()
    with metrics.paused():
        metrics.evaluation(step, train_loss, val_loss, val_bpb)
    metrics.log(step, loss, lr, grad_norm, tokens)
    metrics.say("saved out/step_00001000")
    metrics.close()

The time inside paused() is not part of any step. Print through say(), so that the progress bar stays below the lines.
Call peak_flops on all ranks at the same time, because ranks on one CPU share it.
"""

import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch

from data.errors import say
from data.files import open_regular
from engine.events import Events

# ---------------------------------------------------------------------------------------------------------------------
# The machine

# Dense peaks in FLOP/s: (bfloat16 with float32 accumulation, or float16 on chips without bfloat16; TF32). Sources are
# NVIDIA's data sheets (halved where they count sparsity), its GA102, AD102 and GB202 white papers, and AMD's data sheet
# for MI300X. A card is the first row all of whose words occur in its name.
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
OTHER_CARD = {"mig", "laptop", "d", "ti", "super"}  # a name with such a word is another card, or a part of one


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak of `device` in FLOP/s, the denominator of MFU; None if unknown. A CPU's is measured in 0.5 s."""
    if device.type == "cuda":
        return gpu_peak(torch.cuda.get_device_name(device), dtype)
    return cpu_peak(dtype) if device.type == "cpu" else None


def gpu_peak(name: str, dtype: torch.dtype) -> float | None:
    """The dense matmul peak of a GPU in FLOP/s, None if unknown. float32 has the peak of TF32, even if TF32 is off."""
    words = set(re.split(r"[\s-]+", name.lower()))
    for card, (half, tf32) in GPU_PEAKS.items():
        if words.issuperset(card.lower().split()) and not words & OTHER_CARD:
            return tf32 if dtype == torch.float32 else half
    return None


def cpu_peak(dtype: torch.dtype, seconds: float = 0.5) -> float:
    """The best rate of square matmuls in this dtype in FLOP/s, on torch's current number of threads.

    The matrices grow from 192 rows to 1536, unless the next product would take longer than the rest of the time: on a
    CPU that emulates bfloat16, a product of 1536 rows can take 20 s.
    """
    best, n, last, end = 0.0, 96, 0.0, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        if n < 1536 and start + 8 * last < end:
            n *= 2
            a, out = torch.ones(n, n, dtype=dtype), torch.empty(n, n, dtype=dtype)
            start = time.perf_counter()
        torch.mm(a, a, out=out)
        last = time.perf_counter() - start
        best = max(best, 2 * n**3 / last)
    return best


def peak_memory_bytes(device: torch.device) -> int:
    """The peak of memory so far, in bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # whose ru_maxrss begins with the peak of the process that started this one
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------------------------------------------------------------
# Outputs


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
    bpb = f", bpb {val_bpb:.4f}" if val_bpb is not None else ""
    return f"step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}{bpb}"


# ---------------------------------------------------------------------------------------------------------------------
# The interface of train.py


def slow_step_warning(cfg, seconds: float) -> str:
    """A warning if a step takes over a minute, else "". `seconds` is its time at the machine's peak, nan if unknown."""
    if not seconds > 60:
        return ""
    return (
        f"warning: a step takes {timedelta(seconds=round(seconds))} or more on this machine; lower batch_size="
        f"{cfg.batch_size} or gradient_accumulation_steps={cfg.gradient_accumulation_steps}, or take a smaller model: "
        f"python train.py config/train_pycode.py --dataset={cfg.dataset} --out_dir=out/small"
    )


class Silent:
    """The metrics of every rank except 0: they write nothing."""

    def log(self, step: int, loss: float, lr: float, grad_norm: float, tokens: int, epoch=None, skipped: int = 0):
        """Logs step `step`: loss in nats; tokens, skipped steps and epoch (or epoch per source) since the start."""

    def norms(self, step: int, norms: dict[str, float]):
        """Logs norms by tag, such as grad_norm/blocks.0, in TensorBoard only."""

    def evaluation(self, step: int, train_loss: float, val_loss: float, val_bpb: float | None):
        """Logs an evaluation after `step` steps: losses in nats per token, val_bpb in bits per byte of text."""

    def sample(self, step: int, write_text: Callable[[float], str]):
        """Logs the text of write_text(seconds) in TensorBoard only. It ends its text after so many seconds, which are a
        hundredth of the time since the last sample, or since the start."""

    def paused(self) -> AbstractContextManager:
        """A context whose time is not part of any step."""
        return nullcontext()

    def say(self, text: str):
        """Prints a line on the console only."""

    def close(self):
        """Removes the progress bar and closes the files. A second call does nothing."""


class Metrics(Silent):
    """Writes out_dir/metrics.jsonl, TensorBoard events beside it, and lines on the console.

    step, tokens: number done before. A resume removes the lines of `step` and later, also evaluations, and the run
    writes them again. So metrics.jsonl has the same losses as that of a run without interruption, if the loop restarts
    at the top of `step`. TensorBoard drops the same steps. Rates and the time left are those of this session.
    flops_per_token: of forward and backward. peak: FLOP/s of all ranks together, None if unknown (mfu is null then).
    flags: of the run, for TensorBoard.
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
        flags: dict,
    ):
        folder = Path(out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        truncate_metrics(folder / "metrics.jsonl", step)
        self.file, self.events = open(folder / "metrics.jsonl", "a"), Events(folder, step)
        self.console, self.steps, self.tokens = Console(max_iters), step, tokens
        self.flops_per_token, self.peak, self.device = flops_per_token, peak, device
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
        self.events.hparams(flags)
        self.since = self.sampled = time.perf_counter()  # start of the interval to the next log, end of the last sample

    def log(self, step: int, loss: float, lr: float, grad_norm: float, tokens: int, epoch=None, skipped: int = 0):
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
        figures |= {"epochs" if isinstance(epoch, dict) else "epoch": epoch} if epoch is not None else {}
        figures |= {"skipped": skipped} if skipped else {}
        self.since, self.steps, self.tokens = now, step + 1, tokens
        mfu = f", mfu {figures['mfu']:.2%}" if self.peak else ""
        speed = f"time {figures['ms_per_step']:.2f}ms, tok/s {rate:,.0f}{mfu}"
        skips = f", skipped {skipped}" if skipped else ""
        self.write(step, "train", figures)
        self.console.advance(self.steps)  # first called after the first logged step, which may have compiled
        self.console.line(f"iter {step}: loss {loss:.4f}, {speed}, lr {lr:.2e}, grad norm {grad_norm:.3f}{skips}")

    def evaluation(self, step: int, train_loss: float, val_loss: float, val_bpb: float | None):
        self.write(step, "eval", {"train_loss": train_loss, "val_loss": val_loss, "val_bpb": val_bpb})
        self.console.line(evaluation_line(step, train_loss, val_loss, val_bpb))

    def norms(self, step: int, norms: dict[str, float]):
        with self._errors_with_name():
            self.events.scalars(step, norms)

    def sample(self, step: int, write_text: Callable[[float], str]):
        text = write_text((time.perf_counter() - self.sampled) / 100)
        with self._errors_with_name():
            self.events.text(step, "eval/sample", text)
        self.sampled = time.perf_counter()

    @contextmanager
    def paused(self):
        self.synchronize(self.device)  # the work still queued on the device belongs to the steps
        start = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - start

    def say(self, text: str):
        self.console.line(text)

    def close(self):
        self.console.close()
        for file in (self.file, self.events.records):
            with suppress(OSError):  # lines that could not be written, which has been reported
                file.close()

    def write(self, step: int, kind: str, figures: dict):
        # A float's repr has all its digits. JSON has no nan and inf; they become null.
        figures = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in figures.items()}
        with self._errors_with_name():
            self.file.write(json.dumps({"step": step, "kind": kind} | figures) + "\n")
            self.file.flush()
            self.events.scalars(step, {f"{kind}/{key}": x for key, x in figures.items()})

    @contextmanager
    def _errors_with_name(self):
        try:
            yield
        except OSError as error:  # a write error without the file's name
            raise OSError(error.errno, error.strerror, self.file.name) from error
