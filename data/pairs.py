"""Pairs: texts of which a model learns only a part, such as translations, prompts with completions, and chats.

    parts = [("two plus two = ", False), ("four", True)]        # a document: (text, whether it is a target)
    ids, marks = encode(tokenizer, parts)                       # as they are stored: in the split train, in train_mask

Each target ends with end-of-text. The mask is a stream of its own, one mark for each token: TARGET on the tokens of a
target and on its end-of-text, FIRST on the first token of a document, 0 on others. Documents are read whole: `pack`
fills each window with as many consecutive ones as fit.
"""

from collections.abc import Callable

import numpy as np

from data.base_tokenizer import Tokenizer
from data.dataset import FIRST, N_MARKS, TARGET, TokenStream
from data.errors import require

PADDING = 4  # the mark of tokens that fill a window
WRONG_MASK = "the mask of {} has documents without a source or a target; prepare the data again"
Segments = list[tuple[str, bool]]


def of_chat(where: str, messages) -> Segments:
    """The parts of a chat, a list of {"role": ..., "content": ...}: an assistant's contents are targets, and each
    message begins with a line of its role, such as <|user|>. ValueError names the place of what is no chat."""
    shape = f'{where} is no chat; write a list of {{"role": "user" or "assistant", "content": TEXT}}'
    require(isinstance(messages, list), shape)
    parts = []
    text = ""
    for number, message in enumerate(messages, 1):
        require(isinstance(message, dict) and isinstance(message.get("role"), str), shape)
        role = message["role"]
        content = message.get("content")
        fact = f"{where}: the content of message {number} is {ascii(content):.40}, not text"
        require(isinstance(content, str), f"{fact}; write a text, or leave the message out")
        text += f"<|{role}|>\n"
        if role == "assistant":
            parts += [(text, False), (content, True)]
            text = ""
        else:
            text += f"{content}\n"
    require(parts, f"{where} has no message of the role assistant, so there is nothing to learn; remove it")
    return parts


def encode(tokenizer: Tokenizer, parts: Segments) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a document and their marks, each (N,) int64. An empty source becomes end-of-text, as an empty prompt
    does when a text is sampled."""
    (first, _), *rest = parts
    ids = [tokenizer.encode_first(first)]
    if not len(ids[0]):
        ids = [tokenizer.end]
    marks = [0]
    for text, target in rest:
        ids.append(tokenizer.encode_rest(text))
        if target:
            ids[-1] = np.append(ids[-1], tokenizer.end)
        marks.append(TARGET * target)
    marks = np.repeat(marks, [len(part) for part in ids])
    marks[0] |= FIRST
    return np.concatenate(ids), marks


def documents(stream: TokenStream) -> np.ndarray:
    """The first token, the first target and the end of each document, int64 (n, 3). ValueError for a wrong mask."""
    firsts = []
    targets = []
    place = 0
    for shard in stream.mask.shards:
        marks = np.memmap(shard.path, shard.dtype, "r", shard.offset)  # for a single pass
        require(marks.max() < N_MARKS, f"the mask of {stream.name} has the mark {marks.max()}; prepare the data again")
        target = (marks & TARGET) > 0
        firsts.append(place + np.flatnonzero(marks & FIRST))
        targets.append(place + np.flatnonzero(target & ~np.append(False, target[:-1])))  # the first of each run
        place += len(marks)
    firsts = np.concatenate(firsts)
    targets = np.concatenate(targets)
    ends = np.append(firsts[1:], len(stream))
    found = np.append(targets, len(stream))[np.searchsorted(targets, firsts)]
    whole = len(firsts) and firsts[0] == 0 and (firsts < found).all() and (found < ends).all()
    require(whole, WRONG_MASK.format(stream.name))
    return np.stack((firsts, found, ends), axis=1)


def pack(stream: TokenStream, sizes: Callable[[np.ndarray], np.ndarray], limit: int, block_size: int):
    """Sets stream.packs: for each of its sources the first token and the end of every window, int64 (n, 2); and
    stream.ends, those of all. A window has as many consecutive documents as fit: the sums of their `sizes`, (n, 3) ->
    (n, k), are `limit` at most. ValueError for a document that is larger; it names a block_size that is enough."""
    found = documents(stream)
    each = sizes(found)
    most = int(each.max())
    stream.packs = []
    place = 0
    fact = f"{stream.name} has a pair of {most} tokens, too long for block_size={block_size}"
    require(most <= limit, f"{fact}; set block_size to {block_size + most - limit} or more, or remove it from the data")
    total = np.cumsum(np.pad(each, ((1, 0), (0, 0))), axis=0)
    for _, tokens, _ in stream.sources:
        i, end = np.searchsorted(found[:, 0], (place, place + tokens))
        require(i < end and found[i, 0] == place, WRONG_MASK.format(stream.name))
        bounds = [i]
        while i < end:
            i = min(end, *(np.searchsorted(row, row[i] + limit, "right") - 1 for row in total.T))
            bounds.append(i)
        starts = np.append(found[:, 0], len(stream))[bounds]
        stream.packs.append(np.stack((starts[:-1], starts[1:]), axis=1))
        place += tokens
    stream.ends = np.concatenate(stream.packs)
