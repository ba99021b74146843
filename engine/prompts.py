"""A text as a model reads and writes it: prompts, files and their windows, and samples."""

import codecs
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from data.errors import one_line, require, say
from data.files import decoded, read_file, user_path
from data.tokenizer import Tokenizer

LARGEST_PROMPT = 2**24  # bytes of a file with a prompt


def read_text(flag: str, value: str, most: int) -> str:
    """The text of the file that `flag` names with `value`, a path or FILE:path. ValueError unless it is a regular file
    of UTF-8 text with at most `most` bytes."""
    where = f"{flag}={value[:200]}"
    try:
        content = read_file(user_path(value.removeprefix("FILE:")), most)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {one_line(error)}; give the path of a text file") from None
    return decoded(where, content)


def read_prompt(start: str) -> str:
    """The prompt of --start, which may be FILE:path."""
    if not start.startswith("FILE:"):
        return start
    return read_text("start", start, LARGEST_PROMPT)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of the prompt. An empty prompt becomes end-of-text, or a newline if there is no end-of-text."""
    if tokenizer.eot is not None and tokenizer.end_text in prompt:
        say(f"warning: {tokenizer.end_text} in the prompt is ordinary text; an empty prompt is end-of-text")
    if not prompt and tokenizer.eot is None:
        prompt = "\n"
    return tokenizer.encode_first(prompt).tolist() or [tokenizer.eot]


def check_id(where: str, largest: int, vocab_size: int):
    """ValueError if a model with this vocabulary lacks the largest token of a text."""
    fact = f"{where} has token id {largest}, and the model has {vocab_size}"
    require(largest < vocab_size, f"{fact}; see to its tokenizer")


def text_batches(
    ids: Tensor, block_size: int, batch_size: int, data_rank: int, data_size: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """This rank's batches of a text, ids (N,): windows of block_size inputs, one after another, so that each token but
    the first is a target once. The last windows are padded with targets of -1; all ranks get as many batches."""
    n = len(ids) - 1  # targets
    T = min(block_size, n)
    windows = -(-n // T)
    B = min(batch_size, -(-windows // data_size))
    rounds = -(-windows // (B * data_size))  # batches of each rank
    ids = F.pad(ids, (0, rounds * data_size * B * T - n), value=-1)
    windows = zip(ids[:-1].view(-1, B, T), ids[1:].view(-1, B, T), strict=True)
    for number, (idx, targets) in enumerate(windows):
        if number % data_size == data_rank:
            yield {"idx": idx.clamp(min=0).to(device), "targets": targets.to(device)}


class Sample:
    """A sample while it is generated: takes bytes, returns complete characters, ends at end-of-text or `stop`."""

    def __init__(self, stop: str):
        self.text = ""
        self.stop = stop
        self.ended = False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes, last: bool) -> str:
        """Adds the bytes of a token, and returns the text that from now on certainly belongs to the sample."""
        settled = self.settled()
        self.text += self.decoder.decode(piece, final=last)
        self.ended = last
        if self.stop and self.stop in self.text:
            self.text = self.text.partition(self.stop)[0]
            self.ended = True
        return self.text[settled : self.settled()]

    def settled(self) -> int:
        """The number of characters that certainly belong to the sample: the rest may be the beginning of `stop`."""
        if self.ended:
            return len(self.text)
        for n in range(len(self.stop) - 1, 0, -1):
            if self.text.endswith(self.stop[:n]):
                return len(self.text) - n
        return len(self.text)
