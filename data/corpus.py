"""Documents to token shards, at any size: read as a stream, split by document, tokenized in threads, resumable.

    flags = parser(__doc__, HERE)
    flags.add_argument("--tokenizer", default="gpt2")
    prepare(flags.parse_args(), find_files(["books/*.txt", "web"]))

A document's number, counted over the sorted files, decides by a hash whether it validates; a single text is cut in two
instead. A tokenizer without end-of-text leaves a line end, or a blank line, between documents. Threads only encode, and
their results are written in the order of the documents, so neither their number nor a restart changes any shard. A
preparation that stops goes on from its last full shard when the same command is given again.

Memory holds one document and some pieces of about 1 MB, whatever the input's size: a longer document is encoded in
pieces too. Only one with neither spaces nor lines to cut it at is encoded as a whole, in up to 20 times its size.
"""

import argparse
import hashlib
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from data.command import Parser, next_command, out_folder
from data.files import SPLITS, shown
from data.hashing import mix
from data.sources import ADDRESS, Source, find_files, hub_files, reason
from data.tokenizer import TOKENIZERS, build
from data.writer import ShardWriter

JOB = 1_000_000  # characters that a thread gets at once, and after which a document is cut
MANY = 4096  # documents that it gets at once
CUT = re.compile(r"\S(?= )|(?<=\S)\n(?=\S)")


# -------------------------------------------------------------------------------------------------------- tokenizing


def shares(numbers: np.ndarray) -> np.ndarray:
    """A number in [0, 1] for each document number, (N,) uint64."""
    return mix(numbers) / 2.0**64


