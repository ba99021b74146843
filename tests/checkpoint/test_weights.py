"""init_from=checkpoint:RUN: a new run from the weights of another one; flags that are free or not.

Weights reach other layouts as those of a resume do, see test_layouts, and those of test_families."""

import re

import pytest
import torch

import train
from configurator import read_flags, resolve
from data.tokenizer import CharTokenizer
from engine import retired, weights
from engine.checkpoint import files as checkpoint
from engine.config import Config
from engine.interchange.__main__ import ExportConfig, export
from engine.parallel.ranks import Ranks
from engine.parallel.sharded import ShardedModel
from model import Model
from tests.data.preparing import write_text
from tests.helpers import IN_FLOAT64, TINY, edit_state, losses, metrics, refused, state_of, weights_in
from tests.ranks import launch, train_runs

ROPE = ["--pos=rope", "--qk_norm=True", "--mlp=swiglu", "--mlp_ratio=3"]
SHORT = ["--max_iters=2", "--eval_interval=1", "--lr_decay_iters=40"]


@pytest.fixture(scope="module")
def source(tiny_data, tmp_path_factory):
    """A run whose weights have moved away from their initial values."""
    folder = tmp_path_factory.mktemp("source")
    flags = [*TINY, *ROPE, "--max_iters=10", f"--dataset={tiny_data}", f"--out_dir={folder / 'run'}", "--dropout=0.1"]
    launch(1, train_runs, folder, [flags])
    return folder / "run"


def test_the_flags_of_the_schedule_that_come_along_are_named(source, tmp_path, capsys):
    """All of them, but those that are set, those that have their defaults, and those of a resume."""
    train.main([f"--init_from=checkpoint:{source}", "--max_iters=2", "--lr_decay_iters=2", f"--out_dir={tmp_path}"])
    expected = f"the schedule takes learning_rate=0.01, warmup_iters=5 from checkpoint:{source}; set"
    assert expected in capsys.readouterr().out
    edit_state(tmp_path, flags=state_of(tmp_path)["flags"] | {"batch_ramp": "1:3", "lr_decay_iters": 9})
    train.main(["--init_from=resume", f"--out_dir={tmp_path}", "--max_iters=3"])
    assert "the schedule takes" not in capsys.readouterr().out
    flags = ["--max_iters=1", "--warmup_iters=0"]
    train.main([f"--init_from=checkpoint:{tmp_path}", *flags, f"--out_dir={tmp_path / 'b'}"])
    expected = "the schedule takes batch_ramp='1:3', learning_rate=0.01, lr_decay_iters=9 from "
    assert expected in capsys.readouterr().out


def test_it_is_a_new_run_with_these_weights(run, source, tmp_path, monkeypatch):
    """Its flags are the source's by default; it equals a run from scratch whose initial weights are replaced."""
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    step = checkpoint.find(source)  # a step's directory may be named too
    out = tmp_path / "new"
    train.main([*SHORT, f"--init_from=checkpoint:{step}", "--dropout=0", f"--out_dir={out}"])
    after = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    assert before == after, "the source has changed"
    tensors = weights_in(source)

    def replaced(self, seed, names=None):
        for name, p in self.model.named_parameters():
            p.data.copy_(tensors[name])

    monkeypatch.setattr(ShardedModel, "init_weights", replaced)
    same = run(*SHORT, *ROPE, "--vocab_size=257", out="same")
    assert losses(out) == losses(same)
    assert metrics(out)[0]["step"] == 0
    state = state_of(out)
    assert (state["step"], state["samples"]) == (2, 2 * 8)
    assert state["flags"]["mlp"] == "swiglu"
    changed = {name for name, value in state_of(source)["flags"].items() if state["flags"][name] != value}
    assert changed == {"out_dir", "init_from", "max_iters", "eval_interval", "lr_decay_iters", "dropout"}
    resumed = run("--init_from=resume", "--max_iters=3", "--lr_decay_iters=40", out="new")
    assert checkpoint.find(resumed).name == "step_00000003"


