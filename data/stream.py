"""A split read by position: its shards, one after another, are a single long array of token ids.

stream = TokenStream("pycode train", [Shard(map_file(folder, name)) for name in names], vocab_size)
stream.read(starts, buffer)                      # row i of buffer (B, N): tokens starts[i] to starts[i] + N
"""

import os
import weakref
from itertools import repeat

import numpy as np

from data.files import open_regular, problem


class Shard:
    """Reads the tokens of one file by position: shard[a:b] is (b - a,), in the file's own integer type.

    Tokens are read by pread and not through the memory map. For a window of 2 KB the map would read up to megabytes
    ahead and keep them in the process's resident memory. It would also kill the process if the file was truncated
    after it was opened; here that is a ValueError.
    """

    def __init__(self, mapped: np.memmap):
        self.path, self.dtype, self.length = mapped.filename, mapped.dtype, len(mapped)
        self.offset = mapped.offset  # bytes before the first token
        self.file = open_regular(self.path)
        weakref.finalize(self, os.close, self.file)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        size = (part.stop - part.start) * self.dtype.itemsize
        content = os.pread(self.file, size, self.offset + part.start * self.dtype.itemsize)
        if len(content) < size:
            fact = f"was truncated: tokens {part.start} to {part.stop} are missing"
            raise problem(self.path.parent, self.path.name, fact)
        return np.frombuffer(content, self.dtype)


class TokenStream:
    """Reads one split, all shards of it, as a single array of ids below `vocab_size`. Errors call it `name`.

    `sources` lists (name, tokens, weight) of each data set in the stream. There is more than one only in a mixture.
    """

    def __init__(self, name: str, shards: list[Shard], vocab_size: int, sources: list[tuple] | None = None):
        self.name, self.shards, self.vocab_size = name, shards, vocab_size
        self.starts = np.cumsum([0, *map(len, shards)])  # first token of each shard; the last entry is the total
        self.sources = sources or [(name, len(self), 1)]
        dtypes = {shard.dtype for shard in shards}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None  # None: the shards differ
        if self.dtype:
            self.files = np.array([shard.file for shard in shards])
            # The byte of token t is file_zeros[shard] + t * itemsize, where t counts from the beginning of the stream.
            self.file_zeros = np.array([shard.offset for shard in shards]) - self.starts[:-1] * self.dtype.itemsize

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, starts: np.ndarray, out: np.ndarray) -> None:
        """Fills row i of `out`, int64 (B, N), with tokens starts[i] to starts[i] + N. IndexError beyond [0, len)."""
        size = out.shape[1]
        if self.dtype and starts.min() >= 0:  # fast path: each window inside one shard, no Python code per window
            shard = np.searchsorted(self.starts[1:-1], starts, "right")
            positions = (self.file_zeros[shard] + starts * self.dtype.itemsize).tolist()  # bytes from the file's begin
            contents = map(os.pread, self.files[shard].tolist(), repeat(size * self.dtype.itemsize), positions)
            content = b"".join(contents)
            if len(content) == out.size * self.dtype.itemsize:
                out[...] = np.frombuffer(content, self.dtype).reshape(out.shape)
                return
        for start, row in zip(starts.tolist(), out, strict=True):
            self._read_across_shards(start, row)

    def _read_across_shards(self, start: int, out: np.ndarray) -> None:
        if not 0 <= start <= start + len(out) <= len(self):
            raise IndexError(f"{self.name} has {len(self)} tokens; cannot read {len(out)} from {start}")
        i, done = int(np.searchsorted(self.starts, start, "right")) - 1, 0
        while done < len(out):
            offset = start + done - int(self.starts[i])
            part = self.shards[i][offset : min(offset + len(out) - done, len(self.shards[i]))]
            out[done : done + len(part)] = part
            done += len(part)
            i += 1
