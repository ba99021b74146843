"""What a run will cost, against what training does: bytes of real tensors, allocations, collectives; and figures by
hand."""

import copy
import os
import re
import resource
import shlex
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from itertools import repeat
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import ops
import train
from configurator import Config, parse
from data.objective import objective_class
from engine import optim
from engine.parallel import pipeline
from engine.parallel import ranks as parallel
from engine.parallel import sharded as sharded_model
from engine.parallel.recomputation import recompute
from engine.parallel.sharded import ShardedModel
from engine.plan import plan
from engine.plan.estimate import STATES, estimate_rank
from engine.plan.measure import Parts
from model import BLOCK, READER, Model, Pool, Sum

TINY = {
    "n_layer": 3, "n_head": 4, "n_embd": 64, "block_size": 32, "vocab_size": 512, "batch_size": 2,
    "gradient_accumulation_steps": 16, "dtype": "float32", "device": "cpu", "compile": False, "plan": True,
}  # fmt: skip
LAYOUTS = [
    {"world_size": 4, "n_expert": 4, "ep": 2, "bias": True, "parallel": "fsdp", "fsdp_reshard": False},
    {"world_size": 8, "n_expert": 6, "ep": 2, "parallel": "fsdp", "dp_replicate": 2, "optimizer": "muon"},
    {"world_size": 8, "n_expert": 4, "ep": 4, "tp": 2, "parallel": "fsdp", "activation_checkpoint": "full"},
    {"world_size": 4, "n_expert": 4, "ep": 2, "cp": 2, "parallel": "fsdp", "pos": "rope"},
    {"world_size": 4, "parallel": "fsdp"},
    {"world_size": 4, "parallel": "fsdp", "fsdp_reshard": False, "tie_weights": False},
    {"world_size": 8, "parallel": "fsdp", "dp_replicate": 2},
    {"world_size": 6, "parallel": "fsdp", "n_embd": 60, "gradient_accumulation_steps": 12},  # uneven
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "tp": 2, "activation_checkpoint": "full"},
    {"world_size": 2, "tp": 2, "activation_checkpoint": "selective"},
    {"world_size": 4, "parallel": "fsdp", "tie_weights": False, "dtype": "bfloat16", "pos": "rope"},
    {"world_size": 2, "tp": 2, "dtype": "bfloat16", "fp32_residual": False, "tie_weights": False},
    {"world_size": 8, "tp": 2, "cp": 2, "parallel": "fsdp"},
    {"world_size": 8, "tp": 2, "parallel": "fsdp", "optimizer": "muon"},
]
MUON = [  # on a CPU, updates travel in this dtype; on a GPU, always
    {"world_size": 4, "parallel": "fsdp"},
    {"world_size": 6, "parallel": "fsdp", "dp_replicate": 2, "n_embd": 60, "gradient_accumulation_steps": 12},
    {"world_size": 8, "parallel": "fsdp", "tp": 2, "dp_replicate": 2, "block": "superblock"},
    {"world_size": 4, "parallel": "fsdp", "cp": 2},
    {"world_size": 8, "parallel": "fsdp", "pp": 2, "n_layer": 4},
    {"world_size": 4},
    {"world_size": 4, "tp": 2},
    {"world_size": 8, "parallel": "fsdp", "n_expert": 6, "ep": 2, "tp": 2},
    {"world_size": 8, "parallel": "fsdp", "pp": 2, "tp": 2, "n_layer": 4},
]


def config(**flags) -> Config:
    return Config(**TINY | flags)


@contextmanager
def as_rank(cfg: Config, rank: int = 0):
    """A rank that training would make; the others are pretended, and their messages are garbage."""
    init, scatter, exchange = dist.init_process_group, dist.reduce_scatter_tensor, dist.all_to_all_single

    def pretend(*args, rank, world_size, **kwargs):
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def lenient(*args, **kwargs):  # the pretended one wants both tensors to have as many dimensions
        out, x = (*args, *(kwargs.pop(name) for name in ("output", "input") if name in kwargs))
        return scatter(out[None], x, **kwargs)

    def echoing(out, x, *args, **kwargs):  # the others send what this rank does
        work = exchange(out, x, *args, **kwargs)
        if out.shape == x.shape:
            out.copy_(x)
        return work

    with (
        mock.patch.object(dist, "all_to_all_single", echoing),
        mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(cfg.world_size), LOCAL_RANK="0"),
        mock.patch.object(dist, "init_process_group", pretend),
        mock.patch.object(dist, "reduce_scatter_tensor", lenient),
    ):
        try:
            yield parallel.join(cfg)
        finally:
            dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """(kind, ranks of the group) -> bytes that a ring would send; in an all-to-all of tokens, those of a mean rank."""

    def __init__(self, tokens: bool = False):
        super().__init__()
        self.sent, self.tokens = defaultdict(float), tokens

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func._schema.name.partition("::")[2]
        if func.namespace == "_c10d_functional" and name == "reduce_scatter_tensor":
            self.sent["reduce-scatter", args[2]] += args[0].nbytes * (args[2] - 1) / args[2]
        elif func.namespace == "c10d":
            group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
            n, tensors = group.size(), [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            if name == "alltoall_base_" and self.tokens:
                self.sent["all-to-all", n] += tensors[1].nbytes * (n - 1) / n  # if all ranks get as many
                return out
            if name == "alltoall_base_":
                self.sent["all-to-all", n] += tensors[1].itemsize * (sum(args[4]) - args[4][group.rank()])
                return out
            passes = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 2}[name]
            kind = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}.get(name, "all-reduce")
            self.sent[kind, n] += passes * max(t.nbytes for t in tensors) * (n - 1) / n
        return out


