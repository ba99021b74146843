"""Whatever the layout of the ranks, training is the same: losses, gradient norms and evaluations of runs on real
processes are held against one process's runs, in float64 and some in float32.

test_gradients has each flag of the network on each layout of two ranks. Here is what a whole run adds to a gradient.
"""

import itertools
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
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
from tests.helpers import IN_FLOAT64, TINY, Operations, assert_rounds_alike, distance, figures, losses, steps_of
from tests.parallel.test_gradients import FLAGS as ROW_FLAGS
from tests.parallel.test_gradients import ROWS
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
}
STANDARD = ["--pos=rope"]
SIMPLIFIED = ["--block=simplified", "--pos=alibi"]
GATED = "--mlp=swiglu --norm=rmsnorm --pos=rope --n_embd=48 --n_head=4 --attention=gqa --n_kv_head=2".split()
GATED += ["--value_embedding=True"]
GAINS = "--block=simplified --sas_value_proj=all --mlp=swiglu --n_embd=48 --n_head=4 --bias=True".split()
GAINS += "--conv=4 --conv_lr=0.02".split()
LAYERS = "--block=parallel --pos=rope --pos_pattern=LNG --n_layer=3".split()
LAYERS += "--qkv_bias=True --norm_bias=True --embed_scale=3.0".split()
EXPERTS = "--n_expert=4 --n_expert_shared=1 --n_dense_layer=1 --balance_rate=0.1".split()
EXPERTS += "--mlp_ratio=3 --mlp=swiglu --bias=True".split()
SIGMOID = "--n_expert=3 --n_expert_active=1 --router=sigmoid --block=c+e,p/2".split()
LOSS = ["--logit_softcap=5.0"]
DOCUMENTS = ["--doc_mask=True", "--eval_iters=8"]  # few windows have a boundary that a wrong rank would see
RECOMPUTED = ["--activation_checkpoint=full"]
SELECTED = ["--activation_checkpoint=selective"]
PAIRS = {  # name of a run -> (flags of the model, of the layout)
    # The micro-batches of a rank are not averaged with those of the other one.
    "ddp": (STANDARD, LAYOUTS["ddp"]),
    # Each rank balances experts by its own tokens.
    "ddp, experts": (SIGMOID, LAYOUTS["ddp"]),
    # The gradient's norm counts what both ranks have twice; Muon orthogonalises slices, q, k and v as one matrix.
    "tp": ([*GATED, *MUON], LAYOUTS["tp"]),
    # Evaluations see the documents of another piece, and what is recomputed has other keys.
    "cp": ([*DOCUMENTS, "--pos=learned", "--window=9", "--conv=4", *RECOMPUTED, *MUON], LAYOUTS["cp"]),
    # The gradient's norm counts the tied weight twice; stages of 3 and 2 layers recompute.
    "pp": ([*LAYERS, "--n_layer=5", *SELECTED, *MUON], LAYOUTS["pp"]),
    # The loads count in the gradient's norm, or those of the other rank's tokens do not balance.
    "ep": ([*EXPERTS, *MUON, "--conv=3"], LAYOUTS["ep"]),
    # FSDP gathers what --ep divides, or does not reduce it when it is not resharded.
    "fsdp+ep, kept": ([*EXPERTS, *MUON, *RECOMPUTED, "--fsdp_reshard=False"], [*FSDP, "--ep=2"]),
    # Each rank judges a spike by the norm of its shards. They are looked for after 20 steps.
    "fsdp, spikes": (["--spike_factor=1.01", "--max_iters=24", *TWO], FSDP),
    # The number of a rank's micro-batches, or which samples it reads, does not follow the step.
    "fsdp, ramp": (["--block=superblock", "--batch_ramp=2:1,6:3", "--max_iters=4", *RECOMPUTED, *MUON], FSDP),
}
MESHES = {  # whose ranks send several gradients in one message, in an order that all must share
    # Gains, which every rank has whole, are averaged over shards or copies alone.
    "hsdp": (SIMPLIFIED, [*FSDP, "--dp_replicate=2"]),
    # The same under tp; Muon's owners have shards instead of slices; what is recomputed is gathered once more.
    "fsdp+tp": ([*GAINS, *MUON, *SELECTED], [*FSDP, "--tp=2", *TWO]),
    # Ranks of one cp group read different samples.
    "fsdp+cp": (SIMPLIFIED, [*FSDP, "--cp=2", *TWO]),
    # Gradients of experts are summed over copies, or averaged over the ranks that divide them.
    "hsdp+ep": ([*EXPERTS, *MUON], [*FSDP, "--dp_replicate=2", "--ep=2"]),
    # Copies exchange gradients in an order of their own, such as a set's.
    "ep, two copies": ([*EXPERTS, *MUON], LAYOUTS["ep"]),
}
MIXED = {
    # Pieces are cut in another order than slices, so a rank has positions of another one.
    "tp+cp": (["--block=superblock", "--conv=4", *MUON], ["--tp=2", "--cp=2", *TWO]),
    # A rank routes the tokens of its slice, piece or micro-batch to the experts of another group.
    "ep+tp": ([*EXPERTS, *MUON], ["--ep=2", "--tp=2", *TWO]),
    "ep+cp": (EXPERTS, ["--ep=2", "--cp=2", *TWO]),
    "ep+pp": ([*EXPERTS, *MUON], ["--ep=2", "--pp=2"]),
    # FSDP frees a stage's weights that a later micro-batch needs, or reduces the last one's gradients alone.
    "fsdp+pp": ([*GATED, *MUON, "--n_layer=5", *RECOMPUTED], [*FSDP, "--pp=2"]),
    # Copies of a stage do not average their gradients.
    "ddp+pp": (["--block=superblock", *DOCUMENTS, "--doc_positions=True", *RECOMPUTED, *MUON], ["--pp=2"]),
    # The stream that stages hand on is the whole one and not a slice.
    "pp+tp": ([*LAYERS, "--objective=masked", *LOSS, "--tie_weights=False", *MUON], ["--pp=2", "--tp=2", *TWO]),
    # Stages read the documents of another micro-batch, or pieces those of another piece.
    "pp+cp": ([*DOCUMENTS, "--pos=alibi", "--conv=4", *EXPERTS], ["--pp=2", "--cp=2", *TWO]),
    # A stage has neither the embedding nor the head.
    "four stages": ([*GATED, "--tie_weights=False", "--n_layer=5", "--doc_mask=True"], ["--pp=4"]),
}
LAUNCHES = {"pairs": (2, PAIRS), "meshes": (4, MESHES), "mixed": (4, MIXED)}
FRESH = {"meshes"}  # of whose processes two are new Pythons, so that an order of sets on which ranks rely shows
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


