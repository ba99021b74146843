"""shakespeare: nanoGPT's Shakespeare in GPT-2's tokens, token for token.

    python data/shakespeare/prepare.py                  # shakespeare_char's input.txt, else a download to there
    python data/shakespeare/prepare.py --input=my.txt   # any text of one's own, a file or an address

The first 90 % of the characters train, the rest validate: 301,966 and 36,059 tokens, without an end-of-text.
"""

import argparse
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback from the imports

from data.shakespeare_char.prepare import read_text  # noqa: E402
from data.shards import shown  # noqa: E402
from data.tokenizer import GPT2Tokenizer  # noqa: E402
from data.writer import ShardWriter  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input", default="", help="text file or its address (default: shakespeare_char's)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the shards (default: this one)")
    args = parser.parse_args()

    text, tokenizer = read_text(args.input), GPT2Tokenizer()
    cut = int(len(text) * 0.9)
    train, val = tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])
    with ShardWriter(args.out, tokenizer) as out:
        out.add("train", train)
        out.add("val", val)
    print(
        f"{len(train):,} train + {len(val):,} val tokens in {shown(args.out)}; "
        f"next: python train.py --dataset={'shakespeare' if args.out == HERE else args.out}"
    )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
