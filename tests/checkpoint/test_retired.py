"""Flags in the words of earlier versions, and two spellings of one network: what is read is what was trained."""

import json

import pytest
import torch

import train
from engine.interchange import __main__ as interchange
from engine.interchange.huggingface import read_hf
from model import Model
from tests.helpers import edit_state, refused, state_of, weights_in
from tools.curves import groups_of, read_run

SHORT = ["--warmup_iters=1", "--lr_decay_iters=4", "--n_kv_head=1", "--pos=rope"]
BEFORE = {  # flags of today -> what commit ca72a4b stores in their place; it has a --layer in each checkpoint
    ("--block=standard", "--n_expert=3", "--n_dense_layer=1"): {"block": "standard", "layer": "c+p"},
    ("--block=superblock",): {"block": "superblock", "layer": "c+p"},
    ("--block=simplified_parallel", "--norm_placement=none", "--sas_beta_ff=0.3", "--sas_value_proj=all"): {
        "block": "simplified_parallel",
        "layer": "c+p",
        "norm": "none",
        "norm_placement": "pre",
    },
    ("--block=c.relu+p",): {"block": "superblock", "layer": "c.relu+p"},
    ("--block=c,p;c+p",): {"block": "superblock", "layer": "c,p;c+p"},
}


def in_old_words(folder, changes: dict):
    """Rewrite the flags of a run's last checkpoint."""
    stored = state_of(folder)["flags"]
    for name in ("sas_beta_ff", "sas_value_proj"):
        stored[name.replace("sas", "simplified")] = stored.pop(name)
    edit_state(folder, flags=stored | {"attention": "gqa", "n_kv_head": 1} | changes)


@pytest.mark.parametrize("flags", BEFORE, ids=" ".join)
def test_a_checkpoint_in_the_words_of_ca72a4b_resumes_digit_for_digit(run, flags):
    whole = run(*flags, *SHORT, "--max_iters=4", out="whole")
    out = run(*flags, *SHORT, "--max_iters=2")
    in_old_words(out, BEFORE[flags])
    for again in ([], [*flags, "--n_kv_head=1"]):  # the same flags may be typed again
        train.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=4", *again])
    expected = weights_in(whole)
    found = weights_in(out)
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name
    assert "layer" not in state_of(out)["flags"]


def test_an_export_in_the_words_of_ca72a4b_has_its_logits(run, tmp_path):
    """Readers that differ in a map alone have equal shapes, so a wrong string would go unseen."""
    out = run("--block=c.relu+p", "--max_iters=2", "--warmup_iters=1")
    interchange.main(["export", str(out), str(tmp_path / "hf"), "--remote_code=True"])
    file = tmp_path / "hf/config.json"
    config = json.loads(file.read_text())
    logits = []
    for words in (config["flags"], config["flags"] | {"block": "superblock", "layer": "c.relu+p"}):
        file.write_text(json.dumps(config | {"flags": words}))
        weights = read_hf(tmp_path / "hf")
        model = Model(weights.cfg)
        model.load_state_dict(dict(weights), strict=False)  # without the head, which is tied
        logits.append(model(torch.arange(12)[None]))
    assert torch.equal(*logits)


SPELLED = {  # names and strings of one network, and one beside it
    "--block=superblock": (["--block=parallel", "--block=c+p"], "--block=standard"),
    "--block=standard": (["--block=c,p", "--block=c,p;c,p"], "--block=superblock"),
    "--n_kv_head=1": (["--attention=mqa", "--attention=gqa --n_kv_head=1"], "--n_kv_head=2"),
}


@pytest.mark.parametrize("spelled", SPELLED)
def test_spellings_of_one_network_are_equal(run, spelled, capsys):
    """They have the same weights and one curve, and a resume takes each. Another network is refused."""
    others, different = SPELLED[spelled]
    short = ["--max_iters=2", "--warmup_iters=1"]
    runs = [run(*flags.split(), *short, out=flags) for flags in (spelled, *others)]
    first, *rest = [weights_in(folder) for folder in runs]
    assert all(torch.equal(first[name], each[name]) for each in rest for name in first)
    groups = groups_of([read_run(str(folder)) for folder in (*runs, run(different, *short, out="different"))])
    assert sorted(len(found) for found in groups.values()) == [1, len(runs)]
    flags = [f"--out_dir={runs[0]}", "--init_from=resume", "--max_iters=3"]
    assert f"{different[2:]} (command line): differs from " in refused(train.main, [*flags, different], capsys)
    for other in others:
        train.main([*flags, *other.split()])
