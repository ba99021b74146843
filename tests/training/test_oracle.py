"""train.py against tests/oracle.py, which has nothing in common with it: every figure that a run logs, its weights and
the states of its optimizers, in two and a half epochs of 38 windows, with batches of evaluation that are filled up."""

import math

import numpy as np
import pytest
import torch

import model
from data.tokenizer import ByteTokenizer
from data.writer import ShardWriter
from engine.checkpoint import files as checkpoint
from tests import oracle
from tests.helpers import metrics, tensors_in

SHORT = dict(  # what the runs have in common; the oracle knows no default of the project's
    n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=4, gradient_accumulation_steps=3, max_iters=8,
    eval_interval=3, eval_iters=0, warmup_iters=2, learning_rate=1e-2, min_lr=1e-3, weight_decay=0.3, grad_clip=1.0,
    optimizer="adamw", schedule="cosine", lr_decay_iters=0, objective="causal", bias=False, tie_weights=True,
    attention="mha", doc_mask=False, seed=1337,
)  # fmt: skip
DEFAULT = dict(  # of flags that are refused where they have no use
    beta1=0.9, beta2=0.95, muon_lr=0.02, muon_momentum=0.95, cooldown_iters=0, n_kv_head=0, n_encoder_layer=2,
    corrupt_ratio=0.15, span_length=3.0,
)  # fmt: skip
MASKED = dict(objective="masked", corrupt_ratio=0.3)
SEQ2SEQ = dict(objective="seq2seq", corrupt_ratio=0.3, span_length=1.5)
CASES = {
    "AdamW, cosine that ends early, clipping, biases": dict(
        bias=True, gradient_accumulation_steps=1, batch_size=12, grad_clip=1.2, lr_decay_iters=6, weight_decay=0.1
    ),
    "AdamW, constant, other betas, documents, recomputation, loss in chunks": dict(
        schedule="constant", min_lr=None, lr_decay_iters=None, warmup_iters=3, beta1=0.8, beta2=0.99,
        doc_mask=True, eval_iters=3, grad_clip=0.0, seed=5,
        loss_chunk=10, activation_checkpoint="full",
    ),
    "Muon, wsd, grouped queries, untied head": dict(
        optimizer="muon", schedule="wsd", cooldown_iters=4, attention="gqa", n_head=4, n_kv_head=2, tie_weights=False,
        eval_iters=2, grad_clip=100.0,
    ),
    "Muon, cosine, other momentum, clipping, biases": dict(
        optimizer="muon", muon_lr=0.05, muon_momentum=0.8, bias=True, grad_clip=0.5, warmup_iters=0
    ),
    "masked, documents, wsd that ends early": dict(
        MASKED, doc_mask=True, schedule="wsd", warmup_iters=3, lr_decay_iters=7, eval_iters=2
    ),
    "masked, Muon, one micro-batch": dict(
        MASKED, optimizer="muon", gradient_accumulation_steps=1, batch_size=10, corrupt_ratio=0.15, seed=3
    ),
    "seq2seq, documents, biases": dict(SEQ2SEQ, doc_mask=True, bias=True, n_encoder_layer=1, schedule="wsd", seed=2),
    "seq2seq, Muon, grouped queries": dict(
        SEQ2SEQ, optimizer="muon", attention="gqa", n_head=4, n_kv_head=2, eval_iters=3, grad_clip=0.3
    ),
}  # fmt: skip

# Float32 against float64, the most that was seen: losses 1.1e-7 of their size, norms 1.5e-6 (else 3e-7), states of
# optimizers 1.2e-5 (the norm of the difference), weights 1.8e-5. With a rate of 0.02, or some seeds, a token's and a
# place's embedding come to cancel nearly, the first norm divides by what is left, and all errors grow a hundredfold.
FIGURES = 1e-6
NORMS = 1e-5
TENSORS = 1e-4


@pytest.fixture(scope="module")
def short_data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("short"), 25, 622, 245)


