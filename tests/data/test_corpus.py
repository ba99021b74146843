"""Preparations compared with a naive loop over the documents: all formats, any number of threads, kills, restarts."""

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock, call

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import corpus, sources
from data.corpus import prepare
from data.dataset import open_data
from data.tokenizer import ByteTokenizer, CharTokenizer, build, train_bpe
from data.writer import PREPARING, ShardWriter
from engine.prompts import prompt_ids, read_prompt, read_text
from tests.data import preparing
from tests.data.preparing import args, error, files_of, splits_of, texts, tokens_of, validates, write_set
from tests.helpers import ROOT, changes_until_killed


def naive(documents, tokenizer, separator="\n") -> dict[str, list[int]]:
    """The ids of each split, by a loop over the documents. Without end-of-text a separator ends each document. Empty
    documents are counted and have no ids."""
    splits = {"train": [], "val": []}
    for number, text in enumerate(documents):
        ids = splits["val" if validates(number, 0.2) else "train"]
        if text and tokenizer.eot is None:
            ids += tokenizer.encode(text.removesuffix(separator) + separator).tolist()
        elif text:
            ids += [*tokenizer.encode(text).tolist(), tokenizer.eot]
    return splits


def write_file(path: Path, documents: list[str]) -> None:
    """Writes all documents in the format of the file's name."""
    kind, _, packed = path.name.rpartition("_")[2].partition(".")
    records = [{"id": i, "text": text, "other": "no"} for i, text in enumerate(documents)]
    if packed == "parquet":
        return preparing.write_records(path, records)
    if packed.startswith("jsonl"):
        content = "".join(json.dumps(each) + "\n \n"[: 1 + i % 5 // 3 * 2] for i, each in enumerate(records))
    elif kind == "paragraph":
        ends = ["\n\n", "\n \t\n\n", "\n\n\n", "\r\n\r\n"]
        content = "\n\n" + "".join(text + ends[i % 4] for i, text in enumerate(documents)).rstrip("\r\n")
    else:
        content = "".join(text + ["\n", "\r\n", "\n\n"][i % 3] for i, text in enumerate(documents))
    parts = [content.encode()[:99], content.encode()[99:]]  # two members, as `cat a.gz b.gz` makes
    if packed.endswith("gz"):
        parts = map(gzip.compress, parts)
    if packed.endswith("zst"):
        parts = [pa.compress(part, "zstd", asbytes=True) for part in parts]
    path.write_bytes(b"".join(parts))


WEB = [*texts(60), *texts(60, seed=1)]
FORMATS = ["line.txt", "paragraph.txt", "line.txt.gz", "paragraph.txt.zst"]
FORMATS += ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_equal_a_naive_loop(tmp_path, small, name, tokenizer):
    documents = texts(90)
    separator = "\n"
    kind = name.partition(".")[0]  # of documents, where these are texts
    if kind == "paragraph":
        separator = "\n\n"
        documents = [text.replace(" (a) ", "\n  (a) ") for text in documents]
    elif kind == "a":
        documents[::3] = [text + "\n" for text in documents[::3]]
    for i in range(3):  # b.x is read after a.x
        write_file(tmp_path / f"{'cab'[i]}_{name}", documents[[60, 0, 30][i] :][:30])
    prepare(args(tmp_path / "out", tokenizer, documents=kind), sources.find_files([f"{tmp_path}/*_{name}"]))
    data = open_data(tmp_path / "out")
    assert splits_of(tmp_path / "out") == naive(documents, data.tokenizer, separator)
    val = sum(validates(i, 0.2) for i in range(90))
    assert [data.meta["splits"][split]["documents"] for split in ("train", "val")] == [90 - val, val]


@pytest.mark.parametrize("kind", ["char", "byte", "bpe:300"])
def test_tokenizers_equal_a_naive_loop_with_any_threads(tmp_path, small, kind):
    tokenizer = build(kind, lambda: [text + "\n" * (kind == "char") for text in texts(90)])
    for i, text in enumerate(texts(90)):  # whole files
        (tmp_path / f"{i:03}.txt").write_text(text, newline="")
    written = []
    for threads in (1, 2, 8):
        prepare(args(tmp_path / f"out{threads}", kind, threads=threads), sources.find_files([str(tmp_path)]))
        written.append(files_of(tmp_path / f"out{threads}"))
    assert written[0] == written[1] == written[2]
    assert len(written[0]) > 3
    data = open_data(tmp_path / "out1")
    assert data.tokenizer.hash == tokenizer.hash
    assert data.eot == tokenizer.eot
    assert splits_of(tmp_path / "out1") == naive(texts(90), tokenizer)


LEARNED = ["\n".join(texts(300)), (ROOT / "train.py").read_text()]
BPE = train_bpe(LEARNED, 700)
GPT2 = preparing.gpt2_of_other_merges(LEARNED)
BLANKS = st.text(st.sampled_from(" \n\t\r\x1c\u3000\xa0a1.'x猫é_"), max_size=60)


@given(BLANKS | st.text(max_size=60), st.integers(1, 12))
@settings(max_examples=150)
def test_pieces_have_the_ids_of_the_whole(text, length):
    parts = list(corpus.cut(text, length))
    assert "".join(parts) == text
    assert all(len(p) >= length for p in parts[:-1])
    for tokenizer in (BPE, GPT2, ByteTokenizer(), CharTokenizer(text + " ")):
        assert [i for p in parts for i in tokenizer.encode(p).tolist()] == tokenizer.encode(text).tolist()


LINE = b'{"text": "a"}\n'
DOCUMENTS = ("file", "line", "paragraph")
LONG = b"word " * 30_000
WITH_BREAKS = b"short\n\n" + (b"word " * 15 + b"\n") * 2000
BAD = [
    ("a.jsonl", LINE + b"\n{nope\n", "a.jsonl:3 is not JSON"),
    ("a.jsonl", LINE + b'{"a": "b", "c": "d"}', "a.jsonl:2 has no field 'text'; pass --field or --pairs of a, c"),
    ("a.jsonl", LINE + b'{"text": null}', "a.jsonl:2: text is None, not text"),
    ("a.jsonl", b"[" * 100_000, "a.jsonl:1 is not JSON"),
    ("a.jsonl", LINE + b'{"text": "\xff"}', "a.jsonl:2 is not JSON ('utf-8' codec can't decode byte 0xff"),
    ("a.txt", b"ab\n\ncd\naf\xe9\n", "a.txt is not UTF-8 text: byte 9 is 0xe9"),
    ("a.parquet", b"", "a.parquet cannot be read ("),
    ("a.json", b'[{"text": "one"}]', "one object a line, as jq -c '.[]' does of a list"),
    ("a.txt", "one".encode("utf-16-le"), "holds NUL bytes, as archives and UTF-16 do; unpack or convert it"),
    ("a.jsonl", LONG, "a.jsonl:1 has more than"),
]  # fmt: skip
BAD = [(*row, DOCUMENTS) for row in BAD] + [
    ("a.txt", LONG, "the document that begins at byte 0 has more than", ["file", "line"]),
    ("a.txt", WITH_BREAKS, "the document that begins at byte 7 has more than", ["paragraph"]),
    ("a.txt", b"o", "has 0 tokens, and needs two", DOCUMENTS),
]


@pytest.mark.parametrize("name, content, words, kinds", BAD)
def test_bad_files_and_lines_are_named(tmp_path, monkeypatch, name, content, words, kinds):
    monkeypatch.setattr(sources, "LARGEST", 120_000)
    (tmp_path / name).write_bytes(content)
    for documents in kinds:
        message = error(prepare, args(tmp_path / "out", documents=documents), [str(tmp_path / name)])
        assert words in message
        if "has more than" in words:
            assert ("--documents=line" in message) == (name == "a.txt")  # which has no effect on records
    assert not (tmp_path / "out" / PREPARING).exists()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_damaged_files_are_named(tmp_path, name):
    write_file(tmp_path / name, texts(200))
    whole = (tmp_path / name).read_bytes()
    for content in (whole[:-4], whole[: len(whole) // 2], b"\0garbage" * 100):
        (tmp_path / name).write_bytes(content)
        assert f"{name} cannot be read (" in error(prepare, args(tmp_path / "out"), [str(tmp_path / name)])


@given(st.text(st.sampled_from("ab \n猫"), min_size=2, max_size=300), st.floats(0.01, 0.99), st.integers(1, 100))
@settings(max_examples=25)
@pytest.mark.parametrize("kind", ["char", "byte"])
def test_a_single_text_is_cut_in_two(tmp_path_factory, kind, text, fraction, job):
    """No character is lost or repeated. The last part has its length, or up to half more to begin with a line."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text(text, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "JOB_CHARACTERS", job)
        try:
            prepare(args(folder / "out", kind, val_fraction=fraction), [str(folder / "a.txt")])
        except ValueError as e:
            assert "has 1 tokens, and needs two" in str(e)
            assert kind == "char"
            return
    decode = open_data(folder / "out").tokenizer.decode
    train, val = (decode([i for i in ids if i != 256]) for ids in splits_of(folder / "out").values())
    least = len(text) - min(max(int(len(text) * (1 - fraction)), 1), len(text) - 1)
    assert train + val == text
    assert least <= len(val) <= least * 1.5
    assert len(val) == least or train.endswith("\n")


def test_a_single_text_by_default(tmp_path):
    """nanoGPT's 90 to 10; all of the validation for a limited number of shards."""
    text = "".join(f"line {i} {'word ' * (i % 7)}\n" for i in range(400))
    (tmp_path / "a.txt").write_text(text)
    for name, shards in ("out", 0), ("some", 3):
        flags = args(tmp_path / name, val_fraction=None, shard_tokens=500, shards=shards)
        prepare(flags, [str(tmp_path / "a.txt")])
    train, val = splits_of(tmp_path / "out").values()
    assert 0.1 * len(text) <= len(val) - 1 < 0.1 * len(text) + 50
    assert bytes(val[:5]) == b"line "
    assert splits_of(tmp_path / "some") == {"train": train[:1500], "val": val}


def test_of_many_documents_one_in_two_hundred_validates(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(1000)))
    prepare(args(tmp_path / "out", val_fraction=None, documents="line"), [str(tmp_path / "a.txt")])
    val = open_data(tmp_path / "out").meta["splits"]["val"]["documents"]
    assert val == sum(validates(i, 0.005) for i in range(1000)) > 1


def test_find_files(tmp_path, monkeypatch, capsys):
    names = ("b.txt", "a.jsonl", "sub/c.parquet", "sub/d.TXT.zst", "note.md", "we[i]rd.txt", "._b.txt")
    for name in (*names, ".ipynb_checkpoints/b-checkpoint.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "broken.txt").symlink_to("nothing")
    assert sources.find_files(["sub"]) == ["sub/c.parquet", "sub/d.TXT.zst", *(
        f"sub/loop/{name}" for name in ("a.jsonl", "b.txt", "we[i]rd.txt"))]  # fmt: skip
    capsys.readouterr()
    assert sources.find_files([".", f"{tmp_path}/b.txt"]) == [f"{tmp_path}/b.txt", "a.jsonl", "sub/c.parquet",
        "sub/d.TXT.zst", "we[i]rd.txt"]  # fmt: skip
    left_out = "2 hidden names, 1 of other kinds, 1 names that are no files, 1 second names of a file"
    assert capsys.readouterr().err == f"files to read: 5; left out: {left_out}\n"
    sources.find_files(["[bs]*"])
    assert capsys.readouterr().err == "files to read: 1; left out: 2 names that are no files\n"
    assert sources.find_files(["*.md", "./b.txt", "b.*", "**/d*"]) == ["b.txt", "note.md", "sub/d.TXT.zst"]
    assert sources.find_files(["we[i]rd.txt"]) == ["we[i]rd.txt"]
    (tmp_path / "empty").mkdir()
    said = error(sources.find_files, ["b.txt", "empty"])
    assert "is in the folder 'empty'; name other files by a pattern, such as 'empty/*.md'" in said
    for nothing in ("x/*.txt", "su*"):  # su* is a folder only
        assert f"no regular file matches '{nothing}'; check the path" in error(sources.find_files, ["b.txt", nothing])


def read(path: Path, *arguments, **keywords) -> list:
    return [document for document, *_ in sources.Source([str(path)], *arguments, **keywords).read()]


def test_records_by_every_name_and_byte_order_marks(tmp_path):
    """Which are no text: of records, in texts to prepare, in prompts and in texts to evaluate."""
    for name in ("a.jsonl", "a.json", "a.ndjson", "a.JSONL", "a.Json.gz"):
        for mark in (b"", b"\xef\xbb\xbf"):
            content = mark + b'{"text": "one"}\n{"text": "two"}\n'
            (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
            assert read(tmp_path / name) == ["one", "two"]
            assert sources.RECORDS.search(name)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfnaive")
    for documents in DOCUMENTS:
        assert read(path, documents) == ["naive"]
    assert read_prompt(f"FILE:{path}") == read_text("file", str(path), 99) == "naive"


@given(st.lists(st.text("ab\n <|>", max_size=9), min_size=1, max_size=9), st.integers(1, 40))
@settings(max_examples=40)
def test_documents_between_separators(tmp_path_factory, parts, block):
    path = tmp_path_factory.mktemp("data") / "a.txt"
    text = "<|end|>".join(parts)
    path.write_text(text)
    expected = [part.strip("\n") for part in text.split("<|end|>") if part.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        assert read(path, separator="<|end|>") == expected
        assert [row.text for row in sources.Source([str(path)], separator="<|end|>").read(0, 1)] == expected[1:]


def test_what_is_said_of_documents(tmp_path, capsys):
    file = tmp_path / "a.txt"
    file.write_text("\n<|endoftext|>\n".join(["a tale", "a story"] * 50))
    prepare(args(tmp_path / "out", "char", documents="line"), [str(file)])  # which has no end-of-text of its own
    said = capsys.readouterr().err
    assert "warning: 99 documents hold <|endoftext|>" in said
    assert "pass --separator='<|endoftext|>'" in said
    prepare(args(tmp_path / "out", separator="<|endoftext|>"), [str(file)])
    val = open_data(tmp_path / "out").meta["splits"]["val"]["documents"]
    assert val == sum(validates(i, 0.2) for i in range(100))
    assert capsys.readouterr().err == ""
    text = ByteTokenizer().decode(tokens_of(tmp_path / "out", "train"))
    assert {*text.split("<|endoftext|>")} == {"", "a story", "a tale"}
    prompt_ids(ByteTokenizer(), "<|endoftext|>")
    assert "<|endoftext|> in the prompt is ordinary text" in capsys.readouterr().err
    message = error(prepare, args(tmp_path / "out", documents="line", separator="x"), [str(file)])
    assert message.startswith("separator='x' has no effect")


@pytest.fixture
def web(tmp_path) -> list[str]:
    write_file(tmp_path / "a.jsonl", WEB[:60])
    write_file(tmp_path / "b.parquet", WEB[60:])
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")]


@pytest.mark.parametrize("name, flags", [
    ("[ab].*", {}), ("[ab].*", {"pairs": "text,other"}), ("c.txt", {"val_fraction": None}),
])  # fmt: skip
def test_killed_at_any_write_the_result_is_the_same(tmp_path, web, small, monkeypatch, name, flags):
    (tmp_path / "c.txt").write_text("".join(f"line {i} {'word ' * (i % 7)}\n" for i in range(900)))
    files = sources.find_files([f"{tmp_path}/{name}"])
    whole = tmp_path / "whole"
    folder = tmp_path / "out"
    add = ShardWriter.add
    monkeypatch.setattr(ShardWriter, "add", lambda *arguments: sys.audit("change") or add(*arguments))

    def work(**more):
        prepare(args(folder, **flags, **more), files)

    total = changes_until_killed(lambda: prepare(args(whole, **flags), files))
    old = write_set(tmp_path / "old", range(5), range(3))
    assert total > 50
    assert len(files_of(whole)) > 8
    rng = random.Random(time.time_ns())  # over the days, all writes
    moves = range(total - 21, total + 1)  # the moves into place
    for n in (rng.randrange(1, moves[0]), rng.choice(moves)):
        shutil.copytree(old, folder)
        assert changes_until_killed(work, n) == n
        meta = (folder / "meta.json").read_bytes()
        if meta == (old / "meta.json").read_bytes():
            assert splits_of(folder) == splits_of(old)
        elif b"half prepared" in meta:
            assert "stopped while it moved its files" in error(open_data, folder, vocab_size=257)
            with pytest.raises(KeyboardInterrupt), ShardWriter(folder, ByteTokenizer()):
                raise KeyboardInterrupt  # a second preparation that stops early does not hide it
            assert "stopped while it moved its files" in error(open_data, folder, vocab_size=257)
        else:
            assert meta == (whole / "meta.json").read_bytes()
        if n % 3 == 0:
            changes_until_killed(work, rng.randint(1, total // 3))
        work(threads=7)
        assert files_of(folder) == files_of(whole), n
        shutil.rmtree(folder)


def test_full_shards_are_not_encoded_again(tmp_path, web, small, monkeypatch, capsys):
    encoded = []
    real = ByteTokenizer.encode

    def encode(self, text):
        encoded.append(text)
        if len(encoded) == stop:
            raise KeyboardInterrupt
        return real(self, text)

    stop = 0
    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    prepare(args(tmp_path / "whole"), web)
    whole = encoded.copy()
    encoded.clear()
    stop = int(0.8 * len(whole))
    with pytest.raises(KeyboardInterrupt):
        prepare(args(tmp_path / "out", threads=1), web)
    encoded.clear()
    prepare(args(tmp_path / "out"), web)
    assert len(encoded) < len(whole) / 2
    assert not Counter(encoded) - Counter(whole)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert re.search(r"continues after \d+ documents", capsys.readouterr().err)


def test_an_unfinished_preparation_is_not_mixed_with_another(tmp_path, web, small, monkeypatch):
    monkeypatch.setattr(sources, "ENDS", 100)
    changes_until_killed(lambda: prepare(args(tmp_path / "out"), web), 40)
    message = error(prepare, args(tmp_path / "out", val_fraction=0.3, shard_tokens=999), web)
    assert "holds an unfinished preparation with another val_fraction, shard_tokens; continue with its flags" in message
    assert "another state of its input;" in error(prepare, args(tmp_path / "out"), web[:1])
    file = Path(web[0])
    content = file.read_bytes()
    written = file.stat().st_mtime_ns
    for other, when in (
        (content + b'{"text": "more"}\n', written),
        (content[:-5] + content[-5:].upper(), written),
        (content.replace(b'"id": 30,', b'"id": 31,'), written + 10**9),  # between the ends: seen by its time
        (content, written),
    ):
        assert len(other) == len(content) or other.startswith(content)
        file.write_bytes(other)
        os.utime(file, ns=(when, when))
        if other != content:
            assert "another state of its input;" in error(prepare, args(tmp_path / "out"), web)
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "hash", "another")  # as that of an hf:DIR which has changed
        assert "another tokenizer;" in error(prepare, args(tmp_path / "out"), web)
    shard, progress = (tmp_path / "out" / PREPARING / name for name in ("train_000000.bin", "progress.json"))
    whole = progress.read_bytes()
    for content in (b"[" * 100_000, b'{"settings": {}, "splits": {}}'):
        progress.write_bytes(content)
        assert "progress.json cannot be used (" in error(prepare, args(tmp_path / "out"), web)
    progress.write_bytes(whole)
    for damage in lambda: os.truncate(shard, 100), shard.unlink:
        damage()
        assert "train_000000.bin differs from its saved state; delete" in error(prepare, args(tmp_path / "out"), web)
    write_set(tmp_path / "out", range(5), range(3))  # a writer without settings starts again
    assert tokens_of(tmp_path / "out", "train") == [0, 1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "meta.json", "train_000000.bin", "val_000000.bin"]


@pytest.mark.parametrize("shards", [1, 3, 1000])
def test_number_of_shards(tmp_path, web, monkeypatch, shards):
    monkeypatch.setattr(corpus, "JOB_CHARACTERS", 5000)
    prepare(args(tmp_path / "out", shards=shards), web)
    n = 0
    while n < 120 and len(naive(WEB[:n], ByteTokenizer())["train"]) < shards * 1000:
        n += 1
    expected = naive(WEB[:n], ByteTokenizer())
    assert splits_of(tmp_path / "out") == expected | {"train": expected["train"][: shards * 1000]}
    assert sum(split["documents"] for split in open_data(tmp_path / "out").meta["splits"].values()) == n


def test_offline_is_said_at_once(call, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    address = "http://127.0.0.1:9"  # where nobody listens
    monkeypatch.setattr(constants, "ENDPOINT", address)
    code, _, err = call("openwebtext", f"--out={tmp_path}/out")
    assert code == 2
    assert err.startswith("error: hf:Skylion007/openwebtext cannot be read")
    assert f"{address} does not answer" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_hubs_files(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(sources, "check_hub", lambda: None)
    builder = Mock()
    builder.return_value.config.data_files = {"train": ["hf://b", "hf://a"]}
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    assert sources.find_files(["hf:a/b:c-1"]) == sources.find_files(["hf:a/b@refs/pr/18:c"]) == ["hf://a", "hf://b"]
    assert builder.mock_calls == [call("a/b", "c-1", revision=None), call("a/b", "c", revision="refs/pr/18")]
    builder.side_effect = RuntimeError("no scripts\nand more")
    assert "hf:a/script cannot be read from the hub (no scripts)" in error(sources.hub_files, "hf:a/script")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs datasets to be read; pip install -e .[data]" in error(sources.hub_files, "hf:a/b")


def test_files_of_the_hub_are_read_like_others(tmp_path, web, small, monkeypatch):
    hub = Mock(**{"size.return_value": 1})
    hub.open = lambda name: open(tmp_path / name.removeprefix("hf://"), "rb")
    monkeypatch.setattr(sources, "_hub", lambda: hub)
    files = ["hf://a.jsonl", "hf://b.parquet"]
    prepare(args(tmp_path / "local"), web)
    prepare(args(tmp_path / "out"), files)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "local")
    hub.open = Mock(side_effect=LookupError("gone\nfor ever"))
    assert "hf://a.jsonl cannot be read (gone); try again" in error(prepare, args(tmp_path / "out"), files)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc, which Linux has")
def test_memory_is_bounded(tmp_path):
    """A separate process prepares 50 MB, last a document of 10 MB that Python stores in four bytes per character."""
    file = tmp_path / "a.jsonl"
    with open(file, "w") as f:
        f.writelines([json.dumps({"text": "some words of text " * 1000}) + "\n"] * 2000)
        f.write(json.dumps({"text": "a long document. " * 600_000 + "\U0001f600"}, ensure_ascii=False) + "\n")
    code = (
        "import json, re, sys; from argparse import Namespace; from data import corpus\n"
        "peak = lambda: int(re.search('VmHWM:\\s*([0-9]+)', open('/proc/self/status').read())[1])\n"
        "before = peak(); corpus.prepare(Namespace(**json.loads(sys.argv[1])), sys.argv[2:]); print(peak() - before)"
    )
    flags = json.dumps(vars(args(tmp_path / "out", shard_tokens=10**8)))
    run = [sys.executable, "-c", code, flags, str(file)]
    out = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    assert int(out.split()[-1]) < 185_000  # kB; with all texts at once it is 233,000
    tokens = open_data(tmp_path / "out").meta["splits"]
    assert sum(tokens[s]["tokens"] for s in tokens) == 17 * 600_000 + 2000 * 19_000 + 2001 + 4
