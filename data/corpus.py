"""Prepares data sets of any size: reads documents as a stream, splits them by document, encodes them in threads.

    flags = parser(__doc__, HERE)
    flags.add_argument("--tokenizer", default="gpt2")
    prepare(flags.parse_args(), find_files(["books/*.txt", "web"]))

Documents are numbered over the sorted files, and a hash of the number decides whether a document validates. Threads
only encode, and their results are written in the order of the documents. So neither the number of threads nor a restart
changes a shard.

Memory holds one document and some pieces of about 1 MB, whatever the size of the input. Only a document without spaces
and lines cannot be cut into pieces: it is encoded at once, in up to 20 times its size.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from tqdm import tqdm

from data.command import Parser, out_folder, ready_tokenizer, say
from data.dataset import MASK
from data.errors import require
from data.files import SPLITS
from data.hashing import hash64
from data.pairs import Parts, encode
from data.sources import ADDRESS, Source, find_files, hub_files, reason
from data.tokenizer import build
from data.writer import ShardWriter

RECORDS = re.compile(r"\.(jsonl(\.gz|\.zst)?|parquet)$")  # names of files whose documents are records
CUT = ", or cut it with data/text/prepare.py --documents=paragraph or --documents=line"
JOB_CHARACTERS = 1_000_000  # most characters of a job; a longer document is cut into pieces
JOB_PIECES = 4096  # most pieces of a job
SAFE_CUT = re.compile(r"\S(?= )|(?<=\S)\n(?=\S)")


# -------------------------------------------------------------------------------------------------------- tokenizing


def uniform(numbers: np.ndarray) -> np.ndarray:
    """A uniform random number in [0, 1] for each document number: (N,) uint64 -> (N,) float64."""
    return hash64(numbers) / 2.0**64


def pieces(text: str, length: int) -> Iterator[str]:
    """Cuts `text` into pieces of at least `length` characters. Their ids, joined, are the ids of `text`.

    This holds for all tokenizers, because they split a text into words first, and in all of them a word ends before a
    space and after a single newline. The cuts are at such places only. (A tokenizer of the kind hf may split otherwise.
    Then the tokens at a cut are others.)
    """
    start = 0
    while len(text) - start > length and (found := SAFE_CUT.search(text, start + length)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


@dataclass
class Job:
    """The pieces that a thread encodes in one call. A piece is a document, such as a pair, or a part of a long one."""

    # (text, begins a document, ends it, number of the document over all files, file, row in the file)
    pieces: list[tuple[str | Parts, bool, bool, int, int, int]] = field(default_factory=list)
    size: int = 0  # characters
    position: int = 0  # bytes of the input read so far
    place: tuple[int, int, int] | None = None  # (file, row, number) to continue from; None inside a document


def make_jobs(documents: Iterable[tuple[str | Parts, int, int, int]], number: int) -> Iterator[Job]:
    """Groups (text, file, row, position) of documents, of which `number` is the first one's, into jobs. Empty documents
    are counted, but are in no job."""
    job = Job()
    for text, file, row, position in documents:
        job.position = position
        done = 0
        parts = [text]
        if isinstance(text, str):  # a pair is never cut
            parts = pieces(text, JOB_CHARACTERS) if text else []
        for piece in parts:
            done += len(piece)
            job.pieces.append((piece, done == len(piece), done == len(text), number, file, row))
            job.size += len(together(piece))
            job.place = (file, row, number + 1) if done == len(text) else None
            if job.size >= JOB_CHARACTERS or len(job.pieces) == JOB_PIECES:
                yield job
                job = Job(position=position)
        number += 1
    if job.pieces:
        yield job


def together(text: str | Parts) -> str:
    """The text of a document, or those of a pair's parts joined."""
    return text if isinstance(text, str) else "".join(part for part, _ in text)


