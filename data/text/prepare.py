"""text: a data set from your own files, or from the hub.

    python data/text/prepare.py --input='books/*.txt' --tokenizer=bpe:8192 --documents=paragraph --out=books
    python data/text/prepare.py --input=web.jsonl.zst --input=more --field=content     # into this folder
    python data/text/prepare.py --input=sft.jsonl --pairs=prompt,completion --tokenizer=byte --out=sft

--input takes files, folders, patterns, and data sets of the hub as hf:OWNER/NAME. A file named .jsonl or .parquet is
read as such, any other as UTF-8 text; texts and .jsonl may be compressed as .gz or .zst. A document of a text is the
whole file, a line, a paragraph, which ends at a blank line, or what stands between two of --separator. A document has
at most 32 MB, and end-of-text follows it. The tokenizer char has no end-of-text: there each line keeps its line end,
and each paragraph its blank line.

--pairs prepares pairs, of whose texts a model learns the targets alone: translations, prompts with completions, chats.
Its value names the fields of the source and of the target, or the one field of a chat, a list of messages with role and
content (docs/data.md).

A hash of a document's number decides whether it validates, so the split is the same for every tokenizer. A single text,
one file that is one document, is cut in two instead, where a line begins near the start of its last tenth.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from data import corpus
from data.command import run


def main():
    corpus.main(__doc__, HERE)


if __name__ == "__main__":
    run(main)
