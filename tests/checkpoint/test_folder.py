"""Two runs in one folder: the second one is refused before it looks, names the first, and changes nothing."""

import errno
import fcntl
import itertools
import os
import resource
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sample
import train
from configurator import parse
from data import lock
from data.files import new_file, write_file
from engine import settle
from engine.checkpoint import files as checkpoint
from engine.checkpoint.saver import Checkpoints
from engine.config import Config
from engine.resume import locked
from tests.checkpoint.test_checkpoint import load, save
from tests.helpers import TINY, losses, refused


def test_a_second_run_is_refused_before_it_looks(run, tiny_data, monkeypatch, capsys):
    """It comes after the first one's look at out_dir and before its first line. Evaluations and plans lock nothing."""
    join = settle.join

    def others_come(cfg):
        monkeypatch.setattr(settle, "join", join)
        flags = [f"--dataset={tiny_data}", f"--out_dir={cfg.out_dir}", "--seed=2"]
        for how in (["--init_from=resume"], TINY):
            belongs = f"out_dir={cfg.out_dir} belongs to process {os.getpid()} on "
            refused(train.main, [*flags, *how], capsys, [belongs])
        for more in ("--eval_only=True", "--plan=True"):
            refused(train.main, [*flags, "--init_from=resume", more], capsys, ["no checkpoint in"])
        assert os.listdir(cfg.out_dir) == [".lock"]
        return join(cfg)

    monkeypatch.setattr(settle, "join", others_come)
    folder = run("--max_iters=6", out="one")
    assert settle.join is join, "no other run has come"
    assert losses(folder) == losses(run("--max_iters=6", out="alone"))


def test_a_refused_start_leaves_nothing(run, tiny_data, tmp_path, capsys):
    """Neither its lock nor a folder that it has made; what was there stays."""
    late = ["--max_iters=2", "--warmup_iters=1", "--vocab_size=9"]  # which only the data refuse
    (tmp_path / "old" / "empty").mkdir(parents=True)
    (tmp_path / "old" / "mine").write_text("mine")
    base = [*TINY, f"--dataset={tiny_data}"]
    for out in ("new/deep/run", "old", "old/empty", "old/empty/new"):
        for flags in (late, ["--init_from=resume"], [f"--init_from=hf:{tiny_data}"]):
            refused(train.main, [*base, *flags, f"--out_dir={tmp_path / out}"], capsys)
        assert not (tmp_path / "new").exists()
        assert sorted(path.name for path in (tmp_path / "old").rglob("*")) == ["empty", "mine"]
    folder = run("--max_iters=2", "--warmup_iters=1")
    refused(lambda flags: run(*flags), ["--max_iters=2"], capsys, ["already holds a run"])
    assert (folder / ".lock").exists()


def while_another_waits(seconds: float, action, monkeypatch):
    """action() takes place when a run has waited for a lock so long, by a clock that stands still but for that."""
    now = 0.0

    def sleep(pause: float):
        nonlocal now
        now += pause
        if now - pause < seconds <= now:
            action()

    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))


def test_a_lock_that_its_holder_removes_is_nobodys(tmp_path, monkeypatch):
    """A second run that waits for it meanwhile is refused, so that no third one runs beside it."""
    out = tmp_path / "out"
    holder = locked(str(out))
    holder.__enter__()

    def fail():
        error = ValueError("refused")
        holder.__exit__(ValueError, error, None)

    while_another_waits(0.1, fail, monkeypatch)
    with pytest.raises(ValueError, match="belongs to process"), locked(str(out)):
        pass
    assert not out.exists()


def taken_away_before_a_save(folder: Path, monkeypatch, takes):
    """The run in the folder begins its second save behind takes(folder)."""
    save = train.Run.save
    saves = itertools.count(1)

    def taken(run):
        if next(saves) == 2:
            takes(folder)
        save(run)

    monkeypatch.setattr(train.Run, "save", taken)


@pytest.mark.parametrize("takes", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("moved"))])
def test_a_folder_that_is_taken_away_from_its_run(takes, run, tmp_path, tiny_data, monkeypatch, capsys):
    """It is made anew for the next save, in the old place and with a lock, and a line says so."""
    flags = ["--max_iters=6", "--save_interval=2", "--eval_interval=0"]
    taken_away_before_a_save(tmp_path / "out", monkeypatch, takes)
    outcome = Checkpoints.outcome
    said = []

    def others_come(*args):
        said.append(capsys.readouterr().err)
        argv = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}"]
        refused(train.main, argv, capsys, [f"belongs to process {os.getpid()} on "])
        return outcome(*args)

    monkeypatch.setattr(Checkpoints, "outcome", others_come)
    folder = run(*flags)
    assert said == [f"warning: out_dir={folder} was moved or deleted; it is made anew, with checkpoints alone\n"]
    assert {path.name for path in folder.glob("step_*")} == {"step_00000004", "step_00000006"}


def test_a_folder_that_another_run_has_taken(run, tmp_path, monkeypatch, capsys):
    """Its lock is respected: the first run, whose folder was moved, ends with a line."""
    others = []

    def takes(folder: Path):
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        others.append(open(folder / ".lock", "w"))
        fcntl.flock(others[0], fcntl.LOCK_EX)

    taken_away_before_a_save(tmp_path / "out", monkeypatch, takes)
    said = refused(lambda flags: run(*flags), ["--max_iters=6", "--save_interval=2"], capsys)
    others[0].close()
    assert f"out_dir={tmp_path / 'out'} belongs to process" in said
    assert os.listdir(tmp_path / "out") == [".lock"]
    assert (tmp_path / "moved" / "step_00000002").is_dir()


