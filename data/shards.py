"""Token shards: what they hold, and how a split is read as one long array. writer.py writes them.

    data = open_data("pycode")                       # data/pycode, or any path; "a:0.7,b:0.3" mixes two by weight
    stream = data.split("train")                     # len(stream); stream.read(starts, buffer)

What a file of tokens may be stands in files.py. Beside the files lies meta.json:

    {"tokenizer": spec, "tokenizer_hash": sha256, "vocab_size": V, "eot": id or null,
     "splits": {"train": {"tokens": N, "documents": D,
                          "shards": [{"name", "tokens", "sha256", "max_token"}, ...]}, "val": ...}}

Only `vocab_size` is required: {"vocab_size": 50257} beside shards or beside nanoGPT's headerless train.bin and val.bin
makes them a data set, and so beside Megatron's pairs (train.bin and train.idx, or any x_train_text_document.bin).
nanoGPT's meta.pkl is never opened, because unpickling runs whatever code the file holds.

    python -m data.shards PATH...                    # look into files or data sets, and check them
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends it without a word

import difflib
import math
import os
import re
import resource
import weakref
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat
from pathlib import Path

import numpy as np  # noqa: E402

from data.command import Parser, run, say, told  # noqa: E402
from data.files import (  # noqa: E402
    FORMATS,
    SPLITS,
    header,
    map_file,
    problem,
    read_index,
    read_json,
    regular,
    sha256,
    shown,
    unreadable,
)  # fmt: skip
from data.tokenizer import Tokenizer, from_spec  # noqa: E402

MIXING = 10_000  # the shares of a mixture are multiples of one in so many
LOOKED_AT = 2**24  # tokens of files of unknown ids
MOST_IDS = 2**31 - 1
MOVING = {"half prepared": True}  # what meta.json holds while shards are moved into place


# ---------------------------------------------------------------------------------------------------------- reading


class Shard:
    """The tokens of a mapped file, read by position: shard[a:b] is (b - a,) of the file's own type.

    Through the map, a window of 2 KB would bring in all that the system reads ahead, up to megabytes, would stay in the
    process's resident memory, and would end the process without a word where the file has been cut since. ValueError
    says so here.
    """

    def __init__(self, mapped: np.memmap):
        self.path, self.dtype, self.length = mapped.filename, mapped.dtype, len(mapped)
        self.offset = mapped.offset  # in bytes
        self.file = regular(self.path)
        weakref.finalize(self, os.close, self.file)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        size = (part.stop - part.start) * self.dtype.itemsize
        content = os.pread(self.file, size, self.offset + part.start * self.dtype.itemsize)
        if len(content) < size:
            fact = f"was cut: tokens {part.start} to {part.stop} are not there any more"
            raise problem(self.path.parent, self.path.name, fact)
        return np.frombuffer(content, self.dtype)


class TokenStream:
    """One split as one long array of ids below `vocab_size`, over its shards; messages call it `name`.

    `sources` are (name, tokens, weight) of the data sets that follow one another in it; mostly there is one.
    """

    def __init__(self, name: str, shards: list[Shard], vocab_size: int, sources: list[tuple] | None = None):
        self.name, self.shards, self.vocab_size = name, shards, vocab_size
        self.starts = np.cumsum([0, *map(len, shards)])  # of each shard, and at the end the number of tokens
        self.sources = sources or [(name, len(self), 1)]
        dtypes = {shard.dtype for shard in shards}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None
        if self.dtype:
            self.files = np.array([shard.file for shard in shards])
            self.zeros = np.array([shard.offset for shard in shards]) - self.starts[:-1] * self.dtype.itemsize

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, starts: np.ndarray, out: np.ndarray) -> None:
        """Fill row i of `out`, int64 (B, N), with tokens starts[i] .. starts[i] + N. IndexError outside of [0, len)."""
        size = out.shape[1]
        if self.dtype and starts.min() >= 0:  # no Python code per window, where all lie within their shards
            shard = np.searchsorted(self.starts[1:-1], starts, "right")
            places = (self.zeros[shard] + starts * self.dtype.itemsize).tolist()  # in the file, in bytes
            contents = map(os.pread, self.files[shard].tolist(), repeat(size * self.dtype.itemsize), places)
            content = b"".join(contents)
            if len(content) == out.size * self.dtype.itemsize:
                out[...] = np.frombuffer(content, self.dtype).reshape(out.shape)
                return
        for start, row in zip(starts.tolist(), out, strict=True):
            self._read_window(start, row)

    def _read_window(self, start: int, out: np.ndarray) -> None:
        if not 0 <= start <= start + len(out) <= len(self):
            raise IndexError(f"{self.name} has {len(self)} tokens; cannot read {len(out)} from {start}")
        i, done = int(np.searchsorted(self.starts, start, "right")) - 1, 0
        while done < len(out):
            offset = start + done - int(self.starts[i])
            part = self.shards[i][offset : min(offset + len(out) - done, len(self.shards[i]))]
            out[done : done + len(part)] = part
            done += len(part)
            i += 1


@dataclass(frozen=True)
class DataSet:
    """A prepared folder. `vocab_size` is what a model needs (the flag, where it is larger than the data's own)."""

    folder: Path
    meta: dict | None
    tokenizer: Tokenizer | None
    vocab_size: int
    eot: int | None
    verify: bool

    def split(self, name: str) -> TokenStream:
        """The tokens of "train" or "val". Sizes and largest token ids are always checked, checksums with `verify`.

        The largest id is the one that meta.json recorded when the shard was written; of files without such a record
        the first tokens are looked at, LOOKED_AT in all. A wrong id elsewhere, or in a shard changed since, is found by
        `verify` or when a batch reads it. Under torchrun the ranks share the checksums. ValueError names the file, the
        fact and the remedy.
        """
        records = _find_shards(self.folder, self.meta, name)
        if not records:
            raise problem(self.folder, "", f"has no split {name} (no {name}_000000.bin, no {name}.bin)")
        limit = self.meta["vocab_size"] if self.meta else self.vocab_size
        shards, look_at = [], -(-LOOKED_AT // len(records))
        rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        _allow_files()
        for i, record in enumerate(records):
            try:
                shards.append(Shard(_open_shard(self.folder, record, limit, look_at)))
            except OSError as e:
                raise unreadable(self.folder, record["name"], e) from e
            if self.verify and not record.get("sha256"):
                fact = "cannot be verified, because no meta.json records its SHA-256"
                raise problem(self.folder, record["name"], fact, "pass --verify_data=False")
            if self.verify and i % ranks == rank and not _unchanged(self.folder, record):
                raise problem(self.folder, record["name"], CHANGED)
        return TokenStream(f"{shown(self.folder)} {name}", shards, limit)


@dataclass(frozen=True)
class Mixture(DataSet):
    """Data sets that share tokenizer, vocabulary and end-of-text; the first stands for what is common to all."""

    sources: dict[str, tuple[DataSet, int]]  # name as given: data set, weight

    def split(self, name: str) -> TokenStream:
        """The tokens of all sources, one after the other."""
        streams = {source: data.split(name) for source, (data, _) in self.sources.items()}
        return TokenStream(
            " + ".join(stream.name for stream in streams.values()),
            [shard for stream in streams.values() for shard in stream.shards],
            min(stream.vocab_size for stream in streams.values()),
            [(source, len(stream), self.sources[source][1]) for source, stream in streams.items()],
        )


def open_data(name: str | Path, root: str | Path = "data", vocab_size: int = 0, verify: bool = False) -> DataSet:
    """The data set `name`: a folder under `root`, or a path; or several as `a:0.7,b:0.3`, to be mixed by these weights.

    `vocab_size` 0 takes the vocabulary from meta.json; a number serves data without one, and may be larger than the
    data's (a padded embedding), never smaller. `verify` makes `split` check every checksum. ValueError: the data set is
    missing (names the nearest) or not prepared (names the command), its meta.json is damaged, its vocabulary unknown.
    """
    folder = Path(root) / name
    if not folder.is_dir():
        folder = Path(os.path.expanduser(name))
    if not folder.is_dir() and re.search("[,:]", str(name)):
        return _open_mixture(str(name), root, vocab_size, verify)
    if not folder.is_dir():
        marks = ("prepare.py", "meta.json", "train.bin")  # those with a script, and one's own that are prepared
        known = sorted({p.parent.name for mark in marks for p in Path(root).glob(f"*/{mark}")})
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known) or 'none'}"
        raise ValueError(f"there is no data set {str(name)!r} in {shown(Path(root))} and no such folder; {hint}")
    meta = _read_meta(folder)
    if not any(_find_shards(folder, meta, split) for split in SPLITS):
        raise problem(folder, "", "is not prepared (it has no train_000000.bin and no train.bin)")
    own = meta["vocab_size"] if meta else 0
    if not own and not vocab_size:
        fact = "has no meta.json, so its vocabulary is unknown (a meta.pkl is never unpickled)"
        write = f"echo '{{\"vocab_size\": N}}' > {shown(folder / 'meta.json')}"
        raise problem(folder, "", fact, f"pass --vocab_size=N, or {write}")
    if 0 < vocab_size < own:
        fact = f"has a vocabulary of {own}, more than vocab_size={vocab_size}"
        raise problem(folder, "", fact, f"pass {own} or more")
    tokenizer = from_spec(meta["tokenizer"], folder) if meta and "tokenizer" in meta else None
    if tokenizer and (tokenizer.hash, tokenizer.vocab_size) != (meta.get("tokenizer_hash", tokenizer.hash), own):
        raise problem(folder, "meta.json", "has a tokenizer of another hash or vocabulary size than it records")
    return DataSet(folder, meta, tokenizer, max(own, vocab_size), meta.get("eot") if meta else None, verify)


