"""Whatever the layout of the ranks, training is the same: losses, gradient norms and evaluations of runs on real
processes are held against one process's runs, in float64 and some in float32."""

import itertools
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ops
from configurator import parse
from engine.config import Config
from engine.parallel.context import local_pieces
from engine.parallel.pipeline import StageModel, keep_stage
from engine.parallel.ranks import check_layout, join, layers_of_stage
from engine.parallel.recomputation import KEPT, MATMULS, recompute
from engine.parallel.sharded import ShardedModel
from model import Model
from tests.helpers import (
    IN_FLOAT64,
    TINY,
    Operations,
    assert_rounds_alike,
    assert_same_but_for_rounding,
    distance,
    figures,
    in_both,
    losses,
    steps_of,
)
from tests.ranks import launch, part_of, train_runs

# The vocabulary is the data's 257 ids, which tp=2 pads
SIZES = "--max_iters=2 --eval_interval=0 --eval_iters=1 --warmup_iters=1 --learning_rate=3e-3".split()
SIZES += ["--gradient_accumulation_steps=4"]
TWO = ["--gradient_accumulation_steps=2"]  # where all ranks read the same samples
HALVES = ["--eval_interval=1"]  # which saves in the middle, too
FSDP = ["--parallel=fsdp"]
MUON = ["--optimizer=muon"]
LAYOUTS = {
    "ddp": [],
    "fsdp": FSDP,
    "tp": ["--tp=2", *TWO],
    "cp": ["--cp=2", *TWO],
    "pp": ["--pp=2", *TWO],
    "ep": ["--ep=2"],
    "fsdp+tp": [*FSDP, "--tp=2", *TWO],
    "fsdp+pp": [*FSDP, "--pp=2"],
}
STANDARD, SIMPLIFIED = ["--pos=rope"], ["--block=simplified", "--pos=alibi"]
GATED = "--mlp=swiglu --norm=rmsnorm --pos=rope --n_embd=48 --n_head=4 --attention=gqa --n_kv_head=2".split()
GATED += ["--value_embedding=True"]
LAYERS = "--block=parallel --pos=rope --pos_pattern=LNG --n_layer=3".split()
LAYERS += "--qkv_bias=True --norm_bias=True --embed_scale=3.0".split()
PARTS = ["--block=c/2+p/2,c.stream.relu+s.gelu/2,p.matrix", "--n_head=4"]
SLICES = ["--block=c.none+p,p.gelu.matrix", "--n_head=4"]
EXPERTS = "--n_expert=4 --n_expert_shared=1 --n_dense_layer=1 --balance_rate=0.1".split()
EXPERTS += "--mlp_ratio=3 --mlp=swiglu --bias=True".split()
SIGMOID = "--n_expert=3 --n_expert_active=1 --router=sigmoid --block=c+e,p/2".split()
HEADS = ["--n_head=4", "--pos=rope"]
LOSS = ["--logit_softcap=5.0"]
DOCUMENTS = ["--doc_mask=True", "--eval_iters=8"]  # few windows have a boundary that a wrong rank would see
RECOMPUTED, SELECTED = ["--activation_checkpoint=full"], ["--activation_checkpoint=selective"]
SPANS = "--objective=seq2seq --corrupt_ratio=0.25 --span_length=1.0".split()
OF_TP = {
    "llama": [*GATED, *MUON],
    "biases, sandwich": ["--bias=True", "--norm_placement=sandwich", "--pos=sinusoidal", "--tie_weights=False"],
    "layers, post": [*LAYERS, "--norm_placement=post", *LOSS, "--loss_chunk=7", "--conv=4"],
    "values": ["--block=simplified_parallel", "--simplified_value_proj=all", *MUON],
    "joint pool": ["--block=c.own_slots", "--pos=alibi", "--window=7"],
    "parts": [*PARTS, *"--bias=True --n_slot=4 --mlp=geglu --n_embd=48 --qk_norm=True".split(), *MUON],
    "slices": [*SLICES, "--bias=True", "--mlp_ratio=3", "--conv=3", *MUON],
    "wide": [*HEADS, *"--norm_placement=after --head_dim=12 --attention=gqa --n_kv_head=2".split(), *MUON],
    "experts": [*EXPERTS, *MUON],
    "padding": ["--block=simplified", *LOSS, "--vocab_size=259"],
    "masked": ["--objective=masked", "--doc_mask=True", "--doc_positions=True", "--attn_softcap=3.0"],
    "seq2seq": [*SPANS, "--pos=rope", *MUON],
}
OF_CP = {
    "llama": [*GATED, *HEADS, "--window=5"],
    "documents": [*DOCUMENTS, "--doc_positions=True", "--pos=learned", "--window=9", "--conv=4", *MUON],
    "biases, alibi": ["--bias=True", "--pos=alibi", "--attn_softcap=3.0", *RECOMPUTED],
    "joint pool": ["--block=c.own_slots", "--pos=rope", *MUON],
    "values": ["--block=simplified_parallel", "--simplified_value_proj=all", "--pos=rope", "--window=9"],
    "few keys": ["--block=simplified", "--attention=mqa", "--n_embd=48", "--n_head=4", "--conv=5"],
    "parts": [*PARTS, "--n_slot=4", "--pos=rope"],
    "layers": [*LAYERS, "--rope_scaling=llama3:8:1:4:8"],
    "experts": [*EXPERTS, *RECOMPUTED, "--conv=2"],
}
OF_FSDP = {
    "20 steps": [*STANDARD, "--max_iters=20", *TWO],
    "spikes": ["--spike_factor=1.01", "--max_iters=24", *TWO],  # which are looked for after 20 steps
    "llama, kept": [*GATED, *MUON, "--fsdp_reshard=False"],
    "ramp": ["--block=superblock", "--batch_ramp=2:1,6:3", "--max_iters=4", *MUON],
    "recomputed": RECOMPUTED,
    "untied": ["--block=simplified", "--tie_weights=False", *SELECTED, "--n_layer=3", "--conv=4"],
    "seq2seq": ["--objective=seq2seq", "--grad_clip=0.0"],
    "slices": [*SLICES, *MUON],
    "attention": [*HEADS, *RECOMPUTED, *MUON],
    "experts": [*EXPERTS, *SELECTED, *MUON],
}
LAUNCHES = {  # name -> processes, {name of a run: what is particular about it: (flags of the model, of the layout)}
    "tp": (2, {name: (flags, LAYOUTS["tp"]) for name, flags in OF_TP.items()}),
    "cp": (2, {name: (flags, LAYOUTS["cp"]) for name, flags in OF_CP.items()}),
    "fsdp": (2, {name: (flags, FSDP) for name, flags in OF_FSDP.items()}),
    "pairs": (2, {
        "ddp": (STANDARD, []),
        "ddp, experts": (SIGMOID, []),
        "pp": (STANDARD, LAYOUTS["pp"]),
        "pp, simplified": (SIMPLIFIED, LAYOUTS["pp"]),
        "ep": ([*EXPERTS, *MUON, "--conv=3"], LAYOUTS["ep"]),
        "fsdp+ep, kept": ([*EXPERTS, *MUON, *RECOMPUTED, "--fsdp_reshard=False"], [*FSDP, "--ep=2"]),
        "pp, llama": ([*GATED, *MUON, "--n_layer=4"], LAYOUTS["pp"]),
        "pp, layers": ([*LAYERS, "--n_layer=5", "--conv=4", *SELECTED, "--ema_decay=0.9"], LAYOUTS["pp"]),
        "pp, experts": ([*EXPERTS, *MUON], LAYOUTS["pp"]),
    }),
    "meshes": (4, {
        "hsdp": (SIMPLIFIED, [*FSDP, "--dp_replicate=2"]),
        "fsdp+tp": ([*GATED, "--conv=4", "--conv_lr=0.02", *MUON, *SELECTED], LAYOUTS["fsdp+tp"]),
        "fsdp+tp, gains": ([*OF_TP["values"], "--block=simplified", "--bias=True"], LAYOUTS["fsdp+tp"]),
        "fsdp+cp": (SIMPLIFIED, [*FSDP, "--cp=2", *TWO]),
        "tp+cp": (["--block=superblock", "--conv=4", *MUON], ["--tp=2", "--cp=2", *TWO]),
        "hsdp+ep": ([*EXPERTS, *MUON], [*FSDP, "--dp_replicate=2", "--ep=2"]),
        "ep, two copies": ([*EXPERTS, *MUON], LAYOUTS["ep"]),
        "ep+tp": ([*EXPERTS, *MUON], ["--ep=2", "--tp=2", *TWO]),
        "ep+cp": (EXPERTS, ["--ep=2", "--cp=2", *TWO]),
        "ep+pp": ([*EXPERTS, *MUON], ["--ep=2", "--pp=2"]),
    }),
    "pipelines": (4, {
        "fsdp+pp": (["--tie_weights=False", *SIMPLIFIED, *MUON], LAYOUTS["fsdp+pp"]),
        "ddp+pp": (["--block=superblock", *DOCUMENTS, "--doc_positions=True", *RECOMPUTED, *MUON], ["--pp=2"]),
        "pp+tp": ([*LAYERS, "--objective=masked", *LOSS, "--tie_weights=False", *MUON], ["--pp=2", "--tp=2", *TWO]),
        "pp+cp": ([*DOCUMENTS, "--pos=alibi", "--conv=4", *EXPERTS], ["--pp=2", "--cp=2", *TWO]),
        "fsdp+pp, llama": ([*GATED, *MUON, "--n_layer=5", *RECOMPUTED], LAYOUTS["fsdp+pp"]),
        "four stages": ([*GATED, "--tie_weights=False", "--n_layer=5", "--doc_mask=True"], ["--pp=4"]),
    }),
}  # fmt: skip
FRESH = {"meshes"}  # whose processes are Pythons of their own, so that an order of sets on which ranks rely shows
NARROW = {"fsdp": ["20 steps"]}  # what is computed in float32 too, where no rounding changes a choice
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


