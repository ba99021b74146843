"""Values that a module writes into its parameters, as in nanoGPT, are kept if they are one number; others are refused
by name. One process, a model that is built without memory, train.py and the shards of FSDP do the same."""

import copy
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from ranks import launch
from torch import nn

import model as M
import train
from configurator import Config
from engine.checkpoint import run as run_state
from engine.parallel import ranks as parallel
from engine.parallel.sharded import ShardedModel
from model import Model, ModelConfig

SIZES = {"n_layer": 1, "n_head": 4, "n_embd": 16, "block_size": 8, "vocab_size": 32}
KEPT = {  # what a module does in its __init__ -> the parameter that it gets, and the number that fills it
    "m.own = nn.Parameter(torch.full((4,), 0.5))": ("own", 0.5),
    "m.own = nn.Parameter(torch.zeros(4, 4))": ("own", 0.0),
    "m.own = nn.init.constant_(nn.Parameter(torch.ones(4)), 0.25)": ("own", 0.25),
    "m.own = nn.Parameter(torch.empty(4)); m.own.data.fill_(3)": ("own", 3.0),
    "m.own = nn.Parameter(torch.full_like(m.qkv.weight, -1.0))": ("own", -1.0),
    "m.own = nn.Parameter(torch.full(fill_value=2.0, size=(4,), requires_grad=True))": ("own", 2.0),
    "m.own = nn.Parameter(m.out.weight.new_full((3,), fill_value=0.5)).requires_grad_()": ("own", 0.5),
    "m.own = nn.Parameter(torch.empty(4))": ("own", 1.0),
    "m.own = nn.Parameter(torch.rand(4)); m.initial = {'own': 2.0}": ("own", 2.0),
    "m.gate = M.Linear(m.cfg, 16, 4, 'into'); nn.init.zeros_(m.gate.weight)": ("gate.weight", 0.0),
    "m.gate = M.Linear(m.cfg, 16, 4, 'into'); m.gate.weight = nn.Parameter(torch.ones(4, 16))": ("gate.weight", 1.0),
    "nn.init.ones_(m.out.weight)": ("out.weight", 1.0),
    "m.ln = nn.LayerNorm(16)": ("ln.weight", 1.0),
    "m.ln = nn.LayerNorm(16); nn.init.zeros_(m.ln.weight)": ("ln.weight", 0.0),
    "m.ln = nn.LayerNorm(16); m.ln.initial = {'weight': 0.5}": ("ln.weight", 0.5),
    "m.act = nn.PReLU()": ("act.weight", 0.25),
    "m.emb = nn.Embedding(4, 16); m.emb.initial = {'weight': M.Normal(0.0)}": ("emb.weight", 0.0),
    "m.conv = nn.Conv1d(16, 16, 3); m.conv.initial = {'weight': M.Normal(0.02), 'bias': 0.5}": ("conv.bias", 0.5),
}
REFUSED = {  # -> the parameter that the error names, and its module
    "m.own = nn.Parameter(0.1 * torch.randn(4))": ("own", "Mine"),
    "m.own = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))": ("own", "Mine"),
    "m.own = nn.init.normal_(nn.Parameter(torch.empty(4)), std=0.1)": ("own", "Mine"),
    "m.own = nn.init.trunc_normal_(nn.Parameter(torch.empty(4)), std=0.1)": ("own", "Mine"),
    "m.own = nn.Parameter(nn.init.orthogonal_(torch.empty(2, 2)))": ("own", "Mine"),
    "m.own = nn.Parameter(torch.ones(4).mul_(0.5))": ("own", "Mine"),
    "m.own = nn.Parameter(torch.zeros(4)); m.own.data[1] = 1": ("own", "Mine"),
    "m.own = nn.Parameter(torch.zeros(4)); torch.add(m.own, 1, out=m.own)": ("own", "Mine"),
    "m.own = nn.Parameter(torch.zeros(4)); m.own += 1": ("own", "Mine"),
    "m.own = nn.Parameter(torch.zeros(4)); nn.init.uniform_(m.own.data)": ("own", "Mine"),
    "m.own = nn.Parameter(torch.cat((torch.zeros(2), torch.ones(2))))": ("own", "Mine"),
    "m.gate = M.Linear(m.cfg, 16, 4, 'into'); nn.init.zeros_(m.gate.weight[:2])": ("gate.weight", "Linear"),
    "nn.init.normal_(m.out.weight, std=0.01)": ("out.weight", "Linear"),
    "m.emb = nn.Embedding(4, 16)": ("emb.weight", "Embedding"),
    "m.conv = nn.Conv1d(16, 16, 3)": ("conv.weight", "Conv1d"),
    "m.gate = copy.deepcopy(m.out); nn.init.eye_(m.gate.weight)": ("gate.weight", "Linear"),
}


def use(line: str):
    """The heads of the standard block do what the line says, as the last step of their __init__."""

    class Mine(M.Pool):
        def __init__(self, cfg, layer):
            super().__init__(cfg, layer)
            self.cfg = cfg
            with torch.no_grad():
                exec(line, {"m": self, "M": M, "nn": nn, "torch": torch, "copy": copy})

    M.BLOCK["standard"] = lambda cfg, layer: [
        M.Sum(cfg, attn=Mine(cfg, layer)),
        M.Sum(cfg, mlp=M.Pool(cfg, layer, M.READER["p"])),
    ]


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    monkeypatch.setattr(M, "BLOCK", dict(M.BLOCK))