def steps_in(layout: list[str]) -> list[str]:
    """The flags with which one process has as many micro-batches as this layout."""
    return [flag for flag in layout if flag in TWO]


def assert_same(found: list[tuple], exact: list[tuple], what: str):
    error = distance(found, exact)
    assert error < 1e-9, f"{what} differs from one process by {error:.1e} in float64"


def assert_same_but_for_rounding(found: list[tuple], alone: list[tuple], exact: list[tuple], what: str):
    """In float32, a layout errs at most ten times as much as one process, whose error depends on the CPU."""
    error = distance(found, exact)
    usual = distance(alone, exact)
    assert error < 10 * usual, f"{what} errs by {error:.1e} in float32, and one process by {usual:.1e}"


@pytest.mark.parametrize("launched", LAUNCHES)
def test_losses_do_not_depend_on_the_layout(launched, alone, many):
    processes, runs = LAUNCHES[launched]
    flags = {name: [*SIZES, *of_model, *layout, IN_FLOAT64] for name, (of_model, layout) in runs.items()}
    folder = many(processes, *flags.items(), saved=False, fresh=launched in FRESH)
    for name, (of_model, layout) in runs.items():
        exact = alone(*of_model, *steps_in(layout), IN_FLOAT64)
        assert_same(losses(folder / name), exact, name)


