"""Every wrong flag, file or checkpoint: exit code 2 and one line that names the thing and the remedy, no traceback."""

import io
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import evaluate
import sample
import train
from data import errors
from engine.interchange import __main__ as interchange
from tests.helpers import ROOT, TINY, Bomb, refused
from tests.ranks import command, exit_codes, torchrun
from tests.test_imports import COMMANDS


@pytest.fixture
def told(tiny_data, tmp_path, capsys):
    """told(flags, *fragments) is the line with which train.py refuses them."""
    base = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'new'}"]
    return lambda flags, *fragments: refused(train.main, [*base, *flags.split()], capsys, fragments)


TRAIN_FLAGS = [  # flags, and what the line must name; those of a model alone are in tests/model/test_model.py
    ("--block=c,m,p", ["block='c,m,p'", "objective=seq2seq", "leave m out"]),
    ("--dtype=float16", ["dtype=float16", "float32"]),
    ("--backend=nccl", ["backend=nccl", "gloo"]),
    ("--block_size=100000", ["block_size=100000"]),
    ("--vocab_size=100", ["vocab_size=100", "257"]),
    ("--objective=seq2seq --block_size=1", ["block_size=1 ", "needs 2"]),
    ("--objective=seq2seq --corrupt_ratio=0", ["corrupt_ratio=0.0 "]),
    ("--objective=masked --vocab_size=257", ["vocab_size=257", "258 ids", "258 or more"]),
    ("--conv=4 --conv_lr=0.01 --learning_rate=0 --min_lr=0", ["learning_rate=0.0", "conv_lr"]),
    ("--init_from=gpt3", ["init_from", "gpt3"]),
    ("--init_from=resume", ["no directory", "/new", "out_dir"]),
    ("--init_from=nanogpt:/no/ckpt.pt", ["/no/ckpt.pt"]),
    ("--gradient_accumulation_steps=2**31-1", ["gradient_accumulation_steps=2147483647", "must be <1048576"]),
    ("--plan=True --device=auto --world_size=4 --pp=3", ["there are 4; ", "plan for --world_size=6, or set them to 1"]),
    ("--plan=True --device=auto --world_size=2 --parallel=fsdp --dtype=float16", ["dtype=float16 ", " parallel=fsdp"]),
    ("--out_dir=~nobody_is_called_so/x", ["out_dir='~nobody_is_called_so/x'", "must be: folder"]),
    ("--dataset=" + "x" * 5000, ["xxx ... xxx"]),
    ("--device=cuda:1000", ["device='cuda:1000'", "cuda:N"]),
    ("--init_from=resume --out_dir=TRAINED --pos=rope", ["pos=rope", "learned"]),
    ("--init_from=resume --out_dir=TRAINED --objective=masked", ["objective=masked", "no room", "objective, "]),
    ("--init_from=resume --out_dir=TRAINED/step_00000002", ["is one checkpoint"]),
]
TRAIN_FLAGS += [("--device=cuda", ["--device=auto"])] * (not torch.cuda.is_available())


@pytest.mark.parametrize("flags,fragments", TRAIN_FLAGS, ids=lambda x: str(x)[:60])
def test_wrong_flags(flags, fragments, told, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = told(flags.replace("TRAINED", str(trained)), *fragments)
    assert any(remedy in line for remedy in ("; ", ": set ", " must be ", " must be: ", " such as ")), line
    assert len(line) < 1100
    assert not any(tmp_path.iterdir())


def test_objectives_that_the_data_cannot_serve(told, tiny_data, tmp_path):
    """Documents without end-of-text; ids beyond a vocabulary that nothing tells."""
    data = shutil.copytree(tiny_data, tmp_path / "data")
    (data / "meta.json").write_text('{"vocab_size": 257}')
    told(f"--dataset={data} --doc_mask=True", "doc_mask=True", "end-of-text", "byte")
    (data / "meta.json").unlink()
    for flag in ("objective=masked", "objective=seq2seq"):
        told(f"--dataset={data} --{flag} --vocab_size=300", flag, str(data), '{"vocab_size": N}')
    assert not (tmp_path / "new").exists()


def test_a_folder_of_another_kind_is_no_out_dir(told, run, tmp_path):
    """But that of a run which has ended before its first checkpoint is."""
    for name in ("meta.json", "tokenizer.json", "config.json", "config.py", "compare.json"):
        file = tmp_path / f"with_{name}" / name
        file.parent.mkdir()
        file.write_text("mine")
        told(f"--out_dir={file.parent}", f"{file} was not written by this command; ", "choose another --out_dir")
        assert file.read_text() == "mine"
        assert {*os.listdir(file.parent)} <= {".lock", name}
    (tmp_path / "new").mkdir()
    for name in ("metrics.jsonl", "config.py"):
        (tmp_path / "new" / name).touch()
    assert (run("--max_iters=1", "--warmup_iters=0", out="new") / "latest").exists()


def replaced(make: Callable, path: Path):
    path.unlink()
    make(path)


DAMAGES = [  # a file of the run, and what happens to it
    ("step_00000002", shutil.rmtree),
    ("step_00000002/state.json", partial(replaced, partial(os.symlink, "/dev/zero"))),
    ("step_00000002/index.json", lambda path: path.write_bytes(pickle.dumps(Bomb()))),
    ("step_00000002/rank_0.safetensors", lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])),
    ("metrics.jsonl", partial(replaced, os.mkfifo)),
]


