"""Shards against bytes that are put together by hand, and every way a file may be damaged."""

import hashlib
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data import shards
from data.shards import ShardWriter, TokenStream, open_data
from data.tokenizer import ByteTokenizer


def shard_bytes(tokens, magic=20240520, version=1, count=None, code="H") -> bytes:
    """A shard by the format's description, without numpy."""
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count).ljust(1024, b"\0")
    return header + struct.pack(f"<{len(tokens)}{code}", *tokens)


def prepare(folder, train=range(200), val=range(100, 150), **options) -> Path:
    with ShardWriter(folder, ByteTokenizer(), **options) as out:
        out.add("train", np.array(train))
        out.add("val", np.array(val))
    return Path(folder)


def read_all(stream: TokenStream) -> list[int]:
    out = np.full(len(stream), -1)
    stream.read(0, out)
    return out.tolist()


def error(call, *args, **kwargs) -> str:
    """The message of the ValueError, which must be one line with a remedy."""
    with pytest.raises(ValueError) as e:
        call(*args, **kwargs)
    message = str(e.value)
    assert "\n" not in message and "; " in message, message
    return message


# ------------------------------------------------------------------------------------------------------------ format


def test_written_bytes_are_the_format(tmp_path):
    prepare(tmp_path, train=range(250), shard_tokens=100)
    parts = [range(100), range(100, 200), range(200, 250)]
    for i, part in enumerate(parts):
        assert (tmp_path / f"train_{i:06d}.bin").read_bytes() == shard_bytes(part)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["vocab_size"] == 257 and meta["eot"] == 256 and meta["tokenizer"] == {"kind": "byte"}
    assert meta["tokenizer_hash"] == ByteTokenizer().hash
    assert meta["splits"]["train"]["tokens"] == 250 and meta["splits"]["train"]["documents"] == 1
    assert meta["splits"]["train"]["shards"] == [
        {
            "name": f"train_{i:06d}.bin",
            "tokens": len(part),
            "sha256": hashlib.sha256(shard_bytes(part)).hexdigest(),
            "max_token": max(part),
        }
        for i, part in enumerate(parts)
    ]
    assert sorted(os.listdir(tmp_path)) == ["meta.json"] + [f"train_{i:06d}.bin" for i in range(3)] + ["val_000000.bin"]


@pytest.mark.parametrize("vocab_size, magic, version, code", [(65_536, 20240520, 1, "H"), (65_537, 20240801, 7, "I")])
def test_dtype_follows_the_vocabulary(tmp_path, vocab_size, magic, version, code):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    tokens = [0, vocab_size - 1, 7]
    with ShardWriter(tmp_path, tokenizer) as out:
        out.add("train", np.array(tokens))
    assert (tmp_path / "train_000000.bin").read_bytes() == shard_bytes(tokens, magic, version, code=code)


