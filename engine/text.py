"""A text as a model reads and writes it: prompts, files, their windows and log-probabilities, and samples."""

import codecs
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.errors import require
from data.tokenizer import Tokenizer
from model import Model
from ops import rows_at_once

LARGEST_PROMPT = 2**24  # bytes of a file with a prompt, or with a text to score


def read_text(name: str, value: str, most: int) -> str:
    """The text of the file that the flag `name` names with `value`, a path or FILE:path.

    ValueError unless it is a regular file of UTF-8 text with at most `most` bytes.
    """
    flag, path = f"{name}={value[:200]}", value.removeprefix("FILE:")
    require("\0" not in path, f"{name}={value[:200]!r} holds a NUL, so it is not a path; give the path of a text file")
    try:
        file = Path(path).expanduser()
        require(stat.S_ISREG(file.stat().st_mode), f"{flag} is not a regular file; give the path of a text file")
        with open(file, "rb") as f:  # files under /proc have the size 0 but may have content
            content = f.read(most + 1)
        require(len(content) <= most, f"{flag} has more than {most:,} bytes; shorten it")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} is not UTF-8 text ({error}); convert it, for example with iconv") from None
    except OSError as error:
        raise ValueError(f"{flag} cannot be read ({error.strerror}); give the path of a text file") from None
    except RuntimeError as error:  # of expanduser
        raise ValueError(f"{flag} cannot be found ({error}); give the path of a text file") from None


def read_prompt(start: str) -> str:
    """Reads the prompt of --start. FILE:path must be a regular file of UTF-8 text, else ValueError."""
    if not start.startswith("FILE:"):
        return start
    return read_text("start", start, LARGEST_PROMPT).replace("\r\n", "\n").replace("\r", "\n")


def token_ids(tokenizer: Tokenizer, text: str) -> Tensor:
    """The ids of the text, (N,), after those that the tokenizer puts before every text."""
    return torch.from_numpy(np.concatenate([np.array(tokenizer.prefix, np.int64), tokenizer.encode(text)]))


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of the prompt. An empty prompt becomes end-of-text, or a newline if there is no end-of-text."""
    text = prompt or ("\n" if tokenizer.eot is None else "")
    try:
        return token_ids(tokenizer, text).tolist() or [tokenizer.eot]
    except ValueError:
        require(prompt, "start='' means a newline here, which the tokenizer lacks; pass --start=TEXT")
        raise


def text_batches(
    ids: Tensor, block_size: int, batch_size: int, data_rank: int, data_size: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """This rank's batches of a text, ids (N,): windows of block_size inputs, one after another, so that each token but
    the first is a target once. The last windows are padded with targets of -1; all ranks get as many batches."""
    T = min(block_size, len(ids) - 1)
    n = -(-(len(ids) - 1) // T)  # windows
    B = min(batch_size, -(-n // data_size))
    n = -(-n // (B * data_size)) * B * data_size
    ids = F.pad(ids, (0, n * T + 1 - len(ids)), value=-1)
    windows = zip(ids[:-1].view(-1, B, T), ids[1:].view(-1, B, T), strict=True)
    for number, (idx, targets) in enumerate(windows):
        if number % data_size == data_rank:
            yield {"idx": idx.clamp(min=0).to(device), "targets": targets.to(device)}


@torch.inference_mode()
def token_logprobs(model: Model, ids: Tensor) -> Iterator[float]:
    """The log-probabilities, in nats, of ids[1], ids[2], ..., each given the ids before it; ids (N,).

    Within block_size the context of a token is the whole text before it. Beyond, windows of block_size inputs overlap
    by half, so the context has at least half of block_size tokens.
    """
    limit, N = model.cfg.block_size, len(ids) - 1
    step, chunk = max(1, limit // 2), rows_at_once(model.cfg.loss_chunk, model.cfg.vocab_size, ids.device)
    start = done = 0  # inputs before the window; targets that have their log-probability
    while done < N:
        end = min(start + limit, N)
        x = model.hidden(ids[None, start:end])[0, done - start :]  # (T, C)
        for part, targets in zip(x.split(chunk), ids[done + 1 : end + 1].split(chunk), strict=True):
            yield from model.logits(part).log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
        start, done = start + step, end


class Sample:
    """A sample while it is generated: takes bytes, returns complete characters, ends at end-of-text or `stop`."""

    def __init__(self, stop: str):
        self.text, self.stop, self.ended = "", stop, False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes, last: bool) -> str:
        """Adds the bytes of a token, and returns the text that from now on certainly belongs to the sample."""
        settled = self.settled()
        self.text += self.decoder.decode(piece, final=last)
        if self.stop and self.stop in self.text:
            self.text, self.ended = self.text[: self.text.index(self.stop)], True
        self.ended |= last
        return self.text[settled : self.settled()]

    def settled(self) -> int:
        """The number of characters that certainly belong to the sample: the rest may be the beginning of `stop`."""
        held = 0 if self.ended else len(self.stop) - 1
        overlaps = (n for n in range(held, 0, -1) if self.text.endswith(self.stop[:n]))
        return len(self.text) - next(overlaps, 0)