def test_twenty_steps_in_float32(alone, many):
    flags = [*STANDARD, "--max_iters=20", *TWO]
    folder = many(2, ("fsdp", [*SIZES, *flags, *FSDP]), saved=False)
    assert_same_but_for_rounding(losses(folder / "fsdp"), alone(*flags), alone(*flags, IN_FLOAT64), "fsdp")


def forget_the_end(run: Path, copy: Path):
    """A copy of a run of two steps, as if it had been killed after the first."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "step_00000002")
    for pointer in ("latest", "best"):
        (copy / pointer).write_text("step_00000001\n")


UNEVEN = ["--n_layer=3", "--n_embd=20", "--gradient_accumulation_steps=3", *HALVES]  # the vocabulary is 257
THIRDS = ["--bias=True", "--tie_weights=False", *MUON]
SLICED = ["--n_head=3", "--n_embd=24", "--block_size=18"]  # tp=3 pads the vocabulary to 258


def test_layouts_whose_sizes_do_not_divide(run, alone, many):
    """Three ranks have shards of other sizes. What they saved goes on in one process."""
    thirds = [*SIZES, *UNEVEN, *THIRDS, IN_FLOAT64]
    sliced = [*SIZES, *UNEVEN, *SLICED, IN_FLOAT64]
    folder = many(3, ("fsdp", [*thirds, *FSDP]), ("tp", [*sliced, "--tp=3"]))
    exact = alone(*UNEVEN, *THIRDS, IN_FLOAT64)
    assert_same(losses(folder / "fsdp"), exact, "fsdp")
    assert_same(losses(folder / "tp"), alone(*UNEVEN, *SLICED, IN_FLOAT64), "tp")
    forget_the_end(folder / "fsdp", folder / "resumed")
    assert_same(losses(run(*thirds, "--init_from=resume", out="resumed")), exact, "resumed")


LOW = "--dtype=bfloat16 --qk_norm=True --bias=True --max_iters=6 --eval_interval=3".split() + TWO
IN_BFLOAT16 = {  # with norms of both kinds, and a residual stream in float32 or bfloat16
    "fsdp": LOW,
    "tp": [*LOW, "--norm=rmsnorm", "--block=superblock", "--fp32_residual=False"],
    "cp": [*LOW, "--block=simplified", "--tie_weights=False"],
}


def test_layouts_in_bfloat16(alone, many):
    """Losses, gradient norms and evaluations err from float32's as those of one process in bfloat16 do."""
    folder = many(2, *((layout, [*SIZES, *LAYOUTS[layout], *flags]) for layout, flags in IN_BFLOAT16.items()))
    for layout, flags in IN_BFLOAT16.items():
        exact = [flag for flag in flags if flag != "--fp32_residual=False"]
        found = [losses(folder / layout), alone(*flags), alone(*exact, "--dtype=float32")]
        assert_rounds_alike(*(of_steps(lines, 1) for lines in found), f"{layout}: losses")
        assert_rounds_alike(*(of_steps(lines, 2) for lines in found), f"{layout}: gradient norms")
        assert_rounds_alike(*map(of_evaluations, found), f"{layout}: evaluations")


def of_steps(lines: list[tuple], column: int) -> list[float]:
    """A column of the six steps' `losses`: step, loss, gradient norm, ..."""
    found = [line[column] for line in lines if len(line) == 5]
    assert len(found) == 6
    return found


def of_evaluations(lines: list[tuple]) -> list[float]:
    """The training and the validation losses of the three evaluations."""
    found = [loss for line in lines if len(line) == 4 for loss in line[1:3]]
    assert len(found) == 6
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp", "cp", "pp"])
def test_compiled_layouts_do_the_same(layout, alone, many):
    """Slow: the compilation takes half a minute each."""
    models = {"plain": ["--block=superblock"], "recomputed": ["--pos=rope", *SELECTED]}
    steps = steps_in(LAYOUTS[layout])
    compiled = [*SIZES, *LAYOUTS[layout], "--compile=True"]
    runs = {name: [*compiled, *flags] for name, flags in models.items()}
    wide = {f"{name}, wide": [*flags, IN_FLOAT64] for name, flags in runs.items()}
    folder = many(2, *runs.items(), *wide.items())
    for name, flags in models.items():
        exact = alone(*flags, *steps, IN_FLOAT64)
        assert_same(losses(folder / f"{name}, wide"), exact, name)
        assert_same_but_for_rounding(losses(folder / name), alone(*flags, *steps), exact, name)


