"""Several runs of train.py in the same processes, one after the other: torchrun tests/runs.py 'JSON list of flags'."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
import train  # noqa: E402

train.peak_flops = lambda *_: 1e9  # measuring takes half a second each
join, leave = dist.init_process_group, train.parallel.leave
dist.init_process_group = lambda *args, **kwargs: None if dist.is_initialized() else join(*args, **kwargs)
train.parallel.leave = lambda: None
for flags in json.loads(sys.argv[1]):
    train.main(flags)
leave()