def by_size(traffic: dict[str, plan.Traffic]) -> dict:
    sent = defaultdict(float)
    for kind, each in traffic.items():
        if not kind.startswith("muon"):
            known = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
            sent[next(k for k in known if k in kind), each.ranks] += each.bytes
    return sent


def nbytes(tensors) -> int:
    return sum(sharded_model.local(t).nbytes for t in tensors)


def batch_of(cfg: Config) -> dict:
    task = objective_class(cfg)(cfg.vocab_size, 0, cfg.block_size, cfg.doc_mask)
    T, S = task.lengths
    idx = torch.zeros(cfg.batch_size, T, dtype=torch.int64)
    source = {"source": torch.zeros(cfg.batch_size, S, dtype=torch.int64)} if S else {}
    return {"idx": idx, "targets": idx, **source} | ({"docs": idx} if cfg.doc_mask else {})


# ---------------------------------------------------------------------------------------------------------------------
# What stays, and what is sent


@pytest.mark.parametrize(
    "flags", LAYOUTS + [LAYOUTS[i] | {"block": block} for block in list(BLOCK)[1:] for i in (-1, -2)], ids=str
)
def test_states_and_traffic_are_those_of_training(flags):
    """Exactly, for whatever ShardedModel and the optimizers do with a group of pretended ranks."""
    cfg = config(**flags)
    with as_rank(cfg) as ranks:  # the first, whose shards are no smaller than others'
        rank = ShardedModel(cfg, ranks)
        optimizer = optim.build(rank.model, cfg, rank)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with Collectives(tokens=True) as counted:
            rank.backward(repeat(batch_of(cfg)), cfg.gradient_accumulation_steps // ranks.data_size, scaler)
            gradients = nbytes(p.grad for p in rank.model.parameters())
        state = optimizer.state_tensors(rank.model).values()
        real = nbytes(rank.model.parameters()), gradients, nbytes(state)
    p = plan.estimate(cfg)
    assert [p.memory[kind] for kind in STATES] == list(real)
    assert by_size(p.traffic) == pytest.approx(counted.sent)


@pytest.mark.parametrize("flags", MUON, ids=str)
def test_traffic_and_matmuls_of_muon_are_those_of_training(flags):
    """Of the rank that sends most and of the rank that multiplies most, exactly."""
    cfg, sent, multiplied = config(optimizer="muon", dtype="bfloat16", **flags), [], []
    for number in range(cfg.world_size):
        with as_rank(cfg, number) as ranks:
            rank = ShardedModel(cfg, ranks)
            optimizer = optim.build(rank.model, cfg, rank, ranks.dtype)
            for p in rank.model.parameters():
                p.grad = torch.zeros_like(p)
            with Collectives() as counted, FlopCounterMode(display=False) as flops:
                optimizer.step()
        [(kind, n)] = counted.sent.items()
        assert kind == ("all-to-all", cfg.world_size // cfg.pp)
        sent.append(n)
        multiplied.append(flops.get_total_flops())
    p = plan.estimate(cfg)
    assert p.traffic["muon all-to-all"].bytes == max(sent) and p.traffic["muon all-to-all"].ranks == kind[1]
    speed = plan.GPU[cfg.gpu].achieved * p.peak
    assert p.seconds["Muon's matmuls"] == pytest.approx(max(multiplied) / speed)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("flags", [{"tie_weights": False}, {"objective": "seq2seq"}, {"bias": True}, {"pos": "rope"}])
def test_states_of_one_rank(flags, optimizer):
    cfg = config(optimizer=optimizer, **flags)
    model = Model(cfg)
    state = optim.build(model, cfg).state_tensors(model).values()
    p = plan.estimate(cfg)
    assert p.memory["parameters"] == p.memory["gradients"] == nbytes(model.parameters())
    assert p.memory["optimizer state"] == nbytes(state)
    assert p.traffic == {} and p.parameters == model.n_params()


@pytest.mark.parametrize("tied, chunks", [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_stages_have_what_the_pipeline_leaves_them(tied, chunks):
    cfg = config(n_layer=7, pp=3, pp_chunks=chunks, world_size=3, tie_weights=tied, gradient_accumulation_steps=6)
    model = Model(cfg)
    for i, stage in enumerate(estimate_rank(cfg).stages):
        part = copy.deepcopy(model)
        pipeline.keep_stages(part, i, 3, chunks)
        assert {name: w.held for name, w in stage.weights.items()} == {
            name: p.numel() for name, p in part.named_parameters()
        }


def test_selective_recomputation_repeats_no_reduce_scatter():
    """It keeps their results, and gathers the stream once more for each of two sums."""
    plans = [plan.estimate(config(world_size=2, tp=2, activation_checkpoint=kind)) for kind in ("none", "selective")]
    scattered, gathered = ([p.traffic[f"tp {kind}"].bytes for p in plans] for kind in ("reduce-scatter", "all-gather"))
    assert scattered[0] == scattered[1] and gathered[1] > gathered[0]


def test_traffic_by_hand():
    """C=64, 3 layers of 12 squares and 2 norms, 512 tokens and 32 positions, a last norm; 2 samples of 32 tokens."""
    layer, tables = 12 * 64**2 + 2 * 64, (512 + 32) * 64
    total = 4 * (3 * layer + tables + 64)
    sent = {kind: t.bytes for kind, t in plan.estimate(config(world_size=4)).traffic.items()}
    assert sent == {"ddp all-reduce": 2 * 3 / 4 * total}  # once a step
    sent = {kind: t.bytes for kind, t in plan.estimate(config(world_size=4, parallel="fsdp")).traffic.items()}
    assert sent == {
        # 16 / 4 micro-steps; backwards gather neither the last block, nor what is in no block
        "fsdp all-gather": 3 / 4 * 4 * (total + 4 * 2 * layer),
        "fsdp reduce-scatter": 3 / 4 * 4 * total,
    }
    stream, keys = 2 * 32 * 64 * 4, 2 * 2 * 32 * 64 * 4
    p = plan.estimate(config(world_size=2, tp=2, gradient_accumulation_steps=1))
    assert p.traffic["tp all-gather"].bytes == 1 / 2 * (3 * 2 * 2 + 2) * stream
    p = plan.estimate(config(world_size=2, cp=2, gradient_accumulation_steps=1))
    assert p.traffic["cp all-gather"].bytes == p.traffic["cp reduce-scatter"].bytes == 1 / 2 * 3 * keys
    # experts of 2 C^2, of which ranks 0 and 2 have the same half; 64 rows travel there and back, forward and backward
    p = plan.estimate(config(world_size=4, n_expert=4, n_expert_active=1, expert_ratio=1.0, ep=2))
    experts = 4 * 3 * 4 * 2 * 64**2
    assert p.traffic["experts all-reduce"].bytes == 2 * 1 / 2 * experts / 2
    others = total - 4 * 3 * 8 * 64**2 + 4 * 3 * (4 * 64 + 4)  # the MLP goes, a router and its biases come
    assert p.traffic["ddp all-reduce"].bytes == 2 * 3 / 4 * others
    assert p.traffic["ep all-to-all"].bytes == 1 / 2 * 4 * 3 * (4 * stream + 4 * 8)
    # a pipeline of two on two shards, also counted on four processes under gloo: the first stage has two layers and the
    # tables, and gathers eight micro-batches' layers and one more, and the tables once; their gradient goes across
    p = plan.estimate(config(world_size=4, pp=2, parallel="fsdp"))
    assert p.traffic["fsdp all-gather"].bytes == ((8 + 1) * 4 * 2 * layer + 4 * tables) / 2 == 1843712
    assert p.traffic["fsdp reduce-scatter"].bytes == 4 * (2 * layer + tables) / 2
    assert p.traffic["pp point to point"].bytes == 8 * stream + 4 * 512 * 64 / 2 == 196608
    # two stages of each rank, counted in the same way: each of rank 0's sends a stream, and one of them a gradient
    rank = estimate_rank(config(world_size=4, pp=2, pp_chunks=2, n_layer=6, parallel="fsdp"))
    for stage, sent in zip(rank.stages, ((3617792, 927744 / 2), (1839744, 525568 / 2)), strict=True):
        found = rank.traffic(stage)
        assert (found["fsdp all-gather"], found["fsdp reduce-scatter"]) == sent
        assert found["pp point to point"] == 8 * 3 * stream + 4 * 512 * 64 / 2 == 458752


# ---------------------------------------------------------------------------------------------------------------------
# What comes and goes


def most_allocated(f) -> int:
    """The most bytes at once of what is allocated inside f()."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        f()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@pytest.fixture
def gpu_loss(monkeypatch):
    """The loss as a GPU computes it, and so the plan counts it: also that of few tokens in a chunk."""

    def cross_entropy(x, weight, targets, softcap, chunk, of_chunk, z_loss):
        rows = ops.equal_rows(len(x), ops.rows_at_once(chunk, len(weight), torch.device("cuda")))
        return ops.ChunkedCrossEntropy.apply(x, weight, targets, (softcap, rows, of_chunk, True))

    monkeypatch.setattr(ops, "cross_entropy", cross_entropy)


def activations(p: plan.Plan) -> int:
    copies = p.memory.get("weights cast by autocast", 0)
    return p.memory["activations"] + copies + max(p.memory["logits and loss"], p.memory["backward of a block"])


WIDE = {"n_layer": 5, "n_embd": 128, "block_size": 128, "batch_size": 4, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    "tolerance, flags",
    [(0.02, {"block": block, "mlp": mlp}) for block in ("standard", "superblock") for mlp in ("gelu", "swiglu")]
    + [
        (0.02, {"block": "simplified"}),
        (0.02, {"block": "simplified_parallel"}),
        (0.02, {"block": "parallel", "attention": "gqa", "n_kv_head": 2}),
        (0.02, {"block": "superblock", "layer": "c.own_slots"}),
        (0.02, {"activation_checkpoint": "selective"}),
        (0.05, {"activation_checkpoint": "full"}),
        (0.05, {"activation_checkpoint": "full", "block": "superblock", "mlp": "swiglu"}),
        (0.02, {"window": 32, "window_pattern": "SLL"}),
        (0.02, {"attn_softcap": 20.0}),
        (0.02, {"doc_mask": True}),
        (0.02, {"objective": "seq2seq"}),
        (0.05, {"dtype": "bfloat16", "fp32_residual": True, "n_layer": 2, "batch_size": 1, "loss_chunk": 64}),
        (0.05, {"dtype": "bfloat16", "fp32_residual": False, "n_layer": 2, "batch_size": 1, "loss_chunk": 64}),
        (0.02, {"vocab_size": 20000, "loss_chunk": 64}),
        (0.02, {"vocab_size": 20000, "loss_chunk": 64, "compile": True}),
        (0.2, {"norm": "rmsnorm", "mlp": "swiglu"}),  # whose kernel on GPUs keeps less
    ],
    ids=str,
)
def test_activations_are_what_training_allocates(tolerance, flags, gpu_loss):
    if flags.get("dtype") == "bfloat16" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("with kernels without vectors, torch's bfloat16 attention fails on a CPU whose flags name AMX")
    cfg = config(**WIDE | flags)
    model, batch = Model(cfg), batch_of(cfg)
    for block in [*model.blocks, *(model.encoder.blocks if model.encoder else ())]:
        if cfg.activation_checkpoint != "none":
            recompute(block, cfg.activation_checkpoint)
    if cfg.compile:
        model.chunk_loss = torch.compile(model.chunk_loss, dynamic=False)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            loss = model(**batch)
        loss.backward()

    step()  # so that there are gradients
    assert activations(plan.estimate(cfg)) == pytest.approx(most_allocated(step), rel=tolerance)


def test_windows_that_a_block_declares_are_measured(monkeypatch):
    """Every second layer with a window: by flags, or by a block that sets its reader's window itself."""

    def mine(cfg, layer):
        sums = BLOCK["standard"](cfg, layer)
        sums[0].attn.window = 0 if layer % 2 else 4
        return sums

    monkeypatch.setitem(BLOCK, "mine", mine)
    expected = plan.estimate(config(n_layer=4, window=4, window_pattern="SL"))
    assert expected.memory["activations"] != plan.estimate(config(n_layer=4, window=4)).memory["activations"]
    assert plan.estimate(config(n_layer=4, block="mine")).memory == expected.memory


def test_rms_norm_keeps_what_layer_norm_does():
    """On a GPU."""
    for flags in ({}, {"world_size": 4, "parallel": "fsdp", "dtype": "bfloat16"}):
        a, b = (plan.estimate(config(norm=norm, **flags)).memory["activations"] for norm in ("layernorm", "rmsnorm"))
        assert a == b


def test_dropout_keeps_its_masks_outside_of_attention():
    without, dropout = (plan.estimate(config(dropout=p)).memory["activations"] for p in (0.0, 0.1))
    assert dropout - without == (1 + 2 * 3) * 2 * 32 * 64 * 4  # of the embedding and two in each layer, 2 x 32 tokens


def test_a_pipeline_holds_micro_batches():
    """The first of three stages two blocks for each of three micro-batches, and a step's gradients of what it sends."""
    p, two = plan.estimate(config(n_layer=6, pp=3, world_size=3)), plan.estimate(config(n_layer=2))
    assert p.memory["activations"] == 3 * two.memory["activations"]
    assert p.memory["logits and loss"] == 0
    assert p.memory["streams received"] == pytest.approx(16 * 2 * 32 * 64 * 4, rel=0.02)
    p = plan.estimate(config(n_layer=6, pp=3, world_size=3, vocab_size=8192))  # the last stage with its logits
    assert p.memory["activations"] == pytest.approx(two.memory["activations"], rel=0.05)
    assert p.memory["logits and loss"] > 4 * 64 * 8192


@pytest.mark.parametrize("ranks, chunks", [(2, 2), (2, 3), (4, 2)])
def test_a_rank_of_several_stages_holds_more_micro_batches(ranks, chunks):
    """The first rank of p with v stages holds 1 + (p - 1) / (p v) times as many passes of its blocks as one that has
    them in one stage (arXiv:2205.05198, section 4.2.3), and its first stage those of two rounds of p micro-batches."""
    one, two = (plan.estimate(config(n_layer=n)).memory["activations"] for n in (1, 2))
    block, embedding, flags = two - one, 2 * one - two, {"n_layer": ranks * chunks, "pp": ranks, "world_size": ranks}
    p = plan.estimate(config(**flags, pp_chunks=chunks))
    passes = ranks * chunks * (1 + (ranks - 1) / (ranks * chunks))
    assert p.memory["activations"] == round(passes) * block + 2 * ranks * embedding
    plain, streams = plan.estimate(config(**flags)), 2 * chunks - 1
    assert p.memory["streams received"] == streams * plain.memory["streams received"]


def test_the_loss_of_many_tokens(monkeypatch):
    """Measured on few tokens and continued, it is what all of them give."""
    cfg = config(vocab_size=4096, loss_chunk=8, tp=2, world_size=2, batch_size=5)
    continued = plan.estimate(cfg)
    monkeypatch.setattr(Parts, "loss_cost", lambda parts: parts.loss_of_tokens(5 * 32, 8))
    whole = plan.estimate(cfg)
    assert (continued.memory, continued.traffic) == (whole.memory, whole.traffic)


def test_a_compiled_loss_under_tp_sends_what_an_uncompiled_one_does():
    """And its chunks keep less."""
    flags = {"vocab_size": 20000, "tp": 2, "world_size": 2}
    plain, compiled = (plan.estimate(config(**flags, compile=each)) for each in (False, True))
    assert plain.traffic == compiled.traffic
    assert compiled.memory["logits and loss"] < plain.memory["logits and loss"]


def test_an_evaluation_computes_no_gradient_of_the_loss():
    """One matrix product for each of the four chunks, also under tp; with a gradient three."""
    cfg, products = config(loss_chunk=8, tp=2, world_size=2), []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            products.extend([f] * (f.name().partition(".")[0] in ("aten::mm", "aten::addmm", "aten::addmm_")))
            return f(*args, **(kwargs or {}))

    with as_rank(cfg) as ranks:
        model = ShardedModel(cfg, ranks).model
        x, targets = torch.zeros(1, 32, cfg.n_embd), torch.zeros(1, 32, dtype=torch.int64)
        for gradient, expected in ((False, 4), (True, 12)):
            products.clear()
            with Recorder(), torch.set_grad_enabled(gradient):
                model.loss(x.requires_grad_(gradient), targets)
            assert len(products) == expected


@pytest.mark.parametrize(
    "flags",
    [
        {"world_size": 2, "tp": 2, "gradient_accumulation_steps": 2},
        {"world_size": 4, "parallel": "fsdp", "gradient_accumulation_steps": 8},
        {"world_size": 4, "parallel": "fsdp", "gradient_accumulation_steps": 8, "fsdp_reshard": False},
        {"world_size": 4, "parallel": "fsdp", "gradient_accumulation_steps": 4, "activation_checkpoint": "full"},
        {"world_size": 8, "parallel": "fsdp", "tp": 2, "cp": 2, "gradient_accumulation_steps": 4},
    ],
    ids=str,
)
def test_the_worst_moment_of_a_rank(flags):
    """What training allocates (or 2 % less), or more: the plan counts a block gathered ahead, and gradients before they
    are there."""
    planned, most = moment_of_a_rank(config(**WIDE | {"batch_size": 8} | flags))
    assert 0.98 <= planned / most <= 1.25


def moment_of_a_rank(cfg: Config) -> tuple[int, int]:
    """The most bytes at once in the backward of a step, beside the parameters: planned, and allocated."""
    with as_rank(cfg) as ranks:
        rank = ShardedModel(cfg, ranks)
        scaler, steps = torch.amp.GradScaler("cpu", enabled=False), cfg.gradient_accumulation_steps // ranks.data_size
        rank.backward(repeat(batch_of(cfg)), steps, scaler)
        rank.model.zero_grad(set_to_none=True)
        most = most_allocated(lambda: rank.backward(repeat(batch_of(cfg)), steps, scaler))
    p = plan.estimate(cfg)
    return p.total + p.host - p.memory["parameters"] - p.memory["optimizer state"], most


@pytest.mark.parametrize("block", ["simplified", "simplified_parallel"])
def test_offload_gathers_gains_in_16_bits(block):
    """So their products, and the gradients of these, are half as large as with gains that every rank has whole."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("with kernels without vectors, torch's bfloat16 attention fails on a CPU whose flags name AMX")
    flags = WIDE | {"world_size": 4, "parallel": "fsdp", "gradient_accumulation_steps": 4, "block": block}
    flags |= {"batch_size": 2, "dtype": "bfloat16", "fp32_residual": False}
    here, there = (moment_of_a_rank(config(**flags, fsdp_offload=on)) for on in (False, True))
    planned, real = (a - b for a, b in zip(here, there, strict=True))
    assert planned == pytest.approx(real, rel=0.01) and real > 100_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_by_muon(dtype):
    cfg = config(optimizer="muon", n_layer=8, n_embd=256, vocab_size=64, dtype=dtype)
    model = Model(cfg)
    optimizer = optim.build(model, cfg, dtype=getattr(torch, dtype))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    p, batch = plan.estimate(cfg), 8 * 4 * 256**2  # q, k, v, out of all layers
    kept = 4 * batch * (sys.version_info < (3, 11))  # whose calls keep their arguments alive
    assert p.memory["update by Muon"] + kept == pytest.approx(most_allocated(optimizer.step), rel=0.02)
    assert p.total == sum(p.memory[kind] for kind in STATES) + p.memory["update by Muon"]


@pytest.mark.parametrize("flags", [{"parallel": "fsdp"}, {"parallel": "fsdp", "dp_replicate": 2}, {}], ids=str)
def test_update_by_muon_of_a_rank_that_owns_matrices(flags):
    """What training allocates, or a little more."""
    cfg = config(optimizer="muon", n_layer=8, n_embd=256, vocab_size=64, dtype="bfloat16", world_size=4, **flags)
    with as_rank(cfg) as ranks:
        rank = ShardedModel(cfg, ranks)
        optimizer = optim.build(rank.model, cfg, rank, ranks.dtype)
        for p in rank.model.parameters():
            p.grad = torch.zeros_like(p)
        allocated = most_allocated(optimizer.step)
    assert 0.98 < plan.estimate(cfg).memory["update by Muon"] / allocated < 1.06


@pytest.mark.parametrize(
    "flags, remedies",
    [
        ({}, "batch_size activation_checkpoint=full parallel=fsdp tp pp"),
        ({"batch_size": 1, "activation_checkpoint": "selective"}, "activation_checkpoint=full parallel=fsdp tp pp"),
        ({"parallel": "fsdp", "activation_checkpoint": "full", "tp": 4, "world_size": 4}, "batch_size pp"),
    ],
)
def test_a_plan_that_does_not_fit_advises_what_is_not_set(flags, remedies, monkeypatch):
    assert "it fits" in plan.report(plan.estimate(config(**flags)))
    monkeypatch.setitem(plan.GPU, "h100", plan.GPU["h100"]._replace(memory=1e6))
    advice = plan.report(plan.estimate(config(**flags))).partition("DOES NOT FIT")[2].partition("\n\n")[0]
    assert re.findall(r"(?:parallel|activation_checkpoint)=\w+|\bbatch_size|\btp|\bpp", advice) == remedies.split()


def test_offload_moves_the_states():
    flags = {"world_size": 4, "parallel": "fsdp"}
    here, there = (plan.estimate(config(fsdp_offload=on, **flags)) for on in (False, True))
    states = sum(here.memory[kind] for kind in STATES)
    assert (here.host, there.host, there.total) == (0, states, here.total - states)
    # 4 micro-steps gather twice, the gradients come down once, and AdamW reads four numbers and writes three
    assert there.step - here.step == pytest.approx((2 * 4 + 1 + 7) * here.memory["parameters"] / 20e9)


# ---------------------------------------------------------------------------------------------------------------------
# Time


def test_time_by_hand():
    """6 FLOPs per weight and token and 12 T C per layer and token; thrice instead of twice a block's forward."""
    tokens, weights = 16 * 2 * 32, 3 * 12 * 64**2
    p = plan.estimate(config(world_size=2, activation_checkpoint="full", dtype="bfloat16"))
    attention, head = 3 * 12 * 32 * 64, 512 * 64
    assert p.flops_per_token == 6 * (weights + head) + attention
    assert p.tokens_per_step == tokens
    work = (4 / 3 * (6 * weights + attention) + 6 * head) * tokens / 2
    assert p.seconds["computation"] == pytest.approx(work / (0.5 * 989.4e12))
    sent = p.traffic["ddp all-reduce"]
    assert sent.seconds == pytest.approx(4 * p.parameters / (0.8 * 450e9))
    hidden = 0.8 * 2 / 3 / 8 * p.seconds["computation"]  # behind the last of 8 backwards
    assert p.step == pytest.approx(p.seconds["computation"] + sent.seconds - hidden)
    assert p.mfu == pytest.approx(p.flops_per_token * tokens / (2 * 989.4e12 * p.step))


@pytest.mark.parametrize("layers, chunks, of_blocks, of_head", [(4, 1, 2 / 4, 1), (5, 1, 3 / 5, 0), (4, 2, 2 / 4, 1)])
def test_a_pipeline_waits(layers, chunks, of_blocks, of_head):
    """(ranks - 1) / (chunks micro-batches) of the slowest rank's time: the last has the head, the first one block
    more."""
    p = plan.estimate(config(n_layer=layers, world_size=2, pp=2, pp_chunks=chunks, gradient_accumulation_steps=8))
    busy = p.seconds["computation"] + p.seconds["traffic of tp, cp, ep, pp and Muon"]
    assert p.seconds["bubble of the pipeline"] == pytest.approx(busy / 8 / chunks)
    head = 6 * 512 * 64
    work = (p.flops_per_token - head) * of_blocks + head * of_head
    assert p.seconds["computation"] == pytest.approx(work * p.tokens_per_step / (0.5 * 494.7e12))


@pytest.mark.parametrize(
    "ranks, distance, expected",
    [(8, 1, 450), (2, 4, 450), (16, 1, 400), (1024, 1, 400), (128, 8, 50), (16, 2, 200), (2, 8, 50)],
)
def test_bandwidth(ranks, distance, expected):
    """NVLink inside of a node; between nodes as many cards as the group has ranks in a node."""
    assert plan.bandwidth(plan.GPU["h100"], ranks, distance) == pytest.approx(0.8 * expected * 1e9)


def test_muon_multiplies():
    """Five times X X^T, its square and a product with X, of each logical matrix: q, k, v, out, up and down."""
    cfg = config(optimizer="muon", norm="none", norm_placement="none", mlp="relu")
    square, tall = 2 * 3 * 64**3, 2 * (2 * 64 * 256 * 64 + 64**3)
    rank = estimate_rank(cfg)
    assert rank.owners(rank.stages[0]).flops == 3 * 5 * (4 * square + 2 * tall)


# ---------------------------------------------------------------------------------------------------------------------
# Large models, words and mistakes


@pytest.mark.parametrize(
    "name, flags, parameters, state", [("llama_70b", ["--world_size=1024", "--tp=8"], 70_553_706_496, 16 / 1024)]
)
def test_large_models_take_seconds_and_no_memory(name, flags, parameters, state):
    cfg = parse(Config, [f"config/{name}.py", "--plan=True", *flags])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    p = plan.estimate(cfg)
    assert time.process_time() - start < 25
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB
    assert p.parameters == parameters
    # 4 bytes for each of a number, its gradient and two moments; norms are in all slices of tp
    assert sum(p.memory[kind] for kind in STATES) == pytest.approx(parameters * state, rel=1e-3)
    attention = 12 * cfg.n_layer * cfg.n_embd * cfg.block_size
    table = cfg.vocab_size * cfg.n_embd
    assert p.flops_per_token == pytest.approx(6 * (parameters - table) + attention, rel=1e-4)
    assert p.total <= p.usable


def test_the_first_line_names_the_attention():
    """The kernels of a GPU, of all layers, also where ranks hold parts of the text or of the layers."""
    for flags, said in (
        ({"pp": 2, "world_size": 2}, "full (2 layers)"),
        ({"cp": 2, "world_size": 2, "dtype": "bfloat16"}, "flash (2 layers)"),
    ):
        first = plan.report(plan.estimate(config(**flags, n_layer=2))).splitlines()[0]
        assert first.endswith(f"; attention: {said}")


@pytest.mark.parametrize("flags", [{"window": 64}, {"doc_mask": True}, {"window": 64, "doc_mask": True}], ids=str)
def test_flash_attention_keeps_the_same_with_windows_and_documents(flags):
    """Its kernel keeps q, k, v, the result and a normaliser for each query, whatever a query sees."""
    shape = dict(n_head=2, n_embd=128, block_size=512, dtype="bfloat16", compile=False)
    whole, part = (plan.estimate(config(**shape, **more)).memory["activations"] for more in ({}, flags))
    assert part == pytest.approx(whole, rel=0.01)


def test_what_is_printed_is_in_the_units_that_it_names():
    """Memory in GiB, traffic in GB, times in seconds, the rest in words."""
    shape = {"n_layer": 4, "n_head": 16, "n_embd": 2048, "block_size": 1024, "vocab_size": 50304, "dtype": "bfloat16"}
    p = plan.estimate(config(**shape, world_size=16, parallel="fsdp", tp=2, max_iters=100_000))
    text = plan.report(p)
    assert len(text.splitlines()) <= 45 and max(map(len, text.splitlines())) <= 120

    def printed(name: str) -> list[float]:
        [line] = [line for line in text.splitlines() if line.strip().startswith(f"{name}  ")]
        return [float(x.replace(",", "")) for x in re.findall(r"\d[\d,]*\.?\d*", line[len(name) + 2 :])]

    for name, size in p.memory.items():
        assert printed(name)[0] == pytest.approx(size / 2**30, abs=0.006), name
    assert min(p.memory.values()) > 0.04 * 2**30 and sum(x.bytes for x in p.traffic.values()) > 1e9
    worst, card = printed("at the worst moment")[:2]
    assert worst == pytest.approx(p.total / 2**30, abs=0.006) and card == 79  # of NVIDIA's 80 GB
    assert len(p.traffic) >= 3
    for name, each in p.traffic.items():
        gigabytes, ranks, rate, seconds = printed(name)
        assert gigabytes == pytest.approx(each.bytes / 1e9, abs=0.006) and ranks == each.ranks, name
        assert rate == pytest.approx(each.bandwidth / 1e9, abs=0.6) and seconds == pytest.approx(each.seconds, abs=6e-4)
        assert seconds == pytest.approx(gigabytes / rate, abs=0.002), name
    for name, seconds in (p.seconds | {"in all": sum(p.seconds.values())}).items():
        assert printed(name)[0] == pytest.approx(seconds, abs=6e-4), name
    tokens, days = re.search(r"max_iters=100,000: ([\d.,]+) billion tokens in ([\d.,]+) days", text).groups()
    assert float(tokens.replace(",", "")) == pytest.approx(16 * 2 * 1024 * 100_000 / 1e9, abs=0.06)
    assert float(days.replace(",", "")) == pytest.approx(sum(p.seconds.values()) * 100_000 / 86400, abs=0.06)


def shown_plans() -> list[tuple[str, str]]:
    """The commands of docs/scaling.md whose output follows, and that output."""
    blocks = (ROOT / "docs" / "scaling.md").read_text().split("```\n")[1::2]
    return [tuple(block.split("\n\n", 1)) for block in blocks if re.match(r"python train\.py .*--plan=True\n\n", block)]


@pytest.mark.parametrize("command,output", shown_plans(), ids=lambda text: text.split()[2])
def test_the_plans_of_the_docs(command, output, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    train.main(shlex.split(command)[2:])
    assert capsys.readouterr().out.strip() == output.strip()


@pytest.mark.parametrize(
    "flags, named",
    [
        ({"pp": 3, "world_size": 4}, "there are 4; plan for as many with --world_size=6, or set them to 1$"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"world_size": 2, "parallel": "fsdp", "dtype": "float16"}, "dtype=float16 .* parallel=fsdp"),
    ],
)
def test_mistakes(flags, named):
    with pytest.raises(ValueError, match=named) as error:
        plan.estimate(config(**flags))
    assert "\n" not in str(error.value)
    assert not dist.is_initialized()


def test_data_for_later_layers_is_refused_as_in_training(monkeypatch):
    class Handing(Pool):
        def forward(self, x, inputs):
            return super().forward(inputs.shared.setdefault("first", x), inputs)

    monkeypatch.setitem(BLOCK, "mine", lambda cfg, layer: [Sum(cfg, mlp=Handing(cfg, layer, READER["p"]))])
    assert plan.estimate(config(block="mine")).total > 0
    cfg, lines = config(block="mine", pp=2, world_size=2), []
    for run in (plan.estimate, train_one_rank):
        with pytest.raises(ValueError) as error:
            run(cfg)
        lines.append(str(error.value))
    assert lines[0] == lines[1] and lines[0].startswith("pp=2 hands on only the stream, and a layer hands first to")


def test_layers_of_equal_shapes_that_read_otherwise_have_costs_of_their_own():
    """A map of each score keeps more than the fused softmax; the order of the layers does not matter."""
    memory = [
        plan.estimate(config(block="superblock", layer=layer, n_layer=4, activation_checkpoint="none")).total
        for layer in ("c,p", "c,p;c.gelu,p", "c.gelu,p;c,p", "c.gelu,p")
    ]
    assert memory[0] < memory[1] == memory[2] < memory[3]


def train_one_rank(cfg: Config):
    with as_rank(cfg) as ranks:
        ShardedModel(cfg, ranks)