def masks_drawn(runs: dict[str, list[str]], folder: Path):
    """train.py with each of these flags; a file per run and rank with all dropout masks of the stream."""
    dropped = ops.dropped
    masks = []

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
    drawn = {name: [] for name in layouts}
    for name, masks in drawn.items():
        for rank in range(3):
            masks += torch.load(tmp_path / f"{name} {rank}")
        assert len(masks) == 3 * 2 * 2 * 5  # ranks, steps, micro-batches; the embedding and two in each layer
    assert_independent(drawn["ddp"], "ddp")
    assert_independent(drawn["cp"], "cp")
    assert_independent(drawn["resumed"] + drawn["ddp"], "resumed")


def assert_independent(masks: list[torch.Tensor], what: str):
    kept = torch.stack(masks).double()
    agreement = (kept @ kept.T + (1 - kept) @ (1 - kept).T) / kept.size(1)
    others = agreement[~torch.eye(len(kept), dtype=torch.bool)]
    assert abs(others - 0.5).max() < 3 / kept.size(1) ** 0.5, f"{what}: two masks agree in more than half"


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


@pytest.mark.parametrize("block, flags, onednn, again", [
    ("standard", [], False, 1),
    ("parallel", [], False, 1),
    ("superblock", [], False, 1),
    # attention by products too, whose weights take more memory
    ("superblock", ["--window=8", "--block_size=130"], False, 2),
    # the last one too, because a Function of autograd runs to its end
    ("superblock", ["--block_size=130", "--n_embd=256"], True, 2),
])  # fmt: skip
def test_selective_recomputation_keeps_every_second_product(monkeypatch, block, flags, onednn, again):
    """So of four in a layer, one is computed again: the backward does not need the last one's result."""
    monkeypatch.setattr(ops, "FAST_ONEDNN", onednn)
    cfg = parse(Config, [*TINY, "--vocab_size=257", f"--block={block}", *flags])
    products = Counter()
    gradients = {}
    slow = MATMULS | KEPT | {ops.attention_products.default}
    for kind in ("none", "selective", "full"):
        model = Model(cfg, 0)
        if kind != "none":
            for each in model.blocks:
                recompute(each, kind)
        text = torch.zeros(2, cfg.block_size, dtype=torch.int64)
        loss = model(text, text)
        with Operations(lambda f, *_, kind=kind: products.update([kind] * (f in slow))):
            loss.backward()
        gradients[kind] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert products["selective"] - products["none"] == cfg.n_layer * again
    assert products["full"] - products["none"] == cfg.n_layer * (4 + onednn)  # three matrix products and attention's
    assert torch.equal(gradients["selective"], gradients["none"])


DRAWN = [("--pos=rope", "--pp=2 --tp=2")]
DRAWN += zip(ROWS, itertools.cycle(["--parallel=fsdp --tp=2", "--parallel=fsdp --dp_replicate=2"]))
for layout in ("--ep=2", "--parallel=fsdp --ep=2", "--ep=2 --tp=2", "--ep=2 --pp=2"):
    DRAWN.append((" ".join(EXPERTS), layout))


