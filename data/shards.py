"""Describes and checks token files and data sets.

python -m data.shards PATH...                    # files, folders, or Megatron's prefixes of a .bin and .idx
"""

from pathlib import Path

import numpy as np

from data.command import Parser, run
from data.dataset import CHANGED, MASK, N_MARKS, NOT_PREPARED, TOKENS_CHECKED, find_shards, open_shard, read_meta
from data.errors import one_line, require, say
from data.files import SPLITS, check, display_path, sha256
from data.tokenizer import from_spec


def describe(path: Path, record: dict, meta: dict | None) -> list[str]:
    """Reads and checks one file in full, and describes it in lines for people. ValueError as by `DataSet.split`."""
    meta, recorded = meta or {}, record.get("sha256")
    record = {key: x for key, x in record.items() if key != "max_token"}  # so that the file itself is read
    shard, eot = open_shard(path, record, meta.get("vocab_size", 2**64)), meta.get("eot")
    check(not recorded or sha256(path) == recorded, path, CHANGED)
    tokens, documents = shard.mapped(), shard.documents
    if documents is None and eot is not None:
        parts = (tokens[i : i + TOKENS_CHECKED] for i in range(0, len(tokens), TOKENS_CHECKED))
        documents = sum(np.count_nonzero(part == eot) for part in parts)
    documents = "an unknown number of" if documents is None else f"{documents:,}"
    lines = [
        f"{display_path(path)}: {shard.kind}, {shard.dtype}, {len(shard):,} tokens, {documents} documents, "
        f"largest id {tokens.max()}, SHA-256 {'as in meta.json' if recorded else 'not recorded'}"
    ]
    if "tokenizer" in meta:
        first = tokens[:4096].tolist()
        while first and first[0] == eot:
            first.pop(0)
        first = first[: first.index(eot)] if eot in first else first
        try:
            text = repr(from_spec(meta["tokenizer"], path.parent).decode(first)[:300])
        except ValueError as e:  # such as no network for the tokenizer's table; the token file is good
            text = f"cannot be decoded ({e})"
        lines.append(f"    first document: {text}")
    return lines


def inspect(path: Path) -> list[tuple[Path, dict, dict | None]]:
    """The arguments of `describe` for each file of a folder, for one file, or for Megatron's prefix or .idx."""
    folder, name = (path, "") if path.is_dir() else (path.parent, path.name)
    if name and not path.exists() or path.suffix == ".idx":
        name = f"{path.stem if path.suffix == '.idx' else name}.bin"
    remedy = "give a file, a data set's folder, or the prefix of a .bin and .idx"
    require((folder / name).exists(), f"{display_path(path)} does not exist; {remedy}")
    meta = read_meta(folder)
    splits = [split + kind for kind in ("", MASK) for split in SPLITS]
    records = [record for split in splits for record in find_shards(folder, meta, split)]
    if name:
        records = [record for record in records if record["name"] == name] or [{"name": name}]
    check(records, folder, NOT_PREPARED)
    masks, of_mask = tuple(split + MASK for split in SPLITS), {"vocab_size": N_MARKS}
    return [(folder / r["name"], r, of_mask if r["name"].startswith(masks) else meta) for r in records]


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
