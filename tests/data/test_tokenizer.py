"""Tokenizers compared with independent definitions: nanoGPT's char table, Python's UTF-8, tiktoken's ordinary encoding,
Hugging Face's own byte-level BPE."""

import base64
import codecs
import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiktoken
from helpers import ROOT
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from tokenizers.pre_tokenizers import ByteLevel

from data.hf_tokenizer import LETTERS
from data.tokenizer import (
    TOKENIZERS,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    build,
    from_spec,
    train_bpe,
)

ANY_CHARACTER = st.characters() | st.characters(categories=["Cs"])  # lone surrogates too


class Bytewise:
    """Replaces tiktoken's encoding, so that our own code is tested without GPT-2's table."""

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
        ValueError, match=r"vocabulary of 3 lacks 2 of the text's characters: 'x', '\\u20ac'; remove"
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
    tok.decode(tok.encode(text)).encode()  # always printable
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
    # sha256sum of '{"kind": "byte"}'. With another hash no prepared data set would match its tokenizer.
    assert ByteTokenizer().hash == "68513ce4c5d4b6735a676c70d3318d18b50690d9c964240ffcb59d5916533d09"
    assert len({CharTokenizer("ab").hash, CharTokenizer("ac").hash, ByteTokenizer().hash, GPT2Tokenizer().hash}) == 4


@pytest.mark.parametrize("spec", [{"kind": "word"}, {}, {"kind": ["byte"]}, "byte2", None])
def test_unknown_kind_lists_the_known(spec):
    with pytest.raises(ValueError, match="unknown tokenizer .*; choose one of char, byte, gpt2, bpe, hf$"):
        from_spec(spec)


@pytest.mark.parametrize(
    "spec", [{"kind": "char"}, {"kind": "char", "chars": 5}, {"kind": "byte", "chars": "a"}, {"kind": "bpe"}]
)
def test_spec_that_does_not_fit_its_kind(spec):
    with pytest.raises(ValueError, match="cannot be made from .*; prepare the data again$"):
        from_spec(spec)


def test_gpt2_offline_is_one_line(monkeypatch):
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
    text = "Hello world<|endoftext|> naïve \U0001f600\n\n    def main(self): it's 12\t \n "
    assert tok.encode("Hello world").tolist() == [15496, 995]
    assert tok.encode(text).tolist() == tiktoken.get_encoding("gpt2").encode_ordinary(text)
    assert tok.decode(tok.encode(text)) == text and tok.eot not in tok.encode(text)
    assert tok.byte_lengths[tok.encode(text)].sum() == len(text.encode()) and tok.byte_lengths[tok.eot] == 0


def test_the_table_has_every_kind():
    assert {name: cls.__name__ for name, cls in TOKENIZERS.items()} == {
        "char": "CharTokenizer", "byte": "ByteTokenizer", "gpt2": "GPT2Tokenizer", "bpe": "BPETokenizer",
        "hf": "HFTokenizer",
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- bpe

SOURCES = [path.read_text() for path in sorted(ROOT.glob("*.py")) + [ROOT / "README.md"]]
SOURCES += ["it's don't I'm they'd we'll I've you're\r\n" * 99]
MIXED = (
    "naïve «été» 中文字 \U0001f600\u200d\U0001f525\r\n\t\t x  y\n\n\n  def f(a1, b22=3.1415):  # <|endoftext|>"
    "'s I'LL it's they'll \x00\xa0\u3000 "
)
BPE = train_bpe(SOURCES, 1000)


def reference(texts: list[str], vocab_size: int) -> ByteLevelBPETokenizer:
    """Split, alphabet, training and encoding by Hugging Face."""
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, vocab_size - 1, min_frequency=2, show_progress=False)
    return tokenizer


HF = reference(SOURCES, 1000)
HF_BYTES = {i: bytes(LETTERS[c] for c in token) for token, i in HF.get_vocab().items()}


