"""openwebtext: an open copy of GPT-2's training text, 8 million pages, 9 billion tokens.

    python data/openwebtext/prepare.py --shards=10               # the first billion tokens
    python data/openwebtext/prepare.py --path='owt/*.parquet'    # from local files

Needs pip install -e .[data]. Pages are streamed, and a hash of a page's number decides whether it validates. After an
interruption the same command continues behind the last full shard. The main revision on the hub may still be a loading
script, which is refused. Then pass a revision with parquet files, such as --path=Skylion007/openwebtext@refs/pr/18.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process silently

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
