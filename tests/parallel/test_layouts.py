"""Whatever the layout of the ranks, training is the same: every run here is held against one process's run.

Losses and gradient norms of some steps (a model of FSDP: 20) and the evaluation after them, the same global batch, in
float64 and some in float32. The processes are real (gloo); each launch makes several runs.
"""

import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import (
    IN_FLOAT64,
    TINY,
    assert_rounds_alike,
    assert_same_but_for_rounding,
    distance,
    figures,
    in_both,
    losses,
)
from ranks import launch, train_runs
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from configurator import Config, parse
from data.loader import order  # which has its own tests
from engine import optim
from engine.checkpoint.files import VOCAB_WEIGHTS
from engine.parallel import context as context_parallel
from engine.parallel import ranks as parallel
from engine.parallel import sharded
from engine.parallel import tensor as tensor_parallel
from engine.parallel.ranks import check_layout, join
from engine.parallel.recomputation import MATMULS, recompute
from engine.parallel.sharded import ShardedModel, local
from model import Model, Normal, UndrawnLinear, with_role

# The vocabulary is the data's 257 ids, which tp=2 pads
SIZES = "--max_iters=4 --eval_interval=4 --warmup_iters=1 --gradient_accumulation_steps=4 --learning_rate=3e-3".split()
SIZES += ["--eval_iters=1"]
SHORT = ["--max_iters=3", "--eval_interval=0"]  # an evaluation at the end
TWO = ["--gradient_accumulation_steps=2"]  # where all ranks read the same samples
HALVES = ["--eval_interval=2"]  # which saves in the middle, too
FSDP = ["--parallel=fsdp"]
MUON = ["--optimizer=muon"]
CHUNKS = ["--pp=2", "--pp_chunks=2"]
BLOCKS = {
    "standard": ["--pos=rope"],
    "superblock": ["--block=superblock"],
    "simplified": ["--block=simplified", "--pos=alibi"],
}
LAYOUTS = {  # name -> (processes, flags)
    "ddp": (2, []),
    "fsdp": (2, FSDP),
    "tp": (2, ["--tp=2"]),
    "cp": (2, ["--cp=2"]),
    "pp": (2, ["--pp=2"]),
    "hsdp": (4, [*FSDP, "--dp_replicate=2"]),
    "fsdp+tp": (4, [*FSDP, "--tp=2"]),
    "fsdp+cp": (4, [*FSDP, "--cp=2"]),
    "tp+cp": (4, ["--tp=2", "--cp=2"]),
    "fsdp+pp": (4, [*FSDP, "--pp=2"]),
    "ddp+pp": (4, ["--pp=2"]),
    "pp+tp": (4, ["--pp=2", "--tp=2"]),
    "pp+cp": (4, ["--pp=2", "--cp=2"]),
    "ep": (2, ["--ep=2"]),
    "fsdp+ep": (2, [*FSDP, "--ep=2"]),
    "hsdp+ep": (4, [*FSDP, "--dp_replicate=2", "--ep=2"]),
    "fsdp+ep+shards": (4, [*FSDP, "--ep=2"]),
    "ep+tp": (4, ["--ep=2", "--tp=2"]),
    "ep+cp": (4, ["--ep=2", "--cp=2"]),
    "ep+pp": (4, ["--ep=2", "--pp=2"]),
    "chunks": (2, [*CHUNKS]),
    "fsdp+chunks": (4, [*FSDP, *CHUNKS]),
    "ddp+chunks": (4, [*CHUNKS]),
    "chunks+tp": (4, [*CHUNKS, "--tp=2"]),
    "chunks+cp": (4, [*CHUNKS, "--cp=2"]),
    "fsdp+chunks+tp": (8, [*FSDP, *CHUNKS, "--tp=2"]),
    "pp of four": (4, ["--pp=4"]),
    "chunks of four": (4, ["--pp=4", "--pp_chunks=2"]),
}
GATED = "--mlp=swiglu --norm=rmsnorm --pos=rope --n_embd=48 --n_head=4 --attention=gqa --n_kv_head=2".split()
WIDE = "--qk_norm=True --norm_placement=after --norm=rmsnorm --pos=rope --n_head=4".split()
LAYERS = "--block=parallel --pos=rope --pos_pattern=LNG --n_layer=3".split()
LAYERS += "--qkv_bias=True --norm_bias=True --embed_scale=3.0".split()
PARTS = ["--block=superblock", "--layer=c/2+p/2,c.stream.relu+s.gelu/2,p.matrix", "--n_head=4"]
GROUPS = ["--block=superblock", "--layer=c.none+p,p.softmax.matrix", "--n_head=4"]
EXPERTS = "--n_expert=4 --n_expert_shared=1 --n_dense_layer=1 --balance_rate=0.1".split()
EXPERTS += "--mlp_ratio=3 --mlp=swiglu --bias=True".split()
SIGMOID = "--n_expert=3 --n_expert_active=1 --router=sigmoid --block=superblock --layer=c+e,p/2".split()
FLAGS = "--attn_gate=element --value_residual=True --n_head=4 --pos=rope".split()
DOCUMENTS = ["--doc_mask=True", "--eval_iters=8"]  # few windows have a boundary that a wrong rank would see
MODELS = {  # what is particular about a layout: layout -> {name: flags of the model}
    "tp": {
        "llama": [*GATED, *MUON],
        "biases, sandwich": ["--bias=True", "--norm_placement=sandwich", "--pos=sinusoidal", "--tie_weights=False"],
        "parallel, post": ["--block=parallel", "--norm_placement=post", "--logit_softcap=5.0", "--loss_chunk=7"],
        "values": ["--block=simplified_parallel", "--simplified_value_proj=all", *MUON],
        "joint pool": ["--block=superblock", "--layer=c.own_slots", "--pos=alibi", "--window=7"],
        "series": ["--block=superblock", "--layer=c,p", "--mlp=geglu", "--qk_norm=True", "--n_embd=48"],
        "parts": [*PARTS, "--bias=True", "--n_slot=4", *MUON],
        "groups": [*GROUPS, "--n_group=4", "--bias=True", "--mlp=swiglu", *MUON],
        "wide": [*WIDE, "--head_dim=12", "--attention=gqa", "--n_kv_head=2", "--tie_weights=False", *MUON],
        "layers": [*LAYERS, "--loss_chunk=7"],
        "z loss": ["--z_loss=0.1", "--logit_softcap=5.0", "--loss_chunk=7"],
        "padded": ["--z_loss=0.1", "--logit_softcap=5.0", "--vocab_size=259"],
        "attention": [*FLAGS, *MUON],
        "experts": [*EXPERTS, *MUON],
        "one expert": SIGMOID,
        "head gates": ["--attn_gate=head", "--block=simplified", "--value_residual=True"],
        "masked": ["--objective=masked", "--doc_mask=True", "--doc_positions=True", "--attn_softcap=3.0"],
        "seq2seq": ["--objective=seq2seq", "--corrupt_ratio=0.25", "--span_length=1.0", "--pos=rope", *MUON],
    },
    "cp": {
        "llama": [*GATED, "--window=5"],
        "documents": [*DOCUMENTS, "--doc_positions=True", "--pos=learned", "--window=9", *MUON],
        "biases, alibi": ["--bias=True", "--pos=alibi", "--attn_softcap=3.0", "--activation_checkpoint=full"],
        "joint pool": ["--block=superblock", "--layer=c.own_slots", "--pos=rope", *MUON],
        "values": ["--block=simplified_parallel", "--simplified_value_proj=all", "--pos=rope", "--window=9"],
        "parts": [*PARTS, "--n_slot=4", "--pos=rope"],
        "layers": [*LAYERS, "--rope_scaling=llama3:8:1:4:8"],
        "attention": [*FLAGS, "--window=5"],
        "experts": [*EXPERTS, "--activation_checkpoint=full"],
        "few keys": ["--block=simplified", "--attention=mqa", "--n_embd=48", "--n_head=4"],
    },
    "fsdp": {
        "20 steps": ["--pos=rope", "--max_iters=20"],
        "llama, kept": [*GATED, *MUON, "--fsdp_reshard=False"],
        "spikes": ["--spike_factor=1.01", "--max_iters=30"],
        "ramp": ["--batch_ramp=2:1,6:3", "--max_iters=4", *MUON],
        "layers": LAYERS,
        "offloaded": ["--fsdp_offload=True", "--activation_checkpoint=full"],
        "untied": ["--tie_weights=False", "--activation_checkpoint=selective", "--n_layer=3"],
        "seq2seq": ["--objective=seq2seq", "--grad_clip=0.0"],
        "attention": [*FLAGS, "--activation_checkpoint=full", *MUON],
        "experts": [*EXPERTS, "--activation_checkpoint=selective", *MUON],
    },
    "ddp": {"experts": SIGMOID},
    "hsdp": {
        "experts": [*SIGMOID, *MUON],
        "muon": [*MUON, "--block=superblock"],
        "groups": [*GROUPS, "--n_group=2", *MUON],
    },
    "fsdp+tp": {
        "llama": [*GATED, *MUON, "--activation_checkpoint=selective"],
        "seq2seq": ["--objective=seq2seq", "--corrupt_ratio=0.25", "--span_length=1.0"],
        "values": ["--block=simplified", "--simplified_value_proj=all", "--bias=True", *MUON],
        "experts": [*EXPERTS, *MUON],
    },
    "fsdp+pp": {
        "untied": ["--tie_weights=False", "--n_layer=3", *MUON],
        "masked": ["--objective=masked"],
        "layers": LAYERS,
        "experts": [*EXPERTS, *MUON],
    },
    "ddp+pp": {"recomputed": ["--activation_checkpoint=full", *MUON]},
    "pp+tp": {
        "untied": ["--tie_weights=False", "--n_layer=3", *MUON],
        "masked": ["--objective=masked", "--logit_softcap=5.0", "--z_loss=0.1"],
        "layers": LAYERS,
        "experts": [*EXPERTS, *MUON],
    },
    "pp+cp": {
        "documents": [*DOCUMENTS, "--pos=alibi"],
        "layers": [*LAYERS, *MUON],
        "experts": EXPERTS,
    },
    "ep": {"experts": [*EXPERTS, *MUON], "one expert": [*SIGMOID, "--n_expert=4"]},
    "fsdp+ep": {
        "experts": [*EXPERTS, *MUON, "--activation_checkpoint=full"],
        "whole": [*EXPERTS, "--fsdp_reshard=False"],
    },
    "hsdp+ep": {"experts": [*EXPERTS, *MUON]},
    "fsdp+ep+shards": {"experts": [*EXPERTS, *MUON, "--n_expert=6", "--activation_checkpoint=selective"]},
    "ep+tp": {"experts": [*EXPERTS, *MUON]},
    "ep+cp": {"experts": EXPERTS},
    "ep+pp": {"experts": [*EXPERTS, *MUON]},
    "chunks": {
        "llama": [*GATED, *MUON, "--n_layer=4"],
        "layers": [*LAYERS, "--n_layer=5", "--activation_checkpoint=selective", "--ema_decay=0.9"],
        "experts": [*EXPERTS, *MUON, "--n_layer=6"],
    },
    "fsdp+chunks": {
        "llama": [*GATED, *MUON, "--n_layer=5", "--activation_checkpoint=full"],
        "untied, kept": ["--tie_weights=False", "--n_layer=4", "--fsdp_reshard=False", "--block=simplified"],
        "masked": ["--objective=masked", "--n_layer=4"],
    },
    "ddp+chunks": {"superblock": ["--block=superblock", "--n_layer=6", *MUON]},
    "chunks+tp": {
        "llama": [*GATED, *MUON, "--n_layer=5"],
        "untied": ["--tie_weights=False", "--n_layer=4", "--z_loss=0.1"],
    },
    "chunks+cp": {"layers": [*LAYERS, *MUON, "--n_layer=4"]},
    "fsdp+chunks+tp": {"llama": [*GATED, *MUON, "--n_layer=4"]},
    "pp of four": {"untied": [*GATED, "--tie_weights=False", "--n_layer=5"]},
    "chunks of four": {"llama": [*GATED, "--n_layer=9", "--doc_mask=True"]},
}
MET = {  # blocks that the models of a layout have, or the layouts that it is made of, so that they need no run
    "tp": [*BLOCKS],
    "cp": [*BLOCKS],
    "fsdp": ["standard"],
    "hsdp": ["superblock", "standard"],
    "fsdp+tp": ["standard", "simplified"],
    "fsdp+cp": ["standard", "superblock"],
    "tp+cp": ["standard", "simplified"],
    "fsdp+pp": ["standard", "superblock"],
    "ddp+pp": ["standard", "simplified"],
    "pp+tp": [*BLOCKS],
    "pp+cp": [*BLOCKS],
}
CHOICES = ("--n_expert", "--spike_factor")  # flags with which a step depends on which of two numbers is larger
RUNS = []  # all in float64; one model of each layout of two ranks in float32 too, where no rounding changes a choice
for each, (processes, how) in LAYOUTS.items():
    blocks = {} if {"--ep=2", "--pp_chunks=2", "--pp=4"} & {*how} else BLOCKS  # of two layers
    every = blocks | MODELS.get(each, {})
    rounded = [name for name, flags in every.items() if not any(flag.startswith(CHOICES) for flag in flags)]
    RUNS.append(pytest.param(each, every, rounded, id=f"{each}-float32", marks=pytest.mark.slow))
    fewer = {name: flags for name, flags in every.items() if name not in MET.get(each, ())}
    one = [name for name in fewer if name in rounded and processes == 2]
    RUNS.append(pytest.param(each, fewer, one[:1], id=each))


