"""The training loop against an uninterrupted run; what it hands to its parts."""

import re
import shutil
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import model
import train
from configurator import parse
from data.objective import OBJECTIVE
from data.tokenizer import CharTokenizer
from data.writer import ShardWriter
from engine import evaluation, settle, weights
from engine.checkpoint import files as checkpoint
from engine.config import Config
from engine.evaluation import Evaluation
from engine.parallel import compilation
from engine.parallel import ranks as parallel
from engine.plan import accounting
from tests.helpers import TINY, edit_state, figures, losses, metrics, refused, state_of, steps_of
from tests.ranks import command, launch, train_main

ALONE = parallel.Ranks(0, 1, torch.device("cpu"), torch.float32, False)

MODERN = ["--optimizer=muon", "--pos=rope", "--block=parallel", "--mlp=swiglu", "--norm=rmsnorm", "--schedule=wsd"]
SEQ2SEQ = ["--objective=seq2seq", "--corrupt_ratio=0.3", "--span_length=1.5", "--doc_mask=True", "--n_encoder_layer=1"]
MASKED = ["--objective=masked", "--corrupt_ratio=0.3", "--doc_mask=True", "--pos=rope"]
MIXTURE = ["--objective=masked", "--dataset=TINY:0.75,MORE:.25"]
RESUMED = {"gpt2": ["--dropout=0.1"], "modern": MODERN, "masked": MASKED, "seq2seq": SEQ2SEQ, "mixture": MIXTURE}


@pytest.mark.parametrize("flags", RESUMED.values(), ids=RESUMED)
def test_resume_is_exact(run, flags, tiny_data, more_data):
    """Steps 4 to 8 once more, digit for digit, as after a kill: the log had gone on to 8 meanwhile."""
    flags = [flag.replace("TINY", str(tiny_data)).replace("MORE", str(more_data)) for flag in flags]
    steps = ["--max_iters=8", "--eval_interval=4"]
    folder = run(*flags, *steps)
    whole = figures(folder)
    shutil.rmtree(folder / "step_00000008")
    (folder / "latest").write_text("step_00000004\n")
    run("--init_from=resume", *(flag for flag in flags if flag.startswith("--dataset=")), *steps)
    assert figures(folder) == whole
    assert [line["step"] for line in whole if "loss" in line] == list(range(8))
    assert [line["step"] for line in whole if "val_loss" in line] == [0, 4, 8]


def test_a_whole_evaluation_reads_at_most_100_batches_of_training(run, monkeypatch):
    """It has more of validation here. (The oracle's runs have fewer, and read as many of both.)"""
    read = []
    loss = Evaluation.loss
    monkeypatch.setattr(Evaluation, "loss", lambda self, split, n, stop: read.append(n) or loss(self, split, 1, stop))
    run("--block_size=4", "--batch_size=2", "--eval_iters=0", "--max_iters=1", "--eval_interval=0", "--warmup_iters=0")
    assert read == [100, 0]


def train_with_a_known_peak(flags: list[str]):
    """train.py on devices of 1e9 FLOP/s; a CPU's peak is not known."""
    train.peak_flops = lambda *_: 1e9
    train_main(flags)


def test_the_mfu_is_a_share_of_the_peak_of_all_ranks(tiny_data, tmp_path):
    flags = [*TINY, *SEQ2SEQ, "--log_interval=2", "--max_iters=3", "--eval_interval=0", "--eval_iters=1"]
    flags += [f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}"]
    launch(2, train_with_a_known_peak, tmp_path, flags)
    net = weights.load_model(str(tmp_path / "out"), ALONE.device, torch.float32)[1]
    flops_per_token = accounting.flops(net, 8, 14) / 16  # of a text of 8 tokens and a source of 14, from 16 tokens
    logged = [line for line in metrics(tmp_path / "out") if "loss" in line]
    assert [line["step"] for line in logged] == [0, 2]
    for line in logged:
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops_per_token / 2e9)


class Reached(Exception):
    """A call that a test waits for."""


def test_a_rank_takes_the_gpu_of_its_number_on_its_node(tiny_data, tmp_path, monkeypatch):
    """The twelfth rank of two nodes of eight, before it connects to the others."""

    def set_device(device):
        raise Reached(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**36, major=9))
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    for name, value in (("RANK", 11), ("LOCAL_RANK", 3), ("WORLD_SIZE", 16), ("LOCAL_WORLD_SIZE", 8)):
        monkeypatch.setenv(name, str(value))
    flags = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path}", "--device=cuda"]
    with pytest.raises(Reached, match="cuda:3"):
        train.main([*flags, "--gradient_accumulation_steps=16"])


@pytest.mark.parametrize("objective,chars,given,vocab_size", [
    ("causal", 50, 0, 50), ("masked", 50, 0, 51), ("seq2seq", 50, 0, 54),
    ("causal", 1024, 0, 1024), ("masked", 1024, 0, 1088), ("seq2seq", 1100, 0, 1152),
    ("masked", 1024, 1025, 1025), ("seq2seq", 50, 54, 54),
])  # fmt: skip
def test_vocabulary_has_room_for_the_objective(tmp_path, objective, chars, given, vocab_size):
    with ShardWriter(tmp_path, CharTokenizer("".join(chr(1000 + i) for i in range(chars)))) as out:
        out.add("train", np.arange(chars))
    flags = {"causal": {}, "masked": {"corrupt_ratio": 0.3}, "seq2seq": {"corrupt_ratio": 0.3, "span_length": 1.5}}
    cfg = Config(dataset=str(tmp_path), objective=objective, block_size=16, vocab_size=given, **flags[objective])
    shape = {"corrupt_ratio": cfg.corrupt_ratio, "span_length": cfg.span_length}
    _, made = settle.by_data(cfg)
    assert cfg.vocab_size == vocab_size
    assert made == OBJECTIVE[objective](chars, None, 16, **shape)


