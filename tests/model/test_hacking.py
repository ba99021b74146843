"""The patches of docs/hacking.md apply, are short, and make variants that work, on several ranks too."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import numpy as np
import pytest
import torch
import torch.distributed as dist

import model
from engine import decode, optim
from engine.config import Config
from engine.parallel import pipeline
from engine.parallel import tensor as tensor_parallel
from engine.parallel.context import apply_context_parallel
from tests import mutants
from tests.helpers import ROOT, TINY, figures
from tests.models import check_decoding, choices
from tests.ranks import launch, train_runs

PATCHES = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/hacking.md").read_text(), re.M | re.S)
FLAGS = {  # in the order of the page
    "mlp": "reglu", "pos": "slopes", "block": "macaron", "head_norm": True, "first_stream": True, "kv_conv": True,
    "optimizer": "sgd",
}  # fmt: skip
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 64}


def apply(folder: Path, patch: str):
    """Apply the patch to the copies in the folder."""
    command = ["git", "apply", "--verbose", "-"]
    done = subprocess.run(command, input=patch, capture_output=True, text=True, cwd=folder)
    where = "an edit of yours may stand where this patch of docs/hacking.md belongs"
    assert done.returncode == 0, f"{where}: {done.stderr}"


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("patched_model", file)
    module = sys.modules["patched_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("index", "flag"), list(enumerate(FLAGS))[:-1])
def test_a_patch_makes_a_variant_that_works(index, flag, tmp_path, monkeypatch):
    """Its model has the initial loss, gradients, graph and cache that it should have."""
    (tmp_path / "model.py").write_text((ROOT / "model.py").read_text())
    apply(tmp_path, PATCHES[index])
    new = load(tmp_path / "model.py")
    known = [*choices(get_type_hints(new.ModelConfig)[flag]), *new.ModelConfig.NAMES.get(flag, [])]
    assert FLAGS[flag] in known  # so it is in the grid
    for name in ("MultiHeadAttention", "Neighbours"):
        monkeypatch.setattr(decode, name, getattr(new, name))
    net = new.Model(new.ModelConfig(**SIZES, **{flag: FLAGS[flag]}), seed=1).double()
    idx = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    loss = net(idx, idx.roll(-1, dims=1))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(64), abs=0.3)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters())
    other = idx.clone()
    other[:, 9] = (idx[:, 9] + 1) % 64
    with torch.no_grad():
        before, after = net(idx), net(other)
        assert torch.equal(before[:, :9], after[:, :9]) and not torch.equal(before[:, 9:], after[:, 9:])
        check_decoding(net, idx[:, :4], 8)
    for block in net.blocks:
        block.compile(fullgraph=True, backend="eager")
    assert net(idx, idx.roll(-1, dims=1)).item() == pytest.approx(loss.item(), rel=1e-9)


def train_copy(folder: Path, *runs: list[str]):
    """Train by the code in the folder, in a process that has imported this checkout's."""
    ours = {path.stem for path in ROOT.iterdir()}
    for name in [*sys.modules]:
        if name.partition(".")[0] in ours:
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    train_runs(runs, saved=False)


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory):
    """The runs of a copy of the code with all patches, by name."""
    folder = tmp_path_factory.mktemp("patched")
    mutants.copy(folder)
    for patch in PATCHES:
        apply(folder, patch)
    common = [*TINY, f"--dataset={tiny_data}", "--eval_interval=0", "--max_iters=4", "--mlp_ratio=6"]
    common += [f"--{flag}={value}" for flag, value in FLAGS.items()]

    def flags(name: str, *more: str) -> list[str]:
        return [*common, *more, f"--out_dir={folder / name}"]

    apart = "--first_stream=False"  # as stages of a pipeline need it
    alone = [
        flags("alone"),
        flags("half", "--max_iters=2", "--lr_decay_iters=4", "--save_interval=2"),
        flags("half", "--init_from=resume"),
        flags("apart", apart),
        flags("plan", "--plan=True", "--device=auto", "--n_head=16", "--n_embd=4096"),
    ]
    of_two = [
        flags("tp", "--tp=2", "--activation_checkpoint=full"),
        flags("cp", "--cp=2"),
        flags("fsdp", "--parallel=fsdp", "--activation_checkpoint=selective"),
        flags("pp", "--pp=2", apart),
    ]
    for size, each in ((1, alone), (2, of_two)):
        launch(size, train_copy, folder, folder, *each)
    return folder


