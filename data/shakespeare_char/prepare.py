"""shakespeare_char: nanoGPT's character-level Shakespeare, token for token.

    python data/shakespeare_char/prepare.py                  # input.txt in this folder, or a download
    python data/shakespeare_char/prepare.py --input=my.txt   # your own text, a file or a URL

The first 90 % of the characters train, the rest validate: 1,003,854 and 111,540 tokens, 65 different characters.
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
from data.tokenizer import CharTokenizer  # noqa: E402
from data.writer import ShardWriter  # noqa: E402


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--input", help="text file or its URL (default: input.txt in this folder)")
    parser.add_argument("--out", default=str(HERE), help="NAME (data/NAME) or a path with a / (default: this folder)")
    args = parser.parse_args()

    folder, text = out_folder(args.out), read_text(args.input)
    tokenizer = CharTokenizer(text)
    tokens = tokenizer.encode(text)
    cut = int(len(tokens) * 0.9)
    with ShardWriter(folder, tokenizer) as out:
        out.add("train", tokens[:cut])
        out.add("val", tokens[cut:])
    print(
        f"{tokenizer.vocab_size} characters, "
        f"{cut:,} train + {len(tokens) - cut:,} val tokens in {display_path(folder)}; "
        f"next: {next_command(folder, tokenizer.vocab_size, [cut, len(tokens) - cut])}"
    )


if __name__ == "__main__":
    run(main)