@given(st.binary())
def test_bpe_keeps_any_bytes(content):
    ids = BPE.encode(content.decode("utf-8", "surrogateescape"))
    assert ids.dtype == np.int64 and BPE.decode_bytes(ids) == content
    assert BPE.byte_lengths[ids].sum() == len(content) and BPE.eot not in ids


@given(st.text(ANY_CHARACTER | st.sampled_from("\udc80\udcff \nself")))
@example("\udcff\ud800\udc80")  # two of them escape a byte
def test_bpe_keeps_any_text(text):
    ids = BPE.encode(text)
    assert BPE.decode_bytes(ids) == b"".join(bytes(ByteTokenizer().encode(c).tolist()) for c in text)
    if not any("\ud800" <= c <= "\udfff" for c in text):
        assert BPE.decode(ids) == text


def test_letters_of_bytes_are_those_of_hugging_face():
    assert set(LETTERS) == set(ByteLevel.alphabet()) and sorted(LETTERS.values()) == list(range(256))
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    for text in map(chr, [*range(0x800), *range(0x1000, 0xD000, 0x1000), *range(0x10000, 0x110000, 0x10000)]):
        [(shown, _)] = level.pre_tokenize_str(text)
        assert bytes(LETTERS[c] for c in shown) == text.encode()


def test_bpe_vocabulary_is_hugging_faces():
    assert BPE.token_bytes[:256] == [bytes([i]) for i in range(256)]
    assert BPE.token_bytes[256:-1] == [HF_BYTES[i] for i in range(256, 999)]
    assert (BPE.vocab_size, BPE.eot, BPE.byte_lengths[999]) == (1000, 999, 0)


def same_ids(text: str):
    assert [BPE.token_bytes[i] for i in BPE.encode(text)] == [HF_BYTES[i] for i in HF.encode(text).ids]


