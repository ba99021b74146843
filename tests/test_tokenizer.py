"""Tokenizers against independent definitions: nanoGPT's char table, Python's UTF-8, tiktoken's ordinary encoding."""

import codecs
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer import TOKENIZERS, ByteTokenizer, CharTokenizer, GPT2Tokenizer, from_spec

ANY_CHARACTER = st.characters() | st.characters(categories=["Cs"])  # lone surrogates too


class Bytewise:
    """A stand-in for tiktoken's encoding, so that what is ours is tested without GPT-2's table."""

    def encode_to_numpy(self, text, disallowed_special):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)  # UnicodeEncodeError on lone surrogates

    def encode_ordinary(self, text):
        return list(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode())


@given(st.text(min_size=1))
def test_char_ids_are_nanogpts(text):
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    tok = CharTokenizer(text)
    assert tok.encode(text).tolist() == [table[c] for c in text]
    assert tok.decode(tok.encode(text)) == text
    assert tok.vocab_size == len(table) and tok.eot is None


def test_char_names_what_it_lacks():
    with pytest.raises(
        ValueError, match=r"vocabulary of 3 lacks 2 of the text's characters: 'x', '\\u20ac'; leave"
    ) as e:
        CharTokenizer("abc").encode("abx€x")
    assert "\n" not in str(e.value)


@given(st.text())
def test_byte_is_utf8(text):
    tok = ByteTokenizer()
    assert bytes(tok.encode(text).tolist()) == text.encode()
    assert tok.decode(tok.encode(text)) == text


@given(st.binary())
def test_byte_keeps_bytes_that_are_no_utf8(content):
    tok = ByteTokenizer()
    assert tok.decode_bytes(tok.encode(content.decode("utf-8", "surrogateescape"))) == content


@given(st.text(ANY_CHARACTER))
def test_lone_surrogates_never_crash_and_print(text):
    tok = ByteTokenizer()
    tok.decode(tok.encode(text)).encode()  # printable, whatever went in
    char = CharTokenizer(text + "a")
    assert len(char.encode(text)) == len(text)
    char.decode(char.encode(text)).encode()


@given(st.text(), st.randoms(use_true_random=False))
def test_a_character_spread_over_tokens_streams_whole(text, random):
    tok, decoder = ByteTokenizer(), codecs.getincrementaldecoder("utf-8")("replace")
    assert "".join(decoder.decode(tok.decode_bytes([i])) for i in tok.encode(text)) == text


@pytest.mark.parametrize("ids", [[257], [-1], np.array([3, 300])])
def test_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match="outside the byte vocabulary of 257"):
        ByteTokenizer().decode_bytes(ids)


@given(st.text(min_size=1))
def test_byte_lengths_count_the_text(text):
    for tok in (ByteTokenizer(), CharTokenizer(text)):
        assert tok.byte_lengths.shape == (tok.vocab_size,)
        assert tok.byte_lengths[tok.encode(text)].sum() == len(text.encode())
    assert ByteTokenizer().byte_lengths[256] == 0


@pytest.mark.parametrize(
    "tok", [CharTokenizer("hello\n€\ud800"), ByteTokenizer(), GPT2Tokenizer()], ids=lambda t: t.spec["kind"]
)
def test_spec_goes_through_json(tok):
    again = from_spec(json.loads(json.dumps(tok.spec)))
    assert (type(again), again.vocab_size, again.eot, again.hash) == (type(tok), tok.vocab_size, tok.eot, tok.hash)


def test_hash_is_stable_and_tells_apart():
    # sha256 of '{"kind": "byte"}', computed with sha256sum: a changed hash would orphan every prepared data set
    assert ByteTokenizer().hash == "68513ce4c5d4b6735a676c70d3318d18b50690d9c964240ffcb59d5916533d09"
    assert len({CharTokenizer("ab").hash, CharTokenizer("ac").hash, ByteTokenizer().hash, GPT2Tokenizer().hash}) == 4


@pytest.mark.parametrize("spec", [{"kind": "word"}, {}, {"kind": ["byte"]}, "byte2", None])
def test_unknown_kind_lists_the_known(spec):
    with pytest.raises(ValueError, match="unknown tokenizer .*; choose one of char, byte, gpt2$"):
        from_spec(spec)


@pytest.mark.parametrize("spec", [{"kind": "char"}, {"kind": "char", "chars": 5}, {"kind": "byte", "chars": "a"}])
def test_spec_that_does_not_fit_its_kind(spec):
    with pytest.raises(ValueError, match="cannot be made from .*; prepare the data again$"):
        from_spec(spec)


def test_gpt2_offline_is_one_line(monkeypatch):
    import tiktoken

    def fail(name):
        raise ConnectionError("Max retries\nexceeded")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(ValueError, match="TIKTOKEN_CACHE_DIR") as e:
        GPT2Tokenizer().encode("a")
    assert "\n" not in str(e.value)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match="pip install tiktoken"):
        GPT2Tokenizer().encode("a")


@given(st.text(ANY_CHARACTER))
def test_gpt2_repairs_lone_surrogates(text):
    tok = GPT2Tokenizer()
    tok.__dict__["_encoding"] = Bytewise()
    ids = tok.encode(text)
    assert ids.dtype == np.int64
    assert bytes(ids.tolist()).decode() == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_gpt2_is_tiktokens_ordinary_encoding():
    tok = GPT2Tokenizer()
    try:
        tok.encode("")
    except ValueError:
        pytest.skip("GPT-2's table is not on this machine; set TIKTOKEN_CACHE_DIR")
    text = "Hello world<|endoftext|> naïve \U0001f600\n\n    def main("
    assert tok.encode("Hello world").tolist() == [15496, 995]
    assert tok.encode(text).tolist() == tok._encoding.encode_ordinary(text)
    assert tok.decode(tok.encode(text)) == text and tok.eot not in tok.encode(text)
    assert tok.byte_lengths[tok.encode(text)].sum() == len(text.encode()) and tok.byte_lengths[tok.eot] == 0


def test_the_table_has_every_kind():
    assert {cls.__name__ for cls in TOKENIZERS.values()} == {"CharTokenizer", "ByteTokenizer", "GPT2Tokenizer"}
