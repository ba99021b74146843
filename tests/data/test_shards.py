"""Shards compared with bytes written by hand, and all kinds of damage to a file."""

import hashlib
import json
import os
import pickle
import signal
import struct
from pathlib import Path

import numpy as np
import pytest

from data import files
from data.dataset import open_data
from data.tokenizer import ByteTokenizer, CharTokenizer
from data.writer import ShardWriter
from tests.data.preparing import error, files_of, write_set
from tests.helpers import Bomb, read_all


def shard_bytes(tokens, magic=20240520, version=1, code="H") -> bytes:
    """A shard written from the description of the format, without numpy."""
    header = struct.pack("<3i", magic, version, len(tokens)).ljust(1024, b"\0")
    return header + struct.pack(f"<{len(tokens)}{code}", *tokens)


def test_written_bytes_are_the_format(tmp_path):
    """The largest id of a shard may be that of any document in it."""
    tokens = range(249, -1, -1)
    parts = tokens[:100], tokens[100:200], tokens[200:]
    with ShardWriter(tmp_path, ByteTokenizer(), shard_tokens=100) as out:
        for document in (tokens[:30], tokens[30:170], tokens[170:240], tokens[240:]):
            out.add("train", np.array(document))
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["vocab_size"] == 257
    assert meta["eot"] == 256
    assert meta["tokenizer"] == {"kind": "byte"}
    assert meta["tokenizer_hash"] == ByteTokenizer().hash
    assert meta["splits"]["train"]["tokens"] == 250
    assert meta["splits"]["train"]["documents"] == 4
    for i, (part, shard) in enumerate(zip(parts, meta["splits"]["train"]["shards"], strict=True)):
        assert (tmp_path / f"train_{i:06d}.bin").read_bytes() == shard_bytes(part)
        digest = hashlib.sha256(shard_bytes(part)).hexdigest()
        assert shard == {"name": f"train_{i:06d}.bin", "tokens": len(part), "sha256": digest, "max_token": max(part)}
    assert sorted(os.listdir(tmp_path)) == [".lock", "meta.json"] + [f"train_{i:06d}.bin" for i in range(3)]


@pytest.mark.parametrize("vocab_size, magic, version, code", [(65_536, 20240520, 1, "H"), (65_537, 20240801, 7, "I")])
def test_dtype_follows_the_vocabulary(tmp_path, monkeypatch, vocab_size, magic, version, code):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", vocab_size)
    tokens = [0, vocab_size - 1, 7]
    write_set(tmp_path, train=tokens)
    assert (tmp_path / "train_000000.bin").read_bytes() == shard_bytes(tokens, magic, version, code=code)


def test_a_shard_that_is_cut_while_it_is_read(tmp_path):
    """It raises an error, while a missing page of a memory map would kill the process."""
    stream = open_data(write_set(tmp_path)).split("train")
    os.truncate(tmp_path / "train_000000.bin", 1024 + 2 * 150)
    assert stream.read(140, 150).tolist() == list(range(140, 150))
    message = error(stream.read, 145, 155)
    assert "train_000000.bin was truncated: tokens 145 to 155 are missing" in message


def test_raw_nanogpt_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens = [5, 64, 0, 17]
    (tmp_path / "train.bin").write_bytes(struct.pack("<4H", *tokens))
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    message = error(open_data, tmp_path)
    assert "pass --vocab_size=N" in message
    assert "meta.pkl" in message
    assert read_all(open_data(tmp_path, vocab_size=65).split("train")) == tokens
    (tmp_path / "meta.json").write_text('{"vocab_size": 65}')
    assert read_all(open_data(tmp_path).split("train")) == tokens
    hashes = open_data(tmp_path).split("train").hashes
    (tmp_path / "train.bin").write_bytes(struct.pack("<5H", *tokens, 3))  # a resume says that the data have changed
    assert open_data(tmp_path).split("train").hashes != hashes
    (tmp_path / "train.bin").write_bytes(b"12345")
    assert "train.bin is no shard" in error(open_data(tmp_path).split, "train")
    assert not (tmp_path / "BOOM").exists()


def test_shards_of_other_projects(tmp_path):
    (tmp_path / "fineweb_train_000002.bin").write_bytes(shard_bytes([3, 4]))
    (tmp_path / "fineweb_train_000001.bin").write_bytes(shard_bytes([1, 70_000], 20240801, 7, code="I"))
    (tmp_path / "train.bin").write_bytes(struct.pack("<H", 9))  # shards come first
    assert read_all(open_data(tmp_path, vocab_size=70_001).split("train")) == [1, 70_000, 3, 4]


def index_bytes(sizes, bounds, code=8, width=2, version=1, magic=b"MMIDIDX\0\0") -> bytes:
    header = magic + struct.pack("<QBQQ", version, code, len(sizes), len(bounds))
    pointers = [width * sum(sizes[:i]) for i in range(len(sizes))]
    return header + struct.pack(f"<{len(sizes)}i{len(sizes)}q{len(bounds)}q", *sizes, *pointers, *bounds)