ALONE = {}


@pytest.fixture
def alone(run):
    """alone(*flags) -> the losses of one process's run with these flags, which all tests share."""

    def call(*flags: str) -> list[tuple]:
        flags = tuple(flag for flag in flags if not flag.startswith(("--fsdp", "--activation_checkpoint")))
        if flags not in ALONE:
            ALONE[flags] = losses(run(*SIZES, *flags, out=f"alone {len(ALONE)}"))
        return ALONE[flags]

    return call


@pytest.mark.parametrize("layout,models,in_float32", RUNS)
def test_losses_do_not_depend_on_the_layout(layout, models, in_float32, alone, many):
    processes, how = LAYOUTS[layout]
    one_reader = ("tp", "cp", "tp+cp", "pp", "pp+tp", "pp+cp", "ep+tp", "ep+cp", "chunks", "chunks+tp", "chunks+cp")
    steps = TWO if layout in one_reader else []
    runs = in_both({name: [*SIZES, *SHORT, *flags, *steps, *how] for name, flags in models.items()})
    chosen = [(name, flags) for name, flags in runs if name in in_float32 or IN_FLOAT64 in flags]
    folder = many(processes, *chosen, saved=False)
    one = {name: partial(alone, *SHORT, *flags, *steps) for name, flags in models.items()}
    assert_same_but_for_rounding(folder, one, in_float32)


