"""fineweb_edu: 10 billion tokens of educational web pages, the sample that llm.c and modded-nanogpt train on.

    python data/fineweb_edu/prepare.py --shards=10                   # the first billion tokens
    python data/fineweb_edu/prepare.py --path=HuggingFaceFW/fineweb-edu:sample-100BT
    python data/fineweb_edu/prepare.py --path='fineweb/*.parquet'    # from files that are here already

Needs pip install -e .[data]. Pages come as they are read, a page validates by a hash of its number. Interrupted, the
same command goes on after its last full shard.
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
    stream(__doc__, HERE, "HuggingFaceFW/fineweb-edu:sample-10BT")


if __name__ == "__main__":
    run(main)
