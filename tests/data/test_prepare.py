"""The prepare scripts as users run them: a command, its files, its exit code."""

import hashlib
import os
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import read_all
from preparing import command, load

from data.dataset import open_data
from data.shakespeare_char import text as shakespeare
from data.tokenizer import ByteTokenizer

# ------------------------------------------------------------------------------------------------------------ pycode


def test_pycode_holds_every_source_once(tmp_path):
    result = command("pycode", f"--out={tmp_path}", "--val_fraction=0.1", cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.count("\n") == 1, result
    assert f"next: python train.py config/train_pycode.py --dataset={tmp_path} --out_dir=out/{tmp_path.name}\n" in (
        result.stdout
    )
    data = open_data(tmp_path, verify=True)
    documents = {}
    for split in ("train", "val"):
        tokens = np.array(read_all(data.split(split)))
        assert tokens[-1] == data.eot
        documents[split] = [bytes(d.astype(np.uint8)) for d in np.split(tokens, np.flatnonzero(tokens == data.eot) + 1)]
        documents[split] = [d[:-1] for d in documents[split][:-1]]  # 256 became 0; the part after the last one is empty
        assert len(documents[split]) == data.meta["splits"][split]["documents"]

    stdlib = Path(os.__file__).parent
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    relative = sorted(p.relative_to(stdlib) for p in stdlib.rglob("*.py"))
    sources = [(stdlib / p).read_bytes() for p in relative if not left_out & set(p.parts)]
    assert sorted(documents["train"] + documents["val"]) == sorted(s for s in sources if s)
    n_val = sum(map(len, documents["val"]))
    assert 0.09 < n_val / sum(map(len, sources)) <= 0.1 and len(documents["val"]) > 20


def test_pycode_is_deterministic_and_sorted(tmp_path):
    prepare = load("pycode")
    for name in ("b.py", "a/z.py", "a/test/c.py", "a.py", "tests/d.py", "site-packages/e.py", "note.txt", "empty.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "empty" in name else "x" * 10)
    paths = prepare.find_sources(tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == ["a.py", "a/z.py", "b.py"]
    first = min(paths, key=lambda p: hashlib.sha256(p.relative_to(tmp_path).as_posix().encode()).hexdigest())
    for order in (paths, paths[::-1]):
        assert prepare.validation_set(order, tmp_path, 0.34) == {first}


# -------------------------------------------------------------------------------------------------- shakespeare_char

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 30


@pytest.mark.parametrize("as_url", [False, True])
def test_shakespeare_is_nanogpts_token_for_token(tmp_path, as_url):
    source = tmp_path / "my text.txt"
    source.write_text(TEXT)
    where = source.as_uri() if as_url else source
    result = command("shakespeare_char", f"--input={where}", f"--out={tmp_path / 'out'}")
    assert result.returncode == 0, result
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
    with pytest.raises(ValueError, match="has the SHA-256 .*; get it elsewhere and pass --input=FILE"):
        script.shakespeare()
    assert not script.TEXT.exists()
    (tmp_path / "remote.txt").write_text(TEXT)
    assert script.shakespeare().decode() == script.TEXT.read_text() == TEXT


@pytest.mark.parametrize("answer", [b"HTTP/1.0 404 No\r\n\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nx", None])
def test_shakespeare_with_a_bad_server(script, answer, monkeypatch):
    """It has no such file, ends early, or is silent."""
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
        with pytest.raises(ValueError, match="^cannot download http://127.0.0.1.*; put the text at"):
            script.download(url)


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
