"""The loss of a step is the mean over its targets, however unevenly they are spread over micro-batches and ranks."""

from functools import cache

import pytest
import torch

from configurator import parse
from engine.config import Config
from engine.evaluation import mean_loss
from engine.parallel import ranks as parallel
from engine.parallel.sharded import ShardedModel
from model import Model
from tests.helpers import TINY
from tests.ranks import launch

N = 8  # sequences of a step
T = 16
V = 40
MASKED = ["--objective=masked"]
COUNTS = {  # name -> targets at the beginning of each sequence, so that the pieces of cp have unequally many
    "uneven": [16, 0, 1, 3, 0, 9, 2, 0],
    "one": [0, 0, 0, 0, 0, 1, 0, 0],
    "none": [0] * N,
}
LAYOUTS = [  # layout, number of micro-batches of all ranks, flags of an objective that goes with it
    ([], 2, MASKED),
    ([], 8, MASKED),
    (["--parallel=fsdp"], 8, MASKED),
    (["--cp=2"], 1, []),
    (["--cp=2"], 2, []),
    (["--pp=2"], 8, MASKED),
]


def sequences(counts: list[int]) -> dict[str, torch.Tensor]:
    text = torch.randint(V, (N, T + 1), generator=torch.Generator().manual_seed(0))
    counted = torch.arange(T) < torch.tensor(counts)[:, None]
    return {"idx": text[:, :-1], "targets": text[:, 1:].where(counted, -1)}


def config(*flags: str):
    return parse(Config, [*TINY, f"--vocab_size={V}", *flags])


@cache
def expected(*flags: str) -> list[list[float]]:
    """[loss, norm of its gradient, loss again] of one process and one micro-batch, for each of COUNTS."""
    cfg = config(*flags)
    model = Model(cfg, cfg.seed)
    found = []
    for counts in COUNTS.values():
        batch = sequences(counts)
        targets = batch["targets"]
        log_p = model(batch["idx"]).log_softmax(-1)
        of_targets = log_p.gather(2, targets.clamp(min=0)[..., None])[..., 0]
        loss = -(of_targets * (targets >= 0)).sum() / max(1, sum(counts))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([each.norm() for each in gradients]).norm()
        found.append([loss.item(), norm.item(), loss.item()])
    return found


def steps(n: int, *flags: str) -> list[list[float]]:
    """[loss, norm, loss of an evaluation] of a step of n micro-batches, for each of COUNTS, on these ranks."""
    cfg = config(*flags, f"--batch_size={N // n}", f"--gradient_accumulation_steps={n}")
    ranks = parallel.join(cfg)
    sharded = ShardedModel(cfg, ranks)
    sharded.init_weights(cfg.seed)
    if cfg.objective == "causal":  # the targets here are not those of the objective
        sharded.equal_targets = False
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    share = n // ranks.data_size
    found = []
    for counts in COUNTS.values():
        texts = {name: x.split(N // n) for name, x in sequences(counts).items()}
        mine = range(ranks.data_rank * share, (ranks.data_rank + 1) * share)
        parts = [{name: pieces[i] for name, pieces in texts.items()} for i in mine]
        loss = sharded.mean(sharded.backward(iter(parts), share, scaler))
        norm = sharded.clip(0.0).item()
        sharded.model.zero_grad(set_to_none=True)
        evaluated = mean_loss(sharded, parts)
        sharded.reshard_after_eval()
        found.append([loss, norm, evaluated.nats if evaluated.targets else 0.0])
    return found


@pytest.mark.parametrize("flags", [[], MASKED, ["--loss_chunk=3"]], ids=str)
def test_accumulation_is_the_mean_over_targets(flags, in_this_process):
    torch.set_default_dtype(torch.float64)
    for n in (1, 2, 4, 8):
        torch.testing.assert_close(steps(n, *flags), expected(*flags), rtol=1e-9, atol=1e-12)


def compare_layouts():
    torch.set_default_dtype(torch.float64)
    for layout, n, flags in LAYOUTS:
        print(layout, n)  # before the error, if there is one
        torch.testing.assert_close(steps(n, *layout, *flags), expected(*flags), rtol=1e-9, atol=1e-12)


def test_layouts_compute_the_mean_over_targets(tmp_path):
    """Of gradients, norms and evaluations; test_gradients has each flag of the network."""
    launch(2, compare_layouts, tmp_path)
