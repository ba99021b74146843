"""Measures how much slow links between the ranks of tensor parallelism cost. `bench.py --link_delay` prints it.

For each run, torchrun starts one process per rank on this machine, all on the CPU and not compiled:

    torchrun --standalone --nproc_per_node=2 -m tools.link_delay 0,2,5 config/train_pycode.py --tp=2

A rank trains as train.py does, but each collective of a training step waits first, in forward, backward and optimizer.
The delays (milliseconds) take turns from step to step, so a change of the machine's speed affects all of them alike.
"""

from tools.child import Child, kill_with_parent

if __name__ == "__main__":
    kill_with_parent()  # before the slow imports; torchrun starts its workers in sessions of their own

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch.distributed as dist

from configurator import Config, parse
from engine.errors import require, user_errors
from engine.evaluation import open_dataset
from engine.parallel import tensor as tensor_parallel
from engine.parallel.ranks import environment
from engine.plan import plan

ROOT = Path(__file__).resolve().parent.parent
COLLECTIVES = {tensor_parallel: ["all_gather", "reduce_scatter"], dist: ["all_reduce", "all_to_all_single"]}


def train_rank(delays: list[float], args: list[str]):
    """Train as one of the ranks. The first rank prints (collectives, milliseconds) of each step as a line of JSON."""
    import train  # a command, as this function is

    calls, delay, steps, train_step = 0, 0.0, [], train.Run.train_step

    def delayed(collective: Callable, *args, **kwargs):
        nonlocal calls
        calls += 1
        time.sleep(delay / 1000)
        return collective(*args, **kwargs)

    def step(*args):
        nonlocal calls, delay
        calls, delay, start = 0, delays[len(steps) % len(delays)], time.perf_counter()
        result = train_step(*args)
        steps.append((calls, 1000 * (time.perf_counter() - start)))
        delay = 0.0  # for logs and evaluations
        return result

    for module, name in [(module, name) for module, names in COLLECTIVES.items() for name in names]:
        setattr(module, name, partial(delayed, getattr(module, name)))
    train.Run.train_step = step
    train.main(args)
    if environment().rank == 0:
        print(json.dumps(steps), flush=True)


def table(runs: list[list[str]], names: list[str], delays: list[float]):
    """Print the speed of each run, arguments of train.py, at each delay. The first delay must be 0."""
    configs = [parse(Config, args) for args in runs]
    for cfg in configs:
        alone = cfg.tp > 1 and cfg.cp == cfg.pp == 1 and cfg.parallel == "ddp"
        flags = f"tp={cfg.tp}, cp={cfg.cp}, pp={cfg.pp} and parallel={cfg.parallel}"
        require(alone, f"--link_delay needs tensor parallelism alone, and a run has {flags}; set only --tp=2 or more")
        cfg.world_size, (_, _, cfg.vocab_size) = cfg.tp, open_dataset(cfg)
    planned = [plan.estimate(cfg).collectives for cfg in configs]
    print("ranks  collectives  planned  delay ms  ms/step  slowdown  predicted  run", flush=True)
    for args, name, cfg, count in zip(runs, names, configs, planned, strict=True):
        steps = measure(args, cfg.tp, delays)
        times = [median(ms for _, ms in steps[i :: len(delays)]) for i in range(len(delays))]
        for delay, ms in zip(delays, times, strict=True):
            figures = f"{delay:>10g}{ms:>9.1f}{ms / times[0]:>10.2f}{1 + count * delay / times[0]:>11.2f}"
            print(f"{cfg.tp:>5}{steps[-1][0]:>13}{count:>9}{figures}  {name}", flush=True)


def measure(args: list[str], ranks: int, delays: list[float]) -> list[list[float]]:
    """[collectives, milliseconds] of each step of a run of train.py."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "tools.link_delay"]
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--device=cpu", "--compile=False", f"--out_dir={folder}/run"]
        with Child([sys.executable, *torchrun, ",".join(map(str, delays)), *args, *fixed], ROOT) as run:
            steps = next((json.loads(line) for line in run.lines if line.startswith("[")), [])
            failure = run.failure() or len(steps) < 5 * len(delays) and "too few steps; raise --max_iters"
    require(not failure, f"train.py {' '.join(args)}: {failure}")
    return steps


if __name__ == "__main__":
    with user_errors(Exception):  # one line, which Child.failure finds among the lines of torchrun
        train_rank([float(delay) for delay in sys.argv[1].split(",")], sys.argv[2:])
