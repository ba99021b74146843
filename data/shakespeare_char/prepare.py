"""shakespeare_char: nanoGPT's character-level Shakespeare, token for token.

    python data/shakespeare_char/prepare.py                  # input.txt in this folder, or a download
    python data/shakespeare_char/prepare.py --input=my.txt   # your own text, a file or a URL

The first 90 % of the characters train, the rest validate: 1,003,854 and 111,540 tokens, 65 different characters.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from data.command import Parser, out_folder, run
from data.shakespeare_char.text import read_text
from data.tokenizer import CharTokenizer
from data.writer import ShardWriter


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--input", help="text file or its URL (default: input.txt in this folder)")
    parser.add_argument("--out", default=HERE, help="NAME (data/NAME) or a path with a / (default: this folder)")
    args = parser.parse_args()

    folder, text = out_folder(args.out), read_text(args.input)
    tokenizer = CharTokenizer(text)
    tokens = tokenizer.encode(text)
    cut = int(len(tokens) * 0.9)
    with ShardWriter(folder, tokenizer) as out:
        out.add("train", tokens[:cut])
        out.add("val", tokens[cut:])
    out.report(f"{tokenizer.vocab_size} characters, ")


if __name__ == "__main__":
    run(main)