@pytest.mark.parametrize("launched", LAUNCHES)
def test_losses_do_not_depend_on_the_layout(launched, alone, many):
    processes, runs = LAUNCHES[launched]
    in_float32 = NARROW.get(launched, [])
    flags = in_both({name: [*SIZES, *of_model, *how] for name, (of_model, how) in runs.items()})
    chosen = [(name, each) for name, each in flags if name in in_float32 or IN_FLOAT64 in each]
    folder = many(processes, *chosen, saved=False, fresh=launched in FRESH)
    one = {
        name: partial(alone, *of_model, *(flag for flag in how if flag in TWO))
        for name, (of_model, how) in runs.items()
    }
    assert_same_but_for_rounding(folder, one, in_float32)


def forget_the_end(run: Path, copy: Path):
    """A copy of a run of two steps, as if it had been killed after the first."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "step_00000002")
    for pointer in ("latest", "best"):
        (copy / pointer).write_text("step_00000001\n")


UNEVEN = ["--n_layer=3", "--n_embd=20", "--gradient_accumulation_steps=3", *HALVES]  # the vocabulary is 257
UNEVEN_RUNS = {  # on 3 ranks: name -> (flags of the model, of the layout)
    "fsdp": (["--bias=True", "--tie_weights=False", *MUON], FSDP),
    "gains": (["--block=simplified", "--simplified_value_proj=all"], FSDP),  # of one number: two ranks have none of it
    "tp": (["--n_head=3", "--n_embd=24", "--block_size=18"], ["--tp=3"]),  # which pads the vocabulary to 258
}


def test_layouts_whose_sizes_do_not_divide(run, alone, many):
    """Shares differ in size, and some are empty. What three ranks saved as shards goes on in one process."""
    runs = {name: [*SIZES, *UNEVEN, *flags, *how, IN_FLOAT64] for name, (flags, how) in UNEVEN_RUNS.items()}
    folder = many(3, *runs.items())
    for saved in ("fsdp", "gains"):
        forget_the_end(folder / saved, folder / f"half {saved}")
        run(*runs[saved], "--init_from=resume", "--parallel=ddp", out=f"half {saved}")
    for name in (*runs, "half fsdp", "half gains"):
        exact = alone(*UNEVEN, *UNEVEN_RUNS[name.removeprefix("half ")][0], IN_FLOAT64)
        assert distance(losses(folder / name), exact) < 1e-9, name


LOW = "--dtype=bfloat16 --qk_norm=True --bias=True --max_iters=6 --eval_interval=3".split() + TWO
IN_BFLOAT16 = {  # with norms of both kinds, and a residual stream in float32 or bfloat16
    "layernorm": LOW,
    "rmsnorm": [*LOW, "--norm=rmsnorm", "--block=superblock", "--fp32_residual=False"],
    "simplified": [*LOW, "--block=simplified", "--tie_weights=False"],
}
PAIRS = {"fsdp": ["layernorm", "simplified"], "tp": ["layernorm", "rmsnorm"], "cp": ["simplified"], "pp": ["rmsnorm"]}


def test_layouts_in_bfloat16(alone, many):
    """Losses, gradient norms and evaluations err from float32's as those of one process in bfloat16 do."""
    runs = [(layout, name) for layout, names in PAIRS.items() for name in names]
    flags = [(", ".join(key), [*SIZES, *LAYOUTS[key[0]], *IN_BFLOAT16[key[1]]]) for key in runs]
    folder = many(2, *flags)
    for layout, name in runs:
        where, how = f"{layout}, {name}", IN_BFLOAT16[name]
        exact = [flag for flag in how if flag != "--fp32_residual=False"]
        lines = [losses(folder / where), alone(*how), alone(*exact, "--dtype=float32")]
        trained = [[line for line in each if len(line) == 5] for each in lines]  # step, loss, gradient norm, ...
        evaluated = [[x for line in each if len(line) == 4 for x in line[1:3]] for each in lines]
        assert len(trained[0]) == 6 and len(evaluated[0]) == 6
        assert_rounds_alike(*([line[1] for line in each] for each in trained), f"{where}: losses")
        assert_rounds_alike(*([line[2] for line in each] for each in trained), f"{where}: gradient norms")
        assert_rounds_alike(*evaluated, f"{where}: evaluations")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp", "cp", "pp"])
