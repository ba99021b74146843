"""The prepare scripts of single data sets, compared with loops over their files."""

import hashlib
import random
import socket
import sys
import sysconfig
import threading

import pytest
from helpers import read_all
from preparing import error, load

from data.dataset import open_data
from data.shakespeare_char import text as shakespeare
from data.tokenizer import ByteTokenizer

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def test_pycode_holds_every_source_once(call, tmp_path, monkeypatch):
    """In the order of their names. Those whose names have the first hashes validate, as far as there is room."""
    rng, sources = random.Random(0), {"note.txt": b"x"}
    for i in range(300):
        folder = rng.choice(["", "a/", "a/b/", *(f"c/{name}/" for name in sorted(LEFT_OUT))])
        sources[f"{folder}{i}.py"] = rng.randbytes(i % 60)
    for name, content in sources.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: tmp_path / "library")
    out = tmp_path / "out"
    code, said, _ = call("pycode", f"--out={out}", "--val_fraction=0.1")
    assert code == 0 and said.count("\n") == 1
    assert f"next: python train.py config/train_pycode.py --dataset={out} --out_dir=out/out" in said

    names = [name for name in sorted(sources) if sources[name] and name.endswith(".py")]
    names = [name for name in names if not LEFT_OUT & {*name.split("/")}]
    validates, room = set(), 0.1 * sum(len(sources[name]) for name in names)
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if len(sources[name]) <= room:
            validates.add(name)
            room -= len(sources[name])
    assert 5 < len(validates) < len(names) / 2
    data = open_data(out, verify=True)
    for split in ("train", "val"):
        expected = [sources[name] for name in names if (name in validates) == (split == "val")]
        assert read_all(data.split(split)) == [i for content in expected for i in (*content, data.eot)]
        assert data.meta["splits"][split]["documents"] == len(expected)


TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 30


@pytest.mark.parametrize("as_url", [False, True])
def test_shakespeare_is_nanogpts_token_for_token(call, tmp_path, as_url):
    source = tmp_path / "my text.txt"
    source.write_text(TEXT)
    if as_url:
        source = source.as_uri()
    assert call("shakespeare_char", f"--input={source}", f"--out={tmp_path / 'out'}")[0] == 0
    table = {c: i for i, c in enumerate(sorted(set(TEXT)))}
    n = len(TEXT)
    data = open_data(tmp_path / "out", verify=True)
    assert read_all(data.split("train")) == [table[c] for c in TEXT[: int(n * 0.9)]]
    assert read_all(data.split("val")) == [table[c] for c in TEXT[int(n * 0.9) :]]
    assert data.eot is None and data.vocab_size == len(table) and data.tokenizer.decode([0, 1]) == "\n "


@pytest.fixture
def script(tmp_path, monkeypatch):
    """data/shakespeare_char/text.py without its text, and with the text above as its download."""
    monkeypatch.setattr(shakespeare, "TEXT", tmp_path / "set" / "input.txt")
    monkeypatch.setattr(shakespeare, "URL", (tmp_path / "remote.txt").as_uri())
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(TEXT.encode()).hexdigest())
    (tmp_path / "remote.txt").write_text(TEXT)
    return shakespeare


def test_shakespeare_download_is_checked(script, tmp_path):
    (tmp_path / "remote.txt").write_text(TEXT[:-1])
    message = error(script.shakespeare)
    assert "has the SHA-256 " in message and message.endswith("; get it elsewhere and pass --input=FILE")
    assert not script.TEXT.exists()
    (tmp_path / "remote.txt").write_text(TEXT)
    assert script.shakespeare().decode() == script.TEXT.read_text() == TEXT


@pytest.mark.parametrize("answer", [b"HTTP/1.0 404 No\r\n\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nx", None])
def test_shakespeare_with_a_bad_server(script, answer, monkeypatch):
    monkeypatch.setattr(script, "SECONDS", 0.3)

    def serve():
        connection, _ = server.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        if answer:
            threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/input.txt"
        message = error(script.download, url)
    assert message.startswith("cannot download http://127.0.0.1") and "; put the text at" in message


def test_shakespeare_in_tokens_is_split_by_characters(tmp_path, monkeypatch):
    """The byte tokenizer replaces GPT-2's, whose table may be missing here."""
    module, text = load("shakespeare"), "é" * 19 + "a"
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(module, "GPT2Tokenizer", ByteTokenizer)
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"--input={tmp_path / 'a.txt'}", f"--out={tmp_path / 'out'}"])
    module.main()
    data = open_data(tmp_path / "out", verify=True)
    assert bytes(read_all(data.split("train"))) == b"\xc3\xa9" * 18  # of 20 characters, not of 39 bytes
    assert bytes(read_all(data.split("val"))) == "éa".encode()
