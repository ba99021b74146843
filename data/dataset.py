"""Data sets of token shards: opening one, or several as a mixture. writer.py writes them.

    data = open_data("pycode")                       # data/pycode, or any path; "a:0.7,b:0.3" mixes two by weight
    stream = data.split("train")                     # a TokenStream: len(stream); stream.read(start, end)

files.py describes the formats of token files. Beside the files lies meta.json:

    {"tokenizer": spec, "tokenizer_hash": sha256, "vocab_size": V, "eot": id or null,
     "splits": {"train": {"tokens": N, "documents": D, "lost": bytes of the text that the tokens lack,
                          "shards": [{"name", "tokens", "sha256", "max_token"}, ...]}, "val": ...}}

Only `vocab_size` is required, also beside the files of nanoGPT (train.bin and val.bin) and of Megatron (train.bin with
train.idx, or any x_train_text_document.bin with its .idx). meta.pkl is never opened: unpickling executes code.
"""

import bisect
import difflib
import hashlib
import json
import math
import re
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.errors import require
from data.files import SPLITS, Shard, check, display_path, open_file, problem, read_json, sha256, user_path
from data.tokenizer import Tokenizer, from_spec

MASK = "_mask"  # ends the name of the split that holds the marks of another's tokens, see pairs.py
TARGET, FIRST, N_MARKS = 1, 2, 4  # bits of a mark, and the number of marks
MIXTURE_STEPS = 10_000  # weights of a mixture are rounded to multiples of 1 / MIXTURE_STEPS
MAX_VOCAB_SIZE = 2**31 - 1
MOVING = {"half prepared": True}  # the content of meta.json while shards are moved into place


class TokenStream:
    """Reads one split, all shards of it, as a single array of ids below `vocab_size`. `sources` lists (name, tokens,
    weight) of each data set of a mixture."""

    mask: "TokenStream | None" = None  # of pairs: their marks
    packs: list[np.ndarray] | None = None  # of pairs: the windows of each source that pairs.pack has found
    ends: np.ndarray | None = None  # of pairs: the windows of all sources, int64 (n, 2)
    lost: float = 0  # bytes of the text that the tokens lack; nan = not known
    hashes: Sequence[str] = ()  # of each source; equal ones have the same shards

    def __init__(self, name: str, shards: list[Shard], vocab_size: int, sources: list[tuple] | None = None):
        self.name = name
        self.shards = shards
        self.vocab_size = vocab_size
        self.starts = [0, *accumulate(map(len, shards))]  # first token of each shard; the last entry is the total
        self.sources = sources or [(name, len(self), 1)]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, end: int) -> np.ndarray:
        """The tokens from `start` up to `end`, int64 (end - start,). IndexError for others than there are."""
        if not 0 <= start < end <= len(self):
            raise IndexError(f"{self.name} has {len(self)} tokens, so none from {start} to {end}")
        parts = []
        while start < end:
            i = bisect.bisect(self.starts, start) - 1
            first = self.starts[i]
            stop = min(end, self.starts[i + 1])
            parts.append(self.shards[i][start - first : stop - first].astype(np.int64))
            start = stop
        return np.concatenate(parts)