def in_parts(cfg: ModelConfig) -> Model:
    """The model as engine/ builds it: without memory, and then filled."""
    with torch.device("meta"):
        net = Model(cfg)
    net.to_empty(device="cpu").tie()
    for p in net.parameters():
        p.data.fill_(torch.nan)
    net.init_weights(5)
    return net


@pytest.mark.parametrize("line", KEPT)
def test_one_number_is_kept(line):
    name, value = KEPT[line]
    without = Model(ModelConfig(**SIZES), 5).state_dict()
    use(line)
    whole, parts = Model(ModelConfig(**SIZES), 5).state_dict(), in_parts(ModelConfig(**SIZES)).state_dict()
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
    mine = f"blocks.0.sums.0.attn.{name}"
    assert (whole[mine] == value).all()
    assert all(torch.equal(whole[key], without[key]) for key in without if key != mine)


@pytest.mark.parametrize("build", [Model, in_parts], ids=["whole", "parts"])
@pytest.mark.parametrize("line", REFUSED)
def test_other_values_are_refused_by_name(line, build):
    name, kind = REFUSED[line]
    use(line)
    with pytest.raises(ValueError) as error:
        build(ModelConfig(**SIZES))
    said, last = str(error.value), name.rpartition(".")[2]
    assert said.startswith(f"blocks.0.sums.0.attn.{name} ")
    assert said.endswith(f'give its module {kind} an `initial` = {{"{last}": Normal(0.02)}}, or a number')


@pytest.mark.parametrize("build", [Model, in_parts], ids=["whole", "parts"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "torch.tensor(0.5)",
            r"has no dimensions, .*; write torch.full\(\(1,\), 0.5\) or another number, or use Gain$",
        ),
        ("torch.full((1,), 0.5).expand(4)", r"is an expanded view; write torch.full\(\(4,\), 0.5\) or another number$"),
    ],
)
def test_shapes_that_cannot_be_parameters_are_refused_by_name(value, said, build):
    use(f"m.own = nn.Parameter({value})")
    with pytest.raises(ValueError, match=r"^blocks\.0\.sums\.0\.attn\.own " + said):
        build(ModelConfig(**SIZES))


def test_train_py_keeps_one_number_and_refuses_others(run, monkeypatch, capsys):
    initialize, seen = run_state.initialize, []

    def noted(cfg, sharded, tokenizer):
        initialize(cfg, sharded, tokenizer)
        seen.extend(sharded.model.blocks[1].sums[0].attn.own.tolist())

    monkeypatch.setattr(train.run_state, "initialize", noted)
    use("m.own = nn.Parameter(torch.full((4,), 0.5))")
    run("--max_iters=1", "--warmup_iters=0")
    assert seen == [0.5] * 4
    use("m.own = nn.Parameter(torch.rand(4))")
    with pytest.raises(SystemExit) as stop:
        run("--max_iters=1", "--warmup_iters=0", out="other")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("error: blocks.0.sums.0.attn.own ") and said.count("\n") == 1


def of_shards():
    """On each rank: the shards that FSDP makes are parts of the whole model, own values too."""
    use("m.own = nn.Parameter(torch.full((4, 16), 0.5)); nn.init.zeros_(m.out.weight)")
    cfg = Config(**SIZES, parallel="fsdp", device="cpu", dtype="float32", gradient_accumulation_steps=2)
    whole = Model(cfg, cfg.seed).state_dict()
    sharded = ShardedModel(cfg, parallel.join(cfg))
    sharded.init_weights(cfg.seed)
    for name, p in sharded.model.named_parameters():
        assert torch.equal(p.full_tensor(), whole[name]), name
    assert (whole["blocks.0.sums.0.attn.own"] == 0.5).all() and (whole["blocks.0.sums.0.attn.out.weight"] == 0).all()


def test_shards_have_the_same_values(tmp_path):
    launch(2, of_shards, tmp_path)


def test_no_model_needs_the_compiler():
    """Importing torch._dynamo takes seconds, and PyTorch's dispatch modes do it by default."""
    program = f"""
import sys, torch, model
for device in ("cpu", "meta"):
    with torch.device(device):
        model.Model(model.ModelConfig(**{SIZES}))
sys.exit("torch._dynamo" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("build", [Model, in_parts], ids=["whole", "parts"])
def test_a_buffer_is_refused_by_name(build):
    use("m.register_buffer('seen', torch.ones(8, 8).tril())")
    with pytest.raises(ValueError, match=r"^blocks\.0\.sums\.0\.attn\.seen is a buffer, .* compute it in forward"):
        build(ModelConfig(**SIZES))


def test_a_declared_tensor_without_values_is_refused_by_name():
    use("m.own = nn.Parameter(torch.empty(4)); m.initial = {'own': torch.linspace(0, 1, 4)}")
    whole = Model(ModelConfig(**SIZES), 5)
    assert whole.blocks[0].sums[0].attn.own.tolist() == torch.linspace(0, 1, 4).tolist()
    with pytest.raises(
        ValueError, match=r"^initial\['own'\] of blocks\.0\.sums\.0\.attn has no values; .*device='cpu'"
    ):
        in_parts(ModelConfig(**SIZES))
    use("m.own = nn.Parameter(torch.empty(4)); m.initial = {'own': torch.linspace(0, 1, 4, device='cpu')}")
    assert torch.equal(in_parts(ModelConfig(**SIZES)).blocks[0].sums[0].attn.own, whole.blocks[0].sums[0].attn.own)