@pytest.mark.parametrize("name,damage", DAMAGES)
def test_a_damaged_run(name, damage, trained, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = shutil.copytree(trained, tmp_path / "out")
    damage(out / name)
    told(f"--out_dir={out} --init_from=resume --max_iters=4 --lr_decay_iters=4", str(out))
    assert not (tmp_path / "BOOM").exists()


@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_that_were_changed_after_the_preparation(split, told, tiny_data, tmp_path):
    data = shutil.copytree(tiny_data, tmp_path / "data")
    for shard in data.glob(f"{split}_*.bin"):
        shard.write_bytes(shard.read_bytes()[:1024] + b"\xff\x7f" * ((shard.stat().st_size - 1024) // 2))
    told(f"--dataset={data}", f"data {split} has token id 32767")


def test_messages_of_success_escape_names(run, tiny_data, tmp_path, capsys):
    """As errors do. What a terminal takes as a command, or a line of its own, is shown."""
    name = "a\x1b[31m\nb"
    data = shutil.copytree(tiny_data, tmp_path / f"{name} data")
    out = run("--max_iters=1", "--warmup_iters=0", "--eval_interval=0", "--eval_iters=1", f"--dataset={data}", out=name)
    model = [f"--out_dir={out}", "--device=cpu"]
    said = capsys.readouterr().out
    for main, argv in (
        (evaluate.main, model),
        (sample.main, [*model, "--max_new_tokens=1"]),
        (interchange.main, ["export", str(out), f"{out}/exported"]),
    ):
        main(argv)
        found = capsys.readouterr()
        told = found.err if main is sample.main else found.out
        assert r"a\x1b[31m\nb" in told, told
        said += told
    assert "\x1b" not in said


def train_with_a_wrong_flag():
    sys.argv[1:] = ["--nope=1"]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def test_torchrun_says_it_once(tmp_path):
    """Every rank finds the same mistake; the first one names it, and torchrun ends the others meanwhile."""
    log = tmp_path / "rank 0"
    for _ in range(3):  # again if a busy machine ends the second process before it has found the mistake
        log.unlink(missing_ok=True)
        assert exit_codes(1, torchrun, tmp_path, train_with_a_wrong_flag) == [1]
        said = log.read_text()
        if "exitcode  : -15" not in said:
            break
    told = "error: nope=1 (command line): no such flag"
    assert f"\n{said}".count(f"\n{told}") == 1, said
    assert said.splitlines()[-2].strip().startswith(f"traceback : {told}"), said  # where one looks
    assert f"time      : {time.strftime('%Y')}" in said
    assert "<NO_OTHER_FAILURES>" in said, said
    assert 'train.py", line' not in said, said  # all but the first line are torchrun's own


def ended(main, *argv: str) -> int:
    with pytest.raises(SystemExit) as end:
        errors.command(partial(main, [*argv]))
    return end.value.code


def test_the_exit_code_of_a_command(trained, monkeypatch, capsys):
    """Ctrl-C ends it without a traceback. A stream that is None, as the shell has closed it, becomes /dev/null."""

    def interrupted(argv):
        raise KeyboardInterrupt

    assert ended(interrupted) == 128 + signal.SIGINT
    monkeypatch.setattr(sys, "stdout", None)
    assert ended(sample.main, f"--out_dir={trained}", "--max_new_tokens=5", "--device=cpu") == 0
    monkeypatch.setattr(sys, "stderr", None)
    assert ended(train.main, "--nope=1") == 2
    monkeypatch.undo()
    assert len(capsys.readouterr().err.splitlines()) == 1  # about the model


def test_what_a_terminal_cannot_show_is_escaped(tmp_path, monkeypatch):
    with open(tmp_path / "out", "wb") as file:
        terminal = io.TextIOWrapper(file, "ascii")
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "__stdout__", terminal)
        assert ended(lambda argv: print(*argv), "naïve", "猫", "\udcff") == 0
    assert (tmp_path / "out").read_bytes() == b"na\\xefve \\u732b \\udcff\n"


def test_a_process_says_one_line(trained, tmp_path):
    """About a wrong flag, or about a full disk behind stdout, with Python's buffer and without."""
    sample = ["sample.py", f"--out_dir={trained}", "--max_new_tokens=5", "--device=cpu"]
    full = "stdout: No space left on device; check"
    for program, stdout, unbuffered, said in (
        (["train.py", "--nope=1"], tmp_path / "stdout", False, "nope=1 (command line): no such flag"),
        (["train.py", "--help"], "/dev/full", False, full),  # which is longer than the buffer
        (["evaluate.py", "--help"], "/dev/full", True, full),
        (sample, "/dev/full", False, full),
    ):
        code, err = command(program, tmp_path, stdout=stdout, unbuffered=unbuffered)
        assert (code, len(err.splitlines())) == (2, 1) and err.startswith(f"error: {said}"), f"{program}: {err}"
    assert (tmp_path / "stdout").read_text() == ""


def test_a_file_that_a_small_disk_cannot_hold_is_named(trained, tmp_path):
    """No file grows beyond 2 KB, and the system's error of a write names none."""
    out = tmp_path / "out"
    text = ["data/text/prepare.py", "--input=README.md", "--tokenizer=byte", f"--out={out}"]
    for program in (text, ["-m", "tools.plot", str(trained), f"--out={out}.png"]):
        code, err = command(program, tmp_path, largest=2048)
        last = err.splitlines()[-1]
        assert code == 2 and last.startswith("error: ") and str(out) in last, err
        assert "File too large" in last, last


@pytest.mark.parametrize("program", sorted(name for name in COMMANDS if not name.startswith("data.")))
def test_during_the_imports(program, tmp_path):
    """Ctrl-C ends a program that computes without a traceback. Threads spin as long as the user says."""
    said = "import os, signal\nprint(os.environ['GOMP_SPINCOUNT'], os.environ['TORCH_CPP_LOG_LEVEL'], flush=True)\n"
    (tmp_path / "torch.py").write_text(f"{said}os.kill(os.getpid(), signal.SIGINT)\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "GOMP_SPINCOUNT": "7"}
    done = subprocess.run([sys.executable, "-m", program], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert (done.stdout, done.stderr) == ("7 ERROR\n", "")


TORCHRUN = "torchrun --standalone --nproc_per_node=2 train.py config/x.py '--start=a b'"
ENVIRONMENTS = {
    "RANK=abc": ["RANK=abc must be a number from 0 on; start with torchrun, which sets it"],
    "RANK=": ["RANK= must be a number from 0 on"],
    "RANK=-1": ["RANK=-1 must be a number from 0 on"],
    "WORLD_SIZE=0": ["WORLD_SIZE=0 must be a number from 1 on"],
    "LOCAL_WORLD_SIZE=0": ["LOCAL_WORLD_SIZE=0 must be a number from 1 on"],
    "RANK=5 WORLD_SIZE=2": ["RANK=5 is not below WORLD_SIZE=2; "],
    "WORLD_SIZE=2": ["rank 0 cannot join", "(MASTER_ADDR is not set)", "; start all of them with torchrun"],
    "WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=abc": ["rank 0 cannot join the 2 ranks at localhost:abc"],
    "SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2": ["SLURM_STEP_NUM_TASKS=2 without RANK", TORCHRUN],
    "PMI_SIZE=2": ["PMI_SIZE=2 without RANK: 2 processes would each work alone", TORCHRUN],
}
HARMLESS = ["SLURM_NTASKS=2", "SLURM_STEP_NUM_TASKS=1", "PMI_SIZE=2 RANK=0"]


@pytest.fixture
def environment(monkeypatch):
    """environment("RANK=1 PMI_SIZE=2") sets these variables, and none else of a launcher."""

    def call(names: str):
        for name in {word.partition("=")[0] for words in (*ENVIRONMENTS, *HARMLESS) for word in words.split()}:
            monkeypatch.delenv(name, raising=False)
        for name in names.split():
            monkeypatch.setenv(*name.split("="))

    monkeypatch.setattr(sys, "argv", ["train.py", "config/x.py", "--start=a b"])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # of a rank that is not the first, before it speaks
    return call


@pytest.mark.parametrize("names", ENVIRONMENTS)
def test_a_strange_environment(names, told, tmp_path, environment, in_this_process):
    environment(names)
    told("--collective_timeout=2", *ENVIRONMENTS[names])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("names", HARMLESS)
def test_one_task_works(names, environment, trained, capsys, in_this_process):
    environment(names)
    evaluate.main([f"--out_dir={trained}", "--device=cpu", "--eval_iters=1"])
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize("local_rank, waits", [("0", []), ("1", [20]), ("x", []), ("", [])])
def test_only_a_rank_that_may_have_a_first_one_waits_for_it(local_rank, waits, monkeypatch, in_this_process):
    seen = []
    monkeypatch.setattr(time, "sleep", seen.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit):
        errors.fail("wrong")
    assert seen == waits