def test_all_patches_together_train_on_every_layout(runs):
    found = {}
    for name in ("alone", "half", "tp", "cp", "fsdp", "apart", "pp"):
        found[name] = [(line["loss"], line["grad_norm"]) for line in figures(runs / name) if "loss" in line]
    assert len(found["alone"]) == 4 and found["half"] == found["alone"]  # resumed
    for name, other in (("tp", "alone"), ("cp", "alone"), ("fsdp", "alone"), ("pp", "apart")):
        assert np.allclose(found[name], found[other], rtol=1e-4, atol=0), name


def test_the_plan_counts_the_state_of_a_new_optimizer(runs):
    """As many bytes as parameters; AdamW would keep twice as many."""
    said = (runs / "rank 0").read_text()
    memory = {kind: float(re.search(rf"{kind} +([0-9.]+)", said)[1]) for kind in ("parameters", "optimizer state")}
    assert memory["optimizer state"] == memory["parameters"] > 1.0


def test_a_parameter_may_have_a_learning_rate_of_its_own(monkeypatch):
    """The schedule changes it in proportion."""
    cfg = Config(**SIZES, learning_rate=0.25)
    net = model.Model(cfg)
    monkeypatch.setattr(optim, "own_rates", lambda model, cfg: {model.wte.weight: 0.5})
    optimizer = optim.build(net, cfg)
    optimizer.set_lr(0.125)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates == {p: 0.25 if p is net.wte.weight else 0.125 for p in net.parameters()}


@pytest.mark.parametrize("role", [None, "mine"])
def test_a_parameter_without_a_role_is_refused_by_name(role):
    """A scalar with the module for it."""
    net = model.Model(model.ModelConfig(**SIZES))
    net.blocks[1].extra, net.blocks[1].gain = torch.nn.Linear(32, 32), model.Gain(0.5)
    net.blocks[1].extra.role = role
    net.blocks[1].scale = torch.nn.Parameter(torch.empty(1))
    net.blocks[1].initial = {"scale": 0.5}
    for name, dim in (("sums.0.attn.out", 1), ("gain", None)):
        assert tensor_parallel.sharded_dim(net, f"blocks.1.{name}.weight") == dim
    for name, said in (("extra.weight", f"Linear has role={role}; declare"), ("scale", r"scalar as Gain\(0\.5\)")):
        with pytest.raises(ValueError, match=rf"cut blocks\.1\.{name}: .*{said}"):
            tensor_parallel.sharded_dim(net, f"blocks.1.{name}")
    with pytest.raises(ValueError, match=r"blocks\.1\.scale"):
        tensor_parallel.apply_tensor_parallel(net, group=None)  # before anything is cut


def test_data_for_later_layers_is_refused_in_a_pipeline(monkeypatch):
    class Handing(model.Attention):
        def forward(self, x, inputs):
            return super().forward(inputs.shared.setdefault("first", x), inputs)

    mine = lambda cfg, layer: [model.Sum(cfg, mlp=Handing(cfg, layer, model.READER["p"]))]  # noqa: E731
    monkeypatch.setitem(model.BLOCK, "mine", mine)
    net, idx = model.Model(model.ModelConfig(**SIZES, block="mine")), torch.zeros(1, 4, dtype=torch.int64)
    assert net(idx).isfinite().all()
    for stage in (0, 1):
        with pytest.raises(ValueError, match="^pp=2 hands on only .* a layer hands first to later layers; set pp=1$"):
            pipeline.keep_stage(net, stage, 2)


