"""What a model answers to the sources of pairs, compared with their targets."""

import json
from collections import defaultdict
from typing import BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor

from data.dataset import TokenStream
from data.pairs import documents
from data.tokenizer import Tokenizer
from engine.decode import generate
from model import Model


def read_pairs(stream: TokenStream, eot: int, n: int) -> list[tuple[list[int], list[int]]]:
    """The ids of the source and of the first target, without end-of-text, of the stream's first n pairs; 0 = all."""
    pairs = []
    for first, target, end in documents(stream)[: n or None].tolist():
        source = stream.read(first, target).tolist()
        rest = stream.read(target, end).tolist()
        pairs.append((source, rest[: rest.index(eot)]))
    return pairs


@torch.inference_mode()
def greedy(model: Model, tokenizer: Tokenizer, sources: Tensor) -> list[list[int]]:
    """The answers to sources (B, S): the most likely token at each step, until end-of-text or the end of the window."""
    eot = tokenizer.eot
    begin = sources
    encoded = None
    if model.encoder:
        begin = sources.new_full((len(sources), 1), eot)
        encoded = F.pad(sources, (0, 1), value=eot)
    room = model.cfg.block_size + 1 - begin.size(1)
    written = []
    ended = torch.zeros(len(sources), dtype=torch.bool, device=sources.device)
    for tokens in generate(model, begin, room, lambda logits: logits[:, : tokenizer.vocab_size].argmax(-1), encoded):
        written.append(tokens)
        ended |= tokens == eot
        if ended.all():
            break
    answers = torch.stack(written, dim=1).tolist()
    return [answer[: answer.index(eot)] if eot in answer else answer for answer in answers]


def answer(model: Model, tokenizer: Tokenizer, stream: TokenStream, batch_size: int, n: int, file: BinaryIO) -> float:
    """Writes the source, the first target and the answer of the stream's first n pairs, all if n is 0, into a file, a
    JSON object in each line. Returns the share of answers that are the target. A batch has sources of one length, so it
    needs no padding, and an answer depends on its own source alone."""
    pairs = read_pairs(stream, tokenizer.eot, n)
    of_length = defaultdict(list)
    for i, (source, _) in enumerate(pairs):
        of_length[len(source)].append(i)
    answers: dict[int, list[int]] = {}
    for places in of_length.values():
        for start in range(0, len(places), batch_size):
            rows = places[start : start + batch_size]
            sources = torch.tensor([pairs[i][0] for i in rows], device=model.wte.weight.device)
            answers |= dict(zip(rows, greedy(model, tokenizer, sources), strict=True))
    right = 0
    for i, (source, target) in enumerate(pairs):
        right += answers[i] == target
        record = {
            "source": tokenizer.decode(source),
            "target": tokenizer.decode_rest(target),  # which continues the source
            "answer": tokenizer.decode_rest(answers[i]),
        }
        line = json.dumps(record, ensure_ascii=False) + "\n"
        file.write(line.encode())
    return right / len(pairs)
