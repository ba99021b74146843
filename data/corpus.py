"""Prepares data sets of any size: reads documents as a stream, splits them by document, encodes them in threads.

    main(__doc__, HERE)                      # the command of data/text; openwebtext has an input by default

Documents are numbered over the sorted files, and a hash of the number decides whether a document validates. Results are
written in the order of the documents, so neither the number of threads nor a restart changes a shard. Memory holds some
jobs of about 1 MB, and a longer document in up to 20 times its size.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from tqdm import tqdm

from data.base_tokenizer import END_OF_TEXT
from data.command import Parser, out_folder
from data.dataset import MASK
from data.errors import reason, require, say
from data.files import SPLITS
from data.hashing import hash64
from data.pairs import Segments, encode
from data.sources import RECORDS, Document, Source, find_files
from data.tokenizer import build
from data.writer import PROGRESS, ShardWriter

JOB_CHARACTERS = 1_000_000  # of a job or more, and of a piece of a longer document
JOB_DOCUMENTS = 4096  # most documents of a job
SAFE_CUT = re.compile(r"\S(?= )|(?<=\S)\n(?=\S)")


def cut(text: str, length: int) -> Iterator[str]:
    """Cuts `text` into pieces of at least `length` characters. Their ids, joined, are the ids of `text`. A word of each
    of our tokenizers ends before a space and after a single newline, where the cuts are. A tokenizer of the kind hf may
    split otherwise; then the tokens at a cut are others."""
    start = 0
    while len(text) - start > length and (found := SAFE_CUT.search(text, start + length)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def whole_text(text: str | Segments) -> str:
    """The text of a document, or those of a pair's parts joined."""
    return text if isinstance(text, str) else "".join(part for part, _ in text)


