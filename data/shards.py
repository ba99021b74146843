"""Describes and checks token files and data sets.

python -m data.shards PATH...                    # files, folders, or Megatron's prefixes of a .bin and .idx
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process silently

from pathlib import Path

import numpy as np  # noqa: E402

from data.command import Parser, run  # noqa: E402
from data.dataset import CHANGED, TOKENS_CHECKED, find_shards, open_shard, read_meta  # noqa: E402
from data.errors import one_line, say  # noqa: E402
from data.files import FORMATS, SPLITS, display_path, header, problem, read_index, sha256  # noqa: E402
from data.tokenizer import from_spec  # noqa: E402


def describe(folder: Path, record: dict, meta: dict | None) -> list[str]:
    """Reads and checks one file in full, and describes it in lines for people. ValueError as by `DataSet.split`."""
    path, meta = folder / record["name"], meta or {}
    record = {key: x for key, x in record.items() if key != "max_token"}  # so that the file itself is read
    shard, eot = open_shard(folder, record, meta.get("vocab_size", 2**64)), meta.get("eot")
    if record.get("sha256") and sha256(path) != record["sha256"]:
        raise problem(folder, path.name, CHANGED)
    with open(path, "rb") as f:
        magic, version, _ = header(f.read(12))
    kind = f"shard {magic} of version {version}" if magic in FORMATS else "no header"
    parts = (shard[i : i + TOKENS_CHECKED] for i in range(0, len(shard), TOKENS_CHECKED))
    documents = "an unknown number of" if eot is None else f"{sum(np.count_nonzero(part == eot) for part in parts):,}"
    if path.with_suffix(".idx").exists():
        kind, documents = "Megatron's, version 1", f"{len(read_index(path.with_suffix('.idx'))[2]) - 1:,}"
    checksum = "as in meta.json" if record.get("sha256") else "not recorded"
    lines = [
        f"{display_path(path)}: {kind}, {shard.dtype}, {len(shard):,} tokens, {documents} documents, "
        f"largest id {shard.max()}, SHA-256 {checksum}"
    ]
    if "tokenizer" in meta:
        first = shard[:4096].tolist()
        while first and first[0] == eot:
            first.pop(0)
        first = first[: first.index(eot)] if eot in first else first
        try:
            text = repr(from_spec(meta["tokenizer"], folder).decode(first)[:300])
        except ValueError as e:  # such as no network for the tokenizer's table; the token file is good
            text = f"cannot be decoded ({e})"
        lines.append(f"    first document: {text}")
    return lines


def inspect(path: Path) -> list[tuple[Path, dict, dict | None]]:
    """The arguments of `describe` for each file of a folder, for one file, or for Megatron's prefix or .idx."""
    folder, name = (path, "") if path.is_dir() else (path.parent, path.name)
    if name and not path.exists() or path.suffix == ".idx":
        name = f"{path.stem if path.suffix == '.idx' else name}.bin"
    if not (folder / name).exists():
        raise ValueError(
            f"{display_path(path)} does not exist; give a file, a data set's folder, or the prefix of a .bin and .idx"
        )
    meta = read_meta(folder)
    records = [record for split in SPLITS for record in find_shards(folder, meta, split)]
    if name:
        records = [record for record in records if record["name"] == name] or [{"name": name}]
    if not records:
        raise problem(folder, "", "is not prepared (it has no train_000000.bin and no train.bin)")
    return [(folder, record, meta) for record in records]


def main(arguments: list[str] | None = None) -> int:
    """Describes the files of all paths on stdout, and each problem in a line on stderr. Returns 2 after a problem."""
    flags = Parser(__doc__)
    flags.add_argument("path", nargs="*", help="a file, a data set's folder, or the prefix of a .bin and .idx")
    paths, files = flags.parse_args(arguments).path, []
    problems = [] if paths else [ValueError("give files or folders, as in python -m data.shards data/pycode")]
    for path in paths:
        try:
            files += inspect(Path(path))
        except (ValueError, OSError) as e:
            problems.append(e)
    for file in files:
        try:
            lines = describe(*file)
        except (ValueError, OSError) as e:
            problems.append(e)
        else:
            print(*lines, sep="\n")
    for e in problems:
        say(f"error: {one_line(e)}")
    return 2 if problems else 0


if __name__ == "__main__":
    run(main)
