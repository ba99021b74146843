"""The patches of docs/hacking.md apply to model.py, are short, and make variants that work, under --tp too."""

import ast
import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from ranks import launch
from torch.testing._internal.distributed.fake_pg import FakeStore

import model
from configurator import Config
from engine import parallel, tensor_parallel
from engine.sharded_model import ShardedModel

ROOT = Path(__file__).parent.parent
PATCHES = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/hacking.md").read_text(), re.M | re.S)
FLAGS = {"mlp": "reglu", "pos": "slopes", "block": "macaron"}  # in the order of the page
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 64}


def patched(folder: Path, index: int) -> str:
    """The source of model.py with the patch of that number."""
    (folder / "model.py").write_text((ROOT / "model.py").read_text())
    command = ["git", "apply", "--verbose", "-"]
    done = subprocess.run(command, input=PATCHES[index], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return (folder / "model.py").read_text()


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("patched_model", file)
    module = sys.modules["patched_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def new_definitions(source: str) -> list[ast.ClassDef | ast.FunctionDef]:
    """The classes and functions of a patched source that model.py has not."""
    found = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    return [each for each in found if not hasattr(model, each.name)]


@pytest.mark.parametrize(("index", "flag"), list(enumerate(FLAGS)))
def test_a_patch_makes_a_variant_that_works(index, flag, tmp_path):
    source = patched(tmp_path, index)
    added = [line for line in PATCHES[index].splitlines() if line.startswith("+") and line[1:].strip()]
    assert len(added) - 1 <= 10  # without the line +++ b/model.py
    assert all(len(line) <= 121 for line in added)
    if flag == "block":
        (function,) = new_definitions(source)
        assert 3 <= function.end_lineno - function.lineno + 1 <= 6
    new = load(tmp_path / "model.py")
    net = new.Model(new.ModelConfig(**SIZES, **{flag: FLAGS[flag]}), seed=1).double()
    idx = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    loss = net(idx, idx.roll(-1, dims=1))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(64), abs=0.3)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters())
    initial = {
        "mlp": {},
        "pos": {"position.slope": 0.1},
        "block": {"sums.0.gain.weight": 0.5, "sums.2.gain.weight": 0.5},
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
        text = torch.stack(list(net.generate(idx[:, :4], 8, lambda logits: logits.argmax(-1))), dim=1)
        expected = idx[:, :4]
        for _ in range(8):
            expected = torch.cat((expected, net(expected)[:, -1:].argmax(-1)), dim=1)
        assert torch.equal(text, expected[:, 4:])


def compare(sources: dict[str, str]):
    """On each rank: the loss and the norm of the gradient of each variant, whole and cut into two."""
    join = dist.init_process_group
    dist.init_process_group = lambda *args, **kwargs: None if dist.is_initialized() else join(*args, **kwargs)
    torch.set_default_dtype(torch.float64)
    for flag, source in sources.items():
        lines = source.splitlines()
        for each in new_definitions(source):
            exec("\n".join(lines[each.lineno - 1 : each.end_lineno]), vars(model))  # in the modules that engine/ knows
        name = FLAGS[flag]
        entry = (model.NoEmbedding, model.LearnedSlopes) if flag == "pos" else model.macaron
        (model.POSITION if flag == "pos" else model.BLOCK)[name] = entry
        cfg = Config(
            **SIZES, **{flag: name}, tp=2, device="cpu", dtype="float32", batch_size=2, gradient_accumulation_steps=1
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            idx = torch.randint(64, (2, 17))
        batch = {"idx": idx[:, :-1], "targets": idx[:, 1:]}
        whole = model.Model(cfg, cfg.seed)
        expected = whole(**batch)
        expected.backward()
        norm = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
        sharded = ShardedModel(cfg, parallel.join(cfg))
        sharded.init_weights(cfg.seed)
        loss = sharded.backward(iter([batch]), 1, torch.amp.GradScaler("cpu", enabled=False))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
        assert sharded.clip(0.0).item() == pytest.approx(norm.item(), rel=1e-9)


def test_new_blocks_and_positions_work_under_tensor_parallelism(tmp_path):
    (tmp_path / "ranks").mkdir()
    launch(2, compare, tmp_path / "ranks", {flag: patched(tmp_path, i) for i, flag in ((1, "pos"), (2, "block"))})


@pytest.mark.parametrize("role", [None, "mine"])
def test_a_parameter_without_a_role_is_refused_by_name(role):
    net = model.Model(model.ModelConfig(**SIZES))
    net.blocks[1].extra = nn = torch.nn.Linear(32, 32)
    nn.role = role
    assert tensor_parallel.sharded_dim(net, "blocks.1.sums.0.attn.out.weight") == 1
    with pytest.raises(ValueError, match=rf"cut blocks\.1\.extra\.weight: its module Linear has role={role}; declare"):
        tensor_parallel.sharded_dim(net, "blocks.1.extra.weight")
    with pytest.raises(ValueError, match=r"blocks\.1\.extra\.weight"):
        tensor_parallel.apply_tensor_parallel(net, group=None)  # before anything is cut


def test_two_readers_of_one_name_are_refused(monkeypatch):
    def twice(cfg, layer):
        return [model.Sum(cfg, mlp=model.ParameterPool(cfg)) for _ in range(2)]

    monkeypatch.setitem(model.BLOCK, "twice", twice)
    with pytest.raises(ValueError, match="block=twice has two readers of one name: mlp, mlp"):
        model.Model(model.ModelConfig(**SIZES, block="twice"))


def pool(cfg):
    return {"mlp": model.ParameterPool(cfg)}


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (
            lambda c, i: [model.Sum(c, gains={"mpl": 0.5}, **pool(c))],
            r"gains=\{'mpl': 0.5\} must have the names of .*mlp",
        ),
        (lambda c, i: [model.Sum(c, before=model.ParameterPool(c))], "a reader cannot have the name 'before'"),
        (lambda c, i: [model.Sum(c, mlp=torch.nn.Linear(32, 32))], r"plain nn.Linear layers: sums\.0\.mlp; use Linear"),
    ],
    ids=["gain", "name", "linear"],
)
def test_mistakes_in_a_new_block_are_refused_by_name(sums, said, monkeypatch):
    monkeypatch.setitem(model.BLOCK, "mine", sums)
    with pytest.raises(ValueError, match=said):
        model.Model(model.ModelConfig(**SIZES, block="mine"))


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
