"""A module says what its parameters begin with. Whoever forgets it, or writes values instead, is refused by name."""

import re

import pytest
import torch
from torch import nn

import model as M
from engine.parallel.initial import check_initial
from model import Model, ModelConfig

SIZES = {"n_layer": 1, "n_head": 4, "n_embd": 16, "block_size": 8, "vocab_size": 32}
KEPT = {  # what a module does in its __init__ -> the parameter that it gets, and the number that fills it
    "m.own = nn.Parameter(torch.empty(4)); m.initial = {'own': 0.5}": ("own", 0.5),
    "m.own = nn.Parameter(torch.rand(4, 4)); m.initial = {'own': M.Normal(0.0)}": ("own", 0.0),
    "m.gate = M.Linear(m.cfg, 16, 4, 'column'); m.gate.initial = {'weight': 0.0}": ("gate.weight", 0.0),
    "m.ln = nn.LayerNorm(16); m.ln.initial = {'weight': 0.5, 'bias': 0.0}": ("ln.weight", 0.5),
    "m.own = nn.Parameter(torch.rand(4)); m.initial = {'own': torch.eye(4, device='cpu')[1]}": ("own", torch.eye(4)[1]),
}
WRITTEN = "is written in __init__"
REFUSED = {  # -> the parameter that the error names, and other words of it
    "m.own = nn.Parameter(torch.full((4,), 0.5))": ("own", "Mine", 'initial = {"own": '),
    "m.conv = nn.Conv1d(16, 16, 3)": ("conv.weight", "Conv1d", 'initial = {"weight": '),
    "nn.init.normal_(m.out.weight, std=0.01)": ("out.weight", "Linear", WRITTEN),
    "m.gate = M.Linear(m.cfg, 16, 4, 'column'); nn.init.zeros_(m.gate.weight[:2])": ("gate.weight", "Linear", WRITTEN),
    "m.ln = M.LayerNorm(16); nn.init.zeros_(m.ln.weight)": ("ln.weight", "LayerNorm", WRITTEN),
    "m.own = nn.Parameter(torch.zeros(4)); m.initial = {'own': 0.0}; m.own += 1": ("own", "Mine", WRITTEN),
    "m.own = nn.Parameter(torch.tensor(0.5)); m.initial = {'own': 0.5}": ("own", "no dimensions", "(1,)"),
    "m.register_buffer('seen', torch.ones(8, 8).tril())": ("seen", "buffer", "compute it in forward"),
}


def use(line: str):
    """The heads of the standard block do what the line says, as the last step of their __init__."""

    class Mine(M.Attention):
        def __init__(self, cfg, layer):
            super().__init__(cfg, layer)
            self.cfg = cfg
            with torch.no_grad():
                exec(line, {"m": self, "M": M, "nn": nn, "torch": torch})

    M.BLOCK["standard"] = lambda cfg, layer: [
        M.Sum(cfg, attn=Mine(cfg, layer)),
        M.Sum(cfg, mlp=M.MLP(cfg, layer)),
    ]


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    monkeypatch.setattr(M, "BLOCK", dict(M.BLOCK))


def in_parts(cfg: ModelConfig) -> Model:
    """The model as engine/ builds it: without memory, and then filled."""
    with torch.device("meta"):
        net = Model(cfg)
    check_initial(net)
    net.to_empty(device="cpu").tie()
    for p in net.parameters():
        p.data.fill_(torch.nan)
    net.init_weights(5)
    return net


@pytest.mark.parametrize("line", KEPT)
def test_declared_values_are_kept(line):
    name, value = KEPT[line]
    without = Model(ModelConfig(**SIZES), 5).state_dict()
    use(line)
    whole = Model(ModelConfig(**SIZES), 5).state_dict()
    parts = in_parts(ModelConfig(**SIZES)).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert (whole[f"blocks.0.sums.0.attn.{name}"] == value).all()
    assert all(torch.equal(whole[key], without[key]) for key in without)


@pytest.mark.parametrize("line", REFUSED)
def test_other_values_are_refused_by_name(line):
    """By a model that is built in parts, as every command builds it."""
    name, *words = REFUSED[line]
    use(line)
    with pytest.raises(ValueError, match=rf"^blocks\.0\.sums\.0\.attn\.{re.escape(name)} ") as error:
        in_parts(ModelConfig(**SIZES))
    assert all(word in str(error.value) for word in words)


def test_a_declared_tensor_needs_values():
    """In a model that is built in parts; as a whole it is made on the CPU."""
    use("m.own = nn.Parameter(torch.empty(4)); m.initial = {'own': torch.arange(4.0)}")
    assert Model(ModelConfig(**SIZES)).blocks[0].sums[0].attn.own.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"^initial\['own'\] of blocks\.0\.sums\.0\.attn has .*device='cpu'"):
        in_parts(ModelConfig(**SIZES))