def forget_the_end(run: Path, copy: Path):
    """A copy of a run of 4 steps, as if it had been killed after the second."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "step_00000004")
    for pointer in ("latest", "best"):
        (copy / pointer).write_text("step_00000002\n")


UNEVEN = ["--n_layer=3", "--n_embd=20", "--gradient_accumulation_steps=3", *HALVES]  # the vocabulary is 257
UNEVEN_RUNS = {  # on 3 ranks: name -> (flags of the model, of the layout)
    "ddp": (["--bias=True"], []),
    "fsdp": (["--bias=True", "--tie_weights=False", *MUON], FSDP),
    "gains": (["--block=simplified", "--simplified_value_proj=all"], FSDP),  # of one number: two ranks have none of it
    "tp": (["--n_head=3", "--n_embd=24", "--block_size=18"], ["--tp=3"]),  # which pads the vocabulary to 258
    "cp": (["--n_head=3", "--n_embd=24", "--block_size=18", "--pos=rope"], ["--cp=3"]),
}


def test_layouts_whose_sizes_do_not_divide(run, alone, many):
    """Three ranks, a width of 20 and 257 ids: shares differ in size, and some are empty. What three saved as shards
    goes on in one process. All in float64: how sizes are divided does not depend on it."""
    runs = {name: [*SIZES, *UNEVEN, *flags, *how, IN_FLOAT64] for name, (flags, how) in UNEVEN_RUNS.items()}
    folder = many(3, *runs.items())
    for saved in ("fsdp", "gains"):
        forget_the_end(folder / saved, folder / f"half {saved}")
        run(*runs[saved], "--init_from=resume", "--parallel=ddp", out=f"half {saved}")
    for name in (*runs, "half fsdp", "half gains"):
        exact = alone(*UNEVEN, *UNEVEN_RUNS[name.removeprefix("half ")][0], IN_FLOAT64)
        assert distance(losses(folder / name), exact) < 1e-9, name


@pytest.mark.parametrize("layout", ["fsdp", "tp", pytest.param("fsdp+tp", marks=pytest.mark.slow), "cp", "pp"])
def test_layouts_in_bfloat16(layout, alone, many):
    """Weights that travel in bfloat16, norms of both kinds, and a residual stream in float32 or bfloat16: losses,
    gradient norms and evaluations err from float32's as those of one process in bfloat16 do."""
    low = ["--dtype=bfloat16", "--qk_norm=True", "--bias=True", "--max_iters=10", "--eval_interval=5"]
    low += [*(TWO if layout != "fsdp" else [])]
    models = {"layernorm": low, "rmsnorm": [*low, "--norm=rmsnorm", "--block=superblock", "--fp32_residual=False"]}
    if layout in ("cp", "fsdp"):  # its values are in float32, and its queries in bfloat16; gains are not sharded
        models["simplified"] = [*low, "--block=simplified", "--tie_weights=False"]
    processes, how = LAYOUTS[layout]
    folder = many(processes, *((name, [*SIZES, *flags, *how]) for name, flags in models.items()))
    for name, flags in models.items():
        exact = [flag for flag in flags if flag != "--fp32_residual=False"]
        lines = [losses(folder / name), alone(*flags), alone(*exact, "--dtype=float32")]
        trained = [[line for line in each if len(line) == 5] for each in lines]  # step, loss, gradient norm, ...
        evaluated = [[x for line in each if len(line) == 4 for x in line[1:3]] for each in lines]
        assert len(trained[0]) == 10 and len(evaluated[0]) == 6
        assert_rounds_alike(*([line[1] for line in each] for each in trained), f"{name}: losses")
        assert_rounds_alike(*([line[2] for line in each] for each in trained), f"{name}: gradient norms")
        assert_rounds_alike(*evaluated, f"{name}: evaluations")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp", "cp", "pp"])