def test_compiled_layouts_do_the_same(layout, alone, many):
    """Slow: the compilation takes half a minute each."""
    recomputed = ["--pos=rope", "--activation_checkpoint=selective"]
    models = {"plain": ["--block=superblock"], "recomputed": recomputed}
    compiled = [*LAYOUTS[layout], "--compile=True"]
    steps = [flag for flag in compiled if flag in TWO]
    folder = many(2, *in_both({name: [*SIZES, *flags, *compiled] for name, flags in models.items()}))
    one = {name: partial(alone, *flags, *steps) for name, flags in models.items()}
    assert_same_but_for_rounding(folder, one, [*models])


def masks_drawn(runs: dict[str, list[str]], folder: Path):
    """train.py with each of these flags; a file per run and rank with all dropout masks of the stream."""
    dropped, masks = ops.dropped, []

    def kept(x, p):
        y = dropped(x, p)
        if p and x.dim() == 3:  # of the stream, where nothing else is 0
            masks.append((y != 0).flatten())
        return y

    ops.dropped = kept
    for name, flags in runs.items():
        train_runs([flags])
        torch.save(masks, folder / f"{name} {dist.get_rank()}")
        masks.clear()


def test_every_rank_drops_something_else(run, tiny_data, tmp_path):
    """Masks of any two ranks, micro-batches and layers agree in half of their places, as chance has it; so do those of
    ranks that were not there when the checkpoint was saved."""
    common = [*TINY, *SIZES, f"--dataset={tiny_data}", "--dropout=0.5", "--max_iters=2", "--block_size=18"]
    common += ["--gradient_accumulation_steps=6"]
    layouts = {"ddp": [], "cp": ["--cp=3", *TWO], "resumed": ["--init_from=resume", "--max_iters=4"]}
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


