"""One of several ranks whose links are slow. `tools.bench --link_delay` starts the ranks, all on this CPU:

    torchrun --standalone --nproc_per_node=2 -m tools.link_delay 0,2,5 config/train_pycode.py --tp=2

The arguments are those of tools.speed.train_rank: delays in milliseconds, and what train.py would get.
"""

import sys

from data.errors import user_errors
from tools.child import kill_with_parent

if __name__ == "__main__":
    kill_with_parent()  # before the slow import; torchrun starts its workers in sessions of their own
    from tools.speed import train_rank

    with user_errors(Exception):  # one line, which Child.failure finds among the lines of torchrun
        train_rank([float(delay) for delay in sys.argv[1].split(",")], sys.argv[2:])
