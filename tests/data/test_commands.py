"""What the commands of data/ refuse, in one line, what they say is next, and the data sets that single ones make."""

import hashlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
from http.client import IncompleteRead
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import pytest

from configurator import parse
from data import command, corpus, dataset
from data.shakespeare_char import text as shakespeare
from data.tokenizer import train_bpe
from engine.config import Config
from tests.data.preparing import error, splits_of, validates, write_text
from tests.helpers import ROOT, read_all

NAMES = ("text", "pycode", "shakespeare", "shakespeare_char", "openwebtext")


@pytest.mark.parametrize("name, flags, words", [
    *((name, ["--nope=1"], ["unrecognized arguments: --nope=1", "--name=value"]) for name in NAMES[1:]),
    ("text", [], ["--input"]),
    ("text", ["--input=FILE", "--out="], ["out='' is no folder; pass a name"]),
    ("text", ["--input=FILE", "--val_fraction=nan"], ["val_fraction=nan"]),
    ("text", ["--input=FILE", "--shard_tokens=1e9"], ["--shard_tokens", "'1e9'"]),
    ("text", ["--input=FILE", "--tokenizer=bpe:100000"], ["is larger than the text supports"]),
    ("text", ["--input=FILE", "--out=FILE/x", "--tokenizer=byte"], ["Not a directory"]),
    ("text", ["--input=FIFO"], ["no regular file matches", "FIFO"]),
    ("shakespeare_char", ["--input=FIFO"], ["FIFO: Not a regular file"]),
    ("shakespeare_char", ["--input=BINARY"], ["is not UTF-8 text: byte 0 is 0x80"]),
    ("openwebtext", ["--input=FILE", "--shards=-1", "--tokenizer=byte"], ["shards=-1"]),
])  # fmt: skip
def test_bad_flags_are_one_line(call, tmp_path, monkeypatch, name, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("some words\nof text\n" * 9)
    (tmp_path / "BINARY").write_bytes(bytes(range(128, 256)))
    os.mkfifo("FIFO")
    before = sorted(os.listdir())
    if not any(flag.startswith("--out") for flag in flags):
        flags = [*flags, f"--out={tmp_path}/out"]
    code, _, err = call(name, *flags)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and "; " in err, err
    assert all(word in err for word in words) and sorted(os.listdir()) == before, err


def test_all_that_a_preparation_prints(call, tmp_path, monkeypatch):
    """The documents are counted, those of one text twice in a folder once, and their bytes with an end-of-text each."""
    lengths = [100 + 10 * number for number in range(30)]
    (tmp_path / "texts").mkdir()
    for number, length in enumerate(lengths):
        (tmp_path / "texts" / f"{number:02}.txt").write_text("x" * length)
    (tmp_path / "texts" / "other.md").touch()
    (tmp_path / "texts" / "second.txt").symlink_to("00.txt")
    tokens = {True: [], False: []}
    for number, length in enumerate(lengths):
        tokens[validates(number, 0.2)].append(length + 1)
    train = tokens[False]
    val = tokens[True]
    assert len(train) > 9
    assert len(val) > 2
    out = tmp_path / "out"
    flags = ["--tokenizer=byte", "--val_fraction=0.2", f"--out={out}"]
    following = f"python train.py config/train_pycode.py --dataset={out} --out_dir=out/out"
    assert call("text", f"--input={tmp_path}/texts", *flags) == (
        0,
        f"{len(train)} + {len(val)} documents, {sum(train):,} train + {sum(val):,} val tokens in {out}; "
        f"next: {following}\n",
        "files to read: 30; left out: 1 of other kinds, 1 second names of a file\n",
    )
    monkeypatch.chdir(ROOT)
    cfg = parse(Config, shlex.split(following)[2:])
    dataset.open_data(cfg.dataset)


def huge(name: str):
    Path(name).touch()
    os.truncate(name, 2**40)


MAKE = {"FIFO": os.mkfifo, "FOLDER": os.mkdir, "HUGE": huge, "ENDLESS": lambda name: os.symlink("/dev/zero", name)}


@pytest.mark.parametrize("name", ["train_000000.bin", "meta.json", "tokenizer.json", "train_000000.idx"])
def test_what_is_no_file_is_one_line(tmp_path, monkeypatch, name):
    text = "some words of text\n" * 50
    write_text(tmp_path / "set", train_bpe([text], 262), text)
    for what, make in MAKE.items():
        monkeypatch.chdir(shutil.copytree(tmp_path / "set", tmp_path / what))
        Path(name).unlink(missing_ok=True)
        make(name)
        error(lambda: dataset.open_data(Path.cwd()).split("train"))


SHARD = {"name": "train.bin", "tokens": 1}
META = [
    *({"vocab_size": size} for size in (10**18, True, None)),
    *({"vocab_size": 5, "eot": eot} for eot in (True, 5)),
    *({"vocab_size": 5, "splits": splits} for splits in ([], {"train": []}, {"train": {"shards": 3}})),
    {"vocab_size": 5, "splits": {"train": {"shards": [SHARD], "lost": "5"}}},
    *({"vocab_size": 5, "splits": {"train": {"shards": [SHARD | change]}}} for change in (
        {"name": ".."}, {"name": "/dev/zero"}, {"name": "a\0"}, {"name": None}, {"tokens": 2}, {"max_token": 5},
    )),
    {"vocab_size": 5, "tokenizer": {"kind": "byte"}},
    {"vocab_size": 257, "tokenizer_hash": "0", "tokenizer": {"kind": "byte"}},
    *({"vocab_size": 257, "tokenizer": spec} for spec in (
        3, {"kind": []}, {"kind": "gpt2"}, {"kind": "x" * 9999}, {"kind": "char", "chars": 5},
        {"kind": "hf", "special": ["eos_token"]},
        {"kind": "hf", "file": "/dev/zero", "vocab_size": 257, "sha256": "", "special": {}},
    )),
]  # fmt: skip
TEXTS = ["", "[]", '{"vocab_size": NaN}', '{"vocab_size": 5, "x": ' + "[" * 100_000]


@pytest.mark.parametrize("text", [*map(json.dumps, META), *TEXTS], ids=lambda text: text[:60])
def test_strange_meta_is_one_line(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    Path("train.bin").write_bytes(b"\1\0")
    Path("meta.json").write_text(text)
    assert len(error(lambda: dataset.open_data(tmp_path).split("train"))) < 700


def test_out_is_a_name_or_a_path(monkeypatch, tmp_path):
    monkeypatch.setattr("data.command.DATA", tmp_path)
    for name in ("mine", "my books", "-x", "a.b"):
        assert command.out_folder(name) == tmp_path / name
    assert command.out_folder("./mine") == Path("mine")
    assert command.out_folder(f"{tmp_path}/x") == tmp_path / "x"
    for name in ("", " ", ".", ".."):
        assert "with a /" in error(command.out_folder, name)


# ---- single data sets, compared with loops over their files

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def test_pycode_holds_every_source_once(call, tmp_path, monkeypatch):
    """In the order of their names. Those whose names have the first hashes validate, as far as there is room."""
    rng = random.Random(0)
    sources = {"note.txt": b"x"}
    for i in range(300):
        folder = rng.choice(["", "a/", "a/b/", *(f"c/{name}/" for name in sorted(LEFT_OUT))])
        sources[f"{folder}{i}.py"] = rng.randbytes(i % 60)
    for name, content in sources.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: tmp_path / "library")
    out = tmp_path / "out"
    assert call("pycode", f"--out={out}")[0] == 0

    names = [name for name in sorted(sources) if sources[name] and name.endswith(".py")]
    names = [name for name in names if not LEFT_OUT & {*name.split("/")}]
    validates = set()
    room = 0.05 * sum(len(sources[name]) for name in names)
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if len(sources[name]) <= room:
            validates.add(name)
            room -= len(sources[name])
    assert 5 < len(validates) < len(names) / 4
    data = dataset.open_data(out, verify=True)
    for split in ("train", "val"):
        expected = [sources[name] for name in names if (name in validates) == (split == "val")]
        assert read_all(data.split(split)) == [i for content in expected for i in (*content, data.eot)]


def test_pycode_takes_each_file_of_further_packages_once(call, tmp_path, monkeypatch):
    """A folder of unpacked wheels, and an installed package, with their licences."""
    files = {
        "library/a.py": "a" * 99,
        "wheels/a.py": "a" * 99,  # which the library has
        "wheels/one/b.py": "b",
        "wheels/one/tests/c.py": "c",
        "wheels/one-1.0.dist-info/METADATA": "Name: one\nLicense: MIT",
        "site/installed/__init__.py": "d",
        "site/installed/e.py": "b",  # which the wheels have
        "site/installed-2.0.dist-info/METADATA": "Name: installed\nClassifier: License :: OSI Approved :: BSD",
        "site/installed-2.0.dist-info/top_level.txt": "installed",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: tmp_path / "library")
    monkeypatch.syspath_prepend(tmp_path / "site")
    out = tmp_path / "out"
    code, said, _ = call("pycode", f"--package={tmp_path}/wheels", "--package=installed", f"--out={out}")
    assert code == 0
    assert "wheels (MIT), installed (BSD): 1 + 2 documents" in said
    data = dataset.open_data(out)
    assert read_all(data.split("train")) == [*[ord("a")] * 99, data.eot]
    assert read_all(data.split("val")) == [ord("b"), data.eot, ord("d"), data.eot]  # small enough for 5 %
    code, _, said = call("pycode", "--package=nowhere", f"--out={out}")
    assert code == 2
    assert "package=nowhere: no installed package; install it, or give a folder with a /" in said


SPEECH = "First Citizen:\nBefore we proceed any furthér, hear me speak.\n\nAll:\nSpeak, speak.\n" * 30


def test_shakespeare_is_nanogpts_token_for_token(call, tmp_path):
    source = tmp_path / "my text.txt"
    source.write_text(SPEECH, encoding="utf-8")
    assert call("shakespeare_char", f"--input={source}", f"--out={tmp_path / 'out'}")[0] == 0
    table = {c: i for i, c in enumerate(sorted(set(SPEECH)))}
    ids = [table[c] for c in SPEECH]
    cut = int(len(ids) * 0.9)
    assert splits_of(tmp_path / "out") == {"train": ids[:cut], "val": ids[cut:]}
    assert dataset.open_data(tmp_path / "out").eot is None


def test_shakespeare_download_is_checked(tmp_path, monkeypatch):
    kept = tmp_path / "set" / "input.txt"
    remote = tmp_path / "remote.txt"
    monkeypatch.setattr(shakespeare, "TEXT", kept)
    monkeypatch.setattr(shakespeare, "URL", remote.as_uri())
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(SPEECH.encode()).hexdigest())
    remote.write_text(SPEECH[:-1])
    assert "has the SHA-256 " in error(shakespeare.shakespeare)
    assert not kept.exists()
    remote.write_text(SPEECH)
    assert shakespeare.shakespeare().decode() == kept.read_text() == SPEECH


@pytest.mark.parametrize("problem", [URLError("refused"), TimeoutError("timed out"), IncompleteRead(b"x")])
def test_shakespeare_with_a_bad_server(problem, tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "TEXT", tmp_path / "input.txt")
    monkeypatch.setattr(shakespeare, "urlopen", Mock(side_effect=problem))
    message = error(shakespeare.shakespeare)
    assert message.startswith("cannot download https://")
    assert "; put the text at" in message


def test_as_many_threads_as_the_process_may_use(call, tmp_path, monkeypatch):
    """And not one for each CPU of the machine, as where Slurm gives a job two of them."""
    seen = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    monkeypatch.setattr(corpus, "prepare", lambda args, files: seen.append(args.threads))
    (tmp_path / "a.txt").write_text("text")
    assert call("text", f"--input={tmp_path / 'a.txt'}")[0] == 0
    assert seen == [3]


def test_help_that_a_full_disk_cannot_hold_is_an_error():
    with open("/dev/full", "w") as full:
        code = subprocess.run([sys.executable, "data/text/prepare.py", "--help"], cwd=ROOT, stdout=full).returncode
    assert code == 2
