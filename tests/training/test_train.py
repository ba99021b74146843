"""The training loop against an uninterrupted run, other numbers of processes, closed forms."""

import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import evaluate
import model
import ops
import sample
import train
from configurator import parse
from data.objective import OBJECTIVE
from data.tokenizer import CharTokenizer
from data.writer import ShardWriter
from engine import compilation, device, evaluation, optim
from engine.checkpoint import files as checkpoint
from engine.checkpoint import weights
from engine.checkpoint.run import NEW
from engine.checkpoint.saver import Checkpoints
from engine.config import Config
from engine.evaluation import Evaluation
from engine.parallel import ranks as parallel
from engine.parallel.sharded import ShardedModel
from engine.plan import accounting
from engine.step import Watch
from engine.stop_signal import STOPPING, StopSignal
from tests.checkpoint.test_checkpoint import full_disk
from tests.helpers import (
    IN_FLOAT64,
    ROOT,
    TINY,
    Operations,
    distance,
    edit_state,
    figures,
    losses,
    metrics,
    refused,
    state_of,
    steps_of,
    tensors_in,
    weights_in,
)
from tests.ranks import BACKWARD, act_in, begin, command, exit_codes, launch, train_main, train_until

ALONE = parallel.Ranks(0, 1, torch.device("cpu"), torch.float32, False)
FLAT = dict(n_layer=2, n_head=2, n_embd=16, block_size=16)  # TINY's model
MODERN = ["--optimizer=muon", "--pos=rope", "--block=parallel", "--mlp=swiglu", "--norm=rmsnorm", "--schedule=wsd"]

MASKED = ["--objective=masked", "--corrupt_ratio=0.3", "--doc_mask=True", "--pos=rope"]
MIXTURE = ["--objective=masked", "--dataset=TINY:0.75,MORE:.25"]
SEQ2SEQ = ["--objective=seq2seq", "--corrupt_ratio=0.3", "--span_length=1.5", "--doc_mask=True", "--n_encoder_layer=1"]


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


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("flags", [{"block": "c.own_slots"}, {"objective": "seq2seq", "attn_softcap": 3.0}], ids=str)
def test_recomputation_draws_the_same_masks(monkeypatch, flags, kind):
    """With dropout everywhere, the gradient is digit for digit that of the same seed without recomputation."""
    torch.manual_seed(0)
    batch = {name: torch.randint(30, (4, 16)) for name in ("idx", "targets", "source")}
    batch = {name: x for name, x in batch.items() if name != "source" or "objective" in flags}
    dropped = ops.dropped
    drawn = []
    monkeypatch.setattr(ops, "dropped", lambda x, p: drawn.append(p) or dropped(x, p))

    def gradients(seed: int, kind: str) -> dict[str, torch.Tensor]:
        cfg = Config(**FLAT, **flags, vocab_size=30, dropout=0.3, activation_checkpoint=kind)
        replica = ShardedModel(cfg, ALONE)
        replica.init_weights(cfg.seed)
        torch.manual_seed(seed)
        drawn.clear()
        replica.backward(iter([batch] * 2), 2, torch.amp.GradScaler("cpu", enabled=False))
        return {name: p.grad for name, p in replica.model.named_parameters()}

    plain = gradients(1, "none")
    masks = len(drawn)
    again = gradients(1, kind)
    masks_again = len(drawn)
    other = gradients(2, kind)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    assert not any(torch.equal(other[name], plain[name]) for name in plain)
    assert masks_again > masks


def test_the_gradient_of_dropout_is_that_of_its_masks():
    """Against finite differences, as the strips of attention are computed again in the backward."""
    net = model.Model(model.ModelConfig(**FLAT | {"block_size": 150}, vocab_size=30, dropout=0.3), seed=0).double()
    torch.manual_seed(0)
    idx, targets = torch.randint(30, (2, 2, 150))
    direction = {name: torch.randn_like(p) for name, p in net.named_parameters()}

    def loss(step: float) -> torch.Tensor:
        torch.manual_seed(1)
        moved = {name: p + step * direction[name] for name, p in net.named_parameters()}
        return torch.func.functional_call(net, moved, (idx, targets))

    loss(0.0).backward()
    slope = sum((p.grad * direction[name]).sum().item() for name, p in net.named_parameters())
    with torch.no_grad():
        difference = (loss(1e-6) - loss(-1e-6)).item() / 2e-6
    assert slope == pytest.approx(difference, rel=1e-6)


