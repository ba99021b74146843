"""shakespeare_char: nanoGPT's character-level Shakespeare, token for token.

    python data/shakespeare_char/prepare.py                  # input.txt in this folder, or a download
    python data/shakespeare_char/prepare.py --input=my.txt   # your own text

The first 90 % of the characters train, the rest validate: 1,003,854 and 111,540 tokens, 65 different characters.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from data.command import run
from data.shakespeare_char.text import prepare
from data.tokenizer import CharTokenizer


def main():
    out = prepare(__doc__, HERE, CharTokenizer)
    out.report(f"{out.tokenizer.vocab_size} characters, ")


if __name__ == "__main__":
    run(main)