@dataclass(frozen=True)
class DataSet:
    """A prepared folder, or a mixture of several: then all but `sources` is that of the first one."""

    folder: Path
    meta: dict  # empty without a meta.json
    tokenizer: Tokenizer | None
    vocab_size: int  # the model's: the larger of the data's own size and the flag
    eot: int | None
    verify: bool
    pack: Callable[[TokenStream], None] | None = None  # finds the windows of pairs, see pairs.pack
    sources: dict[str, tuple["DataSet", int]] = field(default_factory=dict)  # of a mixture: name -> (data, weight)

    @property
    def pairs(self) -> bool:
        """Whether a mask says which tokens are targets."""
        return any(split.endswith(MASK) for split in self.meta.get("splits", {}))

    def split(self, name: str) -> TokenStream:
        """Opens the tokens of "train" or "val", of a mixture's sources in turn, after checks of sizes and recorded
        largest ids, with `verify` also of checksums. In files without a record, a batch finds a wrong id."""
        if self.sources:
            stream = self._mixed(name)
        else:
            stream = self._open(name, self.meta.get("vocab_size", self.vocab_size))
            if self.pairs:
                stream.mask = mask = self._open(name + MASK, N_MARKS)
                fact = f"has {len(mask)} marks in {name}{MASK} for {len(stream)} tokens in {name}"
                check(len(mask) == len(stream), self.folder, fact)
            of_old = 0 if not self.tokenizer or self.tokenizer.keeps else math.nan  # data without this record
            stream.lost = self.meta.get("splits", {}).get(name, {}).get("lost", of_old)
            records = [find_shards(self.folder, self.meta, each) for each in (name, name + MASK)]
            stream.hashes = [hashlib.sha256(json.dumps([len(stream), records]).encode()).hexdigest()]
        if self.pack:
            self.pack(stream)
        return stream

    def _mixed(self, name: str) -> TokenStream:
        """The streams of all sources as one."""
        streams = {source: data.split(name) for source, (data, _) in self.sources.items()}
        shards = [shard for stream in streams.values() for shard in stream.shards]
        sources = [(source, len(stream), self.sources[source][1]) for source, stream in streams.items()]
        joint_name = " + ".join(stream.name for stream in streams.values())
        joint = TokenStream(joint_name, shards, min(stream.vocab_size for stream in streams.values()), sources)
        if self.pairs:
            marks = [shard for stream in streams.values() for shard in stream.mask.shards]
            joint.mask = TokenStream(joint_name + MASK, marks, N_MARKS)
        joint.lost = sum(stream.lost for stream in streams.values())
        joint.hashes = [each for stream in streams.values() for each in stream.hashes]
        return joint

    def _open(self, name: str, limit: int) -> TokenStream:
        """Opens one split or mask, whose ids are below `limit`."""
        records = find_shards(self.folder, self.meta, name)
        check(records, self.folder, f"has no split {name} (no {name}_000000.bin, no {name}.bin)")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, soft + len(records)), hard))  # each shard stays open
        shards = []
        for record in records:
            path = self.folder / record["name"]
            shards.append(open_shard(path, record, limit))
            if self.verify:
                recorded = record.get("sha256")
                fact = "cannot be verified, because no meta.json records its SHA-256"
                check(recorded, path, fact, "pass --verify_data=False")
                check(sha256(path) == recorded, path, "was changed: its SHA-256 is not the one in meta.json")
        return TokenStream(f"{display_path(self.folder)} {name}", shards, limit)


def open_data(name: str | Path, root: str | Path = "data", vocab_size: int = 0, verify: bool = False) -> DataSet:
    """Opens the data set `name`: a folder under `root`, a path, or several of them as `a:0.7,b:0.3` with weights. With
    `vocab_size` 0 the size is meta.json's. Another number is for data without one, or for an embedding that is padded
    beyond the data's vocabulary. With `verify`, `split` checks every checksum."""
    folder = next(filter(Path.is_dir, (Path(root) / name, user_path(name))), None)
    if not folder and re.search("[,:]", str(name)):
        return _open_mixture(str(name), root, vocab_size, verify)
    if not folder:
        file = user_path(name)
        if file.is_file() and file.suffix != ".bin" and not Path(root, file.stem).exists():
            prepared = f"python data/text/prepare.py --input='{file}' --out='{file.stem}'"
            raise ValueError(f"dataset={name} is a file; prepare it with {prepared}, and pass --dataset={file.stem}")
        fact = f"there is no data set {str(name)!r} in {display_path(Path(root))} and no such folder"
        folders = [path.name for path in Path(root).glob("[!_]*") if path.is_dir()]
        near = difflib.get_close_matches(str(name), folders, 1)
        raise ValueError(f"{fact}; prepare it, or pass {near[0] if near else 'a path'}")
    meta = read_meta(folder)
    fact = "is not prepared (it has no train_000000.bin and no train.bin)"
    check(any(find_shards(folder, meta, split) for split in SPLITS), folder, fact)
    own = meta.get("vocab_size", 0)
    if not own and not vocab_size:
        fact = "has no meta.json, so its vocabulary is unknown (a meta.pkl is never unpickled)"
        write = f"echo '{{\"vocab_size\": N}}' > {display_path(folder / 'meta.json')}"
        raise problem(folder, fact, f"pass --vocab_size=N, or {write}")
    if vocab_size and vocab_size < own:
        fact = f"has a vocabulary of {own}, more than vocab_size={vocab_size}"
        remedy = f"give a new model --vocab_size={own}, or prepare the data with the tokenizer of the model"
        raise problem(folder, fact, remedy)
    tokenizer = None
    if "tokenizer" in meta:
        tokenizer = from_spec(meta["tokenizer"], folder)
        same = tokenizer.hash == meta.get("tokenizer_hash", tokenizer.hash) and tokenizer.vocab_size == own
        fact = "records another tokenizer hash or vocabulary size than its tokenizer has"
        check(same, folder / "meta.json", fact)
    return DataSet(folder, meta, tokenizer, max(own, vocab_size), meta.get("eot"), verify)


