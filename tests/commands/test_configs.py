"""Every file of config/: its flags fit together, and its model has the parameters counted here by hand."""

import re
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
VOCABULARY = {"pycode": 257, "shakespeare_char": 65, "pycode_gpt2": 50304, "openwebtext": 50304}
VOCABULARY["numbers"] = 257 - 4  # pairs have no sentinels
OWN_IDS = {"causal": 0, "masked": 1, "seq2seq": 4}  # 19 of 64 tokens in 3 spans; the last sentinel ends them
C = 192
D = 48  # width and head size of the quick files


def gpt2(norms: int, positions: int, gains: int = 0) -> int:
    """12 layers: q, k, v, out and the MLP hold 1 + 1 + 1 + 1 + 4 + 4 = 12 squares; one norm more before the head."""
    return 50304 * 768 + positions * 768 + 12 * (12 * 768**2 + norms * 768 + gains) + 768


def quick(layer: int, first: int = 0, tables: int = 1, positions: int = 0, vocabulary: int = 257) -> int:
    """4 layers, a norm, and what only the first layer has; tables of all tokens."""
    return tables * vocabulary * C + positions * C + 4 * layer + first + C


PARAMETERS = {
    "train_gpt2": gpt2(norms=2, positions=1024),
    "train_gpt2_modern": gpt2(norms=1, positions=0, gains=2 * 64 + 4 * 768),
    "train_superblock_124m": gpt2(norms=1, positions=1024),
    # q and k of 12 heads, with biases, and the MLP: 10 squares; alpha, beta, gamma per head; 3 gains; 2 norms;
    # the first value and its 2 gains; the last norm and its bias
    "sas_18l_768": (50304 + 128) * 768 + 18 * (10 * 768**2 + 3 * 12 + 3 + 4 * 768) + 768**2 + 2 + 2 * 768,
    "train_shakespeare_char": (65 + 256) * 384 + 6 * (12 * 384**2 + 2 * 384) + 384,
    "speedrun_shakespeare_cpu": 65 * 176 + 2 * (12 * 176**2 + 176 + 2 * 44 + 4 * 176) + 176,
    "train_shakespeare_cpu": (65 + 64) * 128 + 4 * (12 * 128**2 + 2 * 128) + 128,
    # four taps of each channel, and two tables of values
    "train_pycode": quick(12 * C**2 + C + 2 * D + 4 * C, tables=3),
    "pycode_standard": quick(12 * C**2 + 2 * C + 2 * D),
    # biases: q, k, v 3 C, out C, up 4 C, down C, norms 2 C, and the last norm's C
    "pycode_gpt2": quick(12 * C**2 + 2 * C + 11 * C, first=C, positions=256),
    # 4 experts of four squares each, their routers and biases
    "pycode_moe": quick(4 * C**2 + 4 * 4 * C**2 + 4 * C + 4 + 2 * C + 2 * D),
    # two sums of a norm, half of the heads and 4 experts of two squares
    "pycode_superblock_moe": quick(4 * C**2 + 2 * 4 * 2 * C**2 + 2 * (4 * C + 4) + 2 * C + 4 * D),
    # q and out of 32 heads of 128, keys and values of 4; three matrices of 768 for each of 128 experts; two tables
    "moe_30b_a3b": 2 * 151936 * 2048
    + 48 * (2 * 2048 * 36 * 128 + 128 * (3 * 768 * 2048 + 2048 + 1) + 2 * 2048 + 2 * 128)
    + 2048,
    # 4 query heads and 2 keys and values; three matrices of 512 = 8/3 C
    "pycode_llama": quick(2 * C**2 + 2 * 2 * D * C + 3 * 512 * C + 2 * C, tables=2),
    "pycode_palm": quick(2 * C**2 + 2 * D * C + 3 * 512 * C + C),
    "pycode_bert": quick(4 * C**2 + 3 * 512 * C + 2 * C, vocabulary=258),
    # the encoder and its norm; two layers that also have a query, a key, a value, an out and a norm for its memory;
    # two gains per attention
    "pycode_t5": quick(4 * C**2 + 3 * 512 * C + 2 * C, tables=2, vocabulary=261)
    + 2 * (8 * C**2 + 3 * 512 * C + 3 * C)
    + (4 + 2 + 2) * 2 * D
    + C,
    # 2 layers of 12 squares and 2 norms in the encoder, of 16 and 3 in the decoder, and each's last norm
    "numbers_seq2seq": 257 * 128 + 2 * (12 * 128**2 + 2 * 128 + 16 * 128**2 + 3 * 128) + 2 * 128,
    "pycode_sas": quick(10 * C**2 + 3 * 4 + 3 + 2 * C, first=C**2 + 2),
    "pycode_sas_p": quick(10 * C**2 + 3 * 4 + 2 + C, first=C**2 + 2),
    "pycode_superblock": quick(12 * C**2 + C + 2 * D),
    # 768 slots per head: keys and values of 4 heads and 48 columns are the 8 squares of the MLP
    "pycode_superblock_joint": quick(4 * C**2 + 2 * 4 * 768 * D + C + 2 * D),
    # q, k, v and out are 4 squares, in the 70B one k and v an eighth each; three matrices of the MLP; two tables
    "llama_7b": 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 11008 * 4096 + 2 * 4096) + 4096,
    "llama_70b": 2 * 128256 * 8192 + 80 * (2.25 * 8192**2 + 3 * 28672 * 8192 + 2 * 8192) + 8192,
}


@cache
def read(name: str) -> Config:
    """The flags of a file; ValueError if they contradict each other or one of them is not used by the others."""
    return parse(Config, [str(FILES[name])])


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    cfg = copy(read(name))
    cfg.vocab_size = cfg.vocab_size or VOCABULARY[cfg.dataset] + OWN_IDS[cfg.objective]
    with torch.device("meta"):
        assert sum(p.numel() for p in Model(cfg).parameters()) == PARAMETERS[name]


def test_every_file_is_counted_and_has_its_own_out_dir():
    assert FILES.keys() == PARAMETERS.keys()
    assert len({read(name).out_dir for name in PARAMETERS}) == len(PARAMETERS)


def test_the_file_that_a_preparation_names_next_reads_its_data():
    assert {read(name).dataset: name for name in CONFIGS.values()} == CONFIGS


@pytest.mark.parametrize("name", PARAMETERS)
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
        assert 0 <= 1 - PARAMETERS[name] / PARAMETERS[like] < 5e-4


def test_quick_files_are_the_tuned_runs():
    """A quick file has the rates of its row in docs/baselines.md, which names all such files."""
    page = (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| B \| `(pycode_\w+)\.py`.*? \| ([\d.]+), ([\d.]+)(?: !)? \|", page, re.MULTILINE)
    for name, *rates in rows:
        assert [read(name).muon_lr, read(name).learning_rate] == [float(rate) for rate in rates], name
    untuned = {"train_pycode", "pycode_palm", "pycode_moe", "pycode_superblock_moe"}
    assert {name for name, *_ in rows} == {name for name in FILES if read(name).dataset == "pycode"} - untuned
