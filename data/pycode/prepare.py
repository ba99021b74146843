"""pycode: the source code of Python's standard library, which every machine has without a network.

    python data/pycode/prepare.py                    # about 12 MB of source into this folder, a few seconds
    python data/pycode/prepare.py --tokenizer=gpt2 --out=data/pycode_gpt2
    python data/pycode/prepare.py --package=torch --package=sympy --out=data/pycode_more    # about 70 MB

Each file is one document, followed by end-of-text, in the order of the paths. Tests are left out. The split is by
document: files are tried in the order of a hash of their paths, and validate if they fit into 5 % of all bytes.
--package adds an installed package, or a folder of unpacked wheels, and prints its licence. Of files with equal
contents, a package keeps the first.
"""

import hashlib
import importlib.util
import os
import platform
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from data.command import Parser, out_folder, run
from data.errors import require
from data.files import user_path
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


def add_package(sources: Sources, package: str) -> str:
    """Adds the files of an installed package, or of a folder. Returns its name with its licence."""
    installed = "/" not in package
    if installed:
        spec = importlib.util.find_spec(package)
        found = spec is not None and spec.submodule_search_locations
        require(found, f"package={package}: no installed package; install it, or give a folder with a /")
        folder = Path(found[0])
    else:
        folder = user_path(package)
    seen = {hashlib.sha256(content).digest() for content in sources.values()}
    before = len(sources)
    for name, content in find_sources(folder).items():
        key = hashlib.sha256(content).digest()
        if key not in seen:
            seen.add(key)
            sources[f"{folder.name}/{name}"] = content
    require(len(sources) > before, f"package={package}: no .py files that are new; check the name")
    if installed:
        distributions = [metadata.distribution(name) for name in metadata.packages_distributions().get(package, [])]
    else:
        distributions = [*metadata.distributions(path=[str(folder)])]
    licences = {licence_of(each) for each in distributions} or {"licence unknown"}
    return f"{folder.name} ({', '.join(sorted(licences))})"


def licence_of(distribution: metadata.Distribution) -> str:
    """The licence that a package's metadata name, in one line."""
    stated = distribution.metadata.get("License-Expression") or distribution.metadata.get("License") or ""
    classified = [c for c in distribution.metadata.get_all("Classifier", []) if c.startswith("License")]
    lines = [stated, *(c.rpartition(" :: ")[2] for c in classified), "licence unknown"]
    return next(line for line in lines if 0 < len(line) < 120)


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
    parser.add_argument("--package", action="append", default=[], help="an installed package, or a folder with a /")
    args = parser.parse_args()
    folder = out_folder(args.out)
    library = Path(sysconfig.get_path("stdlib"))
    sources = find_sources(library)
    require(sources, f"{library} has no .py files (a Python without sources?); use another Python")
    packages = [add_package(sources, package) for package in args.package]
    validation = validation_set(sources)
    texts = {name: content.decode("utf-8", "surrogateescape") for name, content in sources.items()}  # keeps all bytes
    tokenizer = build(args.tokenizer, texts.values)
    with ShardWriter(folder, tokenizer) as out:
        for name, text in texts.items():
            split = "val" if name in validation else "train"
            ids = tokenizer.encode(text)
            out.add(split, ids, lost=tokenizer.lost(text, ids))
            out.add(split, tokenizer.end, documents=0)
    what = ", ".join([f"the library of Python {platform.python_version()}", *packages])
    out.report(f"{what}: {out.documents()} documents, ")


if __name__ == "__main__":
    run(main)
