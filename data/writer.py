"""Writes the shards of a data set: all of them or, after an error, none.

dataset.py describes the folder, files.py the format of a shard.
"""

import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from signal import SIG_IGN, SIGHUP, SIGINT, SIGTERM, signal

import numpy as np

from data import files
from data.command import next_command
from data.dataset import MASK, MOVING
from data.errors import printable, require, say
from data.files import HEADER_BYTES, SPLITS, check, display_path, fsync, write_file
from data.lock import locked
from data.tokenizer import Tokenizer

PREPARING = ".preparing"  # the folder in a data set's folder for a preparation that is not complete
SHARD = re.compile(rf"({'|'.join(SPLITS)})({MASK})?_\d{{6}}\.bin")
PROGRESS = "progress.json"  # the file in that folder with the state of a resumable preparation


class ShardWriter:
    """A context that writes documents as shards `{split}_{i:06d}.bin` of at most `shard_tokens` tokens, and meta.json.

    All files are written and fsynced in the folder PREPARING, and moved into place when the block ends. So an exception
    or a power cut before leaves the old data unchanged, and a signal does not stop the moves. With `settings`, a JSON
    object of everything that determines the data, an interrupted preparation continues: the documents that were added
    before the last `save(place)` are there, and `place` has its value (None at a fresh start).
    """

    def __init__(
        self, folder: Path | str, tokenizer: Tokenizer, shard_tokens: int = 100_000_000, settings: dict | None = None
    ):
        self.folder = files.user_path(folder)
        self.tokenizer = tokenizer
        self.shard_tokens = shard_tokens
        self.settings = settings
        self.place = None
        self.magic = next(m for m, (_, t) in files.FORMATS.items() if tokenizer.vocab_size <= np.iinfo(t).max + 1)
        self.version, self.dtype = files.FORMATS[self.magic]
        self.temporary = self.folder / PREPARING
        self.splits: dict[str, dict] = {}
        self.open: dict = {}  # split: the open file of its last shard
        self.unsaved = False  # whether a shard became full after the last `save`
        self.lock = locked(self.folder, "out")

    def __enter__(self) -> "ShardWriter":
        self.lock.__enter__()
        try:
            self._refuse_files_of_others()
            self.temporary.mkdir(exist_ok=True)
            self._resume()
        except BaseException:
            self._close()
            raise
        return self

    def _refuse_files_of_others(self):
        """ValueError if the folder is of another kind, or a file that would be replaced is not of a preparation."""
        meta = self.folder / "meta.json"
        check(not self.temporary.is_symlink(), self.temporary, "is a link", "delete it")
        content = files.read_file(meta, files.LARGEST_JSON) if meta.exists() else b""
        files.check_own(b'"splits"' in content or content == _json(MOVING), self.folder, "out")

    def _resume(self):
        """Restores the state of the last `save`, if any, and deletes all other files of an earlier preparation."""
        path = self.temporary / PROGRESS
        kept = set()
        if self.settings is not None and path.exists():
            start_again = f"delete {display_path(self.temporary)} to start again"
            try:
                saved = files.read_json(path)
                require(saved.pop("sha256") == hashlib.sha256(_json(saved)).hexdigest(), "it was changed")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
                raise files.problem(path, f"cannot be used ({type(e).__name__}: {e})", start_again) from e
            other = [name for name in self.settings if saved["settings"].get(name) != self.settings[name]]
            fact = f"holds an unfinished preparation with another {', '.join(other)}"
            check(not other, self.temporary, fact, f"continue with its flags, or {start_again}")
            self.splits = saved["splits"]
            self.place = saved["place"]
            kept.add(path)
            for split, entry in self.splits.items():
                kept.update(self._reopen(split, shard, start_again) for shard in entry["shards"])
        for file in set(self.temporary.iterdir()) - kept:
            file.unlink()

    def _reopen(self, split: str, shard: dict, remedy: str) -> Path:
        """Finds the file of a saved shard, and opens it behind its tokens if it is not full."""
        file = self.temporary / shard["name"]
        meta = self.folder / "meta.json"
        if not file.exists() and meta.exists() and files.read_json(meta) == MOVING:
            os.replace(self.folder / shard["name"], file)  # it was moved into place before the interruption
        size = HEADER_BYTES + self.dtype.itemsize * shard["tokens"]
        check(file.exists() and file.stat().st_size >= size, file, "differs from its saved state", remedy)
        if not shard["sha256"]:
            self.open[split] = open(file, "r+b")
            self.open[split].seek(size)
        return file

    def save(self, place):
        """Saves everything added so far. `place`, a JSON value, tells the caller from where to continue."""
        for f in self.open.values():
            f.flush()
            os.fsync(f.fileno())
        saved = {"settings": self.settings, "place": place, "splits": self.splits}
        write_file(self.temporary / PROGRESS, _json(saved | {"sha256": hashlib.sha256(_json(saved)).hexdigest()}))
        fsync(self.temporary)
        self.unsaved = False

    def add(self, split: str, tokens: np.ndarray, documents: int = 1, lost: int = 0):
        """Appends the ids (N,) of one or more documents, which lack `lost` bytes of their text, to `split` ("train" or
        "val"). The caller adds end-of-text ids, and of pairs also the marks, to train_mask and val_mask."""
        assert split.removesuffix(MASK) in SPLITS, split
        entry = self.splits.setdefault(split, {"tokens": 0, "documents": 0, "lost": 0, "shards": []})
        entry["documents"] += documents
        entry["lost"] += lost
        entry["tokens"] += len(tokens)
        while len(tokens):
            if split not in self.open:
                shard = {"name": f"{split}_{len(entry['shards']):06d}.bin", "tokens": 0, "sha256": "", "max_token": 0}
                entry["shards"].append(shard)
                self.open[split] = open(self.temporary / shard["name"], "xb")
                self.open[split].write(bytes(HEADER_BYTES))  # written when the number of tokens is known
            shard = entry["shards"][-1]
            room = self.shard_tokens - shard["tokens"]
            part = tokens[:room]
            tokens = tokens[room:]
            self.open[split].write(part.astype(self.dtype).tobytes())
            shard["tokens"] += len(part)
            shard["max_token"] = max(shard["max_token"], int(part.max()))
            if shard["tokens"] == self.shard_tokens:
                self._finish(split)

    def _finish(self, split: str):
        shard = self.splits[split]["shards"][-1]
        with self.open.pop(split) as f:
            f.seek(0)
            f.write(np.array([self.magic, self.version, shard["tokens"]], dtype="<i4").tobytes())
            f.flush()
            os.fsync(f.fileno())
        shard["sha256"] = files.sha256(self.temporary / shard["name"])
        self.unsaved = True

    def __exit__(self, kind, error, traceback):
        try:
            with files.writing(self.folder):
                if error:
                    raise error
                self._commit()
        finally:
            self._close()

    def _close(self):
        for f in self.open.values():
            with suppress(OSError):  # a full disk, which the write has reported
                f.close()
        if not (self.temporary / PROGRESS).exists():
            shutil.rmtree(self.temporary, ignore_errors=True)
        self.lock.__exit__(None, None, None)

    def _commit(self):
        for split in list(self.open):
            self._finish(split)
        meta = {"tokenizer": self.tokenizer.spec, "tokenizer_hash": self.tokenizer.hash}
        meta |= {"vocab_size": self.tokenizer.vocab_size, "eot": self.tokenizer.eot, "splits": self.splits}
        self.tokenizer.save(self.temporary)
        write_file(self.temporary / "meta.json", _json(meta))
        write_file(self.temporary / "moving.json", _json(MOVING))
        handlers = {number: signal(number, SIG_IGN) for number in (SIGINT, SIGTERM, SIGHUP)}
        try:
            # Several renames are not atomic. Until the last one, meta.json warns that old and new shards may be mixed.
            os.replace(self.temporary / "moving.json", self.folder / "meta.json")
            fsync(self.folder)
            for old in self.folder.iterdir():
                if SHARD.fullmatch(old.name):
                    old.unlink()
            for file in sorted(self.temporary.iterdir()):
                if file.name not in ("meta.json", PROGRESS):
                    os.replace(file, self.folder / file.name)
            fsync(self.folder)
            (self.temporary / PROGRESS).unlink(missing_ok=True)
            os.replace(self.temporary / "meta.json", self.folder / "meta.json")
            fsync(self.folder)
        finally:
            for number, handler in handlers.items():
                signal(number, handler)

    def documents(self) -> str:
        """The numbers of documents for people: "95 + 5"."""
        return " + ".join(f"{self.splits[split]['documents']:,}" for split in SPLITS)

    def report(self, what: str = ""):
        """Prints `what` and the numbers of tokens, the folder, and the command that trains on them."""
        lost = sum(each["lost"] for each in self.splits.values())
        if lost > 0:
            say(f"warning: {lost:,} bytes of the text are lost: the tokenizer lacks characters, or changes the text")
        tokens = [self.splits[split]["tokens"] for split in SPLITS]
        found = f"{tokens[0]:,} train + {tokens[1]:,} val tokens in {display_path(self.folder)}"
        print(printable(f"{what}{found}; next: {next_command(self.folder)}"))


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
