"""openwebtext: an open copy of GPT-2's training text, 8 million pages, 9 billion tokens.

    python data/openwebtext/prepare.py --shards=10               # the first billion tokens
    python data/openwebtext/prepare.py --input='owt/*.parquet'    # from local files

Needs pip install -e .[data]. Pages are streamed, and a hash of a page's number decides whether it validates. After an
interruption the same command continues behind the last full shard. The main revision on the hub may still be a loading
script, which is refused. Then pass a revision with parquet files, such as --input=hf:Skylion007/openwebtext@refs/pr/18.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from data import corpus
from data.command import run


def main():
    corpus.main(__doc__, HERE, "hf:Skylion007/openwebtext")


if __name__ == "__main__":
    run(main)
