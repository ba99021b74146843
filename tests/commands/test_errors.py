"""Every wrong flag, file or checkpoint: exit code 2 and one line that names the thing and the remedy, no traceback."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY, refused
from ranks import command

import sample
import train
from data import errors
from data.tokenizer import CharTokenizer
from data.writer import ShardWriter
from engine.checkpoint.run import locked


def test_ctrl_c_ends_a_command_without_a_traceback():
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        errors.command(main)
    assert end.value.code == 128 + signal.SIGINT


TRAIN_FLAGS = [  # flags, and what the line must name; those of a model alone are in tests/model/test_model.py
    (["--max_iters=10**30"], ["max_iters=1000000000000", "must be <2147483648"]),
    (["--seed=2**64"], ["seed=18446744073709551616", "must be <2147483648"]),
    (["--pos=rope", "--rope_scaling=:::"], ["rope_scaling=':::'", "linear:F"]),
    (
        ["--block=superblock", "--layer=c.own_slots", "--n_slot=3", "--mlp_ratio=2"],
        ["mlp_ratio=2.0 (command line)", "and n_slot=0", "n_slot=3", "leave it out"],
    ),
    (["--block=superblock", "--layer=c,m,p"], ["layer='c,m,p'", "objective=seq2seq", "leave m out"]),
    (["--objective=seq2seq", "--layer=c,p"], ["layer='c,p' (command line)", "block=superblock", "block=standard"]),
    (["--dtype=float16"], ["dtype=float16", "float32"]),
    (["--backend=nccl"], ["backend=nccl", "gloo"]),
    (["--dataset=pycodee"], ["pycodee", "pycode"]),
    (["--block_size=100000"], ["block_size=100000"]),
    (["--vocab_size=100"], ["vocab_size=100", "257"]),
    (["--objective=seq2seq", "--block_size=1"], ["block_size=1 ", "needs 2"]),
    (["--objective=masked", "--vocab_size=257"], ["vocab_size=257", "258 ids", "258 or more"]),
    (["--init_from=gpt3"], ["init_from", "gpt3"]),
    (["--init_from=resume"], ["no directory", "/new", "out_dir"]),
    (["--init_from=nanogpt:/no/ckpt.pt"], ["/no/ckpt.pt"]),
    (["--simplified_beta_ff=1.7e308", "--block=simplified"], ["simplified_beta_ff=1.7e+308", "must be <2147483648"]),
    (["--gradient_accumulation_steps=2**31-1"], ["gradient_accumulation_steps=2147483647", "must be <1048576"]),
    (["--batch_ramp=2147483647:9"], ["batch_ramp='2147483647:9'", "8:1000"]),
    (["--out_dir=~nobody_is_called_so/x"], ["out_dir='~nobody_is_called_so/x'", "must be: folder"]),
    (["--dataset=" + "x" * 5000], ["xxx ... xxx"]),
    (["--device=cuda:1000"], ["device='cuda:1000'", "cuda:N"]),
]


@pytest.mark.parametrize("flags,fragments", TRAIN_FLAGS, ids=lambda x: ascii(" ".join(x))[:60])
def test_wrong_flags(flags, fragments, tiny_data, tmp_path, capsys, monkeypatch):
    """The line has what is wrong and a remedy, it is short, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    line = refused(train.main, [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'new'}", *flags], capsys)
    assert [fragment for fragment in fragments if fragment not in line] == []
    assert any(remedy in line for remedy in ("; ", ": set ", " must be ", " must be: ", " such as ")), line
    assert len(line) < 1100 and not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("main", [train.main, sample.main])
def test_a_gpu_that_is_not_there(main, tiny_data, trained, tmp_path, capsys):
    flags = (
        [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path}"] if main is train.main else [f"--out_dir={trained}"]
    )
    assert "--device=auto" in refused(main, [*flags, "--device=cuda"], capsys)


def test_objectives_that_the_data_cannot_serve(tiny_data, tmp_path, capsys):
    """Documents without end-of-text; ids beyond a vocabulary that nothing tells."""
    shutil.copytree(tiny_data, tmp_path / "data")
    flags = [*TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path / 'new'}"]
    (tmp_path / "data" / "meta.json").write_text('{"vocab_size": 257}')
    line = refused(train.main, [*flags, "--doc_mask=True"], capsys)
    assert "doc_mask=True" in line and "end-of-text" in line and "byte" in line
    (tmp_path / "data" / "meta.json").unlink()
    for objective in ("masked", "seq2seq"):
        line = refused(train.main, [*flags, f"--objective={objective}", "--vocab_size=300"], capsys)
        assert f"objective={objective}" in line and str(tmp_path / "data") in line and '{"vocab_size": N}' in line
    assert not (tmp_path / "new").exists()


def cut(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class Bomb:
    def __reduce__(self):
        return (exec, ("import pathlib; pathlib.Path('BOOM').touch()",))


def endless(folder: Path, step: Path):
    (step / "state.json").unlink()
    (step / "state.json").symlink_to("/dev/zero")


DAMAGES = {
    "endless_state": endless,
    "no_pointer_target": lambda d, step: shutil.rmtree(step),
    "malicious_index": lambda d, step: (step / "index.json").write_bytes(pickle.dumps(Bomb())),
    "cut_tensors": lambda d, step: cut(next(step.glob("*.safetensors"))),
}


@pytest.mark.parametrize("main", [train.main, sample.main])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints(damage, main, trained, tiny_data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "out")
    step = tmp_path / "out" / "step_00000002"
    DAMAGES[damage](tmp_path / "out", step)
    resume = [f"--dataset={tiny_data}", "--init_from=resume", "--max_iters=4", "--lr_decay_iters=4"]
    line = refused(main, [f"--out_dir={tmp_path / 'out'}", *(resume if main is train.main else [])], capsys)
    assert str(tmp_path / "out") in line
    assert not (tmp_path / "BOOM").exists()


def test_a_folder_that_cannot_be_written(trained, tiny_data, tmp_path, capsys):
    """A file in its place, one checkpoint instead of the run's folder, a folder where another process trains."""
    (tmp_path / "file").write_text("mine")
    flags = [*TINY, f"--dataset={tiny_data}"]
    assert f"{tmp_path / 'file'}: " in refused(train.main, [*flags, f"--out_dir={tmp_path / 'file'}"], capsys)
    assert (tmp_path / "file").read_text() == "mine"
    inside = ["--init_from=resume", f"--out_dir={trained / 'step_00000002'}"]
    assert "is one checkpoint" in refused(train.main, [*flags, *inside], capsys)
    with locked(str(tmp_path)):
        assert f"process {os.getpid()} on " in refused(train.main, [*flags, f"--out_dir={tmp_path}"], capsys)
        assert (tmp_path / ".lock").exists()  # it is not the refused run's to remove
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_that_were_changed_after_the_preparation(split, tiny_data, tmp_path, capsys, monkeypatch):
    """Found when a batch reads them, in training and in evaluation."""
    shutil.copytree(tiny_data, tmp_path / "data")
    for shard in (tmp_path / "data").glob(f"{split}_*.bin"):
        shard.write_bytes(shard.read_bytes()[:1024] + b"\xff\x7f" * ((shard.stat().st_size - 1024) // 2))
    flags = [*TINY, f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}"]
    assert f"data {split} has token id 32767" in refused(train.main, flags, capsys)


RESUMES = [
    (["--pos=rope"], ["pos=rope", "learned"]),
    (["--init_from=scratch"], ["already holds a run", "resume"]),
    (["--init_from=scratch", "--dataset=pycodee"], ["pycodee"]),  # which is to be mended first
    (["--objective=masked"], ["objective=masked", "no room", "leave objective", "out"]),
    (["--doc_mask=True"], ["doc_mask=True", "False"]),
]


@pytest.mark.parametrize("flags,fragments", RESUMES, ids=lambda x: " ".join(x))
def test_a_resume_that_changes_the_model(flags, fragments, trained, tiny_data, capsys):
    base = [f"--dataset={tiny_data}", f"--out_dir={trained}", "--init_from=resume", "--warmup_iters=1", "--device=cpu"]
    line = refused(train.main, [*base, *flags], capsys)
    for fragment in fragments:
        assert fragment in line


def test_a_resume_with_another_tokenizer(trained, tmp_path, capsys):
    text = "".join(map(chr, range(257))) * 2  # as many tokens as the checkpoint's
    with ShardWriter(tmp_path / "chars", CharTokenizer(text)) as out:
        for split in ("train", "val"):
            out.add(split, CharTokenizer(text).encode(text))
    flags = [f"--dataset={tmp_path / 'chars'}", f"--out_dir={trained}", "--init_from=resume", "--device=cpu"]
    assert "another tokenizer" in refused(train.main, flags, capsys)


@pytest.mark.parametrize("script", ["train.py", "sample.py", "evaluate.py"])
def test_a_process_says_one_line(script, tmp_path):
    code, err = command([script, "--nope=1"], tmp_path, stdout=tmp_path / "stdout")
    assert code == 2 and (tmp_path / "stdout").read_text() == ""
    assert err.startswith("error: nope=1") and len(err.splitlines()) == 1


def test_torchrun_says_it_once(tmp_path):
    """Every rank finds the same mistake; the first one names it, and torchrun ends the others meanwhile."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for _ in range(3):  # again if a busy machine ends the second process while it still imports
        done = subprocess.run([*torchrun, "train.py", "--nope=1"], cwd=ROOT, capture_output=True, text=True)
        if "exitcode  : -15" not in done.stderr:
            break
    told = "error: nope=1 (command line): no such flag"
    assert done.returncode == 1 and done.stderr.count(f"\n{told}") + done.stderr.startswith(told) == 1
    assert done.stderr.splitlines()[-2].strip().startswith(f"traceback : {told}"), done.stderr  # where one looks
    assert f"time      : {time.strftime('%Y')}" in done.stderr
    assert "<NO_OTHER_FAILURES>" in done.stderr, done.stderr
    assert 'train.py", line' not in done.stderr, done.stderr  # all but the first line are torchrun's own


def test_a_rank_that_is_wrong_alone_speaks_too(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert "nope=1" in refused(train.main, ["--nope=1"], capsys) and waited == [20]
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_streams_that_are_closed_or_full(trained, tmp_path):
    """A closed one is /dev/null; what a full disk cannot hold is one line."""
    sample = ["sample.py", f"--out_dir={trained}", "--max_new_tokens=5", "--device=cpu"]
    closed = {"train.py --nope=1 2>&-": (2, 0), f"{' '.join(sample)} >&-": (0, 1)}  # a line about the model
    for line, expected in closed.items():
        shell = ["bash", "-c", f"{sys.executable} {line}"]
        done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, len(done.stderr.splitlines())) == expected, f"{line}: {done.stderr}"
    full = [sample, [*sample, "--help"], ["train.py", "--help"]]  # whose help is longer than the buffer
    unbuffered = [["evaluate.py"], ["data/text/prepare.py"], ["-m", "engine.interchange"]]
    for program in full + [[*name, "--help"] for name in unbuffered]:
        code, err = command(program, tmp_path, stdout="/dev/full", unbuffered=program not in full)
        assert (code, len(err.splitlines())) == (2, 1), f"{program}: {err}"
        assert err.startswith("error: stdout: No space left on device; check"), err


@pytest.mark.parametrize(
    "line",
    [
        f"train.py {' '.join(TINY)} --dataset={{data}} --out_dir={{out}}",
        "data/shakespeare_char/prepare.py --input=README.md --out={out}",
        "data/text/prepare.py --input=README.md --tokenizer=byte --out={out}",
        "-m engine.interchange export {run} {out}",
        "-m tools.plot {run} --out={out}.png",
    ],
    ids=lambda line: line.removeprefix("-m ").split()[0],
)
def test_a_file_that_a_small_disk_cannot_hold_is_named(line, trained, tiny_data, tmp_path):
    """No file grows beyond 2 KB, and the system's error of a write names none."""
    line = line.format(data=tiny_data, run=trained, out=tmp_path / "out")
    code, err = command(line.split(), tmp_path, largest=2048)
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and str(tmp_path) in last, err
    assert "File too large" in last, last


TOOLS = [f"tools.{path.stem}" for path in sorted(ROOT.glob("tools/*.py")) if "__main__" in path.read_text()]
PROGRAMS = [path for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("data/*/*.py")]) if "__main__" in path.read_text()]
PROGRAMS = [[str(path.relative_to(ROOT))] for path in PROGRAMS]
PROGRAMS += [["-m", name] for name in ("engine.interchange", *TOOLS)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program[-1])
def test_ctrl_c_during_the_imports(program, tmp_path):
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT) and done.stderr == "", done.stderr


@pytest.mark.parametrize("program", [each for each in PROGRAMS if "data" not in each[0]], ids=lambda each: each[-1])
def test_threads_do_not_spin_long(program, tmp_path):
    """torch's OpenMP reads the variables when it is loaded, and what the user has set stays."""
    (tmp_path / "torch.py").write_text("import os\nprint(os.environ.get('GOMP_SPINCOUNT'), flush=True)\nos._exit(0)\n")
    for chosen, expected in (({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")):
        env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        env |= chosen | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True, env=env)
        assert done.stdout == f"{expected}\n", done.stderr


ENVIRONMENTS = [
    ({"RANK": "abc"}, ["RANK=abc, LOCAL_RANK=0, WORLD_SIZE=1", "start with torchrun"]),
    ({"RANK": "5", "WORLD_SIZE": "2"}, ["RANK=5, LOCAL_RANK=0, WORLD_SIZE=2", "is not the place of a rank"]),
    ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    ({"LOCAL_RANK": "99"}, ["LOCAL_RANK=99", "LOCAL_WORLD_SIZE=1"]),
    ({"WORLD_SIZE": "2"}, ["rank 0 cannot join", "(MASTER_ADDR is not set)", "start all of them with torchrun"]),
    (
        {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "abc"},
        ["rank 0 cannot join the 2 ranks at localhost:abc", "start all of them with torchrun"],
    ),
]


@pytest.mark.parametrize("names,fragments", ENVIRONMENTS, ids=lambda x: ascii(str(x))[:60])
def test_a_strange_environment(names, fragments, tiny_data, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # of a rank that is not the first, before it speaks
    handler = signal.getsignal(signal.SIGTERM)
    flags = [f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'new'}"]
    try:
        line = refused(train.main, [*TINY, "--collective_timeout=2", *flags], capsys)
    finally:
        signal.signal(signal.SIGTERM, handler)
    for fragment in [*fragments, "; "]:
        assert fragment in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["a FIFO", "endless", "a folder"])
def test_metrics_that_are_no_file(kind, trained, tiny_data, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "out")
    path = tmp_path / "out" / "metrics.jsonl"
    path.unlink()
    {"a FIFO": os.mkfifo, "endless": lambda p: p.symlink_to("/dev/zero"), "a folder": os.mkdir}[kind](path)
    flags = [f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}", "--init_from=resume", "--max_iters=3"]
    assert f"{path}: " in refused(train.main, flags, capsys)