def test_compiled_layouts_do_the_same(layout, alone, many):
    """Slow: the compilation takes half a minute each."""
    recomputed = ["--pos=rope", "--activation_checkpoint=selective"]
    models = {"plain": ["--block=superblock"], "recomputed": recomputed}
    compiled = [*LAYOUTS[layout][1], "--compile=True"]
    folder = many(2, *in_both({name: [*SIZES, *flags, *compiled] for name, flags in models.items()}))
    assert_same_but_for_rounding(folder, {name: partial(alone, *flags) for name, flags in models.items()}, [*models])


def masks_drawn(runs: dict[str, list[str]], folder: Path):
    """train.py with each of these flags; a file per run and rank with all dropout masks of the stream."""
    dropped = ops.dropped
    for name, flags in runs.items():
        masks = []

        def kept(x, p, masks=masks):
            y = dropped(x, p)
            if p and x.dim() == 3:  # of the stream, where nothing else is 0
                masks.append((y != 0).flatten())
            return y

        ops.dropped = kept
        train_runs([flags])
        torch.save(masks, folder / f"{name} {dist.get_rank()}")
    ops.dropped = dropped


def test_every_rank_drops_something_else(run, tiny_data, tmp_path):
    """Masks of different ranks, micro-batches and layers agree in half of their places, as those of p=0.5 do by chance.
    So do those of two ranks that were not there when the checkpoint was saved, and those of a run's beginning."""
    common = [*TINY, *SIZES, f"--dataset={tiny_data}", "--dropout=0.5", "--max_iters=2", "--block_size=18"]
    common += ["--gradient_accumulation_steps=6"]
    layouts = {"ddp": [], "fsdp": FSDP, "cp": ["--cp=3", *TWO], "resumed": ["--init_from=resume", "--max_iters=4"]}
    runs = {name: [*common, *how, f"--out_dir={tmp_path / name}"] for name, how in layouts.items()}
    run(*common, out="resumed")
    launch(3, masks_drawn, tmp_path, runs, tmp_path)
    drawn = {name: [x for rank in range(3) for x in torch.load(tmp_path / f"{name} {rank}")] for name in layouts}
    for name in layouts:
        assert len(drawn[name]) == 3 * 2 * 2 * 5  # ranks, steps, micro-batches; the embedding and two in each layer
        masks = torch.stack([*drawn[name], *(drawn["ddp"] if name == "resumed" else [])]).double()
        agreement = (masks @ masks.T + (1 - masks) @ (1 - masks).T) / masks.size(1)
        others = agreement[~torch.eye(len(masks), dtype=torch.bool)]
        assert abs(others - 0.5).max() < 3 / masks.size(1) ** 0.5, name


@pytest.fixture
def pretended(monkeypatch):
    """This process is the third of four ranks, and the others are pretended: collectives do nothing."""
    init = partial(dist.init_process_group, "fake", store=FakeStore(), rank=2, world_size=4)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: init())
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """What collectives send: (name, dtype, numbers) -> how often."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if f.namespace == "c10d":
            x = args[0][0] if isinstance(args[0], list) else args[1]
            self.seen[f.__name__.partition(".")[0], x.dtype, x.numel()] += 1
        elif f.namespace == "_c10d_functional" and "wait" not in f.__name__:
            self.seen[f.__name__.partition(".")[0], args[0].dtype, args[0].numel()] += 1
        return f(*args, **(kwargs or {}))


def step(rank: ShardedModel, micro_steps: int = 1):
    """A step on four texts, the same in all micro-steps."""
    text = torch.randint(257, (4, 17), generator=torch.Generator().manual_seed(rank.ranks.data_rank))
    batch = {"idx": text[:, :-1], "targets": text[:, 1:]}
    rank.backward(iter([batch] * micro_steps), micro_steps, torch.amp.GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_sends_weights_in_the_flags_dtype_and_gradients_in_float32(pretended, replicas, reshard, tied):
    """Of blocks, and of embedding, last norm and head if these are not tied; otherwise in float32 both ways.
    A step of two micro-batches, which gather the last of two blocks once for forward and backward."""
    flags = [f"--dp_replicate={replicas}", f"--fsdp_reshard={reshard}", "--dtype=bfloat16", "--vocab_size=257"]
    flags.append(f"--tie_weights={tied}")
    cfg = parse(Config, [*TINY, *SIZES, *FSDP, *flags, "--gradient_accumulation_steps=8"])
    replica, shards = ShardedModel(cfg, join(cfg)), 4 // replicas
    replica.init_weights(cfg.seed)
    with Sent() as sent:
        step(replica, 2)
    units = [("blocks.0.",), *([("wte",), ("norm", "head"), ("pos",)] if not tied else [("wte", "pos", "norm")])]
    of_block, *of_others = (
        sum(-(-len(p) // shards) * p[0].numel() for name, p in Model(cfg).named_parameters() if name.startswith(unit))
        for unit in units
    )
    gathers = {("_allgather_base_", torch.bfloat16, of_block): 2 * (3 if reshard else 2)}
    for n in of_others:
        gathers["_allgather_base_", torch.float32 if n == of_others[-1] else torch.bfloat16, n] = 2
    numbers, times = {of_block: 2} | dict.fromkeys(of_others, 1), 2 if reshard else 1  # micro-steps that reduce
    scatters = {("_reduce_scatter_base_", torch.float32, shards * n): k * times for n, k in numbers.items()}
    sums = {("allreduce_", torch.float32, n): k for n, k in numbers.items()} if replicas > 1 else {}
    assert sent.seen == gathers | scatters | sums


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("block", ["standard", "simplified_parallel"])
def test_tensor_parallel_ranks_send_the_stream_in_its_dtype(pretended, block, wide):
    """The embedding's, and sums with gains in float32; the results of readers without gains are in bfloat16 anyway."""
    flags = ["--tp=4", "--n_head=4", "--dtype=bfloat16", f"--fp32_residual={wide}", "--vocab_size=260", *TWO]
    cfg = parse(Config, [*TINY, *flags, f"--block={block}", "--pos=none"])
    rank = ShardedModel(cfg, join(cfg))
    with Sent() as sent:
        step(rank)
    dtypes = Counter()
    for (name, dtype, n), times in sent.seen.items():
        dtypes[dtype] += times * (name == "reduce_scatter_tensor" and n == 4 * 16 * 16)  # of the whole stream
    in_float32 = wide * (1 if block == "standard" else 1 + 2)  # in the forward
    assert dtypes[torch.float32] == in_float32 and dtypes.total() == 1 + 2 * (4 if block == "standard" else 2) + 1


