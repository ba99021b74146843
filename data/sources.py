"""Reads documents one at a time from files of any size, on this machine or on the Hugging Face hub.

    source = Source(find_files(["books/*.txt", "web", "hf:OWNER/NAME"]))
    for document in source.read(): ...

.jsonl, .ndjson, .json, .parquet    a document is the text in one field of a line or row, or a pair, see pairs.py
every other name                    UTF-8 text; a document is the file, a line, a paragraph, or ends at a separator
.gz, .zst added                     the file is decompressed while it is read

Names are compared without case. What is no UTF-8 text is refused.
"""

import glob
import gzip
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from data.errors import reason, require, say
from data.files import decoded, open_regular
from data.pairs import Segments, of_chat

RECORDS = re.compile(r"\.(jsonl|ndjson|json)(\.gz|\.zst)?$|\.parquet$", re.IGNORECASE)  # their documents are records
IN_FOLDERS = re.compile(r"\.(txt|jsonl|ndjson)(\.gz|\.zst)?$|\.parquet$", re.IGNORECASE)  # names that a folder gives
LARGEST = 32_000_000  # bytes of one document
BLOCK = 2**20  # bytes to read at once
BATCH = 64  # rows of a table to read at once
ENDS = 2**16  # bytes at each end of a file by whose hash it is known
ONE_A_LINE = "correct it, remove it, or write one object a line, as jq -c '.[]' does of a list"
ADDRESS = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::([\w.-]+))?")
LINE_END = re.compile(rb"\n")
BLANK_LINES = re.compile(rb"(?:\A|\n)\s*\n")


def find_files(paths: Iterable[str]) -> list[str]:
    """The files of paths, patterns and folders, sorted, each once, and of addresses hf:OWNER/NAME[@REVISION][:CONFIG]
    on the hub. Says how many there are of several, and what was left out."""
    names: list[str] = []
    left_out: Counter = Counter()
    for path in map(os.path.expanduser, paths):
        if ADDRESS.fullmatch(path):
            names += hub_files(path)
            continue
        if os.path.isdir(path):
            files = list(walk(path, left_out))
            fact = f"no text (.txt), record (.jsonl) or table (.parquet) is in the folder {path!r}"
            require(files, f"{fact}; name other files by a pattern, such as '{path}/*.md'")
        elif os.path.exists(path):
            files = [path]
        else:
            parent = next(filter(os.path.isdir, Path(path).parents), Path())  # whose name may have brackets
            pattern = Path(glob.escape(str(parent)), *Path(path).parts[len(parent.parts) :])
            files = glob.glob(str(pattern), recursive=True)
        regular = [f for f in files if os.path.isfile(f)]
        require(regular, f"no regular file matches {path!r}; check the path, and put quotes around a pattern")
        left_out["names that are no files"] += len(files) - len(regular)
        names += map(os.path.normpath, regular)
    names = sorted(set(names))
    found = {os.path.realpath(name): name for name in reversed(names)}
    left_out["second names of a file"] = len(names) - len(found)
    if len(names) > 1 or left_out.total():
        what = ", ".join(f"{n} {kind}" for kind, n in left_out.items() if n)
        say(f"files to read: {len(found)}; left out: {what or 'none'}")
    return sorted(found.values())


def walk(folder: str, left_out: Counter) -> Iterator[str]:
    """The texts and records below a folder, also in folders that are linked there. Counts the others in `left_out`."""
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(parent) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(parent))
        left_out["hidden names"] += sum(name.startswith(".") for name in folders + names)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            if IN_FOLDERS.search(name):
                yield os.path.join(parent, name)
            else:
                left_out["of other kinds"] += 1


class Document(NamedTuple):
    """A text, or a pair, and its place in the source."""

    text: str | Segments
    number: int  # over all files, from 0
    file: int
    row: int  # in its file, from 1
    position: int  # bytes of the input that are read behind it


