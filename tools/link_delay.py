"""Trains as one of several ranks whose links are slow. `tools.bench --link_delay` starts the ranks, all on this CPU:

    torchrun --standalone --nproc_per_node=2 -m tools.link_delay 0,2,5 config/train_pycode.py --tp=2

The arguments behind the delays are train.py's. Each collective of a step waits first, in forward, backward and
optimizer. The delays (milliseconds) take turns from step to step, so a change of the machine's speed affects all alike.
"""

from tools.child import kill_with_parent

if __name__ == "__main__":
    kill_with_parent()  # before the slow imports; torchrun starts its workers in sessions of their own

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import torch.distributed as dist

from configurator import Config, parse
from data.errors import user_errors
from engine.parallel import ranks as parallel
from engine.parallel import tensor as tensor_parallel
from tools.training import Training

COLLECTIVES = {tensor_parallel: ["all_gather", "reduce_scatter"], dist: ["all_reduce", "all_to_all_single"]}


def train_rank(delays: list[float], args: list[str]):
    """Make the steps of a run. The first rank prints (collectives, milliseconds, loss) of each as a line of JSON."""
    calls, delay, steps = 0, 0.0, []

    def delayed(collective: Callable, *args, **kwargs):
        nonlocal calls
        calls += 1
        time.sleep(delay / 1000)
        return collective(*args, **kwargs)

    for module, name in [(module, name) for module, names in COLLECTIVES.items() for name in names]:
        setattr(module, name, partial(delayed, getattr(module, name)))
    with closing(Training(parse(Config, args))) as run:
        for number in range(run.cfg.max_iters):
            calls, delay, start = 0, delays[number % len(delays)], time.perf_counter()
            loss, _ = run.step()
            steps.append((calls, 1000 * (time.perf_counter() - start), loss))
        delay = 0.0
        steps = [(calls, ms, run.sharded.mean(loss)) for calls, ms, loss in steps]
    if run.ranks.first:
        print(json.dumps(steps), flush=True)
    parallel.leave()


if __name__ == "__main__":
    with user_errors(Exception):  # one line, which Child.failure finds among the lines of torchrun
        train_rank([float(delay) for delay in sys.argv[1].split(",")], sys.argv[2:])
