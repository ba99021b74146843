"""Tokenizers compared with others: nanoGPT's char table, Python's UTF-8, tiktoken, Hugging Face's byte-level BPE."""

import hashlib
import json
import os
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from tokenizers.pre_tokenizers import ByteLevel

from data.base_tokenizer import LETTERS
from data.tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer, build, from_spec, train_bpe
from tests.data.preparing import error, gpt2_of_other_merges, write_text
from tests.helpers import ROOT, metrics

SOURCES = [(ROOT / name).read_text() for name in ("README.md", "ops.py", "train.py")]
SOURCES += ["it's don't I'm they'd we'll I've you're\r\n" * 99]
MIXED = (
    "naïve «été» 中文字 \U0001f600\u200d\U0001f525\r\n\t\t x  y\n\n\n  def f(a1, b22=3.1415):  # <|endoftext|>"
    "'s I'LL it's they'll \x00\xa0\u3000 "
)
BPE = train_bpe(SOURCES, 1000)
ANY_CHARACTER = st.characters() | st.characters(categories=["Cs"])  # lone surrogates too


def repaired(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(st.text(min_size=1))
def test_char_ids_are_nanogpts(text):
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    tok = CharTokenizer(text)
    assert tok.encode(text).tolist() == [table[c] for c in text]
    assert tok.decode(tok.encode(text)) == text
    assert tok.vocab_size == len(table)
    assert tok.byte_lengths[tok.encode(text)].sum() == len(text.encode())
    assert tok.eot is None
    assert r"vocabulary lacks characters of the text, such as '\udcff'; leave" in error(tok.encode, text + "\udcff")


@given(st.binary())
def test_byte_keeps_any_bytes(content):
    tok = ByteTokenizer()
    text = content.decode("utf-8", "surrogateescape")
    assert tok.decode_bytes(tok.encode(text)) == content
    if text == repaired(text):
        assert bytes(tok.encode(text).tolist()) == text.encode()
        assert tok.decode(tok.encode(text)) == text


@given(st.text(ANY_CHARACTER))
def test_lone_surrogates_never_crash_and_print(text):
    tok = ByteTokenizer()
    tok.decode(tok.encode(text)).encode()  # always printable
    char = CharTokenizer(text + "a")
    assert len(char.encode(text)) == len(text)
    char.decode(char.encode(text)).encode()
    assert BPE.decode(BPE.encode(text)) == repaired(text)


@pytest.fixture
def small_gpt2(monkeypatch) -> bytes:
    """The table of a GPT-2 with few merges, which are there to be fetched."""
    small = gpt2_of_other_merges(SOURCES[:3])
    table = "\n".join(["#version: 0.2", *map(" ".join, small.merges), ""]).encode()
    monkeypatch.setattr(GPT2Tokenizer, "SHA256", hashlib.sha256(table).hexdigest())
    monkeypatch.setattr(GPT2Tokenizer, "vocab_size", small.vocab_size)
    monkeypatch.setattr(GPT2Tokenizer, "eot", small.eot)
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda *_: table)
    return table


def test_a_run_needs_no_table_of_gpt2(small_gpt2, run, tmp_path, monkeypatch, capsys):
    """Data of older versions have none. Then a run has no bits per byte and no text of the model, and says so."""
    tokenizer = build("gpt2", list)
    write_text(tmp_path / "data", tokenizer, MIXED * 9)
    monkeypatch.setattr("tiktoken.load.read_file_cached", Mock(side_effect=ConnectionError("Max retries\nexceeded")))
    flags = [f"--dataset={tmp_path / 'data'}", "--max_iters=2", "--eval_interval=1", "--warmup_iters=0"]
    assert metrics(run(*flags, out="with"))[-1]["val_bpb"] > 0
    assert (tmp_path / "with" / "vocab.bpe").exists()
    (tmp_path / "data" / "vocab.bpe").unlink()
    capsys.readouterr()
    last = metrics(run(*flags, out="without"))[-1]
    assert last["val_loss"] > 0
    assert last["val_bpb"] is None
    assert "TIKTOKEN_CACHE_DIR" in "".join(capsys.readouterr())


def test_gpt2s_table_travels_with_the_data(small_gpt2, tmp_path, monkeypatch):
    tokenizer = build("gpt2", list)
    ids = tokenizer.encode(MIXED)
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda *_: pytest.fail("fetched again"))
    tokenizer.save(tmp_path / "data")
    for below in ("data", "data/step_00000001"):
        again = from_spec({"kind": "gpt2"}, tmp_path / below)
        assert again.encode(MIXED).tolist() == ids.tolist()
        assert again.decode(ids) == MIXED
    from_spec({"kind": "gpt2"}, tmp_path / "data").save(tmp_path / "run")
    assert [p.read_bytes() for p in (tmp_path / "run").iterdir()] == [small_gpt2]
    (tmp_path / "data" / "vocab.bpe").write_bytes(small_gpt2 + b"x")
    damaged = from_spec({"kind": "gpt2"}, tmp_path / "data")
    assert "vocab.bpe is not GPT-2's table; delete it or copy it again" in error(damaged.encode, "a")