def write(folder, every: int, *lengths: int):
    """So many tokens of train and val, in documents of about `every`: letters that depend on those before them."""
    rng = np.random.default_rng(0)
    tokenizer = ByteTokenizer()
    with ShardWriter(folder, tokenizer, shard_tokens=300) as out:
        for split, length in zip(("train", "val"), lengths, strict=True):
            tokens = np.cumsum(rng.integers(0, 3, length)) % 26 + 97
            tokens[rng.random(length) < 1 / every] = tokenizer.eot
            out.add(split, tokens)
    return folder


def flags_of(case: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in (SHORT | case).items() if value is not None]


def expected(case: dict, *sources: oracle.Source, **options) -> tuple[list[dict], dict[str, torch.Tensor]]:
    return oracle.train(DEFAULT | SHORT | case, list(sources), **options)


def approx(x, tolerance: float = FIGURES):
    if isinstance(x, dict):
        return {name: approx(each) for name, each in x.items()}
    return pytest.approx(x, rel=tolerance, abs=0) if isinstance(x, float) else x


def saved(folder) -> dict[str, torch.Tensor]:
    """Weights and states of the optimizers in the last checkpoint."""
    return {name: x for name, x in tensors_in(folder).items() if not name.startswith("rng.")}


def compared(name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
    """x without the biases of keys, whose gradients are rounding: they move all scores of a query alike."""
    if not name.rpartition(".")[0].endswith((".qkv.bias", ".kv.bias")) and not name.endswith((".qkv.bias", ".kv.bias")):
        return x
    return x if x.dim() == 0 else x.view(heads, -1, 16 // heads)[:, [0, -1] if ".qkv." in name else [-1]]


def assert_equal(folder, case: dict, lines: list[dict], tensors: dict[str, torch.Tensor]):
    """Every line of metrics.jsonl in its order, and every tensor of the last checkpoint."""
    others = {"flops", "tokens_per_s", "mfu", "ms_per_step", "peak_memory_bytes"}
    got = [{name: x for name, x in line.items() if name not in others} for line in metrics(folder)]
    assert [(line["step"], line["kind"]) for line in got] == [(line["step"], line["kind"]) for line in lines]
    for ours, theirs in zip(got, lines, strict=True):
        assert ours == {name: approx(x, NORMS if name == "grad_norm" else FIGURES) for name, x in theirs.items()}
    found = saved(folder)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        ours, theirs = (compared(name, each.double(), case.get("n_kv_head", 2)) for each in (found[name], x))
        error = (ours - theirs).norm().item()
        size = theirs.norm().item()
        assert error <= TENSORS * size, f"{name} of size {size:.1e} differs by {error / size:.1e} of it"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_equals_the_oracles(run, short_data, case):
    folder = run(f"--dataset={short_data}", *flags_of(case))
    lines, tensors = expected(case, oracle.Source(str(short_data)))
    assert_equal(folder, case, lines, tensors)
    trained = [line for line in lines if "loss" in line]
    assert trained[-1]["loss"] < trained[0]["loss"] - 0.1
    assert trained[-1]["epoch"] > 2
    limit = (SHORT | case)["grad_clip"]
    clipped = sum(line["grad_norm"] > limit > 0 for line in trained)
    assert (clipped > 0) == (0 < limit < 2), clipped
    best = checkpoint.read_state(checkpoint.find(folder))["best_val_loss"]
    assert best == pytest.approx(min(line["val_loss"] for line in lines if "val_loss" in line), rel=FIGURES)


def test_a_mixture_equals_the_oracles(run, short_data, tmp_path):
    """Of a source with 38 windows and one with 11, which the run goes through at different paces."""
    case = dict(MASKED, eval_iters=4, doc_mask=True)
    other = write(tmp_path / "other", 20, 180, 90)
    folder = run(f"--dataset={short_data}:0.6,{other}:.25", *flags_of(case))
    lines, tensors = expected(case, oracle.Source(str(short_data), 12), oracle.Source(str(other), 5))
    assert_equal(folder, case, lines, tensors)
    assert lines[-2]["epochs"][str(short_data)] < 2 < lines[-2]["epochs"][str(other)]


def plant(monkeypatch, micro_steps: int, steps: tuple[int, ...], first: int = 0, narrow=lambda x: x):
    """In a run that begins at step `first`, the loss of the second micro-batch of these steps is infinite."""
    plain = model.Model.loss
    calls = []

    def loss(self, x, targets):
        if not self.training:
            return plain(self, x, targets)
        calls.append(x)
        step, micro_step = divmod(len(calls) - 1, micro_steps)
        return plain(self, narrow(x), targets) * (math.inf if step + first in steps and micro_step == 1 else 1.0)

    monkeypatch.setattr(model.Model, "loss", loss)


def test_skipped_steps_equal_the_oracles(run, short_data, monkeypatch):
    """Weights and states stay as they are, Adam's count too; data and rate go on. It resumes between two."""
    case = dict(SEQ2SEQ, optimizer="muon", eval_interval=4, lr_decay_iters=8)
    source = f"--dataset={short_data}"
    with monkeypatch.context() as patch:
        plant(patch, 3, (0, 3, 6))
        run(source, *flags_of(case), "--skip_nonfinite=True", "--max_iters=4")
    plant(monkeypatch, 3, (0, 3, 6), first=4)
    folder = run(source, *flags_of(case), "--skip_nonfinite=True", "--init_from=resume")
    lines, tensors = expected(case, oracle.Source(str(short_data)), infinite=(0, 3, 6))
    assert_equal(folder, case, lines, tensors)
    assert tensors["optim.wte.weight.step"] == 5
    assert lines[-2]["skipped"] == 3


class Narrow(torch.autograd.Function):
    """x; a gradient above LARGEST is infinite, as in float16 one above 65504 is."""

    LARGEST = 2.0**12

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.masked_fill(gradient.abs() > Narrow.LARGEST, math.inf)


def test_the_gradient_scaler_equals_the_oracles(run, short_data, monkeypatch):
    """Steps that overflow are left out for all parameters, without a count; the scale falls, and rises again after two
    good steps; clipping and grad_norm see gradients without the scale. A resume brings scale and count back."""
    case = dict(optimizer="muon", eval_interval=7, lr_decay_iters=12, max_iters=12, grad_clip=0.8)
    source = f"--dataset={short_data}"
    plain = torch.amp.GradScaler

    def scaling(patch, first: int, scale: float):
        plant(patch, 3, (8,), first, Narrow.apply)
        options = dict(enabled=True, init_scale=scale, growth_interval=2)
        patch.setattr(torch.amp, "GradScaler", lambda device, enabled: plain(device, **options))

    with monkeypatch.context() as patch:
        scaling(patch, 0, 2.0**24)
        folder = run(source, *flags_of(case), "--skip_nonfinite=True", "--max_iters=7")
        before = checkpoint.read_state(checkpoint.find(folder))["scaler"]
    scaling(monkeypatch, 7, 1.0)
    run(source, *flags_of(case), "--skip_nonfinite=True", "--init_from=resume")
    scaler = oracle.Scaler(scale=2.0**24, growth_interval=2, largest=Narrow.LARGEST)
    lines, tensors = expected(case, oracle.Source(str(short_data)), infinite=(8,), scaler=scaler)
    assert_equal(folder, case, lines, tensors)
    overflows = [line["step"] for line in lines if line.get("grad_norm", 0) is None]
    assert overflows == [0, 3, 5, 8, 11]  # at first, after the scale has risen, and where the loss is infinite
    now = checkpoint.read_state(checkpoint.find(folder))["scaler"]
    assert (now["scale"], now["_growth_tracker"]) == (scaler.scale, scaler.good)
    assert before["_growth_tracker"] == 1  # which the resume has to bring back, as the scale rises after step 7