@given(st.lists(st.lists(st.integers(0, 256), max_size=30), min_size=1, max_size=8), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_documents_come_back_in_order(tmp_path_factory, documents, shard_tokens):
    tokens = sum(documents, [])
    assume(tokens)
    folder = tmp_path_factory.mktemp("data")
    with ShardWriter(folder, ByteTokenizer(), shard_tokens) as out:
        for document in documents:
            out.add("train", np.array(document, dtype=np.int64))
    data = open_data(folder, verify=True)
    assert read_all(data.split("train")) == tokens
    entry = data.meta["splits"]["train"]
    assert entry["documents"] == len(documents) and entry["tokens"] == len(tokens)
    assert [s["tokens"] for s in entry["shards"][:-1]] == [shard_tokens] * (len(entry["shards"]) - 1)


@given(st.data())
def test_reads_span_shard_ends(data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    whole = np.arange(sum(lengths))
    stream = TokenStream("x", np.split(whole.astype("<u2"), np.cumsum(lengths)[:-1]), 1000)
    start = data.draw(st.integers(0, len(whole)))
    out = np.full(data.draw(st.integers(0, len(whole) - start)), -1)
    stream.read(start, out)
    assert out.tolist() == whole[start : start + len(out)].tolist()
    for bad in (-1, len(whole) - len(out) + 1):
        with pytest.raises(IndexError):
            stream.read(bad, out)


def test_offsets_beyond_32_bits(tmp_path):
    n = 2**32 + 10  # 8 GiB of zeros that occupy no disk
    with open(tmp_path / "train_000000.bin", "wb") as f:
        f.write(struct.pack("<3i", 20240520, 1, 2**30).ljust(1024, b"\0"))
        f.truncate(1024 + 2 * 2**30)
    big = shards._map_file(tmp_path, "train_000000.bin")
    tail = np.arange(10, dtype="<u2")
    stream = TokenStream("x", [big] * 4 + [tail], 1000)
    out = np.full(12, -1)
    stream.read(n - 12, out)
    assert len(stream) == n and out.tolist() == [0, 0, *range(10)]


# --------------------------------------------------------------------------------------------------- foreign folders


def test_raw_nanogpt_files(tmp_path):
    tokens = [5, 64, 0, 17]
    (tmp_path / "train.bin").write_bytes(struct.pack("<4H", *tokens))

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "unpickled"),))

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    message = error(open_data, tmp_path)
    assert "pass --vocab_size=N" in message and "echo '{\"vocab_size\": N}' >" in message and "meta.pkl" in message
    data = open_data(tmp_path, vocab_size=65)
    assert read_all(data.split("train")) == tokens and data.vocab_size == 65 and data.tokenizer is None
    (tmp_path / "meta.json").write_text('{"vocab_size": 65}')
    assert read_all(open_data(tmp_path).split("train")) == tokens
    (tmp_path / "meta.json").write_text('{"vocab_size": 64}')
    assert "holds token id 64, but the vocabulary has only 64; set vocab_size to 65" in error(
        open_data(tmp_path).split, "train"
    )
    (tmp_path / "train.bin").write_bytes(b"12345")
    assert "train.bin has 5 bytes, an odd number" in error(open_data(tmp_path).split, "train")
    assert not (tmp_path / "unpickled").exists()


def test_shards_of_other_projects(tmp_path):
    (tmp_path / "fineweb_train_000002.bin").write_bytes(shard_bytes([3, 4]))
    (tmp_path / "fineweb_train_000001.bin").write_bytes(shard_bytes([1, 70_000], 20240801, 7, code="I"))
    (tmp_path / "train.bin").write_bytes(struct.pack("<H", 9))  # shards come first
    assert read_all(open_data(tmp_path, vocab_size=70_001).split("train")) == [1, 70_000, 3, 4]
    assert "holds token id 70000" in error(open_data(tmp_path, vocab_size=70_000).split, "train")


# ------------------------------------------------------------------------------------------------------------ damage

GOOD = shard_bytes(range(200))
DAMAGE = {
    "cut in the magic": (GOOD[:3], "is no shard"),
    "cut in the header": (GOOD[:500], "is truncated: 500 bytes"),
    "cut in the tokens": (GOOD[:-2], "is truncated: 1422 bytes, but its header says 200 tokens, 1424 bytes"),
    "cut in a token": (GOOD[:-1], "is truncated"),
    "too long": (GOOD + b"\0", "is too long"),
    "count too large": (shard_bytes(range(200), count=201), "is truncated"),
    "count too small": (shard_bytes(range(200), count=199), "is too long"),
    "count negative": (shard_bytes(range(200), count=-1), "is too long"),
    "no tokens": (shard_bytes([]), "holds no tokens"),
    "other magic": (
        shard_bytes(range(200), magic=20240521),
        "is no shard: it begins with 20240521, not with 20240520 or 20240801",
    ),
    "other version": (shard_bytes(range(200), version=2), "is a shard of version 2, not 1"),
    "wide magic, narrow tokens": (shard_bytes(range(200), 20240801, 7), "is truncated"),
    "empty": (b"", "is empty"),
    "another whole shard": (shard_bytes(range(100)), "holds 100 tokens, but meta.json says 200"),
}