PRODUCTS = tuple(f"aten.{name}." for name in "mm addmm bmm baddbmm linear matmul".split())


@pytest.mark.parametrize("flags", [
    ["--bias=True", "--loss_chunk=24"],
    ["--block=c.own_slots", "--pos=alibi", "--activation_checkpoint=full"],
    [*SEQ2SEQ, "--attn_softcap=3.0", "--activation_checkpoint=selective"],
], ids=["standard", "joint", "seq2seq"])  # fmt: skip
def test_products_are_in_the_dtype_of_the_flag(run, monkeypatch, flags):
    """In training, recomputation, evaluations, samples and Muon; parameters and gradients are float32."""
    kept = set()
    backward = ShardedModel.backward
    taken = set()

    def seen(self, *args):
        loss = backward(self, *args)
        kept.update(x.dtype for p in self.model.parameters() for x in (p, p.grad))
        return loss

    def note(f, args, *_):
        if str(f).startswith(PRODUCTS):
            taken.update(x.dtype for x in args[:3] if isinstance(x, torch.Tensor))

    monkeypatch.setattr(ShardedModel, "backward", seen)
    with Operations(note):
        folder = run(*flags, "--dtype=bfloat16", "--optimizer=muon", "--max_iters=1", "--eval_interval=1")
    prompt = "--start=the <mask>" if "--objective=seq2seq" in flags else "--start=the"
    assert taken == {torch.bfloat16}
    assert kept == {torch.float32}
    taken.clear()
    with Operations(note):
        sample.main([f"--out_dir={folder}", prompt, "--dtype=bfloat16", "--max_new_tokens=4", "--device=cpu"])
    assert taken == {torch.bfloat16}
    taken.clear()
    with Operations(note):
        evaluate.main([f"--out_dir={folder}", "--dtype=bfloat16", "--eval_iters=1", "--device=cpu"])
    assert taken == {torch.bfloat16}


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
    net = weights.alone(str(tmp_path / "out"), ALONE.device, torch.float32)[1]
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
    _, made = train.open_with_objective(cfg)
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
    data, _ = train.open_with_objective(cfg)
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


