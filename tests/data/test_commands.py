"""What the commands of data/ do with all that is not right, one line and exit code 2, and what they say is next."""

import importlib.util
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from ranks import train_main

from data import command, dataset, shards

NAMES = ("text", "pycode", "shakespeare", "shakespeare_char", "openwebtext", "fineweb_edu")


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", ROOT / "data" / name / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call(monkeypatch, capsys):
    """call("text", *flags): the command in this process; returns (exit code, stdout, stderr)."""
    handler = signal.getsignal(signal.SIGINT)

    def run(name: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, flags)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command.run(shards.main if name == "shards" else load(name).main)
        return end.value.code, *capsys.readouterr()

    yield run
    signal.signal(signal.SIGINT, handler)


def refused(result, *words: str) -> None:
    code, out, err = result
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and "; " in err, result
    assert all(word in err for word in words), err


# -------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    "name, flags, words",
    [
        *((name, ["--nope=1"], ["--nope=1"]) for name in NAMES[1:]),
        *((name, ["word"], ["unrecognized arguments: word"]) for name in NAMES[1:]),
        *((name, ["--out"], ["argument --out: expected one argument", "--name=value"]) for name in NAMES),
        *((name, ["--out=", "--input=a"], ["out='' is not a folder"]) for name in NAMES[2:4]),
        *((name, ["--out= "], ["out=' ' is not a folder"]) for name in ("pycode",)),
        ("text", [], ["--input"]),
        ("text", ["--input=/nope"], ["'/nope'"]),
        ("text", ["--input="], ["''"]),
        ("text", ["--input=FILE", "--out="], ["out='' is not a folder; pass a name"]),
        ("text", ["--input=FILE", "--documents=page"], ["--documents", "'page'", "'paragraph'"]),
        ("text", ["--input=FILE", "--val_fraction=x"], ["--val_fraction", "'x'"]),
        ("text", ["--input=FILE", "--val_fraction=nan"], ["val_fraction=nan"]),
        ("text", ["--input=FILE", "--val_fraction=1"], ["val_fraction=1.0"]),
        ("text", ["--input=FILE", "--threads=0"], ["threads=0"]),
        ("text", ["--input=FILE", "--threads=1025"], ["threads=1025"]),
        ("text", ["--input=FILE", "--threads=1.5"], ["--threads", "'1.5'"]),
        ("text", ["--input=FILE", "--shard_tokens=1e9"], ["--shard_tokens", "'1e9'"]),
        ("text", ["--input=FILE", "--shard_tokens=99999999999999999999"], ["shard_tokens=99999999999999999999"]),
        ("text", ["--input=FILE", "--tokenizer="], ["unknown tokenizer ''"]),
        ("text", ["--input=FILE", "--tokenizer=bpe:"], ["unknown tokenizer 'bpe:'", "bpe:4096"]),
        ("text", ["--input=FILE", "--tokenizer=bpe:0"], ["bpe:0", "257"]),
        ("text", ["--input=FILE", "--tokenizer=bpe:" + "9" * 5000], ["unknown tokenizer 'bpe:999"]),
        ("text", ["--input=FILE", "--tokenizer=bpe:100000"], ["is larger than the text supports"]),
        ("text", ["--input=FILE", "--tokenizer=a\nb"], ["unknown tokenizer"]),
        ("text", ["--input=FILE", "--out=FILE/x", "--tokenizer=byte"], ["Not a directory"]),
        ("text", ["--input=FILE", "--out=/proc/x", "--tokenizer=byte"], ["/proc/x: No such file"]),
        ("text", ["--input=FILE", "--out=/" + "x" * 300, "--tokenizer=byte"], ["File name too long"]),
        ("text", ["--input=FIFO"], ["FIFO' is not a regular file", "write the text into a file"]),
        ("text", ["--input=/dev/zero"], ["'/dev/zero' is not a regular file"]),
        ("text", ["--input=SOCKET"], ["SOCKET' is not a regular file"]),
        ("text", ["--input=EMPTY", "--tokenizer=byte"], ["the input has no text"]),
        ("text", ["--input=BINARY", "--tokenizer=byte"], ["BINARY is not UTF-8 text: byte 0 is 0x80"]),
        ("text", ["--input=FOLDER"], ["no file in the folder"]),
        ("pycode", ["--val_fraction=0"], ["val_fraction=0.0"]),
        ("pycode", ["--val_fraction=1e-9"], ["val_fraction=1e-09 is less than the smallest file; pass a"]),
        ("pycode", ["--tokenizer=bpe:300"], ["--tokenizer", "'bpe:300'"]),
        ("pycode", ["--out=./FILE"], ["FILE"]),
        ("shakespeare_char", ["--input="], ["No such file"]),
        ("shakespeare_char", ["--input=FIFO"], ["FIFO: Not a regular file"]),
        ("shakespeare_char", ["--input=/dev/zero"], ["/dev/zero: Not a regular file"]),
        ("shakespeare_char", ["--input=FOLDER"], ["FOLDER: Is a directory"]),
        ("shakespeare_char", ["--input=EMPTY"], ["has 0 characters"]),
        ("shakespeare_char", ["--input=BINARY"], ["is not UTF-8 text (byte 0)"]),
        ("shakespeare_char", ["--input=nope://x"], ["cannot download nope://x"]),
        ("shakespeare_char", ["--input=http://[::1"], ["cannot download http://[::1"]),
        ("shakespeare_char", ["--input=file:///nope"], ["cannot download file:///nope"]),
        ("shakespeare", ["--input=SOCKET"], ["SOCKET"]),
        ("openwebtext", ["--path=FIFO"], ["is not a regular file"]),
        ("openwebtext", ["--path=FILE", "--shards=-1", "--tokenizer=byte"], ["shards=-1"]),
        ("openwebtext", ["--path=FILE", "--shards=many"], ["--shards", "'many'"]),
        ("openwebtext", ["--path=FILE", "--tokenizer=char"], ["--tokenizer", "'char'"]),
        ("fineweb_edu", ["--path=a b"], ["no file matches 'a b'"]),
    ],
)
def test_bad_flags_are_one_line(call, tmp_path, monkeypatch, name, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("some words\nof text\n" * 9)
    (tmp_path / "EMPTY").touch()
    (tmp_path / "BINARY").write_bytes(bytes(range(128, 256)))
    (tmp_path / "FOLDER").mkdir()
    os.mkfifo("FIFO")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("SOCKET")
        before = sorted(os.listdir())
        out = [] if any(flag.startswith("--out") for flag in flags) else [f"--out={tmp_path}/out"]
        refused(call(name, *flags, *out), *words)
        assert sorted(os.listdir()) == before


def test_help_and_a_closed_pipe(tmp_path):
    """The commands themselves, whose reader has gone before they write, or whose disk is full."""
    script, word = str(ROOT / "data/text/prepare.py"), tmp_path / "a.txt"
    word.write_text("some words\n" * 30)
    flags = [script, f"--input={word}", f"--out={tmp_path}/out", "--tokenizer=byte"]
    helped = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0 and "--documents" in helped.stdout and not helped.stderr
    for arguments in (flags, ["-m", "data.shards", f"{tmp_path}/out"]):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        assert (done.returncode, done.stderr) == (1, ""), done
        line = shlex.join([sys.executable, *arguments])
        full = f"exec env PYTHONUNBUFFERED= {line} >/dev/full"
        done = subprocess.run(full, shell=True, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: stdout: No space left on device; "), done
        assert done.stderr.count("\n") == 1
        done = subprocess.run(f"exec {line} >&-", shell=True, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_stdout_that_fails_loses_nothing(tmp_path):
    """It fails at the first line, as Python does not buffer it; the data are there all the same."""
    (tmp_path / "a.txt").write_text("some words\n" * 30)
    flags = [ROOT / "data/shakespeare_char/prepare.py", f"--input={tmp_path}/a.txt", f"--out={tmp_path}/out"]
    line = shlex.join([sys.executable, "-u", *map(str, flags)])
    done = subprocess.run(f"exec {line} >/dev/full", shell=True, capture_output=True, text=True)
    note, error = done.stderr.splitlines()
    assert done.returncode == 2 and note.startswith("note: ")
    assert error.startswith("error: stdout: No space left on device; ")
    assert len(dataset.open_data(tmp_path / "out").split("train")) == 297
    for redirection in ("2>&-", "2>/dev/full"):  # nor does an error need a stderr
        done = subprocess.run(f"exec {line} --nope=1 {redirection}", shell=True, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_names_that_are_no_text(tmp_path):
    """Bytes that are no UTF-8, in what is typed and so in what is printed."""
    (tmp_path / "a.txt").write_text("some words\n" * 30)
    out = os.fsencode(tmp_path) + b"/\xff out"
    run = [sys.executable, ROOT / "data/text/prepare.py", f"--input={tmp_path}/a.txt", b"--out=" + out]
    done = subprocess.run([*run, "--tokenizer=byte"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and "\\udcff out" in done.stdout, done
    assert os.path.exists(out + b"/meta.json")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what is caught from /proc, which Linux has")
@pytest.mark.parametrize("arguments", [[f"data/{name}/prepare.py"] for name in NAMES] + [["-m", "data.shards", "data"]])
def test_ctrl_c_while_it_starts(tmp_path, arguments):
    """At any moment from the first import on: no traceback."""
    flags = [] if "-m" in arguments else [f"--out={tmp_path}/out"]
    flags += ["--input=README.md", "--tokenizer=byte"] if arguments == ["data/text/prepare.py"] else []
    rng = random.Random(time.time_ns())
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, *arguments, *flags], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        states = [False]  # whether Python catches the signal: it does, and then for the imports it does not
        while states[-2:] != [True, False] and process.poll() is None:
            caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1], 16)
            states.append(bool(caught >> signal.SIGINT - 1 & 1))
            time.sleep(0.0005)  # the process itself needs this processor
        time.sleep(rng.uniform(0, 0.15))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (-signal.SIGINT, 130, 0, 2) and err.count("\n") <= 1, (process.returncode, err)
        assert "Traceback" not in err


# --------------------------------------------------------------------------------------------------------------- files


FOUND = [
    "FIFO", "SOCKET", "FOLDER", "/dev/zero", "/dev/null", "BROKEN LINK", b"", b"\0", b"x" * 1023, b"x" * 5000,
    b"MMIDIDX\0\0", b"{}", b"\xff" * 2000,
]  # fmt: skip


def put(path: Path, what) -> socket.socket | None:
    path.unlink(missing_ok=True)
    if isinstance(what, bytes):
        path.write_bytes(what)
    elif what == "FIFO":
        os.mkfifo(path)
    elif what == "SOCKET":
        server = socket.socket(socket.AF_UNIX)
        server.bind(path.name)
        return server
    elif what == "FOLDER":
        path.mkdir()
    else:
        path.symlink_to(what)
    return None


@pytest.mark.parametrize("what", FOUND, ids=lambda what: str(what)[:12])
@pytest.mark.parametrize("name", ["train_000000.bin", "meta.json", "tokenizer.json", "train_000000.idx"])
def test_files_that_are_none_are_one_line(call, tmp_path, monkeypatch, name, what):
    """In the place of each file of a data set; no read waits for what never comes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words of text\n" * 50)
    assert call("text", "--input=a.txt", "--tokenizer=bpe:262", "--out=./set")[0] == 0
    monkeypatch.chdir(tmp_path / "set")
    put(Path(name), what)
    code, out, err = call("shards", ".")
    if name == "meta.json" and what == "BROKEN LINK":
        assert code == 0
        return
    if name == "train_000000.idx" and what == "BROKEN LINK" or name == "tokenizer.json" and code == 0:
        assert "cannot be decoded (" in out or what == "BROKEN LINK"  # the shards are good all the same
        return
    assert code == 2 and all(line.startswith("error: ") and "; " in line for line in err.splitlines()), err
    assert "Traceback" not in err and len(err.splitlines()) in (1, 2)
    if name != "tokenizer.json":
        with pytest.raises(ValueError) as error:
            dataset.open_data(tmp_path / "set").split("train")
        assert "; " in str(error.value)


SHARD = {"name": "train.bin", "tokens": 1}
META = [
    {"vocab_size": 10**18}, {"vocab_size": 2**31}, {"vocab_size": 10**400}, {"vocab_size": True}, {"vocab_size": 5.0},
    {"vocab_size": -1}, {"vocab_size": None}, {"vocab_size": [5]}, {"vocab_size": 5, "eot": True},
    {"vocab_size": 5, "eot": -1}, {"vocab_size": 5, "eot": 2**70}, {"vocab_size": 5, "eot": 1.0},
    *({"vocab_size": 5, "splits": splits} for splits in ([], 3, "x", {"train": []}, {"train": {"shards": 3}})),
    *({"vocab_size": 5, "splits": {"train": {"shards": [SHARD | change]}}} for change in (
        {"name": ""}, {"name": "."}, {"name": ".."}, {"name": "/dev/zero"}, {"name": "../a"}, {"name": "a\0"},
        {"name": "\ud800"}, {"name": 3}, {"name": None}, {"name": "x" * 300}, {"tokens": True}, {"tokens": -1},
        {"tokens": 2**70}, {"tokens": "1"}, {"tokens": None}, {"tokens": 1.0}, {"max_token": -1}, {"max_token": 2**70},
        {"max_token": 5}, {"max_token": "1"}, {"tokens": 2},
    )),
    {"vocab_size": 5, "tokenizer": {"kind": "byte"}},
    {"vocab_size": 257, "tokenizer_hash": "0", "tokenizer": {"kind": "byte"}},
    *({"vocab_size": 257, "tokenizer": spec} for spec in (
        3, [], "byte", {}, {"kind": []}, {"kind": "byte", "x": 1}, {"kind": "bpe"}, {"kind": "gpt2"}, {"kind": "char"},
        {"kind": "char", "chars": 5}, {"kind": "char", "chars": ""}, {"kind": "char", "chars": ["a"]},
        {"kind": "hf", "file": "/dev/zero", "vocab_size": 257, "sha256": "", "special": {}}, {"kind": "x" * 9999},
        {"kind": "bpe", "file": "tokenizer.tiktoken", "vocab_size": 257, "sha256": "0"}, {"kind": "hf"},
    )),
]  # fmt: skip
TEXTS = [
    "", " ", "null", "NaN", "[]", '"x"', '{"vocab_size": NaN}', '{"vocab_size": Infinity}', '{"vocab_size": 1e400}',
    '{"vocab_size": 5, "vocab_size": 6}', '{"vocab_size": ' + "9" * 5000 + "}", '{"vocab_size": 5',
    '{"vocab_size": 5, "x": ' + "[" * 100_000, '{"vocab_size": 5}}', "\ufeff{}", "{'vocab_size': 5}",
]  # fmt: skip


@pytest.mark.parametrize("text", [*map(json.dumps, META), *TEXTS], ids=lambda text: text[:60])
def test_strange_meta_is_one_line(call, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    Path("train.bin").write_bytes(b"\1\0")
    Path("meta.json").write_text(text)
    with pytest.raises(ValueError) as error:
        dataset.open_data(tmp_path).split("train")
    assert "\n" not in str(error.value) and "; " in str(error.value) and len(str(error.value)) < 700


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"sha256": 1}', b'{"settings": {}, "sha256": "x"}', None]
)
def test_damaged_progress_is_one_line(call, tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some words of text\n" * 50)
    Path("set/.preparing").mkdir(parents=True)
    put(Path("set/.preparing/progress.json"), "FOLDER" if content is None else content)
    words = ["Is a directory"] if content is None else ["progress.json cannot be used (", "to start again"]
    refused(call("text", "--input=a.txt", "--tokenizer=byte", "--out=./set"), *words)


# ---------------------------------------------------------------------------------------------------------- what next


def printed(result) -> list[str]:
    code, out, err = result
    assert code == 0 and out.count("next: ") == 1, result
    start = shlex.split(out.split("next: ")[1])
    assert start[:2] == ["python", "train.py"]
    return start[2:]


SIZES = {"tiny": 40, "small": 700, "1 MB": 1_000_000}
# Six of them are shorter than the tiny text, which so has two lines.
WORDS = "def self x if not in for key value list of print while try with yield None True class join map zip sum".split()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "tokenizer, documents",
    [("char", "line"), ("char", "file"), ("byte", "line"), ("byte", "file"), ("bpe:300", "file")],
)
def test_the_next_command_trains(call, tmp_path, monkeypatch, size, tokenizer, documents):
    if tokenizer == "bpe:300" and size == "tiny":
        pytest.skip("so small a text has no pairs to merge")
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=6)) for _ in range(1 + SIZES[size] // 30)]
    (tmp_path / "a.txt").write_text("\n".join(lines)[: SIZES[size]])
    flags = ["--val_fraction=0.6"] if documents == "line" else []
    flags += [f"--input={tmp_path}/a.txt", f"--tokenizer={tokenizer}", f"--documents={documents}"]
    result = call("text", *flags, f"--out={tmp_path}/my data")
    arguments = printed(result)
    assert f"--dataset={tmp_path}/my data" in arguments and "--out_dir=out/my data" in arguments
    trains(monkeypatch, tmp_path, arguments)


def trains(monkeypatch, tmp_path, arguments):
    """Two steps of a smaller model; nothing else differs from what the command says."""
    monkeypatch.chdir(ROOT)
    more = ["--max_iters=2", "--eval_iters=1", "--device=cpu", "--compile=False"]
    more += ["--n_layer=1", "--n_head=1", "--n_embd=32"]
    more += ["--warmup_iters=1", "--cooldown_iters=1"] if "config/train_pycode.py" in arguments else []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train_main([*arguments, *more, f"--out_dir={tmp_path}/run"])
    finally:
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("val_loss" in row for row in rows)


@pytest.mark.parametrize("size", [20, 300, 5000])
def test_shakespeares_next_command(call, tmp_path, monkeypatch, size):
    monkeypatch.setattr(command, "DATA", tmp_path)
    monkeypatch.setattr("data.objective.DATA", tmp_path)
    monkeypatch.setattr(command.shutil, "which", lambda _: None)
    (tmp_path / "a.txt").write_text(("to be or not to be\n" * 300)[:size])
    arguments = printed(call("shakespeare_char", f"--input={tmp_path}/a.txt", "--out=shakespeare_char"))
    block = [f"--block_size={ {20: 1, 300: 16}[size] }"] if size < 5000 else []
    assert arguments == ["config/train_shakespeare_cpu.py", *block]
    trains(monkeypatch, tmp_path, arguments)


def test_sizes_of_the_next_command(monkeypatch):
    """GPT-2's vocabulary gets a smaller batch; only a GPU and many tokens get GPT-2's own run."""
    gpu = {"here": None}
    monkeypatch.setattr(command.os.path, "exists", lambda _: False)
    monkeypatch.setattr(command.shutil, "which", lambda _: gpu["here"])
    start, mine = "python train.py config/train_", command.DATA / "mine"
    flags = ".py --dataset=mine --out_dir=out/mine"
    assert command.next_command(command.DATA / "pycode", 257, [10**7, 10**6]) == f"{start}pycode.py"
    assert command.next_command(mine, 50257, [10**10, 10**7]) == f"{start}pycode{flags} --batch_size=2"
    assert command.next_command(mine, 10**6, [10**6, 10**5]) == f"{start}pycode{flags} --batch_size=1"
    assert command.next_command(mine, 257, [10**6, 257]) == f"{start}pycode{flags}"
    assert command.next_command(mine, 257, [10**6, 256]) == f"{start}pycode{flags} --block_size=128"
    assert command.next_command(mine, 257, [2, 9]) == f"{start}pycode{flags} --block_size=1"
    char = command.DATA / "shakespeare_char"
    assert command.next_command(char, 65, [10**6, 10**5]) == f"{start}shakespeare_cpu.py"
    gpu["here"] = "nvidia-smi"
    assert command.next_command(char, 65, [10**6, 10**5]) == f"{start}shakespeare_char.py"
    assert command.next_command(mine, 50257, [10**8, 10**6]) == f"{start}gpt2{flags}"
    assert command.next_command(command.DATA / "openwebtext", 50257, [10**10, 10**7]) == f"{start}gpt2.py"
    assert command.next_command(mine, 257, [10**6, 10**5]) == f"{start}pycode{flags}"
    monkeypatch.chdir("/")
    assert "--dataset=/x/y " in command.next_command(Path("x/y"), 257, [10**6, 10**5])


def test_out_is_a_name_or_a_path(monkeypatch, tmp_path):
    monkeypatch.setattr("data.command.DATA", tmp_path)
    for name in ("mine", "my books", "-x", "a.b"):
        assert command.out_folder(name) == tmp_path / name
    assert command.out_folder("./mine") == Path("mine") and command.out_folder(f"{tmp_path}/x") == tmp_path / "x"
    for name in ("", " ", ".", ".."):
        with pytest.raises(ValueError, match="with a /"):
            command.out_folder(name)
