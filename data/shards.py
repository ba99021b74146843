"""Describes and checks token files and data sets.

python -m data.shards PATH...                    # data sets' folders, or files of tokens
"""

from pathlib import Path

import numpy as np

from data.command import Parser, run
from data.dataset import CHANGED, MASK, N_MARKS, NOT_PREPARED, check_ids, find_shards, open_shard, read_meta
from data.errors import one_line, say
from data.files import SPLITS, check, display_path, sha256
from data.tokenizer import from_spec


def describe(path: Path, record: dict, meta: dict) -> str:
    """Reads and checks one file in full, and describes it in a line. ValueError as by `DataSet.split`."""
    limit = meta.get("vocab_size", 2**64)
    if path.name.startswith(tuple(split + MASK for split in SPLITS)):
        limit = N_MARKS
    shard = open_shard(path, record, limit)
    digest = sha256(path)
    check(digest == record.get("sha256", digest), path, CHANGED)
    tokens = shard.mapped()
    check_ids(path, int(tokens.max()), limit)
    documents = shard.documents or "unknown"
    if shard.documents is None and meta.get("eot") is not None:
        documents = np.count_nonzero(tokens == meta["eot"])
    recorded = "as in meta.json" if "sha256" in record else "not recorded"
    return (
        f"{display_path(path)}: {shard.kind}, {shard.dtype}, {len(shard):,} tokens, documents: {documents}, "
        f"largest id {tokens.max()}, SHA-256 {recorded}"
    )


def describe_all(path: Path) -> None:
    """Prints a line for one file, or for each of a data set's folder with the beginning of the text."""
    if path.is_file():
        print(describe(path, {}, {}))
        return
    meta = read_meta(path) or {}
    splits = [split + kind for kind in ("", MASK) for split in SPLITS]
    records = [record for split in splits for record in find_shards(path, meta, split)]
    check(records, path, NOT_PREPARED)
    for record in records:
        print(describe(path / record["name"], record, meta))
    if "tokenizer" in meta:
        first = open_shard(path / records[0]["name"], records[0], meta["vocab_size"])
        print(f"    begins: {from_spec(meta['tokenizer'], path).decode(first.mapped()[:100])!r}")


def main(arguments: list[str] | None = None) -> int:
    """Describes the files of all paths on stdout, and a problem of each on stderr. Returns 2 after a problem."""
    flags = Parser(__doc__)
    flags.add_argument("path", nargs="+", help="a data set's folder, or a file")
    code = 0
    for path in flags.parse_args(arguments).path:
        try:
            describe_all(Path(path))
        except BrokenPipeError:  # the reader of stdout has ended
            raise
        except (ValueError, OSError) as e:
            say(f"error: {one_line(e)}")
            code = 2
    return code


if __name__ == "__main__":
    run(main)
