"""Muon among ranks: the update of one process, with two messages a step. Copies of parameters are compared."""

import re
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from configurator import parse
from data import errors
from engine import optim
from engine.config import Config
from engine.parallel import ranks as parallel
from engine.parallel.distributed_muon import Owners
from engine.parallel.layout import Layout, Slice
from engine.parallel.sharded import ShardedModel, local
from tests.helpers import TINY
from tests.ranks import BACKWARD, act_in, exit_codes, launch, part_of, train_runs

FSDP = "--parallel=fsdp"
TP = ["--tp=4", "--n_kv_head=4"]
GAINS = ["--block=simplified", "--n_embd=24"]
GATED = ["--mlp=swiglu", "--attention=gqa", "--n_kv_head=2", "--n_head=4", "--n_embd=30", "--head_dim=6"]
LAYOUTS = {  # of four ranks; test_layouts trains with Muon on others
    "ddp": [],
    "fsdp, empty shards": [FSDP, "--n_embd=4", "--n_kv_head=1", "--n_head=2"],
    "pp x fsdp": [FSDP, "--pp=2", "--n_layer=5"],
    "superblock, tp x fsdp": [FSDP, "--tp=2", "--block=superblock", "--pos=rope"],
}
RUNS = [(name, "float64") for name in LAYOUTS] + [(name, "bfloat16") for name in ("ddp", "pp x fsdp")]


def config(flags: list[str], dtype: str = "float32") -> Config:
    """The flags of a run; with float64, in which Newton-Schulz is computed too, tensors are made in it."""
    common = [*TINY, *GATED, "--vocab_size=32", "--optimizer=muon", "--gradient_accumulation_steps=24"]
    cfg = parse(Config, [*common, *flags])
    cfg.dtype = dtype
    torch.set_default_dtype(torch.float64 if dtype == "float64" else torch.float32)
    return cfg


def draw_gradients(sharded: ShardedModel, step: int):
    """Give this rank its parts of random gradients."""
    for name, p in sharded.model.named_parameters():
        p.grad = torch.empty_like(p.detach())
        part = sharded.slice_of(name, p.grad)
        seed = 1000 * step + sum(name.encode())
        full = torch.randn(part.shape, generator=torch.Generator().manual_seed(seed))
        part.tensor.copy_(part_of(full, part))


def updated(cfg: Config, sharded: ShardedModel) -> tuple[dict[str, tuple], int]:
    """This rank's parts of parameters and states after two steps, and the FLOPs of the second one."""
    sharded.init_weights(cfg.seed)
    optimizer = optim.build(sharded.model, cfg, sharded, getattr(torch, cfg.dtype))
    draw_gradients(sharded, 0)
    optimizer.step()
    draw_gradients(sharded, 1)
    with FlopCounterMode(display=False) as multiplied:
        optimizer.step()
    parts = {name: tuple(sharded.slice_of(name, p)) for name, p in sharded.model.named_parameters()}
    for name, x in optimizer.state_tensors(sharded.model).items():
        parts[name] = tuple(sharded.slice_of(name.rpartition(".")[0], x))
    return parts, multiplied.get_total_flops()


def update_on_ranks(runs: list[tuple[str, str]], folder: Path):
    """A file per layout, dtype and rank: its parts of tensors, and counts of a step."""
    all_to_all = dist.all_to_all_single
    sent = Counter()

    def counted(out, x, out_splits, splits, group=None, **kwargs):
        sent["messages"] += 1
        return all_to_all(out, x, out_splits, splits, group=group, **kwargs)

    dist.all_to_all_single = counted
    for name, dtype in runs:
        cfg = config(LAYOUTS[name], dtype)
        sharded = ShardedModel(cfg, parallel.join(cfg))
        sent.clear()
        parts, flops = updated(cfg, sharded)
        found = parts, flops, sent["messages"] / 2, sharded.unequal_copies()
        torch.save(found, folder / f"{name} {dtype} {dist.get_rank()}")


def alone(flags: list[str], dtype: str) -> tuple[dict[str, tuple], int]:
    """The parts, which are whole, and the FLOPs of one process."""
    layout = ("--parallel", "--tp", "--pp", "--cp", "--dp_replicate")
    cfg = config([flag for flag in flags if not flag.startswith(layout)], dtype)
    ranks = parallel.Ranks(0, 1, torch.device("cpu"), getattr(torch, cfg.dtype), False)
    return updated(cfg, ShardedModel(cfg, ranks))


def limit(name: str, dtype: str) -> float:
    """The largest error of an update, which is a few roundings in bfloat16."""
    if dtype == "float64":
        return 1e-9
    return 1e-5 if "momentum" in name else 2e-3