CHUNK_LOSSES = [*itertools.product((0.0, 5.0), (0.0, 0.1), (True, False))]  # softcap, z loss, is there a gradient


def slices_of_the_loss(file: Path):
    """For each of CHUNK_LOSSES the sum and this rank's gradient, as they are, and as one compiled graph."""
    dist.init_process_group("gloo")
    torch._dynamo.config.recompile_limit = len(CHUNK_LOSSES)
    logits, targets = loss_inputs()
    mine = torch.nn.functional.pad(logits, (0, 1), value=100.0).chunk(2, 1)[dist.get_rank()]  # padded
    of_chunk, found = tensor_parallel.parallel_chunk_loss(dist.group.WORLD, logits.size(1)), []
    compiled = torch.compile(of_chunk, backend="aot_eager", fullgraph=True, dynamic=False)
    for softcap, z_loss, gradient in CHUNK_LOSSES:
        given = targets, softcap, gradient, z_loss
        found.append([f(mine.clone(), *given) for f in (of_chunk, compiled)])
    torch.save(found, f"{file}.{dist.get_rank()}")


def loss_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(12, 37, generator=generator, dtype=torch.float64)
    return logits, torch.randint(-1, 37, (12,), generator=generator)


def test_the_loss_of_slices_is_that_of_whole_rows(tmp_path):
    """Also compiled, where no part of it is left out of the graph: it has two kernels that read all logits."""
    launch(2, slices_of_the_loss, tmp_path, tmp_path / "found")
    ranks, (logits, targets) = [torch.load(tmp_path / f"found.{rank}") for rank in range(2)], loss_inputs()
    for options, *of_ranks in zip(CHUNK_LOSSES, *ranks, strict=True):
        softcap, z_loss, gradient = options
        total, p = ops.chunk_loss(logits.clone(), targets, softcap, gradient, z_loss)
        for each in zip(*of_ranks, strict=True):  # uncompiled on both ranks, compiled on both
            for found, _ in each:
                torch.testing.assert_close(found, total, rtol=1e-12, atol=0)
            if gradient:
                both = torch.cat([part for _, part in each], dim=1)
                torch.testing.assert_close(both[:, :-1], p, rtol=0, atol=1e-12)
                assert not both[:, -1].any()


def gains_of_fsdp(file: Path):
    """(dtype, value) of a block's gain and of a head's, in bfloat16 before and after a step whose rate is tiny."""
    flags = ["--block=simplified", "--dtype=bfloat16", "--vocab_size=257", "--learning_rate=1e-4", "--min_lr=0"]
    cfg = parse(Config, [*TINY, *flags, *TWO, *FSDP])
    rank = ShardedModel(cfg, join(cfg))
    rank.init_weights(cfg.seed)
    optimizer = optim.build(rank.model, cfg, rank)
    attn, mlp = rank.model.blocks[0].sums
    gains = []
    mlp.skip.register_forward_pre_hook(
        lambda *_: gains.append([(x.dtype, x[0].item()) for x in (mlp.skip.weight, attn.attn.alpha)])
    )
    for _ in range(2):
        step(rank)
        optimizer.step()
        rank.model.zero_grad(set_to_none=True)
    torch.save(gains, f"{file}.{dist.get_rank()}")


def test_fsdp_keeps_gains_in_float32(tmp_path):
    """In bfloat16, they move by less than a number in bfloat16 can, and alike on both ranks."""
    launch(2, gains_of_fsdp, tmp_path, tmp_path / "gains")
    gains, others = (torch.load(tmp_path / f"gains.{rank}") for rank in range(2))
    assert gains == others
    for (kind, before), (same, after) in zip(*gains, strict=True):
        assert kind == same == torch.float32
        assert before == 1.0 and 0.5e-4 < abs(after - 1.0) < 2e-4


@pytest.mark.parametrize("block", ["standard", "parallel", "superblock"])
def test_selective_recomputation_keeps_every_second_product(block):
    """So of four in a layer, one is computed again: the backward does not need the last one's result."""
    cfg, products = parse(Config, [*TINY, "--vocab_size=257", f"--block={block}"]), []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            products.extend([f] * (f in MATMULS))
            return f(*args, **(kwargs or {}))

    found = {}
    for kind in ("none", "selective", "full"):
        lm, text = Model(cfg, 0), torch.zeros(2, 16, dtype=torch.int64)
        for each in lm.blocks if kind != "none" else ():
            recompute(each, kind)
        loss = lm(text, text)
        products.clear()
        with Products():
            loss.backward()
        found[kind] = len(products), torch.cat([p.grad.flatten() for p in lm.parameters()])
    assert [n - found["none"][0] for n, _ in found.values()] == [0, 2 * 1, 2 * 3]  # in two layers
    assert torch.equal(found["selective"][1], found["none"][1])


