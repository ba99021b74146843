"""text: a data set of one's own files.

    python data/text/prepare.py --input='books/*.txt' --tokenizer=bpe:8192 --documents=paragraph --out=books
    python data/text/prepare.py --input=web.jsonl.zst --input=more --field=content     # into this folder

Patterns, files and folders may be given, of .txt (and every other name: UTF-8 text), .jsonl and .parquet, the first two
also as .gz and .zst. A document of a text is the file, a line or a paragraph, which blank lines end: without its line
end, and followed by end-of-text where the tokenizer has one (char has none). It has at most 32 MB.

Documents validate by a hash of their number, so the split is the same for every tokenizer.
"""

import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback from the imports

from data import corpus  # noqa: E402
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
    corpus.run(main)