@pytest.mark.parametrize("content, fact", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("script", [True, False])
def test_damaged_shard_is_one_line(tmp_path, content, fact, script):
    folder = prepare(tmp_path / "set")
    (folder / "train_000000.bin").write_bytes(content)
    if script:
        (folder / "prepare.py").touch()
    message = error(open_data(folder).split, "train")
    assert f"{folder}/train_000000.bin {fact}" in message
    assert message.endswith(f"run python {folder}/prepare.py" if script else "copy or prepare it again")
    assert read_all(open_data(folder).split("val")) == list(range(100, 150))  # one bad file does not spoil the other


@pytest.mark.parametrize("name", ["cut in the header", "cut in the tokens", "too long", "other version"])
def test_a_damaged_shard_is_no_raw_file(tmp_path, name):
    content, fact = DAMAGE[name]
    (tmp_path / "train.bin").write_bytes(content)
    assert fact in error(open_data(tmp_path, vocab_size=60_000).split, "train")
    (tmp_path / "train.bin").write_bytes(GOOD)
    assert read_all(open_data(tmp_path, vocab_size=60_000).split("train")) == list(range(200))


def test_file_that_cannot_be_read(tmp_path):
    folder = prepare(tmp_path)
    path = folder / "train_000000.bin"
    path.unlink()
    assert "train_000000.bin cannot be read (No such file or directory); " in error(open_data(folder).split, "train")
    path.mkdir()
    assert "cannot be read (Is a directory)" in error(open_data(folder).split, "train")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path):
    prepare(tmp_path).joinpath("train_000000.bin").chmod(0)
    assert "cannot be read (Permission denied)" in error(open_data(tmp_path).split, "train")


def test_token_ids_outside_the_vocabulary(tmp_path):
    with ShardWriter(tmp_path, ByteTokenizer()) as out:
        for bad in (-1, 257):
            assert f"token id {bad} is outside the vocabulary of 257" in error(out.add, "train", np.array([1, bad, 2]))
        out.add("train", np.array([1]))
    meta = json.loads((tmp_path / "meta.json").read_text())
    record = meta["splits"]["train"]["shards"][0]
    content = shard_bytes([300])
    (tmp_path / record["name"]).write_bytes(content)
    for known in (300, None):  # as recorded, and by reading the file
        record["max_token"] = known
        if known is None:
            del record["max_token"]
        (tmp_path / "meta.json").write_text(json.dumps(meta))
        assert "holds token id 300, but the vocabulary has only 257" in error(open_data(tmp_path).split, "train")
        # a larger model does not make the data right
        assert "holds token id 300" in error(open_data(tmp_path, vocab_size=512).split, "train")


def test_verify_finds_one_changed_bit(tmp_path):
    folder = prepare(tmp_path)
    content = bytearray((folder / "val_000000.bin").read_bytes())
    content[-2] ^= 1
    (folder / "val_000000.bin").write_bytes(content)
    open_data(folder).split("val")
    data = open_data(folder, verify=True)
    data.split("train")
    assert "val_000000.bin was changed: its SHA-256" in error(data.split, "val")