def test_a_checkpoint_older_than_a_flag_resumes(run, capsys):
    """With the default. n_kv_head may be said where attention says it too."""
    folder = run("--max_iters=6")
    flags = state_of(folder)["flags"] | {"n_kv_head": 2}
    del flags["logit_softcap"]
    edit_state(folder, flags=flags)
    refused(lambda flags: run(*flags), ["--init_from=resume", "--max_iters=8", "--logit_softcap=30"], capsys)
    free = ["--dropout=0.1", "--loss_chunk=7"]  # flags of the network that may change
    run("--init_from=resume", "--max_iters=8", *free)
    assert len(steps_of(folder)) == 8


def test_lines_that_cannot_be_written_end_no_run(tiny_data, tmp_path):
    flags = [*TINY, f"--dataset={tiny_data}", "--max_iters=5", f"--out_dir={tmp_path}"]
    warning = "warning: stdout: No space left on device; the run goes on, and metrics.jsonl has its figures\n"
    assert command(["train.py", *flags], tmp_path, stdout="/dev/full") == (0, warning)
    assert len(losses(tmp_path)) == 5 + 2


def test_figures_that_cannot_be_written(run, monkeypatch, capsys):
    full = OSError(28, "No space left on device", "metrics.jsonl")
    monkeypatch.setattr("engine.metrics.writing", Mock(side_effect=full))
    assert "metrics.jsonl" in refused(lambda flags: run(*flags), ["--max_iters=4"], capsys)
    assert "loader" not in [thread.name for thread in threading.enumerate()]  # Python's exit could wait for it for ever


def test_no_rank_counts_bytes_if_one_cannot(tiny_data):
    """A table that only some nodes have in their cache."""
    cfg = parse(Config, [*TINY, f"--dataset={tiny_data}"])
    data, _ = settle.by_data(cfg)
    stream = data.split("val")
    with_others = SimpleNamespace(device=torch.device("cpu"), sum=lambda x: x + 1)
    token_bytes, why_not = evaluation.byte_lengths(cfg, data, stream, with_others)
    assert token_bytes is None
    assert "another rank cannot read the tokenizer; set TIKTOKEN_CACHE_DIR" in why_not
    alone = SimpleNamespace(device=torch.device("cpu"), sum=lambda x: x)
    assert evaluation.byte_lengths(cfg, data, stream, alone)[0].sum() == 256


def test_a_home_folder_is_found(run, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").symlink_to(tiny_data)
    run("--max_iters=2", "--dataset=~/data", "--out_dir=~/here")
    train.main(["--out_dir=~/here", "--init_from=resume", "--max_iters=3"])
    assert checkpoint.find(tmp_path / "here").name == "step_00000003"


def test_a_finished_run_and_eval_only_change_nothing(run, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(compilation, "works", lambda ranks: ranks.compile)  # which takes seconds
    monkeypatch.setattr(model.Block, "compile", lambda *_, **__: None)
    before = losses(folder := run("--max_iters=2"))
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    said = re.search(r"step 2: [^(]*\d", capsys.readouterr().out)[0]
    run("--init_from=resume", "--eval_only=True")
    assert capsys.readouterr().out.strip() == said
    for where in (folder, folder / "step_00000002"):
        line = refused(lambda flags: run(*flags), ["--eval_only=True", f"--out_dir={where}"], capsys)
        assert "eval_only=True (command line)" in line
        assert "random weights" in line
        assert "--init_from=resume" in line
    run("--eval_only=True", out="new")
    assert "step 0: " in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    for compiled in (False, True):
        run("--init_from=resume", "--max_iters=2", f"--compile={compiled}")
        assert losses(folder) == before
        assert "raise it to train on" in capsys.readouterr().out


def test_the_batch_grows(run, tmp_path, capsys):
    """A run with batch_ramp is the run whose number of micro-batches is changed by hand, also where it resumes."""
    common = ["--lr_decay_iters=40", "--eval_interval=40", "--max_iters=16"]
    ramp = run(*common, "--batch_ramp=1:4,3:10")
    run(*common, "--batch_ramp=1:4,3:10", "--max_iters=6", out="cut")
    assert losses(run(*common, "--init_from=resume", out="cut")) == losses(ramp)
    for n, last in ((1, 4), (3, 10), (2, 16)):
        resume = ["--init_from=resume"] * (last > 4)
        folder = run(*common, f"--gradient_accumulation_steps={n}", f"--max_iters={last}", *resume, out="by hand")
    assert steps_of(folder) == steps_of(ramp)
    assert state_of(tmp_path / "out")["samples"] == 4 * (4 + 3 * 6 + 2 * 6)
    for wrong in ("8", "0:5", "2:9,3:9", "2:9,3:4", "2:9,", "a:1"):
        line = refused(lambda flags: run(*flags), [f"--batch_ramp={wrong}"], capsys)
        assert f"batch_ramp={wrong!r} (command line)" in line
