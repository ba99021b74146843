"""text: a data set of one's own files.

    python data/text/prepare.py --input='books/*.txt' --tokenizer=bpe:8192 --documents=paragraph --out=books
    python data/text/prepare.py --input=web.jsonl.zst --input=more --field=content     # into this folder

Patterns, files and folders may be given, of .txt (and every other name: UTF-8 text), .jsonl and .parquet, the first two
also as .gz and .zst. A document of a text is the file, a line or a paragraph, which blank lines end. It has at most
32 MB, and is followed by end-of-text. Without one, as in char, it keeps its separator: a line end after each document,
and a blank line after a paragraph.

Documents validate by a hash of their number, 0.005 of them unless --val_fraction says otherwise, so the split is the
same for every tokenizer. A single text, that is one file which is one document, is cut in two instead, as nanoGPT does:
the first 0.9 trains and the rest validates, from the line on that begins there or a little earlier.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends it without a word

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from data import corpus  # noqa: E402
from data.command import run  # noqa: E402
from data.sources import find_files  # noqa: E402


def main() -> None:
    flags = corpus.parser(__doc__, HERE)
    flags.add_argument("--input", action="append", required=True, help="file, pattern or folder; may be repeated")
    flags.add_argument("--tokenizer", default="gpt2", help="char, byte, gpt2 or bpe:N (default gpt2)")
    kinds = ("file", "line", "paragraph")
    flags.add_argument("--documents", choices=kinds, default="file", help="what a text holds (default file)")
    args = flags.parse_args()
    corpus.prepare(args, find_files(args.input), args.documents)


if __name__ == "__main__":
    run(main)
