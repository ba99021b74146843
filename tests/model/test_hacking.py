"""The patches of docs/hacking.md apply, are short, and make variants that work, on several ranks too."""

import ast
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import mutants
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, TINY, figures
from models import check_decoding, choices
from torch.testing._internal.distributed.fake_pg import FakeStore

import model
from engine import decode
from engine.parallel import pipeline
from engine.parallel import tensor as tensor_parallel
from ops import Mask

PATCHES = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/hacking.md").read_text(), re.M | re.S)
FLAGS = {  # in the order of the page
    "mlp": "reglu", "pos": "slopes", "block": "macaron", "head_norm": True, "first_stream": True, "kv_conv": True,
    "value_embedding": True, "optimizer": "sgd",
}  # fmt: skip
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 64}


def patched(folder: Path, index: int) -> str:
    """The source of model.py with the patch of that number."""
    (folder / "model.py").write_text((ROOT / "model.py").read_text())
    apply(folder, PATCHES[index])
    return (folder / "model.py").read_text()


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


def new_definitions(source: str) -> list[ast.ClassDef | ast.FunctionDef]:
    """The classes and functions of a patched source that model.py has not."""
    found = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    return [each for each in found if not hasattr(model, each.name)]


@pytest.mark.parametrize(("index", "flag"), list(enumerate(FLAGS))[:-1])
def test_a_patch_makes_a_variant_that_works(index, flag, tmp_path, monkeypatch):
    source = patched(tmp_path, index)
    added = [line for line in PATCHES[index].splitlines() if line.startswith("+") and line[1:].strip()]
    assert len(added) - 1 <= 10  # without the line +++ b/model.py
    assert all(len(line) <= 121 for line in added)
    if flag == "block":
        (function,) = new_definitions(source)
        assert 3 <= function.end_lineno - function.lineno + 1 <= 6
    new = load(tmp_path / "model.py")
    assert FLAGS[flag] in choices(get_type_hints(new.ModelConfig)[flag])  # so it is in the grid
    for name in ("Heads", "Neighbours", "Rope"):
        monkeypatch.setattr(decode, name, getattr(new, name))
    net = new.Model(new.ModelConfig(**SIZES, **{flag: FLAGS[flag]}), seed=1).double()
    idx = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    loss = net(idx, idx.roll(-1, dims=1))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(64), abs=0.3)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters())
    for block in net.blocks:
        block.compile(fullgraph=True, backend="eager")
    assert net(idx, idx.roll(-1, dims=1)).item() == pytest.approx(loss.item(), rel=1e-9)
    for block in net.blocks:
        block._compiled_call_impl = None
    initial = {
        "mlp": {},
        "pos": {"position.factor": 1.0},
        "block": {"sums.0.gain.weight": 0.5, "sums.2.gain.weight": 0.5},
        "head_norm": {"y_norm.weight": 1.0},
        "first_stream": {"first.weight": 0.1},
        "kv_conv": {"attn.taps": 0.0},
        "value_embedding": {},
    }
    declared = [p for name, p in net.named_parameters() if name.endswith(tuple(initial[flag]) or "none")]
    assert len(declared) == 2 * len(initial[flag])  # in each of two layers
    assert all(
        p.flatten().tolist() == pytest.approx([next(iter(initial[flag].values()))] * p.numel()) for p in declared
    )
    other = idx.clone()
    other[:, 9] = (idx[:, 9] + 1) % 64
    with torch.no_grad():
        before, after = net(idx), net(other)
        assert torch.equal(before[:, :9], after[:, :9]) and not torch.equal(before[:, 9:], after[:, 9:])
        check_decoding(net, idx[:, :4], 8)