def _open_mixture(name: str, root: str | Path, vocab_size: int, verify: bool) -> Mixture:
    """ValueError: a weight is missing or not positive, a source stands twice, two do not share their vocabulary."""
    sources, weights = [], []
    for part in name.split(","):
        match = re.fullmatch(r"([^:]+):(\d+\.?\d*|\.\d+)", part.strip())
        fact = "" if match and float(match[2]) > 0 else "is no name:weight with a positive number"
        if not fact and match[1] in sources:
            fact = "stands twice"
        if fact:
            part = repr(part.strip())
            raise ValueError(f"dataset={name!r}: {part} {fact}; write it like a:0.7,b:0.3, or give one folder")
        sources.append(match[1])
        weights.append(Fraction(match[2]))
    opened = [open_data(source, root, vocab_size, verify) for source in sources]
    first = opened[0]
    for source, data in zip(sources, opened, strict=True):
        kinds = [(d.tokenizer and d.tokenizer.hash, d.meta and d.meta["vocab_size"], d.eot) for d in (first, data)]
        for what, one, other in zip(("tokenizer", "vocabulary size", "end-of-text id"), *kinds, strict=True):
            if one != other:
                raise ValueError(
                    f"dataset={name!r}: {sources[0]} and {source} cannot be mixed, because their meta.json differ in "
                    f"the {what} ({one} and {other}); prepare both with one tokenizer"
                )
    return Mixture(**vars(first), sources=dict(zip(sources, zip(opened, _integers(weights), strict=True), strict=True)))