@pytest.mark.parametrize("flags,layout", DRAWN, ids=str)
def test_every_rank_draws_its_part_of_the_same_weights(flags, layout, pretended):
    """The third of four, all bits; the trainings above and those that move show that it is the layout's part."""
    cfg = parse(Config, [*ROW_FLAGS, *SIZES, *flags.split(), "--vocab_size=261", *layout.split()])
    weights = dict(Model(replace(cfg, tp=1), cfg.seed).named_parameters())
    replica = ShardedModel(cfg, join(cfg))
    replica.init_weights(cfg.seed)
    for name, p in replica.model.named_parameters():
        part = replica.slice_of(name, p)
        whole = weights.get(name, weights["wte.weight"]).detach()
        padded = torch.full(part.shape, torch.nan)  # of the vocabulary
        padded[: len(whole)] = whole
        expected = part_of(padded, part)
        known = ~expected.isnan()
        assert torch.equal(part.tensor[known], expected[known]), name


# ---- Checkpoints move


MOVES = [  # processes, layout, sequences of a micro-batch, micro-batches of a step
    (4, [*FSDP, "--ep=2"], 4, 4),
    (2, ["--parallel=ddp", "--ep=1", "--tp=2"], 4, 3),
    (2, ["--tp=1", "--pp=2"], 1, 12),
    (1, ["--pp=1"], 12, 1),
]


def test_a_run_moves_from_layout_to_layout(run, alone, many):
    """A step each on shards, experts, slices, stages and one process are those of one process that nobody stops."""
    common = [*GATED, *EXPERTS, "--n_expert=6", *MUON, *HALVES, f"--lr_decay_iters={len(MOVES)}", IN_FLOAT64]
    how = "--init_from=scratch"
    for step, (processes, layout, batch, accumulation) in enumerate(MOVES, 1):
        flags = [*SIZES, *common, *layout, how, f"--max_iters={step}"]
        flags += [f"--batch_size={batch}", f"--gradient_accumulation_steps={accumulation}"]
        if processes > 1:
            many(processes, ("moved", flags))
        how = "--init_from=resume"
    moved = steps_of(run(*flags, out="moved"))
    whole = alone(*common, "--batch_ramp=4:1", "--gradient_accumulation_steps=3", f"--max_iters={len(MOVES)}")
    expected = [line for line in whole if len(line) == 5]  # without evaluations
    assert [step for step, *_ in moved] == [0, 1, 2, 3]
    assert_same(moved, expected, "a run that moves")


RESUMED = dict.fromkeys(("ddp", "tp"), ["--bias=True"]) | dict.fromkeys(("fsdp", "cp", "pp"), ["--dropout=0.1"])
RESUMED |= {"ep": ["--dropout=0.1", *EXPERTS]}


def test_the_same_layout_goes_on_digit_for_digit(many):
    runs = {name: [*SIZES, *HALVES, *MUON, *LAYOUTS[name], *flags] for name, flags in RESUMED.items()}
    folder = many(2, *runs.items())
    again = {f"{name}, again": [*flags, "--init_from=resume"] for name, flags in runs.items()}
    for name in RESUMED:
        forget_the_end(folder / name, folder / f"{name}, again")
    many(2, *again.items())
    for name in RESUMED:
        assert figures(folder / f"{name}, again") == figures(folder / name), name


# ---- What a layout costs


@pytest.mark.parametrize("flags,sums", [
    ([], 2), (["--block=simplified"], 2), (["--block=parallel"], 1), (["--block=superblock"], 1),
    (["--block=c.own_slots"], 1),
])  # fmt: skip
def test_layers_of_a_superblock_need_half_of_the_collectives(flags, sums, pretended):
    """Per layer, forward and backward: a gather and a scatter for each sum of the stream, twice."""
    cfg = parse(Config, [*TINY, "--vocab_size=257", "--n_head=4", "--tp=4", *TWO, *flags])
    ranks = join(cfg)
    sent = Counter()
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
    (3, ["--pp=3"], "pp=3 .* with n_layer=2 .* each stage needs a block; set pp lower"),
    (2, ["--batch_ramp=2:5,3:9"], "='2:5,3:9' .* by the 2 .*; set multiples of 2, or if it is over, --batch_ramp=$"),
    (2, ["--pp=2", "--batch_ramp=4:9"], "batch_ramp='4:9' .* with pp=2 .* set pp=1, or if it is over, --batch_ramp="),
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
