"""The losses of a run on both splits, the loss of any batches, and a sample of text."""

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from data.dataset import DataSet, TokenStream
from data.errors import data_errors_end_the_run
from data.loader import count_windows, eval_batches
from data.objective import Objective
from engine.decode import generate
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
            total[2] += (token_bytes[targets.clamp(min=0)] * counted).sum()
    nats, tokens, n_bytes = sharded.ranks.sum(total).tolist()
    bits = nats / math.log(2) / n_bytes if n_bytes else None
    return Loss(nats / tokens if tokens else math.nan, bits, int(tokens), int(n_bytes))


class Evaluation:
    """Evaluates a run on both splits of its data. Every rank makes one and calls the same methods. `writes_texts` says
    whether `text` can be called: a rank must have all weights, and whole sequences."""

    def __init__(
        self, cfg, data: DataSet, streams: dict[str, TokenStream], objective: Objective, sharded: ShardedModel
    ):
        self.cfg = cfg
        self.objective = objective
        self.sharded = sharded
        self.tokenizer = data.tokenizer
        self.streams = streams  # of train and val
        self.token_bytes, self.why_no_bytes = byte_lengths(cfg, data, sharded.ranks)
        whole = not (sharded.divides or cfg.cp > 1)
        self.writes_texts = cfg.objective == "causal" and self.token_bytes is not None and whole

    def losses(self, stop: StopSignal) -> tuple[Loss, Loss] | None:
        """The losses on train and val, over cfg.eval_iters batches of all ranks together; 0 means the whole validation
        set, and at most 100 batches of the training set. Returns None if the ranks agree to stop meanwhile."""
        val_batches = math.ceil(count_windows(self.streams["val"], self.cfg.block_size) / self.cfg.batch_size)
        self.sharded.model.eval()
        of_train = self.loss("train", self.cfg.eval_iters or min(val_batches, 100), stop)
        of_val = of_train and self.loss("val", self.cfg.eval_iters, stop)
        self.sharded.reshard_after_eval()
        self.sharded.model.train()
        return of_val and (of_train, of_val)

    def loss(self, split: str, n_batches: int, stop: StopSignal) -> Loss | None:
        cfg, ranks = self.cfg, self.sharded.ranks
        batches = eval_batches(
            self.streams[split], self.objective, cfg.batch_size, n_batches, ranks.data_rank, ranks.data_size, cfg.seed,
            ranks.device,
        )  # fmt: skip
        return mean_loss(self.sharded, batches, self.token_bytes, stop)

    def text(self, seconds: float) -> str:
        """The first 32 tokens of the validation set and the 128 that a causal model continues them with, or those that
        it writes in so many seconds, but at least one. They are drawn at temperature 0.8, from random numbers of their
        own."""
        ranks, model = self.sharded.ranks, self.sharded.model
        stream = self.streams["val"]
        start = stream.read(0, min(32, self.cfg.block_size, len(stream)))
        own = torch.Generator(ranks.device).manual_seed(0)

        def draw(logits: Tensor) -> Tensor:
            p = torch.softmax(logits[:, : self.tokenizer.vocab_size] / 0.8, dim=-1)
            return torch.multinomial(p, 1, generator=own)[:, 0]

        ids = start.tolist()
        end = time.perf_counter() + seconds
        model.eval()
        try:
            with ranks.autocast(), torch.compiler.set_stance("force_eager") if ranks.compile else nullcontext():
                for token in generate(model, torch.from_numpy(start[None]).to(ranks.device), 128, draw):
                    ids.append(token.item())
                    if time.perf_counter() > end:
                        break
        finally:
            model.train()
        return self.tokenizer.decode(ids)


def byte_lengths(cfg, data: DataSet, ranks: Ranks) -> tuple[Tensor | None, str]:
    """((V,) bytes of text of each token, ""), or (None, the reason) on all ranks if one of them cannot know."""
    token_bytes = None
    reason = "another rank cannot read the tokenizer; set TIKTOKEN_CACHE_DIR to a folder that all share"
    if cfg.objective != "causal":
        reason = f"objective={cfg.objective} restores only a part of the text"
    elif data.tokenizer is None:
        reason = f"{data.folder} has no tokenizer in a meta.json"
    else:
        try:
            token_bytes = torch.from_numpy(data.tokenizer.byte_lengths).to(ranks.device)
        except ValueError as error:
            reason = error
    if ranks.sum(torch.tensor(float(token_bytes is None), device=ranks.device)):
        return None, f"no bits per byte: {reason}"
    return token_bytes, ""