def test_bpe_encodes_real_text_as_hugging_face():
    for text in [*SOURCES, MIXED, (ROOT / "tests" / "model" / "test_model.py").read_text()]:
        same_ids(text)
        assert BPE.decode(BPE.encode(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs", "Cn"]) | st.sampled_from(list(" \n\t'sdtl0self")), max_size=40))
def test_bpe_encodes_any_text_as_hugging_face(text):
    same_ids(text)


def test_the_same_text_always_gives_the_same_ids():
    assert train_bpe(iter(SOURCES), 1000).content == BPE.content
    code = "import json, sys; from data.tokenizer import train_bpe; print(train_bpe(json.load(sys.stdin), 1000).hash)"
    env = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(SOURCES), cwd=ROOT, capture_output=True, text=True, env=env
    )
    assert done.stdout.strip() == BPE.hash


def test_bpe_file_is_tiktokens(tmp_path, monkeypatch):
    from tiktoken.load import load_tiktoken_bpe

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # no copy elsewhere
    BPE.save(tmp_path / "new" / "folder")
    ranks = load_tiktoken_bpe(str(tmp_path / "new" / "folder" / "tokenizer.tiktoken"))
    assert ranks == {token: i for i, token in enumerate(BPE.token_bytes[:-1])}
    assert os.listdir(tmp_path / "new" / "folder") == ["tokenizer.tiktoken"]


@pytest.mark.parametrize("below", ["", "step_00000001"])
def test_bpe_spec_and_file(tmp_path, below):
    BPE.save(tmp_path)
    (tmp_path / "step_00000001").mkdir()
    again = from_spec(json.loads(json.dumps(BPE.spec)), tmp_path / below)
    assert (again.spec, again.hash, again.vocab_size, again.eot) == (BPE.spec, BPE.hash, 1000, 999)
    assert (again.encode(MIXED) == BPE.encode(MIXED)).all()
    other = train_bpe(SOURCES, 999)
    assert len({BPE.hash, other.hash, ByteTokenizer().hash}) == 3


LINES = BPE.content.splitlines(keepends=True)


def line(token: bytes, i: int) -> bytes:
    return base64.b64encode(token) + b" %d\n" % i


@pytest.mark.parametrize(
    "content,words",
    [
        (None, "lacks the tokenizer's tokenizer.tiktoken; copy it"),
        (b"", "ids 0 to -1 in order"),
        (b"".join(LINES[:-1]), "vocab_size is not 999"),
        (b"".join(LINES[:255]), "vocab_size is not 256"),
        (b"".join([*LINES[:-1], b"!bad 998\n"]), "is damaged .*base64"),
        (b"".join([*LINES[:-1], b"YWJj 998"]), "in order"),
        (b"".join([*LINES[:-1], b"YWJj\n"]), "in order"),
        (b"".join([*LINES[:-1], b"YWJj x\n"]), "in order"),
        (b"".join([*LINES[:-1], b"YWJj 998 1\n"]), "in order"),
        (b"".join([*LINES[:-1], b"YWJj 999\n"]), "in order"),
        (b"".join([*LINES[:-1], b"YWJj -1\n"]), "in order"),
        (b"".join([*LINES[:-2], LINES[-1], LINES[-2]]), "in order"),
        (b"".join([*LINES[:-1], line(b"a", 998)]), "a token twice"),
        (b"".join([*LINES[:-1], line(BPE.token_bytes[500], 998)]), "a token twice"),
        (b"".join([*LINES[:-1], line(b"", 998)]), "an empty one"),
        (b"".join([line(b"\x01", 0), line(b"\x00", 1), *LINES[2:]]), "does not begin with the 256 bytes"),
        (b"\x80\x04K*.", "is damaged"),  # a pickle
        (b"\xff\xfe\x00\n" * 999, "is damaged"),
    ],
)
def test_a_damaged_bpe_file(tmp_path, content, words):
    if content is not None:
        (tmp_path / "tokenizer.tiktoken").write_bytes(content)
    with pytest.raises(ValueError, match=words) as e:
        from_spec(BPE.spec | {"sha256": hashlib.sha256(content or b"").hexdigest()}, tmp_path)
    assert "\n" not in str(e.value) and len(str(e.value)) < 300 + len(str(tmp_path))
    if content is not None:
        with pytest.raises(ValueError, match="tokenizer.tiktoken was changed: its SHA-256 is not the recorded one"):
            from_spec(BPE.spec, tmp_path)


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"vocab_size": 999}, "vocab_size is not 1000"),
        ({"vocab_size": "1000"}, "vocab_size is not 1000"),
        ({"sha256": None}, "was changed"),
        ({"pattern": "x"}, "cannot be made from"),
        *[
            ({"file": name}, "only tokenizer.tiktoken is read")
            for name in ["../tokenizer.tiktoken", "/etc/passwd", "a\\b", "..", "", "meta.json", "a\0b", 5, None, ["x"]]
        ],
    ],
    ids=str,
)
def test_a_bpe_spec_that_does_not_fit(tmp_path, fields, words):
    BPE.save(tmp_path)
    with pytest.raises(ValueError, match=words) as e:
        from_spec(BPE.spec | fields, tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("n", [-1, 0, 256, 1_000_001, 10**30])
def test_bpe_sizes_that_cannot_be(n):
    with pytest.raises(ValueError, match=f"bpe:{n} is not possible; pass 257"):
        train_bpe(["abc"], n)


def test_bpe_larger_than_the_text_supports():
    """abc is ab + c, each twice; xy occurs once. The 256 bytes, two merges, end-of-text."""
    with pytest.raises(ValueError, match="bpe:260 is larger than the text supports: .* beyond 259 ids; use bpe:259 or"):
        train_bpe(["abc", "abc", "xy"], 260)
    tok = train_bpe(["abc", "abc", "xy"], 259)
    assert tok.token_bytes[256:258] == [b"ab", b"abc"]
    assert tok.encode("xyabcabab").tolist() == [120, 121, 257, 256, 256]
    assert train_bpe([], 257).encode("é").tolist() == [0xC3, 0xA9]


def test_end_of_text_in_the_text_is_text():
    ids = BPE.encode("a<|endoftext|>b")
    assert BPE.eot not in ids and BPE.decode(ids) == "a<|endoftext|>b"
    assert BPE.decode([*ids[:1], BPE.eot]) == "a<|endoftext|>"


@pytest.mark.parametrize("text", [" " * 2_000_000 + "x", "\n" * 2_000_000, "a" * 2_000_000, "\udcff" * 2_000_000])
def test_one_endless_word(text):
    """Neither overflows the regular expression's stack nor takes quadratic time in training."""
    tok = train_bpe([text, *SOURCES[:2]], 400)
    assert tok.decode_bytes(tok.encode(text)) == text.encode("utf-8", "surrogateescape")


def test_training_skips_lone_surrogates():
    assert train_bpe(["ab\udcffab\ud800"], 258).token_bytes[256] == b"ab"


def test_build():
    passes = []

    def texts():
        passes.append(1)
        return iter(["cb", "a", "cb"])

    assert build("byte", texts).spec == {"kind": "byte"} and build("gpt2", texts).spec == {"kind": "gpt2"}
    assert not passes
    assert build("char", texts).spec == {"kind": "char", "chars": "abc"} and len(passes) == 1
    assert build("bpe:258", texts).token_bytes[256] == b"cb" and len(passes) == 2
    build("byte", texts).save("/dev/null/nowhere")  # has nothing to write


@pytest.mark.parametrize(
    "kind,words",
    [
        ("gpt-2", "did you mean gpt2?"),
        ("GPT2", "did you mean gpt2?"),
        ("bytes", "did you mean byte?"),
        ("byte:5", "did you mean byte?"),
        ("chars", "did you mean char?"),
        ("bpe", "give it a number of ids, such as bpe:4096"),
        ("bpe:", "give it a number"),
        ("bpe:4k", "give it a number"),
        ("bpe:-5", "give it a number"),
        ("bpe:٣٠٠", "give it a number"),
        ("bpe4096", "give it a number"),
        ("", "choose char, byte, gpt2, bpe:N or hf:DIR"),
        ("word", "choose char, byte, gpt2, bpe:N or hf:DIR"),
    ],
)
def test_build_helps(kind, words):
    with pytest.raises(ValueError) as e:
        build(kind, lambda: pytest.fail("read the texts"))
    assert str(e.value) == f"unknown tokenizer {kind!r}; {words}" or "bpe" in kind and words in str(e.value)


def test_training_without_tokenizers_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        build("bpe:300", lambda: ["a"])


def test_a_run_keeps_its_tokenizer(run, tmp_path, capfd):
    """train.py copies the file into out_dir, so that sample.py needs no data. Without the file there is an error."""
    import sample
    from data.writer import ShardWriter

    data, tok = tmp_path / "data", train_bpe(SOURCES, 400)
    with ShardWriter(data, tok) as out:
        for split in ("train", "val"):
            out.add(split, np.append(tok.encode(SOURCES[0]), tok.eot))
    tok.save(data)
    flags = ["--eval_interval=2", "--warmup_iters=1", f"--dataset={data}"]
    out = run(*flags, "--max_iters=2")
    assert (out / "tokenizer.tiktoken").read_bytes() == tok.content
    (out / "tokenizer.tiktoken").unlink()
    run(*flags, "--max_iters=4", "--init_from=resume")
    shutil.rmtree(data)
    capfd.readouterr()
    for where in (out, out / "step_00000004"):
        sample.main([f"--out_dir={where}", "--start=def main(é", "--max_new_tokens=5", "--device=cpu"])
        assert capfd.readouterr().out.startswith("def main(é")
    (out / "tokenizer.tiktoken").unlink()
    with pytest.raises(SystemExit):
        sample.main([f"--out_dir={out}", "--device=cpu"])
    err = capfd.readouterr().err
    assert err.startswith("error: ") and "lacks the tokenizer's tokenizer.tiktoken" in err and err.count("\n") == 1