def test_packages_of_our_folders_names_change_nothing(tmp_path):
    for name in ("data", "engine", "tools"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    command = [sys.executable, "data/pycode/prepare.py", "--help"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=env, text=True)
    assert done.returncode == 0, done.stderr


def test_save_policy(run):
    """Nothing is saved before the first step; with always_save_checkpoint=False, only what improves."""
    folder = run("--max_iters=4", "--eval_interval=2", "--keep_last=9", out="always")
    assert sorted(p.name for p in folder.glob("step_*")) == ["step_00000002", "step_00000004"]
    still = ["--learning_rate=0", "--min_lr=0", "--always_save_checkpoint=False"]
    folder = run("--max_iters=10", "--eval_interval=5", "--save_interval=3", "--keep_last=3", *still)
    steps = sorted(int(p.name[5:]) for p in folder.glob("step_*"))
    assert steps == [6, 9, 10]  # nothing improves after step 0, which is not saved; the last step always is
    assert checkpoint.find(folder).name == "step_00000010"


def script(monkeypatch):
    """(a list for the validation losses of the coming evaluations, a list of those that were returned)."""
    plain = Evaluation.losses
    losses = []
    seen = []

    def scripted(self, stop):
        of_train, of_val = plain(self, stop)
        seen.append(losses[len(seen)])
        return of_train, of_val._replace(nats=seen[-1])

    monkeypatch.setattr(Evaluation, "losses", scripted)
    return losses, seen


def test_a_run_that_goes_back_goes_back_to_its_best_checkpoint(run, monkeypatch, capsys):
    """What `best` names is written over by a worse one; the best step itself may be gone."""
    flags = ["--eval_interval=2", "--max_iters=6", "--keep_last=5"]
    losses, seen = script(monkeypatch)
    losses[:] = [5.0, 3.0, 4.0, 2.0]  # of steps 0, 2, 4 and 6
    folder = run(*flags)
    assert (folder / "best").read_text() == "step_00000006\n"
    for best in (2, 4):
        (folder / "latest").write_text("step_00000004\n")
        losses[:] = [4.0, 5.0]
        seen[:] = []
        capsys.readouterr()
        run(*flags, "--init_from=resume")
        out = capsys.readouterr().out
        assert (folder / "best").read_text() == f"step_{best:08d}\n"
        assert f", of step_{best:08d}" in out
        assert ("the best loss begins anew, as step_00000002 is gone" in out) == (best == 4)
        shutil.rmtree(folder / f"step_{best:08d}")


@pytest.mark.parametrize("best", [6, 8])
def test_a_best_checkpoint_that_the_run_goes_back_from(best, run, monkeypatch, capsys):
    """The run writes over step 6, and has not come to step 8 yet: neither is its best one."""
    flags = ["--eval_interval=2", "--keep_last=5", "--lr_decay_iters=8"]
    losses, seen = script(monkeypatch)
    losses[:] = [1.0, 3.0, 4.0, 2.0, 2.0]
    losses[best // 2] = 0.5
    folder = run(*flags, "--max_iters=8")
    assert (folder / "best").read_text() == f"step_{best:08d}\n"
    (folder / "latest").write_text("step_00000004\n")
    losses[:] = [4.0, 5.0]
    seen.clear()
    run(*flags, "--max_iters=6", "--init_from=resume")
    assert not (folder / "best").exists()
    assert "the best val loss is 1.0000, of step 0" in capsys.readouterr().out


def test_the_best_checkpoint_stays_when_validation_worsens(run, monkeypatch):
    """`best` moves only to a lower loss than any before, those of before a resume included."""
    val = {0: 9.0, 2: 3.0, 4: 4.0, 6: 3.5, 8: 5.0, 10: 2.5, 12: 2.5}
    steps, seen = script(monkeypatch)
    flags = ["--eval_interval=2", "--keep_last=1"]
    found = []
    for evaluated, best in (([0, 2, 4, 6], 2), ([6, 8], 2), ([8, 10, 12], 10)):
        steps[:] = [val[step] for step in evaluated]
        seen[:] = []
        resumed = ["--init_from=resume"] * (evaluated[0] > 0)
        folder = run(*flags, f"--max_iters={evaluated[-1]}", "--lr_decay_iters=40", *resumed)
        assert seen == steps
        assert (folder / "best").read_text() == f"step_{best:08d}\n"
        kept = {f"step_{step:08d}" for step in (best, evaluated[-1])}
        assert {path.name for path in folder.glob("step_*")} == kept
        found += [checkpoint.read_state(folder / name)["best_val_loss"] for name in sorted(kept)]
    assert found == [3.0, 3.0, 3.0, 3.0, 2.5, 2.5]
    steps[:] = [9.0, 3.0, 4.0, 3.5]
    seen[:] = []
    improved = run(*flags, "--max_iters=6", "--always_save_checkpoint=False", out="improved")
    assert sorted(path.name for path in improved.glob("step_*")) == ["step_00000002", "step_00000006"]


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


def test_the_losses_of_both_splits_are_finite(tmp_path):
    keeper = Checkpoints(SimpleNamespace(out_dir=tmp_path), None, Mock(), 0, NEW)
    for of_train, of_val in ((math.nan, 2.0), (2.0, -math.inf)):
        with pytest.raises(SystemExit):
            keeper.is_best(1, of_train, of_val)
    assert (keeper.best_loss, keeper.best_step) == (None, 0)


def weigh(monkeypatch, factor: Callable[[int], float]) -> SimpleNamespace:
    """From now on the loss of each training step, of two micro-batches, is multiplied by factor(step). Returns how many
    micro-batches are `done`."""
    plain = model.Model.loss
    count = SimpleNamespace(done=0)

    def loss(self, x, targets):
        if not self.training:
            return plain(self, x, targets)
        step = count.done // 2
        count.done += 1
        return plain(self, x, targets) * factor(step)

    monkeypatch.setattr(model.Model, "loss", loss)
    return count


def ends_badly(run, *flags, capsys, **where) -> str:
    """The line on stderr with which a run ends, with code 1."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(*flags, **where)
    message = capsys.readouterr().err
    assert stop.value.code == 1
    assert message.startswith("error: ")
    assert len(message.strip().splitlines()) == 1
    return message


@pytest.mark.parametrize("bad, interval, saved", [(5, 4, [4]), (5, 5, [4, 5]), (3, 4, [])])
def test_a_loss_that_is_not_finite_stops(run, monkeypatch, capsys, tmp_path, bad, interval, saved):
    """The last checkpoint may be of the step whose loss is not finite, and then not a good one."""
    weigh(monkeypatch, lambda step: math.inf if step >= bad else 1.0)
    message = ends_badly(run, f"--save_interval={interval}", "--eval_interval=4", out="bad", capsys=capsys)
    steps = sorted((tmp_path / "bad").glob("step_*"))
    assert [state_of(step)["step"] for step in steps] == saved
    assert all(x.isfinite().all() for step in steps for x in weights_in(step).values())
    assert f"step {bad} (samples {8 * bad} to {8 * bad + 7})" in message
    assert "--skip_nonfinite=True" in message
    go_back = f", and go back to the last good checkpoint, {tmp_path / 'bad' / 'step_00000004'}\n"
    assert message.endswith(f"or lower --learning_rate{go_back if bad > 4 else chr(10)}")


def test_a_run_that_leaves_out_fifty_steps_in_a_row_ends(run, monkeypatch, capsys, tmp_path):
    """None of them is saved, as its weights may be at fault. Step 19, between them, is finite."""
    weigh(monkeypatch, lambda step: math.inf if step >= 7 and step != 19 else 1.0)
    flags = ["--skip_nonfinite=True", "--save_interval=3", "--keep_last=1", "--eval_interval=0", "--max_iters=99"]
    message = ends_badly(run, *flags, capsys=capsys)
    [last] = (tmp_path / "out").glob("step_*")
    assert last.name == "step_00000006"
    assert metrics(last.parent)[-1]["step"] == 68
    assert "is not finite at step 20 (samples 160 to 167); nor is it in the 49 steps after it; lower" in message
    assert f", and go back to the last good checkpoint, {last}\n" in message
    assert "skip_nonf" not in message


def test_an_evaluation_that_is_not_finite_ends_the_run(run, monkeypatch, capsys, tmp_path):
    """Its weights are not saved over good ones. --eval_only=True ends likewise."""
    losses, _ = script(monkeypatch)
    losses[:] = [5.0, 3.0, math.nan, math.inf]
    message = ends_badly(run, "--eval_interval=2", "--max_iters=8", "--keep_last=1", capsys=capsys)
    assert "the evaluation at step 4 is not finite: train loss" in message
    assert "val loss nan; lower" in message
    assert f"go back to the last good checkpoint, {tmp_path / 'out' / 'step_00000002'}\n" in message
    assert state_of(tmp_path / "out")["step"] == 2
    message = ends_badly(run, "--init_from=resume", "--eval_only=True", capsys=capsys)
    assert "at step 2 is not finite" in message
    assert "val loss inf; lower --learning_rate\n" in message


@pytest.mark.parametrize("name", ["model.wte.weight", "optim.wte.weight.exp_avg_sq", "optim.wte.weight.average"])
def test_what_is_not_finite_is_not_saved(run, monkeypatch, capsys, tmp_path, name):
    """The weights, the state of the optimizer and the average."""
    plain = train.run_state.tensors_of

    def broken(sharded, optimizer):
        tensors = plain(sharded, optimizer)
        if tensors["optim.wte.weight.step"].tensor == 4:
            tensors[name].tensor[3] = math.nan
        return tensors

    monkeypatch.setattr(train.run_state, "tensors_of", broken)
    flags = ["--save_interval=2", "--eval_interval=0", "--max_iters=6", "--keep_last=1", "--ema_decay=0.9"]
    message = ends_badly(run, *flags, capsys=capsys)
    good = tmp_path / "out" / "step_00000002"
    assert f"at step 4, {name} has numbers that are not finite; lower" in message
    assert f"checkpoint, {good}\n" in message
    assert [*(tmp_path / "out").glob("*step*")] == [good]


def test_a_spike_is_left_out(run, monkeypatch, capsys):
    """As if the rate were 0 in steps 25, 26 and 32; a resume after the first of them goes on digit for digit."""
    rate = optim.learning_rate
    count = weigh(monkeypatch, lambda step: 1000.0 if step in {7, 25, 26, 32} else 1.0)
    flags = ["--beta1=0", "--beta2=0", "--weight_decay=0", "--grad_clip=0", "--save_interval=26"]
    folder = run(*flags, "--spike_factor=10.0")
    said = re.findall(r"step (\d+) is left out: the norm of its gradient, [\d.e+]+, is (\d+)", capsys.readouterr().out)
    assert [int(step) for step, _ in said] == [25, 26, 32]
    assert all(int(times) > 100 for _, times in said)
    lines = [line for line in metrics(folder) if "lr" in line]
    assert [line.get("skipped", 0) for line in lines[24:34]] == [0, 1, 2, 2, 2, 2, 2, 2, 3, 3]
    count.done = 0
    monkeypatch.setattr(optim, "learning_rate", lambda step, cfg: rate(step, cfg) * (step not in {25, 26, 32}))
    assert [x[1] for x in losses(run(*flags, out="still"))] == [x[1] for x in losses(folder)]
    monkeypatch.setattr(optim, "learning_rate", rate)
    shutil.rmtree(folder / "step_00000040")
    for pointer in ("latest", "best"):
        (folder / pointer).write_text("step_00000026\n")
    before = losses(folder)
    count.done = 2 * 26
    run(*flags, "--spike_factor=10.0", "--init_from=resume")
    assert losses(folder) == before


def spikes(watch: Watch, norms: list[float]) -> list[bool]:
    """Which norms of consecutive steps are spikes."""
    return [bool(watch.spike(norm)) for norm in norms]


def test_a_spike_is_above_the_median_of_the_last_hundred_norms():
    """Of which there are twenty at least. A change that lasts becomes usual."""
    cfg = Config(spike_factor=10.0)
    assert spikes(Watch(cfg, ALONE.device, 19 * [1.0]), [11.0]) == [False]
    assert spikes(Watch(cfg, ALONE.device, 20 * [1.0]), 31 * [11.0]) == [True] * 20 + [False] * 11
    zero = Watch(cfg, ALONE.device, 20 * [0.0])
    assert spikes(zero, [11.0]) == [False]
    assert zero.norms[-1] == 11.0
    long = Watch(cfg, ALONE.device, [])
    assert spikes(long, [*range(1, 301)]) == [False] * 300
    assert long.norms == [*range(201, 301)]  # whose median is 250.5
    assert spikes(long, [2504.0]) == [False]
    assert spikes(long, [2516.0]) == [True]  # of 202 to 300 and 2504
    assert not Watch(Config(), ALONE.device, 20 * [1.0]).norms  # while no norms are kept, these grow old


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


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGHUP], ids=["head", "tee", "closed"])
def test_a_pipe_that_nobody_reads_any_more(number, tiny_data, tmp_path, run):
    """`| head -3` ends the run like a SIGTERM. A terminal sends Ctrl-C to `| tee` too, which then reads nothing, and
    SIGHUP when it is closed."""
    flags = [*TINY, f"--dataset={tiny_data}", "--max_iters=100000", "--lr_decay_iters=40", "--log_interval=1"]
    os.mkfifo(tmp_path / "pipe")
    process = begin(["train.py", *flags, f"--out_dir={tmp_path / 'cut'}"], tmp_path, stdout=tmp_path / "pipe")
    with open(tmp_path / "pipe") as lines:
        next(line for line in lines if line.startswith("iter 5:"))
        if number is not None:
            os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "stderr").read_text() == f"{STOPPING}\n"
    step = state_of(tmp_path / "cut")["step"]
    assert step >= 6
    assert steps_of(tmp_path / "cut") == steps_of(run(f"--max_iters={step}", "--lr_decay_iters=40", out="whole"))


def train_with_a_signal_in_an_evaluation(flags: list[str]):
    """train.py, whose second rank alone gets a signal in the second batch of the second evaluation; its tenth fails."""
    loss = "engine.parallel.sharded:ShardedModel.loss"
    first = 21 + 8  # batches of train and val in the first evaluation
    act_in(first + 10, loss, lambda *_: 1 / 0)
    train_until(first + 2, signal.SIGTERM, flags, loss)


def test_a_signal_in_an_evaluation(run, tiny_data, tmp_path):
    """torchrun kills its workers 30 s after it. The resumed run evaluates again, as if nothing had been."""
    flags = ["--max_iters=8", "--eval_interval=6", "--eval_iters=42", IN_FLOAT64]
    common = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'cut'}"]
    said = launch(2, train_with_a_signal_in_an_evaluation, tmp_path, [*common, *flags])
    assert checkpoint.find(tmp_path / "cut").name == "step_00000006"
    assert "stopped by a signal to another rank" in said
    assert "with step 6 saved" in said
    assert len(losses(tmp_path / "cut")) == 1 + 6  # no second evaluation
    run("--init_from=resume", *flags, out="cut")
    assert distance(losses(tmp_path / "cut"), losses(run(*flags, out="whole"))) < 1e-9


def train_with_a_signal_in_the_first_step(flags: list[str]):
    def backward(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    ShardedModel.backward = backward
    train.main(flags)


def test_a_signal_in_the_first_step(tiny_data, tmp_path):
    """Which may compile for minutes: nothing would be lost, so the process ends at once."""
    flags = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}", "--eval_iters=1"]
    assert exit_codes(1, train_with_a_signal_in_the_first_step, tmp_path, flags) == [-signal.SIGTERM]
    assert "Traceback" not in (tmp_path / "rank 0").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_is_answered(rank, capfd, in_this_process):
    """By rank 0, after whose message a second signal has its default action: it ends the process."""
    stop = StopSignal(parallel.Ranks(rank, 2, torch.device("cpu"), torch.float32, False))
    stop.listen()
    signal.raise_signal(signal.SIGINT)
    stop.listen()
    assert stop.name == "SIGINT"
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert capfd.readouterr().err == ("" if rank else f"{STOPPING}\n")


def test_signals_that_come_twice_by_themselves(capfd, monkeypatch, in_this_process):
    """A terminal that is closed sends SIGHUP by the shell and by the kernel, and torchrun turns two of them into SIGHUP
    and SIGTERM; Slurm may send SIGUSR1 again. Only a second SIGTERM or SIGINT ends the process at once."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    stop = StopSignal(ALONE)
    stop.listen()
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        signal.raise_signal(number)
        assert stop.name == "SIGHUP"
        assert stop.agreed()
        assert not exits
    signal.raise_signal(signal.SIGINT)
    assert exits == [128 + signal.SIGINT]
    assert capfd.readouterr().err.startswith(f"{STOPPING}\n")


def test_a_signal_that_is_ignored_stays_ignored(in_this_process):
    """As nohup does with SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopSignal(ALONE)
    stop.listen()
    signal.raise_signal(signal.SIGHUP)
    assert not stop.agreed()


@pytest.mark.parametrize("failing, kept, best", [(4, [2], None), (8, [4, 6], 4)])
def test_a_checkpoint_that_cannot_be_written(run, monkeypatch, capsys, tmp_path, failing, kept, best):
    """The run stops with exit code 2 and one line. What was saved before stays, and resumes."""
    save = checkpoint.save
    out = tmp_path / "full"

    def to_full_disk(out_dir, step, *args):
        with full_disk(20_000) if (out_dir, step) == (str(out), failing) else nullcontext():
            return save(out_dir, step, *args)

    flags = ["--save_interval=2", "--eval_interval=4", "--max_iters=8"]
    whole = losses(run(*flags, out="whole"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", to_full_disk)
        error = refused(lambda flags: run(*flags, out="full"), flags, capsys)
    assert f"step_{failing:08d}: File too large; " in error
    assert error.endswith("start again with --init_from=resume\n")
    assert sorted(path.name for path in out.glob("step_*")) == [f"step_{n:08d}" for n in kept]
    assert checkpoint.find(out).name == f"step_{kept[-1]:08d}"
    if best is not None:
        assert checkpoint.find(out / "best").name == f"step_{best:08d}"
    run(*flags, "--init_from=resume", out="full")
    assert losses(out) == whole


def test_a_schedule_that_moves_is_announced(run, capsys):
    run("--max_iters=6")
    flags = ["--init_from=resume", "--max_iters=7"]
    run(*flags)
    said = capsys.readouterr().out
    assert "max_iters=7 moves the end of the schedule, which was 6; --lr_decay_iters=6 keeps the old schedule" in said
    run(*flags, "--max_iters=8", "--lr_decay_iters=7")
    assert "end of the schedule" not in capsys.readouterr().out
    run("--max_iters=2", out="short")
    assert "warning: warmup_iters=5 is not over at max_iters=2; lower it" in capsys.readouterr().out


def test_two_signals_at_once_end_the_process(monkeypatch, in_this_process):
    """torchrun passes two Ctrl-C on as SIGINT and SIGTERM, and Python calls both handlers after one long operation."""
    exits = []
    both = {signal.SIGINT, signal.SIGTERM}
    monkeypatch.setattr(os, "_exit", exits.append)
    StopSignal(ALONE).listen()
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
    assert exits in ([128 + signal.SIGINT], [128 + signal.SIGTERM])


@pytest.mark.parametrize("call, where, steps", [(6, BACKWARD, {6, 7, 8}), (1, "engine.checkpoint.files:save", {4})])
def test_ranks_agree_on_the_step_at_which_they_stop(call, where, steps, tiny_data, tmp_path):
    """Although one alone gets the signal. After a save there is no further step, which would have to be saved again."""
    flags = [*TINY, f"--dataset={tiny_data}", "--max_iters=100000", f"--out_dir={tmp_path / 'cut'}"]
    said = launch(2, train_until, tmp_path, call, signal.SIGTERM, [*flags, "--eval_interval=4"], where)
    assert "stopped by a signal to another rank" in said
    saved = state_of(tmp_path / "cut")
    assert saved["step"] in steps
    assert saved["ranks"] == 2
    assert {f"rng.{rank}.cpu" for rank in (0, 1)} <= tensors_in(tmp_path / "cut").keys()


def test_a_run_imports_nothing_that_it_does_not_need(tiny_data, tmp_path):
    """With Muon, beside which AdamW runs. Compilers and libraries of tokenizers cost a second or two each."""
    heavy = "tiktoken tokenizers torch._dynamo torch._inductor datasets"
    flags = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path}", "--max_iters=2", "--warmup_iters=1"]
    code = f"import sys, sample, train; train.main({[*flags, '--optimizer=muon']!r})"
    code += f"; print('heavy:', [m for m in {heavy.split()!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy: []\n"), done.stdout


def count_page_faults():
    """Those of the last three of many tensors of 36 MiB, of 9,216 pages each, before and after the call."""
    counts = []
    for call in (lambda: None, device.keep_freed_memory):
        call()
        for n in (20, 3):
            start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(n):
                torch.ones(9 * 2**20)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)
    before, after = counts
    assert before > 10_000 and after < 1000, counts


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns freed tensors to the system")
def test_freed_memory_is_kept(tmp_path):
    launch(1, count_page_faults, tmp_path)


def test_garbage_is_collected_in_fixed_steps(run, monkeypatch):
    """After steps 1, 3 and 6, and never in between; the process has its collector back afterwards."""
    seen = []
    collect = train.gc.collect
    step = train.Run.train_step
    monkeypatch.setattr(train, "COLLECT", 3)
    monkeypatch.setattr(train.gc, "collect", lambda: seen.append("collected") or collect())
    monkeypatch.setattr(train.Run, "train_step", lambda r, lr: seen.append(train.gc.isenabled()) or step(r, lr))
    monkeypatch.setattr(train.gc, "unfreeze", lambda: seen.append("unfrozen"))
    run("--max_iters=7", "--eval_interval=0")
    steps = [True, "collected", False, False, "collected", False, False, False, "collected", False]
    assert seen == [*steps, "unfrozen"]
    assert train.gc.isenabled()


def test_steps_are_traced(run, capsys):
    """Three steps after the first five, with the same losses. A run that is too short says that it has no trace."""
    short = ["--max_iters=10", "--eval_interval=0"]
    folder = run(*short, "--profile_steps=3", "--max_iters=9")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::_fused_adamw_" for event in events) == 3 * 2  # two groups of parameters
    assert f"trace in {folder}/trace.json" in capsys.readouterr().out
    assert losses(folder) == losses(run(*short, "--max_iters=9", out="plain"))
    folder = run("--max_iters=4", "--profile_steps=3", out="short")
    assert "warning: no trace, as" in capsys.readouterr().out
    assert not (folder / "trace.json").exists()


@pytest.mark.parametrize("users, set_to", [({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": ""}, "None")])
def test_segments_are_expandable_unless_the_user_has_set_the_variable(users, set_to, tmp_path):
    """Before torch is imported, in whose place is a file that says so."""
    said = "import os\nprint('set:', os.environ.get('PYTORCH_ALLOC_CONF'), flush=True)\nos._exit(0)\n"
    (tmp_path / "torch.py").write_text(said)
    env = {name: x for name, x in os.environ.items() if "ALLOC_CONF" not in name} | users
    env["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run([sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.stdout == f"set: {set_to}\n", done.stderr
