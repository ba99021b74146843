"""The loss over a fixed set of windows, the bytes of text that its tokens stand for, and a sample of text.

token_bytes, why_no_bytes = byte_lengths(cfg, data, ranks)
found = mean_loss(cfg, ranks, sharded, objective, token_bytes, stop, data.split("val"), n_batches)
"""

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from data.dataset import DataSet, TokenStream
from data.errors import data_errors_end_the_run, require
from data.loader import eval_batches
from data.objective import Objective
from data.tokenizer import Tokenizer
from engine.decode import generate
from engine.parallel.ranks import Ranks
from engine.parallel.sharded import ShardedModel
from engine.stop_signal import StopSignal
from model import Model


def mean_loss(
    cfg, ranks: Ranks, sharded: ShardedModel, objective: Objective, token_bytes: Tensor | None, stop: StopSignal,
    stream: TokenStream, n_batches: int,
) -> tuple[float, float | None] | None:  # fmt: skip
    """(nats per target, bits per byte or None) over a fixed set of windows, which does not depend on the ranks.

    n_batches    of cfg.batch_size windows each, counted over all ranks; 0 means all windows of the stream
    token_bytes  (V,) bytes of text of each token, see `byte_lengths`

    Returns None if the ranks agree to stop meanwhile, because torchrun gives them only 30 s to save.
    """
    batches = eval_batches(
        stream, objective, cfg.batch_size, n_batches, ranks.data_rank, ranks.data_size, cfg.seed, ranks.device
    )
    found = total_loss(ranks, sharded, token_bytes, batches, stop)
    if found is None:
        return None
    nats, tokens, n_bytes = found
    return nats / tokens, nats / math.log(2) / n_bytes if n_bytes else None


@torch.no_grad()
def total_loss(
    ranks: Ranks, sharded: ShardedModel, token_bytes: Tensor | None, batches: Iterable[dict[str, Tensor]],
    stop: StopSignal | None = None,
) -> list[float] | None:  # fmt: skip
    """[nats, number of targets, bytes of text of the targets] of the batches of all ranks together. The bytes are 0
    without `token_bytes`. Returns None if the ranks agree to stop meanwhile."""
    # MPS does not support float64.
    total = torch.zeros(3, dtype=torch.float32 if ranks.device.type == "mps" else torch.float64, device=ranks.device)
    for batch in map(sharded.batch, data_errors_end_the_run(batches)):
        if stop and stop.agreed():
            return None
        targets = batch["targets"]
        counted = (targets >= 0) & sharded.has_loss  # only the last stage of a pipeline has the loss
        total[0] += sharded.loss(batch) * counted.sum()
        total[1] += counted.sum()
        if token_bytes is not None:
            total[2] += (token_bytes[targets.clamp(min=0)] * counted).sum()
    return ranks.sum(total).tolist()


def text_sample(ranks: Ranks, model: Model, tokenizer: Tokenizer, stream: TokenStream, seconds: float) -> str:
    """The first 32 tokens of the stream and the 128 that a causal model continues them with, or those that it writes in
    so many seconds, but at least one. They are drawn at temperature 0.8, from random numbers of their own."""
    start, own = np.empty((1, min(32, model.cfg.block_size)), np.int64), torch.Generator(ranks.device).manual_seed(0)
    stream.read(np.zeros(1, np.int64), start)

    def draw(logits: Tensor) -> Tensor:
        p = torch.softmax(logits[:, : tokenizer.vocab_size] / 0.8, dim=-1)
        return torch.multinomial(p, 1, generator=own)[:, 0]

    ids, end = start[0].tolist(), time.perf_counter() + seconds
    with ranks.autocast(), torch.compiler.set_stance("force_eager") if ranks.compile else nullcontext():
        for token in generate(model, torch.from_numpy(start).to(ranks.device), 128, draw):
            ids.append(token.item())
            if time.perf_counter() > end:
                break
    return tokenizer.decode(ids)


def byte_lengths(cfg, data: DataSet, ranks: Ranks) -> tuple[Tensor | None, str]:
    """((V,) bytes of text of each token, ""), or (None, the reason) on all ranks if one of them cannot know."""
    token_bytes = None
    reason = "another rank cannot read the tokenizer; set TIKTOKEN_CACHE_DIR to a folder that all share"
    try:
        require(cfg.objective == "causal", f"objective={cfg.objective} restores only a part of the text")
        require(data.tokenizer is not None, f"{data.folder} has no tokenizer in a meta.json")
        token_bytes = torch.from_numpy(data.tokenizer.byte_lengths).to(ranks.device)
    except ValueError as error:
        reason = error
    if ranks.sum(torch.tensor(float(token_bytes is None), device=ranks.device)):
        return None, f"no bits per byte: {reason}"
    return token_bytes, ""