def test_updates_are_those_of_one_process(tmp_path):
    """Parameters and states. All ranks together multiply as much as one process, with two messages a step."""
    launch(4, update_on_ranks, tmp_path, RUNS, tmp_path)
    for run, dtype in RUNS:
        expected, flops = alone(LAYOUTS[run], dtype)
        torch.set_default_dtype(torch.float32)
        seen = set()
        for rank in range(4):
            parts, multiplied, messages, unequal = torch.load(tmp_path / f"{run} {dtype} {rank}")
            assert unequal == "", run
            assert messages == 2, run
            flops -= multiplied
            for name, found in parts.items():
                error = (found[0] - part_of(expected[name][0], Slice(*found))).abs()
                assert (error < limit(name, dtype)).all(), f"{run}, rank {rank}: {name}"
            seen |= parts.keys()
        assert seen == expected.keys(), run
        assert flops == 0, f"{run}: one process has {flops} more"


def test_owners_have_equal_work(pretended):
    """The largest matrices are given first: three large ones to three ranks, and all small ones to the fourth."""
    dist.init_process_group()
    shapes = [(64, 16)] * 4 + [(64, 64)] * 3
    matrices = {i: Layout(shape, ((4, 0),)) for i, shape in enumerate(shapes)}
    loads = Counter()
    for i, rank in Owners(matrices, dist.group.WORLD, torch.float32).owner.items():
        loads[rank] += matrices[i].work
    assert sorted(loads.values()) == [4 * 64 * 16 * 16, *[64**3] * 3]


# ---- Copies of parameters


EXPERTS = ["--n_expert=4", "--ep=2"]


def nudge(p: torch.nn.Parameter):
    """Change one number by as little as there is."""
    with torch.no_grad():
        first = local(p).flatten()[:1].clone()
        local(p).view(-1)[:1] = first.nextafter(first + 1)


UP = "blocks.0.sums.1.experts.up.weight"
ROUTER = "blocks.0.sums.1.experts.router.weight"
CHANGES = [  # flags, {(the rank that changes a parameter, its name): who is said to differ from whom}
    ([], {(2, "blocks.1.sums.1.mlp.up.weight"): "[2] from that of rank 0"}),
    ([FSDP, *GAINS, *EXPERTS], {
        (1, "wte.weight"): "",
        (3, "blocks.0.sums.1.mlp.up.weight"): "",
        (3, "blocks.0.sums.0.attn.alpha"): "[3] from that of rank 0",
    }),
    ([FSDP, "--dp_replicate=2"], {(1, "wte.weight"): "[1] from that of rank 3"}),
    (["--tp=2"], {(2, "wte.weight"): "[0] from that of rank 2"}),
    (TP, {(3, "wte.weight"): "", (1, "blocks.0.sums.0.before.weight"): "[1] from that of rank 0"}),
    (["--pp=2"], {(2, "wte.weight"): "[2] from that of rank 3"}),
    (EXPERTS, {(1, UP): "[1] from that of rank 3"}),
    (EXPERTS, {(3, ROUTER): "[3] from that of rank 0"}),
]  # fmt: skip


def change_copies():
    for flags, changes in CHANGES:
        cfg = config(flags)
        sharded = ShardedModel(cfg, parallel.join(cfg))
        sharded.init_weights(cfg.seed)
        assert sharded.unequal_copies() == ""
        for (rank, name), expected in changes.items():
            if dist.get_rank() == rank:
                nudge(sharded.model.get_parameter(name))
            said = sharded.unequal_copies()
            fact, _, _ = said.partition(";")
            assert fact == (expected and f"copies of {name} differ: those of ranks {expected}"), (flags, rank, name)
            assert {*parallel.all_gather(said)} == {said}


def test_ranks_whose_copies_differ_are_named(tmp_path):
    launch(4, change_copies, tmp_path)


def train_with_a_difference(flags: list[str]):
    """train.py, whose second rank of three changes a parameter in the third step."""
    act_in(3, BACKWARD, lambda sharded, *_: sharded.model.wte.weight.data[0].add_(1e-3))
    errors.FIRST_RANK_SPEAKS = 0
    train_runs([flags])


def test_a_difference_ends_the_run_at_the_next_evaluation(tiny_data, tmp_path):
    flags = [*TINY, "--gradient_accumulation_steps=3", f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}"]
    flags += ["--max_iters=8", "--eval_interval=4", "--save_interval=2"]
    assert exit_codes(3, train_with_a_difference, tmp_path, flags) == [1, 1, 1]
    said = (tmp_path / "rank 0").read_text()
    assert "Traceback" not in said
    [line] = [line for line in said.splitlines() if line.startswith("error:")]
    assert re.search(r"at step 4, .* those of ranks \[1\] from that of rank 0;.* --init_from=resume", line)
