"""Token shards: how a preparation writes them, and how a split is read as one long array.

    with ShardWriter(folder, tokenizer) as out:
        out.add("train", ids)                        # one document
    data = open_data("pycode")                       # data/pycode, or any path
    stream = data.split("train")                     # len(stream); stream.read(start, buffer)

A shard is the file that llm.c and modded-nanogpt read: 256 little-endian int32 (magic 20240520 and version 1 for
uint16, magic 20240801 and version 7 for uint32; the number of tokens; zeros), then the tokens. Beside them, meta.json:

    {"tokenizer": spec, "tokenizer_hash": sha256, "vocab_size": V, "eot": id or null,
     "splits": {"train": {"tokens": N, "documents": D,
                          "shards": [{"name", "tokens", "sha256", "max_token"}, ...]}, "val": ...}}

Only `vocab_size` is required: {"vocab_size": 50257} beside shards or beside nanoGPT's headerless train.bin and val.bin
makes them a data set. nanoGPT's meta.pkl is never opened, because unpickling runs whatever code the file holds.
"""

import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.tokenizer import Tokenizer, from_spec

HEADER_BYTES = 256 * 4
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic: (version, dtype)
SPLITS = ("train", "val")
MOVING = {"half prepared": True}  # what meta.json holds while shards are moved into place
PREPARING = ".preparing"  # the folder inside a data set's folder where a preparation works until it is complete


# ---------------------------------------------------------------------------------------------------------- writing


