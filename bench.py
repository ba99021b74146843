"""Measures training speed: of this checkout, against another checkout, or of several runs against each other.

Also measures the loader's speed (--loader), and checks a GPU's results and speed (--gpu).

    python bench.py config/train_shakespeare_cpu.py --max_iters=300
    python bench.py --against=../nanoGPT --rounds=3 config/train_shakespeare_char.py --device=cpu --compile=False ...
    python bench.py --run=config/pycode_gpt2.py --run=config/pycode_llama.py --max_iters=60 --cooldown_iters=5
    python bench.py --loader=openwebtext
    python bench.py --gpu --out=out/gpu.json --against=../nanoGPT                # as make gpu, and nanoGPT's speed

`python train.py` gets the arguments of each --run, followed by the arguments behind the options. Another checkout must
know these flags too: one of superblock does, and nanoGPT knows the flags that both have. The speed is computed from the
times at which the lines "iter N:" appear, so start-up and the first steps do not count. Set eval_interval above
max_iters to leave evaluations out. Runs alternate (A B C, then C B A), because the speed of a shared machine drifts.
Quote the ratios, which compare runs of the same round.

--loader reads batches of 64 x 1024 tokens from a data set that fits in memory, then as many in nanoGPT's way: with a
new memory map for each batch, and two copies of every sequence, as inputs and as targets.

--gpu takes at most 8 minutes on one GPU. It compares attention, models and losses with float64 on the CPU
(engine/gpu_check.py), then trains GPT-2 with 124 M parameters at T=1024 in bfloat16, compiled. If --against is
nanoGPT's folder, nanoGPT trains the same model. Each part is a separate process with its own time limit, so a part that
fails does not end the others. Each result is written to --out at once. --device=cpu rehearses all parts with tiny
shapes. The exit code is 1 if a part failed.
"""

import argparse
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from engine.errors import command, require, user_errors

HERE = Path(__file__).resolve().parent
LIBC = ctypes.CDLL(None)
WARMUP = 0.2  # fraction of the timings, at the beginning, that is ignored
RESERVED = ("--out_dir=", "--log_interval=")  # arguments of train.py that bench.py sets
SECONDS = {"machine": 60, "attention": 60, "models": 75, "losses": 50, "speed": 110, "against": 125}  # at most
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 12}
SHAPE = {  # the flags of --gpu's training run, all of which nanoGPT has too
    "cuda": GPT2 | {"gradient_accumulation_steps": 5, "dtype": "bfloat16", "compile": True},
    "cpu": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 2}
    | {"gradient_accumulation_steps": 1, "dtype": "float32", "compile": False},
}
TIMED_LINES = 8  # lines "iter N:", one per 10 steps, after which a run of --gpu is ended


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def kill_with_parent():
    """Called in a child process: asks Linux to kill it when bench.py ends, even if bench.py is killed."""
    if hasattr(LIBC, "prctl"):
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Child:
    """A context of a process in its own group. The whole group is killed at the block's end, or after `seconds`."""

    def __init__(self, command: list[str], cwd: Path, seconds: float | None = None):
        self.seconds, self.timed_out, self.errors = seconds, False, tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=self.errors, text=True, errors="replace",
            start_new_session=True, preexec_fn=kill_with_parent,
        )  # fmt: skip
        self.lines = self.process.stdout
        self.timer = threading.Timer(seconds or threading.TIMEOUT_MAX, self.time_out)
        self.timer.daemon = True
        self.timer.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_):
        self.timer.cancel()
        self.kill()
        self.process.wait()
        self.lines.close()
        self.errors.close()

    def time_out(self):
        self.timed_out = True
        self.kill()

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def failure(self) -> str:
        """Waits for the end. Returns "" on success, else the cause and the last line of stderr."""
        code = self.process.wait()
        self.errors.seek(0)
        said = [line for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        last = said[-1].removeprefix("error: ")[:500] if said and not self.timed_out else ""
        how = f"time limit of {self.seconds} s" if self.timed_out else signal.Signals(-code).name if code < 0 else ""
        return ": ".join(filter(None, (how, last))) or f"exit code {code}" if code else ""


def measure(
    checkout: Path, args: list[str], seconds: float | None = None, lines: int | None = None
) -> tuple[float, dict]:
    """Runs checkout/train.py. Returns milliseconds per step and the last figures of its metrics.jsonl, {} without one.

    The run is ended after `seconds`, or after `lines` lines "iter N:". ValueError if it failed or printed too few.
    """
    marks: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-u", "train.py", *args, f"--out_dir={folder}/run", "--log_interval=10"]
        with Child(command, checkout, seconds) as run:
            for line in run.lines:
                if found := re.match(r"iter (\d+):", line):
                    marks.append((int(found[1]), time.perf_counter()))
                    if len(marks) == lines:
                        break
            failure = "" if len(marks) == lines else run.failure()
        metrics = Path(folder) / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()[:-1]] if metrics.is_file() else []
    marks = marks[int(WARMUP * len(marks)) :]
    if len(marks) < 2 or failure and not run.timed_out:
        why = failure or "printed fewer than two timings after its first steps; raise --max_iters"
        raise ValueError(f"{checkout}: python train.py {' '.join(args)}: {why}")
    (first, start), (last, end) = marks[0], marks[-1]
    return 1000 * (end - start) / (last - first), next((row for row in reversed(rows) if "mfu" in row), {})


