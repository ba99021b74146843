"""A run's figures: metrics.jsonl, TensorBoard events, wandb, lines on the console and a progress bar.

A command prints through Metrics.say, so that the progress bar stays below the lines.
"""

import json
import os
import shlex
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.errors import printable, reason, require, say, shortened, user_errors
from data.files import read_file, write_file, writing
from engine.config import Config
from engine.device import peak_memory_bytes

LARGEST_FILE = 2**32  # bytes of metrics.jsonl


def read_metrics(path: Path) -> Iterator[dict]:
    """Yields the rows of a metrics.jsonl. Other lines are left out, such as one that a kill has left half written."""
    for line in read_file(path, LARGEST_FILE).splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < 16 else float(digits))
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def truncate_metrics(path: Path, step: int):
    """Removes the rows of `step` and later steps from a metrics.jsonl, and lines that are no rows, atomically."""
    require(path.exists() or not path.is_symlink(), f"{path} is a link to a file that is not there; delete it")
    if path.exists():
        rows = [row for row in read_metrics(path) if row["step"] < step]
        write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def tried(what: str, action: Callable[[], Any]) -> bool:
    """Calls action(). If it fails, a line says so, and the run goes on: nothing decorative ends a training."""
    try:
        action()
    except Exception as error:  # of any class
        fact = shortened(f"{what} fails and is left out from here on ({type(error).__name__}: {error})")
        say(f"warning: {fact}; metrics.jsonl has all figures")
        return False
    return True