def make_jobs(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups documents into jobs, each of which a thread encodes at once. Empty documents are in no job."""
    job = []
    size = 0  # characters
    for document in documents:
        if document.text:
            job.append(document)
            size += len(whole_text(document.text))
        if size >= JOB_CHARACTERS or len(job) == JOB_DOCUMENTS:
            yield job
            job = []
            size = 0
    if job:
        yield job


def map_in_order(function: Callable, jobs: Iterable[list], threads: int) -> Iterator[tuple]:
    """Yields (document, result) of all documents of the jobs, in their order. function(job) gives a job's results. At
    most `threads` + 2 jobs are pending."""
    waiting: deque = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for job in jobs:
            waiting.append((job, pool.submit(function, job)))
            if len(waiting) == threads + 2:
                before, results = waiting.popleft()
                yield from zip(before, results.result(), strict=True)
        for before, results in waiting:
            yield from zip(before, results.result(), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for jobs that have not begun


def progress_bar(total: int | None, done: int = 0) -> tqdm:
    """A bar on stderr of the bytes that are read: of `total`, of which `done` were read before. Where stderr is no
    terminal, it is written every half minute."""
    seconds = 0.5 if sys.stderr.isatty() else 30
    how = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, "leave": False}
    return tqdm(initial=done, total=total, delay=seconds, mininterval=seconds, miniters=1, **how)


def read_texts(source: Source) -> Iterator[str]:
    """Yields the text of each document, for a tokenizer that is built from the texts."""
    with progress_bar(sum(source.sizes)) as progress:
        for document in source.read():
            progress.update(document.position - progress.n)
            yield whole_text(document.text)


@dataclass
class Corpus:
    """Writes the documents of `source`, from `out.place` on, into `out`; a `limit` is the most training tokens."""

    out: ShardWriter
    source: Source
    val_fraction: float
    threads: int
    limit: int

    def __post_init__(self):
        self.special = self.out.tokenizer.end_text or END_OF_TEXT.decode()
        self.specials = 0  # documents that hold this text

    def encode(self, job: list[Document]) -> list[dict[str, np.ndarray]]:
        """Of each document, its ids by the name of its split, and of a pair also the marks."""
        found = []
        for document, split in zip(job, self.splits(job), strict=True):
            try:
                if isinstance(document.text, str):
                    found.append({split: self.ids(document.text)})
                else:
                    ids, marks = encode(self.out.tokenizer, document.text)
                    found.append({split: ids, split + MASK: marks})
            except ValueError as e:  # for example a million blanks in a row with gpt2
                where = f"{self.source.files[document.file]}, document {document.row}"
                raise ValueError(f"{where} cannot be encoded ({reason(e)}); change it, or remove it") from e
        return found

    def ids(self, text: str) -> np.ndarray:
        """The ids of a text and of the end-of-text behind it, in the dtype of shards. The text is cut, because some
        libraries need much memory."""
        encode = self.out.tokenizer.encode
        parts = []
        for piece in cut(text, JOB_CHARACTERS):
            parts.append(encode(piece).astype(self.out.dtype))
            encode = self.out.tokenizer.encode_rest
        parts.append(np.array(self.out.tokenizer.end, self.out.dtype))
        return np.concatenate(parts)

    def splits(self, job: list[Document]) -> list[str]:
        numbers = np.array([document.number for document in job], dtype=np.uint64)
        validates = hash64(numbers) / 2.0**64 < self.val_fraction
        if self.source.val_fraction:  # a single text is cut into document 0, which validates, and document 1
            validates = numbers == 0
        return np.where(validates, "val", "train").tolist()

    def tokens(self, split: str) -> int:
        return self.out.splits.get(split, {"tokens": 0})["tokens"]

    def write(self):
        """Writes all documents, saves after each full shard, and checks that both splits can be used."""
        file, row, number = self.out.place or (0, 0, 0)
        if number:
            say(f"continues after {number:,} documents, {self.tokens('train'):,} tokens to train on")
        jobs = make_jobs(self.source.read(file, row, number))
        total = None if self.limit else sum(self.source.sizes)  # how much a limit leaves out is not known
        with progress_bar(total, sum(self.source.sizes[:file])) as progress:
            for document, arrays in map_in_order(self.encode, jobs, self.threads):
                if self.limit and self.tokens("train") == self.limit:
                    break
                for split, tokens in arrays.items():
                    lost = self.out.tokenizer.lost(whole_text(document.text), tokens) if split in SPLITS else 0
                    if self.limit and split == "train":
                        tokens = tokens[: self.limit - self.tokens("train")]
                    self.out.add(split, tokens, int(split in SPLITS), lost)
                number = document.number + 1
                self.specials += self.special in whole_text(document.text)
                if self.out.unsaved:
                    self.out.save((document.file, document.row, document.number + 1))
                progress.set_postfix_str(f"{self.tokens('train'):,} tokens to train on", refresh=False)
                progress.update(document.position - progress.n)
        if self.specials:
            fact = f"{self.specials:,} documents hold {self.special}, which is ordinary text in them"
            say(f"warning: {fact}; pass --separator='{self.special}' where it stands between documents")
        for split in SPLITS:
            if self.tokens(split) < 2:
                (self.out.temporary / PROGRESS).unlink(missing_ok=True)  # which other flags cannot continue
                fact = f"the split {split} has {self.tokens(split)} tokens, and needs two"
                raise ValueError(f"{fact}; {self.more_documents(number)}")

    def more_documents(self, n: int) -> str:
        """What gives both splits documents, of an input that has n of them now."""
        remedy = "add text, or cut a text into more documents with --documents=paragraph"
        if n > 1 and not self.source.val_fraction:
            hashes = np.sort(hash64(np.arange(n, dtype=np.uint64)) / 2.0**64)
            validate = max(1, n // 20)
            remedy += f", or pass --val_fraction={hashes[validate - 1 : validate + 1].mean():.4g}"
        return remedy


def prepare(args: argparse.Namespace, files: list[str]):
    """Prepares the data set of these files that the flags of `main` describe."""
    plain = [f for f in files if not RECORDS.search(f)]
    single = args.documents == "file" and len(files) == len(plain) == 1 and not args.separator
    val_fraction = args.val_fraction
    if val_fraction is None:
        val_fraction = 0.1 if single else 0.005
    pairs = tuple(args.pairs.split(",")) if args.pairs else ()
    check_flags(args, val_fraction, pairs, files, plain)
    folder = out_folder(args.out)
    source = Source(files, args.documents, args.separator, args.field, pairs)
    end = "\n\n" if args.documents == "paragraph" else "\n"
    if single:
        source.val_fraction = val_fraction
        end = ""
    if args.tokenizer == "char" and not pairs:  # it is built from the texts with their ends
        source.end = end
    tokenizer = build(args.tokenizer, partial(read_texts, source))
    if tokenizer.eot is None:
        endless = f"needs an end-of-text behind each target, and tokenizer={args.tokenizer} has none; pass byte"
        require(not pairs, f"pairs={args.pairs} {endless}")
        source.end = end
    tokenizer.encode("")  # loads gpt2's merges, and fails before anything is written
    names = json.dumps([[f if f.startswith("hf://") else os.path.abspath(f) for f in files], source.states])
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "threads", "input")}
    settings |= {"tokenizer": tokenizer.hash, "state of its input": hashlib.sha256(names.encode()).hexdigest()}
    with ShardWriter(folder, tokenizer, args.shard_tokens, settings) as out:
        Corpus(out, source, val_fraction, args.threads, args.shards * args.shard_tokens).write()
    out.report(f"{out.documents()} documents, ")


def check_flags(
    args: argparse.Namespace, val_fraction: float, pairs: tuple[str, ...], files: list[str], plain: list[str]
):
    """ValueError for a flag that is not possible or has no effect; `plain` are the files that hold no records."""
    for name, least in (("threads", 1), ("shard_tokens", 1), ("shards", 0)):
        value = getattr(args, name)
        require(least <= value < 2**31, f"{name}={value} is not possible; pass a number from {least} to {2**31 - 1}")
    require(0 < val_fraction < 1, f"val_fraction={val_fraction} is not possible; pass a number between 0 and 1")
    need = "pass SOURCE,TARGET, or the one field of a chat, of .jsonl or .parquet alone"
    possible = len(pairs) < 3 and all(pairs) and not (pairs and plain)
    require(possible, f"pairs={args.pairs} is not possible for {files[0]}; {need}")
    require(not (pairs and args.shards), f"shards={args.shards} would cut a pair; leave shards or pairs out")
    used = args.field == "text" or len(plain) < len(files) and not pairs
    require(used, f"field={args.field} has no effect on texts and pairs; leave it out")
    used = not args.separator or plain and args.documents == "file"
    require(used, f"separator={args.separator!r} has no effect on records, or with --documents; leave one of them out")


def main(doc: str, here: str, default: str | None = None):
    """A command that prepares files and data sets of the hub, those of `default` unless --input gives others."""
    flags = Parser(doc, here)
    what = "file, pattern, folder, or hf:OWNER/NAME[@REVISION][:CONFIG] of the hub; may be repeated"
    flags.add_argument("--input", action="append", required=not default, help=f"{what} (default: {default})")
    kinds = ("file", "line", "paragraph")
    flags.add_argument("--documents", choices=kinds, default="file", help="what a document of a text is (default file)")
    between = "text between the documents of a text, such as '<|endoftext|>', instead of --documents"
    flags.add_argument("--separator", default="", help=between)
    names = "SOURCE,TARGET, or the field of a chat: fields of pairs (without a value source,target)"
    flags.add_argument("--pairs", nargs="?", const="source,target", help=names)
    fraction = "fraction of the documents for validation (default 0.005; of a single text the last 0.1)"
    flags.add_argument("--val_fraction", type=float, help=fraction)
    flags.add_argument("--field", default="text", help="field of jsonl and parquet with the text (default text)")
    flags.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard (default 100_000_000)")
    flags.add_argument("--shards", type=int, default=0, help="number of full shards to train on, 0 = all (default 0)")
    flags.add_argument("--tokenizer", default="gpt2", help="char, byte, gpt2, bpe:N or hf:DIR (default gpt2)")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags.add_argument("--threads", type=int, default=cpus, help="encoding threads (default: one per allowed CPU)")
    args = flags.parse_args()
    prepare(args, find_files(args.input or [default]))