# ---------------------------------------------------------------------------------------------------------------------
# Measurements


def measure_loader(name: str, batches: int = 200) -> tuple[float, float]:
    """Million tokens per second of our loader and of nanoGPT's way, each after batches / 10 batches of warm-up."""
    from contextlib import closing

    import numpy as np
    import torch

    from data.loader import Loader
    from data.objective import Causal
    from data.shards import open_data

    B, T = 64, 1024
    data = open_data(name, HERE / "data")
    stream = data.split("train")
    shard = max(stream.shards, key=len)
    require(len(shard) > T + 1, f"--loader={name} has shards of at most {len(shard)} tokens; give a larger data set")

    def theirs() -> None:
        tokens = np.memmap(shard.path, shard.dtype, mode="r", offset=shard.offset, shape=(len(shard),))
        starts = torch.randint(len(tokens) - T, (B,))
        for first in (0, 1):
            torch.stack([torch.from_numpy(tokens[i + first : i + first + T].astype(np.int64)) for i in starts])

    speeds = []
    with closing(Loader(stream, Causal(data.vocab_size, data.eot, T), B)) as loader:
        for fetch in (loader.__next__, theirs):
            for number in range(-batches // 10, batches):
                if number == 0:
                    start = time.perf_counter()
                fetch()
            speeds.append(batches * B * T / (time.perf_counter() - start) / 1e6)
    return tuple(speeds)


def compare(checkouts: list[Path], runs: list[list[str]], names: list[str], rounds: int):
    """Prints the speed of each run in each checkout, and their speed relative to the first."""
    entries = [(checkout, name, run) for checkout in checkouts for name, run in zip(names, runs, strict=True)]
    times: list[list[float]] = [[] for _ in entries]
    for number in range(rounds):
        order = list(zip(entries, times, strict=True))
        for (checkout, name, run), of_run in order if number % 2 == 0 else reversed(order):
            of_run.append(measure(checkout, run)[0])
            print(f"round {number + 1}: {checkout} {name}: {of_run[-1]:.2f} ms per step", flush=True)
    for (checkout, name, _), of_run in list(zip(entries, times, strict=True))[1:]:
        ratios = [b / a for a, b in zip(of_run, times[0], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        than = f"{entries[0][0]} {entries[0][1]}"
        print(f"{checkout} {name}: {median(ratios):.3f} times as fast as {than} ({spread})", flush=True)


def check_numerics(part: str, device: str) -> dict:
    """Runs a part of engine/gpu_check.py. Returns the number of cases, the largest errors, and the failed cases."""
    result, name = {"cases": 0, "failed": {}}, "the start"
    with Child([sys.executable, "-m", "engine.gpu_check", part, device], HERE, SECONDS[part]) as run:
        for case in (json.loads(line) for line in run.lines if line.startswith("{") and line.endswith("}\n")):
            name = case.pop("case")
            result["cases"] += bool(case)
            if "failed" in case:
                result["failed"][name] = case.pop("failed")
            for dtype, error in case.items():
                result[dtype] = max(result.get(dtype, [0.0, ""]), [error, name])
        if failure := run.failure():
            result["failed"][name] = failure
    errors = [f"{dtype} {result[dtype][0]:.1e}" for dtype in ("float32", "bfloat16") if dtype in result]
    text = f"{result['cases']} cases, {len(result['failed'])} failed; largest errors: {', '.join(errors)}"
    return result | {"status": "failed" if result["failed"] else "ok", "text": text}


def measure_speed(part: str, checkout: Path, device: str) -> dict:
    """Trains on random tokens. Returns tokens per second, and for superblock also MFU and peak memory."""
    import numpy as np

    shape = SHAPE[device]
    tokens = shape["batch_size"] * shape["block_size"] * shape["gradient_accumulation_steps"]
    with tempfile.TemporaryDirectory() as data:
        for split in ("train", "val"):
            np.random.default_rng(0).integers(50257, size=2**20, dtype=np.uint16).tofile(f"{data}/{split}.bin")
        (Path(data) / "meta.json").write_text('{"vocab_size": 50257}')
        flags = shape | {"dataset": data, "device": device, "eval_iters": 1, "eval_interval": 10**5, "max_iters": 10**5}
        ms, found = measure(checkout, [f"--{name}={x}" for name, x in flags.items()], SECONDS[part], TIMED_LINES)
    rate = 1000 * tokens / ms
    result = {"status": "ok", "tokens_per_s": rate, "ms_per_step": ms, "tokens_per_step": tokens}
    result["text"] = f"{rate:,.0f} tokens/s, {ms:.1f} ms per step"
    if found:
        result["mfu"] = found["mfu"] and found["mfu"] / found["tokens_per_s"] * rate
        result["peak_memory_bytes"] = found["peak_memory_bytes"]
        mfu = "unknown" if result["mfu"] is None else f"{result['mfu']:.1%}"
        result["text"] += f", MFU {mfu}, {found['peak_memory_bytes'] / 2**30:.2f} GiB peak memory"
    return result


def gpu_report(device: str, out: Path, against: Path | None):
    """Runs all parts of --gpu. Prints a line and writes the report to `out` after each. Exits with 1 if one failed."""
    with Child([sys.executable, "-m", "engine.gpu_check", "machine", device], HERE, SECONDS["machine"]) as run:
        said, failure = run.lines.read(), run.failure()
    require(not failure, f"torch does not start on the GPU: {failure}; check the output of nvidia-smi")
    machine = json.loads(said)
    require(machine["device"] is not None, "torch finds no GPU; pass --device=cpu for a rehearsal without one")
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report = {"date": date, "commit": git.stdout.strip(), "machine": machine, "parts": {}}
    write(out, report)
    print(f"{machine['device']}, torch {machine['torch']}, commit {report['commit']}", flush=True)
    print(f"{'part':<12}{'status':<8}{'seconds':>8}  result", flush=True)
    parts = {part: lambda part=part: check_numerics(part, device) for part in ("attention", "models", "losses")}
    parts["speed"] = lambda: measure_speed("speed", HERE, device)
    if against:
        parts["against"] = lambda: measure_speed("against", against, device)
    for name, part in parts.items():
        start = time.perf_counter()
        try:
            result = part()
        except (ValueError, OSError) as error:
            result = {"status": "failed", "text": " ".join(str(error).split())}
        ours, theirs = (each.get("tokens_per_s") for each in (report["parts"].get("speed", {}), result))
        if ours and theirs:
            result["ratio"] = ours / theirs
            result["text"] += f"; this checkout is {ours / theirs:.2f} times as fast"
        report["parts"][name] = result = {"seconds": round(time.perf_counter() - start, 1)} | result
        write(out, report)
        print(f"{name:<12}{result['status']:<8}{result['seconds']:>8}  {result['text']}", flush=True)
        for case, what in list(result.get("failed", {}).items())[:5]:
            print(f"{'':<30}{case}: {what}", flush=True)
    if any(result["status"] != "ok" for result in report["parts"].values()):
        raise SystemExit(1)


def write(out: Path, report: dict):
    """Writes the report atomically."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, out)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ValueError for wrong options, and OSError if stdout cannot be written."""

    def print_help(self, file=None):
        print(self.format_help(), end="", flush=True)

    def error(self, message: str):
        raise ValueError(f"{message}; --help shows the usage")


def read(argv: list[str] | None) -> tuple[argparse.Namespace, list[list[str]]]:
    """Parses the options and the arguments of each run for train.py. ValueError names a wrong one."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--against", help="folder of another checkout with a train.py")
    parser.add_argument("--run", action="append", help="arguments of one run; repeat the option to compare runs")
    parser.add_argument("--rounds", type=int, help="how often all runs are measured (default 3)")
    parser.add_argument("--loader", metavar="DATASET", help="measure the loader instead of training")
    parser.add_argument("--gpu", action="store_true", help="compare a GPU with the CPU, and measure its speed")
    parser.add_argument("--out", metavar="FILE.json", help="file for the report of --gpu")
    options, args = parser.parse_known_args(argv)
    given = {name for name, value in vars(options).items() if value not in (None, False)}
    for name, alone in (("loader", {"rounds"}), ("gpu", {"out", "against"})):
        others = [f"--{other}" for other in sorted(given - alone - {name})] + args * (name == "loader")
        require(name not in given or not others, f"--{name} does not go with {' '.join(others)}; leave one of them out")
    require("out" not in given or options.gpu, f"--out={options.out} is used only with --gpu; leave it out")
    json_file = (options.out or "").endswith(".json")
    require(not options.gpu or json_file, f"--out={options.out} must be a .json file for --gpu, such as out/gpu.json")
    require(options.loader != "", "--loader= names no data set; give one, such as pycode")
    options.rounds = 3 if options.rounds is None else options.rounds
    require(1 <= options.rounds <= 1000, f"--rounds={options.rounds} must be at least 1 and at most 1000")
    if options.against is not None:
        there = options.against and (Path(options.against) / "train.py").is_file()
        require(there, f"--against={options.against} holds no train.py; give the folder of a checkout")
        options.against = Path(options.against).resolve()
    if options.gpu:
        fixed = f"--gpu measures fixed runs and takes no {' '.join(args)}; leave it out, or rehearse with --device=cpu"
        require(args in ([], ["--device=cpu"]), fixed)
        options.device = "cpu" if args else "cuda"
        return options, []
    runs = []
    for text in options.run or [""]:
        try:
            runs.append(shlex.split(text) + args)
        except ValueError as error:
            raise ValueError(f"--run={text}: {error}; correct its quotation marks") from None
    for run in [] if options.loader else runs:
        require(run, "there is nothing to train; give train.py's arguments, such as a config file and --max_iters=100")
        own = [arg for arg in run if arg.startswith(RESERVED)]
        require(not own, f"{' '.join(own)} is an argument that bench.py sets; leave it out")
    return options, runs


def stop(number: int, frame):
    """Exits so that the process of a run is killed and its folder removed."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None):
    with user_errors():
        options, runs = read(argv)
        if options.gpu:
            return gpu_report(options.device, Path(options.out), options.against)
        for number in range(options.rounds if options.loader else 0):
            ours, theirs = measure_loader(options.loader)
            times = f"{ours / theirs:.1f} times"
            print(f"round {number + 1}: {ours:.0f} Mtok/s, {theirs:.0f} in nanoGPT's way: {times}", flush=True)
        if not options.loader:
            checkouts = [options.against] * bool(options.against) + [HERE]
            compare(checkouts, runs, options.run or [""], options.rounds)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if sys.stdout:
        sys.stdout.reconfigure(errors="replace")  # an argument may be no UTF-8
    command(main)
