"""The loss over a fixed set of windows, and the bytes of text that its tokens stand for.

lengths, why_no_bytes = byte_lengths(cfg, data, ranks)
found = mean_loss(cfg, ranks, sharded, objective, lengths, stop, data.split("val"), n_batches)
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from data.loader import eval_batches
from data.objective import Objective
from data.shards import DataSet
from data.stream import TokenStream
from engine.errors import require, user_errors
from engine.parallel import Ranks
from engine.sharded_model import ShardedModel
from engine.stop_signal import StopSignal


def data_errors_end_the_run(batches: Iterator) -> Iterator:
    """The same batches. An error of the data, such as a shard that was changed, ends the run in one line."""
    with user_errors():
        yield from batches


@torch.no_grad()
def mean_loss(
    cfg,
    ranks: Ranks,
    sharded: ShardedModel,
    objective: Objective,
    lengths: Tensor | None,
    stop: StopSignal,
    stream: TokenStream,
    n_batches: int,
) -> tuple[float, float | None] | None:
    """(nats per target, bits per byte or None) over a fixed set of windows, which does not depend on the ranks.

    n_batches   of cfg.batch_size windows each, counted over all ranks; 0 means all windows of the stream
    lengths     (V,) bytes of text of each token, see `byte_lengths`

    Returns None if the ranks agree to stop meanwhile, because torchrun gives them only 30 s to save.
    """
    # MPS does not support float64.
    total = torch.zeros(3, dtype=torch.float32 if ranks.device.type == "mps" else torch.float64, device=ranks.device)
    batches = eval_batches(
        stream, objective, cfg.batch_size, n_batches, ranks.data_rank, ranks.data_size, cfg.seed, ranks.device
    )
    for batch in map(sharded.batch, data_errors_end_the_run(batches)):
        if stop.agreed():
            return None
        targets = batch["targets"]
        counted = (targets >= 0) & sharded.has_loss  # only the last stage of a pipeline has the loss
        total[0] += sharded.loss(batch) * counted.sum()
        total[1] += counted.sum()
        if lengths is not None:
            total[2] += (lengths[targets.clamp(min=0)] * counted).sum()
    nats, tokens, n_bytes = ranks.sum(total).tolist()
    return nats / tokens, nats / math.log(2) / n_bytes if n_bytes else None


def byte_lengths(cfg, data: DataSet, ranks: Ranks) -> tuple[Tensor | None, str]:
    """((V,) bytes of text of each token, ""), or (None, the reason) on all ranks if one of them cannot know."""
    lengths, reason = None, "another rank cannot read the tokenizer; set TIKTOKEN_CACHE_DIR to a folder that all share"
    try:
        require(cfg.objective == "causal", f"objective={cfg.objective} restores only a part of the text")
        require(data.tokenizer is not None, f"{data.folder} has no tokenizer in a meta.json")
        lengths = torch.from_numpy(data.tokenizer.byte_lengths).to(ranks.device)
    except ValueError as error:
        reason = error
    if ranks.sum(torch.tensor(float(lengths is None), device=ranks.device)):
        return None, f"no bits per byte: {reason}"
    return lengths, ""