def _open_mixture(name: str, root: str | Path, vocab_size: int, verify: bool) -> DataSet:
    """Opens `a:0.7,b:0.3`. ValueError for a missing or zero weight, a repeated source, sources that do not match."""
    weights: dict[str, Fraction] = {}
    for part in map(str.strip, name.split(",")):
        match = re.fullmatch(r"([^:]+):(\d+\.?\d*|\.\d+)", part)
        new = match and float(match[2]) > 0 and match[1] not in weights
        require(new, f"dataset={name!r}: {part!r} is not a new name with a positive weight; write it like a:0.7,b:0.3")
        weights[match[1]] = Fraction(match[2])
    opened = {source: open_data(source, root, vocab_size, verify) for source in weights}
    kinds = {source: _kind(data) for source, data in opened.items()}
    if len(set(kinds.values())) > 1:
        found = "; ".join(f"{source}: {', '.join(kind)}" for source, kind in kinds.items())
        raise ValueError(f"dataset={name!r} mixes data of different kinds ({found}); prepare all with one tokenizer")
    first = next(iter(opened.values()))
    weighted = zip(opened.items(), _integers(list(weights.values())), strict=True)
    return replace(first, sources={source: (data, weight) for (source, data), weight in weighted})


def _kind(data: DataSet) -> tuple[str, ...]:
    """What the sources of a mixture must have in common."""
    tokenizer = "unknown tokenizer" if data.tokenizer is None else f"tokenizer {data.tokenizer.hash[:12]}"
    return tokenizer, f"vocab_size {data.meta.get('vocab_size')}", f"end-of-text {data.eot}", f"pairs {data.pairs}"


def _integers(weights: list[Fraction]) -> list[int]:
    """The smallest integers in the ratio of the weights, whose sum is about MIXTURE_STEPS at most. Weights that would
    need a larger sum are first rounded to multiples of 1 / MIXTURE_STEPS, but never to 0."""
    shares = [weight / sum(weights) for weight in weights]
    steps = min(math.lcm(*(share.denominator for share in shares)), MIXTURE_STEPS)
    integers = [max(1, round(steps * share)) for share in shares]
    return [n // math.gcd(*integers) for n in integers]


def read_meta(folder: Path) -> dict:
    """Reads and checks meta.json; {} if the folder has none. ValueError names the first wrong entry."""
    path = folder / "meta.json"
    if not path.exists():
        return {}
    try:
        meta = read_json(path)
        require(meta != MOVING, "a preparation stopped while it moved its files into place")
        require(_is_count(meta["vocab_size"], 1), f"vocab_size must be a number from 1 to {MAX_VOCAB_SIZE}")
        known = meta.get("eot") is None or _is_count(meta["eot"], 0, meta["vocab_size"] - 1)
        require(known, "eot must be an id below vocab_size")
        for split in meta.get("splits", {}).values():
            require(type(split.get("lost", 0)) is int, "lost must be a number of bytes")
            for shard in split["shards"]:
                name = shard["name"]  # which must not lead out of the folder
                require(name.isprintable() and Path(name).name == name, f"{name!r} is no file name")
                require(_is_count(shard.get("max_token", 0), 0), f"max_token of {name} must be an id")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise problem(path, f"cannot be used ({type(e).__name__}: {e})") from e
    return meta


def _is_count(x, least: int, most: int = MAX_VOCAB_SIZE) -> bool:
    return type(x) is int and least <= x <= most


def find_shards(folder: Path, meta: dict, split: str) -> list[dict]:
    """The records of a split's shards: those in meta.json, else one for each file whose name fits, in this order:
    shards (any prefix, as in fineweb_train_000001.bin), train.bin of nanoGPT or Megatron, Megatron's longer names."""
    if "splits" in meta:
        return meta["splits"].get(split, {"shards": []})["shards"]
    files = sorted(p.name for p in folder.iterdir())
    indexed = [name for name in files if f"{name.removesuffix('.bin')}.idx" in files]  # Megatron's
    kinds = (
        (rf"(.*_)?{split}_\d+\.bin", [name for name in files if name not in indexed]),
        (rf"{split}\.bin", files),
        (rf"(.*_)?{split}(_.*)?\.bin", indexed),
    )
    for pattern, names in kinds:
        if found := [{"name": name} for name in names if re.fullmatch(pattern, name)]:
            return found
    return []


def open_shard(path: Path, record: dict, limit: int) -> Shard:
    """Opens one file after checks that its size is the recorded one, and that the recorded ids are below `limit`."""
    try:
        shard = open_file(path)
    except OSError as e:
        remedy = "prepare the data again, or check its permissions and the limit of open files (ulimit -n)"
        raise problem(path, f"cannot be read ({e.strerror})", remedy) from e
    check(len(shard), path, "holds no tokens")
    tokens = record.get("tokens", len(shard))
    check(tokens == len(shard), path, f"holds {len(shard)} tokens, but meta.json says {tokens}")
    largest = record.get("max_token", 0)
    remedy = "set vocab_size to more, or prepare the data again"
    check(largest < limit, path, f"holds token id {largest}, but the vocabulary has only {limit}", remedy)
    return shard