def test_the_average_of_the_weights(run, many, tmp_path):
    """It is 0.8 A + 0.2 W after each step from the initial weights on: on one rank, after a resume, on two ranks."""
    flags = ["--max_iters=3", "--lr_decay_iters=9", "--ema_decay=0.8", IN_FLOAT64, "--eval_interval=0"]
    flags += ["--n_expert=4", "--optimizer=muon"]
    one = run(*flags, "--save_interval=1", "--keep_last=9", out="one")
    many(2, ("two", [*flags, "--parallel=fsdp"]))
    run(*flags, "--max_iters=1", out="resumed")
    run(*flags, "--init_from=resume", out="resumed")
    cfg = resolve(Config, read_flags(Config, [*TINY, "--vocab_size=257", "--n_expert=4"]))
    names = [name for name, _ in Model(cfg).named_parameters()]
    torch.set_default_dtype(torch.float64)
    average = dict(Model(cfg, cfg.seed).named_parameters())
    for step in range(1, 4):
        new = weights_in(one / f"step_{step:08d}")
        average = {name: 0.8 * average[name].detach() + 0.2 * new[name] for name in names}

    def load(found):
        return dict(found.load(cfg, Ranks(0, 1, torch.device("cpu"), torch.float32, False)).model.named_parameters())

    for out in ("one", "two", "resumed"):
        found = weights.read(f"ema:{tmp_path / out}", load)
        for name in names:
            torch.testing.assert_close(found[name], average[name], rtol=1e-9, atol=1e-12, msg=f"{out}: {name}")
    torch.set_default_dtype(torch.float32)
    run("--max_iters=1", "--ema_decay=0.8", out="narrow")
    export(f"ema:{tmp_path / 'narrow'}", str(tmp_path / "exported"), ExportConfig(remote_code=True))
    starts = (f"ema:{tmp_path / 'narrow'}", f"hf:{tmp_path / 'exported'}")
    first, second = (losses(run(*SHORT, f"--init_from={start}", out=start[:3])) for start in starts)
    assert first == second


FREE = [
    ["--dropout=0.3", "--window=5", "--window_pattern=SL", "--rope_theta=500", "--block_size=40", "--doc_mask=True"],
    ["--attn_softcap=20", "--logit_softcap=30", "--loss_chunk=7", "--pos=none", "--norm_eps=1e-6", "--embed_scale=4"],
    ["--pos_pattern=LN", "--fp32_residual=False", "--dtype=bfloat16"],
    ["--rope_scaling=llama3:8:1:4:16", "--block_size=128", "--mlp=geglu"],
]


@pytest.mark.parametrize("flags", FREE, ids=" ".join)
def test_flags_that_keep_the_weights_are_free(flags, source, tmp_path, monkeypatch):
    """The first evaluation is that of the source's weights in a model with these flags."""
    base = [f"--init_from=checkpoint:{source}", f"--out_dir={tmp_path / 'none'}", "--eval_only=True", "--eval_iters=1"]
    seen = []
    evaluate = train.Run.evaluate

    def evaluated(run):
        seen.append((run.sharded.model, evaluate(run)))

    monkeypatch.setattr(train.Run, "evaluate", evaluated)
    train.main([*base, *flags])
    [(seen_model, finite)] = seen  # the first finite loss is the best
    stored = state_of(source)["flags"]
    with torch.no_grad():
        model = Model(resolve(Config, read_flags(Config, flags), stored, "source"))
    found = dict(seen_model.named_parameters())
    expected = weights_in(source)
    assert finite
    assert found.keys() == expected.keys() == {name for name, _ in model.named_parameters()}
    for name in found:
        assert torch.equal(found[name], expected[name]), name


REFUSED = [  # what the message says of the source, what it says of these flags, and others
    ("n_head=2", "n_head=4"),  # the same shapes, and other rows of q, k and v
    ("n_head=2", "n_head=3", "n_embd=18"),  # which only together need other weights: each contradicts the other flags
    ("attention=mha", "attention=gqa", "n_kv_head=1"), ("pos=rope", "pos=learned"), ("mlp=swiglu", "mlp=gelu"),
    ("bias=False", "bias=True"), ("tie_weights=True", "tie_weights=False"), ("vocab_size=257", "vocab_size=300"),
    ("block=standard", "block=parallel"), ("qk_norm=True", "qk_norm=False", "dropout=0.2"),
    ("n_layer=2", "n_layer=3", "block_size=32", "window=5"),  # which change no shape under RoPE
]  # fmt: skip


