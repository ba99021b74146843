"""openwebtext: an open copy of GPT-2's training text, 8 million pages, 9 billion tokens.

    python data/openwebtext/prepare.py --shards=10               # the first billion tokens
    python data/openwebtext/prepare.py --path='owt/*.parquet'    # from files that are here already

Needs pip install -e .[data]. Pages come as they are read, a page validates by a hash of its number. Interrupted, the
same command goes on after its last full shard. If the hub's main revision is still a loading script, which is refused,
another revision has the pages as parquet files: --path=Skylion007/openwebtext@refs/pr/18, when this was written.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends it without a word

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from data.command import run  # noqa: E402
from data.corpus import stream  # noqa: E402


def main() -> None:
    stream(__doc__, HERE, "Skylion007/openwebtext")


if __name__ == "__main__":
    run(main)
