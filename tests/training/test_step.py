"""One step: its dtype, dropout and recomputation, spikes, and the trace of some steps."""

import json
import re
import shutil
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import evaluate
import model
import ops
import sample
from engine import optim
from engine.config import Config
from engine.parallel import ranks as parallel
from engine.parallel.sharded import ShardedModel
from engine.step import Watch
from tests.helpers import Operations, losses, metrics

ALONE = parallel.Ranks(0, 1, torch.device("cpu"), torch.float32, False)
FLAT = dict(n_layer=2, n_head=2, n_embd=16, block_size=16)  # TINY's model
SEQ2SEQ = ["--objective=seq2seq", "--corrupt_ratio=0.3", "--span_length=1.5", "--doc_mask=True", "--n_encoder_layer=1"]


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("flags", [{"block": "c.own_slots"}, {"objective": "seq2seq", "attn_softcap": 3.0}], ids=str)
def test_recomputation_draws_the_same_masks(monkeypatch, flags, kind):
    """With dropout everywhere, the gradient is digit for digit that of the same seed without recomputation."""
    torch.manual_seed(0)
    batch = {name: torch.randint(30, (4, 16)) for name in ("idx", "targets", "source")}
    batch = {name: x for name, x in batch.items() if name != "source" or "objective" in flags}
    dropped = ops.dropped
    drawn = []
    monkeypatch.setattr(ops, "dropped", lambda x, p: drawn.append(p) or dropped(x, p))

    def gradients(seed: int, kind: str) -> dict[str, torch.Tensor]:
        cfg = Config(**FLAT, **flags, vocab_size=30, dropout=0.3, activation_checkpoint=kind)
        replica = ShardedModel(cfg, ALONE)
        replica.init_weights(cfg.seed)
        torch.manual_seed(seed)
        drawn.clear()
        replica.backward(iter([batch] * 2), 2, torch.amp.GradScaler("cpu", enabled=False))
        return {name: p.grad for name, p in replica.model.named_parameters()}

    plain = gradients(1, "none")
    masks = len(drawn)
    again = gradients(1, kind)
    masks_again = len(drawn)
    other = gradients(2, kind)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert not any(torch.equal(other[name], plain[name]) for name in plain)
    assert masks_again > masks


def test_the_gradient_of_dropout_is_that_of_its_masks():
    """Against finite differences, as the strips of attention are computed again in the backward."""
    net = model.Model(model.ModelConfig(**FLAT | {"block_size": 150}, vocab_size=30, dropout=0.3), seed=0).double()
    torch.manual_seed(0)
    idx, targets = torch.randint(30, (2, 2, 150))
    direction = {name: torch.randn_like(p) for name, p in net.named_parameters()}

    def loss(step: float) -> torch.Tensor:
        torch.manual_seed(1)
        moved = {name: p + step * direction[name] for name, p in net.named_parameters()}
        return torch.func.functional_call(net, moved, (idx, targets))

    loss(0.0).backward()
    slope = sum((p.grad * direction[name]).sum().item() for name, p in net.named_parameters())
    with torch.no_grad():
        difference = (loss(1e-6) - loss(-1e-6)).item() / 2e-6
    assert slope == pytest.approx(difference, rel=1e-6)


PRODUCTS = tuple(f"aten.{name}." for name in "mm addmm bmm baddbmm linear matmul".split())


@pytest.mark.parametrize("flags", [
    ["--bias=True", "--loss_chunk=24"],
    ["--block=c.own_slots", "--pos=alibi", "--activation_checkpoint=full"],
    [*SEQ2SEQ, "--attn_softcap=3.0", "--activation_checkpoint=selective"],
], ids=["standard", "joint", "seq2seq"])  # fmt: skip
def test_products_are_in_the_dtype_of_the_flag(run, monkeypatch, flags):
    """In training, recomputation, evaluations, samples and Muon; parameters and gradients are float32."""
    kept = set()
    backward = ShardedModel.backward
    taken = set()

    def seen(self, *args):
        loss = backward(self, *args)
        kept.update(x.dtype for p in self.model.parameters() for x in (p, p.grad))
        return loss

    def note(f, args, *_):
        if str(f).startswith(PRODUCTS):
            taken.update(x.dtype for x in args[:3] if isinstance(x, torch.Tensor))

    monkeypatch.setattr(ShardedModel, "backward", seen)
    with Operations(note):
        folder = run(*flags, "--dtype=bfloat16", "--optimizer=muon", "--max_iters=1", "--eval_interval=1")
    assert taken == {torch.bfloat16}
    assert kept == {torch.float32}
    prompt = "--start=the <mask>" if "--objective=seq2seq" in flags else "--start=the"
    for program, more in ((sample, [prompt, "--max_new_tokens=4"]), (evaluate, ["--eval_iters=1"])):
        taken.clear()
        with Operations(note):
            program.main([f"--out_dir={folder}", "--dtype=bfloat16", "--device=cpu", *more])
        assert taken == {torch.bfloat16}