DRAWN = ["--parallel=fsdp", "--parallel=fsdp --dp_replicate=2", "--parallel=fsdp --tp=2", "--pp=2"]
DRAWN = list(itertools.product([*BLOCKS.values(), *MODELS["tp"].values(), *MODELS["fsdp"].values()], DRAWN))
DRAWN += [(EXPERTS, layout) for layout in ("--ep=2", "--parallel=fsdp --ep=2", "--ep=2 --tp=2", "--ep=2 --pp=2")]
DRAWN += [(flags, "--pp=2 --tp=2") for flags in BLOCKS.values()]


@pytest.mark.parametrize("flags,layout", DRAWN, ids=str)
def test_every_rank_draws_its_part_of_the_same_weights(flags, layout, pretended):
    """The third of four ranks draws what distributing the whole weights gives it, by `fill` and by PyTorch."""
    plain = [flag for flag in flags if not flag.startswith(("--fsdp", "--activation_checkpoint"))]
    cfg = parse(Config, [*TINY, *SIZES, *plain, "--vocab_size=261", *layout.split()])
    weights = dict(Model(replace(cfg, tp=1), cfg.seed).named_parameters())
    try:
        check_layout(cfg, 4)
    except ValueError as error:
        pytest.skip(f"refused: {error}")
    replica = ShardedModel(cfg, join(cfg))
    replica.init_weights(cfg.seed)
    drawn = {name: local(p).clone() for name, p in replica.model.named_parameters()}
    replica.fill(weights | {"head.weight": weights.get("head.weight", weights["wte.weight"])})
    for name, p in replica.model.named_parameters():
        part, whole = drawn[name], weights.get(name, weights["wte.weight"]).detach()
        whole = torch.nn.functional.pad(whole, (0, 0) * (whole.dim() - 1) + (0, replica.shapes[name][0] - len(whole)))
        cut = tensor_parallel.sharded_dim(replica.model, name) if cfg.tp > 1 else None
        if cut is not None:
            whole = whole.chunk(cfg.tp, cut)[2 % cfg.tp]
        if name in replica.cut_by_ep:
            whole = whole.chunk(cfg.ep)[2 // cfg.tp % cfg.ep]
        if isinstance(p, DTensor):
            whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local()
        assert torch.equal(local(p), whole), name
        if name in VOCAB_WEIGHTS and layout.endswith("tp=2"):  # the padding is drawn, and not filled
            part = part[: len(part) - 1]
        assert torch.equal(part, local(p)[: len(part)]), name


class WithColumns(Model):
    """A model with a weight that has a column per token id, padded as the vocabulary is."""

    def __init__(self, cfg, seed=None):
        super().__init__(cfg, seed)
        self.columns = with_role(UndrawnLinear(cfg.vocab_rows, cfg.n_embd, bias=False), "whole")
        self.columns.initial = {"weight": Normal(0.02)}


def test_padding_of_the_vocabulary_changes_no_initial_weight(pretended, monkeypatch):
    cfg = parse(Config, [*TINY, *SIZES, "--vocab_size=261", "--parallel=fsdp", "--tp=2"])
    monkeypatch.setattr(sharded, "Model", WithColumns)
    replica = ShardedModel(cfg, join(cfg))
    replica.init_weights(cfg.seed)
    whole = WithColumns(replace(cfg, tp=1))
    whole.init_weights(cfg.seed)
    drawn = replica.part("columns.weight", replica.model.columns.weight)
    rows = slice(drawn.offsets[0], drawn.offsets[0] + 8)
    assert drawn.shape == (16, 262) and torch.equal(drawn.tensor[:, :261], whole.columns.weight[rows])


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints move


FOUR = ["--n_layer=4"]
MOVES = {  # models, and the numbers of processes with their layouts: two steps in each, and two in one process
    "dense": (
        {"standard": [*GATED, *FOUR], "superblock": ["--block=superblock", *MUON, "--bias=True", *FOUR]},
        [(4, FSDP), (2, ["--parallel=ddp", "--tp=2"]), (2, ["--tp=1", *CHUNKS]), (2, ["--pp_chunks=1"])],
    ),
    "experts": (
        {"experts": [*EXPERTS, *MUON]},
        [(4, [*FSDP, "--ep=2"]), (2, ["--parallel=ddp"]), (2, ["--ep=1", "--tp=2"])],
    ),
}


@pytest.mark.parametrize("models,layouts", MOVES.values(), ids=MOVES)
def test_a_run_moves_from_layout_to_layout(models, layouts, run, alone, many):
    """Shards on 4 ranks, then slices, stages or experts on 2, then one process: all as on one, in float64."""
    steps = 2 * len(layouts) + 2
    common = [f"--max_iters={steps}", f"--lr_decay_iters={steps}", "--eval_interval=2", IN_FLOAT64]
    resume = []
    for number, (processes, how) in enumerate(layouts, 1):
        how = [*resume, *how, f"--max_iters={2 * number}"]
        folder = many(processes, *((name, [*SIZES, *flags, *common, *how]) for name, flags in models.items()))
        resume = ["--init_from=resume"]
    for name, flags in models.items():
        run(*SIZES, *flags, *common, *resume, "--pp=1", "--tp=1", out=name)
        assert len(losses(folder / name)) == steps + steps // 2 + 1
        assert distance(losses(folder / name), alone(*flags, *common)) < 1e-9, name


def recorded(forward, file: Path):
    """Model.forward, which also adds a line to this rank's file: the windows that it is given to learn from. Each
    begins with the number of tokens before it, as the text is 0, 1, 2, ..."""

    def call(self, idx, *args, **kwargs):
        if self.training:
            rank = dist.get_rank() if dist.is_initialized() else 0
            with open(f"{file}.{rank}", "a") as f:
                f.write(f"{(idx[:, 0] // idx.size(1)).tolist()}\n")
        return forward(self, idx, *args, **kwargs)

    return call


def train_recorded(runs: list[tuple[Path, list[str]]]):
    forward = Model.forward
    for file, flags in runs:
        Model.forward = recorded(forward, file)
        train_runs([flags])


def test_more_ranks_and_other_batches_repeat_no_data(run, tmp_path, monkeypatch):
    """A run on one process, on two, on two with larger steps, on four and on one again: together they read every window
    of an epoch once, and each step those that come next in the order. The losses are those of one process."""
    n, data = 96, tmp_path / "numbers"
    data.mkdir()
    for split in ("train", "val"):
        np.arange(16 * n + 1, dtype=np.uint16).tofile(data / f"{split}.bin")
    common = [f"--dataset={data}", f"--vocab_size={16 * n + 1}", "--lr_decay_iters=40", "--eval_interval=100"]
    common.append(IN_FLOAT64)
    stages = [  # ranks, last step, batch_size, gradient_accumulation_steps, how
        (1, 3, 4, 2, []),
        (2, 6, 4, 2, []),
        (2, 7, 3, 4, []),
        (4, 9, 1, 12, FSDP),
        (1, 10, 12, 1, ["--parallel=ddp"]),
    ]
    launches, flags = [], []
    for _, last, batch, accumulation, how in stages:
        sizes = [f"--batch_size={batch}", f"--gradient_accumulation_steps={accumulation}", f"--max_iters={last}"]
        flags.append([*common, *sizes, *how])
    forward = Model.forward
    for number, ((ranks, *_), each) in enumerate(zip(stages, flags, strict=True)):
        file, how = tmp_path / f"stage {number}", ["--init_from=resume"] * (number > 0)
        if ranks == 1:
            monkeypatch.setattr(Model, "forward", recorded(forward, file))
            run(*each, *how, out="moved")
        else:
            launches.append((file, [*TINY, *each, *how, f"--out_dir={tmp_path / 'moved'}"]))
            if stages[number + 1][0] != ranks:
                launch(ranks, train_recorded, tmp_path, launches)
                launches = []
    monkeypatch.undo()

    samples, step, everything = 0, 0, []
    for number, (ranks, last, batch, accumulation, _) in enumerate(stages):
        files = [f"{tmp_path}/stage {number}.{rank}" for rank in range(ranks)]
        lines = [[json.loads(line) for line in Path(file).read_text().splitlines()] for file in files]
        per_step = batch * accumulation
        read = np.array(lines).reshape(ranks, last - step, per_step // ranks).swapaxes(0, 1).reshape(-1, per_step)
        expected = order(np.arange(samples, samples + read.size), n, 1337).reshape(read.shape)
        assert np.array_equal(np.sort(read), np.sort(expected)), number
        samples, step, everything = samples + read.size, last, [*everything, *read.flat]
    assert sorted(everything) == list(range(n))

    run(*flags[1], out="alone")
    run(*flags[-1], "--init_from=resume", out="alone")
    moved, expected = ([line for line in losses(tmp_path / name) if len(line) == 5] for name in ("moved", "alone"))
    assert [line[0] for line in moved] == list(range(10)) and distance(moved, expected) < 1e-9


KEPT = {"kept": (2, [*FSDP, "--fsdp_reshard=False"])}
OF_RESUMED = dict.fromkeys(("fsdp", "cp", "pp"), ["--dropout=0.1"])
OF_RESUMED |= {"ep": ["--dropout=0.1", *EXPERTS], "chunks": ["--dropout=0.1", "--n_layer=4"]}

MESHES = pytest.param(4, ["fsdp+tp", "fsdp+pp"], marks=pytest.mark.slow)  # their parts are resumed on two ranks


@pytest.mark.parametrize("processes,layouts", [(2, ["ddp", "fsdp", "kept", "tp", "cp", "pp", "ep", "chunks"]), MESHES])
def test_the_same_layout_goes_on_digit_for_digit(processes, layouts, many):
    runs = {}
    for name in layouts:
        runs[name] = [*SIZES, *HALVES, *MUON, *(LAYOUTS | KEPT)[name][1], *OF_RESUMED.get(name, ["--bias=True"])]
        if "fsdp" not in name:
            runs[name] += TWO
    folder = many(processes, *runs.items())
    for name in layouts:
        forget_the_end(folder / name, folder / f"{name}, again")
    many(processes, *((f"{name}, again", [*how, "--init_from=resume"]) for name, how in runs.items()))
    for name in layouts:
        assert figures(folder / f"{name}, again") == figures(folder / name)


# ---------------------------------------------------------------------------------------------------------------------
# What a layout costs


def count(models: dict[str, dict], result: Path):
    """Per name the bytes that rank 0 holds, those of all parameters, and with tp the collectives of a step."""
    found = {}
    originals = {name: getattr(tensor_parallel, name) for name in ("all_gather", "reduce_scatter")}

    def counting(name, *args, **kwargs):
        calls[name] += 1
        return originals[name](*args, **kwargs)

    for name in originals:
        setattr(tensor_parallel, name, partial(counting, name))
    for each, flags in models.items():
        cfg = Config(**flags, device="cpu", gradient_accumulation_steps=4, batch_size=2)
        ranks = parallel.join(cfg)
        replica = ShardedModel(cfg, ranks)
        replica.init_weights(cfg.seed)
        model = replica.model
        with torch.device("meta"):
            n_params = Model(cfg).n_params()
        states = optim.build(model, cfg, replica).state_tensors(model).values()
        tensors = [*model.parameters(), *(t for t in states if t.dim())]
        held, calls = sum(local(t).untyped_storage().nbytes() for t in tensors), Counter()
        if cfg.tp > 1:
            step(replica)
        found[each] = {"held": held, "whole": 4 * n_params, "calls": calls}
    if ranks.first:
        result.write_text(json.dumps(found))


@pytest.fixture
def facts(tmp_path):
    """facts(2, {"a": flags}) -> what `count` finds."""

    def call(processes: int, models: dict[str, dict]) -> dict:
        launch(processes, count, tmp_path, models, tmp_path / "counts.json")
        return json.loads((tmp_path / "counts.json").read_text())

    return call


SIZE = {"n_embd": 32, "n_head": 4, "block_size": 16, "vocab_size": 257}


def test_layers_of_a_superblock_need_half_of_the_collectives(facts):
    """Per layer, forward and backward: a gather and a scatter for each sum of the stream, twice."""
    blocks = {
        "standard": {},
        "simplified": {"block": "simplified"},
        "parallel": {"block": "parallel"},
        "simplified_parallel": {"block": "simplified_parallel"},
        "superblock": {"block": "superblock"},
        "joint": {"block": "superblock", "layer": "c.own_slots"},
    }
    models = {f"{name} {n}": {**SIZE, **flags, "tp": 2, "n_layer": n} for name, flags in blocks.items() for n in (2, 3)}
    calls = {name: each["calls"] for name, each in facts(2, models).items()}
    for name in blocks:
        sums = 2 if name in ("standard", "simplified") else 1
        for collective in ("all_gather", "reduce_scatter"):
            assert calls[f"{name} 3"][collective] - calls[f"{name} 2"][collective] == 2 * sums
            assert calls[f"{name} 2"][collective] == 2 * 2 * sums + 2  # embedding and head


def test_context_parallel_ranks_compute_equally_many_scores(monkeypatch):
    """The first and the last rank too, in the first and in every other layer."""
    scores = {}

    def counting(q, k, *args):
        scores[rank] = scores.get(rank, 0) + q.size(2) * k.size(2)
        return q

    monkeypatch.setattr("ops.attention", counting)
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        model = Model(Config(**SIZE, n_layer=3))
        context_parallel.apply_context_parallel(model, dist.group.WORLD)
        model.hidden(torch.zeros(1, 4, dtype=torch.int64))
        dist.destroy_process_group()
    assert scores == dict.fromkeys(range(4), 3 * 2 * 2 * (8 + 1))  # layers, queries, keys of pieces r and 7 - r


def test_fsdp_holds_one_share_of_parameters_and_optimizer(facts):
    """AdamW's two moments beside each parameter, Muon's one; 5 % are for what does not divide."""
    adamw = {**SIZE, "n_layer": 2, "parallel": "fsdp"}
    models = {"adamw": adamw, "muon": {**adamw, "optimizer": "muon", "vocab_size": 4}, "with tp": {**adamw, "tp": 2}}
    held = facts(4, models)
    for name, tensors in (("adamw", 3), ("muon", 2), ("with tp", 3)):
        assert held[name]["held"] == pytest.approx(held[name]["whole"] * tensors / 4, rel=0.05), name


# ---------------------------------------------------------------------------------------------------------------------
# What does not fit


@pytest.mark.parametrize(
    "ranks,flags,said",
    [
        (3, ["--tp=2"], "tp=2, cp=1 and pp=1 need 2 ranks or a multiple, and there are 3"),
        (4, [*FSDP, "--dp_replicate=3"], "dp_replicate=3 does not divide the 4 data-parallel ranks"),
        (3, [], "gradient_accumulation_steps=4, .* not divisible by the 3 data-parallel ranks; set it to 6"),
        (2, ["--tp=2", "--attention=mqa"], "tp=2 does not divide n_kv_head=1"),
        (2, ["--tp=2", "--block_size=15"], "tp=2 does not divide block_size=15; set --block_size=16"),
        (2, ["--tp=2", "--n_embd=64", "--mlp_ratio=3"], "tp=2 does not divide the MLP's 192 hidden units"),
        (2, ["--tp=2", "--dropout=0.1"], "dropout=0.1 does not go with tp=2"),
        (2, ["--tp=2", "--block=superblock", "--n_group=3", "--n_embd=48"], "tp=2 does not divide n_group=3"),
        (2, ["--tp=2", *GROUPS], "the softmax of p needs all its units; set n_group=2"),
        (2, ["--tp=2", "--objective=seq2seq"], "tp=2 does not divide the 3 tokens of the text or the 15 of its source"),
        (2, ["--cp=2", "--objective=masked"], "cp=2 needs objective=causal, and it is masked"),
        (3, ["--cp=3"], "cp=3, two pieces .* tp=1 do not divide block_size=16; set --block_size=18"),
        (2, ["--ep=2", "--n_expert=3"], "ep=2 does not divide n_expert=3"),
        (4, [*FSDP, "--ep=4", "--dp_replicate=2", "--n_expert=4"], "ep=4 does not divide the 2 data-parallel ranks"),
        (3, ["--pp=3"], "pp=3 .* n_layer=2; set pp or pp_chunks lower"),
        (2, ["--batch_ramp=2:5,3:9"], "batch_ramp=2:5,3:9 is divided among the 2 .*; set multiples of 2"),
        (2, ["--pp=2", "--batch_ramp=4:9"], "batch_ramp=4:9 does not go with pp=2, .* set pp=1"),
        (2, ["--pp=2", "--gradient_accumulation_steps=1"], "pp=2 needs at least 2 micro-batches"),
        (2, ["--pp=2", "--objective=seq2seq"], "pp=2 .* objective=seq2seq"),
        (2, CHUNKS, "pp=2 times pp_chunks=2 stages need a block each, and n_layer=2; .* pp_chunks lower"),
        (2, [*CHUNKS, "--n_layer=4", "--gradient_accumulation_steps=3"], "a multiple; .* leaves 3 .* to 6"),
        (2, [*FSDP, *MUON, "--fsdp_offload=True"], "optimizer=muon does not work with fsdp_offload=True"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_refused_by_name(ranks, flags, said):
    cfg = parse(Config, [*TINY, *SIZES, *flags])
    with pytest.raises(ValueError, match=said):
        check_layout(cfg, ranks)
