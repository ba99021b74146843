"""The losses of a run on both splits, the loss of any batches, and the answers to the sources of pairs."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from data.dataset import DataSet, TokenStream
from data.errors import data_errors_end_the_run, require
from data.loader import eval_batches, windows_per_source
from data.objective import Objective
from data.pairs import documents
from data.tokenizer import Tokenizer
from engine.config import Config
from engine.decode import generate
from engine.parallel.ranks import Ranks
from engine.parallel.sharded import ShardedModel
from engine.stop_signal import StopSignal
from model import Model


class Loss(NamedTuple):
    """What a model's predictions cost, over the batches of all ranks."""

    nats: float  # per target
    bits: float | None  # per byte of text
    targets: int
    n_bytes: int  # of the text of the targets; 0 if it is not known


@torch.no_grad()
def mean_loss(
    sharded: ShardedModel, batches: Iterable[dict[str, Tensor]], token_bytes: Tensor | None = None,
    stop: StopSignal | None = None,
) -> Loss | None:  # fmt: skip
    """The loss of the batches of all ranks together. `token_bytes` (V,) are the bytes of each token's text. Returns
    None if the ranks agree to stop meanwhile, because torchrun gives them only 30 s to save."""
    device = sharded.ranks.device
    # MPS does not support float64.
    total = torch.zeros(3, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    for batch in map(sharded.batch, data_errors_end_the_run(batches)):
        if stop and stop.agreed():
            return None
        targets = batch["targets"]
        counted = (targets >= 0) & sharded.has_loss  # only the last stage of a pipeline has the loss
        total[0] += sharded.loss(batch) * counted.sum()
        total[1] += counted.sum()
        if token_bytes is not None:
            total[2] += (token_bytes[targets.clamp(min=0)] * counted).sum(dtype=total.dtype)
    nats, tokens, n_bytes = sharded.ranks.sum(total).tolist()
    bits = nats / math.log(2) / n_bytes if n_bytes else None
    return Loss(nats / tokens if tokens else math.nan, bits, int(tokens), round(n_bytes))


class Evaluation:
    """Evaluates a run on both splits of its data. Every rank makes one and calls the same methods."""

    def __init__(
        self, cfg: Config, data: DataSet, streams: dict[str, TokenStream], objective: Objective, sharded: ShardedModel
    ):
        self.cfg = cfg
        self.objective = objective
        self.sharded = sharded
        self.streams = streams  # of train and val
        self.token_bytes, self.why_no_bytes = byte_lengths(cfg, data, streams["val"], sharded.ranks)

    def losses(self, stop: StopSignal) -> tuple[Loss | None, Loss | None]:
        """The losses on train and val, over cfg.eval_iters batches of all ranks together; 0 means the whole validation
        set, and at most 100 batches of the training set. That on val is None if the ranks agree to stop meanwhile."""
        windows = sum(windows_per_source(self.streams["val"], self.cfg.block_size))
        val_batches = math.ceil(windows / self.cfg.batch_size)
        self.sharded.model.eval()
        of_train = self.loss("train", self.cfg.eval_iters or min(val_batches, 100), stop)
        of_val = None
        if of_train is not None:
            of_val = self.loss("val", self.cfg.eval_iters, stop)
        self.sharded.reshard_after_eval()
        self.sharded.model.train()
        return of_train, of_val

    def loss(self, split: str, n_batches: int, stop: StopSignal) -> Loss | None:
        cfg, ranks = self.cfg, self.sharded.ranks
        batches = eval_batches(
            self.streams[split], self.objective, cfg.batch_size, n_batches, ranks.data_rank, ranks.data_size, cfg.seed,
            ranks.device,
        )  # fmt: skip
        return mean_loss(self.sharded, batches, self.token_bytes, stop)


def byte_lengths(cfg: Config, data: DataSet, stream: TokenStream, ranks: Ranks) -> tuple[Tensor | None, str]:
    """((V,) bytes that each token stands for, ""), or (None, the reason) on all ranks if one of them cannot know."""
    token_bytes = None
    reason = "another rank cannot read the tokenizer; set TIKTOKEN_CACHE_DIR to a folder that all share"
    try:
        require(cfg.objective == "causal", f"objective={cfg.objective} does not predict the whole text")
        require(data.tokenizer, f"{data.folder} has no tokenizer in a meta.json")
        require(not math.isnan(stream.lost), f"{stream.name} may lack text; prepare it again, which counts it")
        token_bytes = torch.from_numpy(data.tokenizer.byte_lengths).to(ranks.device) + stream.lost / len(stream)
    except ValueError as error:
        reason = error
    if ranks.sum(torch.tensor(float(token_bytes is None), device=ranks.device)):
        return None, f"no bits per byte: {reason}"
    return token_bytes, ""


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
