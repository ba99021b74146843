"""What a model answers to the sources of pairs, compared with their targets."""

import importlib.util
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.dataset import TokenStream
from data.files import write_file
from data.pairs import documents
from data.tokenizer import Tokenizer
from engine.decode import beam_search
from model import Model


@torch.inference_mode()
def answer(
    model: Model, tokenizer: Tokenizer, stream: TokenStream, device: torch.device, batch_size: int, n: int,
    num_beams: int, length_penalty: float, file: str,
) -> dict:  # fmt: skip
    """Writes the source, the first target and the answer of the stream's first n pairs, all if n is 0, into a file, a
    JSON object in each line. Returns the share of answers that are the target, and with sacrebleu the corpus BLEU.

    A batch has sources of one length, so it needs no padding, and an answer depends on its own source alone.
    """
    pairs, eot, limit = [], tokenizer.eot, model.cfg.block_size
    for first, target, end in documents(stream)[: n or None].tolist():
        ids = np.empty((1, end - first), dtype=np.int64)
        stream.read(np.array([first]), ids)
        rest = ids[0, target - first :].tolist()
        pairs.append((ids[0, : target - first].tolist(), rest[: rest.index(eot)]))
    batches, answers = defaultdict(list), {}
    for i, (source, _) in enumerate(pairs):
        batches[len(source)].append(i)
    for length, places in batches.items():
        for start in range(0, len(places), batch_size):
            rows = places[start : start + batch_size]
            idx, source, room = torch.tensor([pairs[i][0] for i in rows], device=device), None, limit + 1 - length
            if model.encoder:
                source, idx, room = F.pad(idx, (0, 1), value=eot), idx.new_full((len(rows), 1), eot), limit
            found = beam_search(model, idx, room, num_beams, eot, tokenizer.vocab_size, source, length_penalty)
            answers |= {i: best for i, (best, *_) in zip(rows, found, strict=True)}
    decodes = tokenizer.decode, tokenizer.decode_rest, tokenizer.decode_rest  # targets continue their sources
    texts = [[f(ids) for f, ids in zip(decodes, (*pair, answers[i]), strict=True)] for i, pair in enumerate(pairs)]
    records = [dict(zip(("source", "target", "answer"), row, strict=True)) for row in texts]
    write_file(
        Path(file).expanduser(), "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records).encode()
    )
    figures = {"exact_match": sum(answers[i] == target for i, (_, target) in enumerate(pairs)) / len(pairs)}
    if importlib.util.find_spec("sacrebleu") is None:
        return figures | {"bleu": None, "note": "no BLEU: pip install -e .[bleu]"}
    import sacrebleu

    _, targets, hypotheses = zip(*texts, strict=True)
    found = sacrebleu.corpus_bleu(hypotheses, [targets])
    if found.totals[-1] == 0:  # then it is 0 by its definition, however good the answers are
        return figures | {"bleu": None, "note": "no BLEU: no answer has four words, whose sequences it counts"}
    return figures | {"bleu": found.score}