class ShardWriter:
    """Context manager: documents become shards `{split}_{i:06d}.bin` of at most `shard_tokens` tokens, and a meta.json.

    Everything is written and fsynced in a folder of its own and moved into place when the block ends, so a preparation
    that stops early, by an exception or a power cut, leaves the old data as it was. Memory does not grow with the data.
    """

    def __init__(self, folder: Path | str, tokenizer: Tokenizer, shard_tokens: int = 100_000_000):
        self.folder, self.tokenizer, self.shard_tokens = Path(folder), tokenizer, shard_tokens
        self.magic = next(m for m, (_, t) in FORMATS.items() if tokenizer.vocab_size <= np.iinfo(t).max + 1)
        self.version, self.dtype = FORMATS[self.magic]
        self.temporary = self.folder / PREPARING
        self.splits: dict[str, dict] = {}
        self.open: dict = {}  # split: the file of its last shard

    def __enter__(self) -> "ShardWriter":
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.temporary, os.O_RDONLY)
        try:  # the kernel drops this lock with the process, however that ends
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            raise ValueError(
                f"{shown(self.folder)} is being prepared by another process; wait for it or end it"
            ) from None
        return self

    def add(self, split: str, tokens: np.ndarray) -> None:
        """Append one document, integers of shape (N,), to `split` ("train" or "val"); it may run over a shard's end.

        The caller puts the end-of-text id where it wants one. ValueError for an id outside the vocabulary.
        """
        assert split in SPLITS, split
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.tokenizer.vocab_size:
            worst = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ValueError(
                f"token id {worst} is outside the vocabulary of {self.tokenizer.vocab_size}; encode with that tokenizer"
            )
        entry = self.splits.setdefault(split, {"tokens": 0, "documents": 0, "shards": []})
        entry["documents"] += 1
        entry["tokens"] += len(tokens)
        while len(tokens):
            if split not in self.open:
                shard = {"name": f"{split}_{len(entry['shards']):06d}.bin", "tokens": 0, "sha256": "", "max_token": 0}
                entry["shards"].append(shard)
                self.open[split] = open(self.temporary / shard["name"], "wb")
                self.open[split].write(bytes(HEADER_BYTES))  # filled in when the count is known
            shard = entry["shards"][-1]
            part, tokens = np.split(tokens, [self.shard_tokens - shard["tokens"]])
            self.open[split].write(part.astype(self.dtype).tobytes())
            shard["tokens"] += len(part)
            shard["max_token"] = max(shard["max_token"], int(part.max()))
            if shard["tokens"] == self.shard_tokens:
                self._finish(split)

    def _finish(self, split: str) -> None:
        shard = self.splits[split]["shards"][-1]
        with self.open.pop(split) as f:
            f.seek(0)
            f.write(np.array([self.magic, self.version, shard["tokens"]], dtype="<i4").tobytes())
            f.flush()
            os.fsync(f.fileno())
        shard["sha256"] = _sha256(self.temporary / shard["name"])

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            for f in self.open.values():
                f.close()
            shutil.rmtree(self.temporary, ignore_errors=True)
            os.close(self.lock)

    def _commit(self) -> None:
        for split in list(self.open):
            self._finish(split)
        for split, entry in self.splits.items():
            if not entry["tokens"]:
                raise ValueError(
                    f"{shown(self.folder)}: no tokens for the split {split}; give the preparation more text"
                )
        meta = {
            "tokenizer": self.tokenizer.spec,
            "tokenizer_hash": self.tokenizer.hash,
            "vocab_size": self.tokenizer.vocab_size,
            "eot": self.tokenizer.eot,
            "splits": self.splits,
        }
        for name, content in (("meta.json", meta), ("moving.json", MOVING)):
            with open(self.temporary / name, "w") as f:
                f.write(json.dumps(content, indent=1) + "\n")
                f.flush()
                os.fsync(f.fileno())
        # Several renames are not one: until the last, a meta.json says that old and new shards may be mixed.
        os.replace(self.temporary / "moving.json", self.folder / "meta.json")
        _sync_folder(self.folder)
        for old in self.folder.iterdir():
            if re.fullmatch(rf"({'|'.join(SPLITS)})_\d{{6}}\.bin", old.name):
                old.unlink()
        for entry in self.splits.values():
            for shard in entry["shards"]:
                os.replace(self.temporary / shard["name"], self.folder / shard["name"])
        _sync_folder(self.folder)
        os.replace(self.temporary / "meta.json", self.folder / "meta.json")
        _sync_folder(self.folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------- reading


class TokenStream:
    """One split as one long array of ids below `vocab_size`, over memory-mapped shards; messages call it `name`."""

    def __init__(self, name: str, shards: list[np.ndarray], vocab_size: int):
        self.name, self.shards, self.vocab_size = name, shards, vocab_size
        self.starts = [0]  # of each shard, and at the end the number of tokens; Python integers have no 32-bit limit
        for shard in shards:
            self.starts.append(self.starts[-1] + len(shard))

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out`, (N,) int64, with tokens start .. start + N. IndexError outside of [0, len)."""
        if not 0 <= start <= start + len(out) <= len(self):
            raise IndexError(f"{self.name} has {len(self)} tokens; cannot read {len(out)} from {start}")
        i, done = bisect_right(self.starts, start) - 1, 0
        while done < len(out):
            offset = start + done - self.starts[i]
            part = self.shards[i][offset : offset + len(out) - done]
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

        The largest id is the one that meta.json recorded when the shard was written (a shard changed since is found by
        `verify`, or when a batch reads the id); a file without such a record is read for it, at 18 GB/s from memory.
        ValueError names the file, the fact and the remedy.
        """
        limit = self.meta["vocab_size"] if self.meta else self.vocab_size
        records = _find_shards(self.folder, self.meta, name)
        if not records:
            raise _error(self.folder, "", f"has no split {name} (no {name}_000000.bin, no {name}.bin)")
        shards = []
        for record in records:
            shard = _map_file(self.folder, record["name"])
            tokens, largest, checksum = (record.get(key) for key in ("tokens", "max_token", "sha256"))
            if tokens not in (None, len(shard)):
                raise _error(self.folder, record["name"], f"holds {len(shard)} tokens, but meta.json says {tokens}")
            if limit <= np.iinfo(shard.dtype).max:
                largest = int(shard.max()) if largest is None else largest
                if largest >= limit:
                    fact = f"holds token id {largest}, but the vocabulary has only {limit}"
                    remedy = "" if tokens else f"set vocab_size to {largest + 1} or more, in meta.json or by flag"
                    raise _error(self.folder, record["name"], fact, remedy)
            if self.verify and not checksum:
                fact = "cannot be verified, because no meta.json records its SHA-256"
                raise _error(self.folder, record["name"], fact, "pass --verify_data=False")
            if self.verify and _sha256(self.folder / record["name"]) != checksum:
                raise _error(self.folder, record["name"], "was changed: its SHA-256 is not the one in meta.json")
            shards.append(shard)
        return TokenStream(f"{shown(self.folder)} {name}", shards, limit)


def open_data(name: str | Path, root: str | Path = "data", vocab_size: int = 0, verify: bool = False) -> DataSet:
    """The data set `name`: a folder under `root`, or a path.

    `vocab_size` 0 takes the vocabulary from meta.json; a number serves data without one, and may be larger than the
    data's (a padded embedding), never smaller. `verify` makes `split` check every checksum. ValueError: the data set is
    missing (names the nearest) or not prepared (names the command), its meta.json is damaged, its vocabulary unknown.
    """
    folder = Path(root) / name
    if not folder.is_dir():
        folder = Path(name)
    if not folder.is_dir():
        known = sorted(p.parent.name for p in Path(root).glob("*/prepare.py"))
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known) or 'none'}"
        raise ValueError(f"there is no data set {str(name)!r} in {shown(Path(root))} and no such folder; {hint}")
    meta = _read_meta(folder)
    if not any(_find_shards(folder, meta, split) for split in SPLITS):
        raise _error(folder, "", "is not prepared (it has no train_000000.bin and no train.bin)")
    own = meta["vocab_size"] if meta else 0
    if not own and not vocab_size:
        fact = "has no meta.json, so its vocabulary is unknown (a meta.pkl is never unpickled)"
        write = f"echo '{{\"vocab_size\": N}}' > {shown(folder / 'meta.json')}"
        raise _error(folder, "", fact, f"pass --vocab_size=N, or {write}")
    if 0 < vocab_size < own:
        raise _error(folder, "", f"has a vocabulary of {own}, more than vocab_size={vocab_size}", f"pass {own} or more")
    tokenizer = from_spec(meta["tokenizer"], folder) if meta and "tokenizer" in meta else None
    if tokenizer and (tokenizer.hash, tokenizer.vocab_size) != (meta.get("tokenizer_hash", tokenizer.hash), own):
        raise _error(folder, "meta.json", "has a tokenizer of another hash or vocabulary size than it records")
    return DataSet(folder, meta, tokenizer, max(own, vocab_size), meta.get("eot") if meta else None, verify)


def _read_meta(folder: Path) -> dict | None:
    path = folder / "meta.json"
    if not path.exists():
        return None
    try:
        meta = json.loads(path.read_text())
        if meta == MOVING:
            raise ValueError("a preparation was cut off while it moved its files into place")
        eot, splits = meta.get("eot"), meta.get("splits", {})
        shards = [shard for split in splits.values() for shard in split["shards"]]
        ok = (
            type(meta["vocab_size"]) is int
            and meta["vocab_size"] > 0
            and (eot is None or type(eot) is int and 0 <= eot < meta["vocab_size"])
            and all(type(s["name"]) is str and type(s["tokens"]) is type(s.get("max_token", 0)) is int for s in shards)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise _error(folder, "meta.json", f"cannot be used ({type(e).__name__}: {e})") from e
    if not ok:
        raise _error(folder, "meta.json", "holds a vocab_size, eot or shard of the wrong kind")
    return meta


def _find_shards(folder: Path, meta: dict | None, split: str) -> list[dict]:
    """meta.json's records of a split's shards; without them the files, by name: shards (a prefix as in
    fineweb_train_000001.bin is fine) before nanoGPT's one file."""
    if meta and "splits" in meta:
        return meta["splits"].get(split, {"shards": []})["shards"]
    names = sorted(p.name for p in folder.iterdir() if re.search(rf"(^|_){split}_\d+\.bin$", p.name))
    return [{"name": n} for n in names or [f"{split}.bin"] if (folder / n).exists()]


def _map_file(folder: Path, name: str) -> np.ndarray:
    """The tokens of one file, memory-mapped. The kind is recognised by magic and exact size."""
    path = folder / name
    try:
        with open(path, "rb") as f:
            start = f.read(HEADER_BYTES)
            size = f.seek(0, os.SEEK_END)
    except OSError as e:
        raise _error(folder, name, f"cannot be read ({e.strerror})") from e
    if not start:
        raise _error(folder, name, "is empty")
    magic, version, count = np.frombuffer(start[:12].ljust(12, b"\0"), dtype="<i4").tolist()
    if magic in FORMATS:
        known, dtype = FORMATS[magic]
        expected, offset = HEADER_BYTES + count * dtype.itemsize, HEADER_BYTES
        if size < HEADER_BYTES:
            raise _error(folder, name, f"is truncated: {size} bytes, less than a shard's header of {HEADER_BYTES}")
        if version != known:
            raise _error(folder, name, f"is a shard of version {version}, not {known}")
        if size != expected:
            fact = "is truncated" if size < expected else "is too long"
            raise _error(folder, name, f"{fact}: {size} bytes, but its header says {count} tokens, {expected} bytes")
        if not count:
            raise _error(folder, name, "holds no tokens")
    elif name in [f"{split}.bin" for split in SPLITS]:
        dtype, offset = np.dtype("<u2"), 0
        if size % dtype.itemsize:
            raise _error(folder, name, f"has {size} bytes, an odd number, so it is no file of uint16 tokens")
    else:
        raise _error(folder, name, f"is no shard: it begins with {magic}, not with {' or '.join(map(str, FORMATS))}")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset).view(np.ndarray)  # slicing a memmap object is slow


def _error(folder: Path, name: str, fact: str, remedy: str = "") -> ValueError:
    """In one line: the file `name` of a data set, or the data set itself (""), what is wrong, and what to do."""
    script = folder / "prepare.py"
    remedy = remedy or (f"run python {shown(script)}" if script.exists() else "copy or prepare it again")
    return ValueError(f"{shown(folder / name)} {fact}; {remedy}")


def shown(path: Path) -> str:
    """`path` as a user in the current folder would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