def map_in_order(function: Callable, jobs: Iterable[Job], threads: int) -> Iterator[tuple]:
    """Yields (job, function(job)) in the order of the jobs. At most `threads` + 2 jobs are pending, and 16 million
    characters."""
    waiting: deque = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for job in jobs:
            size = job.size + sum(j.size for j, _ in waiting)
            while waiting and (len(waiting) > threads + 1 or size > 16 * JOB_CHARACTERS):
                before, result = waiting.popleft()
                size -= before.size
                yield before, result.result()
            waiting.append((job, pool.submit(function, job)))
        while waiting:
            before, result = waiting.popleft()
            yield before, result.result()
    finally:
        pool.shutdown(cancel_futures=True)


class Progress(tqdm):
    """Shows on stderr how much of the input was read: a progress bar on a terminal, else a line every half minute.
    `position` bytes of `total` were read before."""

    BYTES = {"unit": "B", "unit_scale": True}

    def __init__(self, position: int, total: float):
        how = {"dynamic_ncols": True, "mininterval": 0.5, "leave": False, "disable": not sys.stderr.isatty()}
        super().__init__(initial=position, total=total, **self.BYTES, **how)
        self.first = self.last = time.monotonic()

    def show(self, position: int, total: float, counts: str) -> None:
        """Shows that `position` of `total` bytes are read. `counts` describes the output so far."""
        if not self.disable:
            self.total, self.postfix = total, counts
            self.update(position - self.n)
        elif (now := time.monotonic()) - self.last >= 30:
            self.last = now
            figures = {"initial": self.n, "postfix": counts, "ncols": 0}  # n stays what it was at first
            say(self.format_meter(position, total, now - self.first, **figures, **self.BYTES))


def read_texts(source: Source) -> Iterator[str]:
    """Yields the text of each document, for a tokenizer that is built from the texts."""
    with Progress(0, source.total) as progress:
        for n, (text, _, _, position) in enumerate(source.read(), 1):
            progress.show(position, source.total, f"{n:,} documents")
            yield together(text)