SCRIPT = """
import json, sys
from pathlib import Path
sys.path[:0] = ["tests", "."]
from ranks import launch, train_runs
for size, runs in json.loads(sys.argv[1]):
    launch(size, train_runs, Path("ranks"), runs, False)
import train
train.main(json.loads(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory):
    """The runs of a copy of the code with all patches, by name."""
    folder = tmp_path_factory.mktemp("patched")
    mutants.copy(folder)
    for patch in PATCHES:
        apply(folder, patch)
    model_flags = {flag: value for flag, value in FLAGS.items() if flag not in ("block", "optimizer")}
    flags = [*TINY, f"--dataset={tiny_data}", "--optimizer=sgd", "--gradient_accumulation_steps=2", "--eval_interval=0"]
    flags += ["--max_iters=6", "--mlp_ratio=6", *(f"--{flag}={value}" for flag, value in model_flags.items())]
    layouts = {
        "alone": (1, []), "half": (1, ["--max_iters=3", "--lr_decay_iters=6", "--save_interval=3"]),
        "tp": (2, ["--tp=2", "--activation_checkpoint=full"]), "cp": (2, ["--cp=2"]),
        "fsdp": (2, ["--parallel=fsdp", "--activation_checkpoint=selective"]),
        "apart": (1, ["--first_stream=False"]), "pp": (2, ["--first_stream=False", "--pp=2"]),
        "macaron": (1, ["--block=macaron"]), "macaron, tp": (2, ["--block=macaron", "--tp=2"]),
    }  # fmt: skip
    each = {1: [], 2: []}
    for name, (size, more) in layouts.items():
        each[size].append([*flags, *more, f"--out_dir={folder / name}"])
    each[1].append([*flags, "--init_from=resume", f"--out_dir={folder / 'half'}"])
    (folder / "ranks").mkdir()
    large = ["--plan=True", "--n_layer=24", "--n_head=16", "--n_embd=1024", f"--out_dir={folder / 'plan'}"]
    given = map(json.dumps, ([*each.items()], [*flags, *large]))
    done = subprocess.run([sys.executable, "-c", SCRIPT, *given], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def test_all_patches_together_train_on_every_layout(runs):
    folder, _ = runs

    def losses(name: str) -> list[tuple]:
        return [(line["loss"], line["grad_norm"]) for line in figures(folder / name) if "loss" in line]

    whole = losses("alone")
    assert len(whole) == 6 and losses("half") == whole  # resumed
    for name in ("tp", "cp", "fsdp"):
        assert np.allclose(losses(name), whole, rtol=1e-4, atol=0), name
    assert np.allclose(losses("macaron, tp"), losses("macaron"), rtol=1e-4, atol=0) and losses("macaron") != whole
    assert np.allclose(losses("pp"), losses("apart"), rtol=1e-4, atol=0)


def test_the_plan_counts_the_state_of_a_new_optimizer(runs):
    """As many bytes as parameters; AdamW would keep twice as many."""
    memory = {kind: float(re.search(rf"{kind} +([0-9.]+)", runs[1])[1]) for kind in ("parameters", "optimizer state")}
    assert memory["optimizer state"] == memory["parameters"] > 1.0


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

    monkeypatch.setitem(
        model.BLOCK, "mine", lambda cfg, layer: [model.Sum(cfg, mlp=Handing(cfg, layer, model.READER["p"]))]
    )
    net, idx = model.Model(model.ModelConfig(**SIZES, block="mine")), torch.zeros(1, 4, dtype=torch.int64)
    assert net(idx).isfinite().all()
    for stage in (0, 1):
        with pytest.raises(ValueError, match="^pp=2 hands on only .* a layer hands first to later layers; set pp=1$"):
            pipeline.keep_stages(net, stage, 2)


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


def test_values_wider_than_queries_are_refused():
    """A float32 gain makes bfloat16 values float32 under autocast, which would cost memory and time without a word."""
    heads = model.Attention(model.ModelConfig(**SIZES), 0)
    q, v = torch.zeros(1, 4, 4, 8, dtype=torch.bfloat16), torch.zeros(1, 4, 4, 8)
    with pytest.raises(ValueError, match=r"bfloat16 and torch.float32; .* write \.to\(x\.dtype\)$"):
        heads.attend(q, q, v, Mask())


def test_groups_of_rows_that_tp_does_not_divide_are_refused_by_name():
    net = model.Model(model.ModelConfig(**SIZES, attention="gqa", n_kv_head=2))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(
            ValueError, match=r"tp=4 does not divide the 2 groups of rows of blocks\.0\.sums\.0\.attn\.qkv"
        ):
            tensor_parallel.apply_tensor_parallel(net, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