def test_verify_needs_checksums(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"ab")
    message = error(open_data(tmp_path, vocab_size=65_536, verify=True).split, "train")
    assert "train.bin cannot be verified" in message and message.endswith("pass --verify_data=False")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        pytest.param("[" * 100_000, id="deep"),
        "[]",
        "3",
        "{}",
        '{"vocab_size": "65"}',
        '{"vocab_size": 0}',
        '{"vocab_size": 5, "eot": 5}',
        '{"vocab_size": 5, "splits": {"train": 1}}',
    ]
    + [
        '{"vocab_size": 5, "splits": {"train": {"shards": [{"name": "a"}]}}}',
        '{"vocab_size": 5, "tokenizer": {"kind": "x"}}',
    ]
    + [
        '{"vocab_size": 5, "tokenizer": {"kind": "byte"}}',
        '{"vocab_size": 257, "tokenizer_hash": "0", "tokenizer": {"kind": "byte"}}',
        "\udcff",
    ],
)
def test_damaged_meta_is_one_line(tmp_path, text):
    (tmp_path / "train.bin").write_bytes(b"\1\0")
    (tmp_path / "meta.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    error(open_data, tmp_path)


# --------------------------------------------------------------------------------------------------------- open_data


def test_names_paths_and_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/pycode").mkdir(parents=True)
    (tmp_path / "data/pycode/prepare.py").touch()
    assert "no data set 'pycoed' in data and no such folder; did you mean pycode?" in error(open_data, "pycoed")
    assert "known are pycode" in error(open_data, "zzz")
    assert error(open_data, "pycode").startswith("data/pycode is not prepared")
    assert error(open_data, "pycode").endswith("; run python data/pycode/prepare.py")
    prepare("data/pycode")
    prepare("elsewhere", train=range(7))
    assert len(open_data("pycode").split("train")) == 200
    assert len(open_data("elsewhere").split("train")) == len(open_data(tmp_path / "elsewhere").split("train")) == 7
    assert "data/pycode has no split test" in error(open_data("pycode").split, "test")
    assert open_data("pycode").split("train").name == "data/pycode train"


def test_vocabulary_flag(tmp_path):
    folder = prepare(tmp_path)
    data = open_data(folder)
    assert (data.vocab_size, data.eot, data.tokenizer.spec) == (257, 256, {"kind": "byte"})
    assert open_data(folder, vocab_size=320).vocab_size == 320
    assert "has a vocabulary of 257, more than vocab_size=256" in error(open_data, folder, vocab_size=256)


# ----------------------------------------------------------------------------------------------------- interruptions


def test_an_interrupted_preparation_leaves_the_old_data(tmp_path):
    prepare(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        with ShardWriter(tmp_path, ByteTokenizer(), shard_tokens=5) as out:
            out.add("train", np.arange(13))
            raise KeyboardInterrupt
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert "no tokens for the split val" in error(prepare, tmp_path, val=[])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def killed_while(work) -> None:
    """Run `work` in a process that ends at its first RuntimeError as if by SIGKILL: nothing is cleaned up."""
    if (child := os.fork()) == 0:
        try:
            work()
        except RuntimeError:
            pass
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_leftovers_of_a_killed_preparation_are_cleaned_up(tmp_path):
    prepare(tmp_path)

    def work():
        out = ShardWriter(tmp_path, ByteTokenizer(), shard_tokens=5).__enter__()
        out.add("train", np.arange(13))
        os._exit(0)

    killed_while(work)
    assert list((tmp_path / shards.PREPARING).iterdir())
    assert read_all(open_data(tmp_path, verify=True).split("train")) == list(range(200))
    prepare(tmp_path, train=range(3))
    assert read_all(open_data(tmp_path, verify=True).split("train")) == [0, 1, 2]
    assert not (tmp_path / shards.PREPARING).exists()


@pytest.mark.parametrize("moves", [0, 1, 2, 3, 4])
def test_a_crash_between_the_renames_never_passes_for_data(tmp_path, monkeypatch, moves):
    prepare(tmp_path, train=range(200))
    real, done = os.replace, []

    def replace(*paths):
        if len(done) == moves:
            os._exit(0)
        done.append(real(*paths))

    def work():
        monkeypatch.setattr(os, "replace", replace)
        prepare(tmp_path, train=range(199, -1, -1))  # the same sizes: only its content tells the new shard from the old

    killed_while(work)
    if 0 < moves < 4:  # the mark, two shards, meta.json
        assert "was cut off while it moved its files" in error(open_data, tmp_path, vocab_size=257)
        with pytest.raises(KeyboardInterrupt):
            with ShardWriter(tmp_path, ByteTokenizer()):
                raise KeyboardInterrupt  # and a second one, stopped early, does not hide it
        assert "was cut off while it moved its files" in error(open_data, tmp_path, vocab_size=257)
    else:
        expected = list(range(200)) if moves == 0 else list(range(199, -1, -1))
        assert read_all(open_data(tmp_path, verify=True).split("train")) == expected
    prepare(tmp_path)
    assert read_all(open_data(tmp_path, verify=True).split("train")) == list(range(200))


def test_stale_shards_go_and_other_files_stay(tmp_path):
    prepare(tmp_path, train=range(250), shard_tokens=50)
    (tmp_path / "prepare.py").touch()
    (tmp_path / "input.txt").touch()
    with ShardWriter(tmp_path, ByteTokenizer()) as out:
        out.add("train", np.arange(9))
    assert sorted(os.listdir(tmp_path)) == ["input.txt", "meta.json", "prepare.py", "train_000000.bin"]


def test_an_open_stream_survives_a_new_preparation(tmp_path):
    stream = open_data(prepare(tmp_path)).split("train")
    prepare(tmp_path, train=[0] * 200)
    assert read_all(stream) == list(range(200))


def test_two_preparations_do_not_mix(tmp_path):
    with ShardWriter(tmp_path, ByteTokenizer()) as out:
        out.add("train", np.arange(4))
        assert "is being prepared by another process" in error(prepare, tmp_path)
    assert read_all(open_data(tmp_path, verify=True).split("train")) == [0, 1, 2, 3]


def test_opening_does_not_read_a_prepared_shard(tmp_path):
    """The recorded largest id stands for the scan; otherwise every start of a run reads all of the data."""
    folder = prepare(tmp_path)
    (folder / "train_000000.bin").write_bytes(shard_bytes([60_000] * 200))
    assert len(open_data(folder).split("train")) == 200  # found by verify, or by the loader when it reads it