@dataclass
class Corpus:
    """Writes the documents of `source`, from `out.place` on, into `out`; a `limit` is the most training tokens."""

    out: ShardWriter
    source: Source
    val_fraction: float
    threads: int
    limit: int

    def encode(self, job: Job) -> dict[str, tuple[np.ndarray, int]]:
        """{split: (tokens, number of documents that begin in the job)}"""
        tokenizer = self.out.tokenizer
        parts: dict[str, list] = {split: [] for split in SPLITS}
        begun = dict.fromkeys(SPLITS, 0)
        for (text, begins, ends, _, file, row), validates in zip(job.pieces, self.validates(job), strict=True):
            split = "val" if validates else "train"
            begun[split] += begins
            try:
                if isinstance(text, str):
                    parts[split].append(tokenizer.encode(text) if begins else tokenizer.encode_rest(text))
                    if ends:
                        parts[split].append(tokenizer.end)
                else:
                    ids, marks = encode(tokenizer, text)
                    parts[split].append(ids)
                    parts.setdefault(split + MASK, []).append(marks)
            except ValueError as e:  # for example a million blanks in a row with gpt2
                where = f"{self.source.files[file]}, document {row}"
                raise ValueError(f"{where} cannot be encoded ({reason(e)}); change it, or remove it") from e
        return {split: (np.concatenate(p), begun.get(split, 0)) for split, p in parts.items() if p}

    def validates(self, job: Job) -> np.ndarray:
        """Whether the document of each piece validates, (pieces,) bool."""
        numbers = np.array([number for _, _, _, number, _, _ in job.pieces], dtype=np.uint64)
        if self.source.val_fraction:  # a single text is cut into document 0, which validates, and document 1
            return numbers == 0
        return uniform(numbers) < self.val_fraction

    def count(self, unit: str, *splits: str) -> int:
        return sum(self.out.splits[split][unit] for split in splits or SPLITS if split in self.out.splits)

    def bytes_to_read(self, position: int) -> float:
        """Bytes of the input to be read in all. With a limit they are estimated from the first `position` bytes."""
        total, tokens = self.source.total, self.count("tokens", "train")
        return min(total, position * self.limit / tokens) if self.limit and tokens else total

    def write(self) -> None:
        """Writes all documents, saves after each full shard, and checks that both splits can be used."""
        file, row, number = self.out.place or (0, 0, 0)
        start = sum(self.source.sizes[:file])
        if number:
            print(f"continues after {number:,} documents, {self.count('tokens'):,} tokens", file=sys.stderr)
        jobs = make_jobs(self.source.read(file, row), number)
        with (
            Progress(start, self.bytes_to_read(start)) as progress,
            closing(map_in_order(self.encode, jobs, self.threads)) as results,
        ):
            for job, encoded in results:
                if self.limit and "train" in encoded:
                    if self.count("tokens", "train") + len(encoded["train"][0]) >= self.limit:
                        self.write_up_to_limit(job)
                        break
                for split, (tokens, begun) in encoded.items():
                    self.out.add(split, tokens, begun)
                if self.out.unsaved and job.place:
                    self.out.save(job.place)
                counts = f"{self.count('documents'):,} documents, {self.count('tokens'):,} tokens"
                progress.show(job.position, self.bytes_to_read(job.position), counts)
        self.check_splits()

    def write_up_to_limit(self, job: Job) -> None:
        """Writes the pieces of the job in which the limit is reached, up to the limit."""
        for piece in job.pieces:
            for split, (tokens, begun) in self.encode(Job([piece])).items():
                room = self.limit - self.count("tokens", "train") if split == "train" else len(tokens)
                self.out.add(split, tokens[:room], begun)
            if self.count("tokens", "train") == self.limit:
                return

    def check_splits(self) -> None:
        """ValueError for a split that cannot be used."""
        n = self.count("documents")
        require(n, "the input has no text; add text")
        cut = "" if all(map(RECORDS.search, self.source.files)) else CUT
        require(n > 1, f"the input is one document, which cannot be split; add text{cut}")
        fact = f"val_fraction={self.val_fraction} takes"
        require("val" in self.out.splits, f"{fact} none of {n:,} documents; pass a larger --val_fraction")
        require("train" in self.out.splits, f"{fact} all of {n:,} documents; pass a smaller --val_fraction")
        for split in SPLITS:
            fact = f"the split {split} has one token, and a prediction needs two"
            require(self.count("tokens", split) > 1, f"{fact}; add text to the input")


# ---------------------------------------------------------------------------------------------------------- commands


def parser(doc: str, here: str) -> Parser:
    """A parser with the flags that all preparations of documents share."""
    flags = Parser(doc, here)
    fraction = "fraction of the documents for validation (default 0.005; of a single text the last 0.1)"
    flags.add_argument("--val_fraction", type=float, help=fraction)
    flags.add_argument("--field", default="text", help="field of jsonl and parquet with the text (default text)")
    flags.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard (default 100_000_000)")
    flags.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="encoding threads (default: all cores)")
    return flags