def test_names_that_are_no_folders(tmp_path, tiny_data, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag in ("--out_dir=s3://b/run", "--dataset=gs://b/x", "--init_from=checkpoint:s3://b/run", "--out_dir=a\0b"):
        refused(train.main, [*TINY, f"--dataset={tiny_data}", flag], capsys)
    for where in ("a\0b", "~nobody_of_this_name/x", "/dev/null", ""):
        refused(sample.main, [f"--out_dir={where}"], capsys)
    assert not os.listdir(tmp_path)
    file = tmp_path / "file"
    file.write_text("mine")
    refused(train.main, [*TINY, f"--dataset={tiny_data}", f"--out_dir={file}"], capsys, [f"{file}: "])
    assert file.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOSYS, errno.ENOTSUP])
def test_network_file_systems(number, tmp_path, monkeypatch, capsys):
    """They lock regular files that are open for writing, or none; then one line says so, and nobody is refused."""

    def flock(file, how):
        assert stat.S_ISREG(os.fstat(file).st_mode)
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_RDWR
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(str(tmp_path)), suppress(RuntimeError):
        raise RuntimeError
    warning = f"warning: {tmp_path} cannot be locked ({os.strerror(number)}); let no other process write there\n"
    assert capsys.readouterr().err == warning


def test_a_restarted_worker_waits_for_the_lost_one(tmp_path, monkeypatch):
    dying = locked(str(tmp_path))
    dying.__enter__()
    while_another_waits(9.0, lambda: dying.__exit__(None, None, None), monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with pytest.raises(ValueError, match=f"belongs to process {os.getpid()} on "), locked(str(tmp_path)):
        pass
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with locked(str(tmp_path)):
        assert (tmp_path / ".lock").exists()


def test_what_is_written_follows_no_link_and_replaces_no_device(tmp_path):
    """A stranger who may write there has made links of every name."""
    victim = tmp_path / "victim"
    victim.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (victim / "file").write_text("mine")
    for name in (".lock", ".tmp-latest"):
        (out / name).symlink_to(victim / "file")
    (out / ".tmp-step_00000001").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), locked(str(out)):
        pass
    save(out, 1, {"w": torch.ones(2)})
    assert (out / "step_00000001" / "state.json").is_file()
    (out / ".tmp-new").symlink_to(victim / "file")
    write_file(out / "new", b"new")
    assert (out / "new").read_text() == "new"
    for path in (victim, Path("/dev/null")):
        with pytest.raises(OSError, match=f"Not a regular file: '{path}'"), new_file(path):
            raise RuntimeError("the work has begun")
    assert [path.read_text() for path in victim.iterdir()] == ["mine"]


def test_what_a_killed_process_has_left_goes_with_the_next_file(tmp_path):
    killed = tmp_path / "killed"
    with new_file(tmp_path / "new"):
        shutil.copytree(tmp_path, killed)
    assert os.listdir(killed) == [".tmp-new"]
    write_file(killed / "new", b"mine")
    assert os.listdir(killed) == ["new"]
    assert (killed / "new").read_text() == "mine"


def test_what_a_killed_start_has_left_goes_with_the_first_save(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".shared_0123456789abcdef").touch()
    assert not list(run("--max_iters=1", "--eval_iters=1").glob(".shared*"))


@pytest.mark.parametrize("name", ["latest", "state.json", "index.json", "config.py", "metrics.jsonl"])
def test_files_of_forty_gigabytes_are_refused_or_replaced(name, trained, tiny_data, tmp_path, capsys):
    out = shutil.copytree(trained, tmp_path / "out")
    folder = checkpoint.find(out) if name in ("state.json", "index.json") else out
    os.truncate(folder / name, 40 * 10**9)
    flags = [f"--dataset={tiny_data}", f"--out_dir={out}", "--init_from=resume", "--max_iters=3", "--device=cpu"]
    if name == "config.py":  # it is kept as it is, beside the new one
        train.main(flags)
        assert (out / "config_00000002.py").stat().st_size == 40 * 10**9
    else:
        assert "40,000,000,000 bytes" in refused(train.main, flags, capsys)


def test_earlier_flags_stay(run):
    """config.py is of the run as it goes on; what led to the step of a resume with other flags is beside it."""
    flags = ["--max_iters=6", "--lr_decay_iters=40", "--learning_rate=5e-3", "--init_from=resume"]
    folder = run("--max_iters=4", "--lr_decay_iters=40")
    first = (folder / "config.py").read_text()
    for _ in range(2):
        run(*flags)
        assert (folder / "config_00000004.py").read_text() == first
        assert {path.name for path in folder.glob("config*")} == {"config.py", "config_00000004.py"}
    rates = [parse(Config, [str(folder / name)]).learning_rate for name in ("config.py", "config_00000004.py")]
    assert rates == [5e-3, 1e-2]
    assert parse(Config, [str(folder / "config.py")]).init_from == "scratch"  # with another out_dir, it is a new run
    assert checkpoint.find(folder).name == "step_00000006"


def test_a_checkpoint_needs_no_more_memory_than_it_has(tmp_path):
    """The address space may grow by 1 GiB, which is less than the most that an index may have."""
    process = os.fork()
    if process == 0:
        pages, *_ = Path("/proc/self/statm").read_text().split()
        size = resource.getpagesize() * int(pages)
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, -1))
        path = save(tmp_path, 1, {"w": torch.ones(2)})
        load(path, {"w": torch.zeros(2)})
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