def _integers(weights: list[Fraction]) -> list[int]:
    """The smallest integers in the same ratio; if they add up to more than MIXING, the shares are rounded to multiples
    of 1 / MIXING first, but never to 0."""
    if sum(_reduced(weights)) > MIXING:
        weights = [Fraction(max(1, round(MIXING * w / sum(weights)))) for w in weights]
    return _reduced(weights)


def _reduced(weights: list[Fraction]) -> list[int]:
    whole = [int(w * math.lcm(*(w.denominator for w in weights))) for w in weights]
    return [w // math.gcd(*whole) for w in whole]


def _read_meta(folder: Path) -> dict | None:
    path = folder / "meta.json"
    if not path.exists():
        return None
    try:
        meta = read_json(path)
        if meta == MOVING:
            raise ValueError("a preparation was cut off while it moved its files into place")
        size, eot, splits = meta["vocab_size"], meta.get("eot"), meta.get("splits", {})
        shards = [shard for split in splits.values() for shard in split["shards"]]
        wrong = {
            f"a vocab_size that is no number from 1 to {MOST_IDS}": not _is_count(size, 1),
            "an eot that is no id below its vocab_size": eot is not None and not (_is_count(eot) and eot < size),
            "a shard whose name is none of a file": not all(_is_name(shard["name"]) for shard in shards),
            "a shard whose tokens or max_token is no count": not all(
                _is_count(s["tokens"], 0, 2**63) and _is_count(s.get("max_token", 0), 0, 2**63) for s in shards
            ),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise problem(folder, "meta.json", f"cannot be used ({type(e).__name__}: {e})") from e
    for fact in [fact for fact, found in wrong.items() if found]:
        raise problem(folder, "meta.json", f"holds {fact}")
    return meta


def _is_count(x, least: int = 0, most: int = MOST_IDS) -> bool:
    return type(x) is int and least <= x <= most


def _is_name(name) -> bool:
    """Whether a file in the folder may have this name; no other place is read."""
    return type(name) is str and name.isprintable() and name not in ("", ".", "..") and "/" not in name


def _find_shards(folder: Path, meta: dict | None, split: str) -> list[dict]:
    """meta.json's records of a split's shards; without them the files, by name: shards (a prefix as in
    fineweb_train_000001.bin is fine), or else train.bin (nanoGPT's or Megatron's), or else Megatron's longer names.
    """
    if meta and "splits" in meta:
        return meta["splits"].get(split, {"shards": []})["shards"]
    files = sorted(p.name for p in folder.iterdir())
    pairs = [n for n in files if n.endswith(".bin") and f"{n[:-4]}.idx" in files]
    names = [n for n in files if n not in pairs and re.search(rf"(^|_){split}_\d+\.bin$", n)]
    names = names or [n for n in files if n == f"{split}.bin"]
    return [{"name": n} for n in names or pairs if n in names or re.search(rf"(^|_){split}(_|\.bin$)", n)]


CHANGED = "was changed: its SHA-256 is not the one in meta.json"


def _unchanged(folder: Path, record: dict) -> bool:
    return sha256(folder / record["name"]) == record["sha256"]


def _open_shard(folder: Path, record: dict, limit: int, look_at: int | None = None) -> np.memmap:
    """The tokens of one file, memory-mapped; its size is what meta.json says, and the ids are in [0, limit): the
    largest on record, or else the first `look_at`, None = all."""
    name = record["name"]
    shard = map_file(folder, name)
    tokens, largest = record.get("tokens"), record.get("max_token")
    if tokens not in (None, len(shard)):
        raise problem(folder, name, f"holds {len(shard)} tokens, but meta.json says {tokens}")
    if shard.dtype.kind == "i" and (smallest := int(shard[:look_at].min())) < 0:
        raise problem(folder, name, f"holds token id {smallest}, which is negative")
    if limit <= np.iinfo(shard.dtype).max:
        largest = int(shard[:look_at].max()) if largest is None else largest
        if largest >= limit:
            remedy = "" if tokens else f"set vocab_size to {largest + 1} or more, in meta.json or by flag"
            raise problem(folder, name, f"holds token id {largest}, but the vocabulary has only {limit}", remedy)
    return shard


def _allow_files() -> None:
    """Every shard stays open, and there may be thousands: let this process open as many files as it may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    with suppress(ValueError, OSError):  # some systems have other limits beside
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


# --------------------------------------------------------------------------------------------------------- inspection


def describe(folder: Path, record: dict, meta: dict | None) -> list[str]:
    """Lines for people about one file, which is read in full and checked. ValueError as by `DataSet.split`."""
    path, meta = folder / record["name"], meta or {}
    record = {key: x for key, x in record.items() if key != "max_token"}  # the file itself is asked, not the record
    shard, eot = _open_shard(folder, record, meta.get("vocab_size", 2**64)), meta.get("eot")
    if record.get("sha256") and not _unchanged(folder, record):
        raise problem(folder, path.name, CHANGED)
    with open(path, "rb") as f:
        magic, version, _ = header(f.read(12))
    kind = f"shard {magic} of version {version}" if magic in FORMATS else "no header"
    parts = (shard[i : i + LOOKED_AT] for i in range(0, len(shard), LOOKED_AT))
    documents = "an unknown number of" if eot is None else f"{sum(np.count_nonzero(part == eot) for part in parts):,}"
    if path.with_suffix(".idx").exists():
        kind, documents = "Megatron's, version 1", f"{len(read_index(path.with_suffix('.idx'))[2]) - 1:,}"
    checksum = "as meta.json says" if record.get("sha256") else "on no record"
    lines = [
        f"{shown(path)}: {kind}, {shard.dtype}, {len(shard):,} tokens, {documents} documents, "
        f"largest id {shard.max()}, SHA-256 {checksum}"
    ]
    if "tokenizer" in meta:
        first = shard[:4096].tolist()
        while first and first[0] == eot:
            first.pop(0)
        first = first[: first.index(eot)] if eot in first else first
        try:
            text = repr(from_spec(meta["tokenizer"], folder).decode(first)[:300])
        except ValueError as e:  # such as no network to fetch the table from; the file is good all the same
            text = f"cannot be decoded ({e})"
        lines.append(f"    first document: {text}")
    return lines


def inspect(path: Path) -> list[tuple[Path, dict, dict | None]]:
    """What to `describe` of a data set's folder, a file, or a pair of Megatron's without its .bin or with .idx."""
    folder, name = (path, "") if path.is_dir() else (path.parent, path.name)
    if name and not path.exists() or path.suffix == ".idx":
        name = f"{path.stem if path.suffix == '.idx' else name}.bin"
    if not (folder / name).exists():
        raise ValueError(
            f"there is no {shown(path)}; give a file, a data set's folder, or the prefix of a .bin and .idx"
        )
    meta = _read_meta(folder)
    records = [record for split in SPLITS for record in _find_shards(folder, meta, split)]
    if name:
        records = [record for record in records if record["name"] == name] or [{"name": name}]
    if not records:
        raise problem(folder, "", "is not prepared (it has no train_000000.bin and no train.bin)")
    return [(folder, record, meta) for record in records]


def main(arguments: list[str] | None = None) -> int:
    """Prints what the paths hold, and a line on stderr for each that is wrong; the exit code is 2 if there was one."""
    flags = Parser("Looks into files of tokens and data sets, and checks them.")
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
        say(f"error: {told(e)}")
    return 2 if problems else 0


if __name__ == "__main__":
    run(main)