class Events:
    """Writes TensorBoard events. These imports take 0.2 s; torch.utils.tensorboard would take 3 s."""

    def __init__(self, folder: Path, step: int):
        """Readers drop the events of `step` and later that are in the folder."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.Event = event_pb2.Event
        self.Summary = summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.records = RecordWriter(open(folder / name, "wb"))
        self.write(file_version="brain.Event:2")
        self.write(step=step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def scalars(self, step: int, figures: dict):
        values = [self.Summary.Value(tag=tag, simple_value=x) for tag, x in figures.items()]
        self.write(step=step, summary=self.Summary(value=values))

    def write(self, **event):
        self.records.write(self.Event(wall_time=time.time(), **event).SerializeToString())
        self.records.flush()

    def close(self):
        self.records.close()


class Wandb:
    """Sends figures to Weights & Biases (https://docs.wandb.ai); a resume continues the same run there."""

    def __init__(self, folder: Path, cfg: Config):
        try:
            import wandb
        except ImportError:
            remedy = "pip install wandb, or set wandb_log=False and watch the run by tensorboard --logdir=OUT_DIR"
            raise ValueError(f"wandb_log=True: wandb is not installed; {remedy}") from None
        identity = folder / "wandb_id"
        if cfg.init_from != "resume" or not identity.exists():  # a new run takes no id of one that never saved
            write_file(identity, uuid.uuid4().hex[:8].encode())
        known = read_file(identity, 100).decode(errors="replace")
        options = {"project": cfg.wandb_project, "name": cfg.wandb_run_name or folder.name, "config": asdict(cfg)}
        try:
            self.run = wandb.init(**options, id=known, resume="allow", dir=folder)
        except Exception as error:  # of its own classes
            remedy = "log in by wandb login, set WANDB_MODE=offline, or leave wandb_log out"
            raise ValueError(f"wandb_log=True: wandb cannot start: {reason(error)}; {remedy}") from error

    def scalars(self, step: int, figures: dict):
        self.run.log(figures, step=step)

    def close(self):
        self.run.finish()


class Console:
    """Prints lines on stdout and, if stderr is a terminal, a progress bar of the steps below them."""

    def __init__(self, max_iters: int):
        self.max_iters = max_iters
        self.bar = None

    def advance(self, steps: int, figures: str):
        """Sets the number of steps done and the figures behind the bar, for the next redraw. Rate and time left are
        computed since the first call."""
        if self.bar is not None:
            self.bar.n = steps
            self.bar.set_postfix_str(figures, refresh=False)
        elif sys.stderr.isatty():
            from tqdm import tqdm

            options = {"unit": "step", "smoothing": 0, "dynamic_ncols": True, "leave": False}
            self.bar = tqdm(initial=steps, total=self.max_iters, **options)

    def line(self, text: str):
        """Prints a line above the bar."""
        if self.bar is not None:
            self.bar.clear()
        try:
            print(printable(text), flush=True)
        except BrokenPipeError:  # as in `| head`: save and stop. Where Ctrl-C has ended `| tee`, it asks for this too
            if callable(signal.getsignal(signal.SIGUSR1)):  # the run listens, see engine.stop_signal
                os.kill(os.getpid(), signal.SIGUSR1)
        except OSError as error:  # the terminal is gone, or the disk is full
            say(f"warning: stdout: {error.strerror}; the run goes on, and metrics.jsonl has its figures")
        if self.bar is not None:
            self.bar.refresh()

    def close(self):
        if self.bar is not None:
            self.bar.close()


def evaluation_text(step: int, train_loss: float, val_loss: float, val_bpb: float | None, is_best: bool = False) -> str:
    """The console's text for an evaluation; `is_best`: the validation loss is the lowest so far."""
    text = f"step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"
    if val_bpb is not None:
        text += f", bpb {val_bpb:.4f}"
    if is_best:
        text += " (the best so far)"
    return text


class Silent:
    """The metrics of a rank that writes nothing: of all but the first, and under eval_only of every rank."""

    def log(self, *args, **figures):
        """Does nothing."""

    evaluation = say = end = close = log
    paused = nullcontext


class Metrics(Silent):
    """Writes out_dir/metrics.jsonl, TensorBoard events beside it, and lines on the console.

    step, tokens: number done before. A resume removes the rows of `step` and later, also evaluations, and the run
    writes them again. So metrics.jsonl has the same losses as that of a run without interruption, if the loop restarts
    at the top of `step`. TensorBoard drops the same steps. Rates and the time left are those of this session.
    """

    def __init__(self, cfg: Config, work, device: torch.device, step: int, tokens: int):
        self.flops_per_token = work.flops_per_token
        self.peak = work.peak_flops  # of all ranks together, None if unknown
        self.device = device
        self.steps = step
        self.tokens = tokens
        folder = Path(cfg.out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        truncate_metrics(self.path, step)
        self.file = open(self.path, "a")
        self.loggers: list[Events | Wandb] = [Events(folder, step)]
        if cfg.wandb_log:
            self.loggers.append(Wandb(folder, cfg))
        self.console = Console(cfg.max_iters)
        self.say = self.console.line  # prints a line on the console alone
        self.started = time.perf_counter()
        self.since = self.started  # start of the interval to the next log

    def log(self, step: int, loss: float, lr: float, grad_norm: float, tokens: int, progress: dict[str, Any]):
        """Logs step `step`: loss in nats; `tokens` since the start, and figures of the progress, such as the epoch."""
        now = time.perf_counter()
        seconds = now - self.since
        rate = (tokens - self.tokens) / seconds
        ms = 1000 * seconds / (step + 1 - self.steps)
        mfu = None
        line = f"iter {step}: loss {loss:.4f}, time {ms:.2f}ms, tok/s {rate:,.0f}"
        if self.peak:
            mfu = rate * self.flops_per_token / self.peak
            line += f", mfu {mfu:.2%}"
        line += f", lr {lr:.2e}, grad norm {grad_norm:.3f}"
        if "skipped" in progress:
            line += f", skipped {progress['skipped']}"
        figures = {
            "loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": tokens, "flops": tokens * self.flops_per_token,
            "tokens_per_s": rate, "mfu": mfu, "ms_per_step": ms, "peak_memory_bytes": peak_memory_bytes(self.device),
        }  # fmt: skip
        self.write(step, "train", figures | progress)
        self.since = now
        self.steps = step + 1
        self.tokens = tokens
        # The rate is that since the first call, which follows the first logged step, as that may have compiled.
        self.console.advance(self.steps, f"loss {loss:.4f}, {rate:,.0f} tok/s")
        self.console.line(line)

    def evaluation(self, step: int, train_loss: float, val_loss: float, val_bpb: float | None, is_best: bool = False):
        """Logs an evaluation after `step` steps: losses in nats per token, and val_bpb in bits per byte of text."""
        self.write(step, "eval", {"train_loss": train_loss, "val_loss": val_loss, "val_bpb": val_bpb})
        self.console.line(evaluation_text(step, train_loss, val_loss, val_bpb, is_best))

    @contextmanager
    def paused(self):
        """A context whose time is not part of any step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the work still queued on the device belongs to the steps
        start = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - start

    def end(self, how: str, stopped: bool):
        """Prints how the run has ended, and what one may type next."""
        out_dir = shlex.quote(str(self.path.parent))
        resume = f"python train.py --out_dir={out_dir} --init_from=resume"
        if stopped:
            self.say(f"{how}; go on with {resume}")
            return
        minutes, seconds = divmod(round(time.perf_counter() - self.started), 60)
        self.say(f"{how}, after {minutes} min {seconds} s; next, for example:")
        self.say(f"  python sample.py --out_dir={out_dir}")
        self.say(f"  python -m tools.plot {out_dir} --y=loss,val_loss  # after pip install -e .[plots]")
        self.say(f"  {resume} --max_iters={2 * self.console.max_iters}")

    def close(self):
        """Removes the progress bar and closes the files. A second call does nothing."""
        self.console.close()
        self.to_loggers("close")
        self.loggers = []
        with suppress(OSError):  # lines that could not be written, which has been reported
            self.file.close()

    def write(self, step: int, kind: str, figures: dict):
        # A float's repr has all its digits. JSON has no nan and inf; they become null.
        figures = json.loads(json.dumps(figures), parse_constant=lambda word: None)
        with user_errors(), writing(self.path):
            self.file.write(json.dumps({"step": step, "kind": kind} | figures) + "\n")
            self.file.flush()
        numbers = {f"{kind}/{key}": x for key, x in figures.items() if isinstance(x, (int, float))}
        self.to_loggers("scalars", step, numbers)

    def to_loggers(self, method: str, *args):
        """Calls this method of all loggers. One that fails is left out from then on."""
        loggers = self.loggers
        self.loggers = [x for x in loggers if tried(type(x).__name__, partial(getattr(x, method), *args))]