def test_gpt2_is_tiktokens_ordinary_encoding(gpt2):
    theirs = tiktoken.get_encoding("gpt2")
    for text in ("Hello world<|endoftext|> \n\n    def main(self): it's 12\t \n ", "\udcffa\ud800", MIXED, *SOURCES):
        ids = gpt2.encode(text)
        assert ids.dtype == np.int64
        assert ids.tolist() == theirs.encode_ordinary(text)
        assert gpt2.decode(ids) == repaired(text)
        assert gpt2.eot not in ids
        assert gpt2.byte_lengths[ids].sum() == len(repaired(text).encode())
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.token_bytes[:-1] == [theirs.decode_single_token_bytes(i) for i in range(gpt2.eot)]


def test_letters_of_bytes_and_the_vocabulary_are_those_of_hugging_face():
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    assert set(LETTERS) == set(ByteLevel.alphabet())
    assert sorted(LETTERS.values()) == list(range(256))
    [(shown, _)] = level.pre_tokenize_str("".join(map(chr, range(0x800))))
    assert bytes(LETTERS[c] for c in shown) == "".join(map(chr, range(0x800))).encode()
    theirs = ByteLevelBPETokenizer(add_prefix_space=False)  # split, alphabet and training by Hugging Face
    theirs.train_from_iterator(SOURCES, 999, min_frequency=2, show_progress=False)
    ids = {i: bytes(LETTERS[c] for c in token) for token, i in theirs.get_vocab().items()}
    assert [BPE.token_bytes[i] for i in range(1000) if i != BPE.eot] == [ids[i] for i in range(999)]
    assert (BPE.vocab_size, BPE.token_bytes[BPE.eot], BPE.byte_lengths[BPE.eot]) == (1000, b"<|endoftext|>", 0)


def test_bpe_larger_than_the_text_supports():
    """abc is ab + c, each twice; xy occurs once. So there are end-of-text, the 256 bytes, and two merges."""
    texts = ["abc", "abc", "xy", "\udcff"]
    for n in (256, 1_000_001):
        assert f"bpe:{n} is not possible; pass 257" in error(train_bpe, texts, n)
    assert "bpe:260 is larger than the text supports; use bpe:259 or" in error(train_bpe, texts, 260)
    tok = train_bpe(texts, 259)
    pieces = [tok.token_bytes[i] for i in tok.encode("xyabcabab")]
    assert tok.token_bytes[257:] == [b"ab", b"abc"]
    assert pieces == [b"x", b"y", b"abc", b"ab", b"ab"]


def test_hash_is_stable_and_tells_apart():
    # sha256sum of '{"kind": "byte"}'. With another hash no prepared data set would match its tokenizer.
    assert ByteTokenizer().hash == "68513ce4c5d4b6735a676c70d3318d18b50690d9c964240ffcb59d5916533d09"
    different = CharTokenizer("ab"), CharTokenizer("ac"), ByteTokenizer(), GPT2Tokenizer(), BPE, train_bpe(SOURCES, 999)
    assert len({tok.hash for tok in different}) == len(different)
    other = ByteTokenizer()
    other.spec = {"kind": "other"}
    other.token_bytes = [b"b", b"a", *other.token_bytes[2:]]
    assert not ByteTokenizer().same_tokens(other)


@pytest.mark.parametrize("tok", [CharTokenizer("hello\n€\ud800"), ByteTokenizer(), GPT2Tokenizer(), BPE])
def test_spec_and_file(tmp_path, tok):
    tok.save(tmp_path)
    assert os.listdir(tmp_path) == ["tokenizer.json"] * (tok is BPE)
    for where in tmp_path, tmp_path / "step_00000001":
        again = from_spec(json.loads(json.dumps(tok.spec)), where)
        assert (type(again), again.vocab_size, again.eot, again.hash) == (type(tok), tok.vocab_size, tok.eot, tok.hash)
    if tok is BPE:
        assert again.encode(MIXED).tolist() == tok.encode(MIXED).tolist()


def test_build():
    for kind in ("byte", "gpt2"):
        assert build(kind, lambda: pytest.fail("read the texts")).spec == {"kind": kind}
    assert build("char", lambda: iter(["cb", "a", "cb"])).spec == {"kind": "char", "chars": "abc"}
    assert build("bpe:258", lambda: iter(["cb", "a", "cb"])).token_bytes[257] == b"cb"
    for text in ("a\ud83d", "\ude00a", "\ude00\ud83d"):  # whose sorted vocabulary would be read back as one character
        assert "the text has lone surrogates, which are no characters" in error(build, "char", partial(list, [text]))
    for kind in ("gpt-2", "byte:5", "bpe:", "bpe:-5", "bpe:٣٠٠", "hf:", ""):
        message = error(build, kind, lambda: pytest.fail("read the texts"))
        assert message.startswith(f"unknown tokenizer {kind!r}; choose char, byte, gpt2, bpe:N")
