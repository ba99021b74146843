"""shakespeare: nanoGPT's Shakespeare in GPT-2's tokens, token for token.

    python data/shakespeare/prepare.py                  # shakespeare_char's input.txt, or a download to it
    python data/shakespeare/prepare.py --input=my.txt   # your own text, a file or a URL

The first 90 % of the characters train, the rest validate: 301,966 and 36,059 tokens, without an end-of-text.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from data.command import Parser, out_folder, run
from data.errors import require
from data.shakespeare_char.text import read_text
from data.tokenizer import GPT2Tokenizer
from data.writer import ShardWriter


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--input", help="text file or its URL (default: the one of shakespeare_char)")
    parser.add_argument("--out", default=HERE, help="NAME (data/NAME) or a path with a / (default: this folder)")
    args = parser.parse_args()

    folder, text, tokenizer = out_folder(args.out), read_text(args.input), GPT2Tokenizer()
    cut = int(len(text) * 0.9)
    train, val = tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])
    require(len(val) > 1, "the last tenth of the text is one token, and a prediction needs two; pass a longer text")
    with ShardWriter(folder, tokenizer) as out:
        out.add("train", train)
        out.add("val", val)
    out.report()


if __name__ == "__main__":
    run(main)