def test_a_part_that_no_stage_owns_is_refused_in_a_pipeline():
    net = model.Model(model.ModelConfig(**SIZES))
    net.of_embedding = model.with_role(model.RMSNorm(32, 1e-5), "replicated")
    said = r"^pp=2 divides the blocks, and every stage would train a copy of of_embedding\.weight; move it into a block"
    with pytest.raises(ValueError, match=said):
        pipeline.keep_stage(net, 0, 2)


def mlp(cfg):
    return model.Sum(cfg, mlp=model.MLP(cfg, 0))


@pytest.mark.parametrize(("sums", "said"), [
    (lambda c, i: [mlp(c), mlp(c)], "block=mine has two readers of one name: mlp, mlp"),
    (lambda c, i: [model.Sum(c, before=model.Attention(c, i))], "a reader cannot have the name 'before'"),
], ids=["twice", "name"])  # fmt: skip
def test_mistakes_in_a_new_block_are_refused_by_name(sums, said, monkeypatch):
    monkeypatch.setitem(model.BLOCK, "mine", sums)
    with pytest.raises(ValueError, match=said):
        model.Model(model.ModelConfig(**SIZES, block="mine"))


@pytest.mark.parametrize("apply, flags, said", [
    (apply_context_parallel, {"conv": 4}, "cp=4 makes pieces of 2 tokens, and blocks.0.sums.0.conv.earlier reads 3"),
    (tensor_parallel.apply_tensor_parallel, {"attention": "gqa", "n_kv_head": 2},
     "tp=4 does not divide the 2 groups of rows of blocks.0.sums.0.attn.qkv"),
], ids=["cp", "tp"])  # fmt: skip
def test_a_module_that_ranks_cannot_cut_is_refused_by_name(apply, flags, said, pretended):
    dist.init_process_group()
    with pytest.raises(ValueError, match=said):
        apply(model.Model(model.ModelConfig(**SIZES, **flags)), dist.group.WORLD)


def test_a_column_layer_that_reads_what_tp_has_cut_is_refused(pretended):
    """The gate of an MLP reads its hidden units by a second layer of role column."""
    dist.init_process_group()
    net = model.Model(model.ModelConfig(**SIZES))
    mlp = net.blocks[0].sums[1].mlp
    mlp.up = torch.nn.Sequential(mlp.up, model.Linear(net.cfg, 128, 128, "column", bias=False))
    tensor_parallel.apply_tensor_parallel(net, dist.group.WORLD)
    said = r"^tp=4: blocks\.0\.sums\.1\.mlp\.up\.1, of role=column, reads 128 channels and gets 32;"
    with pytest.raises(ValueError, match=said):
        net(torch.zeros(2, 16, dtype=torch.int64))


def test_neighbours_of_the_stream_are_refused_where_tp_cuts_it(pretended):
    """Those that a sum gives to its readers see all tokens."""
    dist.init_process_group()
    net = model.Model(model.ModelConfig(**SIZES, conv=4))
    net.blocks[1].earlier = model.Neighbours(1)
    with pytest.raises(ValueError, match=r"tp=4 cuts the stream along T where blocks\.1\.earlier reads it"):
        tensor_parallel.apply_tensor_parallel(net, dist.group.WORLD)
    net = model.Model(model.ModelConfig(**SIZES, conv=4))
    read = net.blocks[1].sums[0]
    read.earlier = model.Neighbours(1)
    tensor_parallel.apply_tensor_parallel(net, dist.group.WORLD)
    idx = torch.zeros(2, 16, dtype=torch.int64)
    read.register_forward_pre_hook(lambda module, args: module.earlier(*args, [1.0, 1.0]) and None)
    with pytest.raises(ValueError, match=r"tp=4 cuts the stream along T where blocks\.1\.sums\.0\.earlier reads it"):
        net(idx)