def prepare(
    args: argparse.Namespace, files: list[str], documents: str = "file", shards: int = 0, pairs: tuple[str, ...] = ()
) -> None:
    """Prepares the data set that the flags describe, with at most `shards` full shards to train on (0 = all).

    pairs   the fields of a source and its target, or the field of a chat
    """
    plain = [f for f in files if not RECORDS.search(f)]
    single = documents == "file" and len(files) == len(plain) == 1
    val_fraction = args.val_fraction
    if val_fraction is None:
        val_fraction = 0.1 if single else 0.005
    check_flags(args, val_fraction, shards, pairs, files, plain)
    folder = out_folder(args.out)
    source = Source(files, documents, args.field, val_fraction=val_fraction if single else 0, pairs=pairs)
    if args.tokenizer == "char":  # which is built from the separated texts
        source.separated = not single and not pairs
    tokenizer = build(args.tokenizer, partial(read_texts, source))
    endless = f"needs an end-of-text behind each target, and tokenizer={args.tokenizer} has none; pass byte"
    require(not pairs or tokenizer.eot is not None, f"pairs={','.join(pairs)} {endless}")
    source.separated = not single and tokenizer.eot is None
    tokenizer.encode("")  # loads gpt2's merges, and fails before anything is written
    names = json.dumps([[f if f.startswith("hf://") else os.path.abspath(f) for f in files], source.sizes])
    settings = {
        "tokenizer": tokenizer.hash, "input": hashlib.sha256(names.encode()).hexdigest(), "documents": documents,
        "field": args.field, "val_fraction": val_fraction, "separated": source.separated,
        "shard_tokens": args.shard_tokens, "shards": shards,
    }  # fmt: skip
    if pairs:
        settings["pairs"] = [*pairs]
    with ShardWriter(folder, tokenizer, args.shard_tokens, settings) as out:
        Corpus(out, source, val_fraction, args.threads, shards * args.shard_tokens).write()
    if not single:
        out.report(f"{described(out, source, bool(plain))}, ")
    else:
        out.report(f"one text, of which the last {val_fraction:.3g} validates (cut at a line end if one is near), ")


def described(out: ShardWriter, source: Source, plain: bool) -> str:
    """The documents that were written, for people. Warns of a validation set that is a single document."""
    if out.splits["val"]["documents"] == 1:
        remedy = f"pass a larger --val_fraction{CUT if plain else ''}"
        say(f"warning: one document validates, so every validation loss will be that of one text; {remedy}")
    if not source.separated:
        return f"{out.documents()} documents"
    end = "a blank line" if source.documents == "paragraph" else "a line end"
    return f"{out.documents()} documents with {end} after each"


def check_flags(
    args: argparse.Namespace, val_fraction: float, shards: int, pairs: tuple[str, ...], files: list, plain: list
) -> None:
    """ValueError for flags that are not possible; `plain` are those of the files that have no fields."""
    shown = f"pairs={','.join(pairs)}"
    known = len(pairs) < 3 and all(pairs)
    require(known, f"{shown} is not possible; pass SOURCE,TARGET, two fields, or the one field of a chat")
    require(not (pairs and plain), f"{shown} are fields, and {plain[:1]} has none; pass .jsonl or .parquet alone")
    if args.field != "text" and (pairs or len(plain) == len(files)):
        raise ValueError(f"field={args.field} has no effect on {'pairs' if pairs else 'texts'}; leave it out")
    require(0 < val_fraction < 1, f"val_fraction={val_fraction} is not possible; pass a number between 0 and 1")
    for name, value, most in (("threads", args.threads, 1024), ("shard_tokens", args.shard_tokens, 2**31 - 1)):
        require(1 <= value <= most, f"{name}={value} is not possible; pass a number from 1 to {most}")
    require(shards >= 0, f"shards={shards} is not possible; pass 0 for all, or the number of shards to train on")


def stream(doc: str, here: str, path: str) -> None:
    """The command that prepares a data set of the Hugging Face hub, `path` unless --path gives another."""
    flags = parser(doc, here)
    flags.add_argument("--path", default=path, help=f"OWNER/NAME[@REVISION][:CONFIG], or local files (default {path})")
    flags.add_argument("--shards", type=int, default=0, help="number of full shards to train on, 0 = all (default 0)")
    flags.add_argument("--tokenizer", type=ready_tokenizer, default="gpt2", help="gpt2, byte or hf:DIR (default gpt2)")
    args = flags.parse_args()
    try:
        files = find_files([args.path])
    except ValueError:
        if os.path.exists(args.path) or not ADDRESS.fullmatch(args.path):
            raise
        files = hub_files(args.path)
    prepare(args, files, shards=args.shards)
