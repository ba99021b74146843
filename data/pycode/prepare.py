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


def find_sources(folder: Path) -> list[Path]:
    """All .py files below `folder` that are not empty, sorted by relative path, without the directories LEFT_OUT."""
    found = []
    for parent, directories, files in os.walk(folder):
        directories[:] = [d for d in directories if d not in LEFT_OUT]
        found += [Path(parent, f) for f in files if f.endswith(".py")]
    return sorted((p for p in found if p.stat().st_size), key=lambda p: p.relative_to(folder).as_posix())


def validation_set(paths: list[Path], folder: Path) -> set[Path]:
    """Chooses files that fit into VALIDATES of all bytes together, in the order of a hash of their relative paths."""
    sizes = {p: p.stat().st_size for p in paths}
    room = VALIDATES * sum(sizes.values())
    chosen = set()
    for path in sorted(paths, key=lambda p: hashlib.sha256(p.relative_to(folder).as_posix().encode()).digest()):
        if sizes[path] <= room:
            chosen.add(path)
            room -= sizes[path]
    return chosen


def main() -> None:
    parser = Parser(__doc__, HERE)
    parser.add_argument("--tokenizer", default="byte", help="byte, gpt2, bpe:N or hf:DIR (default byte)")
    args = parser.parse_args()
    folder = out_folder(args.out)
    library = Path(sysconfig.get_path("stdlib"))
    paths = find_sources(library)
    require(paths, f"{library} has no .py files (a Python without sources?); use another Python")
    validation = validation_set(paths, library)
    texts = {path: path.read_bytes().decode("utf-8", "surrogateescape") for path in paths}  # keeps all bytes
    tokenizer = build(args.tokenizer, texts.values)
    with ShardWriter(folder, tokenizer) as out:
        for path, text in texts.items():
            split = "val" if path in validation else "train"
            out.add(split, tokenizer.encode(text))
            out.add(split, tokenizer.end, documents=0)
    out.report(f"the library of Python {platform.python_version()}: {out.documents()} documents, ")


if __name__ == "__main__":
    run(main)
