"""Which checkpoints a training saves, which one is the best, and what is not finite and so not saved."""

import math
import shutil
from contextlib import nullcontext

import pytest

import train
from engine.checkpoint import files as checkpoint
from engine.evaluation import Evaluation
from tests.checkpoint.test_checkpoint import full_disk
from tests.helpers import losses, metrics, refused, state_of, weights_in
from tests.training.test_step import weigh


def test_save_policy(run):
    """With always_save_checkpoint=False, only what improves is saved at an evaluation."""
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
