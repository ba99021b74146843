"""Writes checkpoints of torch.distributed.checkpoint (DCP) with a SHA-256 of every piece, which reader.py verifies.

A piece is one rank's part of one tensor. DCP's table `.metadata` has an entry for each piece, with its file, offset and
length. This writer adds an attribute `sha256` to the entry, which DCP's own reader ignores.

Import this module only where it is needed: it imports DCP, which takes a second.
"""

import hashlib
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemWriter


class DigestWriter(FileSystemWriter):
    """Writes pieces for DCP, and computes the SHA-256 of each piece meanwhile. Raises OSError if the disk is full."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.transforms = self  # DCP calls its transform_save_stream for each piece
        self.pieces: dict[Any, _Piece] = {}

    def transform_save_stream(self, item: Any, stream: IO[bytes]) -> tuple["_Piece", list[str]]:
        piece = self.pieces[item.index] = _Piece(stream)
        return piece, []

    def write_data(self, plan, planner):
        try:
            written = super().write_data(plan, planner)
        except RuntimeError:  # for a full disk, torch's archive writer says only: unexpected pos 704 vs 598
            failures = [piece.failure for piece in self.pieces.values() if piece.failure]
            if failures:
                raise failures[0] from None
            raise
        for result in written.value():
            result.storage_data.sha256 = self.pieces[result.index].digest.digest()
        return written


class _Piece:
    """A stream into an open file that computes the SHA-256 of the bytes written, and keeps the error that ended it."""

    def __init__(self, stream: IO[bytes]):
        self.stream, self.digest, self.failure = stream, hashlib.sha256(), None

    def write(self, data) -> int:
        self.digest.update(data)
        try:
            return self.stream.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self):
        self.stream.flush()

    close = flush  # the file stays open for further pieces
