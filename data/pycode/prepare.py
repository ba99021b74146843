"""pycode: the source code of Python's standard library, which every machine has without a network.

    python data/pycode/prepare.py                    # about 12 MB of source into this folder, a few seconds
    python data/pycode/prepare.py --tokenizer=gpt2 --out=data/pycode_gpt2

Each file is one document, followed by end-of-text, in the order of the paths. Tests are left out. The split is by
document: files are tried in the order of a hash of their paths, and validate if they fit into 5 % of all bytes.
"""

import hashlib
import os
import platform
import sys
import sysconfig
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from data.command import Parser, out_folder, run
from data.errors import require
from data.tokenizer import build
from data.writer import ShardWriter

VALIDATES = 0.05  # fraction of the bytes
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
Sources = dict[str, bytes]  # a file's name in the data set -> its content


def find_sources(folder: Path) -> Sources:
    """All .py files below `folder` that are not empty, sorted by relative path, without the directories LEFT_OUT."""
    found = {}
    for parent, directories, files in os.walk(folder):
        directories[:] = [d for d in directories if d not in LEFT_OUT]
        for name in files:
            path = Path(parent, name)
            if path.suffix == ".py" and path.stat().st_size:
                found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return dict(sorted(found.items()))


def validation_set(sources: Sources) -> set[str]:
    """Chooses files that fit into VALIDATES of all bytes together, in the order of a hash of their names."""
    room = VALIDATES * sum(len(content) for content in sources.values())
    chosen = set()
    for name in sorted(sources, key=lambda name: hashlib.sha256(name.encode()).digest()):
        size = len(sources[name])
        if size <= room:
            chosen.add(name)
            room -= size
    return chosen


def main():
    parser = Parser(__doc__, HERE)
    parser.add_argument("--tokenizer", default="byte", help="byte, gpt2, bpe:N or hf:DIR (default byte)")
    args = parser.parse_args()
    folder = out_folder(args.out)
    library = Path(sysconfig.get_path("stdlib"))
    sources = find_sources(library)
    require(sources, f"{library} has no .py files (a Python without sources?); use another Python")
    validation = validation_set(sources)
    texts = {name: content.decode("utf-8", "surrogateescape") for name, content in sources.items()}  # keeps all bytes
    tokenizer = build(args.tokenizer, texts.values)
    with ShardWriter(folder, tokenizer) as out:
        for name, text in texts.items():
            split = "val" if name in validation else "train"
            ids = tokenizer.encode(text)
            out.add(split, ids, lost=tokenizer.lost(text, ids))
            out.add(split, tokenizer.end, documents=0)
    out.report(f"the library of Python {platform.python_version()}: {out.documents()} documents, ")


if __name__ == "__main__":
    run(main)