def pieces(text: str, length: int) -> Iterator[str]:
    """`text` in parts of at least `length` characters which have the same ids, joined, as the whole in all tokenizers.

    They split a text into words first, and in all of them a word ends ahead of a space, and behind a lone newline.
    """
    start = 0
    while len(text) - start > length and (found := CUT.search(text, start + length)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


@dataclass
class Job:
    """What a thread encodes at once."""

    numbers: list[int] = field(default_factory=list)  # of the document of each piece
    pieces: list[tuple[str, bool, bool]] = field(default_factory=list)  # text, whether it begins and ends a document
    rows: list[tuple[int, int]] = field(default_factory=list)  # file and row of that document
    size: int = 0  # characters
    position: int = 0  # bytes of the input read
    place: tuple[int, int, int] | None = None  # file, row and number to go on after it; None inside of a document
    shares: np.ndarray | None = None  # of the numbers


def make_jobs(documents: Iterable[tuple[str, int, int, int]], number: int) -> Iterator[Job]:
    """`number` is the first document's. Empty documents have one, and are left out."""
    job = Job()
    for text, file, row, position in documents:
        done, job.position = 0, position
        for piece in pieces(text, JOB) if text else ():
            done += len(piece)
            job.numbers.append(number)
            job.pieces.append((piece, done == len(piece), done == len(text)))
            job.rows.append((file, row))
            job.size += len(piece)
            job.place = (file, row, number + 1) if done == len(text) else None
            if job.size >= JOB or len(job.pieces) == MANY:
                yield job
                job = Job(position=position)
        number += 1
    if job.pieces:
        yield job


def in_order(function: Callable, jobs: Iterable[Job], threads: int) -> Iterator[tuple]:
    """(job, function(job)) in the order of the jobs; of these `threads` + 2, or 16 MB, are under way at a time."""
    waiting: deque = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for job in jobs:
            while waiting and (len(waiting) > threads + 1 or sum(j.size for j, _ in waiting) + job.size > 16 * JOB):
                before, result = waiting.popleft()
                yield before, result.result()
            waiting.append((job, pool.submit(function, job)))
        while waiting:
            before, result = waiting.popleft()
            yield before, result.result()
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """A line on stderr: twice a second on a terminal, where it replaces the one before, else every half minute.

    tokens, position   that there were at the start; share of the work, in [0, 1]
    """

    def __init__(self, tokens: int, position: int, share: float):
        self.tokens, self.position, self.share = tokens, position, share
        self.start = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def show(self, documents: int, tokens: int, position: int, share: float) -> None:
        now = time.monotonic()
        if now - self.last >= (0.5 if self.terminal else 30):
            self.last, seconds = now, now - self.start
            minutes, rest = divmod(int(seconds * (1 - share) / max(share - self.share, 1e-9)), 60)
            self._print(
                f"{documents:,} documents, {tokens:,} tokens, {(position - self.position) / seconds / 1e6:.1f} MB/s, "
                f"{(tokens - self.tokens) / seconds / 1e6:.2f} Mtok/s, {share:.0%}, {minutes}:{rest:02} left"
            )

    def close(self) -> None:
        if self.terminal:
            self._print("")

    def _print(self, line: str) -> None:
        with suppress(OSError):  # a closed pipe is no reason to stop
            print(f"\r\033[K{line}" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr)
            sys.stderr.flush()


def texts_of(source: Source) -> Iterator[str]:
    """The texts alone, for a tokenizer that is made from them."""
    with closing(Progress(0, 0, 0.0)) as progress:
        for n, (text, _, _, position) in enumerate(source.read(), 1):
            progress.show(n, 0, position, position / source.total)
            yield text


def write(out: ShardWriter, source: Source, val_fraction: float, threads: int, limit: int) -> None:
    """All documents into `out`, from `out.place` on; with a limit, until there are so many tokens to train on."""
    file, row, number = out.place or (0, 0, 0)
    eot = [] if out.tokenizer.eot is None else [np.array([out.tokenizer.eot])]

    def encode(job: Job) -> dict[str, tuple[np.ndarray, int]]:
        """{split: (tokens, documents begun)}"""
        numbers = np.array(job.numbers, dtype=np.uint64)
        job.shares = numbers.astype(float) if source.val_fraction else shares(numbers)  # of a cut text
        parts: dict[str, list] = {split: [] for split in SPLITS}
        begun = dict.fromkeys(SPLITS, 0)
        for (text, begins, ends), val, at in zip(job.pieces, job.shares < val_fraction, job.rows, strict=True):
            split = "val" if val else "train"
            try:
                parts[split] += [out.tokenizer.encode(text), *eot] if ends else [out.tokenizer.encode(text)]
            except ValueError as e:  # such as a million blanks in a row with gpt2
                where = f"{source.files[at[0]]}, document {at[1]}"
                raise ValueError(f"{where} cannot be encoded ({reason(e)}); change it, or leave it out") from e
            begun[split] += begins
        return {split: (np.concatenate(p), begun[split]) for split, p in parts.items() if p}

    def count(what: str, *splits: str) -> int:
        return sum(out.splits[split][what] for split in splits or SPLITS if split in out.splits)

    def done(position: int) -> float:
        return max(position / source.total, limit and count("tokens", "train") / limit)

    def full_shards() -> int:
        return sum(bool(shard["sha256"]) for entry in out.splits.values() for shard in entry["shards"])

    start, saved, low, high = sum(source.sizes[:file]), full_shards(), 1.0, 0.0
    if number:
        print(f"goes on after {number:,} documents, {count('tokens'):,} tokens", file=sys.stderr)
    with (
        closing(Progress(count("tokens"), start, done(start))) as progress,
        closing(in_order(encode, make_jobs(source.read(file, row), number), threads)) as results,
    ):
        for job, encoded in results:
            low, high = min(low, job.shares.min()), max(high, job.shares.max())
            if limit and "train" in encoded and count("tokens", "train") + len(encoded["train"][0]) >= limit:
                for n, piece, at in zip(job.numbers, job.pieces, job.rows, strict=True):  # to where the shard is full
                    for split, (tokens, begun) in encode(Job([n], [piece], [at])).items():
                        room = limit - count("tokens", "train") if split == "train" else len(tokens)
                        out.add(split, tokens[:room], begun)
                    if count("tokens", "train") == limit:
                        break
                break
            for split, (tokens, begun) in encoded.items():
                out.add(split, tokens, begun)
            if full_shards() > saved and job.place:
                out.save(job.place)
                saved = full_shards()
            progress.show(count("documents"), count("tokens"), job.position, done(job.position))

    n = count("documents")
    if n < 2:
        fact = "is one document, which cannot be split" if n else "has no text"
        raise ValueError(f"the input {fact}; give it more, or cut it with --documents=paragraph or --documents=line")
    if len(out.splits) < 2:
        least, most = math.ceil(low * 1e4) / 1e4, math.floor(high * 1e4) / 1e4
        which, bound = ("all", f"{most} or less") if "val" in out.splits else ("none", f"{least} or more")
        raise ValueError(f"val_fraction={val_fraction} takes {which} of {n:,} documents; pass --val_fraction={bound}")
    for split in SPLITS:
        if count("tokens", split) < 2:
            raise ValueError(f"the split {split} has one token, and a prediction needs two; give the input more text")


# ---------------------------------------------------------------------------------------------------------- commands


def parser(doc: str, here: Path) -> Parser:
    """The flags that all preparations of documents share."""
    flags = Parser(doc)
    share = "share of the documents that validates (default 0.005; of a single text its last 0.1)"
    flags.add_argument("--val_fraction", type=float, help=share)
    flags.add_argument("--field", default="text", help="of jsonl and parquet, what holds the text (default text)")
    flags.add_argument("--out", default=str(here), help="NAME (data/NAME) or a path with a / (default: this folder)")
    flags.add_argument("--shard_tokens", type=int, default=100_000_000, help="size of a shard (default 100_000_000)")
    flags.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: one per core")
    return flags


def prepare(args: argparse.Namespace, files: list[str], documents: str = "file", shards: int = 0) -> None:
    """The data set that the flags describe; `shards` full ones to train on, 0 = all. ValueError in one line."""
    single = documents == "file" and len(files) == 1 and not re.search(r"\.(jsonl(\.gz|\.zst)?|parquet)$", files[0])
    val_fraction = (0.1 if single else 0.005) if args.val_fraction is None else args.val_fraction
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction} is no share; pass a number between 0 and 1")
    for name, value, most in (("threads", args.threads, 1024), ("shard_tokens", args.shard_tokens, 2**31 - 1)):
        if not 1 <= value <= most:
            raise ValueError(f"{name}={value} is not possible; pass a number from 1 to {most}")
    if shards < 0:
        raise ValueError(f"shards={shards} is not possible; pass 0 for all, or the number of shards to train on")
    folder = out_folder(args.out)
    separated = not single and getattr(TOKENIZERS.get(args.tokenizer), "eot", 0) is None
    source = Source(files, documents, args.field, separated, val_fraction if single else 0)
    tokenizer = build(args.tokenizer, partial(texts_of, source))
    tokenizer.encode("")  # reads gpt2's table, once, and before anything is written
    names = json.dumps([[f if f.startswith("hf://") else os.path.abspath(f) for f in files], source.sizes])
    settings = {
        "tokenizer": tokenizer.hash,
        "input": hashlib.sha256(names.encode()).hexdigest(),
        "documents": documents,
        "field": args.field,
        "val_fraction": val_fraction,
        "separated": separated,
        "shard_tokens": args.shard_tokens,
        "shards": shards,
    }
    try:
        with ShardWriter(folder, tokenizer, args.shard_tokens, settings) as out:
            write(out, source, val_fraction, args.threads, shards * args.shard_tokens)
    except OSError as e:
        raise ValueError(f"cannot write to {shown(folder)} ({reason(e)}); make room, or pass another --out") from e
    train, val = out.splits["train"], out.splits["val"]
    what = f"{train['documents']:,} + {val['documents']:,} documents"
    if separated:
        what += f" with {'a blank line' if documents == 'paragraph' else 'a line end'} after each"
    if single:
        what = f"one text, of which the last {val_fraction:.3g} validates (cut at a line end where one is near)"
    print(
        f"{what}, {train['tokens']:,} train + {val['tokens']:,} val tokens in {shown(folder)}; "
        f"next: {next_command(folder, tokenizer.vocab_size, [train['tokens'], val['tokens']])}"
    )


def stream(doc: str, here: Path, path: str) -> None:
    """The command of a data set on the hub."""
    flags = parser(doc, here)
    flags.add_argument("--path", default=path, help=f"OWNER/NAME[@REVISION][:CONFIG], or local files (default {path})")
    flags.add_argument("--shards", type=int, default=0, help="how many to train on, 0 = all (default 0)")
    flags.add_argument("--tokenizer", choices=("gpt2", "byte"), default="gpt2", help="default gpt2")
    args = flags.parse_args()
    try:
        files = find_files([args.path])
    except ValueError:
        if os.path.exists(args.path) or not ADDRESS.fullmatch(args.path):
            raise
        files = hub_files(args.path)
    prepare(args, files, shards=args.shards)