def step(rank: ShardedModel):
    """A step of one micro-batch of four texts."""
    text = torch.randint(257, (4, 17), generator=torch.Generator().manual_seed(rank.ranks.data_rank))
    batch = {"idx": text[:, :-1], "targets": text[:, 1:]}
    rank.backward(iter([batch]), 1, torch.amp.GradScaler("cpu", enabled=False))


def test_fsdp_keeps_gains_in_float32(pretended):
    """Also beside weights in bfloat16: they move by less than a number in it can."""
    flags = ["--block=simplified", "--dtype=bfloat16", "--vocab_size=257", "--gradient_accumulation_steps=4"]
    cfg = parse(Config, [*TINY, *FSDP, *flags])
    rank = ShardedModel(cfg, join(cfg))
    rank.init_weights(cfg.seed)
    attn, mlp = rank.model.blocks[0].sums
    kinds = []

    def note(*_):
        kinds.extend(x.dtype for x in (mlp.skip.weight, attn.attn.alpha, mlp.mlp.up.weight))

    mlp.skip.register_forward_pre_hook(note)
    step(rank)
    assert kinds == [torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("block", ["standard", "parallel", "superblock"])
def test_selective_recomputation_keeps_every_second_product(block):
    """So of four in a layer, one is computed again: the backward does not need the last one's result."""
    cfg, products = parse(Config, [*TINY, "--vocab_size=257", f"--block={block}"]), []
    found = {}
    for kind in ("none", "selective", "full"):
        lm, text = Model(cfg, 0), torch.zeros(2, 16, dtype=torch.int64)
        for each in lm.blocks if kind != "none" else ():
            recompute(each, kind)
        loss = lm(text, text)
        products.clear()
        with Operations(lambda f, *_: products.extend({f} & (MATMULS | KEPT))):
            loss.backward()
        found[kind] = len(products), torch.cat([p.grad.flatten() for p in lm.parameters()])
    assert [n - found["none"][0] for n, _ in found.values()] == [0, 2 * 1, 2 * 4]  # in two layers, of which attention
    assert torch.equal(found["selective"][1], found["none"][1])


DRAWN = [*zip(OF_TP.values(), itertools.cycle(["--parallel=fsdp --tp=2", "--parallel=fsdp --dp_replicate=2"]))]
DRAWN += [(EXPERTS, layout) for layout in ("--ep=2", "--parallel=fsdp --ep=2", "--ep=2 --tp=2", "--ep=2 --pp=2")]
DRAWN += [(STANDARD, "--pp=2 --tp=2")]


@pytest.mark.parametrize("flags,layout", DRAWN, ids=str)
def test_every_rank_draws_its_part_of_the_same_weights(flags, layout, pretended):
    """The third of four, all bits; the trainings above and those that move show that it is the layout's part."""
    cfg = parse(Config, [*TINY, *SIZES, *flags, "--vocab_size=261", *layout.split()])
    weights = dict(Model(replace(cfg, tp=1), cfg.seed).named_parameters())
    replica = ShardedModel(cfg, join(cfg))
    replica.init_weights(cfg.seed)
    for name, p in replica.model.named_parameters():
        part, whole = replica.part(name, p), weights.get(name, weights["wte.weight"]).detach()
        padded = torch.full(part.shape, torch.nan)  # of the vocabulary
        padded[: len(whole)] = whole
        expected = part_of(padded, part)
        known = ~expected.isnan()
        assert torch.equal(part.tensor[known], expected[known]), name


# ---- Checkpoints move


MOVES = [  # processes, layout, sequences of a micro-batch, micro-batches of a step
    (4, [*FSDP, "--ep=2"], 4, 4),
    (2, ["--parallel=ddp"], 2, 8),
    (2, ["--ep=1", "--tp=2"], 4, 3),
    (2, ["--tp=1", "--pp=2"], 1, 12),
    (1, ["--pp=1"], 12, 1),
]


def test_a_run_moves_from_layout_to_layout(run, alone, many):
    """A step each on shards, experts, slices, stages and one process are those of one process that nobody stops."""
    common = [*GATED, *EXPERTS, "--n_expert=6", *MUON, *HALVES, f"--lr_decay_iters={len(MOVES)}", IN_FLOAT64]
    for step, (processes, how, batch, accumulation) in enumerate(MOVES, 1):
        flags = [*SIZES, *common, f"--batch_size={batch}", f"--gradient_accumulation_steps={accumulation}"]
        flags += [f"--max_iters={step}", *["--init_from=resume"] * (step > 1)]
        if processes > 1:
            many(processes, ("moved", [*flags, *how]))
    moved = steps_of(run(*flags, *how, out="moved"))
    whole = alone(*common, "--batch_ramp=4:2", "--gradient_accumulation_steps=3", f"--max_iters={len(MOVES)}")
    expected = [line for line in whole if len(line) == 5]  # without evaluations
    assert [line[0] for line in moved] == [0, 1, 2, 3, 4] and distance(moved, expected) < 1e-9


RESUMED = dict.fromkeys(("ddp", "tp"), ["--bias=True"]) | dict.fromkeys(("fsdp", "cp", "pp"), ["--dropout=0.1"])
RESUMED |= {"ep": ["--dropout=0.1", *EXPERTS]}


def test_the_same_layout_goes_on_digit_for_digit(many):
    runs = {name: [*SIZES, *HALVES, *MUON, *LAYOUTS[name], *flags] for name, flags in RESUMED.items()}
    folder = many(2, *runs.items())
    for name in RESUMED:
        forget_the_end(folder / name, folder / f"{name}, again")
    many(2, *((f"{name}, again", [*how, "--init_from=resume"]) for name, how in runs.items()))
    for name in RESUMED:
        assert figures(folder / f"{name}, again") == figures(folder / name)


# ---- What a layout costs


@pytest.mark.parametrize("flags,sums", [
    ([], 2), (["--block=simplified"], 2), (["--block=parallel"], 1), (["--block=superblock"], 1),
    (["--block=c.own_slots"], 1),
])  # fmt: skip
def test_layers_of_a_superblock_need_half_of_the_collectives(flags, sums, pretended):
    """Per layer, forward and backward: a gather and a scatter for each sum of the stream, twice."""
    cfg = parse(Config, [*TINY, "--vocab_size=257", "--n_head=4", "--tp=4", *TWO, *flags])
    ranks, sent = join(cfg), Counter()
    for cfg.n_layer in (2, 3):
        rank = ShardedModel(cfg, ranks)
        rank.init_weights(cfg.seed)
        sent.clear()
        with Operations(lambda f, *_: sent.update([f.__name__.partition(".")[0]])):
            step(rank)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            assert sent[name] == 2 * cfg.n_layer * sums + 2, name  # for layers, embedding and head


def test_blocks_are_spread_evenly_and_a_later_stage_begins_with_the_stream():
    """Which has passed the dropout of the first one."""
    for n_layer, ranks, sizes in ((5, 4, [2, 1, 1, 1]), (6, 4, [2, 1, 2, 1]), (4, 2, [2, 2]), (3, 3, [1, 1, 1])):
        found = []
        for rank in range(ranks):
            model = Model(parse(Config, [*TINY, f"--n_layer={n_layer}", "--vocab_size=31", "--dropout=0.5"]))
            keep_stage(model, rank, ranks)
            found.append(len(model.blocks))
            assert [*model.blocks._modules] == [str(layer) for layer in layers_of_stage(n_layer, rank, ranks)]
            if rank > 0:
                stage = StageModel(model, nullcontext, first=False)
                stage.received = torch.randn(2, 12, 16)
                again, t = model.embed(torch.zeros(2, 12), 3, None)
                assert again is stage.received and t.tolist() == list(range(3, 15))
        assert found == sizes


def test_a_context_parallel_rank_has_an_early_and_a_late_piece(pretended):
    """So that all see equally many keys."""
    dist.init_process_group()
    assert local_pieces(torch.arange(8)[None], dist.group.WORLD).tolist() == [[2, 5]]


# ---- What does not fit


@pytest.mark.parametrize("ranks,flags,said", [
    (3, ["--tp=2"], "tp=2 \\(command line\\) with cp=1 with pp=1: they need 2 ranks or a multiple, and there are 3"),
    (4, [*FSDP, "--dp_replicate=3"], "dp_replicate=3 .*: does not divide the 4 data-parallel ranks"),
    (3, [], "gradient_accumulation_steps=4 .* the 3 data-parallel ranks need equally many, .*; set it to 6"),
    (2, ["--tp=2", "--attention=mqa"], "tp=2 .* does not divide the number of key/value heads, 1; "),
    (2, ["--tp=2", "--block_size=15"], "tp=2 .* with block_size=15 .* tp does not divide it; set --block_size=16"),
    (2, ["--tp=2", "--n_embd=64", "--mlp_ratio=3"], "tp=2 .*: does not divide the MLP's 192 hidden units"),
    (2, ["--tp=2", "--dropout=0.1"], "dropout=0.1 .* with tp=2"),
    (2, ["--tp=2", "--block=c+p.softmax"], "the softmax of p needs all its units; set tp=1"),
    (2, ["--tp=2", "--objective=seq2seq"], "tp=2 .* the 3 tokens of the text or the 15 of its source"),
    (2, ["--cp=2", "--objective=masked"], "cp=2 .* with objective=masked .* only causal texts can be cut; set cp=1"),
    (3, ["--cp=3"], "cp=3 .* with tp=1 with block_size=16 .* a multiple of 6, .*; set --block_size=18"),
    (2, ["--ep=2", "--n_expert=3"], "ep=2 .* with n_expert=3 .* ep does not divide n_expert; set ep to a divisor"),
    (2, ["--ep=2", "--n_expert=2", *SELECTED], "activation_checkpoint=selective .* with ep=2 .*; use full"),
    (4, [*FSDP, "--ep=4", "--dp_replicate=2", "--n_expert=4"], "ep=4 .*: does not divide the 2 data-parallel ranks"),
    (3, ["--pp=3"], "pp=3 .* with n_layer=2 .* each stage needs a block; set pp lower"),
    (2, ["--batch_ramp=2:5,3:9"], "='2:5,3:9' .* by the 2 .*; set multiples of 2, or if it is over, --batch_ramp=$"),
    (2, ["--pp=2", "--batch_ramp=4:9"], "batch_ramp='4:9' .* with pp=2 .* set pp=1, or if it is over, --batch_ramp="),
    (2, ["--pp=2", "--gradient_accumulation_steps=1"], "=1 .* the 1 data-parallel ranks need .* 2 or more each; "),
    (2, ["--pp=2", "--objective=seq2seq"], "pp=2 .* objective=seq2seq"),
])  # fmt: skip
def test_a_layout_that_does_not_fit_is_refused_by_name(ranks, flags, said):
    cfg = parse(Config, [*TINY, *SIZES, *flags])
    with pytest.raises(ValueError, match=said):
        check_layout(cfg, ranks)


@pytest.mark.parametrize("ranks,flags,n,size", [
    (2, ["--batch_size=12", "--gradient_accumulation_steps=1"], 2, 6),
    (6, ["--batch_size=9", "--gradient_accumulation_steps=4"], 12, 3),
    (4, ["--batch_size=6", "--gradient_accumulation_steps=1", "--pp=2"], 4, None),  # 6 sequences cannot be cut into 4
    (2, ["--batch_size=6", "--gradient_accumulation_steps=1", "--pp=2"], 2, 3),
    (64, ["--batch_size=12", "--gradient_accumulation_steps=40"], 64, None),
])  # fmt: skip
def test_the_remedy_for_micro_batches_keeps_the_step_if_it_can(ranks, flags, n, size):
    cfg = parse(Config, [*TINY, *SIZES, *flags])
    with pytest.raises(ValueError) as error:
        check_layout(cfg, ranks)
    remedy = f"set it to {n}, for {n * cfg.batch_size} sequences a step instead of "
    if size:
        assert n * size == cfg.batch_size * cfg.gradient_accumulation_steps
        remedy = f"set it to {n}, and batch_size to {size} for as many sequences a step"
        cfg.batch_size = size
    assert remedy in str(error.value)
    cfg.gradient_accumulation_steps = n
    check_layout(cfg, ranks)