def weigh(monkeypatch, factor: Callable[[int], float]) -> SimpleNamespace:
    """From now on the loss of each training step, of two micro-batches, is multiplied by factor(step). Returns how many
    micro-batches are `done`."""
    plain = model.Model.loss
    count = SimpleNamespace(done=0)

    def loss(self, x, targets):
        if not self.training:
            return plain(self, x, targets)
        step = count.done // 2
        count.done += 1
        return plain(self, x, targets) * factor(step)

    monkeypatch.setattr(model.Model, "loss", loss)
    return count


def test_a_spike_is_left_out(run, monkeypatch, capsys):
    """As if the rate were 0 in steps 25, 26 and 32; a resume after the first of them goes on digit for digit."""
    rate = optim.learning_rate
    count = weigh(monkeypatch, lambda step: 1000.0 if step in {7, 25, 26, 32} else 1.0)
    flags = ["--beta1=0", "--beta2=0", "--weight_decay=0", "--grad_clip=0", "--save_interval=26"]
    folder = run(*flags, "--spike_factor=10.0")
    said = re.findall(r"step (\d+) is left out: the norm of its gradient, [\d.e+]+, is (\d+)", capsys.readouterr().out)
    assert [int(step) for step, _ in said] == [25, 26, 32]
    assert all(int(times) > 100 for _, times in said)
    lines = [line for line in metrics(folder) if "lr" in line]
    assert [line.get("skipped", 0) for line in lines[24:34]] == [0, 1, 2, 2, 2, 2, 2, 2, 3, 3]
    count.done = 0
    monkeypatch.setattr(optim, "learning_rate", lambda step, cfg: rate(step, cfg) * (step not in {25, 26, 32}))
    assert [x[1] for x in losses(run(*flags, out="still"))] == [x[1] for x in losses(folder)]
    monkeypatch.setattr(optim, "learning_rate", rate)
    shutil.rmtree(folder / "step_00000040")
    for pointer in ("latest", "best"):
        (folder / pointer).write_text("step_00000026\n")
    before = losses(folder)
    count.done = 2 * 26
    run(*flags, "--spike_factor=10.0", "--init_from=resume")
    assert losses(folder) == before


def spikes(watch: Watch, norms: list[float]) -> list[bool]:
    """Which norms of consecutive steps are spikes."""
    return [bool(watch.spike(norm)) for norm in norms]


def test_a_spike_is_above_the_median_of_the_last_hundred_norms():
    """Of which there are twenty at least. A change that lasts becomes usual."""
    cfg = Config(spike_factor=10.0)
    assert spikes(Watch(cfg, ALONE.device, 19 * [1.0]), [11.0]) == [False]
    assert spikes(Watch(cfg, ALONE.device, 20 * [1.0]), 31 * [11.0]) == [True] * 20 + [False] * 11
    zero = Watch(cfg, ALONE.device, 20 * [0.0])
    assert spikes(zero, [11.0]) == [False]
    assert zero.norms[-1] == 11.0
    long = Watch(cfg, ALONE.device, [])
    assert spikes(long, [*range(1, 301)]) == [False] * 300
    assert long.norms == [*range(201, 301)]  # whose median is 250.5
    assert spikes(long, [2504.0]) == [False]
    assert spikes(long, [2516.0]) == [True]  # of 202 to 300 and 2504
    assert not Watch(Config(), ALONE.device, 20 * [1.0]).norms  # while no norms are kept, these grow old


def test_steps_are_traced(run, capsys):
    """Three steps after the first five, with the same losses. A run that is too short says that it has no trace."""
    short = ["--max_iters=10", "--eval_interval=0"]
    folder = run(*short, "--profile_steps=3", "--max_iters=9")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::_fused_adamw_" for event in events) == 3 * 2  # two groups of parameters
    assert f"trace in {folder}/trace.json" in capsys.readouterr().out
    assert losses(folder) == losses(run(*short, "--max_iters=9", out="plain"))
    folder = run("--max_iters=4", "--profile_steps=3", out="short")
    assert "warning: no trace, as" in capsys.readouterr().out
    assert not (folder / "trace.json").exists()
