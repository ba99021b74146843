"""fineweb_edu: 10 billion tokens of educational web pages, the sample that llm.c and modded-nanogpt train on.

    python data/fineweb_edu/prepare.py --shards=10                   # the first billion tokens
    python data/fineweb_edu/prepare.py --input=hf:HuggingFaceFW/fineweb-edu:sample-100BT
    python data/fineweb_edu/prepare.py --input='fineweb/*.parquet'    # from local files

Needs pip install -e .[data]. Pages are streamed, and a hash of a page's number decides whether it validates. After an
interruption the same command continues behind the last full shard.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from data import corpus
from data.command import run


def main() -> None:
    corpus.main(__doc__, HERE, "hf:HuggingFaceFW/fineweb-edu:sample-10BT")


if __name__ == "__main__":
    run(main)