@dataclass
class Source:
    """The documents of `files`, which are paths or hf:// addresses."""

    files: list[str]
    documents: str = "file"  # of a text: "file", "line" or "paragraph"; without blank lines and without the line end
    separator: str = ""  # the text between the documents of a text, instead of `documents`
    column: str = "text"  # field of records with the text
    pairs: tuple[str, ...] = ()  # instead of column: the fields of a source and its target, or the one of a chat
    val_fraction: float = 0  # above 0: cuts a single text into two documents, the last part first (`cut_in_two`)
    end: str = ""  # is added to each text that does not end with it

    def __post_init__(self):
        self.columns = self.pairs or (self.column,)
        self.states = [[_hub().size(name)] if name.startswith("hf://") else state(name) for name in self.files]
        self.sizes = [size for size, *_ in self.states]

    def read(self, file: int = 0, row: int = 0, number: int = 0) -> Iterator[Document]:
        """Yields all documents, or those behind a row of a file, the first of which has the number."""
        before = sum(self.sizes[:file])
        for i, name in enumerate(self.files[file:], file):
            for r, (text, position) in enumerate(islice(self._read_file(name), row, None), row + 1):
                if self.end and text and not text.endswith(self.end):
                    text += self.end
                yield Document(text, number, i, r, before + position)
                number += 1
            before += self.sizes[i]
            row = 0

    def _read_file(self, name: str) -> Iterator[tuple[str | Segments, int]]:
        """Yields (text, bytes of the file read so far) of each document."""
        try:
            with _open(name) as raw:
                if name.lower().endswith(".parquet"):
                    documents = self._rows(name, raw)
                elif RECORDS.search(name):
                    documents = self._json_texts(name, _decompressed(name, raw))
                else:
                    documents = self._plain_texts(name, _decompressed(name, raw))
                for text in documents:
                    yield text, raw.tell()
        except ImportError as e:
            raise ValueError(f"{name} needs {e.name} to be read; pip install -e .[data]") from None
        except Exception as e:  # file systems and decompressors raise errors of many types
            if type(e) is ValueError:
                raise
            remedy = "try again, unpack it, replace it, or leave it out"
            if "too much memory" in str(e):  # the window of zstd --long
                remedy = f"unpack it with zstd -d --long=31 '{name}'"
            raise ValueError(f"{name} cannot be read ({reason(e)}); {remedy}") from e

    def _plain_texts(self, name: str, f) -> Iterator[str]:
        for offset, content in self._parts(f):
            if len(content) > LARGEST and b"\0" not in content:
                fact = f"{name}: the document that begins at byte {offset} has more than {LARGEST // 10**6} MB"
                raise ValueError(f"{fact}; cut the text, for example with --documents=paragraph or --documents=line")
            text = decoded(name, content, offset)
            if self.val_fraction:
                yield from cut_in_two(text, self.val_fraction)
            elif self.separator or self.documents != "file":
                yield text.strip("\r\n")
            else:
                yield text

    def _parts(self, f) -> Iterable[tuple[int, bytes]]:
        """(offset, content) of each document of a text. One that is longer than LARGEST may be cut."""
        if self.separator:
            return _split(f, re.compile(re.escape(self.separator.encode())), self.separator.encode())
        if self.documents == "paragraph":
            return _split(f, BLANK_LINES, b"\n\n")
        if self.documents == "line":
            return _split(f, LINE_END, b"\n")
        return [(0, f.read(LARGEST + 1))]

    def _json_texts(self, name: str, f) -> Iterator[str | Segments]:
        for number, line in enumerate(iter(lambda: f.readline(LARGEST + 1), b""), 1):
            if not line.strip():
                continue
            where = f"{name}:{number}"
            require(len(line) <= LARGEST, f"{where} has more than {LARGEST // 10**6} MB; {ONE_A_LINE}")
            try:
                record = json.loads(line, parse_int=lambda digits: int(digits[:4000]))  # more is an error in Python
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{where} is not JSON ({reason(e)}); {ONE_A_LINE}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where} is not a JSON object such as {{{self.columns[0]!r}: ...}}; {ONE_A_LINE}")
            self._check_columns(where, record)
            yield self._document(where, record)

    def _rows(self, name: str, raw) -> Iterator[str | Segments]:
        from pyarrow.parquet import ParquetFile

        table = ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
        self._check_columns(name, table.schema_arrow.names)
        row = 0
        for batch in table.iter_batches(BATCH, columns=[*self.columns], use_threads=False):
            for record in batch.to_pylist():
                row += 1
                yield self._document(f"{name}, row {row}", record)

    def _check_columns(self, where: str, names: Iterable[str]):
        for column in self.columns:
            if column not in names:
                raise ValueError(f"{where} has no field {column!r}; pass --field or --pairs of {', '.join(names)}")

    def _document(self, where: str, record: dict) -> str | Segments:
        """The document of a line or row. ValueError if a field holds no text, or no chat."""
        texts = [record[column] for column in self.columns]
        if len(self.pairs) == 1:
            return of_chat(f"{where}: {self.pairs[0]}", texts[0])
        for column, text in zip(self.columns, texts, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"{where}: {column} is {ascii(text):.40}, not text; remove it, or pass another field")
        if self.pairs:
            return [(texts[0], False), (texts[1], True)]
        return texts[0]