@pytest.mark.parametrize("code, letter", [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_megatron_pairs(tmp_path, code, letter):
    tokens = [5, 64, 0, 17, 101, 3]
    width = struct.calcsize(letter)
    for name, part in (("my_train_text_document", tokens), ("val", tokens[2:])):
        (tmp_path / f"{name}.bin").write_bytes(struct.pack(f"<{len(part)}{letter}", *part))
        (tmp_path / f"{name}.idx").write_bytes(index_bytes([1, 0, len(part) - 1], [0, 1, 3], code, width))
    (tmp_path / "other.idx").touch()
    data = open_data(tmp_path, vocab_size=102)
    assert read_all(data.split("train")) == tokens
    assert read_all(data.split("val")) == tokens[2:]


@pytest.mark.parametrize("text, weights", [
    ("1,1,1", [1, 1, 1]), ("4,2.0", [2, 1]), ("1,1000000", [1, 10_000]), ("0.3333333333,0.6666666667", [3333, 6667]),
])  # fmt: skip
def test_a_mixture_is_its_sources_and_their_weights(tmp_path, monkeypatch, text, weights):
    monkeypatch.chdir(tmp_path)
    numbers = text.split(",")
    for i in range(len(numbers)):
        write_set(f"data/set{i}", train=range(10 * i, 10 * i + 5 + i), val=[i] * 3)
    data = open_data(",".join(f"set{i}:{number}" for i, number in enumerate(numbers)), verify=True)
    train = data.split("train")
    assert train.sources == [(f"set{i}", 5 + i, weight) for i, weight in enumerate(weights)]
    assert read_all(train) == sum((list(range(10 * i, 10 * i + 5 + i)) for i in range(len(weights))), [])
    assert read_all(data.split("val")) == sum(([i] * 3 for i in range(len(weights))), [])
    assert (data.vocab_size, data.eot, data.tokenizer.spec) == (257, 256, {"kind": "byte"})
    assert train.name.startswith("data/set0 train + data/set1 train")


@pytest.mark.parametrize("name, fact", [
    ("a:1,b:0", "'b:0' is not a new name"), ("a:1,b:nan", "'b:nan' is not a new name"),
    ("a:1,a:2", "'a:2' is not a new name"),
    ("shake", "there is no data set 'shake' in data and no such folder; prepare it, or pass shakes"),
    ("a:1,c:1", "different kinds (a: tokenizer 68513ce4c5d4, vocab_size 257, end-of-text 256, pairs F"),
    ("a:1,d:1", "; d: unknown tokenizer, vocab_size 300, end-of-text None, pairs False)"),
    ("d:1,f:1", "; f: unknown tokenizer, vocab_size 300, end-of-text 7"),
])  # fmt: skip
def test_what_cannot_be_mixed_is_one_line(tmp_path, monkeypatch, name, fact):
    monkeypatch.chdir(tmp_path)
    os.makedirs("data/shakes")
    write_set("a"), write_set("b")
    with ShardWriter("c", CharTokenizer("".join(map(chr, range(257))))) as out:  # as many tokens as a
        out.add("train", np.array([0, 1, 2]))
    for folder, meta in (("d", {"vocab_size": 300}), ("f", {"vocab_size": 300, "eot": 7})):
        os.mkdir(folder)
        Path(folder, "train.bin").write_bytes(b"ab")
        Path(folder, "meta.json").write_text(json.dumps(meta))
    assert fact in error(open_data, name)


GOOD = shard_bytes(range(200))
INDEX = index_bytes([150, 50], [0, 1, 2])


@pytest.mark.parametrize("kind, content, fact", [
    ("idx", b"X" + INDEX[1:], "train_000000.idx is no index of Megatron"),
    ("idx", index_bytes([150, 50], [0, 1, 2], code=7), "has the token type 7, and known are 1, 2, 3, 4"),
    ("idx", INDEX, "train_000000.bin has 1424 bytes, and its header or .idx gives 400"),
    ("bin", GOOD[:-2], "has 1422 bytes, and its header or .idx gives 1424, so it is truncated"),
    ("bin", shard_bytes([]), "holds no tokens"),
    ("bin", shard_bytes(range(200), magic=20240521), "is no shard, which begins with 20240520 or 20240801"),
    ("bin", shard_bytes(range(200), version=2), "is a shard of version 2, not 1"),
    ("bin", shard_bytes(range(100)), "holds 100 tokens, but meta.json says 200"),
])  # fmt: skip
def test_damaged_file_is_one_line(tmp_path, kind, content, fact):
    folder = write_set(tmp_path / "set")
    (folder / f"train_000000.{kind}").write_bytes(content)
    assert error(open_data(folder).split, "train").endswith("copy or prepare it again")
    (folder / "prepare.py").touch()
    message = error(open_data(folder).split, "train")
    assert str(folder) in message
    assert fact in message
    assert message.endswith(f"run python {folder}/prepare.py")
    assert read_all(open_data(folder).split("val")) == list(range(100, 150))  # the other split is readable


def test_token_ids_outside_the_vocabulary(tmp_path):
    path = write_set(tmp_path) / "meta.json"
    path.write_text(path.read_text().replace('"max_token": 199', '"max_token": 300'))
    for size in (0, 512):  # a larger vocabulary of the model does not make the data valid
        message = error(open_data(tmp_path, vocab_size=size).split, "train")
        assert "holds token id 300, but the vocabulary has only 257" in message


def test_only_verify_reads_a_shard(tmp_path, monkeypatch):
    """On every rank."""
    (tmp_path / "train.bin").write_bytes(b"ab")
    message = error(open_data(tmp_path, vocab_size=65_536, verify=True).split, "train")
    assert "train.bin cannot be verified" in message
    assert message.endswith("pass --verify_data=False")
    folder = write_set(tmp_path / "set")
    (folder / "train_000000.bin").write_bytes(shard_bytes([60_000] * 200))
    assert len(open_data(folder).split("train")) == 200  # else each start of a run would read all data
    assert "train_000000.bin was changed" in error(open_data(folder, verify=True).split, "train")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "train_000000.bin was changed" in error(open_data(folder, verify=True).split, "train")


def test_names_paths_and_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/pycode").mkdir(parents=True)
    (tmp_path / "data/pycode/prepare.py").touch()
    message = error(open_data, "pycode")
    assert message.startswith("data/pycode is not prepared")
    assert message.endswith("run python data/pycode/prepare.py")
    write_set("data/pycode")
    write_set("elsewhere", train=range(7))
    assert len(open_data("pycode").split("train")) == 200
    assert len(open_data("elsewhere").split("train")) == len(open_data(tmp_path / "elsewhere").split("train")) == 7
    assert "data/pycode has no split test" in error(open_data("pycode").split, "test")
    assert open_data("pycode").split("train").name == "data/pycode train"


def test_a_preparation_replaces_the_one_before_as_a_whole(tmp_path):
    """Until it ends, the old data stay; then its shards are gone, and the files of others and open streams are not."""
    with ShardWriter(tmp_path, ByteTokenizer(), shard_tokens=50) as out:
        out.add("train", np.arange(250))
        out.add("train_mask", np.array([2, *[1] * 249]), 0)
    before = files_of(tmp_path)
    with pytest.raises(KeyboardInterrupt), ShardWriter(tmp_path, ByteTokenizer(), shard_tokens=5) as out:
        out.add("train", np.arange(13))
        raise KeyboardInterrupt
    assert files_of(tmp_path) == before
    stream = open_data(tmp_path).split("train")
    assert len(stream.mask.shards) == 5
    (tmp_path / "input.txt").touch()
    with ShardWriter(tmp_path, ByteTokenizer()) as out:
        out.add("train", np.arange(4))
        assert f"out={tmp_path} belongs to process {os.getpid()} on" in error(write_set, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", "input.txt", "meta.json", "train_000000.bin"]
    assert read_all(stream) == list(range(250))
    assert read_all(open_data(tmp_path, verify=True).split("train")) == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_files_are_moved_does_not_stop_the_moves(tmp_path, monkeypatch, number):
    def stop(*_):
        raise InterruptedError

    write_set(tmp_path)
    replace = os.replace

    def move(source, target):
        if target.parent == tmp_path:
            os.kill(os.getpid(), number)
        replace(source, target)

    before = signal.signal(number, stop)
    try:
        monkeypatch.setattr(os, "replace", move)
        write_set(tmp_path, train=range(7))
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
    assert read_all(open_data(tmp_path, verify=True).split("train")) == list(range(7))


def test_files_of_others_stay(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("mine")
    monkeypatch.setattr(ByteTokenizer, "file", "tokenizer.json")
    for name in ("train_000000.bin", "train_mask_000000.bin", "tokenizer.json", "metrics.jsonl", "meta.json"):
        folder = tmp_path / f"set {name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        message = f"{name} was not written by this command; choose another --out"
        assert message in error(write_set, folder)
        assert {*os.listdir(folder)} == {".lock", name}
        assert (folder / name).read_text() == "mine"
    folder = tmp_path / "preparing"
    folder.mkdir()
    (folder / ".preparing").symlink_to(other)
    error(write_set, folder)
    assert {*os.listdir(folder)} == {".lock", ".preparing"}
    assert os.listdir(other) == ["mine"]


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    for content in (b"new", b"newer"):
        files.write_file(tmp_path / "a", content)
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    monkeypatch.setattr(os, "fsync", lambda _: Path("/dev/full").write_bytes(b"x"))
    with pytest.raises(OSError, match="No space"):
        files.write_file(tmp_path / "a", b"newest")
    assert (tmp_path / "a").read_bytes() == b"newer"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
