"""shakespeare: nanoGPT's Shakespeare in GPT-2's tokens, token for token.

    python data/shakespeare/prepare.py                  # shakespeare_char's input.txt, or a download to it
    python data/shakespeare/prepare.py --input=my.txt   # your own text

The first 90 % of the characters train, the rest validate: 301,966 and 36,059 tokens, without an end-of-text.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from data.command import run
from data.shakespeare_char.text import prepare
from data.tokenizer import GPT2Tokenizer


def main():
    prepare(__doc__, HERE, lambda text: GPT2Tokenizer()).report()


if __name__ == "__main__":
    run(main)