def cut_in_two(text: str, val_fraction: float) -> list[str]:
    """Cuts `text` into [last part, first part]. The last part has `val_fraction` of the characters, or up to half more
    if it can then begin with a line. A text of one character has an empty last part."""
    at = min(max(int(len(text) * (1 - val_fraction)), 1), max(len(text) - 1, 1))
    at = text.rfind("\n", max(at - (len(text) - at) // 2, 0), at) + 1 or at
    return [text[at:], text[:at]]


def state(name: str) -> list:
    """What tells whether a file has changed: its size, the time of its last change and the hash of its ends."""
    with open(name, "rb", opener=open_regular) as f:
        found = os.fstat(f.fileno())
        ends = f.read(ENDS)
        f.seek(max(found.st_size - ENDS, 0))
        return [found.st_size, found.st_mtime_ns, hashlib.sha256(ends + f.read()).hexdigest()]


def _hub():
    from huggingface_hub import HfFileSystem

    return HfFileSystem()


def _open(name: str):
    if name.startswith("hf://"):
        return _hub().open(name)
    return open(name, "rb", opener=open_regular)


def _decompressed(name: str, raw):
    """The open file `raw`, decompressed as its name says."""
    if name.lower().endswith(".gz"):
        return gzip.open(raw)
    if name.lower().endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"))
    return raw


def _split(f, end: re.Pattern, last: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, part) of what stands between matches of `end`, but for blank parts. `last`, which matches, ends
    the file. A part that exceeds LARGEST comes incomplete, as the last one."""
    offset = 0
    rest = b""
    more = True
    while more:
        block = f.read(BLOCK)
        more = block and len(rest) <= LARGEST
        rest += block or last
        start = 0
        for match in end.finditer(rest):
            part = rest[start : match.start()]
            if part.strip():
                yield offset + start, part
            start = match.end()
        offset += start
        rest = rest[start:]
    if rest.strip():
        yield offset, rest


def check_hub():
    """OSError within seconds if the hub does not answer; `datasets` alone would retry for most of a minute."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception as e:  # of the HTTP library that this version of huggingface_hub uses
        raise OSError(f"{constants.ENDPOINT} does not answer: {reason(e)}") from None


def hub_files(address: str) -> list[str]:
    """The hf:// addresses of the training files of hf:OWNER/NAME[@REVISION][:CONFIG], pinned to a commit."""
    name, revision, config = ADDRESS.fullmatch(address).groups()
    try:
        check_hub()
        import datasets

        datasets.disable_progress_bars()
        return datasets.load_dataset_builder(name, config, revision=revision).config.data_files["train"]
    except ImportError as e:
        raise ValueError(f"{address} needs {e.name} to be read; pip install -e .[data]") from None
    except Exception as e:  # any type: name, configuration, format, access, network
        remedy = "check the name and the network, or pass --input= a folder with its .parquet or .jsonl files"
        raise ValueError(f"{address} cannot be read from the hub ({reason(e)}); {remedy}") from e
