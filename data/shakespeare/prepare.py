"""shakespeare: nanoGPT's Shakespeare in GPT-2's tokens, token for token.

    python data/shakespeare/prepare.py                  # shakespeare_char's input.txt, or a download to it
    python data/shakespeare/prepare.py --input=my.txt   # your own text, a file or a URL

The first 90 % of the characters train, the rest validate: 301,966 and 36,059 tokens, without an end-of-text.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process silently

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from data.command import Parser, next_command, out_folder, run  # noqa: E402
from data.files import display_path  # noqa: E402
from data.shakespeare_char.text import read_text  # noqa: E402
from data.tokenizer import GPT2Tokenizer  # noqa: E402
from data.writer import ShardWriter  # noqa: E402


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--input", help="text file or its URL (default: the one of shakespeare_char)")
    parser.add_argument("--out", default=str(HERE), help="NAME (data/NAME) or a path with a / (default: this folder)")
    args = parser.parse_args()

    folder, text, tokenizer = out_folder(args.out), read_text(args.input), GPT2Tokenizer()
    cut = int(len(text) * 0.9)
    train, val = tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])
    if len(val) < 2:
        raise ValueError("the last tenth of the text is one token, and a prediction needs two; pass a longer text")
    with ShardWriter(folder, tokenizer) as out:
        out.add("train", train)
        out.add("val", val)
    print(
        f"{len(train):,} train + {len(val):,} val tokens in {display_path(folder)}; "
        f"next: {next_command(folder, tokenizer.vocab_size, [len(train), len(val)])}"
    )


if __name__ == "__main__":
    run(main)