@pytest.mark.parametrize("old,new,more", [(old, new, more) for old, new, *more in REFUSED], ids=str)
def test_flags_that_need_other_weights_are_named(old, new, more, source, tmp_path, capsys):
    base = [f"--init_from=checkpoint:{source}", f"--out_dir={tmp_path / 'new'}", "--max_iters=1", "--warmup_iters=1"]
    line = refused(train.main, [*base, *(f"--{flag}" for flag in (new, *more))], capsys)
    assert re.search(f"{new} .command line.*: the weights in .*, of a model with .*{old}.* do not fit; leave", line)
    assert not set(re.findall(r"\w+(?==)", line)) & {"dropout", "block_size", "window", "max_iters"}, line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flag, words", [
    ("optimizer=muon", "optimizer=muon (command line): differs from adamw in "),
    ("n_head=4", "n_head=4 (command line): differs from 2 in "),
    ("ema_decay=0.9", "ema_decay=0.9 (command line): differs from 0.0 in "),
])  # fmt: skip
def test_a_resume_that_needs_other_state_names_the_flag(flag, words, source, capsys):
    again = [f"--out_dir={source}", "--init_from=resume", "--max_iters=9"]
    refused(train.main, [*again, f"--{flag}"], capsys, [words, "leave it out, or "])


def test_what_cannot_start(source, tiny_data, tmp_path, capsys):
    text = "".join(chr(1000 + i) for i in range(257)) * 2
    write_text(tmp_path / "chars", CharTokenizer(text), text)
    new = [f"--out_dir={tmp_path / 'new'}", "--max_iters=1", "--warmup_iters=1"]
    start = [*new, f"--init_from=checkpoint:{source}"]
    export(str(source), str(tmp_path / "exported"), ExportConfig(remote_code=True))
    resumed = ["--init_from=resume", f"--out_dir={source}"]
    for other in ([start[-1]], [f"--init_from=hf:{tmp_path / 'exported'}"], resumed):
        line = refused(train.main, [*new, *other, f"--dataset={tmp_path / 'chars'}"], capsys)
        assert "another tokenizer" in line and not (tmp_path / "new" / "latest").exists()
    assert "has no room for the 258 ids" in refused(train.main, [*start, "--objective=masked"], capsys)
    refused(train.main, [*new, f"--init_from=ema:{source}"], capsys, ["keeps no average of its weights; train with"])
    assert "no directory" in refused(train.main, [*new, f"--init_from=checkpoint:{tmp_path / 'absent'}"], capsys)
    assert "no checkpoint in" in refused(train.main, [*new, f"--init_from=checkpoint:{tiny_data}"], capsys)
    assert not (tmp_path / "new").exists()


def test_a_flag_that_has_no_effect_today_does_not_hinder_a_resume(run):
    """A version before this one stored it, as it knew no rule for it."""
    out = run("--block=c+s.gelu", "--max_iters=2", "--warmup_iters=1")
    edit_state(out, flags=state_of(out)["flags"] | {"mlp": "relu"})
    train.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=3"])
    assert state_of(out)["step"] == 3


def test_a_retired_flag_loads_at_its_old_value_and_is_refused_at_another(run, monkeypatch, capsys):
    """test_evaluate has the commands that do not train."""
    monkeypatch.setitem(retired.RETIRED, "old_idea", 0.5)
    out = run("--max_iters=2", "--warmup_iters=1")
    flags = ["--max_iters=1", f"--out_dir={out.parent / 'b'}", f"--init_from=checkpoint:{out}"]
    stored = state_of(out)["flags"]
    edit_state(out, flags=stored | {"old_idea": 0.75})
    line = refused(train.main, flags, capsys)
    assert f"old_idea=0.75 ({out}" in line and "was retired" in line
    edit_state(out, flags=stored | {"old_idea": 0.5})
    train.main(flags)
