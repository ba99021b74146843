"""The losses of a run on both splits, and the loss of any batches."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from data.dataset import DataSet, TokenStream
from data.errors import data_errors_end_the_run, require
from data.loader import count_windows, eval_batches
from data.objective import Objective
from engine.config import Config
from engine.parallel.ranks import Ranks
from engine.parallel.sharded import ShardedModel
from engine.stop_signal import StopSignal


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
        val_batches = math.ceil(count_windows(self.streams["val"], self.cfg.block_size) / self.cfg.batch_size)
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
