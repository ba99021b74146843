"""Every file of config/: its flags fit together, and models of known sizes have the parameters counted by hand."""

from copy import copy
from dataclasses import asdict
from functools import cache

import pytest
import torch

from configurator import parse
from data.command import CONFIGS
from engine.config import Config
from engine.help import dump
from flags import unused
from model import Model
from tests.helpers import ROOT

FILES = {path.stem: path for path in (ROOT / "config").glob("*.py")}
VOCABULARY = {"pycode": 257, "pycode_gpt2": 50304, "openwebtext": 50304}


def gpt2(norms: int, positions: int, gains: int = 0) -> int:
    """12 layers: q, k, v, out and the MLP hold 1 + 1 + 1 + 1 + 4 + 4 = 12 squares; one norm more before the head."""
    return 50304 * 768 + positions * 768 + 12 * (12 * 768**2 + norms * 768 + gains) + 768


PARAMETERS = {
    "train_gpt2": gpt2(norms=2, positions=1024),
    "train_gpt2_modern": gpt2(norms=1, positions=0, gains=2 * 64 + 4 * 768),
    "train_superblock_124m": gpt2(norms=1, positions=1024),
    # q and k of 12 heads, with biases, and the MLP: 10 squares; alpha, beta, gamma per head; 3 gains; 2 norms;
    # the first value and its 2 gains; the last norm and its bias
    "sas_18l_768": (50304 + 128) * 768 + 18 * (10 * 768**2 + 3 * 12 + 3 + 4 * 768) + 768**2 + 2 + 2 * 768,
    # q and out of 32 heads of 128, keys and values of 4; three matrices of 768 for each of 128 experts; two tables
    "moe_30b_a3b": 2 * 151936 * 2048
    + 48 * (2 * 2048 * 36 * 128 + 128 * (3 * 768 * 2048 + 2048 + 1) + 2 * 2048 + 2 * 128)
    + 2048,
    # q, k, v and out are 4 squares, in the 70B one k and v an eighth each; three matrices of the MLP; two tables
    "llama_7b": 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 11008 * 4096 + 2 * 4096) + 4096,
    "llama_70b": 2 * 128256 * 8192 + 80 * (2.25 * 8192**2 + 3 * 28672 * 8192 + 2 * 8192) + 8192,
}


@cache
def read(name: str) -> Config:
    """The flags of a file; ValueError if they contradict each other or one of them is not used by the others."""
    return parse(Config, [str(FILES[name])])


def n_params(name: str) -> int:
    cfg = copy(read(name))
    cfg.vocab_size = cfg.vocab_size or VOCABULARY[cfg.dataset]
    with torch.device("meta"):
        return sum(p.numel() for p in Model(cfg).parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    assert n_params(name) == PARAMETERS[name]


def test_every_file_has_its_own_out_dir():
    assert len({read(name).out_dir for name in FILES}) == len(FILES)


def test_the_file_that_a_preparation_names_next_reads_its_data():
    assert {read(name).dataset: name for name in CONFIGS.values()} == CONFIGS


@pytest.mark.parametrize("name", FILES)
def test_record_reads_back_equal(tmp_path, name):
    path = tmp_path / "config.py"
    cfg = read(name)
    dump(cfg, path)
    back = parse(Config, [str(path)])
    assert back == cfg
    assert list(tmp_path.iterdir()) == [path]
    assert set(back.sources) == asdict(cfg).keys() - unused(cfg).keys()
    expected = {}
    exec(path.read_text(encoding="utf-8"), {}, expected)  # it is also plain Python with the same meaning
    assert asdict(Config()) | expected == asdict(cfg)


@pytest.mark.parametrize("name, like, changed", [
    ("train_superblock_124m", "train_gpt2", {"block"}),
    ("train_pycode", "pycode_standard", {"block", "conv", "conv_lr", "value_embedding", "muon_lr", "muon_momentum"}),
    ("pycode_superblock", "pycode_standard", {"block"}),
    ("pycode_superblock_joint", "pycode_standard", {"block", "mlp", "muon_lr", "learning_rate"}),
    ("pycode_superblock_moe", "pycode_superblock", {"block", "n_expert", "balance_rate", "muon_lr"}),
    ("pycode_sas", "pycode_standard", {"block", "sas_beta_ff", "qk_norm", "muon_lr"}),
    ("pycode_sas_p", "pycode_sas", {"block"}),
])  # fmt: skip
def test_compares_like_with_like(name, like, changed):
    """A comparison of blocks changes only what it says, and superblocks have as many parameters."""
    a = asdict(read(name))
    b = asdict(read(like))
    assert {flag for flag in a if a[flag] != b[flag]} == changed | {"out_dir"}
    if "superblock" in name and "n_expert" not in changed:
        assert 0 <= 1 - n_params(name) / n_params(like) < 5e-4
